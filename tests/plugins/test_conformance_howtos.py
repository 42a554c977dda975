"""The pages docs/howto/write-a-*.md, followed word by word: commands run, files written, tests passed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import attrs
import pytest

from tests.plugins.commands import works
from tests.plugins.conformance_installed import PYTEST, ROOT, install, run

pytestmark = pytest.mark.once

PAGES = sorted((ROOT / "docs" / "howto").glob("write-a*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\S+/\S+\.py)\n")
EXTENSIONS = "onnxruntime_extensions"


@attrs.define
class Reader:
    """Somebody who does what a page says, in a folder of their own."""

    folder: Path
    tested: list[str] = attrs.field(factory=list)
    without: bool = False
    """Whether the rest of the page needs something that is not installed here."""

    def read(self, page: Path) -> None:
        self.without = False
        for language, text in BLOCK.findall(page.read_text("utf-8")):
            if language == "bash":
                for line in text.splitlines():
                    if not self.without:
                        self.type(line)
            elif self.without:
                continue
            elif language == "python" and (found := FILE.match(text)):
                path = self.folder / found[1]
                # Files of the package take the place of what new-plugin wrote.
                assert path.exists(), f"{page.name}: {found[1]} is none of the files there are"
                path.write_text(text, "utf-8")

    def type(self, line: str) -> None:
        command, *words = shlex.split(line)
        if command == "ortflex":
            works(*words)
        elif [command, *words] == ["pip", "install", "onnxruntime-extensions"]:
            self.without = importlib.util.find_spec(EXTENSIONS) is None
        elif [command, *words[:2]] == ["pip", "install", "-e"]:
            assert (self.folder / words[2].removesuffix("[test]") / "pyproject.toml").is_file()
        elif command == "pytest":
            self.tested += words
        else:
            raise AssertionError(f"nobody knows how to run {line!r}")


def test_there_is_a_page_for_what_people_write() -> None:
    names = {p.stem.removeprefix("write-a-").removeprefix("write-an-") for p in PAGES}
    formulas = {"loss", "optimizer", "transform", "gradient-rule", "penalty", "constraint"}
    formulas |= {"schedule", "average"}
    assert names >= formulas | {"backend", "callback", "metric", "data-source", "device"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_no_formula_is_longer_than_fifteen_lines(page: Path) -> None:
    for text in (t for kind, t in BLOCK.findall(page.read_text("utf-8")) if kind == "python"):
        bodies = r"^ *def (?:(?!test_)\w)+\(.*?(?=^\S|^ *@|^ *def |\Z)"
        for body in re.findall(bodies, text, re.M | re.S):
            assert len(body.strip().splitlines()) <= 15, body


def test_followed_word_by_word_every_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    for page in PAGES:
        reader.read(page)
    # The page about the checks themselves is a module of tests.
    blocks = BLOCK.findall((PAGES[0].parent / "test-a-plugin.md").read_text("utf-8"))
    code = "\n".join(text for language, text in blocks if language == "python")
    (tmp_path / "test_page.py").write_text(code, "utf-8")
    reader.tested.append("test_page.py")
    packages = sorted({p.parent for p in tmp_path.glob("*/pyproject.toml")})
    for package in packages:
        assert package.name in reader.tested, f"{package.name} is never tested"
        install(package, tmp_path / "site")
    call = [*PYTEST, "--import-mode=importlib", *sorted(set(reader.tested))]
    done = run(call, tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert len(packages) >= 11
    assert re.search(r"\d+ passed", done.stdout)
