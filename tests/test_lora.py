"""Low-rank adapters: against a reference in NumPy, finite differences, and ONNX Runtime's own loading of adapters."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradcheck import TARGETS

from ortc import Trainer
from ortc.artifacts import compile
from ortc.errors import OrtcError, RecipeError
from ortc.recipe import parse_recipe
from ortc.runtime.adapters import encode_adapters
from ortc.runtime.stage import import_onnxruntime

MODELS = Path(__file__).parent / "data" / "models"
GPT = MODELS / "gpt2_eager.legacy.onnx"

Batch = dict[str, np.ndarray]

# Every form of the table, one weight that is used in two ways, and one that is read by what has no form.
MIXED = """
<ir_version: 10, opset_import: ["": 17]>
mixed (int64[batch,3] ids, float[batch,2,4,4] image) => (float[batch,3,5] y)
{
   looked_up = Gather (table, ids)
   back = Transpose <perm = [1, 0]> (table)
   scores = MatMul (looked_up, back)
   flat = Reshape (scores, rows)
   one = Gemm <alpha = 0.5, transB = 1> (flat, dense, bias)
   two = Gemm <transB = 0> (flat, plain)
   both = Add (one, two)
   seen = Conv <group = 2, pads = [1, 1, 1, 1], strides = [2, 2]> (image, kernel)
   mean = ReduceMean <axes = [2, 3], keepdims = 0> (seen)
   half = MatMul (mean, fold)
   outer = Reshape (half, wide)
   shaped = Reshape (both, cube)
   y = Add (shaped, outer)
}
"""
SHAPES = {"table": (6, 3), "dense": (5, 6), "bias": (5,), "plain": (6, 5), "kernel": (10, 1, 3, 3), "fold": (10, 5)}


def mixed(path: Path) -> Batch:
    """Writes the model; returns its weights."""
    model = onnx.parser.parse_model(MIXED)
    random = np.random.default_rng(3)
    weights = {name: (random.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in SHAPES.items()}
    constants = {"rows": np.array([-1, 6]), "wide": np.array([-1, 1, 5]), "cube": np.array([-1, 3, 5])}
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in (weights | constants).items()]
    model.graph.initializer.extend(tensors)
    onnx.save(model, path)
    return weights


def mixed_loss(w: Mapping[str, np.ndarray], batch: Batch) -> float:
    """The same in NumPy, written by hand: mean squared error."""
    looked_up = w["table"][batch["ids"]]
    flat = (looked_up @ w["table"].T).reshape(-1, 6)
    both = 0.5 * flat @ w["dense"].T + w["bias"] + flat @ w["plain"]
    padded = np.pad(batch["image"].astype(w["kernel"].dtype), ((0, 0), (0, 0), (1, 1), (1, 1)))
    mean = np.zeros((len(padded), 10), w["kernel"].dtype)
    for channel in range(10):
        for i in (0, 2):
            for j in (0, 2):
                window = padded[:, channel // 5, i : i + 3, j : j + 3]
                mean[:, channel] += (window * w["kernel"][channel, 0]).sum((1, 2)) / 4
    y = both.reshape(-1, 3, 5) + (mean @ w["fold"])[:, None]
    return float(np.mean((y - batch["labels"]) ** 2))


def mixed_batch() -> Batch:
    random = np.random.default_rng(5)
    return {
        "ids": random.integers(0, 6, (4, 3)),
        "image": random.standard_normal((4, 2, 4, 4)).astype(np.float32),
        "labels": random.standard_normal((4, 3, 5)).astype(np.float32),
    }


FACTORS = {  # left and right, by the paper's names
    "table": ("lora_A", "lora_B"),
    "plain": ("lora_A", "lora_B"),
    "fold": ("lora_A", "lora_B"),
    "dense": ("lora_B", "lora_A"),
    "kernel": ("lora_B", "lora_A"),
}


def with_adapters(values: Mapping[str, np.ndarray], scale: float) -> Batch:
    """The weights with their adapters, in float64."""
    wide = {name: a.astype(np.float64) for name, a in values.items()}
    found = {name: wide[name] for name in SHAPES}
    for name, (left, right) in FACTORS.items():
        factors = [wide[f"{name}.{side}"] for side in (left, right)]
        product = np.matmul(*(a.reshape(len(a), -1) for a in factors))
        found[name] = wide[name] + scale * product.reshape(wide[name].shape)
    return found


def lora_recipe(**table: Any) -> dict[str, Any]:
    return {"loss": [{"name": "mse"}], "lora": {"rank": 2, "alpha": 6.0, **table}, "target": TARGETS[-1].name}


def randomise(trainer: Trainer, names: Callable[[str], bool]) -> Batch:
    """Adapters away from zero, where every gradient is something."""
    random = np.random.default_rng(9)
    for name, array in trainer._values().items():
        if names(name):
            array[...] = random.standard_normal(array.shape) * 0.3
    return {name: a.copy() for name, a in trainer._values().items()}


def test_gradients_of_all_forms_by_finite_differences(tmp_path: Path):
    mixed(tmp_path / "m.onnx")
    plan = compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe(lora_recipe()))
    adapters = [f"{name}.{side}" for name, sides in FACTORS.items() for side in sides]
    assert sorted(p.name for p in plan.trainable()) == sorted(adapters)
    batch = mixed_batch()
    with Trainer(tmp_path / "s") as trainer:
        values = randomise(trainer, lambda name: "lora" in name)
        loss, gradients = trainer.gradients(batch)
    assert loss == pytest.approx(mixed_loss(with_adapters(values, 3.0), batch), rel=1e-5)
    assert sorted(gradients) == sorted(adapters)
    for name in adapters:
        expected = np.zeros(values[name].shape)
        for index in np.ndindex(expected.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = {k: v.astype(np.float64) for k, v in values.items()}
                moved[name][index] += step
                ends.append(mixed_loss(with_adapters(moved, 3.0), batch))
            expected[index] = (ends[0] - ends[1]) / 2e-5
        assert np.abs(expected).max() > 1e-3, name
        np.testing.assert_allclose(gradients[name], expected, rtol=2e-4, atol=2e-6, err_msg=name)


def test_the_first_loss_is_the_base_models(tmp_path: Path):
    weights = mixed(tmp_path / "m.onnx")
    compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe(lora_recipe()))
    batch = mixed_batch()
    with Trainer(tmp_path / "s") as trainer:
        first, values = trainer.step(batch).loss, trainer.parameters
        assert trainer.restored.name == "step-0"
    assert first == pytest.approx(mixed_loss({k: v.astype(np.float64) for k, v in weights.items()}, batch), rel=1e-5)
    assert all((values[name] == weights[name]).all() for name in weights), "the weights stay"


def test_how_they_begin(tmp_path: Path):
    mixed(tmp_path / "m.onnx")
    for folder, seed in (("s", 0), ("t", 0), ("u", 1)):
        compile(tmp_path / "m.onnx", tmp_path / folder, parse_recipe({**lora_recipe(), "seed": seed}))
    begun = [(tmp_path / f / "checkpoint/step-0/parameters.safetensors").read_bytes() for f in "stu"]
    assert begun[0] == begun[1] != begun[2]
    with Trainer(tmp_path / "s") as trainer:
        values = trainer.parameters
    bounds = {"plain": 1 / np.sqrt(6), "dense": 1 / np.sqrt(6), "kernel": 1 / 3, "fold": 1 / np.sqrt(10)}
    for name, bound in bounds.items():  # of Kaiming-uniform with a = √5: 1/√fan-in
        a = values[f"{name}.lora_A"]
        assert 0.5 * bound < np.abs(a).max() <= bound, name
        assert not values[f"{name}.lora_B"].any()
    assert not values["table.lora_A"].any(), "rows are picked from it"
    assert 1 < np.abs(values["table.lora_B"]).max() <= np.sqrt(3)


def test_training_by_hand(tmp_path: Path):
    """y = x·W + s·(x·A)·B, mean squared error, plain SGD."""
    text = '<ir_version: 10, opset_import: ["": 17]>\nm (float[n,4] x) => (float[n,3] y) { y = MatMul (x, w) }'
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    w = random.standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    recipe = {**lora_recipe(rank=2, alpha=3.0), "optimizer": {"name": "sgd"}, "learning_rate": {"base": 0.1}}
    compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe(recipe))
    x, labels = random.standard_normal((6, 4)).astype(np.float32), random.standard_normal((6, 3)).astype(np.float32)
    with Trainer(tmp_path / "s") as trainer:
        a, b = (trainer.parameters[f"w.lora_{side}"].astype(np.float64) for side in "AB")
        for _ in range(8):
            found = trainer.step({"x": x, "labels": labels}).loss
            error = x @ w + 1.5 * (x @ a) @ b - labels
            assert found == pytest.approx(np.mean(error**2), rel=1e-5)
            dy = 2 * error / error.size
            a, b = a - 0.1 * 1.5 * x.T @ (dy @ b.T), b - 0.1 * 1.5 * (x @ a).T @ dy
        np.testing.assert_allclose(trainer.parameters["w.lora_A"], a, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(trainer.parameters["w.lora_B"], b, rtol=1e-5, atol=1e-7)
        exported = trainer.export(tmp_path / "out.onnx")
    assert exported.loss == pytest.approx(exported.evaluation_loss)
    merged = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    assert list(merged) == ["w"]
    np.testing.assert_allclose(merged["w"], w + 1.5 * a @ b, rtol=1e-5, atol=1e-6)


def text_batch(seed: int = 0) -> Batch:
    ids = np.random.default_rng(seed).integers(0, 64, (2, 4, 7))
    return {"input_ids": ids[0], "attention_mask": np.ones((4, 7), np.int64), "labels": ids[1]}


def gpt(folder: Path, targets: list[str], **recipe: Any) -> Any:
    table = {"loss": [{"name": "cross_entropy", "output": "logits"}], "lora": {"rank": 4, "targets": targets}, **recipe}
    return compile(GPT, folder, parse_recipe({"learning_rate": {"base": 0.01}, **table}))


def losses(folder: Path, steps: int = 4) -> list[float]:
    with Trainer(folder, threads=1) as trainer:
        return [trainer.step(text_batch(i)).loss for i in range(steps)]


def test_the_optimizer_holds_the_adapters_alone(tmp_path: Path):
    plan = gpt(tmp_path / "s", ["*attn*"])
    names = {p.of for p in plan.stages[0].phases["optimizer"].inputs if p.role in ("parameter", "state", "gradient")}
    assert names == {p.name for p in plan.trainable()}
    assert names
    assert all(".attn." in name and "lora" in name for name in names)
    outputs = [p.of for p in plan.stages[0].phases["train"].outputs if p.role == "gradient"]
    assert set(outputs) == names, "no other gradient is computed"


@pytest.mark.ranks
@pytest.mark.parametrize("pipeline", [{"stages": 2}, {"micro_batches": 2}, {"replicas": 2, "zero": 1}], ids=str)
def test_divided(tmp_path: Path, pipeline: dict[str, int]):
    """All weights, the tied embedding among them, whose adapters are in both stages."""
    gpt(tmp_path / "whole", ["*"])
    plan = gpt(tmp_path / "divided", ["*"], pipeline=pipeline)
    if "stages" in pipeline:
        held = [{n for n in s.parameters if "wte" in n} for s in plan.stages]
        assert len(held[0] & held[1]) == 3
    np.testing.assert_allclose(losses(tmp_path / "divided"), losses(tmp_path / "whole"), rtol=2e-6)


def test_in_half_precision(tmp_path: Path):
    gpt(tmp_path / "whole", ["*attn*", "*mlp*"])
    plan = gpt(tmp_path / "half", ["*attn*", "*mlp*"], precision={"type": "fp16"})
    assert {p.dtype for p in plan.parameters} == {"float32"}
    np.testing.assert_allclose(losses(tmp_path / "half"), losses(tmp_path / "whole"), rtol=2e-3)


def test_what_train_and_freeze_say(tmp_path: Path):
    plan = gpt(tmp_path / "s", ["*attn*"], parameters={"train": ["*ln_f*"], "freeze": ["*h.0*"]})
    trained = {p.name for p in plan.trainable()}
    assert {n for n in trained if "lora" not in n} == {"m.transformer.ln_f.weight", "m.transformer.ln_f.bias"}
    adapters = {n for n in trained if "lora" in n}
    assert adapters
    assert all(".h.1." in n for n in adapters)


def test_targets_by_the_names_of_nodes(tmp_path: Path):
    """The names of weights in this file are the exporter's own; those of nodes are not."""
    nodes = [n.name for n in onnx.load(MODELS / "bert.legacy.onnx").graph.node]
    assert any("attention" in name for name in nodes)
    plan = compile(
        MODELS / "bert.legacy.onnx", tmp_path / "s", parse_recipe({"lora": {"targets": ["*attention*query*MatMul*"]}})
    )
    assert plan.adapters
    assert len(plan.trainable()) == 2 * len(plan.adapters)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"targets": ["nothing*"]}, "'nothing*' names no weight that MatMul, Gemm, Conv, Gather reads"),
        ({"targets": ["bias"]}, "'bias' names no weight"),
        ({"rank": 0}, "lora.rank"),
        ({"targets": []}, "lora.targets"),
    ],
)
def test_mistakes(tmp_path: Path, table: dict[str, Any], said: str):
    mixed(tmp_path / "m.onnx")
    with pytest.raises(RecipeError) as error:
        compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe(lora_recipe(**table)))
    assert said in str(error.value)


def test_command_line(tmp_path: Path, ortc):
    code, out, _ = ortc("compile", GPT, "--write-recipe", "--lora", "rank=3,alpha=6,targets=[*attn*,*mlp*]")
    assert code == 0
    assert '[lora]\nrank = 3\nalpha = 6.0\ntargets = [\n    "*attn*",\n    "*mlp*",\n]' in out
    assert 'targets = [\n    "*attn*",\n]' in ortc("compile", GPT, "--write-recipe", "--lora", "targets='*attn*'")[1]
    assert ortc("compile", GPT, "-o", tmp_path / "s", "--lora", "much")[0] == 2
    gpt(tmp_path / "s", ["*attn*"])
    code, out, err = ortc("export", tmp_path / "s", "-o", tmp_path / "m.onnx", "--adapters", tmp_path / "a.onnx_adapter")
    assert (code, err) == (0, "")
    assert "checked: loss" in out
    code, _, err = ortc("export", tmp_path / "s", "-o", tmp_path / "n.onnx", "--adapters", tmp_path / "a.onnx_adapter")
    assert code == 2
    assert "exists already" in err
    assert not (tmp_path / "n.onnx").exists()


def test_export_without_adapters_says_so(tmp_path: Path):
    compile(GPT, tmp_path / "s", parse_recipe({"loss": [{"name": "cross_entropy", "output": "logits"}]}))
    with Trainer(tmp_path / "s") as trainer, pytest.raises(OrtcError, match="compiled without adapters"):
        trainer.export(tmp_path / "m.onnx", adapters=tmp_path / "a.onnx_adapter")


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Batch]:
    """A folder with the adapters apart, and what they are."""
    weights = mixed(tmp_path / "m.onnx")
    compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe(lora_recipe()))
    with Trainer(tmp_path / "s") as trainer:
        values = randomise(trainer, lambda name: "lora" in name)
        trainer.export(tmp_path / "whole.onnx")
        trainer.export(tmp_path / "apart.onnx", adapters=tmp_path / "a.onnx_adapter")
    assert set(values) > set(weights)
    return tmp_path, values


def run(session: Any, options: Any = None) -> np.ndarray:
    batch = mixed_batch()
    return session.run(None, {"ids": batch["ids"], "image": batch["image"]}, options)[0]


def test_without_its_adapters_it_is_the_base_model(exported: tuple[Path, Batch]):
    folder, values = exported
    ort = import_onnxruntime()
    sessions = {name: ort.InferenceSession(str(folder / f"{name}.onnx")) for name in ("m", "whole", "apart")}
    np.testing.assert_array_equal(run(sessions["apart"]), run(sessions["m"]))
    own = {i.name: values[i.name] for i in sessions["apart"].get_overridable_initializers()}
    assert sorted(own) == sorted(name for name in values if "lora" in name)
    batch = mixed_batch()
    fed = sessions["apart"].run(None, {"ids": batch["ids"], "image": batch["image"], **own})[0]
    np.testing.assert_allclose(fed, run(sessions["whole"]), rtol=1e-5, atol=1e-5)
    assert np.abs(fed - run(sessions["m"])).max() > 0.1


def test_onnxruntime_loads_the_adapters(exported: tuple[Path, Batch]):
    folder, values = exported
    ort = import_onnxruntime()
    if not hasattr(ort, "LoraAdapter"):
        pytest.skip("this build cannot load adapters: ONNX Runtime has that since 1.20")
    read = ort.AdapterFormat.read_adapter(str(folder / "a.onnx_adapter"))
    assert read.get_format_version() == 1
    parameters = {name: value.numpy() for name, value in read.get_parameters().items()}
    assert sorted(parameters) == sorted(name for name in values if "lora" in name)
    assert all((parameters[name] == values[name]).all() for name in parameters)
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(folder / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    whole, apart = (ort.InferenceSession(str(folder / f"{name}.onnx")) for name in ("whole", "apart"))
    np.testing.assert_allclose(run(apart, options), run(whole), rtol=1e-5, atol=1e-5)


def decode(data: bytes) -> dict[str, np.ndarray]:
    """The adapter file read as the FlatBuffers documentation says, for builds that cannot."""

    def number(kind: str, at: int) -> int:
        return struct.unpack_from(f"<{kind}", data, at)[0]

    def follow(at: int) -> int:
        return at + number("I", at)

    def field(table: int, index: int) -> int:
        vtable = table - number("i", table)
        assert index < (number("H", vtable) - 4) // 2
        assert number("H", vtable + 2) == 20
        return table + number("H", vtable + 4 + 2 * index)

    assert data[4:8] == b"TORT"
    root = follow(0)
    assert [number("i", field(root, i)) for i in range(3)] == [1, 1, 1]
    vector = follow(field(root, 3))
    found = {}
    for i in range(number("I", vector)):
        table = follow(vector + 4 + 4 * i)
        name, shape, raw = (follow(field(table, k)) for k in (0, 1, 3))
        assert table % 4 == name % 4 == 0
        assert (shape + 4) % 8 == (raw + 4) % 8 == 0
        text = data[name + 4 : name + 4 + number("I", name)].decode()
        sizes = struct.unpack_from(f"<{number('I', shape)}q", data, shape + 4)
        dtype = {1: np.float32, 10: np.float16}[number("i", field(table, 2))]
        found[text] = np.frombuffer(data, dtype, number("I", raw) // np.dtype(dtype).itemsize, raw + 4).reshape(sizes)
    return found


def test_the_file_is_laid_out_as_documented():
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "long/name.ü": np.arange(5, dtype=np.float16),
        "b": np.zeros((1, 2, 1, 1), np.float32),
    }
    found = decode(encode_adapters(tensors))
    assert list(found) == list(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_a_run_goes_on_bit_for_bit(tmp_path: Path):
    gpt(tmp_path / "s", ["*attn*"])
    whole = losses(tmp_path / "s", 4)
    with Trainer(tmp_path / "s", threads=1) as trainer:
        first = [trainer.step(text_batch(i)).loss for i in range(2)]
        path = trainer.save()
    index = json.loads((path / "index.json").read_text())
    assert sorted(index["optimizer"]) == sorted(n for n in index["parameters"] if "lora" in n)
    with Trainer(tmp_path / "s", threads=1) as trainer:
        assert first + [trainer.step(text_batch(i)).loss for i in (2, 3)] == whole


@pytest.mark.parametrize("name", ["bert.legacy", "vit.dynamo", "mobilenet.legacy_train", "embeddings.dynamo", "tied.legacy"])
def test_real_models_begin_with_pytorchs_loss(name: str, tmp_path: Path):
    """Adapters on every weight that can have one; the loss that PyTorch gave, then a smaller one, then both exports' checks."""
    ref, info = np.load(MODELS / f"{name}.ref.npz"), json.loads((MODELS / "index.json").read_text())[name]
    loss = {"name": {"ce": "cross_entropy", "mse": "mse"}[info["loss"]], "output": info.get("output")}
    table = {"loss": [loss], "lora": {"rank": 2}, "learning_rate": {"base": 0.003}, "target": TARGETS[-1].name}
    compile(MODELS / f"{name}.onnx", tmp_path / "s", parse_recipe(table))
    batch = {key[3:]: ref[key] for key in ref if key.startswith("in/")} | {"labels": ref["target"]}
    with Trainer(tmp_path / "s") as trainer:
        losses = [trainer.step(batch).loss for _ in range(3)]
        merged = trainer.export(tmp_path / "merged.onnx")
        apart = trainer.export(tmp_path / "apart.onnx", adapters=tmp_path / "a.onnx_adapter")
    assert losses[0] == pytest.approx(float(ref["loss"]), rel=1e-5)
    assert losses[2] < losses[0]
    assert merged.loss == pytest.approx(apart.loss, rel=1e-4)
