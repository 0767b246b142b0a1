"""Division by a norm or a spread, and pooling by p-norms."""

from __future__ import annotations

import numpy as np

from ortc.passes.gradients.convolution import fit, window
from ortc.rules import Unsupported, gradient

_X = np.random.default_rng(5).standard_normal((2, 3, 4)) + np.array([0.5, -0.5, 0.5, -0.5])
_IMAGE = np.random.default_rng(6).standard_normal((2, 4, 3, 2))


def _direction(op, x, p):
    """sign X · |X|^(p-1), the direction in which a p-norm grows."""
    if p == 1:
        return op.Sign(x)
    return x if p == 2 else x * op.Pow(op.Abs(x), op.const(p - 2, like=x))


def _over_power(op, g, norm, p):
    """g / norm^(p-1); 0 where the norm is 0."""
    if p == 1:
        return g
    power = norm if p == 2 else op.Pow(norm, op.const(p - 1, like=norm))
    return op.where(op.Equal(norm, op.const(0, like=norm)), 0, g / power, like=g)


@gradient("LpNormalization", samples=({"input": _X}, {"input": _X, "axis": 1, "p": 1}, {"input": _X, "axis": 0}))
def lp_normalization(op, input, output, doutput, *, axis=-1, p=2):
    """Y = X/n, n the norm:  dX = (dY - D·Σ dY·Y)/n, D = Y for the 2-norm, sign X for the 1-norm; 0 where n = 0"""
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(input, [axis], keepdims=1)
    along = op.ReduceSum(doutput * output, [axis], keepdims=1)
    g = doutput - (op.Sign(input) if p == 1 else output) * along
    return op.where(op.Equal(norm, op.const(0, like=norm)), 0, g / norm, like=g)


@gradient("MeanVarianceNormalization", samples=({"X": _IMAGE}, {"X": _X, "axes": [0, 2]}, {"X": _X, "axes": [-1]}))
def mean_variance_normalization(op, X, Y, dY, *, axes=(0, 2, 3)):
    """Y = (X - μ)/(σ + 10⁻⁹):  dX = (dY - mean dY - Y·mean(dY·Y))/(σ + 10⁻⁹)"""
    centred = X - op.ReduceMean(X, axes, keepdims=1)
    deviation = op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1)) + 1e-9
    mean, along = (op.ReduceMean(v, axes, keepdims=1) for v in (dY, dY * Y))
    return (dY - mean - Y * along) / deviation


@gradient(
    "LRN", samples=({"X": _IMAGE, "size": 3, "alpha": 0.7}, {"X": _IMAGE, "size": 5, "alpha": 0.5, "beta": 0.6, "bias": 2.0})
)
def lrn(op, X, Y, dY, *, size, alpha=1e-4, beta=0.75, bias=1.0):
    """b = bias + α·mean X² over the neighbours, Y = X·b^-β:  dX = dY·b^-β - 2αβ·X·mean(dY·Y/b) over those it is one of

    (Krizhevsky et al., 2012, 3.3; the neighbours are ``size`` channels, those beyond the edge are 0.)
    """
    before = (size - 1) // 2
    shape = op.vector(op.dim(X, 0), 1, op.dim(X, 1), op.dim(X, *range(2, op.rank(X))))

    def mean(x, begin, end):
        pool = {"kernel_shape": [size, 1], "pads": [begin, 0, end, 0], "count_include_pad": 1}
        return op.reshape_like(op.AveragePool(op.Reshape(x, shape, allowzero=1), **pool), X)

    b = float(alpha) * mean(X * X, before, size - 1 - before) + float(bias)
    back = mean(dY * Y / b, size - 1 - before, before)
    return dY * op.Pow(b, op.const(-beta, like=X)) - 2 * alpha * beta * (X * back)


@gradient("GlobalLpPool", samples=({"X": _IMAGE}, {"X": _X, "p": 1}, {"X": _X, "p": 3}))
def global_lp_pool(op, X, Y, dY, *, p=2):
    """Y = (Σ |X|^p)^(1/p):  dX = dY·sign X·(|X|/Y)^(p-1); 0 where Y = 0"""
    return _direction(op, X, p) * _over_power(op, dY, Y, p)


@gradient(
    "LpPool",
    samples=(
        {"X": (2, 3, 6), "kernel_shape": [2], "strides": [2]},
        {"X": (2, 2, 5, 6), "kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "p": 3},
        {"X": (1, 2, 6, 5), "kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 1], "p": 1},
        {"X": (1, 2, 5, 5), "kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "_static": True},
    ),
)
def lp_pool(op, X, Y, dY, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, p=2, pads=None, strides=None):
    """As GlobalLpPool, the windows' dY/Y^(p-1) added up: a transposed convolution with ones"""
    if auto_pad.startswith("SAME") and any(d != 1 for d in dilations or []):
        raise Unsupported(f"auto_pad={auto_pad} with dilations, which ONNX Runtime pads wrongly")
    if auto_pad.startswith("SAME") and any(k < s for k, s in zip(kernel_shape, strides or [], strict=False)):
        raise Unsupported(f"auto_pad={auto_pad} with a stride beyond the window, for which ONNX Runtime cuts the image")
    pads, strides, dilations = window(op, X, kernel_shape, auto_pad, pads, strides, dilations)
    n, spatial = len(kernel_shape), range(2, op.rank(X))
    one_channel = op.vector(op.dim(Y, 0, 1), 1, *(op.dim(Y, a) for a in spatial))
    g = op.Reshape(_over_power(op, dY, Y, p), one_channel, allowzero=1)
    ones = op.const(np.ones((1, 1, *kernel_shape)), like=X)
    whole = op.ConvTranspose(g, ones, strides=strides, dilations=dilations, pads=[*pads[:n], *[0] * n])
    fitted = fit(op, whole, X, [max(s - 1, 0) for s in strides])
    return _direction(op, X, p) * op.reshape_like(fitted, X)
