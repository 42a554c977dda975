"""The schedule that watches: its rates are torch's, also after a warm-up and in a resumed training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, Progress, ScheduleContext, Trainer, hook
from ortflex_plugins.schedules.plateau import Plateau
from ortflex_plugins.schedules.sequential import Sequential, Warmup
from tests import models
from tests.training import make, plugins, regression, same


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


def test_the_plateau_has_torch_s_defaults(torch: Any) -> None:
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
    schedule = {"name": "plateau", "monitor": monitor, "patience": 0, "threshold": 0.3}
    saver = SaveAt(tmp_path, 7, 12, 20, 27)
    options: dict[str, Any] = {"learning_rate": 0.05, "epochs": 10, "batch_size": 10}
    options |= {"metrics": ["r2"], "backend": {"name": "fused", "steps_per_run": 1}}
    schedule["factor"] = 0.5
    trainer = make(models.mlp(), schedule=schedule, callbacks=[saver], **options)
    history = trainer.fit(x, y, validation_data=held)
    assert len(set(history["rate"])) > 3
    assert [p.name for p in saver.written] == ["7-1", "12-1", "12-2", "20-3", "27-4"]
    for folder in saver.written:
        again = Trainer.resume(folder, plugins=plugins())
        rest = again.fit(x, y, validation_data=held)
        for one, other in zip(history, rest, strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        same(again.get_state(), trainer.get_state(), 0)
    # What is trained after it begins with the rate that the epochs ended with.
    assert again.step((x[:10], y[:10])) == trainer.step((x[:10], y[:10]))
    same(again.get_state(), trainer.get_state(), 0)
