"""What is done with a mutant: everything that ortflex does with such a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
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
    internals_of,
    require_runtime,
)
from ortflex_core.compiler.operators.equivalence import random_inputs
from ortflex_core.training.artifacts import checkpoint_record as record
from ortflex_plugins.adapters.lora import Lora
from ortflex_plugins.data.arrow import Arrow
from ortflex_plugins.data.csv import Csv
from ortflex_plugins.data.npy import NpyFolder
from ortflex_plugins.data.npz import Npz
from ortflex_plugins.data.parquet import Parquet
from ortflex_plugins.pictures import draw
from ortflex_plugins.pictures.pages import page_of_folder as report
from tests import models
from tests.fuzz import numbers
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
    check_checkpoint(folder / "checkpoint", trainer)
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
    check_step(place, made, onnx.load(model))


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
    check_adapter(folder / "peft", trainer)
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


# Undetected damage: what was read in spite of a mutation is what the files say, byte for byte.
# They are read here a second time, with json, hashlib and numpy alone.
DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "F16": "<f2", "U8": "u1"}


def tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a safetensors file that is read without an error, and its metadata."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header.pop("__metadata__", None) or {}
    arrays = {
        name: np.frombuffer(
            content[end + spec["data_offsets"][0] : end + spec["data_offsets"][1]],
            DTYPES[spec["dtype"]],
        ).reshape(spec["shape"])
        for name, spec in header.items()
        if spec["dtype"] in DTYPES
    }
    return arrays, metadata


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.astype(found.dtype).tobytes()


def check_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Every digest of an accepted checkpoint is right, and the Trainer has its tensors."""
    table = json.loads((folder / record.NAME).read_text("utf-8"))
    assert record.seal(dict(table))["digest"] == table["digest"], "the record's digest"
    for name, digest in table["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    arrays, _ = tensors(folder / "state.safetensors")
    _check(trainer.get_state(), arrays, "parameter/")
    _check(internals_of(trainer).live.slots(), arrays, "slot/")


def check_step(folder: Path, made: onnx.ModelProto, before: onnx.ModelProto) -> None:
    """Every tensor of the model is the one that the state has for it, or the old one."""
    arrays, metadata = tensors(folder / "state.safetensors")
    roles = json.loads(metadata["ortflex"])["tensors"]
    given = {role["of"]: arrays[n] for n, role in roles.items() if role["role"] == "parameter"}
    old = {t.name: onnx.numpy_helper.to_array(t) for t in before.graph.initializer}
    for tensor in made.graph.initializer:
        wanted = given.get(tensor.name, old.get(tensor.name))
        assert wanted is not None, tensor.name
        assert same(onnx.numpy_helper.to_array(tensor), wanted), tensor.name


def check_adapter(folder: Path, trainer: Trainer) -> None:
    """The matrices of the Trainer are those of the file, transposed, B times one factor.

    The factor is a quotient of the alphas of the file: of ``alpha_pattern`` and ``lora_alpha``.
    """
    arrays, _ = tensors(next(folder.glob("*.safetensors")))
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    alphas = [config.get("lora_alpha", 8), *(config.get("alpha_pattern") or {}).values()]
    factors = {1.0, *(float(alpha) / float(alphas[0]) for alpha in alphas)}
    state = trainer.get_state()
    assert len(state) == len(arrays)
    for name, array in arrays.items():
        found = state[name.removeprefix("base_model.model.").removesuffix(".weight")]
        wanted = array.reshape(found.T.shape).T.astype(np.float64)
        allowed = [wanted * factor for factor in (factors if "lora_B" in name else (1.0,))]
        close = [np.allclose(found, one, 1e-6, 1e-30, equal_nan=True) for one in allowed]
        assert any(close), name


def _check(found: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], kind: str) -> None:
    for name, array in found.items():
        assert kind + name in arrays, f"{kind}{name} is not in the file"
        assert same(np.asarray(array), arrays[kind + name]), kind + name


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
