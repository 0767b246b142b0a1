"""Writes the inference model with the trained weights, without an ONNX library.

Protobuf messages that follow one another in a file are merged when it is read: repeated fields are appended. So the
file is the compiled template followed by one small ``ModelProto`` per weight, which holds nothing but an initializer.
Field numbers are those of ``onnx.proto``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ortc.errors import OrtcError
from ortc.plan import GraphFile, Plan
from ortc.runtime.batch import Batch, key
from ortc.runtime.checkpoint import sync_folder
from ortc.runtime.onnx_file import MODEL_GRAPH, bytes_field, varint
from ortc.runtime.stage import open_session, read_graph

# A protobuf file must stay below 2 GiB; weights that would not fit go into a file of their own.
LARGEST_FILE = 2**31 - 2**24
_PAGE = 4096  # so that a runtime can map each weight

DATA_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "uint32": 12, "uint64": 13, "complex64": 14, "complex128": 15,
}  # fmt: skip
_GRAPH_INITIALIZER = 5
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 9, 13, 14
_EXTERNAL = 1


def export_model(
    graph: GraphFile,
    folder: Path,
    parameters: Mapping[str, np.ndarray],
    path: Path,
    *,
    force: bool = False,
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the inference model. The file (and ``<name>.data`` beside it, above 2 GB) appears whole or not at all.

    Args:
        graph: the model without its parameters, as it was compiled.
        folder: the output folder it lies in.
        parameters: parameters and buffers by the model's names; written from where they are.
        path: the ``.onnx`` file to write.
        force: replace an existing file.
        check: called with the path of the finished model before it gets its place; what it raises stops the export.

    Raises:
        OrtcError: the file exists, or cannot be written.
    """
    data = path.with_name(f"{path.name}.data")
    template = read_graph(folder, graph)
    external = len(template) + sum(a.nbytes for a in parameters.values()) > LARGEST_FILE
    for file in (path, data) if external else (path,):
        if file.exists() and not force:
            raise OrtcError(f"{file} exists already; choose another name, or --force to replace it")
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise OrtcError(f"cannot write in {path.parent}: {error.strerror}") from None
    try:
        with _synced(aside / path.name) as model, contextlib.ExitStack() as stack:
            weights = stack.enter_context(_synced(aside / data.name)) if external else None
            model.write(template)
            for name, array in parameters.items():
                _write_initializer(model, name, array, weights, data.name)
        check(aside / path.name)
        if external:
            os.replace(aside / data.name, data)
        os.replace(aside / path.name, path)
        sync_folder(path.parent)
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}; nothing was left behind") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_initializer(model: BinaryIO, name: str, array: np.ndarray, weights: BinaryIO | None, location: str) -> None:
    """Append ``ModelProto{graph{initializer{…}}}``; the values go into ``weights`` if there is such a file."""
    values = array.reshape(-1).view(np.uint8).data
    tensor = b"".join(varint(_DIMS << 3) + varint(size) for size in array.shape)
    tensor += varint(_DATA_TYPE << 3) + varint(DATA_TYPES[array.dtype.name])
    tensor += bytes_field(_NAME, name.encode())
    tail = len(values)
    if weights is None:
        tensor += varint(_RAW_DATA << 3 | 2) + varint(tail)
    else:
        weights.write(bytes(-weights.tell() % _PAGE))
        where = {"location": location, "offset": str(weights.tell()), "length": str(tail)}
        tensor += b"".join(
            bytes_field(_EXTERNAL_DATA, bytes_field(1, k.encode()) + bytes_field(2, v.encode())) for k, v in where.items()
        )
        tensor += varint(_DATA_LOCATION << 3) + varint(_EXTERNAL)
        tail = 0
    graph = varint(_GRAPH_INITIALIZER << 3 | 2) + varint(len(tensor) + tail) + tensor
    model.write(varint(MODEL_GRAPH << 3 | 2) + varint(len(graph) + tail) + graph)
    (model if weights is None else weights).write(values)


def exported_loss(plan: Plan, folder: Path, model: Path, graph: GraphFile, batch: Batch, threads: int | None = None) -> float:
    """The loss of an exported model: its outputs, computed by ONNX Runtime, through the compiled criterion.

    Raises:
        OrtcError: if ONNX Runtime cannot open or run the model.
    """
    outputs = _run(str(model), f"the exported {model.name}", plan, graph, batch, threads)
    results = _run(read_graph(folder, plan.criterion), plan.criterion.file, plan, plan.criterion, {**batch, **outputs}, threads)
    return float(results[next(key(p) for p in plan.criterion.outputs if p.role == "loss")])


def _run(
    model: str | bytes, name: str, plan: Plan, graph: GraphFile, feeds: Mapping[str, np.ndarray], threads: int | None
) -> dict[str, np.ndarray]:
    session = open_session(model, name, plan.target, plan.sessions.others, threads)
    try:
        values = session.run([p.name for p in graph.outputs], {p.name: feeds[key(p)] for p in graph.inputs})
    except Exception as error:
        raise OrtcError(f"ONNX Runtime cannot run {name}: {error}") from None
    return dict(zip(map(key, graph.outputs), values, strict=True))
