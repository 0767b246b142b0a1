"""A reference in float64: a model's copy in that precision, and kernels where ONNX's reference evaluator falls short.

Finite differences need every digit of float64. ONNX's reference (``onnx.reference``) is taken as it is but for the kernels
below, which it lacks, rounds to float32, or computes otherwise than the standard says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_scan import Scan as StandardScan

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

# Rules (as ``ortc.rule`` says of a node) whose gradient is by declaration not the derivative.
STRAIGHT_THROUGH = frozenset({"FakeQuantize"})


def evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Runs a model of standard operators in the types that it has; ``run(None, feeds)`` gives its outputs."""
    return ReferenceEvaluator(model, new_ops=REPLACED)


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model in float64 throughout."""
    return retyped(model, TensorProto.DOUBLE)


def retyped(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """A copy of the model in one floating-point type: inputs, outputs, constants, and what Cast and the like make."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    _retype_graph(model.graph, dtype)
    for function in model.functions:
        _retype_nodes(function.node, dtype)
    return model


def _retype_graph(graph: onnx.GraphProto, dtype: int) -> None:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        kind = value.type.tensor_type
        if kind.elem_type in _FLOATS:
            kind.elem_type = dtype
    for tensor in graph.initializer:
        _retype_tensor(tensor, dtype)
    _retype_nodes(graph.node, dtype)


def _retype_nodes(nodes: Iterable[onnx.NodeProto], dtype: int) -> None:
    for node in nodes:
        if node.op_type == "ConstantOfShape" and not node.attribute:  # float32 zeros
            node.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.zeros(1, np.float32))))
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
                attribute.i = dtype
            if attribute.name in ("value_float", "value_floats"):  # a Constant's; they are float32 by their kind
                numbers = attribute.f if attribute.name == "value_float" else attribute.floats
                tensor = onnx.numpy_helper.from_array(np.array(numbers, np.float32))
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            if attribute.type == onnx.AttributeProto.TENSOR:
                _retype_tensor(attribute.t, dtype)
            for graph in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
                _retype_graph(graph, dtype)


# Attributes that name an element type, in any operator.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "output_datatype"})


def _retype_tensor(tensor: onnx.TensorProto, dtype: int) -> None:
    if tensor.data_type in _FLOATS:
        array = onnx.numpy_helper.to_array(tensor).astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


class Erf(OpRun):
    """ONNX's reference rounds erf to float32, too coarse for differences."""

    def _run(self, x):
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Gelu(OpRun):
    """Likewise."""

    def _run(self, x, approximate="none"):
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))),)


class Inverse(OpRun):
    """An operator of ONNX Runtime."""

    op_domain = "com.microsoft"

    def _run(self, x):
        return (np.linalg.inv(x),)


class FusedMatMul(OpRun):
    """Likewise: alpha·A·B, either one transposed."""

    op_domain = "com.microsoft"

    def _run(self, a, b, alpha=1.0, transA=0, transB=0):
        x, y = (np.swapaxes(v, -1, -2) if swap else v for v, swap in ((a, transA), (b, transB)))
        return (np.asarray(alpha, a.dtype) * np.matmul(x, y),)


class BatchNormInternal(OpRun):
    """Likewise: batch norm on the statistics of the batch, which it gives as well."""

    op_domain = "com.microsoft"

    def _run(self, x, scale, bias, mean, var, epsilon=1e-5, momentum=0.9, training_mode=1):
        axes, by_channel = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        own_mean, own_var = x.mean(axes), x.var(axes)
        inverse = 1 / np.sqrt(own_var + epsilon)
        y = (x - own_mean.reshape(by_channel)) * (inverse * scale).reshape(by_channel) + bias.reshape(by_channel)
        running = (momentum * old + (1 - momentum) * own for old, own in ((mean, own_mean), (var, own_var)))
        return (y, *running, own_mean, inverse)


class Pad(OpRun):
    """ONNX's reference knows no negative pads, which cut."""

    def _run(self, data, pads, value=None, axes=None, mode="constant"):
        widths = np.zeros((data.ndim, 2), np.int64)
        widths[range(data.ndim) if axes is None else axes] = np.reshape(pads, (2, -1)).T
        fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
        grown = np.pad(data, np.maximum(widths, 0), mode=mode, **fill)
        ends = [(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, grown.shape, strict=True)]
        return (grown[tuple(slice(a, b) for a, b in ends)],)


class GatherElements(OpRun):
    """ONNX's reference wants indices as large as the data in every other dimension; the standard does not."""

    def _run(self, data, indices, axis=0):
        axis %= data.ndim
        part = tuple(slice(None if a == axis else n) for a, n in enumerate(indices.shape))
        return (np.take_along_axis(data[part], indices, axis),)


class ConvTranspose(OpRun):
    """ONNX's reference cannot reshape the weights of groups; this follows the spec."""

    def _run(self, X, W, B=None, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides):
        n = X.ndim - 2
        strides, dilations = strides or [1] * n, dilations or [1] * n
        pads, extra = pads or [0] * 2 * n, output_padding or [0] * n
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            output_shape = output_shape or [s * i for s, i in zip(strides, X.shape[2:], strict=False)]
        span = [s * (i - 1) + (k - 1) * d + 1 for s, i, k, d in zip(strides, X.shape[2:], W.shape[2:], dilations, strict=False)]
        if output_shape:
            extra = [max(b, size - a) for a, b, size in zip(span, extra, output_shape, strict=False)]
            total = [a + b - size for a, b, size in zip(span, extra, output_shape, strict=False)]
            halves = [t // 2 for t in total], [t - t // 2 for t in total]
            begin, end = halves if auto_pad == "SAME_UPPER" else halves[::-1]
            pads = [*begin, *end]
        full = np.zeros((X.shape[0], W.shape[1] * group, *(a + b for a, b in zip(span, extra, strict=False))), X.dtype)
        c, m = X.shape[1] // group, W.shape[1]
        for g in range(group):
            x, w, y = X[:, g * c : (g + 1) * c], W[g * c : (g + 1) * c], full[:, g * m : (g + 1) * m]
            for k in np.ndindex(*W.shape[2:]):
                at = [
                    slice(j * d, j * d + s * (i - 1) + 1, s)
                    for j, d, s, i in zip(k, dilations, strides, X.shape[2:], strict=False)
                ]
                y[(slice(None), slice(None), *at)] += np.einsum("nc...,cm->nm...", x, w[(slice(None), slice(None), *k)])
        cut = [slice(a, size - b) for a, b, size in zip(pads[:n], pads[n:], full.shape[2:], strict=False)]
        full = full[(slice(None), slice(None), *cut)]
        return (full if B is None else full + B.reshape(-1, *[1] * n),)


class AffineGrid(OpRun):
    """ONNX's reference rounds to float32."""

    def _run(self, theta, size, align_corners=0):
        lines = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:]]
        places = np.meshgrid(*lines, indexing="ij")[::-1]
        return (np.einsum("nij,j...->n...i", theta, np.stack([*places, np.ones_like(places[0])])),)


class GridSample(OpRun):
    """ONNX's reference rounds to float32; this follows the spec, one point after the other."""

    def _run(self, X, grid, align_corners=0, mode="linear", padding_mode="zeros"):
        Y = np.zeros((*X.shape[:2], *grid.shape[1:-1]))
        for b, *point in np.ndindex(*grid.shape[:-1]):
            taps = []
            for g, size in zip(grid[(b, *point)][::-1], X.shape[2:], strict=True):
                x = (g + 1) * (size - 1) / 2 if align_corners else ((g + 1) * size - 1) / 2
                low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
                found = [(_placed(i, size, low, high, padding_mode), w) for i, w in _around(x, mode)]
                taps.append([(i, w) for i, w in found if 0 <= i < size])
            for chosen in itertools.product(*taps):
                places, weights = zip(*chosen, strict=True)
                Y[(b, slice(None), *point)] += math.prod(weights) * X[(b, slice(None), *places)]
        return (Y,)


def _around(x: float, mode: str) -> list[tuple[int, float]]:
    """The places around x that GridSample reads, and how much of each."""
    if mode == "nearest":
        return [(round(x), 1.0)]
    at, a = math.floor(x), -0.75
    t = x - at
    if mode == "linear":
        return [(at, 1 - t), (at + 1, t)]
    near, far = lambda d: (a + 2) * d**3 - (a + 3) * d**2 + 1, lambda d: a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return [(at - 1, far(1 + t)), (at, near(t)), (at + 1, near(1 - t)), (at + 2, far(2 - t))]


def _placed(i: int, size: int, low: float, high: float, padding_mode: str) -> int:
    """What stands for a place outside of the image."""
    if padding_mode == "border" or (padding_mode == "reflection" and low == high):
        return min(max(i, 0), size - 1)
    while padding_mode == "reflection" and not low <= i <= high:
        i = int(2 * (low if i < low else high) - i)
    return i


class GroupNormalization(OpRun):
    """ONNX's reference rounds to float32."""

    def _run(self, X, scale, bias, epsilon=1e-5, num_groups=None, stash_type=1):
        groups = X.reshape(X.shape[0], num_groups, -1)
        mean, variance = (f(groups, axis=-1, keepdims=True) for f in (np.mean, np.var))
        per_channel = (-1, *[1] * (X.ndim - 2))
        Y = ((groups - mean) / np.sqrt(variance + epsilon)).reshape(X.shape)
        return (Y * scale.reshape(per_channel) + bias.reshape(per_channel),)


class LpNormalization(OpRun):
    """ONNX's reference takes the 1-norm without absolute values."""

    def _run(self, x, axis=-1, p=2):
        return (x / (np.abs(x) ** p).sum(axis=axis, keepdims=True) ** (1 / p),)


class GlobalLpPool(OpRun):
    """ONNX has no reference of it."""

    def _run(self, x, p=2):
        return ((np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class GlobalMaxPool(OpRun):
    """ONNX's reference knows two spatial axes only."""

    def _run(self, x):
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class MaxPool(OpRun):
    """ONNX's reference is wrong for SAME_LOWER, and in the indices where there is one spatial axis."""

    def _run(self, x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides):
        n, sizes = x.ndim - 2, x.shape[2:]
        strides, dilations = strides or [1] * n, dilations or [1] * n
        reach = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations, strict=True)]
        pads = list(pads) if pads and auto_pad in (None, "NOTSET") else [0] * 2 * n
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            total = [max((-(-i // s) - 1) * s + r - i, 0) for i, s, r in zip(sizes, strides, reach, strict=True)]
            halves = [t // 2 for t in total], [t - t // 2 for t in total]
            pads = [p for half in (halves if auto_pad == "SAME_UPPER" else halves[::-1]) for p in half]
        span = [i + a + b - r for i, a, b, r in zip(sizes, pads, pads[n:], reach, strict=False)]
        made = [(-(-t // s) if ceil_mode else t // s) + 1 for t, s in zip(span, strides, strict=True)]
        made = [m - ((m - 1) * s >= i + a) for m, s, i, a in zip(made, strides, sizes, pads, strict=False)]  # begins beyond x
        widths = [(0, 0)] * 2 + [(a, b + s) for a, b, s in zip(pads, pads[n:], strides, strict=False)]
        least = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        full = np.pad(x, widths, constant_values=least)
        numbers = np.arange(x.size).reshape(x.shape)
        if storage_order:
            numbers = np.arange(x.size).reshape(*x.shape[:2], *sizes[::-1]).transpose(0, 1, *range(n + 1, 1, -1))
        numbers = np.pad(numbers, widths, constant_values=-1)
        parts = []
        for place in np.ndindex(*kernel_shape):
            steps = zip(place, dilations, strides, made, strict=True)
            at = (slice(None), slice(None), *(slice(j * d, j * d + s * (m - 1) + 1, s) for j, d, s, m in steps))
            parts.append((full[at], numbers[at]))
        values, places = (np.stack(part) for part in zip(*parts, strict=True))
        best = values.argmax(axis=0)[None]
        found = [np.take_along_axis(part, best, axis=0)[0] for part in (values, places)]
        return tuple(found[: len(self.onnx_node.output)])


class LpPool(OpRun):
    """ONNX's reference loses the windows that begin inside and end outside; this follows the spec."""

    def _run(self, x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):
        n = x.ndim - 2
        strides, dilations, pads = strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            sizes = zip(x.shape[2:], kernel_shape, strides, dilations, strict=True)
            total = [max((-(-i // s) - 1) * s + (k - 1) * d + 1 - i, 0) for i, k, s, d in sizes]
            halves = [t // 2 for t in total], [t - t // 2 for t in total]
            pads = [*halves[0], *halves[1]] if auto_pad == "SAME_UPPER" else [*halves[1], *halves[0]]
        span = [a + b - (k - 1) * d - 1 for a, b, k, d in zip(pads, pads[n:], kernel_shape, dilations, strict=False)]
        made = [-(-(i + a) // s) if ceil_mode else (i + a) // s for i, a, s in zip(x.shape[2:], span, strides, strict=True)]
        full = np.pad(np.abs(x) ** p, [(0, 0)] * 2 + [(a, b + s) for a, b, s in zip(pads, pads[n:], strides, strict=False)])
        total = np.zeros((*x.shape[:2], *(m + 1 for m in made)))
        for place in np.ndindex(*kernel_shape):
            at = [slice(j * d, j * d + s * m + 1, s) for j, d, s, m in zip(place, dilations, strides, made, strict=True)]
            total += full[(slice(None), slice(None), *at)]
        return (total ** (1 / p),)


class MeanVarianceNormalization(OpRun):
    """ONNX's reference mixes element types."""

    def _run(self, x, axes=(0, 2, 3)):
        mean, deviation = (f(x, axis=tuple(axes), keepdims=True) for f in (np.mean, np.std))
        return ((x - mean) / (deviation + 1e-9),)


class LRN(OpRun):
    """ONNX's reference counts the batch as the channels."""

    def _run(self, x, alpha=1e-4, beta=0.75, bias=1.0, size=None):
        before, channels = (size - 1) // 2, x.shape[1]
        windows = [slice(max(c - before, 0), c - before + size) for c in range(channels)]
        squares = np.stack([(x[:, w] ** 2).sum(axis=1) for w in windows], axis=1)
        return (x / (bias + alpha / size * squares) ** beta,)


class Scan(StandardScan):
    """ONNX's reference walks forwards only; this follows the spec along the first axis."""

    def __init__(self, onnx_node, run_params):
        OpRun.__init__(self, onnx_node, run_params)

    def _run(self, *args, context=None, body=None, num_scan_inputs=None, scan_input_directions=None, bindings=None, **_):
        count = len(args) - num_scan_inputs
        states, sequences = list(args[:count]), args[count:]
        backwards = bool(scan_input_directions) and scan_input_directions[0] == 1
        order = range(len(sequences[0]))[:: -1 if backwards else 1]
        results = []
        for t in order:
            names = dict(zip(self.body.input_names, [*states, *(s[t] for s in sequences)], strict=True))
            outputs = list(self._run_body({**(context or {}), **names}, bindings=bindings))
            states = outputs[:count]
            results.append(outputs[count:])
        columns = zip(*(results[::-1] if backwards else results), strict=True)
        return (*states, *(np.stack(c) for c in columns))


class Recurrent(OpRun):
    """ONNX's reference of the recurrent layers lacks sequence lengths, activations, clipping; this follows the spec.

    What the spec leaves open is as in ONNX Runtime: see passes/gradients/recurrent.py.
    """

    defaults: ClassVar[tuple[str, ...]]
    kept: ClassVar[tuple[int, ...]] = ()  # what a training form gives of every step as well, in hidden sizes

    def _run(self, X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, **attributes):
        initial = [initial_h, initial_c][: 1 + (len(self.defaults) == 3)]
        if attributes.get("layout"):
            X, initial = X.swapaxes(0, 1), [None if s is None else s.swapaxes(0, 1) for s in initial]
        (steps, batch, _), (directions, _, hidden) = X.shape, R.shape
        lens = np.full(batch, steps) if sequence_lens is None else sequence_lens
        initial = [np.zeros((directions, batch, hidden), X.dtype) if s is None else s for s in initial]
        B = np.zeros((directions, 2 * R.shape[1]), X.dtype) if B is None else B
        P = np.zeros((directions, 3 * hidden), X.dtype) if P is None else P
        functions = _activations(attributes.get("activations") or self.defaults * directions, attributes)
        clip = attributes.get("clip") or np.inf
        Y, *kept = (np.zeros((steps, directions, batch, n * hidden), X.dtype) for n in (1, *self.kept))
        last = [np.zeros_like(s) for s in initial]
        for d, n in np.ndindex(directions, batch):
            state = [s[d, n] for s in initial]
            used = functions[d * len(self.defaults) :][: len(self.defaults)]
            gates = [lambda x, f=f: f(np.clip(x, -clip, clip)) for f in used[:2]] + used[2:]
            for t in list(range(lens[n]))[:: -1 if d or attributes.get("direction") == "reverse" else 1]:
                state, inner = self.step(W[d] @ X[t, n], state, R[d], *np.split(B[d], 2), np.split(P[d], 3), gates, attributes)
                Y[t, d, n] = state[0]
                for array, value in zip(kept, inner, strict=False):
                    array[t, d, n] = value
            for s, value in zip(last, state, strict=True):
                s[d, n] = value if lens[n] else 0
        if attributes.get("layout"):
            return Y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in last)
        return Y, *last, *kept


class LSTM(Recurrent):
    defaults = ("Sigmoid", "Tanh", "Tanh")

    def step(self, x, state, R, Wb, Rb, P, functions, attributes):
        (h_, c_), (f, g, h) = state, functions
        i, o, keep, new = np.split(x + R @ h_ + Wb + Rb, 4)
        i = f(i + P[0] * c_)
        keep = 1 - i if attributes.get("input_forget") else f(keep + P[2] * c_)
        new = g(new)
        c = keep * c_ + i * new
        o = f(o + P[1] * c)
        return [o * h(c), c], [c, np.concatenate([i, o, keep, new])]


class LSTMTraining(LSTM):
    """An operator of ONNX Runtime: all cell states, and the gates i, o, f, c."""

    op_domain = "com.microsoft"
    kept = (1, 4)


class GRU(Recurrent):
    defaults = ("Sigmoid", "Tanh")

    def step(self, x, state, R, Wb, Rb, P, functions, attributes):
        (h,), (f, g) = state, functions
        (xz, xr, xn), (Rz, Rr, Rn), (bz, br, bn) = (np.split(v, 3) for v in (x + Wb, R, Rb))
        z, r = f(xz + Rz @ h + bz), f(xr + Rr @ h + br)
        n = g(xn + (r * (Rn @ h + bn) if attributes.get("linear_before_reset") else Rn @ (r * h) + bn))
        return [(1 - z) * n + z * h], [np.concatenate([z, r, n])]


class GRUTraining(GRU):
    """Likewise: the gates z, r, h."""

    op_domain = "com.microsoft"
    kept = (3,)


class RNN(Recurrent):
    defaults = ("Tanh",)

    def step(self, x, state, R, Wb, Rb, P, functions, attributes):
        return [functions[0](x + R @ state[0] + Wb + Rb)], []


def _activations(names: Sequence[str], attributes: Mapping[str, Any]) -> list[Callable[[np.ndarray], np.ndarray]]:
    """The activations of the recurrent layers, by the table in their spec; each takes its scales off the lists."""
    table: dict[str, tuple[Callable[..., np.ndarray], int]] = {
        "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 0),
        "Tanh": (np.tanh, 0),
        "Relu": (lambda x: np.maximum(x, 0), 0),
        "Softsign": (lambda x: x / (1 + np.abs(x)), 0),
        "Softplus": (lambda x: np.log(1 + np.exp(x)), 0),
        "Affine": (lambda x, a, b: a * x + b, 2),
        "LeakyRelu": (lambda x, a: np.where(x >= 0, x, a * x), 1),
        "ThresholdedRelu": (lambda x, a: np.where(x >= a, x, 0), 1),
        "ScaledTanh": (lambda x, a, b: a * np.tanh(b * x), 2),
        "HardSigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 2),
        "Elu": (lambda x, a: np.where(x >= 0, x, a * (np.exp(x) - 1)), 1),
    }
    left = [list(attributes.get(f"activation_{k}") or []) for k in ("alpha", "beta")]
    found: list[Any] = []
    for name in names:
        function, count = table[name]
        scales = [given.pop(0) for given in left[:count]]
        found.append(lambda x, function=function, scales=scales: function(x, *scales))
    return found


REPLACED: list[type[OpRun]] = [
    FusedMatMul,
    BatchNormInternal,
    GroupNormalization,
    GridSample,
    AffineGrid,
    LpNormalization,
    GlobalLpPool,
    GlobalMaxPool,
    MaxPool,
    LpPool,
    MeanVarianceNormalization,
    LRN,
    LSTM,
    LSTMTraining,
    GRU,
    GRUTraining,
    RNN,
    Scan,
    ConvTranspose,
    Erf,
    Gelu,
    Inverse,
    Pad,
    GatherElements,
]
