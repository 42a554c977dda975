"""Planted mistakes: each must be rejected by the check of a kit that is named for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core.graph.ops import Ops, Tensor


@attrs.frozen
class Planted:
    """A component with a mistake, the check that must find it, and what that says."""

    check: str
    mistake: Any
    match: str
    given: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def label(self) -> str:
        of = "-".join(v for v in self.given.values() if isinstance(v, str))
        return f"{self.check}-{type(self.mistake).__name__}" + (f"-{of}" if of else "")


def cases(planted: Iterable[Planted]) -> Any:
    return pytest.mark.parametrize("planted", planted, ids=lambda p: p.label)


def called(kit: Any, check: str, component: Any, known: Mapping[str, Any]) -> None:
    """Call one check of a kit with what stands for its fixtures."""
    method = getattr(kit(), check)
    given = {"component": component, "here": component, **known}
    method(**{name: given[name] for name in inspect.signature(method).parameters})


def rejected(kit: Any, planted: Planted, known: Mapping[str, Any]) -> None:
    """The check fails, and says what is wrong."""
    wrong = (Exception, pytest.fail.Exception)
    with pytest.raises(wrong, match=planted.match):
        _called(kit, planted, {**known, **planted.given})


def _called(kit: Any, planted: Planted, known: Mapping[str, Any]) -> None:
    """Call the check of a planted mistake; one that skips itself would find nothing."""
    try:
        called(kit, planted.check, planted.mistake, known)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"the check was skipped: {skipped}")


def checks(kit: Any) -> set[Any]:
    """The functions of a kit that are checks."""
    return {f for name, f in inspect.getmembers(kit, inspect.isfunction) if name[:5] == "test_"}


def all_planted(kit: Any, planted: Iterable[Planted], elsewhere: Iterable[Any] = ()) -> None:
    """No check of a kit is without a planted mistake."""
    found = {getattr(kit, p.check) for p in planted} | set(elsewhere)
    assert sorted(f.__qualname__ for f in checks(kit) - found) == []


def through_float32(op: Ops, x: Tensor) -> Any:
    """Float64 with the accuracy of float32; two casts alone are left out by older runtimes."""
    return op.Cast(0.5 * op.Cast(x, to=TensorProto.FLOAT), to=x.dtype) * 2


def noisy(op: Ops, x: Tensor) -> Any:
    return x + op.RandomUniformLike(x)


def doubled_in_float32(x: Tensor) -> Tensor:
    return 2 * x if x.dtype == TensorProto.FLOAT else x


def normal(*shape: int) -> Any:
    return np.random.default_rng(1).normal(size=shape)
