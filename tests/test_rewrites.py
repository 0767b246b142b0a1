"""Every declared rewrite: both sides on random inputs in ONNX Runtime, and that it finds what it looks for."""

from __future__ import annotations

import inspect
from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortc.artifacts import load_rules
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import lower
from ortc.rewrite import REWRITES, Rewrite, apply_rewrites

load_rules()

CASES = [
    pytest.param(of, rule, sample, id=f"{of}-{rule.name}-{i}-{j}")
    for of, rules in REWRITES.items()
    for i, rule in enumerate(rules)
    for j, sample in enumerate(rule.samples)
]


def model_of(rule: Rewrite, sample: dict, symbolic: bool) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """``before`` as a model: shapes are inputs, arrays and numbers constants, all else attributes."""
    graph = ir.Graph([], [], nodes=[], name="g", opset_imports={"": 21})
    op = Builder(graph)
    feeds, arguments = {}, {}
    random = np.random.default_rng(4)
    for name in list(inspect.signature(rule.before).parameters)[1:]:
        given = sample[name]
        if isinstance(given, tuple):
            feeds[name] = random.standard_normal(given).astype(np.float32)
            shape = ir.Shape([f"{name}0" if symbolic and len(given) > 1 else given[0], *given[1:]])
            arguments[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
            graph.inputs.append(arguments[name])
        else:
            arguments[name] = op.const(given) if isinstance(given, np.ndarray | np.generic) else given
    with op.scope("before"):
        y = rule.before(op, **arguments)
    y.name = "result"
    graph.outputs.append(y)
    return infer_shapes(ir.Model(graph, ir_version=10)), feeds


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


@pytest.mark.parametrize(("of", "rule", "sample"), CASES)
def test_both_sides_are_equal(of, rule, sample):
    # The first dimension may be a symbol, unless operands must share it.
    symbolic = sum(isinstance(v, tuple) and len(v) > 1 for v in sample.values()) == 1
    model, feeds = model_of(rule, sample, symbolic)
    want = run(model, feeds)
    shape = model.graph.outputs[0].shape
    hits = apply_rewrites(model.graph, [rule], of)
    assert Counter(hit.rule for hit in hits) == {rule.name: 1}
    [output] = model.graph.outputs
    assert (output.name, output.shape) == ("result", shape)
    made = [node for node in model.graph if node.metadata_props.get("ortc.pass") == of]
    assert made
    assert all(node.metadata_props["ortc.rule"] == rule.name and node.metadata_props["ortc.origin"] for node in made)
    lower(model.graph, lambda node: node.domain == "ortc")
    got = run(model, feeds)
    assert np.abs(got - want).max() <= rule.tolerance * max(1.0, np.abs(want).max())


def test_every_rewrite_has_samples():
    assert [rule.name for rules in REWRITES.values() for rule in rules if not rule.samples] == []
