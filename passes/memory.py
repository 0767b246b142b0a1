"""How operators deal with memory, as ONNX Runtime's CPU kernels do; and the order of nodes that needs little of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ortc.compiler import SLOT, Compilation, Pass, of, role
from ortc.graph.cut import read_by
from ortc.graph.liveness import Liveness, NodeMemory, Waits, liveness, low_peak_order
from ortc.passes.costs import Shapes, concrete_sizes
from ortc.passes.stages import assumed_sizes
from ortc.rules import OpKey, node_key, op_key


def _keys(operators: str) -> list[OpKey]:
    return [op_key(name) for name in operators.split()]


# What the kernels do, measured on ONNX Runtime 1.19.2 and 1.32.0. The output is the first input's memory:
_VIEWS = frozenset(_keys("Identity Reshape Flatten Squeeze Unsqueeze"))

# The output may be written over the first input. No operator of two operands (Add, Mul, …) does so.
_IN_PLACE = frozenset(
    _keys("Relu LeakyRelu ThresholdedRelu Elu Selu Sigmoid HardSigmoid Tanh Softplus Softsign Clip Cast Softmax LogSoftmax")
)


def node_memory(node: ir.Node) -> NodeMemory:
    """What is known of a node."""
    key = node_key(node)
    if key in _VIEWS:
        return NodeMemory(views=((0, 0),))
    if key in _IN_PLACE:
        return NodeMemory(in_place=((0, 0),))
    return NodeMemory()


# Outputs that the runtime binds to arrays of its own.
_BOUND = frozenset({"loss", "parameter", "state", "buffer", "gradient"})


def value_bytes(graph: ir.Graph, shapes: Shapes) -> dict[ir.Value, int]:
    """Bytes of the values that a session makes in memory of its own, those of nested graphs too."""
    parameters = {of(v) for v in graph.inputs if role(v) == "parameter"}
    bound = {v for v in graph.outputs if role(v) in _BOUND and (role(v) != "gradient" or of(v) in parameters)}
    graphs = [graph, *graph.subgraphs()]
    return {v: shapes.bytes(v) for g in graphs for node in g for v in node.outputs if v not in bound}


def phase_memory(graph: ir.Graph, binding: Mapping[str, int]) -> Liveness:
    """Live bytes of a phase's session, with these sizes of the symbolic dimensions."""
    return liveness(graph, value_bytes(graph, concrete_sizes(graph, binding)), node_memory)


@dataclass(frozen=True)
class Order(Pass):
    """Orders every graph for a low peak of memory; the runtime asks ONNX Runtime to keep the order."""

    name = "order"
    after = ("clean-up",)

    def run(self, c: Compilation) -> None:
        binding = assumed_sizes(c)
        for phases in c.stages:
            for model in phases.values():
                graph = model.graph
                sizes = value_bytes(graph, concrete_sizes(graph, binding))
                graph.extend(low_peak_order(graph, sizes, node_memory, overwriting(graph)))


def overwriting(graph: ir.Graph) -> Waits:
    """The nodes whose output the runtime lets share an input's memory, with those that read the input, and must run before.

    So are parameters and states, and the gradients that micro-batches add to.
    """
    readers: dict[ir.Value, list[ir.Node]] = {}
    viewed: dict[ir.Value, ir.Value] = {}
    for node in graph:
        for value in dict.fromkeys(read_by(node)):
            readers.setdefault(viewed.get(value, value), []).append(node)
        for i, o in node_memory(node).views:
            source = node.inputs[i]
            if source is not None:
                viewed[node.outputs[o]] = viewed.get(source, source)
    inputs = {_place(v): v for v in graph.inputs}
    found: dict[ir.Node, list[ir.Node]] = {}
    for output in graph.outputs:
        producer, old = output.producer(), inputs.get(_place(output))
        if producer is not None and old is not None and role(output) in ("parameter", "state", "gradient"):
            found.setdefault(producer, []).extend(n for n in readers.get(old, ()) if n is not producer)
    return found


def _place(value: ir.Value) -> tuple[str | None, str, str | None]:
    return role(value), of(value), value.metadata_props.get(SLOT)
