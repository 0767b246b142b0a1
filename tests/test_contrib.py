"""Each of ONNX Runtime's own operators, as it is lowered, against its native kernel, and its gradient against differences."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from gradcheck import REPLACED
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ortc.artifacts import load_rules
from ortc.autodiff import loss_gradients
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import lower

load_rules()

SIZES = {"B": 2, "S": 4, "T": 5, "2*B": 4}  # a dimension is a number, or one of these names
LENGTHS = np.array([3, 2], np.int32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
IDS = np.random.default_rng(7).integers(0, 10, (2, 4)).astype(np.int32)
MS = "com.microsoft"


# (name, operator, inputs in order: a shape in words, or an array and its shape; attributes; how many outputs, negative
# if only the first and the last of them)
CASES: list[tuple[str, str, list[Any], dict[str, Any], int]] = [
    ("gelu", "Gelu", ["B 3"], {}, 1),
    ("fast_gelu", "FastGelu", ["B 3"], {}, 1),
    ("fast_gelu_bias", "FastGelu", ["B S 3", "3"], {}, 1),
    ("bias_gelu", "BiasGelu", ["B S 3", "3"], {}, 1),
    ("quick_gelu", "QuickGelu", ["B 3"], {"alpha": 1.3}, 1),
    ("matmul", "FusedMatMul", ["B S 3", "B 3 5"], {"alpha": 0.5}, 1),
    ("matmul_ta", "FusedMatMul", ["B 3 S", "3 5"], {"transA": 1}, 1),
    ("matmul_tb", "FusedMatMul", ["B S 3", "B 5 3"], {"transB": 1, "alpha": 2.0}, 1),
    ("matmul_batch", "FusedMatMul", ["S B 3", "3 B 5"], {"transBatchA": 1, "transBatchB": 1}, 1),
    (
        "matmul_batch_t",
        "FusedMatMul",
        ["3 B S", "5 B 3"],
        dict.fromkeys(("transA", "transB", "transBatchA", "transBatchB"), 1),
        1,
    ),
    ("matmul_batch4", "FusedMatMul", ["S B 2 3", "B 2 5 3"], {"transBatchA": 1, "transB": 1}, 1),
    (
        "gemm",
        "FusedGemm",
        ["B 3", "3 5", "5"],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5, "beta": 2.0},
        1,
    ),
    ("gemm_sigmoid", "FusedGemm", ["3 B", "5 3"], {"activation": "Sigmoid", "transA": 1, "transB": 1}, 1),
    ("gemm_selu", "FusedGemm", ["B 3", "3 5"], {"activation": "Selu", "activation_alpha": 1.5, "activation_gamma": 1.2}, 1),
    ("conv", "FusedConv", ["B 2 S T", "3 2 3 3", "3"], {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1),
    ("conv_sum", "FusedConv", ["B 2 S T", "3 2 1 1", "3", "B 3 S T"], {"activation": "Tanh", "kernel_shape": [1, 1]}, 1),
    ("conv_clip", "FusedConv", ["B 2 S T", "3 2 2 2"], {"activation": "Clip", "activation_params": [-0.5, 0.7]}, 1),
    ("rms", "SimplifiedLayerNormalization", ["B S 6", "6"], {"epsilon": 0.1}, 1),
    ("rms_axis", "SimplifiedLayerNormalization", ["B 3 6", "3 6"], {"axis": 1}, 2),
    ("skip_norm", "SkipLayerNormalization", ["B S 6", "B S 6", "6", "6", "6"], {"epsilon": 0.1}, -4),
    ("skip_norm_few", "SkipLayerNormalization", ["S 6", "S 6", "6"], {}, 1),
    ("skip_norm_broadcast", "SkipLayerNormalization", ["B S 6", "S 6", "6", "6"], {}, 1),
    ("skip_rms", "SkipSimplifiedLayerNormalization", ["B S 6", "B S 6", "6", "6"], {"epsilon": 0.1}, -4),
    ("skip_rms_broadcast", "SkipSimplifiedLayerNormalization", ["B S 6", "1 S 6", "6"], {}, 1),
    (
        "embed",
        "EmbedLayerNormalization",
        [(IDS, "B S"), (IDS // 5, "B S"), "10 6", "8 6", "2 6", "6", "6", (MASK, "B S")],
        {},
        2,
    ),
    ("embed_few", "EmbedLayerNormalization", [(IDS, "B S"), None, "10 6", "8 6", None, "6", "6"], {"epsilon": 0.1}, 2),
    (
        "embed_positions",
        "EmbedLayerNormalization",
        [(IDS, "B S"), None, "10 6", "8 6", None, "6", "6", None, (IDS[:1, ::-1] // 2, "1 S")],
        {},
        3,
    ),
    ("trilu", "Trilu", ["B S T"], {"upper": 0}, 1),
    ("trilu_k", "Trilu", ["B S T", (np.array(1), "")], {}, 1),
    ("bias_add", "BiasAdd", ["B S 3", "3", "B S 3"], {}, 1),
    ("split_gelu", "BiasSplitGelu", ["B S 6", "6"], {}, 1),
    ("gemm_gelu", "GemmFastGelu", ["B S 3", "3 5", "5"], {}, 1),
    ("conv_last", "NhwcConv", ["B S T 3", "2 1 2 3", "2"], {}, 1),
    ("group_norm", "GroupNorm", ["B S T 6", "6", "6"], {"groups": 2, "activation": 1}, 1),
    ("group_norm_first", "GroupNorm", ["B 6 S T", "6", "6"], {"groups": 3, "activation": 0, "channels_last": 0}, 1),
    ("skip_group_norm", "SkipGroupNorm", ["B S T 6", "6", "6", "B S T 6", "6"], {"groups": 2, "activation": 0}, 2),
    ("skip_group_norm_few", "SkipGroupNorm", ["B S T 6", "6", "6", "B 6"], {"groups": 2, "activation": 0}, 1),
    ("rfft", "Rfft", ["B S 6"], {"signal_ndim": 1, "onesided": 1}, 1),
    ("irfft", "Irfft", ["B S 4 2"], {"signal_ndim": 1, "onesided": 1}, 1),
    ("transpose_matmul", "TransposeMatMul", ["B 3 S", "3 5"], {"transA": 1, "alpha": 1.5}, 1),
]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def group_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, groups: int) -> np.ndarray:
    """Channels last, of [N, H, W, C]."""
    parts = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean, variance = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    return ((parts - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape) * scale + bias


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def skip_group_norm(x, scale, bias, skip, shift=0.0):  # type: ignore[no-untyped-def]
    total = x + skip.reshape(x.shape[0], *(skip.shape[1:-1] or (1, 1)), -1) + shift
    return group_norm(total, scale, bias, 2), total


# What operators compute that have no kernel on a CPU; ONNX Runtime 1.19.2 leaves the bias of SkipSimplifiedLayerNormalization
# out (1.32 adds it).
EQUAL: dict[str, Callable[..., Any]] = {
    "skip_rms": lambda x, skip, gamma, bias: (rms(x + skip + bias, 0.1) * gamma, x + skip + bias),
    "bias_add": lambda x, bias, skip: x + bias + skip,
    "split_gelu": lambda x, bias: (x + bias)[..., :3] * gelu((x + bias)[..., 3:]),
    "gemm_gelu": lambda x, w, bias: tanh_gelu(x @ w + bias),
    "conv_last": lambda x, w, b: sum(np.einsum("nhwc,mc->nhwm", x[:, :, j : j + 4], w[:, 0, j]) for j in range(2)) + b,
    "group_norm": lambda x, scale, bias: silu(group_norm(x, scale, bias, 2)),
    "group_norm_first": lambda x, s, b: np.moveaxis(group_norm(np.moveaxis(x, 1, -1), s, b, 3), -1, 1),
    "skip_group_norm": skip_group_norm,
    "skip_group_norm_few": lambda *inputs: skip_group_norm(*inputs)[0],
    "rfft": lambda x: np.stack([np.fft.rfft(x).real, np.fft.rfft(x).imag], -1),
    "irfft": lambda x: np.fft.irfft(x[..., 0] + 1j * x[..., 1]),
}


def shape(words: str) -> list[int]:
    return [SIZES[w] if w in SIZES else int(w) for w in words.split()]


def arrays(case: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng(zlib.crc32(case[0].encode()))
    made = [None if x is None else random.standard_normal(shape(x)) if isinstance(x, str) else x[0] for x in case[2]]
    return {f"x{i}": array for i, array in enumerate(made) if array is not None}


def model(case: Any, dtype: Any = np.float32, symbolic: bool = False) -> onnx.ModelProto:
    _, operator, inputs, attributes, count = case
    domain = "" if operator == "SimplifiedLayerNormalization" else MS
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    outputs = [f"y{i}" if i in (0, -count - 1) or count > 0 else "" for i in range(abs(count))]
    ports = []
    for name, array in arrays(case).items():
        words = inputs[int(name[1:])]
        words = (words if isinstance(words, str) else words[1]).split()
        dims = [w if symbolic and w in SIZES else shape(w)[0] for w in words]
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype) if array.dtype.kind == "f" else array.dtype)
        ports.append(helper.make_tensor_value_info(name, kind, dims))
    node = helper.make_node(operator, names, outputs, domain=domain, name="node", **attributes)
    graph = helper.make_graph([node], "g", ports, [onnx.ValueInfoProto(name=o) for o in outputs if o])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)], ir_version=10)


def lowered(case: Any, dtype: Any = np.float32, symbolic: bool = False) -> ir.Model:
    made = infer_shapes(ir.from_proto(model(case, dtype, symbolic)))
    inferred = [(y.dtype, y.shape) for y in made.graph.outputs]
    lower(made.graph, list(made.graph))
    assert [n for n in made.graph if n.domain or n.op_type == "SimplifiedLayerNormalization"] == [], "it is as it was"
    for y, (kind, dims) in zip(made.graph.outputs, inferred, strict=True):
        assert (y.dtype, len(y.shape)) == (kind, len(dims))
    return made


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    cast = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    return session.run(None, {i.name: cast[i.name] for i in session.get_inputs()})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_it_computes_what_the_kernel_does(case):
    feeds = arrays(case)
    equal = EQUAL.get(case[0])
    want = run(model(case), feeds) if equal is None else equal(*feeds.values())
    want = want if isinstance(want, list | tuple) else [want]
    for symbolic in (False, True):
        got = run(ir.to_proto(lowered(case, symbolic=symbolic)), feeds)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_its_gradients_are_those_of_differences(case):
    feeds = arrays(case)
    graph = lowered(case, np.float64).graph
    op = Builder(graph)
    y = graph.outputs[0]
    with op.scope("loss"):
        weights = np.random.default_rng(1).standard_normal([int(d) for d in y.shape])
        loss = op.ReduceSum(op.Mul(y, weights), keepdims=0)
    inputs = [v for v in graph.inputs if op.is_float(v)]
    found = loss_gradients(op, loss, inputs)
    graph.outputs[:] = [loss, *(found[v] for v in inputs if v in found)]
    lower(graph, [n for n in graph if n.domain])  # the gradient of a convolution, which the evaluator lacks
    evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)), new_ops=REPLACED)
    gradients = dict(zip((v.name for v in inputs if v in found), evaluator.run(None, feeds)[1:], strict=True))
    assert gradients
    for value in inputs:
        direction = np.random.default_rng(2).standard_normal(feeds[value.name].shape)
        ends = [evaluator.run(None, {**feeds, value.name: feeds[value.name] + h * direction})[0] for h in (1e-6, -1e-6)]
        numeric = (ends[0] - ends[1]) / 2e-6
        exact = np.sum(gradients[value.name] * direction) if value.name in gradients else 0.0
        assert exact == pytest.approx(numeric, rel=2e-6, abs=2e-6), value.name
