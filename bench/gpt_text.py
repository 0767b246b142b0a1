"""The text of the character-level GPT: Python's own help topics, about 460,000 characters."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np


def text() -> str:
    """All topics in the order of their names. It differs a little from one version of Python to the next."""
    return "".join(topics[name] for name in sorted(topics))


def encode(characters: str) -> tuple[np.ndarray, str]:
    """Token of each character, uint8, and the vocabulary: its characters in order, a token is the place in it."""
    vocabulary = "".join(sorted(set(characters)))
    token = {c: i for i, c in enumerate(vocabulary)}
    return np.array([token[c] for c in characters], np.uint8), vocabulary


def batches(tokens: np.ndarray, *, steps: int, batch: int, block: int, seed: int) -> np.ndarray:
    """Random windows, uint8 [steps, batch, block + 1]: inputs are the first ``block`` tokens, targets the last."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - block, (steps, batch, 1))
    return tokens[starts + np.arange(block + 1)]
