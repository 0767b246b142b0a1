"""``ortc inspect --html``: an output folder as one page that a person opens, with nothing loaded from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import onnx_ir as ir

from ortc import page
from ortc.compiler import Pass, paused_gc
from ortc.errors import OrtcError, RecipeError
from ortc.graph.liveness import Liveness
from ortc.inspection import format_bytes, schedule_name
from ortc.page import Html, Series, Span, tag
from ortc.plan import Plan, load_plan
from ortc.runtime.files import write_text
from ortc.runtime.schedule import parse_action
from ortc.source import read_model

_LARGEST, _OPERATORS, _CHARTS = 8, 25, 8  # rows of the tables of tensors, and of operators; curves of phases
_KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


@dataclass
class _Phase:
    """A graph that runs as one session, and what is predicted of it."""

    label: str
    stage: int
    name: str
    graph: ir.Graph
    shapes: Any


@dataclass
class _Measured:
    """What profiles say: spans of ranks by process (`ortc run --profile`), seconds by operator (ONNX Runtime's own profile)."""

    steps: dict[str, dict[int, list[Span]]] = field(default_factory=dict)
    operators: dict[str, float] = field(default_factory=dict)


def write_report(
    folder: Path,
    output: Path,
    *,
    profiles: Sequence[Path] = (),
    metrics: Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Write the page.

    Args:
        folder: an output folder.
        output: the file. What is there is replaced only if it is such a page.
        profiles: traces of `ortc run --profile`, or of ONNX Runtime's profiler.
        metrics: of past runs; by default the folder's own, if there is one.
        sizes: of symbolic dimensions, by name; the recipe's, or small ones, where not given.

    Raises:
        OrtcError: the folder, a profile or the metrics cannot be read, or the file cannot be written.
    """
    if output.exists() and not _is_ours(output):
        raise OrtcError(f"{output} exists already, and is no report of ortc: choose another name")
    with paused_gc():
        write_text(output, make_report(folder, profiles=profiles, metrics=metrics, sizes=sizes))


def make_report(
    folder: Path, *, profiles: Sequence[Path] = (), metrics: Path | None = None, sizes: Mapping[str, int] | None = None
) -> str:
    """The page as text; arguments as for :func:`write_report`. Linear in nodes; the same for the same folder."""
    plan = load_plan(folder)
    bound = _sizes(plan, sizes or {})
    measured = _measured(profiles)
    phases = list(_phases(plan, folder, bound))
    own = folder / "metrics.jsonl"
    curves = _curves(metrics or own) if metrics is not None or own.exists() else None
    assumed = ", ".join(f"{name} = {size}" for name, size in bound.items())
    sections = [
        ("facts", "At a glance", _facts(plan, phases)),
        ("stages", "Stages", _stages(plan)),
        ("timeline", "One step", _timeline(plan, measured)),
        ("memory", "Memory", _memory(phases, assumed)),
        ("operators", "Operators", _operators(phases, measured, assumed)),
        ("passes", "Passes", _passes(plan, phases)),
        ("runs", "Runs", _runs(curves)),
        ("weights", "Weights", _weights(plan)),
    ]
    return page.page(f"{plan.model}: what ortc compiled", [s for s in sections if s[2]])


def _is_ours(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(len(page.MARK)) == page.MARK
    except (OSError, UnicodeDecodeError):
        return False


# ---- reading ---------------------------------------------------------------------------------------------------------


def _sizes(plan: Plan, given: Mapping[str, int]) -> dict[str, int]:
    from ortc.passes.costs import default_sizes

    ports = {p.of or p.name: p for s in plan.stages for g in s.phases.values() for p in g.inputs if p.role in ("data", "label")}
    sizes = default_sizes(port.shape for port in sorted(ports.values(), key=lambda p: p.role != "data"))
    unknown = sorted(given.keys() - sizes.keys())
    if unknown:
        raise RecipeError(f"--size: no input has a dimension {unknown[0]!r}; there are {', '.join(sorted(sizes)) or 'none'}")
    return {**sizes, **{k: v for k, v in plan.recipe.pipeline.sizes.items() if k in sizes}, **given}


def _phases(plan: Plan, folder: Path, sizes: Mapping[str, int]) -> Iterator[_Phase]:
    from ortc.passes.costs import concrete_sizes

    for stage in plan.stages:
        for name, file in stage.phases.items():
            graph = read_model(folder / file.file).graph
            label = f"stage {stage.index} {name}" if len(plan.stages) > 1 else name
            yield _Phase(label, stage.index, name, graph, concrete_sizes(graph, sizes))


def _measured(profiles: Sequence[Path]) -> _Measured:
    found = _Measured()
    for path in profiles:
        events = _events(path)
        process = {str(e.get("pid")): e["args"].get("name") for e in events if e.get("name") == "process_name"}
        for event in events:
            duration, start, arguments = event.get("dur"), event.get("ts", 0), event["args"]
            if event.get("ph") != "X" or not _is_time(duration) or not _is_time(start):
                continue
            operator = arguments.get("op_name")
            where = str(process.get(str(event.get("pid")), ""))
            if event.get("cat") == "Node" and isinstance(operator, str):
                if str(event.get("name", "")).endswith("_kernel_time") or process:
                    found.operators[operator] = found.operators.get(operator, 0.0) + duration / 1e6
            elif where.startswith("measured"):
                span = _span(str(event.get("name")), start / 1e6, duration / 1e6)
                rank = event.get("tid")
                if span is not None and isinstance(rank, int):
                    found.steps.setdefault(where, {}).setdefault(rank, []).append(span)
    return found


def _is_time(value: object) -> TypeGuard[float]:
    """Whether it is a number of microseconds, as a trace has it."""
    return isinstance(value, int | float) and 0 <= value < 1e15


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OrtcError(f"cannot read the profile {path}: {error}") from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise OrtcError(f"{path} is no profile: it has no trace events (`ortc run --profile` writes one)")
    return [{**e, "args": e["args"] if isinstance(e.get("args"), dict) else {}} for e in events if isinstance(e, dict)]


def _span(name: str, start: float, duration: float) -> Span | None:
    try:
        action = parse_action(name)
    except (RecipeError, ValueError):
        return None
    kind = action.kind
    what = _KINDS.get(kind, "transfer")
    return Span(start, start + duration, kind if kind in _KINDS else "T", name, f"{what}, {_time(duration)}")


@dataclass
class _Curves:
    """Points of past runs by field: (step, value)."""

    fields: dict[str, list[tuple[float, float]]]
    source: str


def _curves(path: Path) -> _Curves:
    fields: dict[str, list[tuple[float, float]]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                row = _row(line)
                step = row.get("step")
                if not isinstance(step, int | float):
                    continue
                for name, value in row.items():
                    if isinstance(value, int | float) and math.isfinite(value) and name not in ("step", "time", "epoch"):
                        fields.setdefault(name, []).append((float(step), float(value)))
    except (OSError, UnicodeDecodeError) as error:
        raise OrtcError(f"cannot read the metrics {path}: {error}") from None
    return _Curves(fields, path.name)


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:  # the last line of a run that was killed
        return {}
    return row if isinstance(row, dict) else {}


# ---- sections --------------------------------------------------------------------------------------------------------


def _facts(plan: Plan, phases: Sequence[_Phase]) -> Html:
    recipe, pipeline = plan.recipe, plan.recipe.pipeline
    trained = sum(math.prod(p.shape) for p in plan.trainable())
    held = sum(math.prod(p.shape) for p in plan.parameters)
    rate = recipe.learning_rate
    ranks = (pipeline.ranks or pipeline.stages) * pipeline.replicas
    pairs: list[tuple[str, page.Child]] = [
        ("model", plan.model),
        ("values that train", f"{trained:,} of {held:,}"),
        ("nodes", f"{sum(len(p.graph) for p in phases if _trains(p)):,} in training"),
        ("loss", ", ".join(f"{loss.name} of {loss.output}" for loss in plan.losses)),
        ("optimizer", recipe.optimizer.name + (", in the training graph" if recipe.optimizer.fuse else "")),
        ("learning rate", f"{rate.base:g}, {rate.schedule}"),
        ("products in", recipe.precision.type),
        ("target", f"{plan.target}, opset {plan.opset}"),
        ("stages", f"{pipeline.stages} on {ranks} {'ranks' if ranks > 1 else 'rank'}"),
        ("micro-batches", f"{pipeline.parts} a step" + (f", {pipeline.replicas} replicas" if pipeline.replicas > 1 else "")),
        ("compiled by", f"ortc {plan.ortc_version}"),
    ]
    if pipeline.stages > 1:
        pairs.insert(9, ("schedule", schedule_name(plan)))
    warnings = [tag("p", text, class_="warning") for text in plan.warnings]
    return page.join([page.facts(pairs), warnings])


def _stages(plan: Plan) -> Html:
    table = [(s, s.costs) for s in plan.stages if s.costs is not None]
    if not table:
        return Html("")
    slowest = max(c.seconds for _, c in table)
    rows: list[list[page.Child]] = []
    for stage, c in table:
        count = sum(math.prod(p.shape) for p in plan.parameters if p.name in stage.parameters)
        sends = ", ".join(f"{format_bytes(n)} to {to}" for to, n in c.sends.items()) or "-"
        parts = (c.parameter_bytes, c.gradient_bytes, c.state_bytes, c.stash_bytes, c.memory_bytes)
        numbers = [str(c.nodes), f"{count:,}", f"{c.flops / 1e9:.3g}", _time(c.seconds)]
        rows.append([str(stage.index), *numbers, page.share(c.seconds, slowest), sends, *map(format_bytes, parts)])
    head = ["stage", "nodes", "values", "GFLOP", "time", "", "sends", "weights", "gradients", "states", "stash", "in all"]
    text = "Predicted, of one micro-batch; the stash is of all micro-batches in flight."
    return page.join([page.note(text), page.table(head, rows, numbers=(0, 1, 2, 3, 4, 7, 8, 9, 10, 11))])


def _timeline(plan: Plan, measured: _Measured) -> Html:
    from ortc.runtime.simulate import plan_costs, simulate
    from ortc.runtime.worker import Routes, schedule_of

    parts: list[page.Child] = []
    kinds: dict[str, None] = {}
    if len(plan.stages) > 1 and all(stage.costs for stage in plan.stages):
        step = simulate(schedule_of(plan, plan.recipe.pipeline.parts), plan_costs(plan), Routes(plan).edges)
        rows: dict[int, list[Span]] = {}
        for t in step.timed:
            kind = t.action.kind
            told = f"stage {t.action.stage}, micro-batch {t.action.micro_batch}, {_KINDS[kind]}, {_time(t.end - t.start)}"
            rows.setdefault(t.rank, []).append(Span(t.start, t.end, kind, str(t.action), told))
            kinds[kind] = None
        parts += [
            tag("h3", f"predicted: {_time(step.end)}, {step.bubble:.1%} of it idle"),
            _picture("predicted", rows),
        ]
    for name, spans in sorted(measured.steps.items()):
        end = max(s.end for row in spans.values() for s in row)
        kinds.update(dict.fromkeys(s.kind for row in spans.values() for s in row))
        parts += [tag("h3", f"{name}: {_time(end)}"), _picture(name, spans)]
    if not parts:
        return Html("")
    colours = [(k, _KINDS[k]) for k in _KINDS if k in kinds] + ([("T", "waiting and transfer")] if "T" in kinds else [])
    about = page.note("A row is a rank, time goes to the right; what is called 2F0 is stage 2's forward of micro-batch 0.")
    return page.join([about, page.legend([*colours, ("none", "idle")]), *parts])


def _picture(name: str, rows: Mapping[int, Sequence[Span]]) -> Html:
    listed = [(f"rank {rank}", spans) for rank, spans in sorted(rows.items())]
    return tag("div", page.timeline(listed, _time, f"timeline of one step, {name}"), class_="wide")


def _memory(phases: Sequence[_Phase], assumed: str) -> Html:
    from ortc.passes.memory import phase_memory

    found = [(p, phase_memory(p.graph, p.shapes)) for p in phases]
    found = [(p, live) for p, live in found if live.peak]
    if not found:
        return Html("")
    where = assumed or "the sizes of the model"
    text = (
        f"What a session makes for itself, node by node, predicted for {where}. Weights, gradients and states, which lie in "
        "memory all the time, come on top."
    )
    most = max(live.peak for _, live in found)
    rows = [
        [
            tag("span", p.label, class_="one"),
            f"{len(p.graph):,}",
            format_bytes(live.peak),
            page.share(live.peak, most),
            tag("code", p.graph[live.at].name or "", class_="one"),
        ]
        for p, live in found
    ]
    summary = page.table(["phase", "nodes", "peak", "", "at"], rows, numbers=(1, 2))
    largest = sorted(found, key=lambda pair: -pair[1].peak)[:_CHARTS]
    shown = [_live_bytes(p, live) for p, live in found if any(p is q for q, _ in largest)]
    left = len(found) - len(shown)
    rest = page.note(f"{left} more phases need less.") if left else None
    return page.join([page.note(text), summary, tag("div", shown, class_="pair"), rest])


def _live_bytes(phase: _Phase, live: Liveness) -> Html:
    """A phase's curve, and what is live at its peak."""
    curve = page.chart(
        [Series("a", phase.label, page.thinned([(float(i), float(n)) for i, n in enumerate(live.live)]))],
        format_bytes,
        lambda i: f"node {int(i):,}",
        filled=True,
        bytes_=True,
        label=f"live bytes over the nodes of {phase.label}",
        mark=(float(live.at), float(live.peak), format_bytes(live.peak)),
    )
    rows = [
        [tag("code", value.name or ""), _shape(phase.shapes.of(value)), format_bytes(size), page.share(size, live.peak)]
        for value, size in live.alive[:_LARGEST]
    ]
    table = page.table(["live at the peak", "shape", "size", ""], rows, numbers=(2,))
    return tag("div", tag("h3", f"{phase.label}: {format_bytes(live.peak)}"), curve, table)


def _time(seconds: float) -> str:
    """``1.5 s``, ``20 ms``, ``3 µs``"""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0"


def _shape(sizes: Sequence[int]) -> Html:
    return tag("span", "×".join(map(str, sizes)) or "scalar", class_="one")


def _trains(phase: _Phase) -> bool:
    return phase.name == "train" or phase.name.startswith(("forward", "backward"))


def _operators(phases: Sequence[_Phase], measured: _Measured, assumed: str) -> Html:
    from ortc.passes.costs import Cost, forward_cost

    counts: dict[str, int] = {}
    costs: dict[str, Cost] = {}
    seconds: dict[str, float] = {}
    for phase in phases:
        if phase.name == "eval":
            continue
        for node in phase.graph:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            cost = forward_cost(node, phase.shapes)
            counts[name] = counts.get(name, 0) + 1
            costs[name] = costs.get(name, Cost()) + cost
            seconds[name] = seconds.get(name, 0.0) + cost.seconds
    short = {name: name.rpartition(".")[2] for name in counts}
    order = sorted(counts, key=lambda name: (-measured.operators.get(short[name], 0.0), -seconds[name], name))
    top = max(seconds.values(), default=0.0)
    top_measured = max(measured.operators.values(), default=0.0)
    rows: list[list[page.Child]] = []
    for name in order[:_OPERATORS]:
        cost = costs[name]
        cells: list[page.Child] = [tag("code", name), f"{counts[name]:,}", f"{cost.flops / 1e9:.3g}", format_bytes(cost.bytes)]
        cells += [_time(seconds[name]), page.share(seconds[name], top)]
        if measured.operators:
            took = measured.operators.get(short[name], 0.0)
            cells += [_time(took), page.share(took, top_measured, "b")]
        rows.append(cells)
    head = ["operator", "nodes", "GFLOP", "read and written", "predicted", ""]
    head += ["measured, all runs", ""] if measured.operators else []
    left = len(order) - _OPERATORS
    rest = page.note(f"{left} more take less.") if left > 0 else None
    where = assumed or "the sizes of the model"
    text = f"One micro-batch and one update of all stages, for {where}; predicted times are a roofline of one core."
    return page.join([page.note(text), page.table(head, rows, numbers=(1, 2, 3, 4, 6)), rest])


def _passes(plan: Plan, phases: Sequence[_Phase]) -> Html:
    from ortc import passes

    about = {p.name: _first_line(p) for p in passes.standard()}
    made: dict[str, dict[str, int]] = {}
    for phase in phases:
        for node in phase.graph:
            tags = node.metadata_props
            if "ortc.pass" in tags:
                rules = made.setdefault(tags["ortc.pass"], {})
                rule = tags.get("ortc.rule", "")
                rules[rule] = rules.get(rule, 0) + 1
    most = max((abs(run.after - run.before) for run in plan.history), default=0)
    rows: list[list[page.Child]] = []
    for run in plan.history:
        change = run.after - run.before
        nodes = [f"{run.before:,}", f"{run.after:,}", f"{change:+,}" if change else "", page.share(abs(change), most)]
        rows.append([tag("code", run.name), *nodes, _rules(made.pop(run.name, {})), about.get(run.name, "")])
    for name, rules in sorted(made.items()):
        rows.append([tag("code", name), "", "", "", "", _rules(rules), about.get(name, "a step inside another pass")])
    text = "Nodes of the training graph before and after each pass; made: what is left of its own in all phases, by rule."
    head = ["pass", "before", "after", "change", "", "made", "what it does"]
    return page.join([page.note(text), page.table(head, rows, numbers=(1, 2, 3))])


def _first_line(step: Pass) -> str:
    return (type(step).__doc__ or "").strip().partition("\n")[0]


def _rules(rules: Mapping[str, int]) -> str:
    """How many nodes, and by which rules most of them."""
    if not rules:
        return ""
    named = sorted(((n, rule) for rule, n in rules.items() if rule), key=lambda pair: (-pair[0], pair[1]))
    shown = ", ".join(f"{rule} {n:,}" for n, rule in named[:4]) + (", …" if len(named) > 4 else "")
    return f"{sum(rules.values()):,}" + (f" ({shown})" if shown else "")


def _runs(curves: _Curves | None) -> Html:
    if curves is None or not curves.fields:
        return Html("")
    parts: list[page.Child] = []
    losses = [
        Series(kind, name, page.thinned(_in_order(curves.fields[name])))
        for kind, name in (("a", "loss"), ("b", "eval_loss"))
        if name in curves.fields
    ]
    if losses:
        keys = page.legend([(s.kind, {"loss": "training", "eval_loss": "evaluation"}[s.name]) for s in losses])
        parts.append(tag("div", tag("h3", "loss"), keys, _curve(losses, "loss by step")))
    for name in sorted(curves.fields.keys() - {"loss", "eval_loss"}):
        points = page.thinned(_in_order(curves.fields[name]))
        parts.append(tag("div", tag("h3", name.replace("_", " ")), _curve([Series("a", name, points)], f"{name} by step")))
    return page.join([page.note(f"From {curves.source}."), tag("div", parts, class_="pair")])


def _in_order(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(points, key=lambda p: p[0])


def _curve(series: Sequence[Series], label: str) -> Html:
    values = [y for s in series for _, y in s.points]
    return page.chart(
        series, lambda y: f"{y:.4g}", lambda x: f"step {int(x):,}", from_zero=0 <= min(values) < max(values) / 2, label=label
    )


def _weights(plan: Plan) -> Html:
    rows = []
    for p in plan.parameters:
        fate = "trains" if p.trainable else "buffer" if p.role == "buffer" else "frozen"
        count = f"{math.prod(p.shape):,}"
        rows.append([tag("code", p.name), p.dtype, _shape(p.shape), count, tag("span", fate, class_=f"chip {fate}"), p.reason])
    head = ["name", "type", "shape", "values", "fate", "why"]
    return page.table(head, rows, numbers=(3,), filterable=len(rows) > 12)
