"""Data as people have them, and arguments as they get them wrong.

Frames, datasets and loaders go into fit, evaluate and predict. Wrong arguments are refused by their
names, or do no harm; one of a list is a list.

The class of absurd numbers: every argument that takes a number, of a Trainer, of fit and of every
component that is installed (:mod:`tests.fuzz.numbers` lists them from signatures), times numbers beyond
int64, float32 and float64, denormal ones, infinities and values of other types. Each ends in success or
in an OrtflexError, within seconds and within memory: tests/fuzz draws them by thousands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
from ortflex_core.training.data.rows import gives_rows
from tests import models
from tests.fuzz import numbers
from tests.models import classifier, linear, two_headed
from tests.training import Recorder, make, plugins, regression, same

pytestmark = pytest.mark.per_python

ROWS, SIZE = 12, 4
NAMES = list("abcde")
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 5)).astype(np.float32)
y = rng.normal(size=(ROWS, 1)).astype(np.float32)


def trainer(model: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"loss": "squared_error", "batch_size": SIZE, "shuffle": False}
    return Trainer(model or linear(), **{**settings, **options}, epochs=2, progress=False)


library = pytest.importorskip


class Mappings:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"X": x[k], "label": y[k]}


class Pairs(Mappings):
    """A dataset of pairs, the labels as Python numbers."""

    def __getitem__(self, k: int) -> Any:
        return x[k], float(y[k, 0])


def hugging_face(label: str = "y") -> Any:
    return library("datasets").Dataset.from_dict({"X": x.tolist(), label: y.tolist()})


def frame() -> Any:
    return library("pandas").DataFrame(x, columns=NAMES)


def tensors() -> Any:
    torch = library("torch")
    return torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))


FORMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "frames of pandas": lambda: (frame(), library("pandas").Series(y[:, 0], name="t")),
    "float64 of pandas": lambda: (
        frame().astype("f8"),
        library("pandas").DataFrame({"t": y[:, 0]}),
    ),
    "frames of polars": lambda: (
        library("polars").DataFrame(x, schema=NAMES),
        library("polars").Series(y[:, 0]),
    ),
    "tensors": lambda: tensors().tensors,
    "a dataset of tensors": lambda: (tensors(),),
    "a loader": lambda: (library("torch.utils.data").DataLoader(tensors(), batch_size=SIZE),),
    "mappings": lambda: (Mappings(),),
    "pairs": lambda: (Pairs(),),
    "lists": lambda: (hugging_face(),),
    "lists with a label": lambda: (hugging_face("label"),),
    "arrays": lambda: (hugging_face().with_format("numpy"),),
    "batches": lambda: (hugging_face().with_format("numpy").to_iterable_dataset().batch(SIZE),),
    "a table": lambda: ({"X": x, "label": y},),
}


def train_alike(arrays: Any, given: Any, **options: Any) -> tuple[Trainer, Trainer]:
    """A training on arrays and one on the same data in another form."""
    plain, made = trainer(**options), trainer(**options)
    plain.fit(*arrays, validation_data=arrays)
    made.fit(*given, validation_data=given if len(given) > 1 else given[0])
    assert made.history_.losses == pytest.approx(plain.history_.losses, rel=1e-6)
    assert made.validation_losses_ == pytest.approx(plain.validation_losses_, rel=1e-6)
    same(made.get_state(), plain.get_state(), 1e-6)
    return plain, made


@pytest.mark.parametrize("form", FORMS)
def test_they_train_as_arrays_do(form: str) -> None:
    given = FORMS[form]()
    plain, made = train_alike((x, y), given)
    assert made.evaluate(*given)["loss"] == pytest.approx(plain.evaluate(x, y)["loss"])


def test_a_dataset_is_split_shuffled_and_predicted_as_arrays_are() -> None:
    plain, made = trainer(shuffle=True), trainer(shuffle=True)
    plain.fit(x, y, validation_data=0.25)
    made.fit(Mappings(), validation_data=0.25)
    assert made.validation_losses_ == plain.validation_losses_
    np.testing.assert_array_equal(made.predict(Mappings()), plain.predict(x))


def test_weights_and_several_inputs_come_by_name() -> None:
    class Weighted(Mappings):
        def __getitem__(self, k: int) -> Any:
            return x[k], y[k], float(k + 1)

    train_alike((x, y, np.arange(1.0, ROWS + 1)), (Weighted(),))


def test_several_losses_take_their_labels_from_one_mapping() -> None:
    inputs = {"left": x[:, :3], "right": x[:, :2]}
    sizes = {"amount": 1, "scores": 3}
    labels = {f"label/{n}": rng.normal(size=(ROWS, s)).astype("f") for n, s in sizes.items()}
    losses = dict.fromkeys(sizes, "squared_error")
    train_alike((inputs, labels), ({**inputs, **labels},), model=two_headed(), loss=losses)


def test_labels_of_a_frame_may_be_strings() -> None:
    pandas, names = library("pandas"), np.array(["u", "v", "w"] * 4)
    options: dict[str, Any] = {"loss": "softmax_cross_entropy", "classes": list("uvw")}
    given = pandas.DataFrame(x[:, :4]), pandas.Series(names)
    train_alike((x[:, :4], names), given, model=classifier(), **options)


@pytest.mark.parametrize("make", ["csr_matrix", "csr_array", "coo_matrix"])
def test_sparse_rows_are_refused_with_an_explanation(make: str) -> None:
    sparse = library("scipy.sparse")
    with pytest.raises(DataError, match=r"X is a sparse matrix; make it dense: X\.toarray\(\)"):
        trainer().fit(getattr(sparse, make)(x), y)
    with pytest.raises(DataError, match="y is a sparse matrix"):
        trainer().fit(x, getattr(sparse, make)(y))


def test_errors_about_frames_name_the_columns() -> None:
    with pytest.raises(DataError, match=r"not numeric or have missing values.*: 'a'; encode"):
        trainer().fit(frame().assign(a="text"), y)
    pandas = library("pandas")
    missing = pandas.array([None, *range(11)], dtype="Int64")
    with pytest.raises(DataError, match="missing values; encode them, fill in"):
        trainer().fit(frame().assign(a=missing), y)


def test_a_lazy_frame_is_to_be_collected() -> None:
    polars = library("polars")
    with pytest.raises(DataError, match=r"X is a lazy frame \(LazyFrame\); pass X\.collect\(\)"):
        trainer().fit(polars.DataFrame(x, schema=NAMES).lazy(), y)


class Ragged(Mappings):
    def __getitem__(self, k: int) -> Any:
        return x[k, : 5 - (k == 3)], y[k]


class Changing(Mappings):
    def __getitem__(self, k: int) -> Any:
        return {"X": x[k]} if k == 2 else {"X": x[k], "y": y[k]}


class Empty(Mappings):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Ragged(), r"has the shape \[4\] in row 3 and \[5\] in row 0; pass rows of one shape"),
        (Changing(), "row 2 of the dataset has other names than X, y"),
        (Empty(), "the dataset has 0 rows"),
        (((x[k], y[k]) for k in range(3)), "batch an iterable of single rows first"),
    ],
)
def test_wrong_datasets_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trainer().fit(data)


def test_collections_and_arrays_are_no_datasets() -> None:
    assert not any(map(gives_rows, [x, [x], (x, y), {"X": x}, "text", range(3), None]))
    assert gives_rows(Pairs())


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
