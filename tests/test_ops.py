"""``ortc ops``: nothing of the standard is left undeclared, and the README has the present counts."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from ortc.ops import GRADIENT, OUT, STOPS, UNKNOWN, of_model, operators, summary

ROOT = Path(__file__).parents[1]


def test_every_operator_of_the_standard_is_declared():
    found = {o.name: o for o in operators()}
    standard = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    assert standard <= found.keys()
    assert [name for name in sorted(standard) if found[name].status == UNKNOWN] == []
    assert found["Tanh"].status == GRADIENT
    assert found["Gather"].inputs == ("data",)
    assert found["Shape"].status == STOPS
    assert found["BitCast"].status == OUT


def test_the_readme_has_the_counts():
    assert summary(operators()) in " ".join((ROOT / "README.md").read_text().split())


def test_of_a_model_with_what_nobody_knows_first(tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 21, "my.own" : 1]>
        g (float[2,3] x, bool c) => (float[2,3] y)
        { a = Tanh(x) b = my.own.Strange(a)
          y = If(c) <then_branch = t () => (float[2,3] u) { u = Relu(b) },
                     else_branch = e () => (float[2,3] v) { v = Tanh(b) }> }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    rows = of_model(tmp_path / "m.onnx")
    assert [(n, o.name, o.status) for n, o in rows] == [
        (1, "my.own::Strange", UNKNOWN),
        (1, "If", GRADIENT),
        (1, "Relu", GRADIENT),
        (2, "Tanh", GRADIENT),
    ]


@pytest.mark.parametrize("name", ["Relu", "LSTM", "Attention", "Scatter"])
def test_the_table_says_how_each_is_tested(name):
    assert next(o for o in operators() if o.name == name).tested
