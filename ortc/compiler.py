"""The pass manager: what a compilation carries, how a pass is declared, and how a list of passes runs."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir

from ortc.boundary import Part
from ortc.errors import RecipeError
from ortc.plan import (
    AdapterInfo,
    LossInfo,
    ParameterInfo,
    PassRun,
    PhaseMemory,
    Recomputed,
    RewriteInfo,
    Sessions,
    StageCosts,
    Stashed,
)
from ortc.recipe import Recipe
from ortc.target import Target

ROLE, OF, SLOT, STAGES, INITIAL = "ortc.role", "ortc.of", "ortc.slot", "ortc.stages", "ortc.initial"


@dataclass
class Compilation:
    """What the passes work on.

    ``model`` is the user's model on its way to the training graph. Graphs that leave that way (the inference template, the
    evaluation, the criterion) are put into ``graphs``. From the partition on, each stage has its own graphs in ``stages``,
    under the phase's name; the passes that finish graphs treat all of them.
    """

    model: ir.Model
    recipe: Recipe
    target: Target
    part: Part | None = None  # which stage of a model that is compiled apart
    graphs: dict[str, ir.Model] = field(default_factory=dict)
    stages: list[dict[str, ir.Model]] = field(default_factory=list)
    costs: list[StageCosts] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # of symbolic dimensions, as assumed for the costs
    memory: list[dict[str, PhaseMemory]] = field(default_factory=list)  # of each stage's phases
    recomputed: dict[int, Recomputed] = field(default_factory=dict)  # by stage
    stashed: dict[int, Stashed] = field(default_factory=dict)  # by stage
    weights: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # a weight's copy in the file -> the weight
    parameters: list[ParameterInfo] = field(default_factory=list)
    constants: list[tuple[str, str]] = field(default_factory=list)  # initialisers that cannot train: (name, why)
    adapters: list[AdapterInfo] = field(default_factory=list)
    losses: list[LossInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # of a part: what the recipe names and another part may have
    rewrites: list[RewriteInfo] = field(default_factory=list)
    history: list[PassRun] = field(default_factory=list)
    sessions: Sessions = field(default_factory=Sessions)  # how the graphs are to be opened

    @property
    def graph(self) -> ir.Graph:
        """The graph of ``model``."""
        return self.model.graph

    def complain(self, text: str) -> None:
        """The recipe names what is not there; where only a part is at hand, another may have it.

        Raises:
            RecipeError: with the text, if this is the whole model.
        """
        if self.part is None:
            raise RecipeError(text)
        self.complaints.append(text)

    def all_models(self) -> dict[str, ir.Model]:
        """Every model that is in work or finished, by a name for messages."""
        staged = {f"stage {s} {phase}": m for s, phases in enumerate(self.stages) for phase, m in phases.items()}
        return {"model": self.model, **self.graphs, **staged}

    def count_nodes(self) -> int:
        """Nodes of the training graph: of the model, and once it is cut of all stages' forward and backward."""
        if not any(self.stages):
            return len(self.graph)
        apart = ("eval", "optimizer")
        return sum(len(m.graph) for phases in self.stages for p, m in phases.items() if not p.startswith(apart))


class Pass:
    """One rewriting step: a frozen dataclass whose fields are its options and whose docstring is their documentation.

    ``after`` names passes that must have run before; the list's order is the person's who wrote it, this only checks it.
    ``preserves``: whether the graphs compute the same as before, where they have the same outputs.
    """

    name: ClassVar[str]
    after: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[bool] = False  # whether a recipe may switch it off
    alone: ClassVar[bool] = False  # whether it means something for a model by itself (`ortc rewrite`)

    @classmethod
    def summary(cls) -> str:
        """The first line of its documentation."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    def asked_for(self, recipe: Recipe) -> bool:
        """Whether a field of the recipe needs the pass, whatever a target's table says."""
        return False

    preserves: ClassVar[bool] = True  # what the graphs compute, but for rounding; `ortc verify` holds the pass to it

    def run(self, c: Compilation) -> bool | None:
        """Rewrite the compilation in place; False if every graph surely is what it was, so that none needs a check."""
        raise NotImplementedError


def run_passes(
    passes: Sequence[Pass],
    c: Compilation,
    alone: bool = False,
    after: Callable[[Pass, Compilation], None] | None = None,
) -> Compilation:
    """Run the passes in order and check the graph after each.

    Args:
        passes: in order.
        c: what they work on.
        alone: without those that they come after in a compilation.
        after: called after each pass; it changes nothing.

    Raises:
        OrtcError: a mistake in the user's model or recipe, as found by a pass.
        AssertionError: naming the pass that broke an invariant: a fault of ortc.
    """
    done: list[str] = []
    with paused_gc():
        for step in passes:
            if not is_on(step, c.recipe, c.target):
                done.append(step.name)
                continue
            missing = [name for name in step.after if name not in done]
            assert alone or not missing, f"pass {step.name} must run after {missing}"
            before = c.count_nodes()
            changed = step.run(c)
            c.history.append(PassRun(name=step.name, before=before, after=c.count_nodes()))
            named = {id(model): (model, phase) for phase, model in c.all_models().items()}  # a single stage is the model itself
            for model, phase in named.values() if changed is not False else ():
                check_invariants(model, f"pass {step.name} ({phase})")
            done.append(step.name)
            if after is not None:
                after(step, c)
    return c


def check_switches(passes: Sequence[Pass], recipe: Recipe) -> None:
    """Check the passes that a recipe has on and off.

    Raises:
        RecipeError: there is no such pass, it is required, or it is to be on and off.
    """
    optional = [step.name for step in passes if step.optional]
    for switch, names in (("off", recipe.passes.off), ("on", recipe.passes.on)):
        for name in names:
            if name not in (step.name for step in passes):
                raise RecipeError(f"passes.{switch}: there is no pass {name!r}; optional are {', '.join(optional)}")
            if name not in optional:
                raise RecipeError(f"passes.{switch}: the pass {name!r} is required; optional are {', '.join(optional)}")
    for step in passes:
        if step.name in recipe.passes.off and (step.name in recipe.passes.on or step.asked_for(recipe)):
            raise RecipeError(f"passes.off: {step.name!r} is off, and the recipe asks for it at another place")


def is_on(step: Pass, recipe: Recipe, target: Target) -> bool:
    """Whether a pass runs: as the recipe says, else as the target's table does."""
    if not step.optional or step.name in recipe.passes.off:
        return not step.optional
    return target.fusions.get(step.name, True) or step.name in recipe.passes.on or step.asked_for(recipe)


def check_invariants(model: ir.Model, where: str) -> None:
    """Cheap structural checks, linear in the graph: single assignment, order, unique names."""
    graph = model.graph
    # A node at a time, not a value at a time: this runs after every pass on every phase.
    known: set[ir.Value | None] = {None, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        if not known.issuperset(node.inputs):
            missing = [v.name for v in node.inputs if v is not None and v not in known]
            raise AssertionError(f"{where}: {node.name} reads {missing[0]} before it is made")
        known.update(node.outputs)
    names = [value.name for value in known if value is not None]
    if len(set(names)) < len(names):
        twice = [name for name, count in Counter(names).items() if name and count > 1]  # an output that is left out has none
        assert not twice, f"{where}: two values are called {twice[0]}"
    for value in graph.outputs:
        assert value in known, f"{where}: output {value.name} is not made in the graph"


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Without Python's cyclic collector: graphs are millions of linked objects, and walking them costs half the time.

    Afterwards they count as old, so that not the next small collection walks them all, but the next full one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:  # else somebody else's frozen objects would thaw
                gc.freeze()
                gc.unfreeze()  # what thaws is in the oldest generation
            gc.enable()


def set_role(value: ir.Value, role: str, of: str | None = None, slot: str | None = None) -> ir.Value:
    """Say what a graph's input or output is; the plan's ports are read from it."""
    value.metadata_props[ROLE] = role
    for key, text in ((OF, of), (SLOT, slot)):
        if text is not None:
            value.metadata_props[key] = text
    return value


def clear_role(value: ir.Value) -> None:
    """Let a value be one like any other."""
    for key in (ROLE, OF, SLOT):
        value.metadata_props.pop(key, None)


def set_stages(value: ir.Value, stages: Iterable[int]) -> ir.Value:
    """Say which stages are at the other end of a boundary."""
    value.metadata_props[STAGES] = ",".join(map(str, sorted(stages)))
    return value


def stages_of(value: ir.Value) -> list[int] | None:
    """The stages given by :func:`set_stages`."""
    text = value.metadata_props.get(STAGES)
    return None if text is None else [int(s) for s in text.split(",") if s]


def role(value: ir.Value) -> str | None:
    """The role given by :func:`set_role`."""
    return value.metadata_props.get(ROLE)


def ends(c: Compilation) -> list[ir.Value]:
    """The outputs that gradients come from: the loss, the first one, or what a part makes for others and gets gradients of."""
    if c.part is None or c.part.is_last:
        return list(c.graph.outputs[:1])
    wanted = {v.name for v in c.part.leaving if v.differentiable}
    return [v for v in c.graph.outputs if role(v) == "boundary" and of(v) in wanted]


def of(value: ir.Value) -> str:
    """What the port belongs to; its own name if nothing else was said."""
    return value.metadata_props.get(OF) or value.name or ""


def new_graph(name: str, opset: int, ir_version: int) -> ir.Model:
    """An empty model for a phase that does not come from the user's graph."""
    graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": opset})
    return ir.Model(graph, ir_version=ir_version, producer_name="ortc")


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a name matches one of the globs (case counts; a glob without wildcards is the name itself)."""
    return any(name == g or fnmatch.fnmatchcase(name, g) for g in globs)
