"""More schedules against torch's schedulers; those made of others, and the one that watches."""

from __future__ import annotations

import json
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import (
    ConfigError,
    Plugins,
    Progress,
    Recipe,
    Schedule,
    ScheduleContext,
    Trainer,
    hook,
)
from ortflex_plugins.schedules.cosine import Cosine, CosineRestarts, OneCycle
from ortflex_plugins.schedules.decay import Exponential, MultiStep, Polynomial, StepDecay
from ortflex_plugins.schedules.plateau import Plateau
from ortflex_plugins.schedules.sequential import Chained, Sequential, Warmup
from tests import models
from tests.plugins.test_schedules import UNITS, at
from tests.training import make, plugins, regression

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
    with pytest.raises(ConfigError, match="length=None is the length of the run in units of"):
        schedule.rate(0.1, Progress())


def test_parameters_are_checked() -> None:
    for milestones in (3, "345", {3: 0.1}):
        with pytest.raises(ConfigError, match=r"milestones: expected a list of integers, got"):
            make(models.linear(), schedule={"name": "multi_step", "milestones": milestones})
    with pytest.raises(ValueError, match=r"OneCycle.up must be a number > 0 and < 1, got 1"):
        OneCycle(up=1)
    with pytest.raises(ValueError, match=r"CosineRestarts.period must be a number >= 1, got 0"):
        CosineRestarts(period=0)


# Made of others ---------------------------------------------------------------------------------


def by(schedule: Any, unit: Any) -> Any:
    """The schedule and its parts, counting by a unit."""
    changes: dict[str, Any] = {"by": unit}
    if hasattr(schedule, "schedules"):
        changes["schedules"] = tuple(by(s, unit) for s in schedule.schedules)
    if hasattr(schedule, "schedule"):
        changes["schedule"] = by(schedule.schedule, unit)
    return attrs.evolve(schedule, **changes)


CHAINS = {
    "warm-up, then cosine": (
        Sequential(schedules=(Warmup(length=5, start=0.1), Cosine()), milestones=(5,)),
        lambda t, o: t.SequentialLR(
            o,
            [
                t.LinearLR(o, start_factor=0.1, total_iters=5),
                t.CosineAnnealingLR(o, T_max=15),
            ],
            milestones=[5],
        ),
    ),
    "three": (
        Sequential(
            schedules=(Exponential(gamma=0.9), Polynomial(), StepDecay(size=2, gamma=0.5)),
            milestones=(4, 9),
        ),
        lambda t, o: t.SequentialLR(
            o,
            [
                t.ExponentialLR(o, 0.9),
                t.PolynomialLR(o, total_iters=5),
                t.StepLR(o, 2, 0.5),
            ],
            milestones=[4, 9],
        ),
    ),
    "at the same time": (
        Chained(
            schedules=(
                Warmup(length=4, start=0.2),
                Exponential(gamma=0.95),
                MultiStep(milestones=(7, 12), gamma=0.3),
            )
        ),
        lambda t, o: t.ChainedScheduler(
            [
                t.LinearLR(o, start_factor=0.2, total_iters=4),
                t.ExponentialLR(o, 0.95),
                t.MultiStepLR(o, [7, 12], 0.3),
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_torch_s(name: str) -> None:
    torch = pytest.importorskip("torch")
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
        (
            {"schedules": ["cosine", "step"], "milestones": []},
            "must be 1, one fewer than schedules",
        ),
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
    with pytest.raises(TypeError, match=r"Chained.schedules must be schedules, got 'cosine'"):
        Chained(schedules=("cosine",))


def test_a_checkpoint_knows_whose_schedules_a_chain_is_made_of(tmp_path: Any) -> None:
    pytest.importorskip("ortflex_example")
    # Gradient families take part in every training.
    found = Plugins(
        entry
        for registry in plugins()
        for entry in registry
        if entry.distribution == "ortflex" or entry.kind == "schedules"
    )
    (name,) = (e.name for e in found["schedules"] if e.distribution == "ortflex-example")
    chain = {"name": "chained", "schedules": ["cosine", name]}
    trainer = make(models.linear(), schedule=chain, plugins=found, backend="auto")
    folder = trainer.save(tmp_path / "c")
    record = json.loads((folder / "checkpoint.json").read_text())
    assert set(record["versions"]) == {"ortflex", "ortflex-example"}


# The one that watches ---------------------------------------------------------------------------


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
def test_the_plateau_is_torch_s(options: Any, mode: Any, threshold_mode: Any) -> None:
    torch = pytest.importorskip("torch")
    names = {"minimum": "min_lr"}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode,
        threshold_mode={"relative": "rel", "absolute": "abs"}[threshold_mode],
        **{names.get(k, k): v for k, v in options.items()},
    )
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


def test_the_plateau_has_torch_s_defaults() -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs, ours = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), Plateau()
    for name in ("factor", "patience", "threshold", "cooldown"):
        assert getattr(ours, name) == getattr(theirs, name)


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
    with pytest.raises(
        ConfigError, match=r"plateau.monitor: the history has no column 'validation_"
    ):
        make(models.mlp(), schedule=options, epochs=4, backend="fused").fit(x, y)
    with pytest.raises(ConfigError, match=r"by: must be one of 'epoch', got 'step'"):
        make(models.mlp(), schedule={"name": "plateau", "by": "step"})


def test_after_a_warm_up_the_plateau_sees_its_own_epochs_alone() -> None:
    lines = tuple({"loss": loss, "penalty": 0.0} for loss in (0.1, 0.2, 5.0, 4.0, 4.0, 4.0))
    plateau = Plateau(patience=1, factor=0.5)
    for schedule in (
        Warmup(by="epoch", length=2, start=0.5, schedule=plateau),
        Sequential(
            by="epoch",
            schedules=(Warmup(by="epoch", length=2, start=0.5), plateau),
            milestones=(2,),
        ),
    ):
        rates = [schedule.rate(0.4, Progress(epoch=k, history=lines[:k])) for k in range(7)]
        assert rates == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.2])


class SaveAt:
    """Writes a checkpoint after some steps."""

    def __init__(self, folder: Any, *steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.written: list[Any] = []

    @hook
    def settled(self, trainer: Trainer, progress: Progress) -> None:
        if progress.step in self.steps:
            self.written.append(trainer.save(self.folder / f"{progress.step}-{progress.epoch}"))


@pytest.mark.parametrize("monitor", ["auto", "validation_r2", "loss"])
def test_a_resumed_training_has_the_same_rates_to_the_last_bit(monitor: str, tmp_path: Any) -> None:
    x, y = regression(rows=60, features=6)
    held = regression(rows=20, features=6, seed=2)
    schedule = {
        "name": "plateau",
        "monitor": monitor,
        "patience": 0,
        "threshold": 0.3,
        "factor": 0.5,
    }
    saver = SaveAt(tmp_path, 7, 12, 20, 27)
    options: dict[str, Any] = {"learning_rate": 0.05, "epochs": 10, "batch_size": 10}
    trainer = make(
        models.mlp(),
        schedule=schedule,
        metrics=["r2"],
        backend={"name": "fused", "steps_per_run": 1},
        callbacks=[saver],
        **options,
    )
    history = trainer.fit(x, y, validation_data=held)
    assert len(set(history["rate"])) > 3
    assert [p.name for p in saver.written] == ["7-1", "12-1", "12-2", "20-3", "27-4"]
    for folder in saver.written:
        again = Trainer.resume(folder, plugins=plugins())
        rest = again.fit(x, y, validation_data=held)
        for one, other in zip(history, rest, strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        for name, array in trainer.get_state().items():
            assert again.get_state()[name].tobytes() == array.tobytes()
    # What is trained after it begins with the rate that the epochs ended with.
    assert again.step((x[:10], y[:10])) == trainer.step((x[:10], y[:10]))
    for name, array in trainer.get_state().items():
        assert again.get_state()[name].tobytes() == array.tobytes()
