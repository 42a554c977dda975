"""The commands as a user calls them: exit codes, texts, and the files they leave."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

import attrs
import click
import numpy as np
import onnx
import pytest

from ortflex_core import Entry, Plugins, Recipe
from ortflex_plugins.cli import reference
from ortflex_plugins.cli.main import COMMANDS, main
from tests import children, models
from tests.plugins.commands import followed, interrupted, ortflex, project, refused, works
from tests.training import plugins, regression

pytestmark = pytest.mark.per_python

ROOT = Path(__file__).parents[2]
BASE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
validation = 0.25
metrics = ["rmse"]
epochs = 3
output = "run"
"""


folder = project(BASE)


# ---------------------------------------------------------------------- all commands


def test_help_lists_every_command_with_its_own_first_line() -> None:
    result = works("--help")
    context = click.Context(main)
    for name, text in COMMANDS.items():
        assert name in result.output
        command = main.get_command(context, name)
        assert command is not None
        assert (command.help or "").splitlines()[0] == text


def test_commands_that_look_around_import_no_runtime() -> None:
    heavy = ["onnx", "onnx_ir", "onnxruntime", "numpy", "torch", "sklearn"]
    for arguments in (["--help"], ["train", "--help"], ["plugins", "--json"]):
        code = (
            "import sys\n"
            "from ortflex_plugins.cli.main import main\n"
            f"try: main({arguments!r})\n"
            "except SystemExit: pass\n"
            f"print([m for m in {heavy!r} if m in sys.modules])\n"
        )
        out = children.run([sys.executable, "-c", code])
        assert out.stdout.splitlines()[-1] == "[]", (arguments, out.stderr)


def test_nonsense_on_the_command_line_exits_with_2() -> None:
    for arguments in (["trian"], ["train"], ["plugins", "--jsn"]):
        assert ortflex(*arguments).exit_code == 2


# ---------------------------------------------------------------------- train


def test_training_fills_the_run_folder(folder: Path) -> None:
    result = works("train", "train.toml", "epochs=4", "optimizer=adam")
    lines = result.stdout.splitlines()
    changed = "`ortflex check --all` or Trainer.summary() lists them, params= selects others"
    assert lines[0] == f"training 2 tensors with 6 numbers; {changed}"
    assert lines[1].startswith("backend ")
    assert sum(line.startswith("epoch ") for line in lines) == 4
    assert lines[-1] == f"wrote {folder / 'run'}"
    run = folder / "run"
    found = {p.name for p in run.iterdir()} - {"loss.png"}
    written = ("recipe.toml", "versions.json", "trained.onnx", "history.csv", "measures.json")
    assert found == set(written)

    versions = json.loads((run / "versions.json").read_text())
    assert versions["packages"]["ortflex"] == importlib.metadata.version("ortflex")
    assert versions["device"] == "cpu"
    assert versions["backend"] in plugins()["backends"]
    assert versions["plugins"]["ortflex"] == importlib.metadata.version("ortflex")

    with (run / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert {"loss", "penalty", "rate", "validation_loss", "validation_rmse"} <= set(rows[0])
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])

    resolved = tomllib.loads((run / "recipe.toml").read_text())
    assert resolved["model"] == "../model.onnx"
    assert (resolved["epochs"], resolved["learning_rate"]) == (4, 0.001)
    assert resolved["optimizer"]["beta2"] == 0.999


def test_the_saved_recipe_repeats_the_training(folder: Path) -> None:
    works("train", "train.toml")
    works("train", "run/recipe.toml", "output=again")
    runs = ("run/trained.onnx", "again/trained.onnx")
    first, second = (models.weights_of(onnx.load(path)) for path in runs)
    start = models.weights_of(models.linear())
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)
        assert not np.array_equal(start[name], array)


def test_the_loss_curve_where_matplotlib_is(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    works("train", "train.toml")
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_run_folders_are_new_by_default(folder: Path) -> None:
    (folder / "train.toml").write_text(BASE.replace('output = "run"', ""))
    for _ in range(2):
        works("train", "train.toml", "epochs=1")
    made = sorted((folder / "runs").iterdir())
    assert len(made) == 2
    assert all(m.name.split("-")[2] == "model" for m in made)


def test_errors_are_for_people(folder: Path) -> None:
    result = refused("train", "train.toml", "epocs=3", "optimizer.bta1=1", "optimizer.name=adam")
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "error: 2 problems"
    assert lines[1].startswith("epocs: unknown key; did you mean 'epochs'?")
    assert lines[2] == (
        "optimizer.bta1: unknown parameter; did you mean 'beta1'? Known: beta1, beta2, eps"
    )
    (line,) = refused("train", "train.toml", "params=koef").stderr.splitlines()
    assert line == "error: unknown parameter 'koef'; did you mean 'coef'? Known: coef, intercept"


def test_broken_files(folder: Path) -> None:
    (folder / "data.npz").write_bytes(b"nothing")
    said = refused("train", "train.toml").stderr
    assert "expected an .npz file (numpy.savez writes one), cannot be read" in said
    (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:50])
    refused("train", "train.toml")


def test_an_unwritable_output_costs_no_training(folder: Path) -> None:
    (folder / "run").write_text("in the way")
    result = refused("train", "train.toml")
    assert "epoch" not in result.stdout
    assert result.stderr.startswith(f"error: cannot create the folder {str(folder / 'run')!r}: ")


def test_debugging_shows_the_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLEX_DEBUG", "1")
    result = ortflex("train", "train.toml", "epocs=3")
    assert type(result.exception).__name__ == "ConfigError"


def test_ctrl_c_keeps_what_there_is(folder: Path) -> None:
    result = interrupted("train", "train.toml", "epochs=5")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert len((folder / "run" / "history.csv").read_text().splitlines()) == 3
    assert (folder / "run" / "trained.onnx").exists()


def test_a_recipe_that_differs_from_the_checkpoint_is_refused(folder: Path) -> None:
    """An edited recipe and keys on the command line alike; what changes nothing may differ."""
    (folder / "train.toml").write_text(BASE + 'callbacks = ["checkpoint"]\n')
    assert interrupted("train", "train.toml").exit_code == 130
    for key, named in {
        "seed=7": "seed: was 0, is 7",
        "learning_rate=0.5": "learning_rate: was",
        "loss=absolute_error": "loss: was 'squared_error', is 'absolute_error'",
    }.items():
        assert named in refused("train", "train.toml", key, "--resume", "run").output
    (folder / "edited.toml").write_text((folder / "train.toml").read_text() + "clip_norm = 0.5\n")
    result = refused("train", "edited.toml", "--resume", "run")
    assert "clip_norm: was None, is 0.5" in result.output
    result = works("train", "edited.toml", "--resume", "run", "--no-strict", "epochs=4")
    assert "clip_norm: was None, is 0.5" in result.output


def test_an_interrupted_training_is_resumed_in_its_run_folder(folder: Path) -> None:
    (folder / "train.toml").write_text(BASE + 'callbacks = ["checkpoint"]\n')
    works("train", "train.toml", "output=whole")
    result = interrupted("train", "train.toml")
    assert result.exit_code == 130
    assert "continue: ortflex train train.toml --resume" in result.output
    works("train", "train.toml", "--resume", "run")
    whole, again = (folder / run for run in ("whole", "run"))
    assert (whole / "trained.onnx").read_bytes() == (again / "trained.onnx").read_bytes()
    lines = [(run / "history.csv").read_text().splitlines() for run in (whole, again)]
    assert len(lines[0]) == len(lines[1]) == 4
    result = refused("train", "train.toml", "output=whole", "--resume", "whole", "optimizer=sgd")
    assert "optimizer: was 'adam', is 'sgd'" in result.output


def test_a_run_of_another_default_continues_with_its_optimizer(folder: Path) -> None:
    """The recipe names no optimizer, as one for version 0.2, whose default was sgd."""
    (folder / "train.toml").write_text(BASE + 'callbacks = ["checkpoint"]\n')
    for output, epochs in (("whole", 3), ("run", 2)):
        works("train", "train.toml", f"output={output}", f"epochs={epochs}", "optimizer=sgd")
    works("train", "train.toml", "--resume", "run")
    whole, run = ((folder / name / "trained.onnx").read_bytes() for name in ("whole", "run"))
    assert whole == run


def test_a_diverged_training_keeps_the_last_good_weights(folder: Path) -> None:
    result = refused("train", "train.toml", "learning_rate=1e30")
    assert "not finite" in result.stderr or "loss is" in result.stderr
    saved = onnx.load(folder / "run" / "last_good.onnx")
    assert all(np.isfinite(onnx.numpy_helper.to_array(t)).all() for t in saved.graph.initializer)
    assert not (folder / "run" / "trained.onnx").exists()
    assert (folder / "run" / "recipe.toml").is_file()


def test_the_installed_command(folder: Path) -> None:
    command = Path(sys.executable).with_name("ortflex")
    if not command.exists():
        pytest.skip("the command is not installed beside this Python")
    out = children.run([str(command), "train", "train.toml", "epochs=1"])
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1] == f"wrote {folder / 'run'}"
    assert "Traceback" not in out.stderr


# ---------------------------------------------------------------------- init


@pytest.mark.parametrize("kind", ["regression", "classifier"])
def test_init_writes_what_train_takes(folder: Path, kind: str) -> None:
    x, _ = regression()
    if kind == "classifier":
        onnx.save(followed(models.linear(outputs=3), "Softmax"), folder / "model.onnx")
        np.savez(folder / "data.npz", X=x, y=np.arange(len(x)) % 3)
    result = works("init", "model.onnx", "-o", "new.toml")
    assert result.output.startswith("wrote new.toml; set its key data to your data")
    text = (folder / "new.toml").read_text()
    loss = {"regression": "squared_error", "classifier": "softmax_cross_entropy"}[kind]
    assert f'\nloss = "{loss}"\n' in text
    assert "#   coef: float32[5, " in text
    works("train", "new.toml", "epochs=1", "output=out")
    assert (folder / "out" / "trained.onnx").exists()


def test_every_key_is_there_with_its_default(folder: Path) -> None:
    works("init", "model.onnx", "--force")
    text = (folder / "train.toml").read_text()
    keys = [f.name for f in attrs.fields(Recipe)]
    # Without the marks of comments the defaults are a recipe, too.
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    lines = [line for line in lines if line.partition(" = ")[0] in keys and " = " in line]
    others = ("not set by default", '"csv"')
    lines = [line for line in lines if not any(other in line for other in others)]
    (folder / "all.toml").write_text("\n".join(lines))
    whole, short = (Recipe.load(f"{name}.toml", plugins=plugins()) for name in ("all", "train"))
    assert whole == short
    assert all(f"{key} = " in text for key in keys)


def test_every_example_is_a_value_that_the_recipe_reads(folder: Path) -> None:
    works("init", "model.onnx", "--force")
    text = (folder / "train.toml").read_text()
    mark = "  # not set by default"
    lines = [line for line in text.splitlines() if mark in line]
    examples = [line.removeprefix("# ").removesuffix(mark) for line in lines]
    assert len(examples) > 8
    for example in examples:
        key = example.partition(" = ")[0]
        if key == "plugins":
            continue  # a folder of the user
        extra = ['distributed = "auto"'] if key == "sync_every" else []
        rest = [line for line in text.splitlines() if not line.startswith(f"{key} = ")]
        (folder / "one.toml").write_text("\n".join([*rest, *extra, example]))
        assert getattr(Recipe.load("one.toml", plugins=plugins()), key) is not None, example


def test_init_says_what_is_left_out_and_never_overwrites(folder: Path) -> None:
    onnx.save(followed(models.linear(), "Mul", "scale", unity=[2.0]), folder / "model.onnx")
    said = "error: train.toml exists and was not changed; overwrite it with --force\n"
    assert refused("init", "model.onnx").stderr == said
    assert (folder / "train.toml").read_text() == BASE
    # A model that does not exist is the mistake, whatever else is there.
    assert "did you mean 'model.onnx'" in ortflex("init", "modle.onnx").stderr
    works("init", "model.onnx", "--force")
    text = (folder / "train.toml").read_text()
    assert "# Not trained (1):\n#   unity: float32[1]: a single number in Mul 'scale'\n" in text
    refused("init", "none.onnx")


# ---------------------------------------------------------------------- plugins


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more losses: one that cannot be imported, and one of a name that is taken."""

    def entry(name: str, target: str, owner: str) -> Entry:
        point = importlib.metadata.EntryPoint(name, target, "ortflex.losses")
        return Entry("losses", name, target, owner, "9.9", point)

    more = [
        entry("shaky", "nowhere_to_be_found:Shaky", "somebody-else"),
        entry("huber", "json:JSONDecoder", "rival"),
    ]
    known = [e for registry in plugins() for e in registry]
    made = Plugins([*known, *more])
    monkeypatch.setattr(Plugins, "discover", classmethod(lambda cls, disabled=None: made))


def test_plugins_are_listed(broken: None) -> None:
    result = ortflex("plugins")
    assert result.exit_code == 0  # two of one name are harmless until that name is asked for
    line = next(row for row in result.output.splitlines() if "somebody-else" in row)
    assert line.split()[:4] == ["shaky", "somebody-else", "9.9", "nowhere_to_be_found:Shaky"]
    names = {row.split()[0]: row.split()[1] for row in result.output.splitlines() if "huber" in row}
    assert {"ortflex/huber": "ortflex", "rival/huber": "rival"}.items() <= names.items()
    assert "A name with a / belongs to two distributions" in result.output


def test_checking_imports_each_plugin_and_says_which_are_broken(broken: None) -> None:
    result = refused("plugins", "--check", "--json")
    rows = {(r["kind"], r["name"], r["distribution"]): r for r in json.loads(result.stdout)}
    status = rows["losses", "shaky", "somebody-else"]["status"]
    assert "(nowhere_to_be_found:Shaky, from somebody-else 9.9) cannot be imported" in status
    assert "No module named 'nowhere_to_be_found'" in status
    status = rows["losses", "huber", "rival"]["status"]
    assert "the loss 'huber' of rival 9.9 is <class 'json.decoder.JSONDecoder'>, expected" in status
    assert rows["losses", "huber", "rival"]["ask_for"] == "rival/huber"
    assert rows["losses", "huber", "ortflex"]["status"] == "ok"
    assert rows["losses", "elastic", "ortflex"] == {
        "kind": "losses",
        "name": "elastic",
        "ask_for": "elastic",
        "distribution": "ortflex",
        "version": importlib.metadata.version("ortflex"),
        "target": "ortflex_plugins.losses.regression:Elastic",
        "home": "",
        "description": "Weighted sum of absolute and squared error: "
        "l = l1_weight·|p − y| + l2_weight·(p − y)².",
        "stability": "stable",
        "status": "ok",
    }


# ---------------------------------------------------------------------- reference


def test_every_key_has_a_place_in_the_reference() -> None:
    """A new key is in one of the groups, and no group has a key that there is not."""
    placed = [key for keys in reference.KEY_GROUPS.values() for key in keys]
    assert sorted(placed) == sorted(field.name for field in attrs.fields(Recipe))


def test_the_reference_is_up_to_date() -> None:
    folder = ROOT / "docs" / "reference"
    figures = json.loads((folder / reference.FIGURES).read_text(encoding="utf-8"))
    made = reference.pages(plugins(), figures)
    marked = {p.name for p in folder.glob("*.md") if "Generated by `make docs`" in p.read_text()}
    assert marked == made.keys()
    for name, content in made.items():
        written = (folder / name).read_text(encoding="utf-8")
        assert written == content, f"docs/reference/{name} is old: run make docs"
