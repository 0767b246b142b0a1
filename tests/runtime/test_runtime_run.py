"""The loop: what it writes, how it continues, and that no kill loses or changes anything."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

from ortc.errors import DataError, NotFiniteError, OrtcError, RecipeError
from ortc.recipe import LearningRate
from ortc.runtime.data import epoch_order
from ortc.runtime.run import run
from ortc.runtime.trainer import Trainer

SAMPLES, BATCH = 50, 8  # seven batches an epoch, the last of two samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make_folder(tmp_path / "f", learning_rate=LearningRate(base=0.02, schedule="cosine", warmup=5))
    np.savez(tmp_path / "d.npz", **tiny.data(SAMPLES))
    np.savez(tmp_path / "e.npz", **tiny.data(21, seed=2))
    return tmp_path / "f"


def train(folder: Path, **options) -> int:
    defaults = {"data": folder.parent / "d.npz", "batch_size": BATCH, "threads": 1, "quiet": True}
    return run(folder, **(defaults | options))


def lines(folder: Path, timing: bool = False) -> list[dict]:
    """The metrics, without what depends on the clock."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not timing:
        for line in found:
            line.pop("time")
            line.pop("samples_per_s", None)
    return found


def final(folder: Path) -> dict[str, bytes]:
    """The bytes of the last checkpoint's tensors."""
    last = max((p for p in (folder / "checkpoint").iterdir() if p.name[0] == "s"), key=lambda p: int(p.name[5:]))
    return {"name": last.name.encode()} | {p.name: p.read_bytes() for p in last.glob("*.safetensors")}


def test_two_epochs(folder: Path, capsys):
    assert train(folder, epochs=2, eval_data=folder.parent / "e.npz", quiet=False) == 0
    metrics = lines(folder, timing=True)
    steps = [line for line in metrics if "loss" in line]
    evaluations = [line for line in metrics if "eval_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert [line["epoch"] for line in steps] == [1] * 7 + [2] * 7
    assert {"step", "epoch", "loss", "lr", "gradient_norm", "samples_per_s", "time"} == set(steps[0])
    assert [steps[0]["lr"], steps[4]["lr"], steps[-1]["lr"]] == pytest.approx([0.004, 0.02, 0])
    assert [(line["step"], line["epoch"]) for line in evaluations] == [(7, 1), (14, 2)]
    assert sorted(p.name for p in (folder / "checkpoint").iterdir()) == ["step-0", "step-14", "step-7"]
    out = capsys.readouterr().out
    assert "step 14/14, epoch 2: loss" in out
    assert "step 14: evaluation loss" in out
    with Trainer(folder) as trainer:
        assert trainer.progress.position == (2, 0)
        whole = trainer.evaluate(tiny.data(21, seed=2)).loss
        assert evaluations[-1]["eval_loss"] == pytest.approx(whole, rel=1e-5), "weighted by samples"


def test_a_finished_run_says_so(folder: Path, capsys):
    train(folder, steps=4)
    before = final(folder)
    assert train(folder, steps=4, quiet=False) == 0
    assert "nothing to do: step 4 was the last" in capsys.readouterr().out
    assert final(folder) == before
    assert len(lines(folder)) == 4


def test_more_epochs_go_on(folder: Path):
    train(folder, epochs=1)
    train(folder, epochs=3)
    assert [line["epoch"] for line in lines(folder)] == [1] * 7 + [2] * 7 + [3] * 7


def test_in_pieces_it_is_the_same_run(folder: Path, tmp_path: Path):
    options = {"schedule": "constant", "eval_data": tmp_path / "e.npz", "eval_every": 4, "save_every": 3}
    train(folder, steps=20, **options)
    whole, metrics = final(folder), lines(folder)
    tiny.make_folder(tmp_path / "g", learning_rate=LearningRate(base=0.02, schedule="cosine", warmup=5))
    for steps in (4, 12, 20):  # where an evaluation is due anyway
        train(tmp_path / "g", steps=steps, **options)
    assert final(tmp_path / "g") == whole
    assert lines(tmp_path / "g") == metrics


def test_restore_none_begins_again(folder: Path):
    train(folder, steps=3)
    first, metrics = final(folder), lines(folder)
    train(folder, steps=3, restore="none")
    assert final(folder) == first
    assert lines(folder) == metrics


def test_changed_settings_are_told(folder: Path, capsys):
    train(folder, steps=9)
    train(folder, steps=12, batch_size=5, seed=3)
    told = capsys.readouterr().err
    assert "epoch 2 begins again" in told
    assert "other batch size, seed, last step than in" in told
    assert [line["step"] for line in lines(folder)] == list(range(1, 13))
    assert lines(folder)[-1]["epoch"] == 2


def test_a_function_is_replayed_to_where_it_was(folder: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "replayed.py").write_text(
        "import numpy as np\n"
        "def batches(epoch):\n"
        "    for i in range(5):\n"
        "        x = np.random.default_rng([epoch, i]).standard_normal((4, 4)).astype(np.float32)\n"
        "        yield {'x': x, 'labels': np.argmax(x[:, :3], 1)}\n"
    )
    monkeypatch.chdir(tmp_path)
    options = {"data": "replayed:batches", "schedule": "constant"}
    train(folder, epochs=3, **options)
    whole = final(folder)
    assert whole["name"] == b"step-15"
    tiny.make_folder(tmp_path / "g", learning_rate=LearningRate(base=0.02, schedule="cosine", warmup=5))
    train(tmp_path / "g", steps=7, **options)
    train(tmp_path / "g", epochs=3, **options)
    assert final(tmp_path / "g") == whole
    with pytest.raises(RecipeError, match="cosine schedule needs the number of steps"):
        train(tmp_path / "g", data="replayed:batches", epochs=9)


def test_a_bad_batch_loses_no_step(folder: Path, tmp_path: Path, capsys):
    train(folder, steps=20, schedule="constant")
    whole, metrics = final(folder), lines(folder)
    tiny.make_folder(tmp_path / "g", learning_rate=LearningRate(base=0.02, schedule="cosine", warmup=5))
    spoilt = tiny.data(SAMPLES)
    spoilt["x"][epoch_order(SAMPLES, 0, 0)[BATCH * 4]] = np.inf  # in the fifth batch of the first epoch
    np.savez(tmp_path / "spoilt.npz", **spoilt)
    with pytest.raises(NotFiniteError, match="step 5: the loss is nan"):
        train(tmp_path / "g", steps=20, schedule="constant", data=tmp_path / "spoilt.npz", quiet=False)
    assert "step 4: saved" in capsys.readouterr().out
    train(tmp_path / "g", steps=20, schedule="constant")
    assert final(tmp_path / "g") == whole
    assert lines(tmp_path / "g") == metrics


def test_a_fixed_batch_size_is_explained(tmp_path: Path):
    tiny.make_folder(tmp_path / "f", batch=4)
    np.savez(tmp_path / "d.npz", **tiny.data(10))
    with pytest.raises(DataError, match="--batch-size 4"):
        train(tmp_path / "f")
    with pytest.raises(DataError, match="--drop-last"):
        train(tmp_path / "f", batch_size=4)
    assert train(tmp_path / "f", batch_size=4, drop_last=True, eval_data=tmp_path / "d.npz") == 0
    assert len(lines(tmp_path / "f")) == 3


def test_a_file_that_is_no_metrics_is_not_overwritten(folder: Path, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("dear diary\n")
    with pytest.raises(OrtcError, match=r"notes\.txt is not a metrics file"):
        train(folder, metrics=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "dear diary\n"


def test_too_few_samples_for_a_batch(folder: Path):
    with pytest.raises(DataError, match="50 samples do not fill one batch of 64"):
        train(folder, batch_size=64, drop_last=True)


# ---- killed and interrupted -----------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from ortc.runtime.data import epoch_order
from ortc.runtime.run import run
from ortc.runtime.trainer import Trainer

save = Trainer.save

def reported(self, *args):
    path = save(self, *args)
    print(path.name, flush=True)
    return path

Trainer.save = reported
folder = Path(sys.argv[1])
data, held_out = folder.parent / "d.npz", folder.parent / "e.npz"
sys.exit(run(folder, data=data, batch_size=8, steps=int(sys.argv[2]), save_every=3, keep=2, quiet=True,
             eval_data=held_out, eval_every=50))
"""


def child(folder: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def undisturbed(folder: Path, steps: int) -> tuple[dict[str, bytes], list[dict]]:
    """The result of the whole run in a folder beside."""
    twin = folder.parent / "undisturbed"
    tiny.make_folder(twin, learning_rate=LearningRate(base=0.02, schedule="cosine", warmup=5))
    process = child(twin, steps)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return final(twin), lines(twin)


def kill_and_restore(folder: Path, kills: int, steps: int) -> None:
    weights, metrics = undisturbed(folder, steps)
    chance = random.Random(kills)
    killed = 0
    while killed < kills:
        process = child(folder, steps)
        assert process.stdout is not None
        reported = process.stdout.readline()  # it runs, and has saved once
        assert reported, process.communicate()
        time.sleep(chance.random() * 0.15)
        process.kill()
        rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it was done too soon, the test needs more steps: {errors}"
        assert "damaged" not in errors
        killed += 1
        last = (reported + rest).splitlines()[-1]
        with Trainer(folder) as trainer:
            assert trainer.step_number >= int(last.removeprefix("step-")), "what was reported as saved is there"
    process = child(folder, steps)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert final(folder) == weights
    assert lines(folder) == metrics
    assert not [p.name for p in (folder / "checkpoint").iterdir() if p.name.startswith(".")]


def test_killed_at_random_instants_the_weights_are_the_same(folder: Path):
    kill_and_restore(folder, kills=5, steps=600)


@pytest.mark.slow
def test_killed_twenty_times_the_weights_are_the_same(folder: Path):
    kill_and_restore(folder, kills=20, steps=2000)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_second_interruption_ends_it_at_once(folder: Path, tmp_path: Path):
    (tmp_path / "slow.py").write_text(
        "import sys, time, numpy as np\n"
        "def batches():\n"
        "    yield {'x': np.zeros((2, 4), np.float32), 'labels': np.zeros(2, np.int64)}\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
    )
    options = "data='slow:batches', steps=9, schedule='constant', quiet=True"
    code = f"from ortc.runtime.run import run; run({str(folder)!r}, {options})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


def test_a_terminal_shows_a_bar(folder: Path):
    pty = pytest.importorskip("pty")
    code = f"from ortc.runtime.run import run; run({str(folder)!r}, data={str(folder.parent / 'd.npz')!r}, steps=30)"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while block := os.read(ours, 4096):
            shown += block
    os.close(ours)
    process.communicate()
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert re.search(r"step 30/30, epoch 15 loss [0-9.]+ lr 0 [0-9]+ samples/s +0:00:00", text)
    assert "step 30: saved" in text


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_interrupted_it_saves_and_goes_on(folder: Path):
    steps = 400
    weights, metrics = undisturbed(folder, steps)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = child(folder, steps)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        rest, errors = process.communicate()
        assert process.returncode == code, errors
        assert "stopping after this step and saving" in errors
        assert rest.splitlines()[-1] == f"step-{lines(folder)[-1]['step']}", "no step is lost"
    process = child(folder, steps)
    process.communicate()
    assert process.returncode == 0
    assert final(folder) == weights
    assert lines(folder) == metrics
