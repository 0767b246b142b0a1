"""How operators deal with memory, as ONNX Runtime's CPU kernels do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from ortc.compiler import of, role
from ortc.graph.liveness import Liveness, Memory, NodeMemory, liveness
from ortc.graph.names import all_graphs
from ortc.passes.costs import Shapes
from ortc.rules import OpKey, node_key, op_key


def _keys(operators: str) -> list[OpKey]:
    return [op_key(name) for name in operators.split()]


# What the kernels do, measured on ONNX Runtime 1.19.2 and 1.32.0. The output is the first input's memory:
VIEWS = frozenset(_keys("Identity Reshape Flatten Squeeze Unsqueeze"))

# The output may be written over the first input. No operator of two operands (Add, Mul, …) does so.
_IN_PLACE = frozenset(
    _keys(
        "Relu LeakyRelu ThresholdedRelu Elu Selu Sigmoid HardSigmoid Tanh Softplus Softsign Clip Cast Softmax LogSoftmax "
        "ScatterElements"
    )
)


# ---- what kernels take for themselves: elements ------------------------------------------------------------------------


def _columns(node: ir.Node, shapes: Shapes) -> int:
    """One image as columns (im2col): (C/group)·kernel·positions; of dY, X, W [M, C/group, kernel…]."""
    gradient, _, weight = map(shapes.of, node.inputs[:3])  # type: ignore[arg-type]
    return math.prod(weight[1:]) * math.prod(gradient[2:])


def _columns_at_once(node: ir.Node, shapes: Shapes) -> int:
    """One image as columns, where the filters of a group outnumber the positions (otherwise a piece at a time); of X, W."""
    weight, positions = shapes.of(node.inputs[1]), math.prod(shapes.of(node.outputs[0])[2:])  # type: ignore[arg-type]
    filters = (weight[0] if weight else 0) // max(node.attributes.get_int("group", 1), 1)
    return math.prod(weight[1:]) * positions if filters > positions and math.prod(weight[2:]) > 1 else 0


def _columns_back(node: ir.Node, shapes: Shapes) -> int:
    """One image's columns: (M/group)·kernel·positions; of X, W [C, M/group, kernel…]."""
    image, weight = map(shapes.of, node.inputs[:2])  # type: ignore[arg-type]
    return math.prod(weight[1:]) * math.prod(image[2:])


def _partial_sum(node: ir.Node, shapes: Shapes) -> int:
    """Of three terms and more."""
    return shapes.elements(node.outputs[0]) if len(node.inputs) > 2 else 0


def _both_choices(node: ir.Node, shapes: Shapes) -> int:
    """Each operand, spread over the condition."""
    condition, *operands = (() if v is None else shapes.of(v) for v in node.inputs)
    return sum(max(math.prod(condition), math.prod(operand)) for operand in operands)


def _last_axis_first(node: ir.Node, shapes: Shapes) -> int:
    """Input and output with the axis last, where it is not."""
    sizes = shapes.of(node.outputs[0])
    axis = node.attributes.get_int("axis", -1)
    return 0 if axis in (-1, len(sizes) - 1) else 2 * math.prod(sizes)


def _indices(node: ir.Node, shapes: Shapes) -> int:
    """The indices, as 64 bits each."""
    return 8 * shapes.elements(node.inputs[1]) // math.ceil((node.outputs[0].dtype or ir.DataType.FLOAT).itemsize)  # type: ignore[arg-type]


_SCRATCH: dict[OpKey, Callable[[ir.Node, Shapes], int]] = {
    ("com.microsoft", "ConvGrad"): _columns,
    ("", "Conv"): _columns_at_once,
    ("", "ConvTranspose"): _columns_back,
    ("", "ScatterElements"): _indices,
    ("", "Sum"): _partial_sum,
    ("", "Where"): _both_choices,
    **dict.fromkeys(_keys("Softmax LogSoftmax"), _last_axis_first),
    **dict.fromkeys(_keys("HardSwish Mish"), lambda node, shapes: shapes.elements(node.outputs[0])),  # one is in two steps
}


_FIRST = ((0, 0),)  # of the first input and the first output
_KINDS = {**dict.fromkeys(VIEWS, NodeMemory(views=_FIRST)), **dict.fromkeys(_IN_PLACE, NodeMemory(in_place=_FIRST))}
_PLAIN = NodeMemory()


def node_memory(node: ir.Node, shapes: Shapes | None = None) -> NodeMemory:
    """What is known of a node; its scratch only where the shapes are."""
    key = node_key(node)
    kind = _KINDS.get(key, _PLAIN)
    if shapes is None or key not in _SCRATCH:
        return kind
    return replace(kind, scratch=math.ceil(_SCRATCH[key](node, shapes) * (node.outputs[0].dtype or ir.DataType.FLOAT).itemsize))


def kernels(shapes: Shapes) -> Memory:
    """What is known of every node of a graph with these sizes."""
    return lambda node: node_memory(node, shapes)


# Outputs that the runtime binds to arrays of its own.
_BOUND = frozenset({"loss", "parameter", "state", "buffer", "gradient"})


def value_bytes(graph: ir.Graph, shapes: Shapes) -> dict[ir.Value, int]:
    """Bytes of the values that a session makes in memory of its own, those of nested graphs too."""
    parameters = {of(v) for v in graph.inputs if role(v) == "parameter"}
    bound = {v for v in graph.outputs if role(v) in _BOUND and (role(v) != "gradient" or of(v) in parameters)}
    made = [v for g in all_graphs(graph) for node in g for v in node.outputs if v.name]  # one without a name is left out
    return {v: shapes.bytes(v) for v in made if v not in bound}


def phase_memory(graph: ir.Graph, shapes: Shapes) -> Liveness:
    """Live bytes of a phase's session, beside inputs and bound outputs.

    So it is in training, where the nodes run as they are written; an evaluation may take less, for ONNX Runtime fuses nodes.
    """
    return liveness(graph, value_bytes(graph, shapes), kernels(shapes))
