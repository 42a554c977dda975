"""Run the tests of a mutant: a server, which has imported what is slow to import, forks for each."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation import reach, tree
from tests.mutation.operators import Mutant
from tests.mutation.reach import Test

_PRELOADED = ("numpy", "onnx", "onnx.reference", "onnxruntime", "pytest", "attrs")
_PRELOADED += ("cattrs", "click", "rich.console", "scipy.special", "sklearn.base", "torch")
_FIRST = 16
"""Tests of the first try: the most specific ones, then the fastest."""
_PATIENCE = 10.0
"""A mutant may take so many times the seconds of its tests, and a minute: else it hangs."""
_PASSED, _FAILED, _NO_TESTS = 0, 1, 5

KILLED, TIMEOUT, SURVIVED, UNREACHED = "killed", "timeout", "survived", "unreached"
UNDECIDED = "undecided"
"""It survived as many tests as the limit of seconds allows, not all that reach it."""


class Outcome(NamedTuple):
    """How the tests of a mutant ended."""

    verdict: str
    by: str
    """The test that failed."""
    tests: int
    seconds: float


class Server:
    """Runs tests in a copy of the checkout, one mutant at a time, each in a fork of this process."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        self._stamp = time.time()
        self.said = ""
        """What pytest wrote."""

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the mutant within this block."""
        path = self.copy / mutant.source
        text = path.read_text("utf-8")
        try:
            self._write(path, mutant.apply(text))
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, "utf-8")
        # Bytecode is found by the second and the size, which two mutants may share.
        self._stamp += 2
        os.utime(path, (self._stamp, self._stamp))

    def run(self, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """The verdict of these tests together, and the test that failed."""
        report = self.copy.with_name(f"{self.copy.name}.json")
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _become_pytest(self.copy, list(tests), report)
        if not _wait(child, seconds):
            return TIMEOUT, f"more than {seconds:.0f} s"
        if not report.exists():
            return KILLED, "the process ended"
        code, failed, said = json.loads(report.read_text("utf-8"))
        self.said = said
        return (SURVIVED, "") if code in (_PASSED, _NO_TESTS) else (KILLED, failed)


def _wait(child: int, seconds: float) -> bool:
    """Wait for a session of processes; whether it ended by itself."""
    last = time.monotonic() + seconds
    while True:
        ended, _ = os.waitpid(child, os.WNOHANG)
        in_time = time.monotonic() < last
        if ended or not in_time:
            # Processes that tests started and left behind end, too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            if not ended:
                os.waitpid(child, 0)
            return bool(ended)
        time.sleep(0.02)


class _Failed:
    """The first test that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (collection)"


def _become_pytest(copy: Path, tests: list[str], report: Path) -> None:
    """Run pytest in this process, which ends."""
    code, failed, said = _FAILED, _Failed(), io.StringIO()
    try:
        os.setsid()
        os.chdir(copy)
        os.environ.update(tree.environment(copy))
        os.environ["ORTFLEX_TEST_SCOPE"] = "all"
        sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(tree.ROOT)))]
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
        for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
            del sys.modules[name]
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        sys.stdout = sys.stderr = said
        pytest = importlib.import_module("pytest")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        code = int(pytest.main([*tests, *options], plugins=[failed]))
    except BaseException:
        said.write(traceback.format_exc())
    finally:
        report.write_text(json.dumps([code, failed.name, said.getvalue()[-4000:]]), "utf-8")
        os._exit(0)


def preload() -> None:
    """Import what tests import, but nothing of ours."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.startswith("ortflex") for name in sys.modules)


def judge(server: Server, mutant: Mutant, room: float) -> Outcome:
    """Run the tests that reach a mutant: first a few that are specific and fast, then the room.

    The room is every function of tests that reaches the line, with all cases, the most specific ones
    first, as far as ``room`` seconds of the tests of the map allow.
    """
    began = time.monotonic()
    reaching = reach.reaching(mutant.source, None if mutant.at_import else mutant.lines)
    # A function that runs only when a module is imported, or in another environment.
    unreached = not reaching
    if unreached:
        reaching = [t for t in reach.reaching(mutant.source) if t.seconds < 1][:_FIRST]
    count = 0
    for number, batch in enumerate(_batches(reaching, mutant, room)):
        # The map has some cases of each function; the room has all of them.
        names = [t.function if number else t.name for t in batch]
        limit = 60 + _PATIENCE * sum(test.seconds for test in batch)
        with server.planted(mutant):
            verdict, by = server.run(list(dict.fromkeys(names)), limit)
        count = max(count, len(batch))
        if verdict == KILLED and not by and server.run(names, limit)[0] != SURVIVED:
            raise RuntimeError(f"these tests fail without a mutant: {names}\n{server.said}")
        if verdict != SURVIVED:
            return Outcome(verdict, by, count, time.monotonic() - began)
    verdict = SURVIVED if count >= len(reaching) else UNDECIDED
    return Outcome(UNREACHED if unreached else verdict, "", count, time.monotonic() - began)


def _batches(reaching: Sequence[Test], mutant: Mutant, room: float) -> Iterator[list[Test]]:
    """The first try, and the room."""
    ordered = sorted(reaching, key=lambda test: not _named_after(test, mutant))
    specific = [test for test in ordered if test.seconds < 2][:_FIRST]
    fast = sorted(reaching, key=lambda test: test.seconds)[: _FIRST // 2]
    first = list(dict.fromkeys((*specific, *fast)))
    if first:
        yield first
    if everything := list(_within(ordered, room)):
        yield everything


def _within(tests: Iterable[Test], seconds: float) -> Iterator[Test]:
    for test in tests:
        if test.seconds <= seconds:
            seconds -= test.seconds
            yield test


def _named_after(test: Test, mutant: Mutant) -> bool:
    """Whether the file of a test has a word of the name of the source: test_cost.py, programs/cost.py."""
    words = {w for w in Path(mutant.source).stem.strip("_").split("_") if len(w) > 2}
    return bool(words & set(Path(test.file).stem.split("_")))
