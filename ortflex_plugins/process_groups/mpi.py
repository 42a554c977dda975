"""The process group ``mpi``: mpi4py."""

from __future__ import annotations

import atexit
import importlib.util
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Communicator,
    OrtflexError,
    ProcessGroup,
    install_command,
    number,
    setting,
)

# Rank and size, as MPICH and Intel MPI, Open MPI, and Slurm's own launcher set them.
_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_PAUSING, _PAUSE = 1.0, 0.001
"""Seconds after which a process that waits leaves the processor to others, and for how long."""
_joined: list[_World] = []


@attrs.frozen(kw_only=True)
class Mpi(ProcessGroup):
    """Connects the processes that mpiexec or srun started: all processes in ``MPI_COMM_WORLD``.

    If a message does not arrive within ``timeout`` seconds, the process that waits for it raises an
    error. When this process exits, it also aborts all other processes, because MPI would otherwise wait
    for them.

    Raises:
        ValueError: ``timeout`` is not positive.

    >>> Mpi(timeout=60.0).describe()
    {'name': 'mpi', 'timeout': 60.0}

    Source: mpi4py; the MPI standard, ``MPI_Iallgather`` and ``MPI_Test``.
    """

    name: ClassVar[str] = "mpi"
    stability = "experimental"
    launch: ClassVar[str] = "mpiexec -n 4 python -m"

    timeout: float = setting(
        default=1800.0,
        validator=number(gt=0),
        help="the number of seconds to wait for a message from the other processes",
    )

    @classmethod
    def unavailable(cls, environ: Mapping[str, str]) -> list[str]:
        """Reasons why this process does not belong to a world of MPI."""
        if importlib.util.find_spec("mpi4py") is None:
            return [f"mpi4py is not installed: {install_command('mpi')}"]
        incomplete = []
        for pair in _VARIABLES:
            found = [name for name in pair if environ.get(name)]
            if len(found) == len(pair):
                return []
            if found and found != ["SLURM_NTASKS"]:
                missing = ", ".join(name for name in pair if name not in found)
                incomplete.append(f"the launcher set {found[0]}, but not {missing}")
        return incomplete or ["this process was not started by mpiexec or srun"]

    def join(self) -> Communicator:
        """The place of this process, created at the first call."""
        if not _joined:
            _joined.append(_World(self.timeout))
        return _joined[0]


class _World:
    """A place in MPI's world (see :class:`ortflex_core.Communicator`)."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._stalled = timeout, False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise OrtflexError(
                f"mpi4py finds no MPI library: {error}. {install_command('mpi')} brings one"
            ) from error
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self._received = np.empty((self.size, 0), np.uint8)
        atexit.register(self._end)

    def all_gather(self, array: Array) -> list[Array]:
        if self._received.shape[1] != len(array):
            self._received = np.empty((self.size, len(array)), np.uint8)
        given = np.ascontiguousarray(array)
        self._wait(self._world.Iallgather(given, self._received))
        return list(self._received)

    def _wait(self, request: Any) -> None:
        """Wait for a message of all, at first without a pause."""
        began = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - began
            if waited > self._timeout:
                self._stalled = True
                raise TimeoutError(f"no message within {self._timeout:g} s")
            if waited > _PAUSING:
                time.sleep(_PAUSE)

    def _end(self) -> None:
        if self._stalled:
            self._world.Abort(1)

    def close(self) -> None:
        """Nothing: mpi4py leaves the world when the program ends."""
