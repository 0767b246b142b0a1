"""Quantisation-aware training: the straight-through gradient, and numbers that stay the model's own."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from ortc.artifacts import compile
from ortc.recipe import LossTerm, Recipe
from ortc.runtime.trainer import Trainer

X = np.random.default_rng(2).standard_normal((6, 3)).astype(np.float32)
TEXT = """
<ir_version: 9, opset_import: ["" : 19]>
g (float[n,3] x) => (float[n,4] y)
<float[3,4] w = {0.9, -2.0, 0.31, 0.04, 0.5, 1.7, -0.27, 0.6, -1.1, 0.2, 0.8, -0.45}, SCALE, ZERO> {
  q = QuantizeLinear<axis = 1>(w, scale, zero)
  d = DequantizeLinear<axis = 1>(q, scale, zero)
  y = MatMul(x, d)
}"""
FORMS = {
    "per tensor": ("float scale = {0.01}", "int8 zero = {3}", 0.01, 3),
    "per channel": (
        "float[4] scale = {0.01, 0.005, 0.02, 0.001}",
        "int8[4] zero = {0, 1, 2, 3}",
        np.array([0.01, 0.005, 0.02, 0.001]),
        np.arange(4),
    ),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_gradient_passes_where_nothing_was_clipped(form, tmp_path):
    scale_text, zero_text, scale, zero = FORMS[form]
    text = TEXT.replace("SCALE", scale_text).replace("ZERO", zero_text)
    path = tmp_path / "qat.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    plan = compile(path, tmp_path / "out", Recipe(loss=[LossTerm(name="mse")]))
    assert [p.name for p in plan.trainable()] == ["w"]
    target = np.zeros((6, 4), np.float32)
    with Trainer(tmp_path / "out") as trainer:
        loss, gradients = trainer.gradients({"x": X, "labels": target})
        outputs = trainer.evaluate({"x": X, "labels": target}).outputs
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # newer ones multiply in integers, and round
    y = onnxruntime.InferenceSession(path, options).run(None, {"x": X})[0]
    np.testing.assert_array_equal(outputs["y"], y)
    assert loss == pytest.approx(float((y.astype(np.float64) ** 2).mean()), rel=1e-5)
    w = np.array([0.9, -2.0, 0.31, 0.04, 0.5, 1.7, -0.27, 0.6, -1.1, 0.2, 0.8, -0.45]).reshape(3, 4)
    level = np.round(w / scale) + zero
    inside = (level >= -128) & (level <= 127)
    assert inside.any()
    assert not inside.all()
    through = X.T.astype(np.float64) @ (2 * y / y.size)
    np.testing.assert_allclose(gradients["w"], through * inside, rtol=1e-4, atol=1e-6)


def test_adapters_train_over_frozen_quantised_weights(tmp_path):
    text = """
    <ir_version: 9, opset_import: ["" : 19]>
    g (float[n,3] x) => (float[n,2] y)
    <int8[3,2] w = {10, -20, 30, 40, -50, 60}, float scale = {0.02}, float[2,2] adapter = {1.0, 0.0, 0.5, 1.0}> {
      d = DequantizeLinear(w, scale)
      h = MatMul(x, d)
      y = MatMul(h, adapter)
    }"""
    path = tmp_path / "frozen.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    plan = compile(path, tmp_path / "out", Recipe(loss=[LossTerm(name="mse")], wrt=["x"]))
    assert [p.name for p in plan.trainable()] == ["adapter"]
    with Trainer(tmp_path / "out") as trainer:
        _, gradients = trainer.gradients({"x": X, "labels": np.zeros((6, 2), np.float32)})
    w = np.array([[10, -20], [30, 40], [-50, 60]]) * 0.02
    adapter = np.array([[1.0, 0.0], [0.5, 1.0]])
    d = 2 * (X @ w @ adapter) / 12
    np.testing.assert_allclose(gradients["adapter"], (X @ w).T @ d, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradients["x"], d @ adapter.T @ w.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zero_points", [False, True])
def test_a_gradient_passes_four_bit_weights(zero_points, tmp_path):
    """MatMulNBits, as ONNX Runtime's own kernel computes it, and the gradient of its input."""
    random = np.random.default_rng(4)
    k, n, block = 40, 5, 16
    packed = random.integers(0, 256, (n, 3, block // 2), np.uint8)
    scales = random.uniform(0.01, 0.1, n * 3).astype(np.float32)
    zeros = random.integers(0, 256, n * 2, np.uint8)
    names = ["h", "B", "scales", *(["zeros"] if zero_points else [])]
    nodes = [
        onnx.helper.make_node("Mul", ["x", "adapter"], ["h"]),
        onnx.helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=block),
    ]
    adapter = random.standard_normal(k).astype(np.float32)
    weights = {"adapter": adapter, "B": packed, "scales": scales, **({"zeros": zeros} if zero_points else {})}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", k])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", n])],
        [onnx.numpy_helper.from_array(v, name) for name, v in weights.items()],
    )
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path / "four.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    plan = compile(path, tmp_path / "out", Recipe(loss=[LossTerm(name="mse")]))
    assert [p.name for p in plan.trainable()] == ["adapter"]
    x = random.standard_normal((6, k)).astype(np.float32)
    batch = {"x": x, "labels": np.zeros((6, n), np.float32)}
    with Trainer(tmp_path / "out") as trainer:
        _, gradients = trainer.gradients(batch)
        y = trainer.evaluate(batch).outputs["y"]
    np.testing.assert_allclose(y, onnxruntime.InferenceSession(path).run(None, {"x": x})[0], rtol=1e-4, atol=1e-4)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(n, 3, block).astype(np.float64)
    zero = np.stack([zeros & 15, zeros >> 4], -1).reshape(n, 4)[:, :3, None] if zero_points else 8
    weight = ((nibbles - zero) * scales.reshape(n, 3, 1)).reshape(n, -1)[:, :k]
    expected = ((2 * y / y.size) @ weight * x).sum(0)
    np.testing.assert_allclose(gradients["adapter"], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
