"""The written cases and the draws of all families; samples of the draws, the same each time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hypothesis import HealthCheck, Phase, given, settings

from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import Draws


def _families(kind: str) -> list[ModuleType]:
    found = sorted(Path(__file__).parent.glob(f"gradient_{kind}*.py"))
    return [importlib.import_module(f"tests.plugins.{path.stem}") for path in found]


CASES: list[Case] = [case for family in _families("cases") for case in family.CASES]
"""What is written: where draws do not reach, and what was wrong once."""

DRAWS = Draws()
for _family in _families("draws_"):
    assert not set(DRAWS) & set(_family.DRAWS)
    DRAWS.update(_family.DRAWS)


@functools.cache
def sample(operator: str, count: int) -> Sequence[Case]:
    """The first draws of an operator."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=DRAWS[operator])
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def every_case(count: int) -> list[Case]:
    """All that are written, and ``count`` draws of each operator."""
    return [*CASES, *(case for name in sorted(DRAWS) for case in sample(name, count))]
