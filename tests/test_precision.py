"""Mixed precision: what is cast and where, that it trains as float32 does, and the rule of the loss scale."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gradcheck import TARGETS

from ortc.artifacts import compile, compile_graphs
from ortc.errors import NotFiniteError, PlanError, RecipeError
from ortc.passes.precision import KINDS, table
from ortc.recipe import Precision, parse_recipe
from ortc.runtime.scaling import Scaling
from ortc.runtime.trainer import Trainer
from ortc.source import load_model

MODELS = Path(__file__).parent / "data" / "models"
INDEX = json.loads((MODELS / "index.json").read_text())
LOSSES = {"ce": {"name": "cross_entropy"}, "mse": {"name": "mse"}, "bce": {"name": "bce_with_logits"}}

MIXED = """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,4] y)
    <float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4,4] u = {2,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7},
     float[4] b = {1,2,3,4}> {
    wt = Transpose<perm = [1, 0]>(w)
    a = MatMul(x, wt)
    c = Add(a, b)
    d = Relu(c)
    e = MatMul(d, u)
    f = Add(e, x)
    s = Softmax(f)
    y = MatMul(s, wt)
}"""


def graph_of(text: str, **precision: object) -> ir.Graph:
    recipe = parse_recipe({"loss": [{"name": "mse"}], "precision": {"type": "fp16", **precision}})
    return compile_graphs(ir.from_proto(onnx.parser.parse_model(text)), recipe).stages[0]["train"].graph


def types(graph: ir.Graph) -> dict[str, str]:
    return {v.name or "": v.dtype.name for n in graph for v in n.outputs if v.dtype is not None}


def test_products_and_what_stands_between_them_are_low():
    graph = graph_of(MIXED)
    found = types(graph)
    low = {name for name in ("wt", "a", "c", "d", "e") if found[name] == "FLOAT16"}
    assert low == {"wt", "a", "c", "d", "e"}  # the transposed weight since only products read it
    assert found["f"] == "FLOAT"  # a sum with the float32 input
    assert found["s"] == "FLOAT"
    casts = Counter(n.inputs[0].name for n in graph if n.op_type == "Cast" and n.inputs[0].name in ("w", "u", "b", "x"))
    assert casts == {"w": 1, "u": 1, "b": 1, "x": 1}  # each once, though wt is read twice


def test_no_cast_is_undone_by_the_next():
    for node in graph_of(MIXED):
        source = node.inputs[0].producer() if node.op_type == "Cast" else None
        assert source is None or source.op_type != "Cast", node.name


def test_weights_and_gradients_stay_in_float32():
    graph = graph_of(MIXED)
    assert {v.dtype.name for v in graph.inputs if v.name in ("w", "u", "b")} == {"FLOAT"}
    assert {v.dtype.name for v in graph.outputs} == {"FLOAT"}


def test_a_node_and_an_operator_can_be_excepted():
    assert types(graph_of(MIXED, operators={"Relu": "full"}))["d"] == "FLOAT"
    named = MIXED.replace("d = Relu", "[act] d = Relu")
    assert types(graph_of(named, nodes={"ac*": "full"}))["d"] == "FLOAT"
    assert types(graph_of(named))["d"] == "FLOAT16"
    with pytest.raises(RecipeError, match="no node of the model is called 'nothing'"):
        graph_of(MIXED, nodes={"nothing": "low"})
    with pytest.raises(RecipeError, match="must be one of low, full, follow, widest"):
        graph_of(MIXED, operators={"Relu": "half"})


def test_the_table_names_operators_of_the_standard_once():
    found = table()
    assert set(found.values()) == set(KINDS)
    assert [name for name in found if not onnx.defs.has(name)] == []


def recipe_of(name: str, precision: dict, **more: object) -> dict:
    loss = {**LOSSES[INDEX[name]["loss"]], "output": INDEX[name]["output"]}
    return {"loss": [loss], "batch_norm": "frozen", "precision": precision, "target": TARGETS[-1].name, **more}


def batch_of(name: str) -> dict[str, np.ndarray]:
    with np.load(MODELS / f"{name}.ref.npz") as stored:
        batch = {key.removeprefix("in/"): stored[key] for key in stored.files if key.startswith("in/")}
        return {**batch, "labels": stored["target"]}


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gpt2_sdpa.dynamo", "resnet.legacy", "bert.legacy", "mlp_dropout.legacy_train", "vit.dynamo"])
def test_training_follows_float32_within_a_hundredth(name, kind, tmp_path):
    """Ten steps on one batch, the loss of each; with one stage and with two."""
    losses = {}
    for label, precision, stages in (("fp32", "fp32", 1), (kind, kind, 1), (f"{kind} in stages", kind, 2)):
        recipe = recipe_of(name, {"type": precision}, pipeline={"stages": stages, "micro_batches": 1})
        compile(MODELS / f"{name}.onnx", tmp_path / label, parse_recipe(recipe))
        with Trainer(tmp_path / label) as trainer:
            losses[label] = [trainer.step(batch_of(name)).loss for _ in range(10)]
            assert trainer.scaling.skipped == 0
    for label in (kind, f"{kind} in stages"):
        np.testing.assert_allclose(losses[label], losses["fp32"], rtol=1e-2)


def test_the_digits_reach_the_loss_of_float32_within_a_hundredth(monkeypatch, tmp_path):
    """As bench/precision.py measures it, with one epoch and three seeds: their mean of the loss on digits kept aside."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "bench")
    from precision import KINDS, digits

    found = {kind: np.mean([digits(kind, tmp_path / "f", seed, epochs=1, threads=1) for seed in range(3)]) for kind in KINDS}
    assert found["fp32"] < np.log(10) / 1.5  # they have learnt something
    for kind in ("fp16", "bf16"):
        np.testing.assert_allclose(found[kind], found["fp32"], rtol=1e-2)


TIED = """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,4] y)
    <float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> { a = MatMul(x, w) b = Tanh(a) c = Tanh(b) y = MatMul(c, w) }"""


def tied_in_stages(tmp_path: Path, kind: str, stages: int) -> list[float]:
    """The losses of four steps, and the evaluation's behind them, of a weight that both stages multiply with."""
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(TIED).SerializeToString())
    pipeline = {"stages": stages, "micro_batches": 2, "cuts": ["b"] if stages > 1 else []}
    recipe = {"loss": [{"name": "mse"}], "optimizer": {"name": "sgd"}, "precision": {"type": kind}, "pipeline": pipeline}
    compile(tmp_path / "m.onnx", tmp_path / f"{stages}", parse_recipe({**recipe, "learning_rate": {"base": 1e-2}}))
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(8, 4)).astype(np.float32) for name in ("x", "labels")}
    with Trainer(tmp_path / f"{stages}", timeout=20) as trainer:
        return [*(trainer.step(batch).loss for _ in range(4)), trainer.evaluate(batch).loss]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_tied_weight_trains_in_stages_as_in_one(kind, tmp_path):
    """Its cast is in both stages: otherwise one held it, for the evaluation, without a gradient that the other waits for."""
    found = tied_in_stages(tmp_path, kind, 2)
    np.testing.assert_allclose(found, tied_in_stages(tmp_path, kind, 1), rtol=1e-3)
    assert found[-1] < found[0]


def test_a_stage_without_the_gradient_of_a_weight_that_it_holds_is_told_at_once(tmp_path):
    tied_in_stages(tmp_path, "fp32", 2)
    plan = json.loads((tmp_path / "2" / "plan.json").read_text())
    for graph in plan["stages"][1]["phases"].values():
        for side in ("inputs", "outputs"):
            graph[side] = [p for p in graph[side] if p["role"] != "gradient"]
    (tmp_path / "2" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="stages 0, 1 hold 'w', but stage 1 has no gradient of it"):
        Trainer(tmp_path / "2")


def test_what_the_model_holds_in_half_stays():
    text = """<ir_version: 10, opset_import: ["": 21]> g (float16[N,4] x, float16[4,4] w) => (float16[N,4] y)
        { a = MatMul(x, w) y = Relu(a) }"""
    model = onnx.parser.parse_model(text)
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float16), "w"))
    recipe = parse_recipe({"loss": [{"name": "mse"}], "precision": {"type": "fp16"}})
    graph = compile_graphs(ir.from_proto(model), recipe).stages[0]["train"].graph
    found = types(graph)
    assert found["a"] == found["y"] == "FLOAT16"


# ---- the loss scale ----------------------------------------------------------------------------------------------------


def test_the_published_rule():
    """Halved after an overflow; doubled after as many good steps as the interval says; never both."""
    precision = Precision(type="fp16", loss_scale={"interval": 3})
    scaling = Scaling.first(precision)
    assert scaling.scale == 2.0**16
    scaling = scaling.after(False, precision)
    assert (scaling.scale, scaling.good, scaling.skipped) == (2.0**15, 0, 1)
    for expected in ((2.0**15, 1), (2.0**15, 2), (2.0**16, 0), (2.0**16, 1)):
        scaling = scaling.after(True, precision)
        assert (scaling.scale, scaling.good) == expected
    assert Scaling.first(Precision(type="bf16")).scale == 1.0
    assert Scaling.first(Precision(type="fp16", loss_scale={"mode": "static", "initial": 128.0})).scale == 128.0
    with pytest.raises(NotFiniteError, match="the loss scale fell"):
        Scaling(2.0**-24).after(False, precision)


def test_a_run_that_overflows_recovers_and_a_restart_in_its_midst_loses_nothing(tmp_path):
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(MIXED).SerializeToString())
    # So large a scale that the gradients overflow, on every processor: the first steps are left out.
    precision = {"type": "fp16", "loss_scale": {"initial": 2.0**120, "backoff": 2.0**-16}}
    recipe = {"loss": [{"name": "mse"}], "precision": precision, "optimizer": {"name": "sgd"}}
    compile(tmp_path / "m.onnx", tmp_path / "f", parse_recipe({**recipe, "learning_rate": {"base": 1e-4}}))
    batch = {"x": np.eye(4, dtype=np.float32), "labels": np.full((4, 4), 1e4, np.float32)}
    with Trainer(tmp_path / "f") as trainer:
        before = {k: v.copy() for k, v in trainer.parameters.items()}
        first = trainer.step(batch)
        assert first.skipped
        assert all(np.array_equal(v, before[k]) for k, v in trainer.parameters.items())
        trainer.save()
        results = [trainer.step(batch) for _ in range(12)]
        assert not results[-1].skipped
        assert results[-1].loss < first.loss
        weights = {k: v.copy() for k, v in trainer.parameters.items()}
        scaling = trainer.scaling
    with Trainer(tmp_path / "f") as trainer:
        assert trainer.step_number == 1
        again = [trainer.step(batch) for _ in range(12)]
        assert again == results
        assert trainer.scaling == scaling
        assert all(np.array_equal(v, weights[k]) for k, v in trainer.parameters.items())


def test_a_batch_that_is_damaged_is_no_overflow(tmp_path):
    name = "mlp.dynamo"
    compile(MODELS / f"{name}.onnx", tmp_path / "f", parse_recipe(recipe_of(name, {"type": "fp16"})))
    batch = batch_of(name)
    data = next(k for k, v in batch.items() if v.dtype == np.float32)
    batch[data] = np.full_like(batch[data], np.nan)
    with Trainer(tmp_path / "f") as trainer, pytest.raises(NotFiniteError, match="the batch itself holds NaN"):
        trainer.step(batch)


def test_gradients_are_told_without_the_scale(tmp_path):
    name = "mlp.dynamo"
    found = {}
    for kind in ("fp32", "fp16"):
        compile(MODELS / f"{name}.onnx", tmp_path / kind, parse_recipe(recipe_of(name, {"type": kind})))
        with Trainer(tmp_path / kind) as trainer:
            found[kind] = trainer.gradients(batch_of(name))[1]
    for key, want in found["fp32"].items():
        np.testing.assert_allclose(found["fp16"][key], want, rtol=2e-2, atol=2e-3 * np.abs(want).max())


def test_the_clone_of_the_model_is_left_alone():
    c = compile_graphs(load_model(MODELS / "mlp.dynamo.onnx"), parse_recipe({"precision": {"type": "fp16"}}))
    assert {v.dtype for n in c.stages[0]["eval"].graph for v in n.outputs} & {ir.DataType.FLOAT16} == set()
