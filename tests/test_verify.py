"""``ortc verify``: right folders pass, and each kind of wrong one is found by the check that is there for it."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortc.artifacts import compile, compile_graphs
from ortc.plan import load_plan
from ortc.recipe import parse_recipe
from ortc.rules import GRADIENTS
from ortc.source import load_model
from ortc.verify import Check, relative_error, verify

from gradcheck import TARGETS  # isort: skip

MODELS = Path(__file__).parent / "data" / "models"
MLP = MODELS / "mlp.legacy.onnx"
TARGET = TARGETS[-1].name
DROPS = """\
<ir_version: 10, opset_import: ["": 17]>
drops (float[N,4] x) => (float[N,2] y) <
   float[4,6] a = {1, 2, 3, 4, 5, 6, -1, 2, -3, 4, -5, 6, 1, 2, 3, -4, -5, -6, 1, 0, 1, 0, 1, 0},
   float[6,2] b = {1, 2, -1, 1, 3, 2, 1, -2, -3, 1, 2, 1}, float ratio = {0.5}, bool training = {1}
> {
   p = MatMul (x, a)
   q = Dropout (p, ratio, training)
   r = Tanh (q)
   s = Dropout (r, ratio, training)
   y = MatMul (s, b)
}
"""
FORWARD, GRADIENT, DIFFERENCE = (
    "the evaluation = the exported model",
    "loss and gradients = one graph in float64",
    "that graph's gradients = a finite difference",
)
AGAIN = "compiled again = the folder's graphs, byte for byte"


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {c.name: c for c in checks}


def wrong(checks: list[Check]) -> list[str]:
    return [c.name for c in checks if c.verdict == "WRONG"]


CASES = {
    "perceptron": ("mlp.legacy", {}),
    "stages": ("gpt2_eager.legacy", {"pipeline": {"stages": 2, "micro_batches": 4}}),
    "zero-bubble, a tied weight": ("tied.legacy", {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "replicas that share the optimizer": ("mlp.legacy", {"pipeline": {"replicas": 2, "zero": 1}}),
    "batch norm, micro-batches": ("lenet_bn.legacy_train", {"pipeline": {"micro_batches": 2}}),
    "half precision": ("mlp.legacy", {"precision": {"type": "fp16"}}),
    "lstm": ("lstm.legacy", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_right_folder(case, tmp_path):
    name, recipe = CASES[case]
    compile(MODELS / f"{name}.onnx", tmp_path / "out", parse_recipe({"target": TARGET, **recipe}))
    checks = verify(tmp_path / "out", MODELS / f"{name}.onnx")
    assert wrong(checks) == []
    found = by_name(checks)
    several = recipe.get("pipeline", {}).get("stages", 1) > 1
    assert found["the stages' evaluation = the exported model" if several else FORWARD].verdict == "right"
    # A stock ONNX Runtime runs a convolution's gradient only once it is lowered.
    late = ("pass gradients",) if case.startswith("batch norm") and TARGET == "onnxruntime" else ()
    for check in (GRADIENT, DIFFERENCE, AGAIN, "pass gradients", "pass lower", "pass clean-up"):
        assert found[check].verdict == ("not checked" if check in late else "right"), found[check]
    if several:
        assert found["pass phases"].verdict == "right"
        assert found["pass phases"].worst, "the phases were run"
    assert not np.isnan(found[GRADIENT].error)
    assert "pass training-form" not in found, "it changes what is computed"


def test_without_the_model_what_the_folder_exports_stands_for_it(ortc, tmp_path):
    compile(MODELS / "lenet_bn.legacy_train.onnx", tmp_path / "out", parse_recipe({"target": TARGET}))
    code, out, _ = ortc("verify", tmp_path / "out")
    assert code == 0
    assert "WRONG" not in out
    assert AGAIN[:15] not in out


def test_dropout_drops_the_same_in_stages_and_in_float64(tmp_path):
    ir.save(ir.from_onnx_text(DROPS), tmp_path / "drops.onnx")
    recipe = {"target": TARGET, "loss": [{"name": "mse"}], "pipeline": {"stages": 2, "micro_batches": 2}}
    compile(tmp_path / "drops.onnx", tmp_path / "out", parse_recipe(recipe))
    checks = verify(tmp_path / "out", tmp_path / "drops.onnx")
    assert wrong(checks) == []
    assert by_name(checks)[GRADIENT].verdict == "right"
    without = by_name(verify(tmp_path / "out"))
    assert without[GRADIENT].verdict == without[DIFFERENCE].verdict == "not checked"
    assert "--model" in without[GRADIENT].note
    assert without["pass lower"].verdict == "right"


def test_a_batch_of_the_users_own(ortc, tmp_path):
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET}))
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    np.savez(tmp_path / "batch.npz", x=x, labels=np.arange(5))
    assert ortc("verify", tmp_path / "out", "--data", tmp_path / "batch.npz")[0] == 0
    np.savez(tmp_path / "bad.npz", x=x)
    code, _, err = ortc("verify", tmp_path / "out", "--data", tmp_path / "bad.npz")
    assert code == 2
    assert "lacks the labels" in err


def test_adapters(tmp_path):
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET, "lora": {"rank": 2, "targets": ["fc1*"]}}))
    found = by_name(verify(tmp_path / "out", MLP))
    assert wrong(list(found.values())) == []
    assert found[GRADIENT].verdict == found["pass lora"].verdict == "right"
    without = by_name(verify(tmp_path / "out"))
    assert without[FORWARD].verdict == "right"
    assert without[GRADIENT].verdict == without["passes"].verdict == "not checked"
    assert "--model" in without["passes"].note


# ---- what is wrong is found ------------------------------------------------------------------------------------------


@pytest.fixture
def break_relu(own_tables):
    """Puts a wrong gradient rule in the place of Relu's."""
    right = GRADIENTS["", "Relu"]

    def broken(*arguments, **attributes):
        result = right.function(*arguments, **attributes)
        return result * 0.9

    broken.__signature__ = inspect.signature(right.function)  # type: ignore[attr-defined]
    return lambda: GRADIENTS.update({("", "Relu"): dataclasses.replace(right, function=broken)}), right


def test_a_wrong_gradient_in_the_folder(break_relu, ortc, tmp_path):
    break_it, right = break_relu
    break_it()
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET}))
    GRADIENTS["", "Relu"] = right
    found = by_name(verify(tmp_path / "out", MLP))
    assert wrong(list(found.values())) == [GRADIENT, AGAIN]
    assert found[GRADIENT].error > 0.05
    code, out, _ = ortc("verify", tmp_path / "out", "--model", MLP)
    assert code == 1
    assert "WRONG: loss and gradients" in out


def test_a_wrong_rule_is_found_by_the_difference(break_relu, tmp_path):
    break_relu[0]()
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET}))
    checks = verify(tmp_path / "out", MLP)
    assert wrong(checks) == [DIFFERENCE], "the reference has the same rule; a finite difference has none"


@pytest.mark.parametrize(("name", "recipe"), [("simplify", {}), ("clean-up", {}), ("phases", {"pipeline": {"stages": 2}})])
def test_a_pass_that_changes_what_is_computed(name, recipe, monkeypatch, tmp_path):
    """A Relu becomes an Abs on the way."""
    from ortc import passes

    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET, **recipe}))
    step = next(type(p) for p in passes.standard() if p.name == name)
    right = step.run

    def run(self, c):
        right(self, c)
        graph = c.graph if not any(c.stages) else c.stages[0].get("train", c.stages[0].get("forward")).graph
        next(n for n in graph if n.op_type == "Relu").op_type = "Abs"

    monkeypatch.setattr(step, "run", run)
    checks = verify(tmp_path / "out")
    assert f"pass {name}" in wrong(checks)
    assert not [c for c in wrong(checks) if c.startswith("pass") and c != f"pass {name}"], "no other pass is blamed"


def test_an_evaluation_that_is_not_the_models(tmp_path):
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET}))
    graph = load_plan(tmp_path / "out").stages[0].phases["eval"]
    file = tmp_path / "out" / graph.file
    proto = onnx.load_model(file)
    next(n for n in proto.graph.node if n.op_type == "Relu").op_type = "Abs"
    onnx.save(proto, file)
    plan = tmp_path / "out" / "plan.json"
    plan.write_text(plan.read_text().replace(graph.sha256, hashlib.sha256(file.read_bytes()).hexdigest()))
    assert FORWARD in wrong(verify(tmp_path / "out"))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes(ortc, tmp_path):
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET}))
    code, out, err = ortc("verify", tmp_path / "out", "--model", MODELS / "lstm.legacy.onnx")
    assert (code, out) == (2, "")
    assert err.startswith("ortc: ")
    assert "is not the model that the folder was compiled from" in err
    assert ortc("verify", tmp_path)[0] == 2
    assert "there is no file" in ortc("verify", tmp_path / "out", "--model", tmp_path / "no.onnx")[2]
    shutil.rmtree(tmp_path / "out" / "checkpoint")
    assert ortc("verify", tmp_path / "out")[0] == 2


def test_relative_error():
    x = np.array([1.0, -4.0, 0.0])
    assert relative_error(x, x) == 0
    assert relative_error(np.array([1.0, -4.0, 0.4]), x) == pytest.approx(0.1)
    assert relative_error(x, x[:2]) == math.inf
    assert relative_error(np.array([np.nan, 1]), np.array([np.nan, 1])) == 0
    assert relative_error(np.array([np.nan, 1]), np.array([1.0, 1])) == math.inf
    assert relative_error(np.array([np.inf]), np.array([np.inf])) == 0
    assert relative_error(np.array([1e-9]), np.array([0.0])) == pytest.approx(1e-3), "relative to the least, 1e-6"


# ---- the history -----------------------------------------------------------------------------------------------------


def test_the_plan_tells_what_each_pass_did(tmp_path):
    compile(MLP, tmp_path / "out", parse_recipe({"target": TARGET, "pipeline": {"stages": 2}}))
    history = json.loads((tmp_path / "out" / "plan.json").read_text())["history"]
    assert [run["name"] for run in history][:2] == ["prepare", "inference-template"]
    for one, next_ in pairwise(history):
        assert one["after"] == next_["before"]
    found = {run["name"]: run for run in history}
    assert found["gradients"]["after"] > found["gradients"]["before"]
    phases = [f"stage-{s}/{p}.onnx" for s in (0, 1) for p in ("forward", "backward")]
    assert history[-1]["after"] == sum(len(onnx.load_model(tmp_path / "out" / file).graph.node) for file in phases)


def test_equal_graphs_whatever_was_compiled_before():
    recipe = parse_recipe({"pipeline": {"stages": 2}})
    texts = []
    for _ in range(3):
        c = compile_graphs(load_model(MODELS / "tied.legacy.onnx"), recipe)
        texts.append([ir.to_proto(m).SerializeToString(deterministic=True) for phases in c.stages for m in phases.values()])
    assert texts[0] == texts[1] == texts[2]
