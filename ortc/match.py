"""Which node of one graph is which node of another: by what they compute, not by what they are called.

Nodes are matched in rounds, each linear in the graphs, the surest first:

1. what is computed from the same inputs and weights in the same way (a node's structure up to the inputs);
2. what is used in the same way (its structure down to the outputs), so that a change at the beginning of a graph leaves
   everything behind it matched;
3. the same operator between neighbours that are matched, forwards and backwards; or of the same name;
4. a node of the same name, with another operator.

Structures are not hashed but numbered: equal ones get the same number, in a table that both graphs share, so nothing is
matched by a collision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import onnx_ir as ir

from ortc.graph.cut import read_by
from ortc.graph.shapes import dims
from ortc.source import content_hash

# Constants of at most so many elements are what they hold; larger ones are weights, which have names.
SMALL = 64

_Item = TypeVar("_Item")
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass
class Matching:
    """Pairs of two graphs, nested ones apart.

    Attributes:
        nodes: a node of the first -> that of the second.
        values: an input, initialiser or node output of the first -> that of the second.
        inputs, initializers: pairs, in the order of the first graph.
        removed, added: nodes of the first and of the second without a partner, in order.
        labels: numbers of both graphs' values: equal ones are computed in the same way.
        digests: of the initialisers, see :func:`tensor_digest`.
    """

    nodes: dict[ir.Node, ir.Node] = field(default_factory=dict)
    values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    inputs: list[tuple[ir.Value | None, ir.Value | None]] = field(default_factory=list)
    initializers: list[tuple[ir.Value | None, ir.Value | None]] = field(default_factory=list)
    removed: list[ir.Node] = field(default_factory=list)
    added: list[ir.Node] = field(default_factory=list)
    labels: dict[ir.Value, int] = field(default_factory=dict)
    digests: dict[ir.Value, str] = field(default_factory=dict)

    def equal(self, a: ir.Value | None, b: ir.Value | None) -> bool:
        """Whether a value of the first graph is that of the second."""
        if a is None or b is None:
            return a is b
        if self.values.get(a) is b:
            return True
        # Equal expressions may be merged in one graph only; weights are other ones, even if they hold the same.
        return (a not in self.digests or _is_small(a)) and self.labels.get(a, -1) == self.labels.get(b, -2)


def match_graphs(a: ir.Graph, b: ir.Graph, outer: Matching | None = None) -> Matching:
    """Match two graphs.

    Args:
        a: a graph whose nodes are in order.
        b: likewise.
        outer: of the graphs around them, if they are nested.
    """
    return _Matcher(a, b, outer).run()


def tensor_digest(tensor: ir.TensorProtocol) -> str:
    """Type, shape and elements; where canonical text (:mod:`ortc.graph.text`) has a hash instead of elements, that hash."""
    if isinstance(tensor, ir.ExternalTensor) and str(tensor.location).startswith("sha256:"):
        content = str(tensor.location)
    else:
        content = content_hash(tensor)
    return f"{tensor.dtype.name}{[str(d) for d in tensor.shape]}{content}"


def attribute_key(attribute: ir.Attr) -> Hashable:
    """What an attribute holds, to compare; a nested graph by its number of nodes alone."""
    if attribute.is_ref():
        return ("@", attribute.ref_attr_name)
    value: Any = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return tensor_digest(value)
    if attribute.type == ir.AttributeType.TENSORS:
        return tuple(map(tensor_digest, value))
    if attribute.type in _GRAPHS:
        return len(value) if attribute.type == ir.AttributeType.GRAPH else tuple(map(len, value))
    if attribute.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING):
        return repr(value)
    if isinstance(value, Sequence):
        return repr(list(value))
    return hashlib.sha256(ir.to_proto(attribute).SerializeToString(deterministic=True)).hexdigest()


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= SMALL


class _Matcher:
    def __init__(self, a: ir.Graph, b: ir.Graph, outer: Matching | None) -> None:
        self.a, self.b = a, b
        self.nodes_a, self.nodes_b = list(a), list(b)
        self.found = Matching()
        self.numbers: dict[Hashable, int] = {}
        self.taken: set[ir.Node] = set()
        self.bodies: dict[ir.Attr, int] = {}
        self.operator: dict[ir.Node, int] = {}
        self.nested = outer is not None
        if outer is not None:
            self.found.values.update(outer.values)
            for value, other in outer.values.items():
                self.found.labels[value] = self.found.labels[other] = self._number("outer", len(self.numbers))

    def run(self) -> Matching:
        """All rounds."""
        self._match_inputs()
        self._match_initializers()
        self.up_a, self.up_b = self._upwards(self.nodes_a), self._upwards(self.nodes_b)
        self._match_groups(self.up_a, self.up_b)
        self._match_groups(self._downwards(self.a, self.nodes_a), self._downwards(self.b, self.nodes_b))
        readers_a, readers_b = _readers(self.nodes_a), _readers(self.nodes_b)
        self._match_neighbours(readers_a, readers_b)
        self._match_names(lambda a, b: _operator_name(a) == _operator_name(b))
        self._match_neighbours(readers_a, readers_b)
        self._match_names(
            lambda a, b: any(v is not None and self.found.equal(v, w) for v, w in zip(a.inputs, b.inputs, strict=False))
        )
        self.found.removed = [n for n in self.nodes_a if n not in self.found.nodes]
        self.found.added = [n for n in self.nodes_b if n not in self.taken]
        self._match_initializers_by_use()
        return self.found

    def _number(self, *key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _pair(self, a: ir.Node, b: ir.Node) -> None:
        self.found.nodes[a] = b
        self.taken.add(b)
        self.found.values.update(zip(a.outputs, b.outputs, strict=False))

    # ---- inputs and weights ------------------------------------------------------------------------------------------

    def _match_inputs(self) -> None:
        pairs, left_a, left_b = _by_key(self.a.inputs, self.b.inputs, lambda v: v.name)
        more, left_a, left_b = _by_key(left_a, left_b, lambda v: (v.dtype, dims(v)))
        for k, (x, y) in enumerate([*pairs, *more]):
            self.found.values[x] = y
            self.found.labels[x] = self.found.labels[y] = self._number("input", k)
        if not self.nested:  # a template reads weights that it does not hold
            for k, (x, y) in enumerate(_by_key(_orphans(self.nodes_a), _orphans(self.nodes_b), lambda v: v.name)[0]):
                self.found.values[x] = y
                self.found.labels[x] = self.found.labels[y] = self._number("missing", k)
        for side, values in (("a", left_a), ("b", left_b)):
            self.found.labels.update({v: self._number("input", side, i) for i, v in enumerate(values)})
        partner = dict(pairs + more)
        self.found.inputs = [*((v, partner.get(v)) for v in self.a.inputs), *((None, v) for v in left_b)]

    def _match_initializers(self) -> None:
        sides = [_initializers(graph) for graph in (self.a, self.b)]
        for values in sides:
            for value in values:
                tensor = value.const_value
                self.found.digests[value] = "" if tensor is None else tensor_digest(tensor)
        digest = self.found.digests
        left_a, left_b = sides
        pairs: list[tuple[ir.Value, ir.Value]] = []
        keys: tuple[Callable[[ir.Value], Hashable], ...] = (
            lambda v: (v.name, digest[v]),
            lambda v: digest[v],
            lambda v: (v.name, v.dtype, dims(v)),
            lambda v: v.name,
        )
        for key in keys:
            more, left_a, left_b = _by_key(left_a, left_b, key)
            pairs += more
        self.found.values.update(pairs)
        for value in [*sides[0], *sides[1]]:
            self.found.labels[value] = self._number("content", digest[value])
        for k, (x, y) in enumerate(pairs):
            if digest[x] != digest[y]:
                self.found.labels[x] = self.found.labels[y] = self._number("weight", k)
        partner = dict(pairs)
        self.found.initializers = [*((v, partner.get(v)) for v in sides[0]), *((None, v) for v in left_b)]

    def _match_initializers_by_use(self) -> None:
        """Weights that differ in name and content, and stand in the same place."""
        alone_a = {a for a, b in self.found.initializers if b is None and a is not None}
        alone_b = {b for a, b in self.found.initializers if a is None and b is not None}
        new: dict[ir.Value, ir.Value] = {}
        for node, other in self.found.nodes.items():
            for x, y in zip(node.inputs, other.inputs, strict=False):
                if x in alone_a and y in alone_b:
                    alone_a.discard(x)
                    alone_b.discard(y)
                    new[x] = y
        if new:
            self.found.values.update(new)
            rows = [(a, new.get(a, b) if a is not None else b) for a, b in self.found.initializers]
            placed = set(new.values())
            self.found.initializers = [(a, b) for a, b in rows if a is not None or b not in placed]

    # ---- structure ---------------------------------------------------------------------------------------------------

    def _operator(self, node: ir.Node) -> int:
        """The operator with its attributes, but for nested graphs."""
        if node not in self.operator:
            attributes = [(name, attribute_key(a)) for name, a in sorted(node.attributes.items())]
            key = (node.domain, node.op_type, node.overload, tuple(attributes), len(node.outputs))
            self.operator[node] = self._number("operator", key)
        return self.operator[node]

    def _upwards(self, nodes: Sequence[ir.Node]) -> dict[ir.Node, int]:
        """Each node's structure up to the inputs."""
        labels, found = self.found.labels, {}
        for node in nodes:
            inputs = tuple(None if v is None else labels.get(v, -1) for v in node.inputs)
            bodies = tuple(self._body(body) for body in _bodies(node))
            found[node] = self._number("node", self._operator(node), inputs, bodies)
            labels.update({v: self._number("value", found[node], i) for i, v in enumerate(node.outputs)})
        return found

    def _body(self, graph: ir.Graph) -> int:
        """A nested graph's structure, given that of what it captures."""
        labels = self.found.labels
        labels.update({v: self._number("formal", i) for i, v in enumerate(graph.inputs)})
        for value in graph.initializers.values():
            tensor = value.const_value
            labels[value] = self._number("content", "" if tensor is None else tensor_digest(tensor))
        self._upwards(list(graph))
        return self._number("body", tuple(labels.get(v, -1) for v in graph.outputs))

    def _downwards(self, graph: ir.Graph, nodes: Sequence[ir.Node]) -> dict[ir.Node, int]:
        """Each node's structure down to the outputs, with what it reads of inputs and weights."""
        labels = self.found.labels
        uses: dict[ir.Value, list[tuple[int, int]]] = {}
        for i, value in enumerate(graph.outputs):
            uses.setdefault(value, []).append((-1, self._number("output", value.name or i)))
        found: dict[ir.Node, int] = {}
        for node in reversed(nodes):
            given = tuple(labels[v] if v is not None and v.producer() is None and v in labels else None for v in node.inputs)
            used = tuple(tuple(sorted(uses.get(v, ()))) for v in node.outputs)
            if any(used):  # of dead nodes nothing is known
                found[node] = self._number("down", self._operator(node), given, used)
                for position, value in enumerate(read_by(node)):
                    uses.setdefault(value, []).append((position, found[node]))
        return found

    def _match_groups(self, keys_a: dict[ir.Node, int], keys_b: dict[ir.Node, int]) -> None:
        """Pair the nodes of equal structure; of several those of equal names first, the others in order."""
        left_a = [n for n in self.nodes_a if n in keys_a and n not in self.found.nodes]
        left_b = [n for n in self.nodes_b if n in keys_b and n not in self.taken]
        named, left_a, left_b = _by_key(left_a, left_b, lambda n: (keys_a.get(n, keys_b.get(n)), _called(n)))
        for a, b in named:
            self._pair(a, b)
        for a, b in _by_key(left_a, left_b, lambda n: keys_a.get(n, keys_b.get(n)))[0]:
            self._pair(a, b)

    # ---- neighbours and names ----------------------------------------------------------------------------------------

    def _match_neighbours(self, readers_a: _Readers, readers_b: _Readers) -> None:
        """Nodes of the same operator that read the same, or whose results are read by a pair, where there is no other."""
        for node in self.nodes_a:
            if node in self.found.nodes:
                continue
            for position, value in enumerate(node.inputs):
                partner = self.found.values.get(value) if value is not None else None
                if partner is None or partner not in readers_b or len(readers_b[partner]) > _MANY:
                    continue
                if len(readers_a[value]) > _MANY:  # type: ignore[index]
                    continue
                ours = self._open(readers_a[value], position, node, self.found.nodes)  # type: ignore[index]
                theirs = self._open(readers_b[partner], position, node, self.taken)
                if len(ours) == len(theirs) == 1:
                    self._pair(node, theirs[0])
                    break
        for node in reversed(self.nodes_a):
            other = self.found.nodes.get(node)
            if other is not None:
                for x, y in zip(node.inputs, other.inputs, strict=False):
                    self._match_producers(x, y)

    def _match_producers(self, x: ir.Value | None, y: ir.Value | None) -> None:
        a, b = (None if v is None else v.producer() for v in (x, y))
        if a is None or b is None or a in self.found.nodes or b in self.taken:
            return
        here = a in self.up_a and b in self.up_b  # not a node of a graph around this one
        if here and _operator_name(a) == _operator_name(b) and x is not None and y is not None and x.index() == y.index():
            self._pair(a, b)

    @staticmethod
    def _open(readers: Iterable[tuple[ir.Node, int]], position: int, like: ir.Node, matched: Any) -> list[ir.Node]:
        wanted = _operator_name(like)
        return [n for n, at in readers if at == position and n not in matched and _operator_name(n) == wanted]

    def _share_an_input(self, a: ir.Node, b: ir.Node) -> bool:
        return any(v is not None and self.found.equal(v, w) for v, w in zip(a.inputs, b.inputs, strict=False))

    def _match_names(self, fits: Callable[[ir.Node, ir.Node], bool]) -> None:
        """Nodes that are called the same, or whose results are, or of which one was made from the other."""
        for name_a, name_b in _NAMES:
            named_a = [(n, name_a(n)) for n in self.nodes_a if n not in self.found.nodes]
            named_b = [(n, name_b(n)) for n in self.nodes_b if n not in self.taken]
            pairs = _by_key((x for x in named_a if x[1]), (y for y in named_b if y[1]), lambda item: item[1])[0]
            for (a, _), (b, _) in pairs:
                if fits(a, b):
                    self._pair(a, b)


def _name(node: ir.Node) -> str:
    return node.name or ""


def _first_output(node: ir.Node) -> str:
    return node.outputs[0].name or ""


def _origin(node: ir.Node) -> str:
    return node.metadata_props.get("ortc.origin", "")


_NAMES: tuple[tuple[Callable[[ir.Node], str], Callable[[ir.Node], str]], ...] = (
    (_name, _name), (_first_output, _first_output), (_name, _origin), (_origin, _name),
)  # fmt: skip

# A value with more readers says little of each of them, and looking at all of them each time would not be linear.
_MANY = 32

_Readers = dict[ir.Value, list[tuple[ir.Node, int]]]


def _readers(nodes: Iterable[ir.Node]) -> _Readers:
    found: _Readers = {}
    for node in nodes:
        for position, value in enumerate(node.inputs):
            if value is not None:
                found.setdefault(value, []).append((node, position))
    return found


def _orphans(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """Values that nodes read, and nobody makes."""
    read = dict.fromkeys(v for node in nodes for v in read_by(node))
    return [v for v in read if v.producer() is None and not v.is_graph_input() and not v.is_initializer()]


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for _, attribute in sorted(node.attributes.items()):
        if not attribute.is_ref() and attribute.type in _GRAPHS:
            value: Any = attribute.value
            yield from [value] if attribute.type == ir.AttributeType.GRAPH else value


def _initializers(graph: ir.Graph) -> list[ir.Value]:
    return list(graph.initializers.values())


def _operator_name(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type


def _called(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or ""


def _by_key(
    a: Iterable[_Item], b: Iterable[_Item], key: Callable[[_Item], Hashable]
) -> tuple[list[tuple[_Item, _Item]], list[_Item], list[_Item]]:
    """Pairs of equal key, in order; what is left of each."""
    waiting: dict[Hashable, list[_Item]] = {}
    left_b = list(b)
    for item in reversed(left_b):
        waiting.setdefault(key(item), []).append(item)
    pairs, left_a = [], []
    for item in a:
        others = waiting.get(key(item))
        if others:
            pairs.append((item, others.pop()))
        else:
            left_a.append(item)
    used = {id(y) for _, y in pairs}
    return pairs, left_a, [item for item in left_b if id(item) not in used]
