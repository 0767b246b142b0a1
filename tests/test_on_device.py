"""ONNX Runtime's own artifacts, trained with its own API: the same losses as ours, the same model in the end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from on_device import Device, api, is_there

from ortc.artifacts import compile
from ortc.errors import RecipeError
from ortc.plan import STEP_COUNTER, load_plan
from ortc.recipe import Recipe, parse_recipe
from ortc.runtime.exchange import export_weights, import_weights
from ortc.runtime.trainer import Trainer

MODELS = Path(__file__).parent / "data" / "models"
STEPS = 12

# Two float32 sums of a loss in another order, and Adam's bias corrections in float32: a few units in the last place each
# step, of which a loss is a sum. One unit is 1.2e-7.
ROUNDING = 5e-6

needs_training_build = pytest.mark.skipif(not is_there(), reason="the installed ONNX Runtime has no on-device training")


def recipe(**fields) -> Recipe:
    return parse_recipe({"artifacts": ["ort"], "target": "ort-training", "learning_rate": {"base": 1e-3}, **fields})


def loss_of(name: str) -> list[dict[str, str]]:
    """The loss that the stored targets of a model are for, where it is not the one that is recognised."""
    return [{"name": "bce_with_logits"}] if json.loads((MODELS / "index.json").read_text())[name]["loss"] == "bce" else []


def batch_of(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The stored batch of a model, under the names that its plan has."""
    stored = np.load(MODELS / f"{name}.ref.npz")
    batch = {key[3:]: stored[key] for key in stored.files if key.startswith("in/")}
    return batch | {loss.labels: stored["target"] for loss in load_plan(folder).losses if loss.labels}


def losses_of_trainer(folder: Path, batch: dict[str, np.ndarray], steps: int = STEPS):
    """The losses of some steps, then the evaluation's loss and outputs, and the weights."""
    with Trainer(folder, threads=1) as trainer:
        losses = [trainer.step(batch).loss for _ in range(steps)]
        evaluation = trainer.evaluate(batch)
        return losses, evaluation, {name: array.copy() for name, array in trainer.parameters.items()}


# A multi-layer perceptron, one with dropout, convolutions with batch norm on the batch, a transformer (which the tool of ONNX
# Runtime refuses, see below), an LSTM (as well), a GPT, a model whose file holds a weight a second time, transposed.
@needs_training_build
@pytest.mark.parametrize(
    "name",
    [
        "mlp.legacy",
        "mlp_dropout.legacy_train",
        "lenet_bn.legacy_train",
        "encoder.dynamo",
        "lstm.legacy",
        "gpt2_sdpa.dynamo",
        "tied.legacy",
    ],
)
def test_it_trains_as_ours_does(name, tmp_path):
    folder = tmp_path / "f"
    # Plain SGD: Adam makes whole steps of gradients that are zero but for rounding, such as a bias's before batch norm.
    compile(MODELS / f"{name}.onnx", folder, recipe(loss=loss_of(name), optimizer={"name": "sgd"}))
    batch = batch_of(name, folder)
    losses, evaluation, weights = losses_of_trainer(folder, batch)
    device = Device(folder / "ort")
    np.testing.assert_allclose([device.step(batch) for _ in range(STEPS)], losses, rtol=ROUNDING)
    assert losses[0] != losses[-1]
    own = {name: p.data for name, p in device.state.parameters if name != STEP_COUNTER}
    assert own.keys() == weights.keys()
    for key, array in weights.items():  # parameters, and the running statistics that training changes
        np.testing.assert_allclose(own[key], array, rtol=1e-5, atol=1e-6, err_msg=key)
    loss, *outputs = device.evaluate(batch)
    np.testing.assert_allclose(loss, evaluation.loss, rtol=ROUNDING)
    device.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "trained.onnx"), providers=["CPUExecutionProvider"])
    exported = session.run(None, {i.name: batch[i.name] for i in session.get_inputs()})
    for output, mine, theirs in zip(session.get_outputs(), exported, outputs, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine, evaluation.outputs[output.name], rtol=1e-4, atol=1e-5)


@needs_training_build
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw"},
        {"name": "adamw", "max_norm": 0.1},
        {"name": "adamw", "decay_all": True, "options": {"weight_decay": 0.1, "beta1": 0.8}},
        {"name": "adam", "options": {"weight_decay": 0.01}},
        {"name": "sgd", "options": {"momentum": 0.9, "weight_decay": 0.1}, "max_value": 0.01},
        {"name": "lion"},
        {"name": "lamb"},
        {"name": "rmsprop", "options": {"momentum": 0.5}},
        {"name": "adagrad"},
    ],
    ids=str,
)
def test_every_optimizer_is_the_recipes(optimizer, tmp_path):
    folder = tmp_path / "f"
    name = "mlp_dropout.legacy_train"
    compile(MODELS / f"{name}.onnx", folder, recipe(loss=loss_of(name), optimizer=optimizer, learning_rate={"base": 0.01}))
    batch = batch_of(name, folder)
    losses, _, weights = losses_of_trainer(folder, batch)
    device = Device(folder / "ort", lr=0.01)
    np.testing.assert_allclose([device.step(batch) for _ in range(STEPS)], losses, rtol=ROUNDING)
    for key, array in weights.items():
        np.testing.assert_allclose(device.state.parameters[key].data, array, rtol=1e-4, atol=3e-6, err_msg=key)


@needs_training_build
def test_groups_that_dimensions_tell_apart_have_their_own_rates(tmp_path):
    groups = [{"match": ["*.bias"], "lr_scale": 0.5}]
    compile(MODELS / "mlp.legacy.onnx", tmp_path / "f", recipe(groups=groups, optimizer={"name": "sgd"}))
    batch = batch_of("mlp.legacy", tmp_path / "f")
    losses, _, _ = losses_of_trainer(tmp_path / "f", batch)
    device = Device(tmp_path / "f" / "ort")
    np.testing.assert_allclose([device.step(batch) for _ in range(STEPS)], losses, rtol=ROUNDING)


@needs_training_build
def test_losses_frozen_weights_and_gradients_of_inputs(tmp_path):
    losses = [{"name": "mse", "weight": 0.5, "labels": "values"}, {"name": "bce_with_logits"}]
    fields = {"loss": losses, "parameters": {"freeze": ["fc1.*"]}, "wrt": ["x"]}
    compile(MODELS / "mlp_dropout.legacy_train.onnx", tmp_path / "f", recipe(**fields))
    batch = batch_of("mlp_dropout.legacy_train", tmp_path / "f")
    batch["values"] = np.random.default_rng(0).standard_normal((len(batch["x"]), 5)).astype(np.float32)
    ours, _, weights = losses_of_trainer(tmp_path / "f", batch)
    with Trainer(tmp_path / "f", restore="none", threads=1) as trainer:
        _, gradients = trainer.gradients(batch)
    device = Device(tmp_path / "f" / "ort")
    _, of_x = device.run(batch)
    np.testing.assert_allclose(of_x, gradients["x"], rtol=1e-5, atol=1e-7)
    device = Device(tmp_path / "f" / "ort")
    np.testing.assert_allclose([device.step(batch) for _ in range(STEPS)], ours, rtol=ROUNDING)
    assert not device.state.parameters["fc1.weight"].requires_grad
    np.testing.assert_array_equal(device.state.parameters["fc1.weight"].data, weights["fc1.weight"])


@needs_training_build
def test_gradients_add_up_until_the_optimizer_steps(tmp_path):
    compile(MODELS / "mlp.legacy.onnx", tmp_path / "f", recipe())
    batch = batch_of("mlp.legacy", tmp_path / "f")
    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 2), slice(2, None))]
    with Trainer(tmp_path / "f", threads=1) as trainer:
        each = [trainer.gradients(half)[1] for half in halves]
    device = Device(tmp_path / "f" / "ort")
    for half in halves:
        device.run(half)
    for key, first in each[0].items():
        np.testing.assert_allclose(device.state.parameters[key].grad, first + each[1][key], rtol=1e-5, atol=1e-7)
    device.module.lazy_reset_grad()
    device.run(halves[0])
    np.testing.assert_allclose(device.state.parameters["fc1.weight"].grad, each[0]["fc1.weight"], rtol=1e-5, atol=1e-7)


@needs_training_build
def test_it_agrees_with_the_artifacts_of_onnx_runtimes_own_tool(tmp_path):
    """Where that tool takes the model: the same losses with plain SGD."""
    name, artifacts = "mlp.legacy", api("artifacts")
    model = onnx.load(MODELS / f"{name}.onnx")
    weights = [i.name for i in model.graph.initializer if i.dims and i.data_type == onnx.TensorProto.FLOAT]
    (tmp_path / "theirs").mkdir()
    artifacts.generate_artifacts(
        model,
        requires_grad=weights,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path / "theirs",
    )
    optimizer = onnx.load(tmp_path / "theirs" / "optimizer_model.onnx")
    optimizer.ir_version = 10  # it takes that of the installed onnx package, which its own runtime may not know
    onnx.save(optimizer, tmp_path / "theirs" / "optimizer_model.onnx")
    compile(MODELS / f"{name}.onnx", tmp_path / "f", recipe(optimizer={"name": "sgd"}, parameters={"train": weights}))
    batch = batch_of(name, tmp_path / "f")
    own, theirs = Device(tmp_path / "f" / "ort", lr=0.1), Device(tmp_path / "theirs", lr=0.1)
    inputs = [*(batch[i.name] for i in model.graph.input), batch["labels"]]
    expected = []
    for _ in range(STEPS):
        expected.append(float(theirs.module(*inputs)))
        theirs.optimizer.step()
        theirs.module.lazy_reset_grad()
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose([own.step(batch) for _ in range(STEPS)], expected, rtol=1e-5)


@needs_training_build
def test_onnx_runtimes_own_tool_refuses_the_transformer(tmp_path):
    """That is what the artifacts are for; if a later build takes it, the documentation must not say so any more."""
    artifacts = api("artifacts")
    with pytest.raises(RuntimeError):
        artifacts.generate_artifacts(
            onnx.load(MODELS / "encoder.dynamo.onnx"),
            requires_grad=["read.bias"],
            loss=artifacts.LossType.CrossEntropyLoss,
            artifact_directory=tmp_path,
        )


@needs_training_build
def test_training_moves_between_the_two_and_goes_on(tmp_path):
    """Three steps here, three there, three here: as nine in one place. Moments, steps and dropout's counter go along."""
    folder, name = tmp_path / "f", "mlp_dropout.legacy_train"
    compile(MODELS / f"{name}.onnx", folder, recipe(loss=loss_of(name), learning_rate={"base": 0.01}))
    batch = batch_of(name, folder)
    expected, _, _ = losses_of_trainer(folder, batch, 9)
    with Trainer(folder, threads=1) as trainer:
        losses = [trainer.step(batch).loss for _ in range(3)]
        trainer.save()
    export_weights(folder, tmp_path / "three.ckpt")
    device = Device(folder / "ort", tmp_path / "three.ckpt", lr=0.01)
    losses += [device.step(batch) for _ in range(3)]
    device.save(tmp_path / "six.ckpt")
    result = import_weights(folder, tmp_path / "six.ckpt", force=True)
    assert (result.step, result.unused) == (6, [])
    with Trainer(folder, threads=1) as trainer:
        assert trainer.step_number == 6
        losses += [trainer.step(batch).loss for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"target": "onnxruntime"}, "add --target ort-training"),
        ({"pipeline": {"stages": 2}}, "leave out --stages"),
        ({"pipeline": {"micro_batches": 2}}, "--micro-batches"),
        ({"precision": {"type": "fp16"}}, "--loss-scale none"),
        ({"optimizer": {"name": "adafactor"}}, "optimizer adafactor"),
        ({"optimizer": {"name": "adam", "options": {"amsgrad": True}}}, "at most two values"),
        ({"groups": [{"match": ["fc1.*"], "lr_scale": 0.1}]}, "'fc1.bias' and 'fc2.bias'"),
        ({"parameters": {"freeze": ["*"]}, "wrt": ["x"]}, "needs a parameter that trains"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(fields, what, tmp_path):
    with pytest.raises(RecipeError, match=what):
        compile(MODELS / "mlp.legacy.onnx", tmp_path / "f", recipe(**fields))
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(("name", "what"), [("lazy_reset_grad", "an input called"), ("x_grad", "an input called 'x_grad'")])
def test_an_input_that_would_be_taken_for_a_gradient_is_refused(name, what, tmp_path):
    model = onnx.load(MODELS / "mlp.legacy.onnx")
    old = model.graph.input[0].name
    model.graph.input[0].name = name
    for node in model.graph.node:
        node.input[:] = [name if i == old else i for i in node.input]
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(RecipeError, match=what):
        compile(tmp_path / "m.onnx", tmp_path / "f", recipe())


@needs_training_build
def test_names_that_the_layout_wants_for_itself_may_be_the_models(tmp_path):
    """A weight called like another's gradient, an output called loss."""
    names = {"fc1.bias": "fc1.weight_grad", "fc2.bias": "step", "fc2.weight": "params"}
    model = onnx.load(MODELS / "mlp.legacy.onnx")
    names[model.graph.output[0].name] = "loss"
    for node in model.graph.node:
        node.input[:] = [names.get(i, i) for i in node.input]
        node.output[:] = [names.get(o, o) for o in node.output]
    for value in (*model.graph.initializer, *model.graph.output):
        value.name = names.get(value.name, value.name)
    onnx.save(model, tmp_path / "m.onnx")
    compile(tmp_path / "m.onnx", tmp_path / "f", recipe())
    batch = batch_of("mlp.legacy", tmp_path / "f")
    losses, _, _ = losses_of_trainer(tmp_path / "f", batch)
    device = Device(tmp_path / "f" / "ort")
    np.testing.assert_allclose([device.step(batch) for _ in range(STEPS)], losses, rtol=ROUNDING)
    assert device.module.eval().output_names()[1:] == ["loss"]


def test_the_same_recipe_gives_the_same_bytes_and_the_plan_lists_the_files(tmp_path):
    plans = [compile(MODELS / "lenet_bn.legacy_train.onnx", tmp_path / name, recipe()) for name in "ab"]
    files = ["ort/training_model.onnx", "ort/eval_model.onnx", "ort/optimizer_model.onnx", "ort/checkpoint"]
    assert [f.file for f in plans[0].artifacts] == files
    assert plans[0].artifacts == plans[1].artifacts
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
