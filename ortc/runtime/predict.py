"""The loop behind ``ortc predict``: the model's outputs for data that may have no targets, in a file."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from ortc.errors import DataError, OrtcError
from ortc.runtime.batch import Batch
from ortc.runtime.checkpoint import sync_folder
from ortc.runtime.data import Arrays, open_data, prefetched
from ortc.runtime.engine import make_engine
from ortc.runtime.files import replaced
from ortc.runtime.stage import import_onnxruntime
from ortc.runtime.trainer import Trainer


@dataclass(frozen=True)
class Predicted:
    """What was written, and with which weights."""

    path: Path
    weights: Path
    samples: int
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]  # type and shape

    def __str__(self) -> str:
        shapes = (f"{name} {dtype}[{','.join(map(str, shape))}]" for name, (dtype, shape) in self.outputs.items())
        return f"{self.path}: {self.samples} samples, {', '.join(shapes)}; weights of {self.weights}"


def predict(
    folder: str | Path,
    output: str | Path,
    *,
    data: str | Path,
    batch_size: int = 32,
    restore: str | Path = "latest",
    raw: bool = False,
    outputs: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    threads: int | None = None,
    providers: Sequence[str] = (),
    session_options: Sequence[str] = (),
    force: bool = False,
) -> Predicted | None:
    """Write the model's outputs for all samples, in their order. Nothing is in memory but a batch.

    Args:
        folder: the output folder of ``ortc compile``.
        output: the ``.npz`` file, with an array for each output; it appears whole or not at all.
        data: see :func:`ortc.runtime.data.open_data`; inputs that no output needs, such as targets, may be missing.
        batch_size: samples of a batch, where the model leaves that open; a function's batches come as they are.
        restore: ``latest``, ``best``, ``none`` (the initial weights), or a checkpoint's path.
        raw: the weights themselves, not their moving average, where there is one.
        outputs: which of the model's outputs, by name; None: see :meth:`ortc.Trainer.predict`.
        rename: names in the data -> names of the model's inputs.
        threads: of each session; None for all cores.
        providers, session_options: see :func:`ortc.runtime.engine.make_engine`.
        force: replace an existing file.

    Returns:
        What was written; None under MPI but on rank 0.

    Raises:
        OrtcError: for anything wrong with folder, data, checkpoint or names; then there is no file.
    """
    path = Path(output)
    if path.suffix != ".npz":
        raise OrtcError(f"the outputs go into an .npz file, which {path} is not by its name")
    if path.is_dir() or not path.parent.is_dir():
        raise OrtcError(f"cannot write {path}: it is a folder, or in none that exists")
    if path.exists() and not force:
        raise OrtcError(f"{path} exists already; choose another name, or --force to replace it")
    engine = make_engine(import_onnxruntime(), providers, session_options)
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(Trainer(folder, restore=restore, threads=threads, engine=engine))
        inputs = trainer.prediction_inputs(outputs)
        source = open_data(data, inputs, rename)
        fixed = inputs.fixed_batch_size()
        batches = prefetched(source.batches(0, seed=None, batch_size=fixed or batch_size, drop_last=False))
        rows = stack.enter_context(Rows(path))
        samples = 0
        if not raw:
            stack.enter_context(trainer.averaged())
        stack.enter_context(contextlib.closing(batches))
        for batch in batches:
            inputs.check_names(batch)
            count = inputs.samples(batch)
            if fixed is not None and isinstance(source, Arrays):
                batch = _filled(batch, fixed)
            whole = inputs.samples(batch)
            for name, array in trainer.predict(batch).items():
                rows.add(name, _rows_of(name, array, count, whole))
            samples += count
        if not samples:
            raise DataError(f"{data} yields no batch")
        if not trainer.is_main:
            return None
        rows.write()
        return Predicted(path, trainer.restored, samples, rows.shapes())


def _filled(batch: Batch, size: int) -> Batch:
    """With the last sample repeated: a model of fixed batch size takes no smaller batch."""
    return {name: np.concatenate([a, np.repeat(a[-1:], size - len(a), axis=0)]) for name, a in batch.items()}


def _rows_of(name: str, array: np.ndarray, samples: int, batch: int) -> np.ndarray:
    """The rows of the samples, in a batch that may have been filled up."""
    if array.ndim == 0 or array.shape[0] % batch:
        raise OrtcError(
            f"the output {name!r} has shape {list(array.shape)} for a batch of {batch} samples, so it has no row for each: "
            "name the outputs that have (--only NAME)"
        )
    return array[: array.shape[0] // batch * samples]


class Rows:
    """An ``.npz`` of arrays that grow; it appears whole or not at all. Use it with ``with``.

    The rows wait in files without a name, which end with the process whatever ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, BinaryIO] = {}
        self._like: dict[str, np.ndarray] = {}  # no rows: type and shape
        self._counts: dict[str, int] = {}

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, name: str, rows: np.ndarray) -> None:
        """Append to the array of this name.

        Raises:
            OrtcError: the rows have another type or shape than those before, or cannot be written.
        """
        if rows.dtype.name == "bfloat16":  # no file of NumPy's has it, and float32 loses nothing
            rows = rows.astype(np.float32)
        if name not in self._files:
            with self._told():
                self._files[name] = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115
            self._like[name], self._counts[name] = rows[:0].copy(), 0
        before = self._like[name]
        if (rows.dtype, rows.shape[1:]) != (before.dtype, before.shape[1:]):
            raise OrtcError(
                f"the output {name!r} has rows of shape {list(rows.shape[1:])} after others of {list(before.shape[1:])}, which "
                "are no one array: give batches of equal sizes"
            )
        with self._told():
            self._files[name].write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._counts[name] += len(rows)

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each array."""
        return {n: (str(like.dtype), (self._counts[n], *like.shape[1:])) for n, like in self._like.items()}

    def write(self) -> None:
        """Make the file of what was added; when this returns, it survives a crash.

        Raises:
            OrtcError: if it cannot be written; then what was there before still is.
        """
        with self._told():
            with replaced(self.path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, (_, shape) in self.shapes().items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        descr = npy.dtype_to_descr(self._like[name].dtype)
                        npy.write_array_header_1_0(member, {"descr": descr, "fortran_order": False, "shape": shape})
                        self._files[name].seek(0)
                        shutil.copyfileobj(self._files[name], member, 1 << 20)
            sync_folder(self.path.parent)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OrtcError(f"cannot write {self.path}: {error.strerror}; nothing was left behind") from None
