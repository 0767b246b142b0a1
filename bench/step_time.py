"""Times one training step beside ONNX Runtime's own training artifacts and PyTorch eager.

    python bench/step_time.py FOLDER [NAME ...] [--peer-python PYTHON] [--torch-python PYTHON] [--threads 1] [--rounds 7]

FOLDER holds the models of bench/make_models.py. Each contestant is a process of its own interpreter (bench/step_workers.py)
with the same weights, batches, threads, float32 and AdamW; they train in turn, one step each, so that whatever else the machine
does meets all of them. A step is everything: forward, backward, update, the loss in hand; ortc's also has the norm of the
gradients and the check that it is finite. Prints medians after two warm-up rounds; exit code 1 if losses disagree.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

import ortc
from ortc.recipe import parse_recipe

WARM_UP = 2
# Relative, of the first loss and of every later one. PyTorch's own float32 and float64 runs part by 1e-7 on bert_mini and by
# 1.5e-4 on resnet18, where batch norm over 8 images magnifies rounding.
ALLOWED, ALLOWED_LATER = 1e-5, {"resnet18": 1e-3}
ADAMW = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
LR = 1e-4


def images(*shape: int, classes: int) -> Callable[..., tuple]:
    return lambda random, n: (random.standard_normal((n, *shape), np.float32), random.integers(0, classes, (n, shape[0])))


def text(batch: int, length: int) -> Callable[..., tuple]:
    return lambda random, n: tuple(random.integers(0, 1000, (2, n, batch, length)))


# name: (batches, number of classes)
CASES = {
    "mlp": (images(64, 784, classes=10), 10),
    "lenet": (images(64, 1, 28, 28, classes=10), 10),
    "resnet18": (images(8, 3, 224, 224, classes=1000), 1000),
    "bert_mini": (text(4, 128), 30522),
    "gpt2_4l": (text(4, 128), 50257),
}


class Contestant:
    """A worker process; it answers one step at a time."""

    def __init__(self, name: str, python: str, job: Path, log: Path) -> None:
        self.name, self.times, self.losses = name, [], []
        command = [python, str(Path(__file__).with_name("step_workers.py")), name, str(job)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1
        )
        self.version = self.process.stdout.readline().strip()
        if not self.version:
            self.process.wait()
            raise RuntimeError(f"cannot take part: {(log.read_text().strip().splitlines() or ['no reason given'])[-1]}")

    def step(self, index: int) -> None:
        self.process.stdin.write(f"{index}\n")
        loss, seconds = json.loads(self.process.stdout.readline())
        self.losses.append(loss)
        self.times.append(seconds)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def prepare(name: str, models: Path, folder: Path, threads: int, steps: int) -> Path:
    """Compile the model and make the batches; returns the job's file."""
    make, classes = CASES[name]
    recipe = parse_recipe(
        {
            "loss": [{"name": "cross_entropy", "options": {} if name in ("mlp", "lenet", "resnet18") else {"axis": -1}}],
            "optimizer": {"name": "adamw", "options": ADAMW, "decay_all": True},
            "learning_rate": {"base": LR},
        }
    )
    plan = ortc.compile(models / f"{name}.onnx", folder / "stages", recipe)
    x, labels = make(np.random.default_rng(0), steps)
    np.savez(folder / "batches.npz", x=x, labels=labels)
    job = {
        "name": name,
        "model": str(models / f"{name}.onnx"),
        "stages": str(folder / "stages"),
        "batches": str(folder / "batches.npz"),
        "input": next(p.name for p in plan.stages[0].phases["train"].inputs if p.role == "data"),
        "trained": [p.name for p in plan.trainable()],
        "classes": classes,
        "threads": threads,
        "adamw": ADAMW,
        "lr": LR,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def compete(name: str, pythons: dict[str, str], models: Path, threads: int, rounds: int) -> tuple[list[Contestant], list[str]]:
    """All steps of all contestants; those that cannot take part are named with the reason."""
    contestants, absent = [], []
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(name, models, Path(folder), threads, rounds + WARM_UP)
        try:
            for who, python in pythons.items():
                try:
                    contestants.append(Contestant(who, python, job, Path(folder) / f"{who}.log"))
                except (RuntimeError, OSError) as error:
                    absent.append(f"{who}: {error}")
            for index in range(rounds + WARM_UP):
                for contestant in contestants:
                    contestant.step(index)
        finally:
            for contestant in contestants:
                contestant.close()
    return contestants, absent


def report(name: str, contestants: Sequence[Contestant], absent: Sequence[str]) -> bool:
    """One line per contestant; whether all losses agree with the first one's."""
    own = contestants[0]
    base, agree = median(own.times[WARM_UP:]), True
    for c in contestants:
        times = sorted(c.times[WARM_UP:])
        apart = np.abs(np.array(c.losses) - own.losses) / np.abs(own.losses)
        fits = bool(apart[0] <= ALLOWED and apart.max() <= ALLOWED_LATER.get(name, ALLOWED))
        agree &= fits
        print(
            f"{name:>10} {c.name:>10} {1000 * median(times):>9.1f} {1000 * times[0]:>9.1f} {base / median(times):>7.2f} "
            f"{c.losses[0]:>9.5f} {apart[0]:>9.1e} {apart.max():>9.1e}{'' if fits else '  losses disagree'}",
            flush=True,
        )
    for line in absent:
        print(f"{name:>10} {line}", flush=True)
    return agree


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{names[0]}, {len(names)} logical cores" if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--peer-python", help="an interpreter with onnxruntime-training-cpu, PyTorch and onnx")
    parser.add_argument("--torch-python", help="an interpreter with PyTorch, onnx and transformers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pythons = {"ortc": sys.executable, "artifacts": args.peer_python, "torch": args.torch_python}
    for who in (who for who, python in pythons.items() if not python):
        print(f"{who} is missing: no interpreter was given")
    print(f"{processor()}; {args.threads} threads; {args.rounds} rounds after {WARM_UP}")
    print(f"{'model':>10} {'who':>10} {'median ms':>9} {'least ms':>9} {'ortc/it':>7} {'loss':>9} {'apart':>9} {'at most':>9}")
    agree, versions = True, {}
    for name in args.names:
        contestants, absent = compete(name, {w: p for w, p in pythons.items() if p}, args.folder, args.threads, args.rounds)
        agree &= report(name, contestants, absent)
        versions |= {c.name: c.version for c in contestants}
    for who, what in versions.items():
        print(f"{who}: {what}")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
