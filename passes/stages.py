"""Stages and phases: the training graph cut by rank, and each stage's graph cut into what runs at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ortc.boundary import Part
from ortc.compiler import STAGES, Compilation, Pass, clear_role, of, role, set_role, set_stages, stages_of
from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.graph.cut import carve, cut, needed, read_by
from ortc.graph.partition import StageRow, amount
from ortc.graph.shapes import dims
from ortc.graph.unused import remove_unused
from ortc.passes.absorb import adds_to_zeros
from ortc.passes.backward import ANEW, FORWARD_ROLES, SIZES, forward_nodes
from ortc.passes.boundary import part_row
from ortc.passes.costs import LINK_BANDWIDTH, concrete_sizes, default_sizes, named_sizes
from ortc.passes.footprint import footprint, settled
from ortc.passes.memory import VIEWS
from ortc.passes.optimizer import state_slots
from ortc.passes.partition import PartitionOptions, assign_stages
from ortc.plan import StageCosts
from ortc.rules import node_key
from ortc.runtime.schedule import Schedule, check, in_flight, make_schedule


@dataclass(frozen=True)
class CutStages(Pass):
    """Gives every stage its part of the training and the evaluation graph."""

    name = "stages"
    after = ("training-form",)

    def run(self, c: Compilation) -> None:
        evaluation = c.graphs.pop("eval")
        pipeline = c.recipe.pipeline
        schedule = schedule_of(c)
        if c.part is not None:
            _place_part(c, c.part, evaluation, schedule)
            return
        if pipeline.stages == 1:
            c.stages = [{"train": c.model, "eval": evaluation}]
            return
        found = assign_stages(c.graph, _options(c, schedule), assumed_sizes(c), state_slots(c))
        places: dict[str, tuple[int, ...]] = {}
        for node, stage in found.stage_of.items():
            places[node.name or ""] = tuple(sorted(found.duplicated.get(node, {stage})))
        _buffers_in_one_stage(c.graph, places)
        _follow_readers(c.graph, evaluation.graph, places)
        c.costs = [_costs(row, count) for row, count in zip(found.table, in_flight(schedule), strict=True)]
        c.stages = [{} for _ in range(pipeline.stages)]
        c.sizes = {**named_sizes(c.graph, found.shapes), **assumed_sizes(c)}  # a stage's inputs may have any of them
        _cut_into(c, "train", c.model, places)
        _cut_into(c, "eval", evaluation, _by_inputs(evaluation.graph, places))
        check(schedule, _edges(c))


def _buffers_in_one_stage(graph: ir.Graph, places: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a layer whose calls are in several stages: those of the earlier one would not see what the later one wrote."""
    written = {of(v): v.producer() for v in graph.outputs if role(v) == "buffer"}
    for buffer in [v for v in graph.inputs if of(v) in written]:
        nodes = [use.node for use in buffer.uses()] + [n for n in (written[of(buffer)],) if n is not None]
        stages = {stage for node in nodes for stage in places[node.name or ""]}
        if len(stages) > 1:
            calls = " and ".join(repr(node.name) for node in dict.fromkeys(nodes))
            raise RecipeError(
                f"stages: {calls} update {of(buffer)}, one after the other, and lie in stages "
                f"{', '.join(map(str, sorted(stages)))}: cut so that they are in one (--cut), "
                "or compile with --batch-norm frozen"
            )


def _place_part(c: Compilation, part: Part, evaluation: ir.Model, schedule: Schedule) -> None:
    """The model is one stage already; those that are compiled elsewhere stay empty."""
    row = part_row(c, part, _options(c, schedule), assumed_sizes(c), state_slots(c))
    c.costs = [_costs(row, in_flight(schedule)[part.stage])] * part.boundary.stages
    c.stages = [{} for _ in range(part.boundary.stages)]
    c.stages[part.stage] = {"train": c.model, "eval": evaluation}
    for model in c.stages[part.stage].values():
        op = Builder(model.graph)
        for value in [v for v in model.graph.inputs if role(v) == "boundary"]:
            name, source = of(value), stages_of(value) or []
            set_stages(set_role(_as_wide_input(op, value), "boundary", of=name), source)
        for value in [v for v in model.graph.outputs if role(v) == "boundary"]:
            name, readers = of(value), stages_of(value) or []
            set_stages(set_role(_as_wide_output(op, value), "boundary", of=name), readers)


def schedule_of(c: Compilation) -> Schedule:
    """The recipe's schedule."""
    pipeline = c.recipe.pipeline
    return make_schedule(pipeline.schedule, pipeline.stages, pipeline.parts, pipeline.ranks)


def _edges(c: Compilation) -> set[tuple[int, int]]:
    """Between which stages values go."""
    arriving = [(v, s) for s, phases in enumerate(c.stages) if "train" in phases for v in phases["train"].graph.inputs]
    return {(source, s) for v, s in arriving if role(v) == "boundary" for source in stages_of(v) or ()}


def _options(c: Compilation, schedule: Schedule) -> PartitionOptions:
    pipeline = c.recipe.pipeline
    chunks = max(map(schedule.stage_rank.count, range(schedule.ranks)))
    return PartitionOptions(
        stages=pipeline.stages,
        cuts=pipeline.cuts,
        mapping=pipeline.assign,
        memory_limit=None if pipeline.memory_limit is None else pipeline.memory_limit // chunks,
        micro_batches=pipeline.parts,
        in_flight=in_flight(schedule),
        trainable=[p.name for p in c.parameters if p.trainable],
        wrt=c.recipe.wrt,
    )


def assumed_sizes(c: Compilation) -> dict[str, int]:
    """What the cost model takes for the named dimensions of the inputs; of stages, for all that the whole has."""
    if c.sizes:
        return dict(c.sizes)
    sizes = default_sizes(dims(value) for value in c.graph.inputs)
    unknown = sorted(c.recipe.pipeline.sizes.keys() - sizes.keys())
    if unknown:
        known = ", ".join(sorted(sizes)) or "none"
        raise RecipeError(f"pipeline.sizes: no input has a dimension {unknown[0]!r}; there are {known}")
    return {**sizes, **c.recipe.pipeline.sizes}


def _costs(row: StageRow, in_flight: int) -> StageCosts:
    return StageCosts(
        nodes=row.nodes,
        flops=row.flops,
        forward_seconds=row.forward_seconds,
        backward_input_seconds=max(row.backward_seconds - row.backward_weight_seconds, 0.0),
        backward_weight_seconds=row.backward_weight_seconds,
        sends=dict(row.sends),
        send_seconds={to: size / LINK_BANDWIDTH for to, size in row.sends.items()},
        parameter_bytes=row.memory.parameters,
        gradient_bytes=row.memory.gradients,
        state_bytes=row.memory.state,
        stash_bytes=row.memory.stash,
        in_flight=in_flight,
        boundary_bytes=row.memory.boundary,
    )


def _follow_readers(graph: ir.Graph, evaluation: ir.Graph, places: dict[str, tuple[int, ...]]) -> None:
    """What training makes of parameters alone and evaluation does not (a weight's cast) is in every stage that reads it.

    Evaluation reads the weight there, so the stage holds it: then it has its gradient too, and a tied one's are summed.
    """
    theirs = {node.name for node in evaluation}
    readers: dict[ir.Node, set[int]] = {}
    for node in graph:
        sources = [(v, v.producer()) for v in read_by(node)]
        follows = all(p in readers if p is not None else role(v) == "parameter" for v, p in sources)
        if sources and follows and node.name not in theirs:
            readers[node] = set()
    for node in reversed(graph):
        if readers.get(node):
            places[node.name or ""] = tuple(sorted(readers[node]))
        for value in read_by(node):
            producer = value.producer()
            if producer in readers:
                readers[producer].update(places[node.name or ""])


def _by_inputs(graph: ir.Graph, places: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The places of a graph that was changed: a node of another name goes where the latest of its inputs is made."""
    found = dict(places)
    for node in graph:
        if node.name not in found:
            producers = [v.producer() for v in read_by(node)]
            found[node.name or ""] = (max((found[p.name or ""][0] for p in producers if p is not None), default=0),)
    return found


def _cut_into(c: Compilation, phase: str, model: ir.Model, places: dict[str, tuple[int, ...]]) -> None:
    for s, piece in enumerate(cut(model, len(c.stages), lambda node: places[node.name or ""])):
        if piece is None:
            continue
        op = Builder(piece.model.graph)
        for arriving, value, source in piece.arriving:
            set_stages(set_role(_as_wide_input(op, arriving), "boundary", of=value.name), [source])
        for leaving, value, readers in piece.leaving:
            set_stages(set_role(_as_wide_output(op, leaving), "boundary", of=value.name), readers)
        c.stages[s][phase] = piece.model


# NumPy has no such type, in whose arrays values travel: they do so in float32, which loses nothing.
_NO_ARRAY = ir.DataType.BFLOAT16


def _as_wide_input(op: Builder, value: ir.Value) -> ir.Value:
    if value.dtype != _NO_ARRAY:
        return value
    wide = ir.Value(name=op.names.fresh(f"{value.name}.wide"), type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
    op.graph.inputs[op.graph.inputs.index(value)] = wide
    first = next(iter(op.graph))
    with op.scope(f"{value.name}.narrow", before=first, origin=value.name or "", pass_="stages"):
        narrow = op.Cast(wide, to=int(_NO_ARRAY))
    ir.convenience.replace_all_uses_with(value, narrow, replace_graph_outputs=True)
    return wide


def _as_wide_output(op: Builder, value: ir.Value) -> ir.Value:
    if value.dtype != _NO_ARRAY:
        return value
    with op.scope(f"{value.name}.wide", origin=value.name or "", pass_="stages"):
        wide = op.Cast(value, to=int(ir.DataType.FLOAT))
    wide.name, wide.shape = op.names.fresh(f"{value.name}.wide"), value.shape
    op.graph.outputs[op.graph.outputs.index(value)] = wide
    return wide


@dataclass(frozen=True)
class SplitPhases(Pass):
    """Cuts each stage's training graph into the phases that the schedule runs, and lets gradients add up over micro-batches."""

    name = "phases"
    after = ("clean-up", "narrow-stash")

    def run(self, c: Compilation) -> None:
        pipeline = c.recipe.pipeline
        if not pipeline.divided:
            if c.target.in_place and "ort" not in c.recipe.artifacts:
                for phases in c.stages:
                    if "train" in phases:
                        _accumulate(phases["train"], tables_only=True)
            return
        schedule = schedule_of(c)
        actions = [action for row in schedule.actions for action in row]
        apart = any(action.kind == "I" for action in actions)
        for stage, phases in enumerate(c.stages):
            if "train" not in phases:
                continue
            _accumulate(phases["train"])
            if pipeline.stages > 1:
                train = phases.pop("train")
                shapes = concrete_sizes(train.graph, assumed_sizes(c))
                values = [*train.graph.inputs, *(v for node in train.graph for v in node.outputs)]
                size = {v.name or "": shapes.bytes(v) for v in values}
                _split(phases, train, apart=apart)
                own = [action for action in actions if action.stage == stage]
                c.costs[stage] = settled(c.costs[stage], footprint(phases, size), own)
        _check_limit(c)


def _check_limit(c: Compilation) -> None:
    """What the finished stages hold may be more than was thought when they were cut."""
    pipeline = c.recipe.pipeline
    if pipeline.memory_limit is None or not c.costs:
        return
    stage_rank = schedule_of(c).stage_rank
    for rank in range(max(stage_rank) + 1):
        own = [c.costs[s] for s, r in enumerate(stage_rank) if r == rank and (c.part is None or c.part.stage == s)]
        taken = sum(costs.memory_bytes for costs in own)
        if taken > pipeline.memory_limit:
            raise RecipeError(
                f"rank {rank} would take {amount(taken)}, more than the limit of {amount(pipeline.memory_limit)}; ask for more "
                "stages, or for recompute (--recompute auto)"
            )


def _accumulate(model: ir.Model, tables_only: bool = False) -> None:
    """Each parameter's gradient is added to an input, whose memory the output may share.

    Args:
        model: a training graph.
        tables_only: only those of which rows are added to zeros: the input takes their place, and nothing is copied.
    """
    graph = model.graph
    op = Builder(graph)
    parameters = {of(v): v for v in graph.inputs if role(v) == "parameter"}
    for index, gradient in enumerate(graph.outputs):
        if role(gradient) != "gradient" or of(gradient) not in parameters:
            continue
        source = gradient.producer()
        rows = adds_to_zeros(source) and not gradient.uses()
        if tables_only and not rows:
            continue
        total = ir.Value(name=op.names.fresh(f"{of(gradient)}.total"), type=gradient.type, shape=gradient.shape)
        graph.inputs.append(set_role(total, "gradient", of=of(gradient)))
        if rows:
            source.replace_input_with(0, total)  # type: ignore[union-attr]
            continue
        with op.scope(f"{of(gradient)}.total", origin=of(gradient), pass_="phases"):
            added = op.Add(total, gradient, _like=gradient)
        added.name = op.names.fresh(f"{gradient.name}.total")
        node = added.producer()
        if node is not None and source is not None:  # at once, so that the gradient itself is not kept
            graph.remove(node)
            graph.insert_after(source, node)
        set_role(added, "gradient", of=of(gradient))
        clear_role(gradient)  # of a node that the gradients of inputs need as well, it is a value to be kept
        graph.outputs[index] = added
    remove_unused(model)


_OUTPUT_ROLES = FORWARD_ROLES | {"gradient", "boundary_gradient"}


def _split(phases: dict[str, ir.Model], train: ir.Model, *, apart: bool) -> None:
    """Forward and backward, or the backward in two parts: the gradients that other stages wait for, and the weights'."""
    graph = train.graph
    ahead = [v for v in graph.outputs if role(v) in FORWARD_ROLES]
    behind = [v for v in graph.outputs if role(v) not in FORWARD_ROLES]
    stash = _stash(graph, behind) if behind else []
    if behind:
        waited = [v for v in behind if role(v) == "boundary_gradient"]
        if apart and waited and len(waited) < len(behind):
            weights = [v for v in behind if role(v) != "boundary_gradient"]
            first, _ = needed(waited, set(stash))
            again = {n for n in first if ANEW in n.metadata_props}
            last, _ = needed(weights, set(stash) | {v for n in first - again for v in n.outputs})
            shared = [v for n in graph if n in first and n not in last for v in n.outputs]
            kept = [v for v in shared if any(u.node in last for u in v.uses()) or v in weights]
            phases["backward_input"] = _phase(train, [*waited, *(v for v in kept if v not in waited)], stash)
            phases["backward_weight"] = _phase(train, weights, [*stash, *kept])
        elif apart:
            phases["backward_input" if waited else "backward_weight"] = _phase(train, behind, stash)
        else:
            phases["backward"] = _phase(train, behind, stash)
    phases["forward"] = _phase(train, list(dict.fromkeys([*ahead, *stash])), [])


def _stash(graph: ir.Graph, behind: list[ir.Value]) -> list[ir.Value]:
    """What the backward needs of the forward's values."""
    made = {v for node in forward_nodes(graph) for v in node.outputs}
    for node in graph:  # what the backward alone wants to know of sizes, the forward tells
        if node.op_type in SIZES and not node.domain and all(v in made or role(v) == "boundary" for v in read_by(node)):
            made.update(node.outputs)
    _, kept = needed(behind, made)
    given = made | {v for v in graph.inputs if role(v) == "boundary"}
    wanted = [v for node in graph for v in node.outputs if v in kept]
    # Views are looked at again where what they view is at hand.
    stash: list[ir.Value] = []
    at_hand = {v for v in kept if role(v) == "boundary"}
    for value in wanted:
        producer = value.producer()
        assert producer is not None
        if not _at_hand(producer, at_hand, given):
            stash.append(value)
            at_hand.add(value)
    return stash


def _at_hand(node: ir.Node, stash: set[ir.Value], made: set[ir.Value]) -> bool:
    if node_key(node) not in VIEWS and (node.op_type not in SIZES or node.domain):
        return False
    return all(v in stash or v not in made or _view_at_hand(v, stash, made) for v in read_by(node))


def _view_at_hand(value: ir.Value, stash: set[ir.Value], made: set[ir.Value]) -> bool:
    producer = value.producer()
    return producer is not None and _at_hand(producer, stash, made)


def _phase(train: ir.Model, outputs: list[ir.Value], given: list[ir.Value]) -> ir.Model:
    model, read = carve(train, outputs, given)
    stash = model.graph.inputs[len(model.graph.inputs) - len(read) :]
    for value in [*stash, *(v for v in model.graph.outputs if role(v) not in _OUTPUT_ROLES)]:
        value.metadata_props.pop(STAGES, None)
        set_role(value, "stash", of=value.name)
    return model
