"""Absurd numbers for every numeric argument there is: of a Trainer, of fit, of every component."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from random import Random
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import Batches, DataError, Trainer, hook
from tests import models
from tests.training import plugins, regression

ABSURD = (
    *(0, -1, 1, 2, 3, 255, 256, 1000, 10**6, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(10**25, -(10**25), 10**400, 10**5000, -(2**63), 0.0, -0.0, 0.5, 1.0, 1.5, -1.5),
    *(1e-45, 1e-320, 1e-30, 1e30, 1e38, 1e39, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), True, None),
    *(np.int64(2**62), np.float32(1e38), np.uint64(2**64 - 1), 0.1 + 0.2j, "1", "nan", (), (1, 2)),
)
_NUMERIC = re.compile(r"\b(int|float)\b")
ARGUMENTS = {
    "losses": "loss",
    "penalties": "penalty",
    "optimizers": "optimizer",
    "schedules": "schedule",
    "adapters": "adapters",
    "transforms": "transforms",
    "constraints": "constraint",
    "averages": "averaging",
    "precisions": "precision",
    "metrics": "metrics",
    "callbacks": "callbacks",
    "devices": "device",
    "data": "",
}
"""The argument of a Trainer for components of a kind."""
LISTED = ("adapters", "transforms", "metrics", "callbacks")
"""Kinds whose argument is a list."""
Place = tuple[str, str, str]
"""Where a number goes: a kind or ``"trainer"``, the name of a component, of an argument."""


@functools.cache
def places() -> tuple[Place, ...]:
    """Every argument whose annotation names a number."""
    found: list[Place] = []
    for name, parameter in inspect.signature(Trainer.__init__).parameters.items():
        if _NUMERIC.search(str(parameter.annotation)):
            found.append(("trainer", "", name))
    found += [("trainer", "", "dropout"), ("fit", "", "steps_per_epoch")]
    found += [("fit", "", "validation_data"), ("trainer", "", "cuda")]
    found += [("batches", "", "buffer"), ("batches", "", "prefetch")]
    found += [("group", "", "rate"), ("group", "", "start_epoch"), ("loss", "", "factor")]
    for kind in ARGUMENTS:
        for name in plugins()[kind].names():
            made = plugins()[kind].load(name)
            if not attrs.has(made):
                continue
            for field in attrs.fields(made):
                if field.init and _NUMERIC.search(str(field.type)):
                    found.append((kind, name, field.alias or field.name))
    return tuple(found)


class Short:
    """Ends a training after a few steps: a file or a number may ask for 2⁶³ epochs."""

    @hook
    def step_end(self, progress: Any) -> bool:
        return bool(progress.step >= 3)


def drawn(rng: Random) -> tuple[Place, Any]:
    """A place, and a number for it."""
    return rng.choice(places()), rng.choice(ABSURD)


def options(place: Place, value: Any, folder: Path) -> dict[str, Any]:
    """Arguments of a Trainer that have the number in its place."""
    kind, name, field = place
    if kind == "trainer":
        return {"device": f"cuda:{value}"} if field == "cuda" else {field: value}
    if kind == "group":
        return {"groups": [{"params": "*", field: value}]}
    if kind == "loss":
        return {"loss": {"name": "squared_error", "factor": value}}
    if kind == "data" or kind not in ARGUMENTS:
        return {}
    spec: dict[str, Any] = {"name": name, field: value}
    spec |= {"path": str(folder / "log.csv")} if name == "csv_log" else {}
    spec |= {"folder": str(folder / "written")} if name in ("checkpoint", "tensorboard") else {}
    return {ARGUMENTS[kind]: [spec] if kind in LISTED else spec}


def train(place: Place, value: Any, folder: Path) -> None:
    """Train on it, on numbers and, where the component is for classes, on classes."""
    arguments: dict[str, Any] = {
        "loss": "squared_error",
        "epochs": 2,
        "batch_size": 5,
        "backend": "fused",
    }
    arguments |= options(place, value, folder)
    if place[2] == "epochs":
        arguments["callbacks"] = [Short()]
    x, y = regression(rows=12, features=4)
    rows: dict[str, Any] = {}
    if place[0] == "fit":
        rows = {place[2]: value}
        if place[2] == "steps_per_epoch":
            x, y = (lambda: iter([(x, y)] * 4)), None
    elif place[0] == "batches":
        made = Batches(lambda: iter([(x, y)] * 4), **{place[2]: value})
        x, y = made, None
    elif place[0] == "data":
        x, y = source(place, value, folder, x, y), None
    else:
        rows = {"validation_data": (x, y)}
    try:
        trainer = _trainer(models.mlp((4, 4, 1)), arguments)
        trainer.fit(x, y, **rows)
    except DataError:
        if place[0] not in ("losses", "metrics"):
            raise
        classes = np.arange(12) % 3
        trainer = _trainer(models.classifier(), {**arguments, **_classes(arguments)})
        trainer.fit(x, classes, validation_data=(x, classes))
    trainer.predict(regression(rows=3, features=4)[0])
    trainer.export(folder / "trained.onnx")
    trainer.save(folder / "saved")


def source(place: Place, value: Any, folder: Path, x: Any, y: Any) -> Any:
    """A data source that has the number in its place, and what it reads."""
    _, name, field = place
    spec: dict[str, Any] = {"name": name, field: value}
    np.savez(folder / "data.npz", X=x, y=y)
    (folder / "data").mkdir(exist_ok=True)
    np.save(folder / "data" / "X.npy", x)
    np.save(folder / "data" / "y.npy", y)
    rows = np.column_stack([x, y])
    names = ",".join([*(f"x{k}" for k in range(len(x[0]))), "y"])
    np.savetxt(folder / "data.csv", rows, delimiter=",", header=names, comments="")
    paths = {"npz": "data.npz", "npy": "data", "parquet": "data.parquet", "arrow": "data.arrow"}
    paths["csv"] = "data.csv"
    if name in ("parquet", "arrow"):
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        table = arrow.table({"X": list(x), "y": list(y)})
        arrow.parquet.write_table(table, folder / "data.parquet")
        with arrow.ipc.new_file(str(folder / "data.arrow"), table.schema) as writer:
            writer.write_table(table)
    spec |= {"path": str(folder / paths[name])} if name in paths else {}
    spec |= {"columns": 4} if name == "example_line" and field != "columns" else {}
    return plugins().component("data", spec)


def _classes(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["loss"] == "squared_error":
        return {"loss": "softmax_cross_entropy"}
    return {}


def _trainer(model: Any, arguments: dict[str, Any]) -> Trainer:
    return Trainer(model, progress=False, plugins=plugins(), **arguments)
