"""The graphs after every pass, as files to look at (``--save-intermediate``)."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ortc.compiler import Compilation, Pass
from ortc.errors import OrtcError

_LARGEST = 1024  # elements; a larger weight is left out


class Snapshots:
    """Writes ``NN-<pass>/<graph>.onnx`` for each graph that a pass changed.

    Weights are not in these files: larger ones are inputs there. The files stay when a later pass fails.

    Args:
        folder: is made; it must be empty if it is there.

    Raises:
        OrtcError: the folder cannot be made, or holds something.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(exist_ok=True)
            if any(folder.iterdir()):
                raise OrtcError(f"{folder} is not empty: the graphs after every pass want a folder of their own")
        except OSError as error:
            raise OrtcError(f"cannot write in {folder}: {error.strerror}") from None
        self._folder, self._number = folder, 0
        self._latest: dict[str, bytes] = {}

    def __call__(self, step: Pass, c: Compilation) -> None:
        """After a pass."""
        self._number += 1
        folder = self._folder / f"{self._number:02}-{step.name}"
        for phase, model in c.all_models().items():
            data = _without_weights(model)
            if self._latest.get(phase) == data:
                continue
            self._latest[phase] = data
            try:
                folder.mkdir(exist_ok=True)
                (folder / f"{phase.replace(' ', '-')}.onnx").write_bytes(data)
            except OSError as error:
                raise OrtcError(f"cannot write in {folder}: {error.strerror}") from None


def _without_weights(model: ir.Model) -> bytes:
    copy = model.clone()
    graph = copy.graph
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.size > _LARGEST:
            graph.initializers.pop(name)
            value.dtype, value.shape, value.const_value = tensor.dtype, ir.Shape(tensor.shape.numpy()), None
            if value not in graph.inputs:
                graph.inputs.append(value)
    return ir.to_proto(copy).SerializeToString(deterministic=True)
