"""Operators that read or write at indices.

Where indices may repeat, gradients are added up with ScatterElements: ONNX Runtime's ScatterND adds from several
threads at once and loses some of them.
"""

from __future__ import annotations

import numpy as np

from ortc.rules import Unsupported, gradient

_ONE_OF_ALL = ("none", "add", "mul", "max", "min")


def add_at(op, x, axes, indices, gradient):
    """Zeros like ``x`` to which slices of the gradient are added.

    Args:
        x: seen as [before, size, after], where ``size`` runs over the neighbouring ``axes``.
        axes: these axes, in order; at least one.
        indices: [before or 1, n, 1], int64 in (-size, size).
        gradient: [before, n, after] in any shape.
    """
    if 0 in op.dims(x):  # ONNX Runtime 1.19.2 drops an Expand to a constant shape with a 0
        return op.zeros_like(x)
    before, after = [op.dim(x, *range(axes[0]))] if axes[0] else [], op.dim(x, *range(axes[-1] + 1, op.rank(x)))
    n = op.dim(indices, 1)
    if not before:  # rows of a table: it keeps its shape
        indices = op.Reshape(indices, op.vector(n, 1), allowzero=1)
    spread = op.vector(*before, n, after)
    zeros = op.zeros(op.vector(*before, op.dim(x, *axes), after), like=gradient)
    updates = op.Reshape(gradient, spread, allowzero=1)
    places = op.Expand(indices, spread)
    return op.reshape_like(op.ScatterElements(zeros, places, updates, axis=len(before), reduction="add"), x)


@gradient(
    "Gather",
    wrt="data",
    samples=(
        {"data": (5, 3), "indices": np.array([[0, -1], [2, 0]])},
        {"data": (2, 5, 3, 2), "indices": np.array([1, 1, -2], np.int32), "axis": 1},
        {"data": (2, 5), "indices": np.array(-2), "axis": -1},
        {"data": (2, 5), "indices": np.array([1])},
        {"data": (2, 5), "indices": np.array([1, 0, 1]), "axis": 1, "_inputs": "indices"},
        {"data": (2, 5), "indices": np.array(1), "_inputs": "indices"},
        {"data": (2, 5), "indices": np.zeros(0, np.int64)},
        {"data": (2, 0), "indices": np.array([0, 1, 0])},
    ),
)
def gather(op, data, indices, doutput, *, axis=0):
    """dY added at the indices; between zeros if there is only one and it is known"""
    [axis] = op.axes(data, axis)
    known = op.constant(indices)
    if known is not None and known.size == 1 and known.ndim < 2:
        size, index = op.dim(data, axis), int(known.reshape(()))
        if isinstance(size, int):
            before, after = index % size, size - 1 - index % size
        elif index >= 0:
            before, after = index, op.Add(size, [-1 - index])
        else:
            before, after = op.Add(size, [index]), -1 - index
        kept = doutput if known.ndim else op.Unsqueeze(doutput, [axis])
        return op.pad(kept, op.vector(before, after), [axis], like=data)
    return add_at(op, data, [axis], op.Reshape(indices, op.vector(1, _count(op, indices), 1), allowzero=1), doutput)


def _count(op, x):
    """The number of elements, an int or an int64 vector of one number."""
    return op.dim(x, *range(op.rank(x)))


@gradient(
    "GatherElements",
    wrt="data",
    samples=(
        {"data": (3, 4), "indices": np.array([[0, -1, 2, 2], [0, 0, 1, 1]])},
        {"data": (3, 4), "indices": np.array([[3, 3], [0, -1]]), "axis": 1},
    ),
)
def gather_elements(op, data, indices, doutput, *, axis=0):
    """dY added at the indices"""
    return op.ScatterElements(op.zeros_like(data), indices, doutput, axis=axis, reduction="add", _like=data)


@gradient(
    "GatherND",
    wrt="data",
    samples=(
        {"data": (3, 4, 2), "indices": np.array([[0, -1], [2, 2], [0, 3]])},
        {"data": (3, 4, 2), "indices": np.array([[[1], [0]], [[1], [-1]]])},
        {"data": (2, 3, 4), "indices": np.array([[[1], [1]], [[0], [-1]]]), "batch_dims": 1},
        {"data": (2, 3, 4, 2), "indices": np.array([[[[1]], [[1]], [[3]]], [[[0]], [[-1]], [[0]]]]), "batch_dims": 2},
        {"data": (2, 3), "indices": np.array([[0, 2], [0, 2]]), "_inputs": "indices"},
    ),
)
def gather_nd(op, data, indices, doutput, *, batch_dims=0):
    """dY added at the indices, their last axis taken as digits of one number"""
    depth = op.rank(data) + op.rank(indices) - 1 - batch_dims - op.rank(doutput)
    axes = list(range(batch_dims, batch_dims + depth))
    number = None
    for position, axis in enumerate(axes):
        size = op.dim(data, axis)
        digit = op.Gather(indices, op.const(position), axis=-1)
        digit = op.Where(op.Less(digit, 0), op.Add(digit, size), digit)
        number = digit if number is None else op.Add(op.Mul(number, size), digit)
    batch = op.dim(data, *range(batch_dims))
    per_batch = op.dim(indices, *range(batch_dims, op.rank(indices) - 1))
    return add_at(op, data, axes, op.Reshape(number, op.vector(batch, per_batch, 1), allowzero=1), doutput)


def _scattered(op, data, updates, output, gradient, reduction, put, take):
    """Gradients of data and updates, given how to ``put`` (base, updates, reduction) and to ``take`` at the indices.

    Products and extremes follow PyTorch's scatter_reduce: exact with zeros among the factors; ties share equally.
    """
    if reduction == "none":
        return put(gradient, op.zeros_like(updates), "none"), take(gradient)
    if reduction == "add":
        return gradient, take(gradient)
    if reduction == "mul":
        zero = op.Equal(updates, op.const(0, like=updates))
        zeros, factors = op.cast(zero, updates), op.where(zero, 1, updates, like=updates)
        product, count = put(data, factors, "mul"), put(op.zeros_like(data), zeros, "add")
        others = op.where(op.Equal(take(count), zeros), take(product) / factors, 0, like=updates)
        return gradient * put(op.ones_like(data), updates, "mul"), take(gradient) * others
    if reduction in ("max", "min"):
        kept, chosen = (op.cast(op.Equal(x, y), x) for x, y in ((data, output), (updates, take(output))))
        share = gradient / put(kept, chosen, "add")
        return share * kept, take(share) * chosen
    raise Unsupported(f"reduction={reduction!r}")


_ROWS = np.array([[0, 2, 1], [0, 1, 1]])
_FACTORS = np.array([[0.5, 0.0, 1.5], [-2.0, 0.7, 0.0]])


@gradient(
    "ScatterElements",
    wrt="data updates",
    samples=(
        {"data": (3, 4), "indices": np.array([[0, -1], [2, 3]]), "updates": (2, 2), "axis": 1},
        *({"data": (3, 3), "indices": _ROWS, "updates": (2, 3), "reduction": how} for how in _ONE_OF_ALL[1:]),
        {"data": (3, 3), "indices": np.array([[0, 2, 1], [1, 1, 1]]), "updates": _FACTORS, "reduction": "mul"},
    ),
)
def scatter_elements(op, data, indices, updates, output, doutput, *, axis=0, reduction="none"):
    """none: dX = dY with zeros at the indices, dU = dY there. add: dX = dY. mul, max, min: see ``_scattered``"""
    return _scattered(
        *(op, data, updates, output, doutput, reduction),
        lambda base, put, how: op.ScatterElements(base, indices, put, axis=axis, reduction=_unless_none(how), _like=data),
        lambda x: op.GatherElements(x, indices, axis=axis, _like=updates),
    )


@gradient(
    "ScatterND",
    wrt="data updates",
    samples=(
        {"data": (3, 4), "indices": np.array([[0, -1], [2, 3]]), "updates": (2,)},
        {"data": (3, 4), "indices": np.array([[2], [0]]), "updates": (2, 4)},
        *({"data": (3, 2), "indices": np.array([[0], [0]]), "updates": (2, 2), "reduction": r} for r in _ONE_OF_ALL[1:]),
    ),
)
def scatter_nd(op, data, indices, updates, output, doutput, *, reduction="none"):
    """As ScatterElements"""
    return _scattered(
        *(op, data, updates, output, doutput, reduction),
        lambda base, put, how: op.ScatterND(base, indices, put, reduction=_unless_none(how), _like=data),
        lambda x: op.GatherND(x, indices, _like=updates),
    )


def _unless_none(reduction):
    return None if reduction == "none" else reduction


_TOP = np.array([[3.0, 1.0, 2.0, -1.0], [0.5, 4.0, -2.0, 1.0]])


@gradient(
    "TopK",
    wrt="X",
    samples=(
        {"X": _TOP, "K": np.array([2]), "_outputs": 2},
        {"X": _TOP, "K": np.array([1]), "axis": 0, "largest": 0, "_outputs": 2},
    ),
)
def top_k(op, X, Indices, dValues, *, axis=-1):
    """dY at the chosen places among zeros"""
    return op.ScatterElements(op.zeros_like(X), Indices, dValues, axis=axis, _like=X)


@gradient(
    "Compress",
    wrt="input",
    samples=(
        {"input": (3, 4), "condition": np.array([True, False, True]), "axis": 0},
        {"input": (3, 4), "condition": np.array([False, True, True]), "axis": -1},
        {"input": (3, 2), "condition": np.array([False, True, False, True, True])},
    ),
)
def compress(op, input, condition, doutput, *, axis=None):
    """dY at the places where the condition holds"""
    places = op.Reshape(op.NonZero(condition), [1, -1, 1])
    return add_at(op, input, op.axes(input, axis), places, doutput)


@gradient(
    "CumSum",
    wrt="x",
    samples=tuple(
        {"x": (3, 4), "axis": np.array(axis), "exclusive": exclusive, "reverse": reverse}
        for axis, exclusive, reverse in ((0, 0, 0), (-1, 1, 0), (1, 0, 1), (0, 1, 1))
    ),
)
def cum_sum(op, x, axis, dy, *, exclusive=0, reverse=0):
    """The sum of dY from the other end"""
    return op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse, _like=x)


@gradient(
    "OneHot",
    wrt="values",
    samples=(
        {"indices": np.array([0, -1, 5]), "depth": np.array(3), "values": (2,)},
        {"indices": np.array([[0, 2], [1, 1]]), "depth": np.array(3), "values": (2,), "axis": 1},
    ),
)
def one_hot(op, indices, depth, values, doutput, *, axis=-1):
    """Y = off + hot·(on - off):  d on = Σ dY·hot, d off = Σ dY - d on"""
    hot = op.OneHot(indices, depth, op.Cast(op.const([0, 1]), to=int(values.dtype)), axis=axis)
    on, whole = (op.Reshape(op.ReduceSum(x, keepdims=0), [1]) for x in (doutput * hot, doutput))
    return op.Concat(whole - on, on, axis=0, _like=values)
