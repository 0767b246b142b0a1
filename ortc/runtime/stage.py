"""One stage: its parameters, buffers and optimizer states in memory, and the sessions that work on them.

Every array is numpy's own, aligned memory that ONNX Runtime reads and writes in place through IO binding: the train
phase writes gradients where the optimizer phase reads them, and the optimizer's outputs are bound to its inputs'
memory. With ``optimizer.fuse`` the train phase does both.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortc.errors import DataError, OrtcError, PlanError
from ortc.plan import AVERAGE, GraphFile, ParameterInfo, Plan, Port, Session
from ortc.plan import Stage as StagePlan
from ortc.runtime.batch import ALIGNMENT, Batch, aligned_zeros, key, numpy_type
from ortc.runtime.engine import Engine, Trace, end_trace
from ortc.runtime.onnx_file import Node, cut_at, nodes_of, with_outputs

if TYPE_CHECKING:
    import onnxruntime

StateKey = tuple[str, str]  # parameter, slot


def import_onnxruntime() -> Any:
    """ONNX Runtime, of whichever build is installed.

    Raises:
        OrtcError: if there is none, saying which to install.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OrtcError(
            f"this needs ONNX Runtime, which cannot be imported ({error}): install one with "
            "`pip install 'ortc[training]'` or `pip install 'ortc[stock]'`"
        ) from None
    return onnxruntime


DEFAULT_ENGINE = Engine()


def open_session(
    model: str | bytes,
    name: str,
    target: str,
    session: Session,
    threads: int | None = None,
    engine: Engine = DEFAULT_ENGINE,
) -> onnxruntime.InferenceSession:
    """Open a graph as the plan says.

    Args:
        model: path or bytes of the ONNX file.
        name: what to call it in an error.
        target: the plan's target.
        session: how it is opened.
        threads: of one operator; None for all cores.
        engine: what else the session is opened with, by the user's wish.

    Raises:
        OrtcError: if the installed build cannot open it.
    """
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    options.use_deterministic_compute = session.deterministic
    for entry, value in session.config_entries.items():
        options.add_session_config_entry(entry, value)
    options.enable_mem_reuse = options.enable_mem_pattern = session.reuse_memory
    if threads is not None:
        options.intra_op_num_threads = threads
    if hasattr(ort, "ExecutionOrder"):
        options.execution_order = getattr(ort.ExecutionOrder, session.execution_order.upper())
    engine.apply(options, re.sub(r"\W+", "-", name))
    providers = [(provider, dict(given)) for provider, given in engine.providers]
    try:
        return ort.InferenceSession(model, options, providers=providers, disabled_optimizers=session.disabled_optimizers)
    except Exception as error:
        hint = ""
        if target == "ort-training":
            hint = (
                "; it was compiled for the target ort-training: install that build with "
                "`pip install 'ortc[training]'`, or compile with --target onnxruntime"
            )
        raise OrtcError(f"ONNX Runtime {ort.__version__} cannot open {name}: {_first_line(error)}{hint}") from None


def read_graph(folder: Path, graph: GraphFile) -> bytes:
    """The bytes of a graph file, as they were compiled.

    Raises:
        PlanError: if the file is missing or was changed.
    """
    path = folder / graph.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}; compile the model again") from None
    if hashlib.sha256(data).hexdigest() != graph.sha256:
        raise PlanError(f"{path} is not the file that was compiled (its hash differs from the plan's); compile again")
    return data


Feed = Any  # an array, or an OrtValue that another session made


class Phase:
    """A session with its IO binding. Arrays are bound once; batches, and what passes between phases and stages, anew.

    Args:
        folder, graph: the output folder, and its graph.
        target, session, threads, engine: as for :func:`open_session`.
        fetch: values of the graph that are outputs too, in each run.
        part: the graph's inputs and outputs are a part of the file's: of the file run what makes those outputs.

    Attributes:
        bound: the arrays that outputs are written to, by the outputs' names.
    """

    def __init__(
        self,
        folder: Path,
        graph: GraphFile,
        target: str,
        session: Session,
        threads: int | None,
        engine: Engine = DEFAULT_ENGINE,
        fetch: Sequence[str] = (),
        part: bool = False,
    ) -> None:
        self.graph = graph
        model = with_outputs(read_graph(folder, graph), fetch)
        if part:
            model, _ = cut_at(model, [p.name for p in graph.outputs])
        self.session = open_session(model, str(folder / graph.file), target, session, threads, engine)
        self.binding = self.session.io_binding()
        self.loose = [p for p in graph.inputs if p.role in LOOSE]
        self._reads_data = any(p.role in ("data", "label", "output") for p in self.loose)
        self._free = [Port(name=name, role="output", dtype="", shape=None) for name in fetch]
        self.bound: dict[str, np.ndarray] = {}
        self._nothing = ort_value(np.zeros((), np.float32))

    def bind_input(self, port: Port, array: np.ndarray) -> None:
        """Let the session read the array's memory, in the port's shape; it must outlive the binding."""
        assert array.flags.c_contiguous  # otherwise ONNX Runtime would read a copy
        self.binding.bind_ortvalue_input(port.name, ort_value(_in_shape_of(port, array)))

    def bind_output(self, port: Port, array: np.ndarray) -> None:
        """Let the session write into the array's memory."""
        assert array.flags.c_contiguous
        self.bound[port.name] = array
        self.binding.bind_ortvalue_output(port.name, ort_value(_in_shape_of(port, array)))

    def leave_output(self, port: Port) -> None:
        """Let the session allocate the output in each run."""
        self._free.append(port)

    def run(self, feeds: Sequence[Feed] = ()) -> list[tuple[Port, Any]]:
        """Run with values for the loose inputs; returns the outputs that have no array of their own, as OrtValues.

        Raises:
            OrtcError: if ONNX Runtime fails; a DataError where the phase reads a batch.
        """
        for port, feed in zip(self.loose, feeds, strict=True):
            if isinstance(feed, np.ndarray):
                self.bind_input(port, feed)
            else:
                self.binding.bind_ortvalue_input(port.name, feed)
        for port in self._free:
            self.binding.bind_output(port.name, "cpu")
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:
            kind = DataError if self._reads_data else OrtcError
            raise kind(f"ONNX Runtime fails in {self.graph.file}: {_first_line(error)}") from None
        values = _owned(self.binding.get_outputs()[-len(self._free) :]) if self._free else []  # in the order of binding
        # A binding holds what it read and made, until something else is bound.
        for port in self.loose:
            self.binding.bind_ortvalue_input(port.name, self._nothing)
        for port in self._free:
            self.binding.bind_output(port.name, "cpu")
        return list(zip(self._free, values, strict=True))


_BFLOAT16 = 16  # in onnx.TensorProto
_DLPACK_TYPE, _DLPACK_BFLOAT = 20, 4  # where a DLTensor has its type's code, and bfloat16's


def ort_value(array: np.ndarray) -> Any:
    """An OrtValue over an array's memory, which must outlive it.

    NumPy's arrays of bfloat16 (`ml_dtypes`) are unknown to ONNX Runtime, they pass as integers. Before 1.20 it is told another
    type by DLPack alone (dlpack.h of dmlc/dlpack), where it is changed.
    """
    kind = import_onnxruntime().OrtValue
    if array.dtype.kind != "V":  # as which `ml_dtypes` has it
        return kind.ortvalue_from_numpy(array)
    bits = array.view(np.uint16)
    if hasattr(kind, "ortvalue_from_numpy_with_onnx_type"):
        return kind.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    capsule = bits.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + _DLPACK_TYPE).value = _DLPACK_BFLOAT
    return kind(state.OrtValue.from_dlpack(capsule, False))


def _in_shape_of(port: Port, array: np.ndarray) -> np.ndarray:
    """The same memory; an optimizer has a large parameter in rows that are no rows of its own."""
    shape = [d for d in port.shape or () if isinstance(d, int)]
    if len(shape) != len(port.shape or ()) or math.prod(shape) != array.size:
        return array
    return array.reshape(shape)


def _owned(values: Sequence[Any]) -> list[Any]:
    """OrtValues that stay what they are; those of a binding become the results of its next run (ONNX Runtime 1.19)."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    made = []
    for value in values:
        held = state.OrtValueVector()  # one for each: a vector keeps the memory of all that it holds
        held.push_back(value._ortvalue)
        made.append(type(value)(held[0]))
        made[-1].vector = held
    return made


def view(value: Any) -> np.ndarray:
    """An OrtValue's memory as an array, without a copy; the array keeps the value alive.

    Raises:
        OrtcError: if NumPy has no such element type.
    """
    kind = value.data_type().removeprefix("tensor(").removesuffix(")")
    name = {"float": "float32", "double": "float64"}.get(kind, kind)
    dtype, shape = numpy_type(name, "a value between stages"), value.shape()
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_char * size).from_address(value.data_ptr())
    memory.owner = value  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), dtype).reshape(shape)


# Roles of what is another value in each run; everything else has an array of its own.
LOOSE = frozenset({"data", "label", "output", "boundary", "boundary_gradient", "stash"})

BACKWARD = ("backward", "backward_input", "backward_weight")
TRAINING = ("train", "forward", *BACKWARD)
PREDICT = "predict"  # no phase of the plan: a part of its evaluation


@dataclass
class Part:
    """One micro-batch on its way through a stage.

    Attributes:
        index: its number in the step.
        batch: the arrays of the model's inputs.
        weights: what it counts in each term of the loss, by ``loss_weight.<term>``.
    """

    index: int
    batch: Batch
    weights: Mapping[str, float]


class Stage:
    """What one rank holds of one stage.

    Attributes:
        values: parameters and buffers by the model's names.
        own: the parameters that this replica updates: all that train, or its shard of them.
        states: optimizer states of those by (parameter, slot).
        from_parameters: which of them are the parameter's value where there is none yet; the others are zero.
        gradients: by parameter, of the micro-batches since :meth:`begin`.
        loss_scale: what the gradients are multiplied with, if the graphs ask for it.
        lr: the learning rate, if the training graph updates the parameters itself; then there are no gradients.
        trained, reduced: the memory of the trained values and of their gradients.
        input_gradients: of data inputs, by name and micro-batch.
        loss: summed over the micro-batches; 0 but on the last stage.
        predicting: what of the evaluation a prediction runs; None: nothing.
        fetch: names of values that each step keeps in ``fetched``, by name and micro-batch.
        buffers: the buffers as the micro-batches have changed them; :meth:`update` makes them the values.
        most_bytes: the most bytes of the stage's own tensors at once since it was set to 0, static ones too; None: not counted.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        stage: StagePlan,
        threads: int | None = None,
        replica: int = 0,
        engine: Engine = DEFAULT_ENGINE,
    ) -> None:
        self.folder, self.plan, self.stage, self.threads, self.engine = folder, plan, stage, threads, engine
        self.predicting: GraphFile | None = None
        self.fetch: frozenset[str] = frozenset()
        self.fetched: dict[str, dict[int, np.ndarray]] = {}
        infos = {p.name: p for p in plan.parameters}
        pipeline = plan.recipe.pipeline
        shards = [trained_of(stage, r) for r in range(pipeline.replicas)] if pipeline.zero else [trained_of(stage)]
        self.own = frozenset(shards[replica if pipeline.zero else 0])
        self.trained, values = _buckets([[infos[n] for n in shard] for shard in shards])
        self.reduced, gradients = _buckets([] if stage.fused else [[infos[n] for n in shard] for shard in shards])
        self.gradients = {n: gradients[n] for n in stage.parameters if n in gradients}
        fixed = [infos[n] for n in stage.parameters if n not in values]
        values.update({p.name: aligned_zeros(p.shape, numpy_type(p.dtype, p.name)) for p in fixed})
        self.values = {n: values[n] for n in stage.parameters}
        self._optimizer = stage.optimizer(replica)
        state_ports = [p for p in _inputs(stage, self._optimizer) if p.role == "state"]
        # Where the optimizer has a parameter in chunks, it has its states so too: in another shape.
        made = stage.phases[self._optimizer].outputs if self._optimizer in stage.phases else []
        chunked = {key(p): p.shape for p in made if p.role == "parameter"}
        self.states: dict[StateKey, np.ndarray] = {
            _state_key(p): _zeros(p).reshape(infos[key(p)].shape if p.shape == chunked[key(p)] else p.shape)  # type: ignore[arg-type]
            for p in state_ports
        }
        self.from_parameters = frozenset(_state_key(p) for p in state_ports if p.initial == "parameter")
        self.input_gradients: dict[str, dict[int, np.ndarray]] = {}
        self.loss = 0.0
        self.loss_scale = 1.0
        self.lr = 0.0
        self.most_bytes: int | None = None
        forward = stage.phases.get("train") or stage.phases.get("forward")
        changed = [key(p) for p in forward.outputs if p.role == "buffer"] if forward else []
        self.buffers = {name: self.values[name].copy() for name in changed}
        self._new_buffers: dict[str, np.ndarray] = {}
        self._scalars: dict[str, dict[str, np.ndarray]] = {}
        self._phases: dict[str, Phase] = {}
        self._losses: dict[str, np.ndarray] = {}
        # What a step must find at zero: of a single micro-batch the gradients are written whole, but for rows of tables; where
        # there are replicas, one may have no part of a batch.
        added = {key(p) for name in TRAINING for p in _inputs(stage, name) if p.role == "gradient"}
        all_added = pipeline.replicas > 1 or added.issuperset(self.gradients)
        some = [gradient for name, gradient in self.gradients.items() if name in added]
        self._zeroed = [bucket.memory for bucket in self.reduced] if all_added else some
        self._kept: dict[int, dict[str, Feed]] = {}
        read_later = [p for name in BACKWARD if name in stage.phases for p in stage.phases[name].inputs]
        self._keep = {key(p) for p in read_later if p.role in ("boundary", "stash")}
        self._keep_for_weights = {_kept_name(p) for p in _inputs(stage, "backward_weight")}

    # Training

    def begin(self) -> None:
        """Start a step: gradients and losses at zero, buffers as they are."""
        for memory in self._zeroed:
            memory[...] = 0
        self.input_gradients.clear()
        self.fetched.clear()
        self.loss = 0.0
        for name, array in self.buffers.items():
            array[...] = self.values[name]
        self._kept.clear()

    def forward(self, part: Part, arrived: Mapping[str, Feed], *, seed: int, step: int) -> dict[str, Any]:
        """Run the forward of a micro-batch (of a single stage, its backward as well).

        Args:
            part: the micro-batch.
            arrived: values of other stages, by name.
            seed, step: of the random numbers.

        Returns:
            Values for other stages, by name.
        """
        name = "train" if "train" in self.stage.phases else "forward"
        if name not in self.stage.phases:
            return {}
        kept = self._kept.setdefault(part.index, {k: v for k, v in arrived.items() if k in self._keep})
        made = self._run(name, part, {**kept, **arrived}, {}, seed=seed, step=step)
        self.loss += float(self._losses.get(name, 0.0))
        for buffer, new in self._new_buffers.items():
            self.buffers[buffer][...] = new
        leaving: dict[str, Any] = {}
        for port, value in made:
            if port.role == "gradient":
                self.input_gradients.setdefault(key(port), {})[part.index] = value.numpy()
            if port.role == "boundary":
                leaving[key(port)] = value
            if port.name in self._keep:
                kept[port.name] = value
        self._count([*arrived.values(), *leaving.values()])
        return leaving

    def backward(
        self, name: str, part: Part, arrived: Mapping[tuple[str, int], Feed], *, seed: int, step: int, last: bool
    ) -> dict[tuple[str, int], Any]:
        """Run a backward phase of a micro-batch.

        Args:
            name: ``backward``, ``backward_input`` or ``backward_weight``; nothing happens where the stage has none.
            part: the micro-batch.
            arrived: gradients from later stages, by the value's name and the stage.
            seed, step: as in its forward.
            last: nothing of this micro-batch is needed any more.

        Returns:
            Gradients for earlier stages, by the value's name and the stage that made it.
        """
        leaving: dict[tuple[str, int], Any] = {}
        kept = self._kept.setdefault(part.index, {})
        kept.update({f"{value} {stage}": gradient for (value, stage), gradient in arrived.items()})
        if name in self.stage.phases:
            for port, made in self._run(name, part, kept, kept, seed=seed, step=step):
                if port.role == "boundary_gradient":
                    leaving.update({(key(port), to): made for to in port.stages or []})
                elif port.role == "gradient":
                    self.input_gradients.setdefault(key(port), {})[part.index] = made.numpy()
                if port.name in self._keep:
                    kept[port.name] = made
        self._count([*arrived.values(), *leaving.values()])
        if last:
            self._kept.pop(part.index, None)
        elif name == "backward_input":
            self._kept[part.index] = {k: v for k, v in kept.items() if k in self._keep_for_weights}
        return leaving

    def _count(self, passing: Sequence[Feed]) -> None:
        """Note what the stage holds: weights, gradients, states, what is kept, and what has arrived or is about to leave.

        Memory that several of them share counts once.
        """
        if self.most_bytes is not None:
            kept = [v for values in self._kept.values() for v in values.values()]
            loose = [v if isinstance(v, np.ndarray) else view(v) for v in [*kept, *passing]]
            arrays = [*self.values.values(), *self.gradients.values(), *self.states.values(), *loose]
            self.most_bytes = max(self.most_bytes, sum({a.ctypes.data: a.nbytes for a in arrays}.values()))

    def kept_bytes(self, micro_batch: int) -> int:
        """Bytes that are held for the backward of a micro-batch."""
        kept = self._kept.get(micro_batch, {}).values()
        return sum((v if isinstance(v, np.ndarray) else view(v)).nbytes for v in kept)

    def update(self, *, lr: float, step: int, gradient_scale: float = 1.0) -> None:
        """The optimizer's step from ``gradients``, in place, unless the training graph has done it; then the new buffers."""
        if self._optimizer in self.stage.phases and not self.stage.fused:
            phase = self._phase(self._optimizer)
            self._set_scalars(self._optimizer, lr=lr, step=step, gradient_scale=gradient_scale)
            phase.run()
        for name, new in self.buffers.items():
            self.values[name][...] = new

    def swap_averages(self) -> None:
        """Exchange the parameters that this replica updates with their moving averages."""
        for (name, slot), average in self.states.items():
            if slot == AVERAGE:
                kept = self.values[name].copy()
                self.values[name][...] = average
                average[...] = kept

    # Evaluation

    def evaluate(self, part: Part, arrived: Mapping[str, Feed]) -> tuple[float, dict[str, np.ndarray], dict[str, Any]]:
        """The loss (0 but on the last stage), the model's outputs, and values for other stages, in inference form."""
        if "eval" not in self.stage.phases:
            return 0.0, {}, {}
        outputs, leaving = _outputs_and_leaving(self._run("eval", part, arrived, {}))
        return float(self._losses.get("eval", 0.0)), outputs, leaving

    def predict(self, part: Part, arrived: Mapping[str, Feed]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The model's outputs, and values for other stages, that ``predicting`` has."""
        if self.predicting is None:
            return {}, {}
        return _outputs_and_leaving(self._run(PREDICT, part, arrived, {}))

    def prepare_prediction(self, graph: GraphFile | None) -> None:
        """Predict with this part of the evaluation from now on."""
        if graph != self.predicting:
            self._phases.pop(PREDICT, None)
            self._scalars.pop(PREDICT, None)
        self.predicting = graph

    def fetchable(self) -> list[str]:
        """The values that training computes on this stage, by name, in order."""
        graphs = [self.stage.phases[name] for name in TRAINING if name in self.stage.phases]
        return list(dict.fromkeys(v for g in graphs for n in nodes_of(read_graph(self.folder, g)) for v in n.outputs))

    def first_not_finite(self, parts: Sequence[Part], *, seed: int, step: int) -> Node | None:
        """The first node of the graph that makes a value which is not finite, in a stage that is the whole model.

        The micro-batches run once more, with every value kept; gradients and buffers are as after :meth:`forward`. Where the
        training graph updates the parameters, what made the value is gone.
        """
        if "train" not in self.stage.phases or self.stage.fused:
            return None
        graph = self.stage.phases["train"]
        nodes = nodes_of(read_graph(self.folder, graph))
        outputs = {p.name for p in graph.outputs}
        every = [name for node in nodes for name in node.outputs if name not in outputs]
        session = self.plan.sessions.training
        phase = Phase(self.folder, graph, self.plan.target, session, self.threads, self.engine, every)
        self._bind("train", phase)
        self.begin()
        for part in parts:
            made = {p.name: value for p, value in self._run("train", part, {}, {}, phase, seed=seed, step=step)}
            for node in nodes:
                if any(not _all_finite(phase.bound.get(name), made.get(name)) for name in node.outputs):
                    return node
            for buffer, new in self._new_buffers.items():
                self.buffers[buffer][...] = new
        return None

    def traces(self, rank: int) -> list[Trace]:
        """Stop ONNX Runtime's profiles of the sessions, and what they recorded."""
        name = f"stage {self.stage.index} "
        return [end_trace(phase.session, rank, name + phase_name) for phase_name, phase in self._phases.items()]

    def close(self) -> None:
        """Release the sessions."""
        self._phases.clear()
        self._kept.clear()

    def _run(
        self,
        name: str,
        part: Part,
        values: Mapping[str, Feed],
        gradients: Mapping[str, Feed],
        phase: Phase | None = None,
        **scalars: int,
    ) -> list[tuple[Port, Any]]:
        phase = phase or self._phase(name)
        self._set_scalars(name, **scalars, micro_batch=part.index, loss_scale=self.loss_scale, lr=self.lr, **part.weights)
        feeds = []
        for port in phase.loose:
            if port.role in ("boundary", "stash"):
                feeds.append(values[key(port)])
            elif port.role == "boundary_gradient":
                feeds.append(gradients[_kept_name(port)])
            else:
                feeds.append(part.batch[key(port)])
        made = phase.run(feeds)
        if self.fetch and name in TRAINING:
            arrays = {p.name: value.numpy() for p, value in made if p.name in self.fetch}
            arrays.update({n: array.copy() for n, array in phase.bound.items() if n in self.fetch})
            for value_name, array in arrays.items():
                self.fetched.setdefault(value_name, {})[part.index] = array
        return made

    def _phase(self, name: str) -> Phase:
        """A phase, opened and bound when it is first needed."""
        if name not in self._phases:
            graph = self.predicting if name == PREDICT else self.stage.phases.get(name)
            if graph is None:
                raise OrtcError(f"{self.folder} has no {name} phase")
            fetch: list[str] = []
            if self.fetch and name in TRAINING:
                outputs = {p.name for p in graph.outputs}
                made = (v for node in nodes_of(read_graph(self.folder, graph)) for v in node.outputs)
                fetch = [v for v in made if v in self.fetch and v not in outputs]
            session = self.plan.sessions.training if name in TRAINING else self.plan.sessions.others
            phase = Phase(self.folder, graph, self.plan.target, session, self.threads, self.engine, fetch, name == PREDICT)
            self._bind(name, phase)
            self._phases[name] = phase
        return self._phases[name]

    def _bind(self, name: str, phase: Phase) -> None:
        scalars = self._scalars.setdefault(name, {})
        for port in phase.graph.inputs:
            if port.role == "buffer" and name in ("train", "forward") and key(port) in self.buffers:
                phase.bind_input(port, self.buffers[key(port)])
            elif port.role in ("parameter", "buffer"):
                phase.bind_input(port, self.values[key(port)])
            elif port.role == "state":
                phase.bind_input(port, self.states[_state_key(port)])
            elif port.role == "gradient":
                phase.bind_input(port, self.gradients[key(port)])
            elif port.role == "scalar":
                phase.bind_input(port, scalars.setdefault(key(port), _zeros(port)))
        for port in phase.graph.outputs:
            array = self._output(port, name)
            if array is None:
                phase.leave_output(port)
            else:
                phase.bind_output(port, array)

    def _output(self, port: Port, phase: str) -> np.ndarray | None:
        """The memory that an output is written to; None where its size depends on the batch."""
        if port.role == "loss":
            return self._losses.setdefault(phase, _zeros(port))
        if port.role == "parameter":
            return self.values[key(port)]
        if port.role == "state":
            return self.states[_state_key(port)]
        if port.role == "buffer" and phase in ("train", "forward"):
            return self._new_buffers.setdefault(key(port), _zeros(port))
        if port.role == "gradient":
            return self.gradients.get(key(port))
        return None

    def _set_scalars(self, phase: str, **values: float) -> None:
        for name, array in self._scalars[phase].items():
            if name not in values:
                raise PlanError(f"{self._phase(phase).graph.file} wants the scalar {name!r}, which this runtime does not know")
            array[...] = values[name]


def _outputs_and_leaving(made: Sequence[tuple[Port, Any]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Of what an evaluation made, the model's outputs and the values for other stages."""
    outputs = {key(p): v.numpy() for p, v in made if p.role != "boundary"}
    return outputs, {key(p): v for p, v in made if p.role == "boundary"}


def square_norm(gradient: np.ndarray) -> float:
    """The square of a gradient's Euclidean norm; not finite if an element is not."""
    flat = _flat(gradient)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
        if not np.isfinite(total):  # float32 sums overflow from 1e19 on
            total = float(np.sum(np.square(gradient, dtype=np.float64)))
    return total


def peer(port: Port) -> int:
    """The stage at the other end of a boundary that has one."""
    if not port.stages:
        raise PlanError(f"the plan gives no stage for the boundary {port.name!r}; compile the model again")
    return port.stages[0]


def _kept_name(port: Port) -> str:
    """What a value is called among those that a micro-batch keeps: of a gradient, the value and where it was read."""
    return f"{key(port)} {peer(port)}" if port.role == "boundary_gradient" else key(port)


def trained_of(stage: StagePlan, replica: int | None = None) -> list[str]:
    """The parameters that train; of a replica, those that it updates."""
    if stage.fused:
        return [key(p) for p in stage.phases["train"].outputs if p.role == "parameter"]
    graphs = [graph for name, graph in stage.phases.items() if replica is None or name == stage.optimizer(replica)]
    names = dict.fromkeys(key(p) for g in graphs for p in (*g.inputs, *g.outputs) if p.role == "gradient")
    held = set(stage.parameters)  # others are gradients of data inputs
    return [name for name in names if name in held]


def _inputs(stage: StagePlan, phase: str) -> list[Port]:
    return stage.phases[phase].inputs if phase in stage.phases else []


@dataclass(frozen=True)
class Bucket:
    """Arrays of one type side by side, so that ranks exchange them at once.

    Attributes:
        memory: flat; each array starts aligned, and what lies between is zero.
        sizes: elements of the shards, which follow one another.
    """

    memory: np.ndarray
    sizes: list[int]


def _buckets(shards: Sequence[Sequence[ParameterInfo]]) -> tuple[list[Bucket], dict[str, np.ndarray]]:
    """A bucket for each type, and every parameter's array in it by name, all zeros."""
    buckets: list[Bucket] = []
    arrays: dict[str, np.ndarray] = {}
    for text, name in {p.dtype: p.name for shard in shards for p in shard}.items():
        dtype = numpy_type(text, name)
        step = ALIGNMENT // dtype.itemsize
        rows = [[(p, math.prod(p.shape)) for p in shard if p.dtype == text] for shard in shards]
        sizes = [sum(-(-count // step) * step for _, count in row) for row in rows]
        memory = aligned_zeros([sum(sizes)], dtype)
        start = 0
        for info, count in (pair for row in rows for pair in row):
            arrays[info.name] = memory[start : start + count].reshape(info.shape)
            start += -(-count // step) * step
        buckets.append(Bucket(memory, sizes))
    return buckets, arrays


def _state_key(port: Port) -> StateKey:
    if port.slot is None:
        raise PlanError(f"the plan gives no slot for the state {port.name!r}; compile the model again")
    return key(port), port.slot


def _zeros(port: Port) -> np.ndarray:
    if port.shape is None or not all(isinstance(d, int) for d in port.shape):
        raise PlanError(f"the plan gives no fixed shape for {port.name!r} but {port.shape}; compile the model again")
    return aligned_zeros([d for d in port.shape if isinstance(d, int)], numpy_type(port.dtype, port.name))


def _all_finite(bound: np.ndarray | None, made: Any) -> bool:
    """Whether a value is, in the memory that it was written to or as an OrtValue; what is no float tensor is."""
    if bound is None and (made is None or not made.is_tensor() or "float" not in made.data_type()):
        return True
    array = view(made) if bound is None else bound
    return array.dtype.kind in "biu" or bool(np.isfinite(array).all())


def _flat(array: np.ndarray) -> np.ndarray:
    """One dimension, in a type that sums well."""
    return array.reshape(-1) if array.dtype.itemsize >= 4 else array.reshape(-1).astype(np.float32)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
