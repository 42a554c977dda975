"""Components by the path of their class, and in files of a folder that a recipe names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    BrokenPlugin,
    CheckpointError,
    ConfigError,
    Ops,
    OrtflexError,
    Penalty,
    PluginError,
    Plugins,
    Recipe,
    Tensor,
    Trainer,
    internals_of,
)
from ortflex_core.kernel import class_paths
from tests import children
from tests.models import linear, weights_of

pytestmark = pytest.mark.per_python

QUARTIC = '''
from __future__ import annotations

import attrs

from ortflex_core import Loss, float_labels, hook, hyper


@attrs.frozen(kw_only=True)
class Quartic(Loss):
    """scale * (p - y) ** 4."""

    name = "quartic"
    scale: float = hyper(default=1.0)

    def label(self, predicted, given):
        return float_labels(self.name, predicted, given)

    def per_sample(self, op, predicted, expected):
        error = predicted - expected
        return self.scale * (error * error * error * error)


class Counter:
    name = "counter"
    epochs = 0

    @hook
    def epoch_end(self, trainer, record):
        Counter.epochs += 1


class NotALoss:
    pass
'''
RATE = 0.01


class Unnamed(Penalty):
    """A class of an importable module, without a name."""

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """w⁴."""
        return weight * weight * weight * weight


@attrs.frozen(kw_only=True)
class Signed(Penalty):
    name: ClassVar[str] = "signed"
    factor: float = 2.0

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """factor·w."""
        return self.factor * weight


RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(8, 5)).astype(np.float32), RNG.normal(size=(8, 1)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe beside a file with a loss."""
    (tmp_path / "my_parts.py").write_text(QUARTIC)
    onnx.save(linear(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=DATA[0], y=DATA[1])
    return tmp_path


def recipe(folder: Path, lines: str, name: str = "train.toml") -> Path:
    path = folder / name
    path.write_text(
        f'model = "model.onnx"\ndata = "data.npz"\nepochs = 1\nlearning_rate = {RATE}\n'
        f'optimizer = "sgd"\n{lines}\n'
    )
    return path


def stepped(x: Any, y: Any, scale: float) -> Any:
    """The coefficients after one step on scale·(p - y)⁴, in numpy."""
    weights = weights_of(linear())
    error = x.astype(np.float64) @ weights["coef"] + weights["intercept"] - y
    return weights["coef"] - RATE * x.T.astype(np.float64) @ (4 * scale * error**3) / len(x)


@pytest.mark.parametrize(
    "lines",
    [
        'loss = "my_parts:Quartic"',
        'loss = "my_parts.py:Quartic"',
        'loss = { target = "my_parts:Quartic", scale = 0.5 }',
        'loss = { name = "my_parts:Quartic", scale = 0.5 }',
        'loss = { Y = { target = "my_parts:Quartic", scale = 0.5 } }',
        '[[loss]]\ntarget = "my_parts:Quartic"\nscale = 0.5',
    ],
)
def test_a_recipe_trains_with_a_class_of_a_file_in_its_folder(folder: Path, lines: str) -> None:
    loaded = Recipe.load(recipe(folder, lines))
    trainer = Trainer.from_recipe(loaded)
    loaded.run(trainer)
    wanted = stepped(*DATA, 0.5 if "0.5" in lines else 1.0)
    np.testing.assert_allclose(trainer.get_state()["coef"], wanted, rtol=1e-5)


def test_a_recipe_written_elsewhere_finds_the_file(folder: Path) -> None:
    resolved = Recipe.load(recipe(folder, 'loss = "my_parts:Quartic"')).resolved()
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text(resolved.to_toml(run))
    assert '"../../my_parts.py:Quartic"' in (run / "recipe.toml").read_text()
    assert Recipe.load(run / "recipe.toml").resolved() == resolved


def test_an_override_is_relative_to_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(folder, 'loss = "squared_error"')
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "other.py").write_text(QUARTIC)
    monkeypatch.chdir(folder / "elsewhere")
    loaded = Recipe.load(path, ["loss=other:Quartic"])
    assert loaded.loss == f"{folder / 'elsewhere' / 'other.py'}:Quartic"


def test_a_mapping_in_python_takes_a_path() -> None:
    states = []
    for penalty in (None, {"coef": {"target": f"{__name__}:Signed", "factor": 3.0}}):
        options: dict[str, Any] = {"optimizer": "sgd", "epochs": 1, "penalty": penalty}
        trainer = Trainer(linear(), loss="squared_error", learning_rate=RATE, **options)
        trainer.fit(*DATA)
        states.append(trainer.get_state()["coef"])
    np.testing.assert_allclose(states[0] - states[1], 3 * RATE, rtol=1e-4)


@pytest.mark.parametrize("penalty", [f"{__name__}:Unnamed", Unnamed(), Signed(factor=1.5)])
def test_a_class_in_a_checkpoint_is_passed_or_trusted(tmp_path: Path, penalty: Any) -> None:
    """A class of this process is no exception: a checkpoint names installed plugins only.

    Both ways out of the error train on, and their own checkpoints resume in the same ways.
    """
    trainer = Trainer(linear(), loss="squared_error", penalty=penalty, epochs=1)
    trainer.fit(*DATA)
    saved = trainer.save(tmp_path / "checkpoint")
    with pytest.raises(PluginError, match=r"^penalty: .*checkpoint.*trust_code=True"):
        Trainer.resume(saved)
    for way in ({"penalty": penalty}, {"trust_code": True}):
        again = Trainer.resume(saved, **way)
        terms = internals_of(trainer).setup.problem.penalties
        assert internals_of(again).setup.problem.penalties == terms
        again.fit(*DATA)
        twice = Trainer.resume(again.save(tmp_path / "again"), **way)
        np.testing.assert_array_equal(twice.get_state()["coef"], again.get_state()["coef"])
    trainer.restore(saved)
    assert Unnamed.name == "Unnamed"


def saved_with(file: Path) -> Path:
    """The checkpoint of a training with the loss of a file."""
    trainer = Trainer(linear(), loss=f"{file}:Quartic", epochs=1)
    trainer.fit(*DATA)
    return trainer.save(file.parent / "checkpoint")


def test_a_checkpoint_executes_no_unnamed_file(folder: Path) -> None:
    file = folder / "my_parts.py"
    saved = saved_with(file)
    with pytest.raises(PluginError, match="my_parts"):
        Trainer.resume(saved)  # although this process has run the file
    code = (
        "import sys; from ortflex_core import PluginError, Trainer, internals_of\n"
        "try: Trainer.resume(sys.argv[1])\n"
        "except PluginError as error: print(error)\n"
        "for way in ({'loss': sys.argv[2]}, {'trust_code': True}):\n"
        "    print(internals_of(Trainer.resume(sys.argv[1], **way)).setup.requests[0].loss)\n"
    )
    command = [sys.executable, "-c", code, str(saved), f"{file}:Quartic"]
    done = children.run(command, check=True)
    first, *others = done.stdout.splitlines()
    assert str(file) in first
    assert [line.startswith("Quartic(scale=1.0)") for line in others] == [True, True]


def test_changed_code_is_another_training(folder: Path) -> None:
    file = folder / "my_parts.py"
    saved = saved_with(file)
    file.write_text(QUARTIC + "\n# changed\n")
    with pytest.raises(CheckpointError, match=r"with other plugins: .*my_parts\.py"):
        Trainer.resume(saved, trust_code=True)


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ("my_prats:Quartic", PluginError, "no file my_prats.py in the folder of the recipe"),
        ("my_prats.py:Quartic", PluginError, "did you mean 'my_parts.py'"),
        ("my_parts.py:Quatric", PluginError, "has no class 'Quatric'; did you mean 'Quartic'"),
        ("my_parts.py:NotALoss", BrokenPlugin, "expected a subclass of ortflex_core's Loss"),
        ("tests.core.test_class_paths:Signed", BrokenPlugin, "expected a subclass of .* Loss"),
        ("my_broken.py:Quartic", BrokenPlugin, "cannot be imported: ValueError: no luck"),
        ("my_needs.py:Quartic", BrokenPlugin, "No module named 'not_installed_here'"),
        ({"target": "my_parts.py:Quartic", "sacle": 1}, ConfigError, "sacle: .*mean 'scale'"),
        ({"target": "my_parts.py:Quartic", "name": "huber"}, ConfigError, "name or target, not"),
    ],
)
def test_errors_about_class_paths_say_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: Any, kind: Any, message: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "my_broken.py").write_text("raise ValueError('no luck')")
    (folder / "my_needs.py").write_text("import not_installed_here")
    with pytest.raises(OrtflexError, match=message) as caught:
        Trainer(linear(), loss=spec)
    assert issubclass(type(caught.value), kind | ConfigError)


def test_a_folder_of_files_has_components_by_name(folder: Path) -> None:
    (folder / "plugins").mkdir()
    (folder / "my_parts.py").rename(folder / "plugins" / "parts.py")
    (folder / "plugins" / "_private.py").write_text("raise SystemExit")
    path = recipe(folder, 'plugins = "plugins/"\nloss = "quartic"\ncallbacks = ["counter"]')
    loaded = Recipe.load(path)
    trainer = Trainer.from_recipe(loaded)
    loaded.run(trainer)
    np.testing.assert_allclose(trainer.get_state()["coef"], stepped(*DATA, 1.0), rtol=1e-5)
    counter = internals_of(trainer).setup.callbacks[0]
    assert type(counter).epochs == 1
    saved = trainer.save(folder / "checkpoint")
    found = Plugins.discover().with_folder(str(folder / "plugins"))
    again = Trainer.resume(saved, plugins=found)
    assert type(internals_of(again).setup.requests[0].loss).__name__ == "Quartic"
    copy = folder / "runs" / "recipe.toml"
    copy.parent.mkdir()
    copy.write_text(loaded.to_toml(copy.parent))
    assert 'plugins = "../plugins"' in copy.read_text()
    Trainer.from_recipe(Recipe.load(copy))
    (copy.parent / "versions.json").write_text("{}")  # now it is the copy in a run folder
    with pytest.raises(PluginError, match=r"^plugins: "):
        Recipe.load(copy)
    own = f"plugins={folder / 'plugins'}"
    for chosen in (Recipe.load(copy, trust_code=True), Recipe.load(path, [own])):
        assert type(internals_of(Trainer.from_recipe(chosen)).setup.requests[0].loss).name
    assert "quartic" not in Plugins.discover()["losses"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "plugins: the folder .* does not exist"),
        ("x = 1", "no file in .* has a component"),
        ("raise ValueError('no luck')", r"the file .*file\.py.* cannot be imported: ValueError"),
    ],
)
def test_wrong_folders_of_plugins_are_errors(folder: Path, text: str | None, message: str) -> None:
    if text is not None:
        (folder / "own").mkdir()
        (folder / "own" / "file.py").write_text(text)
    with pytest.raises(OrtflexError, match=message):
        Recipe.load(recipe(folder, 'plugins = "own"\nloss = "quartic"'))


def test_a_class_that_no_other_process_finds_has_no_path() -> None:
    class Local(Penalty):
        pass

    assert class_paths.of_class(Local) is None
    assert class_paths.of_class(Signed) == f"{__name__}:Signed"
