"""Cutting a graph: a part with the inputs that it needs, and a graph over stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.graph.builder import Builder
from ortc.graph.names import bodies_of, captured


def read_by(node: ir.Node) -> list[ir.Value]:
    """The values of the graph that a node reads, those of its nested bodies included."""
    own = [v for v in node.inputs if v is not None]
    return own + captured(node) if bodies_of(node) else own


def needed(outputs: Iterable[ir.Value], given: Collection[ir.Value]) -> tuple[set[ir.Node], set[ir.Value]]:
    """The nodes that make ``outputs`` from ``given`` and the graph's own inputs, and which of both they read."""
    nodes: set[ir.Node] = set()
    ends: set[ir.Value] = set()
    seen: set[ir.Value] = set()
    waiting = list(outputs)
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if value in given or node is None:
            ends.add(value)
        elif node not in nodes:
            nodes.add(node)
            waiting.extend(read_by(node))
    return nodes, ends


def carve(model: ir.Model, outputs: Sequence[ir.Value], given: Sequence[ir.Value] = ()) -> tuple[ir.Model, list[ir.Value]]:
    """A copy of the part of a model's graph that makes ``outputs`` from the graph's inputs and the values ``given``.

    Inputs keep their order: the graph's own, then those given; what the part does not read is left out.

    Returns:
        The part, and those of ``given`` that it reads.
    """
    _, ends = needed(outputs, set(given))
    own = [v for v in model.graph.inputs if v in ends]
    read = [v for v in given if v in ends]
    graph = ir.convenience.extract(model.graph, [*own, *read], list(outputs))
    held = dict(graph.initializers)
    graph.initializers.clear()  # it comes in the order of a set, another one in each process
    graph.initializers.update({name: held[name] for name in model.graph.initializers if name in held})
    part = ir.Model(
        graph, ir_version=model.ir_version, producer_name=model.producer_name, metadata_props=dict(model.metadata_props)
    )
    return part, read


@dataclass(frozen=True)
class Piece:
    """One stage of a graph.

    Attributes:
        model: the part.
        arriving: its inputs that other stages make: (input, the value in the whole graph, the stage that makes it).
        leaving: its outputs for other stages, likewise with the stages that read it.
    """

    model: ir.Model
    arriving: list[tuple[ir.Value, ir.Value, int]]
    leaving: list[tuple[ir.Value, ir.Value, list[int]]]


def cut(model: ir.Model, count: int, stages_of: Callable[[ir.Node], Sequence[int]]) -> list[Piece | None]:
    """Cut a model into stages; a value goes straight from the stage that makes it to each that reads it.

    Args:
        model: the whole; it stays as it is.
        count: how many stages.
        stages_of: the stages that a node runs in, the first of which sends its values to those that lack it.

    Returns:
        The stages; None for one that makes nothing that is read elsewhere or is an output of the graph.
    """
    graph = model.graph
    places = {node: tuple(stages_of(node)) for node in graph}
    readers: dict[ir.Value, set[int]] = {}
    for node in graph:
        for value in read_by(node):
            producer = value.producer()
            if producer is not None:
                away = set(places[node]) - set(places[producer])
                if away:
                    readers.setdefault(value, set()).update(away)
    crossing = [(v, sorted(readers[v])) for node in graph for v in node.outputs if v in readers]

    def home(value: ir.Value) -> int:
        producer = value.producer()
        return count - 1 if producer is None else places[producer][0]

    pieces: list[Piece | None] = []
    for s in range(count):
        outputs = [v for v in graph.outputs if home(v) == s]
        leaving = [(v, to) for v, to in crossing if home(v) == s]
        wanted = list(dict.fromkeys([*outputs, *(v for v, _ in leaving)]))
        if not wanted:
            pieces.append(None)
            continue
        part, read = carve(model, wanted, [v for v, to in crossing if s in to])
        made = dict(zip(wanted, part.graph.outputs, strict=True))
        arrived = part.graph.inputs[len(part.graph.inputs) - len(read) :]
        sent = []
        for value, to in leaving:
            output = made[value]
            if value in outputs:  # an output of the graph has that name, and that role
                op = Builder(part.graph)
                with op.scope(f"{value.name}.boundary", origin=value.name or "", pass_="stages"):
                    output = op.copy(output, like=output)
                output.name = op.names.fresh(f"{value.name}.boundary")
                part.graph.outputs.append(output)
            sent.append((output, value, to))
        pieces.append(Piece(part, [(a, v, home(v)) for a, v in zip(arrived, read, strict=True)], sent))
    return pieces
