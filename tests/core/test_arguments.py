"""One list of arguments: Trainer, recipes, estimators and the reference have what it has."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    KINDS,
    Arguments,
    ConfigError,
    Recipe,
    Trainer,
    field_types,
    internals_of,
    key_choices,
    kinds_of_plugins,
)
from ortflex_core.training.config.arguments import wrong
from ortflex_plugins.cli.reference import pages
from tests import models
from tests.core import trainer_signature
from tests.training import plugins

pytestmark = pytest.mark.once

FIELDS = {f.name: f for f in attrs.fields(Arguments)}


def test_the_trainers_source_is_that_of_the_list() -> None:
    """Type checkers and editors read the source: ``python -m tests.core.trainer_signature``."""
    source = trainer_signature.SOURCE.read_text(encoding="utf-8")
    assert trainer_signature.written(source) == source


def test_the_trainers_signature_is_the_list_field_by_field() -> None:
    """Read by inspection alone, so that a mistake of what writes the source is found, too."""
    parameters = dict(inspect.signature(Trainer).parameters)
    assert list(parameters) == ["model", *FIELDS, "plugins"]
    types = trainer_signature.annotations()
    for name, field in FIELDS.items():
        parameter = parameters[name]
        assert parameter.kind is parameter.KEYWORD_ONLY, name
        required = parameter.default is parameter.empty
        assert (attrs.NOTHING if required else parameter.default) == field.default, name
        assert parameter.annotation == types[name], name


def test_the_trainers_docstring_has_the_help_of_every_argument() -> None:
    text = inspect.getdoc(Trainer) or ""
    args = text.partition("\nArgs:\n")[2].partition("\nRaises:\n")[0]
    entries = re.split(r"\n    (?=\w+: )", "\n" + args)[1:]
    found = {e.partition(": ")[0]: " ".join(e.partition(": ")[2].split()) for e in entries}
    assert list(found) == ["model", *FIELDS, "plugins"]
    for name, field in FIELDS.items():
        assert found[name] == field.metadata["help"] + ".", name


def test_a_recipe_has_every_argument_and_begins_with_the_files() -> None:
    own = {f.name: f for f in attrs.fields(Recipe)}
    first = ["model", "data", "loss", "validation", "stratify", "output"]
    assert list(own) == [*first, *(name for name in FIELDS if name != "loss"), "plugins"]
    for name, field in FIELDS.items():
        assert (own[name].default, own[name].metadata) == (field.default, field.metadata), name


def test_the_page_of_keys_has_the_help_of_every_argument() -> None:
    rows = [line for line in pages(plugins())["configuration.md"].splitlines() if line[:3] == "| `"]
    fields = {f"`{field.name}`": field for field in attrs.fields(Recipe)}
    assert len(rows) == len(fields)
    for row in rows:
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]]
        field = fields.pop(cells[0])
        plain = re.sub(r"\\([<>|])", r"\1", cells[3])
        meaning = re.sub("`(True|False)`", lambda found: found[0].lower(), field.metadata["help"])
        assert plain.replace("`", "") == meaning.replace("`", "")


# A value that is wrong whatever plugins and model there are, and what is said of it.
WRONG: dict[str, tuple[Any, str]] = {
    "head": (0, "expected labels, a table or an integer >= 1, got 0"),
    "params": (5, "expected a name or a list of names, got 5"),
    "freeze": (5, "expected a name or a list of names, got 5"),
    "learning_rate": (float("nan"), "expected a finite number > 0, got nan"),
    "groups": (5, "expected a list of tables, got 5"),
    "clip_value": (-1, "expected a finite number > 0, got -1"),
    "clip_norm": (0.0, "expected a finite number > 0, got 0.0"),
    "accumulate": (0, "expected an integer >= 1, got 0"),
    "recompute": (1, "expected True, False, an integer >= 2 or names of tensors, got 1"),
    "sync_every": (0, "expected an integer >= 1, got 0"),
    "shard_state": ("yes", "expected True or False, got 'yes'"),
    "batch_size": (2.5, "expected an integer >= 1, got 2.5"),
    "drop_last": ("yes", "expected True or False, got 'yes'"),
    "epochs": (True, "expected an integer >= 1, got True"),
    "shuffle": ("yes", "expected True or False, got 'yes'"),
    "seed": (-1, "expected an integer >= 0, got -1"),
    "reduction": ("avg", "expected 'mean' or 'sum', got 'avg'"),
    "reinitialize": ([1], "expected a name or a list of names, got [1]"),
    "check_finite": (None, "expected True or False, got None"),
    "cache": (True, "expected 'auto', 'memory', 'disk' or False, got True"),
    "batch_norm": ("off", "expected 'auto', 'train' or 'freeze', got 'off'"),
    "update_bn": (1, "expected True or False, got 1"),
    "dropout": (1.0, "expected 'file', 'off' or a number >= 0 and < 1, got 1.0"),
    "threads": ("all", "expected 'auto' or an integer >= 1, got 'all'"),
    "gradients": (5, "expected a name or a list of names, got 5"),
    "prefer": ([None], "expected a name or a list of names, got [None]"),
    "free_batch": ("no", "expected True or False, got 'no'"),
    "receipt": (1, "expected True or False, got 1"),
    "progress": (1, "expected True or False, got 1"),
}


def test_one_error_lists_all_wrong_arguments_and_components() -> None:
    """Also what the registry says; an argument that is wrong in itself is not asked of it a second time."""
    given = {name: value for name, (value, _) in WRONG.items()}
    given |= {"optimizer": {"name": "adam", "bta1": 0.8, "beta2": 2}, "metrics": ["acuracy"]}
    with pytest.raises(ConfigError) as raised:
        Trainer(models.linear(), loss="squared_error", plugins=plugins(), **given)
    lines = [f"{name}: {text}" for name, (_, text) in WRONG.items()]
    found = list(raised.value.problems)
    assert found[: len(lines)] == lines
    assert [line.partition(";")[0] for line in found[len(lines) :]] == [
        "optimizer.bta1: unknown parameter",
        "optimizer.beta2: must be a number >= 0 and < 1, got 2",
        "metrics[0]: unknown metric 'acuracy'",
    ]


@pytest.mark.parametrize("name", WRONG)
def test_a_single_wrong_value_gives_one_line(name: str) -> None:
    value, text = WRONG[name]
    with pytest.raises(ConfigError) as raised:
        Trainer(models.linear(), loss="squared_error", plugins=plugins(), **{name: value})
    assert list(raised.value.problems) == [f"{name}: {text}"]


def test_what_is_not_checked_here_takes_plugins_or_labels() -> None:
    """A new argument that is a number, a flag or a text has a check, and a case above."""
    assert set(FIELDS) - set(WRONG) == {*kinds_of_plugins(), "classes"}
    assert set(kinds_of_plugins().values()) == set(KINDS) - {"data", "gradients", "decompositions"}


def test_files_are_checked_for_the_same_ranges(tmp_path: Path) -> None:
    """Values of the right type: the Trainer's own line, before there is a Trainer."""
    onnx.save(models.linear(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=np.zeros((4, 3)), y=np.zeros(4))
    table = {"model": str(tmp_path / "model.onnx"), "data": str(tmp_path / "data.npz")}
    types = field_types(Recipe)
    of_type = {"learning_rate", "clip_norm", "clip_value", "accumulate", "seed", "dropout"}
    assert of_type < set(types)
    given = dict.fromkeys(of_type, -1)
    with pytest.raises(ConfigError) as raised:
        Recipe.from_mapping({**table, "loss": "squared_error", **given}, plugins())
    assert {line.partition(":")[0] for line in raised.value.problems} == of_type


def test_a_files_problems_come_in_the_order_of_its_keys() -> None:
    """Not in that of a set, which is another one in every process."""
    names = ["optimizer", "schedule", "constraint", "averaging", "device", "backend"]
    table = {"model": "no.onnx", "data": "no.npz", "loss": "no", **dict.fromkeys(names, "no")}
    with pytest.raises(ConfigError) as raised:
        Recipe.from_mapping(table, plugins())
    found = [line.partition(":")[0] for line in raised.value.problems]
    assert found == ["model", "data", "loss", *names]


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("metrics", "mae", ("mae",)),
        ("metrics", {"name": "top_k", "k": 3}, ({"name": "top_k", "k": 3},)),
        ("params", "coef", ("coef",)),
        ("params", (n for n in ["coef", "!b*"]), ("coef", "!b*")),
        ("params", None, None),
        ("reinitialize", True, True),
        ("gradients", ["signal"], ("signal",)),
        ("schedule", {"name": "a", "steps": [1, 2]}, {"name": "a", "steps": (1, 2)}),
    ],
)
def test_values_are_kept_in_one_form(name: str, given: Any, kept: Any) -> None:
    made = Arguments(loss="squared_error", **{name: given})
    assert getattr(made, name) == kept
    again = attrs.evolve(made)
    assert again == made == copy.deepcopy(made) == pickle.loads(pickle.dumps(made))


def test_a_table_of_the_users_is_not_shared() -> None:
    """What is changed after the Trainer was made does not change what its checkpoints say."""
    optimizer = {"name": "adam", "beta1": 0.8}
    trainer = Trainer(models.linear(), loss="squared_error", optimizer=optimizer, plugins=plugins())
    optimizer["beta1"] = 0.1
    assert internals_of(trainer).arguments["optimizer"] == {"name": "adam", "beta1": 0.8}


def test_the_estimators_parameters_of_the_same_name_are_the_same() -> None:
    """Meaning and default; what differs is listed with its reason."""
    base = pytest.importorskip("ortflex_plugins.estimators._base")
    own = {f.name: f for f in attrs.fields(base.OrtEstimator)}
    assert set(base.SHARED) == set(own) & set(FIELDS)
    defaults = {n: own[n].default for n in base.SHARED if own[n].default != FIELDS[n].default}
    assert defaults == base.OWN_DEFAULTS


@pytest.mark.parametrize("name", ["OrtRegressor", "OrtClassifier"])
def test_an_estimators_constructor_says_all_its_parameters(name: str) -> None:
    """With types and defaults, as scikit-learn, editors and help() read them."""
    estimators = pytest.importorskip("ortflex_plugins.estimators")
    cls = getattr(estimators, name)
    parameters = inspect.signature(cls).parameters
    made = cls()
    assert set(parameters) == set(made.get_params())
    for key, parameter in parameters.items():
        only = parameter.POSITIONAL_OR_KEYWORD if key == "model" else parameter.KEYWORD_ONLY
        assert parameter.kind is only
        assert parameter.default == made.get_params()[key]
        assert parameter.annotation is not parameter.empty
    text = inspect.getdoc(cls) or ""
    assert name == "OrtClassifier" or all(re.search(rf"\b{key}\b", text) for key in parameters)


@pytest.mark.parametrize("scalar", [np.float16, np.float32, np.float64, np.longdouble, np.int8])
def test_scalars_of_numpy_are_numbers(scalar: Any) -> None:
    """Also where a warning is an error; components keep them as Python's numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not wrong({"learning_rate": scalar(1)})
        assert wrong({"learning_rate": scalar(0)})
        adam = plugins()["optimizers"].load("adam")(eps=scalar(1))
    assert type(adam.eps) in (int, float)
    assert adam.describe()["eps"] == 1
    with pytest.raises(ValueError, match="eps"):
        plugins()["optimizers"].load("adam")(eps=scalar(-1))


def test_the_choices_of_a_key_are_words_of_a_recipe() -> None:
    for name in FIELDS:
        assert all(isinstance(word, str) for word in key_choices(name)), name


def test_a_single_table_of_a_group_is_a_list_of_one() -> None:
    group = {"params": "intercept", "rate": 0.5}
    one, several = (Arguments(loss="squared_error", groups=g) for g in (group, [group]))
    assert one == several
    assert not one.problems()
    trainer = Trainer(models.linear(), loss="squared_error", groups=group)
    (found,) = internals_of(trainer).setup.problem.updating.groups
    assert (found.parameters, found.rate) == (("intercept",), 0.5)


@pytest.mark.parametrize("given", ["folder", 3, {"name": "adam"}])
def test_plugins_that_are_no_plugins_are_an_error(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^plugins: "):
        Trainer(models.linear(), loss="squared_error", plugins=given)
