"""The loss of a character-level GPT over 200 steps, by ortc and by PyTorch: same initial weights, same batches.

    python bench/gpt_curve.py

PyTorch's curve is stored (bench/data/make_gpt_curve.py made it), in float32 and in float64: how far these two lie apart is
what rounding alone does to a run. Exit code 1 if ortc's curve lies further than ROUNDINGS times that from the float32 one: its
sums run in another order.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import ortc
from ortc.recipe import parse_recipe

DATA = Path(__file__).parent / "data"
ROUNDINGS = 10


def curve(stored: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """Train by ortc; the loss of each batch before its update."""
    first, second = stored["betas"]
    options = {"beta1": float(first), "beta2": float(second), "epsilon": float(stored["epsilon"])}
    recipe = parse_recipe(
        {
            "loss": [{"name": "cross_entropy", "options": {"axis": -1}}],
            "optimizer": {"name": "adamw", "options": {**options, "weight_decay": float(stored["weight_decay"])}},
            "learning_rate": {"base": float(stored["lr"])},
        }
    )
    plan = ortc.compile(DATA / "gpt.onnx", folder, recipe)
    # ortc's default is what PyTorch's groups say: matrices decay, biases and norms do not.
    assert {p.name for p in plan.trainable() if len(p.shape) > 1} == set(stored["decayed"].tolist())
    with ortc.Trainer(folder) as trainer:
        tokens = stored["batches"].astype(np.int64)
        return np.array([trainer.step({"input_ids": b[:, :-1], "labels": b[:, 1:]}).loss for b in tokens])


def difference(losses: np.ndarray, others: np.ndarray) -> float:
    """The largest relative one."""
    return float((np.abs(losses - others) / others).max())


def main() -> int:
    with np.load(DATA / "gpt_curve.npz") as archive:
        stored = {name: archive[name] for name in archive.files}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ours = curve(stored, Path(folder) / "stages")
    theirs = stored["loss"].astype(np.float64)
    print(f"{'step':>5} {'PyTorch':>10} {'ortc':>10}")
    for step in [*range(0, len(ours), 20), len(ours) - 1]:
        print(f"{step + 1:5d} {theirs[step]:10.6f} {ours[step]:10.6f}")
    worst, rounding = difference(ours, theirs), difference(stored["loss_float64"], theirs)
    print(f"largest relative difference {worst:.1e}, {len(ours)} steps in {time.perf_counter() - begin:.1f} s")
    print(f"PyTorch's float64 run differs by {rounding:.1e}; allowed is {ROUNDINGS} times that")
    return int(not worst <= ROUNDINGS * rounding)


if __name__ == "__main__":
    sys.exit(main())
