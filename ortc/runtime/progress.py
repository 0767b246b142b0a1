"""What a run shows: a progress bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from ortc.runtime.trainer import StepResult

LINE_EVERY = 10.0  # seconds
BAR_EVERY = 0.1


class Progress:
    """Shows nothing; the base of those that do."""

    def step(self, result: StepResult, epoch: int, speed: float) -> None:
        """After each step; ``speed`` in samples per second."""

    def evaluation(self, step: int, loss: float) -> None:
        """After each evaluation."""
        self.line(f"step {step}: evaluation loss {loss:.6g}")

    def line(self, text: str) -> None:
        """Anything else."""


class Lines(Progress):
    """A line for the first step, for the last, and every few seconds."""

    def __init__(self, total: int | None) -> None:
        self.total, self._next = total, 0.0

    def step(self, result: StepResult, epoch: int, speed: float) -> None:
        now = time.monotonic()
        if now >= self._next or result.step == self.total:
            self._next = now + LINE_EVERY
            of = "" if self.total is None else f"/{self.total}"
            self.line(
                f"step {result.step}{of}, epoch {epoch + 1}: loss {result.loss:.6g}, lr {result.lr:.3g}, {speed:.0f} samples/s"
            )

    def line(self, text: str) -> None:
        print(text, flush=True)


class Bar(Progress):
    """A progress bar with loss, samples/s and the time left."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task, self._next = bar, task, 0.0
        self._latest: tuple[StepResult, int, float] | None = None

    def step(self, result: StepResult, epoch: int, speed: float) -> None:
        self._latest = result, epoch, speed
        now = time.monotonic()
        if now >= self._next:
            self._next = now + BAR_EVERY
            self.draw()

    def draw(self) -> None:
        """Show the latest step."""
        if self._latest is not None:
            result, epoch, speed = self._latest
            fields = {"epoch": epoch + 1, "loss": f"{result.loss:.5g}", "speed": f"{speed:.0f}"}
            self.bar.update(self.task, completed=result.step, **fields)

    def line(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def show_progress(step: int, total: int | None, quiet: bool) -> Iterator[Progress]:
    """The way of showing that fits the terminal."""
    if quiet:
        yield Progress()
    elif not sys.stdout.isatty():
        yield Lines(total)
    else:
        import rich.progress as rich

        of = "" if total is None else f"/{total}"
        columns = (
            rich.BarColumn(),
            rich.TextColumn(f"step {{task.completed}}{of}, epoch {{task.fields[epoch]}}"),
            rich.TextColumn("loss {task.fields[loss]}"),
            rich.TextColumn("{task.fields[speed]} samples/s"),
            rich.TimeRemainingColumn(),
        )
        with rich.Progress(*columns) as progress:
            bar = Bar(progress, progress.add_task("train", total=total, completed=step, epoch="", loss="", speed=""))
            try:
                yield bar
            finally:
                bar.draw()
