"""``ortc verify``: translation validation of an output folder, on the machine at hand.

Three things are compared on one batch, each with something that was made another way:

* the stages' evaluation, one after the other, with the exported model;
* loss and gradients, as a training step computes them (all stages, micro-batches, replicas, casts, fused and recomputed nodes),
  with a compilation that has none of that, in float64, run by ONNX's reference evaluator; and those with a finite difference;
* what the graphs compute before and after each pass that says it changes nothing (`Pass.preserves`), in float64.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ortc import __version__
from ortc.artifacts import load_rules
from ortc.compiler import SLOT, Compilation, Pass, of, role, run_passes, stages_of
from ortc.diff import printable
from ortc.errors import DataError, ModelError, NotFiniteError, OrtcError, PlanError
from ortc.grad import TOLERANCES, VANISHING, compiled, difference, narrowest
from ortc.graph.cut import carve, needed
from ortc.graph.shapes import dims
from ortc.plan import Plan, fingerprint
from ortc.recipe import Recipe, unfused
from ortc.runtime.batch import Batch, key, synthetic_batch
from ortc.runtime.data import read_npz
from ortc.runtime.export import export_model
from ortc.runtime.parts import parts_of
from ortc.runtime.stage import Part, open_session
from ortc.runtime.trainer import Trainer
from ortc.source import load_model
from ortc.target import load_target

# A forward alone is a half of a gradient's way, without its sums over the batch: a tenth of the tolerances of gradients.
FORWARD = 0.1

# In float64 nothing is rounded but constants that a pass folds, in the type that they have: some hundred roundings of float32.
# A precision pass rounds constants to its half type: a few of them.
EXACT = 1e-5
ROUNDED = {"fp32": EXACT, "fp16": 5e-3, "bf16": 4e-2}

# What activations that are kept in a type may do to gradients: as computing in one of as many bits.
STASHED = {"fp32": 0.0, "fp16": 0.05, "bf16": 0.4, "int8": 0.4}

# What is smaller than this is judged against this: it may be zero but for rounding.
LEAST = 1e-6

# What of a recipe says what is computed; the rest is how.
_MEANING = ("loss", "parameters", "wrt", "batch_norm", "seed", "gelu", "lora")

_MERGED = "the folder exports its adapters merged into the weights: give the model with --model"
_IDLE = "no graph changed"

_Key = tuple[str, ...]
_Arrays = dict[_Key, np.ndarray]


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        worst: the value with the largest error; empty if there was none.
        error: its relative error; NaN if nothing was compared.
        tolerance: what it may be.
        note: why nothing was compared, or what else there is to say.
        errors: of each value, the largest first, where they are what people want to see.
    """

    name: str
    worst: str = ""
    error: float = math.nan
    tolerance: float = 0.0
    note: str = ""
    errors: tuple[tuple[str, float], ...] = ()

    @property
    def verdict(self) -> str:
        """``right``, ``WRONG`` or ``not checked``."""
        if math.isnan(self.error):
            return "not checked"
        return "right" if self.error <= self.tolerance else "WRONG"


def verify(
    folder: Path, model: Path | None = None, data: Path | None = None, *, rules: Sequence[Path] = (), threads: int | None = None
) -> list[Check]:
    """Check an output folder.

    Args:
        folder: of `ortc compile`.
        model: the model that it was compiled from; without, what the folder exports stands for it: then dropout is gone, so
            that gradients of a model with dropout cannot be compared.
        data: an ``.npz`` with one batch as for `ortc run`; without, a batch is made up.
        rules: the user's own rule files, if the folder was compiled with some.
        threads: of each session.

    Raises:
        OrtcError: the folder, the model or the batch cannot be used; that something is wrong is no error but a result.
    """
    load_rules(rules)
    with (
        tempfile.TemporaryDirectory(prefix="ortc-verify-") as aside,
        Trainer(folder, restore="none", threads=threads) as trainer,
    ):
        given = read_npz(data) if data else None
        plan, parameters = trainer.plan, dict(trainer.parameters)
        batch = given if given is not None else _made_up(trainer)
        parts = parts_of(batch, trainer.micro_batches, trainer.inputs, plan.losses, plan.recipe.pipeline.divided)
        exported = Path(aside) / "exported.onnx"
        export_model(plan.export, folder, parameters, exported)
        try:
            outputs = trainer.evaluate(parts[0].batch).outputs
        except DataError as error:
            hint = "" if data else " (the batch was made up: give one with --data BATCH.npz)"
            raise DataError(f"{error}{hint}") from None
        checks = [_forward(trainer, exported, parts[0], outputs, threads)]
        source = model or exported
        checks += _gradients(trainer, source, batch, parts, parameters, threads, own=model is not None)
        checks += _passes(plan, source, _Fed(parts[0], parameters, trainer.seed, outputs), own=model is not None)
    return checks


def report(checks: Sequence[Check], console: Console | None = None) -> bool:
    """Print the checks as a table; whether none is wrong."""
    console = console or Console()
    console = console if console.is_terminal else Console(width=160)
    table = Table(box=None)
    table.add_column("check")
    table.add_column("worst value", overflow="fold")
    for column in ("relative error", "tolerance"):
        table.add_column(column, justify="right")
    table.add_column("")
    idle = [c for c in checks if c.note == _IDLE]
    for c in checks:
        if c in idle:
            continue
        numbers = ["", ""] if math.isnan(c.error) else [f"{c.error:.1e}", f"{c.tolerance:.0e}"]
        text = f"{c.verdict}: {c.note}" if c.note else c.verdict
        table.add_row(*(escape(printable(t)) for t in (c.name, c.worst, *numbers, text)))
    console.print(table)
    if idle:
        console.print(
            f"{len(idle)} passes changed no graph: {', '.join(c.name.removeprefix('pass ') for c in idle)}", markup=False
        )
    for c in checks:
        if c.errors:
            console.print(f"{c.name}, of each, the largest first:", markup=False)
            for name, error in c.errors:
                console.print(f"  {error:.1e}  {printable(name)}", markup=False)
    wrong = [c.name for c in checks if c.verdict == "WRONG"]
    judged = sum(c.verdict == "right" for c in checks if c not in idle)
    text = f"WRONG: {', '.join(wrong)}" if wrong else f"{judged} checks are right"
    left = len(checks) - judged - len(wrong) - len(idle)
    console.print(text + (f", {left} could not be made" if left else ""), markup=False)
    return not wrong


def relative_error(found: np.ndarray, expected: np.ndarray, least: float = LEAST) -> float:
    """The largest difference, relative to the largest magnitude expected, but at least to ``least``.

    Infinite where one of both alone is not finite.
    """
    if found.shape != expected.shape:
        return math.inf
    if expected.dtype.kind not in "fiub" or found.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(found, expected) else math.inf
    with np.errstate(all="ignore"):
        a, b = found.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if not np.isfinite(a[~same]).all() or not np.isfinite(b[~same]).all():
            return math.inf
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
        return float(np.abs(a - b)[~same].max(initial=0.0)) / max(scale, least)


def _worst(name: str, errors: Mapping[str, float], tolerance: float, note: str = "") -> Check:
    if not errors:
        return Check(name, note=note or "nothing to compare")
    what = max(errors, key=lambda w: errors[w])
    return Check(name, what, errors[what], tolerance, note)


def _made_up(trainer: Trainer) -> Batch:
    """A batch with as many samples as the micro-batches want, and targets of all classes."""
    samples = 2 * trainer.micro_batches
    batch = synthetic_batch(trainer.inputs.ports, batch=samples)
    fixed = trainer.inputs.fixed_batch_size()
    if fixed is not None and trainer.micro_batches > 1:
        wide = {n: a.ndim > 0 and a.shape[0] % fixed == 0 for n, a in batch.items()}
        batch = {n: np.concatenate([a] * trainer.micro_batches) if wide[n] else a for n, a in batch.items()}
    for loss in trainer.inputs.losses:
        labels = batch.get(loss.labels or "")
        if labels is not None and labels.dtype.kind in "iu":
            batch[loss.labels or ""] = (np.arange(labels.size).reshape(labels.shape) % (loss.classes or 1)).astype(labels.dtype)
    return batch


# ---- the forward -----------------------------------------------------------------------------------------------------


def _forward(trainer: Trainer, exported: Path, part: Part, outputs: Mapping[str, np.ndarray], threads: int | None) -> Check:
    plan = trainer.plan
    session = open_session(str(exported), "the exported model", plan.target, plan.sessions.others, threads)
    unknown = [key(p) for p in plan.export.inputs if key(p) not in part.batch]
    if unknown:
        raise PlanError(f"the plan exports a model that reads {unknown[0]!r}, which nothing trains on; compile the model again")
    feeds = {p.name: part.batch[key(p)] for p in plan.export.inputs}
    try:
        values = session.run([p.name for p in plan.export.outputs], feeds)
    except Exception as error:
        raise OrtcError(f"ONNX Runtime cannot run the exported model: {error}") from None
    expected = dict(zip(map(key, plan.export.outputs), values, strict=True))
    kind, tolerance = _narrowest(trainer, "eval")
    errors = {name: relative_error(outputs[name], np.asarray(expected[name])) for name in expected if name in outputs}
    stages = "the stages' evaluation" if len(plan.stages) > 1 else "the evaluation"
    return _worst(f"{stages} = the exported model", errors, FORWARD * tolerance, f"in {kind}")


def _narrowest(trainer: Trainer, *phases: str) -> tuple[str, float]:
    """The narrowest type that the phases compute in, and the tolerance for gradients in it."""
    files = [s.phases[p].file for s in trainer.plan.stages for p in s.phases if p.startswith(phases)]
    found = [narrowest(onnx.load_model(trainer.folder / file)) for file in files]
    return max(found, key=lambda pair: pair[1])


# ---- gradients -------------------------------------------------------------------------------------------------------


def _gradients(
    trainer: Trainer,
    source: Path,
    batch: Batch,
    parts: Sequence[Part],
    parameters: Mapping[str, np.ndarray],
    threads: int | None,
    *,
    own: bool,
) -> Iterator[Check]:
    plan = trainer.plan
    names = ("loss and gradients = one graph in float64", "that graph's gradients = a finite difference")
    if not own and plan.recipe.lora is not None:
        yield from (Check(name, note=_MERGED) for name in names)
        return
    ports = [p for s in plan.stages for g in s.phases.values() for p in g.inputs]
    if not own and any(p.role == "scalar" and p.of == "seed" for p in ports):
        yield from (Check(name, note="the model draws random numbers: give it with --model") for name in names)
        return
    try:
        reference = _Reference(plan, source, parts, parameters, trainer)
    except OrtcError as error:
        if own and isinstance(error, ModelError):
            raise
        yield from (Check(name, note=str(error)) for name in names)
        return
    if plan.fused:
        with compiled(source, unfused(plan.recipe), threads=threads) as whole:
            loss, gradients = _finite_gradients(whole, batch)
    else:
        loss, gradients = _finite_gradients(trainer, batch)
    kind, tolerance = _narrowest(trainer, "train", "forward", "backward")
    floor = VANISHING * max((_norm(g) for g in reference.gradients.values()), default=0.0)
    errors = {"loss": abs(loss - reference.loss) / max(1.0, abs(reference.loss))}
    for name, expected in reference.gradients.items():
        found = gradients[name].astype(np.float64)
        scale = max(_norm(expected), floor, np.finfo(np.float64).tiny)
        errors[name] = _norm(found - expected) / scale if np.isfinite(found).all() else math.inf
    what = max(errors, key=lambda name: errors[name])
    kept = plan.recipe.stash.dtype
    note = f"in {kind}" if kept == "fp32" else f"in {kind}, activations kept in {kept}"
    yield Check(names[0], what, errors[what], max(tolerance, STASHED[kept]), note)
    yield reference.check(names[1])
    if plan.fused:
        yield _fused_step(plan, source, batch, threads)


def _fused_step(plan: Plan, source: Path, batch: Batch, threads: int | None) -> Check:
    """Where each weight is updated as its gradient comes: against all gradients first."""
    found = []
    for recipe in (plan.recipe, unfused(plan.recipe)):
        with compiled(source, recipe, threads=threads) as trainer:
            trainer.step(batch)
            found.append({name: array.copy() for name, array in trainer.parameters.items()})
    errors = {name: relative_error(array, found[1][name]) for name, array in found[0].items()}
    return _worst("the fused step = all gradients, then the optimizer", errors, 0.0, "to the last bit")


def _finite_gradients(trainer: Trainer, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
    """Of a step that overflows the loss scale is lowered, as in training."""
    while True:
        loss, gradients = trainer.gradients(batch)
        finite = all(np.isfinite(g).all() for g in gradients.values())
        if finite or trainer.plan.recipe.precision.scaling != "dynamic":
            return loss, gradients
        try:
            trainer.scaling = trainer.scaling.after(False, trainer.plan.recipe.precision)
        except NotFiniteError:
            return loss, gradients


class _Reference:
    """Loss and gradients of the unpartitioned graph in float64, summed over the micro-batches.

    Raises:
        OrtcError: the graph cannot be compiled, or ONNX's reference evaluator cannot run it.
    """

    def __init__(
        self, plan: Plan, source: Path, parts: Sequence[Part], parameters: Mapping[str, np.ndarray], trainer: Trainer
    ) -> None:
        from ortc import passes
        from ortc.passes.reference import STRAIGHT_THROUGH, evaluator, widened

        fields = {k: v for k, v in plan.recipe.model_dump().items() if k in _MEANING}
        recipe = Recipe.model_validate(
            {**fields, "target": "onnxruntime", "pipeline": {"micro_batches": trainer.micro_batches}}
        )
        c = run_passes(passes.standard(), Compilation(load_model(source), recipe, load_target("onnxruntime")))
        _check_model(source, c, plan)
        graph = c.stages[0]["train"]
        self.rounds = any(n.metadata_props.get("ortc.rule") in STRAIGHT_THROUGH for n in graph.graph)
        self.inputs = {v.name or "": (role(v), of(v)) for v in graph.graph.inputs}
        self.outputs = [(role(v), of(v)) for v in graph.graph.outputs]
        self.parameters = {n: of_ for n, (kind, of_) in self.inputs.items() if kind == "parameter"}
        self.parts, self.trainer = parts, trainer
        self.feeds = [self._feeds(graph.graph, part, parameters) for part in parts]
        self._whole = evaluator(widened(ir.to_proto(graph)))
        forward, _ = carve(graph, [v for v in graph.graph.outputs if role(v) == "loss"])
        self._forward = evaluator(widened(ir.to_proto(forward)))
        self.loss = 0.0
        self.gradients: dict[str, np.ndarray] = {}
        for feeds in self.feeds:
            for (kind, name), value in zip(self.outputs, self._run(self._whole, feeds), strict=True):
                if kind == "loss":
                    self.loss += float(value)
                elif kind == "gradient" and name in self.parameters.values():
                    self.gradients[name] = self.gradients.get(name, 0.0) + value

    def _feeds(self, graph: ir.Graph, part: Part, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        counters = {"seed": self.trainer.seed, "step": self.trainer.step_number + 1, "micro_batch": part.index, **part.weights}
        feeds = {}
        for value in graph.inputs:
            kind, name = role(value), of(value)
            if kind in ("parameter", "buffer"):
                array = parameters[name]
            elif kind == "scalar":
                array = np.asarray(counters[name], value.dtype.numpy())  # type: ignore[union-attr]
            elif kind == "gradient":
                array = np.zeros(tuple(int(d) for d in dims(value) or ()))  # type: ignore[arg-type]
            else:
                array = part.batch[name]
            feeds[value.name or ""] = array.astype(np.float64) if array.dtype.kind == "f" else array
        return feeds

    def _run(self, evaluator: Any, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        try:
            with np.errstate(all="ignore"):
                read = set(evaluator.input_names)
                return evaluator.run(None, {k: v for k, v in feeds.items() if k in read})
        except Exception as error:
            raise OrtcError(f"ONNX's reference evaluator cannot run the graph: {_first_line(error)}") from None

    def check(self, name: str) -> Check:
        """The gradients along one random direction of all parameters together, against a central difference."""
        tolerance = next(t for _, kind, t in TOLERANCES if kind == "float64")
        if self.rounds:
            return Check(name, note="a rounding lies before the loss, whose gradient is declared, and no derivative")
        random = np.random.default_rng(0)
        direction = {
            n: random.standard_normal(self.gradients[o].shape) for n, o in self.parameters.items() if o in self.gradients
        }
        exact = sum(float(np.sum(self.gradients[self.parameters[n]] * v)) for n, v in direction.items())
        scale = math.sqrt(sum(_norm(g) ** 2 for g in self.gradients.values()))

        def loss(h: float) -> float:
            moved = [{**feeds, **{n: feeds[n] + h * v for n, v in direction.items()}} for feeds in self.feeds]
            return sum(float(self._run(self._forward, feeds)[0]) for feeds in moved)

        numeric, smooth = difference(loss, self.loss, exact, tolerance * scale)
        error = abs(exact - numeric) / max(scale, abs(numeric), np.finfo(np.float64).tiny)
        if error > tolerance and not smooth:
            return Check(name, note="the loss has no derivative there (a ReLU at 0, equal maxima, …); other data may avoid it")
        return Check(name, "all together", error, tolerance)


def _check_model(source: Path, c: Compilation, plan: Plan) -> None:
    if fingerprint(c.parameters) != plan.fingerprint:
        raise ModelError(f"{source} is not the model that the folder was compiled from: its parameters are others")


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64)))


# ---- each pass -------------------------------------------------------------------------------------------------------


def _passes(plan: Plan, source: Path, fed: _Fed, *, own: bool) -> Iterator[Check]:
    """The compilation again, step by step."""
    if not own and plan.recipe.lora is not None:
        yield Check("passes", note=_MERGED)
        return
    from ortc import passes

    c = Compilation(load_model(source), plan.recipe, load_target(plan.target))
    before: dict[str, _State] = _states(c, fed)
    checks: list[Check] = []

    def compare(step: Pass, c: Compilation) -> None:
        nonlocal before
        after = _states(c, fed)
        if step.preserves and not step.asked_for(plan.recipe):
            tolerance = ROUNDED[plan.recipe.precision.type] if step.name == "precision" else EXACT
            checks.append(_compare(f"pass {step.name}", before, after, tolerance))
        if step.name == "narrow-stash" and plan.recipe.stash.dtype != "fp32" and "training" in after:
            checks.append(_rounding(plan.recipe.stash.dtype, before["training"], after["training"]))
        before = after

    run_passes(passes.standard(), c, after=compare)
    yield from checks
    if own:
        yield _compiled_again(plan, c)


def _compiled_again(plan: Plan, c: Compilation) -> Check:
    """Same model, recipe and version: the same bytes."""
    name = "compiled again = the folder's graphs, byte for byte"
    if plan.ortc_version != __version__:
        return Check(name, note=f"the folder is of ortc {plan.ortc_version}, this is {__version__}")
    other = []
    for stage, phases in zip(plan.stages, c.stages, strict=False):
        for phase, graph in stage.phases.items():
            same = phase in phases and _bytes_of(phases[phase]) == graph.sha256
            other += [] if same else [graph.file]
    return Check(
        name, other[0] if other else "", float(len(other)), 0.0, "of other bytes: " + ", ".join(other) if other else ""
    )


def _bytes_of(model: ir.Model) -> str:
    return hashlib.sha256(ir.to_proto(model).SerializeToString(deterministic=True)).hexdigest()


@dataclass
class _Fed:
    """What graphs are fed with, by what their inputs are."""

    part: Part
    parameters: Mapping[str, np.ndarray]
    seed: int
    outputs: Mapping[str, np.ndarray]  # of the model, for the criterion

    def array(self, value: ir.Value) -> np.ndarray | None:
        """Of an input; None if another graph makes it."""
        kind, name = role(value) or "data", of(value)
        if kind in ("data", "label"):
            return self.part.batch.get(name)
        if kind in ("parameter", "buffer"):
            return self.parameters[name]
        if kind == "output":
            return self.outputs.get(name)
        if kind == "scalar":
            known = {"seed": self.seed, "step": 1, "micro_batch": 0, "lr": 0.01, **self.part.weights}
            return np.asarray(known.get(name, 1), value.dtype.numpy())  # type: ignore[union-attr]
        if kind in ("state", "gradient"):
            shape = tuple(int(d) for d in dims(value) or ())  # type: ignore[arg-type]
            text = f"{kind} {name} {value.metadata_props.get(SLOT)}"
            return np.random.default_rng(list(text.encode())).random(shape).astype(value.dtype.numpy())  # type: ignore[union-attr]
        return None


@dataclass
class _State:
    """Graphs that make something together, at one moment of the compilation; run when first asked for.

    Attributes:
        graphs: the stage of each, and the graph.
        fed: what they are fed with.
        digest: equal for equal graphs.
    """

    graphs: list[tuple[int, ir.Model]]
    fed: _Fed
    totals: bool = False
    digest: str = ""
    problem: str = ""
    results: dict[str, _Arrays | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Keep the graphs as they are now."""
        hashed = hashlib.sha256()
        for i, (stage, model) in enumerate(self.graphs):
            copy = model.clone()
            hashed.update(ir.to_proto(copy).SerializeToString(deterministic=True))
            self.graphs[i] = (stage, copy)
        self.digest = hashed.hexdigest()

    def run(self, tool: str) -> _Arrays | str:
        """Their outputs, by what they are; or why there are none."""
        if tool not in self.results:
            try:
                self.results[tool] = _chain(self.graphs, self.fed, _TOOLS[tool], self.totals)
            except Exception as error:  # of any kind, from evaluators
                self.results[tool] = _first_line(error)
        return self.results[tool]


def _states(c: Compilation, fed: _Fed) -> dict[str, _State]:
    """What there is to run: the training, the evaluation, the criterion, the optimizer."""
    trained = any(c.stages)
    groups: dict[str, list[tuple[int, ir.Model]]] = {"training": [], "evaluation": [], "criterion": [], "optimizer": []}
    if not trained:
        groups["training"] = [(0, c.model)]
    for graph, group in (("eval", "evaluation"), ("criterion", "criterion")):
        if graph in c.graphs:
            groups[group].append((0, c.graphs[graph]))
    for stage, phases in enumerate(c.stages):
        for phase, model in phases.items():
            group = phase if phase.startswith("optimizer") else "evaluation" if phase == "eval" else "training"
            groups.setdefault(group, []).append((stage, model))
    return {group: _State(models, fed, totals=group == "training") for group, models in groups.items() if models}


def _compare(name: str, before: Mapping[str, _State], after: Mapping[str, _State], tolerance: float) -> Check:
    errors: dict[str, float] = {}
    notes: list[str] = []
    changed = False
    for group, state in after.items():
        if group not in before or before[group].digest == state.digest:
            if group in before:
                state.results = before[group].results
            continue
        changed = True
        for tool in _TOOLS:
            old, new = before[group].run(tool), state.run(tool)
            if not isinstance(old, str) and not isinstance(new, str):
                gradients = [np.abs(a).max(initial=0.0) for k, a in old.items() if k[0] == "gradient"]
                floor = VANISHING * float(max(gradients, default=0.0))
                for k in [k for k in old if k in new]:
                    least = max(floor, LEAST**2) if k[0] == "gradient" else LEAST
                    errors[f"{_shown(k)} ({group})"] = relative_error(new[k], old[k], least)
                if tool != "float64":
                    notes.append(f"{group} in {tool}")
                    tolerance = max(tolerance, _SINGLE)
                break
        else:
            notes.append(f"{group} not: {old if isinstance(old, str) else new}")
    if not changed:
        return Check(name, "", 0.0, tolerance, _IDLE)
    return _worst(name, errors, tolerance, "; ".join(notes))


def _rounding(dtype: str, exact: _State, rounded: _State) -> Check:
    """What keeping activations in a narrow type does to the gradients; in ONNX Runtime, for float64 is no narrow type."""
    name = f"gradients with activations kept in {dtype} = without"
    found, expected = (state.run("float32 by ONNX Runtime") for state in (rounded, exact))
    if isinstance(found, str) or isinstance(expected, str):
        return Check(name, note=found if isinstance(found, str) else str(expected))
    norms = {k: _norm(a) for k, a in expected.items() if k[0] == "gradient"}
    far = {k: _norm(found[k].astype(np.float64) - expected[k]) for k in norms}
    floor = max(VANISHING * max(norms.values(), default=0.0), float(np.finfo(np.float64).tiny))
    errors = {_shown(k).removeprefix("gradient "): far[k] / max(norms[k], floor) for k in norms}
    together = math.hypot(*far.values()) / max(math.hypot(*norms.values()), floor)
    ordered = tuple(sorted(errors.items(), key=lambda pair: -pair[1]))
    if not ordered:
        return Check(name, note="there are no gradients")
    return Check(name, *ordered[0], STASHED[dtype], f"{together:.1e} together", ordered)


def _shown(found: _Key) -> str:
    kind, name, *rest = found
    return name if kind == "output" or kind == name else " ".join([kind, name, *rest])


def _chain(graphs: Sequence[tuple[int, ir.Model]], fed: _Fed, run: _Tool, totals: bool) -> _Arrays:
    """Run graphs that feed each other, each as soon as its inputs are there.

    A stage's training graph, as long as it is not in phases, runs twice: what needs no gradient of other stages first.
    """
    waiting = list(graphs)
    for stage, model in graphs:
        ahead = [v for v in model.graph.outputs if role(v) in ("boundary", "loss")]
        arriving = {v for v in model.graph.inputs if role(v) == "boundary_gradient"}
        if arriving and ahead and not needed(ahead, arriving)[1] & arriving:
            waiting.append((stage, carve(model, ahead)[0]))
    known: _Arrays = {}
    made: _Arrays = {}
    while waiting:
        for item in list(waiting):
            stage, model = item
            feeds = {v.name or "": _fed(v, stage, fed, known, totals) for v in model.graph.inputs}
            if any(array is None for array in feeds.values()):
                continue
            waiting.remove(item)
            values = run(model, {k: v for k, v in feeds.items() if v is not None})
            for value, array in zip(model.graph.outputs, values, strict=True):
                known[_made_key(value, stage)] = known["stash", str(stage), value.name or ""] = array
                result = (
                    role(value) or "output",
                    of(value),
                    *([value.metadata_props[SLOT]] if SLOT in value.metadata_props else []),
                )
                if result[0] in ("loss", "output", "buffer", "state", "parameter"):
                    made[result] = array
                elif result[0] == "gradient":
                    made[result, str(stage)] = array  # type: ignore[index]
            break
        else:
            raise OrtcError("the stages wait for each other")
    return _summed(made)


def _summed(made: Mapping[Any, np.ndarray]) -> _Arrays:
    """The gradient of a weight that several stages hold is the sum of theirs."""
    found: _Arrays = {}
    for key_, array in made.items():
        if isinstance(key_[0], tuple):
            found[key_[0]] = found[key_[0]] + array if key_[0] in found else array
        else:
            found[key_] = array
    return found


def _made_key(value: ir.Value, stage: int) -> _Key:
    if role(value) == "boundary_gradient":
        return ("boundary_gradient", of(value), str(stage))
    return (role(value) or "output", of(value))


def _fed(value: ir.Value, stage: int, fed: _Fed, known: _Arrays, totals: bool) -> np.ndarray | None:
    kind = role(value)
    if kind == "boundary":
        return known.get(("boundary", of(value)))
    if kind == "boundary_gradient":
        [source] = stages_of(value) or [stage]
        return known.get(("boundary_gradient", of(value), str(source)))
    if kind == "stash":
        return known.get(("stash", str(stage), of(value)))
    if kind == "gradient" and totals:
        return np.zeros(tuple(int(d) for d in dims(value) or ()), value.dtype.numpy())  # type: ignore[arg-type,union-attr]
    return fed.array(value)


_Tool = Callable[[ir.Model, Mapping[str, np.ndarray]], list[np.ndarray]]


def _in_float64(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    from ortc.passes.reference import evaluator, widened

    wide = {k: a.astype(np.float64) if a.dtype.kind in "fV" else a for k, a in feeds.items()}  # V: bfloat16
    with np.errstate(all="ignore"):
        return list(evaluator(widened(_proto(model))).run(None, wide))


def _in_runtime(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    from ortc.passes import SESSIONS

    session = open_session(_proto(model).SerializeToString(), "the graph", "", SESSIONS.others)
    types = {i.name: i.type for i in session.get_inputs()}
    return session.run(None, {k: a.copy() for k, a in feeds.items() if k in types})  # a kernel may write to what it reads


_SINGLE = 1e-3  # of float32, as for gradients
_TOOLS: dict[str, _Tool] = {"float64": _in_float64, "float32 by ONNX Runtime": _in_runtime}


def _proto(model: ir.Model) -> onnx.ModelProto:
    """The model with its weights, in inference form where the training form is not made yet."""
    from ortc.passes.forms import to_inference
    from ortc.passes.randomness import RANDOM

    copy = model.clone()
    if any(n.op_type in RANDOM and not n.domain for n in copy.graph):
        to_inference(copy.graph)
    drawn = [n.op_type for n in copy.graph if n.op_type in RANDOM and not n.domain]
    if drawn:
        raise OrtcError(f"it draws random numbers ({drawn[0]})")
    ir.external_data.load_to_model(copy)
    return ir.to_proto(copy)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
