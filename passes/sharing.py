"""Weights that an exporter merged although they are two, and weights that it wrote twice although they are one.

PyTorch's exporters store equal initialisers once. Of an untrained model, whose norms are all ones and biases all zeros, that
ties dozens of weights which the user's code keeps apart. They are told from weights that really are shared (a tied embedding)
by two signs together: every element has the same value, which trained or random weights do not have; and the file still says
that the users were different modules: the TorchScript exporter leaves ``Identity(a.weight) -> b.weight``, the dynamo exporter
writes each node's module path into its metadata.

The other way round, folding constants writes a tied weight (an embedding that is also the output's projection) a second time,
transposed, under a name of the exporter's own. Trained apart the two would drift from each other.
"""

from __future__ import annotations

import ast

import numpy as np
import onnx_ir as ir

from ortc.graph.names import Names, taken_names
from ortc.graph.shapes import FLOAT_TYPES

_SCOPES = "pkg.torch.onnx.name_scopes"
TORCH_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
_COMPARED = 512  # elements of two matrices that are compared; more would read the weights
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


def tie_copies(model: ir.Model) -> dict[str, str]:
    """Replace an exporter's transposed copy of a weight by a Transpose of that weight, in place, in a prepared model.

    Returns:
        The copy's name -> the name of the weight that it follows from now on.
    """
    graph = model.graph
    _merge_folds(graph)
    matrices: dict[tuple[int, ...], list[ir.Value]] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in FLOAT_TYPES and len(tensor.shape) == 2 and tensor.size > 1 and value.uses():
            matrices.setdefault(tuple(tensor.shape.numpy()), []).append(value)
    tied: dict[str, str] = {}
    for (rows, columns), copies in matrices.items():
        for copy in [v for v in copies if _made_by_exporter(v)]:
            originals = (v for v in matrices.get((columns, rows), []) if not _made_by_exporter(v) and _is_transposed(copy, v))
            original = next(originals, None)
            if original is not None and not copy.is_graph_output():
                tied[copy.name or ""] = original.name or ""
                _follow(graph, copy, original)
    return tied


def _merge_folds(graph: ir.Graph) -> None:
    """A weight of a module that is called several times, folded anew for each call (transposed, say), is one weight."""
    first: dict[tuple[object, ...], ir.Value] = {}
    for value in list(graph.initializers.values()):
        source, tensor = value.metadata_props.get(TORCH_FOLDED_FROM), value.const_value
        if source is None or "." not in source or tensor is None or tensor.dtype not in FLOAT_TYPES or tensor.size < 2:
            continue
        kept = first.setdefault((source, tensor.dtype, tuple(tensor.shape.numpy())), value)
        if kept is not value and not value.is_graph_output() and _is_same(value, kept):
            ir.convenience.replace_all_uses_with(value, kept)
            graph.initializers.pop(value.name or "")


def _is_same(value: ir.Value, other: ir.Value) -> bool:
    """Whether elements all over two tensors of one shape are equal."""
    assert value.const_value is not None
    assert other.const_value is not None
    a, b = value.const_value.numpy().reshape(-1), other.const_value.numpy().reshape(-1)
    places = (np.arange(_COMPARED) * 104729) % a.size
    return bool((a[places] == b[places]).all())


def _made_by_exporter(value: ir.Value) -> bool:
    return (value.name or "").startswith("onnx::") or TORCH_FOLDED_FROM in value.metadata_props


def _is_transposed(copy: ir.Value, original: ir.Value) -> bool:
    """Whether elements all over the two matrices are equal, and not all the same."""
    assert copy.const_value is not None
    assert original.const_value is not None
    a, b = copy.const_value.numpy(), original.const_value.numpy()
    # Two primes spread the places over rows and columns.
    rows, columns = (np.arange(_COMPARED) * 7919) % a.shape[0], (np.arange(_COMPARED) * 104729) % a.shape[1]
    seen = a[rows, columns]
    return bool((seen == b[columns, rows]).all() and (seen != seen[0]).any())


def follow_transposed(graph: ir.Graph, copy: ir.Value, name: str) -> None:
    """Give a graph the weight ``name``, of which it holds but a transposed copy, and let the copy follow it."""
    tensor = copy.const_value
    assert tensor is not None
    rows, columns = tensor.shape.numpy()
    shape = ir.Shape((columns, rows))
    original = ir.Value(name=name, type=copy.type, shape=shape)
    original.const_value = ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(tensor.numpy().T)), dtype=tensor.dtype, shape=shape, name=name
    )
    graph.register_initializer(original)
    _follow(graph, copy, original)


def _follow(graph: ir.Graph, copy: ir.Value, original: ir.Value) -> None:
    name = copy.name or ""
    graph.initializers.pop(name)
    copy.name = None
    node = ir.Node("", "Transpose", [original], [ir.AttrInt64s("perm", [1, 0])], num_outputs=1, name=f"{name}.tied")
    node.metadata_props.update({"ortc.pass": "prepare", "ortc.origin": original.name or ""})
    graph.insert_before(graph[0], node)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, copy.type, copy.shape
    ir.convenience.replace_all_uses_with(copy, node.outputs[0])
