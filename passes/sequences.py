"""Sequences whose elements are known one by one give way to the tensors in them, so that gradients can flow.

Exporters make them for ``split``, ``chunk``, ``stack`` and, in loops, for lists that grow by one element per turn.
"""

from __future__ import annotations

import onnx_ir as ir

from ortc.graph.builder import Builder
from ortc.graph.shapes import constant, dims

Elements = dict[ir.Value, list[ir.Value]]


def resolve_sequences(model: ir.Model) -> ir.Model:
    """Replace the sequences of the main graph by tensors, in place; the interface and what is computed stay.

    The model is folded and has types and shapes; those of new nodes and behind them are to be inferred again. What
    cannot be known now (a position, a number of parts) stays a sequence.
    """
    graph = model.graph
    op = Builder(graph)
    elements: Elements = {}
    for node in list(graph):
        if node.domain:
            continue
        with op.scope(node.name or node.op_type, before=node, origin=node.name or "", pass_="sequences"):
            if node.op_type in _MAKE:
                made = _MAKE[node.op_type](op, node, elements)
                if made is not None:
                    elements[node.outputs[0]] = made
            elif node.op_type in _TAKE and node.inputs[0] in elements:
                taken = _TAKE[node.op_type](op, node, elements[node.inputs[0]])
                if taken is not None:
                    _replace(op, node.outputs[0], taken)
            elif node.op_type == "Loop":
                _collect_in_loop(op, node, elements)
    for node in reversed(list(graph)):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs) and any(v in elements for v in _values(node)):
            graph.remove(node, safe=True)
    return model


def _values(node: ir.Node) -> list[ir.Value]:
    return [v for v in [*node.inputs, *node.outputs] if v is not None]


def _replace(op: Builder, old: ir.Value, new: ir.Value) -> None:
    """``new`` gets the uses of ``old``, and its name where the graph's interface has it."""
    if old.is_graph_output():
        new = op.Identity(new)
        new.type, new.shape = old.type, old.shape
        new.metadata_props.update(old.metadata_props)
        name, old.name = old.name, None
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _position(value: ir.Value | None, default: int, count: int) -> int | None:
    """A position in a sequence of ``count`` as a number from 0, if it is known and there."""
    if value is None:
        return default
    known = constant(value)
    if known is None or not -count <= int(known.item()) <= count:
        return None
    return int(known.item()) % count if int(known.item()) < 0 else int(known.item())


# ---- what makes a sequence: its elements, or None --------------------------------------------------------------------


def _construct(op: Builder, node: ir.Node, elements: Elements) -> list[ir.Value] | None:
    return [v for v in node.inputs if v is not None]


def _empty(op: Builder, node: ir.Node, elements: Elements) -> list[ir.Value] | None:
    return []


def _identity(op: Builder, node: ir.Node, elements: Elements) -> list[ir.Value] | None:
    return elements.get(node.inputs[0]) if node.inputs[0] is not None else None


def _insert(op: Builder, node: ir.Node, elements: Elements) -> list[ir.Value] | None:
    sequence, new, *where = node.inputs
    if sequence not in elements or new is None:
        return None
    have = elements[sequence]
    position = _position(where[0] if where else None, len(have), len(have))
    return None if position is None else [*have[:position], new, *have[position:]]


def _erase(op: Builder, node: ir.Node, elements: Elements) -> list[ir.Value] | None:
    sequence, *where = node.inputs
    if not elements.get(sequence):  # type: ignore[arg-type]
        return None
    have = elements[sequence]  # type: ignore[index]
    position = _position(where[0] if where else None, len(have) - 1, len(have))
    return None if position is None else [v for i, v in enumerate(have) if i != position]


def _split(op: Builder, node: ir.Node, elements: Elements) -> list[ir.Value] | None:
    """A number as ``split`` is the size of each part but perhaps the last; without it every part is one slice."""
    x, *given = node.inputs
    if x is None or dims(x) is None:
        return None
    [axis] = op.axes(x, node.attributes.get_int("axis", 0))
    size = op.dims(x)[axis]
    if given and given[0] is not None:
        split = constant(given[0])
        if split is not None and split.ndim == 1:
            sizes = [int(n) for n in split]
        elif split is not None and isinstance(size, int):
            sizes = [min(int(split), size - start) for start in range(0, size, int(split))]
        else:
            return None
    elif isinstance(size, int):
        sizes = [1] * size
    else:
        return None
    parts = list(op.Split(x, sizes, axis=axis, _outputs=len(sizes))) if len(sizes) > 1 else [x]
    slices = not (given and given[0] is not None) and not node.attributes.get_int("keepdims", 1)
    return [op.Squeeze(p, [axis]) for p in parts] if slices else parts


# ---- what is read from one -------------------------------------------------------------------------------------------


def _at(op: Builder, node: ir.Node, have: list[ir.Value]) -> ir.Value | None:
    position = _position(node.inputs[1], 0, len(have))
    return None if position is None or position == len(have) else have[position]


def _length(op: Builder, node: ir.Node, have: list[ir.Value]) -> ir.Value | None:
    return op.const(len(have))


def _concat(op: Builder, node: ir.Node, have: list[ir.Value]) -> ir.Value | None:
    axis = node.attributes.get_int("axis", 0)
    if not have:
        return None
    if node.attributes.get_int("new_axis", 0):
        have = [op.Unsqueeze(v, [axis]) for v in have]
    return op.Concat(*have, axis=axis)


# ---- a list that a loop fills ----------------------------------------------------------------------------------------


def _collect_in_loop(op: Builder, loop: ir.Node, elements: Elements) -> None:
    """A loop that appends one element per turn to an empty sequence collects them as a scan output instead."""
    body = loop.attributes["body"].as_graph()
    states = len(loop.inputs) - 2
    outer = {d for v in op.graph.inputs for d in dims(v) or () if isinstance(d, str)}
    lists = [i for i in range(states) if _is_collected(loop, body, i, elements, outer)]
    if not lists:
        return
    items = []
    for i in lists:
        append = body.outputs[1 + i].producer()
        assert append is not None
        items.append(append.inputs[1])
    appends = [body.outputs[1 + i].producer() for i in lists]
    kept = [i for i in range(len(loop.outputs)) if i not in lists]
    outputs = [body.outputs[0], *(body.outputs[1 + i] for i in kept), *items]
    body.outputs.clear()
    body.outputs.extend(outputs)  # type: ignore[arg-type]
    for append in appends:
        body.remove(append, safe=True)  # type: ignore[arg-type]
    for i in reversed(lists):
        del body.inputs[2 + i]
    inputs = [*loop.inputs[:2], *(v for i, v in enumerate(loop.inputs[2:]) if i not in lists)]
    attributes = list(loop.attributes.values())
    new = [ir.Value(name=op.names.fresh(f"{loop.name}.collected")) for _ in range(len(kept) + len(lists))]
    for value, item in zip(new[len(kept) :], items, strict=True):
        assert item is not None
        assert item.dtype is not None
        value.dtype, value.shape = item.dtype, ir.Shape([None, *(dims(item) or ())])
    name, loop.name = loop.name, None
    node = ir.Node("", "Loop", inputs, attributes, outputs=new, name=name, metadata_props=dict(loop.metadata_props))
    op.graph.insert_before(loop, node)
    for i, value in zip(kept, new, strict=False):
        old = loop.outputs[i]
        value.type, value.shape = old.type, old.shape
        value.metadata_props.update(old.metadata_props)
        text, old.name = old.name, None
        value.name = text
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    for i, value in zip(lists, new[len(kept) :], strict=True):
        for use in list(loop.outputs[i].uses()):
            with op.scope(use.node.name or "", before=use.node, origin=use.node.name or "", pass_="sequences"):
                _replace(op, use.node.outputs[0], _joined(op, use.node, value))
            op.graph.remove(use.node, safe=True)
    op.graph.remove(loop, safe=True)


def _is_collected(loop: ir.Node, body: ir.Graph, i: int, elements: Elements, outer: set[str]) -> bool:
    """Whether state ``i`` starts empty, only grows at its end, by elements of one shape, and is only read joined.

    The elements' sizes are the same in every turn: along the axis where they are joined because the size is known
    outside of the loop, along the others because they could not be joined otherwise.
    """
    start, inside, result = loop.inputs[2 + i], body.inputs[2 + i], body.outputs[1 + i]
    append = result.producer()
    if start is None or elements.get(start) != [] or append is None or append.op_type != "SequenceInsert":
        return False
    item = append.inputs[1]
    if item is None or item.producer() is None:
        return False
    grows = append.graph is body and append.inputs[0] is inside and len(append.inputs) == 2
    alone = len(inside.uses()) == 1 and not result.uses() and list(body.outputs).count(result) == 1
    y, shape = loop.outputs[i], dims(item)
    if shape is None or y.is_graph_output():
        return False
    joins = [use.node for use in y.uses()]
    axes = [n.attributes.get_int("axis", 0) for n in joins if not n.attributes.get_int("new_axis", 0)]
    same = all(isinstance(shape[a], int) or shape[a] in outer for a in axes)
    return grows and alone and same and all(n.op_type == "ConcatFromSequence" and n.graph is loop.graph for n in joins)


def _joined(op: Builder, node: ir.Node, stacked: ir.Value) -> ir.Value:
    """What ConcatFromSequence makes of the elements, from the elements stacked along a first axis."""
    r, new_axis = op.rank(stacked), node.attributes.get_int("new_axis", 0)
    axis = node.attributes.get_int("axis", 0) % (r if new_axis else r - 1)
    moved = op.Transpose(stacked, perm=[*range(1, axis + 1), 0, *range(axis + 1, r)]) if axis else stacked
    if new_axis:
        return moved
    sizes = [op.dim(stacked, a) for a in range(1, r)]
    return op.Reshape(moved, op.vector(*sizes[:axis], -1, *sizes[axis + 1 :]))


_MAKE = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SplitToSequence": _split,
    "Identity": _identity,
}
_TAKE = {"SequenceAt": _at, "SequenceLength": _length, "ConcatFromSequence": _concat}

# The operators that give way where their sequence's elements are known one by one.
RESOLVED = frozenset({*_MAKE, *_TAKE} - {"Identity"})
