"""Tables as arrays, one for each column: Parquet files, and datasets that Hugging Face's ``datasets`` saved on disk.

A column holds numbers, or lists of numbers (of lists …) that all have the same length. Arrow files are mapped and their columns
looked at where they are; Parquet is packed, so it is unpacked into temporary files and those are mapped.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ortc.errors import DataError

_ROWS = 1 << 16  # of a Parquet file at a time


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"reading tables needs the package pyarrow ({error}): pip install 'ortc[data]'") from None
    return pyarrow


def read_parquet(path: Path) -> list[dict[str, np.ndarray]]:
    """The columns of a file, as one shard.

    Raises:
        DataError: it is no Parquet file, or a column is not numbers.
    """
    arrow = _arrow()
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = (_columns(batch, str(path)) for batch in file.iter_batches(_ROWS))
            return [_unpacked(batches, path, file.metadata.num_rows)]
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {first_line(error)}") from None


def is_dataset(folder: Path) -> bool:
    """Whether ``datasets`` saved the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def read_dataset(folder: Path) -> list[tuple[Path, dict[str, np.ndarray]]]:
    """The record batches of a saved dataset, each with its file.

    Raises:
        DataError: it holds several splits, cannot be read, or a column is not numbers.
    """
    arrow = _arrow()
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in folder.glob("*/state.json"))
        raise DataError(f"{folder} holds the splits {', '.join(splits)}: name one, such as {folder / (splits or ['train'])[0]}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read {folder / 'state.json'}: {first_line(error)}") from None
    shards = []
    for name in files:
        path = folder / name
        if path.resolve().parent != folder.resolve():
            raise DataError(f"{folder / 'state.json'} names a file outside of the folder: {name!r}")
        try:
            with arrow.memory_map(str(path)) as source:
                found = [batch for batch in arrow.ipc.open_stream(source) if batch.num_rows]
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path}: {first_line(error)}") from None
        shards += [(path, _columns(batch, str(path))) for batch in found]
    if not shards:
        raise DataError(f"{folder} holds no samples")
    return shards


def _columns(batch: Any, source: str) -> dict[str, np.ndarray]:
    """The columns that are numbers, as arrays that look at Arrow's memory where they can; texts and the like are left out."""
    found = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        array = _array(column, f"{source}: column {name!r}")
        if array is not None:
            found[str(name)] = array
    return found


def _array(column: Any, what: str) -> np.ndarray | None:
    """An Arrow array as NumPy's, [rows, …]; None if it holds no numbers.

    Raises:
        DataError: a value is missing, or lists differ in length.
    """
    import pyarrow.types as kinds

    kind = column.type
    if isinstance(column, _arrow().ExtensionArray):
        return _array(column.storage, what)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        if column.null_count:
            raise DataError(f"{what} has missing values")
        inner = column.flatten()
        rows = len(column)
        if not kinds.is_fixed_size_list(kind):
            lengths = np.unique(np.diff(column.offsets.to_numpy()))
            if lengths.size > 1:
                raise DataError(f"{what} holds lists of {lengths[0]} to {lengths[-1]} elements: pad them to one length")
        values = _array(inner, what)
        return None if values is None else values.reshape(rows, -1, *values.shape[1:])
    if not (kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)):
        return None
    if column.null_count:
        raise DataError(f"{what} has missing values")
    return column.to_numpy(zero_copy_only=False)


def _unpacked(batches: Iterator[dict[str, np.ndarray]], path: Path, rows: int) -> dict[str, np.ndarray]:
    """The batches one after the other, in a temporary file for each column, mapped."""
    made: dict[str, np.ndarray] = {}
    done = 0
    for batch in batches:
        for name, array in batch.items():
            if name not in made:
                with tempfile.TemporaryFile(prefix="ortc-") as file:
                    made[name] = np.memmap(file, array.dtype, "w+", 0, (rows, *array.shape[1:]))
            if array.shape[1:] != made[name].shape[1:]:
                lengths = f"{made[name].shape[1]} and {array.shape[1]}"
                raise DataError(f"{path}: column {name!r} holds lists of {lengths} elements: pad them to one length")
            made[name][done : done + len(array)] = array
        done += len(next(iter(batch.values()), ()))
    return made


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]
