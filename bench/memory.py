"""What sessions have in memory at their peak, measured, beside what the compiler predicts.

    python bench/make_models.py MODELS gpt2_12l resnet18 unet   # in an interpreter with PyTorch, transformers, onnx
    python bench/memory.py MODELS [NAME ...] [--stages 2] [--schedule 1f1b]
    python bench/memory.py MODELS [NAME ...] --compare fuse     # or recompute, or stash

Each measurement is a process of its own, where sessions have no arena, and an allocation of 64 KiB or more is a mapping of its
own, which glibc gives back at once (MALLOC_MMAP_THRESHOLD_): what resident memory grows by while a session runs is what that
session has alive. Needs Linux and glibc. Prints for each phase, in MiB, the peak predicted and measured, in the order in which
the nodes are built and in the compiler's (pass `order`); and as `step` what the process takes for a whole step as it is run,
with arenas and all arrays. Exits with 1 if a peak of 16 MiB or more is off by more than 10 % in the compiler's order (in the
other, ONNX Runtime runs Shape nodes earlier than they stand).

With `--compare` the settings of a switch stand beside each other: gradients first, then the optimizer (AdamW), or both in one
graph (`--fuse-update`); the policies of `--recompute`; those of `--stash` and `--stash-dtype`. It prints what the largest
session has alive, predicted and measured, the bytes of the gradients that live at once, the memory of a whole step, and the
median time of one, in which all cores compute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ALLOWED, SMALL = 0.1, 2**24  # what is measured is right to some MiB
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
# Sizes of the named dimensions of a micro-batch, classes of the targets.
CASES = {
    "gpt2_12l": ({"batch": 2, "length": 128}, 50257),
    "resnet18": ({"batch": 4}, 1000),
    "unet": ({"batch": 4}, 8),
}
# By switch: what its settings are called here, and in the recipe.
SWITCHES: dict[str, dict[str, dict]] = {
    "fuse": {"apart": {}, "fused": {"optimizer": {"fuse": True}}},
    "recompute": {policy: {"recompute": {"nodes": policy}} for policy in ("none", "auto", "full", "layers")},
    "stash": {
        "keep": {},
        "packed": {"stash": {"packed": True}},
        "bf16": {"stash": {"packed": True, "dtype": "bf16"}},
        "int8": {"stash": {"packed": True, "dtype": "int8"}},
    },
}

WORKER = """
import json, statistics, sys, threading, time
import numpy as np
import onnxruntime
import ortc
from ortc.runtime import stage

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

folder, batch, exact = sys.argv[1:]
with np.load(batch) as archive:
    arrays = dict(archive)
peaks, run, alone = {}, stage.Phase.run, threading.Lock()

def watched(phase, *feeds):
    with alone:  # the ranks are threads
        before = resident("VmRSS")
        reset()
        made = run(phase, *feeds)
        peaks[phase.graph.file] = max(peaks.get(phase.graph.file, 0), resident("VmHWM") - before)
    return made

if exact == "exact":
    class Bare(onnxruntime.SessionOptions):
        def __init__(self):
            super().__init__()
            self.enable_cpu_mem_arena = False
    onnxruntime.SessionOptions = Bare
start = resident("VmRSS")
trainer = ortc.Trainer(folder, threads=1 if exact == "exact" else None, restore="none")
trainer.step(arrays)  # opens the sessions, and touches all arrays
trainer.step(arrays)
whole = resident("VmHWM") - start
if exact == "exact":
    stage.Phase.run = watched
    trainer.step(arrays)
times = []
for _ in range(0 if exact == "exact" else 7):
    began = time.perf_counter()
    trainer.step(arrays)
    times.append(time.perf_counter() - began)
print(json.dumps({"peaks": peaks, "whole": whole, "seconds": statistics.median(times) if times else None}))
"""


def batch_of(plan: object, sizes: dict[str, int], classes: int, micro_batches: int = 1) -> dict[str, np.ndarray]:
    """Random data and targets of a step."""
    random = np.random.default_rng(0)
    arrays = {}
    for stage in plan.stages:
        for port in (p for phase in ("train", "forward") if phase in stage.phases for p in stage.phases[phase].inputs):
            if port.role not in ("data", "label"):
                continue
            shape = [d if isinstance(d, int) else sizes[d] for d in port.shape]
            shape[0] *= micro_batches
            integer = port.role == "label" or port.dtype == "int64"
            made = random.integers(0, classes, shape) if integer else random.standard_normal(shape).astype(np.float32)
            arrays.setdefault(port.of or port.name, made)
    return arrays


def measure(path: Path, stages: int = 1, schedule: str = "1f1b", **recipe: dict) -> dict:
    """Compile and measure; by phase what is predicted and measured, and the whole step."""
    from ortc.artifacts import compile
    from ortc.recipe import parse_recipe

    sizes, classes = CASES[path.stem]
    parts = 1 if stages == 1 else 2 * stages
    divided = {} if stages == 1 else {"stages": stages, "schedule": schedule, "micro_batches": parts}
    loss = [{"name": "cross_entropy", "options": {"axis": -1 if path.stem.startswith("gpt") else 1}}]
    fields = {"loss": loss, "pipeline": {"sizes": sizes, **divided}, **recipe}
    with tempfile.TemporaryDirectory() as folder:
        plan = compile(path, Path(folder) / "stages", parse_recipe(fields))
        np.savez(Path(folder) / "batch.npz", **batch_of(plan, sizes, classes, parts))
        told = {}
        for how in ("exact", "as it is run"):
            command = [sys.executable, "-c", WORKER, f"{folder}/stages", f"{folder}/batch.npz", how]
            environment = {**os.environ, **(EXACT if how == "exact" else {})}
            told[how] = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            )
    phases = [g for stage in plan.stages for name, g in stage.phases.items() if name != "eval"]
    predicted = {g.file: g.memory.peak_bytes for g in phases}
    whole = told["as it is run"]
    gradients = sum(4 * int(np.prod(p.shape)) for p in plan.trainable())
    return {
        "predicted": predicted,
        "measured": told["exact"]["peaks"],
        "step": whole["whole"],
        "seconds": whole["seconds"],
        "gradients": 0 if plan.fused else gradients,
    }


def compare(folder: Path, names: list[str], settings: dict[str, dict]) -> bool:
    """Print the table of `--compare`; whether the predictions are right."""
    right = True
    columns = ("predicted", "measured", "ratio", "gradients", "step", "seconds")
    print(f"{'MiB':>10} {'setting':>8}" + "".join(f"{column:>11}" for column in columns))
    for name in names:
        for setting, recipe in settings.items():
            row = measure(folder / f"{name}.onnx", **recipe)
            predicted, measured = (max(row[key].values()) for key in ("predicted", "measured"))
            right &= abs(predicted / measured - 1) <= ALLOWED or measured < SMALL
            numbers = [
                _mib(predicted),
                _mib(measured),
                f"{predicted / measured:.2f}",
                _mib(row["gradients"]),
                _mib(row["step"]),
            ]
            print(f"{name:>10} {setting:>8}" + "".join(f"{n:>11}" for n in (*numbers, f"{row['seconds']:.3f}")), flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--compare", choices=SWITCHES, help="a switch's settings beside each other")
    args = parser.parse_args()
    if args.compare:
        return int(not compare(args.folder, args.names, SWITCHES[args.compare]))
    right = True
    print(f"{'':>32} {'as built':^28} {'ordered':^28}")
    print(f"{'model':>10} {'phase':>21} " + f"{'predicted':>10} {'measured':>10} {'ratio':>6} " * 2 + f"{'memory':>7}")
    for name in args.names:
        path = args.folder / f"{name}.onnx"
        built, ordered = (measure(path, args.stages, args.schedule, passes={"off": off}) for off in (["order"], []))
        for file in ordered["predicted"]:
            line = f"{name:>10} {file.removesuffix('.onnx').removeprefix('stage-'):>21} "
            for row in (built, ordered):
                ratio = row["predicted"][file] / max(row["measured"][file], 1)
                line += f"{_mib(row['predicted'][file]):>10} {_mib(row['measured'][file]):>10} {ratio:>6.2f} "
            right &= abs(ratio - 1) <= ALLOWED or ordered["measured"][file] < SMALL
            less = ordered["measured"][file] / max(built["measured"][file], 1)
            print(line + f"{less:>7.2f}", flush=True)
        print(
            f"{name:>10} {'step':>21} {'':>10} {_mib(built['step']):>10} {'':>6} {'':>10} {_mib(ordered['step']):>10}",
            flush=True,
        )
    return int(not right)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


if __name__ == "__main__":
    sys.exit(main())
