"""The command line in tests: a call, a folder with a model, data and a recipe, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from click.testing import CliRunner, Result

from ortflex_core import Trainer, hook, internals_of
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


def interrupting(
    fit: Callable[..., Any],
    error: type[BaseException] = KeyboardInterrupt,
    step: int | None = None,
) -> Callable[..., Any]:
    """Trainer.fit with a Ctrl-C, or another end, after a step, by default after the second epoch."""

    class Step:
        @hook
        def step_end(self, progress: Any) -> None:
            if progress.step == step:
                raise error

    class Stop:
        @hook
        def epoch_start(self, progress: Any) -> None:
            if progress.epoch == 2:
                raise error

    def wrapped(self: Trainer, *args: Any, **options: Any) -> Any:
        internals_of(self).hooks.register(Stop() if step is None else Step())
        return fit(self, *args, **options)

    return wrapped
