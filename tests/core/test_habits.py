"""Habits of users of numpy, torch, Keras and scikit-learn: the error has the same thing in our words.

The class: a call that is right in another library. It is an error of ortflex, or of Python with our word
at its end, and never the trace of a library.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Batches, ConfigError, DataError, ModelError, OutputError, Trainer
from ortflex_core.kernel.errors import ArgumentError, PluginError
from ortflex_core.kernel.synonyms import _ATTRIBUTES
from tests import models
from tests.training import same

X = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
Y = X[:, :1] * 2


def made(**arguments: Any) -> Trainer:
    given = {"loss": "squared_error", "epochs": 1, "progress": False, "receipt": False}
    return Trainer(models.linear(), **{**given, **arguments})


# ---------------------------------------------------------------------- attributes and methods


@pytest.mark.parametrize(("name", "here"), _ATTRIBUTES["Trainer"].items())
def test_a_method_of_another_library_has_its_name_here(name: str, here: str) -> None:
    """The name that is given exists, and the error is Python's, so that hasattr is False."""
    trainer = made()
    with pytest.raises(AttributeError, match="here it is") as error:
        getattr(trainer, name)
    assert str(error.value).endswith(here)
    assert not hasattr(trainer, name)
    assert hasattr(trainer, here.partition("(")[0])


@pytest.mark.parametrize("name", _ATTRIBUTES["History"])
def test_an_attribute_of_another_history_has_its_name_here(name: str) -> None:
    history = made().fit(X, Y)
    with pytest.raises(AttributeError) as error:
        getattr(history, name)
    here = str(error.value).partition("here it is ")[2]
    first = "history['loss']" if here.startswith("history['loss']") else here.partition("(")[0]
    assert eval(first, {"history": history}) is not None


def test_other_attributes_are_absent_as_before() -> None:
    trainer = made()
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'nothing'$"):
        _ = trainer.nothing  # type: ignore[attr-defined]
    assert getattr(trainer.fit(X, Y), "nothing", 3) == 3
    again = pickle.loads(pickle.dumps(trainer))
    same(copy.copy(again).get_state(), trainer.get_state(), 0)


# ---------------------------------------------------------------------- data


class NoLength:
    """As torch's DataLoader of an IterableDataset: it has ``__len__``, which raises TypeError."""

    def __len__(self) -> int:
        raise TypeError("object of type 'Stream' has no len()")

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([(X[:6], Y[:6]), (X[6:], Y[6:])])


@pytest.mark.parametrize("wrapped", [lambda d: d, Batches], ids=["bare", "Batches"])
def test_a_loader_without_a_length(wrapped: Any) -> None:
    """The training is that of a list of the same batches."""
    trainer, other = made(epochs=2), made(epochs=2)
    trainer.fit(wrapped(NoLength()))
    other.fit(list(NoLength()))
    same(trainer.get_state(), other.get_state(), 0)
    assert trainer.evaluate(wrapped(NoLength())) == other.evaluate(list(NoLength()))


@pytest.mark.parametrize(
    "give", [zip, lambda x, y: list(zip(x, y, strict=True))], ids=["zip", "list"]
)
@pytest.mark.parametrize("y", [Y, Y[:, 0]], ids=["columns", "numbers"])
def test_rows_in_place_of_batches(give: Any, y: Any) -> None:
    with pytest.raises(DataError, match=r"must yield batches; .* pass arrays as fit\(X, y\)"):
        made().fit(give(X, y))


def test_a_batch_of_a_loader_of_mappings_names_its_keys() -> None:
    with pytest.raises(DataError, match="with the keys 'input_ids', 'labels'; expected"):
        made().fit([{"input_ids": X, "labels": Y}])


@pytest.mark.parametrize("path", ["data.npz", Path("data.npz")], ids=["str", "Path"])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_path_in_place_of_arrays(path: Any, method: str) -> None:
    text = r"'data\.npz', expected arrays, a data source or batches; numpy\.load reads"
    with pytest.raises(DataError, match=text):
        getattr(made(), method)(path)


def test_weights_of_classes_in_place_of_those_of_rows() -> None:
    with pytest.raises(DataError, match="the option class_weight of a loss"):
        made().fit(X, Y, sample_weight={0: 1.0, 1: 2.0})


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_masked_values_are_not_used_and_other_arrays_of_numpy_are() -> None:
    """The values under a mask were trained on, in silence; a matrix was a TypeError of numpy."""
    masked = np.ma.masked_greater(X, 1.0)
    for call in (lambda: made().fit(masked, Y), lambda: made().predict(masked)):
        with pytest.raises(DataError, match="X has masked values"):
            call()
    with pytest.raises(DataError, match="y has masked values"):
        made().fit(X, np.ma.masked_less(Y, 0.0))
    wanted = made()
    wanted.fit(X, Y)
    for given in (np.asmatrix(X), np.ma.array(X, mask=False)):
        trainer = made()
        trainer.fit(given, Y)
        same(trainer.get_state(), wanted.get_state(), 0)


# ---------------------------------------------------------------------- arguments and files


def test_options_of_a_loss_given_to_fit_say_where_they_belong() -> None:
    with pytest.raises(ArgumentError, match=r"Trainer\(…, loss=…\); pass it as an option of the"):
        made().fit(X, Y, class_weight={0: 1.0})  # type: ignore[call-arg]


@pytest.mark.parametrize("text", ["Adam(lr=0.1)", "torch.optim.Adam", "adam 0.1"])
def test_an_optimizer_as_an_expression_is_shown_whole(text: str) -> None:
    with pytest.raises((PluginError, ConfigError), match=re.escape(text)):
        made(optimizer=text)


@pytest.mark.parametrize("name", ["m.onnx", "m.pt", "m.pth", "m.h5", "m.keras", "m.safetensors"])
def test_save_does_not_make_a_folder_of_the_name_of_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"writes a folder.*Trainer\.export\('m\.onnx'\)"):
        made().save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    assert made().save(tmp_path / "m.ckpt").is_dir()


def test_a_folder_in_place_of_a_model_names_the_models_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pass the \.onnx file in it$"):
        Trainer(tmp_path, loss="squared_error")
    onnx.save(models.linear(), tmp_path / "trained.onnx")
    with pytest.raises(ModelError, match=r"in it: .*trained\.onnx$"):
        Trainer(tmp_path, loss="squared_error")
