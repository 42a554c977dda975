"""A copy of the checkout, in which mutants are written: the checkout itself is never changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".nox" / "mutation"
SOURCES = ("ortflex.py", "ortflex_core", "ortflex_plugins")


def copy(place: Path) -> Path:
    """Copy what git tracks, and new files that it does not ignore, to a folder that is made anew."""
    shutil.rmtree(place, ignore_errors=True)
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def sources() -> list[str]:
    """The files that mutants are drawn from, relative to the checkout."""
    found = [ROOT / SOURCES[0], *(p for name in SOURCES[1:] for p in (ROOT / name).rglob("*.py"))]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def package_of(source: str) -> str:
    """The package of a source in the table: two levels, as ``ortflex_core/compiler/graph``."""
    parts = source.split("/")
    return "/".join(parts[: min(2, len(parts) - 1)]) or source


def environment(tree: Path) -> dict[str, str]:
    """The variables of a process that runs the tests of a copy."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(tree.with_name(f"{tree.name}-bytecode")),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
    }
