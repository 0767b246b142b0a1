"""Transposed convolution: the gradient of a convolution, so that its own gradients are convolutions again."""

from __future__ import annotations

from ortc.passes.gradients.convolution import weight_gradient
from ortc.rules import Unsupported, gradient

_SAMPLES = (
    {"X": (2, 3, 4), "W": (3, 2, 3), "B": (2,), "_static": "W"},
    {"X": (1, 2, 3, 4), "W": (2, 3, 3, 2), "strides": [2, 1], "pads": [1, 0, 1, 1], "output_padding": [1, 0], "_static": "W"},
    {"X": (2, 4, 3, 3), "W": (4, 1, 2, 3), "group": 2, "dilations": [2, 1], "strides": [1, 2], "_static": "W"},
    {"X": (1, 1, 2, 3, 2), "W": (1, 2, 2, 2, 2), "strides": [2, 1, 2], "_static": "W"},
    {"X": (1, 2, 3, 4), "W": (2, 2, 3, 3), "strides": [2, 2], "auto_pad": "SAME_UPPER", "_static": "W"},
    {"X": (1, 2, 3, 4), "W": (2, 2, 3, 2), "strides": [2, 1], "auto_pad": "SAME_LOWER", "_static": "W"},
    {"X": (1, 2, 3, 4), "W": (2, 2, 3, 2), "strides": [2, 2], "output_shape": [6, 9], "_static": "W"},
)


@gradient("ConvTranspose", samples=_SAMPLES)
def conv_transpose(
    op,
    X,
    W,
    dY,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    output_shape=None,
    pads=None,
    strides=None,
):
    """dX: dY convolved with W; dW: as the weight gradient of that convolution; dB: Σ dY per channel"""
    kernel = op.dims(W)[2:]
    if not all(isinstance(k, int) for k in kernel):
        raise Unsupported("the kernel's size is unknown")
    n = len(kernel)
    strides, dilations, extra = list(strides or [1] * n), list(dilations or [1] * n), output_padding or [0] * n
    if any(e >= s for e, s in zip(extra, strides, strict=True)):
        raise Unsupported("output_padding of a stride or more, which ONNX Runtime computes wrongly")
    reach = [(k - 1) * d + 1 + e for k, d, e in zip(kernel, dilations, extra, strict=True)]
    db = op.ReduceSum(dY, [0, *range(2, n + 2)], keepdims=0)
    if output_shape is not None:
        dY, pads = _to_shape(op, X, dY, auto_pad, list(output_shape)[-n:], strides, reach)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        pads = _shared_out([max(r - s, 0) for r, s in zip(reach, strides, strict=True)], auto_pad)
    pads = list(pads or [0] * 2 * n)
    dX = op.Conv(dY, W, group=group, pads=pads, strides=strides, dilations=dilations)
    dX.shape = X.shape
    return dX, weight_gradient(op, X, dY, W, group, pads, strides, dilations), db


def _shared_out(totals, auto_pad):
    """Pads of these totals: the odd one at the end for SAME_UPPER, else at the beginning."""
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return [*small, *large] if auto_pad == "SAME_UPPER" else [*large, *small]


def _to_shape(op, X, dY, auto_pad, made, strides, reach):
    """dY and the pads that gave it its shape; where the size of X is unknown dY is padded in the graph.

    The pads take s·(x - 1) + reach to the wanted size; one that is larger has zeros at its end (as ONNX Runtime).
    """
    n, spatial = len(made), list(range(2, op.rank(X)))
    sizes = op.dims(X)[2:]
    if all(isinstance(size, int) for size in sizes):
        totals = [s * (x - 1) + r - y for s, x, r, y in zip(strides, sizes, reach, made, strict=True)]
        if any(-t >= s for t, s in zip(totals, strides, strict=True)):
            raise Unsupported("an output_shape that exceeds the kernel's reach by a stride or more")
        return dY, _shared_out([max(t, 0) for t in totals], auto_pad)
    whole = op.Mul(op.vector(*(op.dim(X, a) for a in spatial)), strides)
    total = op.Max(op.Add(whole, [r - s - y for r, s, y in zip(reach, strides, made, strict=True)]), [0] * n)
    small = op.Div(total, [2] * n)
    large = op.Sub(total, small)
    ends = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    return op.pad(dY, op.vector(*ends), spatial), None
