"""The loop behind ``ortc run``."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ortc.errors import DataError, NotFiniteError, OrtcError
from ortc.plan import load_plan
from ortc.recipe import LearningRate, Recipe, parse_recipe
from ortc.runtime.batch import Batch
from ortc.runtime.board import Board
from ortc.runtime.data import Arrays, Data, open_data, prefetched
from ortc.runtime.engine import make_engine, merge_traces
from ortc.runtime.evaluation import Goal, Metric, make_metrics
from ortc.runtime.files import refuse_link, write_text
from ortc.runtime.lr import learning_rate
from ortc.runtime.messages import tell
from ortc.runtime.metrics import MetricsFile
from ortc.runtime.progress import Progress, Show, show_progress
from ortc.runtime.stage import import_onnxruntime
from ortc.runtime.tensors import show_magnitudes
from ortc.runtime.trainer import StepResult, Trainer
from ortc.runtime.transport import TIMEOUT

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
    shuffle: bool = True,
    eval_batch_size: int | None = None,
    threads: int | None = None,
    timeout: float = TIMEOUT,
    metrics: str | Path | None = None,
    profile: str | Path | None = None,
    metric: Sequence[str] = (),
    best: str | None = None,
    patience: int | None = None,
    tensorboard: str | Path | None = None,
    histograms: Sequence[str] = (),
    histogram_every: int = 100,
    fetch: Sequence[str] = (),
    fetch_every: int = 1,
    rename: Mapping[str, str] | None = None,
    providers: Sequence[str] = (),
    session_options: Sequence[str] = (),
    ort_profile: str | Path | None = None,
    log_every: int | None = None,
    quiet: bool = False,
    json: bool = False,
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
        shuffle: whether the samples of an epoch come in an order of their own, or as they are stored.
        eval_batch_size: samples of a batch in evaluations; default: ``batch_size``.
        threads: of each session; default: all cores, which the ranks of a host share out.
        timeout: seconds that a rank waits for another, before the run ends; 0 for ever.
        metrics: the JSON-lines file; default ``metrics.jsonl`` in the folder.
        profile: where a trace of the last step goes, predicted and measured; the metrics end with what each rank did in it.
        metric: what evaluations find out beside the loss: see :func:`ortc.runtime.evaluation.make_metrics`.
        best: keep the best checkpoint by this: ``loss``, a metric's name, or ``min:NAME``, ``max:NAME``.
        patience: stop after so many evaluations that were not better than the best (by ``best``; default: the loss).
        tensorboard: a folder for TensorBoard's event files.
        histograms: globs: of these parameters and their gradients histograms and norms go there as well; with
            ``optimizer.fuse``, of the parameters.
        histogram_every: steps between those.
        fetch: names of values of the training graphs to write into ``fetched/step-N.npz`` in the folder.
        fetch_every: steps between those.
        rename: names in the data -> names of the model's inputs.
        providers, session_options: see :func:`ortc.runtime.engine.make_engine`.
        ort_profile: where ONNX Runtime's own traces of all sessions go, as one.
        log_every: steps between lines, in place of a progress bar.
        quiet: print errors only.
        json: print the lines of the metrics file, and nothing else.

    Returns:
        The exit code: 0; 130 or 143 after Ctrl-C or SIGTERM, which save first.

    Raises:
        OrtcError: for anything wrong with folder, data, checkpoint or numbers.
    """
    folder = Path(folder)
    for file in (profile, ort_profile):
        if file is not None and (Path(file).is_dir() or not Path(file).parent.is_dir()):
            raise OrtcError(f"cannot write {file}: it is a folder, or in none that exists")
    if eval_data is None and (metric or best is not None or patience is not None):
        raise OrtcError("--metric, --best and --patience look at evaluations: give --eval-data")
    if histograms and tensorboard is None:
        raise OrtcError("--histograms go to TensorBoard: give --tensorboard DIR")
    with contextlib.ExitStack() as stack:
        traces = None if ort_profile is None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ortc-")))
        engine = make_engine(import_onnxruntime(), providers, session_options, traces)
        rate = _learning_rate(load_plan(folder).recipe, lr, schedule, warmup)
        if seed is not None:
            parse_recipe({"seed": seed}, "options")
        trainer = stack.enter_context(
            Trainer(
                folder, restore=restore, threads=threads, timeout=timeout or None, seed=seed,
                schedule=rate, keep=keep, exclusive=True, engine=engine,
                fetch=fetch,
            )
        )  # fmt: skip
        source = open_data(data, trainer.inputs, rename)
        if isinstance(source, Arrays):
            source.share, source.whole = trainer.share_of_batch, trainer.reads_whole
        held_out = open_data(eval_data, trainer.inputs, rename) if eval_data is not None else None
        metrics_found = make_metrics(trainer.plan, metric, threads)
        judged = best if best is not None else "loss" if patience is not None else None
        loop = _Loop(
            trainer=trainer,
            rename=rename or {},
            source=os.path.abspath(data) if os.path.exists(data) else str(data),
            data=source,
            held_out=held_out,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            eval_batch_size=eval_batch_size or batch_size,
            epochs=epochs if epochs is not None or steps is not None else 1,
            steps=steps,
            eval_every=eval_every,
            save_every=save_every,
            profile=None if profile is None else Path(profile),
            metrics=metrics_found,
            goal=None if judged is None else Goal.parse(judged, metrics_found),
            patience=patience,
            histograms=histograms,
            histogram_every=histogram_every,
            fetch_every=fetch_every,
            log_every=log_every,
            show="quiet" if quiet or not trainer.is_main else "json" if json else "auto",
        )
        if tensorboard is not None and trainer.is_main:
            loop.board = stack.enter_context(contextlib.closing(Board(Path(tensorboard), trainer.step_number)))
        if loop.show == "auto":
            loop.describe(eval_data)
        path = Path(metrics) if metrics is not None else folder / "metrics.jsonl"
        if metrics is None:
            refuse_link(path)
        code = loop.run(path)
        if ort_profile is not None:
            told = trainer.traces()
            if told is not None:
                write_text(Path(ort_profile), merge_traces(told))
        return code


def _learning_rate(recipe: Recipe, lr: float | None, schedule: str | None, warmup: int | None) -> LearningRate:
    changes = {"base": lr, "schedule": schedule, "warmup": warmup}
    table = {**recipe.learning_rate.model_dump(), **{k: v for k, v in changes.items() if v is not None}}
    return parse_recipe({"learning_rate": table}, "options").learning_rate


@dataclass
class _Loop:
    trainer: Trainer
    rename: Mapping[str, str]
    source: str
    data: Data
    held_out: Data | None
    batch_size: int
    drop_last: bool
    shuffle: bool
    eval_batch_size: int
    epochs: int | None
    steps: int | None
    eval_every: int | None
    save_every: int | None
    profile: Path | None
    metrics: Sequence[Metric]
    goal: Goal | None
    patience: int | None
    histograms: Sequence[str]
    histogram_every: int
    fetch_every: int
    log_every: int | None
    show: Show
    board: Board | None = None

    def describe(self, eval_data: str | Path | None) -> None:
        """Say where the run happens, and what of the data is not used."""
        if self.trainer.ranks > 1:
            print(self.trainer.describe_ranks())
        if self.trainer.plan.fused:
            print("the weights are updated as their gradients come (--fuse-update): the norm of the gradients is not known")
        if isinstance(self.data, Arrays):
            count, left = self.data.count(self.batch_size, self.drop_last), self.data.left_out(self.batch_size, self.drop_last)
            rest = f"; {left} of them, others each time, are left out (--drop-last)" if left else ""
            print(f"data: {self.data.samples} samples, {count} batches an epoch{rest}")
        fixed = self.trainer.inputs.fixed_batch_size()
        if isinstance(self.held_out, Arrays) and fixed is not None and self.held_out.left_out(fixed, True):
            left = self.held_out.left_out(fixed, True)
            print(f"evaluation: the last {left} of {self.held_out.samples} samples in {eval_data} are left out: no full batch")

    def run(self, metrics_path: Path) -> int:
        trainer = self.trainer
        self._check_batch_size()
        position, settings, total = self._continue()
        if self._complete(position) or self._lost_patience(settings):
            if self.show == "auto":
                print(f"nothing to do: step {trainer.step_number} was the last; give more --steps or --epochs to go on")
            return 0
        if self.profile is not None:
            trainer.record()
        metrics = MetricsFile(metrics_path if trainer.is_main else None, trainer.step_number)
        with (
            contextlib.closing(metrics),
            _signals() as caught,
            show_progress(trainer.step_number, total, self.show, self.log_every) as show,
            contextlib.closing(self._batches(position)) as batches,
        ):
            began = time.perf_counter()
            for epoch, index, batch, is_last in batches:
                try:
                    result = trainer.step(batch)
                except (DataError, NotFiniteError) as error:
                    self._report(error)
                    # The state is that of the step before, and worth keeping.
                    if trainer.intact and trainer.step_number > trainer.progress.step:
                        metrics.sync()
                        show.line(f"step {trainer.step_number}: saved {trainer.save(position, settings)}")
                    raise
                seconds = max(time.perf_counter() - began, 1e-9)
                line = _step_line(result, epoch, seconds, scaled=trainer.plan.recipe.precision.scaling != "none")
                metrics.write(**line)
                show.numbers(line)
                show.step(result, epoch, result.samples / seconds)
                self._record(result, line)
                position = (epoch + 1, 0) if is_last else (epoch, index + 1)
                stop = self._complete(position) or trainer.agree(bool(caught))
                improved = False
                if self.held_out is not None and (self._complete(position) or _due(result, self.eval_every, is_last)):
                    found = self._evaluate(self.held_out)
                    line = {"step": result.step, "epoch": epoch + 1, **{f"eval_{k}": v for k, v in found.items()}}
                    metrics.write(**line, time=time.time())
                    show.numbers(line)
                    show.evaluation(result.step, found)
                    if self.board is not None:
                        self.board.scalars(result.step, {f"evaluation/{name}": value for name, value in found.items()})
                    if self.goal is not None:
                        settings["best"] = self.goal.judged(settings.get("best"), found, result.step)
                        improved = settings["best"]["step"] == result.step
                    if self._lost_patience(settings):
                        show.line(f"step {result.step}: {settings['best']['stale']} evaluations without a better one; stopping")
                        stop = True
                if stop or improved or _due(result, self.save_every, is_last):
                    metrics.sync()
                    if self.board is not None:
                        self.board.sync()
                    path = trainer.save(position, settings)
                    if improved:
                        show.line(f"step {result.step}: the best so far by {self.goal.metric}")  # type: ignore[union-attr]
                    if stop:
                        show.line(f"step {result.step}: saved {path}")
                        break
                began = time.perf_counter()
            else:
                raise DataError(f"the data yields no batch in epoch {position[0] + 1}")
            if self.profile is not None:
                self._write_profile(self.profile, metrics, show)
        return INTERRUPTED + caught[0] if caught else 0

    def _lost_patience(self, settings: Mapping[str, Any]) -> bool:
        return self.patience is not None and (settings.get("best") or {"stale": 0})["stale"] >= self.patience

    def _report(self, error: OrtcError) -> None:
        """What is known of values that are not finite, in a file and on stderr."""
        if not isinstance(error, NotFiniteError) or error.report is None or not self.trainer.is_main:
            return
        path = self.trainer.folder / f"not-finite-step-{error.report['step']}.json"
        write_text(path, dumps(error.report, indent=1) + "\n")
        if self.show != "quiet":
            for line in [*show_magnitudes(error.report["gradients"]), f"all of it is in {path}"]:
                tell(line)

    def _record(self, result: StepResult, line: Mapping[str, Any]) -> None:
        """What goes elsewhere than into the metrics."""
        if self.histograms and result.step % self.histogram_every == 0:
            shapes = self.trainer.histograms(self.histograms)
            if self.board is not None:
                self.board.histograms(result.step, shapes)
        if self.board is not None:
            names = {"loss", "lr", "gradient_norm", "loss_scale", "samples_per_s", "tokens_per_s"}
            self.board.scalars(result.step, {f"train/{k}": v for k, v in line.items() if k in names})
        if result.fetched and result.step % self.fetch_every == 0:
            _write_fetched(self.trainer.folder / "fetched" / f"step-{result.step}.npz", result.fetched)

    def _write_profile(self, path: Path, metrics: MetricsFile, show: Progress) -> None:
        """The trace of the last step, and in the metrics what each rank did in it."""
        step = self.trainer.recorded()
        if step is None:
            return
        write_text(path, step.trace(self.trainer.plan))
        metrics.write(step=self.trainer.step_number, ranks=step.ranks, time=time.time())
        idle = sum(rank["bubble"] for rank in step.ranks) / len(step.ranks)
        show.line(f"step {self.trainer.step_number}: the ranks idle {idle:.1%}; {path}: open it in ui.perfetto.dev")
        for rank in step.ranks:
            show.line(memory_line(rank))

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

    def _continue(self) -> tuple[tuple[int, int], dict[str, Any], int | None]:
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
            "shuffle": self.shuffle,
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
        if trainer.step_number and self.show == "auto":
            print(f"continuing from {trainer.restored}")
        kept = {"best": before.settings["best"]} if "best" in before.settings else {}
        return (epoch, batch), {**settings, "data": self.source, "rename": dict(self.rename), **kept}, total

    def _batches(self, position: tuple[int, int]) -> Generator[tuple[int, int, Batch, bool], None, None]:
        """Epoch, index in it, batch, and whether it is the epoch's last, without end unless an epoch is empty."""
        epoch, start = position
        while True:
            batches = prefetched(
                self.data.batches(
                    epoch,
                    seed=self.trainer.seed if self.shuffle else None,
                    batch_size=self.batch_size,
                    drop_last=self.drop_last,
                    start=start,
                )
            )
            index, ahead = start, next(batches, None)
            if ahead is None and start == 0:
                return
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                yield epoch, index, batch, ahead is None
                index += 1
            epoch, start = epoch + 1, 0

    def _evaluate(self, data: Data) -> dict[str, float]:
        """The mean of the batches' losses, weighted by their samples, and the metrics, of the averaged weights where there are
        such; a model of fixed batch size leaves a rest out."""
        fixed = self.trainer.inputs.fixed_batch_size()
        total = samples = 0.0
        sums: dict[str, np.ndarray] = {}
        with self.trainer.averaged():
            for batch in data.batches(0, seed=None, batch_size=fixed or self.eval_batch_size, drop_last=fixed is not None):
                result = self.trainer.evaluate(batch)
                total += result.loss * result.samples
                samples += result.samples
                if self.metrics and result.outputs:  # under MPI another rank may have them
                    arrays = {**self.trainer.inputs.fit(batch), **result.outputs}
                    for metric in self.metrics:
                        sums[metric.name] = sums.get(metric.name, 0) + metric.sums(arrays, result.samples)
        if not samples:
            raise DataError("the evaluation data yields no batch")
        if self.metrics:
            told = self.trainer.share({name: a.tolist() for name, a in sums.items()} or None)
            sums = {name: np.array(numbers) for name, numbers in told.items()}
        return {"loss": total / samples, **{m.name: m.value(sums[m.name]) for m in self.metrics}}


def memory_line(rank: Mapping[str, Any]) -> str:
    """What a rank of a profile had in memory, measured, beside what was predicted."""

    def mib(key: str) -> str:
        return f"{rank[key] / 2**20:,.1f} MiB"

    def predicted(key: str) -> str:
        return f" (predicted {mib(key)})" if key in rank else ""

    line = f"rank {rank['rank']}: tensors {mib('tensor_bytes')}{predicted('predicted_tensor_bytes')}"
    if "predicted_session_bytes" in rank:
        line += f", in a session {mib('predicted_session_bytes')} more predicted"
    return f"{line}; its process at most {mib('resident_bytes')}" if rank["resident_bytes"] else line


def _due(result: StepResult, every: int | None, end_of_epoch: bool) -> bool:
    return end_of_epoch if every is None else result.step % every == 0


def _write_fetched(path: Path, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Each value under its name; of several micro-batches as ``<name>/<number>``."""
    named = {f"{n}/{i}" if len(arrays) > 1 else n: a for n, arrays in values.items() for i, a in enumerate(arrays)}
    refuse_link(path.parent)
    refuse_link(path)
    try:
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **named)  # type: ignore[arg-type]
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}") from None


def _step_line(result: StepResult, epoch: int, seconds: float, *, scaled: bool) -> dict[str, Any]:
    more = {"loss_scale": result.loss_scale} if scaled else {}
    if result.tokens is not None:
        more["tokens_per_s"] = round(result.tokens / seconds, 2)
    return {
        "step": result.step,
        "epoch": epoch + 1,
        "loss": result.loss,
        "lr": result.lr,
        **({} if result.gradient_norm is None else {"gradient_norm": result.gradient_norm}),
        "samples_per_s": round(result.samples / seconds, 2),
        **more,
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
