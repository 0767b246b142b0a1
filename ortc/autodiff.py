"""Reverse mode over the declared rules.

The sweep visits the forward nodes from the loss backwards. Each rule is given the gradients that arrived for its node's
outputs; what it returns is summed to the input's shape and added to what other uses of that input gave. Only nodes on a
path from a wanted value to the loss are visited, so a frozen weight costs no backward work.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.errors import ModelError
from ortc.graph.builder import Builder, UnknownRank
from ortc.graph.names import captured
from ortc.graph.shapes import is_float as is_known_float
from ortc.rules import CONTROL, GRADIENTS, NO_GRADIENT, OUT_OF_REACH, Unsupported, node_key


def is_float(value: ir.Value) -> bool:
    """Whether a gradient can flow into the value; of one whose type nothing says (behind an unknown operator) it is assumed."""
    return value.type is None or is_known_float(value)


def differentiable_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node through which a gradient flows, or would if there were a rule for it."""
    key = node_key(node)
    if key in NO_GRADIENT:
        return []
    rule = GRADIENTS.get(key)
    if rule is None:
        return [v for v in [*node.inputs, *captured(node)] if v is not None and is_float(v)]
    return [v for i, v in enumerate(node.inputs) if v is not None and is_float(v) and rule.differentiable(i)]


def reached(forward: Iterable[ir.Node], ends: Iterable[ir.Value]) -> dict[ir.Value, ir.Node | None]:
    """Every value that a gradient starting at ``ends`` reaches, with the node that it came through (None at an end)."""
    via: dict[ir.Value, ir.Node | None] = dict.fromkeys(ends)
    for node in reversed(list(forward)):
        if any(v in via for v in node.outputs):
            for value in differentiable_inputs(node):
                via.setdefault(value, node)
    return via


@dataclass(frozen=True)
class _Trouble:
    node: ir.Node
    reason: str


def loss_gradients(op: Builder, loss: ir.Value, wrt: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Append the backward of a scalar loss to its graph; see :func:`build_gradients`."""
    return build_gradients(op, {loss: loss_seed(op, loss)}, wrt)


def loss_seed(op: Builder, loss: ir.Value) -> ir.Value:
    """The gradient of a scalar loss by itself: 1."""
    with op.scope(f"{loss.name}.grad", origin=loss.name or "", pass_="gradients"):
        seed = op.expand_like(op.const(1, like=loss), loss)
    if seed.producer() is not None:
        seed.name = op.names.fresh(f"{loss.name}.grad")
    return seed


def build_gradients(
    op: Builder, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value], forward: Sequence[ir.Node] | None = None
) -> dict[ir.Value, ir.Value]:
    """Append a backward to a graph.

    Args:
        op: a builder on a topologically sorted graph with types and shapes on its values.
        seeds: values of that graph, and the gradients that arrive for them.
        wrt: the values whose gradients are wanted; of a nested graph also values of the graph around it.
        forward: the nodes to differentiate, in order; default: all that the graph holds now.

    Returns:
        For each value of ``wrt`` that the seeds depend on, its gradient: the same type and shape, named
        ``<value>.grad``, a distinct value each.

    Raises:
        ModelError: listing every node on the way that has no rule, with its path.
    """
    forward = list(op.graph) if forward is None else forward
    active = depending_on(forward, wrt)
    via = reached(forward, seeds)
    path = [n for n in forward if any(v in via for v in n.outputs) and any(v in active for v in differentiable_inputs(n))]
    unknown = [n for n in path if node_key(n) not in GRADIENTS and node_key(n) not in CONTROL]
    missing = [
        _Trouble(n, n.meta.get("ortc.unsupported") or OUT_OF_REACH.get(node_key(n), "no gradient rule")) for n in unknown
    ]
    if missing:
        raise ModelError(_explain(missing, via, active, op.opset))

    troubles: list[_Trouble] = []
    gradients = dict(seeds)
    complete: set[ir.Value] = set(seeds.values())
    for node in reversed(path):
        arrived = {v: _complete(op, v, gradients, complete) for v in node.outputs if v in gradients}
        if not arrived:
            continue
        with op.scope(f"{node.name}.grad", origin=node.name or "", rule=node.op_type, pass_="gradients"):
            try:
                found = _of_inputs(op, node, arrived, active)
            except Unsupported as error:
                troubles.append(_Trouble(node, str(error)))
                continue
            except UnknownRank as error:
                troubles.append(_Trouble(node, f"the rank of {error} is unknown; add shape information to the model"))
                continue
            for value, gradient in found:
                gradient = op.sum_to(gradient, value)
                gradients[value] = op.Add(gradients[value], gradient, _like=value) if value in gradients else gradient
    if troubles:
        raise ModelError(_explain(troubles, via, active, op.opset))
    return _distinct(op, {v: _complete(op, v, gradients, complete) for v in wrt if v in gradients})


def _of_inputs(
    op: Builder, node: ir.Node, arrived: Mapping[ir.Value, ir.Value], active: Container[ir.Value]
) -> list[tuple[ir.Value, ir.Value]]:
    """The active inputs of a node (captured ones included) with their gradients, as its rule has them."""
    control = CONTROL.get(node_key(node))
    if control is not None:
        wanted = list(dict.fromkeys(v for v in differentiable_inputs(node) if v in active))
        return list(control(op, node, arrived, wanted).items())
    found = GRADIENTS[node_key(node)](op, node, arrived)
    pairs = zip(node.inputs, found, strict=True)
    return [(v, g) for v, g in pairs if v is not None and g is not None and v in active]


def depending_on(forward: Iterable[ir.Node], wrt: Iterable[ir.Value]) -> dict[ir.Value, ir.Node | None]:
    """Float values that depend on one of ``wrt``, with the node that made them (None for ``wrt`` themselves)."""
    active: dict[ir.Value, ir.Node | None] = dict.fromkeys(wrt)
    for node in forward:
        if any(v in active for v in differentiable_inputs(node)):
            active.update((v, node) for v in node.outputs if is_float(v))
    return active


def _complete(op: Builder, value: ir.Value, gradients: dict[ir.Value, ir.Value], complete: set[ir.Value]) -> ir.Value:
    """Nothing will be added to the value's gradient any more: give it its name."""
    gradient = gradients[value]
    if gradient not in complete and gradient.producer() is not None:
        gradient.name = _name(op, value)
        complete.add(gradient)
    return gradient


def _name(op: Builder, value: ir.Value) -> str:
    """``<value>.grad``; in a nested graph, whose gradient of an outer value is only a part of it, ``<value>.grad.part``."""
    return op.names.fresh(f"{value.name}.grad" if op.graph is op.root else f"{value.name}.grad.part")


def _distinct(op: Builder, gradients: dict[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """One value per gradient: where a rule handed the same one to two inputs, the second gets a copy of its own."""
    taken: set[ir.Value] = set()
    for value, gradient in gradients.items():
        if gradient in taken or gradient.producer() is None:
            with op.scope(f"{value.name}.grad", origin=value.name or "", pass_="gradients"):
                gradient = op.copy(gradient, like=value)
                gradient.name = _name(op, value)
            gradients[value] = gradient
        taken.add(gradient)
    return gradients


def _explain(
    troubles: Sequence[_Trouble],
    via: dict[ir.Value, ir.Node | None],
    active: dict[ir.Value, ir.Node | None],
    opset: int,
) -> str:
    lines = [f"{len(troubles)} node(s) on the way from the loss to a parameter cannot be differentiated:"]
    for trouble in troubles:
        node = trouble.node
        operator = f"{node.domain}::{node.op_type}" if node.domain else f"{node.op_type} (opset {opset})"
        lines.append(f"- node {node.name!r}, operator {operator}: {trouble.reason}")
        up = _walk_up(node, via)
        down, parameter = _walk_down(node, active)
        lines.append(f"  path: loss <- {' <- '.join([*up, node.name or '?', *down, parameter])}")
        lines.append(f"  parameter that needs it: {parameter}")
    lines.append(
        "What to do: freeze what needs these nodes (--freeze 'GLOB'), or add a rule: a function decorated with "
        '@gradient("OPERATOR") in passes/gradients/ (ARCHITECTURE.md shows how).'
    )
    return "\n".join(lines)


def _walk_up(node: ir.Node, via: dict[ir.Value, ir.Node | None]) -> list[str]:
    """Names of the nodes between the loss and ``node``, the loss's side first."""
    names: list[str] = []
    current: ir.Node | None = node
    while current is not None:
        current = next((via[v] for v in current.outputs if v in via), None)
        if current is not None:
            names.append(current.name or "?")
    return _shorten(names[::-1])


def _walk_down(node: ir.Node, active: dict[ir.Value, ir.Node | None]) -> tuple[list[str], str]:
    """Names of the nodes from ``node`` down to a parameter, and the parameter's name."""
    names: list[str] = []
    value = next(v for v in differentiable_inputs(node) if v in active)
    while (producer := active[value]) is not None:
        names.append(producer.name or "?")
        value = next(v for v in differentiable_inputs(producer) if v in active)
    return _shorten(names), value.name or "?"


def _shorten(names: list[str]) -> list[str]:
    return names if len(names) <= 6 else [*names[:3], "…", *names[-2:]]
