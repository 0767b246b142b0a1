"""Training from Python: one step, one evaluation, one save at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from ortc.errors import DataError, NotFiniteError, OrtcError
from ortc.plan import Plan, Port, Stage, load_plan
from ortc.recipe import LearningRate
from ortc.runtime import checkpoint
from ortc.runtime.adapters import adapter_graph, check_free, merged, write_adapters
from ortc.runtime.batch import BatchCheck, synthetic_batch
from ortc.runtime.checkpoint import Progress
from ortc.runtime.data import first_batch
from ortc.runtime.engine import Engine, Trace
from ortc.runtime.export import export_model, exported_loss
from ortc.runtime.lock import lock_folder
from ortc.runtime.lr import learning_rate
from ortc.runtime.outputs import graphs_of, model_outputs
from ortc.runtime.parts import edges_of, parts_of, read_whole, share_of
from ortc.runtime.profile import Profile, Recorder, make_profile
from ortc.runtime.scaling import Scaling
from ortc.runtime.stage import DEFAULT_ENGINE, Part, import_onnxruntime
from ortc.runtime.team import Team
from ortc.runtime.transport import TIMEOUT

EXPORT_TOLERANCE = 1e-4  # relative; the exported graph is another one than the evaluation's, and sums in another order


@dataclass(frozen=True)
class StepResult:
    """One training step."""

    step: int
    loss: float
    lr: float
    gradient_norm: float | None  # None with `optimizer.fuse`: the gradients are never all there
    samples: int
    loss_scale: float = 1.0
    tokens: int | None = None  # targets that count, where a sample has several
    fetched: dict[str, list[np.ndarray]] = field(default_factory=dict)  # by name, an array a micro-batch; on rank 0
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
        restore: where to continue: ``latest``, ``best``, ``none`` (the initial weights), or the path of a checkpoint.
        threads: of each session; None for all cores, which the ranks of a host share out.
        timeout: seconds that a rank waits for another, before the run ends; None for ever.
        seed: of dropout and the data order; None: the checkpoint's, or the recipe's.
        schedule: the learning rate; None: the recipe's.
        total_steps: the last step of the run, for schedules that depend on it.
        engine: execution providers and session options; None: the CPU.
        fetch: names of values of the training graphs that each step gives back.
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
        timeout: float | None = TIMEOUT,
        seed: int | None = None,
        schedule: LearningRate | None = None,
        total_steps: int | None = None,
        keep: int = 3,
        exclusive: bool = False,
        engine: Engine | None = None,
        fetch: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self.plan = load_plan(self.folder)
        import_onnxruntime()
        self.schedule = schedule or self.plan.recipe.learning_rate
        self.total_steps, self.keep = total_steps, keep
        self._threads = threads
        self._checkpoints = self.folder / self.plan.checkpoint
        self._lock: IO[str] | None = None
        self._lost: str | None = None
        self._fused = self.plan.fused
        made = [p for stage in self.plan.stages for graph in stage.phases.values() for p in graph.outputs]
        self._updates = any(p.role == "parameter" for p in made)
        ports = [p for s in self.plan.stages for phase in ("train", "forward", "eval") for p in _inputs(s, phase)]
        self.inputs = BatchCheck([p for p in ports if p.role in ("data", "label")], self.plan.losses)
        self._prediction: tuple[list[str], BatchCheck] | None = None
        self._fetch = list(dict.fromkeys(fetch))
        self._team = Team(self.folder, self.plan, threads, engine or DEFAULT_ENGINE, timeout)
        try:
            if exclusive:
                self._take_lock()
                self._team.each(lambda w: checkpoint.check_shared(self._checkpoints, w.world))
            if self._fetch:
                self._team.each(lambda w: w.fetch(self._fetch))
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

    @property
    def reads_whole(self) -> frozenset[str]:
        """The arrays of a batch that this process needs all rows of; see :meth:`share_of_batch`."""
        return read_whole(self.inputs)

    def share_of_batch(self, samples: int) -> slice:
        """The samples of a step's batch that this process works on: under MPI those of its replica."""
        workers = self._team.workers
        if len(workers) > 1:
            return slice(0, samples)
        return share_of(samples, self.micro_batches, workers[0].replica, workers[0].replicas)

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

    def _train(self, parts: list[Part], step: int, lr: float = 0.0) -> tuple[float, float]:
        """Forward and backward of a batch, its micro-batches dealt out to the replicas; the loss and the gradients' norm."""
        shares, scale = self._shares(parts), self.scaling.scale
        found = self._team.each(lambda w: w.train(shares[w.replica], seed=self.seed, step=step, loss_scale=scale, lr=lr))
        loss, norm = found[0]
        return loss, norm / scale

    @property
    def intact(self) -> bool:
        """Whether the state is that of a step: with ``optimizer.fuse`` a step that fails may have changed part of it."""
        return self._lost is None

    def _check_intact(self) -> None:
        if self._lost is not None:
            raise OrtcError(self._lost)

    def _shares(self, parts: list[Part]) -> list[list[Part]]:
        """The micro-batches of each replica."""
        edges = edges_of(len(parts), self._team.workers[0].replicas)
        return [parts[a:b] for a, b in pairwise(edges)]

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
            NotFiniteError: the loss or a gradient is NaN or infinite; parameters, buffers and states are as before. With
                ``optimizer.fuse`` it is the loss alone that is looked at, and the state is lost: nothing but :meth:`close` is
                left to do (see :attr:`intact`), and the last checkpoint is where to go on.
        """
        if not self._updates:
            raise OrtcError(f"{self.folder} has no optimizer phase: none of the model's parameters trains")
        self._check_intact()
        parts = self._parts(batch)
        number = self.step_number + 1
        lr = learning_rate(self.schedule, number, self.total_steps)
        self._take_lock()
        if self._fused:
            self._lost = (
                f"step {number} failed while it updated the weights (--fuse-update), and cannot be taken back: go on from the "
                f"checkpoint of step {self.progress.step}, or compile without --fuse-update"
            )
        try:
            loss, norm = self._train(parts, number, lr)
        except OrtcError as error:
            if self._lost is None:
                raise
            raise type(error)(f"{error}. {_capital(self._lost)}") from None
        scale, finite = self.scaling.scale, bool(np.isfinite(loss) and np.isfinite(norm))
        samples = sum(self.inputs.samples(part.batch) for part in parts)
        told = None if self._fused else norm
        result = StepResult(number, loss, lr, told, samples, scale, _tokens(self.plan, parts), self._fetched())
        if not finite and self._precision.scaling == "dynamic" and not _damaged(parts):
            self.scaling = self.scaling.after(False, self._precision)
            self.step_number = number
            return replace(result, skipped=True)
        if not finite and self._fused:
            damaged = _damaged(parts)
            why = f" (the batch holds {damaged})" if damaged else ""
            raise NotFiniteError(f"step {number}: the loss is {loss:g}{why}. {_capital(self._lost)}")
        if not finite:
            raise self._not_finite(number, loss, norm, parts)
        most = self.plan.recipe.optimizer.max_norm
        factor = (1.0 if most is None or norm <= most else most / norm) / scale
        updates = number - self.scaling.skipped
        self._team.each(lambda w: w.update(lr=lr, step=updates, gradient_scale=factor))
        self.scaling = self.scaling.after(True, self._precision)
        self.step_number = number
        self._lost = None
        return result

    def _fetched(self) -> dict[str, list[np.ndarray]]:
        if not self._fetch:
            return {}
        found = self._team.each(lambda w: w.fetched())[0] or {}
        return {name: [found[name][m] for m in sorted(found[name])] for name in self._fetch if name in found}

    def _not_finite(self, step: int, loss: float, norm: float, parts: list[Part]) -> NotFiniteError:
        """The error, with all that can be found out; no state changes."""
        bad = self._team.each(lambda w: w.not_finite())[0]
        sizes = self._team.each(lambda w: w.gradient_sizes())[0]
        shares = self._shares(parts)
        node = self._team.each(lambda w: w.first_not_finite(shares[w.replica], seed=self.seed, step=step))[0]
        error = NotFiniteError(_describe_not_finite(step, loss, bad, parts, node))
        error.report = {
            "step": step,
            "loss": repr(loss),
            "gradient_norm": repr(norm),
            "loss_scale": self.scaling.scale,
            "first_node": None if node is None else {"name": node[0], "operator": node[1]},
            "gradients": sizes,
        }
        return error

    def histograms(self, globs: Sequence[str]) -> dict[str, Any]:
        """On the main process the distribution of the parameters, and of the last step's gradients, that a glob matches
        (``parameters/<name>``, ``gradients/<name>``: see :mod:`ortc.runtime.tensors`); every process calls it."""
        return self._team.each(lambda w: w.histograms(globs, self.scaling.scale))[0] or {}

    def traces(self) -> list[Trace] | None:
        """On the main process ONNX Runtime's profiles, which end here; every process calls it, once, at the end."""
        found = self._team.each(lambda w: w.traces())[0]
        self._team.each(lambda w: w.close())
        return found

    def evaluate(self, batch: Mapping[str, np.ndarray]) -> Evaluation:
        """Loss and outputs of one batch in inference form: dropout off, batch norm with its running statistics.

        Raises:
            DataError: the batch does not fit.
        """
        self._check_intact()
        part = self._whole(batch)
        found = self._team.each(lambda w: w.evaluate(part))
        outputs = {name: a for _, made in found for name, a in made.items()}
        return Evaluation(found[0][0], outputs, self.inputs.samples(part.batch))

    def prediction_inputs(self, outputs: Sequence[str] | None = None) -> BatchCheck:
        """The inputs that some outputs of the model need, and no others; :meth:`predict` makes those outputs from now on.

        Args:
            outputs: their names; None for all, but for what the model itself calls its loss.

        Raises:
            OrtcError: the model has no such output.
        """
        names = model_outputs(self.plan) if outputs is None else list(dict.fromkeys(outputs))
        if self._prediction is None or self._prediction[0] != names:
            graphs = graphs_of(self.plan, self.folder, names)
            ports = [p for graph in graphs.values() for p in graph.inputs if p.role in ("data", "label")]
            self._team.each(lambda w: w.prepare_prediction(graphs))
            self._prediction = names, BatchCheck(ports, (), known=self.inputs.ports)
        return self._prediction[1]

    def predict(self, batch: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The model's outputs of one batch in inference form, with the present weights; no targets are needed.

        Of weights that have a moving average (``--ema``) that takes part within :meth:`averaged`.

        Args:
            batch: arrays by the names of the model's inputs, [samples, …]. Those that no output needs may be missing.
            outputs: which outputs, by name; None: as before, at first all but for what the model itself calls its loss.

        Returns:
            The outputs by name, as the model gives them, usually [samples, …]. Under MPI on rank 0; elsewhere nothing.

        Raises:
            DataError: the batch does not fit.
            OrtcError: the model has no such output.
        """
        self._check_intact()
        names = outputs if outputs is not None or self._prediction is None else self._prediction[0]
        part = Part(0, self.prediction_inputs(names).fit(batch), {})
        assert self._prediction is not None
        made = self._team.each(lambda w: w.predict(part))[0]
        return {name: made[name] for name in self._prediction[0] if name in made}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the parameters are their moving averages, where the recipe asks for such (``--ema``)."""
        if self.plan.recipe.optimizer.ema is None:
            yield
            return
        self._team.each(lambda w: w.swap_averages())
        try:
            yield
        finally:
            self._team.each(lambda w: w.swap_averages())

    def share(self, found: Any) -> Any:
        """What the first process that has something (not None) found, in all of them; every process of the job calls it."""
        return self._team.share(found)

    def gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradients of one batch in training form, as the next step would compute them; no state changes.

        Returns:
            The loss, and the gradients by the names of the parameters (and of the recipe's ``wrt`` inputs). A weight that the
            model's file holds a second time, transposed, has its whole gradient under both names. Under MPI those of this
            process's stages, and with ``--zero 1`` of its shard.

        Raises:
            DataError: the batch does not fit.
        """
        if self._fused:
            raise OrtcError(
                f"{self.folder} was compiled with --fuse-update: its graph updates each weight as soon as the gradient exists, "
                "and gives no gradients away; compile without it"
            )
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
            NotFiniteError: with ``optimizer.fuse``, where nobody looked at the gradients: a weight or a state is not finite.
        """
        self._check_finite()
        self._take_lock()
        scaling = None if self._precision.scaling == "none" else self.scaling.saved()
        self.progress = Progress(self.step_number, self.seed, position, settings or {}, scaling)
        return self._team.each(lambda w: checkpoint.save(self._checkpoints, self.plan, self.progress, w, keep=self.keep))[0]

    def export(
        self,
        path: str | Path,
        data: str | Path | None = None,
        *,
        force: bool = False,
        adapters: str | Path | None = None,
        raw: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> Exported:
        """Write the original model with the present weights as an inference model, and check it.

        Of weights that have a moving average (``--ema``) that is written, unless ``raw``.
        Low-rank adapters are merged into their weights, or go into a file of their own.

        The check runs the file in ONNX Runtime and compares its loss on a batch with the evaluation's.

        Args:
            path: the ``.onnx`` file; above 2 GB the weights go into ``<name>.data`` beside it.
            data: where to take the batch from, as for a run; None: the last run's files if they are there, else made up.
            force: replace an existing file.
            adapters: the ``.onnx_adapter`` file for ONNX Runtime's adapter loading. The model then takes the adapters as
                inputs, zeros by default: without the file it is the model from before the training.
            raw: write the weights themselves, not their averages.
            rename: names in ``data`` -> names of inputs; of the last run's files its own.

        Raises:
            OrtcError: a file exists or cannot be written, or the losses differ; then no file is left.
        """
        self._check_intact()
        with contextlib.nullcontext() if raw else self.averaged():
            return self._export(Path(path), data, force, None if adapters is None else Path(adapters), rename)

    def _check_finite(self) -> None:
        """What a fused step has made is not looked at before it is kept."""
        self._check_intact()
        if not self._fused:
            return
        stages = [stage for worker in self._team.workers for stage in worker.stages.values()]
        held = [(name, a) for s in stages for name, a in s.values.items()]
        held += [(name, a) for s in stages for (name, _), a in s.states.items()]
        bad = [name for name, a in held if a.dtype.kind == "f" and not np.isfinite(a).all()]
        if bad:
            raise NotFiniteError(
                f"after step {self.step_number} {bad[0]!r} is not finite, and no checkpoint was written; go on from that of "
                f"step {self.progress.step} with a lower learning rate or a warm-up. Without --fuse-update such a step changes "
                "nothing, and what is not finite is told"
            )

    def _export(
        self, path: Path, data: str | Path | None, force: bool, adapters: Path | None, rename: Mapping[str, str] | None
    ) -> Exported:
        if data is None:
            data, rename = _still_there(self.progress.settings)
        fitted = self.inputs.fit(first_batch(data, self.inputs, rename) if data else synthetic_batch(self.inputs.ports))
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
            check_free(adapters, force)
        export_model(graph, self.folder, values, path, force=force, check=check)
        if adapters is not None:
            write_adapters(adapters, own)
        return Exported(path, self.step_number, losses[0], expected)

    def _take_lock(self) -> None:
        if self._lock is None and self._team.main:
            self._lock = lock_folder(self.folder)
            checkpoint.clean_up(self._checkpoints)


def _inputs(stage: Stage, phase: str) -> list[Port]:
    return stage.phases[phase].inputs if phase in stage.phases else []


def _still_there(settings: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The data of the last run, and its names; only files: a checkpoint shall not name code to run."""
    source, rename = settings.get("data"), settings.get("rename")
    there = isinstance(source, str) and "\0" not in source and Path(source).exists()
    return source if there else None, rename if isinstance(rename, dict) else {}


def _over(array: np.ndarray, scale: float) -> np.ndarray:
    """A copy, divided by the loss scale."""
    return array.copy() if scale == 1.0 else (array / scale).astype(array.dtype)


def _capital(sentence: str | None) -> str:
    return (sentence or "")[:1].upper() + (sentence or "")[1:]


def _tokens(plan: Plan, parts: Sequence[Part]) -> int | None:
    """The targets of the first loss that has several in a sample, without those that are ignored."""
    for loss in plan.losses:
        arrays = [part.batch[loss.labels] for part in parts if loss.labels in part.batch]
        if loss.classes and arrays and arrays[0].ndim > 1:
            return int(sum((a != loss.ignore_index).sum() for a in arrays))
    return None


def _damaged(parts: Sequence[Part]) -> str:
    """What of the data is not finite, which no loss scale mends; empty if all is."""
    arrays = [(name, a) for part in parts for name, a in part.batch.items() if a.dtype.kind == "f"]
    names = dict.fromkeys(name for name, a in arrays if not np.isfinite(a).all())
    return f"NaN or infinity, in {', '.join(map(repr, names))}" if names else ""


def _describe_not_finite(step: int, loss: float, bad: Sequence[str], parts: Sequence[Part], node: Sequence[str] | None) -> str:
    damaged = _damaged(parts)
    advice = "try a lower learning rate, a warm-up, or look at this batch"
    if damaged:
        advice = f"the batch itself holds {damaged}"
    shown = ", ".join(map(repr, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
    where = "" if node is None or damaged else f"; the first node that makes such a value is {node[0]!r} ({node[1]})"
    which = f"not finite are the gradients of {shown}" if bad else "all gradients are finite"
    return f"step {step}: the loss is {loss:g}; {which}{where}. The weights are those of step {step - 1}: {advice}"
