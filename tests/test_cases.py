"""Small models, each of which somebody reported to break a training tool, and what must happen with them.

The numbers lie in ``data/cases``: weights, one batch, and the loss and its gradients by central differences in float64.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gradcheck import TARGETS
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from ortc.artifacts import compile
from ortc.errors import ModelError, OrtcError, RecipeError
from ortc.plan import Plan
from ortc.recipe import parse_recipe
from ortc.runtime.trainer import Trainer

DATA = Path(__file__).parent / "data" / "cases"

# ONNX text; the weights come from the numbers.
MODELS = {
    "unary_atan_reciprocal_leakyrelu": """<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,3] y) {
        xw = MatMul (x, W)
        z = Add (xw, b)
        a = Atan (z)
        shifted = Add (a, two)
        q = Reciprocal (shifted)
        centred = Sub (q, half)
        y = LeakyRelu <alpha = 0.2> (centred)
    }""",
    "resize_linear_unet": """<ir_version: 8, opset_import: ["": 17]> g (float[N,1,8,8] x) => (float[N,1,8,8] y) {
        c = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1, b1)
        t = Tanh (c)
        u = Resize <mode = "linear", coordinate_transformation_mode = "half_pixel"> (t, , scales)
        both = Concat <axis = 1> (u, x)
        y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (both, w2)
    }""",
    "gru_empty_optional_input": """<ir_version: 8, opset_import: ["": 17]> g (float[T,2,2] x) => (float[2,1] y) {
        hidden, h = GRU <hidden_size = 3, linear_before_reset = 1> (x, W, R, B, , h0)
        last = Squeeze (h, ax0)
        y = MatMul (last, head)
    }""",
    "layernorm_two_ways": """<ir_version: 8, opset_import: ["": 18]> g (float[N,5,4] x) => (float[N,5,6] y) {
        h = MatMul (x, W)
        n = LayerNormalization <axis = -1, epsilon = 0.00001> (h, scale1)
        a = Tanh (n)
        mean = ReduceMean <keepdims = 1> (a, axes)
        centred = Sub (a, mean)
        square = Mul (centred, centred)
        variance = ReduceMean <keepdims = 1> (square, axes)
        safe = Add (variance, eps)
        deviation = Sqrt (safe)
        normal = Div (centred, deviation)
        scaled = Mul (normal, scale2)
        y = Add (scaled, bias2)
    }""",
    # The weights are inputs as well, as files of that age have them.
    "zoo_style_opset10": """<ir_version: 3, opset_import: ["": 10]>
    g (float[N,3] x, float[8,3] W1, float[8] b1, float[1,8] W2, float[1] b2) => (float[N,1] y) {
        h = Gemm <transB = 1> (x, W1, b1)
        a = Relu (h)
        z = Gemm <transB = 1> (a, W2, b2)
        s = ReduceSum <axes = [1], keepdims = 1> (z)
        u = Unsqueeze <axes = [1]> (s)
        y = Squeeze <axes = [1]> (u)
    }""",
    "name_collisions": """<ir_version: 8, opset_import: ["": 17]> g (float[N,3] target) => (float[N,2] y) {
        W_grad = MatMul (target, W)
        loss = Tanh (W_grad)
        labels = MatMul (loss, V)
        step = Mul (labels, lr)
        y = Identity (step)
    }""",
    "batchnorm_running_stats": """<ir_version: 8, opset_import: ["": 15]>
    g (float[N,3] x) => (float[N,4] y, float[4] new_mean, float[4] new_var) {
        h = MatMul (x, W)
        y, new_mean, new_var = BatchNormalization <training_mode = 1, momentum = 0.9, epsilon = 0.001>
            (h, scale, bias, running_mean, running_var)
    }""",
    "unused_and_int_initializers": """<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,2,3] y) {
        h = MatMul (x, W)
        shifted = Add (h, b)
        c = Clip (shifted, lo, hi)
        r = Reshape (c, new_shape)
        s = Shape (only_shape)
        sf = Cast <to = 1> (s)
        six = ReduceProd <keepdims = 0> (sf)
        y = Div (r, six)
    }""",
    "two_heads_weighted_loss": """<ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (float[N,4,2] box, float[N,4] obj, int64[N] debug) {
        h = MatMul (x, W)
        a = Tanh (h)
        flat = MatMul (a, Wb)
        box = Reshape (flat, box_shape)
        obj = MatMul (a, Wo)
        debug = ArgMax <axis = 1, keepdims = 0> (obj)
    }""",
    "dropout_train_to_inference": """<ir_version: 7, opset_import: ["": 13]> g (float[64] x) => (float[64] y) {
        h = Mul (x, w)
        y = Dropout <seed = 7> (h, ratio, mode)
    }""",
    "external_data": """<ir_version: 8, opset_import: ["": 17]> g (float[N,16] x) => (float[N,8] y) {
        h = MatMul (x, W)
        y = Add (h, b)
    }""",
    "input_gradient_frozen_net": """<ir_version: 8, opset_import: ["": 17]>
    g (float[N,1,6,6] image, int64[N] ids) => (float[N,3] logits) {
        c = Conv <kernel_shape = [3, 3]> (image, w)
        t = Tanh (c)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (t)
        f = Flatten <axis = 1> (p)
        e = Gather <axis = 0> (E, ids)
        both = Concat <axis = 1> (f, e)
        logits = MatMul (both, W)
    }""",
}

Numbers = dict[str, dict[str, np.ndarray]]


def numbers_of(case: str) -> Numbers:
    """The stored arrays as ``weight``, ``input``, ``target``, ``grad`` by name, and ``loss``."""
    found: Numbers = {"weight": {}, "input": {}, "target": {}, "grad": {}}
    with np.load(DATA / f"{case}.npz") as archive:
        for key in archive.files:
            kind, _, name = key.partition("/")
            found.setdefault(kind, {})[name] = archive[key]
    return found


def build(case: str) -> onnx.ModelProto:
    """The case's model with its weights."""
    model = onnx.parser.parse_model(MODELS[case])
    weights = numbers_of(case)["weight"]
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


@contextmanager
def trainer_of(
    case: str, folder: Path, loss: list[dict] | None = None, **recipe: object
) -> Iterator[tuple[Plan, Trainer, dict[str, np.ndarray], Numbers]]:
    """Plan, trainer, batch and numbers of a compiled case."""
    numbers = numbers_of(case)
    path = folder / f"{case}.onnx"
    if not path.exists():
        onnx.save(build(case), path)
    loss = loss or [{"name": "mse", "output": "y"}]
    plan = compile(path, folder / "stages", parse_recipe({"loss": loss, "target": TARGETS[-1].name, **recipe}))
    targets = list(numbers["target"].values())
    batch = {**numbers["input"], **{term.get("labels", "labels"): t for term, t in zip(loss, targets, strict=True)}}
    with Trainer(folder / "stages") as trainer:
        yield plan, trainer, batch, numbers


def assert_as_stored(trainer: Trainer, batch: dict[str, np.ndarray], numbers: Numbers) -> None:
    """Loss and gradients are those of the finite differences, within 1e-4 of each gradient's largest entry."""
    loss, gradients = trainer.gradients(batch)
    assert loss == pytest.approx(float(numbers["loss"][""]), rel=1e-5)
    assert numbers["grad"]
    for name, want in numbers["grad"].items():
        np.testing.assert_allclose(gradients[name], want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=name)


def outputs_of(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of an exported model, by ONNX's reference implementation."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return dict(zip([o.name for o in model.graph.output], ReferenceEvaluator(model).run(None, feeds), strict=True))


@pytest.mark.parametrize(
    "case",
    [
        "unary_atan_reciprocal_leakyrelu",
        "resize_linear_unet",
        "gru_empty_optional_input",
        "layernorm_two_ways",
        "zoo_style_opset10",
        "name_collisions",
        "batchnorm_running_stats",
        "unused_and_int_initializers",
        "external_data",
    ],
)
def test_loss_and_gradients_are_finite_differences(case, tmp_path):
    with trainer_of(case, tmp_path) as (plan, trainer, batch, numbers):
        assert set(numbers["grad"]) <= {p.name for p in plan.trainable()}
        assert_as_stored(trainer, batch, numbers)
        assert {p.of for p in plan.stages[0].phases["train"].inputs if p.role == "data"} == set(numbers["input"])


@pytest.mark.parametrize("case", ["name_collisions", "zoo_style_opset10", "layernorm_two_ways", "resize_linear_unet"])
def test_an_export_computes_what_the_trained_model_does(case, tmp_path):
    with trainer_of(case, tmp_path) as (_, trainer, batch, numbers):
        feeds = numbers["input"]
        before = trainer.evaluate(batch).outputs["y"]
        np.testing.assert_allclose(before, outputs_of(tmp_path / f"{case}.onnx", feeds)["y"], atol=1e-5)
        trainer.step(batch)
        after = trainer.evaluate(batch).outputs["y"]
        assert np.abs(after - before).max() > 1e-4
        trainer.export(tmp_path / "trained.onnx")
        exported = onnx.load(tmp_path / "trained.onnx")
        assert {o.version for o in exported.opset_import} == {o.version for o in build(case).opset_import}
        names = [v for node in exported.graph.node for v in node.output if v]
        assert len(names) == len(set(names))
        np.testing.assert_allclose(after, outputs_of(tmp_path / "trained.onnx", feeds)["y"], atol=1e-5)


def test_batch_norm_updates_and_exports_its_statistics(tmp_path):
    with trainer_of("batchnorm_running_stats", tmp_path) as (plan, trainer, batch, numbers):
        weight = numbers["weight"]
        assert {p.name for p in plan.trainable()} == {"W", "scale", "bias"}
        h = numbers["input"]["x"].astype(np.float64) @ weight["W"]
        want = {
            "running_mean": 0.9 * weight["running_mean"] + 0.1 * h.mean(axis=0),
            "running_var": 0.9 * weight["running_var"] + 0.1 * h.var(axis=0),  # of the population
        }
        trainer.step(batch)
        for name, value in want.items():
            np.testing.assert_allclose(trainer.parameters[name], value, rtol=1e-5)
        trainer.export(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    (node,) = [n for n in exported.graph.node if n.op_type == "BatchNormalization"]
    assert list(node.output) == ["y"]
    assert [o.name for o in exported.graph.output] == ["y"]
    assert all(a.i == 0 for a in node.attribute if a.name == "training_mode")
    stored = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    for name, value in want.items():
        np.testing.assert_allclose(stored[name], value, rtol=1e-5)
    x = numbers["input"]["x"] @ stored["W"] - want["running_mean"]
    y = x / np.sqrt(want["running_var"] + 1e-3) * stored["scale"] + stored["bias"]
    np.testing.assert_allclose(outputs_of(tmp_path / "trained.onnx", numbers["input"])["y"], y, rtol=1e-4, atol=1e-5)


CALLED_TWICE = """<ir_version: 8, opset_import: ["": 15]> g (float[N,3] x, float[N,3] z) => (float[N,4] y) {
    h = MatMul (x, W)
    k = MatMul (z, W)
    a, mean_a, var_a = BatchNormalization <training_mode = 1, momentum = 0.8> (h, scale, bias, mean, variance)
    b, mean_b, var_b = BatchNormalization <training_mode = 1, momentum = 0.8> (k, scale, bias, mean, variance)
    p = Tanh (a)
    y = Mul (p, b)
}"""


def called_twice(folder: Path) -> dict[str, np.ndarray]:
    """Writes a model that calls one batch norm twice, and gives a batch and the model's weights."""
    numbers = np.random.default_rng(7)
    shapes = {"W": (3, 4), "scale": 4, "bias": 4, "mean": 4, "variance": 4, "x": (6, 3), "z": (6, 3), "labels": (6, 4)}
    arrays = {name: numbers.uniform(0.5, 2, shape).astype(np.float32) for name, shape in shapes.items()}
    model = onnx.parser.parse_model(CALLED_TWICE)
    model.graph.initializer.extend(numpy_helper.from_array(arrays[n], n) for n in ("W", "scale", "bias", "mean", "variance"))
    onnx.save(model, folder / "model.onnx")
    return arrays


@pytest.mark.parametrize("recipe", [{}, {"recompute": {"nodes": "full"}}, {"pipeline": {"micro_batches": 2}}], ids=str)
def test_a_batch_norm_that_is_called_twice_updates_its_statistics_twice(recipe, tmp_path):
    arrays = called_twice(tmp_path)
    compile(
        tmp_path / "model.onnx",
        tmp_path / "stages",
        parse_recipe({"loss": [{"name": "mse"}], "target": TARGETS[-1].name, **recipe}),
    )
    with Trainer(tmp_path / "stages") as trainer:
        trainer.step({name: arrays[name] for name in ("x", "z", "labels")})
        found = {name: trainer.parameters[name].copy() for name in ("mean", "variance")}
    parts = recipe.get("pipeline", {}).get("micro_batches", 1)
    want = {name: arrays[name].astype(np.float64) for name in found}
    for x, z in zip(np.split(arrays["x"], parts), np.split(arrays["z"], parts), strict=True):
        for rows in (x @ arrays["W"], z @ arrays["W"]):
            want = {"mean": 0.8 * want["mean"] + 0.2 * rows.mean(0), "variance": 0.8 * want["variance"] + 0.2 * rows.var(0)}
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_a_batch_norm_whose_calls_lie_in_two_stages_is_refused(tmp_path):
    called_twice(tmp_path)
    recipe = {"loss": [{"name": "mse"}], "pipeline": {"stages": 2, "micro_batches": 2, "cuts": ["p"]}}
    with pytest.raises(RecipeError, match=r"update mean, one after the other, and lie in stages 0, 1.*--batch-norm frozen"):
        compile(tmp_path / "model.onnx", tmp_path / "stages", parse_recipe(recipe))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_training_graph_leaves_a_callers_statistics_alone(target, tmp_path):
    """ONNX Runtime writes the statistics that BatchNormalization makes over those that it is given, be they the caller's."""
    arrays = {**numbers_of("batchnorm_running_stats")["weight"], **numbers_of("batchnorm_running_stats")["input"]}
    onnx.save(build("batchnorm_running_stats"), tmp_path / "model.onnx")
    compile(tmp_path / "model.onnx", tmp_path / "stages", parse_recipe({"loss": [{"name": "mse"}], "target": target.name}))
    session = ort.InferenceSession(tmp_path / "stages" / "stage-0" / "train.onnx")
    feeds = {i.name: arrays.get(i.name, np.zeros((len(arrays["x"]), 4), np.float32)).copy() for i in session.get_inputs()}
    before = {name: array.copy() for name, array in feeds.items()}
    session.run(None, feeds)
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_what_cannot_train_is_said_and_refused_by_name(tmp_path, capsys):
    from ortc.inspection import inspect_model

    case = "unused_and_int_initializers"
    with trainer_of(case, tmp_path, parameters={"train": ["*"]}) as (plan, *_):
        assert {p.name for p in plan.trainable()} == {"W", "b"}
        states = {p.of for p in plan.stages[0].phases["optimizer"].inputs if p.role == "state"}
        assert states == {"W", "b"}
    inspect_model(tmp_path / f"{case}.onnx", parse_recipe({"loss": [{"name": "mse"}]}))
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    reasons = {"const_fold_opt__99": "nothing uses it", "new_shape": "int64", "only_shape": "no gradient reaches it"}
    for name, reason in reasons.items():
        assert reason in listed[name]
        with pytest.raises(OrtcError, match=name) as error:
            compile(tmp_path / f"{case}.onnx", tmp_path / "out", parse_recipe({"parameters": {"train": [name]}}))
        assert reason in str(error.value)
    assert not (tmp_path / "out").exists()


def test_two_heads_with_a_weighted_loss(tmp_path):
    loss = [
        {"name": "mse", "output": "box", "weight": 0.4, "labels": "where"},
        {"name": "bce_with_logits", "output": "obj", "weight": 0.6, "labels": "whether"},
    ]
    with trainer_of("two_heads_weighted_loss", tmp_path, loss) as (plan, trainer, batch, numbers):
        assert_as_stored(trainer, batch, numbers)
        (total,) = [p for p in plan.stages[0].phases["train"].outputs if p.role == "loss"]
        assert total.shape == []
        assert {p.of for p in plan.stages[0].phases["train"].inputs if p.role in ("data", "label")} == {"x", "where", "whether"}
        evaluation = trainer.evaluate(batch)
        assert evaluation.loss == pytest.approx(float(numbers["loss"][""]), rel=1e-5)
        np.testing.assert_array_equal(evaluation.outputs["debug"], evaluation.outputs["obj"].argmax(axis=1))
        trainer.export(tmp_path / "trained.onnx")
    assert set(outputs_of(tmp_path / "trained.onnx", numbers["input"])) == {"box", "obj", "debug"}


def test_dropout_has_one_mask_for_both_ways_and_none_outside_of_training(tmp_path):
    with trainer_of("dropout_train_to_inference", tmp_path) as (plan, trainer, batch, numbers):
        x, t, w = numbers["input"]["x"], numbers["target"]["y"], numbers["weight"]["w"]
        assert [p.name for p in plan.trainable()] == ["w"]
        loss, gradients = trainer.gradients(batch)
        kept = gradients["w"] != 0
        assert 16 < kept.sum() < 48
        y = np.where(kept, 2 * x * w, 0)
        np.testing.assert_allclose(gradients["w"], np.where(kept, 2 / 64 * (y - t) * 2 * x, 0), rtol=1e-5)
        assert loss == pytest.approx(np.mean((y - t) ** 2), rel=1e-5)

        first = [trainer.step(batch).loss for _ in range(3)]
        evaluation = trainer.evaluate(batch)
        np.testing.assert_allclose(evaluation.outputs["y"], x * trainer.parameters["w"], rtol=1e-6)
        trainer.export(tmp_path / "trained.onnx")
        trained = np.array(trainer.parameters["w"])
    exported = onnx.load(tmp_path / "trained.onnx")
    assert not [n for n in exported.graph.node if n.op_type == "Dropout"]
    np.testing.assert_allclose(outputs_of(tmp_path / "trained.onnx", {"x": x})["y"], x * trained, rtol=1e-6)

    def masks(seed: int) -> tuple[list[float], np.ndarray]:
        with Trainer(tmp_path / "stages", restore="none", seed=seed) as trainer:
            _, gradients = trainer.gradients(batch)
            losses = [trainer.step(batch).loss for _ in range(3)]
            _, later = trainer.gradients(batch)
            assert not np.array_equal(later["w"] != 0, gradients["w"] != 0)
            return losses, gradients["w"] != 0

    assert masks(plan.recipe.seed)[0] == first
    np.testing.assert_array_equal(masks(plan.recipe.seed)[1], kept)
    assert not np.array_equal(masks(plan.recipe.seed + 1)[1], kept)


def test_external_data_from_another_directory(tmp_path, monkeypatch):
    user, here = tmp_path / "modèle", tmp_path / "here"
    for folder in (user / "weights", here):
        folder.mkdir(parents=True)
    model, blob = build("external_data"), bytearray(4096)  # the first page is empty: no offset is 0
    for tensor in model.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, "weights/params.bin", len(blob), len(tensor.raw_data))
        blob += tensor.raw_data + bytes(-len(tensor.raw_data) % 4096)
        tensor.ClearField("raw_data")
    (user / "weights" / "params.bin").write_bytes(blob)
    (user / "external_data.onnx").write_bytes(model.SerializeToString())
    before = {p: p.read_bytes() for p in user.rglob("*") if p.is_file()}
    monkeypatch.chdir(here)
    with trainer_of("external_data", Path("../modèle")) as (_, trainer, batch, numbers):
        assert_as_stored(trainer, batch, numbers)
        trainer.export("first.onnx")
    assert {p: p.read_bytes() for p in before} == before

    shutil.move(user / "stages", tmp_path / "moved")
    shutil.rmtree(user)
    with Trainer(tmp_path / "moved") as trainer:
        assert_as_stored(trainer, batch, numbers)
        trainer.step(batch)
        trained = {name: np.array(value) for name, value in trainer.parameters.items()}
        trainer.export("trained.onnx")
    (tmp_path / "far").mkdir()
    shutil.move("trained.onnx", tmp_path / "far" / "trained.onnx")
    x = numbers["input"]["x"]
    np.testing.assert_allclose(
        outputs_of(tmp_path / "far" / "trained.onnx", {"x": x})["y"], x @ trained["W"] + trained["b"], rtol=1e-5, atol=1e-6
    )
    weight = numbers["weight"]
    np.testing.assert_allclose(outputs_of(Path("first.onnx"), {"x": x})["y"], x @ weight["W"] + weight["b"], atol=1e-5)


def test_the_gradient_of_an_input_of_a_frozen_model(tmp_path):
    case, loss = "input_gradient_frozen_net", [{"name": "cross_entropy", "output": "logits", "options": {"axis": 1}}]
    frozen = {"freeze": ["*"]}
    with trainer_of(case, tmp_path, loss, parameters=frozen, wrt=["image"]) as (plan, trainer, batch, numbers):
        assert plan.trainable() == []
        assert "optimizer" not in plan.stages[0].phases
        assert_as_stored(trainer, batch, numbers)
        assert set(trainer.gradients(batch)[1]) == {"image"}
        with pytest.raises(OrtcError, match="none of the model's parameters trains"):
            trainer.step(batch)
        evaluation = trainer.evaluate(batch)
        assert evaluation.loss == pytest.approx(float(numbers["loss"][""]), rel=1e-5)
    for wrt, error, says in ((["ids"], RecipeError, "'ids' holds int64"), ([], ModelError, "no trainable parameter")):
        with pytest.raises(error, match=says):
            compile(tmp_path / f"{case}.onnx", tmp_path / "out", parse_recipe({"parameters": frozen, "wrt": wrt}))
