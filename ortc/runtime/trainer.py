"""Training from Python: one step, one evaluation, one save at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from ortc.errors import DataError, NotFiniteError, OrtcError
from ortc.plan import Port, Stage, load_plan
from ortc.recipe import LearningRate
from ortc.runtime import checkpoint
from ortc.runtime.adapters import adapter_graph, check_free, merged, write_adapters
from ortc.runtime.batch import Batch, BatchCheck, synthetic_batch
from ortc.runtime.checkpoint import Progress
from ortc.runtime.data import first_batch
from ortc.runtime.export import export_model, exported_loss
from ortc.runtime.lock import lock_folder
from ortc.runtime.lr import learning_rate
from ortc.runtime.parts import parts_of
from ortc.runtime.profile import Profile, Recorder, make_profile
from ortc.runtime.scaling import Scaling
from ortc.runtime.stage import Part, import_onnxruntime
from ortc.runtime.team import Team

EXPORT_TOLERANCE = 1e-4  # relative; the exported graph is another one than the evaluation's, and sums in another order


@dataclass(frozen=True)
class StepResult:
    """One training step."""

    step: int
    loss: float
    lr: float
    gradient_norm: float
    samples: int
    skipped: bool = False  # nothing was updated: the gradients overflowed, and the loss scale has been lowered


@dataclass(frozen=True)
class Evaluation:
    """The loss and the model's outputs (by name) of one batch, in inference form."""

    loss: float
    outputs: dict[str, np.ndarray]
    samples: int


@dataclass(frozen=True)
class Exported:
    """An exported model, and how its loss compares on the batch that it was checked with."""

    path: Path
    step: int
    loss: float
    evaluation_loss: float

    def __str__(self) -> str:
        losses = f"loss {self.loss:.6g}, evaluation {self.evaluation_loss:.6g}"
        return f"{self.path}: weights of step {self.step}, checked: {losses}"


class Trainer:
    """Trains with an output folder of ``ortc compile``. Use it with ``with``, or call :meth:`close`.

    Args:
        folder: the output folder.
        restore: where to continue: ``latest``, ``none`` (the initial weights), or the path of a checkpoint.
        threads: of each session; None for all cores.
        seed: of dropout and the data order; None: the checkpoint's, or the recipe's.
        schedule: the learning rate; None: the recipe's.
        total_steps: the last step of the run, for schedules that depend on it.
        keep: how many checkpoints to keep beside the initial one.
        exclusive: take the folder's lock now; otherwise the first step or save does.

    Raises:
        OrtcError: the folder, the plan, or the checkpoint is unusable, or ONNX Runtime is missing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        restore: str | Path = "latest",
        threads: int | None = None,
        seed: int | None = None,
        schedule: LearningRate | None = None,
        total_steps: int | None = None,
        keep: int = 3,
        exclusive: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.plan = load_plan(self.folder)
        import_onnxruntime()
        self.schedule = schedule or self.plan.recipe.learning_rate
        self.total_steps, self.keep = total_steps, keep
        self._threads = threads
        self._checkpoints = self.folder / self.plan.checkpoint
        self._lock: IO[str] | None = None
        ports = [p for s in self.plan.stages for phase in ("train", "forward", "eval") for p in _inputs(s, phase)]
        self.inputs = BatchCheck([p for p in ports if p.role in ("data", "label")], self.plan.losses)
        self._team = Team(self.folder, self.plan, threads)
        try:
            if exclusive:
                self._take_lock()
            found = self._team.each(lambda w: checkpoint.restore(self._checkpoints, self.plan, restore, w))
            self.restored, self.progress = found[0]
        except BaseException as error:
            self._end(error)
            raise
        saved = self.progress.seed
        self.seed = seed if seed is not None else saved if saved is not None else self.plan.recipe.seed
        self.step_number = self.progress.step
        self._precision = self.plan.recipe.precision
        self.scaling = Scaling.restored(self.progress.scaling, self._precision)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def close(self) -> None:
        """Release the sessions and the folder. Nothing is saved."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if error is not None:
            self._team.fail(error)
        self._team.close()

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes: it runs rank 0."""
        return self._team.main

    @property
    def micro_batches(self) -> int:
        """Parts of a step's batch, over all replicas."""
        return self.plan.recipe.pipeline.parts * self._team.workers[0].replicas

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set in any process of the job."""
        return self._team.agree(flag)

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self._team.size

    def describe_ranks(self) -> str:
        """How many ranks there are, where they run, and with how many threads."""
        return self._team.describe()

    def record(self) -> None:
        """From now on time every action of each step; every process of the job calls it."""
        for worker in self._team.workers:
            worker.recorder = Recorder()

    def recorded(self) -> Profile | None:
        """What all ranks recorded of the last step, on the main process; every process calls it, after :meth:`record`."""
        told = self._team.each(lambda w: w.world.gather_object(w.recorder.told() if w.recorder is not None else None))[0]
        return make_profile(self.plan, told) if told is not None else None

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Read-only views of this process's parameters and buffers by name; the next step changes what they show."""
        views = {name: array.view() for name, array in self._values().items()}
        for view in views.values():
            view.flags.writeable = False
        return views

    def _values(self) -> dict[str, np.ndarray]:
        held = [stage.values for worker in self._team.workers for stage in worker.stages.values()]
        found = {name: array for values in reversed(held) for name, array in values.items()}
        return {p.name: found[p.name] for p in self.plan.parameters if p.name in found}

    def _gradients(self) -> dict[str, np.ndarray]:
        stages = [stage for worker in self._team.workers for stage in worker.stages.values()]
        found = {name: array for s in reversed(stages) for name, array in s.gradients.items() if name in s.own}
        return {p.name: found[p.name] for p in self.plan.parameters if p.name in found}

    def _train(self, parts: list[Part], step: int) -> tuple[float, float]:
        """Forward and backward of a batch, its micro-batches dealt out to the replicas; the loss and the gradients' norm."""
        replicas = self._team.workers[0].replicas
        edges = np.linspace(0, len(parts), replicas + 1).astype(int)
        shares = [parts[a:b] for a, b in pairwise(edges)]
        scale = self.scaling.scale
        found = self._team.each(lambda w: w.train(shares[w.replica], seed=self.seed, step=step, loss_scale=scale))
        loss, norm = found[0]
        return loss, norm / scale

    def _parts(self, batch: Mapping[str, np.ndarray]) -> list[Part]:
        return parts_of(batch, self.micro_batches, self.inputs, self.plan.losses, self.plan.recipe.pipeline.divided)

    def _whole(self, batch: Mapping[str, np.ndarray]) -> Part:
        [part] = parts_of(batch, 1, self.inputs, self.plan.losses, self.plan.recipe.pipeline.divided)
        return part

    def step(self, batch: Mapping[str, np.ndarray]) -> StepResult:
        """Train on one batch.

        Args:
            batch: arrays by the names of the model's inputs, and the targets under theirs (``labels`` unless the recipe
                says otherwise). Other arrays are ignored.

        Raises:
            DataError: the batch does not fit; nothing ran.
            NotFiniteError: the loss or a gradient is NaN or infinite; parameters, buffers and states are as before.
        """
        if not any(phase.startswith("optimizer") for stage in self.plan.stages for phase in stage.phases):
            raise OrtcError(f"{self.folder} has no optimizer phase: none of the model's parameters trains")
        parts = self._parts(batch)
        number = self.step_number + 1
        lr = learning_rate(self.schedule, number, self.total_steps)
        self._take_lock()
        loss, norm = self._train(parts, number)
        scale, finite = self.scaling.scale, bool(np.isfinite(loss) and np.isfinite(norm))
        samples = sum(self.inputs.samples(part.batch) for part in parts)
        if not finite and self._precision.scaling == "dynamic" and not _holds_damage(parts):
            self.scaling = self.scaling.after(False, self._precision)
            self.step_number = number
            return StepResult(number, loss, lr, norm, samples, skipped=True)
        if not finite:
            bad = self._team.each(lambda w: w.not_finite())[0]
            raise NotFiniteError(_describe_not_finite(number, loss, bad, [part.batch for part in parts]))
        most = self.plan.recipe.optimizer.max_norm
        factor = (1.0 if most is None or norm <= most else most / norm) / scale
        updates = number - self.scaling.skipped
        self._team.each(lambda w: w.update(lr=lr, step=updates, gradient_scale=factor))
        self.scaling = self.scaling.after(True, self._precision)
        self.step_number = number
        return StepResult(number, loss, lr, norm, samples)

    def evaluate(self, batch: Mapping[str, np.ndarray]) -> Evaluation:
        """Loss and outputs of one batch in inference form: dropout off, batch norm with its running statistics.

        Raises:
            DataError: the batch does not fit.
        """
        part = self._whole(batch)
        found = self._team.each(lambda w: w.evaluate(part))
        outputs = {name: a for _, made in found for name, a in made.items()}
        return Evaluation(found[0][0], outputs, self.inputs.samples(part.batch))

    def gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradients of one batch in training form, as the next step would compute them; no state changes.

        Returns:
            The loss, and the gradients by the names of the parameters (and of the recipe's ``wrt`` inputs). A weight that the
            model's file holds a second time, transposed, has its whole gradient under both names. Under MPI those of this
            process's stages, and with ``--zero 1`` of its shard.

        Raises:
            DataError: the batch does not fit.
        """
        parts = self._parts(batch)
        loss, _ = self._train(parts, self.step_number + 1)
        gradients = {name: _over(g, self.scaling.scale) for name, g in self._gradients().items()}
        stages = [stage for worker in self._team.workers for stage in worker.stages.values()]
        of_inputs = {}
        for name in dict.fromkeys(name for stage in stages for name in stage.input_gradients):
            read = [stage.input_gradients[name] for stage in stages if name in stage.input_gradients]
            each = [sum(arrays[part.index] for arrays in read if part.index in arrays) for part in parts]
            divided = sum(len(part.batch[name]) for part in parts) == len(batch[name])
            of_inputs[name] = _over(np.concatenate(each) if divided else sum(each), self.scaling.scale)
        copies = {copy: gradients[p.name].T for p in self.plan.trainable() for copy in p.copies if p.name in gradients}
        return loss, {**gradients, **copies, **of_inputs}

    def save(self, position: tuple[int, int] = (0, 0), settings: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint; when this returns, it survives a crash.

        Args:
            position: epochs done and batches done of the next one, for whoever feeds the data.
            settings: anything JSON holds, given back in ``progress.settings``.

        Returns:
            Its folder, ``checkpoint/step-N``.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are intact.
        """
        self._take_lock()
        scaling = None if self._precision.scaling == "none" else self.scaling.saved()
        self.progress = Progress(self.step_number, self.seed, position, settings or {}, scaling)
        return self._team.each(lambda w: checkpoint.save(self._checkpoints, self.plan, self.progress, w, keep=self.keep))[0]

    def export(
        self, path: str | Path, data: str | Path | None = None, *, force: bool = False, adapters: str | Path | None = None
    ) -> Exported:
        """Write the original model with the present weights as an inference model, and check it.

        Low-rank adapters are merged into their weights, or go into a file of their own.

        The check runs the file in ONNX Runtime and compares its loss on a batch with the evaluation's.

        Args:
            path: the ``.onnx`` file; above 2 GB the weights go into ``<name>.data`` beside it.
            data: where to take the batch from, as for a run; None: the last run's files if they are there, else made up.
            force: replace an existing file.
            adapters: the ``.onnx_adapter`` file for ONNX Runtime's adapter loading. The model then takes the adapters as
                inputs, zeros by default: without the file it is the model from before the training.

        Raises:
            OrtcError: a file exists or cannot be written, or the losses differ; then no file is left.
        """
        path = Path(path)
        data = data or _still_there(self.progress.settings.get("data"))
        fitted = self.inputs.fit(first_batch(data, self.inputs) if data else synthetic_batch(self.inputs.ports))
        try:
            expected = self.evaluate(fitted).loss
        except DataError as error:
            hint = "" if data else " (the batch was made up: give --data for the check)"
            raise DataError(f"{error}{hint}") from None
        losses: list[float] = []

        def check(model: Path) -> None:
            loss = exported_loss(self.plan, self.folder, model, graph, fitted, self._threads)
            losses.append(loss)
            if not np.isclose(loss, expected, rtol=EXPORT_TOLERANCE, atol=1e-7, equal_nan=True):
                raise OrtcError(
                    f"the exported model has loss {loss:.7g} where the evaluation has {expected:.7g}: no file was "
                    "written; please report this"
                )

        values, graph, own = self._values(), self.plan.export, {}
        if adapters is None:
            values = merged(self.plan.adapters, values)
        else:
            graph = adapter_graph(self.plan)
            own = {p.of or p.name: values[p.of or p.name] for p in graph.inputs if p.role == "parameter"}
            fitted.update(own)
            values.update({name: np.zeros_like(array) for name, array in own.items()})
            check_free(Path(adapters), force)
        export_model(graph, self.folder, values, path, force=force, check=check)
        if adapters is not None:
            write_adapters(Path(adapters), own)
        return Exported(path, self.step_number, losses[0], expected)

    def _take_lock(self) -> None:
        if self._lock is None and self._team.main:
            self._lock = lock_folder(self.folder)
            checkpoint.clean_up(self._checkpoints)


def _inputs(stage: Stage, phase: str) -> list[Port]:
    return stage.phases[phase].inputs if phase in stage.phases else []


def _still_there(source: object) -> str | None:
    """The data of the last run; only files: a checkpoint shall not name code to run."""
    return source if isinstance(source, str) and Path(source).exists() else None


def _over(array: np.ndarray, scale: float) -> np.ndarray:
    """A copy, divided by the loss scale."""
    return array.copy() if scale == 1.0 else (array / scale).astype(array.dtype)


def _holds_damage(parts: Sequence[Part]) -> bool:
    """Whether the data itself is not finite, which no loss scale mends."""
    return any(a.dtype.kind == "f" and not np.isfinite(a).all() for part in parts for a in part.batch.values())


def _describe_not_finite(step: int, loss: float, bad: Sequence[str], batches: Sequence[Batch]) -> str:
    arrays = [(name, a) for batch in batches for name, a in batch.items() if a.dtype.kind == "f"]
    damaged = list(dict.fromkeys(name for name, a in arrays if not np.isfinite(a).all()))
    advice = "try a lower learning rate, a warm-up, or look at this batch"
    if damaged:
        advice = f"the batch itself holds NaN or infinity, in {', '.join(map(repr, damaged))}"
    shown = ", ".join(map(repr, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
    which = f"not finite are the gradients of {shown}" if bad else "all gradients are finite"
    return f"step {step}: the loss is {loss:g}; {which}. The weights are those of step {step - 1}: {advice}"
