"""The fused step: the training graph updates each parameter as soon as its gradient exists (``optimizer.fuse``).

So the gradients never all live at once: each is a value within the session, freed after its update. New parameters and states
are written over the old ones (the runtime binds both to one array). ONNX Runtime does not know of that, so the data flow has to
say it: whatever makes a new value comes after every reader of the old one. Where it would not do so, as where the gradient of
an input reads the weight that the weight's own gradient does not, the update waits for the reader (``waiting.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass

from ortc.compiler import SLOT, Compilation, Pass, clear_role, of, role
from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.graph.cut import read_by
from ortc.graph.names import Names, all_graphs, taken_names
from ortc.graph.shapes import dims, static
from ortc.passes.memory import VIEWS
from ortc.passes.waiting import Guard
from ortc.rules import node_key

# What these make holds the same numbers as what they read. ONNX Runtime's own fusions let the readers of a transpose, or of a
# cast, read the value before it instead (as FusedMatMul does), so their readers are readers of that.
_HANDED_ON = VIEWS | {("", "Transpose"), ("", "Cast")}


@dataclass(frozen=True)
class FuseUpdate(Pass):
    """Updates each parameter within the training graph, as soon as its gradient exists, where the recipe asks for it."""

    name = "fuse-update"
    after = ("clean-up", "recompute")

    def run(self, c: Compilation) -> bool:
        if not c.recipe.optimizer.fuse:
            return False
        check(c)
        for phases in c.stages:
            if "optimizer" in phases:
                _fuse(phases["train"], phases.pop("optimizer"))
                DeduplicateInitializersPass()(phases["train"])
        return True


def check(c: Compilation) -> None:
    """What needs all gradients before the first update.

    Raises:
        RecipeError: naming it, and what to leave out.
    """
    recipe, pipeline = c.recipe, c.recipe.pipeline
    scaling = "--precision fp16 (--precision bf16 needs no scale)" if recipe.precision.type == "fp16" else "--loss-scale"
    needs = (
        (pipeline.stages > 1 or c.part is not None, "there is one stage", "--stages"),
        (pipeline.parts > 1, f"a step has one micro-batch, not {pipeline.parts}", "--micro-batches"),
        (pipeline.replicas > 1, f"there is one replica, not {pipeline.replicas}", "--data-parallel (and --zero)"),
        (recipe.optimizer.max_norm is not None, "gradients are not clipped by the norm of all", "--clip-norm"),
        (recipe.precision.scaling != "none", "no step is left out for an overflow of the scaled loss", scaling),
        ("ort" in recipe.artifacts, "ONNX Runtime's own layout, which has an optimizer of its own, is not made", "--artifacts"),
    )
    for broken, condition, flag in needs:
        if broken:
            raise RecipeError(
                f"optimizer.fuse: the update can be part of the training graph only where {condition}: leave out {flag}, "
                "or --fuse-update"
            )


def _fuse(train: ir.Model, update: ir.Model) -> None:
    """Move the optimizer's graph into the training graph; each update waits for the last reading of what it overwrites."""
    graph, before = train.graph, list(train.graph)
    ports, new = list(update.graph.inputs), list(update.graph.outputs)
    moved = _move(update.graph, graph)
    op = Builder(graph)
    trained = {of(v) for v in ports if role(v) == "parameter"}
    gradients = {of(v): v for v in graph.outputs if role(v) == "gradient" and of(v) in trained}
    held = {_key(v): v for v in graph.inputs} | {("gradient", name, None): v for name, v in gradients.items()}
    owner: dict[ir.Value, str] = {}
    for port in ports:
        source = held.setdefault(_key(port), port)
        if role(port) != "scalar":
            owner[source] = of(port)
        if source is port:
            graph.inputs.append(port)
        elif dims(port) != dims(source):  # in chunks
            with op.scope(of(port), origin=of(port), pass_=FuseUpdate.name):
                source = op.Reshape(source, list(static(port) or ()), _like=port)
            moved.insert(0, source.producer())
        if source is not port:
            ir.convenience.replace_all_uses_with(port, source)
    outputs = [v for v in graph.outputs if gradients.get(of(v)) is not v]
    for gradient in gradients.values():
        clear_role(gradient)
    graph.outputs.clear()
    graph.outputs.extend([*outputs, *new])

    memory = {held[_key(v)]: v for v in new}
    place = {node: i for i, node in enumerate(before)}
    read = readers(before, memory)
    behind: dict[int, list[ir.Node]] = {}
    for name, block in _blocks(moved, owner).items():
        last = [gradients[name].producer(), *read[held["parameter", name, None]]] if name else []
        behind.setdefault(max((place.get(node, -1) for node in last if node is not None), default=-1), []).extend(block)
    order = behind.get(-1, [])
    for i, node in enumerate(before):
        order += [node, *behind.get(i, ())]
    graph.extend(order)
    _hold_writes(op, memory)


def _key(value: ir.Value) -> tuple[str | None, str, str | None]:
    return role(value), of(value), value.metadata_props.get(SLOT)


def _move(source: ir.Graph, to: ir.Graph) -> list[ir.Node]:
    """Give a graph the nodes and constants of another one, whose inputs and outputs go; what has a name twice gets another."""
    taken = taken_names(to)
    names = Names(taken | taken_names(source))
    for graph in all_graphs(source):
        values = [*graph.inputs, *list(graph.initializers.values()), *(v for node in graph for v in node.outputs)]
        for named in (*values, *graph):
            if named.name in taken:
                named.name = names.fresh(named.name or "")
    nodes, constants = list(source), list(source.initializers.values())
    source.inputs.clear()
    source.outputs.clear()
    source.initializers.clear()
    source.remove(nodes)
    to.extend(nodes)
    for value in constants:
        to.register_initializer(value)
    for domain, version in source.opset_imports.items():
        to.opset_imports.setdefault(domain, version)
    return nodes


def _blocks(nodes: Iterable[ir.Node], owner: dict[ir.Value, str]) -> dict[str, list[ir.Node]]:
    """The nodes by the parameter that they update; what all share is under the empty name, which comes first."""
    blocks: dict[str, list[ir.Node]] = {"": []}
    for node in nodes:
        [name] = {owner[v] for v in read_by(node) if v in owner} or {""}
        blocks.setdefault(name, []).append(node)
        if name:
            owner.update(dict.fromkeys(node.outputs, name))
    return blocks


# ---- when memory may be overwritten -----------------------------------------------------------------------------------------


def readers(nodes: Iterable[ir.Node], memory: Collection[ir.Value]) -> dict[ir.Value, list[ir.Node]]:
    """The nodes that read each value's memory, in order; also where a view, a copy or a sequence hands it on."""
    found: dict[ir.Value, list[ir.Node]] = {value: [] for value in memory}
    behind: dict[ir.Value, tuple[ir.Value, ...]] = {value: (value,) for value in memory}
    for node in nodes:
        read = dict.fromkeys(m for v in read_by(node) for m in behind.get(v, ()))
        if not read:
            continue
        handed_on = [v for v in node.outputs if node_key(node) in _HANDED_ON or not isinstance(v.type, ir.TensorType)]
        behind.update(dict.fromkeys(handed_on, tuple(read)))
        if len(handed_on) < len(node.outputs):
            for value in read:
                found[value].append(node)
    return found


def _hold_writes(op: Builder, memory: Mapping[ir.Value, ir.Value]) -> None:
    """Let what overwrites memory wait for all that reads it. Linear in the nodes, with a bit for each reader.

    Args:
        op: the builder of the graph, which is in order.
        memory: the value that takes each one's place.
    """
    nodes = list(op.graph)
    found = readers(nodes, memory)
    bits = {node: 1 << i for i, node in enumerate(dict.fromkeys(n for each in found.values() for n in each))}
    after: dict[ir.Node | None, int] = {None: 0}  # the readers that have run when a node does
    for node in nodes:
        mask = 0
        for producer in dict.fromkeys(v.producer() for v in read_by(node)):
            mask |= after[producer] | bits.get(producer, 0)  # type: ignore[arg-type]
        after[node] = mask
    waits: dict[ir.Node, list[ir.Node]] = {}
    for value, new in memory.items():
        writer = new.producer()
        assert writer is not None
        late = [n for n in found[value] if n is not writer and not after[writer] & bits[n]]
        last = [n for n in late if not any(after[other] & bits[n] for other in late)]
        waits.setdefault(writer, []).extend(last)
    for writer, nodes_before in waits.items():
        signals = [_tensor_of(node) for node in dict.fromkeys(nodes_before)]
        held = not signals or Guard(op, writer, signals, FuseUpdate.name).hold(writer)
        assert held, f"{writer.name} reads nothing that could come late"


def _tensor_of(node: ir.Node) -> ir.Value:
    return next(v for v in node.outputs if v.name and isinstance(v.type, ir.TensorType))
