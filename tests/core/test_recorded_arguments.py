"""The arguments in a checkpoint are checked as strictly as those that are given in Python.

The class of the defect: a value of JSON that no Trainer accepts is read from a checkpoint and fails
later, with an error that is not one of ortflex (``classes=3`` was a TypeError in ``fit``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import Arguments, CheckpointError, OrtflexError, Trainer
from tests import edited_checkpoints, models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python

X, Y = regression(rows=6)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 3, 0.5, "no_such_name", [1, "a"], [None]),
    *({"a": 1}, {"name": 3}, {"object": 3}),
)
# The group is not recorded, and the names of the trained tensors replace params.
NAMES = [f.name for f in attrs.fields(Arguments) if f.name not in ("distributed", "params")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = make(models.linear(), epochs=1)
    trainer.fit(X, Y)
    return trainer.save(tmp_path_factory.mktemp("recorded") / "checkpoint")


@pytest.mark.parametrize("name", NAMES)
def test_values_that_no_trainer_accepts_are_refused(saved: Path, name: str) -> None:
    """Each argument with values of every type of JSON, from Python and from a checkpoint."""
    old: list[Any] = []
    edited_checkpoints.edit(saved, lambda r: old.append(dict(r["arguments"])))
    try:
        for value in VALUES:
            refused = None
            try:
                make(models.linear(), **{"epochs": 1, name: value})
            except OrtflexError as error:
                refused = error
            arguments = {**old[0], name: value}
            edited_checkpoints.edit(saved, lambda r, a=arguments: r.update(arguments=a))  # type: ignore[misc]
            if refused is None:
                continue
            with pytest.raises(OrtflexError, match=name) as caught:
                Trainer.resume(saved, plugins=plugins())
            assert not isinstance(caught.value, CheckpointError) or str(saved) in str(caught.value)
    finally:
        edited_checkpoints.edit(saved, lambda r: r.update(arguments=old[0]))


@pytest.mark.parametrize(
    "classes",
    [3, "ab", [], [1, "a"], ["a", "a"], [float("nan"), 1], [[1], [2]], {"a": 1}, np.array(3)],
    ids=repr,
)
def test_classes_that_are_no_list_of_labels_are_refused(classes: Any) -> None:
    with pytest.raises(OrtflexError, match="classes: expected"):
        make(models.linear(), classes=classes)


@pytest.mark.parametrize("classes", [["a", "b"], (0, 1), np.array([2.0, 1.0]), [True, False]])
def test_lists_and_arrays_of_labels_are_classes(classes: Any) -> None:
    make(models.linear(), classes=classes)
