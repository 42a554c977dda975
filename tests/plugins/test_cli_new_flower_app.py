"""``ortflex new-flower-app``: the files that it writes, and what it refuses. Flower is not needed."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from ortflex_core import Recipe
from tests.plugins.commands import prepare, refused, works

pytestmark = pytest.mark.once

RECIPE = 'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\n'


def test_the_project_has_a_client_a_server_and_the_recipe(tmp_path: Path) -> None:
    prepare(tmp_path, RECIPE + 'callbacks = ["csv_log"]\noutput = "run"\nlearning_rate = 0.5\n')
    folder = tmp_path / "my-app"
    done = works("new-flower-app", str(tmp_path / "train.toml"), "--output", str(folder))
    assert "flwr run" in done.output
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "my_app.server_app:app",
        "clientapp": "my_app.client_app:app",
    }
    assert app["config"]["output"] == str(folder / "trained.onnx")
    for name in ("client_app", "server_app"):
        tree = ast.parse((folder / "my_app" / f"{name}.py").read_text())
        assert any(isinstance(n, ast.Assign) and n.targets[0].id == "app" for n in tree.body)  # type: ignore[attr-defined]
    recipe = Recipe.load(folder / "my_app" / "train.toml")
    assert (recipe.model, recipe.data) == (str(tmp_path / "model.onnx"), str(tmp_path / "data.npz"))
    assert (recipe.learning_rate, recipe.callbacks, recipe.output) == (0.5, (), None)
    again = refused("new-flower-app", str(tmp_path / "train.toml"), "--output", str(folder))
    assert "exists and was not changed" in again.output


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (RECIPE + "epoch = 3\n", "app", "did you mean 'epochs'"),
        (RECIPE + 'averaging = "ema"\n', "app", "averaging: the averages of a client"),
        (RECIPE + 'distributed = "torch"\n', "app", "distributed: a client trains in one process"),
        (RECIPE, "my_app", "cannot be the name of a project"),
        (RECIPE, "a" * 40, "at most 32"),
    ],
)
def test_wrong_recipes_and_names_write_nothing(
    tmp_path: Path, text: str, name: str, words: str
) -> None:
    prepare(tmp_path, text)
    done = refused("new-flower-app", str(tmp_path / "train.toml"), "-o", str(tmp_path / name))
    assert words in done.output
    assert not (tmp_path / name).exists()


def test_without_flower_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflex_core import ConfigError
    from ortflex_plugins.flower import client_app, server_app

    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    for make in (lambda: client_app(lambda context: ()), lambda: server_app("model.onnx")):
        with pytest.raises(ConfigError, match=r"Flower is not installed: pip install .*\["):
            make()
