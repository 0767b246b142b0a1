"""Checks a gradient rule on one node against central finite differences.

The node is run twice: in float64 by ONNX's reference evaluator, where its gradient must equal the directional finite
difference along one random direction per input; and in float32 by ONNX Runtime with the same shapes static and
symbolic, where the gradient graph must give the float64 values again.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import packages_distributions
from itertools import product
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_scan import Scan as StandardScan

from ortc.autodiff import loss_gradients
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import keeps, lower
from ortc.rules import GRADIENTS, GradientRule, OpKey, load_declarations
from ortc.target import Target, load_target

load_declarations("ortc.passes.lowerings")

OPSET = 21
STEP = 1e-6


class Erf(OpRun):
    """ONNX's reference rounds erf to float32, too coarse for differences."""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Gelu(OpRun):
    """Likewise."""

    def _run(self, x, approximate="none"):  # type: ignore[no-untyped-def]
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))),)


class Inverse(OpRun):
    """An operator of ONNX Runtime."""

    op_domain = "com.microsoft"

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (np.linalg.inv(x),)


class Pad(OpRun):
    """ONNX's reference knows no negative pads, which cut."""

    def _run(self, data, pads, value=None, axes=None, mode="constant"):  # type: ignore[no-untyped-def]
        widths = np.zeros((data.ndim, 2), np.int64)
        widths[range(data.ndim) if axes is None else axes] = np.reshape(pads, (2, -1)).T
        fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
        grown = np.pad(data, np.maximum(widths, 0), mode=mode, **fill)
        ends = [(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, grown.shape, strict=True)]
        return (grown[tuple(slice(a, b) for a, b in ends)],)


class GatherElements(OpRun):
    """ONNX's reference wants indices as large as the data in every other dimension; the standard does not."""

    def _run(self, data, indices, axis=0):  # type: ignore[no-untyped-def]
        axis %= data.ndim
        part = tuple(slice(None if a == axis else n) for a, n in enumerate(indices.shape))
        return (np.take_along_axis(data[part], indices, axis),)


class ConvTranspose(OpRun):
    """ONNX's reference cannot reshape the weights of groups; this follows the spec."""

    def _run(self, X, W, B=None, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides):  # type: ignore[no-untyped-def]
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

    def _run(self, theta, size, align_corners=0):  # type: ignore[no-untyped-def]
        lines = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:]]
        places = np.meshgrid(*lines, indexing="ij")[::-1]
        return (np.einsum("nij,j...->n...i", theta, np.stack([*places, np.ones_like(places[0])])),)


class GridSample(OpRun):
    """ONNX's reference rounds to float32; this follows the spec, one point after the other."""

    def _run(self, X, grid, align_corners=0, mode="linear", padding_mode="zeros"):  # type: ignore[no-untyped-def]
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


class LpNormalization(OpRun):
    """ONNX's reference takes the 1-norm without absolute values."""

    def _run(self, x, axis=-1, p=2):  # type: ignore[no-untyped-def]
        return (x / (np.abs(x) ** p).sum(axis=axis, keepdims=True) ** (1 / p),)


class GlobalLpPool(OpRun):
    """ONNX has no reference of it."""

    def _run(self, x, p=2):  # type: ignore[no-untyped-def]
        return ((np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class LpPool(OpRun):
    """ONNX's reference loses the windows that begin inside and end outside; this follows the spec, for explicit pads."""

    def _run(self, x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):  # type: ignore[no-untyped-def]
        assert auto_pad in (None, "NOTSET")
        n = x.ndim - 2
        strides, dilations, pads = strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n
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

    def _run(self, x, axes=(0, 2, 3)):  # type: ignore[no-untyped-def]
        mean, deviation = (f(x, axis=tuple(axes), keepdims=True) for f in (np.mean, np.std))
        return ((x - mean) / (deviation + 1e-9),)


class LRN(OpRun):
    """ONNX's reference counts the batch as the channels."""

    def _run(self, x, alpha=1e-4, beta=0.75, bias=1.0, size=None):  # type: ignore[no-untyped-def]
        before, channels = (size - 1) // 2, x.shape[1]
        windows = [slice(max(c - before, 0), c - before + size) for c in range(channels)]
        squares = np.stack([(x[:, w] ** 2).sum(axis=1) for w in windows], axis=1)
        return (x / (bias + alpha / size * squares) ** beta,)


class Scan(StandardScan):
    """ONNX's reference walks forwards only; this follows the spec along the first axis."""

    def __init__(self, onnx_node, run_params):  # type: ignore[no-untyped-def]
        OpRun.__init__(self, onnx_node, run_params)

    def _run(self, *args, context=None, body=None, num_scan_inputs=None, scan_input_directions=None, bindings=None, **_):  # type: ignore[no-untyped-def]
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

    def _run(self, X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, **attributes):  # type: ignore[no-untyped-def]
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
        Y, last = np.zeros((steps, directions, batch, hidden), X.dtype), [np.zeros_like(s) for s in initial]
        for d, n in np.ndindex(directions, batch):
            state = [s[d, n] for s in initial]
            used = functions[d * len(self.defaults) :][: len(self.defaults)]
            gates = [lambda x, f=f: f(np.clip(x, -clip, clip)) for f in used[:2]] + used[2:]
            for t in list(range(lens[n]))[:: -1 if d or attributes.get("direction") == "reverse" else 1]:
                state = self.step(W[d] @ X[t, n], state, R[d], *np.split(B[d], 2), np.split(P[d], 3), gates, attributes)
                Y[t, d, n] = state[0]
            for s, value in zip(last, state, strict=True):
                s[d, n] = value if lens[n] else 0
        if attributes.get("layout"):
            return Y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in last)
        return Y, *last


class LSTM(Recurrent):
    defaults = ("Sigmoid", "Tanh", "Tanh")

    def step(self, x, state, R, Wb, Rb, P, functions, attributes):  # type: ignore[no-untyped-def]
        (h_, c_), (f, g, h) = state, functions
        i, o, keep, new = np.split(x + R @ h_ + Wb + Rb, 4)
        i = f(i + P[0] * c_)
        keep = 1 - i if attributes.get("input_forget") else f(keep + P[2] * c_)
        c = keep * c_ + i * g(new)
        return [f(o + P[1] * c) * h(c), c]


class GRU(Recurrent):
    defaults = ("Sigmoid", "Tanh")

    def step(self, x, state, R, Wb, Rb, P, functions, attributes):  # type: ignore[no-untyped-def]
        (h,), (f, g) = state, functions
        (xz, xr, xn), (Rz, Rr, Rn), (bz, br, bn) = (np.split(v, 3) for v in (x + Wb, R, Rb))
        z, r = f(xz + Rz @ h + bz), f(xr + Rr @ h + br)
        n = g(xn + (r * (Rn @ h + bn) if attributes.get("linear_before_reset") else Rn @ (r * h) + bn))
        return [(1 - z) * n + z * h]


class RNN(Recurrent):
    defaults = ("Tanh",)

    def step(self, x, state, R, Wb, Rb, P, functions, attributes):  # type: ignore[no-untyped-def]
        return [functions[0](x + R @ state[0] + Wb + Rb)]


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
    found = []
    for name in names:
        function, count = table[name]
        scales = [given.pop(0) for given in left[:count]]
        found.append(lambda x, function=function, scales=scales: function(x, *scales))
    return found


REPLACED = [
    GridSample,
    AffineGrid,
    LpNormalization,
    GlobalLpPool,
    LpPool,
    MeanVarianceNormalization,
    LRN,
    LSTM,
    GRU,
    RNN,
    Scan,
    ConvTranspose,
    Erf,
    Gelu,
    Inverse,
    Pad,
    GatherElements,
]


def check_sample(key: OpKey, sample: Mapping[str, Any]) -> None:
    """Assert that the rule's gradients for one sample are right, in every input that has one."""
    rule = GRADIENTS[key]
    arrays, node = instantiate(rule, sample)
    forward = node_model(node, arrays, np.float64)
    weights = [_random(f"weight{i}", y.shape) for i, y in enumerate(_reference(forward, arrays)) if y.dtype == np.float64]
    wanted = [
        n
        for i, n in enumerate(node.input)
        if n and rule.differentiable(i) and arrays[n].dtype == np.float64 and n not in node.doc_string.split()
    ]

    graph = gradient_model(node, arrays, weights, wanted, np.float64)
    gradients = dict(zip(wanted, _reference(graph, arrays), strict=True))
    for name in wanted:
        assert gradients[name].shape == arrays[name].shape, f"{key} {name}: shape {gradients[name].shape}"
        direction = _random(f"direction {name}", arrays[name].shape)
        numeric = _directional(forward, arrays, weights, name, direction)
        exact = float(np.sum(gradients[name] * direction))
        scale = max(1.0, abs(numeric), float(np.abs(gradients[name]).max(initial=0)))
        assert abs(exact - numeric) <= 2e-6 * scale, f"{key} {dict(sample)} d{name}: {exact} against {numeric}"

    # A sample that is _static has an operator whose output ONNX gives no rank unless every size is known.
    for symbolic, target in product((False,) if sample.get("_static") is True else (False, True), TARGETS):
        model = gradient_model(node, arrays, weights, wanted, np.float32, symbolic, target)
        for name, got in zip(wanted, _runtime(model, arrays), strict=True):
            want = gradients[name]
            scale = max(1.0, float(np.abs(want).max(initial=0)))
            assert got.shape == want.shape
            where = f"{key} {dict(sample)} d{name}, symbolic={symbolic}, target {target.name}"
            assert np.abs(got - want).max(initial=0) <= 2e-5 * scale, where


def installed_targets() -> list[Target]:
    """The targets whose graphs the installed ONNX Runtime runs."""
    found = {name.lower() for name in packages_distributions().get("onnxruntime", [])}
    return [
        load_target(n) for n in ("onnxruntime", "ort-training") if n == "onnxruntime" or "onnxruntime-training-cpu" in found
    ]


TARGETS = installed_targets()


def instantiate(rule: GradientRule, sample: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], onnx.NodeProto]:
    """Arrays and a node for a sample: a shape becomes random normal numbers, anything else stays what it is."""
    arrays: dict[str, np.ndarray] = {}
    names: list[str] = []
    for formal in rule.inputs:
        given = sample.get(formal)
        variadic = rule.variadic_input and formal == rule.inputs[-1]
        for index, item in enumerate(given if isinstance(given, list) else [] if variadic else [given]):
            name = f"{formal}_{index}" if variadic else formal
            names.append("" if item is None else name)
            if item is not None:
                arrays[name] = _random(name, item) if isinstance(item, tuple) else np.asarray(item)
    while names and not names[-1]:
        names.pop()
    attributes = {k: v for k, v in sample.items() if k not in rule.inputs and not k.startswith("_")}
    outputs = sample.get("_outputs", 1)
    if isinstance(outputs, int):
        outputs = [f"out{i}" for i in range(outputs)]
    node = helper.make_node(rule.key[1], names, outputs, name="node", domain=rule.key[0], **attributes)
    fed = [f"+{n}" for n in sample.get("_inputs", "").split()]
    fixed = [f"={n}" for n in str(sample.get("_static", "")).split()]
    node.doc_string = " ".join([sample.get("_constants", ""), *fed, *fixed])
    return arrays, node


def node_model(node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], dtype: Any, symbolic: bool = False) -> onnx.ModelProto:
    """A model of the one node; integer and boolean inputs are constants, as they mostly are in real models.

    ``_constants`` of a sample names float inputs that are constants too, ``_inputs`` the others that are fed, ``_static``
    those whose sizes are always known. An output whose name starts with ``unused`` takes no part in the loss.
    """
    inputs, constants = [], []
    notes = node.doc_string.split()
    for name, array in arrays.items():
        if (array.dtype.kind == "f" and name not in notes) or f"+{name}" in notes:
            fed = np.dtype(dtype) if array.dtype.kind == "f" else array.dtype
            shape = (
                [f"{name}_{i}" for i in range(array.ndim)]
                if symbolic and fed == dtype and f"={name}" not in notes
                else array.shape
            )
            inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(fed), shape))
        else:
            stored = array.astype(dtype) if array.dtype == np.float64 else array
            constants.append(onnx.numpy_helper.from_array(stored, name))
    outputs = [onnx.ValueInfoProto(name=o) for o in node.output if o and not o.startswith("unused")]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    imports = [helper.make_opsetid("", OPSET)] + ([helper.make_opsetid(node.domain, 1)] if node.domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def gradient_model(
    node: onnx.NodeProto,
    arrays: Mapping[str, np.ndarray],
    weights: list[np.ndarray],
    wanted: list[str],
    dtype: Any,
    symbolic: bool = False,
    target: Target | None = None,
) -> onnx.ModelProto:
    """The gradients of Σ weights·outputs with respect to ``wanted``, built by the engine and lowered to a target.

    Without a target only what ONNX does not define is lowered, for its reference evaluator.
    """
    model = ir.from_proto(node_model(node, arrays, dtype, symbolic))
    if any(v.type is None or v.shape is None for v in model.graph.outputs):
        infer_shapes(model)
    graph = model.graph
    op = Builder(graph)
    with op.scope("loss"):
        outputs = [v for v in graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
        terms = [
            op.ReduceSum(op.Mul(op.cast(y, graph.inputs[0]), w.astype(dtype)), keepdims=0)
            for y, w in zip(outputs, weights, strict=True)
        ]
        loss = terms[0] if len(terms) == 1 else op.Sum(*terms)
    by_name = {v.name: v for v in graph.inputs}
    gradients = loss_gradients(op, loss, [by_name[n] for n in wanted])
    graph.outputs.clear()
    with op.scope("zero"):
        graph.outputs.extend(gradients[by_name[n]] if by_name[n] in gradients else op.zeros_like(by_name[n]) for n in wanted)
    lower(graph, lambda n: bool(n.domain) if target is None else not keeps(target, n))
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto


def _random(name: str, shape: Any) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def _reference(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    feeds = {i.name: _floats(arrays[i.name], np.float64) for i in model.graph.input}
    return [np.asarray(y) for y in ReferenceEvaluator(model, new_ops=REPLACED).run(None, feeds)]


def _runtime(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    return session.run(None, {k: _floats(v, np.float32) for k, v in arrays.items() if k in names})


def _floats(array: np.ndarray, dtype: Any) -> np.ndarray:
    return array.astype(dtype) if array.dtype.kind == "f" else array


def _directional(
    model: onnx.ModelProto,
    arrays: Mapping[str, np.ndarray],
    weights: list[np.ndarray],
    name: str,
    direction: np.ndarray,
) -> float:
    """(f(x + h·v) - f(x - h·v)) / 2h in float64."""

    def value(sign: float) -> float:
        moved = {**arrays, name: arrays[name] + sign * STEP * direction}
        outputs = [y for y in _reference(model, moved) if y.dtype == np.float64]
        return sum(float(np.sum(y * w)) for y, w in zip(outputs, weights, strict=True))

    return (value(1) - value(-1)) / (2 * STEP)
