"""The memory that this process can still get, and graphs that need more.

Linux gives out more memory than there is and later ends a process that uses it, without a message. So the
tensors of a graph are compared with what the machine, the control group of a container and the limits of
the process leave, before the graph runs.

Source: man 5 proc (MemAvailable, VmSize), man 2 getrlimit; the kernel's documentation of control groups
(memory.max and memory.current of version 2, memory.limit_in_bytes and memory.usage_in_bytes of version 1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.runtime import liveness, recompute
from ortflex_core.kernel.errors import OrtflexError

_log = logging.getLogger("ortflex")
_CERTAIN = 2
"""A graph whose estimate is this multiple of the memory is refused; a smaller excess is a warning.

The order in which onnxruntime runs nodes is not that of the file; estimates of 1.6 times were measured.
XLA, which fuses nodes, needed 0.6 to 1.3 times the estimate, OpenVINO 1.6 to 1.9 times.
"""
_SMALL = 2**26
_GROUPS = (  # the folder, the limit, what is used, the line of memory.stat with what the kernel can free
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available(root: Path = Path("/")) -> int | None:
    """The bytes that this process can still get; None where the system does not say it, as on Windows.

    ``root`` is the folder with ``proc`` and ``sys``.
    """
    found = [*_of_machine(root), *_of_groups(root), *_of_process(root)]
    return max(0, min(found)) if found else None


def check(name: str, most: int, peak: Callable[[], int]) -> None:
    """Refuse a graph whose tensors cannot be in memory, and warn of one where this is likely.

    ``peak`` estimates the bytes of the tensors that are alive at the same time; it is not called if
    ``most`` bytes, which the graph cannot exceed, are few.
    """
    if most < _SMALL or (left := available()) is None or most <= left or (need := peak()) <= left:
        return
    text = (
        f"the {name} graph needs about {need / 2**20:,.0f} MiB for its tensors, but this process can get "
        f"{left / 2**20:,.0f} MiB. A smaller batch_size needs less, with accumulate= for the same step; so "
        "does recompute=True. `ortflex check MODEL --memory` lists the largest tensors"
    )
    if need > _CERTAIN * left:
        raise OrtflexError(text)
    _log.warning("%s", text)


def check_programs(programs: Mapping[str, Program | bytes]) -> None:
    """Refuse programs as :func:`check` does, for any compiler; graphs that are bytes are not examined."""
    for name, program in programs.items():
        if isinstance(program, Program):
            check(name, sum(program.sizes.values()), partial(_peak, program))


def _peak(program: Program) -> int:
    """The bytes of the tensors of a program that are alive at the same time, in the order of the file."""
    nodes = list(recompute.repeat_forward(program).graph.node)
    known = recompute.with_copies(liveness.completed(nodes, program.sizes), nodes)
    return liveness.peak(nodes, known, {o.name for o in program.outputs}).size


def _of_machine(root: Path) -> Iterator[int]:
    lines = _table(root / "proc/meminfo")
    if "MemAvailable" in lines:
        yield lines["MemAvailable"] * 1024 + lines.get("SwapFree", 0) * 1024


def _of_process(root: Path) -> Iterator[int]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft - _table(root / "proc/self/status").get("VmSize", 0) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """What the control groups of the process leave; a container sees its own group as the root."""
    lines = _lines(root / "proc/self/cgroup")
    for folder, limit, used, freed in _GROUPS:
        groups = [p for _, kinds, p in lines if folder in kinds.split(",")]
        inner = PurePosixPath(groups[0] if groups else "/")
        for group in (inner, *inner.parents):
            place = root / "sys/fs/cgroup" / folder / str(group).lstrip("/")
            most, now = _number(place / limit), _number(place / used)
            if most is not None and now is not None:
                yield most - now + _table(place / "memory.stat", " ").get(freed, 0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[list[str]]:
    return [parts for line in _text(path).splitlines() if len(parts := line.split(":", 2)) == 3]


def _table(path: Path, mark: str = ":") -> dict[str, int]:
    """The numbers of a file with lines like ``VmSize:  5 kB``."""
    pairs = (line.partition(mark) for line in _text(path).splitlines())
    return {k: int(v.split()[0]) for k, _, v in pairs if v.split()[:1] and v.split()[0].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
