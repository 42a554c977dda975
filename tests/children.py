"""Processes of tests, every one with a limit: none is waited for without an end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 150.0
"""Far more than any needs, and less than the limit of a test (``timeout`` in pyproject.toml)."""


def run(
    call: Sequence[str],
    *,
    seconds: float = SECONDS,
    check: bool = False,
    env: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with what is written captured as text, in a session of its own.

    Args:
        call: the program and its arguments.
        seconds: the limit. Then the process and those it started are ended; Python's write their
            stacks first, which are part of the error.
        check: fail if it does not exit with 0.
        env: instead of this process's.
        **options: of ``subprocess.Popen``.

    Raises:
        AssertionError: it took too long, or failed although ``check`` was asked for.
    """
    environment = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    given: dict[str, Any] = {**pipes, **options, "text": True, "start_new_session": True}
    with subprocess.Popen(list(call), env=environment, **given) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            said = _end(process)
            raise AssertionError(f"{list(call)} took more than {seconds} s:\n{said}") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left running
    assert not check or process.returncode == 0, f"{process.returncode}: {out}\n{err}"
    return subprocess.CompletedProcess(list(call), process.returncode, out, err)


def peak() -> float:
    """The most memory that this process had, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had, too
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


def ranks(group: str, size: int) -> list[str]:
    """What starts so many processes of Python."""
    if group == "torch":
        return [sys.executable, "-m", "ortflex_core.testing.launch", str(size)]
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return [shutil.which("mpiexec", path=here) or "mpiexec", "-n", str(size), sys.executable]


def rank() -> int:
    """The number of this process among those."""
    return int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))


def with_tests(**variables: str) -> dict[str, str]:
    """The environment of a process that imports these tests from any folder."""
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **variables}


def measured(module: str, *arguments: str) -> dict[str, float]:
    """What ``python -m MODULE --one …`` prints last, as JSON."""
    call = [sys.executable, "-m", module, "--one", *arguments]
    done = run(call, seconds=3600, check=True, env=with_tests())
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _end(process: subprocess.Popen[str]) -> str:
    """End a session, with the stacks of its processes; what they wrote."""
    for number, patience in ((signal.SIGABRT, 10), (signal.SIGKILL, 10)):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return "\n".join(text[-4000:] for text in process.communicate(timeout=patience) if text)
    return "(nothing)"


def wait(child: int, seconds: float, what: str) -> int:
    """The exit code of a fork, or minus the signal that ended it.

    Raises:
        AssertionError: it takes longer than ``seconds``. It is ended; where its faulthandler is
            enabled, its stacks are in its standard error.
    """
    assert child > 0
    last, pause = time.monotonic() + seconds, 0.001
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > last:
            os.kill(child, signal.SIGABRT)
            time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"{what}: its process takes more than {seconds} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
