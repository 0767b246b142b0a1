"""Times one training step beside ONNX Runtime's own training artifacts, onnxsim's loop, PyTorch eager and torch.compile.

    python bench/step_time.py FOLDER [NAME ...] [--peers PEERS] [--threads 1] [--rounds 7]

FOLDER holds the models of bench/make_models.py, PEERS the environments of bench/make_peers.sh. Each contestant is a process
of its own interpreter (bench/step_workers.py) with the same weights, batches, threads, float32 and AdamW; they train in turn,
one step each, so that whatever else the machine does meets all of them. A step is everything: forward, backward, update, the
loss in hand; ortc's also has the norm of the gradients and the check that it is finite. Prints medians after two warm-up
rounds, the seconds from the start of the process to the end of its first step (compilation in it, not what other contestants
do meanwhile), and the most memory that the process has had, all of it beside the best of the others; who is absent, and why;
exit code 1 if losses disagree.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
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
    return lambda random, n: (
        {"x": random.standard_normal((n, *shape), np.float32)},
        random.integers(0, classes, (n, shape[0])),
    )


def text(batch: int, length: int, classes: int | None = None) -> Callable[..., tuple]:
    """Texts, and for each word the next one, or for each text its class."""

    def make(random: np.random.Generator, n: int) -> tuple:
        words = random.integers(0, 1000, (n, batch, length))
        return {"input_ids": words}, random.integers(0, classes or 1000, (n, batch, length) if classes is None else (n, batch))

    return make


def clicks(batch: int) -> Callable[..., tuple]:
    return lambda random, n: (
        {
            "x": random.standard_normal((n, batch, 13), np.float32),
            "categories": random.integers(0, 100_000, (n, batch, 8)),
        },
        random.integers(0, 2, (n, batch)),
    )


# name: (batches, number of classes, axis of the classes)
CASES = {
    "mlp": (images(64, 784, classes=10), 10, 1),
    "lenet": (images(64, 1, 28, 28, classes=10), 10, 1),
    "resnet18": (images(8, 3, 224, 224, classes=1000), 1000, 1),
    "lstm": (text(32, 64, classes=10), 10, 1),
    "dlrm": (clicks(256), 2, 1),
    "bert_mini": (text(4, 128), 30522, -1),
    "gpt2_4l": (text(4, 128), 50257, -1),
}


class Contestant:
    """A worker process; it answers one step at a time."""

    def __init__(self, name: str, python: str, job: Path, log: Path) -> None:
        self.name, self.times, self.losses, self.peak = name, [], [], 0
        begin = time.perf_counter()
        command = [python, str(Path(__file__).with_name("step_workers.py")), name, str(job)]
        self.log = log
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1
        )
        self.version = self._answer().strip()
        self.ready = time.perf_counter() - begin

    def step(self, index: int) -> None:
        self.process.stdin.write(f"{index}\n")
        loss, seconds, self.peak = json.loads(self._answer())
        self.losses.append(loss)
        self.times.append(seconds)

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            reason = (self.log.read_text().strip().splitlines() or ["no reason given"])[-1]
            raise RuntimeError(f"cannot take part: {textwrap.shorten(reason, 200)}")
        return line

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def prepare(name: str, models: Path, folder: Path, threads: int, steps: int) -> Path:
    """Compile the model and make the batches; returns the job's file."""
    make, classes, axis = CASES[name]
    recipe = {
        "loss": [{"name": "cross_entropy", "options": {"axis": axis}}],
        "optimizer": {"name": "adamw", "options": ADAMW, "decay_all": True},
        "learning_rate": {"base": LR},
    }
    plan = ortc.compile(models / f"{name}.onnx", folder / "stages", parse_recipe(recipe))
    x, labels = make(np.random.default_rng(0), steps)
    np.savez(folder / "batches.npz", labels=labels, **{f"input.{key}": array for key, array in x.items()})
    job = {
        "name": name,
        "model": str(models / f"{name}.onnx"),
        "recipe": recipe,
        "batches": str(folder / "batches.npz"),
        "inputs": list(x),
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
                for contestant in tuple(contestants):
                    try:
                        contestant.step(index)
                    except RuntimeError as error:
                        absent.append(f"{contestant.name}: {error}")
                        contestants.remove(contestant)
                        contestant.close()
        finally:
            for contestant in contestants:
                contestant.close()
    return contestants, absent


def report(name: str, contestants: Sequence[Contestant], absent: Sequence[str]) -> bool:
    """One line per contestant; whether all losses agree with the first one's."""
    own = contestants[0]
    base, agree = median(own.times[WARM_UP:]), own.name == "ortc"
    for c in contestants:
        times = sorted(c.times[WARM_UP:])
        apart = np.abs(np.array(c.losses) - own.losses) / np.abs(own.losses)
        fits = bool(apart[0] <= ALLOWED and apart.max() <= ALLOWED_LATER.get(name, ALLOWED))
        agree &= fits
        shown = (f"{1000 * median(times):.1f}", f"{1000 * times[0]:.1f}", f"{base / median(times):.2f}")
        shown = (*shown, f"{c.ready + c.times[0]:.1f}", f"{c.peak / 2**20:.0f}")
        row = (*shown, f"{c.losses[0]:.5f}", f"{apart[0]:.1e}", f"{apart.max():.1e}")
        print(_line(name, c.name, *row) + ("" if fits else "  losses disagree"), flush=True)
    if others := contestants[1:]:
        print(f"{name:>10} " + ", ".join(_beside(own, others, *measure) for measure in MEASURES))
    for line in absent:
        print(f"{name:>10} {line}", flush=True)
    return agree


MEASURES: list[tuple[str, Callable[[Contestant], float]]] = [
    ("time of a step", lambda c: median(c.times[WARM_UP:])),
    ("first step", lambda c: c.ready + c.times[0]),
    ("memory", lambda c: c.peak),
]


def _beside(own: Contestant, others: Sequence[Contestant], what: str, measure: Callable[[Contestant], float]) -> str:
    best = min(others, key=measure)
    return f"{what} {measure(own) / max(measure(best), 1e-9):.2f} of {best.name}'s"


def _line(*cells: str) -> str:
    return " ".join(f"{cell:>10}" for cell in cells)


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
    parser.add_argument("--peers", type=Path, help="the folder of bench/make_peers.sh")
    for who in ("artifacts", "onnxsim", "torch"):
        parser.add_argument(f"--{who}-python", metavar="PYTHON", help=f"the interpreter of {who}, else the one in PEERS")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pythons = {"ortc": sys.executable}
    for who, environment in {"artifacts": "artifacts", "onnxsim": "onnxsim", "torch": "torch", "inductor": "torch"}.items():
        given = getattr(args, f"{environment}_python") or (args.peers and str(args.peers / environment / "bin" / "python"))
        if given and shutil.which(given):
            pythons[who] = given
        else:
            print(f"{who} is absent: " + (f"there is no {given}" if given else "no interpreter was given (--peers)"))
    print(f"{processor()}; {args.threads} threads; {args.rounds} rounds after {WARM_UP}")
    print(_line("model", "who", "median ms", "least ms", "ortc / it", "first s", "MiB", "loss", "apart", "at most"))
    agree, versions = True, {}
    for name in args.names:
        contestants, absent = compete(name, pythons, args.folder, args.threads, args.rounds)
        agree &= report(name, contestants, absent)
        versions |= {c.name: c.version for c in contestants}
    for who, what in versions.items():
        print(f"{who}: {what}")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
