"""Gradients through If, Loop and Scan, captured values included, against central differences in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from ortc.autodiff import loss_gradients
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.rules import load_declarations

load_declarations("ortc.passes.gradients")

IF = """
<ir_version: 10, opset_import: ["" : 21]>
g (FLOAT[2,3] x, FLOAT[3] w, bool c) => (FLOAT[2,3] y) {
  h = Mul(x, w)
  y = If(c) <
    then_branch = t () => (FLOAT[2,3] a) { s = Sin(h) a = Mul(s, w) },
    else_branch = e () => (FLOAT[2,3] b) { b = Exp(h) }
  >
}"""

LOOP = """
<ir_version: 10, opset_import: ["" : 21]>
g (FLOAT[2,3] x, FLOAT[3] w, int64 n) => (FLOAT[2,3] last, FLOAT[n,2] all) {
  go = Constant<value = bool {1}>()
  last, all = Loop(n, go, x) <
    body = b (int64 i, bool goes, FLOAT[2,3] s) => (bool on, FLOAT[2,3] t, FLOAT[2] r) {
      on = Identity(goes)
      f = CastLike(i, s)
      k = Add(s, f)
      m = Mul(k, w)
      t = Tanh(m)
      axes = Constant<value_ints = [1]>()
      r = ReduceSum<keepdims = 0>(m, axes)
    }
  >
}"""

SCAN = """
<ir_version: 10, opset_import: ["" : 21]>
g (FLOAT[4,3] x, FLOAT[3] w, FLOAT[3] s0) => (FLOAT[3] last, FLOAT[4,3] all) {
  last, all = Scan <
    num_scan_inputs = 1, scan_input_directions = [DIRECTION], scan_output_directions = [DIRECTION],
    body = b (FLOAT[3] s, FLOAT[3] v) => (FLOAT[3] t, FLOAT[3] r) { p = Mul(s, w) t = Add(p, v) r = Sin(t) }
  > (s0, x)
}"""

NESTED = """
<ir_version: 10, opset_import: ["" : 21]>
g (FLOAT[3] x, FLOAT[3] w, int64 n) => (FLOAT[3] last) {
  go = Constant<value = bool {1}>()
  last = Loop(n, go, x) <
    body = b (int64 i, bool goes, FLOAT[3] s) => (bool on, FLOAT[3] t) {
      on = Identity(goes)
      one = Constant<value = int64 {1}>()
      early = Less(i, one)
      t = If(early) <
        then_branch = p () => (FLOAT[3] a) { a = Mul(s, w) },
        else_branch = q () => (FLOAT[3] d) { d = Sin(s) }
      >
    }
  >
}"""

CASES = {
    "then": (IF, {"c": np.array(True)}),
    "else": (IF, {"c": np.array(False)}),
    "loop": (LOOP, {"n": np.array(3)}),
    "loop once": (LOOP, {"n": np.array(1)}),
    "scan": (SCAN.replace("DIRECTION", "0"), {}),
    "scan backwards": (SCAN.replace("DIRECTION", "1"), {}),
    "if in a loop": (NESTED, {"n": np.array(3)}),
}


def model_of(text: str, dtype: str) -> ir.Model:
    return infer_shapes(ir.from_onnx_text(text.replace("FLOAT", dtype)))


def gradient_model(text: str, weights: list[np.ndarray], dtype: str) -> tuple[onnx.ModelProto, list[str]]:
    model = model_of(text, dtype)
    graph = model.graph
    op = Builder(graph)
    with op.scope("loss"):
        terms = [
            op.ReduceSum(op.Mul(y, w.astype(y.dtype.numpy())), keepdims=0) for y, w in zip(graph.outputs, weights, strict=True)
        ]
        loss = terms[0] if len(terms) == 1 else op.Add(*terms)
    wanted = [v for v in graph.inputs if v.dtype.is_floating_point()]
    gradients = loss_gradients(op, loss, wanted)
    graph.outputs.clear()
    graph.outputs.extend(gradients[v] for v in wanted)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto, [v.name for v in wanted]


@pytest.mark.parametrize("name", sorted(CASES))
def test_gradients_are_the_differences(name):
    text, constants = CASES[name]
    random = np.random.default_rng(5)
    floats = {
        v.name: random.standard_normal(v.shape.numpy())
        for v in model_of(text, "double").graph.inputs
        if v.name not in constants
    }
    forward = ReferenceEvaluator(
        ir.to_proto(model_of(text.replace("scan_input_directions = [1], scan_output_directions = [1],", ""), "double"))
    )
    backwards = "[1]" in text.split("body")[0] and "Scan" in text

    def run(values: dict[str, np.ndarray]) -> list[np.ndarray]:
        if not backwards:
            return forward.run(None, {**values, **constants})
        # ONNX's reference ignores directions: the sequence is turned before and after.
        last, every = forward.run(None, {**values, "x": values["x"][::-1].copy()})
        return [last, every[::-1]]

    weights = [random.standard_normal(y.shape) for y in run(floats)]
    single, names = gradient_model(text, weights, "float")
    session = onnxruntime.InferenceSession(single.SerializeToString())
    fed = {i.name for i in session.get_inputs()}
    feeds = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in {**floats, **constants}.items() if k in fed}
    for key, got in zip(names, session.run(None, feeds), strict=True):
        assert got.shape == floats[key].shape
        for index in np.ndindex(*floats[key].shape):
            moved = []
            for sign in (1, -1):
                array = floats[key].copy()
                array[index] += sign * 1e-6
                moved.append(sum(float((y * w).sum()) for y, w in zip(run({**floats, key: array}), weights, strict=True)))
            assert got[index] == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=2e-5, rel=1e-4), f"{key}{index}"


def test_lowerings_reach_into_nested_graphs(tmp_path):
    """A convolution's weight gradient is an operator that only the training build has: nested it is lowered as well."""
    from ortc.artifacts import compile_graphs
    from ortc.recipe import parse_recipe

    text = """
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[n,1,4,4] x, bool c) => (float[n,1,4,4] y) <float[1,1,3,3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}> {
      y = If(c) <
        then_branch = t () => (float[n,1,4,4] a) { a = Conv<pads = [1, 1, 1, 1]>(x, w) },
        else_branch = e () => (float[n,1,4,4] b) { b = com.microsoft.QuickGelu(x) }
      >
    }"""
    recipe = parse_recipe({"target": "onnxruntime", "loss": [{"name": "mse"}]})
    graphs = compile_graphs(ir.from_onnx_text(text), recipe).stages[0]
    everywhere = [n for phase in ("train", "eval") for n in graphs[phase].graph.all_nodes()]
    assert {n.domain for n in everywhere} == {""}
    session = onnxruntime.InferenceSession(ir.to_proto(graphs["train"]).SerializeToString())
    feeds = {
        "x": np.ones((2, 1, 4, 4), np.float32),
        "w": np.full((1, 1, 3, 3), 0.1, np.float32),
        "labels": np.zeros((2, 1, 4, 4), np.float32),
    }
    taken, other = (session.run(["w.grad"], {**feeds, "c": np.array(c)})[0] for c in (True, False))
    assert np.abs(taken).min() > 0
    assert not other.any()
