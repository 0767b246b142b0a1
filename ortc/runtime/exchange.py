"""Weights from other tools into an output folder, and out of it: names are matched, types and shapes checked."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ortc.errors import CheckpointError
from ortc.plan import STEP_COUNTER, ParameterInfo, Plan, load_plan
from ortc.runtime import checkpoint
from ortc.runtime.batch import numpy_type
from ortc.runtime.checkpoint import Progress
from ortc.runtime.lock import lock_folder
from ortc.runtime.stage import StateKey
from ortc.runtime.weight_files import FORMATS, Stored, WeightFile, format_of, open_weights, write_weights

_SHOWN = 5  # of the names in a message


@dataclass
class Imported:
    """What an import did.

    Attributes:
        checkpoint: the folder of the new checkpoint.
        format: of the file.
        step: where training goes on; 0, unless the file has the optimizer's state.
        taken: names in the file by the model's.
        missing: parameters that the file lacks; they stayed as they were.
        unused: names in the file that the model has not.
    """

    checkpoint: Path
    format: str
    step: int
    taken: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.checkpoint}: {len(self.taken)} weights taken ({self.format})"]
        if self.step:
            lines[0] += f", with the optimizer's state of step {self.step}"
        if self.missing:
            lines.append(f"not in the file, left as they were: {_listed(self.missing)}")
        if self.unused:
            lines.append(f"not in the model, left out: {_listed(self.unused)}")
        return "\n".join(lines)


def import_weights(
    folder: str | Path,
    file: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    transpose: Sequence[str] = (),
    cast: bool = False,
    partial: bool = False,
    force: bool = False,
) -> Imported:
    """Make the weights of a file those that the next run starts from, at step 0 (or where a checkpoint of ONNX Runtime was).

    Args:
        folder: an output folder of ``ortc compile``.
        file: .safetensors, a state_dict of PyTorch (its pickle is never run), HDF5, or a checkpoint of ONNX Runtime.
        rename: globs over the file's names, and what takes their place: ``{"module.*": "*"}``. The first that matches wins.
        transpose: globs over the model's names: of these the file has the transposed matrix.
        cast: convert floats of another precision.
        partial: leave the parameters that the file lacks as they are in the latest checkpoint.
        force: also if the folder holds checkpoints of a run; they stay, but are not the latest any more.

    Raises:
        OrtcError: the folder or the file cannot be used, or they do not fit; the folder is as it was.
    """
    folder, file = Path(folder), Path(file)
    plan = load_plan(folder)
    root = folder / plan.checkpoint
    with lock_folder(folder), open_weights(file) as found:
        checkpoint.clean_up(root)
        trained = [p.name for p in root.glob("step-*") if p.name != "step-0"]
        if trained and not force:
            raise CheckpointError(
                f"{folder} holds checkpoints of a run ({_listed(sorted(trained))}): with --force the imported weights are the "
                "latest ones instead; or compile into another folder"
            )
        values, result = _matched(plan, file, found, rename or {}, transpose, cast, partial)
        if result.missing:
            _, _, present, _ = checkpoint.load(root, plan, "latest")
            values |= {name: present[name] for name in result.missing}
        states = _states(plan, found, result)
        result.step = found.step if states else 0
        ordered = {p.name: values[p.name] for p in plan.parameters}
        result.checkpoint = checkpoint.save_arrays(root, plan, Progress(result.step), ordered, states)
    return result


def export_weights(
    folder: str | Path,
    file: str | Path,
    *,
    which: str | Path = "latest",
    kind: str | None = None,
    rename: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write a checkpoint's weights into a file of another tool's format, under the model's names.

    Args:
        folder: an output folder of ``ortc compile``.
        file: what to write.
        which: ``latest``, ``none`` (the initial one), or the path of a checkpoint.
        kind: ``safetensors``, ``pytorch``, ``hdf5`` or ``ort``; None: by the file's ending.
        rename: globs over the model's names, and what takes their place in the file.
        force: replace an existing file.

    Returns:
        The checkpoint's folder.

    Raises:
        OrtcError: the folder cannot be read, or the file not written.
    """
    folder, file = Path(folder), Path(file)
    kind = kind or format_of(file)
    if kind not in FORMATS:
        raise CheckpointError(f"there is no format {kind!r}; there are {', '.join(FORMATS)}")
    if file.exists() and not force:
        raise CheckpointError(f"{file} exists already; choose another name, or --force to replace it")
    plan = load_plan(folder)
    source, progress, values, states = checkpoint.load(folder / plan.checkpoint, plan, which)
    named: dict[str, str] = {}
    for name in values:
        new = renamed(name, rename or {})
        if new in named.values():
            raise CheckpointError(f"--rename gives two parameters the name {new!r}")
        named[name] = new
    counted = {STEP_COUNTER: np.array(progress.step, np.float32)} if kind == "ort" and _counts(plan) else {}
    trained = [p.name for p in plan.trainable()]
    moments = _moments(trained, values, states)
    write_weights(
        file,
        kind,
        {**{named[name]: array for name, array in values.items()}, **counted},
        trained=[named[name] for name in trained],
        step=progress.step,
        states=None if moments is None else {named[name]: held for name, held in moments.items()},
    )
    return source


def _moments(
    trained: Sequence[str], values: Mapping[str, np.ndarray], states: Mapping[StateKey, np.ndarray]
) -> dict[str, list[np.ndarray]] | None:
    """The states of each parameter, if ONNX Runtime's checkpoint can hold them: one or two, of the parameter's shape."""
    found = {name: [array for (of, _), array in states.items() if of == name] for name in trained}
    fits = all(1 <= len(held) <= 2 and all(a.shape == values[name].shape for a in held) for name, held in found.items())
    return found if fits and found else None


def _counts(plan: Plan) -> bool:
    """Whether the training graph has counters of random numbers, which the on-device layout keeps in a parameter."""
    graphs = [graph for stage in plan.stages for name, graph in stage.phases.items() if name in ("train", "forward")]
    return any(p.role == "scalar" and p.of == "step" for graph in graphs for p in graph.inputs)


# ---- names ------------------------------------------------------------------------------------------------------------------


def renamed(name: str, rules: Mapping[str, str]) -> str:
    """The name that rules give: each ``*`` on the right is what the ``*`` in its place on the left stands for."""
    for old, new in rules.items():
        match = re.fullmatch("(.*)".join(re.escape(part) for part in old.split("*")), name, re.DOTALL)
        if match is not None:
            parts = new.split("*")
            if len(parts) - 1 > len(match.groups()):
                raise CheckpointError(f"--rename {old}={new}: the new name has more * than the old one")
            filled = "".join(part + value for part, value in zip(parts, match.groups(), strict=False))
            return filled + (parts[-1] if len(parts) > len(match.groups()) else "")
    return name


def _matched(
    plan: Plan,
    file: Path,
    found: WeightFile,
    rename: Mapping[str, str],
    transpose: Sequence[str],
    cast: bool,
    partial: bool,
) -> tuple[dict[str, np.ndarray], Imported]:
    """The arrays of the file by the model's names, and what was matched.

    Raises:
        CheckpointError: names, types or shapes do not fit.
    """
    by_name: dict[str, str] = {}
    for name in found.tensors:
        new = renamed(name, rename)
        if new in by_name:
            raise CheckpointError(f"{file}: {by_name[new]!r} and {name!r} would both be {new!r}: change --rename")
        by_name[new] = name
    unmatched = [glob for glob in rename if not any(renamed(n, {glob: ""}) != n for n in found.tensors)]
    if unmatched:
        raise CheckpointError(f"--rename {unmatched[0]}=…: {file} has no such name{_close(unmatched[0], found.tensors)}")
    unknown = [glob for glob in transpose if not any(fnmatch.fnmatchcase(p.name, glob) for p in plan.parameters)]
    if unknown:
        raise CheckpointError(
            f"--transpose {unknown[0]}: the model has no such parameter{_close(unknown[0], [p.name for p in plan.parameters])}"
        )
    result = Imported(Path(), found.format, 0)
    problems: list[str] = []
    wanted: dict[str, tuple[Stored, bool]] = {}
    for p in plan.parameters:
        there = [n for n in (p.name, *p.copies) if n in by_name]
        if not there:
            result.missing.append(p.name)
            continue
        name = by_name[there[0]]
        stored = found.tensors[name]
        turned = (there[0] != p.name) != any(fnmatch.fnmatchcase(p.name, glob) for glob in transpose)
        problem = _misfit(p, stored, turned, cast)
        if problem:
            problems.append(f"  {p.name!r} {problem}")
        result.taken[p.name] = name
        wanted[p.name] = stored, turned
    copies = {copy for p in plan.parameters for copy in p.copies}
    used = {*result.taken.values(), *(by_name[n] for n in copies if n in by_name)}
    result.unused = [name for name in found.tensors if name not in used and name != STEP_COUNTER]
    if problems:
        raise CheckpointError("\n".join([f"{file} does not fit {plan.model}:", *_some(problems)]))
    if not result.taken or (result.missing and not partial):
        raise CheckpointError(_lacks(plan, file, result, by_name))
    types = {p.name: numpy_type(p.dtype, p.name) for p in plan.parameters}
    values = {}
    for name, (stored, turned) in wanted.items():
        array = stored.read()
        values[name] = np.ascontiguousarray((array.T if turned else array).astype(types[name], copy=False))
    return values, result


def _misfit(p: ParameterInfo, stored: Stored, turned: bool, cast: bool) -> str:
    """Why a tensor of the file cannot be this parameter; nothing if it can."""
    shape = stored.shape[::-1] if turned else stored.shape
    if turned and len(stored.shape) != 2:
        return f"cannot be transposed: it is {list(stored.shape)} in the file"
    if list(shape) != p.shape:
        hint = f" (--transpose {p.name!r} takes it transposed)" if list(shape)[::-1] == p.shape and len(shape) == 2 else ""
        return f"is {list(shape)} in the file{' transposed' if turned else ''} and {p.shape} in the model{hint}"
    if stored.dtype != p.dtype:
        floats = all("float" in t for t in (stored.dtype, p.dtype))
        if not (floats and cast):
            return f"is {stored.dtype} in the file and {p.dtype} in the model{' (--cast converts it)' if floats else ''}"
    return ""


def _lacks(plan: Plan, file: Path, result: Imported, by_name: Mapping[str, str]) -> str:
    """What to say of parameters that the file lacks: names that are close, a rename that would do."""
    free = [new for new, name in by_name.items() if name in result.unused]
    lines = [f"{file} lacks {len(result.missing)} of the {len(plan.parameters)} parameters and buffers of {plan.model}:"]
    lines += _some([f"  {name!r}{_close(name, free)}" for name in result.missing])
    rule = _prefix_rule(result.missing, free)
    lines.append(
        f"try --rename {rule}" if rule else "--rename OLD=NEW maps names; --partial leaves those that lack as they are"
    )
    return "\n".join(lines)


def _prefix_rule(missing: Sequence[str], free: Sequence[str]) -> str:
    """A rename by prefix that finds every missing name, such as ``'module.*=*'``."""
    names = set(free)
    first = missing[0] if missing else ""
    for name in free:
        if name.endswith(first) and name != first:
            prefix = name[: -len(first)]
            if all(f"{prefix}{m}" in names for m in missing):
                return f"'{prefix}*=*'"
        if first.endswith(name) and name != first:
            prefix = first[: -len(name)]
            if all(m.startswith(prefix) and m[len(prefix) :] in names for m in missing):
                return f"'*={prefix}*'"
    return ""


def _close(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names)[:2000], n=1, cutoff=0.5)
    return f" (is it {found[0]!r}?)" if found else ""


def _some(lines: Sequence[str]) -> list[str]:
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _states(plan: Plan, found: WeightFile, result: Imported) -> dict[StateKey, np.ndarray]:
    """The optimizer's states that the file has, if they are of this optimizer, and every parameter's."""
    slots: dict[str, list[str]] = {}
    for port in (port for stage in plan.stages for graph in stage.phases.values() for port in graph.inputs):
        if port.role == "state" and port.of is not None and port.slot is not None:
            slots.setdefault(port.of, []).append(port.slot)
    infos = {p.name: p for p in plan.parameters}
    states: dict[StateKey, np.ndarray] = {}
    for name, wanted in slots.items():
        held = found.states.get(result.taken.get(name, ""), [])
        if len(held) < len(wanted) or any(list(a.shape) != infos[name].shape or a.dtype != np.float32 for a in held):
            return {}
        states |= {(name, slot): array for slot, array in zip(wanted, held, strict=False)}
    return states
