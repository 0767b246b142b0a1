"""Pooling."""

from __future__ import annotations

import numpy as np

from ortc.passes.gradients.convolution import fit, window
from ortc.rules import gradient

_MAX = (
    {"X": (2, 3, 6), "kernel_shape": [2], "strides": [2]},
    {"X": (2, 2, 5, 6), "kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
    {"X": (1, 2, 5, 5), "kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
    {"X": (1, 2, 4, 4, 4), "kernel_shape": [2, 2, 2], "strides": [2, 2, 2]},
    {"X": (1, 2, 5, 6), "kernel_shape": [2, 2], "strides": [2, 2], "storage_order": 1},
)


@gradient("MaxPool", samples=_MAX)
def max_pool(
    op,
    X,
    Indices,
    dY,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    pads=None,
    storage_order=0,
    strides=None,
):
    """dY goes to the element that was the largest, the first of equals; overlapping windows add up"""
    if storage_order:  # Indices go down the columns: again along the rows
        place = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads, "strides": strides}
        _, Indices = op.MaxPool(X, _outputs=2, kernel_shape=kernel_shape, **place)
    zeros = op.Reshape(op.zeros_like(X), [-1])
    scattered = op.ScatterElements(zeros, op.Reshape(Indices, [-1]), op.Reshape(dY, [-1]), axis=0, reduction="add")
    return op.reshape_like(scattered, X)


_AVERAGE = (
    {"X": (2, 3, 6), "kernel_shape": [2], "strides": [2]},
    {"X": (2, 2, 5, 6), "kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
    {"X": (2, 2, 5, 6), "kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    {"X": (1, 2, 5, 5), "kernel_shape": [2, 2], "strides": [2, 2]},
    {"X": (1, 1, 4, 4, 4), "kernel_shape": [2, 2, 2], "strides": [2, 2, 2]},
    {"X": (1, 2, 6, 5), "kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 0, 1], "ceil_mode": 1},
    {"X": (1, 2, 6, 5), "kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1, "count_include_pad": 1},
)


@gradient("AveragePool", samples=_AVERAGE)
def average_pool(
    op, X, Y, dY, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, pads=None, strides=None
):
    """Each element of a window gets dY / n, n the elements that were counted: a transposed convolution with ones"""
    n = len(kernel_shape)
    pads, strides, dilations = window(op, X, kernel_shape, auto_pad, pads, strides, dilations)
    spatial = list(range(2, op.rank(X)))
    # With ceil_mode the last windows reach up to a stride less one beyond the pads: too many windows are counted, then cut.
    beyond = [s - 1 if ceil_mode else 0 for s in strides]
    ones = op.const(np.ones((1, 1, *kernel_shape)), like=X)
    counted = op.Expand(op.const(np.ones([1] * (n + 2)), like=X), op.vector(1, 1, *(op.dim(X, a) for a in spatial)))
    reach = [*pads[:n], *(p + b for p, b in zip(pads[n:], beyond, strict=True))]
    if count_include_pad:
        counted = op.pad(counted, pads, spatial, op.const(1, like=X))
        reach = [*[0] * n, *beyond]
    counts = op.Conv(counted, ones, strides=strides, dilations=dilations, pads=reach)
    if ceil_mode:
        counts = op.Slice(counts, [0] * n, op.vector(*(op.dim(Y, a) for a in spatial)), spatial)
    share = op.Reshape(dY / counts, op.vector(-1, 1, *(op.dim(Y, a) for a in spatial)))
    whole = op.ConvTranspose(share, ones, strides=strides, dilations=dilations, pads=[*pads[:n], *[0] * n])
    like = op.Reshape(X, op.vector(-1, 1, *(op.dim(X, a) for a in spatial)))
    return op.reshape_like(fit(op, whole, like, [s - 1 for s in strides]), X)


@gradient("GlobalAveragePool", samples=({"X": (2, 3, 4, 5)},))
def global_average_pool(op, X, dY):
    """dX = dY / n, broadcast"""
    return op.expand_like(dY / op.size(X, range(2, op.rank(X))), X)


@gradient("GlobalMaxPool", samples=({"X": (2, 3, 4, 5)},))
def global_max_pool(op, X, Y, dY):
    """dY goes to the largest; ties share it equally (as PyTorch's amax)"""
    hits = op.cast(op.Equal(X, Y), X)
    return hits * (dY / op.ReduceSum(hits, list(range(2, op.rank(X))), keepdims=1))
