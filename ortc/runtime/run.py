"""The loop behind ``ortc run``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ortc.errors import DataError, NotFiniteError, OrtcError
from ortc.plan import load_plan
from ortc.recipe import LearningRate, Recipe, parse_recipe
from ortc.runtime.batch import Batch
from ortc.runtime.data import Arrays, Data, open_data
from ortc.runtime.files import write_text
from ortc.runtime.lr import learning_rate
from ortc.runtime.messages import tell
from ortc.runtime.metrics import MetricsFile
from ortc.runtime.progress import Progress, show_progress
from ortc.runtime.trainer import StepResult, Trainer

INTERRUPTED = 128  # plus the signal's number is the exit code, as a shell has it


def run(
    folder: str | Path,
    *,
    data: str | Path,
    batch_size: int = 32,
    steps: int | None = None,
    epochs: int | None = None,
    eval_data: str | Path | None = None,
    eval_every: int | None = None,
    save_every: int | None = None,
    keep: int = 3,
    restore: str | Path = "latest",
    lr: float | None = None,
    schedule: str | None = None,
    warmup: int | None = None,
    seed: int | None = None,
    drop_last: bool = False,
    threads: int | None = None,
    metrics: str | Path | None = None,
    profile: str | Path | None = None,
    quiet: bool = False,
) -> int:
    """Train until ``steps`` or ``epochs`` are done (counted from the beginning, not from where it continues).

    Args:
        folder: the output folder of ``ortc compile``.
        data: see :func:`ortc.runtime.data.open_data`.
        batch_size: samples of a batch; a function's batches come as they are.
        steps: the last step.
        epochs: passes over the data; 1 if neither is given.
        eval_data: evaluated every ``eval_every`` steps (default: each epoch) and at the end, all of it.
        save_every: steps between checkpoints; default: each epoch. The end and an interruption save as well.
        keep: checkpoints to keep beside the initial one.
        restore: ``latest``, ``none``, or a checkpoint's path.
        lr, schedule, warmup: in place of the recipe's.
        seed: of data order and dropout; default: the restored checkpoint's, else the recipe's.
        drop_last: leave out an epoch's last batch if it is smaller.
        metrics: the JSON-lines file; default ``metrics.jsonl`` in the folder.
        profile: where a trace of the last step goes, predicted and measured; the metrics end with what each rank did in it.
        quiet: print errors only.

    Returns:
        The exit code: 0; 130 or 143 after Ctrl-C or SIGTERM, which save first.

    Raises:
        OrtcError: for anything wrong with folder, data, checkpoint or numbers.
    """
    folder = Path(folder)
    if profile is not None and (Path(profile).is_dir() or not Path(profile).parent.is_dir()):
        raise OrtcError(f"cannot write {profile}: it is a folder, or in none that exists")
    rate = _learning_rate(load_plan(folder).recipe, lr, schedule, warmup)
    if seed is not None:
        parse_recipe({"seed": seed}, "options")
    with Trainer(folder, restore=restore, threads=threads, seed=seed, schedule=rate, keep=keep, exclusive=True) as trainer:
        source = open_data(data, trainer.inputs)
        held_out = open_data(eval_data, trainer.inputs) if eval_data is not None else None
        loop = _Loop(
            trainer=trainer,
            source=os.path.abspath(data) if os.path.exists(data) else str(data),
            data=source,
            held_out=held_out,
            batch_size=batch_size,
            drop_last=drop_last,
            epochs=epochs if epochs is not None or steps is not None else 1,
            steps=steps,
            eval_every=eval_every,
            save_every=save_every,
            profile=None if profile is None else Path(profile),
        )
        quiet = quiet or not trainer.is_main
        if not quiet and trainer.ranks > 1:
            print(trainer.describe_ranks())
        path = Path(metrics) if metrics is not None else folder / "metrics.jsonl"
        return loop.run(path, quiet)


def _learning_rate(recipe: Recipe, lr: float | None, schedule: str | None, warmup: int | None) -> LearningRate:
    changes = {"base": lr, "schedule": schedule, "warmup": warmup}
    table = {**recipe.learning_rate.model_dump(), **{k: v for k, v in changes.items() if v is not None}}
    return parse_recipe({"learning_rate": table}, "options").learning_rate


@dataclass
class _Loop:
    trainer: Trainer
    source: str
    data: Data
    held_out: Data | None
    batch_size: int
    drop_last: bool
    epochs: int | None
    steps: int | None
    eval_every: int | None
    save_every: int | None
    profile: Path | None

    def run(self, metrics_path: Path, quiet: bool) -> int:
        trainer = self.trainer
        self._check_batch_size()
        position, settings, total = self._continue(quiet)
        if self._complete(position):
            if not quiet:
                print(f"nothing to do: step {trainer.step_number} was the last; give more --steps or --epochs to go on")
            return 0
        if self.profile is not None:
            trainer.record()
        metrics = MetricsFile(metrics_path if trainer.is_main else None, trainer.step_number)
        with (
            contextlib.closing(metrics),
            _signals() as caught,
            show_progress(trainer.step_number, total, quiet) as show,
        ):
            began = time.perf_counter()
            for epoch, index, batch, is_last in self._batches(position):
                try:
                    result = trainer.step(batch)
                except (DataError, NotFiniteError):  # the state is that of the step before, and worth keeping
                    if trainer.step_number > trainer.progress.step:
                        metrics.sync()
                        show.line(f"step {trainer.step_number}: saved {trainer.save(position, settings)}")
                    raise
                speed = result.samples / max(time.perf_counter() - began, 1e-9)
                metrics.write(**_step_line(result, epoch, speed))
                show.step(result, epoch, speed)
                position = (epoch + 1, 0) if is_last else (epoch, index + 1)
                stop = self._complete(position) or trainer.agree(bool(caught))
                if self.held_out is not None and (self._complete(position) or _due(result, self.eval_every, is_last)):
                    loss = self._evaluate(self.held_out)
                    metrics.write(step=result.step, epoch=epoch + 1, eval_loss=loss, time=time.time())
                    show.evaluation(result.step, loss)
                if stop or _due(result, self.save_every, is_last):
                    metrics.sync()
                    path = trainer.save(position, settings)
                    if stop:
                        show.line(f"step {result.step}: saved {path}")
                        break
                began = time.perf_counter()
            else:
                raise DataError(f"the data yields no batch in epoch {position[0] + 1}")
            if self.profile is not None:
                self._write_profile(self.profile, metrics, show)
        return INTERRUPTED + caught[0] if caught else 0

    def _write_profile(self, path: Path, metrics: MetricsFile, show: Progress) -> None:
        """The trace of the last step, and in the metrics what each rank did in it."""
        step = self.trainer.recorded()
        if step is None:
            return
        write_text(path, step.trace(self.trainer.plan))
        metrics.write(step=self.trainer.step_number, ranks=step.ranks, time=time.time())
        idle = sum(rank["bubble"] for rank in step.ranks) / len(step.ranks)
        show.line(f"step {self.trainer.step_number}: the ranks idle {idle:.1%}; {path}: open it in ui.perfetto.dev")

    def _check_batch_size(self) -> None:
        fixed = self.trainer.inputs.fixed_batch_size()
        if fixed is None or not isinstance(self.data, Arrays):
            return
        parts = self.trainer.micro_batches
        size = fixed * parts
        takes = f"batches of {fixed} samples only" if parts == 1 else f"{parts} micro-batches of {fixed} samples in a step"
        if size != self.batch_size:
            raise DataError(f"the model takes {takes}: use --batch-size {size}")
        if self.data.samples % size and not self.drop_last:
            raise DataError(f"the model takes {takes}, and {self.data.samples} samples leave a smaller one: use --drop-last")

    def _last_step(self, position: tuple[int, int]) -> int | None:
        """The number of the last step, as far as it is known beforehand."""
        limits = [self.steps] if self.steps is not None else []
        count = self.data.count(self.batch_size, self.drop_last)
        if count == 0:
            raise DataError(f"{self.data.samples} samples do not fill one batch of {self.batch_size}")
        if self.epochs is not None and count is not None:
            limits.append(self.trainer.step_number + (self.epochs - position[0]) * count - position[1])
        return min(limits) if limits else None

    def _complete(self, position: tuple[int, int]) -> bool:
        done = self.steps is not None and self.trainer.step_number >= self.steps
        return done or (self.epochs is not None and position[0] >= self.epochs)

    def _continue(self, quiet: bool) -> tuple[tuple[int, int], dict[str, Any], int | None]:
        """Say where the run goes on and what differs from the one before.

        Returns:
            The position in the data; the settings that must stay for a run to continue bit for bit; the last step.
        """
        trainer, before = self.trainer, self.trainer.progress
        order = {
            "batch size": self.batch_size,
            "samples": self.data.samples,
            "drop last": self.drop_last,
            "seed": trainer.seed,
        }
        epoch, batch = before.position
        if batch and any(before.settings.get(k, v) != v for k, v in order.items()):
            tell(f"warning: the batches are others than before, so epoch {epoch + 1} begins again")
            batch = 0
        trainer.total_steps = total = self._last_step((epoch, batch))
        rate = trainer.schedule
        learning_rate(rate, rate.warmup + 1, total)  # complains now, not after the warm-up
        last = None if rate.schedule == "constant" else total
        settings = {**order, "learning rate": rate.model_dump(), "last step": last}
        changed = [k for k, v in settings.items() if before.settings.get(k, v) != v]
        if changed:
            tell(f"warning: other {', '.join(changed)} than in {trainer.restored}; going on with the new")
        if trainer.step_number and not quiet:
            print(f"continuing from {trainer.restored}")
        return (epoch, batch), {**settings, "data": self.source}, total

    def _batches(self, position: tuple[int, int]) -> Iterator[tuple[int, int, Batch, bool]]:
        """Epoch, index in it, batch, and whether it is the epoch's last, without end unless an epoch is empty."""
        epoch, start = position
        while True:
            batches = self.data.batches(
                epoch, seed=self.trainer.seed, batch_size=self.batch_size, drop_last=self.drop_last, start=start
            )
            index, ahead = start, next(batches, None)
            if ahead is None and start == 0:
                return
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                yield epoch, index, batch, ahead is None
                index += 1
            epoch, start = epoch + 1, 0

    def _evaluate(self, data: Data) -> float:
        """The mean of the batches' losses, weighted by their samples; a model of fixed batch size leaves a rest out."""
        fixed = self.trainer.inputs.fixed_batch_size()
        total = samples = 0.0
        for batch in data.batches(0, seed=None, batch_size=fixed or self.batch_size, drop_last=fixed is not None):
            result = self.trainer.evaluate(batch)
            total += result.loss * result.samples
            samples += result.samples
        if not samples:
            raise DataError("the evaluation data yields no batch")
        return total / samples


def _due(result: StepResult, every: int | None, end_of_epoch: bool) -> bool:
    return end_of_epoch if every is None else result.step % every == 0


def _step_line(result: StepResult, epoch: int, speed: float) -> dict[str, Any]:
    return {
        "step": result.step,
        "epoch": epoch + 1,
        "loss": result.loss,
        "lr": result.lr,
        "gradient_norm": result.gradient_norm,
        "samples_per_s": round(speed, 2),
        "time": time.time(),
    }


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second one of either ends the process at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield caught
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        tell("stopping after this step and saving; once more to stop at once")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
