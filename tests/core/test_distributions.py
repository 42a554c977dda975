"""What is handed out: the version in one place, the wheel's contents, and habits that name what exists."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import ortflex_core
from ortflex_core import install_command
from ortflex_core.kernel.install_command import command_of, origin
from tests import distributions

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
INFO = f"Metadata-Version: 2.4\nName: ortflex\nVersion: {ortflex_core.__version__}\n\n"


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


PROJECT = tomllib.loads(read("pyproject.toml"))["project"]


def entry_points() -> str:
    """The file of a wheel whose entry points are those of pyproject.toml."""
    groups = {**PROJECT["entry-points"], "console_scripts": PROJECT["scripts"]}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    return "\n".join(lines)


def test_the_version_is_written_once() -> None:
    """Metadata, changelog and command line read ``ortflex_core.__version__``; nothing repeats it."""
    assert version("ortflex") == ortflex_core.__version__, "install the project again"
    assert PROJECT["dynamic"] == ["version"]
    written = re.compile(rf'version\s*[=:]\s*"?{re.escape(ortflex_core.__version__)}\b')
    places = ("pyproject.toml", "noxfile.py", "CITATION.cff", "docs/conf.py", "ortflex.py")
    assert [name for name in places if written.search(read(name))] == []
    headings = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.M)
    assert headings[headings[0] == "Unreleased"] == ortflex_core.__version__


def test_a_complete_wheel_has_no_problems() -> None:
    names = [*distributions.packaged(), f"ortflex-{ortflex_core.__version__}.dist-info/METADATA"]
    assert list(distributions.wheel_problems(names, INFO, entry_points())) == []


def test_files_that_the_wheel_lacks_are_named() -> None:
    names = distributions.packaged()
    for name in (
        *("ortflex.py", "ortflex_core/py.typed", "ortflex_plugins/py.typed"),
        *("ortflex_plugins/cli/templates/loss.py.txt", "ortflex_plugins/pictures/page.js"),
    ):
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
    mutated = re.findall(r'session_for\("mutation", "(\w+)"', noxfile)
    sessions |= {f"mutation({name})" for name in mutated}
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
    known = {
        path.name
        for folder in ("ortflex_core", "ortflex_plugins", "tests", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert set(re.findall(r"`(\w+\.py)`", text)) - known - {"ortflex.py", "noxfile.py"} == set()
    named = re.findall(r"`(?:\w+\.)?(\w+)` in `(ortflex_\w+/[\w./]+)`", text)
    assert len(named) > 10
    gone = [n for n in named if not re.search(rf"^ *(def |class )?{n[0]}\b", read(n[1]), re.M)]
    assert gone == []


# pyproject.toml asks for what is imported, and for nothing else -----------------------------------


IMPORTED_AS = {
    "scikit-learn": "sklearn",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "onnxruntime-training": "onnxruntime",
    "onnxruntime-training-cpu": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "tensorboardx": "tensorboardX",
}
# Installed for a package that imports it without asking for it: what for.
FOR_ANOTHER = {
    "onnxscript": "torch's ONNX exporter",
    "alembic": "mlflow's default store",
    "sqlalchemy": "mlflow's default store",
    "sqlparse": "mlflow's default store",
    "mpich": "the library of mpi4py, and mpiexec",
}
OURS = ("ortflex_core", "ortflex_plugins")
TOOLS = ("docs", "dev")
"""Extras for work on the repository: imported, or named as a tool, in its tests, pages and settings."""


def names_in(requirements: Iterable[str]) -> set[str]:
    return {re.match(r"[\w.-]+", text)[0].lower() for text in requirements}  # type: ignore[index]


def module(distribution: str) -> str:
    return IMPORTED_AS.get(distribution, distribution.replace("-", "_"))


def imported(source: str) -> set[str]:
    """The top-level modules that a source imports, also inside functions and by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "importorskip", "find_spec")):
                found.add(str(node.args[0].value))
    return {name.partition(".")[0] for name in found}


def imports(*folders: str) -> set[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found: set[str] = set()
    return found.union(*(imported(path.read_text(encoding="utf-8")) for path in paths))


def test_declared_dependencies_are_those_that_are_imported() -> None:
    asked = names_in(PROJECT["dependencies"])
    extras = {n: names_in(r) for n, r in PROJECT["optional-dependencies"].items() if n not in TOOLS}
    used = imports(*OURS) - set(sys.stdlib_module_names) - {*OURS, "ortflex"}
    assert {d for d in asked if module(d) not in used} == set()
    optional = set[str]().union(*extras.values())
    assert {d for d in optional if module(d) not in used} <= set(FOR_ANOTHER)
    assert used - {module(d) for d in asked | optional} <= UNASKED


UNASKED = {
    "google",  # protobuf, which onnx brings
    "scipy",  # which scikit-learn brings
    "typing_extensions",  # read by type checkers alone, which bring it
    "IPython",  # which the kernel of a notebook has
    "pandas",  # looked at only where a user's data are of it
}


def test_what_is_installed_for_another_package_is_asked_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(FOR_ANOTHER) <= set[str]().union(*map(names_in, extras.values()))
    assert not {module(d) for d in FOR_ANOTHER} & imports(*OURS) - {"onnxscript"}


def test_tools_are_used() -> None:
    settings = ("noxfile.py", "pyproject.toml", "docs/conf.py", "tests/conftest.py", "Makefile")
    words = {name: read(name) for name in settings if (ROOT / name).exists()}
    words["pyproject.toml"] = words["pyproject.toml"].partition("[tool.")[2]
    text = "\n".join(words.values()).replace("-", "_")
    used = imports("tests", "docs") | imported(words.get("noxfile.py", ""))
    for extra in TOOLS:
        for d in names_in(PROJECT["optional-dependencies"][extra]):
            name = module(d)
            assert name in used or re.search(rf"\b{name}\b|{name.removeprefix('pytest_')}", text), d


# The install command of messages and pages is the one that works from where ortflex was installed ---


PYTHON = [*ROOT.glob("ortflex.py"), *ROOT.glob("ortflex_*/**/*.py")]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]


def test_each_origin_has_its_command(tmp_path: Path, monkeypatch: Any) -> None:
    folder = {"url": tmp_path.as_uri(), "dir_info": {}}
    assert command_of(folder, ("xla",)) == f'pip install "{tmp_path}[xla]"'
    editable = {**folder, "dir_info": {"editable": True}}
    assert command_of(editable, ("xla",)) == f'pip install -e "{tmp_path}[xla]"'
    monkeypatch.chdir(tmp_path)
    assert command_of(folder, ("stock", "xla")) == 'pip install ".[stock,xla]"'
    spaced = {"url": "file:///a%20b/ortflex-1.0-py3-none-any.whl", "archive_info": {}}
    assert command_of(spaced, ("xla",)) == 'pip install "/a b/ortflex-1.0-py3-none-any.whl[xla]"'
    web = {"url": "s3://bucket/ortflex-1.0-py3-none-any.whl", "archive_info": {}}
    assert command_of(web, ("xla",)) == f'pip install "ortflex[xla] @ {web["url"]}"'
    assert command_of(None) == 'pip install "ortflex"'


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"url": 3}', "null"])
def test_a_broken_record_counts_as_an_index(text: str | None, monkeypatch: Any) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            return text

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert origin.__wrapped__() is None


def test_the_command_is_that_of_this_installation() -> None:
    found = importlib.metadata.distribution("ortflex").read_text("direct_url.json")
    assert install_command("xla") == command_of(json.loads(found or "null"), ("xla",))


def test_no_message_names_a_command_of_its_own() -> None:
    wrong = []
    for path in PYTHON:
        if path.name == "install_command.py" or "templates" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(text, str) and re.search(r"^[^`]*pip install .{0,12}ortflex\[", text):
                wrong.append(f"{path}:{node.lineno}")
    assert not wrong


def test_the_commands_of_pages_have_the_form_that_the_site_substitutes() -> None:
    """docs/conf.py names what is installed in one place; pages are right in a checkout as they are."""
    wrong = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        if "_build" not in page.parts and "gallery" not in page.parts
        for line in page.read_text("utf-8").splitlines()
        if re.search(r"ortflex\[[a-z]", line)
    ]
    assert not wrong
    assert 'pip install ".[' in read("docs/howto/install-a-runtime.md")
