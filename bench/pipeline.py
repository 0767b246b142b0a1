"""Times two stages in threads on two cores beside one process with two threads, on the same work.

    python bench/pipeline.py FOLDER [NAME ...] [--schedule 1f1b] [--micro-batches 8] [--rounds 7]

FOLDER holds the models of bench/make_models.py. The stages have a session of one thread each; in one piece the sessions have
two threads, once with the same micro-batches and once with the whole batch. All train in turn in one process, one step each, so
that whatever else the machine does meets all of them. Beside the times stands the bubble that the schedule must have on its own
(the ranks idle that share of the time, whatever the runtime does). Exit code 1 if losses disagree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ortc
from ortc.recipe import parse_recipe
from ortc.runtime.schedule import make_schedule
from ortc.runtime.simulate import equal_costs, simulate

WARM_UP = 2
# Relative, of every step's loss: the orders in which gradients are summed differ. Batch norm sees micro-batches, so that the
# whole batch of a ResNet is other work, which is timed and not compared.
ALLOWED = 1e-5
Batch = dict[str, np.ndarray]


def text(random: np.random.Generator) -> Batch:
    ids, labels = random.integers(0, 1000, (2, 8, 128))
    return {"input_ids": ids, "labels": labels}


def images(random: np.random.Generator) -> Batch:
    return {"x": random.standard_normal((16, 3, 224, 224), np.float32), "labels": random.integers(0, 1000, 16)}


# name: (batches, sizes of a micro-batch for the cost model, axis of the classes, whether a batch depends on its division)
CASES: dict[str, tuple[Callable[[np.random.Generator], Batch], dict[str, int], int, bool]] = {
    "gpt2_4l": (text, {"length": 128}, -1, False),
    "bert_mini": (text, {"length": 128}, -1, False),
    "resnet18": (images, {}, 1, True),
}


def measure(name: str, models: Path, schedule: str, micro_batches: int, rounds: int) -> bool:
    """Train all in turn and print a line for each; whether the losses agree."""
    make, sizes, axis, divided = CASES[name]
    samples = len(make(np.random.default_rng(0))["labels"])
    pipeline = {"micro_batches": micro_batches, "sizes": {**sizes, "batch": samples // micro_batches}}
    contestants: dict[str, tuple[dict[str, Any], int]] = {
        "2 stages": ({**pipeline, "stages": 2, "schedule": schedule}, 1),
        f"{micro_batches} parts": (pipeline, 2),
        "whole batch": ({}, 2),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainers = {}
        for i, (who, (table, threads)) in enumerate(contestants.items()):
            loss = [{"name": "cross_entropy", "options": {"axis": axis}}]
            ortc.compile(models / f"{name}.onnx", Path(folder) / str(i), parse_recipe({"loss": loss, "pipeline": table}))
            trainers[who] = stack.enter_context(ortc.Trainer(Path(folder) / str(i), threads=threads))
        times: dict[str, list[float]] = {who: [] for who in trainers}
        losses: dict[str, list[float]] = {who: [] for who in trainers}
        for step in range(WARM_UP + rounds):
            batch = make(np.random.default_rng(step))
            for who, trainer in trainers.items():
                started = time.perf_counter()
                losses[who].append(trainer.step(batch).loss)
                times[who].append(time.perf_counter() - started)
    bubble = simulate(make_schedule(schedule, 2, micro_batches), equal_costs(2)).bubble
    return report(name, schedule, bubble, times, losses, compared=list(times)[:2] if divided else list(times))


def report(
    name: str,
    schedule: str,
    bubble: float,
    times: dict[str, list[float]],
    losses: dict[str, list[float]],
    compared: list[str],
) -> bool:
    """One line per contestant, above 1 the two stages are the slower ones."""
    own, agree = "2 stages", True
    for who, seconds in times.items():
        kept = seconds[WARM_UP:]
        apart = max(abs(a / b - 1) for a, b in zip(losses[who], losses[own], strict=True))
        fits = who not in compared or apart <= ALLOWED
        agree &= fits
        what = f"{schedule}, bubble {bubble:.0%}" if who == own else ""
        print(
            f"{name:>10} {who:>12} {1e3 * median(kept):>9.1f} {1e3 * min(kept):>9.1f} "
            f"{median(times[own][WARM_UP:]) / median(kept):>8.2f} {losses[who][-1]:>9.5f} {apart:>9.1e}"
            f"{'' if fits else '  losses disagree'}  {what}",
            flush=True,
        )
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"{args.rounds} rounds after {WARM_UP}")
    print(f"{'model':>10} {'who':>12} {'median ms':>9} {'least ms':>9} {'stages/it':>8} {'loss':>9} {'apart':>9}")
    agree = [measure(name, args.folder, args.schedule, args.micro_batches, args.rounds) for name in args.names]
    return int(not all(agree))


if __name__ == "__main__":
    sys.exit(main())
