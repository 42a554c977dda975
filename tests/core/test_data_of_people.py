"""Data as people have them go into fit, evaluate and predict: frames, datasets, loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Trainer
from ortflex_core.training.data.rows import gives_rows
from tests.models import classifier, linear, two_headed

pytestmark = pytest.mark.per_python

ROWS, SIZE = 12, 4
NAMES = list("abcde")
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 5)).astype(np.float32)
y = rng.normal(size=(ROWS, 1)).astype(np.float32)


def trainer(model: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"loss": "squared_error", "batch_size": SIZE, "shuffle": False}
    return Trainer(model or linear(), **{**settings, **options}, epochs=2, progress=False)


def pandas_frames() -> tuple[Any, ...]:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x, columns=NAMES), pandas.Series(y[:, 0], name="t")


def pandas_doubles() -> tuple[Any, ...]:
    frame, series = pandas_frames()
    return frame.astype("float64"), series.to_frame()


def polars_frames() -> tuple[Any, ...]:
    polars = pytest.importorskip("polars")
    return polars.DataFrame(x, schema=NAMES), polars.Series(y[:, 0])


def torch_tensors() -> tuple[Any, ...]:
    torch = pytest.importorskip("torch")
    return torch.tensor(x), torch.tensor(y)


def torch_dataset() -> tuple[Any, ...]:
    torch = pytest.importorskip("torch")
    return (torch.utils.data.TensorDataset(*torch_tensors()),)


def torch_loader() -> tuple[Any, ...]:
    torch = pytest.importorskip("torch")
    return (torch.utils.data.DataLoader(*torch_dataset(), batch_size=SIZE),)


class Mappings:
    """A dataset of mappings."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"X": x[k], "label": y[k]}


class Pairs(Mappings):
    """A dataset of pairs, the labels as Python numbers."""

    def __getitem__(self, k: int) -> Any:
        return x[k], float(y[k, 0])


def hugging_face(**renamed: str) -> Any:
    datasets = pytest.importorskip("datasets")
    names = {"X": "X", "y": "y", **renamed}
    return datasets.Dataset.from_dict({names["X"]: x.tolist(), names["y"]: y.tolist()})


FORMS: list[Callable[[], tuple[Any, ...]]] = [
    pandas_frames,
    pandas_doubles,
    polars_frames,
    torch_tensors,
    torch_dataset,
    torch_loader,
    lambda: (Mappings(),),
    lambda: (Pairs(),),
    lambda: (hugging_face(),),
    lambda: (hugging_face(y="label"),),
    lambda: (hugging_face().with_format("numpy"),),
    lambda: (hugging_face().with_format("numpy").to_iterable_dataset().batch(SIZE),),
    lambda: ({"X": x, "label": y},),
]


@pytest.mark.parametrize("form", FORMS)
def test_they_train_as_arrays_do(form: Callable[[], tuple[Any, ...]]) -> None:
    given = form()
    plain, made = trainer(), trainer()
    plain.fit(x, y, validation_data=(x, y))
    made.fit(*given, validation_data=given if len(given) > 1 else given[0])
    assert made.history_.losses == pytest.approx(plain.history_.losses, rel=1e-6)
    assert made.validation_losses_ == pytest.approx(plain.validation_losses_, rel=1e-6)
    for name, array in plain.get_state().items():
        np.testing.assert_allclose(made.get_state()[name], array, rtol=1e-6)
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
    pandas = pytest.importorskip("pandas")
    names = np.array(["u", "v", "w"] * 4)
    plain, made = (
        trainer(classifier(), loss="softmax_cross_entropy", classes=list("uvw")) for _ in "ab"
    )
    plain.fit(x[:, :4], names)
    made.fit(pandas.DataFrame(x[:, :4]), pandas.Series(names))
    assert made.history_.losses == plain.history_.losses


@pytest.mark.parametrize("make", ["csr_matrix", "csr_array", "coo_matrix"])
def test_sparse_rows_are_refused_with_an_explanation(make: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(DataError, match=r"X is a sparse matrix; make it dense: X\.toarray\(\)"):
        trainer().fit(getattr(sparse, make)(x), y)
    with pytest.raises(DataError, match="y is a sparse matrix"):
        trainer().fit(x, getattr(sparse, make)(y))


def frame_with(values: Any) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x, columns=NAMES).assign(a=values)


def test_errors_about_frames_name_the_columns() -> None:
    with pytest.raises(DataError, match=r"not numeric or have missing values.*: 'a'; encode"):
        trainer().fit(frame_with("text"), y)
    pandas = pytest.importorskip("pandas")
    missing = pandas.array([None, *range(11)], dtype="Int64")
    with pytest.raises(DataError, match="missing values; encode them, fill in"):
        trainer().fit(frame_with(missing), y)


def test_a_lazy_frame_is_to_be_collected() -> None:
    polars = pytest.importorskip("polars")
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
