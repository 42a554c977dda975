"""Values of files that code trusted: each ends in an error of ortflex, not in a trace.

The class: a value that is used for what it should be (a count, a name, a path) before it is known to
be one.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from ortflex_core import CheckpointError, ModelError, Trainer, apply_state, suggest
from ortflex_core.training.artifacts import hub as repository
from ortflex_plugins.cli import predict
from tests import edited_checkpoints, models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", [-1, None, b"a", 1.5, ("a",), slice(2)])
def test_a_name_that_is_no_string_is_not_known(name: Any) -> None:
    assert suggest(name, ["loss", b"loss", 3, None]).endswith("Known: 3, None, b'loss', loss")


@pytest.mark.parametrize("step", [np.zeros(3, np.int64), np.array(-1), np.array(np.nan)])
def test_a_step_that_is_no_count_is_an_error_of_the_checkpoint(step: Any, tmp_path: Path) -> None:
    trainer = make(models.mlp((3, 4, 1)), epochs=1, optimizer="adam")
    trainer.fit(*regression(rows=8, features=3))
    place = trainer.save(tmp_path / "c")
    arrays = load_file(place / "state.safetensors")
    save_file({**arrays, "slot/step": step}, place / "state.safetensors")
    edited_checkpoints.seal(place)
    with pytest.raises(CheckpointError, match="slot/step"):
        Trainer.resume(place, plugins=plugins()).fit(*regression(rows=8, features=3))


@pytest.mark.parametrize(
    "locations",
    [["m.onnx"], ["."], [""], ["./m.onnx"], ["a/../b"], ["/a"], ["a", "a/b"], ["m.onnx/b"]],
)
def test_data_files_of_the_hub_whose_names_are_none(locations: list[str], tmp_path: Path) -> None:
    """Two spellings of one name are one file."""
    with pytest.raises(ModelError, match=r"m\.onnx"):
        opened(locations, tmp_path)
    (tmp_path / "w.bin").write_bytes(bytes(10_000))
    assert opened(["w.bin", "./w.bin"], tmp_path) == ["m.onnx", "w.bin"]


def opened(locations: list[str], folder: Path) -> list[str]:
    """The files of a model of the Hub whose tensors are at these locations."""
    model = models.mlp((3, 4, 1))
    for k, tensor in enumerate(model.graph.initializer):
        location = locations[k % len(locations)]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        tensor.ClearField("raw_data")
    (folder / "m.onnx").write_bytes(model.SerializeToString())

    class Hub:
        def hf_hub_download(self, repo_id: str, filename: str, revision: str | None = None) -> str:
            return str(folder / filename)

    with repository.open_model("a/b", "m.onnx", None, Hub()) as (path, _):
        return sorted(p.name for p in path.parent.iterdir())


def test_a_spreadsheet_does_not_compute_names_and_strings_of_a_model() -> None:
    arrays = {
        "=cmd|' /C calc'!A0": np.array([[1.0, -2.0]]),
        "@sum": np.array(["+1+1", "-5", "fine"])[:1],
        "y": np.array([-0.5]),
    }
    text = predict._encode(arrays, ".csv").decode()
    heads, cells = list(csv.reader(io.StringIO(text)))
    assert all(cell[0] not in "=+@\t\r" for cell in (*heads, *cells))
    assert [float(cells[k]) for k in (0, 1, 3)] == [1, -2, -0.5]
    assert predict._plain("-5") == "-5"
    assert predict._plain("-5+1") == "'-5+1"


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("averaging", [None, "ema"])
def test_a_state_with_values_that_are_not_finite_is_not_applied(
    value: float, averaging: str | None, tmp_path: Path
) -> None:
    """Of a runner that diverged: the file and the tensor are named, and no model is written."""
    trainer = make(models.linear(), averaging=averaging)
    place = trainer.export_step(tmp_path / "step", *regression(rows=8))
    path = place / "state.safetensors"
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    arrays = load_file(path)
    key = next(k for k in arrays if "average" in k) if averaging else "coef"
    arrays[key] = arrays[key].copy()
    arrays[key].flat[0] = value
    save_file(arrays, path, header["__metadata__"])
    with pytest.raises(CheckpointError, match="not finite") as error:
        apply_state(models.linear(), path, tmp_path / "out.onnx", plugins=plugins())
    assert repr(str(path)) in str(error.value)
    assert "'coef'" in str(error.value)
    assert not (tmp_path / "out.onnx").exists()
