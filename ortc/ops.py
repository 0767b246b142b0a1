"""``ortc ops``: what is known of every operator, and of those in one model before anybody compiles it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ortc.artifacts import load_rules
from ortc.rules import CONTROL, GRADIENTS, LOWERINGS, NO_GRADIENT, OUT_OF_REACH, OpKey
from ortc.target import load_target, target_names

GRADIENT, STOPS, REWRITTEN, OUT, UNKNOWN = "gradient", "no gradient", "written in others", "out of reach", "unknown"


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        versions: the opsets in which the standard has changed the operator; none of another domain's.
        status: ``gradient``: it has a rule; ``no gradient``: it stops gradients, rightly; ``written in others``: those have
            rules; ``out of reach``; ``unknown``: nobody has declared anything.
        inputs: the inputs that get a gradient.
        note: how it is written in others, or the reason why it is out of reach.
        lowered: the targets on which it is written in others when all gradients are built.
        tested: by what.
    """

    name: str
    versions: tuple[int, ...]
    status: str
    inputs: tuple[str, ...]
    note: str
    lowered: tuple[str, ...]
    tested: str


def operators() -> list[Operator]:
    """Every operator of the standard's domain, and every other one that something is declared of, by name."""
    load_rules()
    from ortc.passes.randomness import RANDOM
    from ortc.passes.sequences import RESOLVED

    versions: dict[OpKey, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            versions.setdefault(("", schema.name), []).append(schema.since_version)
    declared = {*GRADIENTS, *NO_GRADIENT, *CONTROL, *LOWERINGS, *OUT_OF_REACH}
    shown = [key for key in {*versions, *declared} if key[0] != "ortc"]
    return [_describe(key, tuple(sorted(versions.get(key, []))), {*RANDOM}, RESOLVED) for key in sorted(shown)]


def _describe(key: OpKey, versions: tuple[int, ...], random: set[str], sequences: frozenset[str]) -> Operator:
    domain, op_type = key
    status, note = UNKNOWN, ""
    inputs: tuple[str, ...] = ()
    rule = GRADIENTS.get(key)
    if rule is not None:
        status, inputs = GRADIENT, rule.wrt
    elif key in CONTROL:
        status, note = GRADIENT, "also of the values that its bodies capture"
        inputs = tuple(i.name for i in onnx.defs.get_schema(op_type, domain).inputs)
    elif not domain and op_type in random:
        status, note = GRADIENT, "drawn from counters: the same numbers in each run"
        inputs = ("data",)
    elif key in NO_GRADIENT:
        status = STOPS
    elif key in LOWERINGS:
        status, note = REWRITTEN, "by a lowering"
    elif not domain and (way := _brought_to_target(op_type)):
        status, note = REWRITTEN, way
    elif not domain and op_type in sequences:
        status, note = REWRITTEN, f"by its tensors; out of reach where {OUT_OF_REACH[key]}"
    elif key in OUT_OF_REACH:
        status, note = OUT, OUT_OF_REACH[key]
    lowered = tuple(t for t in target_names() if key in LOWERINGS and not load_target(t).kernels.get(_label(key)))
    return Operator(_label(key), versions, status, inputs, note, lowered, _tested(key, status))


def _brought_to_target(op_type: str) -> str:
    """How the standard's operator comes to the targets' opset; nothing if it is there already, or cannot."""
    opset = max(load_target(name).opset for name in target_names())
    newest: Any = onnx.defs.get_schema(op_type)
    if newest.deprecated:
        return "in opsets that have it: by the operator that replaced it"
    if ("ortc", op_type) in LOWERINGS:
        return f"as opset {newest.since_version} is newer than the targets': by a lowering"
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        if newest.has_function or newest.has_context_dependent_function:
            return f"as opset {newest.since_version} is newer than the targets': by the standard's own definition"
    return ""


def _tested(key: OpKey, status: str) -> str:
    rule = GRADIENTS.get(key)
    if rule is not None and rule.samples:
        return f"{len(rule.samples)} samples against differences" + ("" if key[0] else "; ONNX's cases")
    if status in (STOPS, OUT, UNKNOWN):
        return ""
    return "cases of its own" if key[0] else "cases of its own; ONNX's cases"


def _label(key: OpKey) -> str:
    return f"{key[0]}::{key[1]}" if key[0] else key[1]


def of_model(path: str | Path) -> list[tuple[int, Operator]]:
    """The operators of a model (functions inlined, bodies included) with the number of their nodes, those at odds first.

    Raises:
        OrtcError: if the file cannot be read, or is no model.
    """
    from ortc.graph.names import all_graphs
    from ortc.passes.normalise import prepare
    from ortc.source import blamed, load_model

    with blamed(path):
        model = prepare(load_model(path))
    counts = Counter((n.domain, n.op_type) for g in all_graphs(model.graph) for n in g)
    known = {o.name: o for o in operators()}
    rows = [(n, known.get(_label(key)) or Operator(_label(key), (), UNKNOWN, (), "", (), "")) for key, n in counts.items()]
    order = (UNKNOWN, OUT, REWRITTEN, GRADIENT, STOPS)
    return sorted(rows, key=lambda row: (order.index(row[1].status), row[1].name))


def summary(found: Sequence[Operator]) -> str:
    """How many operators of the standard there are of each status."""
    standard = [o for o in found if o.versions]
    counts = Counter(o.status for o in standard)
    parts = ", ".join(f"{counts[s]} {s}" for s in (GRADIENT, STOPS, REWRITTEN, OUT, UNKNOWN) if counts[s])
    return f"{len(standard)} operators of the standard: {parts}; {len(found) - len(standard)} of other domains"
