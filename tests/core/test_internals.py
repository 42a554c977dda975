"""What a Trainer shows to those who type a dot, and where its parts are for those who look inside."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from ortflex_core import Internals, internals_of
from tests import models
from tests.training import make, plugins, regression

PUBLIC = {
    *("fit", "step", "predict", "evaluate", "per_sample_losses"),
    *("summary", "describe", "get_state", "set_state"),
    *("save", "resume", "restore", "from_recipe", "from_hub", "push_to_hub"),
    *("export", "export_step", "export_adapter", "export_base", "save_onnx_graph"),
    *("model", "optimizer", "schedule", "device", "learning_rate", "plugins", "progress"),
    *("batch_size", "epochs", "shuffle", "seed"),
    *("history_", "train_losses_", "validation_losses_", "backend_"),
    *("engine", "folder", "rank"),
}
MOVED = {
    *("arguments", "setup", "hooks", "live", "loop", "runtime", "problem"),
    *("sharing_errors", "forget_engine", "check_finite", "threads"),
}


def shown(trainer: Any) -> set[str]:
    return {name for name in dir(trainer) if not name.startswith("_")}


def test_public_attributes_of_a_trainer_are_those_that_users_use() -> None:
    trainer = make(models.linear(), plugins=plugins())
    assert shown(trainer) == PUBLIC
    trainer.fit(*regression())
    assert shown(trainer) == PUBLIC


def test_internals_follow_the_training() -> None:
    trainer = make(models.linear(), plugins=plugins())
    inner = internals_of(trainer)
    assert isinstance(inner, Internals)
    assert inner.problem.terms == ()
    trainer.fit(*regression())
    assert internals_of(trainer) is inner
    assert inner.problem.terms
    assert inner.engine is trainer.engine
    assert inner.loop is None
    assert inner.plugins is trainer.plugins


@pytest.mark.parametrize("name", sorted(MOVED))
def test_attributes_of_version_0_1_work_with_a_warning(name: str) -> None:
    trainer = make(models.linear(), plugins=plugins(), threads=3, check_finite=False)
    inner = internals_of(trainer)
    with pytest.warns(
        DeprecationWarning, match=rf"Trainer\.{name} is deprecated.*0\.3.*internals_of"
    ):
        value = getattr(trainer, name)
    expected = {"check_finite": False, "threads": 3}.get(name, getattr(inner, name, None))
    assert value == expected


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    trainer = make(models.linear(), plugins=plugins())
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'lopp'"):
        trainer.lopp  # noqa: B018
    assert not hasattr(object.__new__(type(trainer)), "_internals")  # and no endless recursion


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_copies_have_internals_of_their_own(copied: Any) -> None:
    trainer = make(models.linear())
    x, y = regression()
    trainer.fit(x, y)
    again = copied(trainer)
    assert internals_of(again) is not internals_of(trainer)
    np.testing.assert_array_equal(again.predict(x), trainer.predict(x))
