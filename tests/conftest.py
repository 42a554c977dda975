"""GPU tests where there is a GPU; and how each test ended, for the table of runtime x backend."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import platform
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import IO, Any

import pytest

from ortflex_core.errors import RuntimeUnavailable
from ortflex_core.runtime.installation import require_runtime

_SLOW = 7200
"""Seconds that a slow test may take, unless it says otherwise."""
_RANK = ("passed", "skipped", "failed")


def _runtime_name() -> str:
    try:
        return str(require_runtime())
    except RuntimeUnavailable:
        return "no runtime"


def pytest_report_header() -> str:
    return f"onnxruntime: {_runtime_name()}"


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist send their reports to the process that has no worker's input.
    path = os.environ.get("ORTFLEX_TEST_REPORT")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)), "ortflex-report")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("ORTFLEX_TEST_SAMPLE", "1") != "1":
        _sample(config, items, int(os.environ["ORTFLEX_TEST_SAMPLE"]))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW))
        # A property travels with the report, from whichever process ran the test.
        item.user_properties.append(("backend", backend_of(item)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (reasons := _against_cuda()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end: collecting garbage need not look at them each time.
    gc.freeze()


def _sample(config: pytest.Config, items: list[pytest.Item], every: int) -> None:
    """Keep every n-th case of the large tables of gradients and of checks, always the same ones.

    Which operators a runtime computes rightly is the same question over and over; one environment
    asks all of it, the others a part, of which no operator is missing. What asks nothing of the
    runtime is asked in that one environment alone.
    """
    left_out = [item for item in items if item.get_closest_marker("once")]
    kept = {""}
    for item in sorted(filter(_one_of_many, items), key=_order):
        if _order(item) % every == 0 or (_group(item) not in kept):
            kept.add(_group(item))
        else:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]


def _one_of_many(item: pytest.Item) -> bool:
    """Whether this asks the same question as many others, and hardly about the runtime."""
    sampled = item.get_closest_marker("sampled") is not None
    asked = sampled or item.path.name.startswith("test_gradient_rules") or _of_a_kit(item)
    return asked and item.get_closest_marker("once") is None


def _order(item: pytest.Item) -> int:
    """A number of its own, which does not change with the other tests."""
    return zlib.crc32(item.nodeid.encode())


def _group(item: pytest.Item) -> str:
    """The operator, with which the names of the cases of its rule begin; else nothing."""
    rule = item.path.name == "test_gradient_rules.py"
    return item.nodeid.partition("-")[0].rstrip("]") if rule else ""


def _of_a_kit(item: pytest.Item) -> bool:
    """Whether this is one of many checks of a plugin, not about a backend but for compositions."""
    one_of_many = "ackends" not in item.nodeid or "test_composition" in item.nodeid
    return item.path.name == "test_conformance.py" and one_of_many


def _against_cuda() -> list[str]:
    from ortflex_core.registry import Plugins  # only where there are such tests

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
