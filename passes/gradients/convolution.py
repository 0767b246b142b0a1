"""Convolution. Its two gradients are convolutions themselves (Dumoulin & Visin, arXiv 1603.07285)."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortc.rules import Unsupported, gradient

_SAMPLES = (
    {"X": (2, 3, 5), "_static": "W", "W": (4, 3, 3), "B": (4,)},
    {"X": (2, 2, 6, 5), "_static": "W", "W": (3, 2, 3, 2), "B": (3,), "pads": [1, 0, 1, 1], "strides": [2, 1]},
    {
        "X": (2, 4, 6, 7),
        "_static": "W",
        "W": (6, 2, 2, 3),
        "group": 2,
        "dilations": [2, 1],
        "strides": [1, 2],
        "pads": [0, 1, 1, 2],
    },
    {"X": (1, 3, 7, 6), "_static": "X W", "W": (3, 1, 3, 3), "group": 3, "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"X": (2, 3, 4, 4), "_static": "W", "W": (5, 3, 1, 1)},
    {"X": (1, 3, 7, 7), "_static": True, "W": (2, 3, 3, 3), "pads": [1, 1, 0, 2]},
    {"X": (1, 4, 6), "_static": "W", "W": (6, 2, 3), "group": 2, "dilations": [2], "pads": [2, 2]},
    {"X": (2, 3, 5, 4), "_static": "W", "W": (3, 1, 3, 3), "group": 3, "pads": [1, 1, 1, 1]},
    {"X": (1, 2, 4, 4), "_static": "W", "W": (4, 1, 3, 1), "group": 2, "pads": [1, 0, 1, 0]},
    {"X": (1, 4, 4, 4), "_static": "W", "W": (2, 2, 1, 3), "group": 2, "pads": [0, 1, 0, 1]},
    {"X": (1, 2, 4, 3, 5), "_static": "W", "W": (2, 2, 2, 2, 2), "strides": [2, 1, 3]},
)


def window(op, x, kernel, auto_pad, pads, strides, dilations):
    """Pads, strides and dilations as lists of numbers.

    Args:
        x: the input [N, C, spatial…].
        kernel: the window's size per spatial axis.
        auto_pad, pads, strides, dilations: the operator's attributes, None or empty where left out.

    Raises:
        Unsupported: for SAME padding of a size known only at run time, unless the stride is 1.
    """
    n = len(kernel)
    strides, dilations = list(strides or [1] * n), list(dilations or [1] * n)
    if auto_pad in ("NOTSET", "VALID"):
        return list(pads or [0] * 2 * n) if auto_pad == "NOTSET" else [0] * 2 * n, strides, dilations
    begin, end = [], []
    for size, k, s, d in zip(op.dims(x)[2:], kernel, strides, dilations, strict=True):
        reach = (k - 1) * d + 1
        if s == 1:
            total = reach - 1
        elif isinstance(size, int):
            total = (-(-size // s) - 1) * s + reach - size
            if total < 0:
                raise Unsupported(f"auto_pad={auto_pad} with a kernel below its stride: runtimes disagree on negative pads")
        else:
            raise Unsupported(f"auto_pad={auto_pad} with stride {s} over an axis of unknown size")
        small, large = total // 2, total - total // 2
        begin.append(small if auto_pad == "SAME_UPPER" else large)
        end.append(large if auto_pad == "SAME_UPPER" else small)
    return [*begin, *end], strides, dilations


def fit(op, g, x, pads_end):
    """``g``, which starts where ``x`` does, cut or filled with zeros at the end of each spatial axis to the size of ``x``."""
    axes = list(range(2, op.rank(x)))
    longer = op.pad(g, [*[0] * len(axes), *pads_end], axes) if any(pads_end) else g
    return op.Slice(longer, [0] * len(axes), op.vector(*(op.dim(x, a) for a in axes)), axes)


@gradient("Conv", samples=_SAMPLES)
def conv(op, X, W, dY, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None):
    """dX: dY convolved with W transposed; dW: X convolved with dY, batch and channels exchanged; dB: Σ dY per channel"""
    kernel = op.dims(W)[2:]
    if not all(isinstance(k, int) for k in kernel):
        raise Unsupported("the kernel's size is unknown")
    pads, strides, dilations = window(op, X, kernel, auto_pad, pads, strides, dilations)
    dX = _input_gradient(op, X, W, dY, kernel, group, pads, strides, dilations)
    dW = weight_gradient(op, dY, X, W, group, pads, strides, dilations)
    return dX, dW, op.ReduceSum(dY, [0, *range(2, op.rank(dY))], keepdims=0)


def weight_gradient(op, dY, X, W, group, pads, strides, dilations):
    """The second output of the training kernel ConvGrad; passes/lowerings/convolution.py has it for targets without."""
    kernel = [int(k) for k in op.dims(W)[2:]]
    window = {"pads": pads, "strides": strides, "dilations": dilations, "kernel_shape": kernel, "group": group}
    outputs = [None, ir.Value(type=W.type, shape=W.shape)]
    return op.ConvGrad(dY, X, W, _domain="com.microsoft", _outputs=outputs, **window)[1]


# How much larger than dY the input may be for dX to be quicker as a Conv with the weights turned round than as a ConvTranspose:
# that works for every place of X, this one for every place of dY. Ratio Conv / ConvTranspose with one thread and two (ONNX
# Runtime 1.19.2, `bench/lowerings.py`): as large 0.6 to 1.0, by single channels 0.2 to 1.1; 1.14 times as large 0.8 and 0.9,
# 1.36 times 1.7 and 2.2; over three axes, for which ConvTranspose is written without care, 0.05 to 0.13.
_GROWTH = {1: 1.2, 2: 1.2, 3: 6.0}


def _flips(op, X, dY, reach, pads, strides):
    """Whether dX is made by a Conv with the weights turned round."""
    n = len(reach)
    if any(s != 1 for s in strides) or any(p > r for p, r in zip(pads, [*reach, *reach], strict=True)):
        return False
    sizes, made = op.dims(X)[2:], op.dims(dY)[2:]
    if all(isinstance(d, int) for d in (*sizes, *made)):
        return math.prod(sizes) <= _GROWTH.get(n, 1) * math.prod(made)
    return all(r <= pads[i] + pads[n + i] for i, r in enumerate(reach))


def turned_round(op, W, dY, reach, group, pads, dilations):
    """dY convolved with W [M, C/group, kernel…] as [C, M/group, kernel…], its places the other way round.

    Args:
        reach: how far the kernel reaches along each axis, (k - 1)·dilation.
        pads, dilations: of the convolution whose gradient this is; its stride is 1, its pads are within the reach.
    """
    made, channels, *kernel = op.dims(W)
    n, spatial = len(kernel), range(2, 2 + len(kernel))
    if any(k > 1 for k in kernel):
        W = op.Slice(W, [-1] * n, [np.iinfo(np.int64).min] * n, list(spatial), [-1] * n)
    if group == 1:
        W = op.Transpose(W, perm=[1, 0, *spatial])
    else:
        if channels > 1 and made > group:
            parted = op.Reshape(W, [group, made // group, channels, *kernel])
            W = op.Transpose(parted, perm=[0, 2, 1, *(a + 1 for a in spatial)])
        if channels > 1 or made > group:
            W = op.Reshape(W, [group * channels, made // group, *kernel])
    back = [r - p for r, p in zip([*reach, *reach], pads, strict=True)]
    return op.Conv(dY, W, pads=back, dilations=dilations, group=group, kernel_shape=kernel)


def _input_gradient(op, X, W, dY, kernel, group, pads, strides, dilations):
    """A convolution, or a ConvTranspose; what a stride left over at the end of X gets no gradient."""
    n = len(kernel)
    sizes, made = op.dims(X)[2:], op.dims(dY)[2:]
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    if all(isinstance(d, int) for d in op.dims(W)[:2]) and _flips(op, X, dY, reach, pads, strides):
        dX = turned_round(op, W, dY, reach, group, pads, dilations)
        dX.shape = X.shape
        return dX
    shared = {"group": group, "strides": strides, "dilations": dilations, "kernel_shape": list(kernel)}
    if all(isinstance(d, int) for d in (*sizes, *made)):
        rest = [
            size - ((out - 1) * s + (k - 1) * d + 1 - pads[i] - pads[n + i])
            for i, (size, out, k, s, d) in enumerate(zip(sizes, made, kernel, strides, dilations, strict=True))
        ]
        return op.ConvTranspose(dY, W, pads=pads, output_padding=rest if any(rest) else None, **shared)
    if strides == [1] * n:
        return op.ConvTranspose(dY, W, pads=pads, _like=X, **shared)
    whole = op.ConvTranspose(dY, W, pads=[*pads[:n], *[0] * n], **shared)
    out = fit(op, whole, X, [s - 1 for s in strides])
    out.shape = X.shape
    return out
