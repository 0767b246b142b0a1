"""``ortc explain``: provenance of every node, and what is told of tensors, nodes and weights."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from ortc.artifacts import compile, compile_graphs
from ortc.explain import explain
from ortc.graph.names import all_graphs
from ortc.recipe import parse_recipe
from ortc.source import load_model

pytestmark = pytest.mark.compiler

MODELS = Path(__file__).parent / "data" / "models"
HALVES = {"pipeline": {"stages": 2, "micro_batches": 2}}

RECIPES = {"plain": {}, "half": {"precision": {"type": "bf16"}}, "stages": {**HALVES, "target": "onnxruntime"}}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [p.stem for p in sorted(MODELS.glob("*.onnx"))])
def test_every_node_says_where_it_came_from_or_is_the_models_own(name, recipe):
    c = compile_graphs(load_model(MODELS / f"{name}.onnx"), parse_recipe({"wrt": [], **RECIPES[recipe]}))
    own = {node.name for graph in all_graphs(c.graphs["export"].graph) for node in graph}
    for phases in c.stages:
        for phase, model in phases.items():
            for graph in all_graphs(model.graph):
                for node in graph:
                    tags = node.metadata_props
                    assert node.name in own or "ortc.pass" in tags, f"{phase}: {node.name}"
                    shared = phase.startswith("optimizer") and (node.name or "").startswith("scalars")
                    assert "ortc.pass" not in tags or tags.get("ortc.origin") or shared, f"{phase}: {node.name}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("explain")
    recipe = {**HALVES, "precision": {"type": "fp16"}, "target": "onnxruntime", "parameters": {"freeze": ["fc1.bias"]}}
    compile(MODELS / "mlp.legacy.onnx", root / "out", parse_recipe(recipe))
    return root / "out"


def test_a_weight(folder):
    text = explain(folder, "fc1.weight")
    assert text.splitlines()[0] == "fc1.weight: float32[128,64], 32 KiB"
    assert "  trains     the loss depends on it" in text
    assert "  held by    stage 0" in text
    assert "  states     exp_avg, exp_avg_sq of adamw" in text
    assert "  read by    Gemm /fc1/Gemm in the exported model" in text
    assert "  in         stage-0/optimizer.onnx: input (parameter)" in text


def test_a_frozen_weight(folder):
    text = explain(folder, "fc1.bias")
    assert "  frozen     " in text
    assert "frozen by the recipe" in text
    assert "states" not in text


def test_an_activation_is_stashed_for_the_nodes_that_read_it(folder):
    text = explain(folder, "/a1/Relu_output_0")
    assert "  made by    Relu /a1/Relu, which is the model's own" in text
    assert "  stashed    by the forward for stage 0 backward, where it is read by Greater (gradients of /a1/Relu)" in text
    assert "  kept       after it arrived until stage 1 backward, where it is read by Gemm (gradients of /fc2/Gemm)" in text
    assert "  is         a value that one stage makes and others read, stage 1 at the other end" in text
    assert "  computed   in float16: Relu is `follow` in precision.toml: no arithmetic" in text


def test_a_cast_tells_for_whom(folder):
    text = explain(folder, "fc1.weight/cast/Cast")
    assert "by pass precision of weight fc1.weight" in text
    assert "  cast       from fc1.weight to float16[128,64], for its readers: Gemm is `low` in precision.toml" in text


def test_a_node_of_the_model_and_what_became_of_it(folder):
    text = explain(folder, "/fc1/Gemm")
    assert text.splitlines()[0] == "/fc1/Gemm: a node Gemm"
    assert "  became     Gemm /fc1/Gemm.grad/Gemm" in text
    assert "in stage 0 backward, by pass gradients" in text


def test_a_made_node_leads_back_to_the_model(folder):
    text = explain(folder, "/fc1/Gemm.grad/Gemm_1")
    assert "by pass gradients (rule Gemm) from Gemm /fc1/Gemm, which is the model's own" in text


def test_in_one_graph_a_value_is_kept_until_the_backward(tmp_path):
    compile(MODELS / "mlp.legacy.onnx", tmp_path / "out")
    assert "  kept       in train until the backward has read it: " in explain(tmp_path / "out", "/a1/Relu_output_0")


def test_a_name_that_is_nowhere(ortc, folder):
    code, out, err = ortc("explain", folder, "fc1.wieght")
    assert (code, out) == (2, "")
    assert "no tensor or node is called 'fc1.wieght'; did you mean 'fc1.weight'" in err
    assert "did you mean" not in ortc("explain", folder, "§")[2]
    assert ortc("explain", folder, "")[0] == 2
    assert ortc("explain", folder.parent, "x")[0] == 2


def test_names_cannot_write_to_the_terminal(ortc, tmp_path):
    proto = onnx.load_model(MODELS / "mlp.legacy.onnx")
    evil = "\x1b[2J\nortc: fine"
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [evil if n == "/fc1/Gemm_output_0" else n for n in names]
    onnx.save(proto, tmp_path / "evil.onnx")
    compile(tmp_path / "evil.onnx", tmp_path / "out")
    code, out, _ = ortc("explain", tmp_path / "out", evil)
    assert code == 0
    assert "\x1b" not in out
    assert "made by    Gemm /fc1/Gemm" in out
