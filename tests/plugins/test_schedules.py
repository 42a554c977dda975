"""Schedules beside torch's schedulers and scikit-learn's estimators, and those made of others."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import ConfigError, Plugins, Progress, Recipe, Schedule, ScheduleContext, Trainer
from ortflex_plugins.schedules.cosine import Cosine, CosineRestarts, OneCycle
from ortflex_plugins.schedules.decay import (
    Constant,
    Exponential,
    InverseScaling,
    MultiStep,
    Optimal,
    Polynomial,
    StepDecay,
)
from ortflex_plugins.schedules.sequential import Chained, Sequential, Warmup
from tests import models
from tests.training import make, plugins, regression


def at(by: str, time: int, total: int | None = None) -> Progress:
    """The progress at a time of one unit; the other units stand elsewhere."""
    elsewhere = Progress(step=977, epoch=991, rows=997)
    if by == "epoch":
        return attrs.evolve(elsewhere, epoch=time, epochs=total)
    if by == "rows":
        return attrs.evolve(elsewhere, rows=time, epochs=1, rows_per_epoch=total)
    return attrs.evolve(elsewhere, step=time, epochs=1, steps_per_epoch=total)


UNITS = ["step", "epoch", "rows"]


TWINS = [
    (StepDecay(size=4, gamma=0.3), "StepLR", (4,), {"gamma": 0.3}),
    (Exponential(gamma=0.8), "ExponentialLR", (0.8,), {}),
    (Cosine(period=24, minimum=0.02), "CosineAnnealingLR", (24,), {"eta_min": 0.02}),
    (Cosine(), "CosineAnnealingLR", (20,), {}),
    # Past its period it rises again.
    (Cosine(period=8, minimum=0.02), "CosineAnnealingLR", (8,), {"eta_min": 0.02}),
    (MultiStep(milestones=(3, 5, 11), gamma=0.5), "MultiStepLR", ([3, 5, 11],), {"gamma": 0.5}),
    (Polynomial(), "PolynomialLR", (20,), {}),
    (Polynomial(length=8, power=2.5), "PolynomialLR", (8,), {"power": 2.5}),
    (CosineRestarts(period=4), "CosineAnnealingWarmRestarts", (4,), {}),
    (
        CosineRestarts(period=3, factor=2, minimum=0.01),
        *("CosineAnnealingWarmRestarts", (3,), {"T_mult": 2, "eta_min": 0.01}),
    ),
    (OneCycle(), "OneCycleLR", (0.3,), {"total_steps": 20}),
    (
        OneCycle(length=20, up=0.45, start_divisor=5, end_divisor=10),
        *("OneCycleLR", (0.3, 20)),
        {"pct_start": 0.45, "div_factor": 5, "final_div_factor": 10},
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


@pytest.mark.parametrize("by", UNITS)
@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        (Optimal(alpha=0.01, t0=7.5), lambda b, t: 1 / (0.01 * (7.5 + t))),
        (InverseScaling(power=0.5, scale=30), lambda b, t: b / math.sqrt(30 * t + 1)),
    ],
)
def test_rates_are_the_formula_s_in_every_unit(schedule: Schedule, formula: Any, by: Any) -> None:
    schedule = attrs.evolve(schedule, by=by)
    for time in range(21):
        rate = schedule.rate(0.3, at(by, time, total=20))
        assert type(rate) is float
        assert rate == pytest.approx(formula(0.3, time), rel=1e-13, abs=1e-16)


def replay(schedule: Schedule, x: Any, slope: Any, epochs: int, base: float) -> Any:
    """Gradient descent row by row without intercept, at our rates."""
    weight = np.zeros(x.shape[1])
    for row in range(epochs * len(x)):
        k = row % len(x)
        rate = schedule.rate(base, Progress(step=row, rows=row))
        weight -= rate * slope(x[k] @ weight, k) * x[k]
    return weight


# Row by row, as it is replayed.
PLAINLY: dict[str, Any] = {"penalty": None, "fit_intercept": False, "shuffle": False}
PLAINLY |= {"max_iter": 3, "tol": None}


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
    theirs = linear_model.SGDRegressor(learning_rate=name, eta0=0.02, **PLAINLY, **options)
    theirs.fit(x, y)
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
    options = {"loss": "log_loss", "learning_rate": name, "eta0": 0.1, **PLAINLY, **options}
    theirs = linear_model.SGDClassifier(**options).fit(x, y)
    assert_allclose(weight, theirs.coef_[0], rtol=1e-11)


def test_invscaling_by_epoch_is_the_perceptron_s() -> None:
    neural_network = pytest.importorskip("sklearn.neural_network")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    rates = {"learning_rate": "invscaling", "learning_rate_init": 0.1, "power_t": 0.5}
    descent = {
        "hidden_layer_sizes": (),
        "solver": "sgd",
        "alpha": 0,
        "momentum": 0,
        "batch_size": 30,
        "shuffle": False,
    }
    theirs = neural_network.MLPRegressor(random_state=0, **rates, **descent)
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


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Optimal(), r"optimal: t0 depends on the loss .* pass t0="),
        (Cosine(by="rows"), r"cosine: period=None .* units of 'rows'.*set period="),
        (Polynomial(), "length=None is the length of the run in units of"),
        (OneCycle(), "length=None is the length of the run in units of"),
    ],
)
def test_what_a_schedule_has_to_know_first_is_named(schedule: Schedule, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        schedule.rate(0.1, Progress(epochs=3))


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


def test_after_its_length_the_last_rate_stays() -> None:
    assert Polynomial(length=4).rate(0.3, Progress(step=9)) == 0
    cycle = OneCycle(length=4)
    last = cycle.rate(0.3, Progress(step=3))
    assert cycle.rate(0.3, Progress(step=9)) == last == pytest.approx(0.3 / 25e4)


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        (Warmup, {"schedule": "cosine"}, "Warmup.schedule must be a schedule, got 'cosine'"),
        (Warmup, {"schedule": Cosine(by="epoch")}, "'step' and its schedule 'cosine' by 'epoch'"),
        (Warmup, {"length": 2.5}, "Warmup.length must be a whole number, got 2.5"),
        (Warmup, {"start": 2}, "Warmup.start must be a number >= 0 and <= 1, got 2"),
        (Optimal, {"alpha": 0}, "Optimal.alpha must be a number > 0, got 0"),
        (Cosine, {"period": 0}, "Cosine.period must be a number > 0, got 0"),
        (StepDecay, {"size": -1}, "StepDecay.size must be a number > 0, got -1"),
        (Constant, {"by": "batch"}, "Constant.by must be one of 'step', 'epoch', 'rows'"),
        (OneCycle, {"up": 1}, "OneCycle.up must be a number > 0 and < 1, got 1"),
        (CosineRestarts, {"period": 0}, "CosineRestarts.period must be a number >= 1, got 0"),
        (Chained, {"schedules": ("cosine",)}, "Chained.schedules must be schedules, got 'cosine'"),
    ],
)
def test_parameters_are_checked(schedule: Any, options: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError, ConfigError), match=text):
        schedule(**options)


@pytest.mark.parametrize("milestones", [3, "345", {3: 0.1}])
def test_milestones_are_a_list(milestones: Any) -> None:
    with pytest.raises(ConfigError, match=r"milestones: expected a list of integers, got"):
        make(models.linear(), schedule={"name": "multi_step", "milestones": milestones})


def by(schedule: Any, unit: Any) -> Any:
    """The schedule and its parts, counting by a unit."""
    changes: dict[str, Any] = {"by": unit}
    if hasattr(schedule, "schedules"):
        changes["schedules"] = tuple(by(s, unit) for s in schedule.schedules)
    if hasattr(schedule, "schedule"):
        changes["schedule"] = by(schedule.schedule, unit)
    return attrs.evolve(schedule, **changes)


FALLS = MultiStep(milestones=(7, 12), gamma=0.3)
CHAINS = {
    "warm-up, then cosine": (
        Sequential(schedules=(Warmup(length=5, start=0.1), Cosine()), milestones=(5,)),
        lambda t, o: t.SequentialLR(
            o, [t.LinearLR(o, 0.1, total_iters=5), t.CosineAnnealingLR(o, 15)], [5]
        ),
    ),
    "three": (
        Sequential(
            schedules=(Exponential(gamma=0.9), Polynomial(), StepDecay(size=2, gamma=0.5)),
            milestones=(4, 9),
        ),
        lambda t, o: t.SequentialLR(
            o, [t.ExponentialLR(o, 0.9), t.PolynomialLR(o, 5), t.StepLR(o, 2, 0.5)], [4, 9]
        ),
    ),
    "at the same time": (
        Chained(schedules=(Warmup(length=4, start=0.2), Exponential(gamma=0.95), FALLS)),
        lambda t, o: t.ChainedScheduler(
            [
                *(t.LinearLR(o, 0.2, total_iters=4), t.ExponentialLR(o, 0.95)),
                t.MultiStepLR(o, [7, 12], 0.3),
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_torch_s(name: str, torch: Any) -> None:
    schedule, build = CHAINS[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = build(torch.optim.lr_scheduler, optimizer)
    for time in range(20):
        for unit in UNITS:
            rate = by(schedule, unit).rate(0.3, at(unit, time, total=20))
            assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        theirs.step()


def test_a_chain_comes_out_of_a_file_and_goes_back_into_it(tmp_path: Any) -> None:
    (tmp_path / "model.onnx").write_bytes(models.mlp().SerializeToString())
    x, y = regression(features=6)
    np.savez(tmp_path / "data.npz", X=x, y=y)
    text = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 2
[schedule]
name = "sequential"
milestones = [3]
schedules = [{ name = "warmup", length = 3, start = 0.5 }, "cosine"]
"""
    (tmp_path / "train.toml").write_text(text)
    recipe = Recipe.load(tmp_path / "train.toml", plugins=plugins())
    wanted = Sequential(schedules=(Warmup(length=3, start=0.5), Cosine()), milestones=(3,))
    trainer = Trainer.from_recipe(recipe, plugins())
    assert trainer.schedule == wanted
    (tmp_path / "again.toml").write_text(recipe.resolved(plugins()).to_toml(tmp_path))
    again = Recipe.load(tmp_path / "again.toml", plugins=plugins())
    assert Trainer.from_recipe(again, plugins()).schedule == wanted


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            {"schedules": ["cosin"], "milestones": []},
            r"schedule\.schedules\[0\]: unknown schedule 'cosin'; did you mean 'cosine'",
        ),
        (
            {"schedules": ["cosine", {"name": "warmup", "lenght": 3}], "milestones": [3]},
            r"schedule\.schedules\[1\]\.lenght: unknown parameter; did you mean 'length'",
        ),
        ({"schedules": "cosine", "milestones": []}, "schedules: expected a list of schedules, got"),
        ({"schedules": [], "milestones": []}, "must be at least one schedule, got none"),
        ({"schedules": ["cosine", "step"], "milestones": []}, "must be 1, one fewer than sched"),
        ({"schedules": ["step"] * 3, "milestones": [4, 4]}, r"must rise, got \(4, 4\)"),
        (
            {"schedules": [{"name": "cosine", "by": "epoch"}], "milestones": []},
            "sequential counts by 'step' and its schedule 'cosine' by 'epoch'",
        ),
    ],
)
def test_a_wrong_chain_is_named(table: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, LookupError), match=text):
        make(models.linear(), schedule={"name": "sequential", **table})


def test_a_checkpoint_knows_whose_schedules_a_chain_is_made_of(tmp_path: Any) -> None:
    pytest.importorskip("ortflex_example")
    # Gradient families take part in every training.
    entries = [entry for registry in plugins() for entry in registry]
    found = Plugins(e for e in entries if e.distribution == "ortflex" or e.kind == "schedules")
    (name,) = (e.name for e in found["schedules"] if e.distribution == "ortflex-example")
    chain = {"name": "chained", "schedules": ["cosine", name]}
    trainer = make(models.linear(), schedule=chain, plugins=found, backend="auto")
    folder = trainer.save(tmp_path / "c")
    record = json.loads((folder / "checkpoint.json").read_text())
    assert set(record["versions"]) == {"ortflex", "ortflex-example"}
