"""``ortflex diff`` compares with numpy what two files have."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from ortflex_plugins.cli.main import main

pytestmark = pytest.mark.once


def model(path, tensors, op="Add", **metadata):
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node(op, ["s", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(a, n) for n, a in tensors.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, metadata)
    onnx.save(made, path)
    return str(path)


def run(*arguments):
    result = CliRunner().invoke(main, ["diff", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_difference_is_found_and_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(3, 2)).astype(np.float32), np.zeros(2, np.float32)
    other = w.copy()
    other[1, 0] += 0.5
    other[2, 1] -= 2
    first = model(tmp_path / "a.onnx", {"w": w, "b": b}, author="me")
    second = model(tmp_path / "b.onnx", {"w": other, "b": b}, op="Mul", author="<you>")
    found = json.loads(run(first, second, "--json"))
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
    text = run(first, second, "-o", str(page))
    assert "1 of 2 tensors differ" in text
    assert "<td>w</td>" in page.read_text()
    assert "<you>" not in page.read_text()


def test_equal_files_and_other_forms(tmp_path):
    w, b = np.full((3, 2), np.nan, np.float32), np.zeros(2, np.float32)
    first = model(tmp_path / "a.onnx", {"w": w, "b": b})
    again = json.loads(run(first, first, "--json"))
    assert (again["tensors"], again["facts"], again["equal"]) == ([], {}, 2)
    second = model(tmp_path / "b.onnx", {"w": w, "b": b[:1]})
    [change] = json.loads(run(first, second, "--json"))["tensors"]
    assert (change["name"], change["state"]) == ("b", "other form")
    assert "[2]" in change["form"]
    assert "[1]" in change["form"]
