"""The golden plugin, run as pytest inside pytest on small folders, with a stand-in for the compiler."""

from __future__ import annotations

import sys

import onnx_ir as ir
import pytest

import ortc.artifacts
from ortc.graph.text import graph_text
from ortc.recipe import Recipe

pytest_plugins = ["pytester"]

MODEL = """\
<ir_version: 10, opset_import: ["": 21]>
g (float[N,3] x) => (float[N,3] y) {
   y = Relu (x)
}
"""
CASE = f"A rectifier.\n--- model\n{MODEL}"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Two phases that are the model itself, named by the recipe's seed; a test may change ``op_type``."""
    made: dict[str, object] = {"op_type": "Relu"}

    def compiled_graphs(model: ir.Model, recipe: Recipe) -> dict[str, ir.Model]:
        model.graph.name = f"seed{recipe.seed}"
        model.graph[0].op_type = made["op_type"]
        return {"train": model, "eval": model}

    monkeypatch.setattr(ortc.artifacts, "compiled_graphs", compiled_graphs)
    return made


def write(pytester: pytest.Pytester, text: str) -> None:
    (pytester.path / "case.golden").write_text(text, encoding="utf-8")


def read(pytester: pytest.Pytester) -> str:
    return (pytester.path / "case.golden").read_text(encoding="utf-8")


def test_a_case_without_expected_graphs_fails_and_says_how_to_write_them(pytester, compiler):
    write(pytester, CASE)
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*case.golden has no expected graphs yet*--update-golden"])
    assert "Traceback" not in result.stdout.str()
    assert read(pytester) == CASE


def test_update_writes_every_phase_and_the_case_then_holds(pytester, compiler):
    write(pytester, CASE)
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    written = read(pytester)
    assert written.startswith(CASE)
    assert [line for line in written.splitlines() if line.startswith("---")] == [
        "--- model",
        "--- train.onnx",
        "--- eval.onnx",
    ]
    pytester.runpytest().assert_outcomes(passed=1)
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    assert read(pytester) == written


def test_a_difference_is_shown_as_a_diff_and_update_accepts_it(pytester, compiler):
    write(pytester, CASE)
    pytester.runpytest("--update-golden")
    compiler["op_type"] = "Tanh"
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["train.onnx, expected -> compiled:", "  ~ node y  Relu", "*operator Relu -> Tanh"])
    result.stdout.fnmatch_lines(["*case.golden differs; *--update-golden"])
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    assert "y = Relu (x)\n" in read(pytester), "the input stays"
    assert read(pytester).count("Tanh (x)") == 2


def test_only_the_sections_that_are_there_are_compared_and_rewritten(pytester, compiler):
    write(pytester, f"{CASE}--- eval.onnx\nold\n")
    pytester.runpytest().assert_outcomes(failed=1)
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    assert "train.onnx" not in read(pytester)
    assert "old" not in read(pytester)
    pytester.runpytest().assert_outcomes(passed=1)


@pytest.mark.parametrize("option", [[], ["--update-golden"]])
def test_a_phase_that_is_not_compiled_is_an_error(pytester, compiler, option):
    text = f"{CASE}--- traim.onnx\nold\n"
    write(pytester, text)
    result = pytester.runpytest(*option)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no such graph: traim.onnx; the compiler made train.onnx, eval.onnx"])
    assert read(pytester) == text


def test_the_recipe_and_a_model_file_are_read(pytester, compiler):
    ir.save(ir.from_onnx_text(MODEL), pytester.path / "a model.onnx")
    write(pytester, "--- recipe\nseed = 7\n--- model: a model.onnx\n--- train.onnx\n")
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    assert "\nseed7 (\n" in read(pytester)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"--- recipe\nsead = 7\n--- model\n{MODEL}", "*does not compile: *sead*"),
        (f"--- recipe\nseed =\n--- model\n{MODEL}", "*is not valid TOML*"),
        ("--- recipe\nseed = 7\n", "*has no section `--- model`"),
        ("--- model\nnonsense\n", "*the model is not ONNX text*"),
        ("--- model: absent.onnx\n", "*absent.onnx*"),
        (CASE + CASE, "*a section stands twice*"),
    ],
)
def test_a_mistake_in_a_golden_is_told_without_a_traceback(pytester, compiler, text, message):
    write(pytester, text)
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    assert "ortc/testing.py" not in result.stdout.str()


def test_other_golden_files_are_left_alone(pytester, compiler):
    (pytester.path / "other.golden").write_bytes(b"\xff\x00 an image\n--- a/model.py\n")
    write(pytester, "--- train.onnx\nof a test\n")
    pytester.runpytest().assert_outcomes()


def test_the_function(pytester, compiler):
    pytester.makepyfile(
        f"""
        import onnx_ir as ir
        from ortc.testing import assert_golden

        def test_my_model():
            assert_golden(ir.from_onnx_text({MODEL!r}), {{"seed": 3}}, "case.golden")
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*case.golden has no expected graphs yet*"])
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    model = ir.from_onnx_text(MODEL)
    model.graph.name = "seed3"
    text = graph_text(model)
    assert read(pytester) == f"--- train.onnx\n{text}--- eval.onnx\n{text}"
    pytester.runpytest().assert_outcomes(passed=1)
    compiler["op_type"] = "Tanh"
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*operator Relu -> Tanh"])


def test_loading_the_plugin_imports_no_compiler(pytester):
    script = "import sys, ortc.testing; print([m for m in ('numpy', 'onnx', 'onnx_ir', 'pydantic') if m in sys.modules])"
    assert pytester.run(sys.executable, "-c", script).stdout.lines == ["[]"]
