"""Which stage every node of the training graph goes to: balanced by the cost model, or as the user says.

By hand there are two ways: cut tensors, each of which ends a stage, or globs over node names. The loss and all that reads the
labels are on the last stage whichever way; nodes that every stage computes for itself (masks from data inputs) follow their
readers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ortc.autodiff import differentiable_inputs, reached
from ortc.compiler import matches, of, role
from ortc.errors import RecipeError
from ortc.graph.names import captured
from ortc.graph.partition import (
    Machine,
    Node,
    Parameter,
    Partition,
    Problem,
    StageRow,
    Value,
    amount,
    ancestors,
    choose_replicated,
    fill,
    imbalance,
    light,
    partition,
    path,
    place_replicated,
    readers_of,
    settle,
    single,
    stage_table,
)
from ortc.graph.shapes import is_float
from ortc.passes.costs import LINK_BANDWIDTH, Cost, NodeCost, Shapes, concrete_sizes, kept_values, node_cost


@dataclass(frozen=True)
class PartitionOptions:
    """What the recipe says about stages.

    Attributes:
        stages: how many.
        cuts: by hand: names of the tensors that end stage 0, 1, …; several for one stage are joined by commas.
        mapping: by hand: node-name glob -> stage; the first that matches wins.
        memory_limit: bytes that a stage may take. A rank with several chunks divides its own among them.
        micro_batches: of one step.
        in_flight: micro-batches whose stash each stage holds at a time; default: as 1F1B does, ``stages - stage`` of them.
        trainable: names of the parameters that train; default: all.
        wrt: data inputs whose gradients are wanted.
    """

    stages: int
    cuts: Sequence[str] = ()
    mapping: Mapping[str, int] = field(default_factory=dict)
    memory_limit: int | None = None
    micro_batches: int = 1
    in_flight: Sequence[int] | None = None
    trainable: Collection[str] | None = None
    wrt: Collection[str] = ()


@dataclass(frozen=True)
class Assignment:
    """The stage of every node (the first of a duplicated one), all stages of the duplicated ones, and the stage table."""

    stage_of: dict[ir.Node, int]
    duplicated: dict[ir.Node, frozenset[int]]
    table: list[StageRow]
    shapes: Shapes  # of the graph's values, with the sizes that were assumed

    @property
    def imbalance(self) -> float:
        """The slowest stage's time over the mean."""
        return imbalance(self.table)


def assign_stages(
    graph: ir.Graph, options: PartitionOptions, binding: Mapping[str, int], optimizer_slots: float, default: int = 1
) -> Assignment:
    """Give every node of a forward graph with its loss (see ``training-form``) a stage.

    Every edge goes from a stage to the same or a later one. A parameter that nodes of several stages read is in all of them.
    Nodes that nothing depends on are where their inputs are, and cost nothing.

    Args:
        graph: the first output is the loss; inputs have their roles.
        options: how to cut.
        binding: the sizes of one micro-batch, by the names of the symbolic dimensions.
        optimizer_slots: float32 numbers of optimizer state for each element of a parameter.
        default: size of dimensions that are not bound.

    Raises:
        RecipeError: if the options ask for what cannot be; it says why.
    """
    machine = _machine(options)
    shapes = concrete_sizes(graph, binding, default)
    problem, nodes = describe(graph, shapes, options, optimizer_slots)
    if options.cuts or options.mapping:
        found = _by_hand(graph, problem, nodes, options, machine)
    elif options.stages == 1:
        everything: list[tuple[int, ...]] = [(0,)] * len(nodes)
        found = Partition(everything, stage_table(problem, everything, machine))
    else:
        found = partition(problem, machine)
    stage_of = {node: stages[0] for node, stages in zip(nodes, found.placement, strict=True)}
    _place_dead(graph, stage_of)
    duplicated = {n: frozenset(s) for n, s in zip(nodes, found.placement, strict=True) if len(s) > 1}
    return Assignment({node: stage_of[node] for node in graph}, duplicated, found.table, shapes)


def _machine(options: PartitionOptions) -> Machine:
    if options.stages < 1:
        raise RecipeError(f"stages: there must be at least 1, not {options.stages}")
    if options.cuts and options.mapping:
        raise RecipeError("stages: give either cut tensors or a mapping of nodes, not both")
    in_flight = options.in_flight
    if in_flight is None:
        in_flight = [min(options.micro_batches, options.stages - s) for s in range(options.stages)]
    if len(in_flight) != options.stages:
        raise RecipeError(f"stages: {len(in_flight)} numbers of micro-batches in flight for {options.stages} stages")
    return Machine(in_flight, LINK_BANDWIDTH, options.memory_limit)


def _place_dead(graph: ir.Graph, stage_of: dict[ir.Node, int]) -> None:
    """Nodes that nothing depends on go where the latest of their inputs is."""
    for node in graph:
        if node not in stage_of:
            producers = [v.producer() for v in [*node.inputs, *captured(node)] if v is not None]
            stage_of[node] = max((stage_of[p] for p in producers if p is not None), default=0)


# ---- the graph as plain data -----------------------------------------------------------------------------------------


def describe(
    graph: ir.Graph, shapes: Shapes, options: PartitionOptions, optimizer_slots: float
) -> tuple[Problem, list[ir.Node]]:
    """The graph as a partition problem, and the nodes that it is about: those that an output depends on, in order."""
    nodes = _live(graph)
    flow = _Flow(graph, nodes, options)
    numbers = {v: i for i, v in enumerate(v for node in nodes for v in node.outputs)}
    values = [Value(v.name or "", shapes.bytes(v), v in flow.active and v in flow.via) for v in numbers]
    inputs = [v for v in graph.inputs if role(v) in ("parameter", "buffer")]
    weights = {v: i for i, v in enumerate(inputs)}
    parameters = [_parameter(v, shapes, v in flow.active, optimizer_slots) for v in inputs]
    last = _last(graph, nodes)
    described = []
    for node in nodes:
        reads = _reads(node)
        on_path = any(v in flow.via for v in node.outputs) and any(v in flow.active for v in differentiable_inputs(node))
        cost = node_cost(node, shapes, flow.active if on_path else (), flow.weights)
        kept, extra = kept_values(node, shapes, flow.active) if on_path else ([], 0)
        described.append(
            Node(
                name=node.name or node.op_type,
                inputs=tuple(numbers[v] for v in reads if v in numbers),
                outputs=tuple(numbers[v] for v in node.outputs),
                parameters=tuple(weights[v] for v in reads if v in weights),
                keeps=tuple(numbers[v] for v in kept if v in numbers),
                extra=extra,
                forward=cost.forward.seconds,
                backward=cost.backward_seconds,
                backward_weight=cost.backward_weight.seconds,
                flops=_total(cost).flops,
                replicable=node in flow.replicable,
                last=node in last,
            )
        )
    return Problem(described, values, parameters), nodes


def _total(cost: NodeCost) -> Cost:
    return cost.forward + cost.backward_input + cost.backward_weight


def _reads(node: ir.Node) -> list[ir.Value]:
    return list(dict.fromkeys(v for v in [*node.inputs, *captured(node)] if v is not None))


def _live(graph: ir.Graph) -> list[ir.Node]:
    needed = set(graph.outputs)
    live = []
    for node in reversed(graph):
        if any(v in needed for v in node.outputs):
            needed.update(_reads(node))
            live.append(node)
    return live[::-1]


def _parameter(value: ir.Value, shapes: Shapes, trains: bool, optimizer_slots: float) -> Parameter:
    size, elements = shapes.bytes(value), shapes.elements(value)
    return Parameter(size, size * trains, int(4 * elements * optimizer_slots) * trains, elements)


class _Flow:
    """What depends on what.

    Attributes:
        active: the float values that depend on something that a gradient is wanted for.
        via: the values that the loss depends on smoothly.
        weights: the values that follow from parameters alone.
        replicable: the nodes that follow from data inputs and constants alone.
    """

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node], options: PartitionOptions) -> None:
        held = [v for v in graph.inputs if role(v) in ("parameter", "buffer")]
        trained = [v for v in held if role(v) == "parameter" and (options.trainable is None or of(v) in options.trainable)]
        differentiated = [v for v in graph.inputs if role(v) == "data" and of(v) in options.wrt]
        labels = [v for v in graph.inputs if role(v) == "label"]
        # Gradients come from the loss, or where a part is compiled apart from what other stages read.
        leaving = [v for v in graph.outputs if role(v) == "boundary"]
        self.via = reached(nodes, leaving or graph.outputs[:1])
        self.active = {*trained, *differentiated, *(v for v in graph.inputs if role(v) == "boundary" and is_float(v))}
        self.weights = set(held)
        self.replicable: set[ir.Node] = set()
        rooted = {*held, *differentiated, *labels}
        for node in nodes:
            reads, constants = _reads(node), graph.initializers
            if any(v in self.active for v in differentiable_inputs(node)):
                self.active.update(v for v in node.outputs if is_float(v))
            followed = [v for v in reads if v.name not in constants]
            if followed and all(v in self.weights for v in followed):
                self.weights.update(node.outputs)
            if any(v in rooted for v in reads):
                rooted.update(node.outputs)
            elif not any(v.is_graph_output() for v in node.outputs):
                self.replicable.add(node)


def _last(graph: ir.Graph, nodes: Sequence[ir.Node]) -> set[ir.Node]:
    """The loss, whatever depends on the labels, and what reads either."""
    reading = {v for v in graph.inputs if role(v) == "label"}
    last = set()
    for node in nodes:
        is_loss = node.metadata_props.get("ortc.pass") == "loss" or graph.outputs[0] in node.outputs
        if is_loss or any(v in reading for v in _reads(node)):
            last.add(node)
            reading.update(node.outputs)
    return last


# ---- by hand ---------------------------------------------------------------------------------------------------------


def _by_hand(
    graph: ir.Graph, problem: Problem, nodes: Sequence[ir.Node], options: PartitionOptions, machine: Machine
) -> Partition:
    problem = choose_replicated(problem, machine.stages)
    rest, positions = single(problem)
    stage_of = _by_cuts(graph, rest, options) if options.cuts else _by_names(problem, rest, positions, options)
    placed = {positions[i]: stage for i, stage in stage_of.items()}
    placement = place_replicated(problem, placed)
    table = stage_table(problem, placement, machine)
    for row in table:
        if machine.memory is not None and row.memory.total > machine.memory:
            raise RecipeError(
                f"stage {row.stage} would take {amount(row.memory.total)}, more than the limit of {amount(machine.memory)}: "
                f"{row.memory}; cut elsewhere, or leave the cuts to ortc"
            )
    return Partition(placement, table)


def _by_cuts(graph: ir.Graph, problem: Problem, options: PartitionOptions) -> dict[int, int]:
    """Stage k is what the tensors of cut k depend on, and no earlier stage holds."""
    numbers = {v.name: i for i, v in enumerate(problem.values)}
    producers = problem.producers()
    if len(options.cuts) != options.stages - 1:
        raise RecipeError(f"cuts: {options.stages} stages have {options.stages - 1} cuts between them, not {len(options.cuts)}")
    stage_of: dict[int, int] = {}
    ended: list[tuple[str, int]] = []  # each tensor so far, and the node that makes it
    boundaries: list[list[str]] = []
    for stage, cut in enumerate(options.cuts):
        names = [cut] if cut in numbers else [name.strip() for name in cut.split(",")]
        for name in names:
            _check_cut(graph, problem, name, numbers, producers)
        ends = [producers[numbers[name]] for name in names]
        own = ancestors(problem, ends) - stage_of.keys()
        for name, end in zip(names, ends, strict=True):
            if end not in own:
                raise RecipeError(_already_in(problem, stage_of, ended, name, end, stage))
        stage_of |= dict.fromkeys(own, stage)
        ended += zip(names, ends, strict=True)
        boundaries.append(names)
    left = [i for i in range(len(problem.nodes)) if i not in stage_of]
    movable = set(left) & set(light(problem, options.stages))
    stage_of |= dict.fromkeys(left, options.stages - 1)
    readers = readers_of(problem)
    for stage, names in enumerate(boundaries):
        for name in names:
            if all(stage_of[i] <= stage for i in readers[numbers[name]]):
                raise RecipeError(
                    f"cuts: {name!r} is not between two stages: everything that reads it is in stage {stage} or before; "
                    "cut at a tensor that the rest of the model reads"
                )
    return settle(problem, stage_of, movable)


def _check_cut(graph: ir.Graph, problem: Problem, name: str, numbers: Mapping[str, int], producers: Sequence[int]) -> None:
    if any(v.name == name for v in graph.inputs) or name in graph.initializers:
        raise RecipeError(f"cuts: {name!r} is an input or a weight of the model, which no node makes: no stage can end there")
    if name not in numbers:
        raise RecipeError(f"cuts: no node makes a tensor called {name!r}{_close(name, list(numbers))}")
    if producers[numbers[name]] < 0:
        raise RecipeError(
            f"cuts: {name!r} follows from data inputs and constants alone: each stage that needs it computes it, so that no "
            "stage can end there"
        )
    if problem.nodes[producers[numbers[name]]].last:
        raise RecipeError(f"cuts: {name!r} belongs to the loss or depends on the labels, which are on the last stage")


def _already_in(
    problem: Problem, stage_of: Mapping[int, int], ended: Sequence[tuple[str, int]], name: str, end: int, stage: int
) -> str:
    """Why a cut tensor is computed before its stage: a later tensor was named first."""
    for other, later in ended:
        way = path(problem, end, later)
        if way:
            return (
                f"cuts: {name!r} cannot end stage {stage}: {other!r}, which ends stage {stage_of[later]}, depends on it, by "
                f"{_arrows(problem, way)}; that path would run backwards. Name the tensors in the order of the model, each once"
            )
    raise AssertionError(f"{name} is in stage {stage_of[end]} for no reason")


def _by_names(problem: Problem, rest: Problem, positions: Sequence[int], options: PartitionOptions) -> dict[int, int]:
    """Stages by the first glob that matches a node's name; the loss is on the last whatever matches it."""
    names = [node.name for node in problem.nodes]
    for glob, stage in options.mapping.items():
        if not 0 <= stage < options.stages:
            raise RecipeError(f"mapping: {glob!r} is given stage {stage}, but there are stages 0 to {options.stages - 1}")
        if not any(matches(name, [glob]) for name in names):
            raise RecipeError(f"mapping: no node has a name like {glob!r}{_close(glob.strip('*'), names)}")
    given: dict[int, int] = {}
    for i, node in enumerate(rest.nodes):
        wanted = [stage for glob, stage in options.mapping.items() if matches(node.name, [glob])]
        if node.last:
            given[i] = options.stages - 1
        elif wanted:
            given[i] = wanted[0]
    stage_of, backwards = fill(rest, given, options.stages)
    if backwards:
        start, end = backwards[0], backwards[-1]
        raise RecipeError(
            f"mapping: an edge would run backwards: {rest.nodes[end].name!r} of stage {given[end]} depends on "
            f"{rest.nodes[start].name!r} of stage {given[start]}, by {_arrows(rest, backwards)}"
        )
    stage_of = settle(rest, stage_of, [i for i in stage_of if i not in given])
    for stage in range(options.stages):
        if stage not in stage_of.values():
            raise RecipeError(f"mapping: stage {stage} would hold no node; name some for it, or ask for fewer stages")
    return stage_of


def _arrows(problem: Problem, way: Sequence[int]) -> str:
    names = [problem.nodes[i].name for i in way]
    return " -> ".join(names if len(names) <= 12 else [*names[:6], f"… {len(names) - 11} more …", *names[-5:]])


def _close(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
