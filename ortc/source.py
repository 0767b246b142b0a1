"""Reading a model file safely, and streaming weights from file to file. Weights are never read into memory here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ortc.errors import CheckpointError, ModelError, OrtcError
from ortc.graph.names import all_graphs
from ortc.graph.shapes import SMALL

# It warns of what is read and made nowhere, which is an error here, and right in a template without its weights.
logging.getLogger("onnx_ir.serde").setLevel(logging.ERROR)

MIN_OPSET = 7
MAX_OPSET = onnx.defs.onnx_opset_version()

# The names that the safetensors format has for element types.
SAFETENSORS_TYPES = {
    ir.DataType.DOUBLE: "F64",
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT64: "I64",
    ir.DataType.INT32: "I32",
    ir.DataType.INT16: "I16",
    ir.DataType.INT8: "I8",
    ir.DataType.UINT64: "U64",
    ir.DataType.UINT32: "U32",
    ir.DataType.UINT16: "U16",
    ir.DataType.UINT8: "U8",
    ir.DataType.BOOL: "BOOL",
}


def load_model(path: str | Path) -> ir.Model:
    """Read an ONNX file (protobuf) and check what can be checked without looking at the weights.

    External data is not read: its tensors map their file when somebody asks for the numbers.

    Raises:
        ModelError: if the file is missing, is not an ONNX model, is cut off, is of an opset or IR version out of range,
            has no outputs, reads values that nobody makes, or has external data that is missing, too short, or outside
            of the model's folder.
    """
    model = read_model(path)
    if not model.graph.outputs:
        raise ModelError(f"{path} has no outputs: there is nothing to train towards")
    _check_closed(Path(path), model)
    return model


@contextlib.contextmanager
def blamed(*paths: str | Path) -> Iterator[None]:
    """What is done with models: if it fails as it never should, and one of them is no valid ONNX, that is what is told.

    Raises:
        ModelError: likewise.
    """
    try:
        yield
    except OrtcError:
        raise
    except Exception as failure:
        for path in paths:
            try:
                onnx.checker.check_model(str(path), full_check=True)
            except Exception as error:
                raise ModelError(f"{path} is not a valid ONNX model: {str(error).strip()}") from None
        if isinstance(failure, onnx.shape_inference.InferenceError | ir.serde.SerdeError):  # the checker does not see all
            files = " or ".join(map(str, paths))
            raise ModelError(f"{files} has shapes or attributes that do not fit each other: {_innermost(failure)}") from failure
        raise


def read_model(path: str | Path) -> ir.Model:
    """As :func:`load_model`, of a file that need not be complete: a template lacks the weights that its nodes read.

    Raises:
        ModelError: likewise, but for outputs, and values that nobody makes.
    """
    path = Path(path)
    proto = _parse(path)
    _check_versions(path, proto)
    if proto.graph.sparse_initializer:
        names = ", ".join(t.values.name for t in proto.graph.sparse_initializer[:5])
        raise ModelError(f"{path} has sparse weights ({names}), which are not supported; export them as dense tensors")
    try:
        model = ir.from_proto(proto)
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {_innermost(error)}") from None
    _check_tensors(path, model)
    _read_small(model)
    return model


def _read_small(model: ir.Model) -> None:
    """Take small external tensors into memory: shape inference looks at them, and each would keep a map of its file."""
    graphs = [g for graph in [model.graph, *(f.graph for f in model.functions.values())] for g in all_graphs(graph)]
    with contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for value in (v for g in graphs for v in g.initializers.values()):
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.size <= SMALL:
                path = Path(tensor.path)
                if path not in files:
                    files[path] = stack.enter_context(open(path, "rb"))
                files[path].seek(tensor.offset or 0)
                dims, data = tensor.shape.numpy(), files[path].read(tensor.nbytes)
                proto = onnx.TensorProto(name=tensor.name, data_type=int(tensor.dtype), dims=dims, raw_data=data)
                value.const_value = ir.serde.deserialize_tensor(proto)


def _parse(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.onnx"))
        hint = f"; it holds {', '.join(found[:5])}" if found else ""
        raise ModelError(f"{path} is a folder, not an ONNX file{hint}")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if not data:
        raise ModelError(f"{path} is empty")
    try:
        proto = onnx.ModelProto.FromString(data)
    except DecodeError:
        if _is_cut_off(data):
            raise ModelError(f"{path} is cut off: it ends inside the model; copy or export it again") from None
        raise ModelError(f"{path} is not an ONNX file, or it is damaged") from None
    if not proto.HasField("graph"):
        raise ModelError(f"{path} holds no graph: it is not an ONNX model, or it is cut off")
    return proto


def _is_cut_off(data: bytes) -> bool:
    """Whether the top-level protobuf fields are a model's, and the last of them reaches beyond the end of the file."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        # A model has the fields 1 … 26, as numbers (wire type 0) or as messages (wire type 2).
        if not 1 <= number <= 26 or wire not in (0, 2):
            return False
        size, at = _varint(data, at)
        at += size if wire == 2 else 0
    return at > len(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A protobuf variable-length integer and the position behind it, which is past the end if it is cut off."""
    result = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return result, at
    return 0, len(data) + 1


def _check_versions(path: Path, proto: onnx.ModelProto) -> None:
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{path} has IR version {proto.ir_version}, but the installed onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}; update onnx, or export for an older version"
        )
    if not proto.opset_import:
        raise ModelError(f"{path} does not say which opset it is written in: it is cut off, or not an ONNX model")
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and not MIN_OPSET <= opset.version <= MAX_OPSET:
            hint = "update onnx" if opset.version > MAX_OPSET else "export the model again"
            raise ModelError(
                f"{path} is written in opset {opset.version}; opsets {MIN_OPSET} to {MAX_OPSET} (the newest that the "
                f"installed onnx {onnx.__version__} knows) are accepted; {hint}"
            )


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def _check_closed(path: Path, model: ir.Model) -> None:
    """Every value that is read must be made somewhere: a graph that was cut with a tool often forgets."""
    for graph in [model.graph, *(f.graph for f in model.functions.values())]:
        for g in all_graphs(graph):
            for node in g:
                for value in node.inputs:
                    if value is not None and _is_orphan(value):
                        raise ModelError(
                            f"{path}: node {node.name or node.op_type!r} ({node.op_type}) reads {value.name!r}, which "
                            "is neither an input, nor an initializer, nor made by a node"
                        )
            for value in g.outputs:
                if _is_orphan(value):
                    raise ModelError(f"{path}: nothing makes the output {value.name!r}")


def _is_orphan(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def _tensors(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """Every tensor of the model, with a description for people: weights and attributes, in every nested graph."""
    for graph in [model.graph, *(f.graph for f in model.functions.values())]:
        for g in all_graphs(graph):
            for name, value in g.initializers.items():
                if value.const_value is not None:
                    yield f"the weight {name!r}", value.const_value
            for node in g:
                for attribute in node.attributes.values():
                    if attribute.is_ref():
                        continue
                    where = f"attribute {attribute.name!r} of node {node.name or node.op_type!r}"
                    if attribute.type == ir.AttributeType.TENSOR:
                        yield where, attribute.as_tensor()
                    elif attribute.type == ir.AttributeType.TENSORS:
                        yield from ((where, tensor) for tensor in attribute.as_tensors())


def _check_tensors(path: Path, model: ir.Model) -> None:
    folder = Path(os.path.abspath(path)).parent
    for what, tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = folder
            _check_external(path, folder, what, tensor)
        elif isinstance(tensor, ir.TensorProtoTensor) and tensor.raw.HasField("raw_data"):
            _check_size(path, what, tensor, len(tensor.raw.raw_data))
        elif isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
            try:  # numbers one by one, as few files have them for much
                size = len(tensor.tobytes())
            except Exception as error:
                raise ModelError(f"{path} is damaged: {what} has not the data that its type and shape need: {error}") from None
            _check_size(path, what, tensor, size)


def _check_external(path: Path, folder: Path, what: str, tensor: ir.ExternalTensor) -> None:
    location = os.fspath(tensor.location)
    file = folder / location
    is_inside = not os.path.isabs(location) and ".." not in Path(location).parts
    if not is_inside or not file.resolve().is_relative_to(folder.resolve()):
        raise ModelError(
            f"{path}: the data of {what} lies outside of the model's folder ({location!r}), which is refused; "
            "put the file beside the model"
        )
    if not file.is_file():
        raise ModelError(f"{path}: the data of {what} is missing: there is no file {file}")
    state = file.stat()
    if state.st_nlink > 1:
        # onnx_ir refuses to open such a file, since the other name may lie anywhere.
        raise ModelError(f"{path}: the data file {file} has several hard links, which is refused; make a copy of it")
    if tensor.length is not None:
        _check_size(path, what, tensor, tensor.length)
    offset = tensor.offset or 0
    if offset < 0 or offset + tensor.nbytes > state.st_size:
        raise ModelError(
            f"{path}: the data of {what} is cut off: {file} has {state.st_size} bytes, but the bytes {offset} to "
            f"{offset + tensor.nbytes} are needed"
        )


def _check_size(path: Path, what: str, tensor: ir.TensorProtocol, size: int) -> None:
    if size != tensor.nbytes:
        raise ModelError(
            f"{path} is damaged: {what} has {size} bytes of data, but its type {tensor.dtype.name} and shape "
            f"{list(tensor.shape)} need {tensor.nbytes}"
        )


def content_hash(tensor: ir.TensorProtocol) -> str:
    """The sha256 of a tensor's elements; external data is mapped, not read into memory."""
    array = np.ascontiguousarray(tensor.numpy())
    if tensor.dtype == ir.DataType.STRING:
        return hashlib.sha256(json.dumps([bytes(text).hex() for text in array.reshape(-1)]).encode()).hexdigest()
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


def write_safetensors(
    path: str | Path, tensors: Mapping[str, ir.TensorProtocol], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into a safetensors file, one after the other; external data goes from file to file.

    The bytes depend only on names and contents. Layout as in the safetensors specification: eight bytes with the length
    of the header (little endian), a JSON header padded with spaces to a multiple of eight, the data without gaps.
    Wide element types come first, so that every tensor is aligned.

    Args:
        path: the file; it is overwritten, and on disk when this returns.
        tensors: by name.
        metadata: free text that readers show beside the tensors.

    Raises:
        ModelError: for an element type that the format does not have, or data that changed its size meanwhile.
        OSError: if the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    with open(path, "wb") as file:
        file.write(_safetensors_header({name: tensors[name] for name in order}, metadata or {}))
        for name in order:
            _write_tensor(file, name, tensors[name])
        file.flush()
        os.fsync(file.fileno())


def _safetensors_header(tensors: Mapping[str, ir.TensorProtocol], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_TYPES:
            raise ModelError(f"the weight {name!r} has the type {tensor.dtype.name}, which safetensors files do not have")
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": [int(d) for d in tensor.shape],  # type: ignore[arg-type]
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(path: Path, data: memoryview) -> tuple[int, dict[str, tuple[str, list[int], int, int]]]:
    """Where the tensors of a safetensors file are.

    Args:
        path: for messages.
        data: the file's bytes.

    Returns:
        Where the data begins, and by name the element type, the shape, and the first and last byte from there.

    Raises:
        CheckpointError: if it is no such file, or is cut off.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:start]))
        header.pop("__metadata__", None)
        found = {name: (e["dtype"], e["shape"], *e["data_offsets"]) for name, e in header.items()}
        if all(0 <= begin <= end <= len(data) - start for _, _, begin, end in found.values()):
            return start, found
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise CheckpointError(f"{path} is no safetensors file, or it is damaged")


def _write_tensor(file: BinaryIO, name: str, tensor: ir.TensorProtocol) -> None:
    start = file.tell()
    try:
        tensor.tofile(file)  # type: ignore[attr-defined]
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file that is written
        raise ModelError(f"cannot read the weight {name!r}: {error}") from None
    if file.tell() - start != tensor.nbytes:
        raise ModelError(f"the data of the weight {name!r} is cut off; its file changed since the model was read")
