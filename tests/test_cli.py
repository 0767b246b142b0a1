"""The whole way through the command line, and what it says to a user's mistakes: one message, exit code 2, no traceback.

Everything happens in a folder whose name, like the files', has spaces and letters beyond ASCII.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

from ortc.plan import load_plan

MODEL = "modèle un.onnx"
STAGES = "étapes 1"
DATA = "données d'été.npz"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The present directory, with a perceptron and data that it can learn."""
    folder = tmp_path / "Übung mit Leerzeichen"
    folder.mkdir()
    monkeypatch.chdir(folder)
    save(perceptron(), MODEL)
    np.savez(DATA, **samples())
    return folder


@pytest.fixture
def refused(ortc):
    """Runs a command that must end with one message for people; returns the message."""

    def run(*arguments):
        before = sorted(Path().rglob("*"))
        code, out, err = ortc(*arguments)
        assert code == 2, out + err
        assert err.startswith("ortc: ")
        assert "Traceback" not in err
        assert sorted(Path().rglob("*")) == before, "something was left behind"
        return err.removeprefix("ortc: ").rstrip()

    return run


def samples(count: int = 40) -> dict[str, np.ndarray]:
    """Points, and the largest of their first three coordinates."""
    x = np.random.default_rng(1).standard_normal((count, 4)).astype(np.float32)
    return {"x": x, "labels": x[:, :3].argmax(axis=1).astype(np.int64)}


def model(nodes, weights, inputs, outputs, opsets=(("", 17),)) -> onnx.ModelProto:
    """A model of nodes, weights by name, and inputs and outputs as (name, type, shape)."""
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items()]
    ports = [[h.make_tensor_value_info(*port) for port in ports] for ports in (inputs, outputs)]
    graph = h.make_graph(nodes, "graph", *ports, tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid(*opset) for opset in opsets], ir_version=8)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def perceptron() -> onnx.ModelProto:
    return model(
        [
            h.make_node("MatMul", ["x", "hidden.weight"], ["product"], name="hidden"),
            h.make_node("Add", ["product", "hidden.bias"], ["sum"], name="shift"),
            h.make_node("Relu", ["sum"], ["active"], name="relu"),
            h.make_node("MatMul", ["active", "out.weight"], ["logits"], name="out"),
        ],
        {"hidden.weight": floats(4, 8), "hidden.bias": floats(8), "out.weight": floats(8, 3)},
        [("x", T.FLOAT, ["batch", 4])],
        [("logits", T.FLOAT, ["batch", 3])],
    )


def one_layer(*nodes: onnx.NodeProto, output: str, extra: dict | None = None) -> onnx.ModelProto:
    """``product = x · w`` and what the nodes make of it."""
    first = h.make_node("MatMul", ["x", "w"], ["product"], name="matmul")
    ports = [("x", T.FLOAT, ["batch", 4])], [(output, T.FLOAT, ["batch", 3])]
    return model([first, *nodes], {"w": floats(4, 3), **(extra or {})}, *ports)


def save(proto: onnx.ModelProto, path: str) -> None:
    Path(path).write_bytes(proto.SerializeToString())


# ---- the whole way ------------------------------------------------------------------------------------------------------


def test_the_whole_way(ortc):
    code, out, _ = ortc("inspect", MODEL)
    assert code == 0
    assert all(name in out for name in ("hidden.weight", "hidden.bias", "out.weight", "trains", "cross_entropy"))

    code, out, _ = ortc("compile", MODEL, "-o", STAGES, "--lr", "0.05")
    assert code == 0
    assert "cross_entropy of output 'logits'" in out
    assert f"next: ortc run '{STAGES}' --data" in out  # can be pasted into a shell

    assert ortc("run", STAGES, "--data", DATA, "--batch-size", "8", "--epochs", "2")[0] == 0
    code, out, _ = ortc("run", STAGES, "--data", DATA, "--batch-size", "8", "--epochs", "20", "--eval-data", DATA)
    assert code == 0
    assert "continuing from" in out
    assert "step-10" in out
    lines = [json.loads(line) for line in Path(STAGES, "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 100
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:5])
    assert "nothing to do" in ortc("run", STAGES, "--data", DATA, "--batch-size", "8", "--epochs", "20")[1]

    code, out, _ = ortc("export", STAGES, "-o", "entraîné 1.onnx", "--data", DATA)
    assert code == 0
    assert "weights of step 100" in out
    exported = onnx.load("entraîné 1.onnx")
    onnx.checker.check_model(exported, full_check=True)
    trained = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    assert set(trained) == {"hidden.weight", "hidden.bias", "out.weight"}
    assert not np.array_equal(trained["out.weight"], floats(8, 3))
    (logits,) = onnx.reference.ReferenceEvaluator(exported).run(None, {"x": samples()["x"]})
    assert np.mean(logits.argmax(axis=1) == samples()["labels"]) > 0.9
    assert "step-" not in ortc("inspect", STAGES)[2]


def test_gradients_are_finite_differences(ortc):
    batch = {k: v[:8] for k, v in samples().items()}
    np.savez("lot.npz", **batch)
    code, _, _ = ortc("grad", MODEL, "--data", "lot.npz", "-o", "gradiënten.npz", "--wrt", "x")
    assert code == 0
    with np.load("gradiënten.npz") as archive:
        found = dict(archive)
    assert set(found) == {"loss", "hidden.weight", "hidden.bias", "out.weight", "x"}

    def loss(w1, b1, w2, x):
        logits = np.maximum(x @ w1 + b1, 0) @ w2
        log_prob = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return -log_prob[np.arange(len(x)), batch["labels"]].mean()

    names = ["hidden.weight", "hidden.bias", "out.weight", "x"]
    values = [np.float64(v) for v in (floats(4, 8), floats(8), floats(8, 3), batch["x"])]
    assert found["loss"] == pytest.approx(loss(*values), rel=1e-6)
    for i, name in enumerate(names):
        numeric = np.zeros_like(values[i])
        for at in np.ndindex(values[i].shape):
            moved = [[v.copy() for v in values] for _ in range(2)]
            moved[0][i][at] += 1e-6
            moved[1][i][at] -= 1e-6
            numeric[at] = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        np.testing.assert_allclose(found[name], numeric, atol=1e-5 * np.abs(numeric).max())


def test_the_recipe_in_force_round_trips(ortc):
    options = ["--loss", "cross_entropy:axis=1,label_smoothing=0.1", "--freeze", "*.bias", "--optimizer", "sgd:momentum=0.9"]
    code, out, _ = ortc("compile", MODEL, *options, "--lr", "0.2", "--seed", "7", "--write-recipe")
    assert code == 0
    Path("recette é.toml").write_text(out, encoding="utf-8")
    assert ortc("compile", MODEL, "--recipe", "recette é.toml", "--write-recipe")[1] == out
    assert "base = 0.5" in ortc("compile", MODEL, "--recipe", "recette é.toml", "--lr", "0.5", "--write-recipe")[1]
    assert ortc("compile", MODEL, "-o", "a", *options, "--lr", "0.2", "--seed", "7")[0] == 0
    assert ortc("compile", MODEL, "-o", "b", "--recipe", "recette é.toml")[0] == 0
    assert Path("a/plan.json").read_bytes() == Path("b/plan.json").read_bytes()
    assert [p.name for p in load_plan("a").parameters if not p.trainable] == ["hidden.bias"]


def test_the_installed_command_says_a_mistake_without_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "ortc.cli", "inspect", "rien.onnx"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "ortc: there is no file rien.onnx\n")


def test_a_model_may_own_any_name(ortc):
    """Values, weights and nodes called as ortc's own, and an input called as the targets are."""
    nodes = [
        h.make_node("MatMul", ["labels", "W"], ["W.grad"]),
        h.make_node("Add", ["W.grad", "lr"], ["W_grad"], name="loss"),
        h.make_node("Tanh", ["W_grad"], ["step"], name="step"),
        h.make_node("MatMul", ["step", "seed"], ["loss"], name="optimizer"),
    ]
    weights = {"W": floats(3, 5), "lr": floats(5), "seed": floats(5, 2)}
    save(model(nodes, weights, [("labels", T.FLOAT, ["N", 3])], [("loss", T.FLOAT, ["N", 2])]), "names.onnx")
    code, out, _ = ortc("compile", "names.onnx", "-o", "names", "--loss", "mse")
    assert code == 0
    assert "targets in 'labels_target'" in out
    x, t = floats(6, 3), floats(6, 2)
    np.savez("names.npz", labels=x, labels_target=t)
    assert ortc("run", "names", "--data", "names.npz", "--batch-size", "6", "--steps", "3")[0] == 0
    assert ortc("export", "names", "-o", "names-trained.onnx", "--data", "names.npz")[0] == 0
    assert ortc("grad", "names.onnx", "--loss", "mse", "--data", "names.npz", "-o", "g.npz")[0] == 0
    with np.load("g.npz") as g:
        y = np.tanh(x @ weights["W"] + weights["lr"]) @ weights["seed"]
        assert g["loss"] == pytest.approx(np.mean((y - t) ** 2), rel=1e-5)
        assert set(g.files) == {"loss", "W", "lr", "seed"}


# ---- folders and files ----------------------------------------------------------------------------------------------------


def test_an_output_that_exists_is_replaced_whole_by_force_alone(ortc, refused):
    assert ortc("compile", MODEL, "-o", STAGES)[0] == 0
    Path(STAGES, "stray").write_text("of the first compilation")
    message = refused("compile", MODEL, "-o", STAGES)
    assert "exists already" in message
    assert "--force" in message
    assert ortc("compile", MODEL, "-o", STAGES, "--force", "--optimizer", "sgd")[0] == 0
    assert not Path(STAGES, "stray").exists()
    assert load_plan(STAGES).recipe.optimizer.name == "sgd"

    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("ten years")
    assert "no plan.json" in refused("compile", MODEL, "-o", "mine", "--force")
    assert "does not exist" in refused("compile", MODEL, "-o", "no/where")

    for command in (["export", STAGES, "-o", "x.onnx"], ["grad", MODEL, "--data", DATA, "-o", "x.npz"]):
        assert ortc(*command)[0] == 0
        assert "exists already" in refused(*command)
        assert ortc(*command, "--force")[0] == 0


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_full_disk_leaves_nothing_behind(failing, ortc, refused, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    message = refused("compile", MODEL, "-o", STAGES)
    assert STAGES in message
    assert "No space left on device" in message
    monkeypatch.undo()


def run_with_a_full_disk(room: int, *arguments: str) -> str:
    """A real one: the process may write files of ``room`` bytes only. Returns the message."""
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); sys.dont_write_bytecode = True; "
        f"from ortc.cli import main; sys.argv = {['ortc', *arguments]!r}; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
def test_a_write_that_the_system_cuts_short_leaves_nothing_behind(ortc):
    assert ortc("compile", MODEL, "-o", STAGES)[0] == 0
    before = sorted(Path().iterdir())
    message = run_with_a_full_disk(1000, "compile", MODEL, "-o", "other")
    assert message == "ortc: cannot write other: File too large; nothing was left behind\n"
    message = run_with_a_full_disk(200, "export", STAGES, "-o", "x.onnx")
    assert message == "ortc: cannot write x.onnx: File too large; nothing was left behind\n"
    run_with_a_full_disk(1000, "grad", MODEL, "--data", DATA, "-o", "x.npz")
    assert sorted(Path().iterdir()) == before


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
@pytest.mark.parametrize(("room", "what"), [(100, "metrics"), (700, "checkpoint")])
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(room, what, ortc):
    assert ortc("compile", MODEL, "-o", STAGES)[0] == 0
    command = ["run", STAGES, "--data", DATA, "--batch-size", "20", "--epochs", "2", "--quiet"]
    assert what in run_with_a_full_disk(room, *command)
    assert ortc(*command)[0] == 0
    steps = [json.loads(line)["step"] for line in Path(STAGES, "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_folder_that_is_no_output_is_named(refused):
    Path("vide").mkdir()
    assert "vide has no plan.json" in refused("run", "vide", "--data", DATA)
    assert "no plan.json" in refused("export", "vide", "-o", "x.onnx")
    assert "no plan.json" in refused("inspect", "vide")


# ---- models ---------------------------------------------------------------------------------------------------------------


def damaged(kind: str) -> None:
    """Write ``bad.onnx``."""
    whole = Path(MODEL).read_bytes()
    if kind == "text":
        Path("bad.onnx").write_text("Dear reader, this is a letter.\n" * 20)
    elif kind == "image":
        Path("bad.onnx").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    elif kind == "empty":
        Path("bad.onnx").touch()
    elif kind == "truncated":
        Path("bad.onnx").write_bytes(whole[: len(whole) // 2])
    elif kind == "folder":
        Path("bad.onnx").mkdir()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("text", "is not an ONNX file"),
        ("image", "is not an ONNX file"),
        ("empty", "is empty"),
        ("truncated", "is cut off"),
        ("folder", "is a folder"),
        ("missing", "there is no file"),
    ],
)
def test_a_file_that_is_no_model(kind, says, refused):
    damaged(kind)
    for command in (["compile", "bad.onnx", "-o", "out"], ["inspect", "bad.onnx"]):
        if kind == "folder" and command[0] == "inspect":
            continue  # that is how output folders are inspected
        message = refused(*command)
        assert "bad.onnx" in message
        assert says in message


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("poids.bin", "is missing"),
        ("../poids.bin", "outside of the model's folder"),
        ("/etc/hostname", "outside of the model's folder"),
        ("court.bin", "is cut off"),
    ],
)
def test_external_data_that_cannot_be_used(location, says, refused):
    proto = perceptron()
    for tensor in proto.graph.initializer:
        size = len(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, location, offset=0, length=size)
        tensor.ClearField("raw_data")
    save(proto, "externe.onnx")
    Path("../poids.bin").write_bytes(bytes(4096))
    Path("court.bin").write_bytes(bytes(16))
    message = refused("compile", "externe.onnx", "-o", "out")
    assert says in message
    assert "'hidden.weight'" in message
    assert Path(location).name in message


def test_every_operator_without_a_gradient_is_listed_with_its_path(ortc, refused):
    nodes = [
        h.make_node("MatMul", ["x", "w1"], ["a"], name="première"),
        h.make_node("Swirl", ["a"], ["b"], name="tourbillon", domain="acme"),
        h.make_node("MatMul", ["b", "w2"], ["c"], name="seconde"),
        h.make_node("Twist", ["c"], ["y"], name="torsion", domain="acme"),
    ]
    proto = model(
        nodes, {"w1": floats(4, 4), "w2": floats(4, 3)}, [("x", T.FLOAT, ["n", 4])], [("y", T.FLOAT, ["n", 3])],
        [("", 17), ("acme", 1)],
    )  # fmt: skip
    shapes = {"a": 4, "b": 4, "c": 3}
    proto.graph.value_info.extend(h.make_tensor_value_info(k, T.FLOAT, ["n", v]) for k, v in shapes.items())
    save(proto, "acme.onnx")
    message = refused("compile", "acme.onnx", "-o", "out", "--loss", "mse")
    lines = message.splitlines()
    assert any("'tourbillon'" in line and "acme::Swirl" in line for line in lines)
    assert any("'torsion'" in line and "acme::Twist" in line for line in lines)
    assert any("torsion <- seconde <- tourbillon <- première <- w1" in line for line in lines), message
    assert "--freeze" in message
    only = refused("compile", "acme.onnx", "-o", "out", "--loss", "mse", "--freeze", "w1")
    assert "torsion" in only
    assert "tourbillon" not in only


def test_nothing_to_train(refused):
    save(model([h.make_node("Relu", ["x"], ["y"])], {}, [("x", T.FLOAT, ["n", 3])], [("y", T.FLOAT, ["n", 3])]), "none.onnx")
    assert "holds no weights" in refused("compile", "none.onnx", "-o", "out")
    message = refused("compile", MODEL, "-o", "out", "--freeze", "*")
    assert "no trainable parameter" in message
    assert "hidden.bias: frozen by the recipe" in message
    assert "--wrt" in message


def test_integer_only_and_quantised_models(refused):
    integer = model(
        [h.make_node("MatMulInteger", ["x", "w"], ["y"])], {"w": np.ones((4, 3), np.int8)},
        [("x", T.INT8, ["n", 4])], [("y", T.INT32, ["n", 3])],
    )  # fmt: skip
    quantised = model(
        [
            h.make_node("DequantizeLinear", ["w", "scale", "zero"], ["weight"], name="dequantise"),
            h.make_node("MatMul", ["x", "weight"], ["y"]),
        ],
        {"w": np.ones((4, 3), np.int8), "scale": np.float32(0.1), "zero": np.int8(0)},
        [("x", T.FLOAT, ["n", 4])],
        [("y", T.FLOAT, ["n", 3])],
    )
    for proto, names in ((integer, ["'y' (int32)"]), (quantised, ["w: its elements are int8", "scale"])):
        save(proto, "int.onnx")
        message = refused("compile", "int.onnx", "-o", "out")
        assert "integer-only or quantised model cannot be trained" in message
        assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--loss", "crossentropy"], ["crossentropy", "cross_entropy"]),
        (["--loss", "cross_entropy:smoothing=1"], ["smoothing", "label_smoothing"]),
        (["--loss", "mse:output=logit"], ["'logit'", "logits"]),
        (["--loss", "cross_entropy:axis=5"], ["axis", "5"]),
        (["--loss", "cross_entropy:labels=x"], ["'x'", "a data input"]),
        (["--loss", "cross_entropy:labels=logits"], ["'logits'", "an output"]),
        (["--loss", "none:output=logits"], ["'logits'", "scalar", "['batch', 3]"]),
        (["--optimizer", "adamx"], ["adamx", "adamw"]),
        (["--optimizer", "adamw:beta3=1"], ["beta3", "beta1"]),
        (["--train", "nothing.*"], ["'nothing.*'"]),
        (["--freeze", "nothing.*"], ["'nothing.*'"]),
        (["--wrt", "y"], ["'y'", "x"]),
        (["--batch-norm", "off"], ["batch_norm", "'batch' or 'frozen'"]),
        (["--schedule", "sine"], ["learning_rate.schedule", "cosine"]),
        (["--lr", "-1"], ["learning_rate.base"]),
        (["--target", "tpu"], ["tpu", "ort-training"]),
        (["--recipe", "rien.toml"], ["rien.toml"]),
    ],
)
def test_a_wrong_option_is_named_with_what_there_is(options, says, refused):
    message = refused("compile", MODEL, "-o", "out", *options)
    assert all(text in message for text in says), message


def test_a_recipe_is_checked_field_by_field(refused):
    Path("bad.toml").write_text('colour = "blue"\n[learning_rate]\nwarmup = "long"\n', encoding="utf-8")
    message = refused("compile", MODEL, "-o", "out", "--recipe", "bad.toml")
    assert "bad.toml: colour" in message
    assert "bad.toml: learning_rate.warmup" in message
    Path("bad.toml").write_text("= 3", encoding="utf-8")
    assert "bad.toml is not valid TOML" in refused("compile", MODEL, "-o", "out", "--recipe", "bad.toml")


# ---- data -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": None}, ["lacks the labels 'labels'", "it has 'x'"]),
        ({"x": None}, ["lacks the input 'x'", "it has 'labels'"]),
        ({"labels": np.zeros(40, np.float32)}, ["'labels' has type float32", "int64"]),
        ({"labels": np.zeros((40, 3), np.int64)}, ["'labels' has shape [", "[batch]"]),
        ({"labels": np.full(40, 3)}, ["'labels' holds class 3", "3 classes", "0 to 2"]),
        ({"labels": np.full(40, -1)}, ["'labels' holds class -1", "0 to 2"]),
        ({"labels": np.zeros(39, np.int64)}, ["labels"]),
        ({"x": np.zeros((40, 5), np.float32)}, ["'x' has shape [", "dimension 1 must be 4"]),
        ({"x": np.zeros((40, 4), np.int64)}, ["'x' has type int64", "float32"]),
        ({"x": np.array([{}] * 40, dtype=object)}, ["'x' "]),
    ],
)
def test_data_that_does_not_fit(change, says, ortc, refused):
    assert ortc("compile", MODEL, "-o", STAGES)[0] == 0
    arrays = {k: v for k, v in {**samples(), **change}.items() if v is not None}
    np.savez("bad.npz", **arrays)
    Path(STAGES, "metrics.jsonl").touch()
    Path(STAGES, "checkpoint", ".lock").touch()
    for command in (["run", STAGES, "--data", "bad.npz", "--quiet"], ["grad", MODEL, "--data", "bad.npz", "-o", "g.npz"]):
        code, out, err = ortc(*command)
        assert (code, "Traceback" in err) == (2, False), out + err
        assert all(text in err for text in says), err
    assert not Path("g.npz").exists()
    assert sorted(p.name for p in Path(STAGES, "checkpoint").glob("step-*")) == ["step-0"]


def test_data_that_is_not_there(ortc):
    assert ortc("compile", MODEL, "-o", STAGES)[0] == 0
    Path("text.npz").write_text("not an archive")
    for data in ("rien.npz", "text.npz", "no_such_module:batches"):
        code, _, err = ortc("run", STAGES, "--data", data)
        assert (code, "Traceback" in err) == (2, False)
        assert data.split(":")[0] in err


def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(ortc):
    assert ortc("compile", MODEL, "-o", STAGES)[0] == 0
    arrays = samples()
    arrays["x"][20, 2] = np.nan
    np.savez("nan.npz", **arrays)
    command = ["run", STAGES, "--data", "nan.npz", "--batch-size", "4", "--quiet"]
    code, _, err = ortc(*command)
    assert code == 2
    step = int(err.split("step ")[1].split(":")[0])
    assert "the loss is nan" in err
    assert "gradients of 'hidden.weight'" in err
    assert f"The weights are those of step {step - 1}" in err
    assert "NaN or infinity, in 'x'" in err
    kept = {p.name for p in Path(STAGES, "checkpoint").glob("step-*")}
    assert kept == {"step-0", f"step-{step - 1}"}

    np.savez("huge.npz", x=samples()["x"] * np.float32(1e37), labels=samples()["labels"])
    code, _, err = ortc("run", STAGES, "--data", "huge.npz", "--restore", "none", "--quiet", "--batch-size", "40")
    assert code == 2
    assert "step 1: the loss is" in err
    assert "try a lower learning rate" in err


# ---- warnings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "loss"), [("Softmax", "cross_entropy"), ("LogSoftmax", "cross_entropy"), ("Sigmoid", "bce_with_logits")]
)
def test_probabilities_before_a_loss_of_logits_warn(operator, loss, ortc):
    save(one_layer(h.make_node(operator, ["product"], ["p"], name="activation"), output="p"), "p.onnx")
    code, out, _ = ortc("compile", "p.onnx", "-o", "p", "--loss", loss)
    assert code == 0
    assert f"warning: output 'p' comes from {operator} (node 'activation')" in out
    assert len(load_plan("p").warnings) == 1


@pytest.mark.parametrize(("momentum", "says"), [(0.0, "the last batch alone"), (1.0, "never change"), (0.9, None)])
def test_batch_norm_momentum_at_its_ends_warns(momentum, says, ortc):
    statistics = {"g": np.ones(3), "b": np.zeros(3), "m": np.zeros(3), "v": np.ones(3)}
    node = h.make_node("BatchNormalization", ["product", "g", "b", "m", "v"], ["y"], name="bn", momentum=momentum)
    save(one_layer(node, output="y", extra={k: v.astype(np.float32) for k, v in statistics.items()}), "bn.onnx")
    code, out, _ = ortc("compile", "bn.onnx", "-o", "bn")
    assert code == 0
    assert ("warning: node 'bn' (BatchNormalization) has momentum" in out) == (says is not None)
    assert says is None or says in out


def test_accumulate_is_another_name_of_micro_batches(ortc):
    texts = [ortc("compile", MODEL, option, 4, "--write-recipe")[1] for option in ("--accumulate", "--micro-batches")]
    assert texts[0] == texts[1]
    assert "micro_batches = 4" in texts[0]
