"""Checks a batch against the plan before anything runs with it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from ortc.errors import DataError, OrtcError
from ortc.plan import LossInfo, Port
from ortc.runtime.messages import tell

Batch = dict[str, np.ndarray]

# ONNX Runtime's kernels vectorise from the first aligned element, so sums depend on where an array starts. All memory
# that a session reads starts at a multiple of this many bytes: otherwise two runs would differ in the last bit.
ALIGNMENT = 64


def key(port: Port) -> str:
    """The name under which people know what a port holds."""
    return port.of or port.name


def numpy_type(text: str, name: str) -> np.dtype:
    """The element type that the plan gives for ``name``.

    Raises:
        OrtcError: if NumPy has no such type.
    """
    try:
        if text == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError, ImportError):
        raise OrtcError(f"{name!r} has type {text}, which this runtime cannot hold yet") from None
    if dtype.kind not in "biufc":
        raise OrtcError(f"{name!r} has type {text}, which is none of numbers")
    return dtype


def aligned_zeros(shape: Sequence[int], dtype: np.dtype | str) -> np.ndarray:
    """Zeros in aligned memory, contiguous."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """The array itself if it is contiguous and aligned, else a copy that is."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


class BatchCheck:
    """Fits batches to a plan's data and label inputs.

    Args:
        ports: the inputs with role data or label, of all phases; equal keys describe the same array.
        losses: the plan's losses, for the range of class indices.
        known: other arrays that data may well hold.
    """

    def __init__(self, ports: Iterable[Port], losses: Sequence[LossInfo], known: Iterable[str] = ()) -> None:
        ports = sorted(ports, key=lambda p: p.role != "data")  # sizes are those of the data; labels follow
        self.ports = {key(p): p for p in ports}
        self.losses = [loss for loss in losses if loss.labels and loss.classes]
        self._ignored: set[str] = set(known)

    def fit(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """The arrays of the inputs, in the types and the memory layout that the graphs want.

        Raises:
            DataError: an array is missing, or has the wrong type, shape or class indices.
        """
        self.check_names(batch)
        sizes: dict[str, tuple[int, str]] = {}
        fitted: Batch = {}
        for name, port in self.ports.items():
            array = np.asarray(batch[name])
            _check_shape(name, array, port, sizes)
            fitted[name] = aligned(_cast(name, array, numpy_type(port.dtype, name)))
        for loss in self.losses:
            if loss.labels in fitted:
                _check_classes(fitted[loss.labels], loss)
        return fitted

    def samples(self, batch: Batch) -> int:
        """The number of samples: the size of the first data input's first dimension."""
        for name, port in self.ports.items():
            if port.role == "data" and batch[name].ndim:
                return batch[name].shape[0]
        return 1

    def fixed_batch_size(self) -> int | None:
        """The batch size that the model is fixed to, if it is."""
        sizes = {p.shape[0] for p in self.ports.values() if p.role == "data" and p.shape}
        return next(iter(sizes)) if len(sizes) == 1 and all(isinstance(s, int) for s in sizes) else None  # type: ignore[return-value]

    def check_names(self, names: Iterable[str]) -> None:
        """Every input must be among the names; others are told once.

        Raises:
            DataError: naming the first input that is missing.
        """
        names = list(names)
        for name, port in self.ports.items():
            if name not in names:
                what = "the input" if port.role == "data" else "the labels"
                raise DataError(f"the data lacks {what} {name!r}; it has {_listed(names)}")
        extra = [name for name in names if name not in self.ports and name not in self._ignored]
        if extra:
            self._ignored.update(extra)
            tell(f"warning: the model does not read {_listed(extra)} of the data")


def dimension(text: str, sizes: Mapping[str, int]) -> int | None:
    """The size of a symbolic dimension: a known name, or sums and products of such; None if it is open."""
    if text in sizes or text.isidentifier():
        return sizes.get(text)
    try:
        return _arithmetic(_parsed(text), sizes)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _arithmetic(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_arithmetic(node.left, sizes), _arithmetic(node.right, sizes))
    return sizes[ast.unparse(node)]


def synthetic_batch(ports: Mapping[str, Port], batch: int = 2, other: int = 16) -> Batch:
    """A made-up batch that fits the inputs: normal floats from a fixed seed, ones as integers (ids, masks), class 0.

    Args:
        ports: the inputs, data before labels.
        batch: size of symbolic first dimensions.
        other: size of other symbolic dimensions.
    """
    random = np.random.Generator(np.random.Philox(0))
    sizes: dict[str, int] = {}
    made: Batch = {}
    for name, port in ports.items():
        shape = []
        for axis, want in enumerate(port.shape or ()):
            size = want if isinstance(want, int) else dimension(want, sizes) if want else None
            shape.append((batch if axis == 0 else other) if size is None else size)
            if isinstance(want, str):
                sizes.setdefault(want, shape[-1])
        dtype = numpy_type(port.dtype, name)
        if dtype.kind == "f":
            made[name] = random.standard_normal(shape).astype(dtype)
        else:
            made[name] = np.full(shape, port.role == "data", dtype)
    return made


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


def _check_shape(name: str, array: np.ndarray, port: Port, sizes: dict[str, tuple[int, str]]) -> None:
    wrong = None if port.shape is None else _misfit(name, array.shape, port.shape, sizes)
    if wrong is not None:
        wants = f"[{', '.join('?' if d is None else str(d) for d in port.shape or ())}]"
        raise DataError(f"{name!r} has shape {list(array.shape)}, the model wants {wants}: {wrong}")
    if array.size == 0:
        raise DataError(f"{name!r} has shape {list(array.shape)}: it is empty")


def _misfit(
    name: str, shape: Sequence[int], wanted: Sequence[int | str | None], sizes: dict[str, tuple[int, str]]
) -> str | None:
    """What is wrong with a shape; the sizes that it gives to names are noted, with where they come from."""
    if len(shape) != len(wanted):
        return f"{len(wanted)} dimensions"
    for axis, (size, want) in enumerate(zip(shape, wanted, strict=True)):
        if isinstance(want, int) and size != want:
            hint = "; if that is the batch, use --batch-size and --drop-last" if axis == 0 else ""
            return f"dimension {axis} must be {want}{hint}"
        if isinstance(want, str):
            computed = None if want in sizes else dimension(want, {symbol: known for symbol, (known, _) in sizes.items()})
            known, source = sizes.setdefault(want, (size if computed is None else computed, name))
            if size != known:
                return f"{want!r} is {known} in {source!r}"
    return None


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Wider and narrower types of the same kind are converted; an integer that does not fit is an error."""
    if array.dtype == dtype:
        return array
    kinds = ({"f"}, {"i", "u"})
    if not any(array.dtype.kind in kind and dtype.kind in kind for kind in kinds):
        raise DataError(f"{name!r} has type {array.dtype}, the model wants {dtype}: convert it with .astype({str(dtype)!r})")
    if dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
        limits = np.iinfo(dtype)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise DataError(f"{name!r} has type {array.dtype} with values beyond {dtype}, which the model wants")
    return array.astype(dtype)


def _check_classes(labels: np.ndarray, loss: LossInfo) -> None:
    assert loss.classes is not None
    if labels.dtype.kind not in "iu" or (labels.min() >= 0 and labels.max() < loss.classes):
        return
    wrong = (labels < 0) | (labels >= loss.classes)
    if loss.ignore_index is not None:
        wrong &= labels != loss.ignore_index
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        but = "" if loss.ignore_index is None else f" (or {loss.ignore_index}, which is ignored)"
        raise DataError(
            f"{loss.labels!r} holds class {int(labels[where])} at {list(where)}; the loss {loss.name} of output "
            f"{loss.output!r} has {loss.classes} classes: labels must be 0 to {loss.classes - 1}{but}"
        )
