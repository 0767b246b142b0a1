"""Reductions. ``axes`` is an input (opset 18); with keepdims=0 the reduced axes are put back before broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortc.rules import gradient, no_gradient

no_gradient("ArgMax", "ArgMin")

_POSITIVE = np.abs(np.random.default_rng(7).standard_normal((2, 3, 4))) + 0.2
_CASES: tuple[dict[str, Any], ...] = (
    {},
    {"axes": np.array([1])},
    {"axes": np.array([0, -1]), "keepdims": 0},
    {"keepdims": 0},
)
_SAMPLES = tuple({"data": (2, 3, 4), **case} for case in _CASES)
_POSITIVES = tuple({"data": _POSITIVE, **case} for case in _CASES)


def _spread(op, value, data, axes, keepdims, noop):
    """A reduced value with its reduced axes put back as ones, so that it broadcasts against ``data``."""
    if keepdims or (axes is None and noop):
        return value
    if axes is None:
        return op.Reshape(value, [1] * op.rank(data))
    return op.Unsqueeze(value, axes)


def _count(op, data, axes, noop):
    """How many elements were reduced to one."""
    known = op.constant(axes)
    if axes is None or known is not None:
        along = [] if axes is None and noop else op.axes(data, known)
        return op.size(data, along)
    return op.cast(op.ReduceProd(op.Gather(op.shape(data), axes), keepdims=0), data)


_NOTHING = {"data": (2, 3, 4), "axes": np.array([], np.int64), "noop_with_empty_axes": 1}


@gradient("ReduceSum", wrt="data", samples=(*_SAMPLES, _NOTHING))
def reduce_sum(op, data, axes, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY, broadcast"""
    return op.expand_like(_spread(op, dreduced, data, axes, keepdims, noop_with_empty_axes), data)


@gradient("ReduceMean", wrt="data", samples=_SAMPLES)
def reduce_mean(op, data, axes, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY / n, broadcast"""
    share = dreduced / _count(op, data, axes, noop_with_empty_axes)
    return op.expand_like(_spread(op, share, data, axes, keepdims, noop_with_empty_axes), data)


@gradient("ReduceSumSquare", wrt="data", samples=_SAMPLES)
def reduce_sum_square(op, data, axes, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY · 2X"""
    return _spread(op, dreduced, data, axes, keepdims, noop_with_empty_axes) * (2 * data)


@gradient("ReduceL1", wrt="data", samples=_POSITIVES)
def reduce_l1(op, data, axes, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY · sign X; 0 at 0"""
    return _spread(op, dreduced, data, axes, keepdims, noop_with_empty_axes) * op.Sign(data)


@gradient("ReduceL2", wrt="data", samples=_SAMPLES)
def reduce_l2(op, data, axes, reduced, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY · X / Y; 0 where the norm is 0 (as PyTorch)"""
    zero = op.Equal(reduced, op.const(0, like=data))
    ratio = op.where(zero, 0, dreduced / op.where(zero, 1, reduced, like=data), like=data)
    return _spread(op, ratio, data, axes, keepdims, noop_with_empty_axes) * data


@gradient("ReduceLogSum", wrt="data", samples=_POSITIVES)
def reduce_log_sum(op, data, axes, reduced, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """Y = ln Σ X:  dX = dY / Σ X = dY · exp(-Y)"""
    share = dreduced * op.Exp(-reduced)
    return op.expand_like(_spread(op, share, data, axes, keepdims, noop_with_empty_axes), data)


@gradient("ReduceLogSumExp", wrt="data", samples=_SAMPLES)
def reduce_log_sum_exp(op, data, axes, reduced, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY · exp(X - Y)"""
    total = _spread(op, reduced, data, axes, keepdims, noop_with_empty_axes)
    return _spread(op, dreduced, data, axes, keepdims, noop_with_empty_axes) * op.Exp(data - total)


@gradient("ReduceMax", "ReduceMin", wrt="data", samples=(*_SAMPLES, {"data": np.array([[1.0, 3.0], [0.5, 2.0]])}))
def reduce_extreme(op, data, axes, reduced, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dY goes to the extreme element; ties share it equally (as PyTorch's amax)"""
    extreme = _spread(op, reduced, data, axes, keepdims, noop_with_empty_axes)
    hits = op.cast(op.Equal(data, extreme), data)
    if noop_with_empty_axes and axes is None:
        return dreduced
    ties = op.ReduceSum(hits, axes, keepdims=1)
    return hits * (_spread(op, dreduced, data, axes, keepdims, noop_with_empty_axes) / ties)


_ZEROS = np.array([[0.0, 2.0, -1.5], [0.0, 3.0, 0.0]])


@gradient("ReduceProd", wrt="data", samples=(*_SAMPLES, {"data": _ZEROS, "axes": np.array([1])}))
def reduce_prod(op, data, axes, dreduced, *, keepdims=1, noop_with_empty_axes=0):
    """dX = dY · the product of the others, exact also where some are 0"""
    if noop_with_empty_axes and axes is None:
        return dreduced
    zero = op.Equal(data, op.const(0, like=data))
    zeros, factors = op.cast(zero, data), op.where(zero, 1, data, like=data)
    product, count = op.ReduceProd(factors, axes, keepdims=1), op.ReduceSum(zeros, axes, keepdims=1)
    others = op.where(op.Equal(count, zeros), product / factors, 0, like=data)
    return _spread(op, dreduced, data, axes, keepdims, noop_with_empty_axes) * others
