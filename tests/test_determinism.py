"""The same model, recipe and version give the same bytes: in another process, in another folder, for another hash seed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortc.demo import MODEL, RECIPE

pytestmark = pytest.mark.compiler

MODELS = Path(__file__).parent / "data" / "models"
CASES = {
    "digits": (MODEL, ["--recipe", str(RECIPE)]),
    "frozen, lamb": (MODEL, ["--freeze", "*bias", "--optimizer", "lamb"]),
    "gpt2": (MODELS / "gpt2_sdpa.dynamo.onnx", ["--loss", "cross_entropy"]),
    "stages": (MODELS / "tied.legacy.onnx", ["--stages", "2"]),
    "mobilenet": (MODELS / "mobilenet.legacy_train.onnx", ["--loss", "cross_entropy", "--optimizer", "sgd:momentum=0.9"]),
}


def compile_elsewhere(model: Path, options: list[str], folder: Path, hash_seed: str) -> dict[str, bytes]:
    """The output folder's files after ``ortc compile`` of a copy of the model, in a process of its own."""
    folder.mkdir()
    copy = folder / model.name
    shutil.copy(model, copy)
    command = [sys.executable, "-m", "ortc.cli", "compile", model.name, "-o", "stages", "--quiet", *options]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    stages = folder / "stages"
    return {str(p.relative_to(stages)): p.read_bytes() for p in sorted(stages.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_two_compilations_are_equal_byte_by_byte(case, tmp_path):
    model, options = CASES[case]
    one = compile_elsewhere(model, options, tmp_path / "one", "1")
    other = compile_elsewhere(model, options, tmp_path / "an other, längerer", "4242")
    first = "forward" if "--stages" in options else "train"
    assert {"plan.json", f"stage-0/{first}.onnx", "stage-0/eval.onnx", "stage-0/optimizer.onnx"} <= set(one)
    assert "checkpoint/step-0/parameters.safetensors" in one
    assert list(one) == list(other)
    assert [name for name in one if one[name] != other[name]] == []
