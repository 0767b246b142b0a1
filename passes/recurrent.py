"""LSTM and GRU in training: the operators of ONNX Runtime that give the gates as well, so that the backward need not
compute them again. They know one direction, full sequences and the usual activations; what has more stays as it is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortc.graph.builder import Builder
from ortc.graph.names import take_place
from ortc.graph.shapes import dims
from ortc.target import Target

# Activations, and what is kept of every step: arrays of so many hidden sizes.
_FORMS = {"LSTM": (("Sigmoid", "Tanh", "Tanh"), (1, 4)), "GRU": (("Sigmoid", "Tanh"), (3,))}

_FLAGS = ("direction", "hidden_size", "linear_before_reset")


def has_training_form(target: Target, node: ir.Node) -> bool:
    """Whether the target has a kernel of the node that gives its gates."""
    if node.domain or node.op_type not in _FORMS:
        return False
    x, _, r, *optional = node.inputs
    lens, peepholes = ([*optional, *[None] * 5][i] for i in (1, 4))
    if x is None or x.dtype is None or r is None or lens is not None or peepholes is not None:
        return False
    others = {k: a.value for k, a in node.attributes.items() if k not in _FLAGS and a.value}
    names, usual = others.pop("activations", ()), _FORMS[node.op_type][0]
    known = target.keeps("com.microsoft", f"{node.op_type}Training", x.dtype.numpy().name, 3)
    sized = isinstance((dims(r) or (None,))[-1], int)
    return known and sized and not others and all(n == usual[i % len(usual)] for i, n in enumerate(names))


def to_training_form(op: Builder, node: ir.Node) -> None:
    """Replace a node that has a training form; a layer of two directions becomes two, what goes backwards reads X reversed."""
    direction = node.attributes.get_string("direction", "forward")
    both = direction == "bidirectional"
    x, *others = node.inputs
    assert x is not None
    with op.scope(node.name or node.op_type, before=node, origin=node.name or "", rule=node.op_type, pass_="training-form"):
        parts = [_halves(op, value, both) for value in others]
        layers = []
        for d in range(1 + both):
            backwards = d == 1 or direction == "reverse"
            y, *states = _one_direction(op, node, _turned(op, x) if backwards else x, [p[d] for p in parts])
            layers.append([_turned(op, y) if backwards else y, *states])
        outputs = layers[0]
        if both:
            outputs = [op.Concat(*each, axis=int(i == 0)) for i, each in enumerate(zip(*layers, strict=True))]
    for old, new in zip(node.outputs, outputs, strict=False):
        if old.uses() or old.is_graph_output():
            take_place(old, new)
    op.graph.remove(node, safe=True)


def _halves(op: Builder, value: ir.Value | None, both: bool) -> tuple[ir.Value | None, ...]:
    if value is None or not both:
        return (value,) * 2
    return tuple(op.Split(value, axis=0, num_outputs=2, _outputs=2))


def _turned(op: Builder, x: ir.Value) -> ir.Value:
    """The steps in reverse."""
    turned: ir.Value = op.Slice(x, [-1], [np.iinfo(np.int64).min], [0], [-1], _like=x)
    return turned


def _one_direction(op: Builder, node: ir.Node, x: ir.Value, others: list[ir.Value | None]) -> list[ir.Value]:
    """Y and the last states, of the node in its training form with these inputs."""
    steps, batch, *_ = dims(x) or (None, None)
    hidden = (dims(others[1]) or (None,))[-1]  # type: ignore[arg-type]
    assert isinstance(hidden, int)
    states, kept = len(_FORMS[node.op_type][0]) - 1, _FORMS[node.op_type][1]
    shapes = [
        (steps, 1, batch, hidden),
        *[(1, batch, hidden)] * states,
        *((steps, 1, batch, n * hidden) for n in kept),
    ]
    outputs = [ir.Value(type=x.type, shape=ir.Shape(shape)) for shape in shapes]
    linear = node.attributes.get_int("linear_before_reset", 0) or None
    made = op.node(
        f"{node.op_type}Training",
        x,
        *others,
        _domain="com.microsoft",
        _outputs=outputs,
        hidden_size=hidden,
        linear_before_reset=linear,
    )
    return list(made[: 1 + states])
