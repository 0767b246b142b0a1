"""Stages that somebody else cut, one model each, joined into the whole that they are parts of.

Values connect by name: an output of one file is the input of that name of later ones. The whole is then compiled as any model
is, with each node on the stage of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortc.errors import ModelError
from ortc.graph.names import all_graphs
from ortc.graph.shapes import dims
from ortc.passes.normalise import convert_opset, prepare
from ortc.source import load_model


def stage_prefix(stage: int) -> str:
    """What the names of a stage's nodes begin with."""
    return f"stage{stage}/"


def join(paths: Sequence[str | Path]) -> ir.Model:
    """Read the stages' models, in order, and join them; weights are not loaded but where two have the same name.

    Inputs that no earlier file makes are data inputs; an input of the same name in several files is one. Outputs that no later
    file reads are the model's. A weight of the same name in several files is one (tied) if its values are equal; otherwise each
    file keeps its own, as ``stage<k>/<name>``.

    Raises:
        ModelError: naming the files and the value: two make the same one, types or shapes do not fit, or a file reads what
            only a later one makes.
    """
    models = [prepare(load_model(path)) for path in paths]
    newest = max(model.opset_imports[""] for model in models)
    files = [Path(path).name for path in paths]
    graph = ir.Graph([], [], nodes=[], name=models[0].graph.name or "joined", opset_imports={"": newest})
    made: dict[str, tuple[int, ir.Value]] = {}
    read: set[str] = set()
    data: dict[str, tuple[int, ir.Value]] = {}
    weights: dict[str, tuple[int, ir.Value]] = {}
    _check_order(files, models)
    taken = {v.name for model in models for v in [*model.graph.inputs, *model.graph.outputs]}
    for stage, part in enumerate(models):
        model = convert_opset(part, newest)
        own = model.graph
        graph.opset_imports.update({domain: v for domain, v in own.opset_imports.items() if domain})
        interface = {v.name for v in [*own.inputs, *own.outputs]}
        for value in list(own.inputs):
            name = value.name or ""
            source = made.get(name) or data.get(name)
            if source is None:
                data[name] = (stage, value)
                continue
            _check_fit(name, source[1], files[source[0]], value, files[stage])
            ir.convenience.replace_all_uses_with(value, source[1], replace_graph_outputs=True)
            if name in made:
                read.add(name)
        for name, value in list(own.initializers.items()):
            own.initializers.pop(name)
            if name in weights and _equal(weights[name][1], value):
                ir.convenience.replace_all_uses_with(value, weights[name][1])
                continue
            if name in weights or (name in taken and name not in interface):
                value.name = f"{stage_prefix(stage)}{name}"
                assert value.const_value is not None
                value.const_value.name = value.name
            weights[value.name or name] = (stage, value)
            graph.register_initializer(value)
        outputs = [(v, v.name or "") for v in own.outputs]
        own.outputs.clear()
        own.inputs.clear()
        nodes = list(own)
        own.remove(nodes)
        for node in nodes:
            for inner in [node, *(n for g in node.attributes.values() for n in _nested(g))]:
                inner.name = f"{stage_prefix(stage)}{inner.name}"
            for value in node.outputs:
                if value.name and value.name not in interface:
                    value.name = f"{stage_prefix(stage)}{value.name}"
        graph.extend(nodes)
        for value, name in outputs:
            if any(known.get(name, (0, None))[1] is value for known in (made, data)):
                continue  # it arrived under this name, and is only passed on
            if name in made:
                raise ModelError(
                    f"{files[made[name][0]]} and {files[stage]} both make {name!r}; a value has one stage that makes it"
                )
            made[name] = (stage, value)
    graph.inputs.extend(value for _, value in data.values())
    last = {id(v) for stage, v in made.values() if stage == len(models) - 1}
    graph.outputs.extend(v for name, (_, v) in made.items() if name not in read or id(v) in last)
    return ir.Model(graph, ir_version=max(m.ir_version for m in models), producer_name=models[0].producer_name)


def _nested(attribute: ir.Attr) -> list[ir.Node]:
    graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else []
    return [node for outer in graphs for g in all_graphs(outer) for node in g]


def _check_order(files: Sequence[str], models: Sequence[ir.Model]) -> None:
    makes = [{v.name for v in m.graph.outputs} for m in models]
    for stage, model in enumerate(models):
        for value in model.graph.inputs:
            earlier = any(value.name in names for names in makes[:stage])
            later = [k for k in range(stage + 1, len(models)) if value.name in makes[k]]
            if later and not earlier:
                raise ModelError(
                    f"{files[stage]} (stage {stage}) reads {value.name!r}, which {files[later[0]]} (stage {later[0]}) makes: "
                    "values go from earlier stages to later ones; give the files in their order"
                )


def _check_fit(name: str, first: ir.Value, first_file: str, second: ir.Value, second_file: str) -> None:
    if first.dtype is not None and second.dtype is not None and first.dtype != second.dtype:
        raise ModelError(f"{name!r} is {first.dtype.name} in {first_file} and {second.dtype.name} in {second_file}")
    one, other = dims(first), dims(second)
    if one is None or other is None:
        return
    numbers = [(a, b) for a, b in zip(one, other, strict=False) if isinstance(a, int) and isinstance(b, int)]
    if len(one) != len(other) or any(a != b for a, b in numbers):
        raise ModelError(f"{name!r} has shape {list(one)} in {first_file} and {list(other)} in {second_file}")


def _equal(first: ir.Value, second: ir.Value) -> bool:
    a, b = first.const_value, second.const_value
    assert a is not None
    assert b is not None
    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and bool(np.array_equal(a.numpy(), b.numpy()))
