"""The house keeps its shape: dependencies point one way, the engine names no operator, and everything is shipped."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
ENGINE, PASSES = ROOT / "ortc", ROOT / "passes"

# The commands and what they start with, and the side that users' tests see: they may name the passes.
ABOVE_THE_PASSES = {"ortc/cli.py", "ortc/compiler.py", "ortc/testing.py"}

RUNTIME_MAY = {"ortc.runtime", "ortc.plan", "ortc.recipe", "ortc.errors", "numpy", "onnxruntime", "safetensors", "rich"}
RUNTIME_MAY |= {"mpi4py", "ml_dtypes", "h5py"}  # the transport and HDF5 files, when they need them
RUNTIME_MAY |= {"tensorboard", "pyarrow"}  # inside functions, where a run asks for them
GRAPH_MAY = {"ortc.graph", "ortc.errors", "numpy", "onnx", "onnx_ir", "networkx"}
PASSES_MAY = {
    *("ortc.passes", "ortc.compiler", "ortc.autodiff", "ortc.rules", "ortc.rewrite", "ortc.graph", "ortc.target"),
    *("ortc.boundary", "ortc.plan", "ortc.recipe", "ortc.errors", "ortc.source"),
    "ortc.runtime.schedule",  # a schedule is a pure function, which compiler and runtime both ask
    *("numpy", "onnx", "onnx_ir", "onnxscript", "networkx"),
}

# Whose capitalised attributes are not operators that a file names: onnx_ir's classes, and the builder's own vocabulary
# (sum_to, expand_like, …), which is made of operators.
NOT_OPERATORS_OF = {"ir", "self"}


def python_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, *, top_level: bool = False) -> Iterator[str]:
    """The absolute names of imported modules; ``from ortc import x`` is ``ortc.x``.

    With ``top_level``, those that run when the module is imported: not in functions, not under TYPE_CHECKING.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from ([f"ortc.{alias.name}" for alias in node.names] if node.module == "ortc" else [node.module])
        elif not (top_level and runs_later(node)):
            yield from imports(node, top_level=top_level)


def runs_later(node: ast.AST) -> bool:
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def within(module: str, packages: set[str]) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def strangers(path: Path, allowed: set[str]) -> list[str]:
    """The modules that a file imports anywhere beside the allowed ones and the standard library."""
    return [m for m in imports(parse(path)) if m.split(".")[0] not in sys.stdlib_module_names and not within(m, allowed)]


@pytest.mark.parametrize("path", python_files(ENGINE / "runtime"), ids=relative)
def test_the_runtime_needs_nothing_of_the_compiler(path: Path):
    assert strangers(path, RUNTIME_MAY | {"ortc.__version__"}) == []


@pytest.mark.parametrize("path", python_files(ENGINE / "graph"), ids=relative)
def test_the_graph_tools_know_no_rules(path: Path):
    assert strangers(path, GRAPH_MAY) == []


@pytest.mark.parametrize("path", [p for p in python_files(ENGINE) if relative(p) not in ABOVE_THE_PASSES], ids=relative)
def test_the_engine_does_not_know_the_passes(path: Path):
    """Inside a function it may: somewhere the standard passes must be asked for."""
    assert [m for m in imports(parse(path), top_level=True) if within(m, {"ortc.passes"})] == []


@pytest.mark.parametrize("path", python_files(PASSES), ids=relative)
def test_passes_use_the_engine_below_them(path: Path):
    assert strangers(path, PASSES_MAY) == []


def named_operators(tree: ast.AST, operators: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in operators and ast.unparse(node.value) not in NOT_OPERATORS_OF:
            yield f"line {node.lineno}: .{node.attr}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in operators:
            yield f"line {node.lineno}: {node.value!r}"


@pytest.mark.parametrize("path", sorted([*ENGINE.glob("*.py"), *(ENGINE / "graph").glob("*.py")]), ids=relative)
def test_the_engine_names_no_operator(path: Path):
    operators = {s.name for s in onnx.defs.get_all_schemas() if len(s.name) >= 4}
    assert list(named_operators(parse(path), operators)) == []


def test_the_search_for_operators_finds_them():
    found = list(named_operators(ast.parse("op.Relu(x)\nif node.op_type == 'Conv': pass"), {"Relu", "Conv"}))
    assert found == ["line 1: .Relu", "line 2: 'Conv'"]


def test_help_imports_no_graph_library():
    script = (
        "import sys\n"
        "sys.argv = ['ortc', '--help']\n"
        "from ortc.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = ('numpy', 'onnx', 'onnx_ir', 'onnxscript', 'onnxruntime')\n"
        "print('imported:', *(m for m in heavy if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compile" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "imported:"


def packaging() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def packages() -> dict[str, Path]:
    """The folder of every import package in the repository."""
    found = {}
    for name, folder in (("ortc", ENGINE), ("ortc.passes", PASSES)):
        for init in sorted(folder.rglob("__init__.py")):
            found[".".join([name, *init.parent.relative_to(folder).parts])] = init.parent
    return found


def test_every_package_is_shipped():
    assert sorted(packaging()["packages"]) == sorted(packages())


@pytest.mark.parametrize("package", packages())
def test_every_data_file_is_shipped(package: str):
    patterns = packaging()["package-data"].get(package, [])
    files = [p.name for p in packages()[package].iterdir() if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert [name for name in files if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)] == []
