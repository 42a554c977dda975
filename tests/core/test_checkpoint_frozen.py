"""Checkpoints and the weights that are not trained: compared, kept, and linked to the model's file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import CheckpointError, Trainer
from ortflex_core.training.checkpoints import checkpoint
from tests import models
from tests.core.test_checkpoint_restore import BASE, begun, data
from tests.training import make, plugins

pytestmark = pytest.mark.sampled


def with_frozen(model: onnx.ModelProto, name: str, change: float) -> onnx.ModelProto:
    """The model with one value of one initializer changed."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for tensor in out.graph.initializer:
        if tensor.name == name:
            array = onnx.numpy_helper.to_array(tensor).copy()
            array.reshape(-1)[-1] += change
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    return out


@pytest.mark.parametrize("sizes", [(6, 8, 1), (6, 200, 1)], ids=["small", "above 1,024 elements"])
@pytest.mark.parametrize("frozen", ["W1", "b1"])
def test_other_frozen_weights_are_refused_by_name(
    sizes: tuple[int, ...], frozen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One value of one tensor is enough, in a tensor of any size."""
    options: dict[str, Any] = {"params": ["W2", "b2"], "groups": [], "constraint": None}
    model = models.mlp(sizes)
    other = with_frozen(model, frozen, 1.0)
    begun(tmp_path / "c", model, **options)
    trainer = make(other, **{**BASE, **options})
    with pytest.raises(CheckpointError, match=rf"not trained: {frozen}\. Use that model"):
        trainer.restore(tmp_path / "c")
    with pytest.raises(CheckpointError, match=rf"not trained: {frozen}\. Use that model"):
        Trainer.resume(tmp_path / "c", plugins=plugins(), model=other)
    with caplog.at_level(logging.WARNING, "ortflex"):
        trainer.restore(tmp_path / "c", strict=False)
    assert f"not trained: {frozen}" in caplog.text


@pytest.mark.parametrize("how", ["restore", "resume"])
def test_a_checkpoint_has_the_frozen_weights_of_the_trainer_that_wrote_it(
    how: str, tmp_path: Path
) -> None:
    """After other weights were taken over on purpose, later checkpoints have the model of now."""
    options: dict[str, Any] = {"params": ["W2", "b2"], "groups": [], "constraint": None}
    model = models.mlp((6, 8, 1))
    other = with_frozen(model, "W1", 3.0)
    begun(tmp_path / "c", model, **options)
    if how == "restore":
        trainer = make(other, **{**BASE, **options})
        trainer.restore(tmp_path / "c", strict=False)
    else:
        trainer = Trainer.resume(tmp_path / "c", plugins=plugins(), model=other, strict=False)
    x, y = data()
    trainer.fit(x, y)
    for name in ("d", "e"):  # the second one links to the first one's model
        trainer.save(tmp_path / name)
        again = Trainer.resume(tmp_path / name, plugins=plugins())
        np.testing.assert_array_equal(again.predict(x), trainer.predict(x))


def test_a_model_that_was_replaced_on_the_disk_is_not_linked_to(tmp_path: Path) -> None:
    """Another process has saved another training to the place this one saved to before."""
    options: dict[str, Any] = {"params": ["W2", "b2"], "groups": [], "constraint": None}
    model = models.mlp((6, 8, 1))
    first = make(model, **{**BASE, **options})
    second = make(with_frozen(model, "W1", 3.0), **{**BASE, **options})
    x, _ = data()
    first.save(tmp_path / "c")
    second.save(tmp_path / "c")
    for name in ("c", "d"):
        first.save(tmp_path / name)
        again = Trainer.resume(tmp_path / name, plugins=plugins())
        np.testing.assert_array_equal(again.predict(x), first.predict(x))


def test_large_models_have_two_copies_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have one in every checkpoint; a resumed run links to none of those it found."""
    trainer = make(models.mlp(), **BASE)

    def inodes(names: Sequence[str]) -> list[int]:
        places = [trainer.save(tmp_path / name) for name in names]
        return [place.joinpath("model", "model.onnx").stat().st_ino for place in places]

    assert len(set(inodes("abcd"))) == 4
    monkeypatch.setattr(checkpoint, "COPIED", 0)
    first, second, *others = inodes(["step-1", "step-2", "step-3", "best", "step-4"])
    assert first != second
    assert others == [first, second, second]
