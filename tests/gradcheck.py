"""Checks a gradient rule on one node against central finite differences.

The node is run twice: in float64 by ONNX's reference evaluator, where its gradient must equal the directional finite
difference along one random direction per input; and in float32 by ONNX Runtime with the same shapes static and
symbolic, where the gradient graph must give the float64 values again.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from ortc.autodiff import loss_gradients
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import keeps, lower
from ortc.passes.reference import REPLACED as REPLACED
from ortc.passes.reference import evaluator
from ortc.rules import GRADIENTS, GradientRule, OpKey, load_declarations
from ortc.target import Target, load_target

load_declarations("ortc.passes.lowerings")

OPSET = 21
STEP = 1e-6


def check_sample(key: OpKey, sample: Mapping[str, Any]) -> None:
    """Assert that the rule's gradients for one sample are right, in every input that has one."""
    rule = GRADIENTS[key]
    arrays, node = instantiate(rule, sample)
    forward = node_model(node, arrays, np.float64)
    if node.domain:  # which the reference evaluator does not know
        written = infer_shapes(ir.from_proto(forward))
        lower(written.graph, lambda n: True)
        forward = ir.to_proto(written)
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
    return [np.asarray(y) for y in evaluator(model).run(None, feeds)]


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
