"""The Trainer and recipes read one value in one way: both refuse it, with the same lines, or neither."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    Arguments,
    HookManager,
    Model,
    OrtflexError,
    Parts,
    Recipe,
    Trainer,
    internals_of,
    kinds_of_plugins,
)
from tests import models
from tests.training import make, plugins, regression, same

pytestmark = pytest.mark.once

ANY: list[Any] = [
    *(None, True, False, np.True_),
    *(-1, 0, 1, 2, 2.5, 10**400, float("inf"), float("nan")),
    *(np.float32(0.5), np.int64(2), np.float64("nan")),
    *("", "no", "auto", b"no", object(), int),
    *([], ["no"], [None], {}, {"name": 3}, {"title": "no"}, [[]], np.ones(2)),
]
"""Values that some argument takes and others refuse."""
NAMES = {
    "losses": "squared_error",
    "penalties": "l2",
    "optimizers": "adam",
    "schedules": "cosine",
    "transforms": "clip_norm",
    "metrics": "mae",
    "averages": "ema",
    "adapters": "lora",
    "edits": "new_head",
    "quantizers": "mse",
    "constraints": "non_negative",
    "precisions": "float32",
    "devices": "cpu",
    "backends": "fused",
    "process_groups": "torch",
    "callbacks": "early_stopping",
}
FIELDS = {field.name: field for field in attrs.fields(Arguments)}
OF_THE_MODEL = (
    *("params", "freeze", "head", "edits", "quantize", "adapters", "recompute", "reinitialize"),
    *("device", "distributed", "classes"),
)
"""Arguments whose values a model or this machine may refuse after a recipe has accepted them."""
MORE: dict[str, list[Any]] = {
    "loss": [
        {"name": "huber", "delta": np.float32(0.5)},
        {"name": "huber", "delta": "0.5"},
        {"name": "huber", "dleta": 1},
        *({"name": "huber", "factor": f} for f in (2, np.float32(0.5), float("inf"), "2", True)),
        *({"name": "huber", key: 1} for key in ("predicted", "expected", "weight")),
        {"name": "no", "factor": None, "expected": 3},
        ["no", {"name": "huber", "factor": "x"}],
    ],
    "penalty": [
        {"coef": "l2", "inter*": {"l1": 0.5}},
        {"coef": "no", "intercept": {"l3": 1}},
        {"by_parameter": {"coef": 3}},
        {"l1": 0.5},
    ],
    "constraint": [{"coef": "non_negative"}, {"coef": "no", "intercept": 3}],
    "optimizer": [{"name": "adam", "beta1": b} for b in (np.float32(0.5), 1, "0.5", float("nan"))],
    "groups": [
        [{"params": "coef", "rate": np.float32(0.5)}],
        [{"params": "coef", "rate": float("inf"), "optimizer": "no"}],
        [{"params": "coef", "optimizer": "adma", "penalty": {"coef": "l9"}}, {"prams": "x"}],
        [{"params": "coef", "optimizer": "adma", "penalty": {"coef": "l9"}}],
        [{"params": "coef", "frozen": 1}],
    ],
    "metrics": [["mae", "no", 3]],
    "transforms": [["clip_norm", {"name": "clip_value", "bound": np.int64(-1)}]],
    "callbacks": [["no", object(), {"name": "early_stopping", "patience": np.int64(3)}]],
    "device": ["cpu:0", "cuda:x", "cpu:"],
    "gradients": [["no", "neither"]],
    "prefer": [["ortflex"]],
    "sync_every": [4],
    "dropout": ["off", 0.5, np.float32(0.5)],
    "classes": [["a", "b"], ["a", 1], ["a", "a"]],
    "head": [5, ["a", "b"], ["a", "a"], {"outputs": 3}, {"output": 3}, {"outputs": 0}],
    "edits": [[{"name": "new_head", "outputs": 3}, {"name": "cut"}, "no"]],
    "quantize": [
        {"weights": "int4"},
        {"weights": "int3"},
        {"name": "minmax", "rows": 0},
        {"no": 1},
    ],
    "reduction": ["sum"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    onnx.save(models.linear(), folder / "model.onnx")
    np.savez(folder / "data.npz", X=np.zeros((4, 5), np.float32), y=np.zeros((4, 1), np.float32))
    return {"model": str(folder / "model.onnx"), "data": str(folder / "data.npz")}


def refusal(make: Any) -> list[str]:
    """The lines with which something is refused; empty if it is not."""
    try:
        make()
    except OrtflexError as error:
        return list(getattr(error, "problems", [str(error)]))
    return []


@pytest.mark.parametrize("name", FIELDS)
def test_the_trainer_and_recipes_give_one_answer(name: str, files: dict[str, str]) -> None:
    model = files["model"] if name == "free_batch" else Model(files["model"], plugins=plugins())
    values = [*ANY, *MORE.get(name, ())]
    if kind := kinds_of_plugins().get(name):
        values += [NAMES[kind], {"name": NAMES[kind], "no_such_parameter": 1}]
    for value in values:
        given = {"loss": "squared_error", name: value}
        of_recipe = refusal(lambda given=given: Recipe.from_mapping(files | given, plugins()))
        of_trainer = refusal(lambda given=given: Trainer(model, **given, plugins=plugins()))
        if of_recipe or name not in OF_THE_MODEL:
            assert [line for line in of_trainer if line not in of_recipe] == [], value
        assert set(of_recipe) <= set(of_trainer), value


def test_arguments_that_are_wrong_together_are_reported_together(files: dict[str, str]) -> None:
    given: dict[str, Any] = {
        "loss": [{"name": "huber", "factor": float("inf")}, "no"],
        "penalty": {"coef": "l2", "intercept": "l9"},
        "groups": [{"params": "coef", "optimizer": "adma", "penalty": {"coef": "l9"}}],
        "epochs": 0,
        "sync_every": 2,
    }
    of_recipe = refusal(lambda: Recipe.from_mapping(files | given, plugins()))
    of_trainer = refusal(lambda: Trainer(files["model"], **given, plugins=plugins()))
    assert sorted(of_recipe) == sorted(of_trainer)
    assert [line.partition(":")[0] for line in of_trainer] == [
        *("epochs", "loss[0].factor", "loss[1]", "penalty.intercept", "groups[0].optimizer"),
        *("groups[0].penalty.coef", "sync_every"),
    ]


def test_penalties_of_overlapping_globs_are_written_as_they_were_given() -> None:
    l1, l2 = {"name": "l1", "l1": 0.5}, {"name": "l2", "l2": 0.25}
    for given in ({"*": l2, "coef": l1}, {"coef": l1, "*": l2}):
        assert Parts(plugins()).spell_out("penalty", given) == {"by_parameter": given}


def test_numbers_of_numpy_train_and_are_stored_as_those_of_python(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "loss": {"name": "huber", "delta": np.float32(0.25), "factor": np.float64(0.5)},
        "optimizer": {"name": "adam", "beta1": np.float32(0.5)},
        "schedule": {"name": "cosine", "period": np.int64(3)},
        "callbacks": [{"name": "early_stopping", "patience": np.int64(3)}],
        "groups": [{"params": "coef", "rate": np.float32(0.5)}],
        **{name: np.float32(0.5) for name in ("learning_rate", "clip_norm", "clip_value")},
        **{name: np.int64(2) for name in ("epochs", "batch_size", "accumulate", "seed")},
        "shuffle": np.True_,
        "dropout": np.float32(0.5),
    }
    plain = {"epochs": 2, "batch_size": 2, "accumulate": 2, "seed": 2, "shuffle": True}
    x, y = regression(rows=8)
    trainer = make(models.linear(), **given)
    trainer.fit(x, y)
    again = Trainer.resume(trainer.save(tmp_path / "c"), plugins=plugins())
    for name, value in plain.items():
        kept = internals_of(again).arguments[name]
        assert (type(kept), kept) == (type(value), value)
    other = make(models.linear(), **given | plain)
    other.fit(x, y)
    same(other.get_state(), trainer.get_state(), 0)
    same(again.get_state(), trainer.get_state(), 0)


def test_a_trainer_looks_for_plugins_in_their_own_groups_once(monkeypatch: Any) -> None:
    """A manager of hooks per argument, or all packages, would take most of the time."""
    made: list[Any] = []
    init = HookManager.__init__
    monkeypatch.setattr(
        HookManager, "__init__", lambda self, *args: made.append(self) or init(self, *args)
    )
    found = importlib.metadata.entry_points()
    asked: list[str] = []

    class Asked:
        groups = found.groups

        def select(self, *, group: str) -> Any:
            asked.append(group)
            return found.select(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", Asked)
    Trainer(models.linear(), loss="squared_error", progress=False)
    assert len(made) == 1
    assert asked
    assert {group.partition(".")[0] for group in asked} == {"ortflex"}
    assert len(asked) == len({*asked})
