"""Stages cut by another tool (onnx-graphsurgeon), one file each: joined, compiled and trained as the whole model is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from gradcheck import TARGETS

from ortc.artifacts import compile, compile_stages
from ortc.errors import ModelError, RecipeError
from ortc.recipe import parse_recipe
from ortc.runtime.trainer import Trainer

MODELS = Path(__file__).parent / "data" / "models"
INDEX = json.loads((MODELS / "index.json").read_text())


def surgeon(name: str, borders: list[list[str]], folder: Path) -> list[Path]:
    """The model cut at tensors: each border ends a stage; what crosses further is an input of every stage that reads it."""
    whole = gs.import_onnx(onnx.shape_inference.infer_shapes(onnx.load(MODELS / f"{name}.onnx")))
    paths = []
    ends = [*borders, [t.name for t in whole.outputs]]
    for stage, names in enumerate(ends):
        graph = whole.copy()
        tensors = graph.tensors()
        arriving = [tensors[n] for border in ends[:stage] for n in border if n in tensors]
        for tensor in arriving:
            tensor.inputs.clear()
        graph.outputs = [tensors[n] for n in names]
        graph.inputs = [*graph.inputs, *arriving]
        graph.cleanup().toposort()
        reached = {t.name for node in graph.nodes for t in node.inputs}
        graph.inputs = [t for t in graph.inputs if t.name in reached]
        paths.append(folder / f"s{stage}.onnx")
        onnx.save(gs.export_onnx(graph), paths[-1])
    return paths


def crossing(name: str, part: float) -> list[str]:
    """The tensors that cross the place where a part of the model's nodes lies before."""
    graph = gs.import_onnx(onnx.load(MODELS / f"{name}.onnx")).toposort()
    before = graph.nodes[: int(len(graph.nodes) * part)]
    ids = {id(n) for n in before}
    return [t.name for n in before for t in n.outputs if any(id(c) not in ids for c in t.outputs)]


def batch_of(name: str) -> dict[str, np.ndarray]:
    with np.load(MODELS / f"{name}.ref.npz") as stored:
        batch = {key.removeprefix("in/"): stored[key] for key in stored.files if key.startswith("in/")}
        return {**batch, "labels": stored["target"]}


@pytest.mark.parametrize("parts", [[0.5], [0.5, 0.75]])
@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "resnet.legacy", "tied.legacy", "bert.legacy"])
def test_a_model_cut_by_graphsurgeon_trains_as_the_whole(name, parts, tmp_path):
    kept: set[str] = set()
    borders = []
    for part in parts:  # what crossed an earlier border travels from there
        border = [n for n in crossing(name, part) if n not in kept]
        borders.append(border)
        kept.update(border)
    paths = surgeon(name, borders, tmp_path)
    loss = {"ce": {"name": "cross_entropy"}, "bce": {"name": "bce_with_logits"}}[INDEX[name]["loss"]]
    recipe = {"loss": [{**loss, "output": INDEX[name]["output"]}], "batch_norm": "frozen", "optimizer": {"name": "sgd"}}
    recipe["target"] = TARGETS[-1].name
    pipeline = {"micro_batches": 1}
    compile(MODELS / f"{name}.onnx", tmp_path / "whole", parse_recipe(recipe))
    plan = compile_stages(paths, tmp_path / "stages", parse_recipe({**recipe, "pipeline": pipeline}))
    assert len(plan.stages) == len(paths)
    with Trainer(tmp_path / "whole") as whole, Trainer(tmp_path / "stages") as stages:
        assert set(stages.parameters) == set(whole.parameters)  # a weight that two files hold is one
        losses = [(whole.step(batch_of(name)).loss, stages.step(batch_of(name)).loss) for _ in range(5)]
        np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
        stages.export(tmp_path / "trained.onnx", data=None)
    assert losses[-1][0] < losses[0][0]


def save(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'), path)
    return path


FIRST = "a (float[N,2] x) => (float[N,2] h) <float[2,2] w = {1,2,3,4}> { h = MatMul(x, w) }"
SECOND = "b (float[N,2] h) => (float[N,2] y) <float[2,2] w = {1,2,3,5}> { t = Tanh(h) y = MatMul(t, w) }"


def test_weights_of_one_name_and_other_values_stay_apart(tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    plan = compile_stages(paths, tmp_path / "f", parse_recipe({"loss": [{"name": "mse"}]}))
    assert [p.name for p in plan.parameters] == ["w", "stage1/w"]
    assert [s.parameters for s in plan.stages] == [["w"], ["stage1/w"]]


def test_files_of_other_opsets_are_brought_to_one(tmp_path):
    first = tmp_path / "a.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> {FIRST}'), first)
    plan = compile_stages([first, save(tmp_path / "b.onnx", SECOND)], tmp_path / "f", parse_recipe({"loss": [{"name": "mse"}]}))
    assert len(plan.stages) == 2


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (SECOND, FIRST, r"a.onnx \(stage 0\) reads 'h', which b.onnx \(stage 1\) makes"),
        (
            FIRST.replace("=> (float[N,2] h)", "=> (float[N,2] h, float[N,2] k)").replace(
                "MatMul(x, w)", "MatMul(x, w) k = Neg(h)"
            ),
            "b (float[N,2] k) => (float[N,2] h) { h = Neg(k) }",
            "both make 'h'",
        ),
        (FIRST, FIRST, r"no later file reads what a.onnx \(stage 0\) makes \(h\).*--connect 0:h=x"),
        (
            FIRST,
            SECOND.replace("[N,2] h", "[N,3] h").replace("{1,2,3,5}", "{1,2,3,5,6,7}").replace("[2,2] w", "[3,2] w"),
            "has shape",
        ),
        (FIRST, SECOND.replace("float[N,2] h", "double[N,2] h"), "'h' is FLOAT in a.onnx and DOUBLE in b.onnx"),
    ],
)
def test_what_does_not_fit_is_told_with_its_files(first, second, says, tmp_path):
    paths = [save(tmp_path / "a.onnx", first), save(tmp_path / "b.onnx", second)]
    with pytest.raises(ModelError, match=says):
        compile_stages(paths, tmp_path / "f", parse_recipe({"loss": [{"name": "mse"}]}))
    assert not (tmp_path / "f").exists()


def test_the_stages_are_the_files(tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    with pytest.raises(RecipeError, match="leave out how to cut"):
        compile_stages(paths, tmp_path / "f", parse_recipe({"pipeline": {"stages": 3}}))
    with pytest.raises(RecipeError, match="at least two files"):
        compile_stages(paths[:1], tmp_path / "f", parse_recipe({}))


def test_a_value_that_a_file_only_passes_on_goes_straight(tmp_path):
    relay = "m (float[N,2] x, float[N,2] h) => (float[N,2] h, float[N,2] k) <float[2,2] v = {1,0,2,1}> { k = MatMul(x, v) }"
    last = SECOND.replace("(float[N,2] h)", "(float[N,2] h, float[N,2] k)").replace("Tanh(h)", "Add(h, k)")
    paths = [save(tmp_path / f"{k}.onnx", text) for k, text in (("a", FIRST), ("m", relay), ("z", last))]
    recipe = parse_recipe({"loss": [{"name": "mse"}], "pipeline": {"micro_batches": 2}, "target": TARGETS[-1].name})
    plan = compile_stages(paths, tmp_path / "f", recipe)
    sent = {p.of: p.stages for s in plan.stages for p in s.phases["forward"].outputs if p.role == "boundary"}
    assert sent == {"h": [2], "k": [2]}
    with Trainer(tmp_path / "f") as trainer:
        ones = np.ones((4, 2), np.float32)
        assert np.isfinite(trainer.step({"x": ones, "labels": ones}).loss)
