"""Custom-operator libraries: named by code, loaded by every session, refused by their name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import Entry, PluginError, Plugins, Unsupported, load_rules
from ortflex_core.compiler.operators.reverse_mode import Rules
from ortflex_core.compiler.runtime import session
from tests.training import make, plugins, usable


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that session options are given, in the order of the calls."""
    calls: list[str] = []
    real = onnxruntime.SessionOptions

    class Options(real):  # type: ignore[misc, valid-type]
        def register_custom_ops_library(self, path: str) -> None:
            calls.append(path)

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(session, "_libraries", {})
    return calls


def test_a_missing_library_is_named() -> None:
    with pytest.raises(PluginError, match=r"cannot load the custom-operator library '/none/x\.so'"):
        session.use_library(Path("/none/x.so"))
    session.session_options(1)  # and is forgotten


def test_every_session_loads_what_was_named_once(loaded: list[str]) -> None:
    session.session_options(1)
    assert loaded == []
    session.use_library("one.so")
    session.use_library("one.so")
    session.use_library("other.so")
    del loaded[:]
    session.session_options(1)
    assert loaded == ["one.so", "other.so"]


def bringing(*libraries: str | Callable[[], str]) -> Rules:
    """A family of rules with kernels in libraries."""
    family = Rules()
    for one in libraries:
        family.kernels(one)
    return family


def test_a_family_brings_its_library_along(loaded: list[str]) -> None:
    found = with_family(bringing("direct.so", lambda: "asked.so"))
    assert loaded == []  # listing plugins loads nothing
    rules = load_rules(found)
    rules.lookup("", "Relu", 17)
    assert loaded == []  # ours have this operator
    rules.lookup("custom", "Cube", 1)
    assert loaded == ["direct.so", "asked.so"]


def test_the_kernels_of_a_family_are_asked_for_once(loaded: list[str]) -> None:
    """However often the family is: by name, by preference, and by each of its operators."""
    asked = []

    def library() -> str:
        asked.append("asked")
        return "asked.so"

    found = with_family(bringing(library))
    found.prefer = ("tests", *found.prefer)
    rules = load_rules(found, first=["custom"])
    for name in ("Cube", "Cube", "Sphere"):
        rules.lookup("custom", name, 1)
    assert asked == ["asked"]


def test_a_family_whose_kernels_fail_is_tried_once_unless_it_is_named(
    loaded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def library() -> str:
        tried.append("tried")
        raise OSError("no such kernel")  # each text is a warning once in a process

    found = with_family(bringing(library))
    rules = load_rules(found)
    assert [rules.lookup("custom", name, 1)[0] for name in ("Cube", "Sphere")] == [False, False]
    assert tried == ["tried"]
    assert "no such kernel" in caplog.text
    with pytest.raises(PluginError):
        load_rules(found, first=["custom"])


def with_family(family: Rules) -> Plugins:
    class Point(EntryPoint):
        def load(self) -> Any:
            return family

    point = Point("custom", "nowhere:RULES", "ortflex.gradients")
    entry = Entry("gradients", "custom", "nowhere:RULES", "tests", "1", point)
    return Plugins([*(e for registry in plugins() for e in registry), entry])


MODEL = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.contrib": 1]>
g (float[N, 2] X) => (float[N, 1] Y) <float[2, 1] w = {0.5, -0.25}>
{ z = MatMul(X, w)  Y = ai.onnx.contrib.OrtflexCube(z) }"""


@cache
def library() -> Callable[[], str]:
    """A library with a kernel written in Python; a second kernel of the name would spoil it for good."""
    extensions = pytest.importorskip("onnxruntime_extensions")

    @extensions.onnx_op(  # type: ignore[untyped-decorator]
        op_type="OrtflexCube", inputs=[extensions.PyOp.dt_float], outputs=[extensions.PyOp.dt_float]
    )
    def kernel(x: Any) -> Any:
        return x**3

    found: Callable[[], str] = extensions.get_library_path
    return found


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_an_operator_of_a_library_is_trained_or_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable(backend)
    monkeypatch.setattr(session, "_libraries", {})  # other tests do without

    family = bringing(library())

    @family.rule("OrtflexCube", domain="ai.onnx.contrib")
    def cube(op: Any, node: Any, g: Any) -> Any:
        return [3 * node.inputs[0] * node.inputs[0] * g]

    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    options: dict[str, Any] = {"backend": backend, "learning_rate": 0.1}
    trainer = make(onnx.parser.parse_model(MODEL), plugins=with_family(family), **options)
    if backend != "fused":
        with pytest.raises(Unsupported, match="OrtflexCube"):
            trainer.step((x, y))
        return
    w = np.array([[0.5], [-0.25]])
    z = x @ w
    slope = x.T @ (2 * (z**3 - y) * 3 * z**2 / len(x))
    loss = trainer.step((x, y))
    np.testing.assert_allclose(loss, np.square(z**3 - y).mean(), rtol=1e-5)
    np.testing.assert_allclose(trainer.get_state()["w"], w - 0.1 * slope, rtol=1e-5)
    now = x @ trainer.get_state()["w"]
    np.testing.assert_allclose(trainer.predict(x), now**3, rtol=1e-4, atol=1e-6)
