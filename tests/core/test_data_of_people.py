"""Data as people have them go into fit, evaluate and predict: frames, datasets, loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Trainer
from ortflex_core.training.data.rows import gives_rows
from tests.models import classifier, linear, two_headed
from tests.training import same

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


@pytest.mark.parametrize("form", FORMS)
def test_they_train_as_arrays_do(form: str) -> None:
    given = FORMS[form]()
    plain, made = trainer(), trainer()
    plain.fit(x, y, validation_data=(x, y))
    made.fit(*given, validation_data=given if len(given) > 1 else given[0])
    assert made.history_.losses == pytest.approx(plain.history_.losses, rel=1e-6)
    assert made.validation_losses_ == pytest.approx(plain.validation_losses_, rel=1e-6)
    same(made.get_state(), plain.get_state(), 1e-6)
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

    plain, made = trainer(), trainer()
    plain.fit(x, y, np.arange(1.0, ROWS + 1))
    made.fit(Weighted())
    np.testing.assert_allclose(made.get_state()["coef"], plain.get_state()["coef"], rtol=1e-6)


def test_several_losses_take_their_labels_from_one_mapping() -> None:
    model = two_headed()
    shapes = {
        i.name: [d.dim_value for d in i.type.tensor_type.shape.dim][1:] for i in model.graph.output
    }
    inputs = {i.name: x[:, : i.type.tensor_type.shape.dim[1].dim_value] for i in model.graph.input}
    labels = {f"label/{n}": rng.normal(size=(ROWS, *s)).astype("f") for n, s in shapes.items()}
    losses = dict.fromkeys(shapes, "squared_error")
    plain, made = trainer(two_headed(), loss=losses), trainer(two_headed(), loss=losses)
    plain.fit(inputs, labels)
    made.fit({**inputs, **labels})
    assert made.history_.losses == plain.history_.losses


def test_labels_of_a_frame_may_be_strings() -> None:
    pandas = library("pandas")
    names = np.array(["u", "v", "w"] * 4)
    plain, made = (
        trainer(classifier(), loss="softmax_cross_entropy", classes=list("uvw")) for _ in "ab"
    )
    plain.fit(x[:, :4], names)
    made.fit(pandas.DataFrame(x[:, :4]), pandas.Series(names))
    assert made.history_.losses == plain.history_.losses


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
