"""The inference form of what was trained."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime

from ortc.artifacts import compile
from ortc.recipe import LossTerm, Recipe
from ortc.runtime.trainer import Trainer

NEWER = """
<ir_version: 11, opset_import: ["" : 24]>
g (float[n,4] x) => (float[n,4] y) <float[4] scale = {1.0, 0.5, -1.0, 2.0}, float[4,4] w = {
  0.1, 0.2, 0.3, 0.4, -0.1, 0.5, 0.2, 0.0, 0.3, -0.3, 0.1, 0.2, 0.4, 0.1, -0.2, 0.6}> {
  h = RMSNormalization<axis = -1>(x, scale)
  m = MatMul(h, w)
  y = Swish(m)
}"""


def test_a_model_newer_than_its_target_is_exported_for_the_target(tmp_path):
    """Operators of opset 23 and 24, which the target does not know, are written out; the numbers are NumPy's."""
    onnx.save(onnx.parser.parse_model(NEWER), tmp_path / "newer.onnx")
    compile(tmp_path / "newer.onnx", tmp_path / "out", Recipe(loss=[LossTerm(name="mse")]))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    with Trainer(tmp_path / "out") as trainer:
        trainer.step({"x": x, "labels": np.zeros_like(x)})
        weights = {k: v.astype(np.float64) for k, v in trainer.parameters.items()}
        trainer.export(tmp_path / "trained.onnx")
    assert {i.domain: i.version for i in onnx.load(tmp_path / "trained.onnx").opset_import}[""] == 21
    y = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})[0]
    h = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weights["scale"]
    m = h @ weights["w"]
    np.testing.assert_allclose(y, m / (1 + np.exp(-m)), rtol=1e-5, atol=1e-6)
