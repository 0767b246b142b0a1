"""Stages that somebody else cut, one model each: joined into the whole that they are parts of, or described to each other.

Values connect by name: an output of one file is the input of that name of later ones. A whole is then compiled as any model
is, with each node on the stage of its file; where a stage is compiled apart, a :class:`~ortc.boundary.Boundary` says what it
must know of the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from ortc.boundary import Boundary, Connection, Crossing, Part, Shared, stage_prefix
from ortc.compiler import Compilation, run_passes
from ortc.errors import ModelError, RecipeError
from ortc.graph.names import all_graphs
from ortc.graph.shapes import Dims, dims, is_float, type_name
from ortc.passes.normalise import convert_opset, prepare
from ortc.passes.parameters import ChooseParameters
from ortc.passes.pipeline import Prepare, Simplify, Upgrade
from ortc.passes.sharing import follow_transposed
from ortc.recipe import Recipe
from ortc.source import content_hash, load_model
from ortc.target import load_target


class Stages:
    """The models of all stages, in order, with the names that they have in the whole.

    Args:
        paths: one file each.
        connections: values that have one name where they are made and another where they are read.

    Attributes:
        models: prepared; every node's name begins with its stage.
        files: what to call them in a message.

    Raises:
        ModelError: a file cannot be read, or what the files make and read does not fit together.
        RecipeError: a connection names what is not there.
    """

    def __init__(self, paths: Sequence[str | Path], connections: Sequence[Connection] = ()) -> None:
        names = [Path(path).name for path in paths]
        self.files = names if len(set(names)) == len(names) else [str(path) for path in paths]
        self.models = [prepare(load_model(path)) for path in paths]
        self._own_names: list[dict[str, str]] = [{} for _ in paths]  # name in the whole -> name in the file
        for connection in connections:
            self._connect(connection)
        self._check_order()
        self._check_ends()
        for stage, model in enumerate(self.models):
            _prefix(model.graph, stage)

    def _connect(self, wanted: Connection) -> None:
        makers = [k for k, m in enumerate(self.models) if wanted.output in self._names(k, m.graph.outputs)]
        makers = [k for k in makers if wanted.source in (None, k)]
        readers = [k for k, m in enumerate(self.models) if wanted.input in self._names(k, m.graph.inputs)]
        readers = [k for k in readers if wanted.reader in (None, k)]
        text = f"--connect {wanted.output}={wanted.input}"
        if not makers:
            where = "no file" if wanted.source is None else f"stage {wanted.source}"
            raise RecipeError(f"{text}: {where} has no output {wanted.output!r}{self._listed(wanted.source, 'outputs')}")
        if len(makers) > 1:
            raise RecipeError(
                f"{text}: {self.files[makers[0]]} and {self.files[makers[1]]} both have that output; say which: "
                f"--connect {makers[0]}:{wanted.output}=…"
            )
        [maker] = makers
        readers = [k for k in readers if k > maker]
        if not readers:
            where = "no later file" if wanted.reader is None else f"stage {wanted.reader}"
            raise RecipeError(f"{text}: {where} has an input {wanted.input!r}{self._listed(wanted.reader, 'inputs')}")
        same = [k for k, m in enumerate(self.models) if k != maker and wanted.output in self._names(k, m.graph.outputs)]
        name = f"{stage_prefix(maker)}{wanted.output}" if same else wanted.output
        self._rename(maker, self.models[maker].graph.outputs, wanted.output, name)
        for reader in readers:
            self._rename(reader, self.models[reader].graph.inputs, wanted.input, name)

    def _names(self, stage: int, values: Iterable[ir.Value]) -> list[str]:
        """What the values are called in the file."""
        return [self._own_names[stage].get(v.name or "", v.name or "") for v in values]

    def _listed(self, stage: int | None, what: str) -> str:
        if stage is None or stage >= len(self.models):
            return ""
        return f"; it has {', '.join(self._names(stage, getattr(self.models[stage].graph, what))) or 'none'}"

    def _rename(self, stage: int, values: Sequence[ir.Value], own: str, name: str) -> None:
        for value in values:
            if value.name == own != name:
                _free(self.models[stage].graph, name, stage)
                value.name = name
                self._own_names[stage][name] = own

    def _check_order(self) -> None:
        makes = [{v.name for v in m.graph.outputs} for m in self.models]
        for stage, model in enumerate(self.models):
            for value in model.graph.inputs:
                earlier = any(value.name in names for names in makes[:stage])
                later = [k for k in range(stage + 1, len(self.models)) if value.name in makes[k]]
                if later and not earlier:
                    raise ModelError(
                        f"{self.files[stage]} (stage {stage}) reads {value.name!r}, which {self.files[later[0]]} (stage "
                        f"{later[0]}) makes: values go from earlier stages to later ones; give the files in their order"
                    )

    def _check_ends(self) -> None:
        """Every file but the last makes something that a later one reads."""
        made = {v.name for m in self.models for v in m.graph.outputs}
        for stage, model in enumerate(self.models[:-1]):
            later = [v.name or "" for m in self.models[stage + 1 :] for v in m.graph.inputs]
            outputs = [v.name or "" for v in model.graph.outputs]
            if not set(outputs) & set(later):
                open_ends = list(dict.fromkeys(name for name in later if name not in made))
                pairs = [(o, i) for o in outputs for i in difflib.get_close_matches(o, open_ends, n=1, cutoff=0.0)]
                like = f", perhaps --connect {stage}:{pairs[0][0]}={pairs[0][1]}" if pairs else ""
                raise ModelError(
                    f"no later file reads what {self.files[stage]} (stage {stage}) makes ({', '.join(outputs)}); inputs that "
                    f"no file makes are {', '.join(open_ends) or 'none'}. Values connect by name; where the names differ, say "
                    f"--connect OUTPUT=INPUT{like}"
                )

    def crossing(self, shapes: Mapping[str, Dims | None]) -> list[Crossing]:
        """The values that go from stage to stage; one that a file only passes on goes straight.

        Args:
            shapes: of the values by name.
        """
        found: dict[str, tuple[int, ir.Value, list[int]]] = {}
        for stage, model in enumerate(self.models):
            for value in model.graph.inputs:
                if value.name in found:
                    found[value.name][2].append(stage)
            for value in model.graph.outputs:
                if value.name and value.name not in found and not value.is_graph_input():
                    found[value.name] = (stage, value, [])
        rows = []
        for name, (source, value, readers) in found.items():
            if readers:
                shape = shapes.get(name)
                if value.is_initializer():
                    raise ModelError(
                        f"{self.files[source]} gives its weight {name!r} to a later stage as it is: let each file that reads "
                        "it hold it (it is tied then), or compile the stages together (--stage-models)"
                    )
                if value.dtype is None:
                    raise ModelError(f"{self.files[source]} does not say what type its output {name!r} has")
                own = self._own_names
                rows.append(
                    Crossing(
                        name=name,
                        dtype=type_name(value.dtype),
                        shape=None if shape is None else ["?" if d is None else d for d in shape],
                        source=source,
                        readers=readers,
                        output=own[source].get(name),
                        inputs={k: own[k][name] for k in readers if name in own[k]},
                    )
                )
        return rows


def _free(graph: ir.Graph, name: str, stage: int) -> None:
    """Whatever inside the graph has that name gives it up."""
    for inner in all_graphs(graph):
        for node in inner:
            for value in node.outputs:
                if value.name == name and not value.is_graph_output():
                    value.name = f"{stage_prefix(stage)}{name}"


def _prefix(graph: ir.Graph, stage: int) -> None:
    """Names of nodes, and of values that no other file knows, begin with the stage."""
    interface = {v.name for v in [*graph.inputs, *graph.outputs]}
    for node in graph:
        for inner in [node, *(n for g in node.attributes.values() for n in _nested(g))]:
            inner.name = f"{stage_prefix(stage)}{inner.name}"
        for value in node.outputs:
            if value.name and value.name not in interface:
                value.name = f"{stage_prefix(stage)}{value.name}"


def _nested(attribute: ir.Attr) -> list[ir.Node]:
    graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else []
    return [node for outer in graphs for g in all_graphs(outer) for node in g]


# ---- the whole -------------------------------------------------------------------------------------------------------


def join(models: Sequence[ir.Model], files: Sequence[str]) -> tuple[ir.Model, list[str]]:
    """Join the stages' models; their weights are read only where two have the same name.

    Inputs that no earlier file makes are data inputs; an input of the same name in several files is one. Outputs that no later
    file reads are the model's. A weight of the same name in several files is one (tied) if its values are equal; otherwise each
    file keeps its own, as ``stage<k>/<name>``.

    Args:
        models: in order, as :class:`Stages` has them; they are used up.
        files: what to call them in a message.

    Returns:
        The whole, and warnings.

    Raises:
        ModelError: naming the files and the value: two make the same one, or types or shapes do not fit.
    """
    newest = max(model.opset_imports[""] for model in models)
    graph = ir.Graph([], [], nodes=[], name=models[0].graph.name or "joined", opset_imports={"": newest})
    made: dict[str, tuple[int, ir.Value]] = {}
    read: set[str] = set()
    data: dict[str, tuple[int, ir.Value]] = {}
    weights: dict[str, ir.Value] = {}
    apart: list[str] = []
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
        outputs = [(v, v.name or "") for v in own.outputs]
        own.outputs.clear()
        own.inputs.clear()
        for name, value in list(own.initializers.items()):
            own.initializers.pop(name)
            if name in weights and _equal(weights[name], value):
                ir.convenience.replace_all_uses_with(value, weights[name])
                continue
            if name in weights or (name in taken and name not in interface):
                if name in weights and is_float(value) and _is_weight(value):
                    apart.append(f"{name!r} of {files[stage]}")
                value.name = f"{stage_prefix(stage)}{name}"
                assert value.const_value is not None
                value.const_value.name = value.name
            weights[value.name or name] = value
            graph.register_initializer(value)
        nodes = list(own)
        own.remove(nodes)
        graph.extend(nodes)
        for value, name in outputs:
            if any(known.get(name, (0, None))[1] is value for known in (made, data)):
                continue  # it arrived under this name, and is only passed on
            if name in made:
                raise ModelError(
                    f"{files[made[name][0]]} and {files[stage]} both make {name!r}; a value has one stage that makes it. "
                    f"Connect the one that a later file reads by its stage: --connect {made[name][0]}:{name}=INPUT"
                )
            made[name] = (stage, value)
    graph.inputs.extend(value for _, value in data.values())
    last = {id(v) for stage, v in made.values() if stage == len(models) - 1}
    graph.outputs.extend(v for name, (_, v) in made.items() if name not in read or id(v) in last)
    whole = ir.Model(graph, ir_version=max(m.ir_version for m in models), producer_name=models[0].producer_name)
    warnings = []
    if apart:
        warnings.append(
            f"{len(apart)} weights have the name of another file's and other values: they train apart, as stage<k>/<name> "
            f"({', '.join(apart[:3])}{', …' if len(apart) > 3 else ''})"
        )
    return whole, warnings


def _check_fit(name: str, first: ir.Value, first_file: str, second: ir.Value, second_file: str) -> None:
    if first.dtype is not None and second.dtype is not None and first.dtype != second.dtype:
        raise ModelError(f"{name!r} is {first.dtype.name} in {first_file} and {second.dtype.name} in {second_file}")
    if not _shapes_fit(dims(first), dims(second)):
        raise ModelError(
            f"{name!r} has shape {list(dims(first) or ())} in {first_file} and {list(dims(second) or ())} in {second_file}"
        )


def _shapes_fit(one: Dims | None, other: Dims | None) -> bool:
    if one is None or other is None:
        return True
    numbers = [(a, b) for a, b in zip(one, other, strict=False) if isinstance(a, int) and isinstance(b, int)]
    return len(one) == len(other) and all(a == b for a, b in numbers)


def _equal(first: ir.Value, second: ir.Value) -> bool:
    a, b = first.const_value, second.const_value
    assert a is not None
    assert b is not None
    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and content_hash(a) == content_hash(b)


# ---- each stage for itself -------------------------------------------------------------------------------------------


def describe(stages: Stages) -> Boundary:
    """What the stages must know of each other to be compiled apart.

    Shapes, and weights that an exporter wrote a second time, transposed, are found in the whole.
    """
    holders: dict[str, list[tuple[int, ir.Value]]] = {}
    for stage, model in enumerate(stages.models):
        for name, value in model.graph.initializers.items():
            if is_float(value) and _is_weight(value):
                holders.setdefault(name, []).append((stage, value))
    weights = []
    for name, held in holders.items():
        (first, one), *others = held
        same = [stage for stage, value in others if _equal(one, value)]
        apart = [stage for stage, _ in others if stage not in same]
        if same:
            assert one.const_value is not None
            weights.append(Shared(name=name, stages=[first, *same], sha256=content_hash(one.const_value)))
        if apart:
            weights.append(Shared(name=name, stages=[first, *apart], tied=False))
    opset = max(model.opset_imports[""] for model in stages.models)
    holding = {name: [stage for stage, _ in held] for name, held in holders.items()}
    whole, _ = join([model.clone() for model in stages.models], stages.files)
    known = Compilation(whole, Recipe(), load_target(Recipe().target))
    run_passes([Prepare(), Upgrade(), ChooseParameters(), Simplify()], known)
    for copy, original in known.tied.items():
        if copy in holding and holding[copy] != holding.get(original):
            weights = _with_copy(weights, original, copy, holding)
    shapes = {v.name or "": dims(v) for node in known.graph for v in node.outputs}
    return Boundary(stages=len(stages.models), opset=opset, values=stages.crossing(shapes), weights=weights)


def _with_copy(weights: Sequence[Shared], name: str, copy: str, holding: Mapping[str, Sequence[int]]) -> list[Shared]:
    """The weights, of which one is written transposed under another name in some stages."""
    known = next((w for w in weights if w.name == name and w.tied), Shared.model_construct(name=name, stages=[*holding[name]]))
    stages = sorted({*known.stages, *holding[copy]})
    transposed = {**known.transposed, **dict.fromkeys(holding[copy], copy)}
    row = known.model_copy(update={"stages": stages, "transposed": transposed})
    return [*(w for w in weights if w is not known and w.name != copy), row]


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and not (tensor.size <= 1 and "ortc.constant_node" in value.metadata_props)


def load_part(path: str | Path, part: Part) -> ir.Model:
    """The model of one stage, prepared, with the names that the boundary gives it.

    Raises:
        ModelError: the file cannot be read, or is not what the boundary says of it.
    """
    model = prepare(load_model(path))
    graph = model.graph
    boundary = part.boundary
    if boundary.opset is not None:
        if model.opset_imports[""] > boundary.opset:
            raise ModelError(
                f"{path} is of opset {model.opset_imports['']}, the boundary says {boundary.opset}: raise it there"
            )
        model = convert_opset(model, boundary.opset)
    for crossing in part.arriving:
        _take(path, graph, graph.inputs, "input", crossing, crossing.inputs.get(part.stage, crossing.name), part.stage)
    for crossing in part.leaving:
        _take(path, graph, graph.outputs, "output", crossing, crossing.output or crossing.name, part.stage)
    for value in [v for v in graph.outputs if v.is_graph_input()]:
        graph.outputs.remove(value)  # it is only passed on, and goes straight
    arriving = {v.name for v in part.arriving}
    foreign = {v.name for v in boundary.values} - arriving - {v.name for v in part.leaving}
    for value in [*graph.inputs, *graph.outputs]:
        if value.name in foreign:
            raise ModelError(
                f"{path} has {value.name!r}, of which the boundary says nothing for stage {part.stage}: add the stage there, "
                "or rename the value"
            )
    _check_weights(path, graph, part)
    _prefix(graph, part.stage)
    return model


def _take(
    path: str | Path, graph: ir.Graph, values: Sequence[ir.Value], what: str, crossing: Crossing, own: str, stage: int
) -> None:
    found = next((v for v in values if v.name == own), None)
    if found is None:
        names = [v.name or "" for v in values]
        close = difflib.get_close_matches(own, names, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names) or 'none'}"
        raise ModelError(f"{path} (stage {stage}) has no {what} {own!r}, which the boundary says it has{hint}")
    if found.is_initializer() or (what == "output" and found.is_graph_input()):
        raise ModelError(f"{path} (stage {stage}): {own!r} is not made there, but an input or a weight: it cannot cross")
    if found.dtype is not None and type_name(found.dtype) != crossing.dtype:
        raise ModelError(f"{path}: {own!r} is {type_name(found.dtype)}, the boundary says {crossing.dtype}")
    told: Dims | None = None if crossing.shape is None else tuple(None if d == "?" else d for d in crossing.shape)
    if not _shapes_fit(dims(found), told):
        raise ModelError(f"{path}: {own!r} has shape {list(dims(found) or ())}, the boundary says {list(told or ())}")
    if what == "input" and found.shape is None and told is not None:
        found.shape = ir.Shape(told)
    if found.name != crossing.name:
        _free(graph, crossing.name, stage)
        found.name = crossing.name


def _check_weights(path: str | Path, graph: ir.Graph, part: Part) -> None:
    for shared in part.tied:
        copy = shared.transposed.get(part.stage, "")
        if copy in graph.initializers and shared.name not in graph.initializers:
            follow_transposed(graph, graph.initializers[copy], shared.name)
    for shared in part.boundary.weights:
        if part.stage in shared.stages and shared.name not in graph.initializers:
            raise ModelError(f"{path} (stage {part.stage}) has no weight {shared.name!r}, which the boundary says it has")
    for shared in part.tied:
        tensor = graph.initializers[shared.name].const_value
        assert tensor is not None
        if shared.sha256 is not None and content_hash(tensor) != shared.sha256:
            raise ModelError(
                f"{path}: the values of the tied weight {shared.name!r} are not those that the boundary was made with; give "
                "all stages the same, or say there that it is not tied"
            )
    for name, new in part.renamed():
        value = graph.initializers.pop(name)
        assert value.const_value is not None
        value.name = value.const_value.name = new
        graph.register_initializer(value)
