"""Recipes: every error at once with its path, overrides, and TOML that reads back the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, Recipe, Trainer, hook, to_toml
from ortflex_core.training.config.toml import parse_override, read_toml
from ortflex_plugins.losses.cross_entropy import SoftmaxCrossEntropy
from ortflex_plugins.losses.regression import Huber
from ortflex_plugins.optimizers.adam import Adam
from tests import models
from tests.training import plugins, regression

pytestmark = pytest.mark.per_python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and data to train it on."""
    onnx.save(models.linear(), tmp_path / "model.onnx")
    x, y = regression()
    np.savez(tmp_path / "data.npz", X=x, y=y)
    return tmp_path


FILES = 'model = "model.onnx"\ndata = "data.npz"\n'
BASE = FILES + 'loss = "squared_error"\n'


def load(folder: Path, text: str = "", *overrides: str, base: str = BASE) -> Recipe:
    (folder / "train.toml").write_text(base + text, encoding="utf-8")
    return Recipe.load(folder / "train.toml", overrides, plugins())


def problems(folder: Path, text: str = "", *overrides: str, base: str = BASE) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(folder, text, *overrides, base=base)
    return list(raised.value.problems)


def test_paths_are_relative_to_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    recipe = load(folder, 'output = "runs/a"\n')
    assert recipe.model == str(folder / "model.onnx")
    assert recipe.data == str(folder / "data.npz")
    assert recipe.output == str(folder / "runs" / "a")
    # On the command line, paths are what they are for any other command.
    assert load(folder, "", "output=here").output == str(elsewhere / "here")


@pytest.mark.parametrize("key", ["model", "data", "validation", "output", "plugins", "data.path"])
def test_an_empty_path_is_not_the_current_folder(folder: Path, key: str) -> None:
    name = key.partition(".")[0]
    assert problems(folder, "", f"{key}=")[0].startswith(f"{name}: expected a path, got ''")
    if key not in ("model", "data", "data.path"):
        assert problems(folder, f'{key} = ""\n')[0].startswith(f"{name}: expected a path, got ''")


@pytest.mark.parametrize("where", ["file", "override"])
def test_an_override_may_name_a_component_of_the_folder_of_plugins(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the folder is named: the parameters of the component are known when the override is read."""
    monkeypatch.chdir(folder)
    (folder / "parts").mkdir()
    (folder / "parts" / "losses.py").write_text(
        "import attrs\nfrom ortflex_plugins.losses.regression import SquaredError\n\n\n"
        "@attrs.frozen(kw_only=True)\nclass Mine(SquaredError):\n    name = 'mine'\n"
    )
    text, overrides = ('plugins = "parts"\n', []) if where == "file" else ("", ["plugins=parts"])
    recipe = load(folder, text, *overrides, "loss=mine")
    assert recipe.loss == "mine"
    assert recipe.plugins == str(folder / "parts")


@pytest.mark.parametrize(
    ("value", "number"),
    [("20%", "0.2"), ("12.5 %", "0.125"), ("0,2", "0.2"), ("1,5", ""), ("100%", ""), ("0%", "")],
)
def test_a_fraction_that_reads_as_a_path(folder: Path, value: str, number: str) -> None:
    [line] = problems(folder, f'validation = "{value}"\n')
    assert line.endswith(f"a fraction is a number: {number}") == bool(number)
    assert ("a fraction" in line) == bool(number)


def test_all_errors_at_once_each_with_its_path(folder: Path) -> None:
    text = """
epocs = 3
batch_size = "32"
seed = -1
reduction = "avg"
metrics = ["acuracy", { name = "rmse", squared = true }]
validation = 1.5
params = [1]
optimizer = { name = "adam", bta1 = 0.8, beta2 = 2, eps = "small" }
schedule = { name = "warmup", length = 0, schedule = { name = "cosin" } }
penalty = { "coef*" = { l3 = 1 }, intercept = "l7" }
device = "gpu"
backend = "trainig_agent"
"""
    base = BASE.replace("data.npz", "dta.npz").replace('"squared_error"', '{name="hubr"}')
    found = problems(folder, text, base=base)

    def expect(line: str) -> None:
        assert any(re.fullmatch(line, f) for f in found), f"{line}\nis not in\n{found}"

    lists = "`ortflex plugins"
    expect(r"epocs: unknown key; did you mean 'epochs'\? `ortflex init` writes a file that .*")
    expect("batch_size: expected an integer >= 1, got '32'")
    expect("seed: expected an integer >= 0, got -1")
    expect("reduction: expected 'mean' or 'sum', got 'avg'")
    expect(rf"metrics\[0\]: unknown metric 'acuracy'; did you mean 'accuracy'\? ({lists}|Known).*")
    expect(r"metrics\[1\]\.squared: unknown parameter; Known: none")
    expect("validation: expected a fraction > 0 and < 1, got 1.5")
    expect(r"params: expected a name or a list of names, got \[1\]")
    expect(r"optimizer\.bta1: unknown parameter; did you mean 'beta1'\? Known: beta1, beta2, eps")
    expect(r"optimizer\.beta2: must be a number >= 0 and < 1, got 2")
    expect(r"optimizer\.eps: expected a number, got 'small'")
    expect(r"schedule\.length: must be a number >= 1, got 0")
    expect(rf"schedule\.schedule: unknown schedule 'cosin'; .*'cosine'.*{lists} schedules.*")
    expect(r"penalty\.coef\*\.l3: unknown parameter; Known: l1, l2")
    expect(r"penalty\.intercept: unknown penalty 'l7'; .*")
    expect("device: unknown device 'gpu'; its name in ortflex is 'cuda'")
    expect(r"backend: unknown backend 'trainig_agent'; did you mean 'training_agent'\? .*")
    missing = re.escape(str(folder / "dta.npz"))
    expect(rf"data: the file or folder '{missing}' does not exist; did you mean 'data\.npz'.*")
    expect(rf"loss: unknown loss 'hubr'; did you mean 'huber'\? {lists} losses` lists all")
    assert len(found) == 19, found


def test_what_is_missing(folder: Path) -> None:
    assert problems(folder, base="") == [
        "model: is missing; the .onnx file; training starts from its weights",
        "data: is missing; the training data",
        "loss: is missing; the loss to minimize: one loss, {tensor: loss}, or a list of tables with the "
        "optional keys predicted, expected, weight and factor; if no tensor is named, the loss uses "
        "the only float output of the model as the prediction",
    ]
    [text] = problems(folder, base=BASE.replace("model.onnx", "m.onnx"))
    assert text.startswith(f"model: the file {str(folder / 'm.onnx')!r} does not exist; ")
    assert f"'model.onnx'? Known: model.onnx (in {str(folder)!r})" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('loss = { name = "huber", delta = 0 }', "loss.delta: must be a number > 0, got 0"),
        ('loss = { name = "huber", weight = 2 }', "loss.weight: expected the name of a tensor,"),
        ("loss = { delta = 1 }", "loss: expected a name"),
        ('loss = [{ name = "huber" }, "hubr"]', "loss[1]: unknown loss 'hubr'"),
        ("loss = []", "loss: at least one loss is needed, got none"),
    ],
)
def test_losses(folder: Path, line: str, message: str) -> None:
    (found,) = problems(folder, line, base=FILES)
    assert found.startswith(message)


def test_sources_by_their_ending(folder: Path) -> None:
    (folder / "arrays").mkdir()
    (folder / "rows.csv").write_text("a,y\n1,2\n")
    (folder / "rows.tsx").write_text("")
    np.save(folder / "one.npy", np.zeros(3))

    def name(path: str) -> str:
        return load(folder, "", f"data={folder / path}").resolved(plugins()).data["name"]  # type: ignore[no-any-return]

    assert [name(p) for p in ("data.npz", "arrays", "rows.csv")] == ["npz", "npy", "csv"]
    (found,) = problems(folder, "", f"data={folder / 'rows.tsx'}")
    assert "no data source is called 'tsx', the ending of" in found
    (found,) = problems(folder, "", f"data={folder / 'one.npy'}")
    assert "is a single array; specify the folder of .npy files that contains it" in found


# ---------------------------------------------------------------------- overrides


def test_overrides(folder: Path) -> None:
    recipe = load(
        folder,
        'optimizer = { name = "adam", beta1 = 0.5 }\n[penalty]\nname = "l2"\n',
        "optimizer.beta2=0.9",
        "loss=huber",
        "loss.delta=2",
        'params=["coef*"]',
        "schedule.gamma=0.5",
        "schedule.name=step",
        "data.target=y",
        "epochs = 3",
        "metrics=rmse",
        "device=cuda:1",
    )
    assert recipe.optimizer == {"name": "adam", "beta1": 0.5, "beta2": 0.9}
    assert recipe.loss == {"name": "huber", "delta": 2}
    assert recipe.params == ("coef*",)
    assert recipe.schedule == {"name": "step", "gamma": 0.5}
    assert recipe.data == {"name": "npz", "path": str(folder / "data.npz"), "target": "y"}
    assert (recipe.epochs, recipe.metrics, recipe.device) == (3, ("rmse",), "cuda:1")
    assert recipe.penalty == {"name": "l2"}


def test_wrong_overrides(folder: Path) -> None:
    found = problems(folder, "", "epochs", "epochs.x=1", "=3", "shuffle=maybe", "a b=1")
    wanted = "expected key=value, for example epochs=5 or optimizer.beta1=0.8"
    assert found == [
        f"'epochs' is not an override; {wanted}, without spaces around the =",
        "epochs.x=1: epochs is 10, not a table",
        f"'=3' is not an override; {wanted}, without spaces around the =",
        f"'a b=1' is not an override; {wanted}",
        "shuffle: expected True or False, got 'maybe'",
    ]


TEXTS = ("huber", "2024-01-01", "a=b", "1\nx = 2", "")
VALUES = {"1e-3": 1e-3, "true": True, '"7"': "7", "[1, 2]": [1, 2], "{a = 1}": {"a": 1}}


@pytest.mark.parametrize("text", [*TEXTS, *VALUES])
def test_values_are_toml_or_text(text: str) -> None:
    assert parse_override(f"key={text}") == (("key",), VALUES.get(text, text))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("metrics=[accuracy]", '["accuracy"]'),
        ("metrics=[r2, mae]", '["r2", "mae"]'),
        ("optimizer={name=adam, beta1 = 0.8}", '{name="adam", beta1 = 0.8}'),
        ("groups=[{params=[layer.1/W], frozen = true}]", '[{params=["layer.1/W"], frozen = true}]'),
        ('penalty={name="l2", at=head}', '{name="l2", at="head"}'),
    ],
)
def test_lists_that_lost_their_quotation_marks_name_what_to_type(typed: str, meant: str) -> None:
    key = typed.partition("=")[0]
    with pytest.raises(ConfigError, match="the shell removes quotation marks") as caught:
        parse_override(typed)
    hint = str(caught.value).partition("in quotation marks: ")[2]
    assert hint == f"'{key}={meant}'"
    parse_override(hint.strip("'"))


# ---------------------------------------------------------------------- files


def test_toml_errors_have_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    with pytest.raises(ConfigError, match=r"the file '.*train\.toml' does not exist"):
        read_toml(path)
    for content, text in (
        (b'model = "m.onnx"\nloss = huber\n', r"train\.toml:2:8: Invalid value"),
        (b'model = "m.onnx"\nloss = [1,', r"train\.toml:2:11: "),
        (b'model = "\xff"\n', "expected text in UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            read_toml(path)


ODD = ('quo"te\\ \n\t\x01\x7f é 😀', [1, [2.5, "x"]], {"a b": {"": 1}, "é": [], "x-1": {}})


@pytest.mark.parametrize("value", [True, -3, 1e-300, float("inf"), *ODD])
def test_values_read_back(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "value.toml"
    path.write_text(f"value = {to_toml(value)}\n", encoding="utf-8")
    assert read_toml(path) == {"value": value}


RICH = """
validation = 0.25
params = ["*", "!intercept"]
penalty = { "coef*" = { l2 = 0.01 } }
optimizer = { name = "adam", beta1 = 0.8 }
schedule = { name = "warmup", by = "epoch", schedule = { name = "cosine", by = "epoch" } }
metrics = ["rmse"]
device = "cuda:1"
classes = ["no", "yes"]
dropout = 0.1
cache = false
reinitialize = "coef"
"""


@pytest.mark.parametrize("text", ["", RICH])
def test_a_resolved_recipe_reads_back_the_same(folder: Path, text: str) -> None:
    resolved = load(folder, text).resolved(plugins())
    run = folder / "run"
    run.mkdir()
    written = resolved.to_toml(run)
    assert str(folder) not in written  # it can be moved together with the data
    (run / "recipe.toml").write_text(written, encoding="utf-8")
    assert Recipe.load(run / "recipe.toml", plugins=plugins()) == resolved
    assert resolved.resolved(plugins()) == resolved


def test_every_default_is_spelled_out(folder: Path) -> None:
    resolved = load(folder, RICH).resolved(plugins())
    assert resolved.optimizer == {"name": "adam", "beta1": 0.8, "beta2": 0.999, "eps": 1e-8}
    assert resolved.learning_rate == Adam.default_rate
    assert resolved.device == {"name": "cuda", "index": 1, "data_bytes": 2**30}
    elastic = {"name": "elastic", "l1": 0.0, "l2": 0.01}
    assert resolved.penalty == {"by_parameter": {"coef*": elastic}}
    assert resolved.schedule["schedule"]["name"] == "cosine"
    assert resolved.data["target"] == "y"


def test_losses_on_several_tensors_read_back_the_same(folder: Path) -> None:
    for line in (
        'loss = { Y = "huber", XW = { name = "squared_error", factor = 0.5, expected = "z" } }',
        'loss = [{ name = "huber", predicted = "Y" }, { name = "elastic", predicted = "XW" }]',
    ):
        resolved = load(folder, line, base=FILES).resolved(plugins())
        (folder / "again.toml").write_text(resolved.to_toml(folder))
        assert Recipe.load(folder / "again.toml", plugins=plugins()) == resolved


def test_objects_are_written_by_their_names(folder: Path) -> None:
    paths = {"model": str(folder / "model.onnx"), "data": str(folder / "data.npz")}
    recipe = Recipe(**paths, loss=Huber(delta=2.0), optimizer=Adam(beta1=0.5))
    resolved = recipe.resolved(plugins())
    assert resolved.loss == {"name": "huber", "delta": 2.0}
    assert resolved.optimizer["beta1"] == 0.5


def test_what_no_file_can_say_is_refused(folder: Path) -> None:
    paths = {"model": str(folder / "model.onnx"), "data": str(folder / "data.npz")}

    class Quiet:
        @hook
        def epoch_end(self) -> None: ...

    recipe = Recipe(**paths, loss="squared_error", callbacks=(Quiet(),))
    with pytest.raises(ConfigError, match=r"^callbacks: <.*Quiet .*> cannot be written to a TOML"):
        recipe.resolved(plugins()).to_toml()
    recipe = Recipe(**paths, loss=SoftmaxCrossEntropy(ignore_index=None))
    with pytest.raises(ConfigError, match=r"ignore_index=None.*\) cannot be written to a file"):
        recipe.resolved(plugins())


# ---------------------------------------------------------------------- training


def test_a_recipe_trains(folder: Path) -> None:
    seen: list[Recipe] = []

    def recipe_resolved(recipe: Recipe) -> None:
        seen.append(recipe)

    recipe = load(folder, "validation = 0.25\nepochs = 3\nprogress = false\n")
    trainer = Trainer.from_recipe(recipe, plugins(), callbacks=[recipe_resolved])
    assert seen == [recipe.resolved(plugins())]
    history = recipe.run(trainer)
    assert len(history) == 3
    assert history["rows"] == [30, 30, 30]
    assert history.losses[-1] < history.losses[0]
    assert "validation_loss" in history.columns
