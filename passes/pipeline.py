"""The passes that are one call: normalisation, gradients, tidying."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, DeduplicateInitializersPass

from ortc.autodiff import build_gradients, depending_on, loss_seed
from ortc.compiler import Compilation, Pass, of, role, set_role, set_stages, stages_of
from ortc.graph.builder import Builder, UnknownRank
from ortc.graph.names import all_graphs, take_place
from ortc.graph.shapes import is_float
from ortc.graph.unused import hold_outputs, released_outputs, remove_unused
from ortc.passes.inference import infer_missing, infer_shapes
from ortc.passes.normalise import convert_opset, fold, prepare
from ortc.passes.precision import widen_missing
from ortc.passes.sequences import resolve_sequences
from ortc.passes.sharing import tie_copies, unmerge
from ortc.passes.spellings import respell
from ortc.rules import GRADIENTS, LOWERINGS, Unsupported, lowered, node_key
from ortc.target import Target

# It warns of every initialiser of a nested graph that it leaves alone.
logging.getLogger("onnx_ir.passes.common.initializer_deduplication").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Prepare(Pass):
    """Inlines functions, makes every weight an initialiser of its own, gives every node and value a name."""

    name = "prepare"
    alone = True

    def run(self, c: Compilation) -> None:
        c.model = prepare(c.model)
        separated = unmerge(c.model)
        if separated:
            c.warnings.append(
                f"{len(separated)} weights, which the exporter had merged because their values were equal, train apart "
                f"({', '.join(separated[:3])}{', …' if len(separated) > 3 else ''})"
            )
        c.tied = tie_copies(c.model)
        if c.part is not None:
            c.tied |= {w.transposed[c.part.stage]: w.name for w in c.part.tied if c.part.stage in w.transposed}
        for value in c.graph.outputs:
            set_role(value, "output", of=value.name)


@dataclass(frozen=True)
class Upgrade(Pass):
    """Brings the graph to the target's opset, the one form of each operator that the later passes know."""

    name = "upgrade"
    alone = True
    after = ("prepare",)

    def run(self, c: Compilation) -> None:
        c.model = infer_shapes(convert_opset(c.model, c.target.opset))
        c.model.ir_version = c.target.ir_version


@dataclass(frozen=True)
class Simplify(Pass):
    """Folds constants (never a weight: those are inputs by now) and infers types and shapes."""

    name = "simplify"
    alone = True
    after = ("choose-parameters",)

    def run(self, c: Compilation) -> None:
        simplify(c.model)


def simplify(model: ir.Model) -> ir.Model:
    """What :class:`Simplify` does, in place: folded, in the usual forms and without sequences, with all types and shapes."""
    given = _nodes(model)
    fold(model)
    if _nodes(model) != given:  # otherwise folding has inferred everything
        infer_shapes(model)
    resolve_sequences(respell(model))
    return model if _nodes(model) == given else infer_shapes(fold(model))


def _nodes(model: ir.Model) -> list[ir.Node]:
    return [node for graph in all_graphs(model.graph) for node in graph]


@dataclass(frozen=True)
class Decompose(Pass):
    """Writes operators that have a lowering but no gradient rule in others, whose rules then give the gradient."""

    name = "decompose"
    alone = True
    after = ("simplify",)

    def run(self, c: Compilation) -> None:
        lower(c.graph, lambda n: node_key(n) not in GRADIENTS)


@dataclass(frozen=True)
class Gradients(Pass):
    """Appends each stage's backward pass, the last stage's first: a stage starts from the gradients that come back to it.

    The training graph's outputs are the loss (or what goes to other stages), the gradients, and the new buffers.
    """

    name = "gradients"
    after = ("stages",)

    def run(self, c: Compilation) -> None:
        trained = {p.name for p in c.parameters if p.trainable} | set(c.recipe.wrt)
        wanted = [v for v in c.graph.inputs if of(v) in trained and role(v) in ("parameter", "data")]
        crossing: set[str | None] = set()
        returned: dict[str, list[int]] = {}
        if c.part is not None:
            crossing = {v.name for v in c.part.arriving if v.differentiable}
            returned = {v.name: list(v.readers) for v in c.part.leaving if v.differentiable}
        elif len(c.stages) > 1:
            crossing = {v.name for v in depending_on(list(c.graph), wanted)}
        for stage, phases in reversed(list(enumerate(c.stages))):
            if "train" in phases:
                seed = loss_seed if c.recipe.precision.scaling == "none" else _loss_scale
                _differentiate(phases["train"].graph, stage, trained, crossing, returned, seed, promised=c.part is not None)


def _differentiate(
    graph: ir.Graph,
    stage: int,
    trained: Container[str],
    crossing: Container[str | None],
    returned: dict[str, list[int]],
    seed: Callable[[Builder, ir.Value], ir.Value],
    promised: bool,
) -> None:
    """Append the backward of one stage.

    Args:
        graph: the stage's forward.
        stage: its index.
        trained: parameters (and data inputs) that want a gradient.
        crossing: values between stages that want one.
        returned: of such a value, the stages that give back a gradient; this one's are added.
        seed: makes the gradient of the loss.
        promised: another stage counts on the gradients of values between stages, be they zero.
    """
    op = Builder(graph)
    seeds = {}
    for value in graph.outputs:
        if role(value) == "loss":
            seeds[value] = seed(op, value)
        elif role(value) == "boundary" and of(value) in returned:
            seeds[value] = _arriving(op, value, sorted(returned[of(value)]))
    wanted = [v for v in graph.inputs if of(v) in trained and role(v) in ("parameter", "data")]
    boundary = [v for v in graph.inputs if role(v) == "boundary" and of(v) in crossing and is_float(v)]
    gradients = build_gradients(op, seeds, [*wanted, *boundary])
    for value in [*wanted, *(boundary if promised else [])]:
        if value not in gradients:  # another stage has the use that the loss depends on
            with op.scope(f"{value.name}.grad", origin=value.name or "", pass_="gradients"):
                gradients[value] = op.copy(op.zeros_like(value), like=value)
                gradients[value].name = op.names.fresh(f"{value.name}.grad")
    outputs = list(graph.outputs)
    graph.outputs.clear()
    graph.outputs.extend(v for v in outputs if role(v) != "buffer")
    graph.outputs.extend(set_role(gradients[v], "gradient", of=of(v)) for v in wanted)
    for value in boundary:
        if value in gradients:
            returned.setdefault(of(value), []).append(stage)
            graph.outputs.append(set_role(gradients[value], "boundary_gradient", of=of(value)))
            set_stages(gradients[value], stages_of(value) or [])
    graph.outputs.extend(v for v in outputs if role(v) == "buffer")


def _loss_scale(op: Builder, loss: ir.Value) -> ir.Value:
    """The gradient of the loss is a number that the runtime gives."""
    value = ir.Value(name=op.names.fresh("loss_scale"), type=loss.type, shape=ir.Shape(()))
    op.graph.inputs.append(set_role(value, "scalar", of="loss_scale"))
    return value


def _arriving(op: Builder, value: ir.Value, stages: list[int]) -> ir.Value:
    """The sum of the gradients that stages give back for a value, as new inputs."""
    parts = []
    for stage in stages:
        part = ir.Value(name=op.names.fresh(f"{value.name}.grad.{stage}"), type=value.type, shape=value.shape)
        op.graph.inputs.append(set_stages(set_role(part, "boundary_gradient", of=of(value)), [stage]))
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    with op.scope(f"{value.name}.grad", origin=value.name or "", pass_="gradients"):
        return op.Sum(*parts)


@dataclass(frozen=True)
class Lower(Pass):
    """Writes operators that a target lacks, or has only slowly, in others; their gradient rules have seen them by now."""

    name = "lower"
    alone = True
    after = ("gradients",)

    def run(self, c: Compilation) -> None:
        for model in _finishing(c):
            lower(model.graph, lambda n: not keeps(c.target, n))
            widen_missing(model.graph, c.target)
            drop_unused_domains(model.graph)


def drop_unused_domains(graph: ir.Graph) -> None:
    """Forget the opsets of domains that no operator is of any more."""
    used = {node.domain for node in graph.all_nodes()}
    for domain in [d for d in graph.opset_imports if d and d not in used]:
        del graph.opset_imports[domain]


def _finishing(c: Compilation) -> list[ir.Model]:
    """The models that come to be run: of every stage, and the criterion; without stages (`ortc rewrite`) the one there is."""
    if not c.stages:
        return [c.model]
    criterion = [c.graphs["criterion"]] if "criterion" in c.graphs else []  # it is where the loss is
    return [*(model for phases in c.stages for model in phases.values()), *criterion]


def keeps(target: Target, node: ir.Node) -> bool:
    """Whether the target runs the node quicker than its lowering."""
    dtype = next((v.dtype for v in node.inputs if v is not None and v.dtype is not None), ir.DataType.FLOAT)
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    return target.keeps(node.domain, node.op_type, dtype.numpy().name, len(shape or ()))


def lower(graph: ir.Graph, wanted: Callable[[ir.Node], bool]) -> None:
    """Replace nodes by their lowerings, also in nested graphs; the values that others read keep their names.

    Args:
        graph: the graph.
        wanted: which nodes that have a lowering; one whose form the lowering does not cover stays.
    """
    outermost = Builder(graph)
    for part in all_graphs(graph):
        op = outermost if part is graph else Builder(part, outermost)
        for node in [n for n in part if node_key(n) in LOWERINGS and wanted(n)]:
            _lower_node(op, node)


def _lower_node(op: Builder, node: ir.Node) -> None:
    origin = node.metadata_props.get("ortc.origin", node.name or "")  # of a fusion, which itself will be gone
    with op.scope(node.name or node.op_type, before=node, origin=origin, rule=node.op_type, pass_="lower"):
        try:
            made = lowered(op, node)
        except Unsupported as error:
            node.meta["ortc.unsupported"] = str(error)
            return
        except UnknownRank as error:
            node.meta["ortc.unsupported"] = f"the rank of {str(error)!r} is unknown"
            return
    for old, new in zip(node.outputs, made, strict=False):
        if new is not None:
            take_place(old, new)
    op.graph.remove(node, safe=True)


@dataclass(frozen=True)
class CleanUp(Pass):
    """Merges equal constants and subexpressions, drops dead nodes and what no longer feeds anything."""

    name = "clean-up"
    alone = True
    after = ("lower", "optimizer")

    def run(self, c: Compilation) -> None:
        for model in _finishing(c):
            DeduplicateInitializersPass()(model)
            merge_equal(model)
            remove_unused(model)
            drop_unused_inputs(model.graph)
            infer_missing(model)  # once, by name; whoever asks for sizes would do so again and again


def merge_equal(model: ir.Model) -> None:
    """Merge equal subexpressions. Of two equal graph outputs the second becomes a copy of the first, and keeps its role."""
    graph = model.graph
    outputs = list(graph.outputs)
    holders = hold_outputs(graph)
    CommonSubexpressionEliminationPass()(model)
    merged = released_outputs(graph, holders)
    taken = {new for old, new in zip(outputs, merged, strict=True) if new is old}
    for old, new in zip(outputs, merged, strict=True):
        if new is not old:
            new = _copy(graph, new, old) if new in taken else new
            new.name = old.name
            new.metadata_props.update(old.metadata_props)
            taken.add(new)
        graph.outputs.append(new)


def _copy(graph: ir.Graph, value: ir.Value, instead: ir.Value) -> ir.Value:
    tags = {"ortc.pass": CleanUp.name, "ortc.origin": value.name or ""}
    output = ir.Value(type=value.type, shape=value.shape)
    node = ir.node("Identity", [value], outputs=[output], name=instead.name, metadata_props=tags)
    graph.append(node)
    return node.outputs[0]


def drop_unused_inputs(graph: ir.Graph) -> None:
    """Drop weights and constants that nothing reads; data and labels stay, so that a batch always fits."""
    for value in list(graph.inputs):
        if role(value) in ("parameter", "buffer") and not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
