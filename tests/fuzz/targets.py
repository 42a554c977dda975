"""What is done with a mutant: everything that ortflex does with such a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx

from ortflex_core import (
    FLOATS,
    Columns,
    Model,
    ModelError,
    Recipe,
    Trainer,
    apply_state,
    check_model,
    require_runtime,
)
from ortflex_core.compiler.operators.equivalence import random_inputs
from ortflex_plugins.adapters.lora import Lora
from ortflex_plugins.data.arrow import Arrow
from ortflex_plugins.data.csv import Csv
from ortflex_plugins.data.npy import NpyFolder
from ortflex_plugins.data.npz import Npz
from ortflex_plugins.data.parquet import Parquet
from ortflex_plugins.pictures import draw
from ortflex_plugins.pictures.pages import page_of_folder as report
from tests import models
from tests.fuzz import numbers, truth
from tests.training import plugins

_MOST = 100_000
"""Elements of an input that a test is willing to make up."""


def backends() -> list[str]:
    registry, runtime = plugins()["backends"], require_runtime()
    own = ("fused", "training_agent", "training_session")
    return [n for n in own if not registry.load(n).available(runtime)]


def run_model(folder: Path, number: int) -> None:
    path = folder / "model.onnx"
    model = Model(path)
    if number % 5 == 0:
        check_model(model, plugins=plugins())
        draw(str(path), plugins=plugins()).html()
    chosen = backends()
    outputs = [o.name for o in model.outputs if o.dtype in FLOATS]
    loss: Any = {outputs[0]: "squared_error"} if len(outputs) > 1 else "squared_error"
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=("sgd", "adam")[number % 2],
        backend=chosen[number // 2 % len(chosen)],
        epochs=2,
        batch_size=2,
        progress=False,
        plugins=plugins(),
    )
    feeds = inputs(model)
    if feeds is None:
        return
    predicted = trainer.predict(feeds)
    target = predicted[outputs[0]] if isinstance(predicted, dict) else predicted
    trainer.fit(feeds, np.zeros(target.shape, target.dtype))
    trainer.export(folder / "trained.onnx")


def inputs(model: Model) -> dict[str, Any] | None:
    """Random rows, or None where the model asks for more than a test has."""
    for spec in model.inputs:
        sizes = [d if isinstance(d, int) else 4 for d in spec.shape or ()]
        if np.prod([float(s) for s in sizes]) > _MOST or any(s < 0 for s in sizes):
            return None
        if spec.dtype not in FLOATS and spec.dtype not in (1, 6, 7, 8, 9):
            return None
    return random_inputs(model.inputs, batch=4, size=3)


def run_checkpoint(folder: Path, number: int) -> None:
    trainer = Trainer.resume(
        folder / "checkpoint", plugins=plugins(), callbacks=[numbers.Short()] if number % 2 else []
    )
    truth.check_checkpoint(folder / "checkpoint", trainer)
    data = rows()
    trainer.predict(data["X"])
    if number % 2:
        trainer.fit(data["X"], data["y"])


def rows() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 3)).astype(np.float32)
    return {"X": x, "y": x[:, :1] * 2}


def run_recipe(folder: Path, number: int) -> None:
    recipe = Recipe.load(folder / "train.toml", plugins=plugins())
    Trainer.from_recipe(recipe, plugins())
    again = folder / "again.toml"
    again.write_text(recipe.resolved(plugins()).to_toml(folder), "utf-8")
    Trainer.from_recipe(Recipe.load(again, plugins=plugins()), plugins())


def run_data(folder: Path, number: int) -> None:
    sources: dict[str, Callable[[str], Any]] = {
        "data.npz": lambda path: Npz(path=path),
        "data": lambda path: NpyFolder(path=path),
        "data.csv": lambda path: Csv(path=path, target=["y"]),
        "data.parquet": lambda path: Parquet(path=path, target=["y"]),
        "data.arrow": lambda path: Arrow(path=path, target=["y"]),
    }
    path = next(folder / name for name in sources if (folder / name).exists())
    source = sources[path.name](str(path))
    loaded: Columns = source.load()
    if loaded.rows:
        loaded.take(np.arange(min(2, loaded.rows)))
    trainer = Trainer(
        models.mlp((3, 4, 1)),
        loss="squared_error",
        backend="fused",
        epochs=1,
        progress=False,
        plugins=plugins(),
    )
    trainer.fit(source)


def run_number(folder: Path, number: int) -> None:
    place, value = numbers.drawn(Random(f"number/{number}"))
    numbers.train(place, value, folder)


def run_folder(folder: Path, number: int) -> None:
    """``ortflex report`` of a run folder, whose text is then looked at."""
    page = report(folder / "run")
    assert "<html" in page


def run_step(folder: Path, number: int) -> None:
    """``ortflex apply-state`` of the folder, or of the state alone."""
    place = folder / "step"
    model = folder / "m.onnx"
    made = apply_state(model, place if number % 2 else place / "state.safetensors")
    truth.check_step(place, made, onnx.load(model))


def run_adapter(folder: Path, number: int) -> None:
    trainer = Trainer(
        folder / "m.onnx",
        loss="squared_error",
        adapters=Lora.from_peft(folder / "peft"),
        backend="fused",
        epochs=1,
        progress=False,
        plugins=plugins(),
    )
    truth.check_adapter(folder / "peft", trainer)
    data = rows()
    trainer.predict(data["X"])
    if number % 2:
        trainer.fit(data["X"], data["y"])
        trainer.export_adapter(folder / "again")


def planted(folder: Path, number: int) -> None:
    """Everything that must not happen, for the tests of the harness."""
    if number == 1:
        raise ZeroDivisionError
    if number == 2:
        os.abort()
    if number == 3:
        np.ones(2**36)
    if number == 4:
        raise ModelError("as it should be")
    while number == 5:
        pass


RUN = {
    "model": run_model,
    "checkpoint": run_checkpoint,
    "recipe": run_recipe,
    "data": run_data,
    "number": run_number,
    "run": run_folder,
    "step": run_step,
    "adapter": run_adapter,
    "planted": planted,
}
