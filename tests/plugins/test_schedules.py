"""Schedules beside torch's schedulers and scikit-learn's estimators, and those made of others."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import (
    ConfigError,
    Plugins,
    Progress,
    Recipe,
    Schedule,
    ScheduleContext,
    Trainer,
)
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
from ortflex_plugins.schedules.plateau import Plateau
from ortflex_plugins.schedules.sequential import Chained, Sequential, Warmup
from tests import models
from tests.training import SaveAt, make, plugins, regression, same


def at(by: str, time: int, total: int | None = None) -> Progress:
    """The progress at a time of one unit; the other units stand elsewhere."""
    elsewhere = Progress(step=977, epoch=991, rows=997)
    if by == "epoch":
        return attrs.evolve(elsewhere, epoch=time, epochs=total)
    if by == "rows":
        return attrs.evolve(elsewhere, rows=time, epochs=1, rows_per_epoch=total)
    return attrs.evolve(elsewhere, step=time, epochs=1, steps_per_epoch=total)


UNITS = ["step", "epoch", "rows"]


def by(schedule: Any, unit: Any) -> Any:
    """The schedule and its parts, counting by a unit."""
    changes: dict[str, Any] = {"by": unit}
    if hasattr(schedule, "schedules"):
        changes["schedules"] = tuple(by(s, unit) for s in schedule.schedules)
    if hasattr(schedule, "schedule"):
        changes["schedule"] = by(schedule.schedule, unit)
    return attrs.evolve(schedule, **changes)


FALLS = MultiStep(milestones=(7, 12), gamma=0.3)
CHAINED = Chained(schedules=(Warmup(length=4, start=0.2), Exponential(gamma=0.95), FALLS))
THREE = (Exponential(gamma=0.9), Polynomial(), StepDecay(size=2, gamma=0.5))
# By our schedule: torch's of an optimizer, in a run of n steps.
TWINS: list[tuple[Schedule, Any]] = [
    (Constant(), lambda t, o, n: t.ConstantLR(o, factor=1.0)),
    (StepDecay(size=4, gamma=0.3), lambda t, o, n: t.StepLR(o, 4, 0.3)),
    (Exponential(gamma=0.8), lambda t, o, n: t.ExponentialLR(o, 0.8)),
    (Cosine(period=24, minimum=0.02), lambda t, o, n: t.CosineAnnealingLR(o, 24, 0.02)),
    (Cosine(), lambda t, o, n: t.CosineAnnealingLR(o, n)),
    # Past its period it rises again.
    (Cosine(period=8, minimum=0.02), lambda t, o, n: t.CosineAnnealingLR(o, 8, 0.02)),
    (
        MultiStep(milestones=(3, 5, 11), gamma=0.5),
        lambda t, o, n: t.MultiStepLR(o, [3, 5, 11], 0.5),
    ),
    (Polynomial(), lambda t, o, n: t.PolynomialLR(o, n)),
    (Polynomial(length=8, power=2.5), lambda t, o, n: t.PolynomialLR(o, 8, 2.5)),
    (CosineRestarts(period=4), lambda t, o, n: t.CosineAnnealingWarmRestarts(o, 4)),
    (
        CosineRestarts(period=3, factor=2, minimum=0.01),
        lambda t, o, n: t.CosineAnnealingWarmRestarts(o, 3, 2, 0.01),
    ),
    (OneCycle(), lambda t, o, n: t.OneCycleLR(o, o.defaults["lr"], n)),
    (
        OneCycle(length=60, up=0.45, start_divisor=5, end_divisor=10),
        lambda t, o, n: t.OneCycleLR(
            o, o.defaults["lr"], 60, pct_start=0.45, div_factor=5, final_div_factor=10
        ),
    ),
    (Warmup(length=9), lambda t, o, n: t.LinearLR(o, total_iters=9)),
    (
        Sequential(schedules=(Warmup(length=5, start=0.1), Cosine()), milestones=(5,)),
        lambda t, o, n: t.SequentialLR(
            o, [t.LinearLR(o, 0.1, total_iters=5), t.CosineAnnealingLR(o, n - 5)], [5]
        ),
    ),
    (
        Sequential(schedules=THREE, milestones=(4, 9)),
        lambda t, o, n: t.SequentialLR(
            o, [t.ExponentialLR(o, 0.9), t.PolynomialLR(o, 5), t.StepLR(o, 2, 0.5)], [4, 9]
        ),
    ),
    (
        CHAINED,
        lambda t, o, n: t.ChainedScheduler(
            [
                *(t.LinearLR(o, 0.2, total_iters=4), t.ExponentialLR(o, 0.95)),
                t.MultiStepLR(o, [7, 12], 0.3),
            ]
        ),
    ),
]
of_torch = pytest.mark.parametrize(
    ("schedule", "twin"), TWINS, ids=lambda given: getattr(given, "name", "")
)


@of_torch
def test_rates_are_torch_s(schedule: Schedule, twin: Any, torch: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = twin(torch.optim.lr_scheduler, optimizer, 20)
    for time in range(20):
        for unit in UNITS:
            rate = by(schedule, unit).rate(0.3, at(unit, time, total=20))
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


# scikit-learn's squared error is ½ (p − y)².
SLOPES: dict[str, Any] = {
    "SGDRegressor": lambda score, label: score - label,
    "SGDClassifier": lambda score, label: 1 / (1 + math.exp(-score)) - label,
}


@pytest.mark.parametrize(
    ("kind", "name", "ours", "options"),
    [
        ("SGDRegressor", "invscaling", InverseScaling(by="rows"), {}),
        ("SGDRegressor", "invscaling", InverseScaling(by="rows", power=0.5), {"power_t": 0.5}),
        ("SGDRegressor", "optimal", Optimal(by="rows", alpha=0.01), {"alpha": 0.01}),
        ("SGDRegressor", "optimal", Optimal(by="rows", alpha=0.5), {"alpha": 0.5}),
        ("SGDRegressor", "constant", Constant(by="rows"), {}),
        ("SGDClassifier", "optimal", Optimal(by="rows"), {}),
        ("SGDClassifier", "optimal", Optimal(by="rows", alpha=0.05), {"alpha": 0.05}),
        ("SGDClassifier", "invscaling", InverseScaling(by="rows", power=0.5), {"power_t": 0.5}),
    ],
)
def test_rates_are_scikit_learn_s(kind: str, name: str, ours: Schedule, options: Any) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng, slope = np.random.default_rng(0), SLOPES[kind]
    x = rng.normal(size=(40, 3)) * 0.3
    y = rng.normal(size=40) if kind == "SGDRegressor" else rng.integers(0, 2, 40)
    ours = ours.bind(ScheduleContext(slope=slope))
    weight = replay(ours, x, lambda p, k: slope(p, y[k]), epochs=3, base=0.1)
    loss = {} if kind == "SGDRegressor" else {"loss": "log_loss"}
    given = {"learning_rate": name, "eta0": 0.1, **loss, **PLAINLY, **options}
    theirs = getattr(linear_model, kind)(**given).fit(x, y)
    assert theirs.t_ == 121
    assert_allclose(weight, theirs.coef_.ravel(), rtol=1e-11)


def test_invscaling_by_epoch_is_the_perceptron_s() -> None:
    neural_network = pytest.importorskip("sklearn.neural_network")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    rates = {"learning_rate": "invscaling", "learning_rate_init": 0.1, "power_t": 0.5}
    descent = {"hidden_layer_sizes": (), "solver": "sgd", "alpha": 0, "momentum": 0}
    given = {"batch_size": 30, "shuffle": False, "random_state": 0}
    theirs = neural_network.MLPRegressor(**rates, **descent, **given)
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
        *(
            ({"name": "multi_step", "milestones": given}, "milestones: expected a list of integers")
            for given in (3, "345", {3: 0.1})
        ),
    ],
)
def test_a_wrong_table_is_named(table: dict[str, Any], text: str) -> None:
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


def figures(count: int, seed: int) -> list[float]:
    """Losses that fall, stay, and once are none."""
    rng = np.random.default_rng(seed)
    out = np.exp(-np.arange(count) / 9) + 0.1 * rng.random(count) + 0.2
    out[17] = np.nan
    return out.tolist()


@pytest.mark.parametrize("threshold_mode", ["relative", "absolute"])
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {"patience": 2},
        {"patience": 0, "factor": 0.5},
        {"patience": 1, "factor": 0.7, "threshold": 0.05, "cooldown": 3},
        {"patience": 0, "factor": 0.1, "minimum": 0.0123},
        {"patience": 0, "factor": 0.01},
    ],
)
def test_the_plateau_is_torch_s(options: Any, mode: Any, threshold_mode: Any, torch: Any) -> None:
    names = {"minimum": "min_lr"}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    given = {names.get(k, k): v for k, v in options.items()}
    given["threshold_mode"] = {"relative": "rel", "absolute": "abs"}[threshold_mode]
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, **given)
    ours = Plateau(mode=mode, threshold_mode=threshold_mode, **options)
    lines: list[dict[str, float]] = []
    rates = set()
    for epoch, value in enumerate(figures(60, seed=len(options))):
        rate = ours.rate(0.3, Progress(epoch=epoch, history=tuple(lines)))
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14, abs=0)
        rates.add(rate)
        lines.append({"loss": value, "penalty": 0.0})
        theirs.step(value)
    assert len(rates) > 1


def test_the_plateau_knows_which_way_a_metric_is_better() -> None:
    context = ScheduleContext(slope=None, higher=frozenset({"validation_r2"}))
    assert Plateau(monitor="validation_r2").bind(context).mode == "max"  # type: ignore[attr-defined]
    assert Plateau(monitor="validation_mae").bind(context).mode == "min"  # type: ignore[attr-defined]
    assert Plateau(monitor="validation_r2", mode="min").bind(context).mode == "min"  # type: ignore[attr-defined]
    x, y = regression(features=6)
    rates = {}
    for mode, meant in (("auto", "max"), ("min", "min")):
        schedule = {"name": "plateau", "monitor": "validation_r2", "mode": mode, "patience": 0}
        options: dict[str, Any] = {"epochs": 6, "backend": "fused", "learning_rate": 0.05}
        trainer = make(models.mlp(), schedule=schedule, metrics=["r2"], **options)
        lines = tuple(trainer.fit(x, y, validation_data=0.25))
        replayed = Plateau(monitor="validation_r2", mode=meant, patience=0)
        rates[mode] = [line["rate"] for line in lines]
        for k, rate in enumerate(rates[mode]):
            assert rate == replayed.rate(0.05, Progress(epoch=k, history=lines[:k]))
    assert rates["auto"] != rates["min"]


def test_the_plateau_watches_the_training_loss_where_nothing_is_held_out() -> None:
    x, y = regression(features=6)
    options = {"name": "plateau", "patience": 0, "threshold": 0.999, "factor": 0.5}
    history = make(models.mlp(), schedule=options, epochs=4, backend="fused").fit(x, y)
    assert history["rate"] == [1e-3, 1e-3, 5e-4, 2.5e-4]
    options = {"name": "plateau", "monitor": "validation_loss"}
    with pytest.raises(ConfigError, match=r"plateau.monitor: the history has no column 'valid"):
        make(models.mlp(), schedule=options, epochs=4, backend="fused").fit(x, y)
    with pytest.raises(ConfigError, match=r"by: expected 'epoch', got 'step'"):
        make(models.mlp(), schedule={"name": "plateau", "by": "step"})


def test_after_a_warm_up_the_plateau_sees_its_own_epochs_alone() -> None:
    lines = tuple({"loss": loss, "penalty": 0.0} for loss in (0.1, 0.2, 5.0, 4.0, 4.0, 4.0))
    plateau = Plateau(patience=1, factor=0.5)
    alone = Warmup(by="epoch", length=2, start=0.5)
    for schedule in (
        Warmup(by="epoch", length=2, start=0.5, schedule=plateau),
        Sequential(by="epoch", schedules=(alone, plateau), milestones=(2,)),
    ):
        rates = [schedule.rate(0.4, Progress(epoch=k, history=lines[:k])) for k in range(7)]
        assert rates == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.2])


@pytest.mark.parametrize("monitor", ["auto", "validation_r2", "loss"])
def test_a_resumed_training_has_the_same_rates_to_the_last_bit(monitor: str, tmp_path: Any) -> None:
    x, y = regression(rows=60, features=6)
    held = regression(rows=20, features=6, seed=2)
    schedule = {"name": "plateau", "monitor": monitor, "patience": 0, "threshold": 0.3}
    saver = SaveAt(tmp_path, 7, 12, 12, 20, 27)  # step 12 ends an epoch
    options: dict[str, Any] = {"learning_rate": 0.05, "epochs": 10, "batch_size": 10}
    options |= {"metrics": ["r2"], "backend": {"name": "fused", "steps_per_run": 1}}
    schedule["factor"] = 0.5
    trainer = make(models.mlp(), schedule=schedule, callbacks=[saver], **options)
    history = trainer.fit(x, y, validation_data=held)
    assert len(set(history["rate"])) > 3
    names = [p.name for p in saver.written]
    assert names == ["1-7-0", "1-12-1", "2-12-2", "3-20-3", "4-27-4"]
    for folder in saver.written:
        again = Trainer.resume(folder, plugins=plugins())
        rest = again.fit(x, y, validation_data=held)
        for one, other in zip(history, rest, strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        same(again.get_state(), trainer.get_state(), 0)
    # What is trained after it begins with the rate that the epochs ended with.
    assert again.step((x[:10], y[:10])) == trainer.step((x[:10], y[:10]))
    same(again.get_state(), trainer.get_state(), 0)
