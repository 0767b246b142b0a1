"""Checkpoints: folders ``step-N`` that appear whole or not at all.

A checkpoint holds

* ``parameters.safetensors``: the parameters and buffers under the model's own names (of several ranks one file each,
  ``parameters-<rank>.safetensors``, and so the optimizer's: the index says where each tensor is);
* ``optimizer.safetensors``: the optimizer's states, each as ``<parameter>/<slot>`` (a slot has no slash, so the last
  one divides). It is missing where there are none, as in the initial checkpoint: states start at zero;
* ``index.json``: what the files mean::

    {"version": 1,
     "fingerprint": …,                      # of the plan: which model this belongs to
     "step": 120,                           # updates done; dropout and the learning rate go on from here
     "serial": 4,                           # counts the saves in this folder: the highest is the latest
     "seed": 0,                             # of dropout and of the data order; null in the initial checkpoint
     "position": {"epoch": 1, "batch": 7},  # epochs done, and batches done of the next one
     "settings": {…},                       # what a run must repeat to continue bit for bit
     "scaling": {"scale": 65536.0, "good": 7, "skipped": 1},  # of the loss; null where it is not scaled
     "parameters": {"w": {"dtype": "float32", "shape": [8, 4], "file": "parameters.safetensors", "offset": [0, 0]}},
     "optimizer": {"w": {"exp_avg": {…}}},
     "files": {"parameters.safetensors": "<sha256>"},
     "checksum": "<sha256 of the rest>"}

  ``shape`` is that of the whole tensor, ``offset`` where the file's part of it starts.

A single ``.safetensors`` file can be restored as well, such as a loop in another language writes (``examples/``): the
parameters and buffers under their names, the optimizer's states, if any, as ``<parameter>/<slot>``, and in its metadata,
if it is known, the ``step``.

A save writes into a hidden folder beside the others, syncs every file, renames the folder and syncs the parent: a
checkpoint that was reported as saved survives a kill at any instant.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortc.errors import CheckpointError
from ortc.plan import ParameterInfo, Plan, index_problem
from ortc.runtime.batch import numpy_type
from ortc.runtime.messages import tell
from ortc.runtime.stage import StateKey
from ortc.runtime.transport import Transport

if TYPE_CHECKING:
    from ortc.runtime.worker import Worker

CHECKPOINT_VERSION = 1
PARAMETERS, OPTIMIZER, INDEX = "parameters.safetensors", "optimizer.safetensors", "index.json"


class Damaged(CheckpointError):
    """A checkpoint that cannot be trusted; the one before it can take its place."""


@dataclass(frozen=True)
class Progress:
    """Where a run is: everything in a checkpoint but the tensors.

    ``position`` is (epochs done, batches done of the next one).
    """

    step: int = 0
    seed: int | None = None
    position: tuple[int, int] = (0, 0)
    settings: dict[str, Any] = field(default_factory=dict)
    scaling: dict[str, Any] | None = None


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_index(folder: Path, plan: Plan, file_of: Mapping[str, str] | None = None) -> None:
    """Complete the initial checkpoint, whose ``parameters.safetensors`` lies in the folder.

    Args:
        folder: the checkpoint's.
        plan: of what is in it.
        file_of: the file of each parameter, where that is another.

    Raises:
        OSError: if a file cannot be read or written.
    """
    placed = {p.name: PARAMETERS if file_of is None else file_of[p.name] for p in plan.parameters}
    entries = {p.name: _entry(p.dtype, p.shape, placed[p.name]) for p in plan.parameters}
    files = {name: file_hash(folder / name) for name in sorted({*placed.values()} or {PARAMETERS})}
    _write_index(folder, plan.fingerprint, 0, Progress(), entries, {}, files)


def save(root: Path, plan: Plan, progress: Progress, worker: Worker, *, keep: int) -> Path:
    """Write a checkpoint, then delete all but the last ``keep``, the best and the initial one. All ranks call it together.

    Each rank writes what it owns, from where it is; rank 0 the index, last. A checkpoint of the same step is replaced.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if one cannot write its part; the others are as they were.
    """
    world = worker.world
    target = root / f"step-{progress.step}"
    aside = root / f".{target.name}.new"
    if world.rank == 0:
        _tell_all(world, target, lambda: _begin(root, aside))
    else:
        _tell_all(world, target, None)
    try:
        own: dict[str, Any] = {}
        problem = _attempt(lambda: own.update(_write_shard(aside, worker)))
        shards = world.gather_object({"problem": problem, **own})
        if shards is None:
            _tell_all(world, target, None)
        else:
            _tell_all(world, target, lambda: _finish(root, aside, target, plan, progress, shards))
    finally:
        if world.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
    if world.rank == 0:
        _forget_old(root, keep, best_step(progress.settings))
    return target


def check_shared(root: Path, world: Transport) -> None:
    """Check that all ranks see one folder of checkpoints, before they train for one. All ranks call it together.

    Raises:
        CheckpointError: on every rank, if one sees another, or it cannot be written.
    """
    if world.size == 1:
        return
    name = world.broadcast_object(f".step-{secrets.token_hex(8)}.new" if world.rank == 0 else None)
    _tell_all(world, root, (lambda: _begin(root, root / name)) if world.rank == 0 else None)
    told = world.gather_object((root / name).is_dir())
    blind = None if told is None else [rank for rank, sees in enumerate(told) if not sees]
    if world.rank == 0:
        shutil.rmtree(root / name, ignore_errors=True)
    blind = world.broadcast_object(blind)
    if blind:
        raise CheckpointError(
            f"rank {blind[0]} has another folder {root} than rank 0: checkpoints are written by all ranks, so that folder "
            "must be on a disk that they share (it may be a link to one)"
        )


def save_arrays(
    root: Path, plan: Plan, progress: Progress, values: Mapping[str, np.ndarray], states: Mapping[StateKey, np.ndarray]
) -> Path:
    """Write a checkpoint of arrays, in one process; it is the latest then. One of the same step is replaced.

    Raises:
        CheckpointError: it cannot be written; the others are as they were.
    """
    target = root / f"step-{progress.step}"
    aside = root / f".{target.name}.new"

    def write() -> None:
        _begin(root, aside)
        shard = _write_files(aside, values, states, suffix="")
        _finish(root, aside, target, plan, progress, [{"problem": "", **shard}])

    try:
        problem = _attempt(write)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if problem:
        raise CheckpointError(f"cannot save {target}: {problem}; the earlier checkpoints are intact")
    return target


def _begin(root: Path, aside: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()


def _attempt(action: Callable[[], None]) -> str:
    """What went wrong, in words for a person; nothing if all went well."""
    try:
        action()
    except OSError as error:
        room = ": free some space, or keep fewer checkpoints (--keep)" if error.errno == errno.ENOSPC else ""
        return f"{error.strerror or error}{room}"
    except CheckpointError as error:
        return str(error)
    return ""


def _tell_all(world: Transport, target: Path, action: Callable[[], None] | None) -> None:
    """Rank 0 acts, and all ranks hear whether it could.

    Raises:
        CheckpointError: if it could not.
    """
    problem = world.broadcast_object(_attempt(action) if action is not None else None)
    if problem:
        raise CheckpointError(f"cannot save {target}: {problem}; the earlier checkpoints are intact")


def _write_shard(folder: Path, worker: Worker) -> dict[str, Any]:
    """One rank's files; returns what the index says of them."""
    suffix = "" if worker.world.size == 1 else f"-{worker.world.rank}"
    return _write_files(folder, worker.owned_values(), worker.owned_states(), suffix)


def _write_files(
    folder: Path, values: Mapping[str, np.ndarray], states: Mapping[StateKey, np.ndarray], suffix: str
) -> dict[str, Any]:
    names = {kind: kind.replace(".safetensors", f"{suffix}.safetensors") for kind in (PARAMETERS, OPTIMIZER)}
    if values:
        _write_tensors(folder / names[PARAMETERS], dict(values))
    if states:
        _write_tensors(folder / names[OPTIMIZER], {f"{name}/{slot}": array for (name, slot), array in states.items()})
    optimizer: dict[str, dict[str, Any]] = {}
    for (name, slot), array in states.items():
        optimizer.setdefault(name, {})[slot] = _entry(array.dtype.name, array.shape, names[OPTIMIZER])
    return {
        "parameters": {name: _entry(a.dtype.name, a.shape, names[PARAMETERS]) for name, a in values.items()},
        "optimizer": optimizer,
        "files": {f: file_hash(folder / f) for f in names.values() if (folder / f).exists()},
    }


def _finish(root: Path, aside: Path, target: Path, plan: Plan, progress: Progress, shards: list[dict[str, Any]]) -> None:
    problems = [shard["problem"] for shard in shards if shard["problem"]]
    if problems:
        raise CheckpointError(problems[0])
    parameters = {name: entry for shard in shards for name, entry in shard["parameters"].items()}
    ordered = {p.name: parameters[p.name] for p in plan.parameters}
    optimizer = {name: slots for shard in shards for name, slots in shard["optimizer"].items()}
    files = {name: digest for shard in shards for name, digest in shard["files"].items()}
    _write_index(aside, plan.fingerprint, _next_serial(root), progress, ordered, optimizer, files)
    _put_in_place(aside, target)


def _entry(dtype: str, shape: tuple[int, ...] | list[int], file: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "file": file, "offset": [0] * len(shape)}


def _write_index(
    folder: Path,
    fingerprint: str,
    serial: int,
    progress: Progress,
    parameters: dict[str, Any],
    optimizer: dict[str, Any],
    files: dict[str, str],
) -> None:
    index: dict[str, Any] = {
        "version": CHECKPOINT_VERSION,
        "fingerprint": fingerprint,
        "step": progress.step,
        "serial": serial,
        "seed": progress.seed,
        "position": {"epoch": progress.position[0], "batch": progress.position[1]},
        "settings": progress.settings,
        "scaling": progress.scaling,
        "parameters": parameters,
        "optimizer": optimizer,
        "files": files,
    }
    index["checksum"] = _checksum(index)
    with open(folder / INDEX, "w", encoding="utf-8") as file:
        json.dump(index, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it hides the operating system's error in its text
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise CheckpointError(f"cannot write {path}: {error}") from None
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last; Windows does so by itself."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(aside: Path, target: Path) -> None:
    replaced = _replaced(target)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(target, replaced)
    os.rename(aside, target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _forget_old(root: Path, keep: int, best: int | None) -> None:
    for folder in _latest_first(root)[keep:]:
        if folder.name not in ("step-0", f"step-{best}"):
            shutil.rmtree(folder, ignore_errors=True)


def best_step(settings: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint, as a run noted it in its settings."""
    return settings["best"]["step"] if settings.get("best") else None


def clean_up(root: Path) -> None:
    """Remove what a killed save left behind. Only the run that holds the folder's lock may do so."""
    for leftover in root.glob(".step-*.old"):
        target = root / leftover.name[1:].removesuffix(".old")
        if target.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:  # killed between the two renames
            os.rename(leftover, target)
    for leftover in root.glob(".step-*.new"):
        shutil.rmtree(leftover, ignore_errors=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


def restore(root: Path, plan: Plan, which: str | Path, worker: Worker) -> tuple[Path, Progress]:
    """Read a checkpoint into the arrays of a rank's stages. All ranks call it together.

    Args:
        root: the folder of the checkpoints.
        plan: whose checkpoint it must be; how it was divided into stages and replicas does not matter.
        which: ``latest``, ``best``, ``none`` (the initial one), or the path of one. A damaged latest one is told on stderr and
            passed over.
        worker: its parameters, buffers and states are filled; states that the checkpoint lacks with zeros, or as the plan says.

    Returns:
        The folder that was read, and where the run was.

    Raises:
        CheckpointError: it is damaged (the latest: all are), is missing, or belongs to another model.
    """
    world = worker.world
    chosen: dict[str, str] = {}
    if world.rank == 0:
        try:
            chosen = {"folder": str(_choose(root, plan, which))}
        except CheckpointError as error:
            chosen = {"problem": str(error)}
    chosen = world.broadcast_object(chosen)
    if "problem" in chosen:
        raise CheckpointError(chosen["problem"])
    folder = Path(chosen["folder"])
    index = _index_of_file(folder, plan) if _is_file(folder) else read_index(folder)
    for stage in worker.stages.values():
        place = folder.parent if _is_file(folder) else folder
        _load(place, index, stage.values, stage.states, stage.from_parameters, quiet=world.rank != 0)
    return folder, _progress(index)


def load(root: Path, plan: Plan, which: str | Path) -> tuple[Path, Progress, dict[str, np.ndarray], dict[StateKey, np.ndarray]]:
    """A checkpoint's folder, where the run was, all values, and all states, in the order in which they were saved.

    Raises:
        CheckpointError: as :func:`restore`.
    """
    if _is_file(which):
        raise CheckpointError(f"{which} is no checkpoint but a file of weights; give the folder of one")
    folder = _choose(root, plan, which)
    index = read_index(folder)
    values = {p.name: _room(p.name, p.shape, p.dtype) for p in plan.parameters}
    states = {
        (name, slot): _room(name, entry["shape"], entry["dtype"])
        for name, slots in index["optimizer"].items()
        for slot, entry in slots.items()
    }
    _load(folder, index, values, states)
    return folder, _progress(index), values, states


def _room(name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    try:
        return np.empty(shape, numpy_type(dtype, name))
    except (ValueError, MemoryError):
        raise CheckpointError(f"{name!r} is said to have the shape {list(shape)}, which does not fit into memory") from None


def _progress(index: dict[str, Any]) -> Progress:
    position = index["position"]
    return Progress(
        index["step"], index["seed"], (position["epoch"], position["batch"]), index["settings"], index.get("scaling")
    )


def _choose(root: Path, plan: Plan, which: str | Path) -> Path:
    """The checkpoint to read, whole and of this model."""
    if _is_file(which):
        _index_of_file(Path(which), plan)
        return Path(which)
    if str(which) == "none":
        candidates = [root / "step-0"]
    elif str(which) == "best":
        candidates = [_best(root)]
    elif str(which) == "latest":
        candidates = _latest_first(root)
        if not candidates:
            raise CheckpointError(f"{root} has no checkpoint, not even the initial one; compile the model again")
    else:
        candidates = [Path(which)]
    problems: list[str] = []
    for folder in candidates:
        try:
            index = read_index(folder)
            _check_model(folder, index, plan)
            _check_files(folder, index)
            return folder
        except Damaged as error:
            problems.append(str(error))
            if len(candidates) > 1:
                tell(f"warning: {error}; the checkpoint before it is taken")
    raise CheckpointError("\n".join(problems))


def _best(root: Path) -> Path:
    for folder in _latest_first(root):
        with contextlib.suppress(Damaged):
            step = best_step(read_index(folder)["settings"])
            if step is None:
                break
            return root / f"step-{step}"
    raise CheckpointError(f"{root} has no best checkpoint: a run keeps one with --eval-data and --best METRIC")


def _is_file(which: str | Path) -> bool:
    return Path(which).suffix == ".safetensors"


def _index_of_file(path: Path, plan: Plan) -> dict[str, Any]:
    """What the index of a checkpoint would say, if its tensors were in this one file.

    Raises:
        CheckpointError: it cannot be read, lacks a parameter, or holds what is not of this model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    step = metadata.get("step", "0")
    if not step.isdecimal():
        raise CheckpointError(f"{path} has {step!r} as its step, in the metadata; it must be a number")
    ours = {p.name for p in plan.parameters}
    index: dict[str, Any] = {"step": int(step), "seed": None, "position": {"epoch": 0, "batch": 0}, "settings": {}}
    index |= {"parameters": {}, "optimizer": {}}
    for name in names:
        parameter, _, slot = name.rpartition("/")
        if name in ours:
            index["parameters"][name] = {"file": path.name}
        elif parameter in ours:
            index["optimizer"].setdefault(parameter, {})[slot] = {"file": path.name}
        else:
            raise CheckpointError(f"{path} belongs to another model than {plan.model}: it has {name!r}, the model has not")
    for parameter in plan.parameters:
        if parameter.name not in index["parameters"]:
            raise CheckpointError(f"{path} lacks the parameter {parameter.name!r} of {plan.model}")
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint.

    Raises:
        Damaged: it is missing or was changed.
        CheckpointError: it is of another version.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        checksum = index.pop("checksum")
    except OSError as error:
        what = f"{folder} is no checkpoint" if not folder.exists() else f"checkpoint {folder} is damaged"
        raise Damaged(f"{what}: cannot read {INDEX}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"checkpoint {folder} is damaged: {INDEX} is cut off or was changed") from None
    if checksum != _checksum(index):
        raise Damaged(f"checkpoint {folder} is damaged: {INDEX} was changed")
    if index.get("version") != CHECKPOINT_VERSION:
        raise CheckpointError(f"{folder} has checkpoint version {index.get('version')!r}, this ortc reads {CHECKPOINT_VERSION}")
    problem = index_problem(index)
    if problem:
        raise Damaged(f"checkpoint {folder} is damaged: {INDEX}: {problem}")
    return index


def _check_model(folder: Path, index: dict[str, Any], plan: Plan) -> None:
    if index["fingerprint"] == plan.fingerprint:
        return
    theirs, ours = index["parameters"], {p.name: p for p in plan.parameters}
    raise CheckpointError(f"checkpoint {folder} belongs to another model than {plan.model}: {_difference(theirs, ours)}")


def _difference(theirs: dict[str, Any], ours: dict[str, ParameterInfo]) -> str:
    for name in [*theirs, *ours]:
        if name not in ours:
            return f"it has a parameter {name!r}, the model has not"
        if name not in theirs:
            return f"it lacks the parameter {name!r}"
        have, want = (theirs[name]["dtype"], theirs[name]["shape"]), (ours[name].dtype, ours[name].shape)
        if have != want:
            return f"{name!r} is {have[0]} {have[1]} there and {want[0]} {want[1]} in the model"
    return "its fingerprint differs"


def _check_files(folder: Path, index: dict[str, Any]) -> None:
    for name, sha256 in index["files"].items():
        try:
            found = file_hash(folder / name)
        except OSError as error:
            raise Damaged(f"checkpoint {folder} is damaged: cannot read {name}: {error.strerror}") from None
        if found != sha256:
            raise Damaged(f"checkpoint {folder} is damaged: {name} is not what was saved (its hash differs)")


def _load(
    folder: Path,
    index: dict[str, Any],
    values: Mapping[str, np.ndarray],
    states: Mapping[StateKey, np.ndarray],
    from_parameters: Collection[StateKey] = (),
    quiet: bool = False,
) -> None:
    _read(folder, [(index["parameters"][name]["file"], name, a, f"{name!r} in {folder}") for name, a in values.items()])
    saved = {(name, slot): entry["file"] for name, slots in index["optimizer"].items() for slot, entry in slots.items()}
    missing = sorted(k for k in states if k not in saved)
    zeroed = [k for k in missing if k not in from_parameters]
    if saved and zeroed and not quiet:
        name, slot = zeroed[0]
        tell(f"warning: {folder} lacks {len(zeroed)} optimizer states, such as {slot!r} of {name!r}; they start at zero")
    for k in missing:
        if k in from_parameters:
            states[k][...] = values[k[0]]
        elif states[k].any():  # zeros that were never written to take no memory
            states[k][...] = 0
    wanted = [(k, array) for k, array in states.items() if k in saved]
    _read(folder, [(saved[k], "/".join(k), a, f"the state {k[1]!r} of {k[0]!r} in {folder}") for k, a in wanted])


def _read(folder: Path, wanted: Sequence[tuple[str, str, np.ndarray, str]]) -> None:
    """Fill arrays: (file, tensor, array, what to call it), each file opened once."""
    for file in dict.fromkeys(row[0] for row in wanted):
        with _tensors(folder / file) as read:
            for _, tensor, array, what in (row for row in wanted if row[0] == file):
                _fill(array, read(tensor), what)


def _fill(array: np.ndarray, tensor: np.ndarray, what: str) -> None:
    if tensor.shape != array.shape or tensor.dtype != array.dtype:
        have, want = f"{tensor.dtype} {list(tensor.shape)}", f"{array.dtype} {list(array.shape)}"
        raise CheckpointError(f"{what} is {have}, it must be {want}")
    array[...] = tensor


@contextlib.contextmanager
def _tensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file.get_tensor
    except (SafetensorError, OSError) as error:
        raise Damaged(f"checkpoint {path.parent} is damaged: {path.name}: {error}") from None


def _latest_first(root: Path) -> list[Path]:
    """The checkpoints in a folder; those whose index cannot be read are placed by their step."""
    steps = {folder: int(folder.name[5:]) for folder in root.glob("step-*") if folder.name[5:].isdecimal()}
    serials: dict[Path, int] = {}
    for folder in steps:
        with contextlib.suppress(CheckpointError):
            serials[folder] = read_index(folder)["serial"]
    return sorted(steps, key=lambda f: (serials.get(f, _serial_by_step(steps[f], steps, serials)), steps[f]), reverse=True)


def _serial_by_step(step: int, steps: dict[Path, int], serials: dict[Path, int]) -> int:
    """A damaged checkpoint counts as saved right after the highest one of a lower step."""
    return max((serial for folder, serial in serials.items() if steps[folder] < step), default=0)


def _next_serial(root: Path) -> int:
    serials = [0]
    for folder in root.glob("step-*"):
        with contextlib.suppress(CheckpointError):
            serials.append(read_index(folder)["serial"])
    return max(serials) + 1


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """The sha256 of a file, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
