"""GELU, x·Φ(x) with Φ the normal distribution (Hendrycks & Gimpel, arXiv 1606.08415): how it is spelt, and which form is taken.

==========  ==============================================================
``exact``   x·½·(1 + erf(x/√2))
``tanh``    x·½·(1 + tanh(√(2/π)·(x + 0.044715·x³))), within 5·10⁻⁴ of it
``quick``   x·sigmoid(1.702·x), within 2.1·10⁻² of it
==========  ==============================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortc.compiler import Compilation
from ortc.errors import ModelError
from ortc.graph.builder import Builder
from ortc.graph.names import all_graphs, take_place
from ortc.passes.fusion import Fusion
from ortc.passes.normalise import remove_dead_nodes
from ortc.recipe import Recipe
from ortc.rewrite import Hit, rewrite

FORMS = ("exact", "tanh", "quick")

_ROOT, _CUBIC, _QUICK = math.sqrt(2 / math.pi), 0.044715, 1.702

Expression = Callable[[Any, Any], Any]

# x/√2
_ARGUMENTS: tuple[Expression, ...] = (lambda op, x: x / math.sqrt(2), lambda op, x: x * math.sqrt(0.5))

# √(2/π)·(x + 0.044715·x³)
_POLYNOMIALS: tuple[Expression, ...] = (
    lambda op, x: _ROOT * (x + _CUBIC * op.Pow(x, 3)),
    lambda op, x: _ROOT * (x + _CUBIC * (x * x * x)),
    lambda op, x: _ROOT * (x + _CUBIC * x * x * x),
    lambda op, x: _ROOT * (x * (1.0 + _CUBIC * op.Pow(x, 2))),
    lambda op, x: _ROOT * (x * (1.0 + _CUBIC * (x * x))),
    lambda op, x: _ROOT * (x * (1.0 + _CUBIC * x * x)),
    lambda op, x: (_ROOT * x) * (1.0 + _CUBIC * op.Pow(x, 2)),
    lambda op, x: (_ROOT * x) * (1.0 + _CUBIC * (x * x)),
    lambda op, x: (_ROOT * x) * (1.0 + _CUBIC * x * x),
    lambda op, x: x * (_ROOT + _ROOT * _CUBIC * (x * x)),
)

# x·½·(1 + s) of x and the odd function s
_PRODUCTS: tuple[Expression, ...] = (
    lambda x, s: (x * (1.0 + s)) * 0.5,
    lambda x, s: (x * 0.5) * (1.0 + s),
    lambda x, s: x * ((1.0 + s) * 0.5),
    lambda x, s: x * (0.5 + s * 0.5),
    lambda x, s: (x * (1.0 + s)) / 2.0,
    lambda x, s: (x / 2.0) * (1.0 + s),
    lambda x, s: x * ((1.0 + s) / 2.0),
)


def spellings(form: str) -> Iterator[Expression]:
    """The common ways to write a form in plain operators, but for the order of factors and terms."""
    if form == "quick":
        yield lambda op, x: x * op.Sigmoid(x * _QUICK)
        return
    for product in _PRODUCTS:
        for inner in _ARGUMENTS if form == "exact" else _POLYNOMIALS:
            yield _spelling(product, "Erf" if form == "exact" else "Tanh", inner)


def _spelling(product: Expression, odd: str, inner: Expression) -> Expression:
    return lambda op, x: product(x, getattr(op, odd)(inner(op, x)))


def written(form: str) -> Expression:
    """A form as we write it, by the standard's operator where the opset has it."""
    return lambda op, x: _write(op, x, form)


def _write(op: Any, x: ir.Value, form: str) -> ir.Value:
    if form == "quick":
        return x * op.Sigmoid(x * _QUICK)
    if op.opset >= 20:
        return op.Gelu(x, approximate="tanh" if form == "tanh" else None)
    s = op.Erf(x * math.sqrt(0.5)) if form == "exact" else op.Tanh(_ROOT * (x * (1.0 + _CUBIC * (x * x))))
    return x * ((1.0 + s) * 0.5)


def _standard(form: str) -> Expression:
    return lambda op, x: op.Gelu(x, approximate="tanh" if form == "tanh" else "none")


def declare() -> None:
    """Of ``gelu`` the spellings of each form as the operator; of ``gelu to FORM`` those, and every other form as that one."""
    samples = ({"x": (3, 4)},)
    for form in ("exact", "tanh"):
        for before in spellings(form):
            rewrite("gelu", name=form, before=before, after=written(form), samples=samples)
    for to in FORMS:
        for form in FORMS:
            found = [] if form == to == "quick" else list(spellings(form))
            if form not in (to, "quick"):
                found.append(_standard(form))
            apart = 1e-6 if form == to else 5e-4 if "quick" not in (form, to) else 2.1e-2
            for before in found:
                rewrite(f"gelu to {to}", name=form, before=before, after=written(to), tolerance=apart, samples=samples)


declare()


@dataclass(frozen=True)
class FuseGelu(Fusion):
    """Writes GELU, however it is spelt, as the standard's operator: in its own form, or the one that the recipe chooses."""

    name = "gelu"

    def asked_for(self, recipe: Recipe) -> bool:
        """A choice of the form is kept."""
        return recipe.gelu != "keep"

    def run(self, c: Compilation) -> bool:
        """With a choice the exported model follows: it computes what was trained and evaluated."""
        choice = c.recipe.gelu
        if choice == "keep":
            return super().run(c)
        hits = self.replace(c, f"gelu to {choice}")
        changed = [hit for hit in hits if hit.rule != choice]
        if "export" in c.graphs:
            _follow(c, c.graphs["export"], changed, choice)
        return bool(hits)


# ONNX Runtime's operators: GELU of the first input, or of the sum of two.
_CONTRIB = frozenset({"Gelu", "FastGelu", "QuickGelu", "BiasGelu"})


def _follow(c: Compilation, template: ir.Model, hits: Sequence[Hit], choice: str) -> None:
    """Change the same GELUs in the model to export, found by the names of their inputs and outputs."""
    ours = {v.name: v for graph in all_graphs(c.graph) for node in graph for v in node.outputs}
    theirs = {v.name: v for graph in all_graphs(template.graph) for v in _values(graph)}
    outermost = Builder(template.graph)
    for hit in hits:
        y = theirs.get(hit.output)
        node = None if y is None else y.producer()
        x = theirs.get(_past_dropout(hit.inputs["x"], ours))
        contrib = node is not None and node.domain == "com.microsoft" and node.op_type in _CONTRIB
        if y is None or node is None or node.graph is None or (x is None and not contrib):
            raise ModelError(
                f"gelu = {choice!r}: the GELU that makes {hit.output!r} cannot be changed in the model that is exported; "
                "leave the forms as they are (--gelu keep)"
            )
        op = outermost if node.graph is template.graph else Builder(node.graph, outermost)  # type: ignore[arg-type]
        with op.scope(node.name or "Gelu", before=node, origin=node.name or "", rule=hit.rule, pass_="gelu"):
            if contrib:
                operands = [v for v in node.inputs if v is not None]
                x = operands[0] if len(operands) == 1 else op.Add(*operands)
            assert x is not None
            made = ours[hit.output]
            x.type = x.type or made.type
            new = _write(op, x, choice)
        take_place(y, new)
        theirs[hit.output] = new
    remove_dead_nodes(template)
    if choice == "exact" and template.opset_imports[""] < 9 and hits:
        raise ModelError("gelu = 'exact': the model's opset has no Erf for the exported model; export it in opset 9 or newer")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _past_dropout(name: str, ours: dict[str | None, ir.Value]) -> str:
    """The model to export is in inference form, where dropout is gone."""
    node = ours[name].producer() if name in ours else None
    if node is None or node.op_type != "Dropout" or node.domain:
        return name
    assert node.inputs[0] is not None
    return _past_dropout(node.inputs[0].name or "", ours)
