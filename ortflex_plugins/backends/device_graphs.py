"""Runs that a device records once and replays: CUDA graphs of the step.

A short step on a GPU is bound by the launches of its kernels. A device graph replaces them by one
launch. It keeps the addresses and shapes of the recorded run, as the bindings of a plan do: each
direction of a plan has a separate recording.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from ortflex_core import Device, GraphError, OrtflexError, Program, new_session

_log = logging.getLogger("ortflex")

Wanted = bool | Literal["auto"]
PLAIN = -1
"""The number of a run that is not recorded."""
_MOST = 16
"""The largest number of recordings of an engine; batches of further shapes run without one."""


class DeviceGraphs:
    """The recordings of an engine.

    Args:
        device: the device that holds all tensors.
        wanted: False records nothing. If a step cannot be recorded, ``"auto"`` runs it without a
            recording, and True raises an error.
        threads: the number of threads of the sessions.

    Attributes:
        reason: why runs are not recorded; None while they are.
    """

    def __init__(self, device: Device, wanted: Wanted, threads: int) -> None:
        self._device, self._wanted, self._threads = device, wanted, threads
        self._providers = device.graph_providers() if wanted is not False else None
        self._sessions: dict[str, Any] = {}
        self._used = 0
        self.reason: str | None = None
        if wanted is False:
            self.reason = "cuda_graph=False"
        elif self._providers is None:
            self.reason = f"the device {device.name} cannot record runs"

    def session(self, program: Program) -> Any | None:
        """A session that records; None if recording is not possible.

        It is not shared between engines: a recording has the addresses of one engine's memory.

        Raises:
            GraphError: the graph cannot be recorded, and ``wanted`` is True.
        """
        if self.reason is not None or self._providers is None:
            return None
        if program.key not in self._sessions:
            try:
                session = new_session(
                    program, self._device, self._threads, providers=self._providers
                )
                _check(session, self._providers)
            except OrtflexError as error:
                self.refuse(error)
                return None
            self._sessions[program.key] = session
        return self._sessions[program.key]

    def number(self) -> int:
        """A number for the recording of a binding; :data:`PLAIN` after the sixteenth."""
        if self._used == _MOST:
            return PLAIN
        self._used += 1
        return self._used

    def refuse(self, error: OrtflexError) -> None:
        """Stop recording because of an error; raises it if recordings are required."""
        if self._wanted is True:
            raise GraphError(
                f"cuda_graph=True: the step cannot be recorded: {error}. With cuda_graph='auto' it runs "
                "without a recording"
            ) from error
        self.reason = str(error)
        _log.info("steps run without CUDA graphs: %s", self.reason)


def _check(session: Any, providers: list[Any]) -> None:
    """Raise GraphError if onnxruntime made the session with other options than these.

    Its Python class does so silently if a provider fails.
    """
    actual = session.get_provider_options()
    for name, options in providers:
        for key, value in options.items():
            value_used = str(actual.get(name, {}).get(key))
            if value_used != str(value):
                raise GraphError(
                    f"onnxruntime made the session with {key}={value_used} instead of {value} on {name}"
                )
