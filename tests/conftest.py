"""GPU tests where there is a GPU; and how each test ended, for the table of runtime x backend."""

from __future__ import annotations

import gc
import json
import os
import platform
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from ortflex_core.errors import RuntimeUnavailable
from ortflex_core.runtime import require_runtime

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
    asks all of it, the others a part (all of them in ``make test-all``).
    """
    left_out = [
        item
        for item in items
        if (item.path.name.startswith("test_gradient_rules") or _of_a_kit(item))
        and zlib.crc32(item.nodeid.encode()) % every
    ]
    config.hook.pytest_deselected(items=left_out)
    gone = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in gone]


def _of_a_kit(item: pytest.Item) -> bool:
    """Whether this is a check of a plugin that no backend takes part in."""
    return item.path.name == "test_conformance.py" and "ackends" not in item.nodeid


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

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A module that cannot be imported, or skips itself, counts as one test.
        if report.outcome != "passed":
            self._record(report.nodeid, report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._record(report.nodeid, report)

    def _record(self, nodeid: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        # A test that passes and then fails to tear down has failed.
        known = dict(getattr(report, "user_properties", ()))
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
        }
        self.path.write_text(json.dumps(summary, indent=2))


def _reason(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")
