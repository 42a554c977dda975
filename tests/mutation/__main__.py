"""``python -m tests.mutation map``, then ``python -m tests.mutation --seed S --count N``.

The map says which tests reach which lines; it needs Python 3.12. Then mutants are drawn and judged, in
copies of the checkout under .nox/mutation. Results are kept there: the same call again continues, and
``--again survived`` judges those anew, after tests were written. `nox --session mutation` does both.
What the map's environment has not, say jax, is judged in the one that has it:
``--of ortflex_plugins/backends/xla --again unreached --tests tests/plugins/test_xla*.py``.
"""

from __future__ import annotations

import os

# A process with threads, those of a BLAS or of onnxruntime's telemetry, cannot be forked.
os.environ |= {"OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}

import argparse
import sys
import traceback
from collections.abc import Sequence

from tests.mutation import operators, reach, report, run, tree


def main(arguments: Sequence[str]) -> int:
    """Draw and judge mutants, or write the map; 1 if one survived."""
    if arguments[:1] == ["map"]:
        parser = argparse.ArgumentParser(prog="python -m tests.mutation map")
        parser.add_argument("files", nargs="*", help="files of tests; by default all that are new")
        parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
        options = parser.parse_args(arguments[1:])
        reach.collect(options.files, options.jobs)
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--package", default="", help="only sources below it: ortflex_core/compiler/graph"
    )
    parser.add_argument("--of", default="", help="of those drawn, only sources that begin so")
    parser.add_argument("--tests", nargs="*", default=[], help="these tests, not those of the map")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that judge"
    )
    parser.add_argument(
        "--timeout", type=float, default=180, help="seconds of the tests of a batch"
    )
    parser.add_argument("--again", nargs="*", default=[], help="judge these verdicts once more")
    parser.add_argument("--list", action="store_true", help="only show what is known")
    options = parser.parse_args(arguments)
    drawn = operators.draw(_texts(options.package), options.seed, options.count)
    drawn = [mutant for mutant in drawn if mutant.source.startswith(options.of)]
    results = tree.PLACE / "results.jsonl"
    known = report.Results(results).known
    argued = report.arguments()
    equal = {m.identity for m in drawn if report.argument_of(m, argued)}
    todo = [
        m
        for m in drawn
        if m.identity not in equal
        and (m.identity not in known or known[m.identity].verdict in options.again)
    ]
    if todo and not options.list:
        if not reach.MAP.exists() and not options.tests:
            parser.error("there is no map yet: python -m tests.mutation map")
        _judge_all(todo, options.jobs, options.timeout, options.tests)
        known = report.Results(results).known
    open_ends = (run.SURVIVED, run.UNDECIDED, run.UNREACHED)
    kept = [m for m in drawn if m.identity not in equal]
    print(report.listed(kept, known, open_ends))
    print(report.table(drawn, known, equal))
    return int(any(known[m.identity].verdict == run.SURVIVED for m in kept if m.identity in known))


def _texts(package: str) -> dict[str, str]:
    names = [n for n in tree.sources() if n.startswith(package)]
    return {name: (tree.ROOT / name).read_text("utf-8") for name in names}


def _judge_all(
    drawn: Sequence[operators.Mutant], jobs: int, room: float, tests: Sequence[str]
) -> None:
    """Judge mutants in so many processes, each with a copy of the checkout."""
    copies = [tree.copy(tree.PLACE / f"copy-{number}") for number in range(jobs)]
    run.preload()

    children = []
    for number, copy in enumerate(copies):
        child = os.fork()
        if child == 0:
            try:
                _judge(run.Server(copy), drawn[number::jobs], room, tests)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit("a process ended with an error, which is above")


def _judge(
    server: run.Server, drawn: Sequence[operators.Mutant], room: float, tests: Sequence[str]
) -> None:
    results = report.Results(tree.PLACE / "results.jsonl")
    for mutant in drawn:
        outcome = run.judge(server, mutant, room, tests)
        results.keep(mutant, outcome)
        print(f"{outcome.verdict} {outcome.seconds:.0f} s {mutant}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
