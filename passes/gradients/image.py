"""Resampling and rearranging of images."""

from __future__ import annotations

from functools import partial, reduce
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir

from ortc.rules import Unsupported, gradient

_IMAGE = np.random.default_rng(3).standard_normal((1, 2, 4, 5))
_SIZES = {"X": _IMAGE, "sizes": np.array([7, 3]), "axes": [2, 3]}


def _scaled(*scales):
    """A sample; the scales are of all axes or of the last ones."""
    axes = None if len(scales) == 4 else list(range(4 - len(scales), 4))
    return {"X": _IMAGE, "scales": np.array(scales, np.float32), "_constants": "scales"} | ({"axes": axes} if axes else {})


_RESIZE = (
    _scaled(1, 1, 2, 3),
    {**_scaled(1.6, 0.7), "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"},
    {**_scaled(1, 1, 2, 2), "mode": "linear"},
    {**_SIZES, "mode": "linear", "coordinate_transformation_mode": "align_corners"},
    {**_scaled(1.6, 0.7), "mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
    {**_SIZES, "mode": "cubic"},
    {**_scaled(2, 2), "mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
    {**_scaled(0.5, 0.6), "mode": "linear", "antialias": 1},
    {**_scaled(0.5, 0.6), "mode": "cubic", "antialias": 1},
    {**_SIZES, "mode": "linear", "keep_aspect_ratio_policy": "not_larger"},
    {
        **{**_SIZES, "roi": np.array([0.2, -0.1, 0.8, 0.7], np.float32), "mode": "linear", "_constants": "roi"},
        "coordinate_transformation_mode": "tf_crop_and_resize",
    },
)

# The operators of the formulas below, on arrays: what is known now is computed now, the rest in the graph.
_NOW = SimpleNamespace(
    Abs=np.abs,
    Ceil=np.ceil,
    Floor=np.floor,
    Less=np.less,
    Max=np.maximum,
    Min=np.minimum,
    Range=partial(np.arange, dtype=np.float32),
    ReduceSum=lambda x, axes, keepdims: x.sum(axis=tuple(axes), keepdims=bool(keepdims)),
    Unsqueeze=np.expand_dims,
    Where=np.where,
)


@gradient("Resize", wrt="X", samples=_RESIZE)
def resize(
    op,
    X,
    roi,
    scales,
    sizes,
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
    """Y = M·X along each axis, M the weights of the interpolation:  dX = Mᵀ·dY along each axis

    Where pixels are repeated whole times, it is a convolution with ones instead. Coordinates are computed in float32,
    as ONNX Runtime does, so that ties fall alike.
    """
    axes = op.axes(X, axes)
    factors = _factors(op, X, Y, axes, scales, sizes, keep_aspect_ratio_policy)
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    crop = [(_entry(op, roi, i), _entry(op, roi, i + len(axes))) if cropped else () for i in range(len(axes))]
    kernel = {
        "nearest": partial(_nearest, how=nearest_mode),
        "linear": partial(_smooth, _tent, radius=1, exclude_outside=False, antialias=antialias),
        "cubic": partial(
            _smooth, partial(_cubic, a=cubic_coeff_a), radius=2, exclude_outside=exclude_outside, antialias=antialias
        ),
    }[mode]
    weights = partial(_weights, kernel=kernel, coordinates=coordinate_transformation_mode)
    repeats = _repeats(op, X, axes, factors, weights) if mode == "nearest" and not cropped else None
    if repeats is not None:
        channels = op.dims(X)[1]
        ones = op.const(np.ones((channels, 1, *repeats)), like=X)
        return op.Conv(dY, ones, group=channels, strides=repeats, kernel_shape=repeats, _like=X)
    g = dY
    for axis, factor, bounds in reversed(list(zip(axes, factors, crop, strict=True))):
        if not _equals(factor, 1):
            v, numbers = _together(op, _length(op, X, axis), _length(op, Y, axis), factor, *bounds)
            g = _apply(op, g, axis, op.dim(X, axis), weights(v, *numbers))
        elif cropped and not (_equals(bounds[0], 0) and _equals(bounds[1], 1)):
            raise Unsupported("a crop along an axis of scale 1, which ONNX Runtime leaves out")
    if g is not dY:
        g.shape = X.shape
    return g


def _length(op, x, axis):
    """A dimension as a float32 number, or a scalar of the graph."""
    size = op.dims(x)[axis]
    return np.float32(size) if isinstance(size, int) else op.Squeeze(op.Cast(op.dim(x, axis), to=1), [0])


def _entry(op, vector, index):
    """An entry of a vector, likewise."""
    known = op.constant(vector)
    return np.float32(known[index]) if known is not None else op.Cast(op.Gather(vector, op.const(index)), to=1)


def _together(op, *numbers):
    """Where to compute with these numbers, and the numbers there: now if all are known, else in the graph."""
    if not any(isinstance(n, ir.Value) for n in numbers):
        return _NOW, numbers
    return op, [n if isinstance(n, ir.Value) else op.const(n) for n in numbers]


def _equals(factor, number):
    return not isinstance(factor, ir.Value) and factor == number


def _factors(op, X, Y, axes, scales, sizes, policy):
    """The scale of each axis."""
    if scales is not None and op.dims(scales) != (0,):
        return [_entry(op, scales, i) for i in range(len(axes))]
    ratios = []
    for i, axis in enumerate(axes):
        if policy == "stretch" and op.dims(X)[axis] == op.dims(Y)[axis] is not None:
            ratios.append(np.float32(1))
        else:
            made = _length(op, Y, axis) if policy == "stretch" else _entry(op, sizes, i)
            _, (made, size) = _together(op, made, _length(op, X, axis))
            ratios.append(made / size)
    if policy == "stretch":
        return ratios
    v, ratios = _together(op, *ratios)
    return [reduce(v.Min if policy == "not_larger" else v.Max, ratios)] * len(axes)


def _repeats(op, X, axes, factors, weights):
    """How many times each pixel is repeated along the spatial axes, or None if it is not that simple."""
    per_axis = dict(zip(axes, factors, strict=True))
    repeats = [per_axis.get(axis, np.float32(1)) for axis in range(op.rank(X))]
    if any(isinstance(k, ir.Value) or k % 1 for k in repeats) or len(repeats) < 3 or not isinstance(op.dims(X)[1], int):
        return None
    if any(k != 1 for k in repeats[:2]) or all(k == 1 for k in repeats):
        return None
    three = np.float32(3)
    if any(not np.array_equal(weights(_NOW, three, 3 * k, k), np.eye(3).repeat(int(k), axis=0)) for k in repeats if k != 1):
        return None
    return [int(k) for k in repeats[2:]]


def _weights(v, size, made, factor, start=None, end=None, *, kernel, coordinates):
    """M, [made, size]: what each output element takes of each input element (ONNX, Resize, coordinate_transformation_mode)."""
    x = v.Range(0.0, made, 1.0)
    last = size - 1
    if coordinates == "align_corners":
        x = x * last / v.Max(made - 1, 1)
    elif coordinates == "asymmetric":
        x = x / factor
    elif coordinates == "tf_crop_and_resize":
        first = v.Where(v.Less(1, made), start * last, 0.5 * (start + end) * last)
        x = first + x * (end - start) * last / v.Max(made - 1, 1)
    else:
        x = (x + 0.5) / factor - 0.5
        if coordinates == "pytorch_half_pixel":
            x = x * v.Min(made - 1, 1)
        elif coordinates == "half_pixel_symmetric":
            x = 0.5 * size * (1 - made / (factor * size)) + x
        elif coordinates != "half_pixel":
            raise Unsupported(f"coordinate_transformation_mode={coordinates!r}")
    x = v.Unsqueeze(x, [1])
    matrix = kernel(v, x, v.Range(0.0, size, 1.0), last, factor)
    if coordinates == "tf_crop_and_resize":
        matrix = v.Where(v.Less(x, 0), 0, v.Where(v.Less(last, x), 0, matrix))
    return matrix


def _nearest(v, x, at, last, factor, *, how):
    """1 at the place that x is rounded to."""
    if how == "floor":
        x = v.Floor(x)
    elif how == "ceil":
        x = v.Ceil(x)
    else:
        x = v.Ceil(x - 0.5) if how == "round_prefer_floor" else v.Floor(x + 0.5)
    return _tent(v, v.Max(v.Min(x, last), 0) - at)


def _smooth(kernel, v, x, at, last, factor, *, radius, exclude_outside, antialias):
    """The kernel at the distances from x, stretched by 1/factor against aliasing; the edges stand for what is beyond them."""
    narrow = v.Min(factor, 1) if antialias else None

    def weight(distance):
        return kernel(v, distance * narrow if antialias else distance)

    matrix = weight(x - at)
    if not exclude_outside:
        beyond = v.Range(1.0, v.Ceil(radius / narrow) + 1, 1.0) if antialias else np.arange(1, radius + 1, dtype=np.float32)
        before = v.ReduceSum(weight(x + beyond), [1], keepdims=1)
        after = v.ReduceSum(weight(x - last - beyond), [1], keepdims=1)
        matrix = matrix + before * _tent(v, at) + after * _tent(v, at - last)
    return matrix / v.ReduceSum(matrix, [1], keepdims=1) if exclude_outside or antialias else matrix


def _tent(v, distance):
    """1 - |d|, 0 beyond 1; of whole numbers 1 at 0 and else 0"""
    return v.Max(1 - v.Abs(distance), 0)


def _cubic(v, distance, *, a):
    """Keys' kernel (1981): (a+2)·d³ - (a+3)·d² + 1 for d < 1, a·d³ - 5a·d² + 8a·d - 4a for 1 <= d < 2"""
    d = v.Abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return v.Where(v.Less(d, 1), near, v.Where(v.Less(d, 2), far, 0))


def _apply(op, g, axis, size, matrix):
    """Mᵀ·g along one axis; ``size`` is what it becomes."""
    last = op.rank(g) - 1
    m = op.const(matrix, like=g) if isinstance(matrix, np.ndarray) else op.cast(matrix, g)
    if axis == last:
        return op.MatMul(g, m)
    m = op.const(np.ascontiguousarray(matrix.T), like=g) if isinstance(matrix, np.ndarray) else op.transpose_last(m)
    if axis == last - 1:
        return op.MatMul(m, g)
    before, after = range(axis), range(axis + 1, last + 1)
    made, rest = op.dim(g, axis), op.dim(g, *after)
    flat = op.Reshape(g, op.vector(op.dim(g, *before), made, rest), allowzero=1)
    shape = op.vector(*(op.dim(g, a) for a in before), size, *(op.dim(g, a) for a in after))
    return op.Reshape(op.MatMul(m, flat), shape, allowzero=1)


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
    split = op.Reshape(doutput, op.vector(n, op.dim(doutput, 1), h, b, w, b), allowzero=1)
    return op.reshape_like(op.Transpose(split, perm=[0, 1, 3, 5, 2, 4]), input)


@gradient("SpaceToDepth", samples=({"input": (2, 2, 4, 6), "blocksize": 2},))
def space_to_depth(op, input, doutput, *, blocksize):
    """The inverse rearrangement"""
    return op.DepthToSpace(doutput, blocksize=blocksize, mode="DCR", _like=input)


@gradient(
    "MaxUnpool",
    wrt="X",
    samples=(
        {"X": (1, 1, 2, 2), "I": np.array([[[[5, 2], [8, 15]]]]), "kernel_shape": [2, 2], "strides": [2, 2], "_static": True},
        {
            **{"X": (1, 2, 3), "I": np.array([[[0, 4, 7], [9, 6, 2]]]), "output_shape": np.array([1, 2, 6])},
            **{"kernel_shape": [2], "strides": [2], "_static": True},
        },
    ),
)
def max_unpool(op, X, I, doutput, *, kernel_shape, pads=None, strides=None):  # noqa: E741 - the operator's own name
    """dY at the indices, which count through the whole output"""
    return op.Gather(op.Reshape(doutput, [-1]), I, axis=0, _like=X)


@gradient(
    "Col2Im",
    wrt="input",
    samples=(
        {"input": (2, 8, 12), "image_shape": np.array([4, 5]), "block_shape": np.array([2, 2]), "_static": True},
        {
            **{"input": (1, 12, 9), "image_shape": np.array([5, 6]), "block_shape": np.array([3, 2]), "_static": True},
            **{"pads": [1, 0, 1, 1], "strides": [2, 2], "dilations": [1, 2]},
        },
    ),
)
def col2im(op, input, block_shape, doutput, *, dilations=None, pads=None, strides=None):
    """The blocks of dY again: a convolution of each channel with one kernel per place of the block"""
    block = op.constant(block_shape)
    if block is None:
        raise Unsupported("block_shape is not constant")
    if block.size != 2:
        raise Unsupported("an image of other than two dimensions, which ONNX Runtime puts together wrongly")
    places = int(np.prod(block))
    pick = op.const(np.eye(places).reshape(places, 1, *block), like=doutput)
    channels = op.vector(op.dim(doutput, 0, 1), 1, *(op.dim(doutput, a) for a in range(2, op.rank(doutput))))
    image = op.Reshape(doutput, channels, allowzero=1)
    blocks = op.Conv(image, pick, pads=pads, strides=strides, dilations=dilations)
    return op.reshape_like(blocks, input)


@gradient(
    "AffineGrid",
    wrt="theta",
    samples=(
        {"theta": (2, 2, 3), "size": np.array([2, 1, 3, 4])},
        {"theta": (1, 3, 4), "size": np.array([1, 2, 3, 2, 4]), "align_corners": 1},
    ),
)
def affine_grid(op, theta, size, dgrid, *, align_corners=0):
    """grid = (coordinates, 1)·θᵀ:  dθ = dgridᵀ·(coordinates, 1), the coordinates those that the identity gives"""
    n = op.rank(dgrid) - 2
    identity = op.const(np.eye(n, n + 1)[None], like=dgrid)
    one = op.Concat([1], op.Slice(size, [1], [n + 2], [0]), axis=0)
    coordinates = op.Reshape(op.AffineGrid(identity, one, align_corners=align_corners), [-1, n])
    d = op.Reshape(dgrid, op.vector(op.dim(dgrid, 0), op.dim(dgrid, *range(1, n + 1)), n), allowzero=1)
    turned = op.MatMul(op.transpose_last(d), coordinates)
    return op.Concat(turned, op.Unsqueeze(op.ReduceSum(d, [1], keepdims=0), [2]), axis=2, _like=theta)


_PLACES = np.random.default_rng(8).uniform(-1.4, 1.4, (1, 3, 2, 2))
_VOLUME = {"X": (2, 2, 2, 3, 2), "grid": np.random.default_rng(9).uniform(-1.4, 1.4, (2, 1, 2, 2, 3))}


@gradient(
    "GridSample",
    samples=(
        {"X": _IMAGE, "grid": _PLACES},
        {"X": _IMAGE, "grid": _PLACES, "padding_mode": "border", "align_corners": 1},
        {"X": _IMAGE, "grid": _PLACES, "padding_mode": "reflection"},
        {"X": _IMAGE, "grid": _PLACES, "mode": "nearest"},
        {"X": _IMAGE, "grid": _PLACES, "mode": "cubic", "padding_mode": "reflection", "align_corners": 1},
        _VOLUME,
    ),
)
def grid_sample(op, X, grid, dY, *, align_corners=0, mode="linear", padding_mode="zeros"):
    """Y = Σ w(x - i)·X[i] over the places i around x:  dX[i] = Σ w·dY, dx = Σ w'·X[i]·dY  (Jaderberg et al., arXiv 1506.02025)

    Places outside are 0, or stand for the edge, or for their mirror image. mode="nearest" gives the grid the gradient 0.
    """
    n = op.rank(X) - 2
    batch, channels, points = op.dim(X, 0), op.dim(X, 1), op.dim(grid, *range(1, n + 1))
    places = op.Reshape(grid, op.vector(batch, 1, points, n), allowzero=1)
    scales, weights, slopes, index = [], [], [], None
    for axis in range(n):
        size = op.size(X, [axis + 2], like=grid)
        scales.append(((size - 1) if align_corners else size) * 0.5)
        x = op.Gather(places, op.const(n - 1 - axis), axis=3)
        at, weight, slope = _taps(op, (x + 1) * scales[-1] if align_corners else (x + 1) * scales[-1] - 0.5, mode)
        at, inside = _within(op, at, size, padding_mode, align_corners)
        # One dimension per axis for its taps: [batch, taps…, points].
        others = [a + 1 for a in range(n) if a != axis]
        at = op.Unsqueeze(op.Cast(at, to=7), others)
        index = at if index is None else op.Add(op.Mul(index, op.dim(X, axis + 2)), at)
        for found, v in ((weights, weight), (slopes, slope)):
            found.append(op.Unsqueeze(v if inside is None else op.where(inside, v, 0, like=grid), others))
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[mode] ** n
    spread = op.vector(batch, channels, op.Mul(op.vector(points), [taps]))
    index = op.Expand(op.Reshape(index, op.vector(batch, 1, op.Mul(op.vector(points), [taps])), allowzero=1), spread)
    g = op.Reshape(dY, op.vector(batch, channels, 1, points), allowzero=1)

    whole = op.cast(op.Reshape(reduce(op.Mul, weights), op.vector(batch, 1, taps, points), allowzero=1), X)
    zeros = op.zeros(op.vector(batch, channels, op.dim(X, *range(2, n + 2))), like=X)
    updates = op.Reshape(g * whole, spread, allowzero=1)
    dX = op.reshape_like(op.ScatterElements(zeros, index, updates, axis=2, reduction="add"), X)
    if mode == "nearest":
        return dX, op.zeros_like(grid)

    flat = op.Reshape(X, op.vector(batch, channels, op.dim(X, *range(2, n + 2))), allowzero=1)
    values = op.Reshape(op.GatherElements(flat, index, axis=2), op.vector(batch, channels, taps, points), allowzero=1)
    each = op.vector(batch, *[round(taps ** (1 / n))] * n, points)
    towards = op.cast(op.Reshape(op.ReduceSum(values * g, [1], keepdims=0), each, allowzero=1), grid)
    parts = []
    for axis in reversed(range(n)):
        slope = reduce(op.Mul, [slopes[a] if a == axis else weights[a] for a in range(n)])
        parts.append(op.Unsqueeze(op.ReduceSum(towards * slope, list(range(1, n + 1)), keepdims=0) * scales[axis], [2]))
    return dX, op.reshape_like(op.Concat(*parts, axis=2), grid)


def _taps(op, x, mode):
    """The places around x, their weights and the derivatives of these by x."""
    if mode == "nearest":
        return op.Round(x), op.ones_like(x), op.zeros_like(x)
    steps = [0, 1] if mode == "linear" else [-1, 0, 1, 2]
    at = op.Floor(x) + op.const(np.array(steps)[:, None], like=x)
    away = x - at
    if mode == "linear":
        return at, _tent(op, away), op.where(op.Less(away, op.const(0, like=x)), 1, op.const(-1, like=x), like=x)
    return at, _cubic(op, away, a=-0.75), op.Sign(away) * _cubic_slope(op, op.Abs(away), a=-0.75)


def _cubic_slope(op, d, *, a):
    """The derivative of ``_cubic`` for d >= 0"""
    near = (3 * (a + 2) * d - 2 * (a + 3)) * d
    far = (3 * a * d - 10 * a) * d + 8 * a
    return op.Where(op.Less(d, 1), near, op.Where(op.Less(d, 2), far, 0))


def _within(op, at, size, padding_mode, align_corners):
    """Places inside the image in the stead of those outside, and which were inside (None where all count)."""
    last, inside = size - 1, None
    if padding_mode == "zeros":
        inside = op.And(op.GreaterOrEqual(at, op.const(0, like=at)), op.LessOrEqual(at, last))
    elif padding_mode == "reflection":
        # A mirror at the outer pixels' centres or edges; an image of one pixel has its only pixel everywhere.
        low, span = (0.0, last) if align_corners else (-0.5, size)
        span = max(span, 0.5) if isinstance(span, float) else op.Max(span, 0.5)
        beyond = at - low
        beyond = beyond - op.Floor(beyond / (2 * span)) * (2 * span)
        at = op.Round(span - op.Abs(beyond - span) + low)
    return op.Max(op.Min(at, last), 0.0), inside


_ROIS = {
    "X": (2, 2, 5, 6),
    "rois": np.array([[0.3, 0.6, 4.1, 3.2], [-2.7, 1.1, 2.2, 6.4], [1.2, 0.4, 5.7, 4.3]]),
    "batch_indices": np.array([1, 0, 1]),
    "output_height": 2,
    "output_width": 3,
    "_constants": "rois",
}


@gradient(
    "RoiAlign",
    wrt="X",
    samples=(
        _ROIS,
        {**_ROIS, "sampling_ratio": 2, "spatial_scale": 0.7, "coordinate_transformation_mode": "output_half_pixel"},
        {**_ROIS, "sampling_ratio": 1, "_constants": "", "_inputs": "batch_indices"},
    ),
)
def roi_align(
    op,
    X,
    rois,
    batch_indices,
    dY,
    *,
    coordinate_transformation_mode="half_pixel",
    mode="avg",
    output_height=1,
    output_width=1,
    sampling_ratio=0,
    spatial_scale=1.0,
):
    """Y = R·X·Cᵀ for each region, R and C what its rows and columns take of X's:  dX = Σ Rᵀ·dY·C over an image's regions

    (He et al., arXiv 1703.06870; as there the regions get no gradient.) The sum is part of the product with Rᵀ.
    """
    if mode != "avg":
        raise Unsupported(f"mode={mode!r}")
    half_pixel = coordinate_transformation_mode == "half_pixel"
    rows, columns = (
        _bins(op, rois, first, op.size(X, [axis], like=rois), made, half_pixel, sampling_ratio, float(spatial_scale))
        for first, axis, made in ((1, 2, output_height), (0, 3, output_width))
    )
    wide = op.MatMul(dY, op.Unsqueeze(op.cast(columns, X), [1]))
    wide = op.Transpose(wide, perm=[0, 2, 1, 3])
    wide = op.Reshape(wide, op.vector(op.dim(wide, 0, 1), op.dim(wide, 2, 3)), allowzero=1)
    images = op.Unsqueeze(op.Range(op.const(0), op.Squeeze(op.vector(op.dim(X, 0)), [0]), op.const(1)), [1])
    own = op.cast(op.Equal(images, op.Unsqueeze(batch_indices, [0])), X)
    masked = op.Unsqueeze(own, [2, 3]) * op.cast(rows, X)
    masked = op.Reshape(masked, op.vector(op.dim(X, 0), op.dim(wide, 0), op.dim(X, 2)), allowzero=1)
    dX = op.MatMul(op.transpose_last(masked), wide)
    dX = op.Reshape(dX, op.vector(op.dim(X, 0), op.dim(X, 2), op.dim(X, 1), op.dim(X, 3)), allowzero=1)
    return op.Transpose(dX, perm=[0, 2, 1, 3], _like=X)


def _bins(op, rois, first, size, made, half_pixel, sampling_ratio, scale):
    """[regions, made, size]: how much each bin along an axis takes of each place; its samples count alike."""
    start, end = (
        op.Unsqueeze(op.Gather(rois, op.const(column), axis=1), [1, 2]) * scale - (0.5 if half_pixel else 0.0)
        for column in (first, first + 2)
    )
    span = end - start if half_pixel else op.Max(end - start, 1.0)
    length = span * (1 / made)
    if sampling_ratio:
        count, steps = op.const(sampling_ratio, like=rois), op.const(np.arange(sampling_ratio), like=rois)
    else:
        count = op.Ceil(length)
        most = op.ReduceMax(op.Concat(op.const(np.ones((1, 1, 1)), like=rois), count, axis=0), keepdims=0)
        steps = op.Range(0.0, most, 1.0)
    number = op.const(np.arange(made)[:, None], like=rois)
    x = start + length * (number + (steps + 0.5) / op.Max(count, 1.0))
    counted = op.And(op.And(op.GreaterOrEqual(x, op.const(-1, like=x)), op.LessOrEqual(x, size)), op.Less(steps, count))
    places = op.Range(0.0, op.const(size, like=x) if isinstance(size, float) else size, 1.0)
    weight = _tent(op, op.Unsqueeze(op.Max(op.Min(x, size - 1), 0.0), [3]) - places)
    weight = op.where(op.Unsqueeze(counted, [3]), weight, 0, like=x)
    return op.ReduceSum(weight, [2], keepdims=0) / op.Max(count, 1.0)
