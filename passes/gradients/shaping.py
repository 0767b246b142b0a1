"""Operators that move, repeat, cut and join without computing, and those whose outputs depend smoothly on nothing."""

from __future__ import annotations

import numpy as np

from ortc.rules import gradient, no_gradient, out_of_reach

no_gradient(
    *("Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size", "NonZero", "Unique", "NonMaxSuppression"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
    *("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"),
    *("StringNormalizer", "StringConcat", "StringSplit", "RegexFullMatch", "TfIdfVectorizer", "ImageDecoder"),
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"),
    *("QLinearConv", "QLinearMatMul"),
    *("OptionalHasElement", "SequenceLength"),
    "Hardmax",
)

out_of_reach(
    "the elements of its sequence are not known one by one while compiling",
    *("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap"),
    *("SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement"),
)
out_of_reach("it reads the bits of numbers as others, for which no operator up to the targets' opset exists", "BitCast")

_END = np.iinfo(np.int64).max


@gradient(
    "Reshape",
    wrt="data",
    samples=(
        {"data": (2, 3, 4), "shape": np.array([4, 6])},
        {"data": (), "shape": np.array([1, 1])},
        {"data": (2, 0), "shape": np.array([0, 2, 3]), "allowzero": 1},
    ),
)
def reshape(op, data, dreshaped):
    """Back to the shape of X"""
    return op.reshape_like(dreshaped, data)


@gradient("Flatten", samples=({"input": (2, 3, 4)}, {"input": (2, 3, 4), "axis": -1}, {"input": (), "axis": 0}))
def flatten(op, input, doutput):
    """Back to the shape of X"""
    return op.reshape_like(doutput, input)


def _turned(op, x):
    """A matrix transposed; of one that is itself a transpose, what it was made of."""
    producer = x.producer()
    if producer is not None and producer.op_type == "Transpose":
        return producer.inputs[0]
    return op.Transpose(x, perm=[1, 0])


@gradient("Transpose", samples=({"data": (2, 3, 4), "perm": [2, 0, 1]}, {"data": (2, 3)}, {"data": ()}))
def transpose(op, data, dtransposed, *, perm=None):
    """dX = dY under the inverse permutation; a product that was made for nothing else is made the other way round"""
    product = dtransposed.producer()
    if op.rank(data) == 2 and product is not None and product.op_type == "MatMul" and len(dtransposed.uses()) == 0:
        a, b = product.inputs
        return op.MatMul(_turned(op, b), _turned(op, a), _like=data)
    return op.Transpose(dtransposed, perm=None if perm is None else np.argsort(perm), _like=data)


@gradient(
    "Squeeze",
    wrt="data",
    samples=({"data": (1, 3, 1), "axes": np.array([-1])}, {"data": (1, 3, 1), "axes": np.array([0, 2])}),
)
def squeeze(op, data, axes, dsqueezed):
    """The axes are put back."""
    return op.reshape_like(dsqueezed, data) if axes is None else op.Unsqueeze(dsqueezed, axes, _like=data)


@gradient("Unsqueeze", wrt="data", samples=({"data": (2, 3), "axes": np.array([0, -1])}, {"data": (), "axes": np.array([0])}))
def unsqueeze(op, data, axes, dexpanded):
    """The axes go again."""
    return op.Squeeze(dexpanded, axes, _like=data)


@gradient(
    "Expand",
    wrt="input",
    samples=({"input": (3, 1), "shape": np.array([2, 1, 4])}, {"input": (), "shape": np.array([2])}),
)
def expand(op, doutput):
    """dX = dY, summed over what was repeated (by the engine)"""
    return doutput


@gradient(
    "Concat",
    samples=({"inputs": [(2, 3), (2, 1), (2, 0)], "axis": -1}, {"inputs": [(2, 3), (4, 3)], "axis": 0}),
)
def concat(op, inputs, dconcat_result, *, axis):
    """Each input gets its own part of dY, cut out on its own so that an unneeded one costs nothing."""
    [axis] = op.axes(dconcat_result, axis)
    if len(inputs) == 1:
        return [dconcat_result]
    parts, start = [], 0
    for x in inputs:
        end = _plus(op, start, op.dim(x, axis))
        parts.append(op.Slice(dconcat_result, op.vector(start), op.vector(end), [axis], _like=x))
        start = end
    return parts


def _plus(op, a, b):
    """The sum of numbers and int64 vectors of one element."""
    return a + b if isinstance(a, int) and isinstance(b, int) else op.Add(op.vector(a), op.vector(b))


@gradient(
    "Split",
    wrt="input",
    samples=(
        {"input": (2, 6), "split": np.array([1, 2, 3]), "axis": -1, "_outputs": 3},
        {"input": (7, 2), "num_outputs": 3, "_outputs": 3},
        {"input": (6, 2), "num_outputs": 2, "_outputs": 2},
        {"input": (4,), "split": np.array([4])},
        {"input": (6, 2), "split": np.array([2, 1, 3]), "_outputs": ["a", "", "b"]},
    ),
)
def split(op, input, outputs, doutputs, *, axis=0, num_outputs=None):
    """The parts joined again; zeros where no gradient arrives"""
    parts = [op.zeros_like(y) if d is None else d for y, d in zip(outputs, doutputs, strict=True)]
    return op.Concat(*parts, axis=axis, _like=input) if len(parts) > 1 else parts[0]


def _cut(starts, ends, steps=None, inputs=""):
    """A sample that slices a [7, 6]: along the last axes if several are given, else along the first."""
    axes = [0] if len(starts) == 1 else [-1, 0]
    named = {"starts": starts, "ends": ends, "axes": axes, **({"steps": steps} if steps else {})}
    return {"data": (7, 6), **{k: np.array(v) for k, v in named.items()}, "_inputs": inputs}


@gradient(
    "Slice",
    wrt="data",
    samples=(
        {"data": (5, 4), "starts": np.array([1]), "ends": np.array([3])},
        _cut([-3, 1], [_END, -1]),
        _cut([1, 0], [6, _END], [2, 3]),
        _cut([-1], [-_END], [-1]),
        _cut([5], [0], [-2]),
        _cut([2], [1]),
        _cut([2], [1], [2]),
        _cut([1], [2], [-2]),
        _cut([-3], [6], None, "starts ends"),
        _cut([6, 1], [1, 5], [-2, 3], "starts ends"),
        _cut([6], [1], [-2], "starts ends steps"),
        _cut([6], [1], [-2], "axes"),
    ),
)
def slice_(op, data, starts, ends, axes, steps, doutput):
    """dY in the place that it was cut from, among zeros

    A step s is undone by s - 1 zeros after each element; a negative one by reversing first. Then zeros (or, where the
    last step overshoots, cuts) on both sides restore the size.
    """
    if 0 in op.dims(doutput):
        return op.zeros_like(data)
    along, stride = op.constant(axes), op.constant(steps)
    count = op.dims(starts)[0]
    if (axes is not None and along is None) or (steps is not None and stride is None) or not isinstance(count, int):
        return _put_back(op, data, op.Slice(_positions(op, data), starts, ends, axes, steps), doutput)
    along = op.axes(data, range(count) if along is None else along)
    stride = np.ones(count, np.int64) if stride is None else stride.astype(np.int64)
    first, last = _bounds(op, data, starts, doutput, along, stride)
    backwards = [a for a, s in zip(along, stride, strict=True) if s < 0]
    if backwards:
        n = len(backwards)
        doutput = op.Slice(doutput, [-1] * n, [-_END] * n, backwards, [-1] * n)
    for axis, step in zip(along, stride, strict=True):
        doutput = _dilate(op, doutput, axis, abs(int(step)))
    return doutput if _is_zero(op, first, last) else op.pad(doutput, op.vector(first, last), along, like=data)


def _is_zero(op, *vectors):
    known = [op.constant(v) for v in vectors]
    return all(v is not None and not v.any() for v in known)


def _bounds(op, data, starts, doutput, along, stride):
    """How many zeros go before and after dY (its elements ``stride`` apart) along each axis, as int64 vectors."""
    size, count = (_sizes(op, x, along) for x in (data, doutput))
    reach = count * np.abs(stride) if isinstance(count, np.ndarray) else op.Mul(count, np.abs(stride))
    start = op.constant(starts)
    if start is not None and isinstance(size, np.ndarray) and isinstance(count, np.ndarray):
        start = np.clip(np.where(start < 0, start + size, start), 0, np.where(stride < 0, size - 1, size))
        first = np.clip(np.where(stride < 0, start + stride * (count - 1), start), 0, size)
        return op.const(first), op.const(size - first - reach)
    size, count, reach = (op.const(v) if isinstance(v, np.ndarray) else v for v in (size, count, reach))
    start = op.Cast(starts, to=7) if starts.dtype != size.dtype else starts
    start = op.Where(op.Less(start, 0), start + size, start)
    first = op.Max(op.Min(start, size - (stride < 0).astype(np.int64)), op.const(0))
    if (stride < 0).any():
        first = op.Min(first + op.Mul(count - 1, np.minimum(stride, 0)), size)
    return first, size - first - reach


def _sizes(op, x, axes):
    """The dimensions along ``axes``: an array if known, else an int64 vector."""
    known = [op.dims(x)[a] for a in axes]
    return np.array(known, np.int64) if all(isinstance(d, int) for d in known) else op.Gather(op.shape(x), axes)


def _dilate(op, x, axis, step):
    """``step - 1`` zeros after each element along the axis (by Concat: Pad takes ten times as long on a short axis)."""
    if step == 1:
        return x
    sizes = [op.dim(x, a) for a in range(op.rank(x))]
    zeros = op.zeros(op.vector(*sizes[: axis + 1], step - 1, *sizes[axis + 1 :]), like=x)
    apart = op.Concat(op.Unsqueeze(x, [axis + 1]), zeros, axis=axis + 1)
    merged = [*sizes[:axis], _times(op, sizes[axis], step), *sizes[axis + 1 :]]
    return op.Reshape(apart, op.vector(*merged), allowzero=1)


def _times(op, size, factor):
    return size * factor if isinstance(size, int) else op.Mul(size, [factor])


def _positions(op, data):
    """The row-major number of every element, in the shape of ``data``."""
    numbers = op.Range(op.const(0), op.Size(data), op.const(1))
    return op.Reshape(numbers, op.shape(data), allowzero=1)


def _put_back(op, data, positions, gradient):
    """Zeros like ``data`` with the gradient added at the row-major positions."""
    zeros = op.zeros(op.Reshape(op.Size(data), [1]), like=data)
    flat = (op.Reshape(x, [-1]) for x in (positions, gradient))
    return op.reshape_like(op.ScatterElements(zeros, *flat, axis=0, reduction="add"), data)


_PADS = np.array([1, 0, 2, 2])


@gradient(
    "Pad",
    wrt="data constant_value",
    samples=(
        {"data": (3, 4), "pads": _PADS},
        {"data": (3, 4), "pads": np.array([-1, 2, 0, -1]), "constant_value": ()},
        {"data": (3, 4), "pads": np.array([1, 2]), "axes": np.array([-1])},
        {"data": (3, 4), "pads": np.array([1, 2]), "axes": np.array([-1]), "mode": "reflect"},
        *({"data": (3, 4), "pads": _PADS, "mode": mode} for mode in ("reflect", "edge", "wrap")),
        {"data": (3, 4), "pads": _PADS, "mode": "edge", "_inputs": "pads"},
        {"data": (3, 4), "pads": _PADS, "_inputs": "pads"},
    ),
)
def pad(op, data, pads, constant_value, axes, doutput, *, mode="constant"):
    """Constant: dX = dY cut to X, dvalue = the sum of the rest. Otherwise each element goes to where it was read."""
    if mode != "constant":
        return _put_back(op, data, op.Pad(_positions(op, data), pads, None, axes, mode=mode), doutput), None
    known = op.constant(pads)
    inside = op.Pad(doutput, op.Neg(pads) if known is None else op.const(-known), None, axes, _like=data)
    if constant_value is None:
        return inside, None
    return inside, op.ReduceSum(doutput, keepdims=0) - op.ReduceSum(inside, keepdims=0)


@gradient(
    "Tile",
    wrt="input",
    samples=(
        {"input": (2, 3), "repeats": np.array([2, 1])},
        {"input": (2, 3), "repeats": np.array([3, 2])},
        {"input": (2, 3), "repeats": np.array([3, 2]), "_inputs": "repeats"},
    ),
)
def tile(op, input, repeats, doutput):
    """Y as [r0, d0, r1, d1, …]: dX = dY summed over the repeats"""
    r = op.rank(input)
    known = op.constant(repeats)
    times = [op.Slice(repeats, [i], [i + 1]) for i in range(r)] if known is None else [int(n) for n in known]
    apart = [part for axis in range(r) for part in (times[axis], op.dim(input, axis))]
    split = op.Reshape(doutput, op.vector(*apart), allowzero=1)
    return op.ReduceSum(split, list(range(0, 2 * r, 2)), keepdims=0, _like=input)


@gradient(
    "Trilu",
    wrt="input",
    samples=(
        {"input": (2, 3, 4)},
        {"input": (3, 4), "k": np.array(-1), "upper": 0},
        {"input": (3, 3), "k": np.array(1)},
    ),
)
def trilu(op, input, k, doutput, *, upper=1):
    """The same triangle of dY"""
    return op.Trilu(doutput, k, upper=upper, _like=input)


@gradient(
    "ReverseSequence",
    wrt="input",
    samples=(
        {"input": (4, 3, 2), "sequence_lens": np.array([4, 2, 1])},
        {"input": (3, 4), "sequence_lens": np.array([4, 2, 1]), "batch_axis": 0, "time_axis": 1},
    ),
)
def reverse_sequence(op, input, sequence_lens, dY, *, batch_axis=1, time_axis=0):
    """Reversed again"""
    return op.ReverseSequence(dY, sequence_lens, batch_axis=batch_axis, time_axis=time_axis, _like=input)


@gradient(
    "CenterCropPad",
    wrt="input_data",
    samples=(
        {"input_data": (5, 4), "shape": np.array([2, 7])},
        {"input_data": (2, 5, 4), "shape": np.array([8, 1]), "axes": [1, -1]},
    ),
)
def center_crop_pad(op, input_data, doutput_data, *, axes=None):
    """Cropped where it was padded, padded where it was cropped"""
    along = op.axes(input_data, axes)
    shape = op.vector(*(op.dim(input_data, a) for a in along))
    return op.CenterCropPad(doutput_data, shape, axes=along, _like=input_data)
