"""Writes tests/data/dataset with Hugging Face's ``datasets`` (made with 5.2.0): two splits of the points of tiny.py.

It needs nothing else: ``python tests/data/make_dataset.py``.
"""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np


def split(samples: int, seed: int) -> datasets.Dataset:
    x = np.random.default_rng(seed).standard_normal((samples, 4)).astype(np.float32)
    labels = np.argmax(x[:, :3] + x[:, 1:4] * 0.3, axis=1)
    columns = {"x": x.tolist(), "labels": labels.tolist(), "note": [f"point {i}" for i in range(samples)]}
    kinds = {"x": datasets.Sequence(datasets.Value("float32"), length=4), "labels": datasets.Value("int64")}
    return datasets.Dataset.from_dict(columns, datasets.Features({**kinds, "note": datasets.Value("string")}))


if __name__ == "__main__":
    saved = datasets.DatasetDict({"train": split(50, 1), "test": split(21, 2)})
    saved.save_to_disk(str(Path(__file__).parent / "dataset"), num_shards={"train": 2, "test": 1})
