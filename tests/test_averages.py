"""The exponential moving average of the weights: against NumPy, evaluated, saved, exported, however the model is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradcheck import TARGETS

from ortc import Trainer
from ortc.artifacts import compile
from ortc.errors import RecipeError
from ortc.plan import Plan
from ortc.recipe import parse_recipe
from ortc.runtime.run import run

MODELS = Path(__file__).parent / "data" / "models"
MLP = MODELS / "mlp.legacy.onnx"


def compiled(folder: Path, **recipe: Any) -> Any:
    table = {"learning_rate": {"base": 0.05}, "optimizer": {"name": "adamw", "ema": 0.8}, "target": TARGETS[-1].name}
    return compile(MLP, folder, parse_recipe({**table, **recipe}))


@pytest.fixture(scope="module")
def batches() -> list[dict[str, np.ndarray]]:
    ref = np.load(MODELS / "mlp.legacy.ref.npz")
    name = next(n for n in ref if n.startswith("in/"))
    shape, classes = ref[name].shape, ref["target"].max() + 1
    random = np.random.default_rng(1)
    return [
        {
            name[3:]: random.standard_normal((8, *shape[1:])).astype(np.float32),
            "labels": random.integers(0, classes, (8, *ref["target"].shape[1:])),
        }
        for _ in range(6)
    ]


def followed(trainer: Trainer, batches: list) -> dict[str, np.ndarray]:
    """The averages as PyTorch's AveragedModel makes them: the first weights, then a += (1-d)·(p - a)."""
    averages: dict[str, np.ndarray] = {}
    for batch in batches:
        trainer.step(batch)
        for name, value in trainer.parameters.items():
            before = averages.get(name, value)
            averages[name] = before + np.float32(0.2) * (value - before)
    return averages


def inside(trainer: Trainer) -> dict[str, np.ndarray]:
    with trainer.averaged():
        return {name: array.copy() for name, array in trainer.parameters.items()}


def test_by_hand(tmp_path: Path, batches: list):
    compiled(tmp_path / "s")
    with Trainer(tmp_path / "s", threads=1) as trainer:
        expected = followed(trainer, batches)
        plain = {name: array.copy() for name, array in trainer.parameters.items()}
        found = inside(trainer)
        assert all((trainer.parameters[name] == plain[name]).all() for name in plain), "and back again"
        trainer.save()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-7)
        assert np.abs(found[name] - plain[name]).max() > 1e-4
    with Trainer(tmp_path / "s", threads=1) as trainer:
        again = inside(trainer)
        trainer.export(tmp_path / "average.onnx")
        trainer.export(tmp_path / "raw.onnx", raw=True)
    assert all((again[name] == found[name]).all() for name in found)
    for file, values in (("average", found), ("raw", plain)):
        exported = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / f"{file}.onnx").graph.initializer}
        assert all((exported[name] == values[name]).all() for name in values)


def test_before_the_first_step_it_is_the_weights(tmp_path: Path):
    compiled(tmp_path / "s")
    with Trainer(tmp_path / "s") as trainer:
        found = inside(trainer)
        assert all((trainer.parameters[name] == found[name]).all() for name in found)
        assert any(array.any() for array in found.values())


def test_a_checkpoint_without_averages(tmp_path: Path, batches: list, capsys):
    compiled(tmp_path / "without", optimizer={"name": "adamw"})
    compiled(tmp_path / "with")
    with Trainer(tmp_path / "without", threads=1) as trainer:
        trainer.step(batches[0])
        path = trainer.save()
        plain = {name: array.copy() for name, array in trainer.parameters.items()}
    with Trainer(tmp_path / "with", threads=1, restore=path) as trainer:
        assert all((a == plain[name]).all() for name, a in inside(trainer).items())
        trainer.step(batches[1])
        found = inside(trainer)
        for name, value in trainer.parameters.items():
            np.testing.assert_allclose(found[name], plain[name] + 0.2 * (value - plain[name]), rtol=1e-5, atol=1e-7)
    assert "lacks" not in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.parametrize("pipeline", [{"stages": 2}, {"replicas": 2}, {"stages": 2, "replicas": 2, "zero": 1}], ids=str)
def test_divided(tmp_path: Path, batches: list, pipeline: dict[str, int]):
    results = []
    for folder, table in (("whole", {}), ("divided", pipeline)):
        compiled(tmp_path / folder, pipeline=table)
        with Trainer(tmp_path / folder, threads=1) as trainer:
            for batch in batches:
                trainer.step(batch)
            with trainer.averaged():
                results.append(trainer.evaluate(batches[0]).loss)
            trainer.save()
            plain = trainer.evaluate(batches[0]).loss
            results.append(plain)
    assert results[0] == pytest.approx(results[2], rel=1e-5)
    assert results[1] == pytest.approx(results[3], rel=1e-5)
    assert abs(results[0] - results[1]) > 1e-4
    with (
        Trainer(tmp_path / "whole", threads=1, restore=tmp_path / "divided" / "checkpoint" / "step-6") as trainer,
        trainer.averaged(),
    ):
        assert trainer.evaluate(batches[0]).loss == pytest.approx(results[0], rel=1e-5)


def test_runs_evaluate_it(tmp_path: Path, batches: list, ortc):
    assert ortc("compile", MLP, "-o", tmp_path / "s", "--ema", "0.8", "--lr", "0.05", "--target", TARGETS[-1].name)[0] == 0
    np.savez(tmp_path / "d.npz", **{k: np.concatenate([b[k] for b in batches]) for k in batches[0]})
    run(tmp_path / "s", data=tmp_path / "d.npz", eval_data=tmp_path / "d.npz", batch_size=8, threads=1, quiet=True)
    told = (tmp_path / "s" / "metrics.jsonl").read_text().splitlines()[-1]
    with Trainer(tmp_path / "s", threads=1) as trainer:
        with trainer.averaged():
            averaged = np.mean([trainer.evaluate(b).loss for b in batches])
        plain = np.mean([trainer.evaluate(b).loss for b in batches])
    assert f'"eval_loss": {averaged:.5f}'[:19] in told
    assert abs(plain - averaged) > 1e-3


def test_decays_that_are_none(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"optimizer\.ema"):
        parse_recipe({"optimizer": {"ema": 1.0}})


def starts(plan: Plan) -> dict[str | None, set[str | None]]:
    """What the states of each slot are before there is one."""
    found: dict[str | None, set[str | None]] = {}
    for port in plan.stages[0].phases["optimizer"].inputs:
        if port.role == "state":
            found.setdefault(port.slot, set()).add(port.initial)
    return found


def test_the_plan_says_where_a_state_starts(tmp_path: Path):
    assert starts(compiled(tmp_path / "s")) == {"exp_avg": {None}, "exp_avg_sq": {None}, "ema": {"parameter"}}


def test_large_weights_are_averaged_in_chunks(tmp_path: Path):
    text = '<ir_version: 10, opset_import: ["": 17]>\nm (float[n,512] x) => (float[n,1024] y) { y = MatMul (x, w) }'
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(random.standard_normal((512, 1024)).astype(np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    recipe = {"optimizer": {"ema": 0.8}, "loss": [{"name": "mse"}], "target": TARGETS[-1].name}
    plan = compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe(recipe))
    assert starts(plan)["ema"] == {"parameter"}
    optimizer = onnx.load(tmp_path / "s" / "stage-0" / "optimizer.onnx")
    assert "Scan" in {n.op_type for n in optimizer.graph.node}, "large enough for the test"
    shapes = {"x": (2, 512), "labels": (2, 1024)}
    made = [{k: random.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()} for _ in range(3)]
    with Trainer(tmp_path / "s", threads=1) as trainer:
        expected = followed(trainer, made)
        found = inside(trainer)
        plain = trainer.parameters["w"]
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6, atol=1e-7)
        assert np.abs(found["w"] - plain).max() > 1e-4
