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
    """Wait for a session of processes; whether it ended by itself.

    It has so many seconds of a processor, since others may use the machine, and five times as many by
    the clock, since one that waits for a lock uses none.
    """
    last = time.monotonic() + 5 * seconds
    while True:
        ended, _ = os.waitpid(child, os.WNOHANG)
        in_time = time.monotonic() < last and (ended or _used(child) < seconds)
        if ended or not in_time:
            # Processes that tests started and left behind end, too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            if not ended:
                os.waitpid(child, 0)
            return bool(ended)
        time.sleep(0.02)


def _used(process: int) -> float:
    """The seconds of a processor of a process and of its children that ended."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():  # another system: the clock decides
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class _Listener:
    """Keeps the cases that are wanted, in their order, and the first test that fails.

    The map may have cases that this environment has not: those of newer opsets, or of packages.
    """

    def __init__(self, tests: Sequence[str]) -> None:
        self.name = ""
        self._order = {test: number for number, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        functions = {name.partition("[")[0] for name in self._order if "[" in name}
        wanted = [
            item
            for item in items
            if item.nodeid in self._order or item.nodeid.partition("[")[0] not in functions
        ]
        left_out = set(map(id, items)) - set(map(id, wanted))
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = sorted(wanted, key=lambda item: self._order.get(item.nodeid, -1))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (collection)"


def _become_pytest(copy: Path, tests: list[str], report: Path) -> None:
    """Run pytest in this process, which ends."""
    code, heard, said = _FAILED, _Listener(tests), io.StringIO()
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
        functions = dict.fromkeys(test.partition("[")[0] for test in tests)
        code = int(pytest.main([*functions, *options], plugins=[heard]))
    except BaseException:
        said.write(traceback.format_exc())
    finally:
        report.write_text(json.dumps([code, heard.name, said.getvalue()[-4000:]]), "utf-8")
        os._exit(0)


def preload() -> None:
    """Import what tests import, but nothing of ours."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.startswith("ortflex") for name in sys.modules)


def judge(server: Server, mutant: Mutant, room: float, tests: Sequence[str] = ()) -> Outcome:
    """Run the tests that reach a mutant until one fails: a few specific ones, the others, all cases.

    All cases are those of the functions that reach its source: the map has some cases of each function,
    and another case may be the one that reaches the mutant.

    ``room`` is the seconds that the tests of one of these batches may take without a mutant. The
    fastest run first, so what most tests see costs little, and a slow test runs for survivors only.
    With ``tests``, these run instead, for instance those of an environment that has no map.
    """
    began = time.monotonic()
    if tests:
        with server.planted(mutant):
            verdict, by = server.run(tests, 60 + _PATIENCE * room)
        _check_that_they_run(server, verdict, by, tests, room)
        return Outcome(verdict, by, len(tests), time.monotonic() - began)
    reaching = reach.reaching(mutant.source, None if mutant.at_import else mutant.lines)
    # A function that runs only when a module is imported, or in another environment.
    unreached = not reaching
    if unreached:
        reaching = [t for t in reach.reaching(mutant.source) if t.seconds < 1][:_FIRST]
    tried: set[str] = set()
    wanted = {test.name for test in reaching} | {t.function for t in reaching if "[" in t.name}
    every = reach.reaching(mutant.source)
    for batch, names in _batches(reaching, every, mutant, room):
        limit = 60 + _PATIENCE * sum(test.seconds for test in batch)
        with server.planted(mutant):
            verdict, by = server.run(names, limit)
        tried |= {*names}
        _check_that_they_run(server, verdict, by, names, limit)
        if verdict != SURVIVED:
            return Outcome(verdict, by, len(tried), time.monotonic() - began)
    verdict = SURVIVED if tried >= wanted else UNDECIDED
    return Outcome(UNREACHED if unreached else verdict, "", len(tried), time.monotonic() - began)


def _check_that_they_run(
    server: Server, verdict: str, by: str, names: Sequence[str], seconds: float
) -> None:
    """Refuse a kill by no test: a name without a test fails without a mutant, too.

    Raises:
        RuntimeError: they fail without a mutant.
    """
    if verdict == KILLED and not by and server.run(names, seconds)[0] != SURVIVED:
        raise RuntimeError(f"these tests fail without a mutant: {names}\n{server.said}")


def _batches(
    reaching: Sequence[Test], every: Sequence[Test], mutant: Mutant, room: float
) -> Iterator[tuple[list[Test], list[str]]]:
    """Tests of the map, and the names under which they run; ``every`` test reaches the source."""
    ordered = sorted(reaching, key=lambda test: not _named_after(test, mutant))
    fast = sorted(reaching, key=lambda test: test.seconds)
    specific = [test for test in ordered if test.seconds < 2][:_FIRST]
    first = list(dict.fromkeys((*specific, *fast[: _FIRST // 2])))
    others = list(_within([test for test in fast if test not in first], room))
    further = sorted(set(every).difference(reaching), key=lambda test: test.seconds)
    cases = list(_within([t for t in (*ordered, *further) if "[" in t.name], room))
    names = dict.fromkeys(test.function for test in cases)
    for batch, called in (
        (first, [t.name for t in first]),
        (others, [t.name for t in others]),
        (cases, list(names)),
    ):
        if batch:
            yield batch, called


def _within(tests: Iterable[Test], seconds: float) -> Iterator[Test]:
    for test in tests:
        if test.seconds <= seconds:
            seconds -= test.seconds
            yield test


def _named_after(test: Test, mutant: Mutant) -> bool:
    """Whether the file of a test has a word of the name of the source: test_cost.py, programs/cost.py."""
    words = {w for w in Path(mutant.source).stem.strip("_").split("_") if len(w) > 2}
    return bool(words & set(Path(test.file).stem.split("_")))
