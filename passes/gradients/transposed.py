"""Transposed convolution: the gradient of a convolution, so that its own gradients are convolutions again."""

from __future__ import annotations

from ortc.passes.gradients.convolution import weight_gradient
from ortc.rules import Unsupported, gradient

_SAMPLES = (
    {"X": (2, 3, 4), "W": (3, 2, 3), "B": (2,), "_static": "W"},
    {"X": (1, 2, 3, 4), "W": (2, 3, 3, 2), "strides": [2, 1], "pads": [1, 0, 1, 1], "output_padding": [1, 0], "_static": "W"},
    {"X": (2, 4, 3, 3), "W": (4, 1, 2, 3), "group": 2, "dilations": [2, 1], "strides": [1, 2], "_static": "W"},
    {"X": (1, 1, 2, 3, 2), "W": (1, 2, 2, 2, 2), "strides": [2, 1, 2], "_static": "W"},
)


@gradient("ConvTranspose", samples=_SAMPLES)
def conv_transpose(
    op,
    X,
    W,
    Y,
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
    strides, dilations = list(strides or [1] * n), list(dilations or [1] * n)
    extra = list(output_padding or [0] * n)
    pads = _pads(op, X, Y, kernel, auto_pad, output_shape, pads, strides, dilations, extra)
    dX = op.Conv(dY, W, group=group, pads=pads, strides=strides, dilations=dilations)
    if any(e >= s for e, s in zip(extra, strides, strict=True)):
        axes = list(range(2, n + 2))
        dX = op.Slice(dX, [0] * n, op.vector(*(op.dim(X, a) for a in axes)), axes)
    dX.shape = X.shape
    dW = weight_gradient(op, dY, W, X, group, pads, strides, dilations)
    return dX, dW, op.ReduceSum(dY, [0, *range(2, n + 2)], keepdims=0)


def _pads(op, X, Y, kernel, auto_pad, output_shape, pads, strides, dilations, extra):
    """The pads in force: given, none, or what remains so that the output has the wanted size (ONNX, ConvTranspose)."""
    n = len(kernel)
    if output_shape is None and auto_pad in ("NOTSET", "VALID"):
        return list(pads or [0] * 2 * n) if auto_pad == "NOTSET" else [0] * 2 * n
    begin, end = [], []
    for i, (size, made) in enumerate(zip(op.dims(X)[2:], op.dims(Y)[2:], strict=True)):
        reach = (kernel[i] - 1) * dilations[i] + 1
        if output_shape is None:
            total = max(reach + extra[i] - strides[i], 0)
        elif isinstance(size, int) and isinstance(made, int):
            total = strides[i] * (size - 1) + extra[i] + reach - made
        else:
            raise Unsupported("output_shape over an axis of unknown size")
        if total < 0:
            raise Unsupported("an output larger than the kernel reaches")
        small, large = total // 2, total - total // 2
        begin.append(small if auto_pad == "SAME_UPPER" else large)
        end.append(large if auto_pad == "SAME_UPPER" else small)
    return [*begin, *end]
