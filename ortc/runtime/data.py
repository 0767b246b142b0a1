"""Training data: arrays on disk, mapped into memory, or batches from the user's own function."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import lzma
import math
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.lib import format as npy

from ortc.errors import DataError
from ortc.runtime.batch import Batch, BatchCheck, aligned_zeros
from ortc.runtime.tables import first_line, is_dataset, read_dataset, read_parquet


class Arrays:
    """Samples along the first axis of arrays; shards follow one another.

    Attributes:
        samples: how many there are.
        share: of a batch's samples those that this rank works on, if not all; other rows stay zero, unread.
        whole: the arrays that it reads whole all the same.
    """

    def __init__(self, shards: list[dict[str, np.ndarray]], source: str) -> None:
        self.shards = shards
        self.share: Callable[[int], slice] = lambda samples: slice(None)
        self.whole: frozenset[str] = frozenset()
        first = shards[0]
        for shard in shards:
            for name, array in shard.items():
                want = first.get(name)
                if want is None or (array.dtype, array.shape[1:]) != (want.dtype, want.shape[1:]) or len(shard) != len(first):
                    raise DataError(f"{source}: its files do not hold the same arrays ({name!r} differs in one)")
        self._starts = np.cumsum([0, *(len(next(iter(s.values()))) for s in shards)])
        self.samples = int(self._starts[-1])
        if self.samples == 0:
            raise DataError(f"{source} holds no samples")

    def count(self, batch_size: int, drop_last: bool) -> int | None:
        """Batches of an epoch."""
        return self.samples // batch_size if drop_last else -(-self.samples // batch_size)

    def left_out(self, batch_size: int, drop_last: bool) -> int:
        """Samples of an epoch that are in no batch."""
        return self.samples % batch_size if drop_last else 0

    def batches(self, epoch: int, *, seed: int | None, batch_size: int, drop_last: bool, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from the batch ``start`` on; without a seed in the stored order."""
        order = np.arange(self.samples) if seed is None else epoch_order(self.samples, seed, epoch)
        for i in range(start, self.count(batch_size, drop_last) or 0):
            yield self._take(order[i * batch_size : (i + 1) * batch_size])

    def _take(self, indices: np.ndarray) -> Batch:
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        mine = np.zeros(len(indices), bool)
        mine[self.share(len(indices))] = True
        batch = {n: aligned_zeros((len(indices), *a.shape[1:]), a.dtype) for n, a in self.shards[0].items()}
        for k in np.unique(shard_of):
            every = np.flatnonzero(shard_of == k)
            own = every[mine[every]]
            for name, array in self.shards[k].items():
                rows = every if name in self.whole else own
                batch[name][rows] = array[indices[rows] - self._starts[k]]
        return batch


class Generated:
    """Batches of the user's function, as they come; one call is an epoch.

    Args:
        function: yields dicts of arrays. It is called with ``seed`` and ``epoch`` if it has parameters of these names,
            and must yield the same batches for the same values: a restored run skips those that it has seen.
    """

    samples = None

    def __init__(
        self, function: Callable[..., Iterator[Mapping[str, np.ndarray]]], source: str, rename: Mapping[str, str] | None = None
    ) -> None:
        self.function, self.source, self.rename = function, source, rename or {}

    def count(self, batch_size: int, drop_last: bool) -> int | None:
        """Batches of an epoch: not known."""
        return None

    def batches(self, epoch: int, *, seed: int | None, batch_size: int, drop_last: bool, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from the batch ``start`` on; the sizes are the function's own."""
        known = {"seed": seed or 0, "epoch": epoch}
        takes = inspect.signature(self.function).parameters
        for i, batch in enumerate(self.function(**{k: v for k, v in known.items() if k in takes})):
            if not isinstance(batch, Mapping):
                raise DataError(f"{self.source} must yield dicts of arrays, not {type(batch).__name__}")
            if i >= start:
                yield _renamed({name: np.asarray(array) for name, array in batch.items()}, self.rename, self.source)


Data = Arrays | Generated


def open_data(source: str | Path, inputs: BatchCheck, rename: Mapping[str, str] | None = None) -> Data:
    """Open a ``.npz`` or ``.parquet``, a folder of ``.npz``, ``.npy`` or ``.parquet``, a dataset that Hugging Face's
    ``datasets`` saved on disk, or ``module:function``.

    In a folder each ``.npz`` or ``.parquet`` is a shard with all inputs, or each ``.npy`` is one input, by its file name.
    Nothing is loaded: files are mapped, compressed ones are unpacked into a temporary file first.

    Args:
        source: where it is.
        inputs: the model's inputs.
        rename: names in the data -> names of inputs.

    Raises:
        DataError: there is no such data, it is not plain arrays, or an input is missing.
    """
    path, names = Path(source), rename or {}
    if path.is_dir():
        return Arrays([_select(_renamed(shard, names, file), inputs, file) for file, shard in _open_folder(path)], str(path))
    if path.is_file():
        shards = read_parquet(path) if path.suffix == ".parquet" else [read_npz(path)]
        return Arrays([_select(_renamed(shard, names, path), inputs, path) for shard in shards], str(path))
    if re.fullmatch(r"[\w.]+:\w+", str(source)):
        return Generated(_import_function(str(source)), str(source), names)
    raise DataError(
        f"there is no data {str(source)!r}: give a .npz or .parquet, a folder of .npz, .npy or .parquet, a dataset on disk, "
        "or module:function"
    )


def _renamed(arrays: Mapping[str, np.ndarray], names: Mapping[str, str], source: object) -> dict[str, np.ndarray]:
    renamed = {names.get(name, name): array for name, array in arrays.items()}
    missing = [name for name in names if name not in arrays]
    if missing or len(renamed) < len(arrays):
        what = f"there is no {missing[0]!r}" if missing else "two would have the same name"
        raise DataError(f"{source}: --rename: {what}; it has {', '.join(map(repr, arrays))}")
    return renamed


_T = TypeVar("_T")


def prefetched(items: Iterator[_T], ahead: int = 2) -> Generator[_T, None, None]:
    """The same items, made in a thread that is up to ``ahead`` of them in advance; what it raises comes in its place."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(ahead)
    stop = threading.Event()

    def put(is_item: bool, item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((is_item, item), timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                put(True, item)
                if stop.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    thread = threading.Thread(target=work, name="data", daemon=True)
    thread.start()
    try:
        while True:
            is_item, item = ready.get()
            if is_item:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        stop.set()
        thread.join(timeout=5)  # what the data does there may take longer than anybody waits


def first_batch(source: str | Path, inputs: BatchCheck, rename: Mapping[str, str] | None = None) -> Batch:
    """The first batch of the data, in stored order, to try something on.

    Raises:
        DataError: as :func:`open_data`, or there is none.
    """
    size = inputs.fixed_batch_size() or 32
    for batch in open_data(source, inputs, rename).batches(0, seed=None, batch_size=size, drop_last=False):
        return batch
    raise DataError(f"{source} yields no batch")


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the samples in an epoch, a pure function of its arguments (int64 indices).

    It sorts by the raw output of NumPy's Philox generator, which is the same in every version and on every machine.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(samples)
    return np.argsort(keys, kind="stable")


def _open_folder(folder: Path) -> list[tuple[Path, dict[str, np.ndarray]]]:
    """The shards of a folder, each with the file it comes from."""
    if is_dataset(folder):
        return read_dataset(folder)
    files = {kind: sorted(folder.glob(f"*.{kind}")) for kind in ("npz", "npy", "parquet")}
    there = [kind for kind, found in files.items() if found]
    if len(there) > 1:
        raise DataError(f"{folder} holds both .{there[0]} and .{there[1]} files: a folder is one or the other")
    if not there:
        raise DataError(f"{folder} holds neither .npz, .npy nor .parquet files, and is no dataset that was saved on disk")
    if there == ["npy"]:
        return [(folder, {p.stem: _map_npy(p) for p in files["npy"]})]
    if there == ["npz"]:
        return [(p, read_npz(p)) for p in files["npz"]]
    return [(p, shard) for p in files["parquet"] for shard in read_parquet(p)]


def _select(arrays: dict[str, np.ndarray], inputs: BatchCheck, source: Path) -> dict[str, np.ndarray]:
    """The arrays that the model reads, all of one length."""
    try:
        inputs.check_names(arrays)
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    chosen = {name: array for name, array in arrays.items() if name in inputs.ports}
    first = next(iter(chosen))
    for name, array in chosen.items():
        if array.ndim == 0:
            raise DataError(f"{source}: {name!r} is a single number; its first axis must be the samples")
        if len(array) != len(chosen[first]):
            raise DataError(f"{source}: {name!r} has {len(array)} samples, {first!r} has {len(chosen[first])}")
    return chosen


def _map_npy(path: Path) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            return _map(file, str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz``, mapped; pickled objects are refused, unread.

    Raises:
        DataError: it is none, is damaged, or holds more than plain numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            return {m.filename[:-4]: _map_member(archive, m, file, f"{path}: {m.filename[:-4]!r}") for m in members}
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except zipfile.BadZipFile:
        raise DataError(f"{path} is not an .npz file, or it is cut off") from None
    except (OSError, RuntimeError, NotImplementedError) as error:  # the latter two: encrypted, unknown compression
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except (zlib.error, lzma.LZMAError, EOFError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is damaged: {error or 'it is cut off'}") from None


def _map_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: BinaryIO, what: str) -> np.ndarray:
    if member.compress_type == zipfile.ZIP_STORED:
        file.seek(member.header_offset + 26)  # a local header: 30 bytes, then a name and extras of these lengths
        lengths = file.read(4)
        start = member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        file.seek(start)
        return _map(file, what)
    with tempfile.TemporaryFile(prefix="ortc-") as unpacked:
        with archive.open(member) as packed:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
        unpacked.seek(0)
        return _map(unpacked, what)


def _map(file: BinaryIO, what: str) -> np.ndarray:
    """Map the array of an ``.npy`` that starts where the file stands."""
    try:
        version = npy.read_magic(file)
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, dtype = read_header(file)
    except Exception as error:  # the header is Python's text: whatever reading it raises, it is no array's
        raise DataError(f"{what} is not a plain array: {first_line(error)}") from None
    if dtype.hasobject or dtype.kind not in "biufc":
        raise DataError(f"{what} has type {dtype}: only plain numbers can be read, not pickled objects or text")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise DataError(f"{what} is not a plain array: no array has the shape {shape}")
    try:
        if 0 in shape:
            return np.zeros(shape, dtype)
        if math.prod(shape) * dtype.itemsize > os.fstat(file.fileno()).st_size:  # NumPy's own sum may overflow
            raise ValueError
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")
    except (ValueError, OverflowError, MemoryError):
        raise DataError(f"{what} is cut off, or its shape {shape} is none that can be") from None


def _import_function(source: str) -> Callable[..., Iterator[Mapping[str, np.ndarray]]]:
    """Import the user's function, as ``python -m`` would find it: from the current folder first."""
    module, _, name = source.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise DataError(f"cannot import the data {source!r}: {error}") from None
    except AttributeError:
        raise DataError(f"module {module!r} has no function {name!r}") from None
    finally:
        sys.path.pop(0)
