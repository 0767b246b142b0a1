"""Processor time, for tests of how it grows. What it is depends on the machine, so only ratios may be asserted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """The least processor time of some runs, without the garbage collector: its walks depend on what else lives."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return min(_once(run) for _ in range(times))
    finally:
        if enabled:
            gc.enable()


def _once(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
