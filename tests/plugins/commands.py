"""The command line in tests: a call, a folder with a model, data and a recipe, and Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto

from ortflex_core import Trainer, hook, internals_of
from ortflex_plugins.cli.main import main
from tests import models
from tests.training import regression


def ortflex(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def works(*arguments: str) -> Result:
    """A call that does what it should."""
    result = ortflex(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str) -> Result:
    """A call that ends with an error for people."""
    result = ortflex(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result


def followed(model: ModelProto, op_type: str, name: str = "", **constants: Any) -> ModelProto:
    """The model, changed in place: another node after its output."""
    for key, value in constants.items():
        tensor = onnx.numpy_helper.from_array(np.array(value, np.float32), key)
        model.graph.initializer.append(tensor)
    given = [model.graph.output[0].name, *constants]
    model.graph.node.append(onnx.helper.make_node(op_type, given, ["Z"], name=name))
    model.graph.output[0].name = "Z"
    return model


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def prepare(folder: Path, recipe: str) -> Path:
    """A linear model, data for it and ``train.toml`` in a folder."""
    onnx.save(models.linear(), folder / "model.onnx")
    x, y = regression()
    np.savez(folder / "data.npz", X=x, y=y)
    (folder / "train.toml").write_text(recipe)
    return folder


def save_classifier(x: Any, labels: Any) -> None:
    """``model.onnx``, a network of scikit-learn with its labels and a ZipMap, and ``d.npz`` for it."""
    skl2onnx = pytest.importorskip("skl2onnx")
    neural = pytest.importorskip("sklearn.neural_network")
    fitted = neural.MLPClassifier((4,), tol=10.0).fit(x, labels)
    onnx.save(skl2onnx.to_onnx(fitted, x[:1], target_opset=17), "model.onnx")
    np.savez("d.npz", X=x, y=labels)


def project(recipe: str) -> Any:
    """The fixture ``folder``: the current folder, with what ``prepare`` writes."""

    @pytest.fixture
    def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        return prepare(tmp_path, recipe)

    return folder


def interrupted(
    *arguments: str, error: type[BaseException] = KeyboardInterrupt, step: int | None = None
) -> Result:
    """A call with a Ctrl-C, or another end, after a step, by default after the second epoch."""
    fit = Trainer.fit

    class Stop:
        @hook
        def step_end(self, progress: Any) -> None:
            if progress.step == step:
                raise error

        @hook
        def epoch_start(self, progress: Any) -> None:
            if step is None and progress.epoch == 2:
                raise error

    def stopped(self: Trainer, *args: Any, **options: Any) -> Any:
        internals_of(self).hooks.register(Stop())
        return fit(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", stopped)
        return ortflex(*arguments)
