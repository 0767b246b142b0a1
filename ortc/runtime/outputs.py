"""What of the evaluation graphs makes the model's outputs: a prediction wants no loss, and so no targets."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ortc.errors import OrtcError
from ortc.plan import GraphFile, Plan, Port
from ortc.runtime.batch import key
from ortc.runtime.onnx_file import cut_at
from ortc.runtime.stage import read_graph


def model_outputs(plan: Plan) -> list[str]:
    """The outputs of the user's model, by name, in its order; without what the model itself calls its loss (``none``), a
    number for a whole batch that may want targets, if there are others."""
    made = {key(p) for p in _evaluated(plan)}
    every = [name for name in map(key, plan.export.outputs) if name in made]
    losses = {loss.output for loss in plan.losses if loss.name == "none"}
    return [name for name in every if name not in losses] or every


def graphs_of(plan: Plan, folder: Path, names: Sequence[str]) -> dict[int, GraphFile]:
    """The evaluation graphs of the stages that some outputs need, with those inputs and outputs alone that they need.

    Args:
        plan, folder: an output folder.
        names: outputs of the model.

    Raises:
        OrtcError: the model has no such output.
        PlanError: a graph's file is missing or was changed.
    """
    known = list(dict.fromkeys(map(key, _evaluated(plan))))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 3, 0.4) or known
            raise OrtcError(f"the model has no output {name!r}; there is {', '.join(map(repr, close))}")
    found: dict[int, GraphFile] = {}
    readers: dict[str, list[int]] = {}  # of values between stages
    for stage in reversed(plan.stages):
        if "eval" not in stage.phases:
            continue
        graph = stage.phases["eval"]
        outputs = [p for p in graph.outputs if p.role == "output" and key(p) in names]
        for port in graph.outputs:
            to = [s for s in port.stages or () if s in readers.get(key(port), ())]
            if port.role == "boundary" and to:
                outputs.append(port.model_copy(update={"stages": to}))
        if not outputs:
            continue
        _, left = cut_at(read_graph(folder, graph), [p.name for p in outputs])
        inputs = [p for p in graph.inputs if p.name in left]
        for port in inputs:
            if port.role == "boundary":
                readers.setdefault(key(port), []).append(stage.index)
        found[stage.index] = graph.model_copy(update={"inputs": inputs, "outputs": outputs})
    return found


def _evaluated(plan: Plan) -> Iterator[Port]:
    return (p for s in plan.stages if "eval" in s.phases for p in s.phases["eval"].outputs if p.role == "output")
