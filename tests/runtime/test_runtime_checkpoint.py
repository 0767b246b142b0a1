"""Saving, restoring, and what happens to damaged checkpoints and full disks."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from ortc.errors import CheckpointError
from ortc.runtime import checkpoint
from ortc.runtime.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with checkpoints of the steps 1 to 3."""
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f", seed=9) as trainer:
        for _ in range(3):
            trainer.step(tiny.data())
            trainer.save((2, trainer.step_number), {"some": ["setting"]})
    return tmp_path / "f"


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoint").iterdir())


def test_a_restored_trainer_goes_on_as_if_it_had_never_stopped(folder: Path):
    with Trainer(folder) as trainer:
        assert trainer.step_number == 3
        assert trainer.seed == 9
        assert trainer.progress.position == (2, 3)
        assert trainer.progress.settings == {"some": ["setting"]}
        restored = trainer.step(tiny.data())
        weights = {name: a.copy() for name, a in trainer.parameters.items()}
    with Trainer(folder, restore="none", seed=9) as trainer:
        assert trainer.step_number == 0
        for _ in range(4):
            result = trainer.step(tiny.data())
        assert result == restored
        assert all(np.array_equal(a, weights[name]) for name, a in trainer.parameters.items())


def test_the_files_are_keyed_by_the_models_names(folder: Path):
    saved = folder / "checkpoint" / "step-3"
    assert set(load_file(saved / "parameters.safetensors")) == {*tiny.SHAPES, tiny.BUFFER}
    states = load_file(saved / "optimizer.safetensors")
    assert set(states) == {f"{name}/{slot}" for name in tiny.SHAPES for slot in ("exp_avg", "exp_avg_sq")}
    assert states["fc/1.weight/exp_avg"].any()
    index = json.loads((saved / "index.json").read_text())
    assert index["parameters"]["fc/1.weight"] == {
        "dtype": "float32",
        "shape": [4, 8],
        "file": "parameters.safetensors",
        "offset": [0, 0],
    }
    assert index["optimizer"]["lr"]["exp_avg_sq"]["file"] == "optimizer.safetensors"


def test_the_last_ones_and_the_first_are_kept(folder: Path):
    with Trainer(folder, keep=2) as trainer:
        trainer.step(tiny.data())
        trainer.save()
    assert steps(folder) == ["step-0", "step-3", "step-4"]


def test_a_path_restores_that_checkpoint(folder: Path):
    with Trainer(folder, restore=folder / "checkpoint" / "step-2") as trainer:
        assert trainer.step_number == 2


def test_after_going_back_the_new_checkpoint_is_the_latest(folder: Path):
    with Trainer(folder, restore="none") as trainer:
        trainer.step(tiny.data(seed=5))
        trainer.save()
        weights = {name: a.copy() for name, a in trainer.parameters.items()}
    with Trainer(folder) as trainer:
        assert trainer.step_number == 1
        assert all(np.array_equal(a, weights[name]) for name, a in trainer.parameters.items())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": lambda c: flip(c / "parameters.safetensors"),
    "flipped state": lambda c: flip(c / "optimizer.safetensors"),
    "cut off": lambda c: os.truncate(c / "parameters.safetensors", 100),
    "missing file": lambda c: (c / "optimizer.safetensors").unlink(),
    "no index": lambda c: (c / "index.json").unlink(),
    "bad json": lambda c: os.truncate(c / "index.json", 50),
    "other json": lambda c: (c / "index.json").write_text("[]"),
    "changed index": lambda c: (c / "index.json").write_text((c / "index.json").read_text().replace('"step": 3', '"step": 4')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_told(damage: str, folder: Path, capsys):
    DAMAGE[damage](folder / "checkpoint" / "step-3")
    with Trainer(folder) as trainer:
        assert trainer.step_number == 2
        told = capsys.readouterr().err
        assert "step-3 is damaged" in told
        assert "the checkpoint before it is taken" in told
        trainer.step(tiny.data())
        trainer.save()
    with Trainer(folder) as trainer:
        assert trainer.step_number == 3
    assert capsys.readouterr().err == ""


def test_when_all_are_damaged_each_is_told(folder: Path):
    for name in steps(folder):
        flip(folder / "checkpoint" / name / "parameters.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)step-3.*step-2.*step-1.*step-0"):
        Trainer(folder)


def test_a_damaged_checkpoint_asked_for_by_path_is_an_error(folder: Path):
    flip(folder / "checkpoint" / "step-2" / "parameters.safetensors")
    with pytest.raises(CheckpointError, match="hash differs"):
        Trainer(folder, restore=folder / "checkpoint" / "step-2")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        Trainer(folder, restore=folder / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path):
    tiny.make_folder(tmp_path / "other", buffer=False)
    with pytest.raises(CheckpointError, match=r"step-3 belongs to another model than tiny\.onnx.*'running'"):
        Trainer(tmp_path / "other", restore=folder / "checkpoint" / "step-3")


def test_states_of_another_optimizer_start_at_zero_and_that_is_told(folder: Path, tmp_path: Path, capsys):
    tiny.make_folder(tmp_path / "sgd", optimizer="sgd")
    with Trainer(tmp_path / "sgd", restore=folder / "checkpoint" / "step-3") as trainer:
        assert trainer.step_number == 3
        assert "lacks 4 optimizer states" in capsys.readouterr().err
        trainer.step(tiny.data())


def test_what_a_killed_save_left_is_cleaned_up(folder: Path):
    root = folder / "checkpoint"
    shutil.copytree(root / "step-1", root / ".step-4.new")
    shutil.copytree(root / "step-2", root / ".step-2.old")
    os.rename(root / "step-1", root / ".step-1.old")  # killed between the two renames of a replacement
    with Trainer(folder, exclusive=True):
        assert steps(folder) == ["step-0", "step-1", "step-2", "step-3"]


@pytest.mark.parametrize("when", range(6))
def test_a_full_disk_leaves_the_earlier_checkpoints(when: int, folder: Path, monkeypatch):
    """Whichever sync it is that fails."""
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == when + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Trainer(folder) as trainer:
        trainer.step(tiny.data())
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "fsync", full)
            if when < 4:  # two files of tensors, the index, their folder
                with pytest.raises(CheckpointError, match=r"No space left.*--keep\); the earlier checkpoints are intact"):
                    trainer.save()
            elif when == 4:  # the folder of the checkpoints: it may not last, so it is not reported as saved
                with pytest.raises(CheckpointError):
                    trainer.save()
            else:
                trainer.save()
                assert len(calls) == 5
        if when < 4:
            assert steps(folder) == ["step-0", "step-1", "step-2", "step-3"]
        trainer.save()
    with Trainer(folder) as trainer:
        assert trainer.step_number == 4
    assert steps(folder) == ["step-0", "step-2", "step-3", "step-4"]


def test_a_real_write_error_is_told(folder: Path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Trainer(folder) as trainer:
        trainer.step(tiny.data())
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"cannot save .*step-4: File too large; the earlier"):
                trainer.save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps(folder) == ["step-0", "step-1", "step-2", "step-3"]
    with Trainer(folder) as trainer:
        assert trainer.step_number == 3


def one_file(folder: Path, path: Path, **changes: np.ndarray | None) -> Path:
    """The tensors of step 3 in one file, as a loop in another language writes it."""
    saved = folder / "checkpoint" / "step-3"
    tensors = load_file(saved / "parameters.safetensors") | load_file(saved / "optimizer.safetensors") | changes
    save_file({name: a for name, a in tensors.items() if a is not None}, path, metadata={"step": "3"})
    return path


def test_a_single_file_restores_as_the_checkpoint_does(folder: Path, tmp_path: Path):
    file = one_file(folder, tmp_path / "all.safetensors")
    losses = []
    for restore in ("latest", file):
        with Trainer(folder, restore=restore, seed=9) as trainer:
            assert trainer.step_number == 3
            losses.append([trainer.step(tiny.data()).loss for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_single_file_may_have_no_states_and_no_step(folder: Path, tmp_path: Path):
    """The weights alone: the optimizer starts anew."""
    weights = load_file(folder / "checkpoint" / "step-3" / "parameters.safetensors")
    save_file(weights, tmp_path / "weights.safetensors")
    with Trainer(folder, restore=tmp_path / "weights.safetensors") as trainer:
        assert trainer.step_number == 0
        assert all(np.array_equal(array, weights[name]) for name, array in trainer.parameters.items())
        trainer.save()
    states = load_file(folder / "checkpoint" / "step-0" / "optimizer.safetensors")
    assert states
    assert not any(array.any() for array in states.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": None}, "lacks the parameter 'lr'"),
        ({"other": np.zeros(2, np.float32)}, "it has 'other', the model has not"),
        ({"lr": np.zeros(2, np.float32)}, "'lr'"),
    ],
)
def test_a_single_file_of_another_model_is_refused(changes: dict, said: str, folder: Path, tmp_path: Path):
    file = one_file(folder, tmp_path / "other.safetensors", **changes)
    with pytest.raises(CheckpointError, match=said):
        Trainer(folder, restore=file)


def test_a_single_file_that_is_cut_off_is_refused(folder: Path, tmp_path: Path):
    file = one_file(folder, tmp_path / "cut.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot read .*cut.safetensors"):
        Trainer(folder, restore=file)
    with pytest.raises(CheckpointError, match=r"cannot read .*absent.safetensors"):
        Trainer(folder, restore=tmp_path / "absent.safetensors")
