"""Nested graphs, what they read, and fresh names that never collide with the user's."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


class Names:
    """Hands out unused names; deterministic, constant time per name."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """``base`` itself if it is free, else ``base_1``, ``base_2``, …"""
        name = base
        while name in self._taken:
            self._next[base] = count = self._next.get(base, 0) + 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def all_graphs(graph: ir.Graph) -> list[ir.Graph]:
    """The graph and the bodies nested in its nodes, outermost first."""
    # Graph.subgraphs() does the same, through an iterator in which a compilation spent a tenth of its time.
    return [graph, *(inner for node in graph for body in bodies_of(node) for inner in all_graphs(body))]


_GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


def captured(node: ir.Node) -> list[ir.Value]:
    """Values of the surrounding graph that the node's nested bodies read."""
    found: dict[ir.Value, None] = {}
    for body in bodies_of(node):
        inside = {v for g in all_graphs(body) for v in _defined(g)}
        for graph in all_graphs(body):
            used = [v for n in graph for v in n.inputs if v is not None] + list(graph.outputs)
            found.update(dict.fromkeys(v for v in used if v not in inside))
    return list(found)


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs nested right in a node."""
    own = node.attributes.data  # the plain dict: every walk of a graph asks this of every node
    if not own or _GRAPHS.isdisjoint([a.type for a in own.values()]):
        return []
    bodies: list[ir.Graph] = []
    for attribute in own.values():
        if attribute.type == ir.AttributeType.GRAPH:
            bodies.append(attribute.value)
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies.extend(attribute.value)
    return bodies


def _defined(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def taken_names(graph: ir.Graph) -> set[str]:
    """Every name of a value or a node in the graph and its nested bodies."""
    taken: set[str] = set()
    for g in all_graphs(graph):
        taken.update(v.name for v in g.inputs if v.name)
        taken.update(name for name in g.initializers if name)
        for node in g:
            taken.update(v.name for v in node.outputs if v.name)
            if node.name:
                taken.add(node.name)
    return taken


def take_place(old: ir.Value, new: ir.Value) -> None:
    """``new`` gets the uses and the name of ``old``, and what is known of it."""
    new.metadata_props.update(old.metadata_props)
    new.type = new.type or old.type
    new.shape = new.shape or old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    name, old.name = old.name, None
    new.name = name or new.name
