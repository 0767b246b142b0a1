"""The training loops of examples/, with stock packages of other languages: the losses of ``ortc run`` over the same batches.

They fetch packages of Node (some 500 MB) where these are not there yet, so they run with ``-m slow`` only.

Losses and weights are compared within float32 rounding. All sides run the same graphs, in builds of ONNX Runtime that differ
in version, processor features and number of threads, hence in the order of their sums. Measured over 50 steps: 7e-7 of a loss,
3e-6 of a tensor's norm. A loop that gets one thing wrong (the counters of dropout in a single step, running statistics, the
factor of the clipping, the optimizer's step or states, the warm-up) is off by a tenth of either, or more.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file

from ortc.demo import MODEL, RECIPE, TRAIN_DATA
from ortc.runtime.trainer import Trainer

TRAINING_BUILD = importlib.util.find_spec("onnxruntime.training") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TRAINING_BUILD, reason="the loops are compared with stock ONNX Runtime"),
]

ROOT = Path(__file__).parents[1]
JAVASCRIPT = ROOT / "examples" / "javascript"
HEADERS = "com.github.asus4.onnxruntime@0.4.9"  # ONNX Runtime's own headers, in a package for iOS among others
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4
STEPS, BATCH_SIZE = 50, 32  # the 44 batches of the data, and the first six again


def tool(*names: str) -> str:
    """The path of the first that is installed; the test is skipped where none is."""
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"needs {' or '.join(names)}")


def command(*words: str | Path | int, cwd: Path) -> str:
    """Run it; its output."""
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{words[0]}: {done.stdout}\n{done.stderr}"
    return done.stdout


def npm(*words: str, cwd: Path) -> str:
    """Run npm; the test is skipped where it does not reach its registry."""
    done = subprocess.run([tool("npm"), *words], cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if re.search("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH", done.stderr):
        pytest.skip("npm does not reach its registry")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages() -> Path:
    """The folder of the packages for Node, installed as examples/README.md says."""
    tool("node")
    npm("install", "--no-audit", "--no-fund", cwd=JAVASCRIPT)
    return JAVASCRIPT / "node_modules"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with the compiled graphs, the data, and in `run` what ``ortc run`` made of them."""
    folder = tmp_path_factory.mktemp("examples")
    with zipfile.ZipFile(TRAIN_DATA) as archive:
        archive.extractall(folder / "digits")
    # Dropout, batch norm, a warm-up, averages, and clipping, which the first steps need: the norm of their gradients is 15.
    options = ["--lr", "1e-3", "--warmup", "5", "--clip-norm", "5", "--ema", "0.9"]
    ortc(folder, "compile", MODEL, "-o", "stages", "--recipe", RECIPE, "--target", "onnxruntime", *options)
    (folder / "batches.py").write_text(
        "import numpy as np\n"
        "def digits():\n"
        "    x, labels = np.load('digits/x.npy'), np.load('digits/labels.npy')\n"
        f"    for i in range(0, len(x) - {BATCH_SIZE - 1}, {BATCH_SIZE}):\n"
        f"        yield {{'x': x[i:i + {BATCH_SIZE}], 'labels': labels[i:i + {BATCH_SIZE}]}}\n"
    )
    shutil.copytree(folder / "stages", folder / "run")
    ortc(folder, "run", "run", "--data", "batches:digits", "--steps", STEPS)
    return folder


def ortc(folder: Path, *words: str | Path | int) -> str:
    return command(sys.executable, "-m", "ortc.cli", *words, cwd=folder)


def losses_of(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step \d+: loss ([\d.e-]+)", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The C++ loop, compiled against the shared library that Python uses as well."""
    folder = tmp_path_factory.mktemp("cpp")
    libraries = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1.*"))
    if not libraries:
        pytest.skip("ONNX Runtime's wheel has a shared library of its own on Linux only")
    (folder / "libonnxruntime.so.1").symlink_to(libraries[0])
    compile_ = [tool("g++", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", ROOT / "examples" / "cpp" / "train.cpp"]
    link = ["-o", "train", "libonnxruntime.so.1", "-Wl,-rpath,$ORIGIN"]
    command(*compile_, "-isystem", headers(folder), *link, cwd=folder)
    return folder / "train"


def headers(folder: Path) -> Path:
    """The folder of onnxruntime_cxx_api.h: the system's, or that of a package from npm."""
    for place in (Path("/usr/include/onnxruntime"), Path("/usr/local/include/onnxruntime")):
        if (place / "onnxruntime_cxx_api.h").exists():
            return place
    archive = folder / npm("pack", "--silent", HEADERS, cwd=folder).split()[-1]
    with tarfile.open(archive) as members:
        for member in members:
            if "/ios-arm64/" in member.name and member.name.endswith(".h"):
                content = members.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())
    archive.unlink()
    return folder


@pytest.fixture(params=["javascript", "cpp"])
def loop(request) -> list[str | Path]:
    """The words of the command that starts a loop."""
    if request.param == "cpp":
        return [request.getfixturevalue("program")]
    request.getfixturevalue("packages")
    return [tool("node"), JAVASCRIPT / "train.mjs"]


def test_same_as_ortc_run(work, loop):
    """Losses, weights, running statistics and the optimizer's states are those of ``ortc run``, and the checkpoint exports."""
    output = command(*loop, "stages", "digits", STEPS, "trained.safetensors", cwd=work)
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    want = [row["loss"] for row in rows if "lr" in row][:STEPS]
    losses = losses_of(output)
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, want, rtol=LOSS_TOLERANCE)
    saved = work / "run" / "checkpoint" / f"step-{STEPS}"
    expected = load_file(saved / "parameters.safetensors") | load_file(saved / "optimizer.safetensors")
    found = load_file(work / "trained.safetensors")
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert np.linalg.norm(found[name] - array) <= WEIGHT_TOLERANCE * np.linalg.norm(array), name
    told = ortc(work, "export", "stages", "--restore", "trained.safetensors", "-o", "model.onnx", "--data", "digits", "--force")
    assert f"weights of step {STEPS}, checked" in told


def test_continues(work, loop):
    """Two runs, the second from the first's checkpoint, are one run; and a run of ``ortc`` goes on from there."""
    ortc(work, "compile", MODEL, "-o", "constant", "--target", "onnxruntime", "--lr", "1e-3", "--force")
    whole = command(*loop, "constant", "digits", 8, "whole.safetensors", cwd=work)
    first = command(*loop, "constant", "digits", 5, "first.safetensors", cwd=work)
    second = command(*loop, "constant", "digits", 8, "second.safetensors", "first.safetensors", cwd=work)
    assert first + second == whole
    assert (work / "second.safetensors").read_bytes() == (work / "whole.safetensors").read_bytes()
    with np.load(TRAIN_DATA) as data, Trainer(work / "constant", restore=work / "first.safetensors") as trainer:
        third = [trainer.step({name: data[name][32 * i : 32 * i + 32] for name in data}).loss for i in (5, 6, 7)]
    np.testing.assert_allclose(losses_of(second), third, rtol=LOSS_TOLERANCE)


def test_fused_step(work, loop):
    """A folder whose training graph updates the weights gives the weights of one that has an optimizer of its own."""
    found = []
    for folder, flags in (("apart", []), ("fused", ["--fuse-update"])):
        ortc(work, "compile", MODEL, "-o", folder, "--target", "onnxruntime", "--lr", "1e-3", "--force", *flags)
        output = command(*loop, folder, "digits", 6, f"{folder}.safetensors", cwd=work)
        found.append((losses_of(output), load_file(work / f"{folder}.safetensors")))
    assert len(found[1][0]) == 6
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=LOSS_TOLERANCE)
    assert found[0][1].keys() == found[1][1].keys()
    for name, array in found[0][1].items():
        assert np.linalg.norm(found[1][1][name] - array) <= WEIGHT_TOLERANCE * np.linalg.norm(array), name


@pytest.mark.parametrize("file", ["stages/plan.json", "digits/labels.npy", "stages/checkpoint/step-0/parameters.safetensors"])
def test_cpp_tells_of_a_file_that_is_cut_off(work, program, file):
    whole = (work / file).read_bytes()
    try:
        (work / file).write_bytes(whole[: len(whole) // 2])
        words = [program, "stages", "digits", str(STEPS), "cut.safetensors"]
        done = subprocess.run(words, cwd=work, capture_output=True, text=True, check=False)
    finally:
        (work / file).write_bytes(whole)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert not (work / "cut.safetensors").exists()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def test_page(work, packages):
    """What is drawn and labelled is learnt; the page trains as ``ortc`` does, and needs nothing but its own server."""
    browser = tool("chromium", "chromium-browser", "google-chrome")
    ortc(work, "run", "stages", "--data", TRAIN_DATA, "--steps", 135)
    ortc(work, "export", "stages", "-o", "trained.onnx")
    options = ["--batch-norm", "frozen", "--lr", "1e-3", "--force"]
    site = work / "site"
    shutil.copytree(JAVASCRIPT, site, ignore=shutil.ignore_patterns("node_modules", "stages"))
    (site / "node_modules").symlink_to(packages)
    ortc(work, "compile", "trained.onnx", "-o", "site/stages", "--target", "onnxruntime", *options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        seen = json.loads(command(tool("node"), ROOT / "tests" / "examples_page.mjs", site, url, browser, cwd=work))
    finally:
        server.shutdown()
        server.server_close()
    assert seen["problems"] == []
    assert [request for request in seen["requests"] if not request.startswith((url, "blob:", "data:"))] == []
    assert "and 4 now" in seen["told"][-1]
    assert seen["before"].split()[0] != str(seen["unseen"])
    assert seen["after"].split()[0] == str(seen["unseen"])
    batch = {
        "x": np.array([d["pixels"] for d in seen["drawings"]], np.float32).reshape(-1, 1, 8, 8),
        "labels": np.array([d["label"] for d in seen["drawings"]], np.int64),
    }
    with Trainer(site / "stages", restore="none") as trainer:
        want = [trainer.step(batch).loss for _ in seen["losses"]]
        values = {name: array.copy() for name, array in trainer.parameters.items()}
    assert len(want) == 30
    # These go to zero: the difference of scores of about ten, each of which is rounded to 1e-6.
    np.testing.assert_allclose(seen["losses"], want, rtol=LOSS_TOLERANCE, atol=1e-6)
    with Trainer(site / "stages", restore=site / "page.safetensors") as trainer:
        assert trainer.step_number == 30
        for name, array in trainer.parameters.items():
            assert np.linalg.norm(array - values[name]) <= WEIGHT_TOLERANCE * np.linalg.norm(array), name
