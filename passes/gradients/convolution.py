"""Convolution. Its two gradients are convolutions themselves (Dumoulin & Visin, arXiv 1603.07285)."""

from __future__ import annotations

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
            total = max((-(-size // s) - 1) * s + reach - size, 0)
        else:
            raise Unsupported(f"auto_pad={auto_pad} with stride {s} over an axis of unknown size")
        small, large = total // 2, total - total // 2
        begin.append(small if auto_pad == "SAME_UPPER" else large)
        end.append(large if auto_pad == "SAME_UPPER" else small)
    return [*begin, *end], strides, dilations


def fit(op, g, x, pads_end):
    """``g``, which starts where ``x`` does, cut or filled with zeros at the end of each spatial axis to the size of ``x``."""
    axes = list(range(2, op.rank(x)))
    longer = op.Pad(g, [*[0] * len(axes), *pads_end], None, axes) if any(pads_end) else g
    return op.Slice(longer, [0] * len(axes), op.vector(*(op.dim(x, a) for a in axes)), axes)


@gradient("Conv", samples=_SAMPLES)
def conv(op, X, W, dY, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None):
    """dX: dY convolved with W transposed; dW: X convolved with dY, batch and channels exchanged; dB: Σ dY per channel"""
    kernel = op.dims(W)[2:]
    if not all(isinstance(k, int) for k in kernel):
        raise Unsupported("the kernel's size is unknown")
    pads, strides, dilations = window(op, X, kernel, auto_pad, pads, strides, dilations)
    dX = _input_gradient(op, X, W, dY, kernel, group, pads, strides, dilations)
    dW = weight_gradient(op, X, W, dY, group, pads, strides, dilations)
    return dX, dW, op.ReduceSum(dY, [0, *range(2, op.rank(dY))], keepdims=0)


def _input_gradient(op, X, W, dY, kernel, group, pads, strides, dilations):
    """A ConvTranspose; what a stride left over at the end of X gets no gradient."""
    n = len(kernel)
    sizes, made = op.dims(X)[2:], op.dims(dY)[2:]
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


def weight_gradient(op, X, W, dY, group, pads, strides, dilations):
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
    if not _exact(op, X, dY, W, pads, strides, dilations):
        kernel = [int(k) for k in op.dims(W)[2:]]
        out = op.Slice(out, [0] * len(kernel), kernel, spatial)
    dW = op.Transpose(out, perm=[1, 0, *spatial])
    dW.shape = W.shape
    return dW


def _exact(op, X, dY, W, pads, strides, dilations):
    """Whether no stride leaves anything over, so that nothing must be cut."""
    n = len(strides)
    for i, (size, out, k, s, d) in enumerate(
        zip(op.dims(X)[2:], op.dims(dY)[2:], op.dims(W)[2:], strides, dilations, strict=True)
    ):
        if s == 1 and d == 1:
            continue
        if not isinstance(size, int) or not isinstance(out, int):
            return False
        if (size + pads[i] + pads[n + i] - (out - 1) * s - 1) // d + 1 != k:
            return False
    return True
