"""Arguments are read in one way, and habits of other libraries have an error in our words.

The Trainer and recipes both refuse a value, with the same lines, or neither. The class of habits: a call
that is right in numpy, torch, Keras or scikit-learn. It is an error of ortflex, or of Python with our word
at its end, and never the trace of a library.
"""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    Arguments,
    Batches,
    ConfigError,
    DataError,
    HookManager,
    Model,
    ModelError,
    OrtflexError,
    OutputError,
    Parts,
    Recipe,
    Trainer,
    internals_of,
    kinds_of_plugins,
)
from ortflex_core.kernel.errors import ArgumentError, PluginError
from ortflex_core.kernel.synonyms import _ATTRIBUTES
from tests import models
from tests.training import make, plugins, regression, same

ANY: list[Any] = [
    *(None, True, False, np.True_),
    *(-1, 0, 1, 2, 2.5, 10**400, float("inf"), float("nan")),
    *(np.float32(0.5), np.int64(2), np.float64("nan")),
    *("", "no", "auto", b"no", object(), int),
    *([], ["no"], [None], {}, {"name": 3}, {"title": "no"}, [[]], np.ones(2)),
]
"""Values that some argument takes and others refuse."""
NAMES = {"devices": "cpu", "backends": "fused", "process_groups": "torch"}
"""Plugins that every environment has; of other kinds the first one."""
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


@pytest.mark.once
@pytest.mark.parametrize("name", FIELDS)
def test_the_trainer_and_recipes_give_one_answer(name: str, files: dict[str, str]) -> None:
    model = files["model"] if name == "free_batch" else Model(files["model"], plugins=plugins())
    values = [*ANY, *MORE.get(name, ())]
    if kind := kinds_of_plugins().get(name):
        plugin = NAMES.get(kind, plugins()[kind].names()[0])
        values += [plugin, {"name": plugin, "no_such_parameter": 1}]
    for value in values:
        given = {"loss": "squared_error", name: value}
        of_recipe = refusal(lambda given=given: Recipe.from_mapping(files | given, plugins()))
        of_trainer = refusal(lambda given=given: Trainer(model, **given, plugins=plugins()))
        if of_recipe or name not in OF_THE_MODEL:
            assert [line for line in of_trainer if line not in of_recipe] == [], value
        assert set(of_recipe) <= set(of_trainer), value


@pytest.mark.once
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


@pytest.mark.once
def test_penalties_of_overlapping_globs_are_written_as_they_were_given() -> None:
    l1, l2 = {"name": "l1", "l1": 0.5}, {"name": "l2", "l2": 0.25}
    for given in ({"*": l2, "coef": l1}, {"coef": l1, "*": l2}):
        assert Parts(plugins()).spell_out("penalty", given) == {"by_parameter": given}


@pytest.mark.once
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


@pytest.mark.once
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
