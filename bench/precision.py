"""Training in half precision beside float32: the digits CNN of the demo, and the small GPT of gpt_curve.py.

    python bench/precision.py

Prints the loss at the end of each run relative to float32's, and the seconds. On the CPU half types are stored, not computed:
ONNX Runtime computes in float32 between casts (of bfloat16 ortc says so itself), so that they are slower here; what they cost
and save where kernels for them exist is not measured. Exit code 1 if a loss is more than one per cent higher.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import ortc
from ortc.demo import BATCH_SIZE, EPOCHS, MODEL, RECIPE, TRAIN_DATA
from ortc.recipe import Precision, load_recipe, parse_recipe
from ortc.runtime.data import open_data

DATA = Path(__file__).parent / "data"
KINDS = ("fp32", "fp16", "bf16")


def digits(kind: str, folder: Path) -> float:
    """The mean loss of the last epoch."""
    recipe = load_recipe(RECIPE).model_copy(update={"precision": Precision(type=kind)})  # type: ignore[arg-type]
    ortc.compile(MODEL, folder, recipe)
    losses: list[float] = []
    with ortc.Trainer(folder) as trainer:
        data = open_data(str(TRAIN_DATA), trainer.inputs)
        trainer.total_steps = EPOCHS * (data.count(BATCH_SIZE, True) or 0)
        for epoch in range(EPOCHS):
            batches = data.batches(epoch, seed=trainer.seed, batch_size=BATCH_SIZE, drop_last=True, start=0)
            losses = [trainer.step(batch).loss for batch in batches]
        return float(np.mean(losses))


def gpt(kind: str, folder: Path) -> float:
    """The mean loss of the last 20 of 200 steps."""
    with np.load(DATA / "gpt_curve.npz") as stored:
        tokens, lr = stored["batches"].astype(np.int64), float(stored["lr"])
    loss = [{"name": "cross_entropy", "options": {"axis": -1}}]
    recipe = parse_recipe({"loss": loss, "learning_rate": {"base": lr}, "precision": {"type": kind}})
    ortc.compile(DATA / "gpt.onnx", folder, recipe)
    with ortc.Trainer(folder) as trainer:
        return float(np.mean([trainer.step({"input_ids": b[:, :-1], "labels": b[:, 1:]}).loss for b in tokens][-20:]))


def main() -> int:
    worst = 0.0
    for name, train in (("digits", digits), ("gpt", gpt)):
        losses: dict[str, float] = {}
        for kind in KINDS:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                losses[kind] = train(kind, Path(folder) / "stages")
            off = losses[kind] / losses["fp32"] - 1
            worst = max(worst, off)
            print(f"{name:7s} {kind}  loss {losses[kind]:.6f}  {off:+.3%}  {time.perf_counter() - began:.1f} s", flush=True)
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
