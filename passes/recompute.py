"""Activation recompute: what the backward reads of the forward is computed again, instead of being kept.

Works on each stage's training graph, after equal expressions were merged and before the phases are cut. The choice is made on
plain data (``ortc/graph/recompute.py``); this file says which nodes a policy is about, and writes the clones.

A clone must not run before the backward gets there: it waits for a gradient (``backward.py``, ``waiting.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.compiler import Compilation, Pass, matches, role
from ortc.errors import RecipeError
from ortc.graph import recompute
from ortc.graph.builder import Builder
from ortc.graph.cut import read_by
from ortc.graph.names import captured
from ortc.graph.recompute import Choice, Training
from ortc.graph.shapes import constant
from ortc.graph.unused import remove_unused
from ortc.passes.backward import SIZES, Waiting, halves
from ortc.passes.costs import Shapes, concrete_sizes, forward_cost
from ortc.passes.memory import VIEWS, node_memory
from ortc.passes.optimizer import state_slots
from ortc.passes.stages import assumed_sizes, schedule_of
from ortc.plan import Recomputed
from ortc.rules import node_key
from ortc.runtime.schedule import in_flight

MARK = "ortc.recompute"

# Bytes that a second of a step is worth to `auto`. An element-wise operator gives back 14e9 or so for each second, a product
# over 64 numbers (a head's scores) 7e9, one over 768 (a dense layer) 0.6e9, a 3×3 convolution of 64 channels 0.8e9.
RATE = 2e9

# ---- what is known of operators --------------------------------------------------------------------------------------


def _keys(operators: str) -> frozenset[str]:
    return frozenset(operators.split())


# Each element from one element of each operand.
_POINTWISE = _keys(
    "Abs Add BitShift BitwiseAnd BitwiseOr BitwiseXor Cast Ceil Clip Cos Div Elu Equal Erf Exp Expand FastGelu "
    "Floor Gelu Greater GreaterOrEqual HardSigmoid Identity IsNaN LeakyRelu Less LessOrEqual Log Max Min Mod Mul "
    "Neg Not Pow QuickGelu Range Reciprocal Relu Reshape Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Squeeze "
    "Sub Sum Tanh ThresholdedRelu Unsqueeze Where"
)


def _gelu(node: ir.Node) -> bool:
    """A GELU, or the one node that is in each of its spellings: erf; 1 + tanh; x·sigmoid(1.702·x)."""
    if node.op_type in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "Erf"):
        return True
    if node.op_type == "Tanh":
        readers = [use.node for use in node.outputs[0].uses()]
        return any(n.op_type == "Add" and any(_is_number(v, 1) for v in n.inputs) for n in readers)
    source = node.inputs[0].producer() if node.op_type == "Sigmoid" and node.inputs[0] is not None else None
    return source is not None and source.op_type == "Mul" and any(_is_number(v, 1.702) for v in source.inputs)


def _is_number(value: ir.Value | None, number: float) -> bool:
    array = None if value is None else constant(value)
    return array is not None and array.size == 1 and bool(abs(float(array.reshape(())) - number) < 1e-3)


def _softmax(node: ir.Node) -> bool:
    return node.op_type == "Softmax"


# A policy's own nodes; with them go the element-wise nodes around. Those of `attention` also have the products before them.
POLICIES: dict[str, Callable[[ir.Node], bool]] = {"gelu": _gelu, "attention": _softmax}
WHOLE = ("none", "auto", "full", "layers")


def _around(forward: Sequence[ir.Node], anchor: Callable[[ir.Node], bool], products: bool) -> set[ir.Node]:
    """The anchors of a policy, and the element-wise nodes that are connected to them."""
    inside = set(forward)
    found = [node for node in forward if anchor(node)]
    region = set(found)
    while found:
        node = found.pop()
        before = [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
        after = [use.node for v in node.outputs for use in v.uses()]
        for other in [*before, *after]:
            if other in inside and other not in region and not other.domain.startswith("ai.") and other.op_type in _POINTWISE:
                region.add(other)
                found.append(other)
    if products:
        weights = of_weights(forward)
        for node in forward:
            feeds = any(use.node in region for v in node.outputs for use in v.uses())
            if node.op_type in ("MatMul", "FusedMatMul") and feeds and not any(v in weights for v in node.inputs):
                region.add(node)
    return region


def of_weights(forward: Sequence[ir.Node]) -> set[ir.Value | None]:
    """Values that follow from parameters and constants alone."""
    found: set[ir.Value | None] = set()
    for node in forward:
        read = read_by(node)
        found.update(v for v in read if v.producer() is None and role(v) in (None, "parameter", "buffer"))
        if all(v in found for v in read):
            found.update(node.outputs)
    return found


# ---- the pass --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recompute(Pass):
    """Runs nodes of the forward again where the backward needs them, as the recipe says; never changes a gradient's value."""

    name = "recompute"
    after = ("clean-up",)

    def run(self, c: Compilation) -> bool:
        wanted = c.recipe.recompute
        policy, budget = wanted.nodes, wanted.budget
        if policy == "none" and budget is None:
            return False
        check_policy(policy)
        pipeline = c.recipe.pipeline
        schedule = schedule_of(c)
        waiting = in_flight(schedule)
        chunks = max(map(schedule.stage_rank.count, range(schedule.ranks)))
        binding, slots = assumed_sizes(c), state_slots(c)
        for stage, phases in enumerate(c.stages):
            if "train" not in phases:
                continue
            graph = phases["train"].graph
            bound = not pipeline.divided and not c.recipe.optimizer.fuse
            cut = _Parts(graph, concrete_sizes(graph, binding), bound=bound)
            static = cut.static_bytes(slots, gradients=not c.recipe.optimizer.fuse)
            before = recompute.follow(cut.training, ())
            # Each micro-batch in flight keeps its stash; the one whose backward runs is in the peak.
            parked = waiting[stage] - 1 if pipeline.stages > 1 else 0
            room = None if budget is None else _Room(budget // chunks, static, parked)
            choice = _choose(cut, policy, room, stage if pipeline.stages > 1 else None)
            write_clones(graph, cut, choice)
            remove_unused(phases["train"])  # optional outputs that only clones are read of now
            c.recomputed[stage] = Recomputed(
                policy="auto" if policy == "none" else policy,
                nodes=[cut.forward[i].name or "" for i in choice.clones],
                seconds=choice.seconds,
                step_seconds=cut.seconds,
                memory_before=static + before.peak + parked * cut.kept(before),
                memory_after=static + choice.peak + parked * cut.kept(choice),
            )
        return True


@dataclass(frozen=True)
class _Room:
    """What a stage may take: bytes in all, of which so many are there anyway, and how many other stashes."""

    budget: int
    static: int
    parked: int


class _Parts:
    """A training graph as plain data."""

    def __init__(self, graph: ir.Graph, shapes: Shapes, bound: bool) -> None:
        """``bound``: gradients are written where the optimizer reads them."""
        self.forward, self.backward = halves(graph)
        nodes = [*self.forward, *self.backward]
        self.number = {v: i for i, v in enumerate(v for node in nodes for v in node.outputs)}
        elsewhere = {v for v in graph.outputs if role(v) == "gradient"} if bound else set()
        costs = [forward_cost(node, shapes).seconds for node in nodes]
        self.seconds = sum(costs)
        self._captured = {v for node in self.backward for v in captured(node)}
        plain = [self._plain(node, seconds) for node, seconds in zip(nodes, costs, strict=True)]
        kept = [v for v in graph.outputs if v in self.number and role(v) != "gradient"]
        self.training = Training(
            forward=plain[: len(self.forward)],
            backward=plain[len(self.forward) :],
            sizes=[0 if v in elsewhere else shapes.bytes(v) for v in self.number],
            outputs=frozenset(self.number[v] for v in kept),
        )
        self.graph, self.shapes = graph, shapes

    def _plain(self, node: ir.Node, seconds: float) -> recompute.Node:
        plain = not node.domain
        nested = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        return recompute.Node(
            reads=tuple(dict.fromkeys(self.number[v] for v in read_by(node) if v in self.number)),
            makes=tuple(self.number[v] for v in node.outputs),
            seconds=seconds,
            again=not nested
            and not all(v.is_initializer() for v in read_by(node))  # a constant, which ONNX Runtime folds
            and not (plain and node.op_type in SIZES)
            and all(v.type is None or isinstance(v.type, ir.TensorType) for v in node.outputs)
            and not any(v in self._captured for v in node.outputs),
            view=node_key(node) in VIEWS,
            in_place=bool(node_memory(node).in_place),
            kind=":".join(node_key(node)),
        )

    def kept(self, choice: Choice) -> int:
        """Bytes of a stash; of views of one value once."""
        t, roots = self.training, set()
        for v in choice.stash:
            while (node := t.forward[t.maker[v]]).view and node.reads and node.reads[0] in t.maker:
                v = node.reads[0]
            roots.add(v)
        return sum(t.sizes[v] for v in sorted(roots))

    def static_bytes(self, slots: float, gradients: bool) -> int:
        """Parameters, buffers with their new values, the optimizer's states, and (where all live at once) gradients."""
        size = self.shapes.bytes
        held = sum(size(v) for v in self.graph.inputs if role(v) in ("parameter", "buffer"))
        changed = sum(size(v) for v in self.graph.outputs if role(v) == "buffer")
        trained = [v for v in self.graph.outputs if role(v) == "gradient"]
        states = sum(4 * self.shapes.elements(v) for v in trained)
        return held + changed + (sum(map(size, trained)) if gradients else 0) + round(slots * states)


def _choose(cut: _Parts, policy: str, room: _Room | None, stage: int | None) -> Choice:
    t = cut.training
    if policy == "full":
        choice = recompute.least(t)
    elif policy in ("none", "auto"):
        choice = recompute.best(t, RATE) if room is None else recompute.follow(t, ())
    else:
        choice = recompute.follow(t, _named(cut, policy))
    return choice if room is None else _fitting(cut, policy, choice, room, stage)


def _fitting(cut: _Parts, policy: str, choice: Choice, room: _Room, stage: int | None) -> Choice:
    """The choice if it fits, or with `auto` the cheapest that does.

    Raises:
        RecipeError: if there is none, with the least that is possible.
    """
    t = cut.training

    def taken(made: Choice) -> int:
        return room.static + made.peak + room.parked * cut.kept(made)

    if taken(choice) <= room.budget:
        return choice
    where = "" if stage is None else f"stage {stage}: "
    if policy not in ("none", "auto"):
        raise RecipeError(
            f"{where}recompute {policy!r} takes {_mib(taken(choice))} as predicted, more than the memory budget of "
            f"{_mib(room.budget)}; `--recompute auto` finds what fits, if anything does"
        )
    room_for_peak = room.budget - room.static
    lowest: Choice | None = None
    for _ in range(6 if room.parked else 1):  # the other micro-batches' stashes follow from the choice
        if room_for_peak <= 0:
            break
        made = recompute.fit(t, room_for_peak)
        if taken(made) <= room.budget:
            return made
        lowest = made if lowest is None or taken(made) < taken(lowest) else lowest
        room_for_peak = min(room_for_peak - 1, room.budget - room.static - room.parked * cut.kept(made))
    if lowest is None or room.parked:
        made = recompute.least(t)
        lowest = made if lowest is None or taken(made) < taken(lowest) else lowest
    if taken(lowest) <= room.budget:
        return lowest
    raise RecipeError(
        f"{where}the memory budget of {_mib(room.budget)} cannot be kept: the least that was found is "
        f"{_mib(taken(lowest))}, of which {_mib(room.static)} are parameters, gradients and optimizer states; more "
        "stages, a smaller micro-batch (--size tells the sizes that are assumed) or --precision need less"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _named(cut: _Parts, policy: str) -> set[int]:
    """The nodes of a list of policies and globs over the forward's nodes.

    Raises:
        RecipeError: if nothing is meant by a part of the list.
    """
    chosen: set[int] = set()
    views = {i for i, node in enumerate(cut.training.forward) if node.view}
    for part in (p.strip() for p in policy.split(",")):
        if part == "layers":
            found = recompute.repeated_layers(cut.training)
        elif part in POLICIES:
            region = _around(cut.forward, POLICIES[part], products=part == "attention")
            allowed = {i for i, node in enumerate(cut.forward) if node in region} | views
            found = recompute.minimum_cut(cut.training, RATE, allowed)
        else:
            found = {i for i, node in enumerate(cut.forward) if any(matches(name, [part]) for name in _names(node))}
        chosen |= found
    return chosen


def _names(node: ir.Node) -> Iterable[str]:
    return [n for n in (node.name, node.metadata_props.get("ortc.origin")) if n]


def check_policy(policy: str) -> None:
    """Raises a RecipeError for a list that cannot be meant."""
    parts = [p.strip() for p in policy.split(",")]
    alone = [p for p in parts if p in ("none", "auto", "full")]
    if (alone and len(parts) > 1) or not all(parts):
        raise RecipeError(f"recompute {policy!r}: none, auto and full stand alone; a list has layers, gelu, attention, globs")


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_clones(graph: ir.Graph, cut: _Parts, choice: Choice) -> None:
    """Put the clones of a choice into the backward, each just before the first node that reads it, behind its guard."""
    writer = _Writer(graph, cut)
    group: list[ir.Node] = []
    for index, cloned in recompute.order(cut.training, frozenset(choice.clones)):
        if cloned:
            group.append(cut.forward[index])
            continue
        reader = cut.backward[index]
        if group:
            writer.write(group, reader)
            group = []
        writer.read_clones(reader)


class _Writer:
    def __init__(self, graph: ir.Graph, cut: _Parts) -> None:
        self.op = Builder(graph)
        self.again: dict[ir.Value, ir.Value] = {}
        self._waiting = Waiting(self.op, cut.backward, Recompute.name)

    def read_clones(self, node: ir.Node) -> None:
        """Let a node read what was made again."""
        for position, value in enumerate(node.inputs):
            if value is not None and value in self.again:
                node.replace_input_with(position, self.again[value])

    def write(self, group: Sequence[ir.Node], reader: ir.Node) -> None:
        """Clone nodes, in order, in front of the node that reads them first."""
        guard = self._waiting.until(reader)
        made: set[ir.Value] = set()
        for node in group:
            clone = self._clone(node)
            self.read_clones(clone)
            if not any(v in made for v in clone.inputs):
                guard.hold(clone)
            made.update(clone.outputs)
            self.op.graph.insert_before(reader, clone)

    def _clone(self, node: ir.Node) -> ir.Node:
        names = self.op.names
        outputs = [
            ir.Value(name=names.fresh(f"{v.name}.again") if v.name else "", type=v.type, shape=v.shape) for v in node.outputs
        ]
        self.again.update(zip(node.outputs, outputs, strict=True))
        metadata = {**node.metadata_props, "ortc.pass": Recompute.name, MARK: "1"}
        metadata.setdefault("ortc.origin", node.name or "")
        return ir.Node(
            node.domain,
            node.op_type,
            list(node.inputs),
            list(node.attributes.values()),
            overload=node.overload,
            outputs=outputs,
            name=names.fresh(f"{node.name}.again"),
            metadata_props=metadata,
        )
