"""The install command of messages and pages is the one that works from where ortflex was installed."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import install_command
from ortflex_core.kernel.install_command import command_of, origin

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
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
    assert 'pip install ".[' in (ROOT / "docs" / "howto" / "install-a-runtime.md").read_text(
        "utf-8"
    )
