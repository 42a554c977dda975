"""More schedules against torch's schedulers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from ortflex_core.errors import ConfigError
from ortflex_core.protocols import Schedule
from ortflex_core.types import Progress
from ortflex_plugins.schedules.cosine_restarts import CosineRestarts
from ortflex_plugins.schedules.multi_step import MultiStep
from ortflex_plugins.schedules.one_cycle import OneCycle
from ortflex_plugins.schedules.polynomial import Polynomial
from tests.plugins.test_schedules import UNITS, at

TWINS = [
    (MultiStep(milestones=(3, 5, 11), gamma=0.5), "MultiStepLR", ([3, 5, 11],), {"gamma": 0.5}),
    (Polynomial(), "PolynomialLR", (20,), {}),
    (Polynomial(length=8, power=2.5), "PolynomialLR", (8,), {"power": 2.5}),
    (CosineRestarts(period=4), "CosineAnnealingWarmRestarts", (4,), {}),
    (
        CosineRestarts(period=3, factor=2, minimum=0.01),
        "CosineAnnealingWarmRestarts",
        (3,),
        {"T_mult": 2, "eta_min": 0.01},
    ),
    (OneCycle(), "OneCycleLR", (0.3,), {"total_steps": 20}),
    (
        OneCycle(length=20, up=0.45, start_divisor=5, end_divisor=10),
        "OneCycleLR",
        (0.3,),
        {"total_steps": 20, "pct_start": 0.45, "div_factor": 5, "final_div_factor": 10},
    ),
]


@pytest.mark.parametrize(("schedule", "twin", "arguments", "options"), TWINS)
def test_rates_are_torch_s(schedule: Schedule, twin: str, arguments: Any, options: Any) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = getattr(torch.optim.lr_scheduler, twin)(optimizer, *arguments, **options)
    for time in range(20):
        for by in UNITS:
            ours = attrs.evolve(schedule, by=by)
            rate = ours.rate(0.3, at(by, time, total=20))
            assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        if time < 19:
            theirs.step()


def test_after_its_length_the_last_rate_stays() -> None:
    assert Polynomial(length=4).rate(0.3, Progress(step=9)) == 0
    cycle = OneCycle(length=4)
    last = cycle.rate(0.3, Progress(step=3))
    assert cycle.rate(0.3, Progress(step=9)) == last == pytest.approx(0.3 / 25e4)


@pytest.mark.parametrize("schedule", [Polynomial(), OneCycle()])
def test_an_unknown_length_is_an_error(schedule: Schedule) -> None:
    with pytest.raises(ConfigError, match="length=None is the length of the training in units of"):
        schedule.rate(0.1, Progress())


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"OneCycle.up must be a number > 0 and < 1, got 1"):
        OneCycle(up=1)
    with pytest.raises(ValueError, match=r"CosineRestarts.period must be a number >= 1, got 0"):
        CosineRestarts(period=0)
