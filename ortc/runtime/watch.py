"""Names the rank that died. A small process beside the ranks of one host, outside of what mpiexec kills.

    python -I -S watch.py COUNT

mpiexec kills the surviving ranks within milliseconds of a death, before they could say anything, and itself names a process
and not a rank. Every rank holds a connection to this process; the kernel closes a dead rank's before mpiexec takes down the
others, and the first one that closes without a goodbye is the one to name. It imports the standard library alone, to start
quickly.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time

GOODBYE = b"."
GRACE = 3.0  # seconds in which the launcher may end the others, before they are killed from here


def watch(count: int) -> None:
    """Serve ``count`` ranks until all have said goodbye, or one died and the others are gone.

    The address to connect to goes to stdout, one line; a rank introduces itself with the line ``rank pid``.
    """
    folder = tempfile.mkdtemp(prefix="ortc-")
    selector = selectors.DefaultSelector()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.join(folder, "watch"))
            server.listen(count)
            print(server.getsockname(), flush=True)
            meet(selector, server, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    while selector.get_map():
        for key, _ in selector.select():  # epoll lists them in the order in which they closed
            assert isinstance(key.fileobj, socket.socket)
            said = receive(key.fileobj)
            selector.unregister(key.fileobj)
            if said != GOODBYE:
                report(*key.data)
                end(selector)
                return


def meet(selector: selectors.BaseSelector, server: socket.socket, count: int) -> None:
    """Wait until every rank has connected, or the one that started this process is gone (stdin closes)."""
    with selectors.DefaultSelector() as arrivals:
        arrivals.register(server, selectors.EVENT_READ)
        arrivals.register(sys.stdin, selectors.EVENT_READ)
        while len(selector.get_map()) < count:
            if any(key.fileobj is sys.stdin for key, _ in arrivals.select()):
                sys.exit()
            connection, _ = server.accept()
            rank, pid = introduction(connection).split()
            selector.register(connection, selectors.EVENT_READ, (int(rank), int(pid)))


def introduction(connection: socket.socket) -> str:
    """The first line, and nothing of what follows it: a short job's goodbye may be there already."""
    line = b""
    while not line.endswith(b"\n"):
        byte = receive(connection)
        if not byte:
            sys.exit()  # died while it connected, which the launcher sees too
        line += byte
    return line.decode()


def receive(connection: socket.socket) -> bytes:
    """What the rank said last; nothing if it is dead."""
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def report(rank: int, pid: int) -> None:
    text = (
        f"ortc: rank {rank} (process {pid} on {socket.gethostname()}) died: killed, out of memory, or crashed; "
        "this ends the job, and the same command started again continues from the last checkpoint\n"
    )
    os.write(2, text.encode())


def end(selector: selectors.BaseSelector) -> None:
    """Wait for the launcher to end the others, else kill them: an open connection is a living process."""
    deadline = time.monotonic() + GRACE
    while selector.get_map() and time.monotonic() < deadline:
        for key, _ in selector.select(0.1):
            selector.unregister(key.fileobj)
    for key in list(selector.get_map().values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(key.data[1], signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
