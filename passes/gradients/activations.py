"""Activations and the softmax family.

Where a gradient passes or stops, it is multiplied with the condition as a number: ONNX Runtime's Where takes seven times as
long (6.4 M elements, two threads, 1.19.2: 26 against 3.6 ms; the training kernel ReluGrad 26 ms).
"""

from __future__ import annotations

import math

import numpy as np

from ortc.rules import Unsupported, gradient

_POINTS = np.array([[-2.6, -0.4, 0.3], [0.9, 1.7, -1.2]])
_X = ({"X": _POINTS},)
_AXES = ({"input": (2, 3, 4)}, {"input": (2, 3, 4), "axis": 1}, {"input": (3,), "axis": 0})


@gradient("Relu", samples=_X)
def relu(op, Y, dY):
    """dX = dY where Y > 0, else 0 (0 at the kink)"""
    return dY * op.cast(op.Greater(Y, op.const(0, like=Y)), dY)


@gradient("LeakyRelu", samples=(*_X, {"X": _POINTS, "alpha": 0.2}))
def leaky_relu(op, X, dY, *, alpha=0.01):
    """dX = dY where X > 0, else α·dY"""
    positive = op.cast(op.Greater(X, op.const(0, like=X)), dY)
    return dY * (float(alpha) + (1 - float(alpha)) * positive)


@gradient("PRelu", samples=({"X": _POINTS, "slope": (3,)}, {"X": (2, 3, 4), "slope": (3, 1)}))
def prelu(op, X, slope, dY):
    """dX = dY where X > 0, else slope·dY; dslope = X·dY where X <= 0"""
    positive = op.Greater(X, op.const(0, like=X))
    return op.where(positive, dY, slope * dY, like=dY), op.where(positive, 0, X * dY, like=dY)


@gradient("Sigmoid", samples=_X)
def sigmoid(op, Y, dY):
    """dX = dY · Y · (1 - Y)"""
    return dY * (Y * (1 - Y))


@gradient("HardSigmoid", samples=({"X": _POINTS}, {"X": _POINTS, "alpha": 0.3, "beta": 0.4}))
def hard_sigmoid(op, X, dY, *, alpha=0.2, beta=0.5):
    """Y = clip(αX + β, 0, 1):  dX = α·dY strictly inside, else 0"""
    line = float(alpha) * X + float(beta)
    inside = op.And(op.Greater(line, op.const(0, like=X)), op.Less(line, op.const(1, like=X)))
    return op.where(inside, float(alpha) * dY, 0, like=dY)


@gradient("HardSwish", samples=({"X": np.array([[-3.5, -2.0, 0.3], [0.9, 2.5, 4.0]])},))
def hard_swish(op, X, dY):
    """Y = X·clip(X/6 + 1/2, 0, 1):  dX = dY · (0 for X <= -3, 1 for X >= 3, else X/3 + 1/2)"""
    slope = op.where(op.GreaterOrEqual(X, op.const(3, like=X)), 1, X * (1 / 3) + 0.5, like=X)
    return dY * op.where(op.LessOrEqual(X, op.const(-3, like=X)), 0, slope, like=X)


@gradient("Tanh", samples=({"input": (2, 3)},))
def tanh(op, output, doutput):
    """dX = dY · (1 - Y²)"""
    return doutput * (1 - output * output)


@gradient("Elu", samples=(*_X, {"X": _POINTS, "alpha": 1.7}))
def elu(op, X, dY, *, alpha=1.0):
    """dX = dY for X > 0, else dY · α·exp X"""
    return dY * op.where(op.Greater(X, op.const(0, like=X)), 1, float(alpha) * op.Exp(X), like=X)


@gradient("Celu", samples=(*_X, {"X": _POINTS, "alpha": 1.7}))
def celu(op, X, dY, *, alpha=1.0):
    """dX = dY for X > 0, else dY · exp(X/α)"""
    return dY * op.where(op.Greater(X, op.const(0, like=X)), 1, op.Exp(X * (1 / float(alpha))), like=X)


@gradient("Selu", samples=_X)
def selu(op, X, dY, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    """dX = γ·dY for X > 0, else dY · γ·α·exp X"""
    negative = float(gamma) * float(alpha) * op.Exp(X)
    return dY * op.where(op.Greater(X, op.const(0, like=X)), float(gamma), negative, like=X)


@gradient("ThresholdedRelu", samples=(*_X, {"X": _POINTS, "alpha": 0.5}))
def thresholded_relu(op, X, dY, *, alpha=1.0):
    """dX = dY where X > α, else 0"""
    return op.where(op.Greater(X, op.const(float(alpha), like=X)), dY, 0, like=dY)


@gradient("Shrink", samples=({"input": _POINTS, "lambd": 0.7, "bias": 0.1},))
def shrink(op, input, doutput, *, bias=0.0, lambd=0.5):
    """dX = dY where |X| > λ, else 0"""
    return op.where(op.Greater(op.Abs(input), op.const(float(lambd), like=input)), doutput, 0, like=doutput)


@gradient("Softplus", samples=_X)
def softplus(op, X, dY):
    """dX = dY · sigmoid X"""
    return dY * op.Sigmoid(X)


@gradient("Softsign", samples=({"input": _POINTS},))
def softsign(op, input, doutput):
    """dX = dY / (1 + |X|)²"""
    denominator = 1 + op.Abs(input)
    return doutput / (denominator * denominator)


@gradient("Mish", samples=_X)
def mish(op, X, dY):
    """Y = X·tanh(softplus X), t the tanh:  dX = dY · (t + X·(1 - t²)·sigmoid X)"""
    t = op.Tanh(op.Softplus(X))
    return dY * (t + X * ((1 - t * t) * op.Sigmoid(X)))


@gradient("Gelu", samples=(*_X, {"X": _POINTS, "approximate": "tanh"}))
def gelu(op, X, dY, *, approximate="none"):
    """Hendrycks & Gimpel, arXiv 1606.08415.

    Exact, Φ and φ the normal's:  dX = dY · (Φ(X) + X·φ(X))
    tanh, u = √(2/π)·(X + 0.044715·X³), t = tanh u:  dX = dY · ½·(1 + t + X·(1 - t²)·u')
    """
    if approximate == "none":
        cumulative = 0.5 * (1 + op.Erf(X * math.sqrt(0.5)))
        density = op.Exp(-0.5 * (X * X)) * (1 / math.sqrt(2 * math.pi))
        return dY * (cumulative + X * density)
    if approximate == "tanh":
        root, cubic = math.sqrt(2 / math.pi), 0.044715
        square = X * X
        t = op.Tanh(root * (X * (1 + cubic * square)))
        slope = root * (1 + 3 * cubic * square)
        return dY * (0.5 * ((1 + t) + X * ((1 - t * t) * slope)))
    raise Unsupported(f"approximate={approximate!r}")


@gradient("Softmax", samples=_AXES)
def softmax(op, output, doutput, *, axis=-1):
    """dX = Y · (dY - Σ dY·Y) along the axis; 0 in a row that is masked throughout, if the model replaces its NaN"""
    if _is_replaced(output):
        output = op.where(op.IsNaN(output), 0, output, like=output)
    weighted = doutput * output
    return weighted - output * op.ReduceSum(weighted, [axis], keepdims=1)


def _is_replaced(value):
    """Whether the model puts something else in places of a value, as it does for NaN."""
    readers = [use.node for use in value.uses()]
    casts = [n.outputs[0] for n in readers if n.op_type in ("Cast", "CastLike")]
    return any(n.op_type in ("IsNaN", "Where") for n in readers) or any(map(_is_replaced, casts))


@gradient("LogSoftmax", samples=_AXES)
def log_softmax(op, output, doutput, *, axis=-1):
    """dX = dY - exp(Y) · Σ dY along the axis"""
    return doutput - op.Exp(output) * op.ReduceSum(doutput, [axis], keepdims=1)
