"""What a stage holds at a time, from its finished graphs and its row of the schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ortc.compiler import of, role
from ortc.plan import StageCosts
from ortc.runtime.schedule import Action

_BACKWARD = ("backward", "backward_input", "backward_weight")
_CROSSING = ("boundary", "boundary_gradient")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one micro-batch on its way through a stage. Memory that several values share counts once.

    Attributes:
        arriving, leaving: of the forward, and of the backward (or its part for the inputs), by ``F`` and ``B``.
        kept: from the forward to the backward.
        kept_for_weights: from the part of the backward for the inputs to that for the weights.
    """

    arriving: Mapping[str, int]
    leaving: Mapping[str, int]
    kept: int
    kept_for_weights: int

    def most(self, actions: Iterable[Action]) -> tuple[int, int]:
        """The most that is kept after any action of the stage's, and the most that there is while one runs."""
        held = most_kept = most = 0
        for action in actions:
            way = "F" if action.kind == "F" else "B"
            passing = 0 if action.kind == "W" else self.arriving[way] + self.leaving[way]
            most = max(most, held + passing + (self.kept if action.kind == "F" else 0))
            held += {
                "F": self.kept,
                "B": -self.kept,
                "I": self.kept_for_weights - self.kept,
                "W": -self.kept_for_weights,
            }.get(action.kind, 0)
            most_kept, most = max(most_kept, held), max(most, held)
        return most_kept, most


def footprint(phases: Mapping[str, ir.Model], size: Mapping[str, int]) -> Footprint:
    """Of a stage.

    Args:
        phases: its graphs.
        size: bytes of a value by its name.
    """
    graphs = {name: model.graph for name, model in phases.items()}

    def ports(values: Iterable[ir.Value], roles: Collection[str]) -> dict[str, int]:
        # A value and its gradient have one name; gradients of one value come from several stages.
        return {v.name or "": size.get(v.name or "", 0) for v in values if role(v) in roles}

    forward = graphs.get("forward")
    later = [graphs[name] for name in _BACKWARD if name in graphs]
    read = {of(v) for g in later for v in g.inputs if role(v) in ("boundary", "stash")}
    weights = graphs.get("backward_weight")
    first = graphs.get("backward") or graphs.get("backward_input")
    arriving = {} if forward is None else ports(forward.inputs, ("boundary",))
    made = {} if forward is None else ports(forward.outputs, ("boundary", "stash"))
    boundary = {v.name or "": of(v) for v in (() if forward is None else forward.inputs) if role(v) == "boundary"}
    kept = {n: b for n, b in arriving.items() if boundary[n] in read}
    kept |= {n: b for n, b in made.items() if n in read}
    back = {} if first is None else ports(first.inputs, ("boundary_gradient",))
    for_weights = {} if weights is None else ports(weights.inputs, ("boundary", "stash", "boundary_gradient"))
    given_back = {} if first is None else ports(first.outputs, ("boundary_gradient", "stash"))
    return Footprint(
        arriving={"F": sum(b for n, b in arriving.items() if n not in kept), "B": sum(back.values())},
        leaving={"F": sum(b for n, b in made.items() if n not in kept), "B": sum(given_back.values())},
        kept=sum(kept.values()),
        kept_for_weights=sum(for_weights.values()) if first is not weights else 0,
    )


def settled(costs: StageCosts, held: Footprint, actions: Iterable[Action]) -> StageCosts:
    """The costs with what the stage holds, in place of what was thought when it was cut."""
    most_kept, most = held.most(actions)
    return costs.model_copy(
        update={
            "stash_bytes": most_kept,
            "boundary_bytes": most - most_kept,
            "kept_bytes": held.kept,
            "kept_for_weights_bytes": held.kept_for_weights,
        }
    )
