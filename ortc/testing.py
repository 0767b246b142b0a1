"""Golden graphs: a pytest plugin, and one function, that compare what ortc compiles with text files under review.

The plugin is installed with ortc, so your own repository can hold goldens of your own models. A golden is a text file
called ``*.golden``, made of sections; lines before the first one are a comment::

    A perceptron with a mean squared error.
    --- recipe
    [[loss]]
    name = "mse"
    --- model
    <ir_version: 10, opset_import: ["": 21]>
    perceptron (float[N,3] x) => (float[N,2] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
       y = MatMul (x, w)
    }
    --- train.onnx
    …

==================  ===========================================================================================
``--- recipe``      the recipe, as in ``ortc.toml``; the defaults without one, for the target ``ort-training``
``--- model``       the model as ONNX text, or ``--- model: FILE.onnx``, relative to the golden
``--- PHASE.onnx``  the expected graph of that phase (train, eval, optimizer, …), as :mod:`ortc.graph.text` writes it
==================  ===========================================================================================

``pytest --update-golden`` writes the expected sections: those that the file has, or all phases where it has none. So a
new case is a file without any, and a case that is about one phase keeps only that phase's section.

A model that a test makes itself has the function instead::

    from ortc.testing import assert_golden

    def test_my_model():
        assert_golden(make_my_model(), {"loss": [{"name": "mse"}]}, "tests/my_model.golden")

Its golden holds expected sections alone, and the plugin leaves it to the test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Every pytest run of somebody who has ortc installed imports this file: the compiler is imported when a golden runs.
if TYPE_CHECKING:
    import onnx_ir as ir

    from ortc.recipe import Recipe

_SECTION = re.compile(r"^--- (recipe|model|\S+\.onnx)(?:: (.+?))?[ \t]*\n", re.MULTILINE)
_CASE = re.compile(r"^--- (recipe|model)\b", re.MULTILINE)

_updating = pytest.StashKey[bool]()
_config: list[pytest.Config] = []  # of the running session; the last one where pytest runs inside pytest


# Of a golden whose recipe says none: what is installed decides nothing in it.
TARGET = "ort-training"


class GoldenError(Exception):
    """A golden that does not hold, or is not written as it should be."""


def assert_golden(model: str | Path | ir.Model, recipe: Recipe | Mapping[str, Any] | None, golden: str | Path) -> None:
    """Compile a model and compare its graphs with a golden file; rewrite that under ``pytest --update-golden``.

    Args:
        model: an ONNX file or a model; a model given as such is changed by the compilation.
        recipe: a recipe, or its fields as in ``ortc.toml``; None for the defaults.
        golden: the file with the expected text. Made by ``--update-golden`` if missing.

    Raises:
        AssertionError: with what differs, as graphs (:mod:`ortc.diff`).
        OrtcError: if the model does not compile.
    """
    __tracebackhide__ = True
    path = Path(golden)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        _check(path, text, _compiled(model, recipe), bool(_config) and _config[-1].stash[_updating])
    except GoldenError as error:
        raise AssertionError(str(error)) from None


def _compiled(model: str | Path | ir.Model, recipe: Recipe | Mapping[str, Any] | None) -> dict[str, str]:
    """The text of every graph that the compiler makes, by section name."""
    from ortc.artifacts import compiled_graphs
    from ortc.graph.text import graph_text
    from ortc.recipe import Recipe, parse_recipe
    from ortc.source import load_model

    recipe = recipe if isinstance(recipe, Recipe) else parse_recipe(dict(recipe or {}))
    if "target" not in recipe.model_fields_set:
        recipe = recipe.model_copy(update={"target": TARGET})
    loaded = load_model(model) if isinstance(model, str | Path) else model
    return {f"{phase}.onnx": graph_text(graph) for phase, graph in compiled_graphs(loaded, recipe).items()}


def _check(path: Path, text: str, actual: Mapping[str, str], update: bool) -> None:
    """Compare the expected sections with the compiled graphs, or rewrite them.

    Raises:
        GoldenError: where they differ, or the file expects a graph that there is none of.
    """
    expected = {name: body for name, _, body in _sections(text) if name not in ("recipe", "model")}
    unknown = [name for name in expected if name not in actual]
    if unknown:
        raise GoldenError(f"{path}: no such graph: {', '.join(unknown)}; the compiler made {', '.join(actual)}")
    wanted = list(expected) or list(actual)
    if update:
        new = _head(text) + "".join(f"--- {name}\n{actual[name]}" for name in wanted)
        if new != text:
            _replace(path, new)
        return
    if not expected:
        raise GoldenError(f"{path} has no expected graphs yet: write them with pytest --update-golden")
    from ortc.diff import diff_texts

    diffs = [line for name in wanted for line in diff_texts(name, expected[name], actual[name])]
    if diffs:
        diffs += ["", f"{path} differs; if that is right, rewrite it with pytest --update-golden"]
        raise GoldenError("\n".join(diffs))


def _sections(text: str) -> list[tuple[str, str | None, str]]:
    """(name, what stands after its colon, body) of each section, in order."""
    found = list(_SECTION.finditer(text))
    names = [m[1] for m in found]
    if len(set(names)) < len(names):
        raise GoldenError(f"a section stands twice: {', '.join(names)}")
    ends = [*(m.start() for m in found[1:]), len(text)]
    return [(m[1], m[2], text[m.end() : end]) for m, end in zip(found, ends, strict=False)]


def _head(text: str) -> str:
    """Everything before the first expected section, ending with a line feed."""
    starts = [m.start() for m in _SECTION.finditer(text) if m[1] not in ("recipe", "model")]
    head = text[: starts[0]] if starts else text
    return head if not head or head.endswith("\n") else head + "\n"


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(aside, path)


# ---- the plugin ------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden``."""
    parser.getgroup("ortc").addoption(
        "--update-golden", action="store_true", help="rewrite the expected graphs of *.golden files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let :func:`assert_golden` know the option."""
    config.stash[_updating] = config.getoption("--update-golden")
    _config.append(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Forget it again."""
    _config.remove(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """A ``*.golden`` file with a recipe or a model is a case; others are a test's own, or of another tool."""
    if file_path.suffix != ".golden" or not _CASE.search(file_path.read_text(encoding="utf-8", errors="replace")):
        return None
    return GoldenFile.from_parent(parent, path=file_path)


class GoldenFile(pytest.File):
    """One golden, one case."""

    def collect(self) -> Iterator[pytest.Item]:
        """The case."""
        yield GoldenCase.from_parent(self, name="golden")


class GoldenCase(pytest.Item):
    """Compiles the golden's model and compares."""

    def runtest(self) -> None:
        """Run the case."""
        text = self.path.read_text(encoding="utf-8")
        model, recipe = _read_case(self.path, text)
        _check(self.path, text, _compiled(model, recipe), self.config.stash[_updating])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone where the golden, its model or its recipe is at fault."""
        from ortc.errors import OrtcError

        if isinstance(excinfo.value, GoldenError):
            return str(excinfo.value)
        if isinstance(excinfo.value, OrtcError):
            return f"{self.path} does not compile: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The file is the name of the case."""
        return self.path, None, f"golden {self.path.name}"


def _read_case(path: Path, text: str) -> tuple[Path | ir.Model, Recipe]:
    """The model and the recipe of a golden."""
    import onnx_ir as ir
    from onnx.parser import ParseError

    from ortc.recipe import Recipe, parse_recipe_text

    sections = {name: (argument, body) for name, argument, body in _sections(text)}
    if "model" not in sections:
        raise GoldenError(f"{path} has no section `--- model`")
    recipe = Recipe()
    if "recipe" in sections:
        recipe = parse_recipe_text(sections["recipe"][1], str(path))
    file, body = sections["model"]
    if file is not None:
        return path.parent / file, recipe
    try:
        return ir.from_onnx_text(body), recipe
    except ParseError as error:
        raise GoldenError(f"{path}: the model is not ONNX text: {error}") from None
