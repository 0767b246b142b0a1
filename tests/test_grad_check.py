"""``ortc grad --check``: right gradients pass, wrong ones are named, kinks are told apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from gradcheck import TARGETS
from rich.console import Console

from ortc import grad

pytestmark = pytest.mark.usefixtures("own_tables")

MODELS = Path(__file__).parent / "data" / "models"

WRONG_RULE = """
from ortc.rules import gradient

@gradient("Tanh")
def tanh(op, output, doutput):
    return doutput * (1 - output)
"""

DROPOUT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n,6] x) => (float[n,4] y) <float[6,5] first = {FIRST}, float[5,4] last = {LAST}, float ratio = {0.4}, bool on = {1}> {
  h = MatMul(x, first) t = Tanh(h) d = Dropout(t, ratio, on) y = MatMul(d, last)
}"""

PLAIN = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n,6] x) => (float[n,4] y) <float[6,5] first = {FIRST}, float[5,4] last = {LAST}> {
  h = MatMul(x, first) t = Sigmoid(h) y = MatMul(t, last)
}"""

KINK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n,6] x) => (float[n,4] y) <float[6,4] w = {FIRST}, float[4] zeros = {0, 0, 0, 0}, float[4] scale = {1, 2, 3, 4}> {
  r = Relu(zeros) h = MatMul(x, w) s = Mul(h, scale) y = Add(s, r)
}"""


QUANTISED = """
<ir_version: 9, opset_import: ["" : 19]>
g (float[n,6] x) => (float[n,4] y)
<float[6,5] first = {FIRST}, float[5,4] last = {LAST}, float scale = {0.05}, int8 zero = {0}> {
  q = QuantizeLinear(first, scale, zero) d = DequantizeLinear(q, scale, zero) h = MatMul(x, d) y = MatMul(h, last)
}"""


@pytest.fixture
def check(ortc):
    """Runs ``ortc grad``; returns exit code, output and errors."""
    return partial(ortc, "grad")


def save(text: str, path: Path) -> Path:
    """A model from text, its weights random."""
    random = np.random.default_rng(3)
    for name, size in (("FIRST", 30), ("LAST", 20)):
        count = 24 if "float[6,4]" in text else size
        text = text.replace(name, ", ".join(f"{v:.3f}" for v in random.standard_normal(count)))
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def halved(path: Path) -> Path:
    """The model in float16."""
    model = onnx.load_model(path)
    for port in [*model.graph.input, *model.graph.output]:
        port.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, path)
    return path


def verdicts(out: str) -> dict[str, str]:
    """The table's rows: parameter -> verdict."""
    rows = [line.split() for line in out.splitlines()]
    return {row[0]: " ".join(row[4:]) for row in rows if len(row) > 4 and row[3][:1].isdigit() and "e" in row[3]}


def batch_of(name: str, folder: Path) -> Path:
    """The stored batch of a model."""
    with np.load(MODELS / f"{name}.ref.npz") as stored:
        batch = {k.removeprefix("in/"): stored[k] for k in stored.files if k.startswith("in/")} | {"labels": stored["target"]}
    np.savez(folder / "batch.npz", **batch)
    return folder / "batch.npz"


CHECKED = ["mlp.legacy", "resnet.legacy_train", "bert.dynamo", "lstm.legacy", "lenet_bn.legacy_train"]


@pytest.mark.parametrize("name", CHECKED)
def test_gradients_of_real_models_are_right(check, tmp_path, name):
    """Integer inputs, batch norm on the batch, recurrent layers; the batch is the stored one."""
    code, out, err = check(MODELS / f"{name}.onnx", "--check", "--data", batch_of(name, tmp_path), "--target", TARGETS[-1].name)
    assert code == 0, out + err
    assert "worst: " in out
    assert "for the rounding of float32" in out
    found = verdicts(out)
    assert len(found) > 3
    assert set(found.values()) == {"right"}


def test_a_batch_is_made_up(check):
    code, out, err = check(MODELS / "mlp_dropout.legacy_train.onnx", "--check", "--parameters", "fc2.*")
    assert code == 0, out + err
    assert verdicts(out) == {"fc2.weight": "right", "fc2.bias": "right"}


def test_a_wrong_rule_is_found_and_the_parameter_named(check, tmp_path):
    model = save(DROPOUT, tmp_path / "model.onnx")
    code, out, _ = check(model, "--check", "--loss", "mse")
    assert code == 0, out
    (tmp_path / "rules.py").write_text(WRONG_RULE)
    code, out, _ = check(model, "--check", "--loss", "mse", "--rules", tmp_path / "rules.py")
    assert code == 1
    assert verdicts(out) == {"first": "WRONG", "last": "right"}  # only the first lies behind the Tanh
    assert "WRONG: 1 of 2" in out
    assert "worst: first, " in out


def test_a_model_in_half_precision(check, tmp_path):
    code, out, err = check(halved(save(PLAIN, tmp_path / "half.onnx")), "--check", "--loss", "mse")
    assert code == 0, out + err
    assert "for the rounding of float16" in out
    assert verdicts(out) == {"first": "right", "last": "right"}


def test_a_kink_is_told_and_not_judged(check, tmp_path):
    code, out, err = check(save(KINK, tmp_path / "kink.onnx"), "--check", "--loss", "mse")
    assert code == 0, out + err
    assert verdicts(out) == {"w": "right", "zeros": "at a kink", "scale": "right"}
    assert "1 of 3 at a kink" in out


def test_what_lies_before_a_rounding_is_told_and_not_judged(check, tmp_path):
    code, out, err = check(save(QUANTISED, tmp_path / "quantised.onnx"), "--check", "--loss", "mse")
    assert code == 0, out + err
    assert "1 of 2 straight-through, not judged" in out
    assert "worst: last, " in out


def test_data_inputs_are_checked_too(check, tmp_path):
    code, out, err = check(save(DROPOUT, tmp_path / "model.onnx"), "--check", "--loss", "mse", "--wrt", "x")
    assert code == 0, out + err
    assert verdicts(out) == {"first": "right", "last": "right", "x": "right"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "-o", "g.npz"], "say one of the two"),
        ([], "say one of the two"),
        (["-o", "g.npz"], "say which batch: --data"),
        (["--check", "--parameters", "nothing.*"], "no trained parameter is called 'nothing.*'"),
    ],
)
def test_mistakes_are_told(check, arguments, message):
    code, _, err = check(MODELS / "mlp.legacy.onnx", *arguments)
    assert code == 2
    assert err.startswith("ortc: ")
    assert message in err


def cubed(h: float) -> float:
    return (1 + h) ** 3


def bent(h: float) -> float:
    return 2 * max(h, 0.0) - h


@pytest.mark.parametrize(
    ("loss", "expected", "found", "smooth"),
    [
        (cubed, 3.0, 3.0, True),
        (cubed, 2.0, 3.0, True),  # wrong, at a place where the slope only changes
        (lambda h: 1e4 * h * h + h, 2.0, 1.0, True),  # and fast
        (bent, 1.0, 0.0, False),
        (lambda h: bent(h - grad.STEP / 2), -1.0, -1.0, True),  # a kink between the two steps
        (lambda h: float(h > 0), 0.0, None, False),  # a jump
    ],
)
def test_differences(loss, expected, found, smooth):
    value, is_smooth = grad.difference(loss, loss(0.0), expected, 1e-6)
    assert is_smooth == smooth
    if found is not None:
        assert value == pytest.approx(found, abs=1e-7)


def test_a_vanishing_gradient_is_relative_to_the_others():
    """A bias in front of a batch norm: zero but for rounding."""
    rounding = np.full(3, 1e-8)
    assert grad.check_one("b", rounding, lambda at: 0.0, 0.0, 1e-3).verdict == "WRONG"
    assert grad.check_one("b", rounding, lambda at: 0.0, 0.0, 1e-3, floor=1e-3).verdict == "right"


def test_the_table_keeps_long_names_whole(capsys):
    name = "encoder." * 12 + "weight"
    grad._print(Console(width=240), [grad.Checked(name, 1.0, 1.0, 0.0, "right")], "float32", 1e-3)
    assert name in capsys.readouterr().out
