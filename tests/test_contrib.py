"""Each of ONNX Runtime's own operators, as it is lowered, against its native kernel, and its gradient against differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from contrib_cases import CASES, IDS, MASK, STORED, arrays, model
from gradcheck import REPLACED
from onnx.reference import ReferenceEvaluator

from ortc.artifacts import compile, load_rules
from ortc.autodiff import loss_gradients
from ortc.errors import ModelError
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import lower
from ortc.recipe import LossTerm, Recipe
from ortc.runtime.trainer import Trainer

load_rules()


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


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


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Of [B, S, N, H] and [B, T, N, H]."""
    scores = np.exp(np.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1]))
    y = np.einsum("bnst,btnh->bsnh", scores / scores.sum(-1, keepdims=True), v)
    return y.reshape(*y.shape[:2], -1)


# What operators compute that have no kernel for a CPU.
EQUAL: dict[str, Callable[..., Any]] = {
    "bias_add": lambda x, bias, skip: x + bias + skip,
    "split_gelu": lambda x, bias: (x + bias)[..., :3] * gelu((x + bias)[..., 3:]),
    "gemm_gelu": lambda x, w, bias: tanh_gelu(x @ w + bias),
    "conv_last": lambda x, w, b: sum(np.einsum("nhwc,mc->nhwm", x[:, :, j : j + 4], w[:, 0, j]) for j in range(2)) + b,
    "group_norm": lambda x, scale, bias: silu(group_norm(x, scale, bias, 2)),
    "group_norm_first": lambda x, s, b: np.moveaxis(group_norm(np.moveaxis(x, 1, -1), s, b, 3), -1, 1),
    "skip_group_norm": skip_group_norm,
    "skip_group_norm_few": lambda *inputs: skip_group_norm(*inputs)[0],
    "heads_packed": lambda x, bias: attended(*np.moveaxis(x + bias.reshape(3, 3, 4).transpose(1, 0, 2), 3, 0)),
    "heads_packed_pair": lambda q, kv: attended(q.reshape(*q.shape[:2], 3, 4), kv[..., 0, :], kv[..., 1, :]),
    "rfft": lambda x: np.stack([np.fft.rfft(x).real, np.fft.rfft(x).imag], -1),
    "irfft": lambda x: np.fft.irfft(x[..., 0] + 1j * x[..., 1]),
}


def lowered(case: Any, dtype: Any = np.float32, symbolic: bool = False) -> ir.Model:
    made = infer_shapes(ir.from_proto(model(case, dtype, symbolic)))
    inferred = [(y.dtype, y.shape) for y in made.graph.outputs]
    lower(made.graph, lambda n: True)
    assert [n for n in made.graph if n.domain or n.op_type == "SimplifiedLayerNormalization"] == [], "it is as it was"
    for y, (kind, dims) in zip(made.graph.outputs, inferred, strict=True):
        assert (y.dtype, len(y.shape)) == (kind, len(dims))
    return made


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], dtype: Any = np.float32) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # nothing is fused again
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    cast = {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    return session.run(None, {i.name: cast[i.name] for i in session.get_inputs()})


def expected(case: Any, feeds: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """By the kernel, of a later release where this one has none, or by NumPy where none has one for a CPU."""
    name = case[0]
    if name in EQUAL:
        found = EQUAL[name](*feeds.values())
        return found if isinstance(found, tuple) else [found]
    if name in STORED:
        with np.load(Path(__file__).parent / "data" / "contrib.npz") as stored:
            return [stored[f"{name}/{i}"] for i in range(sum(k.startswith(f"{name}/") for k in stored.files))]
    return run(model(case), feeds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_it_computes_what_the_kernel_does(case):
    feeds = arrays(case)
    want = expected(case, feeds)
    for symbolic in (False, True):
        got = run(ir.to_proto(lowered(case, symbolic=symbolic)), feeds)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_it_keeps_half_precision(case):
    feeds = arrays(case)
    proto = ir.to_proto(lowered(case, np.float16))
    onnx.checker.check_model(proto, full_check=True)
    for a, b in zip(run(proto, feeds, np.float16), expected(case, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-3 * max(1.0, np.abs(b).max()))


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
    lower(graph, lambda n: bool(n.domain))  # the gradient of a convolution, which the evaluator lacks
    evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)), new_ops=REPLACED)
    gradients = dict(zip((v.name for v in inputs if v in found), evaluator.run(None, feeds)[1:], strict=True))
    assert gradients
    for value in inputs:
        direction = np.random.default_rng(2).standard_normal(feeds[value.name].shape)
        ends = [evaluator.run(None, {**feeds, value.name: feeds[value.name] + h * direction})[0] for h in (1e-6, -1e-6)]
        numeric = (ends[0] - ends[1]) / 2e-6
        exact = np.sum(gradients[value.name] * direction) if value.name in gradients else 0.0
        assert exact == pytest.approx(numeric, rel=2e-6, abs=2e-6), value.name


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (("turned", "Attention", ["B S 6", "6 36"], {"num_heads": 3, "do_rotary": 1}, 1), "a shared cache, or rotation"),
        (("mask", "Attention", ["B S 6", "6 36", "36", (np.zeros(8, np.int32), "8")], {"num_heads": 3}, 1), r"a mask of \[8\]"),
        (("ndim", "Rfft", ["B S 6"], {"signal_ndim": 2}, 1), "a transform of several axes"),
        (("name", "FusedConv", ["B 2 S T", "3 2 1 1"], {"activation": "Gelu"}, 1), "the activation Gelu"),
        (("heads", "MultiHeadAttention", ["B S 6", "B S 6", "B S 6"], {}, 1), "missing a required.* argument: 'num_heads'"),
    ],
)
def test_what_is_not_covered_is_told(case, reason):
    graph = infer_shapes(ir.from_proto(model(case))).graph
    lower(graph, lambda n: True)
    op = Builder(graph)
    with op.scope("loss"):
        loss = op.ReduceSum(graph.outputs[0], keepdims=0)
    with pytest.raises(ModelError, match=f"node 'node', operator com.microsoft::{case[1]}: {reason}"):
        loss_gradients(op, loss, [graph.inputs[0]])


ENCODER = """
<ir_version: 8, opset_import: ["" : 14, "com.microsoft" : 1]>
g (int32[b,s] ids, int32[b,s] mask) => (float[b,s,12] y) {
  e, count = com.microsoft.EmbedLayerNormalization (ids, , words, places, , gamma, beta, mask)
  a = com.microsoft.Attention <num_heads = 3> (e, projection, bias, count)
  o = MatMul (a, out)
  n, none, none2, sum = com.microsoft.SkipLayerNormalization (e, o, gamma, beta, beta)
  f = com.microsoft.BiasGelu (n, beta)
  y = Add (f, sum)
}"""


def test_a_fused_encoder_trains(tmp_path):
    proto = onnx.parser.parse_model(ENCODER)
    random = np.random.default_rng(3)
    shapes = {"words": (10, 12), "places": (8, 12), "gamma": (12,), "beta": (12,), "projection": (12, 36), "bias": (36,)}
    for name, dims in {**shapes, "out": (12, 12)}.items():
        weight = random.standard_normal(dims).astype(np.float32) / 2
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(proto, tmp_path / "encoder.onnx")
    batch = {"ids": IDS, "mask": MASK}
    [y] = run(proto, batch)
    target = random.standard_normal(y.shape).astype(np.float32)
    compile(tmp_path / "encoder.onnx", tmp_path / "out", Recipe(loss=[LossTerm(name="mse")]))
    with Trainer(tmp_path / "out") as trainer:
        loss, gradients = trainer.gradients({**batch, "labels": target})
    assert loss == pytest.approx(((y - target) ** 2).mean(), rel=1e-5)
    assert set(gradients) == {*shapes, "out"}
    for weight in proto.graph.initializer:
        before, direction = onnx.numpy_helper.to_array(weight), random.standard_normal(tuple(weight.dims)).astype(np.float32)
        losses = []
        for step in (1e-2, -1e-2):
            weight.CopyFrom(onnx.numpy_helper.from_array(before + step * direction, weight.name))
            losses.append(((run(proto, batch)[0].astype(np.float64) - target) ** 2).mean())
        weight.CopyFrom(onnx.numpy_helper.from_array(before, weight.name))
        numeric = (losses[0] - losses[1]) / 2e-2
        assert np.sum(gradients[weight.name] * direction) == pytest.approx(numeric, rel=1e-2, abs=1e-3), weight.name
