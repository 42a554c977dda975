"""The process group ``mpi``: mpi4py."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core import Array, Communicator, OrtflexError, ProcessGroup

# Rank and size, as MPICH and Intel MPI, Open MPI, and Slurm's own launcher set them.
_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_joined: list[_World] = []


@attrs.frozen(kw_only=True)
class Mpi(ProcessGroup):
    """Processes that mpiexec or srun started: all of MPI's world.

    >>> Mpi().describe()
    {'name': 'mpi'}

    Source: mpi4py; the MPI standard, ``MPI_Allgather``.
    """

    name: ClassVar[str] = "mpi"
    launch: ClassVar[str] = "mpiexec -n 4 python -m"

    @classmethod
    def unavailable(cls, environ: Mapping[str, str]) -> list[str]:
        """Reasons why this process does not belong to a world of MPI."""
        if importlib.util.find_spec("mpi4py") is None:
            return ["mpi4py is not installed: pip install 'ortflex[mpi]'"]
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
            _joined.append(_World())
        return _joined[0]


class _World:
    """A place in MPI's world (see :class:`ortflex_core.Communicator`)."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise OrtflexError(
                f"mpi4py finds no MPI library: {error}. pip install 'ortflex[mpi]' brings one"
            ) from error
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self._received = np.empty((self.size, 0), np.uint8)

    def all_gather(self, array: Array) -> list[Array]:
        if self._received.shape[1] != len(array):
            self._received = np.empty((self.size, len(array)), np.uint8)
        self._world.Allgather(np.ascontiguousarray(array), self._received)
        return list(self._received)

    def close(self) -> None:
        """Nothing: mpi4py leaves the world when the program ends."""
