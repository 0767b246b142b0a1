"""How operators deal with memory, as ONNX Runtime's CPU kernels do."""

from __future__ import annotations

import onnx_ir as ir

from ortc.compiler import of, role
from ortc.graph.liveness import NodeMemory
from ortc.passes.costs import Shapes
from ortc.rules import OpKey, node_key, op_key


def _keys(operators: str) -> list[OpKey]:
    return [op_key(name) for name in operators.split()]


# What the kernels do, measured on ONNX Runtime 1.19.2 and 1.32.0. The output is the first input's memory:
VIEWS = frozenset(_keys("Identity Reshape Flatten Squeeze Unsqueeze"))

# The output may be written over the first input. No operator of two operands (Add, Mul, …) does so.
_IN_PLACE = frozenset(
    _keys("Relu LeakyRelu ThresholdedRelu Elu Selu Sigmoid HardSigmoid Tanh Softplus Softsign Clip Cast Softmax LogSoftmax")
)

# ONNX Runtime reads a transposed operand of these where it lies (it makes them FusedMatMul or Gemm with transA, transB).
_PRODUCTS = frozenset(_keys("MatMul com.microsoft::FusedMatMul Gemm"))


def node_memory(node: ir.Node) -> NodeMemory:
    """What is known of a node."""
    key = node_key(node)
    if key in VIEWS or _folds(node):
        return NodeMemory(views=((0, 0),))
    if key in _IN_PLACE:
        return NodeMemory(in_place=((0, 0),))
    return NodeMemory()


def _folds(node: ir.Node) -> bool:
    """Whether a node is a transposition of the last two axes that only matrix products read."""
    if node_key(node) != ("", "Transpose"):
        return False
    readers = [use.node for use in node.outputs[0].uses()]
    perm = node.attributes.get_ints("perm", ())
    last_two = [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]
    return bool(readers) and list(perm) == last_two and all(node_key(reader) in _PRODUCTS for reader in readers)


# Outputs that the runtime binds to arrays of its own.
_BOUND = frozenset({"loss", "parameter", "state", "buffer", "gradient"})


def value_bytes(graph: ir.Graph, shapes: Shapes) -> dict[ir.Value, int]:
    """Bytes of the values that a session makes in memory of its own, those of nested graphs too."""
    parameters = {of(v) for v in graph.inputs if role(v) == "parameter"}
    bound = {v for v in graph.outputs if role(v) in _BOUND and (role(v) != "gradient" or of(v) in parameters)}
    graphs = [graph, *graph.subgraphs()]
    return {v: shapes.bytes(v) for g in graphs for node in g for v in node.outputs if v not in bound}
