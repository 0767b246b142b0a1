"""Training in half precision beside float32: the digits CNN of the demo, and the small GPT of gpt_curve.py.

    python bench/precision.py

Prints each type's loss relative to float32's, and the seconds. Of the digits it is the loss on the digits kept aside, after
five epochs at a tenth of the demo's learning rate, which decays to zero: there the weights have come to rest and the loss is
not yet near zero. The mean over five seeds counts, each of them (the order of the data, and dropout) the same for all types;
the spread of float32 over the seeds is printed beside it. Of the GPT it is the mean of the last 20 of 200 training steps.

On the CPU half types are stored, not computed: ONNX Runtime computes in float32 between casts (of bfloat16 ortc says so
itself), so that they are slower here; what they cost and save where kernels for them exist is not measured. Exit code 1 if a
loss is more than one per cent off.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import ortc
from ortc.demo import BATCH_SIZE, EVAL_DATA, MODEL, TRAIN_DATA
from ortc.recipe import parse_recipe
from ortc.runtime.data import open_data

DATA = Path(__file__).parent / "data"
KINDS = ("fp32", "fp16", "bf16")


SEEDS, EPOCHS, LEARNING_RATE = range(5), 5, 3e-4


def digits(kind: str, folder: Path, seed: int, epochs: int = EPOCHS, threads: int | None = None) -> float:
    """The loss on the digits kept aside, after the last epoch."""
    rate = {"base": LEARNING_RATE, "schedule": "cosine"}
    ortc.compile(MODEL, folder, parse_recipe({"learning_rate": rate, "precision": {"type": kind}, "seed": seed}), force=True)
    with ortc.Trainer(folder, threads=threads) as trainer:
        data = open_data(str(TRAIN_DATA), trainer.inputs)
        trainer.total_steps = epochs * (data.count(BATCH_SIZE, True) or 0)
        for epoch in range(epochs):
            for batch in data.batches(epoch, seed=seed, batch_size=BATCH_SIZE, drop_last=True):
                trainer.step(batch)
        with np.load(EVAL_DATA) as aside:
            return trainer.evaluate(dict(aside)).loss


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
    for name, seeds in (("digits", SEEDS), ("gpt", range(1))):
        losses: dict[str, list[float]] = {}
        for kind in KINDS:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                stages = Path(folder) / "stages"
                losses[kind] = [digits(kind, stages, seed) if name == "digits" else gpt(kind, stages) for seed in seeds]
            mean, exact = np.mean(losses[kind]), np.mean(losses["fp32"])
            off = float(mean / exact - 1)
            each = [abs(x / y - 1) for x, y in zip(losses[kind], losses["fp32"], strict=True)]
            worst = max(worst, abs(off))
            print(
                f"{name:7s} {kind}  loss {mean:.6f}  {off:+.3%}  of one seed at most {max(each):.3%}; "
                f"over the seeds {min(losses[kind]):.4f} to {max(losses[kind]):.4f}  {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
