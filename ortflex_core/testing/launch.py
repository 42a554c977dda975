"""Starts processes as torchrun does, without torch: ``python -m ortflex_core.testing.launch 2 -m module``.

Every process has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. If a process
ends, the launcher does not end the others, which have to notice it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def launch(size: int, arguments: list[str]) -> int:
    """Run ``size`` processes of Python with the arguments; returns the first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *arguments]
        processes.append(subprocess.Popen(command, env={**os.environ, **shared, **own}))
    codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))
