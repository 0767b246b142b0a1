"""The user's own loss: an ONNX file, or an onnxscript function, that is appended to the model.

Its inputs that are called like outputs of the model are fed by them; if none is, the first input is fed by the term's
output. The other inputs are targets, under their own names (a single one under ``labels=`` where that is given). Its first
output is the loss, a scalar; a larger one is averaged.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.graph.shapes import dims, rank
from ortc.passes.normalise import convert_opset, prepare
from ortc.recipe import LossTerm
from ortc.rules import import_file
from ortc.source import load_model


def append_user_loss(
    graph: ir.Graph, op: Builder, term: LossTerm, outputs: dict[str, ir.Value], targets: dict[str, ir.Value]
) -> tuple[ir.Value, str | None]:
    """Append the loss of a term whose name is a file; returns the scalar and the name of its (first) target."""
    from ortc.passes.loss import add_target

    model = _load(term, outputs)
    prepare(model)
    convert_opset(model, op.opset)
    body = model.graph
    mapping: dict[ir.Value, ir.Value] = {}
    fed = {i: outputs[i.name] for i in body.inputs if i.name in outputs}
    if not fed:
        if not body.inputs:
            raise RecipeError(f"loss {term.name}: it has no inputs")
        fed = {body.inputs[0]: outputs[term.output or ""]}
    rest = [i for i in body.inputs if i not in fed]
    first: str | None = None
    for value in rest:
        key = term.labels if term.labels is not None and len(rest) == 1 else value.name or "labels"
        first = first or key
        if key not in targets:
            shape = dims(value)
            if shape is None:
                shape = dims(outputs[term.output or ""])
            add_target(graph, op, key, value.dtype, shape, targets)
        mapping[value] = targets[key]
    mapping.update(fed)
    return _copy(op, body, mapping, term), first


def _copy(op: Builder, body: ir.Graph, mapping: dict[ir.Value, ir.Value], term: LossTerm) -> ir.Value:
    for name, value in list(body.initializers.items()):
        assert value.const_value is not None
        mapping[value] = op.const(value.const_value.numpy()) if value.const_value.size <= 1024 else _weights(term, name)
    for node in list(body):
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise RecipeError(f"loss {term.name}: node {node.name!r} ({node.op_type}) has a nested graph, which a loss may not")
        made = op.node(
            node.op_type,
            *(None if v is None else mapping[v] for v in node.inputs),
            _domain=node.domain,
            _outputs=len(node.outputs),
            **dict(node.attributes),  # type: ignore[arg-type]  # none of its keys starts with an underscore
        )
        mapping.update(zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    loss = mapping[body.outputs[0]]
    if rank(loss) != 0:
        loss = op.ReduceMean(loss, keepdims=0)
    return loss


def _weights(term: LossTerm, name: str) -> ir.Value:
    raise RecipeError(f"loss {term.name}: its initialiser {name!r} is larger than 1024 elements; a loss has no weights")


def _load(term: LossTerm, outputs: dict[str, ir.Value]) -> ir.Model:
    if term.name.endswith(".onnx"):
        return load_model(term.name)
    path, _, function = term.name.rpartition(":")
    written = getattr(import_file(path), function, None)
    if written is None:
        raise RecipeError(f"loss {term.name}: {path} has no {function}")
    if not hasattr(written, "to_function_proto"):
        raise RecipeError(f"loss {term.name}: {function} is not an onnxscript function (decorate it with @script())")
    return _model_of(ir.from_proto(written.to_function_proto()), outputs[term.output or ""], outputs)


def _model_of(function: ir.Function, output: ir.Value, outputs: dict[str, ir.Value]) -> ir.Model:
    """A model that calls the function: its inputs take the model's output's type and shape."""
    inputs = [
        ir.Value(name=i.name, type=outputs.get(i.name or "", output).type, shape=outputs.get(i.name or "", output).shape)
        for i in function.inputs
    ]
    call = ir.Node(function.domain, function.name, inputs, num_outputs=len(function.outputs), name="call")
    call.outputs[0].name = "loss_value"
    imports = dict(function.opset_imports)
    graph = ir.Graph(inputs, call.outputs[:1], nodes=[call], name="loss", opset_imports={**imports, function.domain: 1})
    model = ir.Model(graph, ir_version=10, functions=[function])
    InlinePass()(model)
    return model
