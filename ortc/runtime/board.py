"""TensorBoard: a run's numbers as its event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortc.errors import OrtcError


class Board:
    """Writes the event file of one run; the numbers of steps beyond ``step`` are about to be repeated, and dropped.

    Raises:
        OrtcError: if TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise OrtcError(f"--tensorboard needs the package tensorboard ({error}): pip install 'ortc[tensorboard]'") from None
        self._event, self._summary = event_pb2, summary_pb2
        try:
            self._writer = EventFileWriter(str(folder))
        except OSError as error:
            raise OrtcError(f"cannot write in {folder}: {error.strerror}") from None
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(session_log=started, step=step + 1, wall_time=time.time()))

    def scalars(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Add the numbers of a step by their tags; None is left out."""
        values = [self._summary.Summary.Value(tag=tag, simple_value=n) for tag, n in numbers.items() if n is not None]
        self._add(step, values)

    def histograms(self, step: int, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what :func:`ortc.runtime.tensors.histogram` says of tensors, by their tags, and their norms as ``norm/<tag>``."""
        values = []
        for tag, told in tensors.items():
            shape = self._summary.HistogramProto(
                min=told["min"], max=told["max"], num=sum(told["counts"]), sum=told["sum"], sum_squares=told["sum_squares"],
                bucket_limit=told["edges"][1:], bucket=told["counts"],
            )  # fmt: skip
            values.append(self._summary.Summary.Value(tag=tag, histo=shape))
            values.append(self._summary.Summary.Value(tag=f"norm/{tag}", simple_value=told["norm"]))
        self._add(step, values)

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(summary=summary, step=step, wall_time=time.time()))

    def sync(self) -> None:
        """Put what was added into the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
