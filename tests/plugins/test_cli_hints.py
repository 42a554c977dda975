"""Names that people type, of other libraries or in capitals: what is said, and offered after TAB."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import attrs
import numpy as np
import onnx
import pytest
from click.shell_completion import BashComplete, ZshComplete

from ortflex_core import (
    KINDS,
    TABLES,
    Arguments,
    ConfigError,
    DataError,
    PluginError,
    Recipe,
    Trainer,
    component_schema,
    names_elsewhere,
)
from ortflex_core.kernel.errors import ArgumentError
from ortflex_plugins.cli.main import COMMANDS, ELSEWHERE, main
from ortflex_plugins.cli.plugins import kind_of
from ortflex_plugins.data.csv import Csv
from tests import children, models
from tests.plugins.commands import followed, ortflex, project, refused, works
from tests.training import plugins

pytestmark = pytest.mark.once

BASE = (
    'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\nepochs = 1\noutput = "run"\n'
)


folder = project(BASE)


# ---------------------------------------------------------------------- other names


def test_synonyms_are_no_keys_and_mean_keys() -> None:
    keys = {f.name for f in attrs.fields(Recipe)}
    assert {word.meaning for word in names_elsewhere().values()} <= keys
    assert not set(names_elsewhere()) & keys
    assert {f.name for f in attrs.fields(Arguments)} <= keys


def test_keys_of_other_libraries_are_translated() -> None:
    """Each is one error that names the key, and none lists all keys."""
    every = {
        "model": "m",
        "data": "d",
        "loss": "squared_error",
        **dict.fromkeys(names_elsewhere(), 1),
    }
    with pytest.raises(ConfigError) as caught:
        Recipe.from_mapping(every, plugins())
    lines = [line.partition(": unknown key; ") for line in str(caught.value).splitlines()]
    said = {name: text for name, _, text in lines if text}
    assert said.keys() == names_elsewhere().keys()
    for name, (meaning, _) in names_elsewhere().items():
        assert said[name].startswith(f"did you mean '{meaning}'?"), name
        assert "Known:" not in said[name]


def test_arguments_of_other_libraries_are_translated() -> None:
    """Those of the Trainer; what belongs to fit or to a recipe is said as such."""
    with pytest.raises(ArgumentError) as caught:
        Trainer(models.mlp(), "squared_error", **dict.fromkeys(names_elsewhere(), 1))
    lines = [line.partition("; ") for line in str(caught.value).splitlines()]
    said = {start.removeprefix("Trainer has no argument "): text for start, _, text in lines}
    for name, (meaning, _) in names_elsewhere().items():
        assert meaning in said[repr(name)], name
        assert "Known:" not in said[repr(name)]


@pytest.mark.parametrize(
    ("argument", "theirs", "ours"),
    [
        ("loss", "CrossEntropyLoss", "softmax_cross_entropy"),
        ("loss", "sparse_categorical_crossentropy", "softmax_cross_entropy"),
        ("loss", "SmoothL1Loss", "huber"),
        ("loss", "BCEWithLogitsLoss", "log_loss"),
        ("loss", "MSELoss", "squared_error"),
        ("loss", "L1Loss", "absolute_error"),
        ("loss", "KLDivLoss", "kullback_leibler"),
        ("schedule", "ReduceLROnPlateau", "plateau"),
        ("schedule", "CosineAnnealingLR", "cosine"),
        ("schedule", "OneCycleLR", "one_cycle"),
        ("schedule", "StepLR", "step"),
        ("schedule", "ExponentialLR", "exponential"),
        ("callbacks", "EarlyStopping", "early_stopping"),
        ("callbacks", "ModelCheckpoint", "checkpoint"),
        ("callbacks", "CSVLogger", "csv_log"),
        ("callbacks", "TensorBoardLogger", "tensorboard"),
        ("callbacks", "WandbCallback", "wandb"),
        ("metrics", "MeanAbsoluteError", "mae"),
        ("metrics", "F1Score", "f1"),
        ("metrics", "AUROC", "roc_auc"),
        ("optimizer", "Adam_W", "adamw"),
    ],
)
def test_components_of_other_libraries_are_translated(
    argument: str, theirs: str, ours: str
) -> None:
    given = {"loss": "squared_error", argument: [theirs] if argument == "callbacks" else theirs}
    with pytest.raises(PluginError, match=f"(its name in ortflex is|did you mean) '{ours}'"):
        Trainer(models.mlp(), **given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lr=0.1", "lr: unknown key; did you mean 'learning_rate'?"),
        ("optimizer.lr=0.1", "the rate is a key of the recipe: learning_rate"),
        ("loss=mse", "unknown loss 'mse'; its name in ortflex is 'squared_error'"),
        ("loss=BCE", "unknown loss 'BCE'; its name in ortflex is 'log_loss'"),
        ("device=gpu", "unknown device 'gpu'; its name in ortflex is 'cuda'"),
        ("metrics=auc", "unknown metric 'auc'; its name in ortflex is 'roc_auc'"),
    ],
)
def test_names_of_other_libraries_are_translated(folder: Path, change: str, said: str) -> None:
    assert said in refused("train", "train.toml", change).output


def test_aliases_are_in_lower_case_and_name_nothing_else() -> None:
    """An alias that were a plugin's name, or that two have, would say something wrong."""
    for kind in KINDS:
        seen: set[str] = set()
        for name, plugin in plugins()[kind].classes():
            aliases = getattr(plugin, "aliases", ())
            assert all(a == a.lower() for a in aliases), name
            assert not seen & set(aliases), name
            assert not set(aliases) & set(plugins()[kind].names()), name
            seen |= set(aliases)


@pytest.mark.parametrize("name", ["Adam", "ADAM", "aDaM"])
def test_capitals_are_accepted(name: str) -> None:
    registry = plugins()["optimizers"]
    assert registry.load(name) is registry.load("adam")
    assert plugins().component("optimizers", {"name": name, "beta1": 0.5}).beta1 == 0.5
    assert type(plugins().component("optimizers", "AdamW")).name == "adamw"


# ---------------------------------------------------------------------- ortflex plugins


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_kind_lists_its_plugins_with_a_line_about_each(kind: str) -> None:
    for word in (kind, kind.upper()):
        assert kind_of(word, KINDS) == kind
    result = works("plugins", kind)
    lines = result.output.splitlines()
    for name in plugins()[kind].names():
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert len(row.split()) > 3
        assert "no description" not in row
    rows = json.loads(ortflex("plugins", kind, "--json").output)
    assert {row["ask_for"] for row in rows} == set(plugins()[kind].names())


@pytest.mark.parametrize(
    "name", ["adam", "Adam", "huber", "warmup", "checkpoint", "csv", "early_stopping"]
)
def test_a_name_shows_its_parameters_with_defaults(name: str) -> None:
    result = works("plugins", name)
    [registry] = [r for r in plugins() if r.kind in KINDS and name.lower() in r.names()]
    schema = component_schema(registry.load(name))
    assert schema
    for field in schema:
        row = next(s for s in result.output.splitlines() if s.startswith(f"{field['name']} "))
        shown = "required" if field["required"] else str(field["default"])
        assert shown in row
        assert field["help"] in row


def test_every_parameter_of_every_component_has_a_meaning() -> None:
    """The class: a row without a meaning in the tables of `ortflex plugins NAME` and of the reference."""
    registries = [r for r in plugins() if r.kind in KINDS and r.kind not in TABLES]
    without = [
        f"{registry.kind} {entry.name} {field['name']}"
        for registry in registries
        for entry in registry
        if entry.distribution == "ortflex"
        for field in component_schema(registry.load(entry.name))
        if not field["help"]
    ]
    assert not without


def test_a_name_of_two_kinds_shows_both() -> None:
    text = ortflex("plugins", "elastic").output
    assert "elastic (loss, from ortflex" in text
    assert "elastic (penalty, from ortflex" in text


def test_unknown_names_are_translated_or_completed() -> None:
    assert "its name in ortflex is 'absolute_error'" in refused("plugins", "l1_loss").output
    both = ortflex("plugins", "mse")  # a quantizer, and a name of a loss
    assert both.exit_code == 0
    assert "squared_error" in both.output
    assert "did you mean 'adam'" in ortflex("plugins", "adm").output
    with pytest.raises(PluginError, match="Known"):
        plugins()["losses"].entry("zzzzz")


# ---------------------------------------------------------------------- ortflex check


def test_check_has_the_summary_first_and_the_rest_on_demand(folder: Path) -> None:
    proto = followed(models.linear(), "Mul", "scale", unity=[2.0])
    onnx.save(proto, "model.onnx")
    short, long = ortflex("check", "model.onnx"), ortflex("check", "model.onnx", "--all")
    assert short.exit_code == long.exit_code == 0
    assert short.output.startswith("model.onnx: opset ")
    assert "not trained: unity (" in short.output
    assert "\ntrained: coef" not in short.output
    assert "--all lists the " in short.output
    assert "\ntrained: coef" in long.output
    for node in proto.graph.node:
        row = [s for s in long.output.splitlines() if node.op_type in s.split()[1:2]]
        assert row, node.op_type
        assert not [s for s in short.output.splitlines() if node.op_type in s.split()[1:2]]


def test_check_shows_the_nodes_that_stop_a_gradient(folder: Path) -> None:
    onnx.save(followed(models.linear(), "Round", "rounded"), "model.onnx")
    result = refused("check", "model.onnx")
    assert "rounded" in result.output
    assert "blocks coef, intercept" in result.output


# ---------------------------------------------------------------------- csv


def test_csv_without_a_header_is_the_same_table(tmp_path: Path) -> None:
    rows = "1.5,2,7\n3,4,8\n5,6,9\n"
    (tmp_path / "bare.csv").write_text(rows)
    (tmp_path / "headed.csv").write_text("a,b,y\n" + rows)
    bare = Csv(path=str(tmp_path / "bare.csv"), header=False, target="2").load()
    headed = Csv(path=str(tmp_path / "headed.csv")).load()
    np.testing.assert_array_equal(bare.inputs["X"], headed.inputs["X"])
    np.testing.assert_array_equal(bare.labels["y"], headed.labels["y"])
    chosen = Csv(path=str(tmp_path / "bare.csv"), header=False, target="0", columns=["2"]).load()
    assert chosen.inputs["X"].ravel().tolist() == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("rows", ["0.0,0.0,1\n1,2,3\n", "0.5,0.25,1\n1,2,3\n"])
def test_a_first_line_of_numbers_is_recognized(tmp_path: Path, rows: str) -> None:
    """Two equal numbers were 'two columns of one name', others a list of 'known' columns."""
    (tmp_path / "d.csv").write_text(rows)
    assert Csv(path=str(tmp_path / "d.csv"), target="2").load().rows == 2
    with pytest.raises(DataError, match=r"line 1 has numbers only.* header = false") as caught:
        Csv(path=str(tmp_path / "d.csv"), header=True).load()
    assert "Known" not in str(caught.value)


def test_errors_of_a_table_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match='named 0 to 2: target = "2" is the last'):
        Csv(path=str(path), header=False).load()
    path.write_text("1,2,3\n4,5\n")
    with pytest.raises(DataError, match="line 2: expected 3 fields as in line 1, got 2"):
        Csv(path=str(path), header=False, target="0").load()
    path.write_text("")
    with pytest.raises(DataError, match="expected rows, found nothing"):
        Csv(path=str(path), header=False).load()


def test_an_array_of_another_name_is_asked_for(folder: Path) -> None:
    np.savez("data.npz", x=np.zeros((4, 5)), labels=np.zeros((4, 1)))
    result = refused("train", "train.toml")
    assert (
        "the labels are read from 'y', but there is no such array; choose one, for example data"
        in result.output
    )
    assert "Known: labels, x" in result.output
    assert 'data = { path = …, target = "…" }' in result.output


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_an_optimizer_says_where_the_learning_rate_is_set(name: str) -> None:
    assert "learning_rate=0.01" in ortflex("plugins", name).output


# ---------------------------------------------------------------------- first mistakes


def test_a_run_without_checkpoints_is_not_offered_for_resume(folder: Path) -> None:
    works("train", "train.toml")
    again = refused("train", "train.toml")
    assert "--resume" not in again.stderr
    assert "To start a new run, use --force" in again.stderr
    resumed = ortflex("train", "train.toml", "--resume", "run")
    assert "this run wrote no checkpoints. The callback checkpoint writes them" in resumed.stderr
    checkpoints = "callbacks=checkpoint"
    works("train", "train.toml", checkpoints, "output=other")
    again = ortflex("train", "train.toml", checkpoints, "output=other")
    assert "To continue it, use --resume" in again.stderr


def test_a_folder_of_runs_is_no_run_but_names_them(folder: Path) -> None:
    works("train", "train.toml", "output=runs/a")
    assert "; runs in it: runs/a" in ortflex("report", "runs").stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("model = model.onnx", "in 'model = model.onnx'; names and paths are in quotation marks"),
        ("model = /tmp/m.onnx", "names and paths are in quotation marks"),
        ("model = 'a' 3", "Expected newline or end of document"),
    ],
)
def test_a_value_without_quotation_marks_is_shown(folder: Path, line: str, text: str) -> None:
    (folder / "bare.toml").write_text(line)
    assert text in ortflex("train", "bare.toml").stderr


def test_a_command_of_another_tool_or_a_mistyped_one_has_the_name_here() -> None:
    """The class: the name of a command that other tools have, such as fit, or one with a mistake."""
    assert not set(COMMANDS) & set(ELSEWHERE)
    for name, command in {**ELSEWHERE, "trian": "train", "evaluat": "evaluate"}.items():
        result = ortflex(name, "run")
        assert result.exit_code == 2
        assert f"did you mean {command!r}" in result.stderr, name


def test_a_file_or_a_word_in_place_of_a_command_has_the_command() -> None:
    for word, hint in {
        "train.toml": "`ortflex train train.toml`",
        "model.onnx": "`ortflex init model.onnx`",
        "help": "--help",
        "version": "--version",
    }.items():
        result = ortflex(word)
        assert result.exit_code == 2
        assert f"did you mean {hint}?" in result.stderr


# ---------------------------------------------------------------------- after TAB, in bash and zsh


def offered(*words: str, shell: type[BashComplete | ZshComplete] = ZshComplete) -> set[str]:
    """What completes the last word."""
    complete = shell(main, {}, "ortflex", "_ORTFLEX_COMPLETE")
    return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}


def names(kind: str) -> set[str]:
    return set(plugins()[kind].names())


def test_tab_offers_commands() -> None:
    assert offered("pl") == {"plugins"}


def test_tab_offers_kinds_and_names_of_plugins() -> None:
    found = offered("plugins", "")
    assert set(KINDS) <= found
    for kind in KINDS:
        assert names(kind) <= found
    assert offered("plugins", "adam") == {"adam", "adamax", "adamw"}
    assert offered("plugins", "ADAMA") == {"adamax"}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("check", "m.onnx", "--optimizer"), "optimizers"),
        (("check", "m.onnx", "--loss"), "losses"),
        (("graph", "m.onnx", "--loss"), "losses"),
        (("compare", "t.toml", "--backend"), "backends"),
        (("evaluate", "run", "--metric"), "metrics"),
    ],
)
def test_tab_offers_plugins_for_an_option(words: tuple[str, ...], kind: str) -> None:
    assert offered(*words, "") == names(kind)
    assert offered(*words, "zzz") == set()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_tab_offers_keys_of_a_recipe_and_their_values(command: str) -> None:
    keys = {f"{f.name}=" for f in attrs.fields(Recipe)}
    assert offered(command, "t.toml", "") == keys
    assert offered(command, "t.toml", "epochs=3", "learn") == {"learning_rate="}
    assert offered(command, "t.toml", "optimizer=ada") == {
        f"optimizer={n}" for n in names("optimizers") if n.startswith("ada")
    }
    assert offered(command, "t.toml", "reduction=") == {"reduction=mean", "reduction=sum"}
    assert offered(command, "t.toml", "epochs=") == set()
    assert offered(command, "t.toml", "no_such=") == set()


@pytest.mark.parametrize(
    "words", [("optimizer", "=", "ada"), ("epochs", "=", "3", "loss", "=", "h")]
)
def test_bash_divides_the_word_at_the_equals_sign(words: tuple[str, ...]) -> None:
    kind = "optimizers" if "optimizer" in words else "losses"
    expected = {n for n in names(kind) if n.startswith(words[-1])}
    assert expected
    assert offered("train", "t.toml", *words, shell=BashComplete) == expected


def test_a_shell_gets_the_answer(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "_ORTFLEX_COMPLETE": "bash_complete",
        "COMP_WORDS": "ortflex train t.toml optimizer = adam",
        "COMP_CWORD": "5",
    }
    code = "from ortflex_plugins.cli.main import main; main(prog_name='ortflex')"
    done = children.run([sys.executable, "-c", code], env=environment, cwd=tmp_path)
    assert {line.split(",")[1] for line in done.stdout.split()} == {"adam", "adamax", "adamw"}
    assert done.stderr == ""
