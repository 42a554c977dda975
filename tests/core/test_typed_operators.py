"""Operators have types: the stub is what the schemas say, and type checkers see tensors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import Ops, Trace
from tests.core import typed_operators

pytestmark = pytest.mark.once

FORMULA = """
from typing import assert_type
from ortflex_core import Host, Ops, Tensor

def formula(op: Ops, x: Tensor, rate: Host, beta: float) -> None:
    assert_type(op.Abs(x), Tensor)
    assert_type(op.ReduceMax(x, axes=[1], keepdims=0), Tensor)
    assert_type(op.TopK(x, [3], outputs=2), tuple[Tensor, Tensor])
    assert_type(op.Split(x, [1, 2], axis=0, outputs=2), tuple[Tensor, ...])
    assert_type(op("Gelu", x, domain="com.microsoft"), Tensor)
    assert_type(op.Min(1 - beta**rate, 1.0), Host)
    assert_type(op.Min(1.0, x), Tensor)
    assert_type(op.Sqrt(1 - rate), Host)
    assert_type(rate * x, Tensor)
    assert_type(x / rate, Tensor)
    assert_type(2 * rate, Host)
    assert_type(-x + 1, Tensor)
"""
MISTAKES = """
from ortflex_core import Host, Ops, Tensor

def formula(op: Ops, x: Tensor, rate: Host) -> None:
    op.Abz(x)
    op.Softmax(x, axes=1)
    op.Cast(x)
    op.Abs(None)
    op.ReduceMax(x, keepdims="no")
    x + "1"
"""


def written() -> list[ast.FunctionDef]:
    tree = ast.parse(typed_operators.STUB.read_text("utf-8"))
    [operators] = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return [node for node in operators.body if isinstance(node, ast.FunctionDef)]


def opset_of_the_stub() -> int:
    first = typed_operators.STUB.read_text("utf-8").split("\n", 1)[0]
    return int(first.partition("opset ")[2].split()[0])


def test_the_stub_is_what_the_generator_writes() -> None:
    """Of the newest onnx that was there when it was written; others know other operators."""
    if onnx.defs.onnx_opset_version() != opset_of_the_stub():
        pytest.skip(f"this onnx knows opset {onnx.defs.onnx_opset_version()}")
    assert typed_operators.STUB.read_text("utf-8") == typed_operators.stub()


def test_every_operator_of_an_opset_is_found_by_editors_and_at_run_time() -> None:
    """What ``dir`` lists is in the stub, and the other way around where onnx is as new."""
    stub = {method.name for method in written()}
    newest = min(opset_of_the_stub(), onnx.defs.onnx_opset_version())
    listed = {name for name in dir(Trace({"": newest}).op) if name[0].isupper()}
    assert {"Abs", "TopK", "RMSNormalization"} <= listed <= stub
    if newest == opset_of_the_stub():
        assert listed == stub
    older = {name for name in dir(Trace({"": 12}).op) if name[0].isupper()}
    assert "Trilu" in listed
    assert "Trilu" not in older
    assert "Abs" in older


def test_run_time_pays_nothing_for_types() -> None:
    """The class has no method an operator, and the stub is no module that could be imported."""
    assert Ops.__mro__ == (Ops, object)
    assert "Abs" not in vars(Ops)
    assert not typed_operators.STUB.with_suffix(".py").exists()


def test_outputs_and_keywords_of_the_stub_are_those_of_calls() -> None:
    op = (trace := Trace({"": 18})).op
    x = trace.input("x", np.float32, (4, 3))
    values, indices = op.TopK(x, [2], outputs=2, axis=1, largest=0)
    assert (values.dtype, indices.dtype) == (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
    [topk] = [n for n in trace.nodes if n.op_type == "TopK"]
    methods = [m for m in written() if m.name == "TopK"]
    for method in methods:
        keywords = {a.arg for a in method.args.kwonlyargs} - {"outputs"}
        assert set(topk.attributes) <= keywords
        assert [a.arg for a in method.args.args] == ["self", "X", "K"]
    results = [ast.unparse(m.returns) for m in methods if m.returns is not None]
    assert results == ["Tensor", "tuple[Tensor, Tensor]", "tuple[Tensor, ...]"]


def checked(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "formula.py"
    file.write_text(code, "utf-8")
    root = typed_operators.STUB.parents[3]
    settings = ["--strict", "--config-file", str(root / "pyproject.toml")]
    command = [sys.executable, "-m", "mypy", *settings, "--no-incremental", str(file)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "wrong"), [(FORMULA, set()), (MISTAKES, set(range(5, 11)))])
def test_mypy_sees_tensors_and_host_scalars_and_finds_mistakes(
    code: str, wrong: set[int], tmp_path: Path
) -> None:
    """Misspelt operators and attributes, what is missing, and values of the wrong type."""
    pytest.importorskip("mypy")
    done = checked(code, tmp_path)
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert lines == wrong, done.stdout
    assert bool(done.returncode) == bool(wrong)
