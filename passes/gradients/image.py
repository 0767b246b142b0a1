"""Resampling and rearranging of images."""

from __future__ import annotations

import numpy as np

from ortc.rules import Unsupported, gradient

_IMAGE = np.random.default_rng(3).standard_normal((1, 2, 4, 5))
_TWICE = np.array([1.0, 1.0, 2.0, 2.0], np.float32)
_ODD = np.array([1.0, 1.0, 1.6, 0.7], np.float32)
_FIXED = {"_static": True, "_constants": "scales"}
_RESIZE = (
    {"X": _IMAGE, "scales": _TWICE, **_FIXED},
    {"X": _IMAGE, "scales": _ODD, "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric", **_FIXED},
    {"X": _IMAGE, "scales": _TWICE, "mode": "linear", **_FIXED},
    {
        **{"X": _IMAGE, "sizes": np.array([7, 3]), "axes": [2, 3], "mode": "linear"},
        **{"coordinate_transformation_mode": "align_corners", "_static": True},
    },
    {"X": _IMAGE, "scales": _ODD, "mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel", **_FIXED},
    {"X": _IMAGE, "sizes": np.array([7, 3]), "mode": "cubic", "axes": [2, 3], "_static": True},
    {"X": _IMAGE, "scales": _TWICE, "mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5, **_FIXED},
)


@gradient("Resize", wrt="X", samples=_RESIZE)
def resize(
    op,
    X,
    scales,
    Y,
    dY,
    *,
    antialias=0,
    axes=None,
    coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    keep_aspect_ratio_policy="stretch",
    mode="nearest",
    nearest_mode="round_prefer_floor",
):
    """Y = M·X along each axis, M the weights of the interpolation:  dX = Mᵀ·dY along each axis"""
    if antialias:
        raise Unsupported("antialias=1")
    if coordinate_transformation_mode == "tf_crop_and_resize":
        raise Unsupported("coordinate_transformation_mode='tf_crop_and_resize'")
    given = op.constant(scales)
    factors = dict(zip(op.axes(X, axes), given, strict=True)) if given is not None and given.size else {}
    g = dY
    for axis in op.axes(X):
        size, made = op.dims(X)[axis], op.dims(Y)[axis]
        if size == made and factors.get(axis, 1.0) == 1.0:
            continue
        if not isinstance(size, int) or not isinstance(made, int):
            raise Unsupported(f"axis {axis} is of unknown size")
        factor = float(factors.get(axis, made / size))
        x = _coordinates(size, made, factor, coordinate_transformation_mode)
        g = _apply(op, g, axis, size, _weights(x, size, mode, nearest_mode, cubic_coeff_a, exclude_outside))
    g.shape = X.shape
    return g


def _coordinates(size, made, factor, mode):
    """Where each output element lies in the input (ONNX, Resize, coordinate_transformation_mode)."""
    x = np.arange(made, dtype=np.float64)
    if mode == "align_corners":
        return x * (size - 1) / (made - 1) if made > 1 else x * 0
    if mode == "asymmetric":
        return x / factor
    if mode == "pytorch_half_pixel" and made == 1:
        return x * 0
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - made / (factor * size)) + (x + 0.5) / factor - 0.5
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (x + 0.5) / factor - 0.5
    raise Unsupported(f"coordinate_transformation_mode={mode!r}")


def _weights(x, size, mode, nearest_mode, a, exclude_outside):
    """M, [output size, input size]: what each output element takes of each input element; the edges are repeated."""
    below = np.floor(x)
    if mode == "nearest":
        rounded = {
            "floor": below,
            "ceil": np.ceil(x),
            "round_prefer_floor": np.ceil(x - 0.5),
            "round_prefer_ceil": np.floor(x + 0.5),
        }[nearest_mode]
        taps = [(rounded, np.ones_like(x))]
    elif mode == "linear":
        taps = [(below, below + 1 - x), (below + 1, x - below)]
    else:
        taps = [(below + k, _cubic(np.abs(x - below - k), a)) for k in (-1, 0, 1, 2)]
    matrix = np.zeros((len(x), size))
    for index, weight in taps:
        inside = (index >= 0) & (index < size)
        kept = np.where(inside, weight, 0) if exclude_outside and mode == "cubic" else weight
        np.add.at(matrix, (np.arange(len(x)), index.clip(0, size - 1).astype(int)), kept)
    return matrix / matrix.sum(axis=1, keepdims=True) if exclude_outside and mode == "cubic" else matrix


def _cubic(distance, a):
    """Keys' kernel (1981): (a+2)·d³ - (a+3)·d² + 1 for d < 1, a·d³ - 5a·d² + 8a·d - 4a for 1 <= d < 2"""
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def _apply(op, g, axis, size, matrix):
    """Mᵀ·g along one axis."""
    last = op.rank(g) - 1
    if axis == last:
        return op.MatMul(g, op.const(matrix, like=g))
    m = op.const(np.ascontiguousarray(matrix.T), like=g)
    if axis == last - 1:
        return op.MatMul(m, g)
    before, after = range(axis), range(axis + 1, last + 1)
    flat = op.Reshape(g, op.vector(-1, matrix.shape[0], op.dim(g, *after)))
    shape = op.vector(*(op.dim(g, a) for a in before), size, *(op.dim(g, a) for a in after))
    return op.Reshape(op.MatMul(m, flat), shape)


@gradient(
    "DepthToSpace",
    samples=({"input": (2, 8, 2, 3), "blocksize": 2}, {"input": (2, 8, 2, 3), "blocksize": 2, "mode": "CRD"}),
)
def depth_to_space(op, input, doutput, *, blocksize, mode="DCR"):
    """The inverse rearrangement"""
    b = blocksize
    if mode == "DCR":
        return op.SpaceToDepth(doutput, blocksize=b, _like=input)
    n, _, h, w = (op.dim(input, a) for a in range(4))
    split = op.Reshape(doutput, op.vector(n, -1, h, b, w, b))
    return op.reshape_like(op.Transpose(split, perm=[0, 1, 3, 5, 2, 4]), input)


@gradient("SpaceToDepth", samples=({"input": (2, 2, 4, 6), "blocksize": 2},))
def space_to_depth(op, input, doutput, *, blocksize):
    """The inverse rearrangement"""
    return op.DepthToSpace(doutput, blocksize=blocksize, mode="DCR", _like=input)
