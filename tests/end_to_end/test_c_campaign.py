"""A sample of the campaign of :mod:`.c_campaign`: the bits of a step with every compiler that is here."""

from __future__ import annotations

import shutil

import pytest

from ortflex_plugins.c import compiler
from tests.end_to_end import c_campaign

pytestmark = [
    pytest.mark.once,
    pytest.mark.slow,
    pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle())),
]
BUILDS = tuple(b for b in c_campaign.BUILDS if shutil.which(b[0]))


@pytest.mark.skipif(not BUILDS, reason="neither gcc nor clang is installed")
def test_a_step_has_the_same_bits_with_every_compiler_and_no_finding() -> None:
    assert c_campaign.check(1, 0, BUILDS) == []


@pytest.mark.skipif(not BUILDS, reason="neither gcc nor clang is installed")
def test_another_cost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file for the second width of vectors adds to the cost."""
    wide = c_campaign.MACHINES[-1]
    real = c_campaign.run
    seen = []

    def run(case: c_campaign.Case, *given: object) -> object:
        source = case.source
        if seen:
            source = source.replace("costs[0] = (double)", "costs[0] = 1e-3 + (double)")
        seen.append(case)
        return real(c_campaign.Case(case.label, source, case.data), *given)  # type: ignore[arg-type]

    monkeypatch.setattr(c_campaign, "run", run)
    assert c_campaign.check(1, 0, BUILDS[:1], (c_campaign.MACHINES[0], wide))
