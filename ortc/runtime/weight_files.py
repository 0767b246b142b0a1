"""Files of named tensors in other tools' formats, read lazily and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ortc.errors import CheckpointError
from ortc.runtime import ort_checkpoint, pytorch_file
from ortc.runtime.checkpoint import sync_folder

# The formats, and the endings by which a file to write is known. A file that is read is known by its first bytes.
FORMATS = {
    "safetensors": (".safetensors",),
    "pytorch": (".pt", ".pth", ".bin"),
    "hdf5": (".h5", ".hdf5"),
    "ort": (".ckpt", ""),  # ONNX Runtime calls the file `checkpoint`
}

_SAFETENSORS_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``read`` gives it in this type and shape."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclass
class WeightFile:
    """What a file holds.

    Attributes:
        format: one of :data:`FORMATS`.
        tensors: by name.
        step: updates done, where the file has an optimizer's state.
        states: of the optimizer, by parameter, in order.
    """

    format: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    step: int = 0
    states: dict[str, list[np.ndarray]] = field(default_factory=dict)


def format_of(path: Path) -> str:
    """The format in which a file of this name is written.

    Raises:
        CheckpointError: its ending says none.
    """
    for name, endings in FORMATS.items():
        if path.suffix.lower() in endings:
            return name
    known = ", ".join(f"{e} ({name})" for name, endings in FORMATS.items() for e in endings if e)
    raise CheckpointError(f"{path}: the ending says no format; there are {known}, or give --format")


# ---- reading ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[WeightFile]:
    """Read a file's names, types and shapes; its tensors while it is open.

    Raises:
        CheckpointError: it cannot be read, is damaged, or of none of the formats.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if head.startswith(b"PK\x03\x04"):
        yield _open_pytorch(path)
    elif head.startswith(b"\x89HDF\r\n\x1a\n"):
        with _open_hdf5(path) as found:
            yield found
    elif head[4:8] == ort_checkpoint.IDENTIFIER:
        yield _open_ort(path)
    elif head[8:9] == b"{":
        with _open_safetensors(path) as found:
            yield found
    elif head.startswith(b"\x80"):
        raise CheckpointError(
            f"{path} is a bare pickle, which is not read (it may run code): save the state_dict with PyTorch 1.6 or later, "
            "or as .safetensors"
        )
    else:
        raise CheckpointError(
            f"{path} is cut off, or none of what is read: a .safetensors file, a state_dict of PyTorch, HDF5, or a checkpoint "
            "of ONNX Runtime's on-device training"
        )


def _open_pytorch(path: Path) -> WeightFile:
    tensors, read = pytorch_file.read_file(path)
    return WeightFile("pytorch", {n: Stored(t.dtype, t.shape, partial(read, t)) for n, t in tensors.items()})


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[WeightFile]:
    from safetensors import SafetensorError, safe_open

    found = WeightFile("safetensors")
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                part = file.get_slice(name)
                dtype = _SAFETENSORS_TYPES.get(part.get_dtype(), part.get_dtype())
                found.tensors[name] = Stored(dtype, tuple(part.get_shape()), partial(file.get_tensor, name))
            yield found
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _open_ort(path: Path) -> WeightFile:
    saved = ort_checkpoint.read_checkpoint(path)
    arrays = {**saved.trained, **saved.frozen}
    found = WeightFile("ort", {n: Stored(a.dtype.name, a.shape, partial(np.asarray, a)) for n, a in arrays.items()}, saved.step)
    for (name, _), array in sorted(saved.states.items()):
        found.states.setdefault(name, []).append(array)
    return found


@contextlib.contextmanager
def _open_hdf5(path: Path) -> Iterator[WeightFile]:
    h5py = _h5py()
    found = WeightFile("hdf5")

    def visit(name: str, item: Any) -> None:  # it follows no link to another file
        if isinstance(item, h5py.Dataset):
            if item.external or item.is_virtual:
                raise CheckpointError(f"{path}: {name!r} has its values in another file, which is refused")
            if item.dtype.kind in "fiub":
                own = item.attrs.get("name")
                key = own if isinstance(own, str) else name
                found.tensors[key] = Stored(item.dtype.name, item.shape, partial(_read_hdf5, item))

    try:
        with h5py.File(path, "r") as file:
            file.visititems(visit)
            yield found
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _read_hdf5(item: Any) -> np.ndarray:
    return np.asarray(item[()])


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise CheckpointError("HDF5 files need h5py: pip install 'ortc[hdf5]'") from None
    return h5py


# ---- writing ----------------------------------------------------------------------------------------------------------------


def write_weights(
    path: Path,
    kind: str,
    arrays: Mapping[str, np.ndarray],
    *,
    trained: Sequence[str] = (),
    step: int = 0,
    states: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> None:
    """Write a file; it appears whole or not at all, and takes the place of one that is there.

    Args:
        path: the file.
        kind: one of :data:`FORMATS`.
        arrays: by name.
        trained: for ``ort``, the names of those that train.
        step: for ``ort``, updates done.
        states: for ``ort``, the optimizer's states of each that trains, at most two, in order.

    Raises:
        CheckpointError: it cannot be written, or the format lacks an element type.
    """
    write = {"safetensors": _write_safetensors, "pytorch": pytorch_file.write_file, "hdf5": _write_hdf5}.get(kind)
    if write is None:
        write = partial(_write_ort, trained=trained, step=step, states=states)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
            made = Path(aside) / path.name
            write(made, arrays)
            with open(made, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(made, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from None


def _write_hdf5(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A dataset for each, under its name, in which slashes make groups; the whole name is in its attribute ``name``."""
    h5py = _h5py()
    lacking = [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]
    if lacking:
        raise CheckpointError(f"{lacking[0]!r} is {arrays[lacking[0]].dtype.name}, which HDF5 does not have")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            try:
                file.create_dataset(name, data=array).attrs["name"] = name
            except (ValueError, TypeError) as error:  # a name that is another's group
                raise CheckpointError(f"HDF5 cannot hold the name {name!r} beside the others ({error}): --rename it") from None


def _write_ort(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    trained: Sequence[str],
    step: int,
    states: Mapping[str, Sequence[np.ndarray]] | None,
) -> None:
    sources = {name: ort_checkpoint.source(name, array) for name, array in arrays.items()}
    kept = None
    if states is not None:
        named = {n: zip(ort_checkpoint.MOMENTUMS, held, strict=False) for n, held in states.items()}
        kept = {name: [ort_checkpoint.source(*pair) for pair in pairs] for name, pairs in named.items()}
    frozen = [s for name, s in sources.items() if name not in trained]
    ort_checkpoint.write_checkpoint(path, [sources[name] for name in trained], frozen, step, kept)
