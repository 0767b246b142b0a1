"""Times the transport beside plain MPI: ping-pong and all-reduce of the same sizes, in one run, in turn.

    mpiexec -n 2 python bench/transport.py [--rounds 30]

Plain MPI is mpi4py's Send, Recv and Allreduce on arrays made before, with MPI's own busy waiting. Ours also sends a header,
checks type and shape, and lets go of the core while it waits. Prints medians in milliseconds, one way for the ping-pong between
ranks 0 and 1 (the others wait at a barrier); above 1 ours is the slower one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from mpi4py import MPI

from ortc.runtime.transport import Transport, mpi_world

SIZES = [4, 64 << 10, 1 << 20, 4 << 20, 32 << 20]  # bytes


def ping_pong(transport: Transport, sent: np.ndarray, got: np.ndarray) -> dict[str, Callable[[], object]]:
    comm, rank = MPI.COMM_WORLD, transport.rank

    def plain() -> None:
        if rank == 0:
            comm.Send(sent, 1)
            comm.Recv(got, 1)
        elif rank == 1:
            comm.Recv(got, 0)
            comm.Send(sent, 0)

    def ours() -> None:
        if rank == 0:
            request = transport.send(sent, 1, 0)
            transport.receive_into(got, 1, 0).wait()
            request.wait()
        elif rank == 1:
            transport.receive_into(got, 0, 0).wait()
            transport.send(sent, 0, 0).wait()

    return {"ours": ours, "plain": plain}


def all_reduce(transport: Transport, sent: np.ndarray, got: np.ndarray) -> dict[str, Callable[[], object]]:
    return {"ours": lambda: transport.all_reduce(got), "plain": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, got)}


def measure(transport: Transport, contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds on this rank, the contestants in turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 2):
        for name, run in contestants.items():
            transport.barrier()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: 1e3 * median(seconds[2:]) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with mpi_world() as transport:
        if transport.rank == 0:
            print(f"{transport.size} ranks, {MPI.Get_library_version().splitlines()[0]}")
            print(f"{'':12} {'bytes':>10} {'ours':>9} {'plain':>9} {'ours / plain':>13}")
        for name, case, ways in (("ping-pong", ping_pong, 2), ("all-reduce", all_reduce, 1)):
            for size in SIZES:
                sent, got = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
                took = {who: ms / ways for who, ms in measure(transport, case(transport, sent, got), rounds).items()}
                if transport.rank == 0:
                    ratio = took["ours"] / took["plain"]
                    print(f"{name:12} {size:10} {took['ours']:9.3f} {took['plain']:9.3f} {ratio:13.2f}", flush=True)


if __name__ == "__main__":
    main()
