"""Schedules against their formulas, scikit-learn's estimators (really run) and torch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import ConfigError, Progress, Schedule, ScheduleContext
from ortflex_plugins.schedules.cosine import Cosine
from ortflex_plugins.schedules.decay import (
    Constant,
    Exponential,
    InverseScaling,
    Optimal,
    StepDecay,
)
from ortflex_plugins.schedules.sequential import Warmup


def at(by: str, time: int, total: int | None = None) -> Progress:
    """The progress at a time of one unit; the other units stand elsewhere."""
    elsewhere = Progress(step=977, epoch=991, rows=997)
    if by == "epoch":
        return attrs.evolve(elsewhere, epoch=time, epochs=total)
    if by == "rows":
        return attrs.evolve(elsewhere, rows=time, epochs=1, rows_per_epoch=total)
    return attrs.evolve(elsewhere, step=time, epochs=1, steps_per_epoch=total)


UNITS = ["step", "epoch", "rows"]


@pytest.mark.parametrize("by", UNITS)
@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (Constant(), lambda b, t: b),
        (Optimal(alpha=0.01, t0=7.5), lambda b, t: 1 / (0.01 * (7.5 + t))),
        (InverseScaling(), lambda b, t: b / (t + 1) ** 0.25),
        (InverseScaling(power=0.5, scale=30), lambda b, t: b / math.sqrt(30 * t + 1)),
        (StepDecay(size=3, gamma=0.2), lambda b, t: b * 0.2 ** math.floor(t / 3)),
        (Exponential(gamma=0.9), lambda b, t: b * 0.9**t),
        (
            Cosine(period=8, minimum=0.01),
            lambda b, t: 0.01 + (b - 0.01) / 2 * (1 + math.cos(math.pi * t / 8)),
        ),
        (Cosine(), lambda b, t: b / 2 * (1 + math.cos(math.pi * t / 20))),
    ],
)
def test_rates_are_the_formula_s_in_every_unit(schedule: Schedule, formula: Any, by: Any) -> None:
    schedule = attrs.evolve(schedule, by=by)
    for time in range(21):
        rate = schedule.rate(0.3, at(by, time, total=20))
        assert type(rate) is float
        assert rate == pytest.approx(formula(0.3, time), rel=1e-13, abs=1e-16)


def test_units_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Constant.by must be one of 'step', 'epoch', 'rows'"):
        Constant(by="batch")  # type: ignore[arg-type]


# scikit-learn ------------------------------------------------------------------------------------


def replay(schedule: Schedule, x: Any, slope: Any, epochs: int, base: float) -> Any:
    """Gradient descent row by row without intercept, at our rates."""
    weight = np.zeros(x.shape[1])
    for row in range(epochs * len(x)):
        k = row % len(x)
        rate = schedule.rate(base, Progress(step=row, rows=row))
        weight -= rate * slope(x[k] @ weight, k) * x[k]
    return weight


@pytest.mark.parametrize(
    ("name", "ours", "options"),
    [
        ("invscaling", InverseScaling(by="rows"), {}),
        ("invscaling", InverseScaling(by="rows", power=0.5), {"power_t": 0.5}),
        ("optimal", Optimal(by="rows", alpha=0.01), {"alpha": 0.01}),
        ("optimal", Optimal(by="rows", alpha=0.5), {"alpha": 0.5}),
        ("constant", Constant(by="rows"), {}),
    ],
)
def test_rates_are_sgd_regressor_s(name: str, ours: Schedule, options: Any) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)) * 0.3, rng.normal(size=40)
    # scikit-learn's squared error is ½ (p − y)².
    ours = ours.bind(ScheduleContext(slope=lambda score, label: score - label))
    weight = replay(ours, x, lambda p, k: p - y[k], epochs=3, base=0.02)
    theirs = linear_model.SGDRegressor(
        learning_rate=name,
        eta0=0.02,
        penalty=None,
        fit_intercept=False,
        shuffle=False,
        max_iter=3,
        tol=None,
        **options,
    ).fit(x, y)
    assert theirs.t_ == 121
    assert_allclose(weight, theirs.coef_, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "ours", "options"),
    [
        ("optimal", Optimal(by="rows"), {}),
        ("optimal", Optimal(by="rows", alpha=0.05), {"alpha": 0.05}),
        ("invscaling", InverseScaling(by="rows", power=0.5), {"power_t": 0.5}),
    ],
)
def test_rates_are_sgd_classifier_s(name: str, ours: Schedule, options: Any) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)) * 0.3, rng.integers(0, 2, 40)

    def slope(score: float, label: float) -> float:
        return 1 / (1 + math.exp(-score)) - label

    ours = ours.bind(ScheduleContext(slope=slope))
    weight = replay(ours, x, lambda p, k: slope(p, y[k]), epochs=3, base=0.1)
    theirs = linear_model.SGDClassifier(
        loss="log_loss",
        learning_rate=name,
        eta0=0.1,
        penalty=None,
        fit_intercept=False,
        shuffle=False,
        max_iter=3,
        tol=None,
        **options,
    ).fit(x, y)
    assert_allclose(weight, theirs.coef_[0], rtol=1e-11)


def test_invscaling_by_epoch_is_the_perceptron_s() -> None:
    neural_network = pytest.importorskip("sklearn.neural_network")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    theirs = neural_network.MLPRegressor(
        hidden_layer_sizes=(),
        solver="sgd",
        learning_rate="invscaling",
        learning_rate_init=0.1,
        power_t=0.5,
        alpha=0,
        momentum=0,
        batch_size=30,
        shuffle=False,
        random_state=0,
    )
    ours = InverseScaling(by="epoch", power=0.5, scale=len(x))
    assert ours.rate(0.1, Progress(epoch=0)) == 0.1
    theirs.partial_fit(x, y)
    weight, bias = theirs.coefs_[0].copy(), theirs.intercepts_[0].copy()
    for epoch in range(1, 6):
        theirs.partial_fit(x, y)
        error = x @ weight + bias - y[:, None]
        rate = ours.rate(0.1, Progress(step=epoch, epoch=epoch, rows=epoch * 30))
        weight -= rate * x.T @ error / 30
        bias -= rate * error.mean(axis=0)
        assert_allclose(weight, theirs.coefs_[0], rtol=1e-9)


def test_a_steep_loss_makes_optimal_start_lower() -> None:
    asked = []

    def slope(score: float, label: float) -> float:
        asked.append((score, label))
        return 4.0

    alpha = 1e-4
    bound = Optimal(alpha=alpha).bind(ScheduleContext(slope=slope))
    typical = alpha**-0.25
    assert asked == [(pytest.approx(-typical), 1.0)]
    assert bound.rate(123.0, Progress()) == pytest.approx(typical / 4, rel=1e-12)
    assert bound.bind(ScheduleContext(slope=slope)) is bound


def test_optimal_must_be_bound_first() -> None:
    with pytest.raises(ConfigError, match=r"optimal: t0 depends on the loss .* pass t0="):
        Optimal().rate(0.1, Progress())


# torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["step", "exponential", "cosine", "past its period", "warmup"])
def test_rates_are_torch_s(case: str) -> None:
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    ours: Schedule
    if case == "step":
        ours, theirs = StepDecay(size=4, gamma=0.3), schedulers.StepLR(optimizer, 4, gamma=0.3)
    elif case == "exponential":
        ours, theirs = Exponential(gamma=0.8), schedulers.ExponentialLR(optimizer, 0.8)
    elif case == "warmup":
        ours = Warmup(length=5, schedule=Exponential(gamma=0.8))
        first = schedulers.LinearLR(optimizer, total_iters=5)
        second = schedulers.ExponentialLR(optimizer, 0.8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch steps its parts in a way it deprecates
            theirs = schedulers.SequentialLR(optimizer, [first, second], milestones=[5])
    else:
        period = 24 if case == "cosine" else 10
        ours = Cosine(period=period, minimum=0.02)
        theirs = schedulers.CosineAnnealingLR(optimizer, period, eta_min=0.02)
    for step in range(20):
        assert ours.rate(0.1, Progress(step=step)) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-9
        )
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.step()


# Ends and combinations ---------------------------------------------------------------------------


def test_cosine_needs_to_know_how_long_the_training_is() -> None:
    with pytest.raises(ConfigError, match=r"cosine: period=None .* units of 'rows'.*set period="):
        Cosine(by="rows").rate(0.1, Progress(epochs=3))


@pytest.mark.parametrize("by", UNITS)
def test_after_the_warm_up_the_inner_schedule_starts_at_its_own_zero(by: Any) -> None:
    inner = InverseScaling(by=by, power=1)
    schedule = Warmup(by=by, schedule=inner, length=4, start=0.0)
    rates = [schedule.rate(0.4, at(by, t)) for t in range(8)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.2, 0.4 / 3, 0.1])


@pytest.mark.parametrize("by", UNITS)
def test_an_inner_cosine_lasts_what_the_warm_up_leaves(by: Any) -> None:
    schedule = Warmup(by=by, schedule=Cosine(by=by), length=4)
    assert schedule.rate(1.0, at(by, 4, total=14)) == 1.0
    assert schedule.rate(1.0, at(by, 9, total=14)) == pytest.approx(0.5)
    assert schedule.rate(1.0, at(by, 14, total=14)) == pytest.approx(0.0, abs=1e-16)
    # A training shorter than its warm-up has a rate anyway.
    assert schedule.rate(1.0, at(by, 2, total=3)) == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="set period="):
        schedule.rate(1.0, at(by, 2))


def test_a_warm_up_binds_what_it_is_around() -> None:
    schedule = Warmup(schedule=Warmup(schedule=Optimal(alpha=0.01), length=2), length=3)
    bound = schedule.bind(ScheduleContext(slope=lambda score, label: 1.0))
    plain = Optimal(alpha=0.01).bind(ScheduleContext(slope=lambda score, label: 1.0))
    assert bound.rate(0.1, Progress(step=5)) == plain.rate(0.1, Progress(step=0))
    assert bound.rate(0.1, Progress(step=15)) == plain.rate(0.1, Progress(step=10))


def test_a_warm_up_describes_itself_with_its_inner_schedule() -> None:
    described = Warmup(by="epoch", length=2).describe()
    assert described["schedule"] == {"name": "constant", "by": "epoch"}


def test_parameters_are_checked() -> None:
    with pytest.raises(TypeError, match=r"Warmup.schedule must be a schedule, got 'cosine'"):
        Warmup(schedule="cosine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"counts by 'step' and its schedule 'cosine' by 'epoch'"):
        Warmup(schedule=Cosine(by="epoch"))
    with pytest.raises(ValueError, match=r"Warmup.length must be a whole number, got 2.5"):
        Warmup(length=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Warmup.start must be a number >= 0 and <= 1, got 2"):
        Warmup(start=2)
    with pytest.raises(ValueError, match=r"Optimal.alpha must be a number > 0, got 0"):
        Optimal(alpha=0)
    with pytest.raises(ValueError, match=r"Cosine.period must be a number > 0, got 0"):
        Cosine(period=0)
    with pytest.raises(ValueError, match=r"StepDecay.size must be a number > 0, got -1"):
        StepDecay(size=-1)
