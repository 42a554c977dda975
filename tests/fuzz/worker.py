"""Feeds mutants to ortflex, one after another, and says of each how it ended.

By hand: ``python -m tests.fuzz.worker model 1234 1 folder`` runs mutant 1234 of the models, and
leaves its files in the folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests import children

SECONDS = 10
"""Of the processor, for one mutant; 1 for those of the harness's own tests."""
ADDRESSES = 3 * 2**30
"""Beside what the libraries take: more is refused by the system, and an allocation fails."""


def main() -> None:
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keep = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    # The libraries write to the standard output; the parent reads ours from another one.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    from tests.fuzz import mutants, targets

    mutants.write(kind, first, Path(tempfile.mkdtemp()))  # what seeds need is made now
    with contextlib.suppress(Exception):
        targets.RUN[kind](Path("nowhere"), 0)
    _limit_addresses()
    for number in range(first, first + count):
        print(json.dumps({"begin": number}), file=out)
        folder = keep or Path(tempfile.mkdtemp())
        folder.mkdir(exist_ok=True)
        source, began = "", time.monotonic()
        _limit_seconds(1 if kind == "planted" else SECONDS)
        try:
            source = mutants.write(kind, number, folder)
            outcome = _outcome(lambda: targets.RUN[kind](folder, number))  # noqa: B023
        finally:
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
        said = {
            "end": number,
            "of": source,
            **outcome,
            "seconds": round(time.monotonic() - began, 3),
            "mib": round(children.peak()),
        }
        print(json.dumps(said), file=out)


def _outcome(run: object) -> dict[str, str]:
    from ortflex_core import OrtflexError

    try:
        run()  # type: ignore[operator]
    except OrtflexError as error:
        return {"outcome": "refused", "what": type(error).__name__, "text": str(error)[:300]}
    except BaseException as error:
        lines = traceback.format_exc().splitlines()
        return {"outcome": "wrong", "what": type(error).__name__, "text": "\n".join(lines[-30:])}
    return {"outcome": "fine", "what": "", "text": ""}


def _limit_seconds(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _limit_addresses() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
