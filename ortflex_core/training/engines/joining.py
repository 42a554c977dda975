"""The process group of a run: the one that the user names, or the one of the launcher."""

from __future__ import annotations

import os
from typing import Any

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.engine_protocols import ProcessGroup
from ortflex_core.kernel.errors import ConfigError, Unsupported
from ortflex_core.kernel.registry import Plugins
from ortflex_core.training.engines.peers import Peers

_MEMBERS = ("rank", "size", "all_gather", "close")


def join(plugins: Plugins, spec: Any) -> Peers | None:
    """Join the group of a spec; None if one process trains.

    Raises:
        ConfigError: no launcher started this process, or it did not set all required variables.
        OrtflexError: the group cannot be joined.
    """
    if spec is None:
        return None
    group = _of_launcher(plugins) if spec == "auto" else plugins.component("process_groups", spec)
    if spec != "auto" and (reasons := _reasons(group)):
        raise ConfigError(f"distributed: {'; '.join(reasons)}. {_command(group)}")
    with calling(group, "join"):
        communicator = group.join()
    if missing := [name for name in _MEMBERS if not hasattr(communicator, name)]:
        wanted = f"a Communicator; it has no {', '.join(missing)}"
        raise calls.wrong(group, "join", communicator, wanted)
    return Peers(communicator) if communicator.size > 1 else None


def _of_launcher(plugins: Plugins) -> ProcessGroup:
    """The group that this process was started in."""
    available, lines = [], []
    for name, cls in plugins["process_groups"].classes():
        reasons = cls.unavailable(os.environ)
        if not reasons:
            available.append(name)
        lines.append(f"  {name}: {'; '.join(reasons)}. {_command(cls)}")
    if not available:
        raise ConfigError(
            "distributed='auto': this process was not started by a launcher of several processes:\n"
            + "\n".join(lines)
        )
    if len(available) > 1:
        raise ConfigError(
            "distributed='auto': several process groups are possible here, "
            f"{', '.join(available)}; name one"
        )
    group: ProcessGroup = plugins.component("process_groups", available[0])
    return group


def _reasons(group: ProcessGroup) -> list[str]:
    with calling(group, "unavailable"):
        reasons: Any = type(group).unavailable(os.environ)
    if not isinstance(reasons, list) or not all(isinstance(r, str) for r in reasons):
        raise calls.wrong(group, "unavailable", reasons, "a list of reasons")
    return list(reasons)


def _command(group: Any) -> str:
    launch = group.launch
    return f"Start it with: {launch} ortflex train train.toml" if launch else ""


def share(total: int, peers: Peers | None) -> int:
    """The batches per step of each process, from the number of all processes together."""
    size = 1 if peers is None else peers.size
    if total % size:
        raise Unsupported(
            f"a step of {total} batches cannot be divided among {size} processes; use a number of "
            f"processes that divides {total}"
        )
    return total // size
