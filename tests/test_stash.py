"""Packed masks and indices change no bit of a gradient, narrow activations round it as their type; both need less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from gradcheck import TARGETS
from test_memory import SESSION, measured, needs_linux
from test_pipeline import TASKS, sizes_of

from ortc import Trainer
from ortc.artifacts import compile
from ortc.cli import main
from ortc.plan import Plan
from ortc.recipe import parse_recipe
from ortc.runtime.batch import Batch, synthetic_batch
from ortc.verify import verify

DATA = Path(__file__).parent / "data" / "models"
GPT = Path(__file__).parent.parent / "bench" / "data" / "gpt.onnx"
TYPES = {"fp16": 2.0**-11, "bf16": 2.0**-9}  # of a rounding to nearest, relative


def build(path: Path, folder: Path, **fields: Any) -> Plan:
    return compile(path, folder, parse_recipe({"target": TARGETS[-1].name, **fields}))


def gradients(folder: Path, samples: int) -> tuple[float, dict[str, np.ndarray]]:
    with Trainer(folder, threads=1) as trainer:
        loss, found = trainer.gradients(synthetic_batch(trainer.inputs.ports, samples))
        return loss, {name: array.copy() for name, array in found.items()}


def assert_same(a: tuple[float, dict[str, np.ndarray]], b: tuple[float, dict[str, np.ndarray]]) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert [name for name in a[1] if not np.array_equal(a[1][name], b[1][name])] == []


def model_of(folder: Path, text: str, **weights: np.ndarray) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items())
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# ---- without loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [4, 5])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(
    "name",
    [
        *("resnet.legacy_train", "lenet_bn.legacy_train", "lenet_bn.dynamo"),
        *("mlp.legacy", "mlp_dropout.legacy_train", "gpt2_eager.legacy"),
    ],
)  # fmt: skip
def test_packing_changes_no_bit(name: str, target: Any, samples: int, tmp_path: Path) -> None:
    found = []
    for packed in (False, True):
        recipe = {"target": target.name, "stash": {"packed": packed}, "pipeline": {"sizes": {}}}
        plan = build(DATA / f"{name}.onnx", tmp_path / str(packed), **recipe)
        found.append(gradients(tmp_path / str(packed), samples))
    assert_same(*found)
    if name.startswith(("resnet", "lenet")):
        stashed = plan.stages[0].stashed
        assert stashed is not None
        assert stashed.bytes_after < stashed.bytes_before


POOLS = [
    "kernel_shape = [2, 2], strides = [2, 2]",
    "kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1]",
    "kernel_shape = [2, 3], strides = [2, 2], ceil_mode = 1",
    "kernel_shape = [3, 3], strides = [1, 2], dilations = [2, 1], pads = [2, 1, 2, 1]",
    'kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER"',
    'kernel_shape = [2, 2], strides = [2, 2], auto_pad = "VALID"',
    "kernel_shape = [3, 3], strides = [3, 3], storage_order = 1",
]


@pytest.mark.parametrize("width", [9, 131])  # the distance fits in one byte, and in two
@pytest.mark.parametrize("pool", POOLS)
def test_every_form_of_a_max_pool(pool: str, width: int, tmp_path: Path) -> None:
    text = f"""pooled (float[batch,2,7,{width}] x) => (float[batch,c,h,w] y) {{
        scaled = Conv (x, scale)
        positive = Relu (scaled)
        y = MaxPool <{pool}> (positive)
    }}"""
    path = model_of(tmp_path, text, scale=normal(3, 2, 1, 1))
    found = []
    for packed in (False, True):
        folder = tmp_path / str(packed)
        sizes = {"loss": [{"name": "mse"}], "pipeline": {"sizes": {"batch": 64}}}
        plan = build(path, folder, stash={"packed": packed}, **sizes)
        with Trainer(folder, threads=1) as trainer:
            batch = synthetic_batch(trainer.inputs.ports, 3)
            batch["x"][0, :, :3] = -np.inf  # windows without a maximum
            batch["x"][1] = np.sign(batch["x"][1])  # equal ones
            loss, arrays = trainer.gradients(
                {**batch, "x": np.where(np.isfinite(batch["x"]), batch["x"], -9).astype(np.float32)}
            )
            found.append((loss, {n: a.copy() for n, a in arrays.items()}))
    assert_same(*found)
    stashed = plan.stages[0].stashed
    assert (0 if stashed is None else stashed.values) == (0 if "storage_order" in pool else 2)


def test_not_a_number_is_told_as_without(tmp_path: Path) -> None:
    text = """pooled (float[batch,1,8,8] x) => (float[batch,1,4,4] y) {
        scaled = Conv (x, scale)
        y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (scaled)
    }"""
    path = model_of(tmp_path, text, scale=normal(1, 1, 1, 1))
    build(path, tmp_path / "o", loss=[{"name": "mse"}], stash={"packed": True}, pipeline={"sizes": {"batch": 64}})
    with Trainer(tmp_path / "o", threads=1) as trainer:
        batch = synthetic_batch(trainer.inputs.ports, 2)
        batch["x"][0] = np.nan
        loss, _ = trainer.gradients(batch)
        assert not np.isfinite(loss)


DROPOUT = """dropped (float[batch,37] x) => (float[batch,5] y)
<float ratio = {0.3}, bool training = {1}> {
    wide = MatMul (x, up)
    positive = Relu (wide)
    dropped = Dropout (positive, ratio, training)
    y = MatMul (dropped, down)
}"""


@pytest.mark.parametrize("samples", [8, 11])
@pytest.mark.parametrize("pipeline", [{}, {"stages": 2, "micro_batches": 2, "cuts": ["dropped"]}])
def test_dropout_masks_are_bits(pipeline: dict[str, Any], samples: int, tmp_path: Path) -> None:
    """Of 61 columns, so that the last byte is not full; the float that the mask scales with is made again."""
    path = model_of(tmp_path, DROPOUT, up=normal(37, 61), down=normal(61, 5))
    found = []
    for packed in (False, True):
        folder = tmp_path / str(packed)
        recipe = {"loss": [{"name": "mse"}], "pipeline": {"sizes": {"batch": 256}, **pipeline}}
        plan = build(path, folder, stash={"packed": packed}, **recipe)
        found.append(gradients(folder, samples))
    assert_same(*found)
    stashed = plan.stages[0].stashed
    assert stashed is not None
    elements = 256 * 61
    # The ReLU's output, freed by its mask; the floats that dropout scales with, made again of theirs.
    assert stashed.values == 2
    saved = stashed.bytes_before - stashed.bytes_after
    assert saved == pytest.approx(2 * 4 * elements - 2 * elements // 8, rel=0.01) or (pipeline and saved > 4 * elements)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("stash", [{"packed": True}, {"packed": True, "dtype": "bf16"}, {"dtype": "int8"}])
@pytest.mark.parametrize("name", ["lenet_bn.legacy_train", "gpt"])
def test_stages_keep_what_the_plan_predicts(name: str, stash: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    path = GPT if name == "gpt" else DATA / f"{name}.onnx"
    pipeline = {"stages": 2, "micro_batches": 4, "schedule": schedule}
    sizes = {"batch": 8, "sequence": 16}
    inputs = {d.dim_param for i in onnx.load(path).graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    pipeline["sizes"] = {n: sizes.get(n, 8) for n in sorted(inputs)}
    plain = build(path, tmp_path / "plain", pipeline=pipeline)
    plan = build(path, tmp_path / "o", pipeline=pipeline, stash=stash)
    if name != "gpt" or "dtype" in stash:
        assert plan.stages[0].costs.stash_bytes < plain.stages[0].costs.stash_bytes
    folders = []
    for folder in ("plain", "o"):
        with Trainer(tmp_path / folder, threads=1) as trainer:
            batch = batch_of(trainer, pipeline["sizes"], 4)
            trainer.record()
            loss, arrays = trainer.gradients(batch)
            folders.append((loss, {n: a.copy() for n, a in arrays.items()}))
            trainer.step(batch)
            profile = trainer.recorded()
    if "dtype" not in stash:
        assert_same(*folders)
    assert profile is not None
    for rank, stage in zip(profile.ranks, plan.stages, strict=True):
        assert rank["tensor_bytes"] == pytest.approx(stage.costs.memory_bytes, rel=0.02)


def batch_of(trainer: Trainer, sizes: dict[str, int], parts: int = 1) -> Batch:
    random = np.random.default_rng(0)
    arrays = {}
    for name, port in trainer.inputs.ports.items():
        shape = [d if isinstance(d, int) else sizes[d] for d in port.shape or ()]
        shape[0] *= parts
        integer = "int" in port.dtype
        arrays[name] = random.integers(0, 2, shape) if integer else random.standard_normal(shape).astype(np.float32)
    return arrays


@pytest.mark.parametrize(
    "more", [{"recompute": {"nodes": "auto"}}, {"precision": {"type": "bf16"}}, {"passes": {"off": ["order"]}}]
)
@pytest.mark.parametrize("name", ["resnet.legacy_train", "gpt2_eager.legacy"])
def test_packing_with_the_rest(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    build(DATA / f"{name}.onnx", tmp_path / "plain", **more)
    plan = build(DATA / f"{name}.onnx", tmp_path / "packed", stash={"packed": True}, **more)
    assert_same(gradients(tmp_path / "plain", 5), gradients(tmp_path / "packed", 5))
    if plan.stages[0].recomputed is not None:
        train = plan.stages[0].phases["train"]
        assert train.memory is not None


def test_what_is_computed_again_is_not_kept(tmp_path: Path) -> None:
    plain = build(GPT, tmp_path / "plain", stash={"dtype": "bf16"})
    again = build(GPT, tmp_path / "again", stash={"dtype": "bf16"}, recompute={"nodes": "layers"})
    assert again.stages[0].stashed.bytes_before < plain.stages[0].stashed.bytes_before
    assert again.stages[0].stashed.bytes_after < plain.stages[0].stashed.bytes_after
    assert again.stages[0].recomputed.memory_after < again.stages[0].recomputed.memory_before


# ---- with loss ---------------------------------------------------------------------------------------------------------


def product_gradients(tmp_path: Path, stash: dict[str, Any]) -> tuple[Batch, dict[str, np.ndarray]]:
    text = "products (float[batch,16] x) => (float[batch,3] y) { wide = MatMul (x, up)  y = MatMul (wide, down) }"
    path = model_of(tmp_path, text, up=normal(16, 70), down=normal(70, 3))
    folder = tmp_path / str(stash.get("dtype"))
    build(path, folder, loss=[{"name": "mse"}], stash=stash, pipeline={"sizes": {"batch": 64}})
    with Trainer(folder, threads=1) as trainer:
        batch = synthetic_batch(trainer.inputs.ports, 13)
        _, found = trainer.gradients(batch)
        return batch, {n: a.copy() for n, a in found.items()}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_what_is_kept_is_rounded_once(dtype: str, tmp_path: Path) -> None:
    """dW = Xᵀ·dY with each x off by at most its rounding: |ΔdW| <= the sum of those times |dY|, element by element."""
    batch, exact = product_gradients(tmp_path, {})
    _, found = product_gradients(tmp_path, {"dtype": dtype})
    assert np.array_equal(found["up"], exact["up"])  # from the data and dY, which are not kept narrow
    wide = batch["x"].astype(np.float64) @ normal(16, 70)
    label = next(n for n in batch if n != "x")
    gradient = 2 * (wide @ normal(70, 3) - batch[label]) / batch[label].size
    step = np.abs(wide) * TYPES[dtype] if dtype in TYPES else np.abs(wide).max(1, keepdims=True) / 127 / 2 * np.ones(70)
    bound = step.T @ np.abs(gradient)
    off = np.abs(found["down"].astype(np.float64) - exact["down"])
    slack = 1e-5 * np.abs(exact["down"]).max()
    assert (off <= bound + slack).all()
    assert off.max() > 0.02 * bound.max()  # it was rounded: a pair of casts was not taken away


@pytest.mark.parametrize(("dtype", "expected"), [("fp16", 2e-3), ("bf16", 2.0**-7), ("int8", 0.1)])
@pytest.mark.parametrize("name", ["resnet.legacy_train", "lenet_bn.legacy_train", "gpt2_eager.legacy"])
def test_gradients_of_models_are_near(name: str, dtype: str, expected: float, tmp_path: Path) -> None:
    build(DATA / f"{name}.onnx", tmp_path / "plain")
    plan = build(DATA / f"{name}.onnx", tmp_path / dtype, stash={"dtype": dtype})
    (loss, exact), (other, found) = gradients(tmp_path / "plain", 5), gradients(tmp_path / dtype, 5)
    assert loss == other  # the forward is what it was
    far = np.sqrt(sum(float(np.sum((found[n].astype(np.float64) - exact[n]) ** 2)) for n in exact))
    whole = np.sqrt(sum(float(np.sum(exact[n].astype(np.float64) ** 2)) for n in exact))
    assert 0 < far < expected * whole
    stashed = plan.stages[0].stashed
    assert stashed is not None
    assert stashed.bytes_after < stashed.bytes_before * (0.75 if dtype != "int8" else 0.6)


def test_verify_tells_what_rounding_does(tmp_path: Path) -> None:
    model = DATA / "lenet_bn.legacy_train.onnx"
    build(model, tmp_path / "o", stash={"packed": True, "dtype": "bf16"})
    checks = {check.name: check for check in verify(tmp_path / "o", model, threads=1)}
    assert checks["pass pack-stash"].error == 0
    told = checks["gradients with activations kept in bf16 = without"]
    assert told.verdict == "right"
    assert told.errors[0] == (told.worst, told.error)
    assert [e for _, e in told.errors] == sorted((e for _, e in told.errors), reverse=True)
    assert 1e-4 < told.error < 2.0**-6
    assert {name for name, _ in told.errors} == {p.name for p in load(tmp_path / "o").trainable()}


def load(folder: Path) -> Plan:
    from ortc.plan import load_plan

    return load_plan(folder)


# ---- memory ------------------------------------------------------------------------------------------------------------


@needs_linux
@pytest.mark.parametrize("stash", [{"packed": True}, {"dtype": "bf16"}, {"packed": True, "dtype": "int8"}], ids=str)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2_eager.legacy", {"batch": 128, "sequence": 16}),
        ("resnet.legacy_train", {"batch": 512}),
        ("lenet_bn.legacy_train", {"batch": 512}),
    ],
)
def test_sessions_peak_as_predicted(name: str, sizes: dict[str, int], stash: dict[str, Any], tmp_path: Path) -> None:
    axis = -1 if name.startswith("gpt") else 1
    recipe = {"loss": [{"name": "cross_entropy", "options": {"axis": axis}}], "pipeline": {"sizes": sizes}}
    plan = build(DATA / f"{name}.onnx", tmp_path / "o", stash=stash, **recipe)
    plain = build(DATA / f"{name}.onnx", tmp_path / "plain", **recipe)
    with Trainer(tmp_path / "o", threads=1) as trainer:
        named = {d for p in trainer.inputs.ports.values() for d in p.shape or () if isinstance(d, str)}
        np.savez(tmp_path / "batch.npz", **batch_of(trainer, {**dict.fromkeys(named, 16), **sizes}))
    found = measured(SESSION, str(tmp_path / "o"), str(tmp_path / "batch.npz"))
    train = plan.stages[0].phases["train"]
    assert found[train.file] == pytest.approx(train.memory.peak_bytes, rel=0.1)
    if "dtype" in stash or name.startswith("resnet"):  # masks and indices alone are not at the others' peak
        assert train.memory.peak_bytes < plain.stages[0].phases["train"].memory.peak_bytes


# ---- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stash", "tight"], "neither keep nor packed"),
        (["--stash-dtype", "fp8"], "stash.dtype"),
        (["--moments", "fp16"], "optimizer.moments"),
        (["--moments", "bf16", "--optimizer", "sgd"], "has no first moment"),
        (["--moments", "bf16", "--optimizer", "adafactor"], "has no first moment"),
        (["--moments", "bf16", "--artifacts", "ort", "--target", "ort-training"], "leave out --moments"),
        (["--stash-dtype", "int8", "--artifacts", "ort", "--target", "ort-training"], "bf16 or fp16"),
    ],
)
def test_mistakes_are_told(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ortc", "compile", str(DATA / "mlp.legacy.onnx"), "-o", str(tmp_path / "o"), *flags])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("stash", [{"packed": True}, {"packed": True, "dtype": "bf16"}], ids=str)
def test_ranks_hold_what_is_predicted(stash: dict[str, Any], tmp_path: Path) -> None:
    """Of the stage that the loss is not part of; less than without."""
    for name, task in TASKS.items():
        batch, model = task.batch(np.random.default_rng(0)), task.model(tmp_path)
        pipeline = {"stages": 2, "micro_batches": 4, "sizes": sizes_of(model, batch, 4)}
        held = []
        for folder, fields in ((name, {"stash": stash}), (f"{name}-plain", {})):
            plan = build(model, tmp_path / folder, pipeline=pipeline, loss=[task.loss], **fields)
            with Trainer(tmp_path / folder, threads=1) as trainer:
                trainer.record()
                trainer.step(batch)
                profile = trainer.recorded()
            assert profile is not None
            assert plan.stages[0].costs is not None
            held.append(profile.ranks[0]["peak_stash_bytes"])
            assert held[-1] == plan.stages[0].costs.stash_bytes
        assert held[0] <= held[1], name
