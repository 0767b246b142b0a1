"""What several test files share."""

from __future__ import annotations

import sys

import pytest

from ortc import cli
from ortc.artifacts import load_rules
from ortc.rules import GRADIENTS, LOWERINGS


@pytest.fixture
def ortc(monkeypatch, capsys):
    """Runs a command; returns exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ortc", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return run


@pytest.fixture(autouse=True)
def _no_runtime(request, monkeypatch):
    """What is marked as the compiler's alone cannot run anything."""
    if request.node.get_closest_marker("compiler"):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)


@pytest.fixture
def own_tables():
    """The declarations that a test adds are gone after it."""
    load_rules()
    before = dict(GRADIENTS), dict(LOWERINGS)
    yield
    for table, saved in zip((GRADIENTS, LOWERINGS), before, strict=True):
        table.clear()
        table.update(saved)
