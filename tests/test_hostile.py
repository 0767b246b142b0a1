"""Input that somebody made to do harm, or that is damaged: refused in words, no code runs, nothing is written elsewhere."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortc.artifacts import compile
from ortc.errors import CheckpointError, DataError, ModelError, OrtcError, PlanError, RecipeError
from ortc.plan import load_plan
from ortc.recipe import parse_recipe
from ortc.runtime.data import read_npz
from ortc.runtime.run import run
from ortc.runtime.trainer import Trainer
from ortc.source import blamed
from ortc.verify import verify

MODEL = """<ir_version: 10, opset_import: ["": 21]> g (float[N,3] x) => (float[N,2] y)
    <float[3,2] w = {1,2,3,4,5,6}> { y = MatMul(x, w) }"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    compile(tmp_path / "m.onnx", tmp_path / "out", parse_recipe({"loss": [{"name": "mse", "labels": "t"}]}))
    data = {"in": np.ones((8, 3), np.float32), "t": np.zeros((8, 2), np.float32)}
    np.savez(tmp_path / "d.npz", **data)
    return tmp_path / "out"


def trained(folder: Path, **more: object) -> None:
    run(folder, data=str(folder.parent / "d.npz"), rename={"in": "x"}, batch_size=4, quiet=True, threads=1, **more)


# ---- plan.json ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.update(checkpoint="../elsewhere"), "checkpoint: .*must stay inside"),
        (lambda p: p.update(checkpoint="/tmp/elsewhere"), "checkpoint: .*must stay inside"),
        (lambda p: p["export"].update(file="x\0y"), "export.file: .*must stay inside"),
        (lambda p: p["losses"][0].update(classes=2, class_weights=[1.0]), "class_weights: .*each of the classes"),
        (lambda p: p["stages"][0].update(index=1), "stages: .*in order"),
        (lambda p: p.update(stages=[]), "stages: .*in order"),
        (lambda p: p["parameters"][0].update(shape=[2**70, 2]), "shape"),
        (lambda p: p["parameters"][0].update(shape=[-3, 2]), "shape"),
        (lambda p: p.update(surprise=1), "surprise"),
    ],
)
def test_a_plan_that_leads_elsewhere_or_makes_no_sense(change: Callable[[dict], None], says: str, folder: Path):
    plan = json.loads((folder / "plan.json").read_text())
    change(plan)
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=says):
        load_plan(folder)


def test_a_plan_that_exports_another_input(folder: Path):
    plan = json.loads((folder / "plan.json").read_text())
    plan["export"]["inputs"][0]["name"] = "nobody"
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="reads 'nobody'"):
        verify(folder, folder.parent / "m.onnx")


# ---- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i["parameters"]["w"].update(file="../../secret.safetensors"),
        lambda i: i["optimizer"]["w"].update(exp_avg=None),
        lambda i: i.update(step=-1),
        lambda i: i.update(position=3),
        lambda i: i.update(files={"../../../etc/passwd": "0"}),
        lambda i: i["settings"].update(best={"step": "../../x"}),
        lambda i: i.update(surprise=1),
    ],
)
def test_an_index_with_the_right_checksum_and_wrong_fields(change: Callable[[dict], None], folder: Path):
    trained(folder, epochs=1)
    path = folder / "checkpoint" / "step-2" / "index.json"
    index = json.loads(path.read_text())
    del index["checksum"]
    change(index)
    index["checksum"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is damaged: index\.json: "):
        Trainer(folder, restore=path.parent)


# ---- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "fetched"])
def test_nothing_is_written_through_a_link_in_the_folder(name: str, folder: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    if name == "fetched":
        victim.mkdir()
    else:
        victim.write_text("precious")
    (folder / name).symlink_to(victim)
    with pytest.raises(OrtcError, match="is a link"):
        trained(folder, epochs=1, fetch=["y"])
    assert not any(victim.iterdir()) if name == "fetched" else victim.read_text() == "precious"


# ---- data --------------------------------------------------------------------------------------------------------------


def npy(shape: str, body: bytes = bytes(96)) -> bytes:
    header = f"{{'descr':'<f4','fortran_order':False,'shape':{shape}}}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + body


@pytest.mark.parametrize(
    "shape", ["(True,3)", "(-1,3)", "(10**30,)", "(9999999999999999999999,)", "(4294967296,4294967296,4)", "((((", "('a',)"]
)
def test_an_array_whose_header_lies(shape: str, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", npy(shape))
    with pytest.raises(DataError, match=r"not a plain array|none that can be"):
        read_npz(tmp_path / "d.npz")


def test_every_damage_of_a_compressed_file_is_told_as_such(tmp_path: Path):
    whole = io.BytesIO()
    np.savez_compressed(whole, x=np.arange(300, dtype=np.float32))
    random, refused = np.random.default_rng(0), 0
    for _ in range(200):
        data = bytearray(whole.getvalue())
        data[random.integers(len(data))] = random.integers(256)
        (tmp_path / "d.npz").write_bytes(data[: random.integers(len(data) // 2, len(data) + 1)])
        try:
            read_npz(tmp_path / "d.npz")
        except DataError:
            refused += 1
    assert refused > 150


# ---- models and recipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 5])
def test_a_weight_without_its_numbers(kept: int, tmp_path: Path):
    model = onnx.parser.parse_model(MODEL)
    del model.graph.initializer[0].float_data[kept:]
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="is damaged: the weight 'w' has "):
        compile(tmp_path / "m.onnx", tmp_path / "out")


def test_what_fails_on_an_invalid_model_is_told_to_be_the_models_fault(tmp_path: Path):
    model = onnx.parser.parse_model(MODEL)
    (tmp_path / "good.onnx").write_bytes(model.SerializeToString())
    model.graph.node[0].output.append("extra")
    (tmp_path / "bad.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"bad\.onnx is not a valid ONNX model"), blamed(tmp_path / "bad.onnx"):
        raise IndexError
    with pytest.raises(IndexError), blamed(tmp_path / "good.onnx"):
        raise IndexError
    with pytest.raises(ModelError, match="do not fit each other: 3 and 4"), blamed(tmp_path / "good.onnx"):
        raise onnx.shape_inference.InferenceError("3 and 4")


@pytest.mark.parametrize(
    ("option", "value"), [("label_smoothing", "/etc/passwd"), ("axis", 1.5), ("reduction", 3), ("class_weights", ["a"])]
)
def test_an_option_of_a_loss_has_its_type(option: str, value: object, tmp_path: Path):
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    recipe = parse_recipe({"loss": [{"name": "cross_entropy", "options": {option: value}}]})
    with pytest.raises(RecipeError, match=f"{option} must be"):
        compile(tmp_path / "m.onnx", tmp_path / "out", recipe)


# ---- what is no harm ---------------------------------------------------------------------------------------------------


def test_an_export_finds_the_last_runs_data_under_its_names(folder: Path, tmp_path: Path):
    trained(folder, epochs=1)
    with Trainer(folder) as trainer:
        trainer.export(tmp_path / "a.onnx")
        trainer.export(tmp_path / "b.onnx", tmp_path / "d.npz", rename={"in": "x"})
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
