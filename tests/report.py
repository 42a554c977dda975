"""Merge the reports of all environments into one table: runtime x backend x outcome.

Run by `make test`, as `python tests/report.py FOLDER`; exits with 1 if anything failed or nothing
ran. Only the standard library: it runs where nox does. Its last line is the total, alone.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OUTCOMES = ("passed", "skipped", "failed")


def table(rows: list[tuple[str, ...]]) -> str:
    """Align the columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if cell.isdecimal() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def rows_of(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each backend; the seconds of all of them are in the first."""
    rows = []
    seconds = str(report.get("seconds", ""))
    for backend, counts in sorted(report["backends"].items()):
        numbers = (str(counts.get(o, 0)) for o in OUTCOMES)
        rows.append((report["runtime"], report["python"], backend, *numbers, seconds))
        seconds = ""
    return rows


def main(folder: Path) -> int:
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for report in reports for row in rows_of(report)]
    for text in (t for report in reports for t in report.get("tables", ())):
        print(f"\n{text}")
    for path in sorted(folder.glob("*.stacks")):
        if text := path.read_text():
            print(f"\n{path.stem} said nothing for long and was ended:\n{text}")
    print()
    print(table([("runtime", "Python", "backend", *OUTCOMES, "seconds"), *rows]))

    skips: Counter[str] = Counter()
    for report in reports:
        skips.update(report["skips"])
    if skips:
        print("\nSkipped, and why:")
    for reason, count in skips.most_common():
        print(f"{count:6}  {reason}")

    totals = dict(zip(OUTCOMES, (sum(int(r[i]) for r in rows) for i in (3, 4, 5)), strict=True))
    print()
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    return int(totals["failed"] > 0 or totals["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
