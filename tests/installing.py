"""Distributions for tests: a module, its metadata and its entry points in a folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Install = Callable[..., None]

GOOD = """
import attrs
from ortflex_core import Loss

@attrs.frozen(kw_only=True)
class Cubed(Loss):
    name = "cubed"
    def per_sample(self, op, predicted, expected):
        return op.Abs(predicted - expected) ** 3
"""


def module_of(name: str) -> str:
    """The module of a distribution."""
    return f"{name.replace('-', '_')}_module"


def write(
    root: Path, name: str, code: str, groups: Mapping[str, Mapping[str, str]], version: str = "1.0"
) -> Path:
    """The folder of a distribution; entry points as {group: {name: target}}."""
    folder = root / name
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module_of(name)}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution of one module onto sys.path."""
    added: list[str] = []

    def add(
        name: str, code: str, groups: Mapping[str, Mapping[str, str]], version: str = "1.0"
    ) -> None:
        monkeypatch.syspath_prepend(str(write(tmp_path, name, code, groups, version)))
        added.append(module_of(name))

    yield add
    for module in added:
        sys.modules.pop(module, None)
