"""The ranks that this process runs: all of a job, as threads, or its own one under MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from ortc import __version__
from ortc.errors import CheckpointError
from ortc.plan import Plan
from ortc.runtime.engine import Engine
from ortc.runtime.stage import DEFAULT_ENGINE
from ortc.runtime.transport import (
    RankFailed,
    Transport,
    handshake,
    launched_by_mpi,
    mpi_world,
    thread_world,
)
from ortc.runtime.worker import Worker, ranks_of

T = TypeVar("T")


def cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def threads_of(world: Transport) -> int:
    """As many threads as this rank has cores; of a core that several ranks of this host may run on, each has its part."""
    told = world.broadcast_object(world.gather_object([socket.gethostname(), sorted(cores())]))
    host, own = told[world.rank]
    here = [core for name, others in told if name == host for core in others]
    return max(int(sum(Fraction(1, here.count(core)) for core in own)), 1)


class Team:
    """Runs functions on every rank of this process at once.

    Attributes:
        workers: the ranks of this process.
        main: whether rank 0 is among them: it prints, and writes what there is one of.
        size: ranks of the whole job.
        threads: of each session; None for all cores.
    """

    def __init__(
        self, folder: Path, plan: Plan, threads: int | None, engine: Engine = DEFAULT_ENGINE, timeout: float | None = None
    ) -> None:
        self._mpi, self._timeout = launched_by_mpi(), timeout
        size = ranks_of(plan) * plan.recipe.pipeline.replicas
        worlds = [mpi_world(timeout)] if self._mpi else thread_world(size, timeout)
        self.size = worlds[0].size
        if self._mpi:
            # An error in one rank ends all: until the world closes, everything happens in it.
            worlds[0].__enter__()
            self._world: Transport | None = worlds[0]
        if threads is None and self.size > 1:
            threads = threads_of(worlds[0]) if self._mpi else max(len(cores()) // self.size, 1)
        self.threads = threads
        self._pool = ThreadPoolExecutor(len(worlds)) if len(worlds) > 1 else None
        try:
            if self._mpi:
                handshake(worlds[0], {"ortc": __version__, "plan": plan.identity(), "folder of": plan.model})
            self.workers = self._run(worlds, lambda world: Worker(folder, plan, world, threads, engine))
        except BaseException as error:
            self.fail(error)
            raise
        self.main = self.workers[0].world.rank == 0

    def each(self, function: Callable[[Worker], T]) -> list[T]:
        """What the function returns on each rank of this process, in order.

        Raises:
            BaseException: what the first rank that failed raised. Under MPI that ends all ranks, for the others are not told
                of it; only a CheckpointError has been heard by all.
        """
        try:
            return self._run(self.workers, function, lambda w: w.world)
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                self.fail(error)
            if self._pool is not None:  # the others were told of the failure; now they can go on
                for worker, world in zip(self.workers, thread_world(self.size, self._timeout), strict=True):
                    worker.connect(world)
            raise

    def _run(self, items: list, function: Callable, world_of: Callable = lambda world: world) -> list:
        if self._pool is None:
            return [function(items[0])]

        def run(item):  # type: ignore[no-untyped-def]
            with world_of(item):
                return function(item)

        futures = [self._pool.submit(run, item) for item in items]
        errors = [e for e in (f.exception() for f in futures) if e is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, RankFailed)), errors[0])
        return [f.result() for f in futures]

    def describe(self) -> str:
        """The ranks in a line."""
        where = "processes under MPI" if self._mpi else "threads of this process"
        stages, replicas = len(self.workers[0].plan.stages), self.workers[0].replicas
        what = f"{stages} stage{'s' if stages > 1 else ''}" + (f" × {replicas} replicas" if replicas > 1 else "")
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.size} ranks ({what}) as {where}, sessions with {threads} each"

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if not self._mpi:
            return flag
        import numpy as np

        told = np.array([flag], np.int64)
        self.workers[0].world.all_reduce(told, "max")
        return bool(told[0])

    def share(self, found: Any) -> Any:
        """What the first rank that has something (not None) found, on all."""
        if not self._mpi:
            return found
        world = self.workers[0].world
        told = world.gather_object(found)
        return world.broadcast_object(next((f for f in told if f is not None), None) if told is not None else None)

    def fail(self, error: BaseException) -> None:
        """Under MPI: end all ranks, saying why."""
        if self._mpi and self._world is not None:
            world, self._world = self._world, None
            world.__exit__(type(error), error, error.__traceback__)

    def close(self) -> None:
        """Release the sessions; under MPI all ranks come to this together."""
        for worker in self.workers:
            worker.close()
        if self._pool is not None:
            self._pool.shutdown()
        if self._mpi and self._world is not None:
            world, self._world = self._world, None
            world.__exit__(None, None, None)
