"""Bringing a model to one form changes nothing that it computes, and loses no name of its interface."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ortc.errors import ModelError
from ortc.graph.names import all_graphs
from ortc.passes.normalise import convert_opset, fold, infer_shapes, prepare

TARGET = 21
NUMPY = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 11: np.float64}


def parse(text: str, opset: int = TARGET, **domains: int) -> onnx.ModelProto:
    """A model from ONNX text; ``float[] y`` is a value of unknown shape."""
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": opset, **domains}.items())
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: [{imports.replace("_", ".")}]> {text}')


def feeds(proto: onnx.ModelProto, sizes: dict[str, int] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; symbolic dimensions are 3 unless said otherwise."""
    rng = np.random.default_rng(seed)
    held = {i.name for i in proto.graph.initializer}
    result = {}
    for value in proto.graph.input:
        if value.name in held:
            continue
        tensor = value.type.tensor_type
        shape = [d.dim_value or (sizes or {}).get(d.dim_param, 3) for d in tensor.shape.dim]
        kind = NUMPY[tensor.elem_type]
        array = rng.normal(size=shape) * 2 if np.dtype(kind).kind == "f" else rng.integers(0, 2, shape)
        result[value.name] = np.asarray(array).astype(kind)
    return result


def run(proto: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    ).run(None, inputs)


def same_results(before: onnx.ModelProto, after: ir.Model, sizes: dict[str, int] | None = None) -> None:
    proto = ir.to_proto(after)
    onnx.checker.check_model(proto, full_check=True)
    inputs = feeds(before, sizes)
    for expected, found in zip(run(before, inputs), run(proto, inputs), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


# ---- the table of steps: every operator whose signature or meaning changed between opset 7 and 21 ------------------------

X4 = "float[2,3,4,5] x"
UPGRADES = [
    *((o, X4, f"y = {op}<axis={axis}>(x)") for op in ("Softmax", "LogSoftmax", "Hardmax") for o in (7, 11, 12) for axis in (1, 3)),
    (11, X4, "y = Softmax(x)"),
    (12, X4, "y = Softmax<axis=-1>(x)"),
    (12, X4, "y = LogSoftmax<axis=-2>(x)"),
    (11, X4, "y = Softmax<axis=0>(x)"),
    *((o, "float[1,3,1] x", "y = Squeeze<axes=[0,2]>(x)") for o in (7, 11, 12)),
    (11, "float[1,3,1] x", "y = Squeeze(x)"),
    (11, "float[1,3,1] x", "y = Squeeze<axes=[-1]>(x)"),
    *((o, "float[3] x", "y = Unsqueeze<axes=[0,2]>(x)") for o in (7, 11, 12)),
    *(
        (o, X4, f"y = {op}<axes=[1,3], keepdims={k}>(x)")
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2")
        for o, k in ((7, 0), (12, 1), (17, 0))
        if not (op == "ReduceSum" and o == 17)
    ),
    *((17, X4, f"y = {op}<axes=[-1]>(x)") for op in ("ReduceSumSquare", "ReduceLogSumExp")),
    (17, X4, "y = ReduceMean(x)"),
    (12, X4, "y = ReduceSum<keepdims=0>(x)"),
    (7, X4, "y = MaxPool<kernel_shape=[2,2], strides=[1,2]>(x)"),
    (7, X4, "y = AveragePool<kernel_shape=[2,2], pads=[1,1,0,0], count_include_pad=1>(x)"),
    (10, X4, "y = AveragePool<kernel_shape=[3,2], strides=[2,2], ceil_mode=1>(x)"),
    (17, X4, "y = LpPool<kernel_shape=[2,2], p=2>(x)"),
    *((o, X4 + ", float[3] s, float[3] b, float[3] m", "v = Abs(m) y = BatchNormalization<epsilon=0.1>(x, s, b, m, v)") for o in (7, 9, 13, 14)),
    (8, X4 + ", float[3] s, float[3] b, float[3] m", "v = Abs(m) y = BatchNormalization<spatial=1>(x, s, b, m, v)"),
    *((o, X4, 'y = Upsample<mode="nearest", scales=[1.0,1.0,2.0,3.0]>(x)') for o in (7, 8)),
    (8, X4, 'y = Upsample<mode="linear", scales=[1.0,1.0,2.0,2.0]>(x)'),
    (9, X4, 's = Constant<value=float[4]{1.0,1.0,2.0,2.0}>() y = Upsample<mode="nearest">(x, s)'),
    (9, X4, 's = Constant<value=float[4]{1.0,1.0,1.6,2.3}>() y = Upsample<mode="linear">(x, s)'),
    (10, X4, 's = Constant<value=float[4]{1.0,1.0,2.0,2.0}>() y = Resize<mode="nearest">(x, s)'),
    (10, X4, 's = Constant<value=float[4]{1.0,1.0,1.7,2.3}>() y = Resize<mode="nearest">(x, s)'),
    (10, X4, 's = Constant<value=float[4]{1.0,1.0,0.5,0.6}>() y = Resize<mode="nearest">(x, s)'),
    (10, X4, 's = Constant<value=float[4]{1.0,1.0,0.5,2.0}>() y = Resize<mode="linear">(x, s)'),
    (11, X4, 'r = Constant<value=float[0]{}>() s = Constant<value=float[4]{1.0,1.0,2.0,1.5}>() y = Resize<mode="linear">(x, r, s)'),
    (
        12,
        X4,
        "r = Constant<value=float[0]{}>() z = Constant<value=int64[4]{2,3,7,4}>() "
        'y = Resize<mode="cubic", coordinate_transformation_mode="align_corners">(x, r, r, z)',
    ),
    (13, X4, 's = Constant<value=float[4]{1.0,1.0,2.0,2.0}>() y = Resize<mode="nearest">(x, , s)'),
    *((o, X4, "y = Dropout<ratio=0.3>(x)") for o in (7, 10, 11)),
    (8, X4, "y, i = TopK<k=2, axis=1>(x)"),
    (10, X4, "k = Constant<value=int64[1]{2}>() y, i = TopK<axis=-1>(x, k)"),
    (9, X4, "y = Slice<axes=[1,3], starts=[1,-3], ends=[9,-1]>(x)"),
    (9, X4, "y = Slice<starts=[0,1], ends=[1,2]>(x)"),
    (10, X4, "y = Clip<min=-0.5, max=0.7>(x)"),
    (7, X4, "y = Clip<max=0.5>(x)"),
    (7, X4, "y = Clip(x)"),
    (10, X4, "y = Pad<pads=[0,1,0,2,0,0,1,0], value=1.5>(x)"),
    (10, X4, 'y = Pad<mode="reflect", pads=[0,0,1,2,0,0,1,1]>(x)'),
    (12, X4, 'p = Constant<value=int64[8]{0,0,1,2,0,0,1,1}>() y = Pad<mode="edge">(x, p)'),
    (9, "float[3,3] x, float[1,3] u", "i = Constant<value=int64[1,3]{2,0,1}>() y = Scatter<axis=0>(x, i, u)"),
    *((o, X4, "a, y = Split<axis=3, split=[2,3]>(x)") for o in (7, 11, 12)),
    (7, X4, "a, y = Split<axis=2>(x)"),
    (13, X4, "a, y = Split<axis=2>(x)"),
    (13, X4, "s = Constant<value=int64[2]{1,3}>() a, y = Split<axis=2>(x, s)"),
    (
        10,
        X4,
        "r = Constant<value=float[1,4]{0.0,0.5,2.5,3.0}>() b = Constant<value=int64[1]{1}>() "
        "y = RoiAlign<output_height=2, output_width=2, sampling_ratio=2>(x, r, b)",
    ),
    (16, X4 + ", float[2,2,2,2] g", 't = Tanh(g) y = GridSample<mode="bilinear">(x, t)'),
    (16, X4 + ", float[2,2,2,2] g", 't = Tanh(g) y = GridSample<mode="bicubic", padding_mode="border">(x, t)'),
    (16, X4 + ", float[2,2,2,2] g", "t = Tanh(g) y = GridSample(x, t)"),
    (17, "float[2,4,1] x", "y = DFT(x)"),
    (17, "float[2,4,3,1] x", "y = DFT<axis=2>(x)"),
    (18, "float[2,4,5] x, float[2] s, float[2] b", "y = GroupNormalization<num_groups=2>(x, s, b)"),
    (18, "float[N,C,5] x, float[2] s, float[2] b", "y = GroupNormalization<num_groups=2>(x, s, b)"),
    (7, "float[3,4] x, float[4,2] w, float[2] b", "y = Gemm<alpha=0.5, beta=2.0>(x, w, b)"),
    (7, "float[5,2,3] x, float[1,16,3] w, float[1,16,4] r", "y = LSTM<hidden_size=4>(x, w, r)"),
    (7, "float[5,2,3] x, float[1,12,3] w, float[1,12,4] r", "y = GRU<hidden_size=4, linear_before_reset=1>(x, w, r)"),
    (7, "float[5,2,3] x, float[1,4,3] w, float[1,4,4] r", "y = RNN<hidden_size=4>(x, w, r)"),
    (7, X4, "y = ArgMax<axis=2, keepdims=0>(x)"),
    (7, X4 + ", float[3,1,5] z", "a = Add(x, z) b = Mul(a, z) c = Sub(b, z) y = Div(c, z)"),
    (7, X4 + ", float[3,1,5] z", "y = PRelu(x, z)"),
    (8, X4 + ", float[3,1,5] z", "a = Max(x, z) b = Min(a, x) c = Sum(a, b, z) y = Mean(a, c)"),
    (9, X4, "a = Sign(x) b = Erf(a) y = Flatten<axis=2>(b)"),
    (9, "float[3,4] x", "i = Constant<value=int64[2]{0,2}>() y = Gather<axis=1>(x, i)"),
    (9, "int64[3] x", "d = Constant<value=int64 {4}>() v = Constant<value=float[2]{0.0,1.0}>() y = OneHot(x, d, v)"),
    (12, X4 + ", bool[2,3,4,5] c", "a = Neg(x) y = Where(c, x, a)"),
    (11, "float[4,8,2,2] x", "y = DepthToSpace<blocksize=2>(x)"),
    (10, "float[4,8,2,2] x", "y = DepthToSpace<blocksize=2>(x)"),
    (15, X4, "y = Cast<to=6>(x)"),
    (13, X4, "s = Shape(x) y = Reshape(x, s)"),
    (17, X4 + ", float[5] s", "y = LayerNormalization<epsilon=0.01>(x, s)"),
]  # fmt: skip


def upgraded(case: tuple[int, str, str]) -> tuple[onnx.ModelProto, ir.Model]:
    opset, inputs, body = case
    proto = parse(f"g ({inputs}) => (float[] y) {{ {body} }}", opset)
    schema_type = onnx.shape_inference.infer_shapes(proto).graph.output[0].type.tensor_type.elem_type
    del proto.graph.output[:]
    kind = onnx.TensorProto.INT32 if "to=6" in body else onnx.TensorProto.INT64 if "ArgMax" in body else schema_type
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y", kind, None))
    return proto, infer_shapes(convert_opset(prepare(ir.from_proto(proto)), TARGET))


@pytest.mark.parametrize("case", UPGRADES, ids=[f"{o}-{b[:60]}" for o, _, b in UPGRADES])
def test_an_old_operator_means_the_same_at_the_target(case: tuple[int, str, str]):
    before, after = upgraded(case)
    assert after.opset_imports[""] == TARGET
    same_results(before, after, {"C": 4})


def test_batch_norm_that_trained_by_its_number_of_outputs_trains_by_its_attribute():
    ports = "float[4,3,5] x, float[3] s, float[3] b, float[3] m, float[3] v"
    outputs = "float[4,3,5] y, float[3] rm, float[3] rv"
    body = "y, rm, rv, sm, sv = BatchNormalization<momentum=0.8>(x, s, b, m, v)"
    model = convert_opset(prepare(ir.from_proto(parse(f"g ({ports}) => ({outputs}) {{ {body} }}", 9))), TARGET)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    inputs = feeds(proto)
    inputs["v"] = np.abs(inputs["v"])
    y, mean, variance = run(proto, inputs)
    x = inputs["x"]
    np.testing.assert_allclose(mean, 0.8 * inputs["m"] + 0.2 * x.mean((0, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, 0.8 * inputs["v"] + 0.2 * x.var((0, 2)), rtol=1e-5, atol=1e-6)
    column = [inputs[k][None, :, None] for k in "sb"]
    normal = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, normal * column[0] + column[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "inputs", "body"),
    [
        (8, "float[2,3] x, float[2,3] s, float[2,3] b", "v = Abs(s) y = BatchNormalization<spatial=0>(x, s, b, b, v)"),
        (9, X4, 's = Constant<value=float[4]{1.0,1.0,0.6,2.2}>() r = Upsample<mode="nearest">(x, s) y = Identity(r)'),
    ],
)
def test_what_no_later_opset_has_is_refused_by_name(opset: int, inputs: str, body: str):
    model = prepare(ir.from_proto(parse(f"g ({inputs}) => (float[] y) {{ {body} }}", opset)))
    with pytest.raises(ModelError, match=r"node 'BatchNormalization' \(Batch|node 'Upsample' \(Resize"):
        convert_opset(model, TARGET)


# ---- models that are newer than the target ---------------------------------------------------------------------------------

NEWER = [
    (22, X4 + ", float[2,3,2,2] w", "a = Conv(x, w) b = Elu(a) c = MaxPool<kernel_shape=[2,2]>(b) y = Dropout(c)"),
    (23, X4, "s = Shape(x) a = Reshape(x, s) b = Cast<to=1>(a) y = Identity(b)"),
    (24, X4, 'y = Cast<to=1, round_mode="up">(x)'),
    (28, X4, "k = Constant<value=int64[1]{2}>() v, i = TopK(x, k) y = Transpose<perm=[3,2,1,0]>(v)"),
    (28, X4, "y = ReduceLogSumExp(x)"),
    (28, "float[2,4,3,3] x", "y = SpaceToDepth<blocksize=3>(x)"),
    (23, X4 + ", float[5] w", "y = RMSNormalization<epsilon=0.01>(x, w)"),
    (23, X4 + ", float[4,5] w", "y = RMSNormalization<axis=-2>(x, w)"),
    (24, X4, "y = Swish<alpha=0.7>(x)"),
    (23, "float[2,2,3,4] x, float[2,2,5,4] k, float[2,2,5,4] v", "y = Attention(x, k, v)"),
    (24, "float[2,2,5,4] x, float[2,2,5,4] k, float[2,2,5,4] v", "y = Attention<is_causal=1, scale=0.3>(x, k, v)"),
    (23, "float[2,3,8] x, float[2,5,8] k, float[2,5,8] v, float[3,5] m", "y = Attention<q_num_heads=2, kv_num_heads=2>(x, k, v, m)"),
    (23, "float[2,3,6,8] x, float[2,6,4] c, float[2,6,4] s", "y = RotaryEmbedding(x, c, s)"),
]  # fmt: skip


@pytest.mark.parametrize(("opset", "inputs", "body"), NEWER, ids=[f"{o}-{b[:50]}" for o, _, b in NEWER])
def test_a_newer_operator_means_the_same_at_the_target(opset: int, inputs: str, body: str):
    proto = parse(f"g ({inputs}) => (float[] y) {{ {body} }}", opset)
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, None))
    fed = feeds(proto)
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, fed)
    after = ir.to_proto(infer_shapes(convert_opset(prepare(ir.from_proto(proto)), TARGET)))
    onnx.checker.check_model(after, full_check=True)
    assert [o.version for o in after.opset_import if not o.domain] == [TARGET]
    assert {n.op_type for n in after.graph.node}.isdisjoint({"RMSNormalization", "Swish", "Attention", "RotaryEmbedding"})
    np.testing.assert_allclose(run(after, fed)[0], expected[0], rtol=1e-5, atol=1e-5)


def test_what_the_target_cannot_say_is_refused_by_name_all_at_once():
    body = "a = CumProd(x, i) b = CumProd(a, i) y = Cast<to=1, round_mode=\"down\">(b)"
    model = prepare(ir.from_proto(parse(f"g (float[3] x, int64 i) => (float[3] y) {{ {body} }}", 26)))
    with pytest.raises(ModelError) as caught:
        convert_opset(model, TARGET)
    text = str(caught.value)
    assert "opset 26" in text
    assert "opset 21" in text
    assert "CumProd (CumProd, opset 26)" in text
    assert "CumProd_1 (CumProd" in text
    assert "Cast (Cast, opset 25)" in text
