"""What is in the wheel and in the source distribution: ``python tests/distributions.py FILES``.

Exits with 1 and a line for each thing that is missing or should not be there. It needs the standard
library only.
"""

from __future__ import annotations

import configparser
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("ortflex_core", "ortflex_plugins")
LEFT_OUT = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def packaged() -> set[str]:
    """Every file of the checkout that belongs into the wheel: code, templates, marks of types."""
    files = [p for name in PACKAGES for p in (ROOT / name).rglob("*") if p.is_file()]
    return {
        "ortflex.py",
        *(p.relative_to(ROOT).as_posix() for p in files if not LEFT_OUT & set(p.parts)),
    }


def version() -> str:
    """The version, where it is written."""
    text = (ROOT / "ortflex_core" / "kernel" / "version.py").read_text("utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.M)[0]


def wheel_problems(names: Iterable[str], metadata: str, entry_points: str) -> Iterator[str]:
    """What is wrong with a wheel of these files, metadata and entry points."""
    info = f"ortflex-{version()}.dist-info/"
    held = {name for name in names if not name.startswith(info)}
    yield from (f"the wheel lacks {name}" for name in sorted(packaged() - held))
    yield from (f"the wheel has {name}" for name in sorted(held - packaged()))
    if f"\nVersion: {version()}\n" not in metadata:
        yield f"the metadata have another version than {version()}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    expected = {**project["entry-points"], "console_scripts": project["scripts"]}
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(entry_points)
    found = {section: dict(parser[section]) for section in parser.sections()}
    if found != expected:
        yield "the entry points differ from pyproject.toml"


def source_problems(names: Iterable[str]) -> Iterator[str]:
    """What is wrong with a source distribution of these files."""
    inner = {name.partition("/")[2] for name in names}
    wanted = packaged() | {
        *("pyproject.toml", "noxfile.py", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"),
        *("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", ".ci/run", "docs/conf.py"),
        *("tests/conftest.py", "tests/core/test_trainer.py", "tests/benchmarks/__main__.py"),
    }
    yield from (f"the source distribution lacks {name}" for name in sorted(wanted - inner))
    caches = [n for n in inner if LEFT_OUT & set(n.split("/")) or n.startswith((".nox", ".venv"))]
    yield from (f"the source distribution has {name}" for name in sorted(caches))


def problems(path: Path) -> Iterator[str]:
    """What is wrong with a file that was built."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            info = f"ortflex-{version()}.dist-info"
            metadata, entry_points = (
                wheel.read(f"{info}/{name}").decode() for name in ("METADATA", "entry_points.txt")
            )
            yield from wheel_problems(wheel.namelist(), metadata, entry_points)
    else:
        with tarfile.open(path) as archive:
            yield from source_problems(archive.getnames())


def main(files: list[str]) -> int:
    """Print the problems of all files; 1 if there are any."""
    found = [problem for name in files for problem in problems(Path(name))]
    print(
        "\n".join(found)
        or f"{len(files)} distributions of ortflex {version()} are as they should be"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
