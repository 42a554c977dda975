"""Two backends of known speed, ``first`` and ``second``: ``fused`` with pauses and planned failures.

``auto`` prefers ``first``.
"""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

import attrs

from ortflex_core import Plugins
from ortflex_plugins.backends.fused import FusedBackend
from tests.training import with_backends

PAUSE: dict[str, float] = {}
"""Seconds that every run of a backend takes longer."""
BUILT: list[str] = []
FAILURES: dict[str, tuple[str, BaseException]] = {}


class PacedEngine:
    def __init__(self, name: str, engine: Any) -> None:
        self._name, self._engine = name, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, batches: Any, rates: Any) -> Any:
        when, error = FAILURES.get(self._name, ("", None))
        if when == "run" and error is not None:
            raise error
        time.sleep(PAUSE.get(self._name, 0.0))
        losses = self._engine.run(batches, rates)
        return Nothing(len(rates)) if when == "nan" else losses


class Nothing:
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def read(self) -> Any:
        return [(math.nan, 0.0)] * self._steps


@attrs.frozen(kw_only=True)
class Paced(FusedBackend):
    def supports(self, problem: Any, device: Any, runtime: Any) -> list[str]:
        when, error = FAILURES.get(self.name, ("", None))
        if when == "refuse":
            return [str(error)]
        return super().supports(problem, device, runtime)

    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        when, error = FAILURES.get(self.name, ("", None))
        if when == "build" and error is not None:
            raise error
        BUILT.append(self.name)
        return PacedEngine(self.name, FusedBackend(steps_per_run=2).build(problem, device, runtime))


@attrs.frozen(kw_only=True)
class First(Paced):
    name: ClassVar[str] = "first"
    priority: ClassVar[int] = 50


@attrs.frozen(kw_only=True)
class Second(Paced):
    name: ClassVar[str] = "second"
    priority: ClassVar[int] = 40


def paced() -> Plugins:
    return with_backends(First, Second)
