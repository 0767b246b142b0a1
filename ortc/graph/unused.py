"""Without what nothing needs, in time linear in the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def hold_outputs(graph: ir.Graph) -> list[ir.Node]:
    """Let nodes have the graph's outputs, whose only output is that of the last of them, until :func:`released_outputs`.

    onnx_ir goes through all outputs of a graph for each node that it removes, and a training graph has one for each parameter;
    and through all inputs of a node for each of them that changes, hence several.
    """
    values = list(graph.outputs)
    size = math.isqrt(len(values)) + 1
    holders = [
        ir.Node("ortc", "Outputs", values[i : i + size], [ir.AttrInt64("first", i)], num_outputs=1)  # no two are equal
        for i in range(0, len(values), size)
    ]
    last = ir.Node("ortc", "Outputs", [holder.outputs[0] for holder in holders], num_outputs=1)
    graph.extend([*holders, last])
    graph.outputs.clear()
    graph.outputs.extend(last.outputs)
    return [*holders, last]


def released_outputs(graph: ir.Graph, holders: Sequence[ir.Node]) -> list[ir.Value]:
    """What the outputs have become, in their order; the graph has none now."""
    values = [value for holder in holders[:-1] for value in holder.inputs if value is not None]
    graph.outputs.clear()
    graph.remove(holders, safe=True)
    return values


def remove_unused(model: ir.Model) -> None:
    """Without nodes, optional outputs and initializers that nothing needs."""
    holders = hold_outputs(model.graph)
    RemoveUnusedNodesPass()(model)
    model.graph.outputs.extend(released_outputs(model.graph, holders))
