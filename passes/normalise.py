"""Any ONNX model in one form: inlined, at one opset, constants folded, types and shapes known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from ortc.errors import ModelError
from ortc.graph.names import Names, all_graphs, bodies_of, take_place, taken_names
from ortc.graph.shapes import constant, dims, rank, static
from ortc.graph.unused import remove_unused
from ortc.passes.inference import ShapeInference, infer_shapes, merged
from ortc.passes.inlining import inline_functions, splice
from ortc.passes.opset import CONSTANT_NODE, change_opset

__all__ = ["convert_opset", "fold", "infer_shapes", "prepare", "remove_dead_nodes"]

# For a model that uses nothing of the standard, any opset is right.
DEFAULT_OPSET = 21


def prepare(model: ir.Model) -> ir.Model:
    """Tidy a model in place, at its own opset, without changing what it computes.

    Model-local functions are inlined; Constant nodes (but those of strings) and initializers of nested graphs become
    initializers of the main graph; no initializer is an input; every node has a unique name, and so has every value
    (but outputs that a node leaves out: those have none); nodes are in topological order; nodes that nothing needs are
    gone.
    Initializers that nothing needs stay: the compiler reports them. Those that were Constant nodes say so in their
    metadata (``ortc.constant_node``).

    Raises:
        ModelError: if functions cannot be inlined, or the graph has a cycle.
    """
    _inline_functions(model)
    common.RemoveInitializersFromInputsPass()(model)
    _sort(model)
    _give_names(model.graph)
    _lift_constants(model)
    change_opset(model, model.opset_imports[""])
    remove_dead_nodes(model)
    return model


def convert_opset(model: ir.Model, opset: int) -> ir.Model:
    """Bring a prepared model to an opset of the ONNX standard, in place.

    Initializers, inputs and outputs keep their names and shapes, and so do all nodes that need no change. Going up, the
    steps of :mod:`ortc.passes.opset` apply. Going down, an operator that has changed since only in what the node does
    not use stays as it is; one that ONNX defines through others is written out.

    Raises:
        ModelError: naming the nodes that cannot be expressed in ``opset``.
    """
    change_opset(model, opset)
    _lift_constants(model)
    return model


def _inline_functions(model: ir.Model) -> None:
    """Functions may be written in opsets of their own: then each node says which, until all are in the newest."""
    if "ai.onnx" in model.opset_imports:
        model.opset_imports[""] = model.opset_imports.pop("ai.onnx")
    graphs = [(model.graph, model.opset_imports), *((f.graph, f.opset_imports) for f in model.functions.values())]
    newest = max((imports[""] for _, imports in graphs if "" in imports), default=DEFAULT_OPSET)
    for graph, imports in graphs:
        if imports.setdefault("", newest) < newest:
            for node in graph.all_nodes():
                node.version = imports[""]
            imports[""] = newest
    inline_functions(model)


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


def _lift_constants(model: ir.Model) -> None:
    for graph in all_graphs(model.graph):
        for node in list(graph):
            if node.op_type == "Constant" and not node.domain and not node.outputs[0].is_graph_output():
                _lift_constant(graph, node)
    common.LiftSubgraphInitializersToMainGraphPass()(model)


def _lift_constant(graph: ir.Graph, node: ir.Node) -> None:
    if len(node.attributes) != 1:
        raise ModelError(f"node {node.name!r} (Constant) must have one value, but it has {len(node.attributes)}")
    (attribute,) = node.attributes.values()
    if attribute.name not in _CONSTANT_FORMS:
        return
    tensor = _CONSTANT_FORMS[attribute.name](attribute)
    if tensor.dtype == ir.DataType.STRING:
        return
    old = node.outputs[0]
    tensor.name = old.name
    lifted = ir.Value(
        name=old.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
        doc_string=old.doc_string,
        metadata_props={**old.metadata_props, CONSTANT_NODE: "1"},
    )
    old.replace_all_uses_with(lifted)
    graph.remove(node, safe=True)
    graph.register_initializer(lifted)


def remove_dead_nodes(model: ir.Model) -> None:
    """Without nodes that nothing needs; the initializers stay, in their order."""
    initializers = list(model.graph.initializers.values())
    remove_unused(model)
    model.graph.initializers.clear()
    for value in initializers:
        model.graph.register_initializer(value)


# Operators that are not evaluated though their inputs are constants: random ones (dropout gets its training form
# later), and those that say how a model was quantised.
_NOT_FOLDED = {
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"),
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
}

# Constants of more elements than the first are not computed with; what is made has at most as many as the inputs, or
# as the second.
_LARGEST_INPUT, _LARGEST_OUTPUT = 1 << 20, 1 << 12


def fold(model: ir.Model) -> ir.Model:
    """Simplify a model in place: whatever is constant is computed, what does nothing goes; the interface stays.

    Initializers count as constants, graph inputs do not: so a parameter that is a graph input is never folded. An If
    with a constant condition gives way to its branch. Dropout stays. Initializers that nothing reads stay, but those go
    that only folded nodes have read. Types and shapes are inferred on the way.

    Raises:
        ModelError: as :func:`infer_shapes`.
    """
    # onnxscript's folder is not used: it removes Dropout whatever it is told, and leaves outputs that nobody makes.
    spare = {v for v in model.graph.initializers.values() if not v.uses()}
    _Folding(model.graph).fold(model.graph)
    remove_dead_nodes(model)
    for name, value in list(model.graph.initializers.items()):
        if value not in spare and not value.uses() and not value.is_graph_output():
            model.graph.initializers.pop(name)
    return model


class _Folding:
    """What folding carries along: the main graph, which gets the constants, and what is known of sizes."""

    def __init__(self, graph: ir.Graph) -> None:
        self.main = graph
        self.inference = ShapeInference(graph)
        self.names = Names(taken_names(graph))

    def fold(self, graph: ir.Graph) -> None:
        """Fold the nodes of the main graph or of a body."""
        for node in graph:
            self._fold_node(graph, node)

    def _fold_node(self, graph: ir.Graph, node: ir.Node) -> None:
        self.inference.visit(node)
        branch = _taken_branch(node)
        if branch is not None:
            self._inline(node, branch)
            return
        for body in bodies_of(node):
            self.fold(body)
        if any(v.is_graph_output() and graph is not self.main for v in node.outputs):
            return  # what a body returns must be made in the body
        arrays = self._constants(node)
        same = _does_nothing(node)
        if arrays is not None:
            for value, array in zip(node.outputs, arrays, strict=True):
                take_place(value, self._constant(value, array))
            graph.remove(node, safe=True)
        elif same is not None and self._bypass(node.outputs[0], same):
            graph.remove(node, safe=True)

    def _constants(self, node: ir.Node) -> list[np.ndarray] | None:
        """The outputs, if they can be computed now."""
        y = node.outputs[0]
        known = self.inference.integers(y)
        if len(node.outputs) == 1 and known is not None and all(isinstance(d, int) for d in known.flat):
            return None if y.dtype is None else [known.astype(y.dtype.numpy())]
        if node.domain or node.op_type in _NOT_FOLDED or not node.inputs or bodies_of(node):
            return None
        if any(v is not None and (v.const_value is None or v.is_graph_input()) for v in node.inputs):
            return None
        size = max(v.const_value.size for v in node.inputs if v is not None and v.const_value is not None)
        made = [static(v) for v in node.outputs]
        if size > _LARGEST_INPUT or any(m is None or np.prod(m) > max(size, _LARGEST_OUTPUT) for m in made):
            return None
        return _evaluate(node, self.main.opset_imports[""])

    def _constant(self, like: ir.Value, array: np.ndarray) -> ir.Value:
        name = self.names.fresh(like.name or "constant")
        value = ir.Value(name=name, const_value=ir.tensor(array, dtype=like.dtype, name=name))
        value.type, value.shape = like.type, ir.Shape(array.shape)
        self.main.register_initializer(value)
        return value

    def _bypass(self, y: ir.Value, x: ir.Value) -> bool:
        """Use ``x`` for ``y``; not where an input, an initializer or another output would lose its name."""
        if x.producer() is not None:
            x.shape = merged(dims(x), dims(y))
        if not y.is_graph_output():
            ir.convenience.replace_all_uses_with(y, x)
            return True
        if x.producer() is None or x.graph is not y.graph or x.is_graph_output():
            return False
        take_place(y, x)
        return True

    def _inline(self, node: ir.Node, branch: ir.Graph) -> None:
        for name in list(branch.initializers):
            self.main.register_initializer(branch.initializers.pop(name))
        graph = node.graph
        assert graph is not None
        for inner in splice(node, branch, list(branch.outputs), self.names):
            self._fold_node(graph, inner)


def _taken_branch(node: ir.Node) -> ir.Graph | None:
    """The branch of an If whose condition is constant."""
    if node.op_type != "If" or node.domain:
        return None
    condition = constant(node.inputs[0])
    if condition is None:
        return None
    return node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()


def _evaluate(node: ir.Node, opset: int) -> list[np.ndarray] | None:
    """Compute a node with constant inputs; None if ONNX's reference implementation cannot, or finds another type."""
    feeds = {v.name or "": v.const_value.numpy() for v in node.inputs if v is not None and v.const_value is not None}
    try:
        results = ReferenceEvaluator(ir.serde.serialize_node(node), opsets={"": opset}).run(None, feeds)
    except Exception:
        return None
    for value, result in zip(node.outputs, results, strict=True):
        if not isinstance(result, np.ndarray | np.generic) or value.dtype is None or result.dtype != value.dtype.numpy():
            return None
    return [np.asarray(result) for result in results]


def _does_nothing(node: ir.Node) -> ir.Value | None:
    """The input that a node's only output always equals, or None."""
    if node.domain or not node.inputs or node.inputs[0] is None or len(node.outputs) != 1:
        return None
    x, y = node.inputs[0], node.outputs[0]
    same_shape = dims(x) is not None and dims(x) == dims(y)
    match node.op_type:
        case "Identity":
            nothing = True
        case "Cast":
            nothing = x.dtype is not None and x.dtype == y.dtype
        case "Concat" | "Sum" | "Mean" | "Max" | "Min":
            nothing = len(node.inputs) == 1
        case "Transpose":
            perm = node.attributes.get_ints("perm")
            nothing = list(perm) == sorted(perm) if perm else rank(x) in (0, 1)
        case "Reshape" | "Expand" | "Squeeze" | "Unsqueeze" | "Flatten" | "Tile":
            nothing = same_shape
        case _:
            nothing = False
    return x if nothing else None
