"""Discrete Fourier transforms. Complex numbers are pairs in the last dimension; one that is 1 there is real."""

from __future__ import annotations

import numpy as np

from ortc.passes.gradients.indexing import add_at
from ortc.rules import Unsupported, gradient


def _adjoint(op, g, length, axis, *, inverse, onesided):
    """The transposed transform of ``length`` numbers: of an unscaled forward one the unscaled backward one.

    A one-sided transform leaves out the second half; its gradient is zero.
    """
    if onesided:
        g = _resize(op, g, axis, length)
    number = op.cast(op.Squeeze(length), g) if not isinstance(length, int) else float(length)
    back = op.DFT(g, None, op.const(axis), inverse=1 - inverse)
    return back / number if inverse else back * number


def _resize(op, x, axis, size):
    """Zeros appended, or the end cut off, to give ``size`` along the axis."""
    have = op.dim(x, axis)
    if isinstance(have, int) and isinstance(size, int):
        return x if have == size else op.pad(x, [0, size - have], [axis])
    return op.pad(x, op.vector(0, op.Sub(op.vector(size), op.vector(have))), [axis])


def _as_real_as(op, x, like):
    """The real part if ``like`` is real."""
    parts = op.dims(like)[-1]
    return x if parts == 2 else op.Slice(x, [0], op.vector(op.dim(like, op.rank(like) - 1)), [-1])


@gradient(
    "DFT",
    wrt="input",
    samples=(
        {"input": (2, 6, 2)},
        {"input": (2, 6, 2), "axis": np.array(1), "inverse": 1},
        {"input": (2, 5, 1), "onesided": 1},
        {"input": (5, 2, 1), "axis": np.array(0), "dft_length": np.array(7)},
        {"input": (2, 6, 2), "dft_length": np.array(4)},
    ),
)
def dft(op, input, dft_length, axis, doutput, *, inverse=0, onesided=0):
    """dX = the transform the other way round, times (forward) or over (inverse) its length; the real part of real X"""
    if inverse and onesided:
        raise Unsupported("a one-sided inverse transform")
    place = np.array(-2) if axis is None else op.constant(axis)
    if place is None:
        raise Unsupported("an axis that is not a constant")
    [along] = op.axes(input, place.reshape(()))
    length = _number(op, dft_length)
    whole = _adjoint(op, doutput, op.dim(input, along) if length is None else length, along, inverse=inverse, onesided=onesided)
    gradient = _as_real_as(op, _resize(op, whole, along, op.dim(input, along)), input)
    gradient.shape = input.shape
    return gradient


def _number(op, x):
    """A scalar as an int if it is a constant, else as an int64 vector of one number."""
    if x is None:
        return None
    known = op.constant(x)
    return op.Reshape(op.Cast(x, to=7), [1]) if known is None else int(known.reshape(()))


# onesided is spelled out since ONNX's shape inference takes its default for 0.
@gradient(
    "STFT",
    wrt="signal window",
    samples=(
        {"signal": (2, 10, 1), "frame_step": np.array(3), "window": (4,), "onesided": 1, "_static": True},
        {"signal": (2, 10, 1), "frame_step": np.array(2), "window": (5,), "frame_length": np.array(5)}
        | {"onesided": 0, "_static": True},
        {"signal": (1, 9, 1), "frame_step": np.array(4), "frame_length": np.array(4)} | {"onesided": 1, "_static": True},
    ),
)
def stft(op, signal, frame_step, window, frame_length, output, doutput, *, onesided=1):
    """Y = DFT(frames · window):  the frames' gradients, times the window, added where they overlap"""
    length = op.dim(window, 0) if frame_length is None else _number(op, frame_length)
    frames = _as_real_as(op, _adjoint(op, doutput, length, 2, inverse=0, onesided=onesided), signal)
    first = op.Mul(_numbers(op, op.dim(output, 1)), _number(op, frame_step))
    places = op.Add(op.Unsqueeze(first, [1]), _numbers(op, length))
    shaped = None if window is None else op.Unsqueeze(window, [1])
    dsignal = add_at(op, signal, [1], op.Reshape(places, [1, -1, 1]), frames if shaped is None else frames * shaped)
    if window is None:
        return dsignal, None
    return dsignal, op.ReduceSum(frames * op.Gather(signal, places, axis=1), [0, 1, 3], keepdims=0)


def _numbers(op, n):
    """0 … n - 1"""
    return op.Range(op.const(0), op.Squeeze(op.vector(n)), op.const(1))
