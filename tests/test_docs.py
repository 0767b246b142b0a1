"""The pages of docs/ say what is: their commands run and print what they show, their links lead somewhere.

A page that runs is a script. Of its fenced blocks, in order, those of language ``sh`` run, in bash, all in one folder; one of
language ``text`` right behind is what that prints; and where a file's name stands after the language, the block is that file.
In what is shown `…` stands for anything, a line that is nothing else for any lines, and a number with a decimal point for one
that is about as large.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from ortc.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECONDS = 120  # of one block: many times what it takes

# Runs differ in the order of sums, by the number of cores and the build; over some ten steps that grows.
LOSS_TOLERANCE, ACCURACY_TOLERANCE = 0.3, 0.03

TRAINING_BUILD = find_spec("onnxruntime.training") is not None
_FENCE = re.compile(r"^```(\w*)(?: +(\S+))?\n(.*?)^```$(\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and what it shows as the output."""

    language: str
    file: str | None
    text: str
    shown: str | None
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = _FENCE.finditer(text)
    return [Block(m[1], m[2], m[3], m[5], text.count("\n", 0, m.start()) + 1) for m in found]


def run_page(page: Path, folder: Path) -> None:
    """Write the files of a page and run its commands, in a folder; what they print is what it shows."""
    bin_ = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join((bin_, os.environ["PATH"])), "COLUMNS": "160", "PYTHONHASHSEED": "0"}
    ran = 0
    for block in blocks(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            words = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            where = f"{page.name}:{block.line}"
            assert done.returncode == 0, f"{where}: {done.stdout}\n{done.stderr}"
            if block.shown is not None:
                assert_shown(block.shown, done.stdout, where)
            ran += 1
    assert ran, f"{page.name} has no commands"


def assert_shown(shown: str, printed: str, where: str) -> None:
    """Hold what a command printed to what the page shows."""
    patterns, numbers = [], []
    for line in shown.splitlines():
        words = " ".join(line.split())
        if words == "…":
            patterns.append(r"(?:.*\n)*?")
            continue
        parts = re.split(r"(…|(?<![\w.])\d+\.\d+(?!\.?\w))", words)
        pieces = ["[^\\n]*?" if p == "…" else r"(\d+\.?\d*(?:e-\d+)?)" if i % 2 else re.escape(p) for i, p in enumerate(parts)]
        numbers += [(p, parts[i - 1]) for i, p in enumerate(parts) if i % 2 and p != "…"]
        patterns.append("".join(pieces) + r"\n")
    plain = "".join(" ".join(line.split()) + "\n" for line in printed.splitlines())
    match = re.fullmatch("".join(patterns), plain)
    assert match, f"{where} shows\n{shown}\nbut this is printed:\n{printed}"
    for found, (number, before) in zip(match.groups(), numbers, strict=True):
        near = {"abs": ACCURACY_TOLERANCE} if before.endswith("accuracy ") else {"rel": LOSS_TOLERANCE}
        assert float(found) == pytest.approx(float(number), **near), f"{where} shows {before}{number}:\n{printed}"


@pytest.mark.skipif(not TRAINING_BUILD, reason="the tutorial compiles for ort-training, as one does by default")
def test_tutorial(tmp_path):
    run_page(DOCS / "tutorial.md", tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert {"trained.onnx", "merged.onnx", "base.onnx", "mirror.onnx_adapter", "from-two.onnx", "report.html", "board"} <= made
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert "--- train.onnx" in (tmp_path / "digits.golden").read_text(encoding="utf-8")


@pytest.mark.ranks
@pytest.mark.skipif(not TRAINING_BUILD, reason="the page compiles for ort-training, as one does by default")
@pytest.mark.skipif(
    find_spec("mpi4py") is None or not Path(sys.executable).with_name("mpiexec").exists(),
    reason="needs mpi4py and an MPI beside this interpreter: ortc[mpi]",
)
def test_deployment(tmp_path):
    run_page(DOCS / "deployment.md", tmp_path)
    kept = [path.name for path in (tmp_path / "stages" / "checkpoint" / "step-30").glob("*.safetensors")]
    assert sorted(name for name in kept if name.startswith("optimizer")) == [
        f"optimizer-{rank}.safetensors" for rank in range(4)
    ]


def test_extending(tmp_path):
    run_page(DOCS / "extending.md", tmp_path)
    assert "--- train.onnx" in (tmp_path / "scale.golden").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("loss 0.5\n", "loss 0.9\n"),
        ("accuracy 0.97\n", "accuracy 0.9\n"),
        ("step 45\n", "step 46\n"),
        ("a\n…\nb\n", "a\nc\n"),
        ("a\nb\n", "a\nx\nb\n"),
    ],
)
def test_what_is_not_printed_is_noticed(shown, printed):
    assert_shown(shown, shown.replace("…\n", ""), "here")
    with pytest.raises(AssertionError, match="here"):
        assert_shown(shown, printed, "here")


PAGES = sorted(page for place in ("", "docs/", "examples/", "bench/") for page in ROOT.glob(f"{place}*.md"))
OPTIONS = {
    name: {option for p in command.params for option in p.opts if option.startswith("-")} | {"--help"}
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
}
# Flags of other programs that the pages name.
FOREIGN = {"--update-golden", "--map-by"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, part = target.partition("#")
        if ":" in file:
            continue  # of another place
        path = (page.parent / file) if file else page
        assert path.exists(), f"{page.name} links to {target}"
        if part:
            assert part in anchors(path), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_and_flag_exists(page):
    text = page.read_text(encoding="utf-8")
    code = [m[0] for m in re.finditer(r"^```.*?^```$|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)]
    for piece in code:
        joined = piece.replace("\\\n", " ")
        for name, rest in re.findall(r"(?<![\w./-])ortc (\w[\w-]*)([^\n`|;&]*)", joined):
            assert name in OPTIONS, f"{page.name}: there is no command `ortc {name}`"
            unknown = set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) - OPTIONS[name]
            assert not unknown, f"{page.name}: `ortc {name}` has no {unknown}"
        if piece.startswith("`--"):
            flag = re.match(r"`(--[\w-]+)", piece)
            assert flag is not None
            assert flag[1] in set().union(*OPTIONS.values()) | FOREIGN, f"{page.name}: there is no {flag[1]}"
