"""What a run shows: a progress bar on a terminal, now and then a line elsewhere, or every number as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ortc.runtime.metrics import plain
from ortc.runtime.trainer import StepResult

LINE_EVERY = 10.0  # seconds
BAR_EVERY = 0.1

Show = Literal["auto", "quiet", "json"]


class Progress:
    """Shows nothing; the base of those that do."""

    def step(self, result: StepResult, epoch: int, speed: float) -> None:
        """After each step; ``speed`` in samples per second."""

    def evaluation(self, step: int, found: Mapping[str, float]) -> None:
        """After each evaluation: the loss, and metrics."""
        rest = "".join(f", {name} {value:.6g}" for name, value in found.items() if name != "loss")
        self.line(f"step {step}: evaluation loss {found['loss']:.6g}{rest}")

    def line(self, text: str) -> None:
        """Anything else."""

    def numbers(self, fields: Mapping[str, Any]) -> None:
        """A line of the metrics file."""


class Json(Progress):
    """The lines of the metrics file."""

    def numbers(self, fields: Mapping[str, Any]) -> None:
        print(json.dumps({k: plain(v) for k, v in fields.items()}), flush=True)


class Lines(Progress):
    """A line for the first step, for the last, and every few seconds or steps."""

    def __init__(self, total: int | None, every: int | None) -> None:
        self.total, self.every, self._next = total, every, 0.0
        self._began: tuple[float, int] | None = None

    def step(self, result: StepResult, epoch: int, speed: float) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now, result.step
        due = now >= self._next if self.every is None else result.step % self.every == 0
        if due or result.step == self.total:
            self._next = now + LINE_EVERY
            of = "" if self.total is None else f"/{self.total}"
            text = (
                f"step {result.step}{of}, epoch {epoch + 1}: loss {result.loss:.6g}, lr {result.lr:.3g}, {speed:.0f} samples/s"
            )
            self.line(text + self._left(now, result.step))

    def _left(self, now: float, step: int) -> str:
        """The time that is left, by the mean of the steps so far."""
        assert self._began is not None
        began, first = self._began
        if self.total is None or step in (first, self.total):
            return ""
        seconds = round((now - began) / (step - first) * (self.total - step))
        return f", {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def line(self, text: str) -> None:
        print(text, flush=True)


class Bar(Progress):
    """A progress bar with loss, learning rate, samples/s and the time left."""

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
            rate = f"{result.lr:.3g}"
            fields = {"epoch": epoch + 1, "loss": f"{result.loss:.5g}", "rate": rate, "speed": f"{speed:.0f}"}
            self.bar.update(self.task, completed=result.step, **fields)

    def line(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def show_progress(step: int, total: int | None, show: Show, every: int | None = None) -> Iterator[Progress]:
    """The way of showing that was asked for, or fits the terminal.

    Args:
        step: where the run is.
        total: the last step, if it is known.
        show: ``auto``: a bar on a terminal, else lines.
        every: steps between lines; None: some seconds.
    """
    if show == "quiet":
        yield Progress()
    elif show == "json":
        yield Json()
    elif not sys.stdout.isatty() or every is not None:
        yield Lines(total, every)
    else:
        import rich.progress as rich

        of = "" if total is None else f"/{total}"
        columns = (
            rich.BarColumn(),
            rich.TextColumn(f"step {{task.completed}}{of}, epoch {{task.fields[epoch]}}"),
            rich.TextColumn("loss {task.fields[loss]}"),
            rich.TextColumn("lr {task.fields[rate]}"),
            rich.TextColumn("{task.fields[speed]} samples/s"),
            rich.TimeRemainingColumn(),
        )
        with rich.Progress(*columns) as progress:
            task = progress.add_task("train", total=total, completed=step, epoch="", loss="", rate="", speed="")
            bar = Bar(progress, task)
            try:
                yield bar
            finally:
                bar.draw()
