"""Steps, evaluations and gradients, compared with onnx.reference on the same graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
from onnx.reference import ReferenceEvaluator

from ortc.errors import DataError, NotFiniteError, OrtcError, PlanError
from ortc.plan import Plan, Port, Sessions, dump_plan, load_plan
from ortc.runtime.trainer import Trainer


def reference(folder: Path, plan: Plan, phase: str, values: dict[tuple, np.ndarray]) -> dict[tuple, np.ndarray]:
    """Run a phase with onnx.reference: everything by (role, of, slot)."""
    graph = plan.stages[0].phases[phase]
    evaluator = ReferenceEvaluator(onnx.load(folder / graph.file))
    outputs = evaluator.run([p.name for p in graph.outputs], {p.name: values[_key(p)] for p in graph.inputs})
    return {_key(p): np.asarray(v) for p, v in zip(graph.outputs, outputs, strict=True)}


def _key(port: Port) -> tuple:
    return port.role, port.of, port.slot


def start(folder: Path, batch: dict[str, np.ndarray], plan: Plan) -> dict[tuple, np.ndarray]:
    values: dict[tuple, np.ndarray] = {("parameter", n, None): a for n, a in tiny.weights().items()}
    values |= {("buffer", tiny.BUFFER, None): np.zeros(tiny.HIDDEN, np.float32)}
    values |= {("data", "x", None): batch["x"], ("label", "labels", None): batch["labels"]}
    values |= {("scalar", "seed", None): np.int64(5), ("scalar", "micro_batch", None): np.int64(0)}
    values |= {("scalar", "lr", None): np.float32(0.05)}
    for port in plan.stages[0].phases["optimizer"].inputs:
        if port.role == "state":
            values[_key(port)] = np.zeros(port.shape, np.float32)
    return values


@pytest.mark.parametrize(
    ("optimizer", "buffer"),
    [("sgd", True), ("adamw", False)],  # with the buffer one gradient is rounding noise, which AdamW would blow up
)
def test_five_steps_are_those_of_the_graphs(optimizer: str, buffer: bool, tmp_path: Path):
    folder, batch = tmp_path / "a folder, ä", tiny.data()
    plan = tiny.make_folder(folder, optimizer=optimizer, buffer=buffer)
    values = start(folder, batch, plan)
    with Trainer(folder, seed=5) as trainer:
        for step in range(1, 6):
            result = trainer.step(batch)
            values["scalar", "step", None] = np.int64(step)
            values |= reference(folder, plan, "train", values)
            gradients = [g.astype(np.float64) for (role, _, _), g in values.items() if role == "gradient"]
            assert result.step == step
            assert result.samples == len(batch["x"])
            assert result.lr == 0.05
            assert result.loss == pytest.approx(float(values["loss", None, None]), rel=1e-5)
            assert result.gradient_norm == pytest.approx(np.sqrt(sum((g * g).sum() for g in gradients)), rel=1e-5)
            values |= reference(folder, plan, "optimizer", values)
            for name, array in trainer.parameters.items():
                role = "buffer" if name == tiny.BUFFER else "parameter"
                np.testing.assert_allclose(array, values[role, name, None], rtol=1e-4, atol=1e-6)
        evaluation = trainer.evaluate(batch)
        values |= reference(folder, plan, "eval", values)
        assert evaluation.loss == pytest.approx(float(values["loss", None, None]), rel=1e-5)
        np.testing.assert_allclose(evaluation.outputs["logits"], values["output", "logits", None], rtol=1e-4, atol=1e-5)


def test_gradients_change_nothing_and_are_those_of_the_next_step(tmp_path: Path):
    plan = tiny.make_folder(tmp_path / "f", wrt=True)
    batch = tiny.data()
    values = start(tmp_path / "f", batch, plan) | {("scalar", "step", None): np.int64(1)}
    values |= reference(tmp_path / "f", plan, "train", values)
    with Trainer(tmp_path / "f", seed=5) as trainer:
        before = {name: a.copy() for name, a in trainer.parameters.items()}
        loss, gradients = trainer.gradients(batch)
        kept = {name: g.copy() for name, g in gradients.items()}
        trainer.gradients({**batch, "x": batch["x"] * 2})
        assert all(np.array_equal(a, before[name]) for name, a in trainer.parameters.items())
        assert all(np.array_equal(g, kept[name]) for name, g in gradients.items()), "what is returned stays"
        assert set(gradients) == {*tiny.SHAPES, "x"}
        for name, g in gradients.items():
            np.testing.assert_allclose(g, values["gradient", name, None], rtol=1e-4, atol=1e-6)
        assert trainer.step(batch).loss == loss


def test_batches_of_different_sizes(tmp_path: Path):
    tiny.make_folder(tmp_path / "f", wrt=True)
    with Trainer(tmp_path / "f") as trainer:
        for samples in (8, 3, 8):
            assert trainer.step(tiny.data(samples)).samples == samples
            assert trainer.evaluate(tiny.data(samples)).outputs["logits"].shape == (samples, tiny.CLASSES)
            assert trainer.gradients(tiny.data(samples))[1]["x"].shape == (samples, tiny.INPUTS)


def test_outputs_of_an_evaluation_stay(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f") as trainer:
        first = trainer.evaluate(tiny.data(4)).outputs["logits"]
        copy = first.copy()
        trainer.evaluate(tiny.data(4, seed=9))
        assert np.array_equal(first, copy)


def test_the_loss_falls(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f") as trainer:
        losses = [trainer.step(tiny.data()).loss for _ in range(60)]
    assert losses[-1] < losses[0] / 4


def test_the_seed_reaches_dropout(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    losses = []
    for seed in (0, 1, 0):
        with Trainer(tmp_path / "f", seed=seed) as trainer:
            losses.append(trainer.gradients(tiny.data())[0])
    assert losses[0] == losses[2] != losses[1]


def test_a_batch_that_is_not_finite_changes_nothing(tmp_path: Path):
    tiny.make_folder(tmp_path / "f", dropout=False)
    bad = tiny.data()
    bad["x"][3, 1] = np.nan
    with Trainer(tmp_path / "f") as trainer:
        trainer.step(tiny.data())
        before = {name: a.copy() for name, a in trainer.parameters.items()}
        with pytest.raises(NotFiniteError, match=r"step 2: the loss is nan; not finite are the gradients of 'fc/1.weight'"):
            trainer.step(bad)
        assert all(np.array_equal(a, before[name]) for name, a in trainer.parameters.items())
        assert trainer.step_number == 1
        assert np.isfinite(trainer.step(tiny.data()).loss)


def test_an_infinite_gradient_of_a_finite_loss_is_told(tmp_path: Path):
    tiny.make_folder(tmp_path / "f", dropout=False, buffer=False)
    batch = tiny.data()
    batch["x"][:, 0] = 3e38  # in x·W1 it meets zeros, in dW1 = xᵀ·dh large numbers
    with Trainer(tmp_path / "f") as trainer:
        held = trainer._team.workers[0].stages[0].values
        held["fc/1.weight"][...] = 0
        held["fc/2.weight"][...] *= 1e10
        before = {name: a.copy() for name, a in trainer.parameters.items()}
        message = (
            r"the loss is [0-9.e+]+; not finite are the gradients of 'fc/1.weight'; the first node .* is 'dW1' \(MatMul\)\."
        )
        with pytest.raises(NotFiniteError, match=message):
            trainer.step(batch)
        assert all(np.array_equal(a, before[name]) for name, a in trainer.parameters.items())


def test_a_large_norm_is_no_infinity(tmp_path: Path):
    tiny.make_folder(tmp_path / "f", dropout=False, buffer=False)
    batch = tiny.data()
    batch["x"] *= np.float32(1e21)
    with Trainer(tmp_path / "f") as trainer:
        assert trainer.step(batch).gradient_norm > 1e19


def test_a_wrong_label_is_caught_before_it_trains(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    batch = tiny.data()
    batch["labels"][2] = tiny.CLASSES
    with Trainer(tmp_path / "f") as trainer:
        for call in (trainer.step, trainer.evaluate, trainer.gradients):
            with pytest.raises(DataError, match=r"'labels' holds class 3 at \[2\]"):
                call(batch)
        assert trainer.step_number == 0
        batch["labels"][2] = -100
        assert np.isfinite(trainer.step(batch).loss)


def test_a_changed_graph_is_refused_by_name(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    path = tmp_path / "f" / "stage-0" / "train.onnx"
    path.write_bytes(path.read_bytes() + b"\x00")
    with Trainer(tmp_path / "f") as trainer:
        trainer.evaluate(tiny.data())
        with pytest.raises(PlanError, match=r"train\.onnx is not the file that was compiled"):
            trainer.step(tiny.data())


def test_a_graph_that_this_build_cannot_open_is_explained(tmp_path: Path):
    plan = tiny.make_folder(tmp_path / "f")
    path = tmp_path / "f" / "stage-0" / "eval.onnx"
    model = onnx.load(path)
    model.graph.node.add(op_type="NoSuchKernel", domain="com.microsoft", input=["h0"], output=["nothing"])
    model.opset_import.add(domain="com.microsoft", version=1)
    path.write_bytes(model.SerializeToString())
    _rehash(tmp_path / "f", plan, "eval")
    with Trainer(tmp_path / "f") as trainer, pytest.raises(OrtcError, match=r"(?s)eval\.onnx.*ortc\[training\]"):
        trainer.evaluate(tiny.data())


def _rehash(folder: Path, plan: Plan, phase: str) -> None:
    import hashlib

    data = plan.model_dump()
    graph = data["stages"][0]["phases"][phase]
    graph["sha256"] = hashlib.sha256((folder / graph["file"]).read_bytes()).hexdigest()
    (folder / "plan.json").write_text(dump_plan(Plan.model_validate(data)), encoding="utf-8")
    assert load_plan(folder) != plan


def test_nothing_trains_without_an_optimizer(tmp_path: Path):
    plan = tiny.make_folder(tmp_path / "f")
    data = plan.model_dump()
    del data["stages"][0]["phases"]["optimizer"]
    (tmp_path / "f" / "plan.json").write_text(dump_plan(Plan.model_validate(data)), encoding="utf-8")
    with Trainer(tmp_path / "f") as trainer, pytest.raises(OrtcError, match="none of the model's parameters trains"):
        trainer.step(tiny.data())


def test_sessions_are_opened_as_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And no other option of a plan's reaches ONNX Runtime: the plan's schema has those alone."""
    import onnxruntime

    plan = tiny.make_folder(tmp_path / "f")
    training = {"reuse_memory": False, "disabled_optimizers": ["NoopElimination"], "execution_order": "priority_based"}
    changed = plan.model_copy(update={"sessions": Sessions.model_validate({"training": training, "others": {}})})
    (tmp_path / "f" / "plan.json").write_text(dump_plan(changed), encoding="utf-8")
    opened, real = {}, onnxruntime.InferenceSession

    def spy(model, options, **given):
        opened[len(opened)] = (options.enable_mem_reuse, options.execution_order.name, given["disabled_optimizers"])
        return real(model, options, **given)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    with Trainer(tmp_path / "f") as trainer:
        trainer.step(tiny.data())
    assert list(opened.values()) == [(False, "PRIORITY_BASED", ["NoopElimination"]), (True, "DEFAULT", [])]


def test_only_one_run_at_a_time(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f") as first, Trainer(tmp_path / "f") as second:
        first.step(tiny.data())
        second.evaluate(tiny.data())
        for call in (lambda: second.step(tiny.data()), second.save, lambda: Trainer(tmp_path / "f", exclusive=True)):
            with pytest.raises(OrtcError, match=r"another run \(process \d+\) is training"):
                call()
        first.close()
        second.step(tiny.data())


def test_no_onnxruntime_is_explained(tmp_path: Path, monkeypatch):
    tiny.make_folder(tmp_path / "f")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(OrtcError, match=r"ortc\[training\].*ortc\[stock\]"):
        Trainer(tmp_path / "f")


def test_importing_the_runtime_loads_no_compiler():
    code = (
        "import sys, ortc.runtime.trainer, ortc.runtime.run\n"
        "print([m for m in ('onnx', 'onnx_ir', 'onnxscript', 'onnxruntime', 'rich.progress') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_inputs_and_outputs_share_memory(tmp_path: Path):
    """The update is in place: the arrays stay where they are, and no step allocates them anew."""
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f") as trainer:
        places = {name: a.ctypes.data for name, a in trainer.parameters.items()}
        first = {name: a.copy() for name, a in trainer.parameters.items()}
        trainer.step(tiny.data())
        assert {name: a.ctypes.data for name, a in trainer.parameters.items()} == places
        assert not any(np.array_equal(a, first[name]) for name, a in trainer.parameters.items())
        with pytest.raises(ValueError, match="read-only"):
            trainer.parameters["lr"][0] = 1
