"""The demo: better on what it is fine-tuned for, and the files it promises are there."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from ortflex_core import Plugins, require_runtime

pytestmark = pytest.mark.per_python

for _module in ("sklearn", "skl2onnx", "matplotlib"):
    pytest.importorskip(_module)

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(scope="module", autouse=True)
def some_backend() -> None:
    registry = Plugins.discover()["backends"]
    reasons = [registry.load(name).available(require_runtime()) for name in registry.names()]
    if all(reasons):
        pytest.skip(f"no backend works with {require_runtime()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def accuracies(folder: Path) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        return dict(
            runpy.run_path(str(EXAMPLES / "demo.py"))["main"](
                ["--folder", str(folder), "--epochs", "15"]
            )
        )


def test_fine_tuning_brings_back_what_the_scanner_took(accuracies: dict[str, float]) -> None:
    assert accuracies["before"] < 0.5
    assert accuracies["after"] > 0.85
    assert accuracies["clean_after"] > 0.9


def test_the_exported_file_is_as_good_in_onnxruntime(
    folder: Path, accuracies: dict[str, float]
) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        folder / "trained.onnx", providers=["CPUExecutionProvider"]
    )
    with np.load(folder / "test.npz") as test:
        [label] = session.run(["label"], {session.get_inputs()[0].name: test["X"]})
        assert np.mean(label == test["y"]) == pytest.approx(accuracies["after"])


def test_the_history_has_one_line_an_epoch(folder: Path, accuracies: dict[str, float]) -> None:
    with (folder / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) / 2
    assert {"validation_loss", "validation_accuracy", "rate"} <= set(rows[0])


def test_the_picture_is_there(folder: Path, accuracies: dict[str, float]) -> None:
    picture = (folder / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
