"""Fixtures of the kits, one line each."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ortflex_core.testing.running import plugins


def gives(value: Any) -> Any:
    """A fixture that returns a value."""

    @pytest.fixture
    def fixture(self: Any) -> Any:
        return value

    return fixture


def component_of(kind: str, name: str, package: str = "", **fields: Any) -> Any:
    """The fixture ``component``; a test is skipped without the package."""

    @pytest.fixture
    def component(self: Any) -> Any:
        if package:
            pytest.importorskip(package)
        return plugins().component(kind, {"name": name, **fields})

    return component


def effect_of(check: Any) -> Any:
    """The fixture ``effect``: a method that looks at what a callback has done."""

    @pytest.fixture
    def effect(self: Any) -> Any:
        return partial(check, self)

    return effect


def normals(seed: int, *shape: int) -> Any:
    """A fixture of drawn numbers."""
    return gives(np.random.default_rng(seed).normal(size=shape))
