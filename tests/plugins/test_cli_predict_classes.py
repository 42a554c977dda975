"""`ortflex predict` of classifiers whose probabilities are a map of each class, as skl2onnx has them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.plugins.commands import ortflex
from tests.training import regression

pytestmark = pytest.mark.once

X = regression(rows=40)[0]


def trained(folder: Path, labels: np.ndarray) -> Any:
    """A run folder of a classifier, and what onnxruntime says of its rows."""
    skl2onnx = pytest.importorskip("skl2onnx")
    neural = pytest.importorskip("sklearn.neural_network")
    ort = pytest.importorskip("onnxruntime")
    fitted = neural.MLPClassifier((4,), tol=10.0).fit(X, labels)
    onnx.save(skl2onnx.to_onnx(fitted, X[:1], target_opset=17), "model.onnx")
    np.savez("d.npz", X=X, y=labels)
    assert ortflex("init", "model.onnx", "--data", "d.npz", "-o", "t.toml").exit_code == 0
    done = ortflex("train", "t.toml", "epochs=1", "output=run")
    assert done.exit_code == 0, done.output
    return ort.InferenceSession("run/trained.onnx").run(None, {"X": X})


@pytest.mark.parametrize(
    "labels",
    [np.arange(40) % 2, np.arange(40) % 3, np.array(["ant", "bee", "cat", "doe"] * 10)],
    ids=["2", "3", "names"],
)
def test_the_probabilities_are_written_with_the_labels(
    labels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen, maps = trained(tmp_path, labels)
    classes = list(maps[0])
    expected = np.array([[row[c] for c in classes] for row in maps])

    for ending in ("npz", "csv", "npy"):
        done = ortflex("predict", "run", "-o", f"out.{ending}")
        assert done.exit_code == 0, done.output
        if ending == "npy":
            assert "out.npy has no 'output_probability'; --tensor " in done.output
            tensor = done.output.split("--tensor ")[1].split()[0]
            assert list(np.load("out.npy").astype(str)) == list(map(str, chosen))
            assert ortflex("predict", "run", "-o", "p.npy", "--tensor", tensor).exit_code == 0
            np.testing.assert_allclose(np.load("p.npy"), expected, atol=1e-6)
            continue
        assert "--tensor" not in done.output
        assert f"output_probability [40, {len(classes)}]" in done.output
        if ending == "npz":
            with np.load("out.npz") as found:
                assert set(found) == {"output_label", "output_probability"}
                np.testing.assert_allclose(found["output_probability"], expected, atol=1e-6)
                assert list(found["output_label"].astype(str)) == list(map(str, chosen))
            continue
        head, *rows = list(csv.reader(Path("out.csv").read_text("utf-8").splitlines()))
        assert head == ["output_label", *(f"output_probability_{c}" for c in classes)]
        assert [row[0] for row in rows] == list(map(str, chosen))
        np.testing.assert_allclose(
            np.array([row[1:] for row in rows], np.float32), expected, atol=1e-6
        )


def test_tensors_of_different_lengths_are_no_table() -> None:
    from ortflex_core import ConfigError
    from ortflex_plugins.cli.predict import _encode

    with pytest.raises(ConfigError, match=r"different numbers of rows: a \[3\], b \[2, 2\]"):
        _encode({"a": np.zeros(3), "b": np.zeros((2, 2))}, ".csv")
    text = _encode({"a": np.arange(2), "b": np.zeros((2, 2), np.float32)}, ".csv").decode()
    assert text == "a,b_0,b_1\n0,0,0\n1,0,0\n"
