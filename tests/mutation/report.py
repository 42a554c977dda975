"""Results that are kept, mutants that are equivalent by argument, and the table."""

from __future__ import annotations

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutation import run, tree
from tests.mutation.operators import Mutant
from tests.mutation.run import Outcome

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
_COLUMNS = ("killed", "timeout", "survived", "undecided", "unreached", "equivalent")


class Results:
    """What is known about mutants, by their identity and the tests of the map: a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Outcome] = {}
        for line in path.read_text("utf-8").splitlines() if path.exists() else []:
            entry = json.loads(line)
            self.known[entry.pop("identity")] = Outcome(
                entry["verdict"], entry["by"], entry["tests"], entry["seconds"]
            )

    def keep(self, mutant: Mutant, outcome: Outcome) -> None:
        """Add a result, in place of an earlier one."""
        self.known[mutant.identity] = outcome
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"identity": mutant.identity, "mutant": str(mutant), **outcome._asdict()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def arguments(path: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """Why mutants are equivalent, by source, line of text, and both sides of the edit.

    Raises:
        ValueError: an entry has no argument.
    """
    out = {}
    entries = tomllib.loads(path.read_text("utf-8")).get("mutant", []) if path.exists() else []
    for entry in entries:
        if len(entry["argument"].split()) < 4:
            raise ValueError(f"{path.name}: {entry['file']}: {entry['line']!r} has no argument")
        key = (entry["file"], entry["line"].strip(), entry["before"], entry["after"])
        out[key] = entry["argument"]
    return out


def argument_of(mutant: Mutant, known: Mapping[tuple[str, str, str, str], str]) -> str:
    """The argument of this mutant, or nothing."""
    return known.get((mutant.source, mutant.text, mutant.before, mutant.after), "")


def table(drawn: Sequence[Mutant], known: Mapping[str, Outcome], equal: Iterable[str]) -> str:
    """A line for each package, and the score: killed of those that are settled and not equivalent."""
    left_out = set(equal)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant in drawn:
        outcome = known.get(mutant.identity)
        killed = outcome is not None and outcome.verdict in (run.KILLED, run.TIMEOUT)
        verdict = outcome.verdict if outcome else "open"
        counts[tree.package_of(mutant.source)][
            "equivalent" if mutant.identity in left_out and not killed else verdict
        ] += 1
    total = sum(counts.values(), Counter())
    rows = [(name, counts[name]) for name in sorted(counts)] + [("all", total)]
    width = max(len(name) for name, _ in rows)
    head = f"{'package':{width}} " + " ".join(f"{c:>10}" for c in (*_COLUMNS, "open", "score"))
    lines = [head, "-" * len(head)]
    for name, count in rows:
        cells = [f"{count[c]:>10}" for c in (*_COLUMNS, "open")]
        lines.append(f"{name:{width}} {' '.join(cells)} {_score(count):>10}")
    return "\n".join(lines)


def _score(count: Counter[str]) -> str:
    killed = count["killed"] + count["timeout"]
    settled = killed + count["survived"]
    return f"{killed / settled:.1%}" if settled else "-"


def listed(drawn: Sequence[Mutant], known: Mapping[str, Outcome], verdicts: Sequence[str]) -> str:
    """The mutants with one of these verdicts, with the line of the source."""
    return "\n".join(
        f"{known[m.identity].verdict} {m.identity} {m}\n    {m.text}"
        for m in drawn
        if m.identity in known and known[m.identity].verdict in verdicts
    )
