"""Any ONNX model in one form: inlined, at one opset, constants folded, types and shapes known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ortc.errors import ModelError
from ortc.graph.names import Names, all_graphs, taken_names
from ortc.passes.inference import infer_shapes

__all__ = ["convert_opset", "fold", "infer_shapes", "prepare"]


def prepare(model: ir.Model) -> ir.Model:
    """Tidy a model in place, at its own opset, without changing what it computes.

    Model-local functions are inlined; Constant nodes (but those of strings) and initializers of nested graphs become
    initializers of the main graph; no initializer is an input; every node has a unique name, and so has every value (but
    outputs that a node leaves out: those have none); nodes are in topological order; nodes that nothing needs are gone.
    Initializers that nothing needs stay: the compiler reports them.

    Raises:
        ModelError: if functions cannot be inlined, or the graph has a cycle.
    """
    _inline(model)
    common.RemoveInitializersFromInputsPass()(model)
    common.OutputFixPass()(model)
    _sort(model)
    _give_names(model.graph)
    for graph in all_graphs(model.graph):
        _lift_constants(graph)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    _remove_dead_nodes(model)
    return model


def _inline(model: ir.Model) -> None:
    try:
        common.InlinePass()(model)
    except Exception as error:
        raise ModelError(f"the model's local functions cannot be inlined: {error.__cause__ or error}") from None
    model.functions.clear()


def _sort(model: ir.Model) -> None:
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(f"the nodes of the model have no order: {error}") from None


def _give_names(graph: ir.Graph) -> None:
    """A unique name for every node and value; those that have one keep it, the model's interface first."""
    fresh = Names(taken_names(graph)).fresh
    values: set[str] = set()
    nodes: set[str] = set()

    def settle(value: ir.Value, base: str) -> None:
        if not value.name or value.name in values:
            value.name = fresh(value.name or base)
        values.add(value.name)

    named: set[ir.Value] = set()
    for g in all_graphs(graph):
        for value in [*g.inputs, *g.outputs, *g.initializers.values()]:
            if value not in named:
                named.add(value)
                settle(value, "value")
    for g in all_graphs(graph):
        for node in g:
            if not node.name or node.name in nodes:
                node.name = fresh(node.name or node.op_type)
            nodes.add(node.name)
            _trim_outputs(node)
            for value in node.outputs:
                if value not in named and (value.name or value.uses()):
                    settle(value, node.name)


def _trim_outputs(node: ir.Node) -> None:
    count = len(node.outputs)
    while count > 1 and not node.outputs[count - 1].name and not node.outputs[count - 1].uses():
        count -= 1
    if count < len(node.outputs):
        node.resize_outputs(count)


# Every form that a Constant node takes, but strings: how its attribute becomes a tensor.
_CONSTANT_FORMS: dict[str, Callable[[ir.Attr], ir.TensorProtocol]] = {
    "value": lambda a: a.as_tensor(),
    "value_float": lambda a: ir.tensor(np.array(a.as_float(), np.float32)),
    "value_floats": lambda a: ir.tensor(np.array(a.as_floats(), np.float32)),
    "value_int": lambda a: ir.tensor(np.array(a.as_int(), np.int64)),
    "value_ints": lambda a: ir.tensor(np.array(a.as_ints(), np.int64)),
}


def _lift_constants(graph: ir.Graph) -> None:
    for node in list(graph):
        if node.op_type != "Constant" or node.domain or node.outputs[0].is_graph_output():
            continue
        (attribute,) = node.attributes.values()
        if attribute.name not in _CONSTANT_FORMS:
            continue
        tensor = _CONSTANT_FORMS[attribute.name](attribute)
        if tensor.dtype == ir.DataType.STRING:
            continue
        old = node.outputs[0]
        tensor.name = old.name
        lifted = ir.Value(
            name=old.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape),
            const_value=tensor,
            doc_string=old.doc_string,
            metadata_props=dict(old.metadata_props),
        )
        old.replace_all_uses_with(lifted)
        graph.remove(node, safe=True)
        graph.register_initializer(lifted)


def _remove_dead_nodes(model: ir.Model) -> None:
    """Without nodes that nothing needs; the initializers stay, in their order."""
    initializers = list(model.graph.initializers.values())
    common.RemoveUnusedNodesPass()(model)
    model.graph.initializers.clear()
    for value in initializers:
        model.graph.register_initializer(value)


def convert_opset(model: ir.Model, opset: int) -> ir.Model:
    """Bring a prepared model to ``opset``, in place."""
    from onnxscript.version_converter import convert_version

    if model.opset_imports.get("", opset) < opset:
        convert_version(model, opset, fallback=True)
    model.opset_imports[""] = opset
    return model


def fold(model: ir.Model) -> ir.Model:
    """Fold constants."""
    from onnxscript.optimizer import fold_constants

    fold_constants(model, should_fold=lambda node: None)
    common.IdentityEliminationPass()(model)
    _remove_dead_nodes(model)
    return model
