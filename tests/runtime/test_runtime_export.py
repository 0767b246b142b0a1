"""The exported model: read by the onnx package, run by ONNX Runtime, equal to the evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny

from ortc.errors import DataError, OrtcError
from ortc.plan import Plan, dump_plan
from ortc.runtime import export
from ortc.runtime.trainer import Trainer


@pytest.fixture
def trainer(tmp_path: Path):
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f") as trainer:
        for _ in range(5):
            trainer.step(tiny.data())
        yield trainer


def outputs(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"x": x})[0]


def test_the_file_is_the_model_with_the_trained_weights(trainer: Trainer, tmp_path: Path):
    path = tmp_path / "trained ü.onnx"
    result = trainer.export(path)
    assert result.loss == pytest.approx(result.evaluation_loss, rel=1e-5)
    assert "weights of step 5" in str(result)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    found = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert set(found) == {*tiny.SHAPES, tiny.BUFFER}
    for name, array in found.items():
        assert array.dtype == np.float32
        assert np.array_equal(array, trainer.parameters[name])
    batch = tiny.data()
    expected = trainer.evaluate(batch).outputs["logits"]
    np.testing.assert_allclose(outputs(path, batch["x"]), expected, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", path.name]


def test_large_models_have_their_weights_in_a_file_beside(trainer: Trainer, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(export, "LARGEST_FILE", 100)
    trainer.export(tmp_path / "big.onnx")
    assert (tmp_path / "big.onnx.data").stat().st_size > 4096
    onnx.checker.check_model(str(tmp_path / "big.onnx"))
    batch = tiny.data()
    expected = trainer.evaluate(batch).outputs["logits"]
    np.testing.assert_allclose(outputs(tmp_path / "big.onnx", batch["x"]), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(OrtcError, match=r"big\.onnx exists"):
        trainer.export(tmp_path / "big.onnx")
    (tmp_path / "big.onnx").unlink()
    with pytest.raises(OrtcError, match=r"big\.onnx\.data exists"):
        trainer.export(tmp_path / "big.onnx")


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "int8", "uint8", "bool", "int32"])
def test_initializers_of_every_type_and_shape(dtype: str, tmp_path: Path):
    arrays = {
        "scalar ü": np.array(1, dtype),
        "long": np.arange(300).astype(dtype),
        "cube": np.arange(24).reshape(2, 3, 4).astype(dtype),
        "empty": np.zeros((0, 5), dtype),
    }
    with open(tmp_path / "m", "wb") as file:
        for name, array in arrays.items():
            export._write_initializer(file, name, array, None, "")
    tensors = onnx.load(tmp_path / "m").graph.initializer
    assert [t.name for t in tensors] == list(arrays)
    for tensor in tensors:
        found = onnx.numpy_helper.to_array(tensor)
        assert found.dtype == dtype
        assert np.array_equal(found, arrays[tensor.name])
        assert found.shape == arrays[tensor.name].shape


def test_it_is_checked_on_the_given_data(trainer: Trainer, tmp_path: Path):
    np.savez(tmp_path / "d.npz", **tiny.data(20))
    result = trainer.export(tmp_path / "o.onnx", tmp_path / "d.npz")
    assert result.evaluation_loss == trainer.evaluate(tiny.data(20)).loss
    with pytest.raises(DataError):
        trainer.export(tmp_path / "p.onnx", tmp_path / "gone.npz")
    assert not (tmp_path / "p.onnx").exists()


def test_a_wrong_export_is_noticed_and_leaves_nothing(tmp_path: Path, trainer: Trainer, monkeypatch):
    write = export._write_initializer

    def damaged(model, name, array, *rest):
        write(model, name, array * np.float32(1.01 if name == "fc/2.weight" else 1), *rest)

    monkeypatch.setattr(export, "_write_initializer", damaged)
    (tmp_path / "o").mkdir()
    with pytest.raises(OrtcError, match=r"the exported model has loss .* where the evaluation has"):
        trainer.export(tmp_path / "o" / "x.onnx")
    assert list((tmp_path / "o").iterdir()) == []


def test_an_existing_file_is_replaced_only_by_force(trainer: Trainer, tmp_path: Path):
    path = tmp_path / "o.onnx"
    path.write_text("mine")
    with pytest.raises(OrtcError, match=r"o\.onnx exists already.*--force"):
        trainer.export(path)
    assert path.read_text() == "mine"
    trainer.export(path, force=True)
    onnx.load(path)


def test_a_folder_that_is_missing_is_told(trainer: Trainer, tmp_path: Path):
    with pytest.raises(OrtcError, match=r"cannot write in .*gone"):
        trainer.export(tmp_path / "gone" / "o.onnx")


def test_the_template_must_be_the_compiled_one(tmp_path: Path):
    plan = tiny.make_folder(tmp_path / "f")
    data = plan.model_dump()
    data["export"]["sha256"] = "0" * 64
    (tmp_path / "f" / "plan.json").write_text(dump_plan(Plan.model_validate(data)), encoding="utf-8")
    with Trainer(tmp_path / "f") as trainer, pytest.raises(OrtcError, match=r"export\.template is not the file"):
        trainer.export(tmp_path / "o.onnx")


def test_the_check_takes_the_data_of_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A made-up batch need not fit a model; the run's own does. Only files are remembered: a checkpoint names no code."""
    from ortc.runtime import trainer as module
    from ortc.runtime.run import run

    tiny.make_folder(tmp_path / "f")
    np.savez(tmp_path / "data.npz", **tiny.data())
    run(tmp_path / "f", data=str(tmp_path / "data.npz"), steps=2, quiet=True)

    def refuse(ports: object) -> None:
        raise DataError("a batch was made up")

    monkeypatch.setattr(module, "synthetic_batch", refuse)
    with Trainer(tmp_path / "f") as trainer:
        trainer.export(tmp_path / "a.onnx")
    (tmp_path / "data.npz").unlink()
    with Trainer(tmp_path / "f") as trainer, pytest.raises(DataError, match="made up"):
        trainer.export(tmp_path / "b.onnx")
