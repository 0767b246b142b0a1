"""``ortc diff``: what is different between two models, or two output folders, as graphs.

What a thing is called inside of a graph, and the order of nodes, are not differences: nodes are matched by what they compute
(:mod:`ortc.match`). Names of inputs and outputs are, since others feed and read them.
"""

from __future__ import annotations

import difflib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from ortc.compiler import paused_gc
from ortc.errors import CheckpointError, OrtcError
from ortc.graph.shapes import dims, type_name
from ortc.match import Matching, attribute_key, match_graphs
from ortc.plan import GraphFile, Plan, load_plan
from ortc.runtime.checkpoint import read_index
from ortc.source import blamed, load_model, read_model, read_safetensors_header

Kind = Literal["-", "+", "~"]

_WORDS: tuple[tuple[Kind, str], ...] = (("-", "removed"), ("+", "added"), ("~", "changed"))
_TAG = "ortc."
_SHOWN_ELEMENTS = 4  # of a tensor that is written out


@dataclass(frozen=True)
class Change:
    """One thing that is only in the first (``-``), only in the second (``+``), or in both and different (``~``).

    Attributes:
        kind: which of the three.
        what: node, input, output, weight, opset, function, graph, field (of the plan).
        name: what it is called (in the first, if it is in both).
        text: what it is, of one that is in one of both only.
        details: what differs, a line each.
    """

    kind: Kind
    what: str
    name: str
    text: str = ""
    details: tuple[str, ...] = ()


@dataclass
class Difference:
    """All changes, by file (of two models: under the empty name), and what is not one but worth a note.

    Attributes:
        files: the changes of each file that differs.
        renamed: nodes and weights of other names, which is no difference.
    """

    files: dict[str, list[Change]] = field(default_factory=dict)
    renamed: int = 0

    def __bool__(self) -> bool:
        return any(self.files.values())

    def add(self, file: str, changes: Iterable[Change]) -> None:
        """Note changes of a file."""
        found = list(changes)
        if found:
            self.files.setdefault(file, []).extend(found)

    def __str__(self) -> str:
        lines: list[str] = []
        for file, changes in self.files.items():
            if file:
                lines.append(f"{printable(file)}:")
            lines += [("  " if file else "") + line for change in changes for line in _lines(change)]
        every = [change for changes in self.files.values() for change in changes]
        counts = [_count(every, kind, word) for kind, word in _WORDS]
        note = f"; {self.renamed} nodes or weights have another name, which is no difference" if self.renamed else ""
        if every:
            return "\n".join([*lines, f"{', '.join(filter(None, counts))}{note}"])
        return f"equal{note}"


def _count(changes: Sequence[Change], kind: Kind, word: str) -> str:
    found = [change.what for change in changes if change.kind == kind]
    return ", ".join(
        f"{found.count(what)} {what}{'s' if found.count(what) != 1 else ''} {word}" for what in dict.fromkeys(found)
    )


def _lines(change: Change) -> Iterator[str]:
    text = f"  {change.text}" if change.text else ""
    yield f"{change.kind} {change.what} {printable(change.name)}{text}"
    for detail in change.details:
        yield f"      {detail}"


def diff(a: Path, b: Path) -> Difference:
    """The difference of two ONNX files, or of two output folders.

    Of folders the recipe and the fates of weights, every graph, the exported model's template, and the initial weights are
    compared. Linear in nodes and in bytes of weights.

    Raises:
        OrtcError: one of them is neither, or they are not of one kind.
    """
    for path in (a, b):
        if not path.exists():
            raise OrtcError(f"there is no {path}")
    if a.is_dir() != b.is_dir():
        folder, file = (a, b) if a.is_dir() else (b, a)
        raise OrtcError(f"{folder} is a folder and {file} is a file: give two models, or two output folders")
    with paused_gc():
        if a.is_dir():
            return _diff_folders(a, b)
        difference = Difference()
        with blamed(a, b):
            _diff_into(difference, "", load_model(a), load_model(b))
        return difference


def diff_models(a: ir.Model, b: ir.Model) -> Difference:
    """The difference of two models."""
    difference = Difference()
    _diff_into(difference, "", a, b)
    return difference


def _diff_into(difference: Difference, file: str, a: ir.Model, b: ir.Model) -> None:
    difference.add(file, _opsets(a.opset_imports, b.opset_imports))
    changes, renamed = _diff_graphs(a.graph, b.graph)
    difference.add(file, changes)
    difference.renamed += renamed
    ours, theirs = ({f"{f.domain}::{f.name}{f.overload}": f for f in m.functions.values()} for m in (a, b))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            difference.add(file, [Change("-" if name in ours else "+", "function", name)])
        else:
            inner, renamed = _diff_graphs(ours[name].graph, theirs[name].graph)
            difference.add(file, [_nested(change, f"function {name}") for change in inner])
            difference.renamed += renamed


def _nested(change: Change, where: str) -> Change:
    return Change(change.kind, change.what, f"{where} / {change.name}", change.text, change.details)


def _opsets(a: Mapping[str, int], b: Mapping[str, int]) -> Iterator[Change]:
    for domain in sorted({*a, *b}):
        name = domain or "ai.onnx"
        if domain not in a or domain not in b:
            yield Change("-" if domain in a else "+", "opset", name, str(a.get(domain, b.get(domain))))
        elif a[domain] != b[domain]:
            yield Change("~", "opset", name, details=(f"version {a[domain]} -> {b[domain]}",))


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _diff_graphs(a: ir.Graph, b: ir.Graph, outer: Matching | None = None) -> tuple[list[Change], int]:
    """The changes between two graphs, and how many nodes and weights have another name."""
    found = match_graphs(a, b, outer)
    changes = [*_ports("input", found.inputs, found), *_outputs(a, b, found), *_weights(found)]
    changes += [Change("-", "node", _called(node), _spelled(node)) for node in found.removed]
    changes += [Change("+", "node", _called(node), _spelled(node)) for node in found.added]
    renamed = sum(_called(x) != _called(y) for x, y in found.nodes.items())
    renamed += sum(x is not None and y is not None and x.name != y.name for x, y in found.initializers)
    for x, y in found.nodes.items():
        details = tuple(_node_details(x, y, found))
        if details:
            changes.append(Change("~", "node", _called(x), f"{_operator(x)}", details))
        for name, inner, other in _bodies(x, y):
            nested, more = _diff_graphs(inner, other, found)
            changes += [_nested(change, f"{_called(x)}.{name}") for change in nested]
            renamed += more
    return changes, renamed


def _bodies(x: ir.Node, y: ir.Node) -> Iterator[tuple[str, ir.Graph, ir.Graph]]:
    for name, attribute in sorted(x.attributes.items()):
        other = y.attributes.get(name)
        if other is not None and not attribute.is_ref() and attribute.type == other.type:
            if attribute.type == ir.AttributeType.GRAPH:
                yield name, attribute.as_graph(), other.as_graph()
            elif attribute.type == ir.AttributeType.GRAPHS:
                pairs = zip(attribute.as_graphs(), other.as_graphs(), strict=False)
                yield from ((f"{name}[{i}]", p, q) for i, (p, q) in enumerate(pairs))


def _node_details(x: ir.Node, y: ir.Node, found: Matching) -> Iterator[str]:
    if _operator(x) != _operator(y):
        yield f"operator {_operator(x)} -> {_operator(y)}"
    yield from _attribute_details(x, y)
    for i in range(max(len(x.inputs), len(y.inputs))):
        v, w = (n.inputs[i] if i < len(n.inputs) else None for n in (x, y))
        if not found.equal(v, w):
            yield f"input {i}: {_value_name(v)} -> {_value_name(w)}"
    if len(x.outputs) != len(y.outputs):
        yield f"outputs: {len(x.outputs)} -> {len(y.outputs)}"
    for i, (v, w) in enumerate(zip(x.outputs, y.outputs, strict=False)):
        if _types_differ(v, w):
            yield f"output {i}: {described(v)} -> {described(w)}"


def _attribute_details(x: ir.Node, y: ir.Node) -> Iterator[str]:
    for name in sorted({*x.attributes, *y.attributes}):
        v, w = x.attributes.get(name), y.attributes.get(name)
        if v is None or w is None or v.type != w.type or attribute_key(v) != attribute_key(w):
            yield f"attribute {printable(name)}: {_attribute_text(v)} -> {_attribute_text(w)}"


def _attribute_text(attribute: ir.Attr | None) -> str:
    if attribute is None:
        return "(none)"
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    value: Any = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor_text(value)
    if attribute.type == ir.AttributeType.GRAPH:
        return f"a graph of {len(value)} nodes"
    if attribute.type in (ir.AttributeType.GRAPHS, ir.AttributeType.TENSORS):
        return f"{len(value)} of them"
    return printable(str(list(value)) if isinstance(value, tuple | list) else str(value))


def _outputs(a: ir.Graph, b: ir.Graph, found: Matching) -> Iterator[Change]:
    """Graph outputs: those of one name, and else those that are the same value."""
    theirs = {v.name: v for v in b.outputs}
    pairs: list[tuple[ir.Value | None, ir.Value | None]] = []
    left: list[ir.Value] = []
    for value in a.outputs:
        other = theirs.pop(value.name, None)
        pairs.append((value, other)) if other is not None else left.append(value)
    for value in left:
        same = next((w for w in theirs.values() if found.values.get(value) is w), None)
        if same is not None:
            theirs.pop(same.name)
        pairs.append((value, same))
    pairs += [(None, w) for w in theirs.values()]
    yield from _ports("output", pairs, found)


def _ports(what: str, pairs: Sequence[tuple[ir.Value | None, ir.Value | None]], found: Matching) -> Iterator[Change]:
    for v, w in pairs:
        if v is None or w is None:
            value = v if v is not None else w
            assert value is not None
            yield Change("-" if w is None else "+", what, value.name or "", described(value))
            continue
        details = [] if v.name == w.name else [f"name {_value_name(v)} -> {_value_name(w)}"]
        if v.dtype != w.dtype or dims(v) != dims(w):
            details.append(f"{described(v)} -> {described(w)}")
        if what == "output" and not found.equal(v, w):
            details.append(f"made by {_maker(v)} -> {_maker(w)}")
        for key in sorted({*v.metadata_props, *w.metadata_props}):
            old, new = v.metadata_props.get(key), w.metadata_props.get(key)
            if key.startswith(_TAG) and old != new:
                details.append(f"{key.removeprefix(_TAG)} {printable(str(old))} -> {printable(str(new))}")
        if details:
            yield Change("~", what, v.name or "", details=tuple(details))


def _maker(value: ir.Value) -> str:
    producer = value.producer()
    return "an input" if producer is None else f"{_operator(producer)} {printable(_called(producer))}"


def _weights(found: Matching) -> Iterator[Change]:
    for v, w in found.initializers:
        if v is None or w is None:
            value = v if v is not None else w
            assert value is not None
            tensor = value.const_value
            yield Change("-" if w is None else "+", "weight", value.name or "", "" if tensor is None else _tensor_text(tensor))
        elif found.digests[v] != found.digests[w]:
            details = tensor_details(v.const_value, w.const_value)
            if v.name != w.name:
                details = [f"name {_value_name(v)} -> {_value_name(w)}", *details]
            yield Change("~", "weight", v.name or "", details=tuple(details))


def tensor_details(a: ir.TensorProtocol | None, b: ir.TensorProtocol | None) -> list[str]:
    """How two tensors differ."""
    if a is None or b is None:
        return [f"{_tensor_text(a)} -> {_tensor_text(b)}"]
    if a.dtype != b.dtype or list(a.shape) != list(b.shape):
        return [f"{_type_text(a)} -> {_type_text(b)}"]
    if _is_hashed(a) or _is_hashed(b):
        return [f"{_type_text(a)}: other elements"]
    if a.size <= _SHOWN_ELEMENTS:
        return [f"{_type_text(a)}: {_elements(a)} -> {_elements(b)}"]
    return [f"{_type_text(a)}: {array_details(a.numpy(), b.numpy())}"]


def array_details(a: np.ndarray, b: np.ndarray) -> str:
    """How two arrays of one type and shape differ."""
    try:
        a, b = a.astype(np.float64), b.astype(np.float64)
    except (TypeError, ValueError):  # texts
        return "other elements"
    with np.errstate(all="ignore"):
        apart = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        count = int(apart.sum())
        if not count:
            return "other bits of the same numbers"
        largest = float(np.abs(a[apart] - b[apart]).max())
    return f"{count:,} of {a.size:,} elements differ, by up to {largest:.3g}"


def _is_hashed(tensor: ir.TensorProtocol) -> bool:
    return isinstance(tensor, ir.ExternalTensor) and str(tensor.location).startswith("sha256:")


def _tensor_text(tensor: ir.TensorProtocol | None) -> str:
    if tensor is None:
        return "(none)"
    if tensor.size <= _SHOWN_ELEMENTS and not _is_hashed(tensor):
        return f"{_type_text(tensor)} {_elements(tensor)}"
    return _type_text(tensor)


def _elements(tensor: ir.TensorProtocol) -> str:
    return printable(str(tensor.numpy().tolist()))


def _type_text(tensor: ir.TensorProtocol) -> str:
    return f"{type_name(tensor.dtype)}[{','.join(str(d) for d in tensor.shape)}]"


def _types_differ(v: ir.Value, w: ir.Value) -> bool:
    """Where both are known: a model whose shapes nobody inferred is no other one."""
    types = v.dtype is not None and w.dtype is not None and v.dtype != w.dtype
    shapes = dims(v), dims(w)
    return types or (None not in shapes and shapes[0] != shapes[1])


def described(value: ir.Value) -> str:
    """``float32[N,3]``"""
    shape = dims(value)
    sizes = "…" if shape is None else ",".join("?" if d is None else printable(str(d)) for d in shape)
    return f"{'?' if value.dtype is None else type_name(value.dtype)}[{sizes}]"


def _spelled(node: ir.Node) -> str:
    return f"{_operator(node)} ({', '.join(_value_name(v) for v in node.inputs)})"


def _operator(node: ir.Node) -> str:
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return printable(f"{name}:{node.overload}" if node.overload else name)


def _called(node: ir.Node) -> str:
    return node.name or next((v.name for v in node.outputs if v.name), "") or ""


def _value_name(value: ir.Value | None) -> str:
    return "(none)" if value is None else printable(value.name or "?")


def printable(text: str) -> str:
    """A name as it can go to a terminal: control characters and line breaks are escaped, they may be an attack."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ---- folders ---------------------------------------------------------------------------------------------------------

# What follows from the rest, or from when and where something was compiled.
_DERIVED = {"ortc_version", "model", "fingerprint", "stages", "export", "criterion", "warnings", "history", "version"}


def _diff_folders(a: Path, b: Path) -> Difference:
    difference = Difference()
    plans = load_plan(a), load_plan(b)
    difference.add("plan.json", _plans(*plans))
    ours, theirs = map(_graph_files, plans)
    for file in dict.fromkeys([*ours, *theirs]):
        if file not in ours or file not in theirs:
            difference.add(file, [Change("-" if file in ours else "+", "graph", file)])
            continue
        models = [read_model(folder / graph.file) for folder, graph in ((a, ours[file]), (b, theirs[file]))]
        _diff_into(difference, file, *models)
    difference.add(
        f"{plans[0].checkpoint}/step-0", _checkpoints(*(f / p.checkpoint for f, p in zip((a, b), plans, strict=True)))
    )
    return difference


def _graph_files(plan: Plan) -> dict[str, GraphFile]:
    found = {f"stage-{s.index}/{phase}": graph for s in plan.stages for phase, graph in s.phases.items()}
    return {**found, "export": plan.export, "criterion": plan.criterion}


def _plans(a: Plan, b: Plan) -> Iterator[Change]:
    ours, theirs = (dict(_flat("", _keyed(plan))) for plan in (a, b))
    for key in dict.fromkeys([*ours, *theirs]):
        if key not in ours or key not in theirs:
            yield Change("-" if key in ours else "+", "field", key, printable(str(ours.get(key, theirs.get(key)))))
        elif ours[key] != theirs[key]:
            yield Change("~", "field", key, details=(f"{printable(str(ours[key]))} -> {printable(str(theirs[key]))}",))


def _keyed(plan: Plan) -> dict[str, Any]:
    fields = {key: value for key, value in plan.model_dump(mode="json").items() if key not in _DERIVED}
    return {**fields, "parameters": {p["name"]: p for p in fields["parameters"]}}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, inner in enumerate(value):
            yield from _flat(f"{prefix}[{i}]", inner)
    else:
        yield prefix, value


def _checkpoints(a: Path, b: Path) -> Iterator[Change]:
    """The initial weights."""
    ours, theirs = (_held(root / "step-0") for root in (a, b))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            held = ours if name in ours else theirs
            yield Change("-" if held is ours else "+", "weight", name, held[name].described(name))
            continue
        mine, other = ours[name], theirs[name]
        if mine.described(name) != other.described(name):
            yield Change("~", "weight", name, details=(f"{mine.described(name)} -> {other.described(name)}",))
        elif mine.bytes(name) != other.bytes(name):
            arrays = mine.array(name), other.array(name)
            how = "other elements" if arrays[0] is None or arrays[1] is None else array_details(arrays[0], arrays[1])
            yield Change("~", "weight", name, details=(f"{mine.described(name)}: {how}",))


def _held(folder: Path) -> dict[str, _Weights]:
    """The file that holds each weight: of several ranks, or of stages that were joined, there is more than one."""
    places = {name: entry["file"] for name, entry in read_index(folder)["parameters"].items()}
    files = {file: _Weights(folder / file) for file in dict.fromkeys(places.values())}
    for name, file in places.items():
        if name not in files[file].entries:
            raise CheckpointError(f"{folder / file} has no {name!r}, which the index says is there; compile again")
    return {name: files[file] for name, file in places.items()}


_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1", "BOOL": "?"}


class _Weights:
    """A safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                self.data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        self.start, self.entries = read_safetensors_header(path, self.data)

    def described(self, name: str) -> str:
        kind, shape, _, _ = self.entries[name]
        return f"{kind}{shape}"

    def bytes(self, name: str) -> memoryview:
        _, _, begin, end = self.entries[name]
        return self.data[self.start + begin : self.start + end]

    def array(self, name: str) -> np.ndarray | None:
        kind = self.entries[name][0]
        return np.frombuffer(self.bytes(name), _NUMPY[kind]) if kind in _NUMPY else None


# ---- text ------------------------------------------------------------------------------------------------------------


def diff_texts(name: str, expected: str, actual: str) -> list[str]:
    """The lines that tell how two graphs in canonical text differ; none if the texts are equal.

    As graphs, where they read back as such and differ; else (only names, order or provenance differ) as text.
    """
    if expected == actual:
        return []
    equal = False
    try:
        difference = diff_models(ir.from_onnx_text(expected), ir.from_onnx_text(actual))
        equal = not difference
    except Exception:  # of any kind, from the parser: a hash in an attribute, or a golden that was edited by hand
        difference = Difference()
    if difference:
        return [f"{name}, expected -> compiled:", *(f"  {line}" for line in str(difference).splitlines())]
    lines = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{name} (expected)", f"{name} (compiled)", lineterm=""
    )
    return [*(["the graphs are equal; names, their order, or tags in comments differ:"] if equal else []), *lines]
