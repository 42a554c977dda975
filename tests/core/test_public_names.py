"""What is public stays: names are listed, nothing listed goes away, and type checkers know all of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Ops, Trace
from tests.core import public_names, typed_operators

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^### (\S+)\n\n```text\n(.*?)^```$", re.M | re.S)


def listed() -> dict[str, list[str]]:
    """Lines by module, as the page has them."""
    return {m: text.splitlines() for m, text in BLOCK.findall(public_names.PAGE.read_text("utf-8"))}


def parsed(line: str) -> tuple[str, list[str] | None]:
    name, bracket, rest = line.partition("(")
    arguments = [a for a in rest.removesuffix(")").split(", ") if a]
    return name, arguments if bracket else None


def broken(old: str, new: str) -> str:
    """Why a caller of ``old`` would not get along with ``new``; empty if all would."""
    (name, before), (_, after) = parsed(old), parsed(new)
    if before is None or after is None:
        return "" if before == after else f"{old} has become {new}"
    gone = [a for a in before if a != "*" and a.rstrip("=") not in {b.rstrip("=") for b in after}]
    if gone:
        return f"{name} has lost the argument {gone[0].rstrip('=')!r}"
    asked = [b for b in after if not b.endswith("=") and b not in before and b[0] != "*"]
    if asked:
        return f"{name} asks for {asked[0]!r}, which nobody gave before"
    head = [a.rstrip("=") for a in before[: before.index("*") if "*" in before else None]]
    if [b.rstrip("=") for b in after[: len(head)]] != head:
        return f"{name} takes its arguments in another order"
    return ""


MODULES = [(m, names) for group in public_names.MODULES.values() for m, names in group.items()]


@pytest.mark.parametrize(
    ("module", "names"), MODULES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_listed_public_names_are_not_removed(module: str, names: Any) -> None:
    if module.endswith("estimators"):
        pytest.importorskip("sklearn")
    now = {parsed(line)[0]: line for line in public_names.lines(module, names)}
    problems = []
    for line in listed()[module]:
        name = parsed(line)[0]
        if name.startswith("OrtLayer") and "OrtLayer" not in now:
            continue  # torch is not installed
        problems.append(f"{name} is gone" if name not in now else broken(line, now[name]))
    hint = "see docs/explanation/deprecation.md, then python -m tests.core.public_names"
    assert not any(problems), f"{'; '.join(filter(None, problems))}: {hint}"


def test_type_checkers_know_the_public_names() -> None:
    assert public_names.STUB.read_text("utf-8") == public_names.stub()


@pytest.mark.slow
def test_the_list_of_public_names_is_complete() -> None:
    for module in ("sklearn", "torch"):
        pytest.importorskip(module)
    written = public_names.PAGE.read_text("utf-8")
    assert written == public_names.page(), "run python -m tests.core.public_names"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("f(a, b=)", "f(a, b=, c=)", ""),
        ("f(a, b)", "f(a, b=)", ""),
        ("f(a, *, b=)", "f(a, *, c=, b=)", ""),
        ("f(a, b=)", "f(a)", "f has lost the argument 'b'"),
        ("f(a)", "f(a, b)", "f asks for 'b', which nobody gave before"),
        ("f(a, b)", "f(b, a)", "f takes its arguments in another order"),
        ("f(a, b=)", "f(b=, a=)", "f takes its arguments in another order"),
        ("f(a=)", "f(a)", "f asks for 'a', which nobody gave before"),
        ("f(a, b=)", "f(a, *, b=)", "f takes its arguments in another order"),
        ("A.x", "A.x()", "A.x has become A.x()"),
    ],
)
def test_what_counts_as_broken(old: str, new: str, reason: str) -> None:
    assert broken(old, new) == reason


def test_kinds_of_plugins_and_hooks_stay() -> None:
    from ortflex_core import KINDS, NAMES

    assert set(KINDS) >= {
        *("losses", "penalties", "schedules", "optimizers", "transforms", "constraints"),
        *("averages", "devices", "backends", "data", "metrics", "callbacks", "gradients"),
    }
    assert set(NAMES) >= {
        *("recipe_resolved", "graph_built", "train_start", "epoch_start", "step_end", "steps_end"),
        *("validation_end", "epoch_end", "settled", "checkpoint_saving", "checkpoint_loading"),
        *("train_end", "exception"),
    }


def test_the_readme_and_the_policy_lead_here() -> None:
    policy = (ROOT / "docs" / "explanation" / "deprecation.md").read_text("utf-8")
    assert "../reference/names.md" in policy


# Types of operators -------------------------------------------------------------------------------


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
