"""Element-wise operators: arithmetic, powers, trigonometry, rounding, comparison, selection.

Derivatives are the textbook ones (Abramowitz & Stegun, 3.3, 4.2-4.6, 7.1). At ties and kinks PyTorch's convention
holds and each rule says which.
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from ortc.rules import gradient, no_gradient

_X = ({"X": (2, 3)},)
_INPUT = ({"input": (2, 3)},)
_BINARY = ({"A": (2, 3), "B": (2, 3)}, {"A": (2, 3), "B": (3,)}, {"A": (2, 1), "B": (4, 1, 3)}, {"A": (), "B": (2, 3)})
_POSITIVE = np.array([[0.3, 0.9, 2.0], [0.1, 1.5, 4.0]])
_BETWEEN = np.array([[0.3, 0.9, -2.2], [0.1, 1.7, 4.4]])
_UNIT = np.array([[-0.9, -0.3, 0.1], [0.2, 0.5, 0.8]])

no_gradient(
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift"),
)


@gradient("Identity", samples=_INPUT)
def identity(op, doutput):
    """dX = dY"""
    return doutput


@gradient("Neg", samples=_X)
def neg(op, dY):
    """dX = -dY"""
    return -dY


@gradient("Add", samples=_BINARY)
def add(op, dC):
    """dA = dC, dB = dC"""
    return dC, dC


@gradient("Sub", samples=_BINARY)
def sub(op, dC):
    """dA = dC, dB = -dC"""
    return dC, -dC


@gradient("Mul", samples=_BINARY)
def mul(op, A, B, dC):
    """dA = dC · B, dB = dC · A"""
    return dC * B, dC * A


@gradient("Div", samples=({"A": (2, 3), "B": _POSITIVE}, {"A": (2, 1), "B": _POSITIVE}))
def div(op, B, C, dC):
    """dA = dC / B, dB = -dC · C / B"""
    dA = dC / B
    return dA, -(dA * C)


@gradient("Sum", samples=({"data_0": [(2, 3), (3,), (2, 1)]},))
def sum_(op, data_0, dsum):
    """Each addend gets dY."""
    return [dsum for _ in data_0]


@gradient("Mean", samples=({"data_0": [(2, 3), (3,), (2, 1)]},))
def mean(op, data_0, dmean):
    """Each of n addends gets dY / n."""
    share = dmean / float(len(data_0))
    return [share for _ in data_0]


@gradient(
    "Pow",
    samples=(
        {"X": _POSITIVE, "Y": (3,)},
        {"X": (2, 3), "Y": np.array(2.0), "_constants": "Y"},
        {"X": _POSITIVE, "Y": np.array(-0.5), "_constants": "Y"},
    ),
)
def pow_(op, X, Y, Z, dZ):
    """dX = dZ · Y · X^(Y-1), dY = dZ · Z · ln X, where 0 for X = 0 (as PyTorch)"""
    exponent = op.constant(Y)
    if exponent is not None and exponent.size == 1:
        return dZ * _power_slope(op, X, float(exponent.reshape(()))), None
    y = op.cast(Y, X)
    dX = dZ * op.where(op.Equal(y, op.const(0, like=X)), 0, y * op.Pow(X, y - 1), like=X)
    if not op.is_float(Y):
        return dX, None
    log = op.where(op.Greater(X, op.const(0, like=X)), op.Log(X), 0, like=X)
    return dX, op.cast(dZ * Z * log, Y)


def _power_slope(op, X, y):
    """d(X^y)/dX for a number y, without a power where a product does."""
    if y == 2:
        return 2 * X
    if y == 3:
        return 3 * (X * X)
    return y * op.Pow(X, op.const(y - 1, like=X))


@gradient("Abs", samples=({"X": np.array([[-1.0, 2.0], [0.5, -0.3]])},))
def abs_(op, X, dY):
    """dX = dY · sign X; 0 at 0"""
    return dY * op.Sign(X)


@gradient("Exp", samples=_INPUT)
def exp(op, output, doutput):
    """dX = dY · Y"""
    return doutput * output


@gradient("Log", samples=({"input": _POSITIVE},))
def log(op, input, doutput):
    """dX = dY / X"""
    return doutput / input


@gradient("Sqrt", samples=({"X": _POSITIVE},))
def sqrt(op, Y, dY):
    """dX = dY / (2 Y)"""
    return dY / (2 * Y)


@gradient("Reciprocal", samples=({"X": _POSITIVE},))
def reciprocal(op, Y, dY):
    """dX = -dY · Y²"""
    return -(dY * (Y * Y))


@gradient("Sin", samples=_INPUT)
def sin(op, input, doutput):
    """dX = dY · cos X"""
    return doutput * op.Cos(input)


@gradient("Cos", samples=_INPUT)
def cos(op, input, doutput):
    """dX = -dY · sin X"""
    return -(doutput * op.Sin(input))


@gradient("Tan", samples=({"input": _UNIT},))
def tan(op, output, doutput):
    """dX = dY · (1 + Y²)"""
    return doutput * (1 + output * output)


@gradient("Asin", samples=({"input": _UNIT},))
def asin(op, input, doutput):
    """dX = dY / √(1 - X²)"""
    return doutput / op.Sqrt(1 - input * input)


@gradient("Acos", samples=({"input": _UNIT},))
def acos(op, input, doutput):
    """dX = -dY / √(1 - X²)"""
    return -(doutput / op.Sqrt(1 - input * input))


@gradient("Atan", samples=_INPUT)
def atan(op, input, doutput):
    """dX = dY / (1 + X²)"""
    return doutput / (1 + input * input)


@gradient("Sinh", samples=_INPUT)
def sinh(op, input, doutput):
    """dX = dY · cosh X"""
    return doutput * op.Cosh(input)


@gradient("Cosh", samples=_INPUT)
def cosh(op, input, doutput):
    """dX = dY · sinh X"""
    return doutput * op.Sinh(input)


@gradient("Asinh", samples=_INPUT)
def asinh(op, input, doutput):
    """dX = dY / √(X² + 1)"""
    return doutput / op.Sqrt(input * input + 1)


@gradient("Acosh", samples=({"input": _POSITIVE + 1.1},))
def acosh(op, input, doutput):
    """dX = dY / √(X² - 1)"""
    return doutput / op.Sqrt(input * input - 1)


@gradient("Atanh", samples=({"input": _UNIT},))
def atanh(op, input, doutput):
    """dX = dY / (1 - X²)"""
    return doutput / (1 - input * input)


@gradient("Erf", samples=_INPUT)
def erf(op, input, doutput):
    """dX = dY · 2/√π · exp(-X²)"""
    return doutput * (2 / math.sqrt(math.pi) * op.Exp(-(input * input)))


@gradient("Floor", "Ceil", samples=({"X": _BETWEEN},))
def staircase(op, X, dY):
    """Zero almost everywhere (a gradient, not an absence of one: as PyTorch)"""
    return op.zeros_like(X)


@gradient("Round", samples=({"X": _BETWEEN},))
def round_(op, X, dY):
    """Zero almost everywhere"""
    return op.zeros_like(X)


@gradient("Sign", samples=({"input": _POSITIVE},))
def sign(op, input, doutput):
    """Zero almost everywhere"""
    return op.zeros_like(input)


@gradient("Mod", wrt="A B", samples=({"A": _POSITIVE, "B": np.array([0.7, 1.3, 3.1]), "fmod": 1},))
def mod(op, A, B, C, dC, *, fmod=0):
    """dA = dC, dB = -dC · (A - C)/B, the whole quotient"""
    return dC, -(dC * ((A - C) / B))


@gradient("Max", samples=({"data_0": [(2, 3), (3,), (2, 1)]},))
def maximum(op, data_0, max, dmax):
    """dY goes to the largest; ties share it equally (as PyTorch)"""
    return _to_the_chosen(op, data_0, max, dmax)


@gradient("Min", samples=({"data_0": [(2, 3), (3,), (2, 1)]},))
def minimum(op, data_0, min, dmin):
    """dY goes to the smallest; ties share it equally (as PyTorch)"""
    return _to_the_chosen(op, data_0, min, dmin)


def _to_the_chosen(op, candidates, chosen, gradient):
    if len(candidates) == 1:
        return [gradient]
    hits = [op.cast(op.Equal(x, chosen), chosen) for x in candidates]
    total = op.Sum(*hits) if len(hits) > 2 else hits[0] + hits[1]
    share = gradient / total
    return [share * hit for hit in hits]


@gradient("Where", wrt="X Y", samples=({"condition": np.array([[True], [False]]), "X": (2, 3), "Y": (3,)},))
def where(op, condition, X, Y, doutput):
    """dX = dY where the condition holds, else 0; the other input the other way round"""
    return op.where(condition, doutput, 0, like=X), op.where(condition, 0, doutput, like=X)


@gradient("Clip", wrt="input", samples=({"input": _UNIT, "min": np.array(-0.5), "max": np.array(0.6)}, {"input": _UNIT}))
def clip(op, input, min, max, doutput):
    """dX = dY inside the bounds (both included, as PyTorch), else 0; the bounds themselves get no gradient"""
    bounds = ((op.GreaterOrEqual, min), (op.LessOrEqual, max))
    inside = [within(input, bound) for within, bound in bounds if bound is not None]
    # One mask: a conversion to the gradient's type and a product take longer than the comparisons.
    return doutput * op.cast(reduce(op.And, inside), doutput) if inside else doutput


@gradient("Cast", wrt="input", samples=({"input": (2, 3), "to": 11},))
def cast(op, input, doutput):
    """Back to the input's type"""
    return op.cast(doutput, input)


@gradient("CastLike", wrt="input", samples=({"input": (2, 3), "target_type": (1,)},))
def cast_like(op, input, doutput):
    """Back to the input's type"""
    return op.cast(doutput, input)
