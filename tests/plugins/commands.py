"""The command line in tests: a call, and a folder with a model, data and a recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from click.testing import CliRunner, Result

from ortflex_plugins.cli.main import main
from tests import models
from tests.training import regression


def ortflex(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def prepare(folder: Path, recipe: str) -> Path:
    """A linear model, data for it and ``train.toml`` in a folder."""
    onnx.save(models.linear(), folder / "model.onnx")
    x, y = regression()
    np.savez(folder / "data.npz", X=x, y=y)
    (folder / "train.toml").write_text(recipe)
    return folder
