"""GPU tests where there is a GPU; and how each test ended, for the table of runtime x backend."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import platform
import random
import re
import signal
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest

from ortflex_core import Plugins, RuntimeUnavailable, require_runtime

_SLOW = 7200
"""Seconds that a slow test may take, unless it says otherwise."""
_TORCH_SEED = 67280421310721
"""The seed of torch when it is imported: the same for a test that imports it and for later ones."""
_RANK = ("passed", "skipped", "failed")


class Scope(NamedTuple):
    """What runs in an environment; CONTRIBUTING.md has the rule in words."""

    without: tuple[str, ...] = ()
    """Markers of tests that other environments run."""
    tables: int = 1
    """1 of so many cases of large tables, which ask the same question over and over."""
    cases: int = 1
    """1 of so many cases of other functions, after the first."""
    few: int = 0
    """Functions with at most so many cases keep all of them."""
    functions: int = 1
    """The first case of 1 of so many functions; of each that asks the backend of the environment."""
    whole: bool = False
    """Whether the backend's own files and kit run whole, and of other plugins nothing."""
    slow_once: bool = False
    """Whether slow tests run elsewhere if one environment, or one per Python, is enough for them."""


SCOPES = {
    "all": Scope(),
    # What `make test` runs of all: functions with many cases ask the same question over and over.
    "most": Scope(tables=5, cases=5, few=6),
    # The runtimes with a backend of their own. Other environments have fused on old runtimes.
    "session": Scope(("once", "per_python"), tables=16, cases=16, functions=6),
    "agent": Scope(("once", "per_python"), tables=16, cases=16, functions=8),
    # The runtime of stock with another Python, and an older runtime.
    "python": Scope(("once",), tables=32, cases=32, functions=16),
    "runtime": Scope(("once",), tables=32, cases=32, functions=8),
    "version": Scope(("once", "per_python"), tables=32, cases=32, functions=4),
    # The runtime of stock with one more backend.
    "backend": Scope(("once", "per_python"), tables=24, cases=24, functions=24, whole=True),
    # Of tests/mutation: which tests reach a line.
    "mutation": Scope(tables=8, cases=4),
    # What all but the first and the mutants are with `make test-all`.
    "every case": Scope(slow_once=True),
}
_SCOPE = os.environ.get("ORTFLEX_TEST_SCOPE", "all")
_OWN = os.environ.get("ORTFLEX_TEST_BACKEND", "fused")
"""The backend that this environment is for."""


def _runtime_name() -> str:
    try:
        return str(require_runtime())
    except RuntimeUnavailable:
        return "no runtime"


def pytest_report_header() -> str:
    return f"onnxruntime: {_runtime_name()}"


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore Ctrl-C; the tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers of pytest-xdist send their reports to the process that has no worker's input.
    path = os.environ.get("ORTFLEX_TEST_REPORT")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)), "ortflex-report")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not import files whose tests all run in other environments."""
    if collection_path.suffix != ".py" or not (markers := SCOPES[_SCOPE].without):
        return None
    whole = rf"^pytestmark = pytest\.mark\.({'|'.join(markers)})$"
    return bool(re.search(whole, collection_path.read_text("utf-8"), re.MULTILINE)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[Any], list[Any]]:
    """Look for no doctests here.

    A file would be read for them first, and if it cannot be imported, its tests would be a skip.
    """
    found = yield
    return [one for one in found if type(one) is pytest.Module]


@pytest.hookimpl(trylast=True)  # after -m and -k, so that a function keeps a case of those chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = _left_out(items, _SCOPE)
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW))
        # A property travels with the report, from whichever process ran the test.
        item.user_properties.append(("backend", backend_of(item)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reasons := _against_cuda()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup() -> None:
    # A test that draws without a seed draws the same numbers alone, in any order and in any process.
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(_TORCH_SEED)


@pytest.fixture
def torch() -> Any:
    """torch, where it is installed."""
    return pytest.importorskip("torch")


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end: collecting garbage need not look at them each time.
    gc.freeze()


def _left_out(items: list[pytest.Item], scope: str) -> list[pytest.Item]:
    """The tests that do not run in an environment of this scope (see ``SCOPES``)."""
    found = SCOPES[scope]
    if found.whole:
        items = [item for item in items if not _of_own_plugin(item)]
    left_out = [item for item in items if any(map(item.get_closest_marker, found.without))]
    if found.slow_once:
        left_out += [
            i for i in items if _has(i, "slow") and (_has(i, "once") or _has(i, "per_python"))
        ]
    gone = set(map(id, left_out))
    kept: set[str] = set()
    cases = Counter(map(_group, items))
    # By a number of its own, which does not change with the other tests.
    for item in sorted(items, key=lambda i: (_OWN not in i.name, zlib.crc32(i.nodeid.encode()))):
        if id(item) in gone:
            continue
        if found.whole and item.path.parent.name == "plugins":
            left_out.append(item)
            continue
        every = found.tables if _of_a_table(item) else found.cases
        group = _group(item)
        first = group not in kept and (
            zlib.crc32(f"{scope} {group}".encode()) % found.functions == 0 or _is_own(item)
        )
        drawn = zlib.crc32(item.nodeid.encode()) % every == 0
        if not (first or drawn or cases[group] <= found.few):
            left_out.append(item)
        kept.add(group)
    return left_out


def _of_own_plugin(item: pytest.Item) -> bool:
    """Whether a test is in a file of this backend, or in its conformance kit."""
    kit = "ackends" in item.nodeid and _OWN in item.name
    return item.path.name.startswith(f"test_{_OWN}") or kit


def _is_own(item: pytest.Item) -> bool:
    """Whether a test is for this environment: for its Python, or its backend by case or by file."""
    return _has(item, "per_python") or _OWN in item.name or _names_own(item.path)


@functools.cache
def _names_own(path: Path) -> bool:
    return _OWN != "fused" and _OWN in path.read_text("utf-8")


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _of_a_table(item: pytest.Item) -> bool:
    """Whether this is one of many cases of the same question, hardly one about the runtime."""
    if item.path.name == "test_conformance.py":  # checks of plugins; of backends the compositions
        return "ackends" not in item.nodeid or "test_composition" in item.nodeid
    return _has(item, "sampled") or item.path.name.startswith("test_gradient_rules")


def _group(item: pytest.Item) -> str:
    """A function, or one with an operator that has a gradient rule."""
    function, _, case = item.nodeid.partition("[")
    return f"{function}[{case.partition('-')[0]}" if _is_rule(item) else function


def _is_rule(item: pytest.Item) -> bool:
    return item.path.name == "test_gradient_rules.py"


def _against_cuda() -> list[str]:
    try:
        runtime = require_runtime()
    except RuntimeUnavailable as error:
        return [str(error)]
    return list(Plugins.discover()["devices"].load("cuda").available(runtime))


def backend_of(item: pytest.Item) -> str:
    """Return the backend a test uses: its marker's, its parameter's, or "core" for none."""
    if marker := item.get_closest_marker("backend"):
        return str(marker.args[0])
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    return backend if isinstance(backend, str) else "core"


class Recorder:
    """Counts the outcomes by backend and writes them as JSON when pytest ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backends: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}
        self.skips: Counter[str] = Counter()
        self.tables: dict[str, str] = {}
        self.stacks: IO[str] | None = None
        self.heard = float("-inf")

    def pytest_sessionstart(self) -> None:
        self.stacks = self.path.with_suffix(".stacks").open("w")
        self._hear()

    def _hear(self) -> None:
        """Where reports stop coming, this process says where it stands, and ends."""
        if self.stacks is not None and time.monotonic() - self.heard > 1:
            self.heard = time.monotonic()
            silence = float(os.environ.get("ORTFLEX_TEST_SILENCE", "900"))
            faulthandler.dump_traceback_later(silence, exit=True, file=self.stacks)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A module that cannot be imported, or skips itself, counts as one test.
        if report.outcome != "passed":
            self._record(report.nodeid, report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._record(report.nodeid, report)

    def _record(self, nodeid: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        self._hear()
        # A test that passes and then fails to tear down has failed.
        known = dict(getattr(report, "user_properties", ()))
        if "table" in known:
            self.tables[nodeid] = str(known["table"])
        self.backends.setdefault(nodeid, str(known.get("backend", "core")))
        before = self.outcomes.get(nodeid, "passed")
        self.outcomes[nodeid] = max(before, report.outcome, key=_RANK.index)
        if report.outcome == "skipped":
            self.skips[_reason(report)] += 1

    def pytest_sessionfinish(self) -> None:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for nodeid, outcome in self.outcomes.items():
            counts[self.backends.get(nodeid, "core")][outcome] += 1
        summary = {
            "runtime": _runtime_name(),
            "python": platform.python_version(),
            "backends": counts,
            "skips": self.skips,
            "tables": list(self.tables.values()),
        }
        self.path.write_text(json.dumps(summary, indent=2))


def _reason(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")
