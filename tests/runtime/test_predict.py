"""The model's outputs without targets: ONNX Runtime's, of the original model with the trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from ortc import Trainer
from ortc.artifacts import compile
from ortc.errors import OrtcError
from ortc.recipe import parse_recipe
from ortc.runtime.onnx_file import cut_at
from ortc.runtime.predict import predict

MODELS = Path(__file__).parents[1] / "data" / "models"

NET = """
<ir_version: 9, opset_import: ["": 18]> net (float[{batch}, 6] x, float[{batch}, 1] scale)
    => (float[{batch}, 5] logits, float[{batch}, 12] features, float middle) {{
    p0 = Gemm(x, w0, b0)  h0 = Relu(p0)  p1 = Gemm(h0, w1, b1)  features = Relu(p1)
    scaled = Mul(features, scale)  logits = Gemm(scaled, w2, b2)
    middle = ReduceMean<keepdims=0>(features)
}}
"""


def net(path: Path, batch: int | str = "n") -> Path:
    """Two inputs of a sample; an output from the middle, which the rest reads, and one that is a number for a whole batch."""
    model = onnx.parser.parse_model(NET.format(batch=batch))
    random = np.random.default_rng(0)
    for i, (a, b) in enumerate([(6, 16), (16, 12), (12, 5)]):
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal((a, b)).astype(np.float32) / 4, f"w{i}"))
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(b).astype(np.float32), f"b{i}"))
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.save(model, path)
    return path


def points(samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, 6)).astype(np.float32)
    return {"x": x, "scale": 1 + x[:, :1] ** 2, "labels": random.integers(0, 5, samples)}


def unlabelled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in batch.items() if name != "labels"}


def trained(model: Path, folder: Path, batch: dict[str, np.ndarray], **recipe: Any) -> Path:
    """After two steps that change the weights a good deal."""
    table = {"loss": [{"name": "cross_entropy", "output": "logits"}], "learning_rate": {"base": 0.05}, **recipe}
    compile(model, folder, parse_recipe(table))
    with Trainer(folder, threads=1) as trainer:
        for _ in range(2):
            trainer.step(batch)
        trainer.save()
    return folder


def by_onnxruntime(folder: Path, batch: dict[str, np.ndarray], raw: bool = False) -> dict[str, np.ndarray]:
    """What the exported model, the original one with the trained weights, makes of a batch."""
    path = folder / "exported.onnx"
    with Trainer(folder, threads=1) as trainer:
        trainer.export(path, force=True, raw=raw)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    made = session.run(names, {i.name: batch[i.name] for i in session.get_inputs()})
    return dict(zip(names, made, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "pipeline",
    [
        {},
        {"stages": 2, "cuts": ["features"]},
        {"stages": 3, "cuts": ["h0", "features"], "micro_batches": 2},
        {"stages": 4, "schedule": "interleaved", "ranks": 2, "micro_batches": 2},
        {"stages": 2, "replicas": 2},
    ],
    ids=str,
)
def test_the_outputs_are_those_of_the_exported_model(pipeline: dict[str, Any], tmp_path: Path):
    folder = trained(net(tmp_path / "m.onnx"), tmp_path / "s", points(12), pipeline=pipeline)
    for samples in (1, 5):
        batch = unlabelled(points(samples, seed=samples))
        expected = by_onnxruntime(folder, batch)
        with Trainer(folder, threads=1) as trainer:
            found = trainer.predict(batch)
            assert list(found) == ["logits", "features", "middle"]
            for name, array in found.items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)
            assert found["logits"].shape == (samples, 5)
            # An output alone, and what it needs alone.
            few = trainer.predict({"x": batch["x"]}, ["features"])
            assert list(few) == ["features"]
            np.testing.assert_allclose(few["features"], expected["features"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        ({"precision": {"type": "fp16"}}, 2e-2),
        ({"precision": {"type": "bf16"}}, 1e-1),
        ({"lora": {"rank": 2, "targets": ["w*"]}}, 1e-5),
        ({"optimizer": {"ema": 0.5}}, 1e-5),
    ],
    ids=str,
)
def test_in_all_forms(recipe: dict[str, Any], tolerance: float, tmp_path: Path):
    """Mixed precision has the rounding of its type: 2^-11 and 2^-8, a few times over."""
    folder = trained(net(tmp_path / "m.onnx"), tmp_path / "s", points(12), **recipe)
    batch = unlabelled(points(7, seed=1))
    made = []
    for raw in (False, True):
        predict(folder, tmp_path / "out.npz", data=save(tmp_path, batch), outputs=["logits"], raw=raw, force=True)
        found = np.load(tmp_path / "out.npz")["logits"]
        expected = by_onnxruntime(folder, batch, raw)["logits"]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        made.append(found)
    if "optimizer" in recipe:
        assert np.abs(made[0] - made[1]).max() > 1e-3


def save(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "resnet.dynamo", "lstm.legacy", "lenet_bn.legacy_train"])
def test_real_models(name: str, tmp_path: Path):
    ref = np.load(MODELS / f"{name}.ref.npz")
    compile(MODELS / f"{name}.onnx", tmp_path / "s", parse_recipe({}))
    batch = {n[3:]: ref[n] for n in ref if n.startswith("in/")}
    with Trainer(tmp_path / "s", threads=1) as trainer:
        found = trainer.predict(batch)
    expected = by_onnxruntime(tmp_path / "s", batch)
    assert found
    for output, array in found.items():
        np.testing.assert_allclose(array, expected[output], rtol=1e-4, atol=1e-5)


def test_the_file_has_all_samples_in_their_order(tmp_path: Path, ortc):
    batch = points(23)
    folder = trained(net(tmp_path / "m.onnx"), tmp_path / "s", batch)
    for arrays in (batch, unlabelled(batch)):
        out = tmp_path / "out.npz"
        code, said, err = ortc(
            "predict", folder, "--data", save(tmp_path, arrays), "-o", out, "--batch-size", 5, "--only", "features", "--only",
            "logits", "--force",
        )  # fmt: skip
        assert (code, err) == (0, "")
        assert said.strip() == (
            f"{out}: 23 samples, features float32[23,12], logits float32[23,5]; weights of {folder / 'checkpoint' / 'step-2'}"
        )
        found, expected = np.load(out), by_onnxruntime(folder, batch)
        assert sorted(found) == ["features", "logits"]
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
    initial = tmp_path / "initial.npz"
    first = ["--data", tmp_path / "data.npz", "--only", "logits", "--restore", "none"]
    assert ortc("predict", folder, "-o", initial, *first)[0] == 0
    assert np.abs(np.load(initial)["logits"] - np.load(out)["logits"]).max() > 0.1
    # What was written is data again.
    np.savez(tmp_path / "renamed.npz", points=batch["x"], scale=batch["scale"])
    again = tmp_path / "again.npz"
    more = ["--data", tmp_path / "renamed.npz", "--rename", "points=x", "--only", "logits", "--quiet"]
    assert ortc("predict", folder, "-o", again, *more) == (0, "", "")
    np.testing.assert_allclose(np.load(again)["logits"], np.load(out)["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("pipeline", [{}, {"stages": 2, "micro_batches": 2}], ids=str)
def test_a_model_of_fixed_batch_size_leaves_none_out(pipeline: dict[str, int], tmp_path: Path):
    parts = pipeline.get("micro_batches", 1)
    folder = trained(net(tmp_path / "m.onnx", batch=4), tmp_path / "s", points(4 * parts), pipeline=pipeline)
    batch = unlabelled(points(10, seed=1))
    said = predict(folder, tmp_path / "out.npz", data=save(tmp_path, batch), outputs=["logits"])
    assert said is not None
    assert said.samples == 10
    found = np.load(tmp_path / "out.npz")["logits"]
    for start in (0, 4, 6):
        part = {name: array[start : start + 4] for name, array in batch.items()}
        expected = by_onnxruntime(folder, part)["logits"]
        np.testing.assert_allclose(found[start : start + 4], expected, rtol=1e-5, atol=1e-6)
    assert found.shape == (10, 5)


def test_a_models_own_loss_is_no_output_and_its_targets_no_input(tmp_path: Path):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]> net (float[n, 6] x, float[n, 2] wanted) => (float cost, float[n, 2] y) {
            y = MatMul(x, w)  d = Sub(y, wanted)  s = Mul(d, d)  cost = ReduceMean<keepdims=0>(s)
        }""")
    w = np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    compile(tmp_path / "m.onnx", tmp_path / "s", parse_recipe({"loss": [{"name": "none", "output": "cost"}]}))
    x = points(3)["x"]
    with Trainer(tmp_path / "s") as trainer:
        found = trainer.predict({"x": x})
        assert list(found) == ["y"]
        np.testing.assert_allclose(found["y"], x @ w, rtol=1e-5)
        with pytest.raises(OrtcError, match="lacks the input 'wanted'"):
            trainer.predict({"x": x}, ["cost"])
        assert trainer.predict({"x": x, "wanted": x @ w}, ["cost"])["cost"] == pytest.approx(0, abs=1e-9)


MISTAKES = [
    ({"data": {"x": points(3)["x"]}}, "lacks the input 'scale'"),
    ({"only": "logit"}, "the model has no output 'logit'; there is 'logits'"),
    ({"only": None}, "the output 'middle' has shape [] for a batch of 3 samples, so it has no row for each"),
    ({"out": "out.txt"}, "out.txt is not by its name"),
    ({"out": "no/out.npz"}, "no/out.npz: it is a folder, or in none that exists"),
    ({"out": "there.npz"}, "there.npz exists already"),
    ({"restore": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("change", "says"), MISTAKES, ids=str)
def test_a_mistake_is_told_and_leaves_nothing(change: dict[str, Any], says: str, tmp_path: Path, monkeypatch, ortc):
    monkeypatch.chdir(tmp_path)
    compile(net(Path("m.onnx")), "s", parse_recipe({"loss": [{"name": "cross_entropy", "output": "logits"}]}))
    given = {"data": unlabelled(points(3)), "only": "logits", "out": "out.npz", "restore": "latest", **change}
    save(tmp_path, given["data"])
    np.savez("there.npz", before=1)
    before = sorted(tmp_path.iterdir())
    only = [] if given["only"] is None else ["--only", given["only"]]
    code, out, err = ortc("predict", "s", "--data", "data.npz", "-o", given["out"], "--restore", given["restore"], *only)
    assert (code, out) == (2, "")
    assert err.startswith("ortc: ")
    assert says in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before
    assert list(np.load("there.npz")) == ["before"]


def test_batches_of_other_shapes_are_no_array(tmp_path: Path, monkeypatch, ortc):
    """A function may give them; nothing is left of what was there before the mistake."""
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> net (float[n, t, 2] x) => (float[n, t, 3] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "w"))
    onnx.save(model, "m.onnx")
    compile("m.onnx", "s", parse_recipe({"loss": [{"name": "mse"}]}))
    Path("lengths.py").write_text(
        "import numpy as np\ndef same():\n    for n in (2, 3): yield {'x': np.ones((n, 4, 2), np.float32)}\n"
        "def other():\n    for t in (2, 3): yield {'x': np.ones((2, t, 2), np.float32)}\n"
    )
    assert ortc("predict", "s", "--data", "lengths:same", "-o", "out.npz")[0] == 0
    np.testing.assert_array_equal(np.load("out.npz")["y"], np.full((5, 4, 3), 2, np.float32))
    code, _, err = ortc("predict", "s", "--data", "lengths:other", "-o", "more.npz")
    assert code == 2
    assert "rows of shape [3, 3] after others of [2, 3]" in err
    assert not [p for p in tmp_path.iterdir() if "more" in p.name]


def test_a_part_of_a_file_is_onnxs():
    """The nodes that onnx.utils extracts, also what a nested graph reads from outside."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]> net (float[n, 2] x, bool c, float[n, 2] z) => (float[n, 2] y, float[n, 2] q) {
            a = Relu(x)  b = Mul(x, w)  unused = Neg(z)
            y = If(c) <then_branch = one () => (float[n, 2] i) { i = Add(a, a) },
                       else_branch = two () => (float[n, 2] j) { j = Identity(b) }>
            q = Mul(y, z)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(np.full(2, 3, np.float32), "w"))
    model.graph.initializer.append(numpy_helper.from_array(np.full(2, 3, np.float32), "other"))
    data = model.SerializeToString()
    parts = (("y", ["x", "c"], 3), ("q", ["x", "c", "z"], 4), ("b", ["x"], 1), ("ab", ["x"], 2))
    for names, inputs, nodes in ((list(text), inputs, nodes) for text, inputs, nodes in parts):
        part, left = cut_at(data, names)
        made = onnx.load_model_from_string(part)
        assert left == inputs == [i.name for i in made.graph.input]
        assert [o.name for o in made.graph.output] == names
        assert len(made.graph.node) == nodes
        feeds = {"x": np.array([[-1, 2]], np.float32), "c": np.array(False), "z": np.full((1, 2), 5, np.float32)}
        whole = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        session = onnxruntime.InferenceSession(part, providers=["CPUExecutionProvider"])
        found = session.run(names, {n: feeds[n] for n in left})
        values = {"a": [[0, 2]], "b": [[-3, 6]], **dict(zip("yq", whole.run(["y", "q"], feeds), strict=True))}
        for name, array in zip(names, found, strict=True):
            np.testing.assert_array_equal(array, values[name])
    whole, left = cut_at(data, ["y", "q"])
    assert left == ["x", "c", "z"]
    assert onnx.load_model_from_string(whole).opset_import == model.opset_import
