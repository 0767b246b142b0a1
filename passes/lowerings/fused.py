"""ortc's own operators, which fusions make, in those of the standard; training kernels of activations likewise."""

from __future__ import annotations

import math

from ortc.rules import lowering


@lowering("ortc::Swish")
def swish(op, X, *, alpha=1.0):
    """Y = X·sigmoid(αX)"""
    return (X * op.Sigmoid(X if alpha == 1 else X * float(alpha)),)


@lowering("ortc::BiasGelu")
def bias_gelu(op, A, B, *, approximate="none"):
    """Y = gelu(A + B)"""
    return (op.Gelu(A + B, approximate=None if approximate == "none" else approximate),)


@lowering("ortc::RMSNormalization")
def rms_normalization(op, X, scale, *, axis=-1, epsilon=1e-5):
    """Y = X/√(mean X² + ε)·scale over the axes from ``axis`` on; also 1/√…"""
    axes = list(range(axis % op.rank(X), op.rank(X)))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(X * X, axes, keepdims=1) + float(epsilon)))
    return X * inverse * scale, inverse


@lowering("ortc::SoftmaxDropout")
def softmax_dropout(op, X, mask, *, axis=-1):
    """Y = softmax(X)·mask; also the softmax"""
    weights = op.Softmax(X, axis=axis)
    return weights * mask, weights


@lowering("ortc::Attend")
def attend(op, scores, V, mask=None, *, guarded=0):
    """Y = (P·mask)·V, P = softmax(scores); also P, and P·mask. With ``guarded`` P is 0 in a row that is hidden throughout."""
    weights = op.Softmax(scores, axis=-1)
    if guarded:
        weights = op.where(op.IsNaN(weights), 0, weights, like=weights)
    dropped = weights if mask is None else weights * mask
    return op.MatMul(dropped, V), weights, dropped


@lowering("com.microsoft::GeluGrad")
def gelu_grad(op, dY, X):
    """dX = dY·(Φ(X) + X·φ(X)), Φ and φ the normal's"""
    cumulative = 0.5 * (1 + op.Erf(X * math.sqrt(0.5)))
    density = op.Exp(-0.5 * (X * X)) * (1 / math.sqrt(2 * math.pi))
    return (dY * (cumulative + X * density),)


@lowering("com.microsoft::FastGeluGrad")
def fast_gelu_grad(op, dY, X):
    """u = √(2/π)·(X + 0.044715·X³), t = tanh u:  dX = dY·½·(1 + t + X·(1 - t²)·u')"""
    root, cubic = math.sqrt(2 / math.pi), 0.044715
    square = X * X
    t = op.Tanh(root * (X * (1 + cubic * square)))
    slope = root * (1 + 3 * cubic * square)
    return (dY * (0.5 * ((1 + t) + X * ((1 - t * t) * slope))),)
