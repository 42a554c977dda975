"""Process groups: ``mpi`` by mpi4py, and ``torch`` by torch.distributed over gloo."""

from __future__ import annotations

import atexit
import importlib.util
import re
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
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

__path__: list[str] = []  # Import paths of 0.2, such as process_groups.mpi, are modules inside.

# Rank and size, as MPICH and Intel MPI, Open MPI, and Slurm's own launcher set them.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_PAUSING, _PAUSE = 1.0, 0.001
"""Seconds after which a process that waits leaves the processor to others, and for how long."""
_worlds: list[_World] = []


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
        for pair in _MPI_VARIABLES:
            found = [name for name in pair if environ.get(name)]
            if len(found) == len(pair):
                return []
            if found and found != ["SLURM_NTASKS"]:
                missing = ", ".join(name for name in pair if name not in found)
                incomplete.append(f"the launcher set {found[0]}, but not {missing}")
        return incomplete or ["this process was not started by mpiexec or srun"]

    def join(self) -> Communicator:
        """The place of this process, created at the first call."""
        if not _worlds:
            _worlds.append(_World(self.timeout))
        return _worlds[0]


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


_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_gloos: list[_Gloo] = []


@attrs.frozen(kw_only=True)
class Torch(ProcessGroup):
    """Connects the processes that torchrun, Slurm, Ray Train or Spark's TorchDistributor started.

    The processes communicate through gloo. If the program has already initialized a process group,
    ortflex uses this group.

    Raises:
        ValueError: ``timeout`` is not positive.

    >>> Torch(timeout=60.0).describe()
    {'name': 'torch', 'timeout': 60.0}

    Source: torch.distributed.
    """

    name: ClassVar[str] = "torch"
    stability = "experimental"
    launch: ClassVar[str] = "torchrun --nproc-per-node 4 -m"

    timeout: float = setting(
        default=1800.0,
        validator=number(gt=0),
        help="the number of seconds to wait for the other processes, at the start and for every message",
    )

    @classmethod
    def unavailable(cls, environ: Mapping[str, str]) -> list[str]:
        """Reasons why this process does not belong to a group of torch.distributed."""
        if importlib.util.find_spec("torch") is None:
            return [f"torch is not installed: {install_command('distributed')}"]
        if _initialized():
            return []
        missing = [name for name in _TORCH_VARIABLES if not environ.get(name)]
        if len(missing) == len(_TORCH_VARIABLES):
            return [
                "this process was not started by torchrun or another launcher of torch.distributed"
            ]
        if missing:
            found = [name for name in _TORCH_VARIABLES if name not in missing]
            return [f"the launcher set {', '.join(found)}, but not {', '.join(missing)}"]
        wrong = [name for name in ("RANK", "WORLD_SIZE") if not environ[name].isdigit()]
        return [f"{name} is {environ[name]!r}, expected a number" for name in wrong]

    def join(self) -> Communicator:
        """The place of this process, created at the first call."""
        if not _gloos:
            _gloos.append(_Gloo(self.timeout))
        return _gloos[0]


def _initialized() -> bool:
    """Whether the program has a group; torch is not imported to ask for it."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


class _Gloo:
    """A place in the group of torch.distributed (see :class:`ortflex_core.Communicator`)."""

    def __init__(self, timeout: float) -> None:
        import torch
        import torch.distributed

        self._torch, self._distributed = torch, torch.distributed
        self._timeout, limit = timeout, timedelta(seconds=timeout)
        self._group = None
        if not _initialized():
            try:
                self._distributed.init_process_group("gloo", timeout=limit)
            except (RuntimeError, ValueError) as error:
                raise OrtflexError(
                    f"the processes of this training could not connect: {error}. Start WORLD_SIZE "
                    "processes with the same MASTER_ADDR and MASTER_PORT"
                ) from error
            atexit.register(self.close)
        elif self._distributed.get_backend() != "gloo":  # the program itself trains on GPUs
            self._group = self._distributed.new_group(backend="gloo", timeout=limit)
        self.rank: int = self._distributed.get_rank()
        self.size: int = self._distributed.get_world_size()
        self._received: list[Any] = []

    def all_gather(self, array: Array) -> list[Array]:
        if not len(array):
            return [array] * self.size
        if not self._received or len(self._received[0]) != len(array):
            self._received = [
                self._torch.empty(len(array), dtype=self._torch.uint8) for _ in range(self.size)
            ]
        given = self._torch.from_numpy(array if array.flags.writeable else np.array(array))
        try:
            # torch.distributed.all_gather does the same after checks that take a fifth of its time.
            group = self._group or self._distributed.group.WORLD
            group.allgather([self._received], [given]).wait()
        except RuntimeError as error:
            if _TIMED_OUT.search(str(error)):
                raise TimeoutError(f"no message within {self._timeout:g} s") from error
            raise
        return [tensor.numpy() for tensor in self._received]

    def close(self) -> None:
        if self in _gloos:
            _gloos.remove(self)
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group(self._group)
