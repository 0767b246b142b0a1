"""Convolution. Its two gradients are convolutions themselves (Dumoulin & Visin, arXiv 1603.07285)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortc.graph.shapes import dims
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
    {"X": (1, 32, 14, 14), "_static": True, "W": (32, 32, 3, 3), "pads": [1, 1, 0, 2]},
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


def _flipping_pays(W, sizes, kernel, group, pads, strides, dilations):
    """Whether dX is quicker as a Conv with the weights turned round than as a ConvTranspose.

    Measured with two threads (ONNX Runtime 1.19.2), 3x3, batch 8: 64 channels of 56² 4.9 against 9.0 ms, 128 of 28² 4.5 against
    6.7, but 512 of 7² no quicker, and with few channels slower: 16 of 14² (5x5) 0.95 against 0.38.
    """
    plain = group == 1 and all(v == 1 for v in (*strides, *dilations))
    fits = all(p <= k - 1 for k, p in zip([*kernel, *kernel], pads, strict=True))
    large = all(isinstance(d, int) and d >= 14 for d in sizes) and all(isinstance(c, int) and c >= 32 for c in dims(W)[:2])
    return plain and fits and large and any(k > 1 for k in kernel)


def _input_gradient(op, X, W, dY, kernel, group, pads, strides, dilations):
    """A ConvTranspose; what a stride left over at the end of X gets no gradient."""
    n = len(kernel)
    sizes, made = op.dims(X)[2:], op.dims(dY)[2:]
    if _flipping_pays(W, sizes, kernel, group, pads, strides, dilations):
        flipped = op.Slice(W, [-1] * n, [np.iinfo(np.int64).min] * n, list(range(2, n + 2)), [-1] * n)
        weights = op.Transpose(flipped, perm=[1, 0, *range(2, n + 2)])
        return op.Conv(dY, weights, pads=[k - 1 - p for k, p in zip([*kernel, *kernel], pads, strict=True)], _like=X)
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
