"""Planted mistakes: each must be rejected by the check of a kit that is named for it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import Ops, Tensor
from ortflex_core.testing.component import ComponentKit


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
    given = {"component": component, "here": component, "compared": known.get("reference"), **known}
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


def but(component: Any, **changed: Any) -> Any:
    """The component with other methods or class attributes, which are its mistake."""
    kind = type(component)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **changed})()


SHARED = checks(ComponentKit)
"""Checks whose mistakes are planted in losses."""


@attrs.frozen
class Subject:
    """A kit, a component that passes it, mistakes, and what stands for the kit's fixtures.

    Mistakes of the checks ``elsewhere`` are planted in other files; ``uncalled`` are names of checks
    that no component of a test passes.
    """

    kit: Any
    good: Any
    planted: Sequence[Planted]
    known: Mapping[str, Any] = attrs.field(factory=dict)
    elsewhere: frozenset[Any] = frozenset(SHARED)
    uncalled: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return str(self.kit.__name__)


class PlantedMistakes:
    """Tests of some kits: what is right passes, and each check rejects its planted mistakes."""

    subjects: ClassVar[Sequence[Subject]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        rows: list[Any] = []
        for s in self.subjects:
            if "planted" in names:
                rows += [pytest.param(s, p, id=f"{s.label}-{p.label}") for p in s.planted]
            elif "check" in names:
                right = sorted(f.__name__ for f in checks(s.kit) - SHARED)
                own = [name for name in right if name not in s.uncalled]
                rows += [pytest.param(s, name, id=f"{s.label}-{name}") for name in own]
            else:
                rows.append(pytest.param(s, id=s.label))
        metafunc.parametrize([n for n in ("subject", "planted", "check") if n in names], rows)

    def test_a_planted_mistake_is_rejected(
        self, subject: Subject, planted: Planted, tmp_path: Path
    ) -> None:
        rejected(subject.kit, planted, {**subject.known, "tmp_path": tmp_path})

    def test_every_check_has_a_planted_mistake(self, subject: Subject) -> None:
        all_planted(subject.kit, subject.planted, subject.elsewhere)

    def test_what_is_right_passes(self, subject: Subject, check: str, tmp_path: Path) -> None:
        known = {**subject.known, "tmp_path": tmp_path}
        called(subject.kit, check, copy.deepcopy(subject.good), known)


def through_float32(op: Ops, x: Tensor) -> Any:
    """Float64 with the accuracy of float32; two casts alone are left out by older runtimes."""
    return op.Cast(0.5 * op.Cast(x, to=TensorProto.FLOAT), to=x.dtype) * 2


def noisy(op: Ops, x: Tensor) -> Any:
    return x + op.RandomUniformLike(x)


def doubled_in_float32(x: Tensor) -> Tensor:
    return 2 * x if x.dtype == TensorProto.FLOAT else x


def in_any_formula(good: Any, method: str, backends: str) -> list[Planted]:
    """Mistakes that each formula may have, in this method: rounding, another one in float32, noise."""
    right = getattr(type(good), method)

    def after(change: Any) -> Any:
        return but(good, **{method: lambda self, op, *given: change(op, right(self, op, *given))})

    def rounded(self: Any, op: Any, first: Any, *given: Any) -> Any:
        return through_float32(op, right(self, op, through_float32(op, first), *given))

    return [
        Planted("test_float64", but(good, **{method: rounded}), "(accuracy of|rounded to) float32"),
        Planted("test_backends", after(lambda op, x: doubled_in_float32(x)), backends),
        Planted("test_determinism", after(noisy), "differs from one run to the next"),
    ]


def at_each_rank(good: Any, method: str, match: str, wrong: Any) -> list[Planted]:
    """The method is wrong for weights of one rank."""
    right = getattr(type(good), method)

    def at(rank: int) -> Any:
        def changed(self: Any, op: Any, weight: Any, *given: Any) -> Any:
            value = right(self, op, weight, *given)
            return wrong(weight, value) if len(weight.shape) == rank else value

        return but(good, **{method: changed})

    return [Planted("test_value", at(k), match, {"of": f"rank {k}"}) for k in range(1, 6)]


def normal(*shape: int) -> Any:
    return np.random.default_rng(1).normal(size=shape)
