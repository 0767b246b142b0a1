"""Mixed precision: products in half precision, master weights and what must not be rounded in float32.

The table ``precision.toml`` has a list and a reason for every operator. Two sweeps paint the training graph: downwards, what
may be low because its inputs are; upwards, what is low because only low nodes read it. Casts stand where the paint changes,
one per value, so none is undone by the next. Parameters stay in float32 and are cast once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortc.compiler import Compilation, Pass, matches, role
from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.graph.names import captured, take_place
from ortc.graph.shapes import type_name
from ortc.target import Target, packaged_toml

HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
KINDS = ("low", "full", "follow", "widest")


def table() -> dict[str, str]:
    """The kind of every listed operator."""
    return {op_type: kind for op_type, (kind, _) in reasons().items()}


def reasons() -> dict[str, tuple[str, str]]:
    """The kind of every listed operator, and why."""
    rows = packaged_toml("ortc.passes", "precision.toml")
    return {op_type: (kind, why) for kind, listed in rows.items() for op_type, why in listed.items()}


@dataclass(frozen=True)
class CastToHalf(Pass):
    """Casts what the table allows to the recipe's half type."""

    name = "precision"
    after = ("fork-evaluation",)

    def run(self, c: Compilation) -> bool:
        chosen = c.recipe.precision
        if chosen.type == "fp32":
            return False
        kinds = {**table(), **chosen.operators}
        unknown = [f"{op_type} = {kind!r}" for op_type, kind in chosen.operators.items() if kind not in KINDS]
        if unknown:
            raise RecipeError(f"precision.operators: {unknown[0]}: the kind must be one of {', '.join(KINDS)}")
        for glob, kind in chosen.nodes.items():
            if kind not in KINDS:
                raise RecipeError(f"precision.nodes: {glob!r}: the kind must be one of {', '.join(KINDS)}, not {kind!r}")
            if not any(matches(node.name or "", [glob]) for node in c.graph):
                c.complain(f"precision.nodes: no node of the model is called {glob!r}")
        half = HALF[chosen.type]
        place_casts(c.graph, paint(c.graph, kinds, chosen.nodes, half), half)
        return True


def _kind(node: ir.Node, kinds: Mapping[str, str], nodes: Mapping[str, str]) -> str:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    own = next((kind for glob, kind in nodes.items() if matches(node.name or "", [glob])), None)
    return own or kinds.get(name, "full")


def _floats(values: object) -> list[ir.Value]:
    return [v for v in values if v is not None and v.dtype == ir.DataType.FLOAT]  # type: ignore[attr-defined]


def _is_neutral(value: ir.Value) -> bool:
    """A weight or a constant: it takes the type of whatever reads it."""
    return value.producer() is None and role(value) not in ("data", "boundary")


@cache
def _typed(domain: str, op_type: str, opset: int, inputs: int) -> tuple[frozenset[str], tuple[bool, ...]]:
    """The types that an operator may have (of its first input), and which of its inputs have that same type."""
    schema = onnx.defs.get_schema(op_type, opset if not domain else 1, domain)
    formals = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(inputs)]
    # Of an operator that chooses (Where) the first input is no number.
    kind = next((f.type_str for f in formals if not f.type_str.startswith(("B", "tensor"))), formals[0].type_str)
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == kind), [kind])
    return frozenset(allowed), tuple(f.type_str == kind for f in formals)


def _allows(node: ir.Node, opset: int, half: ir.DataType) -> bool:
    try:
        return f"tensor({half.name.lower()})" in _typed(node.domain, node.op_type, opset, len(node.inputs))[0]
    except onnx.defs.SchemaError:
        return False


def paint(graph: ir.Graph, kinds: Mapping[str, str], nodes: Mapping[str, str], half: ir.DataType) -> set[ir.Node]:
    """The nodes that compute in half precision; no operator does that ONNX has not in that type."""
    # Nested graphs, the loss and what a boundary describes are float32. (The model's outputs are none of the training graph's.)
    kept = {v for node in graph for v in captured(node)} | {v for v in graph.outputs if role(v) in ("loss", "boundary")}
    of = {node: _kind(node, kinds, nodes) for node in graph}
    opset = graph.opset_imports[""]
    free = {
        n: bool(_floats(n.outputs)) and not any(v in kept for v in n.outputs) and of[n] != "full" and _allows(n, opset, half)
        for n in graph
    }
    low: set[ir.Node] = set()
    for node in graph:
        inputs = [v for v in _floats(node.inputs) if not _is_neutral(v)]
        made_low = [v.producer() in low for v in (inputs[:1] if of[node] == "follow" else inputs)]
        may = of[node] == "low" or (of[node] in ("follow", "widest") and bool(made_low) and all(made_low))
        if free[node] and may:
            low.add(node)
    for node in reversed(list(graph)):
        readers = [use.node for v in _floats(node.outputs) for use in v.uses()]
        if free[node] and of[node] in ("follow", "widest") and readers and all(n in low for n in readers):
            low.add(node)
    return low


def place_casts(graph: ir.Graph, low: set[ir.Node], half: ir.DataType) -> None:
    """Give low nodes half inputs and outputs, and all others float32, in place."""
    op = Builder(graph)
    cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    for node in list(graph):
        want = half if node in low else ir.DataType.FLOAT
        same = _typed(node.domain, node.op_type, graph.opset_imports[""], len(node.inputs))[1] if node in low else None
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in (ir.DataType.FLOAT, half) or not _ours(value, low):
                continue
            if value.dtype != want and (same is None or same[index]):
                if (value, want) not in cast:
                    with op.scope(f"{value.name}/cast", before=node, origin=value.name or "", pass_="precision"):
                        cast[value, want] = _cast(op, value, want)
                node.replace_input_with(index, cast[value, want])
        if node in low:
            for value in _floats(node.outputs):
                value.type = ir.TensorType(half)  # a new one: clones share theirs


def _cast(op: Builder, value: ir.Value, to: ir.DataType) -> ir.Value:
    constant = value.const_value
    if constant is not None and value.is_initializer() and constant.size == 1:
        return op.const(constant.numpy().astype(to.numpy()))
    return op.Cast(value, to=int(to))


def _ours(value: ir.Value, low: set[ir.Node]) -> bool:
    """Whether a value is float32, or half because of the paint: what the model itself holds in half stays as it is."""
    return value.dtype == ir.DataType.FLOAT or value.producer() in low


def widen_missing(graph: ir.Graph, target: Target) -> None:
    """Let nodes compute in float32 between casts where the target has no kernel for their type, in place."""
    op = Builder(graph)
    wide: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        types = [v.dtype for v in [*node.inputs, *node.outputs] if v is not None and v.dtype is not None]
        narrow = next((t for t in dict.fromkeys(types) if target.misses(node.op_type, type_name(t))), None)
        if narrow is None:
            continue
        with op.scope(node.name or node.op_type, before=node, origin=node.name or "", rule=node.op_type, pass_="lower"):
            inputs = [_widened(op, v, narrow, wide) for v in node.inputs]
            made = [ir.Value(type=_FLOAT if v.dtype == narrow else v.type, shape=v.shape) for v in node.outputs]
            attributes: dict[str, Any] = {k: _wide_attribute(a, narrow) for k, a in node.attributes.items()}
            op.node(node.op_type, *inputs, _domain=node.domain, _outputs=made, **attributes)
            for old, new in zip(node.outputs, made, strict=True):
                result = op.Cast(new, to=int(narrow)) if old.dtype == narrow else new
                result.shape = old.shape
                take_place(old, result)
        graph.remove(node, safe=True)


_FLOAT = ir.TensorType(ir.DataType.FLOAT)


def _widened(op: Builder, value: ir.Value | None, narrow: ir.DataType, wide: dict[ir.Value, ir.Value]) -> ir.Value | None:
    """The value in float32, cast once."""
    if value is None or value.dtype != narrow:
        return value
    if value not in wide:
        constant = value.const_value
        known = constant is not None and value.is_initializer()
        wide[value] = op.const(constant.numpy().astype(np.float32)) if known else op.Cast(value, to=int(ir.DataType.FLOAT))  # type: ignore[union-attr]
    return wide[value]


def _wide_attribute(attribute: ir.Attr, narrow: ir.DataType) -> object:
    value = attribute.value
    if attribute.type == ir.AttributeType.TENSOR and value.dtype == narrow:
        return ir.tensor(value.numpy().astype(np.float32))
    return int(ir.DataType.FLOAT) if attribute.name == "to" and value == int(narrow) else value
