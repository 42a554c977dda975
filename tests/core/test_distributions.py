"""What is handed out: the version in one place, the wheel's contents, and habits that name what exists."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import ortflex_core
from tests import distributions

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
INFO = f"Metadata-Version: 2.4\nName: ortflex\nVersion: {ortflex_core.__version__}\n\n"


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def entry_points() -> str:
    """The file of a wheel whose entry points are those of pyproject.toml."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    return "\n".join(lines)


def test_the_version_is_written_once() -> None:
    """Metadata, changelog and command line read ``ortflex_core.__version__``; nothing repeats it."""
    assert version("ortflex") == ortflex_core.__version__, "install the project again"
    assert tomllib.loads(read("pyproject.toml"))["project"]["dynamic"] == ["version"]
    written = re.compile(rf'version\s*[=:]\s*"?{re.escape(ortflex_core.__version__)}\b')
    places = ("pyproject.toml", "noxfile.py", "CITATION.cff", "docs/conf.py", "ortflex.py")
    assert [name for name in places if written.search(read(name))] == []
    headings = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.M)
    assert headings[headings[0] == "Unreleased"] == ortflex_core.__version__


def test_a_complete_wheel_has_no_problems() -> None:
    names = [*distributions.packaged(), f"ortflex-{ortflex_core.__version__}.dist-info/METADATA"]
    assert list(distributions.wheel_problems(names, INFO, entry_points())) == []


@pytest.mark.parametrize(
    "name",
    [
        "ortflex.py",
        "ortflex_core/py.typed",
        "ortflex_plugins/py.typed",
        "ortflex_plugins/cli/templates/loss.py.txt",
        "ortflex_plugins/pictures/page.js",
    ],
)
def test_a_file_that_the_wheel_lacks_is_named(name: str) -> None:
    names = distributions.packaged()
    assert name in names
    found = list(distributions.wheel_problems(names - {name}, INFO, entry_points()))
    assert found == [f"the wheel lacks {name}"]


def test_what_does_not_belong_into_the_wheel_is_named() -> None:
    names = distributions.packaged() | {"tests/models.py"}
    other = INFO.replace(ortflex_core.__version__, "9.9")
    found = list(distributions.wheel_problems(names, other, entry_points() + "\nmore = a:b"))
    assert found == [
        "the wheel has tests/models.py",
        f"the metadata have another version than {ortflex_core.__version__}",
        "the entry points differ from pyproject.toml",
    ]


def test_a_file_that_the_source_distribution_lacks_is_named() -> None:
    found = set(distributions.source_problems(["ortflex-1/ortflex.py", "ortflex-1/.nox/x"]))
    assert "the source distribution lacks tests/conftest.py" in found
    assert "the source distribution has .nox/x" in found
    assert "the source distribution lacks ortflex.py" not in found


def test_hooks_and_workflow_run_sessions_that_exist() -> None:
    noxfile, makefile = read("noxfile.py"), read("Makefile")
    sessions = {*re.findall(r"^def (\w+)\(session", noxfile, re.M)}
    sessions |= {f"tests({name})" for name in re.findall(r'^    "([\w.-]+)": Env', noxfile, re.M)}
    sessions |= {
        f"mutation({name})" for name in re.findall(r'session_for\("mutation", "(\w+)"', noxfile)
    }
    texts = read(".pre-commit-config.yaml") + read(".github/workflows/ci.yml")
    texts += read("CONTRIBUTING.md")
    asked = {a or b for a, b in re.findall(r'nox --session (?:"([^"]+)"|(\w+))', texts)}
    assert asked >= {"lint", "types", "package", "tests(stock)"}
    assert asked <= sessions
    targets = {*re.findall(r"^make (\w+)$", read(".ci/run"), re.M)}
    assert targets
    assert all(re.search(rf"^[\w -]*\b{target}\b[\w -]*:", makefile, re.M) for target in targets)
    assert ".ci/run" in read(".github/workflows/ci.yml")


def test_contributing_names_paths_that_exist() -> None:
    """A file that moves takes its line in the page with it."""
    text = read("CONTRIBUTING.md")
    paths = re.findall(r"`((?:ortflex_core|ortflex_plugins|tests|docs)/[\w./]+)`", text)
    real = [p for p in paths if not re.search(r"\b(NAME|KIND|FAMILY|COMMAND)\b", p)]
    assert len(real) > 15
    assert [p for p in real if not (ROOT / p).exists()] == []
    named = re.findall(r"`(?:\w+\.)?(\w+)` in `(ortflex_\w+/[\w./]+)`", text)
    assert len(named) > 10
    for name, path in named:
        assert re.search(rf"^ *(def |class )?{name}\b", read(path), re.M), (
            f"{name} is not in {path}"
        )
