"""The weight gradient of a convolution, its transpose along one axis, and deformable convolution, in standard operators.

Measured on the CPU (ONNX Runtime 1.19.2, float32), milliseconds for the training kernel, the products and the convolution.
Two threads, batch 8: 3x3 on 64 channels of 56² 5.2, 12.9, 21.8; 512 of 7² 4.7, 6.1, 10.6; stride 2 on 64 of 56² 2.5, 15.4,
9.3; 1x1 on 64 of 56² 3.6, 5.7, 26.5; 7x7 with stride 2 on 3 of 224² 7.4, 44.8, 17.3. One thread, batch 2, over three axes:
3x3x3 on 16 of 24³ 90, 21, 26; on 64 of 8³ 15.6, 5.4, 5.7.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ortc.rules import Unsupported, lowering


@lowering("com.microsoft::ConvGrad")
def conv_grad(op, dY, X, W, *, pads, strides, dilations, kernel_shape, group=1):
    """dW of a convolution (its second output; the others are not asked for)"""
    products = all(s == 1 for s in strides) or all(k == 1 for k in kernel_shape)
    known = all(isinstance(d, int) for d in op.dims(dY)[2:])
    channels = op.dims(X)[1]
    if group == 1 and products and known and (isinstance(channels, int) and channels >= 4):
        dW = _as_products(op, dY, X, pads, strides, dilations, kernel_shape)
    else:
        dW = _as_convolution(op, dY, X, W, pads, strides, dilations, kernel_shape, group)
    return None, op.reshape_like(dW, W)


def _as_products(op, dY, X, pads, strides, dilations, kernel_shape):
    """One product of dY [M, N·…] with the shifted inputs, [N·…] each, of all places of the kernel (im2col)."""
    n = len(kernel_shape)
    spatial = list(range(2, n + 2))
    padded = op.pad(X, pads, spatial) if any(pads) else X
    by_channel = op.Transpose(padded, perm=[1, 0, *spatial])
    sizes = [int(d) for d in op.dims(dY)[2:]]
    columns = []
    for place in product(*(range(k) for k in kernel_shape)):
        starts = [i * d for i, d in zip(place, dilations, strict=True)]
        ends = [a + (size - 1) * s + 1 for a, size, s in zip(starts, sizes, strides, strict=True)]
        shifted = op.Slice(by_channel, starts, ends, spatial, strides)
        columns.append(op.Reshape(shifted, op.vector(op.dim(X, 1), -1)))
    rows = op.Reshape(op.Transpose(dY, perm=[1, 0, *spatial]), op.vector(op.dim(dY, 1), -1))
    flat = op.Gemm(rows, columns[0] if len(columns) == 1 else op.Concat(*columns, axis=0), transB=1)
    return op.Transpose(op.Reshape(flat, op.vector(op.dim(dY, 1), len(columns), op.dim(X, 1))), perm=[0, 2, 1])


def _as_convolution(op, dY, X, W, pads, strides, dilations, kernel_shape, group):
    """The convolution of X [C, N, …] by dY [M, N, …] with strides and dilations exchanged, cut to the kernel's size.

    Groups are made groups of that convolution: X as [C/g, g·N, …], dY as [g·M/g, N, …].
    """
    spatial = list(range(2, op.rank(X)))
    if group == 1:
        x = op.Transpose(X, perm=[1, 0, *spatial])
    else:
        split = op.Reshape(X, op.vector(op.dim(X, 0), group, -1, *(op.dim(X, a) for a in spatial)))
        x = op.Transpose(split, perm=[2, 1, 0, *(a + 1 for a in spatial)])
        x = op.Reshape(x, op.vector(op.dim(W, 1), -1, *(op.dim(X, a) for a in spatial)))
    y = op.Transpose(dY, perm=[1, 0, *spatial])
    out = op.Conv(x, y, group=group, pads=pads, strides=dilations, dilations=strides)
    if any(v != 1 for v in (*strides, *dilations)):
        out = op.Slice(out, [0] * len(kernel_shape), kernel_shape, spatial)
    return op.Transpose(out, perm=[1, 0, *spatial])


@lowering("ConvTranspose")
def conv_transpose(op, X, W, B=None, *, kernel_shape=None, output_padding=None, output_shape=None, pads=None, **shared):
    """Over one axis as over two, the first of size one: ONNX Runtime's kernel for two is 1.1 to 5 times as quick"""
    if op.rank(X) != 3:
        raise Unsupported("other than one spatial axis")
    begin, end = pads or (0, 0)
    before = {"kernel_shape": kernel_shape, "output_shape": output_shape, "strides": shared.pop("strides", None)}
    before["dilations"] = shared.pop("dilations", None)
    window = {name: [1, values[-1]] for name, values in before.items() if values}
    if output_padding:
        window["output_padding"] = [0, *output_padding]
    X, W = (op.Unsqueeze(v, [2]) for v in (X, W))
    made = op.ConvTranspose(X, W, B, pads=[0, begin, 0, end] if pads else None, **window, **shared)
    return (op.Squeeze(made, [2]),)


@lowering("DeformConv")
def deform_conv(
    op,
    X,
    W,
    offset,
    B=None,
    mask=None,
    *,
    dilations=None,
    group=1,
    kernel_shape=None,
    offset_group=1,
    pads=None,
    strides=None,
):
    """Sampling at the shifted places of all taps, then one product (Dai et al., arXiv 1703.06211; mask: arXiv 1811.11168)"""
    if op.rank(X) != 4:
        raise Unsupported("other than two spatial axes")
    kernel = list(op.dims(W)[2:])
    if not all(isinstance(k, int) for k in (*kernel, op.dims(X)[1], op.dims(W)[0])):
        raise Unsupported("channels or a kernel of unknown size")
    taps, channels, made = kernel[0] * kernel[1], op.dims(X)[1], op.dims(W)[0]
    strides, dilations, pads = strides or [1, 1], dilations or [1, 1], pads or [0] * 4
    n, height, width = op.dim(X, 0), op.dim(offset, 2), op.dim(offset, 3)
    shifts = op.Reshape(offset, op.vector(n, offset_group, taps, 2, height, width))
    grid = [_places(op, X, shifts, axis, kernel, strides, dilations, pads) for axis in (1, 0)]
    rows = op.vector(-1, taps, op.dim(offset, 2, 3), 1)
    grid = op.Concat(*(op.Reshape(g, rows) for g in grid), axis=-1)
    images = op.Reshape(X, op.vector(-1, channels // offset_group, op.dim(X, 2), op.dim(X, 3)))
    sampled = op.GridSample(images, grid, mode="linear", padding_mode="zeros", align_corners=0)
    sampled = op.Reshape(sampled, op.vector(n, offset_group, channels // offset_group, taps, op.dim(offset, 2, 3)))
    if mask is not None:
        sampled = sampled * op.Reshape(mask, op.vector(n, offset_group, 1, taps, op.dim(offset, 2, 3)))
    columns = op.Reshape(sampled, op.vector(n, group, channels // group * taps, op.dim(offset, 2, 3)))
    weights = op.Reshape(W, [group, made // group, channels // group * taps])
    y = op.Reshape(op.MatMul(weights, columns), op.vector(n, made, height, width))
    return (y if B is None else y + op.Reshape(B, [-1, 1, 1]),)


def _places(op, X, shifts, axis, kernel, strides, dilations, pads):
    """Where along one spatial axis each tap of each output reads, as GridSample counts: -1 and 1 are the image's edges."""
    moved = op.Squeeze(op.Slice(shifts, [axis], [axis + 1], [3]), [3])
    along = op.cast(op.Range(0, op.Squeeze(op.vector(op.dim(shifts, 4 + axis)), [0]), 1), X)
    start = op.Reshape(along * float(strides[axis]), [-1, 1] if axis == 0 else [-1])
    tap = np.array([t[axis] * dilations[axis] - pads[axis] for t in product(*map(range, kernel))], np.float64)
    place = moved + op.const(tap.reshape(-1, 1, 1), like=X) + start
    size = op.cast(op.Squeeze(op.vector(op.dim(X, 2 + axis)), [0]), X)
    return (2 * place + 1) / size - 1
