"""Which lines of our sources a test runs, by ``sys.monitoring``: a plugin of pytest.

A line is reported once per test and then switched off until the next, so a test takes hardly longer.
Processes that a test starts record theirs, too: ``sitecustomize`` (see ``reach``) imports this module,
and they leave a file in the folder that LINES names. A process that is killed leaves none.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

LINES = "ORTFLEX_MUTATION_LINES"
"""The variable that names the folder of results, for pytest's process."""
CHILDREN = "ORTFLEX_MUTATION_CHILDREN"
"""The same for the processes that tests start."""
ROOT = Path(__file__).parents[2]

_PREFIXES = tuple(str(ROOT / name) for name in ("ortflex.py", "ortflex_core/", "ortflex_plugins/"))
_TOOL = 1  # sys.monitoring.COVERAGE_ID
_reached: defaultdict[str, set[int]] = defaultdict(set)


def start() -> None:
    """Record from here on."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    # Names of this function live until the interpreter's last line.
    prefixes, found, disable = _PREFIXES, _reached, monitoring.DISABLE

    def record(code: Any, line: int) -> Any:
        if code.co_filename.startswith(prefixes):
            found[code.co_filename].add(line)
        return disable

    monitoring.use_tool_id(_TOOL, "ortflex mutation")
    monitoring.register_callback(_TOOL, monitoring.events.LINE, record)
    monitoring.set_events(_TOOL, monitoring.events.LINE)


def restart() -> None:
    """Forget what was reached."""
    _reached.clear()
    sys.monitoring.restart_events()  # type: ignore[attr-defined,unused-ignore]


def reached() -> dict[str, list[int]]:
    """The lines of each source, relative to the copy of the checkout."""
    found = dict(_reached)
    return {os.path.relpath(name, ROOT): sorted(lines) for name, lines in found.items()}


def leave(folder: Path) -> None:
    """Write what this process reached, under a name that other processes do not use."""
    path = folder / f"{os.getpid()}-{os.urandom(4).hex()}"
    path.write_text(json.dumps(reached()), "utf-8")
    path.rename(path.with_suffix(".json"))


def _leave_at_exit(folder: Path) -> None:
    """Processes that are forked end by ``os._exit``, without what ``atexit`` has."""
    end, here = os._exit, os.getpid()

    def leave_and_end(status: int) -> NoReturn:
        if os.getpid() != here:
            leave(folder)
        end(status)

    os._exit = leave_and_end


class Recorder:
    """Writes a line of JSON for each test that passes: its name, its seconds, and what it reached."""

    def __init__(self, results: Path, left: Path) -> None:
        self.results = results
        self.left = left
        self.seconds = 0.0
        self.passed = True

    def pytest_runtest_logstart(self) -> None:
        self.seconds, self.passed = 0.0, True
        restart()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        self.passed = self.passed and report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found = {source: set(lines) for source, lines in reached().items()}
        for source, lines in self._of_children():
            found.setdefault(source, set()).update(lines)
        if self.passed and found:
            table = {source: sorted(lines) for source, lines in sorted(found.items())}
            line = {"test": nodeid, "seconds": round(self.seconds, 4), "reached": table}
            with self.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _of_children(self) -> Iterator[tuple[str, list[int]]]:
        for path in self.left.glob("*.json"):
            yield from json.loads(path.read_text("utf-8")).items()
            path.unlink()


def pytest_configure(config: Any) -> None:
    """Record into the file that the variable names."""
    folder = Path(os.environ[LINES])
    os.environ[CHILDREN] = str(folder)
    _leave_at_exit(folder / "left")
    config.pluginmanager.register(Recorder(folder / "tests.jsonl", folder / "left"))
    start()


def record_process() -> None:
    """Record a process that a test started, until it ends."""
    folder = Path(os.environ[CHILDREN]) / "left"
    start()
    atexit.register(leave, folder)
    _leave_at_exit(folder)
