"""``ortc demo``: the whole way on real data, in under a minute."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from ortc.artifacts import compile
from ortc.cli import describe_plan
from ortc.demo import BATCH_SIZE, EPOCHS, EVAL_DATA, MODEL, RECIPE, TRAIN_DATA
from ortc.recipe import load_recipe
from ortc.runtime.run import run
from ortc.runtime.trainer import Trainer


def run_demo(folder: Path | None, threads: int | None = None) -> float:
    """Compile, train, evaluate and export the digits model; returns the accuracy on the digits kept aside.

    Args:
        folder: where the output folder and the exported model stay; None: nowhere.
        threads: threads of each session; None: all cores.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="ortc-demo-") as temporary:
            return run_demo(Path(temporary), threads)
    folder.mkdir(parents=True, exist_ok=True)
    stages, exported = folder / "stages", folder / "digits-trained.onnx"
    print(f"$ ortc compile {MODEL.name} -o {stages} --recipe {RECIPE.name}")
    print(describe_plan(compile(MODEL, stages, load_recipe(RECIPE)), stages))
    print(f"$ ortc run {stages} --data {TRAIN_DATA.name} --epochs {EPOCHS} --batch-size {BATCH_SIZE} --drop-last")
    run(stages, data=str(TRAIN_DATA), epochs=EPOCHS, batch_size=BATCH_SIZE, drop_last=True, threads=threads, save_every=500)
    print(f"$ ortc export {stages} -o {exported}")
    with Trainer(stages, threads=threads) as trainer:
        print(trainer.export(exported, data=str(EVAL_DATA)))
    accuracy = _accuracy(exported)
    print(f"accuracy of {exported.name} on the digits kept aside: {accuracy:.2%}")
    return accuracy


def _accuracy(model: Path) -> float:
    """Share of the evaluation digits that the exported model names right."""
    from ortc.runtime.stage import import_onnxruntime

    session = import_onnxruntime().InferenceSession(str(model), providers=["CPUExecutionProvider"])
    with np.load(EVAL_DATA) as digits:
        (logits,) = session.run(["logits"], {"x": digits["x"]})
        return float(np.mean(logits.argmax(axis=1) == digits["labels"]))
