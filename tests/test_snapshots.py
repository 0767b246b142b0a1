"""The graphs after every pass, and what docs/from-trainingrunner.md promises."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import onnx
import pytest

from ortc import passes
from ortc.artifacts import compile, load_rules
from ortc.compiler import Compilation, is_on
from ortc.errors import OrtcError
from ortc.graph.text import graph_text
from ortc.recipe import parse_recipe
from ortc.source import load_model
from ortc.target import load_target

load_rules()

pytestmark = pytest.mark.compiler

ROOT = Path(__file__).parent.parent
MLP, GPT = (Path(__file__).parent / "data" / "models" / f"{name}.onnx" for name in ("mlp.legacy", "gpt2_eager.legacy"))


@pytest.mark.parametrize(
    "recipe", [{}, {"stash": {"packed": True}, "lora": {"targets": ["*"]}}, {"passes": {"on": ["attention"]}}]
)
def test_a_pass_that_says_so_changes_no_graph(recipe):
    recipe = parse_recipe({"loss": [{"name": "cross_entropy", "output": "logits"}], **recipe})
    c = Compilation(load_model(GPT), recipe, load_target(recipe.target), sessions=passes.SESSIONS)
    unchanged = []
    for step in passes.standard():
        if is_on(step, c.recipe, c.target):
            before = {name: graph_text(model) for name, model in c.all_models().items()}
            if step.run(c) is False:
                unchanged.append(step.name)
                assert {name: graph_text(model) for name, model in c.all_models().items()} == before, step.name
    assert {"precision", "fuse-update", "memory"} <= set(unchanged)
    assert "attention-scores" not in unchanged  # it fires here


def test_graphs_after_every_pass(tmp_path: Path, ortc):
    recipe = ["--loss", "cross_entropy:output=logits", "--lora", "targets='*attn*'", "--stages", "2"]
    code, _, err = ortc("compile", GPT, "-o", tmp_path / "s", "--save-intermediate", tmp_path / "i", *recipe)
    assert (code, err) == (0, "")
    folders = sorted(p.name for p in (tmp_path / "i").iterdir())
    names = [step.name for step in passes.standard()]
    order = [names.index(f[3:]) for f in folders]  # numbered as they ran: without those that are off
    assert order == sorted(order)
    assert len({f[:2] for f in folders}) == len(folders)
    assert {"prepare", "loss", "lora", "gradients", "optimizer", "phases"} <= {f[3:] for f in folders}
    files = sorted((tmp_path / "i").rglob("*.onnx"))
    for file in files:
        onnx.load(file)
        assert file.stat().st_size < GPT.stat().st_size + 400_000, "no weights"
    [loss] = (tmp_path / "i").glob("*-loss/model.onnx")
    model = onnx.load(loss)
    onnx.checker.check_model(model)
    assert model.graph.output[0].name == "loss"
    [phases] = (tmp_path / "i").glob("*-phases")
    for file in phases.glob("stage-*"):
        stage, phase = re.fullmatch(r"stage-(\d)-(\w+).onnx", file.name).groups()
        assert file.read_bytes() == (tmp_path / "s" / f"stage-{stage}" / f"{phase}.onnx").read_bytes()


def test_what_a_pass_left_alone_is_not_written_again(tmp_path: Path):
    compile(MLP, tmp_path / "s", parse_recipe({}), save_intermediate=tmp_path / "i")
    found = sorted((tmp_path / "i").rglob("*.onnx"))
    by_name: dict[str, list[bytes]] = {}
    for file in found:
        by_name.setdefault(file.name, []).append(file.read_bytes())
    assert all(a != b for contents in by_name.values() for a, b in itertools.pairwise(contents))


def test_it_is_the_same_compilation(tmp_path: Path):
    for name, folder in (("s", None), ("t", tmp_path / "i")):
        compile(MLP, tmp_path / name, parse_recipe({}), save_intermediate=folder)
    for file in sorted((tmp_path / "s").rglob("*")):
        other = tmp_path / "t" / file.relative_to(tmp_path / "s")
        assert file.is_dir() or file.read_bytes() == other.read_bytes()


def test_a_folder_that_holds_something(tmp_path: Path):
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "mine").write_text("kept")
    with pytest.raises(OrtcError, match="is not empty"):
        compile(MLP, tmp_path / "s", parse_recipe({}), save_intermediate=tmp_path / "i")
    assert not (tmp_path / "s").exists()
    assert [p.name for p in (tmp_path / "i").iterdir()] == ["mine"]


def test_the_page_names_flags_that_exist(ortc):
    text = (ROOT / "docs" / "from-trainingrunner.md").read_text()
    there = "".join((ROOT / "ortc" / "cli.py").read_text().split('"'))
    parameters = {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", there, re.MULTILINE)}
    flags = set(re.findall(r"(--[a-z][a-z-]+)", text))
    assert len(flags) > 30
    assert sorted(f for f in flags - parameters if f not in there) == []


def test_checks_of_the_page(tmp_path: Path, ortc):
    assert ortc("compile")[0] == 2
    for arguments, said in (
        (["--optimizer", "magic"], "there is no optimizer 'magic'; there are"),
        (["--zero", "1"], "add --data-parallel N"),
        (["--train", "nothing"], "nothing in the model is called 'nothing'"),
    ):
        code, _, err = ortc("compile", MLP, "-o", tmp_path / "s", *arguments)
        assert code == 2
        assert said in err
    code, _, err = ortc("compile", MLP, MLP, "--stage-models", "--cut", "x", "-o", tmp_path / "s")
    assert code == 2
    assert "leave out how to cut" in err
