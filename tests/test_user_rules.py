"""An operator of the user's own: without a rule it is told, with a rule file it trains; likewise a loss of the user's own."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from ortc.artifacts import compile
from ortc.errors import ModelError, RecipeError
from ortc.recipe import LossTerm, Recipe, load_recipe
from ortc.runtime.trainer import Trainer

MODEL = """
<ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
g (float[n,3] x) => (float[n,3] y) <float[3] w = {0.5, -1.0, 2.0}> {
  h = Mul(x, w)
  y = mine.Cube(h)
}"""

RULES = """
from ortc.rules import gradient, lowering

@lowering("mine::Cube")
def cube(op, x):
    return (x * x * x,)
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "mine.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    return path


pytestmark = pytest.mark.usefixtures("own_tables")


def test_without_a_rule_the_operator_is_named(model, tmp_path):
    with pytest.raises(ModelError, match=r"operator mine::Cube: no gradient rule(?s:.)*parameter that needs it: w"):
        compile(model, tmp_path / "out")


def test_an_unknown_operator_amid_known_ones_is_named(model, tmp_path):
    text = MODEL.replace("y = mine.Cube(h)", "c = mine.Cube(h) s = Softmax(c) y = Mul(s, w)")
    onnx.save(onnx.parser.parse_model(text), model)
    with pytest.raises(ModelError, match=r"operator mine::Cube: no gradient rule"):
        compile(model, tmp_path / "out", Recipe(loss=[LossTerm(name="mse")]))


def test_a_rule_file_lets_it_train(model, tmp_path):
    rules = tmp_path / "my rules.py"
    rules.write_text(RULES)
    recipe = Recipe(loss=[LossTerm(name="mse")])
    compile(model, tmp_path / "out", recipe, rules=[rules])
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    w = np.array([0.5, -1.0, 2.0], np.float32)
    with Trainer(tmp_path / "out") as trainer:
        loss, gradients = trainer.gradients({"x": x, "labels": np.zeros_like(x)})
    h = x.astype(np.float64) * w
    assert loss == pytest.approx((h**6).mean(), rel=1e-5)
    np.testing.assert_allclose(gradients["w"], (2 * h**3 * 3 * h**2 * x).sum(0) / h.size, rtol=1e-4)


@pytest.mark.parametrize(("text", "message"), [("1/0", "ZeroDivisionError"), ("def f(:", "SyntaxError")])
def test_a_broken_rule_file_is_told(model, tmp_path, text, message):
    rules = tmp_path / "broken.py"
    rules.write_text(text)
    with pytest.raises(RecipeError, match=f"broken.py: {message}"):
        compile(model, tmp_path / "out", rules=[rules])


LINEAR = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n,3] x) => (float[n,2] mean, float[n,2] scale) <float[3,2] w = {1.0, 0.5, -0.5, 1.0, 0.2, 0.3}> {
  mean = MatMul(x, w)
  scale = Exp(mean)
}"""

LOSS = """
<ir_version: 8, opset_import: ["" : 17]>
loss (float[n,2] mean, float[n,2] scale, float[n,2] observed) => (float[n,2] nll) {
  d = Sub(observed, mean) z = Div(d, scale) s = Mul(z, z) l = Log(scale) nll = Add(s, l)
}"""


def test_a_loss_from_an_onnx_file(tmp_path):
    """Its inputs called like outputs are fed by them, the other one is the target; a larger result is averaged."""
    onnx.save(onnx.parser.parse_model(LINEAR), tmp_path / "linear.onnx")
    onnx.save(onnx.parser.parse_model(LOSS), tmp_path / "nll.onnx")
    recipe = Recipe(loss=[LossTerm(name=str(tmp_path / "nll.onnx"))])
    compile(tmp_path / "linear.onnx", tmp_path / "out", recipe)
    random = np.random.default_rng(1)
    x, observed = random.standard_normal((5, 3)), random.standard_normal((5, 2))
    w = np.array([[1.0, 0.5], [-0.5, 1.0], [0.2, 0.3]])

    def value(w):
        mean = x @ w
        return (((observed - mean) / np.exp(mean)) ** 2 + mean).mean()

    with Trainer(tmp_path / "out") as trainer:
        loss, gradients = trainer.gradients({"x": x.astype(np.float32), "observed": observed.astype(np.float32)})
    assert loss == pytest.approx(value(w), rel=1e-5)
    for index in np.ndindex(3, 2):
        step = np.zeros_like(w)
        step[index] = 1e-6
        assert gradients["w"][index] == pytest.approx((value(w + step) - value(w - step)) / 2e-6, rel=1e-3, abs=1e-4)


SCRIPT = """
from onnxscript import script, opset17 as op

@script()
def absolute(x, target):
    return op.ReduceMean(op.Abs(x - target), keepdims=0)
"""


def test_a_loss_from_an_onnxscript_function(tmp_path):
    onnx.save(onnx.parser.parse_model(LINEAR), tmp_path / "linear.onnx")
    (tmp_path / "losses.py").write_text(SCRIPT)
    recipe = Recipe(loss=[LossTerm(name=f"{tmp_path / 'losses.py'}:absolute", output="mean")])
    plan = compile(tmp_path / "linear.onnx", tmp_path / "out", recipe)
    x, target = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    with Trainer(tmp_path / "out") as trainer:
        loss, _ = trainer.gradients({"x": x, plan.losses[0].labels: target})
    assert loss == pytest.approx((0.7 + 1.8) / 2, rel=1e-5)


def test_a_recipe_file_runs_no_python(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[[loss]]\nname = "evil.py:loss"\n')
    with pytest.raises(RecipeError, match="may not name Python code"):
        load_recipe(path)
