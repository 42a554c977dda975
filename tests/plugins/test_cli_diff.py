"""``ortflex diff`` compares with numpy what two files have."""

import json

import numpy as np
import onnx
import pytest
from onnx import helper

from tests import models
from tests.plugins.commands import works

pytestmark = pytest.mark.once


def model(path, tensors, op="Add", **metadata):
    nodes = f"s = MatMul(x, w) y = {op}(s, b)"
    made = models.parsed(nodes, tensors, "float[n, 3] x", "float[n, 2] y")
    helper.set_model_props(made, metadata)
    onnx.save(made, path)
    return str(path)


def test_every_difference_is_found_and_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(3, 2)).astype(np.float32), np.zeros(2, np.float32)
    other = w.copy()
    other[1, 0] += 0.5
    other[2, 1] -= 2
    first = model(tmp_path / "a.onnx", {"w": w, "b": b}, author="me")
    second = model(tmp_path / "b.onnx", {"w": other, "b": b}, op="Mul", author="<you>")
    found = json.loads(works("diff", first, second, "--json").stdout)
    [change] = found["tensors"]
    delta = np.float64(other) - np.float64(w)
    assert (change["name"], change["state"], change["numbers"]) == ("w", "changed", 2)
    assert change["norm"] == pytest.approx(np.linalg.norm(np.float64(w)))
    assert change["change"] == pytest.approx(np.linalg.norm(delta))
    assert change["largest"] == pytest.approx(2)
    assert found["equal"] == 1
    assert found["facts"] == {
        "nodes Add": [1, None],
        "nodes Mul": [None, 1],
        "metadata author": ["me", "<you>"],
    }
    page = tmp_path / "page.html"
    text = works("diff", first, second, "-o", str(page)).stdout
    assert "1 of 2 tensors differ" in text
    assert "<td>w</td>" in page.read_text()
    assert "<you>" not in page.read_text()


def test_equal_files_and_other_forms(tmp_path):
    w, b = np.full((3, 2), np.nan, np.float32), np.zeros(2, np.float32)
    first = model(tmp_path / "a.onnx", {"w": w, "b": b})
    again = json.loads(works("diff", first, first, "--json").stdout)
    assert (again["tensors"], again["facts"], again["equal"]) == ([], {}, 2)
    second = model(tmp_path / "b.onnx", {"w": w, "b": b[:1]})
    [change] = json.loads(works("diff", first, second, "--json").stdout)["tensors"]
    assert (change["name"], change["state"]) == ("b", "other form")
    assert "[2]" in change["form"]
    assert "[1]" in change["form"]
