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
    *("fit", "step", "predict", "evaluate", "per_sample_losses", "calibrate", "find_rate"),
    *("summary", "describe", "get_state", "set_state", "update_bn"),
    *("save", "resume", "restore", "from_recipe", "from_hub", "push_to_hub"),
    *("export", "export_step", "export_adapter", "export_base", "save_onnx_graph"),
    *("model", "optimizer", "schedule", "device", "learning_rate", "plugins", "progress"),
    *("batch_size", "epochs", "shuffle", "seed"),
    *("history_", "train_losses_", "validation_losses_", "backend_"),
    *("engine", "folder", "rank"),
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


def test_internals_of_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a Trainer, got 'a name'"):
        internals_of("a name")


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
