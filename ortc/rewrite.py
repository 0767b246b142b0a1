"""Rewrites: how they are declared, and the driver that applies them, on the patterns of ``onnxscript.rewriter``.

A rewrite is two functions of one expression each, in the operators of the standard and in arithmetic::

    rewrite(
        "silu",
        before=lambda op, X: X * op.Sigmoid(X),
        after=lambda op, X: op.QuickGelu(X, alpha=1.0, _domain="com.microsoft"),
        samples=({"X": (2, 3)},),
    )

Their parameters carry the same names: values of the graph, or attributes where ``before`` uses them so. A number in
``before`` is a constant of one element that equals it but for rounding; the operands of a commutative operator may stand
in either order; an attribute that a node leaves out has its default. A match is replaced only if nothing else reads what
lies inside of it. One generic test runs both sides of every rewrite on its samples: who adds a rewrite adds data.

Only the patterns of onnxscript are used: its own driver tries every rule on every node, and loses types, shapes and names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript.rewriter.pattern import AttrVar, Constant, Pattern, SimplePatternMatcher

from ortc.graph.builder import Builder
from ortc.graph.names import all_graphs, take_place
from ortc.graph.shapes import constant, dims, rank
from ortc.rules import OpKey, node_key, op_key

# A rewrite whose result matches again would never end.
_MOST_SWEEPS = 10

Bindings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A declared rewrite; see :func:`rewrite`."""

    name: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    when: Callable[..., bool] | None
    tolerance: float
    samples: tuple[Mapping[str, Any], ...] = field(repr=False)

    @cached_property
    def pattern(self) -> Pattern:
        """``before`` as a pattern."""
        return Pattern(self.before, matcher=_Matcher, name=self.name)

    @cached_property
    def levels(self) -> tuple[frozenset[OpKey], ...]:
        """The operators of ``before``: the root, those of its operands, of theirs, and so on."""
        found, level = [], [self.pattern._target_pattern.output_node]
        while level:
            found.append(frozenset(map(_pattern_key, level)))
            producers = [v.producer() for node in level for v in node.inputs if v is not None]
            level = list(dict.fromkeys(node for node in producers if node is not None))
        return tuple(found)

    @property
    def root(self) -> OpKey:
        """The operator whose output is replaced."""
        return next(iter(self.levels[0]))

    @cached_property
    def operators(self) -> frozenset[OpKey]:
        """All operators of ``before``."""
        return frozenset[OpKey]().union(*self.levels)

    def match(self, graph: ir.Graph, node: ir.Node) -> tuple[Sequence[ir.Node], Bindings] | None:
        """The nodes and the values that ``before`` stands for, if ``node`` is its root and ``when`` agrees."""
        found = self.pattern.match(None, graph, node)  # type: ignore[arg-type]
        if not found:
            return None
        bindings = found.bindings
        if self.when is not None and not self.when(**_asked(self.when, bindings)):
            return None
        return list(dict.fromkeys(found.nodes)), bindings

    def result(self, op: Builder, bindings: Bindings) -> ir.Value:
        """``after``, written with a builder; of several outputs the first."""
        made = self.after(op, **_asked(self.after, bindings))
        return made[0] if isinstance(made, tuple) else made


REWRITES: dict[str, list[Rewrite]] = {}
_COMMUTATIVE: set[OpKey] = set()


def rewrite(
    of: str,
    *,
    before: Callable[..., Any],
    after: Callable[..., Any],
    when: Callable[..., bool] | None = None,
    tolerance: float = 1e-6,
    name: str | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Declare a rewrite.

    Args:
        of: the pass that it belongs to. Of several that match, the first declared wins.
        before: ``f(op, *parameters)``, the expression that is looked for.
        after: ``f(op, *parameters)``, what takes its place; it may leave parameters out. Of several outputs the first.
        when: ``f(*parameters)``, a condition on what the parameters stand for.
        tolerance: how far both sides may lie apart, of the largest element, in float32.
        name: what the new nodes' metadata and the counts call it; default: the pass's name.
        samples: parameter -> a shape (random normal), an array or a number (a constant), or an attribute.
    """
    REWRITES.setdefault(of, []).append(Rewrite(name or of, before, after, when, tolerance, tuple(samples)))


def commutative(*operators: str) -> None:
    """Declare operators of two operands whose order does not matter."""
    _COMMUTATIVE.update(op_key(name) for name in operators)


@dataclass(frozen=True)
class Hit:
    """One match that was replaced."""

    rule: str
    output: str
    inputs: Mapping[str, str]  # parameter -> the name of the value that it stood for


def apply_rewrites(graph: ir.Graph, rewrites: Sequence[Rewrite], of: str, keep: Collection[str] = ()) -> list[Hit]:
    """Replace all matches, also in nested graphs, until there are none; a match does not reach from graph to graph.

    Consumers come before producers, so the larger of two matches wins. What replaces a value has its name, type, shape,
    and says in its metadata where it comes from. Time is linear in the nodes; no order depends on hashes.

    Args:
        graph: a topologically sorted graph, changed in place.
        rewrites: in order of preference.
        of: the name of the pass, for the metadata.
        keep: names of values that must not vanish.

    Raises:
        AssertionError: if a rewrite matches its own result: a fault of its declaration.
    """
    parts = all_graphs(graph)
    present = {node_key(node) for part in parts for node in part}
    live = [rule for rule in rewrites if rule.operators <= present]
    hits: list[Hit] = []
    if not live:
        return hits
    outermost = Builder(graph)
    for _ in range(_MOST_SWEEPS):
        made: set[OpKey] = set()
        for part in parts:
            hits += _sweep(outermost if part is graph else Builder(part, outermost), live, of, keep, made)
        live = [rule for rule in rewrites if not rule.operators.isdisjoint(made)]
        if not live:
            return hits
    raise AssertionError(f"pass {of}: rewrite {hits[-1].rule!r} matches its own result")


def _sweep(op: Builder, rules: Sequence[Rewrite], of: str, keep: Collection[str], made: set[OpKey]) -> list[Hit]:
    """Go over a graph once; ``made`` gets the operators of new nodes."""
    by_root: dict[OpKey, dict[tuple[frozenset[OpKey], ...], list[Rewrite]]] = {}
    for rule in rules:
        by_root.setdefault(rule.root, {}).setdefault(rule.levels, []).append(rule)
    hits = []
    surroundings = _Surroundings()
    for node in reversed(list(op.graph)):
        groups = by_root.get(node_key(node)) if node.graph is op.graph else None
        for levels, candidates in groups.items() if groups is not None else ():
            if not surroundings.hold(node, levels):
                continue
            match = next(((rule, *m) for rule in candidates if (m := rule.match(op.graph, node)) is not None), None)
            if match is not None and _may_go(match[1], match[2], node, keep):
                hits.append(_replace(op, match[0], node, match[1], match[2], of, made))
                break
    return hits


class _Surroundings:
    """The operators at each distance upstream of nodes: most rewrites are ruled out by them, and need not be tried."""

    def __init__(self) -> None:
        self._known: dict[tuple[ir.Node, int], frozenset[OpKey]] = {}

    def hold(self, node: ir.Node, levels: Sequence[frozenset[OpKey]]) -> bool:
        """Whether all operators of a rewrite are at their distances from its root."""
        return all(level <= self._at(node, distance) for distance, level in enumerate(levels))

    def _at(self, node: ir.Node, distance: int) -> frozenset[OpKey]:
        found = self._known.get((node, distance))
        if found is None:
            producers = [] if distance == 0 else [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
            nearer = (self._at(p, distance - 1) for p in producers)
            found = frozenset([node_key(node)]) if distance == 0 else frozenset[OpKey]().union(*nearer)
            self._known[node, distance] = found
        return found


def _may_go(nodes: Sequence[ir.Node], bindings: Bindings, root: ir.Node, keep: Collection[str]) -> bool:
    inside = (v.name for node in nodes if node is not root for v in node.outputs)
    # A constant of shape [1] beside a scalar makes the scalar a vector.
    grows = rank(root.outputs[0]) and any(
        isinstance(v, ir.Value) and dims(v) == () and not _is_known(v) for v in bindings.values()
    )
    return not grows and not any(name in keep for name in inside)


def _is_known(value: ir.Value) -> bool:
    return constant(value) is not None


def _replace(
    op: Builder, rule: Rewrite, root: ir.Node, nodes: Sequence[ir.Node], bindings: Bindings, of: str, made: set[OpKey]
) -> Hit:
    old = root.outputs[0]
    name, origin = old.name or "", root.metadata_props.get("ortc.origin", root.name or "")
    with op.scope(root.name or root.op_type, before=root, origin=origin, rule=rule.name, pass_=of):
        new = rule.result(op, bindings)
    given = [value for value in bindings.values() if isinstance(value, ir.Value)]
    made.update(node_key(node) for node in _between(given, new))
    inputs = {key: value.name or "" for key, value in bindings.items() if isinstance(value, ir.Value)}
    new.type, new.shape = old.type or new.type, old.shape or new.shape
    take_place(old, new)
    op.graph.remove(nodes, safe=True)
    return Hit(rule.name, name, inputs)


def _between(given: Collection[ir.Value], result: ir.Value) -> list[ir.Node]:
    """The nodes that make a value of others."""
    found: dict[ir.Node, None] = {}
    waiting = [result]
    while waiting:
        value = waiting.pop()
        node = None if value in given else value.producer()
        if node is not None and node not in found:
            found[node] = None
            waiting += [v for v in node.inputs if v is not None]
    return list(found)


def number(value: Any) -> float | None:
    """The number that a value stands for, if it is a constant of one element."""
    array = constant(value)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


def _asked(function: Callable[..., Any], bindings: Bindings) -> dict[str, Any]:
    """Those bindings that the function has parameters for."""
    return {name: bindings[name] for name in _parameters(function) if name in bindings}


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


# ---- matching ----------------------------------------------------------------------------------------------------------


def _pattern_key(node: Any) -> OpKey:
    domain, op_type, _ = node.op_identifier()
    return domain, op_type


class _Matcher(SimplePatternMatcher):
    """onnxscript's matcher, but for commutative operands, default attributes, and constants in any precision."""

    def _match_node(self, pattern_node: Any, node: ir.Node) -> bool:
        seen = self._match.lookup_node(pattern_node)
        if seen is not None:
            return seen is node or self.fail("it stands for another node already")
        key = node_key(node)
        if _pattern_key(pattern_node) != key or not self._match_attributes(pattern_node, node):
            return self.fail("another operator")
        self._match.bind_node(pattern_node, node)
        expected, given = list(pattern_node.inputs), list(node.inputs)
        if len(given) > len(expected):
            return self.fail("more operands")
        if not (self._match_either(expected, given) if key in _COMMUTATIVE else self._match_operands(expected, given)):
            return self.fail("other operands")
        outputs = zip(pattern_node.outputs, node.outputs, strict=False)
        return len(node.outputs) >= len(pattern_node.outputs) and all(self._match.bind_value(p, v) for p, v in outputs)

    def _match_operands(self, expected: list[Any], given: list[ir.Value | None]) -> bool:
        for pattern, value in zip_longest(expected, given):
            if value is None if pattern is None else self._match_value(pattern, value):
                continue
            return False
        return True

    def _match_either(self, expected: list[Any], given: list[ir.Value | None]) -> bool:
        """In this order or the other; the one that fails leaves no bindings behind."""
        for order in (given, given[::-1]):
            self._match.enter_new_match()
            if self._match_operands(expected, order):
                self._match.merge_current_match()
                return True
            self._match.abandon_current_match()
        return False

    def _match_attributes(self, pattern_node: Any, node: ir.Node) -> bool:
        for name, pattern in pattern_node.attributes.items():
            attribute = node.attributes.get(name) or _default(node.domain, node.op_type, name)
            if attribute is None or not pattern.matches(attribute):
                return False
            if isinstance(pattern, AttrVar) and not self._match.bind(pattern.name or name, attribute.value):
                return False
        return True

    def _match_constant(self, pattern_constant: Constant, value: ir.Value) -> bool:
        array = constant(value)
        if array is None or array.size != 1 or array.ndim > 1:
            return self.fail("no constant of one element")
        wanted, found = float(pattern_constant.value), float(array.reshape(()))  # type: ignore[arg-type]
        precision = max(1e-5, ir.DataType.from_numpy(array.dtype).itemsize == 2 and 4e-3)
        return abs(found - wanted) <= precision * abs(wanted) or self.fail("another constant")


@cache
def _default(domain: str, op_type: str, name: str) -> ir.Attr | None:
    """What an attribute is where a node leaves it out."""
    if not onnx.defs.has(op_type, domain):
        return None
    attribute = onnx.defs.get_schema(op_type, domain).attributes.get(name)
    if attribute is None or not attribute.default_value.type:
        return None
    return ir.serde.deserialize_attribute(attribute.default_value)
