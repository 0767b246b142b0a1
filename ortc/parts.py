"""Stages that are compiled apart, each where its file is, and put together into one output folder.

``part.json`` describes the folder of one rank, as ``plan.json`` does the whole; :func:`join_parts` checks that the parts of all
ranks fit and makes the whole of them. What a part holds is what the whole does of that stage: the same graphs, parameters under
the same names, and so the same checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import onnx
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ortc import __version__
from ortc.artifacts import (
    check_output,
    compile_graphs,
    load_rules,
    whole,
    with_stages,
    write_file,
    write_graph,
    write_stage,
)
from ortc.boundary import Boundary, Part
from ortc.compiler import Compilation, paused_gc
from ortc.errors import ModelError, PlanError, RecipeError
from ortc.plan import (
    AdapterInfo,
    File,
    GraphFile,
    LossInfo,
    ParameterInfo,
    Plan,
    Port,
    RewriteInfo,
    Sessions,
    Stage,
    dump_plan,
    fingerprint,
)
from ortc.recipe import Recipe, describe_location
from ortc.runtime.checkpoint import file_hash, write_index
from ortc.runtime.schedule import check, make_schedule
from ortc.runtime.worker import Routes, schedule_of
from ortc.source import content_hash, write_safetensors
from ortc.target import load_target

PART_VERSION: Final = 1
_PART = "part.json"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_Table):
    """One stage of the part's rank."""

    model: str = Field(description="file name of the stage's model")
    stage: Stage
    parameters: list[ParameterInfo]
    tied: dict[str, str] = Field(description="weights that other stages hold too -> sha256 of their elements")
    weights: File | None = Field(description="the safetensors file of the weights that this stage answers for")
    losses: list[LossInfo]
    export: GraphFile
    adapters: list[AdapterInfo]
    adapter_export: GraphFile | None = Field(description="where the recipe asks for adapters, be there none in this stage")
    criterion: GraphFile | None = Field(description="of the last stage")
    rewrites: list[RewriteInfo]
    warnings: list[str]
    complaints: list[str] = Field(description="what the recipe names and this stage has not")


class PartPlan(_Table):
    """Everything in the folder of one rank."""

    version: Literal[1] = PART_VERSION
    ortc_version: str
    rank: int
    boundary: Boundary
    recipe: Recipe
    target: str
    opset: int
    sessions: Sessions
    pieces: list[Piece]


# ---- one rank --------------------------------------------------------------------------------------------------------


def compile_part(
    models: Sequence[str | Path],
    output: str | Path,
    boundary: Boundary,
    rank: int,
    recipe: Recipe | None = None,
    *,
    rules: Sequence[str | Path] = (),
    force: bool = False,
) -> PartPlan:
    """Compile the stages of one rank, with nothing of the others but what the boundary says.

    Args:
        models: the rank's models, in the order of its stages; one, but with the schedule ``interleaved``.
        output: the folder to make. It appears whole or not at all.
        boundary: what crosses between the stages; the same for all ranks.
        rank: which pipeline rank it is.
        recipe: what to build; the same for all ranks.
        rules: Python files with the user's own gradient rules and lowerings.
        force: replace the folder if it exists.

    Raises:
        OrtcError: for anything wrong with the models, the boundary, the recipe or the folder.
    """
    from ortc.passes import SESSIONS
    from ortc.passes.joining import load_part

    recipe = with_stages(recipe or Recipe(), boundary.stages, f"the boundary has {boundary.stages} stages")
    pipeline = recipe.pipeline
    schedule = make_schedule(pipeline.schedule, boundary.stages, pipeline.parts, pipeline.ranks)
    if not 0 <= rank < schedule.ranks:
        raise RecipeError(f"rank: there are ranks 0 to {schedule.ranks - 1}, not {rank}")
    stages = [s for s, r in enumerate(schedule.stage_rank) if r == rank]
    if len(models) != len(stages):
        held = ", ".join(map(str, stages))
        raise RecipeError(f"rank {rank} holds the stages {held}: give {len(stages)} models, in that order, not {len(models)}")
    target = Path(output)
    check_output(target, force)
    with paused_gc(), whole(target, force) as aside:
        load_rules(rules)
        pieces = []
        for path, stage in zip(models, stages, strict=True):
            part = Part(boundary, stage)
            pieces.append(_write_piece(compile_graphs(load_part(path, part), recipe, part=part), Path(path).name, aside, part))
        plan = PartPlan(
            ortc_version=__version__,
            rank=rank,
            boundary=boundary,
            recipe=recipe,
            target=recipe.target,
            opset=load_target(recipe.target).opset,
            sessions=SESSIONS,
            pieces=pieces,
        )
        write_file(
            aside / _PART,
            (json.dumps(plan.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n").encode(),
        )
    return plan


def _write_piece(c: Compilation, model: str, folder: Path, part: Part) -> Piece:
    """Write one stage's files; returns what the part says of them."""
    stage = write_stage(c, folder, part.stage, {p.name for p in c.parameters})
    names = {p.name for p in c.parameters}
    templates = {name: c.graphs[name] for name in ("export", "adapters") if name in c.graphs}
    for template in templates.values():
        for name in names:
            template.graph.initializers.pop(name, None)
    file_of = {name: f"stage-{part.stage}/{name}.template" for name in templates}
    written = {name: write_graph(model, folder, file_of[name], check=False) for name, model in templates.items()}
    tied = {w.name: w.stages[0] for w in part.tied if w.name in names}
    own = {name: c.weights[name] for name in names if tied.get(name, part.stage) == part.stage}
    weights = None
    if own:
        file = f"stage-{part.stage}/parameters.safetensors"
        write_safetensors(folder / file, own)
        weights = File(file=file, sha256=file_hash(folder / file))
    criterion = c.graphs.get("criterion")
    return Piece(
        model=model,
        stage=stage,
        parameters=c.parameters,
        tied={name: content_hash(c.weights[name]) for name in tied},
        weights=weights,
        losses=c.losses,
        export=written["export"],
        adapters=c.adapters,
        adapter_export=written.get("adapters"),
        criterion=None if criterion is None else write_graph(criterion, folder, "criterion.onnx"),
        rewrites=c.rewrites,
        warnings=c.warnings,
        complaints=c.complaints,
    )


# ---- all ranks -------------------------------------------------------------------------------------------------------


def load_part_plan(folder: str | Path) -> PartPlan:
    """Read and validate ``part.json`` of a rank's folder.

    Raises:
        PlanError: if the folder is not one of ``ortc compile --rank``, or a field is wrong.
    """
    path = Path(folder) / _PART
    try:
        return PartPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{folder} has no {_PART}: is it a folder of `ortc compile --rank`?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise PlanError(f"{path}: {describe_location(first['loc'])}: {first['msg']}; compile the part again") from None


def join_parts(folders: Sequence[str | Path], output: str | Path, *, force: bool = False) -> Plan:
    """Put the parts of all ranks together into an output folder that the runtime trains with.

    Args:
        folders: one of each rank, in any order; they stay as they are.
        output: the folder to make. It appears whole or not at all.
        force: replace the folder if it exists.

    Raises:
        OrtcError: the parts do not fit together, one is missing or damaged, or the folder cannot be made.
    """
    parts = [(Path(folder), load_part_plan(folder)) for folder in folders]
    _check_alike(parts)
    found = sorted(
        ((piece.stage.index, folder, piece) for folder, part in parts for piece in part.pieces), key=lambda row: row[0]
    )
    first = parts[0][1]
    _check_complete([(stage, folder) for stage, folder, _ in found], first.boundary.stages)
    pieces = [(folder, piece) for _, folder, piece in found]
    _check_recipe([piece for _, piece in pieces], first.recipe)
    parameters = _parameters(pieces)
    stages = _connected([piece.stage for _, piece in pieces], pieces)
    with_adapters = [(folder, piece.adapter_export) for folder, piece in pieces if piece.adapter_export is not None]
    target = Path(output)
    check_output(target, force)
    with whole(target, force) as aside:
        for folder, piece in pieces:
            _copy_piece(folder, piece, aside)
        last_folder, last = pieces[-1]
        assert last.criterion is not None
        _copy(last_folder, last.criterion.file, last.criterion.sha256, aside / last.criterion.file)
        plan = Plan(
            ortc_version=__version__,
            model="+".join(piece.model for _, piece in pieces),
            fingerprint=fingerprint(parameters),
            recipe=first.recipe,
            target=first.target,
            opset=first.opset,
            parameters=parameters,
            losses=last.losses,
            stages=stages,
            sessions=first.sessions,
            export=_joined_template([(folder, piece.export) for folder, piece in pieces], "export", aside),
            adapters=[adapter for _, piece in pieces for adapter in piece.adapters],
            adapter_export=_joined_template(with_adapters, "adapters", aside) if with_adapters else None,
            criterion=last.criterion,
            rewrites=_rewrites([piece for _, piece in pieces]),
            warnings=list(dict.fromkeys(text for _, piece in pieces for text in piece.warnings)),
        )
        check(schedule_of(plan, plan.recipe.pipeline.parts), Routes(plan).edges)
        _write_checkpoint(pieces, plan, aside)
        write_file(aside / "plan.json", dump_plan(plan).encode())
    return plan


def _check_alike(parts: Sequence[tuple[Path, PartPlan]]) -> None:
    if not parts:
        raise RecipeError("join: give the folders of all ranks")
    one, first = parts[0]
    for folder, part in parts:
        if part.ortc_version != __version__:
            raise PlanError(f"{folder} was compiled by ortc {part.ortc_version}, this is {__version__}; compile it again")
        if part.boundary.identity() != first.boundary.identity():
            raise PlanError(f"{folder} was compiled for another boundary than {one}; compile both with the same file")
        if part.recipe != first.recipe:
            how = _difference(part.recipe.model_dump(), first.recipe.model_dump())
            raise PlanError(f"{folder} was compiled with another recipe than {one}: {how}; compile all parts with the same")


def _difference(first: dict[str, Any], second: dict[str, Any], table: str = "") -> str:
    """The first field that differs, with both values."""
    field = next(name for name in first if first[name] != second[name])
    one, other, name = first[field], second[field], f"{table}{field}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return _difference(one, other, f"{name}.")
    return f"{name} is {one!r} in the first and {other!r} in the second"


def _check_complete(found: Sequence[tuple[int, Path]], stages: int) -> None:
    held: dict[int, Path] = {}
    for stage, folder in found:
        if stage in held:
            raise PlanError(f"{held[stage]} and {folder} both hold stage {stage}; give each once")
        held[stage] = folder
    missing = [str(s) for s in range(stages) if s not in held]
    if missing:
        raise PlanError(f"there are {stages} stages, but no part holds {', '.join(missing)}; give the folders of all ranks")


def _check_recipe(pieces: Sequence[Piece], recipe: Recipe) -> None:
    for text in pieces[0].complaints:
        if all(text in piece.complaints for piece in pieces):
            raise RecipeError(text)
    if not recipe.wrt and not any(p.trainable for piece in pieces for p in piece.parameters):
        raise ModelError("no stage has a trainable parameter")


def _parameters(pieces: Sequence[tuple[Path, Piece]]) -> list[ParameterInfo]:
    """Those of all stages, a tied one once."""
    found: dict[str, tuple[Path, Piece, ParameterInfo]] = {}
    for folder, piece in pieces:
        for info in piece.parameters:
            if info.name not in found:
                found[info.name] = (folder, piece, info)
                continue
            other, theirs, known = found[info.name]
            name = info.name
            if name not in piece.tied or name not in theirs.tied:
                raise PlanError(
                    f"{other} and {folder} both have a weight {name!r}: say in the boundary whether it is one ([[weights]], "
                    f'name = "{name}", stages = [{theirs.stage.index}, {piece.stage.index}], tied = true or false), and '
                    "compile both again"
                )
            if piece.tied[name] != theirs.tied[name]:
                raise PlanError(f"the tied weight {name!r} has other values in {folder} than in {other}")
            copies = list(dict.fromkeys([*known.copies, *info.copies]))
            known, info = (i.model_copy(update={"copies": copies, "reason": known.reason}) for i in (known, info))
            found[name] = (other, theirs, known)
            if info != known:
                raise PlanError(
                    f"the tied weight {name!r} is not treated alike in {other} and {folder}: "
                    f"{_difference(known.model_dump(), info.model_dump())}"
                )
    data = {port.of or port.name for _, piece in pieces for port in _ports(piece.stage, "data")}
    labels = {port.of or port.name for _, piece in pieces for port in _ports(piece.stage, "label")}
    for name in sorted(data & labels):
        raise PlanError(
            f"{name!r} is an input of one stage and the target of the loss: choose another name (--loss …:labels=NAME)"
        )
    for name in sorted(data & found.keys()):
        raise PlanError(f"{name!r} is a weight of one stage and an input of another: rename it in one of the models")
    return [info for _, _, info in found.values()]


def _rewrites(pieces: Sequence[Piece]) -> list[RewriteInfo]:
    """Those of all stages together."""
    found: dict[tuple[str, str], int] = {}
    for row in (row for piece in pieces for row in piece.rewrites):
        found[row.by, row.rule] = found.get((row.by, row.rule), 0) + row.count
    return [RewriteInfo(by=by, rule=rule, count=count) for (by, rule), count in found.items()]


def _ports(stage: Stage, role: str) -> Iterator[Port]:
    for graph in stage.phases.values():
        yield from (port for port in graph.inputs if port.role == role)


def _connected(stages: Sequence[Stage], pieces: Sequence[tuple[Path, Piece]]) -> list[Stage]:
    """The stages, each sending only what is read at the other end, which the compiler of one alone could not know."""
    wanted = {
        (phase == "eval", port.role, port.of, stage.index, source)
        for stage in stages
        for phase, graph in stage.phases.items()
        for port in graph.inputs
        if port.role in ("boundary", "boundary_gradient")
        for source in port.stages or []
    }
    sent: set[tuple[bool, str, str | None, int, int]] = set()
    made = []
    for stage in stages:
        phases = {}
        for phase, graph in stage.phases.items():
            outputs = []
            for port in graph.outputs:
                if port.role in ("boundary", "boundary_gradient"):
                    ways = [(phase == "eval", port.role, port.of, reader, stage.index) for reader in port.stages or []]
                    sent.update(ways)
                    port = port.model_copy(update={"stages": [way[3] for way in ways if way in wanted]})
                outputs.append(port)
            phases[phase] = graph.model_copy(update={"outputs": outputs})
        made.append(stage.model_copy(update={"phases": phases}))
    for _, role, name, reader, source in sorted(wanted - sent, key=str):
        what = "the gradient of " if role == "boundary_gradient" else ""
        raise PlanError(
            f"{pieces[reader][0]} reads {what}{name!r} from stage {source}, but {pieces[source][0]} does not make it"
        )
    return made


def _copy_piece(folder: Path, piece: Piece, aside: Path) -> None:
    (aside / f"stage-{piece.stage.index}").mkdir()
    for graph in piece.stage.phases.values():
        _copy(folder, graph.file, graph.sha256, aside / graph.file)


def _copy(folder: Path, file: str, sha256: str, to: Path) -> None:
    source = folder / file
    try:
        shutil.copyfile(source, to)
    except FileNotFoundError:
        raise PlanError(f"{source} is missing; compile the part again") from None
    if file_hash(to) != sha256:
        raise PlanError(
            f"{source} is not the file that was compiled (its hash differs from the part's); compile the part again"
        )


def _joined_template(templates: Sequence[tuple[Path, GraphFile]], name: str, aside: Path) -> GraphFile:
    from ortc.passes.joining import join

    models, files = [], []
    for folder, template in templates:
        path = folder / template.file
        if not path.exists() or file_hash(path) != template.sha256:
            raise PlanError(f"{path} is missing or was changed; compile the part again")
        models.append(ir.from_proto(onnx.load(path)))
        files.append(str(folder))
    opsets = {model.opset_imports[""] for model in models}
    if len(opsets) > 1:
        raise PlanError(
            f"the stages' models are of opsets {', '.join(map(str, sorted(opsets)))}: say opset = {max(opsets)} in the "
            "boundary, and compile them again"
        )
    model, _ = join(models, files)
    return write_graph(model, aside, f"{name}.template", check=False)


def _write_checkpoint(pieces: Sequence[tuple[Path, Piece]], plan: Plan, aside: Path) -> None:
    checkpoint = aside / plan.checkpoint / "step-0"
    checkpoint.mkdir(parents=True)
    file_of: dict[str, str] = {}
    for folder, piece in pieces:
        if piece.weights is not None:
            name = f"parameters-{piece.stage.index}.safetensors"
            _copy(folder, piece.weights.file, piece.weights.sha256, checkpoint / name)
            file_of |= {p.name: name for p in piece.parameters if p.name not in file_of}
    write_index(checkpoint, plan, file_of)
