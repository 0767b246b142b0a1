"""``ortc grad``: loss and gradients of one batch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ortc.artifacts import compile
from ortc.errors import DataError, OrtcError
from ortc.recipe import Recipe
from ortc.runtime.trainer import Trainer


def write_gradients(
    model: Path, data: Path, output: Path, recipe: Recipe, *, rules: Sequence[Path] = (), force: bool = False
) -> str:
    """Compile the model, run one batch, and write ``loss`` and one array per trained parameter (and per ``wrt`` input).

    Args:
        model: the forward model.
        data: an ``.npz`` with one array per graph input by its name, and the targets under ``labels``.
        output: the ``.npz`` to write; it appears whole or not at all.
        recipe: loss, parameters, batch norm.
        rules: the user's own rule files.
        force: replace an existing output.

    Returns:
        A line for the terminal.
    """
    if output.exists() and not force:
        raise OrtcError(f"{output} exists already; choose another name, or --force to replace it")
    batch = load_batch(data)
    with tempfile.TemporaryDirectory(prefix="ortc-grad-") as folder:
        stages = Path(folder) / "stages"
        plan = compile(model, stages, recipe, rules=rules)
        with Trainer(stages) as trainer:
            loss, gradients = trainer.gradients(batch)
    if "loss" in gradients:
        raise OrtcError("a parameter of the model is called 'loss', like the loss in the output; freeze it or rename it")
    _save(output, {"loss": np.asarray(loss), **gradients})
    terms = ", ".join(f"{term.name} of {term.output!r}" for term in plan.losses)
    return f"{output}: loss {loss:.7g} ({terms}), {len(gradients)} gradients"


def load_batch(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz``; pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: _array(archive, name, path) for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a usable .npz of plain arrays: {error}") from None


def _array(archive: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    try:
        return archive[name]
    except ValueError as error:
        raise DataError(f"{path}: {name!r} is not an array of plain numbers: {error}") from None


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(aside, path)
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}") from None
    finally:
        aside.unlink(missing_ok=True)
