"""One stage: its parameters, buffers and optimizer states in memory, and the sessions that work on them.

Every array is numpy's own, aligned memory that ONNX Runtime reads and writes in place through IO binding: the train
phase writes gradients where the optimizer phase reads them, and the optimizer's outputs are bound to its inputs'
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortc.errors import DataError, OrtcError, PlanError
from ortc.plan import GraphFile, Plan, Port
from ortc.plan import Stage as StagePlan
from ortc.runtime.batch import Batch, aligned_zeros, key, numpy_type

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


_DISABLED = ["CommonSubexpressionElimination", "NoopElimination"]


def open_session(model: str | bytes, name: str, target: str, threads: int | None = None) -> onnxruntime.InferenceSession:
    """Open a graph with the options that training needs.

    The compiler decides the order of the nodes, and recomputed values must not be merged back into the originals. The search
    for factors that are 1 reads beyond constants with a size of 0 (ONNX Runtime 1.19.2): it gives wrong shapes, or crashes.

    Args:
        model: path or bytes of the ONNX file.
        name: what to call it in an error.
        target: the plan's target.
        threads: of one operator; None for all cores.

    Raises:
        OrtcError: if the installed build cannot open it.
    """
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    options.use_deterministic_compute = True
    # Quantised products would be computed in integers, some of which saturate: what trains is to see what it trains for.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if hasattr(ort, "ExecutionOrder"):
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=_DISABLED)
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


class Phase:
    """A session with its IO binding. Arrays are bound once; only batches and outputs of unknown size are bound anew."""

    def __init__(self, folder: Path, graph: GraphFile, target: str, threads: int | None) -> None:
        self.graph = graph
        self.session = open_session(read_graph(folder, graph), str(folder / graph.file), target, threads)
        self.binding = self.session.io_binding()
        self._value = import_onnxruntime().OrtValue.ortvalue_from_numpy
        self._data = [p for p in graph.inputs if p.role in ("data", "label", "output")]
        self._free: list[Port] = []

    def bind_input(self, port: Port, array: np.ndarray) -> None:
        """Let the session read the array's memory; it must outlive the binding."""
        assert array.flags.c_contiguous  # otherwise ONNX Runtime would read a copy
        self.binding.bind_ortvalue_input(port.name, self._value(array))

    def bind_output(self, port: Port, array: np.ndarray) -> None:
        """Let the session write into the array's memory."""
        assert array.flags.c_contiguous
        self.binding.bind_ortvalue_output(port.name, self._value(array))

    def leave_output(self, port: Port) -> None:
        """Let the session allocate the output in each run."""
        self._free.append(port)

    def run(self, batch: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Run; returns the outputs that have no array of their own, by their port's key.

        Raises:
            OrtcError: if ONNX Runtime fails; a DataError where the phase reads a batch.
        """
        for port in self._data:
            assert batch is not None
            self.bind_input(port, batch[key(port)])
        for port in self._free:
            self.binding.bind_output(port.name, "cpu")
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:
            kind = DataError if self._data else OrtcError
            raise kind(f"ONNX Runtime fails in {self.graph.file}: {_first_line(error)}") from None
        if not self._free:
            return {}
        values = self.binding.get_outputs()[-len(self._free) :]  # in the order of binding
        return {key(port): value.numpy() for port, value in zip(self._free, values, strict=True)}


class Stage:
    """What one rank holds.

    Attributes:
        values: parameters and buffers by the model's names.
        states: optimizer states by (parameter, slot).
        gradients: by parameter, as the last train phase left them.
    """

    def __init__(self, folder: Path, plan: Plan, stage: StagePlan, threads: int | None = None) -> None:
        self.folder, self.plan, self.stage, self.threads = folder, plan, stage, threads
        infos = {p.name: p for p in plan.parameters}
        self.values = {n: aligned_zeros(infos[n].shape, numpy_type(infos[n].dtype, n)) for n in stage.parameters}
        optimizer = stage.phases.get("optimizer")
        state_ports = [p for p in optimizer.inputs if p.role == "state"] if optimizer else []
        self.states: dict[StateKey, np.ndarray] = {_state_key(p): _zeros(p) for p in state_ports}
        self.gradients: dict[str, np.ndarray] = {}
        self.new_buffers: dict[str, np.ndarray] = {}
        self._scalars: dict[str, dict[str, np.ndarray]] = {}
        self._phases: dict[str, Phase] = {}
        self._losses: dict[str, np.ndarray] = {}

    def train(self, batch: Batch, *, seed: int, step: int, micro_batch: int = 0) -> tuple[float, dict[str, np.ndarray]]:
        """Forward and backward. Nothing changes but ``gradients`` and ``new_buffers``.

        Returns:
            The loss, and the gradients of data inputs by name.
        """
        phase = self._phase("train")
        self._set_scalars("train", seed=seed, step=step, micro_batch=micro_batch)
        free = phase.run(batch)
        return float(self._losses["train"]), free

    def update(self, *, lr: float, step: int) -> None:
        """The optimizer's step from ``gradients``, in place, then the new buffers."""
        phase = self._phase("optimizer")
        self._set_scalars("optimizer", lr=lr, step=step)
        phase.run()
        for name, new in self.new_buffers.items():
            self.values[name][...] = new

    def evaluate(self, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and the model's outputs in inference form."""
        outputs = self._phase("eval").run(batch)
        return float(self._losses["eval"]), outputs

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients together; not finite if one of them is not."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = sum(float(np.dot(g, g)) for g in (_flat(g) for g in self.gradients.values()))
            if not np.isfinite(total):  # float32 sums overflow from 1e19 on
                total = sum(float(np.sum(np.square(g, dtype=np.float64))) for g in self.gradients.values())
        return float(np.sqrt(total))

    def close(self) -> None:
        """Release the sessions."""
        self._phases.clear()

    def _phase(self, name: str) -> Phase:
        """A phase, opened and bound when it is first needed."""
        if name not in self._phases:
            if name not in self.stage.phases:
                raise OrtcError(f"{self.folder} has no {name} phase: none of the model's parameters trains")
            phase = Phase(self.folder, self.stage.phases[name], self.plan.target, self.threads)
            self._bind(name, phase)
            self._phases[name] = phase
        return self._phases[name]

    def _bind(self, name: str, phase: Phase) -> None:
        scalars = self._scalars.setdefault(name, {})
        for port in phase.graph.inputs:
            if port.role in ("parameter", "buffer"):
                phase.bind_input(port, self.values[key(port)])
            elif port.role == "state":
                phase.bind_input(port, self.states[_state_key(port)])
            elif port.role == "gradient":
                phase.bind_input(port, self._gradient(port))
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
        if port.role == "buffer" and phase == "train":
            return self.new_buffers.setdefault(key(port), _zeros(port))
        if port.role == "gradient" and key(port) in self.values:
            return self._gradient(port)
        return None

    def _gradient(self, port: Port) -> np.ndarray:
        name = key(port)
        if name not in self.gradients:
            self.gradients[name] = aligned_zeros(self.values[name].shape, self.values[name].dtype)
        return self.gradients[name]

    def _set_scalars(self, phase: str, **values: float) -> None:
        for name, array in self._scalars[phase].items():
            if name not in values:
                raise PlanError(f"{self.stage.phases[phase].file} wants the scalar {name!r}, which this runtime does not know")
            array[...] = values[name]


def _state_key(port: Port) -> StateKey:
    if port.slot is None:
        raise PlanError(f"the plan gives no slot for the state {port.name!r}; compile the model again")
    return key(port), port.slot


def _zeros(port: Port) -> np.ndarray:
    if port.shape is None or not all(isinstance(d, int) for d in port.shape):
        raise PlanError(f"the plan gives no fixed shape for {port.name!r} but {port.shape}; compile the model again")
    return aligned_zeros([d for d in port.shape if isinstance(d, int)], numpy_type(port.dtype, port.name))


def _flat(array: np.ndarray) -> np.ndarray:
    """One dimension, in a type that sums well."""
    return array.reshape(-1) if array.dtype.itemsize >= 4 else array.reshape(-1).astype(np.float32)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
