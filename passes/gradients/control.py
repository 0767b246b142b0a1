"""Control flow: the backward of a nested graph is a nested graph.

The forward of a branch or an iteration is computed again inside the backward, from what entered it: nothing inside is kept.
For loops, what entered each iteration is collected by additional scan outputs of the forward node, and the backward is a Scan
over the iterations from the last to the first. Gradients of captured values are added up over the iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortc.autodiff import build_gradients
from ortc.graph.builder import Builder
from ortc.graph.shapes import dims, is_float
from ortc.rules import Unsupported, control

Gradients = dict[ir.Value, ir.Value]


@control("If")
def if_(op: Builder, node: ir.Node, arrived: Mapping[ir.Value, ir.Value], wanted: Sequence[ir.Value]) -> Gradients:
    """An If on the same condition, whose branches hold the backward of the branches"""
    branches = {}
    for name in ("then_branch", "else_branch"):
        with op.nested([]) as inner:
            results, nodes = _copy(inner, node.attributes[name].as_graph(), [])
            seeds = _seeds(inner, [(y, arrived.get(v)) for y, v in zip(results, node.outputs, strict=True)])
            found = build_gradients(inner, seeds, wanted, nodes)
            inner.give([_or_zeros(inner, found, v) for v in wanted])
        branches[name] = inner.graph
    outputs = [ir.Value(type=v.type, shape=v.shape) for v in wanted]
    then, otherwise = branches["then_branch"], branches["else_branch"]
    op.node("If", node.inputs[0], _outputs=outputs, then_branch=then, else_branch=otherwise)
    return dict(zip(wanted, outputs, strict=True))


@control("Loop")
def loop(op: Builder, node: ir.Node, arrived: Mapping[ir.Value, ir.Value], wanted: Sequence[ir.Value]) -> Gradients:
    """A Scan over the iterations that the Loop made, from the last to the first"""
    body = node.attributes["body"].as_graph()
    iteration, _, *states = body.inputs
    count = len(states)
    _same_sizes(states, body.outputs[1 : count + 1])
    initial = node.inputs[2 : count + 2]
    steps, *entered = _collect(op, node, body, [iteration, *states])

    def run(inner: Builder, step: ir.Value, *values: ir.Value) -> tuple[list[ir.Value], list[ir.Node]]:
        results, nodes = _copy(inner, body, [step, inner.const(np.array(True)), *values])
        return results[1:], nodes

    scanned = node.outputs[count : len(body.outputs) - 1 - len(entered) - 1]
    found, _ = _backward(op, run, initial, node.outputs[:count], scanned, [steps, *entered], [], arrived, wanted)
    return found


@control("Scan")
def scan(op: Builder, node: ir.Node, arrived: Mapping[ir.Value, ir.Value], wanted: Sequence[ir.Value]) -> Gradients:
    """A Scan the other way round"""
    body = node.attributes["body"].as_graph()
    scanned_count = node.attributes["num_scan_inputs"].as_int()
    count = len(node.inputs) - scanned_count
    for name in ("scan_input_axes", "scan_output_axes"):
        if name in node.attributes and any(node.attributes[name].as_ints()):
            raise Unsupported(f"{name} other than 0")
    outputs = len(body.outputs) - count
    into = _directions(node, "scan_input_directions", scanned_count)
    out_of = _directions(node, "scan_output_directions", outputs)
    if "scan_output_directions" in node.attributes:
        node.attributes.add(ir.AttrInt64s("scan_output_directions", [*out_of, *[0] * count]))
    entered = _collect(op, node, body, body.inputs[:count])
    sequences = [_reversed(op, v) if d else v for v, d in zip(node.inputs[count:], into, strict=True) if v is not None]

    def run(inner: Builder, *values: ir.Value) -> tuple[list[ir.Value], list[ir.Node]]:
        return _copy(inner, body, values)

    scanned = node.outputs[count : count + outputs]
    turned = {v: _reversed(op, arrived[v]) if d else arrived[v] for v, d in zip(scanned, out_of, strict=True) if v in arrived}
    arrived = {**arrived, **turned}
    initial = node.inputs[:count]
    found, of_sequences = _backward(op, run, initial, node.outputs[:count], scanned, entered, sequences, arrived, wanted)
    for value, gradient, turn in zip(node.inputs[count:], of_sequences, into, strict=True):
        if value is not None and gradient is not None and value in wanted:
            gradient = _reversed(op, gradient) if turn else gradient
            found[value] = op.Add(found[value], gradient, _like=value) if value in found else gradient
    return found


def _backward(op, run, initial, final, scanned, entered, sequences, arrived, wanted):  # type: ignore[no-untyped-def]
    """The reverse Scan of a loop.

    Args:
        op: the builder of the graph that holds the loop.
        run: copies the body, of one step: ``run(inner, *entered, *sequences) -> (states and results, nodes)``.
        initial, final: the loop's states before and after.
        scanned: its scan outputs.
        entered: what entered each iteration, stacked; its last ``len(initial)`` entries are the states.
        sequences: what it scans, in the order of the iterations.
        arrived, wanted: as for every control rule.

    Returns:
        The gradients of ``initial`` and of captured values, and those of ``sequences`` (None where not float).
    """
    carried = [i for i, v in enumerate(final) if is_float(v)]
    outer = [v for v in wanted if v not in initial and v not in sequences]
    d_states = [arrived[final[i]] if final[i] in arrived else op.zeros_like(final[i]) for i in carried]
    sums = [op.zeros_like(v) for v in outer]
    coming = [(j, arrived[v]) for j, v in enumerate(scanned) if v in arrived]
    differentiable = [i for i, v in enumerate(sequences) if is_float(v)]

    def body(inner, *values):  # type: ignore[no-untyped-def]
        d_now, rest = values[: len(carried)], values[len(carried) :]
        sums_now, rest = rest[: len(outer)], rest[len(outer) :]
        inside, d_results = rest[: len(entered) + len(sequences)], rest[len(entered) + len(sequences) :]
        results, nodes = run(inner, *inside)
        pairs = [(results[i], g) for i, g in zip(carried, d_now, strict=True)]
        pairs += [(results[len(final) + j], g) for (j, _), g in zip(coming, d_results, strict=True)]
        states = inside[len(entered) - len(final) : len(entered)]
        steps = inside[len(entered) :]
        wrt = [*(states[i] for i in carried), *(steps[i] for i in differentiable), *outer]
        found = build_gradients(inner, _seeds(inner, pairs), wrt, nodes)
        new_sums = [inner.Add(s, found[v], _like=s) if v in found else s for s, v in zip(sums_now, outer, strict=True)]
        d_before = [_or_zeros(inner, found, states[i]) for i in carried]
        return [*d_before, *new_sums], [_or_zeros(inner, found, steps[i]) for i in differentiable]

    last, of_steps = op.scan(body, [*d_states, *sums], [*entered, *sequences, *(g for _, g in coming)], reverse=True)
    found = dict(zip(outer, last[len(carried) :], strict=True))
    for i, gradient in zip(carried, last, strict=False):
        value = initial[i]
        if value in wanted:
            found[value] = op.Add(found[value], gradient, _like=value) if value in found else gradient
    by_position = dict(zip(differentiable, of_steps, strict=True))
    return found, [by_position.get(i) for i in range(len(sequences))]


def _copy(op: Builder, body: ir.Graph, inputs: Sequence[ir.Value]) -> tuple[list[ir.Value], list[ir.Node]]:
    """Copy the nodes of a nested graph into the builder's; returns what its outputs are there, and the nodes."""
    clone = body.clone(allow_outer_scope_values=True)
    results, nodes = list(clone.outputs), list(clone)
    clone.outputs.clear()
    replaced = dict(zip(clone.inputs, inputs, strict=True))
    for name, value in list(clone.initializers.items()):
        own = ir.Value(name=op.names.fresh(name), type=value.type, shape=value.shape, const_value=value.const_value)
        op.graph.register_initializer(own)
        replaced[value] = own
    for old, new in replaced.items():
        ir.convenience.replace_all_uses_with(old, new)
    clone.remove(nodes)
    for node in nodes:
        node.metadata_props.update({"ortc.pass": "gradients", "ortc.origin": node.name or ""})
        node.name = op.names.fresh(f"{node.name}.again")
        for value in node.outputs:
            if value.name:
                value.name = op.names.fresh(f"{value.name}.again")
    op.graph.extend(nodes)
    return [replaced.get(v, v) for v in results], nodes


def _collect(op: Builder, node: ir.Node, body: ir.Graph, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Let a loop give out, stacked over its iterations, what enters each of them."""
    first = body[0] if len(body) else None
    for value in values:
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise Unsupported(f"its state {value.name!r} is no tensor")
        copy = ir.Node("", "Identity", [value], num_outputs=1, name=op.names.fresh(f"{value.name}/Identity"))
        copy.metadata_props.update({"ortc.pass": "gradients", "ortc.origin": value.name or ""})
        copy.outputs[0].name = op.names.fresh(f"{value.name}.entered")
        copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
        body.insert_before(first, copy) if first is not None else body.append(copy)
        body.outputs.append(copy.outputs[0])
    before = len(node.outputs)
    node.resize_outputs(before + len(values))
    stacked = list(node.outputs[before:])
    steps = op.names.fresh(f"{node.name}.steps")
    for stack, value in zip(stacked, values, strict=True):
        shape = dims(value)
        if shape is None:
            raise Unsupported(f"the rank of its state {value.name!r} is unknown")
        stack.name, stack.type, stack.shape = op.names.fresh(f"{value.name}.all"), value.type, ir.Shape([steps, *shape])
    return stacked


def _same_sizes(before: Sequence[ir.Value], after: Sequence[ir.Value]) -> None:
    for a, b in zip(before, after, strict=True):
        ins, outs = dims(a) or (), dims(b) or ()
        grown = any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(ins, outs, strict=False))
        if len(ins) != len(outs) or grown:
            raise Unsupported(f"its state {a.name!r} changes its size")


def _seeds(op: Builder, pairs: Sequence[tuple[ir.Value, ir.Value | None]]) -> Gradients:
    """Gradients by value; those of one value given out twice are added."""
    seeds: Gradients = {}
    for value, gradient in pairs:
        if gradient is not None and is_float(value):
            seeds[value] = op.Add(seeds[value], gradient, _like=value) if value in seeds else gradient
    return seeds


def _or_zeros(op: Builder, found: Gradients, value: ir.Value) -> ir.Value:
    return found[value] if value in found else op.zeros_like(value)


def _directions(node: ir.Node, name: str, count: int) -> list[int]:
    return list(node.attributes[name].as_ints()) if name in node.attributes else [0] * count


def _reversed(op: Builder, x: ir.Value) -> ir.Value:
    return op.Slice(x, [-1], [np.iinfo(np.int64).min], [0], [-1], _like=x)
