"""Arguments as people get them wrong: refused by their names, or harmless; one of a list is a list.

The class of absurd numbers: every argument that takes a number, of a Trainer, of fit and of every
component that is installed (:mod:`tests.fuzz.numbers` lists them from signatures), times numbers beyond
int64, float32 and float64, denormal ones, infinities and values of other types. Each ends in success or
in an OrtflexError, within seconds and within memory: tests/fuzz draws them by thousands.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    OrtflexError,
    OutputError,
    Trainer,
    internals_of,
    is_number,
    short_repr,
    to_toml,
)
from ortflex_core.training.artifacts.callback_values import Saved
from tests import models
from tests.fuzz import numbers
from tests.training import Recorder, make, plugins, regression, same

pytestmark = pytest.mark.per_python

X, Y = regression(rows=20, features=6)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("factor", "2", "a finite number"),
        ("factor", np.nan, "a finite number"),
        ("predicted", 1, "the name of a tensor"),
        ("expected", 1, "the name of a tensor"),
        ("weight", 0.5, "the name of a tensor"),
    ],
)
def test_a_key_of_a_loss_is_refused_by_its_name(key: str, value: Any, expected: str) -> None:
    text = re.escape(f"loss.{key}: expected {expected}, got {value!r}")
    with pytest.raises(ConfigError, match=text):
        make(models.mlp(), loss={"name": "squared_error", key: value})


def test_a_file_of_another_name(tmp_path: Path) -> None:
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"'.*modle\.onnx' does not exist; did you mean 'model"):
        make(tmp_path / "modle.onnx")


def test_wrong_names_of_outputs_and_weights_are_refused() -> None:
    trainer = make(models.mlp())
    outputs: list[tuple[Any, Any, str]] = [
        ([], ConfigError, "outputs: expected at least one name, got none"),
        (3, ConfigError, "outputs: expected a name or a list of names, got 3"),
        ("m", ModelError, r"has no tensor 'm'; did you mean 'm3' or 'm2'\?$"),
    ]
    for given, error, text in outputs:
        with pytest.raises(error, match=text):
            trainer.predict(X, outputs=given)
    with pytest.raises(DataError, match="expected arrays by the names of parameters, got list"):
        trainer.set_state([X])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"X is the string 'data\.npz', .*numpy\.load reads"):
        trainer.fit("data.npz")


def test_one_callback_metric_or_family_needs_no_list(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make(models.mlp(), callbacks=recorder, metrics="rmse", gradients="matmul", epochs=2)
    trainer.fit(X, Y)
    assert len(recorder.all("epoch_end")) == 2
    assert "rmse" in trainer.evaluate(X, Y)
    for stopping in ("early_stopping", {"name": "early_stopping", "monitor": "loss"}):
        trainer = make(models.mlp(), callbacks=stopping, epochs=1)
        again = Trainer.resume(trainer.save(tmp_path / "c"), plugins=plugins())
        assert [type(c).__name__ for c in internals_of(again).setup.callbacks] == ["EarlyStopping"]


FEW = regression(rows=12)


def test_the_table_has_every_kind_of_argument() -> None:
    """The list is made of signatures: an argument that is added is drawn from then on."""
    places = numbers.places()
    assert len(places) > 90
    assert set(places) >= {
        *(("trainer", "", n) for n in ("threads", "batch_size", "epochs", "seed", "accumulate")),
        *(("trainer", "", n) for n in ("learning_rate", "clip_norm", "clip_value", "dropout")),
        ("callbacks", "checkpoint", "keep"),
        ("optimizers", "adam", "beta1"),
        ("metrics", "top_k", "k"),
        ("batches", "", "prefetch"),
        ("data", "npz", "most"),
        *(("data", name, "buffer") for name in ("npy", "parquet", "arrow")),
    }


@pytest.mark.parametrize(
    "value", [10**25, 2**63, 10**5000, -1, 0, 1.5, True, float("nan"), "1"], ids=short_repr
)
@pytest.mark.parametrize("name", ["accumulate", "batch_size", "epochs", "threads"])
def test_counts_are_bounded(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: expected .*integer (from 1 to \d+|>= 1), got"):
        make(models.linear(), backend="fused", **{name: value})


@pytest.mark.parametrize("value", [2**63, 10**5000, -1, 1.5], ids=short_repr)
def test_seeds_are_bounded(value: Any) -> None:
    with pytest.raises(ConfigError, match="seed: expected an integer"):
        make(models.linear(), backend="fused", seed=value)


@pytest.mark.parametrize("options", [{"threads": 64}, {"threads": 1024}, {"accumulate": 2**31 - 1}])
def test_large_counts_do_no_harm(options: dict[str, int]) -> None:
    """1,024 threads on two processors took minutes for a step of microseconds."""
    trainer = make(models.linear(), backend="fused", epochs=2, **options)
    assert len(trainer.fit(*FEW)) == 2


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -0.5, 1.5, 10**400, True], ids=short_repr
)
def test_fractions_of_validation_data(value: Any) -> None:
    with pytest.raises(DataError, match="validation"):
        make(models.linear(), backend="fused").fit(*FEW, validation_data=value)


@pytest.mark.parametrize("value", [0, -1, 10**25, 1.5, True])
def test_lengths_of_an_endless_epoch(value: Any) -> None:
    with pytest.raises(DataError, match="steps_per_epoch: expected an integer"):
        make(models.linear(), backend="fused").fit(lambda: [FEW], steps_per_epoch=value)


def test_functions_of_batches_get_positional_arguments() -> None:
    """An argument of another name is the epoch; the one after it is the start."""
    seen: list[tuple[Any, ...]] = []

    def other(e: int, first: int) -> Any:
        seen.append((e, first))
        return iter([FEW])

    def with_default(e: int, rows: int = 7, *, start: int) -> Any:
        seen.append((e, rows, start))
        return iter([FEW])

    for function in (lambda e: [FEW], lambda e, /: [FEW], lambda: [FEW]):
        assert len(make(models.linear(), backend="fused", epochs=2).fit(function)) == 2
    make(models.linear(), backend="fused", epochs=2).fit(other)
    make(models.linear(), backend="fused", epochs=2).fit(with_default)
    assert seen == [(0, 0), (1, 0), (0, 7, 0), (1, 7, 0)]
    with pytest.raises(DataError, match="has 3 parameters"):
        make(models.linear(), backend="fused").fit(lambda a, b, c: [FEW])


def test_places_that_cannot_be_read_or_exported_to() -> None:
    for path in ("a\0b", "", "\udc80"):
        with pytest.raises(OrtflexError):
            make(path)
    for path in ("a\0b", ".", "/", "no/such/folder/x.onnx"):
        with pytest.raises(OutputError):
            make(models.linear(), backend="fused").export(path)


def test_schedules_beyond_all_numbers_are_named() -> None:
    for schedule in (
        {"name": "exponential", "gamma": 1e308},
        {"name": "invscaling", "power": 2**63},  # an integer to this power never ends
    ):
        with pytest.raises(OrtflexError, match=schedule["name"]):  # type: ignore[arg-type]
            make(models.linear(), backend="fused", schedule=schedule, batch_size=2).fit(*FEW)


@pytest.mark.parametrize("place", [p for p in numbers.places() if p[0] == "data"], ids="/".join)
def test_numbers_of_data_sources(place: numbers.Place, tmp_path: Path) -> None:
    """Each argument of each source that is installed: refused, or read within memory."""
    for value in (0, -1, -(10**5000), 10**5000, 2**31, 2**63, 1.5, True, float("nan"), "1"):
        if place == ("data", "example_line", "seed"):
            break  # any integer is one; other values are among those that are drawn
        if place == ("data", "npz", "most") and value == 2**31:
            continue  # bytes
        if place[2] == "pad" or (place[2] == "fill" and is_number(value)):
            continue  # takes the place of a missing value
        types = "(an integer|a list of|a number( or|,))"
        expected = f"(expected {types}|must be (1 |'median'|height and width))"
        with pytest.raises(OrtflexError, match=f"{place[2]}: {expected}"):
            numbers.source(place, value, tmp_path, *FEW)
    if place[1] in ("image_folder", "tokenized"):
        return  # their files: test_data_images_and_texts.py
    numbers.train(place, {"columns": 4, "most": 2**31}.get(place[2], 12), tmp_path)


def test_a_number_that_toml_cannot_hold_is_refused_when_it_is_written(tmp_path: Path) -> None:
    """An argument of a plugin that does not check it, a callback's state, a recipe."""

    def trained(steps: int) -> Trainer:
        callback = {"name": "example_stop", "steps": steps}
        trainer = make(models.linear(), backend="fused", epochs=1, callbacks=[callback])
        trainer.fit(*FEW)
        return trainer

    trainer = trained(10**299)
    resumed = Trainer.resume(trainer.save(tmp_path / "saved"), plugins=plugins())
    same(resumed.get_state(), trainer.get_state(), 0)
    with pytest.raises(CheckpointError, match="callbacks has an integer of more than 300"):
        trained(10**5000).save(tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(CheckpointError, match=r"'mine' stores 'n' = an integer of more than 300"):
        Saved().put("mine", {"n": 10**5000})
    with pytest.raises(TypeError, match="more than 300 digits cannot be written"):
        to_toml({"n": 10**5000})


@pytest.mark.parametrize("number", range(3))
def test_a_few_absurd_numbers(number: int, tmp_path: Path) -> None:
    """What is drawn by thousands in tests/fuzz, once here, for those who change the harness."""
    place, value = numbers.drawn(Random(f"number/{number}"))
    with suppress(OrtflexError):  # anything else fails the test
        numbers.train(place, value, tmp_path)
