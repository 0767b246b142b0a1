"""From a model file to an output folder: runs the pipeline and writes the graphs, the plan and the initial checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from ortc import __version__
from ortc.boundary import Connection, Part, stage_prefix
from ortc.compiler import INITIAL, OF, SLOT, Compilation, check_switches, of, paused_gc, role, run_passes, stages_of
from ortc.errors import ModelError, OrtcError, RecipeError
from ortc.graph.shapes import dims, type_name
from ortc.plan import File, GraphFile, Plan, Port, Stage, dump_plan, fingerprint
from ortc.recipe import Recipe
from ortc.rules import import_file, load_declarations
from ortc.runtime.checkpoint import file_hash, write_index
from ortc.runtime.ort_checkpoint import Source, source, write_checkpoint
from ortc.snapshots import Snapshots
from ortc.source import blamed, load_model, write_safetensors
from ortc.target import load_target

STAGE_PHASES = ("train", "forward", "backward", "backward_input", "backward_weight", "eval", "optimizer")
_FILES = {"export": "export.template", "adapters": "adapters.template", "criterion": "criterion.onnx"}


def compile_graphs(
    model: ir.Model,
    recipe: Recipe,
    rules: Sequence[str | Path] = (),
    part: Part | None = None,
    save_intermediate: str | Path | None = None,
) -> Compilation:
    """Run the standard pipeline on a model (which is changed), with the declarations of the user's own files.

    Args:
        model: the whole, or the stage that a part is.
        recipe: what to build.
        rules: Python files.
        part: of a stage that is compiled apart, what it must know of the others.
        save_intermediate: a folder for the graphs after every pass (:mod:`ortc.snapshots`).

    Raises:
        OrtcError: for a mistake in the model or the recipe.
    """
    from ortc import passes

    load_rules(rules)
    steps = passes.standard()
    check_switches(steps, recipe)
    c = Compilation(model, recipe, load_target(recipe.target), part, sessions=passes.SESSIONS)
    if save_intermediate is None:
        return run_passes(steps, c)
    return run_passes(steps, c, after=Snapshots(Path(save_intermediate)))


def load_rules(files: Sequence[str | Path] = ()) -> None:
    """Make all declared rules known, and then those of the user's own Python files, which win."""
    load_declarations("ortc.passes.gradients")
    load_declarations("ortc.passes.lowerings")
    for file in files:
        import_file(file)


def compiled_graphs(model: ir.Model, recipe: Recipe) -> dict[str, ir.Model]:
    """The graphs of a compilation by phase: train, eval, optimizer (of several stages: 0.forward, …), criterion."""
    c = compile_graphs(model, recipe)
    several = len(c.stages) > 1
    graphs = {f"{s}.{phase}" if several else phase: m for s, phases in enumerate(c.stages) for phase, m in in_order(phases)}
    return {**graphs, "criterion": c.graphs["criterion"]}


def in_order(phases: Mapping[str, ir.Model]) -> list[tuple[str, ir.Model]]:
    """The phases of a stage, in the order in which they run."""
    return sorted(phases.items(), key=lambda item: STAGE_PHASES.index(item[0].partition(".")[0]))


def compile(
    model: str | Path,
    output: str | Path,
    recipe: Recipe | None = None,
    *,
    rules: Sequence[str | Path] = (),
    save_intermediate: str | Path | None = None,
    force: bool = False,
) -> Plan:
    """Compile a forward ONNX model into an output folder that the runtime trains with.

    Args:
        model: path of the ONNX file; its weights are never loaded.
        output: the folder to make. It appears whole or not at all.
        recipe: what to build; the defaults without one.
        rules: Python files with the user's own gradient rules and lowerings.
        save_intermediate: a folder for the graphs after every pass, without their weights.
        force: replace the folder if it exists.

    Raises:
        OrtcError: for anything wrong with the model, the recipe or the folder.
    """
    recipe = recipe or Recipe()
    target = Path(output)
    check_output(target, force)
    with paused_gc(), blamed(model):
        compilation = compile_graphs(load_model(model), recipe, rules, None, save_intermediate)
        return write_folder(compilation, Path(model).name, target, force)


def compile_stages(
    models: Sequence[str | Path],
    output: str | Path,
    recipe: Recipe | None = None,
    *,
    connections: Sequence[Connection] = (),
    rules: Sequence[str | Path] = (),
    save_intermediate: str | Path | None = None,
    force: bool = False,
) -> Plan:
    """Compile a model that comes cut in stages, one ONNX file each, in order; see :func:`compile`.

    Values connect by name (:mod:`ortc.passes.joining`), and as ``connections`` say. The result is that of the whole model, cut
    there: one export, one checkpoint.

    Raises:
        OrtcError: for anything wrong with the models, the recipe or the folder.
    """
    from ortc.passes.joining import Stages, join

    recipe = recipe or Recipe()
    if len(models) < 2:
        raise RecipeError("stage models: give at least two files, in order")
    assign = {f"{stage_prefix(k)}*": k for k in range(len(models))}
    divided = with_stages(recipe, len(models), f"the {len(models)} models are the stages", assign)
    target = Path(output)
    check_output(target, force)
    with paused_gc(), blamed(*models):
        load_rules(rules)  # joining infers shapes, for which it asks the lowerings
        stages = Stages(models, connections)
        model, warnings = join(stages.models, stages.files)
        compilation = compile_graphs(model, divided, (), None, save_intermediate)
        compilation.warnings[:0] = warnings
        return write_folder(compilation, "+".join(Path(m).name for m in models), target, force)


def with_stages(recipe: Recipe, stages: int, why: str, assign: Mapping[str, int] | None = None) -> Recipe:
    """The recipe for stages that somebody else cut.

    Raises:
        RecipeError: it says how to cut; ``why`` not.
    """
    pipeline = recipe.pipeline
    if pipeline.cuts or pipeline.assign or pipeline.stages not in (1, stages):
        raise RecipeError(f"{why}: leave out how to cut (--stages, --cut, --assign)")
    return recipe.model_copy(update={"pipeline": pipeline.model_copy(update={"stages": stages, "assign": dict(assign or {})})})


def check_output(target: Path, force: bool) -> None:
    """Refuse an output folder that cannot be made, or replaces what is not ortc's."""
    if not target.parent.exists():
        raise OrtcError(f"cannot make {target}: the folder {target.parent} does not exist")
    if target.exists() and not force:
        raise OrtcError(f"{target} exists already; choose another folder, or --force to replace it whole")
    ours = any((target / name).exists() for name in ("plan.json", "part.json"))
    if target.exists() and not ours and (not target.is_dir() or any(target.iterdir())):
        raise OrtcError(f"{target} is not an output folder of ortc (it has no plan.json); --force will not replace it")


def write_folder(c: Compilation, model_name: str, target: Path, force: bool) -> Plan:
    """Write the output folder, whole or not at all."""
    with whole(target, force) as aside:
        return _write_files(c, model_name, aside)


@contextlib.contextmanager
def whole(target: Path, force: bool) -> Iterator[Path]:
    """A folder beside the target to write into, which gets the target's place in the end, unless something is raised.

    Raises:
        OrtcError: for what the operating system refuses.
    """
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        os.chmod(aside, 0o755)
    except OSError as error:
        raise OrtcError(f"cannot write beside {target}: {error.strerror}") from None
    try:
        yield aside
        for path in [*(p for p in aside.rglob("*") if p.is_dir()), aside]:
            _sync(path)
        _put_in_place(aside, target, force)
    except OSError as error:
        raise OrtcError(f"cannot write {target}: {error.strerror}; nothing was left behind") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(aside: Path, target: Path, force: bool) -> None:
    if target.exists() and force:
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        os.rename(target, old / "old")
        os.rename(aside, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(aside, target)
    _sync(target.parent)


def _write_files(c: Compilation, model_name: str, folder: Path) -> Plan:
    stages = [write_stage(c, folder, index, held) for index, held in enumerate(_held_by_stage(c))]
    others = write_on_device(c, folder)
    held = {p.name for p in c.parameters}
    templates = {name: c.graphs[name] for name in ("export", "adapters") if name in c.graphs}
    for model in templates.values():
        for name in held:
            model.graph.initializers.pop(name, None)
    written = {name: write_graph(model, folder, _FILES[name], check=False) for name, model in templates.items()}
    plan = Plan(
        ortc_version=__version__,
        model=model_name,
        fingerprint=fingerprint(c.parameters),
        recipe=c.recipe,
        target=c.target.name,
        opset=c.target.opset,
        parameters=c.parameters,
        losses=c.losses,
        stages=stages,
        sessions=c.sessions,
        export=written.pop("export"),
        adapters=c.adapters,
        adapter_export=written.get("adapters"),
        criterion=write_graph(c.graphs["criterion"], folder, _FILES["criterion"]),
        rewrites=c.rewrites,
        artifacts=others,
        warnings=c.warnings,
        history=c.history,
    )
    checkpoint = folder / plan.checkpoint / "step-0"
    checkpoint.mkdir(parents=True)
    weights = {p.name: c.weights[p.name] for p in c.parameters}
    write_safetensors(checkpoint / "parameters.safetensors", weights)
    write_index(checkpoint, plan)
    write_file(folder / "plan.json", dump_plan(plan).encode())
    return plan


def write_on_device(c: Compilation, folder: Path) -> list[File]:
    """The graphs of ONNX Runtime's own layout and the checkpoint beside them, if the passes made any."""
    graphs = {name: model for name, model in c.graphs.items() if name.endswith(".onnx")}
    if not graphs:
        return []
    root = folder / next(iter(graphs)).partition("/")[0]
    root.mkdir()
    written = [write_graph(model, folder, name) for name, model in graphs.items()]
    inputs = next(iter(graphs.values())).graph.inputs
    sources = {p.name: Source(p.name, p.dtype, p.shape, c.weights[p.name].tofile) for p in c.parameters}  # type: ignore[attr-defined]
    held = [v for v in inputs if role(v) in ("parameter", "buffer")]
    counters = [source(of(v), np.zeros(v.shape.numpy(), v.dtype.numpy())) for v in held if of(v) not in sources]  # type: ignore[union-attr]
    trained = [p.name for p in c.parameters if p.trainable]
    frozen = [s for name, s in sources.items() if name not in trained]
    path = root / "checkpoint"
    write_checkpoint(path, [sources[name] for name in trained], [*frozen, *counters])
    checkpoint = File(file=path.relative_to(folder).as_posix(), sha256=file_hash(path))
    return [*(File(file=g.file, sha256=g.sha256) for g in written), checkpoint]


def _held_by_stage(c: Compilation) -> list[set[str]]:
    """The parameters and buffers of each stage. Those that none reads are the first one's: they are saved and exported too."""
    held = [
        {of(v) for m in models.values() for v in m.graph.inputs if role(v) in ("parameter", "buffer")} for models in c.stages
    ]
    held[0] |= {p.name for p in c.parameters}.difference(*held)
    return held


def write_stage(c: Compilation, folder: Path, index: int, held: set[str]) -> Stage:
    """One stage's graphs."""
    (folder / f"stage-{index}").mkdir()
    files = {p: write_graph(m, folder, f"stage-{index}/{p}.onnx") for p, m in in_order(c.stages[index])}
    memory = c.memory[index] if c.memory else {}
    phases = {p: file.model_copy(update={"memory": memory.get(p)}) for p, file in files.items()}
    return Stage(
        index=index,
        parameters=[p.name for p in c.parameters if p.name in held],
        phases=phases,
        costs=c.costs[index] if c.costs else None,
        recomputed=c.recomputed.get(index),
        stashed=c.stashed.get(index),
    )


def write_graph(model: ir.Model, folder: Path, file: str, check: bool = True) -> GraphFile:
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    if check:
        try:
            onnx.checker.check_model(data, full_check=True)
        except Exception as error:
            raise ModelError(f"the compiled {file} is not valid ONNX, please report it: {error}") from error
    write_file(folder / file, data)
    return GraphFile(
        file=file,
        sha256=hashlib.sha256(data).hexdigest(),
        inputs=[port(v) for v in model.graph.inputs],
        outputs=[port(v) for v in model.graph.outputs],
    )


def port(value: ir.Value) -> Port:
    """What the plan says of a graph's input or output."""
    return Port(
        name=value.name or "",
        role=role(value) or "data",  # type: ignore[arg-type]
        dtype=type_name(value.dtype or ir.DataType.UNDEFINED),
        shape=None if (known := dims(value)) is None else list(known),
        of=value.metadata_props.get(OF),
        slot=value.metadata_props.get(SLOT),
        initial=value.metadata_props.get(INITIAL),  # type: ignore[arg-type]
        stages=stages_of(value),
    )


def write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
