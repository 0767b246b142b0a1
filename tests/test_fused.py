"""The fused step (``optimizer.fuse``): the bits of a step in two phases, less memory, and nothing is overwritten too early."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gradcheck import TARGETS
from test_memory import SESSION, batch_of, measured, needs_linux

from ortc import Trainer
from ortc.artifacts import compile
from ortc.cli import main
from ortc.errors import DataError, NotFiniteError, OrtcError
from ortc.passes import fused_update
from ortc.passes.sessions import SESSIONS
from ortc.plan import Plan, load_plan
from ortc.recipe import parse_recipe
from ortc.runtime.batch import key, synthetic_batch
from ortc.runtime.run import run
from ortc.verify import verify

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "tests" / "data" / "models"
MLP, GPT, RESNET = (MODELS / f"{name}.onnx" for name in ("mlp.legacy", "gpt2_eager.legacy", "resnet.legacy_train"))
DROPOUT, LSTM = MODELS / "mlp_dropout.legacy_train.onnx", MODELS / "lstm.dynamo.onnx"
STEPS = 3

CASES: dict[str, tuple[Path, dict[str, Any]]] = {
    "mlp adamw": (MLP, {"optimizer": {"name": "adamw"}}),
    "mlp sgd momentum, value clipped": (MLP, {"optimizer": {"name": "sgd", "options": {"momentum": 0.9}, "max_value": 0.01}}),
    "mlp lamb": (MLP, {"optimizer": {"name": "lamb"}}),
    "mlp groups": (
        MLP,
        {
            "optimizer": {"name": "adamw", "options": {"weight_decay": 0.1}},
            "groups": [{"match": ["*bias"], "lr_scale": 3.0, "weight_decay": 0.2}],
            "learning_rate": {"base": 0.01, "schedule": "cosine", "warmup": 2},
        },
    ),
    "dropout adam": (DROPOUT, {"optimizer": {"name": "adam"}}),
    "resnet batch norm lion": (RESNET, {"optimizer": {"name": "lion"}}),
    "resnet rmsprop, frozen": (RESNET, {"optimizer": {"name": "rmsprop"}, "parameters": {"freeze": ["*conv1*"]}}),
    "lstm adagrad": (LSTM, {"optimizer": {"name": "adagrad"}}),
    "gpt adamw average": (GPT, {"optimizer": {"name": "adamw", "ema": 0.9}}),
    "gpt adafactor recompute": (GPT, {"optimizer": {"name": "adafactor"}, "recompute": {"nodes": "full"}}),
    "gpt lion recompute layers": (GPT, {"optimizer": {"name": "lion"}, "recompute": {"nodes": "layers,gelu"}}),
    "gpt bf16": (GPT, {"optimizer": {"name": "adamw"}, "precision": {"type": "bf16"}}),
    "gpt lora": (GPT, {"optimizer": {"name": "adamw"}, "lora": {"targets": ["*attn*"]}}),
    "gpt of its own data": (GPT, {"optimizer": {"name": "sgd"}, "recompute": {"nodes": "auto"}, "passes": {"off": ["order"]}}),
}


def build(path: Path, folder: Path, recipe: dict[str, Any], *, fuse: bool = True) -> Plan:
    axis = -1 if path.stem.startswith("gpt") else 1
    fields = {"target": TARGETS[-1].name, "loss": [{"name": "cross_entropy", "options": {"axis": axis}}], **recipe}
    fields["optimizer"] = {**recipe.get("optimizer", {}), "fuse": fuse}
    return compile(path, folder, parse_recipe(fields))


def batches(trainer: Trainer, count: int = STEPS) -> list[dict[str, np.ndarray]]:
    made = []
    for i in range(count):
        numbers = np.random.default_rng(i)
        batch = synthetic_batch(trainer.inputs.ports, 4)
        for name, array in batch.items():
            if array.dtype.kind == "f":
                batch[name] = array + numbers.standard_normal(array.shape).astype(array.dtype)
        made.append(batch)
    return made


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """Parameters, buffers and states."""
    stage = trainer._team.workers[0].stages[0]
    states = {f"{name} {slot}": array.copy() for (name, slot), array in stage.states.items()}
    return {**{name: array.copy() for name, array in trainer.parameters.items()}, **states}


def trained(folder: Path, steps: int = STEPS) -> tuple[list[float], dict[str, np.ndarray]]:
    with Trainer(folder, threads=1, restore="none", total_steps=10) as trainer:
        losses = [trainer.step(batch).loss for batch in batches(trainer, steps)]
        return losses, state_of(trainer)


def assert_same(found: tuple[list[float], dict[str, np.ndarray]], expected: tuple[list[float], dict[str, np.ndarray]]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert not [name for name, array in expected[1].items() if not np.array_equal(found[1][name], array)]


def deep_model(path: Path, width: int = 1024, layers: int = 8) -> Path:
    """Layers whose weights are updated in chunks, and whose gradients are most of the memory."""
    lines = [f"h{i} = MatMul (a{i}, w{i}) b{i} = Add (h{i}, c{i}) a{i + 1} = Tanh (b{i})" for i in range(layers)]
    text = f"deep (float[batch,{width}] a0) => (float[batch,{width}] a{layers}) {{ {' '.join(lines)} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    numbers = np.random.default_rng(0)
    for i in range(layers):
        w = (numbers.standard_normal((width, width)) / np.sqrt(width)).astype(np.float32)
        for name, array in ((f"w{i}", w), (f"c{i}", np.zeros(width, np.float32))):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


# ---- the same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_two_phases(case: str, tmp_path: Path) -> None:
    model, recipe = CASES[case]
    build(model, tmp_path / "two", recipe, fuse=False)
    plan = build(model, tmp_path / "one", recipe)
    assert plan.fused
    assert list(plan.stages[0].phases) == ["train", "eval"]
    assert not any(p.role == "gradient" for p in plan.stages[0].phases["train"].outputs)
    found, expected = trained(tmp_path / "one"), trained(tmp_path / "two")
    assert_same(found, expected)
    first = load_plan(tmp_path / "one").trainable()[0].name
    with Trainer(tmp_path / "one", restore="none") as trainer:
        assert not np.array_equal(trainer.parameters[first], found[1][first])  # it did train


@pytest.mark.parametrize("name", ["rmsprop", "sgd", "lion", "adagrad"])
def test_large_parameters_in_chunks(name: str, tmp_path: Path) -> None:
    model = deep_model(tmp_path / "m.onnx", layers=2)
    options = {"momentum": 0.9} if name == "sgd" else {}
    recipe = {"loss": [{"name": "mse"}], "optimizer": {"name": name, "options": options}}
    build(model, tmp_path / "two", recipe, fuse=False)
    plan = build(model, tmp_path / "one", recipe)
    nodes = onnx.load(tmp_path / "one/stage-0/train.onnx").graph.node
    assert sum(node.op_type == "Scan" for node in nodes) == 2
    shapes = {p.of: p.shape for p in plan.stages[0].phases["train"].outputs if p.role == "parameter"}
    assert shapes["w0"] == [32, 32768]
    assert_same(trained(tmp_path / "one"), trained(tmp_path / "two"))


# ---- when memory may be overwritten ----------------------------------------------------------------------------------------

# Their readers count as readers of what they read: it is the same memory, or ONNX Runtime may let them read that instead.
VIEWS = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast"}


def read_by(node: onnx.NodeProto) -> set[str]:
    bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return {*node.input, *(name for body in bodies for inner in body.node for name in read_by(inner))}


def overwritten_too_early(folder: Path, file: Path | None = None) -> list[tuple[str, str]]:
    """(reader, what it reads) of which the data flow does not say that it runs before the memory gets its new value."""
    graph = load_plan(folder).stages[0].phases["train"]
    nodes = list(onnx.load(file or folder / graph.file).graph.node)
    maker = {output: i for i, node in enumerate(nodes) for output in node.output}
    before: list[set[int]] = []
    for node in nodes:
        direct = {maker[name] for name in read_by(node) if name in maker}
        before.append(direct.union(*(before[i] for i in direct)))
    inputs = {(p.role, key(p), p.slot): p.name for p in graph.inputs}
    found = []
    for port in graph.outputs:
        if port.role not in ("parameter", "state"):
            continue
        names, writer = {inputs[port.role, key(port), port.slot]}, maker[port.name]
        for i, node in enumerate(nodes):
            if not names & read_by(node):
                continue
            if node.op_type in VIEWS:
                names.update(node.output)
            elif i != writer and i not in before[writer]:
                found.append((node.name, port.name))
    return found


ORDERED = ("mlp adamw", "resnet batch norm lion", "gpt adamw average", "gpt lion recompute layers", "gpt lora", "lstm adagrad")


@pytest.mark.parametrize("case", ORDERED)
def test_every_reader_comes_before_the_new_value(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = CASES[case]
    build(model, tmp_path / "held", recipe)
    assert overwritten_too_early(tmp_path / "held") == []
    monkeypatch.setattr(fused_update, "_hold_writes", lambda op, memory: None)
    build(model, tmp_path / "free", recipe)
    assert overwritten_too_early(tmp_path / "free") != []  # the data flow of the model alone does not say it


@pytest.mark.parametrize("case", [*ORDERED, "deep"])
def test_nor_does_onnx_runtime_undo_it(case: str, tmp_path: Path) -> None:
    """Of the graph that a session runs: of ours, and of one with all optimizations, as other languages open it."""
    model, recipe = CASES[case] if case in CASES else (deep_model(tmp_path / "m.onnx", layers=3), {"loss": [{"name": "mse"}]})
    plan = build(model, tmp_path / "o", recipe)
    path = tmp_path / "o" / plan.stages[0].phases["train"].file
    for disabled in ([], list(SESSIONS.training.disabled_optimizers)):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / "run.onnx")
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
        assert overwritten_too_early(tmp_path / "o", tmp_path / "run.onnx") == []


def shuffled(source: Path, folder: Path, seed: int) -> None:
    """A copy of an output folder whose training graph has its nodes in another order, as late or as random as can be."""
    shutil.copytree(source, folder)
    data = json.loads((folder / "plan.json").read_text())
    file = folder / data["stages"][0]["phases"]["train"]["file"]
    model = onnx.load(file)
    nodes = list(model.graph.node)
    maker = {output: i for i, node in enumerate(nodes) for output in node.output}
    missing = [{maker[name] for name in read_by(node) if name in maker} for node in nodes]
    ready, order, numbers = {i for i, needs in enumerate(missing) if not needs}, [], random.Random(seed)
    while ready:
        # Updates of weights as soon as they can be: what is newest in the file's order first.
        i = max(ready) if seed == 0 else numbers.choice(sorted(ready))
        ready.remove(i)
        order.append(i)
        for j, needs in enumerate(missing):
            if i in needs:
                needs.remove(i)
                if not needs:
                    ready.add(j)
    assert len(order) == len(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes[i] for i in order)
    file.write_bytes(model.SerializeToString())
    data["stages"][0]["phases"]["train"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "plan.json").write_text(json.dumps(data))


@pytest.mark.parametrize("case", ["gpt adamw average", "resnet batch norm lion"])
def test_no_order_of_the_nodes_changes_a_bit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = CASES[case]
    build(model, tmp_path / "one", recipe)
    expected = trained(tmp_path / "one")
    for seed in range(4):
        shuffled(tmp_path / "one", tmp_path / f"order {seed}", seed)
        assert_same(trained(tmp_path / f"order {seed}"), expected)
    monkeypatch.setattr(fused_update, "_hold_writes", lambda op, memory: None)
    build(model, tmp_path / "free", recipe)
    different = 0
    for seed in range(4):
        shuffled(tmp_path / "free", tmp_path / f"free {seed}", seed)
        found = trained(tmp_path / f"free {seed}")
        different += any(not np.array_equal(found[1][name], array) for name, array in expected[1].items())
    assert different > 0  # so the test would see it


# ---- memory ----------------------------------------------------------------------------------------------------------------

WHOLE = """
import ortc

with np.load(sys.argv[2]) as archive:
    batch = dict(archive)
start = resident("VmRSS")
trainer = ortc.Trainer(sys.argv[1], threads=1)
trainer.step(batch)
reset()
trainer.step(batch)
print(json.dumps(resident("VmHWM") - start))
"""


@needs_linux
def test_a_step_takes_less_memory_by_the_gradients(tmp_path: Path) -> None:
    model = deep_model(tmp_path / "m.onnx")
    recipe = {
        "loss": [{"name": "mse"}],
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
        "pipeline": {"sizes": {"batch": 8}},
    }
    plans = [build(model, tmp_path / str(fuse), recipe, fuse=fuse) for fuse in (False, True)]
    gradients = sum(4 * int(np.prod(p.shape)) for p in plans[0].trainable())
    numbers = np.random.default_rng(0)
    batch = {name: numbers.standard_normal((8, 1024), np.float32) for name in ("a0", "labels")}
    np.savez(tmp_path / "batch.npz", **batch)
    predicted = []
    for plan in plans:
        phases = plan.stages[0].phases
        peak = max(phases[name].memory.peak_bytes for name in phases if name != "eval")  # type: ignore[union-attr]
        predicted.append(peak + (0 if plan.fused else gradients))
    two, one = (measured(WHOLE, str(tmp_path / str(fuse)), str(tmp_path / "batch.npz")) for fuse in (False, True))
    assert predicted[0] - predicted[1] > 0.8 * gradients
    assert two - one == pytest.approx(predicted[0] - predicted[1], rel=0.1)


@needs_linux
@pytest.mark.parametrize("name", ["deep", "gpt2_eager.legacy"])
def test_fused_sessions_peak_as_predicted(name: str, tmp_path: Path) -> None:
    if name == "deep":
        model, sizes = deep_model(tmp_path / "m.onnx"), {"batch": 64}
        recipe: dict[str, Any] = {"loss": [{"name": "mse"}]}
    else:
        model, sizes, recipe = GPT, {"batch": 128, "sequence": 16}, {}
    plan = build(model, tmp_path / "o", {**recipe, "pipeline": {"sizes": sizes}})
    with Trainer(tmp_path / "o", threads=1) as trainer:
        np.savez(tmp_path / "batch.npz", **batch_of(trainer, sizes))
    train = plan.stages[0].phases["train"]
    assert train.memory is not None
    assert train.memory.peak_bytes > 2**22
    found = measured(SESSION, str(tmp_path / "o"), str(tmp_path / "batch.npz"))
    assert found.keys() == {train.file}
    assert found[train.file] == pytest.approx(train.memory.peak_bytes, rel=0.1)


def test_recompute_knows_that_gradients_do_not_stay(tmp_path: Path) -> None:
    recipe = {"recompute": {"nodes": "auto"}}
    two, one = (build(GPT, tmp_path / str(fuse), recipe, fuse=fuse).stages[0].recomputed for fuse in (False, True))
    assert two is not None
    assert one is not None
    trainable = sum(4 * int(np.prod(p.shape)) for p in load_plan(tmp_path / "True").trainable())
    assert 0.5 * trainable < two.memory_before - one.memory_before <= trainable


# ---- what else there is to a run -------------------------------------------------------------------------------------------


def test_checkpoints_go_from_one_kind_to_the_other(tmp_path: Path) -> None:
    recipe = CASES["gpt adamw average"][1]
    for fuse in (False, True):
        build(GPT, tmp_path / str(fuse), recipe, fuse=fuse)
    straight = trained(tmp_path / "False", 4)
    for first in (False, True):
        with Trainer(tmp_path / str(first), threads=1, total_steps=10) as trainer:
            every = batches(trainer, 4)
            losses = [trainer.step(batch).loss for batch in every[:2]]
            saved = trainer.save()
        with Trainer(tmp_path / str(not first), threads=1, restore=saved, total_steps=10) as trainer:
            assert trainer.step_number == 2
            losses += [trainer.step(batch).loss for batch in every[2:]]
            assert_same((losses, state_of(trainer)), straight)


def test_evaluation_and_export_are_of_the_averages(tmp_path: Path) -> None:
    recipe = CASES["gpt adamw average"][1]
    found = []
    for fuse in (False, True):
        build(GPT, tmp_path / str(fuse), recipe, fuse=fuse)
        with Trainer(tmp_path / str(fuse), threads=1, total_steps=10) as trainer:
            every = batches(trainer)
            for batch in every:
                trainer.step(batch)
            with trainer.averaged():
                averaged = trainer.evaluate(every[0]).loss
            exported = trainer.export(tmp_path / f"{fuse}.onnx")
            found.append((averaged, trainer.evaluate(every[0]).loss, exported.loss))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def data_of(folder: Path, file: Path, samples: int = 32) -> None:
    with Trainer(folder) as trainer:
        np.savez(file, **synthetic_batch(trainer.inputs.ports, samples))


def test_runs_stop_and_continue(tmp_path: Path) -> None:
    """The lines of the metrics have no norm; a run in two parts is one run."""
    for name in ("whole", "parts"):
        build(DROPOUT, tmp_path / name, {"optimizer": {"name": "adamw"}})
    data_of(tmp_path / "whole", tmp_path / "d.npz")
    options = {"data": tmp_path / "d.npz", "batch_size": 8, "quiet": True, "threads": 1}
    run(tmp_path / "whole", steps=6, **options)
    run(tmp_path / "parts", steps=3, **options)
    run(tmp_path / "parts", steps=6, **options)
    rows = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("whole", "parts")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert not any("gradient_norm" in row for row in rows[0])
    weights = [(tmp_path / n / "checkpoint/step-6/parameters.safetensors").read_bytes() for n in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_no_gradients_to_look_at(tmp_path: Path) -> None:
    build(MLP, tmp_path / "o", {})
    with Trainer(tmp_path / "o") as trainer:
        batch = synthetic_batch(trainer.inputs.ports, 4)
        with pytest.raises(OrtcError, match=r"was compiled with --fuse-update: .* compile without it"):
            trainer.gradients(batch)
        assert trainer.step(batch).gradient_norm is None


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """Nothing can be taken back, so nothing of it is saved, and the checkpoint from before is where to go on."""
    build(MLP, tmp_path / "o", {})
    data_of(tmp_path / "o", tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as archive:
        arrays = dict(archive)
    floats = next(name for name, array in arrays.items() if array.dtype.kind == "f")
    arrays[floats][20] = np.nan
    np.savez(tmp_path / "bad.npz", **arrays)
    options = {"batch_size": 8, "quiet": True, "shuffle": False}
    run(tmp_path / "o", data=tmp_path / "good.npz", steps=4, **options)
    with pytest.raises(
        NotFiniteError, match=rf"step 7: the loss is nan .*'{floats}'.*checkpoint of step 4, or compile without"
    ):
        run(tmp_path / "o", data=tmp_path / "bad.npz", steps=9, **options)
    assert not (tmp_path / "o/checkpoint/step-6").exists()
    with Trainer(tmp_path / "o") as trainer:
        assert trainer.step_number == 4
        batch = {name: array[16:24] for name, array in arrays.items()}
        with pytest.raises(NotFiniteError):
            trainer.step(batch)
        assert not trainer.intact
        for use in (trainer.save, lambda: trainer.step(batch), lambda: trainer.evaluate(batch)):
            with pytest.raises(OrtcError, match="step 5 failed while it updated the weights"):
                use()
        with pytest.raises(OrtcError, match="step 5 failed"):
            trainer.export(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    assert run(tmp_path / "o", data=tmp_path / "good.npz", steps=6, **options) == 0


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """A loss may be finite while the weights after it are not."""
    build(MLP, tmp_path / "o", {"optimizer": {"name": "sgd"}, "learning_rate": {"base": 3e38}})
    with Trainer(tmp_path / "o") as trainer:
        batch = synthetic_batch(trainer.inputs.ports, 4)
        assert np.isfinite(trainer.step({**batch, **{k: a * 1e3 for k, a in batch.items() if a.dtype.kind == "f"}}).loss)
        with pytest.raises(NotFiniteError, match=r"after step 1 .* is not finite, and no checkpoint was written"):
            trainer.save()
    assert not (tmp_path / "o/checkpoint/step-1").exists()


def test_a_batch_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    build(MLP, tmp_path / "o", {})
    with Trainer(tmp_path / "o") as trainer:
        batch = synthetic_batch(trainer.inputs.ports, 4)
        with pytest.raises(DataError):
            trainer.step({**batch, "labels": batch["labels"] + 1000})
        assert trainer.intact
        trainer.step(batch)


def test_verify_holds_it_to_the_step_in_two_phases(tmp_path: Path) -> None:
    build(MLP, tmp_path / "o", {"optimizer": {"name": "adamw"}})
    checks = {check.name: check for check in verify(tmp_path / "o", MLP)}
    assert checks["the fused step = all gradients, then the optimizer"].verdict == "right"
    assert checks["loss and gradients = one graph in float64"].verdict == "right"
    assert not [check.name for check in checks.values() if check.verdict == "WRONG"]


# ---- where it cannot be ----------------------------------------------------------------------------------------------------

REFUSED = {
    "--stages 2": "one stage: leave out --stages",
    "--micro-batches 2": "one micro-batch, not 2: leave out --micro-batches",
    "--data-parallel 2 --micro-batches 1": "one replica, not 2: leave out --data-parallel",
    "--data-parallel 2 --micro-batches 1 --zero 1": "one replica, not 2: leave out --data-parallel (and --zero)",
    "--clip-norm 1": "not clipped by the norm of all: leave out --clip-norm",
    "--precision fp16": "leave out --precision fp16 (--precision bf16 needs no scale)",
    "--loss-scale 8": "leave out --loss-scale",
    "--artifacts ort --target ort-training": "leave out --artifacts",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusals_on_the_command_line(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ortc", "compile", str(MLP), "-o", str(tmp_path / "o"), "--fuse-update", *flags.split()]
    monkeypatch.setattr(sys, "argv", words if "--target" in words else [*words, "--target", TARGETS[-1].name])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("ortc: optimizer.fuse: ")
    assert REFUSED[flags] in told
    assert told.endswith(", or --fuse-update\n")
    assert not (tmp_path / "o").exists()
