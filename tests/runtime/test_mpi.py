"""Ranks as processes under MPI: the bytes that threads give, whatever dies when, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortc.artifacts import compile
from ortc.recipe import parse_recipe

SECONDS = 300  # nothing here waits so long unless it hangs
MODELS = Path(__file__).parents[1] / "data" / "models"
ORTC = Path(sys.executable).with_name("ortc")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        find_spec("mpi4py") is None or not MPIEXEC.exists(),
        reason="needs mpi4py and an MPI beside this interpreter: ortc[mpi]",
    ),
]

# Open MPI asks for leave to run as root, and to run more ranks than there are cores.
ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def compiled(folder: Path, pipeline: dict[str, Any], **recipe: Any) -> Path:
    """A GPT whose embedding is its head, so that the first and the last stage share a weight."""
    table = {"loss": [{"name": "cross_entropy", "output": "logits"}], "optimizer": {"max_norm": 1.0}, **recipe}
    compile(MODELS / "gpt2_eager.legacy.onnx", folder, parse_recipe({**table, "pipeline": pipeline}), force=True)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.npz"
    ids = np.random.default_rng(0).integers(0, 64, (2, 44, 7))
    labels = np.where(ids[1] < 6, -100, ids[1])
    np.savez(path, input_ids=ids[0], attention_mask=np.ones((44, 7), np.int64), labels=labels)
    return path


def command(folder: Path, data: Path | str, *options: object) -> list[str]:
    return [str(ORTC), "run", str(folder), "--data", str(data), "--threads", "1", *map(str, options)]


def start(*line: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(part) for part in line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, **options
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        for _ in range(2):  # mpiexec tells its ranks: to stop after this step, and at once
            process.terminate()
            time.sleep(1)
        process.kill()
        raise
    return process.returncode, out, err


def trained(ranks: int, folder: Path, data: Path, *options: object) -> tuple[str, str]:
    """Run to the end, under MPI unless ``ranks`` is 0; what it printed."""
    mpi = [MPIEXEC, "-n", ranks] if ranks else []
    code, out, err = finished(start(*mpi, *command(folder, data, *options)))
    assert code == 0, err
    return out, err


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {k: v for k, v in line.items() if k in ("step", "epoch", "loss", "lr", "gradient_norm", "eval_loss")} for line in lines
    ]


def checkpoint(folder: Path, step: int) -> dict[str, bytes]:
    """Its tensors' files."""
    return {p.name: p.read_bytes() for p in (folder / "checkpoint" / f"step-{step}").glob("*.safetensors")}


LAYOUTS = [
    (2, {"stages": 2, "micro_batches": 4}),
    (2, {"stages": 4, "micro_batches": 4, "schedule": "interleaved", "ranks": 2}),
    (4, {"stages": 4, "micro_batches": 4, "schedule": "zb-h1"}),
    (4, {"stages": 2, "micro_batches": 2, "replicas": 2}),
    (8, {"stages": 4, "micro_batches": 2, "replicas": 2}),
]


@pytest.mark.parametrize(("ranks", "pipeline"), LAYOUTS, ids=str)
def test_processes_give_the_bytes_that_threads_give(ranks: int, pipeline: dict[str, Any], data: Path, tmp_path: Path):
    """Also in what they print: only rank 0 does."""
    printed = []
    options = ("--steps", 9, "--batch-size", 8, "--save-every", 4, "--eval-data", data, "--eval-every", 5)
    for name, size in (("threads", 0), ("processes", ranks)):
        folder = compiled(tmp_path / name, pipeline)
        out, err = trained(size, folder, data, *options)
        assert err == ""
        printed.append(re.sub(r"threads of this process|processes under MPI|/\S+|\d+ samples/s", "…", out))
    assert printed[0] == printed[1]
    assert metrics(tmp_path / "threads") == metrics(tmp_path / "processes")
    for step in (4, 8, 9):
        assert len(checkpoint(tmp_path / "threads", step)) >= 2
        assert checkpoint(tmp_path / "threads", step) == checkpoint(tmp_path / "processes", step)


def test_what_a_run_finds_out_is_the_same(data: Path, tmp_path: Path):
    """Metrics, the best checkpoint by one, averages, adapters, fetched values, traces, over sharded replicas."""
    recipe = {"optimizer": {"max_norm": 1.0, "ema": 0.9}, "lora": {"targets": ["*attn*"]}}
    options = ["--steps", 6, "--batch-size", 8, "--eval-data", data, "--eval-every", 2, "--lr", 0.05]
    options += [
        "--metric",
        "accuracy",
        "--metric",
        "perplexity",
        "--best",
        "min:perplexity",
        "--fetch",
        "logits",
        "--fetch",
        "loss",
    ]
    for name, size in (("threads", 0), ("processes", 4)):
        folder = compiled(tmp_path / name, {"stages": 2, "micro_batches": 2, "replicas": 2, "zero": 1}, **recipe)
        trained(size, folder, data, *options, "--ort-profile", tmp_path / f"{name}.json")
    told = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("threads", "processes")
    ]
    for lines in told:
        for line in lines:
            for key in ("time", "samples_per_s", "tokens_per_s"):
                line.pop(key, None)
    assert told[0] == told[1]
    assert sum("eval_perplexity" in line for line in told[0]) == 3
    assert checkpoint(tmp_path / "threads", 6) == checkpoint(tmp_path / "processes", 6)
    fetched = [np.load(tmp_path / name / "fetched" / "step-5.npz") for name in ("threads", "processes")]
    assert sorted(fetched[0]) == sorted(fetched[1]) == sorted(f"{name}/{i}" for name in ("logits", "loss") for i in range(4))
    assert all((fetched[0][name] == fetched[1][name]).all() for name in fetched[0])
    [step] = [line for line in told[0] if line["step"] == 5]
    assert sum(float(fetched[0][f"loss/{i}"]) for i in range(4)) == pytest.approx(step["loss"], rel=1e-6)
    rows = []
    for name in ("threads", "processes"):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        rows.append([(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"])
    assert rows[0] == rows[1]
    phases = {name for rank, name in rows[0] if rank == 3}
    assert phases == {"rank 3", *(f"stage 1 {phase}" for phase in ("forward", "backward", "optimizer.1", "eval"))}


def test_predictions_are_gathered(data: Path, tmp_path: Path):
    """Outputs of the first and the last stage, over two replicas, for data without targets."""
    pipeline = {"stages": 2, "micro_batches": 2, "replicas": 2}
    folder = compiled(tmp_path / "s", pipeline)
    trained(0, folder, data, "--steps", 2, "--batch-size", 8)
    arrays = np.load(data)
    np.savez(tmp_path / "unlabelled.npz", **{name: arrays[name] for name in ("input_ids", "attention_mask")})
    for name, size in (("threads", 0), ("processes", 4)):
        line = [ORTC, "predict", folder, "--data", tmp_path / "unlabelled.npz", "-o", tmp_path / f"{name}.npz", "--threads", 1]
        code, out, err = finished(start(*([MPIEXEC, "-n", size] if size else []), *line))
        assert (code, err) == (0, "")
        assert re.fullmatch(r"\S+: 44 samples, logits float32\[44,7,64\]; weights of \S+/step-2\n", out)
    a, b = np.load(tmp_path / "threads.npz"), np.load(tmp_path / "processes.npz")
    assert a["logits"].tobytes() == b["logits"].tobytes()
    assert np.isfinite(a["logits"]).all()


def test_more_ranks_than_the_plan_has_are_replicas(data: Path, tmp_path: Path):
    options = ("--steps", 3, "--batch-size", 8)
    trained(4, compiled(tmp_path / "two", {"stages": 2, "micro_batches": 2}), data, *options)
    trained(0, compiled(tmp_path / "four", {"stages": 2, "micro_batches": 2, "replicas": 2}), data, *options)
    assert metrics(tmp_path / "two") == metrics(tmp_path / "four")
    code, _, err = finished(start(MPIEXEC, "-n", 3, *command(tmp_path / "two", data, *options)))
    assert code != 0
    assert err.count("3 ranks are no multiple of that: start 2, or a multiple for several replicas") == 1, err
    code, _, err = finished(start(MPIEXEC, "-n", 2, *command(compiled(tmp_path / "one", {}), data, *options)))
    assert code != 0
    assert err.count("compile the model again with --data-parallel 2") == 1, err


# ---- who does not belong together ------------------------------------------------------------------------------------


def together(*lines: list[str]) -> tuple[int, str, str]:
    """Ranks that each have a command of their own."""
    parts: list[object] = [MPIEXEC]
    for line in lines:
        parts += [*([":"] if len(parts) > 1 else []), "-n", 1, *line]
    return finished(start(*parts))


def test_another_plan_on_one_rank_is_told_before_the_first_step(data: Path, tmp_path: Path):
    a = compiled(tmp_path / "a", {"stages": 2, "micro_batches": 4})
    b = compiled(tmp_path / "b", {"stages": 2, "micro_batches": 2})
    code, out, err = together(*(command(folder, data, "--steps", 3) for folder in (a, b)))
    assert code != 0
    assert err.count("rank 1: plan is") == 1, err
    assert "step" not in out
    assert not (a / "metrics.jsonl").exists()


def test_another_version_on_one_rank_is_told_before_the_first_step(data: Path, tmp_path: Path):
    folder = compiled(tmp_path / "a", {"stages": 2, "micro_batches": 4})
    older = "import ortc.runtime.team as team; team.__version__ = '0.0.1'; from ortc.cli import main; main()"
    line = command(folder, data, "--steps", 3)
    code, out, err = together(line, [sys.executable, "-c", older, *line[1:]])
    assert code != 0
    assert err.count("rank 1: ortc is 0.0.1") == 1, err
    assert "step" not in out


def test_folders_that_are_not_shared_are_told_before_the_first_step(data: Path, tmp_path: Path):
    """As on two machines with disks of their own; with a link to one folder of checkpoints they train."""
    a = compiled(tmp_path / "a", {"stages": 2, "micro_batches": 4})
    b = compiled(tmp_path / "b", {"stages": 2, "micro_batches": 4})
    lines = [command(folder, data, "--steps", 1) for folder in (a, b)]
    code, out, err = together(*lines)
    assert code != 0
    assert err.count("rank 1 has another folder") == 1, err
    assert "step" not in out
    for folder in (a, b):
        (folder / "checkpoint").rename(tmp_path / f"shared-{folder.name}")
        (folder / "checkpoint").symlink_to(tmp_path / "shared-a")
    (b / "stage-0").rename(tmp_path / "rank 1 needs only its own stage")
    code, _, err = together(*lines)
    assert code == 0, err
    assert sorted(p.name for p in (tmp_path / "shared-a").iterdir()) == ["step-0", "step-1"]


def test_another_models_checkpoint_is_told_once(data: Path, tmp_path: Path):
    folder = compiled(tmp_path / "a", {"stages": 2, "micro_batches": 4})
    recipe = parse_recipe({"loss": [{"name": "cross_entropy"}]})
    compile(MODELS / "tied.legacy_train.onnx", tmp_path / "b", recipe)
    line = command(folder, data, "--steps", 3, "--restore", tmp_path / "b" / "checkpoint" / "step-0")
    code, _, err = finished(start(MPIEXEC, "-n", 2, *line))
    assert code != 0
    assert err.count("belongs to another model than") == 1, err


# ---- what fails in the middle ----------------------------------------------------------------------------------------

TEXTS = """
import time
import numpy as np

def texts(seed, epoch):
    random = np.random.default_rng([seed, epoch])
    for i in range(20):
        time.sleep(PAUSE)
        ids = random.integers(0, 64, (2, 8, 7))
        if [epoch, i] == BAD:
            ids[0, -1, -1] = 1000
        yield {"input_ids": ids[0], "attention_mask": np.ones((8, 7), np.int64), "labels": ids[1]}
"""


def generated(folder: Path, module: str, pause: float = 0.0, bad: list[int] | None = None) -> str:
    (folder / f"{module}.py").write_text(TEXTS.replace("PAUSE", str(pause)).replace("BAD", str(bad)))
    return f"{module}:texts"


def test_an_error_in_one_rank_ends_all_with_its_message(tmp_path: Path):
    """A token that only ONNX Runtime finds wrong, in the first stage of the second replica: the others wait for it."""
    folder = compiled(tmp_path / "a", {"stages": 2, "micro_batches": 2, "replicas": 2})
    source = generated(tmp_path, "bad", bad=[0, 3])
    began = time.monotonic()
    code, _, err = finished(start(MPIEXEC, "-n", 4, *command(folder, source, "--steps", 9, "--save-every", 2), cwd=tmp_path))
    assert time.monotonic() - began < 30
    assert code != 0
    assert len(re.findall(r"ortc: rank \d: ONNX Runtime fails in stage-0/forward.onnx", err)) == 1, err
    assert "Traceback" not in err
    assert sorted(p.name for p in (folder / "checkpoint").iterdir()) == ["step-0", "step-2"]


def test_a_batch_that_all_ranks_find_wrong_is_told_once_and_what_was_done_is_saved(tmp_path: Path, data: Path):
    folder = compiled(tmp_path / "a", {"stages": 2, "micro_batches": 2})
    arrays = dict(np.load(data))
    arrays["labels"] = arrays["labels"].copy()
    arrays["labels"][20:, 0] = 64
    np.savez(tmp_path / "wrong.npz", **arrays)
    (tmp_path / "m.py").write_text(
        "import numpy as np\ndef wrong():\n    d = np.load('wrong.npz')\n"
        "    for i in range(0, 40, 8): yield {k: v[i:i + 8] for k, v in d.items()}\n"
    )
    code, _, err = finished(start(MPIEXEC, "-n", 2, *command(folder, "m:wrong", "--steps", 9), cwd=tmp_path))
    assert code != 0
    assert err.count("holds class 64") == 1, err
    assert "step-2" in [p.name for p in (folder / "checkpoint").iterdir()]


def test_gradients_that_are_not_finite_are_named_whoever_has_them(tmp_path: Path, data: Path):
    """With this rate the weights overflow; rank 0 tells of the gradients of all ranks."""
    recipe = {"optimizer": {"name": "sgd"}, "learning_rate": {"base": 1e30}}
    said = []
    for name, ranks in (("threads", 0), ("processes", 2)):
        folder = compiled(tmp_path / name, {"stages": 2, "micro_batches": 2}, **recipe)
        mpi = [MPIEXEC, "-n", ranks] if ranks else []
        code, _, err = finished(start(*mpi, *command(folder, data, "--steps", 9)))
        assert code != 0
        said += [re.search(r"step 2: the loss is .*", err)[0]]  # type: ignore[index]
        assert err.count("not finite are the gradients of") == 1, err
    assert said[0] == said[1]


def ranks_in(folder: Path) -> dict[int, int]:
    """Process ids of the ranks that train in a folder, from /proc."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            pairs = [e.partition("=") for e in (process / "environ").read_text().split("\0")]
            arguments = (process / "cmdline").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        environment = {name: value for name, _, value in pairs}
        rank = environment.get("PMI_RANK") or environment.get("OMPI_COMM_WORLD_RANK")
        if rank and environment.get("TEST_JOB") == str(folder) and "run" in arguments:
            found[int(rank)] = int(process.name)
    return found


def test_a_rank_that_hangs_is_named_and_ends_all(tmp_path: Path):
    """Stopped, which is no death; the first steps may take their time."""
    folder, options = compiled(tmp_path / "o", {"stages": 2, "micro_batches": 2}), ("--steps", 10**6, "--timeout", 4, "--quiet")
    line = command(folder, generated(tmp_path, "endless", pause=0.01), *options)
    job = start("env", f"TEST_JOB={folder}", MPIEXEC, "-n", 2, *line, cwd=tmp_path)
    began, lines = time.monotonic(), folder / "metrics.jsonl"
    while not (lines.exists() and lines.read_bytes().count(b"\n") > 2) and time.monotonic() - began < SECONDS:
        time.sleep(0.05)
    os.kill(ranks_in(folder)[1], signal.SIGSTOP)
    at = time.monotonic()
    code, _, err = finished(job)
    assert time.monotonic() - at < 30
    assert code != 0
    assert re.search(r"rank 0: .*rank 1.*, for more than 4 s: that rank hangs", err), err


CORES = """
import os, sys
from ortc.runtime.team import threads_of
from ortc.runtime.transport import mpi_world
allowed = {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {4, 5}}
with mpi_world() as world:
    os.sched_getaffinity = lambda pid: allowed[world.rank]
    found = world.gather_object(f"{world.rank} {threads_of(world)}")
    if world.rank == 0:  # lines of several processes may end up in each other
        print("\\n".join(found), flush=True)
"""


def test_ranks_share_out_the_cores_that_they_may_run_on(tmp_path: Path):
    (tmp_path / "cores.py").write_text(CORES)
    code, out, err = finished(start(MPIEXEC, "-n", 3, sys.executable, tmp_path / "cores.py"))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["0 2", "1 2", "2 2"]


def kill_and_restart(tmp_path: Path, kills: int, steps: int, ranks: int, pipeline: dict[str, Any]) -> None:
    source = generated(tmp_path, "slow", pause=0.01)
    options = ("--steps", steps, "--save-every", 3, "--keep", 2, "--quiet")
    twin = compiled(tmp_path / "undisturbed", pipeline)
    code, _, err = finished(start(*command(twin, source, *options), cwd=tmp_path))
    assert code == 0, err
    folder = compiled(tmp_path / "killed", pipeline)
    line = ["env", f"TEST_JOB={folder}", MPIEXEC, "-n", ranks, *command(folder, source, *options)]
    chance, killed = random.Random(kills), 0
    while killed < kills:
        job = start(*line, cwd=tmp_path)
        began = time.monotonic()
        here: dict[int, int] = {}
        while len(here) < ranks and job.poll() is None and time.monotonic() - began < SECONDS:
            here = ranks_in(folder)
            time.sleep(0.05)
        time.sleep(chance.random() * 3)  # while it starts, trains or saves
        if job.poll() is not None:
            pytest.fail(f"it was done too soon, the test needs more steps: {job.communicate()}")
        victim = chance.randrange(ranks)
        at = time.monotonic()
        os.kill(here[victim], signal.SIGKILL)
        code, _, err = finished(job)
        assert time.monotonic() - at < 10
        assert code != 0
        # Before the ranks know each other, mpiexec alone can tell.
        assert re.findall(r"ortc: rank (\d+) \(process", err) in ([], [str(victim)]), err
        killed += 1
    code, _, err = finished(start(*line, cwd=tmp_path))
    assert code == 0, err
    assert "damaged" not in err
    assert checkpoint(folder, steps) == checkpoint(twin, steps)
    assert metrics(folder) == metrics(twin)
    assert not [p.name for p in (folder / "checkpoint").iterdir() if p.name.startswith(".")]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_killed_at_random_instants_the_weights_are_the_same(tmp_path: Path):
    kill_and_restart(tmp_path, kills=3, steps=400, ranks=2, pipeline={"stages": 2, "micro_batches": 2})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_killed_often_the_weights_are_the_same(tmp_path: Path):
    kill_and_restart(tmp_path, kills=12, steps=1500, ranks=4, pipeline={"stages": 2, "micro_batches": 2, "replicas": 2})
