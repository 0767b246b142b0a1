"""``ortc explain``: where a tensor or a node of an output folder came from, what it is, and why it is treated as it is.

Everything is read from the folder: the plan, and the graphs, whose nodes say which pass made them, by which rule, from what
(``ortc.pass``, ``ortc.rule``, ``ortc.origin``). A node that says nothing is the model's own.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from ortc.diff import described, printable
from ortc.errors import OrtcError
from ortc.graph.names import all_graphs
from ortc.graph.shapes import dims, is_float
from ortc.inspection import format_bytes
from ortc.plan import GraphFile, ParameterInfo, Plan, Port, load_plan
from ortc.source import read_model

_FEW = 6  # of what is listed in a line
_FAR = 30  # steps back, of a node that was made from one that was made from one …
_PASS, _RULE, _ORIGIN = "ortc.pass", "ortc.rule", "ortc.origin"


@dataclass
class _Graph:
    """A graph of the folder, and what its ports are."""

    label: str
    file: str
    phase: str
    ports: dict[str, Port]
    outputs: dict[str, Port]
    graph: ir.Graph

    @property
    def trains(self) -> bool:
        """Whether it is of the training itself."""
        return self.phase == "train" or self.phase.startswith(("forward", "backward"))


@dataclass
class _Folder:
    """All that can be asked for, by name."""

    plan: Plan
    graphs: list[_Graph] = field(default_factory=list)
    values: dict[str, list[tuple[_Graph, ir.Value]]] = field(default_factory=dict)
    nodes: dict[str, list[tuple[_Graph, ir.Node]]] = field(default_factory=dict)
    made_from: dict[str, list[tuple[_Graph, ir.Node]]] = field(default_factory=dict)

    def add(self, label: str, folder: Path, file: GraphFile, phase: str = "") -> None:
        """Read a graph."""
        graph = read_model(folder / file.file).graph
        here = _Graph(label, file.file, phase, {p.name: p for p in file.inputs}, {p.name: p for p in file.outputs}, graph)
        self.graphs.append(here)
        for g in all_graphs(graph):
            found: dict[ir.Value, None] = dict.fromkeys([*g.inputs, *g.initializers.values()])
            for node in g:
                found.update(dict.fromkeys([*node.outputs, *(v for v in node.inputs if v is not None)]))
                self.nodes.setdefault(node.name or "", []).append((here, node))
                if _ORIGIN in node.metadata_props:
                    self.made_from.setdefault(node.metadata_props[_ORIGIN], []).append((here, node))
            for value in found:
                known = self.values.setdefault(value.name or "", [])
                if not any(v is value for _, v in known[-4:]):
                    known.append((here, value))


def explain(folder: Path, name: str) -> str:
    """What is known of a tensor or a node.

    Args:
        folder: an output folder of `ortc compile`.
        name: of a tensor, a node or a parameter, in any of the folder's graphs.

    Raises:
        OrtcError: the folder cannot be read, or has nothing of that name; names like it are told.
    """
    found = _read(folder)
    values, nodes = found.values.get(name, []), found.nodes.get(name, [])
    if not name or not (values or nodes or any(p.name == name for p in found.plan.parameters)):
        raise OrtcError(f"{folder}: no tensor or node is called {name!r}{_like(found, name)}")
    lines: list[str] = []
    if values or not nodes:
        lines += _value(found, name)
    if nodes and not all(any(v.name == name for v in node.outputs) for _, node in nodes):
        lines += ["", *_node(found, name)] if lines else _node(found, name)
    elif nodes:
        lines += _descendants(found, [name, *(v.name or "" for _, node in nodes for v in node.outputs)])
    return "\n".join(lines)


def _read(folder: Path) -> _Folder:
    plan = load_plan(folder)
    found = _Folder(plan)
    found.add("the exported model", folder, plan.export)
    for stage in plan.stages:
        for phase, file in stage.phases.items():
            found.add(f"stage {stage.index} {phase}" if len(plan.stages) > 1 else phase, folder, file, phase)
    found.add("criterion", folder, plan.criterion)
    return found


def _like(found: _Folder, name: str) -> str:
    names = [n for n in dict.fromkeys([*found.nodes, *found.values]) if n]
    close = [n for n in names if name and name.lower() in n.lower()][:_FEW]
    if not close:
        close = difflib.get_close_matches(name, names, n=_FEW, cutoff=0.6)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


# ---- values ----------------------------------------------------------------------------------------------------------


def _value(found: _Folder, name: str) -> list[str]:
    plan = found.plan
    places = found.values.get(name, [])
    parameter = next((p for p in plan.parameters if p.name == name), None)
    lines = [f"{printable(name)}: {_summary(places, parameter)}"]
    if parameter is not None:
        lines += _parameter(plan, parameter)
    elif all(v.is_initializer() for _, v in places):
        lines.append("  constant   it has no gradient: it is no weight, or folds what follows from no weight")
    makers = {_provenance(found, node): None for _, v in places for node in [v.producer()] if node is not None}
    lines += [f"  made by    {text}" for text in makers]
    lines += [f"  is         {text}" for text in dict.fromkeys(_roles(places))]
    lines += [f"  {text}" for text in dict.fromkeys(_why(found, name, places))]
    lines += _readers(places)
    lines += _appearances(places)
    return lines


def _summary(places: Sequence[tuple[_Graph, ir.Value]], parameter: ParameterInfo | None) -> str:
    kinds = list(dict.fromkeys(described(v) for g, v in places if v.dtype is not None))
    if parameter is not None:
        kinds = [f"{parameter.dtype}[{','.join(map(str, parameter.shape))}]"]
    sizes = {s for _, v in places if (s := _bytes(v)) is not None}
    size = f", {format_bytes(max(sizes))}" if sizes else ""
    return (" or ".join(kinds) or "type unknown") + size


def _bytes(value: ir.Value) -> int | None:
    shape = dims(value)
    if value.dtype is None or shape is None or not all(isinstance(d, int) for d in shape):
        return None
    return math.ceil(math.prod(shape) * value.dtype.itemsize)  # type: ignore[arg-type]


def _parameter(plan: Plan, info: ParameterInfo) -> Iterator[str]:
    fate = "trains" if info.trainable else "buffer" if info.role == "buffer" else "frozen"
    yield f"  {fate:<10} {printable(info.reason)}"
    held = [str(stage.index) for stage in plan.stages if info.name in stage.parameters]
    if len(plan.stages) > 1:
        why = ": its gradients are added up, and it is saved once" if len(held) > 1 else ""
        yield f"  held by    stage {', '.join(held)}{why}"
    ports = [p for stage in plan.stages for graph in stage.phases.values() for p in graph.inputs if p.of == info.name]
    slots = [p.slot or "" for p in ports if p.role == "state"]
    if slots:
        yield f"  states     {', '.join(dict.fromkeys(slots))} of {plan.recipe.optimizer.name}"
    if info.group is not None:
        yield f"  group      {info.group} of the recipe"
    if info.copies:
        yield f"  copies     {', '.join(map(printable, info.copies))} in the model's file, transposed; they follow it"


def _roles(places: Sequence[tuple[_Graph, ir.Value]]) -> Iterator[str]:
    """What the ports of the graphs say."""
    for graph, value in places:
        for port in (graph.ports.get(value.name or ""), graph.outputs.get(value.name or "")):
            if port is None or port.role in ("parameter", "buffer", "stash"):
                continue
            of = f" of {printable(port.of)}" if port.of and port.of != port.name else ""
            slot = f" {port.slot}" if port.slot else ""
            other = f", stage {', '.join(map(str, port.stages))} at the other end" if port.stages else ""
            yield f"{_ROLES.get(port.role, port.role)}{slot}{of}{other}"


_ROLES = {
    "data": "an input of the model",
    "label": "a target of the loss",
    "state": "the optimizer's state",
    "gradient": "the gradient",
    "boundary": "a value that one stage makes and others read",
    "boundary_gradient": "the gradient, between stages,",
    "scalar": "a number that the runtime gives:",
    "loss": "the loss",
    "output": "an output of the model",
}


def _why(found: _Folder, name: str, places: Sequence[tuple[_Graph, ir.Value]]) -> Iterator[str]:
    """Why it is kept, computed again, or of that type."""
    for graph, value in places:
        readers, producer = [u.node for u in value.uses()], value.producer()
        late = [n for n in readers if _is_backward(n)]
        role = graph.ports[name].role if name in graph.ports else ""
        if role == "stash":
            yield f"stashed    by the forward for {graph.label}, where it is read by {_listed(map(_short, readers))}"
        elif role == "boundary" and graph.phase.startswith("backward"):
            yield f"kept       after it arrived until {graph.label}, where it is read by {_listed(map(_short, readers))}"
        elif late and producer is not None and not _is_backward(producer):
            yield f"kept       in {graph.label} until the backward has read it: {_listed(map(_short, late))}"
        if producer is not None:
            yield from _recomputed(found, producer)
            if graph.trains:
                yield from _cast(found, producer, value)


def _is_backward(node: ir.Node | None) -> bool:
    return node is not None and node.metadata_props.get(_PASS) == "gradients"


def _recomputed(found: _Folder, node: ir.Node) -> Iterator[str]:
    """What recomputing passes leave: copies of forward nodes, called after them."""
    name = node.name or ""
    if node.metadata_props.get(_PASS) == "recompute":
        yield "recomputed so that it need not be kept from the forward: less memory, more time (--recompute)"
    copies = [(g, n) for base in (f"{name}.again", f"{name}.again_1") for g, n in found.nodes.get(base, [])]
    for graph, copy in copies:
        if copy.metadata_props.get(_PASS) == "recompute":
            yield f"recomputed in {graph.label}, as {printable(copy.name or '')}, instead of being kept (--recompute)"


def _cast(found: _Folder, node: ir.Node, value: ir.Value) -> Iterator[str]:
    """What mixed precision did to a value."""
    precision = found.plan.recipe.precision
    if precision.type == "fp32" or not is_float(value):
        return
    from ortc.passes.precision import reasons

    table = {**reasons(), **{op: (kind, "the recipe says so") for op, kind in precision.operators.items()}}

    def reason(reader: ir.Node) -> str:
        kind, why = table.get(reader.op_type, ("full", "not in the table"))
        return f"{reader.op_type} is `{kind}` in precision.toml: {why}"

    if node.metadata_props.get(_PASS) == "precision":
        readers = dict.fromkeys(reason(u.node) for u in value.uses())
        source = node.inputs[0].name if node.inputs and node.inputs[0] is not None else ""
        yield f"cast       from {printable(source or '')} to {described(value)}, for its readers: {_listed(readers)}"
    elif node.metadata_props.get(_PASS) in (None, "respell", "decompose", "loss"):
        yield f"computed   in {described(value).partition('[')[0]}: {reason(node)}"


def _readers(places: Sequence[tuple[_Graph, ir.Value]]) -> list[str]:
    lines = []
    for graph, value in places:
        readers = list(dict.fromkeys(u.node for u in value.uses()))
        if readers:
            lines.append(f"  read by    {_listed(map(_spelled, readers))} in {graph.label}")
    return lines


def _appearances(places: Sequence[tuple[_Graph, ir.Value]]) -> list[str]:
    lines = []
    for graph, value in places:
        name = value.name or ""
        as_ = [f"input ({graph.ports[name].role})"] if value.is_graph_input() and name in graph.ports else []
        as_ += ["initialiser"] if value.is_initializer() else []
        as_ += ["made"] if value.producer() is not None else []
        as_ += [f"output ({graph.outputs[name].role})"] if value.is_graph_output() and name in graph.outputs else []
        lines.append(f"  in         {graph.file}: {', '.join(as_) or 'read'}")
    return list(dict.fromkeys(lines))


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _node(found: _Folder, name: str) -> list[str]:
    places = found.nodes[name]
    node = next((n for g, n in places if g.trains), places[-1][1])
    lines = [f"{printable(name)}: a node {_operator(node)}"]
    lines += [f"  made by    {text}" for text in dict.fromkeys(_provenance(found, n) for _, n in places)]
    for what, values in (("reads", node.inputs), ("makes", node.outputs)):
        lines += [f"  {what:<10} {printable(v.name or '')}: {described(v)}" for v in values if v is not None and v.name]
    for attribute in node.attributes.values():
        shown = printable(str(attribute.value).splitlines()[0]) if attribute.value is not None else ""
        lines.append(f"  attribute  {printable(attribute.name)} = {shown if len(shown) < 80 else shown[:77] + '…'}")
    lines += [f"  {text}" for text in dict.fromkeys(t for _, n in places for t in _recomputed(found, n))]
    if any(graph.trains for graph, _ in places):
        lines += [f"  {text}" for text in dict.fromkeys(t for v in node.outputs for t in _cast(found, node, v))]
    lines += [f"  in         {graph.file}" for graph, _ in places]
    return lines + _descendants(found, [name, *(v.name or "" for v in node.outputs)])


def _descendants(found: _Folder, names: Iterable[str]) -> list[str]:
    """What passes made from it."""
    groups: dict[tuple[str, str], list[ir.Node]] = {}
    for name in dict.fromkeys(names):
        for graph, node in found.made_from.get(name, []):
            groups.setdefault((node.metadata_props.get(_PASS, ""), graph.label), []).append(node)
    return [
        f"  became     {_listed(map(_spelled, nodes))} in {label}, by pass {which}" for (which, label), nodes in groups.items()
    ]


def _provenance(found: _Folder, node: ir.Node) -> str:
    """The node, and step by step what it was made from, to a node of the model."""
    text = _spelled(node)
    seen = {node.name}
    for _ in range(_FAR):
        tags = node.metadata_props
        if _PASS not in tags:
            return f"{text}, which is the model's own"
        rule = f" (rule {printable(tags[_RULE])})" if _RULE in tags else ""
        text += f", by pass {printable(tags[_PASS])}{rule}"
        origin = tags.get(_ORIGIN, "")
        if not origin:
            return text
        before = _origin(found, origin)
        if before is None or before.name in seen:
            what = "of weight" if any(p.name == origin for p in found.plan.parameters) else "from"
            return f"{text} {what} {printable(origin)}"
        text += f" from {_spelled(before)}"
        seen.add(before.name)
        node = before
    return text


def _origin(found: _Folder, name: str) -> ir.Node | None:
    """The node of that name, or that makes the value of that name; the model's own if there is one."""
    for places in (found.nodes.get(name), [(g, v.producer()) for g, v in found.values.get(name, [])]):
        nodes = [node for _, node in places or [] if node is not None]
        if nodes:
            return next((n for n in nodes if _PASS not in n.metadata_props), nodes[0])
    return None


def _short(node: ir.Node) -> str:
    tags = node.metadata_props
    origin = f" of {printable(tags[_ORIGIN])}" if tags.get(_ORIGIN) else ""
    return f"{_operator(node)} ({tags[_PASS]}{origin})" if _PASS in tags else _spelled(node)


def _spelled(node: ir.Node) -> str:
    return f"{_operator(node)} {printable(node.name or '')}".rstrip()


def _operator(node: ir.Node) -> str:
    return printable(f"{node.domain}.{node.op_type}" if node.domain else node.op_type)


def _listed(texts: Iterable[str]) -> str:
    found = list(dict.fromkeys(texts))
    return ", ".join(found[:_FEW]) + (f" and {len(found) - _FEW} more" if len(found) > _FEW else "")
