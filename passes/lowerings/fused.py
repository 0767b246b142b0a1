"""ortc's own operators, which fusions make, in those of the standard."""

from __future__ import annotations

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
