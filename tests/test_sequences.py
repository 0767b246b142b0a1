"""Sequences give way to tensors; ONNX Runtime computes the same before and after."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ortc.passes.inference import infer_shapes
from ortc.passes.normalise import fold, prepare
from ortc.passes.sequences import resolve_sequences

X = np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)
HEADER = '<ir_version: 9, opset_import: ["" : 21]>\n'

STATIC = {
    "parts of a size, the last one smaller": """g (float[5,4] x) => (float[a,b] y, float[c,d] z)
        <int64 n = {2}, int64 i = {-1}, int64 j = {0}>
        { s = SplitToSequence(x, n) y = SequenceAt(s, i) z = SequenceAt(s, j) }""",
    "parts of given sizes, joined in another order": """g (float[5,4] x) => (float[a,b] y)
        <int64[2] n = {1, 3}, int64 i = {0}, int64 j = {1}>
        { s = SplitToSequence<axis = -1>(x, n) a0 = SequenceAt(s, i) a1 = SequenceAt(s, j)
          t = SequenceConstruct(a1, a0) y = ConcatFromSequence<axis = 1>(t) }""",
    "slices, stacked": """g (float[5,4] x) => (float[a,b] y, int64 n)
        { s = SplitToSequence<axis = 1, keepdims = 0>(x) n = SequenceLength(s)
          y = ConcatFromSequence<axis = 1, new_axis = 1>(s) }""",
    "insertion and removal": """g (float[5,4] x) => (float[5,4] y, float[a,b] z)
        <int64 i = {0}, int64 j = {-2}>
        { e = SequenceEmpty() b = Relu(x) c = Neg(x) s = SequenceInsert(e, x) t = SequenceInsert(s, b, i)
          u = SequenceInsert(t, c) v = SequenceErase(u, j) w = Identity(v) y = SequenceAt(w, i)
          z = ConcatFromSequence<axis = 0>(v) }""",
    "a list that a loop fills": """g (float[5,4] x) => (float[a,4] y, float[5,4] last)
        <int64 n = {3}, bool yes = {1}>
        { e = SequenceEmpty()
          last, s = Loop(n, yes, x, e) <body = body (int64 i, bool c, float[5,4] h, seq(float[5,4]) t)
            => (bool d, float[5,4] k, seq(float[5,4]) u) { d = Identity(c) k = Sin(h) u = SequenceInsert(t, k) }>
          y = ConcatFromSequence<axis = AXIS>(s) }""",
}
CASES = {name: text.replace("AXIS", "0") for name, text in STATIC.items()}
CASES["a list that a loop fills, joined along its last axis"] = STATIC["a list that a loop fills"].replace("AXIS", "-1")


def outputs(model: onnx.ModelProto) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": X})


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_same_result_without_sequences(text):
    original = onnx.parser.parse_model(HEADER + text)
    model = resolve_sequences(infer_shapes(fold(prepare(ir.from_proto(original)))))
    resolved = ir.to_proto(infer_shapes(fold(model)))
    onnx.checker.check_model(resolved)
    assert [n.op_type for n in resolved.graph.node if "Sequence" in n.op_type] == []
    assert [o.name for o in resolved.graph.output] == [o.name for o in original.graph.output]
    for got, want in zip(outputs(resolved), outputs(original), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_is_known_only_at_run_time_stays():
    text = """g (float[5,4] x) => (float[a,b] y) <int64 n = {2}>
        { k = Shape<start = 0, end = 1>(x) r = RandomUniform<shape = [1]>() f = Floor(r) p = Cast<to = 7>(f)
          q = Squeeze(p) s = SplitToSequence(x, n) y = SequenceAt(s, q) }"""
    model = resolve_sequences(infer_shapes(prepare(ir.from_proto(onnx.parser.parse_model(HEADER + text)))))
    np.testing.assert_array_equal(outputs(ir.to_proto(model))[0], X[:2])
