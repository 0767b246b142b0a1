"""Separates weights that an exporter merged only because they were equal when it ran.

PyTorch's exporters store equal initialisers once. Of an untrained model, whose norms are all ones and biases all zeros, that
ties dozens of weights which the user's code keeps apart. They are told from weights that really are shared (a tied embedding)
by two signs together: every element has the same value, which trained or random weights do not have; and the file still says
that the users were different modules: the TorchScript exporter leaves ``Identity(a.weight) -> b.weight``, the dynamo exporter
writes each node's module path into its metadata.
"""

from __future__ import annotations

import ast

import onnx_ir as ir

from ortc.graph.names import Names, taken_names
from ortc.graph.shapes import FLOAT_TYPES

_SCOPES = "pkg.torch.onnx.name_scopes"
_LARGEST = 1 << 16  # elements; norms and biases are small, and no large weight shall be read for this


def unmerge(model: ir.Model) -> list[str]:
    """Separate the merged weights of a prepared model, in place.

    Returns:
        The names of the weights that became their own.
    """
    graph = model.graph
    names = Names(taken_names(graph))
    made: list[str] = []
    for value in list(graph.initializers.values()):
        if len(value.uses()) > 1 and _is_uniform(value):
            made += _from_identities(graph, value)
            made += _from_modules(graph, value, names)
    return made


def _is_uniform(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype not in FLOAT_TYPES or not 1 < tensor.size <= _LARGEST:
        return False
    array = tensor.numpy().reshape(-1)
    return bool((array == array[0]).all())


def _own(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
    copy.metadata_props.update(value.metadata_props)
    graph.register_initializer(copy)
    return copy


def _from_identities(graph: ir.Graph, value: ir.Value) -> list[str]:
    made = []
    for node in [u.node for u in value.uses()]:
        if node.op_type != "Identity" or node.domain or node.graph is not graph or node.outputs[0].is_graph_output():
            continue
        output = node.outputs[0]
        name = output.name or ""
        users = list(output.uses())
        for use in users:
            use.node.replace_input_with(use.idx, None)
        graph.remove(node, safe=True)
        copy = _own(graph, value, name)
        for use in users:
            use.node.replace_input_with(use.idx, copy)
        made.append(name)
    return made


def _from_modules(graph: ir.Graph, value: ir.Value, names: Names) -> list[str]:
    owner, _, leaf = (value.name or "").rpartition(".")
    made: dict[str, ir.Value] = {}
    for use in list(value.uses()):
        module = _module(use.node)
        if not owner or module is None or module == owner or module.startswith(f"{owner}.") or owner.startswith(f"{module}."):
            continue
        if module not in made:
            made[module] = _own(graph, value, names.fresh(f"{module}.{leaf}"))
        use.node.replace_input_with(use.idx, made[module])
    return [v.name or "" for v in made.values()]


def _module(node: ir.Node) -> str | None:
    """The path of the innermost module that the node was exported from."""
    text = node.metadata_props.get(_SCOPES)
    if text is None:
        return None
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else None
