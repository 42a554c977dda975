"""The map: which tests reach which lines, and in how many seconds."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import children
from tests.mutation import lines, tree

MAP = tree.PLACE / "map.sqlite"
_SITE = """\
import os
if {name!r} in os.environ:
    from tests.mutation.lines import record_process
    record_process()
"""


class Test(NamedTuple):
    """A test that passes on the sources as they are."""

    name: str
    seconds: float

    @property
    def function(self) -> str:
        """The name without the case."""
        return self.name.partition("[")[0]

    @property
    def file(self) -> str:
        """The file of a test, relative to the checkout."""
        return self.name.partition("::")[0]


def collect(arguments: list[str], jobs: int = 1, seconds: float = 900.0) -> None:
    """Run the tests that are not slow, and write the map.

    One case of each function, backend and operator runs, and 1 of so many others, as the scope
    ``mutation`` of tests/conftest.py says. A file of tests is a process of its own, so a call
    that is interrupted continues where it was; after ``seconds`` a file has what it has.
    """
    if sys.version_info < (3, 12):
        raise SystemExit("the map needs sys.monitoring, that is Python 3.12 or later")
    copy = tree.copy(tree.PLACE / "map")
    site = tree.PLACE / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE.format(name=lines.CHILDREN), "utf-8")
    with _open() as store:
        done = {row[0] for row in store.execute("SELECT name FROM files")}
    files = arguments or [name for name in _files(copy) if name not in done]

    def record(name: str) -> None:
        folder = tree.PLACE / "lines" / name.replace("/", "-")
        found, said = _run(name, copy, folder, seconds)
        _store(name, found)
        print(f"{name}: {said}", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(record, files))


def _run(name: str, copy: Path, folder: Path, seconds: float) -> tuple[list[str], str]:
    """The lines of JSON of the tests of a file, and the last words of pytest."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "left").mkdir(parents=True)
    environment = tree.environment(copy)
    environment["PYTHONPATH"] += os.pathsep + str(tree.PLACE / "site")
    environment |= {lines.LINES: str(folder), "ORTFLEX_TEST_SCOPE": "mutation"}
    call = (sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation.lines", name)
    options = ("-p", "no:cacheprovider", "-m", "not slow and not gpu")
    try:
        ended = children.run((*call, *options), seconds=seconds, env=environment, cwd=copy)
        said = ((ended.stdout + ended.stderr).strip().splitlines() or [""])[-1]
    except AssertionError:
        said = f"more than {seconds} s"
    results = folder / "tests.jsonl"
    found = results.read_text("utf-8").splitlines() if results.exists() else []
    shutil.rmtree(folder)
    return found, said


def _files(copy: Path) -> list[str]:
    """The files of tests and, since examples are tests, the sources."""
    folders = [copy / "tests" / name for name in ("core", "plugins", "end_to_end", "fuzz")]
    written = [p.relative_to(copy).as_posix() for f in folders for p in sorted(f.glob("test_*.py"))]
    return [*tree.SOURCES, *written]


def _open() -> sqlite3.Connection:
    tree.PLACE.mkdir(parents=True, exist_ok=True)
    store = sqlite3.connect(MAP, timeout=60)
    store.executescript(
        """
        CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY);
        CREATE TABLE IF NOT EXISTS tests
            (id INTEGER PRIMARY KEY, file TEXT, name TEXT, seconds REAL, lines INTEGER);
        CREATE TABLE IF NOT EXISTS reached (source TEXT, test INTEGER, lines BLOB);
        CREATE INDEX IF NOT EXISTS by_source ON reached (source);
        """
    )
    return store


def _store(file: str, found: Iterable[str]) -> None:
    with _open() as store:
        old = "SELECT id FROM tests WHERE file = ?"
        store.execute(f"DELETE FROM reached WHERE test IN ({old})", (file,))
        store.execute("DELETE FROM tests WHERE file = ?", (file,))
        store.execute("INSERT OR REPLACE INTO files VALUES (?)", (file,))
        for line in found:
            entry = json.loads(line)
            count = sum(map(len, entry["reached"].values()))
            made = store.execute(
                "INSERT INTO tests (file, name, seconds, lines) VALUES (?, ?, ?, ?)",
                (file, entry["test"], entry["seconds"], count),
            )
            rows = [(s, made.lastrowid, _bits(n)) for s, n in entry["reached"].items()]
            store.executemany("INSERT INTO reached VALUES (?, ?, ?)", rows)


def _bits(numbers: Iterable[int]) -> bytes:
    total = 0
    for number in numbers:
        total |= 1 << number
    return total.to_bytes((total.bit_length() + 7) // 8, "little")


def reaching(source: str, numbers: Iterable[int] | None = None) -> list[Test]:
    """The tests that reach one of these lines of a source, or any of it; the most specific ones first.

    A test is specific if it reaches few lines of the whole.
    """
    mask = None if numbers is None else int.from_bytes(_bits(numbers), "little")
    query = """
        SELECT tests.name, tests.seconds, reached.lines FROM reached JOIN tests ON tests.id = reached.test
        WHERE reached.source = ? ORDER BY tests.lines, tests.id
    """
    with _open() as store:
        rows = store.execute(query, (source,)).fetchall()
    return [
        Test(name, seconds)
        for name, seconds, blob in rows
        if mask is None or int.from_bytes(blob, "little") & mask
    ]
