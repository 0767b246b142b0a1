"""Peak memory and step time with activation recompute, beside what the compiler predicts.

    python bench/make_models.py MODELS gpt2_12l resnet18 unet   # in an interpreter with PyTorch, transformers, onnx
    python bench/recompute.py MODELS [NAME ...]

Each policy trains in a process of its own. The peak is that of its resident memory, less what it has once ONNX Runtime is
imported. Prints a line for each: bytes predicted and measured, their ratio, seconds of a step (median), both relative to none,
and whether the loss after all steps is the same to the last bit. Exits with 1 if a prediction is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from memory import batch_of

POLICIES = ("none", "auto", "full", "layers")
ALLOWED, STEPS, WARM_UP = 0.1, 3, 1
# Sizes of the named dimensions; classes of the targets.
CASES = {
    "gpt2_12l": ({"batch": 4, "length": 256}, 50257),
    "resnet18": ({"batch": 16}, 1000),
    "unet": ({"batch": 16}, 8),
}

WORKER = """
import json, sys, time
import numpy as np
import onnxruntime
import ortc

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

stages, batch, steps, threads = sys.argv[1:]
with np.load(batch) as archive:
    arrays = dict(archive)
before = resident("VmRSS")
trainer = ortc.Trainer(stages, threads=int(threads))
times, losses = [], []
for _ in range(int(steps)):
    begin = time.perf_counter()
    losses.append(trainer.step(arrays).loss)
    times.append(time.perf_counter() - begin)
print(json.dumps({"peak": resident("VmHWM") - before, "times": times, "losses": losses}))
"""


def measure(path: Path, policy: str, threads: int, budget: int | None = None) -> dict:
    """Compile and train one policy; returns its figures."""
    from ortc.artifacts import compile
    from ortc.recipe import parse_recipe

    name = path.stem
    axis = -1 if name.startswith("gpt") else 1
    loss = [{"name": "cross_entropy", "options": {"axis": axis}}]
    fields = {"loss": loss, "recompute": {"nodes": policy, "budget": budget}, "pipeline": {"sizes": CASES[name][0]}}
    with tempfile.TemporaryDirectory() as folder:
        stages = Path(folder) / "stages"
        plan = compile(path, stages, parse_recipe(fields))
        np.savez(Path(folder) / "batch.npz", **batch_of(plan, *CASES[name]))
        command = [sys.executable, "-c", WORKER, str(stages), f"{folder}/batch.npz", str(STEPS + WARM_UP), str(threads)]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    again = plan.stages[0].recomputed
    return {**result, "again": again, "seconds": median(result["times"][WARM_UP:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(f"{args.threads} threads; {STEPS} steps after {WARM_UP}")
    print(f"{'model':>10} {'policy':>8} {'nodes':>6} {'predicted':>10} {'measured':>10} {'ratio':>6} {'step s':>7}", end=" ")
    print(f"{'memory':>7} {'time':>6} {'said':>6}  loss")
    right = True
    for name in args.names:
        rows = {p: measure(args.folder / f"{name}.onnx", p, args.threads) for p in POLICIES}
        base = rows["none"]
        for policy, row in rows.items():
            again = row["again"] or rows["auto"]["again"]
            predicted = again.memory_after if row["again"] else again.memory_before
            said = 1 + (again.seconds / again.step_seconds if row["again"] else 0)
            ratio = predicted / row["peak"]
            same = row["losses"] == base["losses"]
            right &= abs(ratio - 1) <= ALLOWED and same
            print(
                f"{name:>10} {policy:>8} {len(again.nodes) if row['again'] else 0:>6} {predicted / 2**20:>6.0f} MiB "
                f"{row['peak'] / 2**20:>6.0f} MiB {ratio:>6.2f} {row['seconds']:>7.2f} {row['peak'] / base['peak']:>7.2f} "
                f"{row['seconds'] / base['seconds']:>6.2f} {said:>6.2f}  {'the same' if same else 'DIFFERS'}",
                flush=True,
            )
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
