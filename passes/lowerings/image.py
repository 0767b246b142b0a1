"""Operators on regions of images."""

from __future__ import annotations

from ortc.rules import lowering


@lowering("MaxRoiPool")
def max_roi_pool(op, X, rois, *, pooled_shape, spatial_scale=1.0):
    """The largest element of each bin of each region, 0 in an empty one (Girshick, arXiv 1504.08083)"""
    image = op.Cast(op.Squeeze(op.Slice(rois, [0], [1], [1]), [1]), to=7)
    columns = _bins(op, X, 3, rois, 1, pooled_shape[1], float(spatial_scale))
    rows = _bins(op, X, 2, rois, 2, pooled_shape[0], float(spatial_scale))
    nothing = float("-inf")
    wide = op.where(op.Unsqueeze(columns, [1, 2]), op.Unsqueeze(op.Gather(X, image, axis=0), [3]), nothing, like=X)
    wide = op.ReduceMax(wide, [4], keepdims=0)
    tall = op.where(op.Unsqueeze(rows, [1, 4]), op.Unsqueeze(wide, [2]), nothing, like=X)
    largest = op.ReduceMax(tall, [3], keepdims=0)
    return (op.where(op.Equal(largest, op.const(nothing, like=X)), 0, largest, like=X),)


def _bins(op, X, axis, rois, first, made, scale):
    """[regions, bins, size of the axis]: which elements a bin holds; pixels are rounded half up, as ONNX Runtime does."""
    begin, end = (op.Floor(op.Slice(rois, [c], [c + 1], [1]) * scale + 0.5) for c in (first, first + 2))
    width = op.Max(end - begin + 1, op.const(1, like=rois)) / float(made)
    bins = op.const(range(made), like=rois)
    low, high = op.Floor(bins * width) + begin, op.Ceil((bins + 1) * width) + begin
    size = op.Squeeze(op.vector(op.dim(X, axis)))
    places = op.cast(op.Range(op.const(0), size, op.const(1)), rois)
    return op.And(op.GreaterOrEqual(places, op.Unsqueeze(low, [2])), op.Less(places, op.Unsqueeze(high, [2])))
