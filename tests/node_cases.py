"""The standard's own node cases as a suite of gradients: ``python -m tests.node_cases``.

Every case of ``onnx.backend.test`` (the operators and their expanded function bodies): its gradient
model, run by the installed onnxruntime with random cotangents on all real outputs, against float64
central differences through onnx's reference evaluator (:mod:`tests.node_oracle`), for all real inputs.
``--write`` writes the figures that docs/reference/operators.md shows.
Cases run in processes of their own, so that one which kills its process is counted and the rest continues.

The outcomes:

- right, wrong: all checked elements agree, or one does not;
- runtime differs: onnxruntime computes another *forward* value than the reference from the plain model;
- refused: the model, its gradient or its gradient model is refused, with the message;
- crashed: an exception that is not ortflex's own, a process that died or hung;
- random: two runs of the case differ by nature;
- not differentiable: no way from a real input to a real output, and all differences are 0;
- left out: no element of any input is smooth, or the reference does not run the case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import multiprocessing.connection
import pkgutil
import re
import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import onnx

from ortflex_core import require_runtime
from ortflex_plugins.cli import reference
from tests.report import table as aligned

OUTCOMES = (
    "right",
    "wrong",
    "runtime differs",
    "refused",
    "crashed",
    "random",
    "not differentiable",
    "left out",
)
ELEMENTS = 12
"""Elements of each input whose derivative is checked."""
LARGE = 20_000
"""Above so many real elements of all inputs 2 of each are checked: the reference is slow."""
PATIENCE = 300.0
"""Seconds after which a case counts as hanging."""
_PACKAGE = "onnx.backend.test.case.node"


@attrs.frozen
class Result:
    """How one case ended."""

    name: str
    operator: str
    outcome: str
    message: str = ""
    checked: int = 0


def modules() -> list[str]:
    """The modules that hold the cases, one an operator; importing one makes its cases."""
    package = importlib.import_module(_PACKAGE)
    return [
        m.name
        for m in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}.")
        if not m.ispkg and not m.name.rsplit(".", 1)[1].startswith("_")
    ]


def cases_of(module: str) -> list[tuple[str, Any]]:
    """(operator, case) of a module that has not been imported in this process yet."""
    package = importlib.import_module(_PACKAGE)
    before = len(package._NodeTestCases)
    importlib.import_module(module)
    out: list[tuple[str, Any]] = []
    for case in package._NodeTestCases[before:]:
        if "_expanded" not in case.name:
            operator = case.model.graph.node[0].op_type
        out.append((operator, case))  # the expanded form follows its case
    return out


def sample(names: Iterable[str], seed: int, every: int) -> list[str]:
    """Each name with a chance of 1 in ``every``, by its own hash: others do not move it."""
    return [n for n in names if (zlib.crc32(n.encode()) + seed) % every == 0]


def run_all(seed: int = 0, only: str = "", every: int = 1, workers: int = 2) -> Iterator[Result]:
    """Results as they come in.

    Args:
        seed: of the cotangents, the choice of elements and the sample.
        only: a regular expression that the operator or the name of the case has to match.
        every: one module (one operator) of so many.
        workers: processes at a time.
    """
    pending = sample(modules(), seed, every)[::-1]
    context = multiprocessing.get_context("spawn")
    running: dict[Any, _Worker] = {}
    try:
        while pending or running:
            while pending and len(running) < workers:
                worker = _Worker(context, pending.pop(), (), seed, only)
                running[worker.pipe] = worker
            waiting = multiprocessing.connection.wait(list(running), PATIENCE)
            for pipe in waiting or list(running):
                worker = running.pop(pipe)
                try:
                    message = pipe.recv() if waiting else None
                except EOFError:
                    message = None
                if isinstance(message, Result):
                    yield worker.end(message)
                    running[pipe] = worker
                elif isinstance(message, tuple):
                    worker.current = message
                    running[pipe] = worker
                elif message == "done" and pending:
                    worker.take(pending.pop())
                    running[pipe] = worker
                else:
                    code = worker.stop()
                    if message != "done":
                        yield worker.crash(code, "hangs" if not waiting else "dies")
                        again = _Worker(context, worker.module, worker.ended, seed, only)
                        running[again.pipe] = again
    finally:
        for worker in running.values():
            worker.stop()


class _Worker:
    """A process that runs the cases of one module after another."""

    def __init__(
        self, context: Any, module: str, skip: Sequence[str], seed: int, only: str
    ) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, seed, only), daemon=True)
        self.process.start()
        other.close()
        self.take(module, skip)

    def take(self, module: str, skip: Sequence[str] = ()) -> None:
        self.module = module
        self.ended = list(skip)
        self.current = ("", module)
        self.pipe.send((module, list(skip)))

    def end(self, result: Result) -> Result:
        self.ended.append(result.name)
        self.current = ("", self.module)
        return result

    def crash(self, code: int | None, how: str) -> Result:
        operator, name = self.current
        if not operator:
            raise RuntimeError(
                f"the process of {name} {how} outside of any case (exit code {code})"
            )
        return self.end(Result(name, operator, "crashed", f"its process {how}, exit code {code}"))

    def stop(self) -> int | None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


def _serve(pipe: Any, seed: int, only: str) -> None:
    warnings.simplefilter("ignore")
    from tests.node_gradients import examine

    while True:
        try:
            module, skip = pipe.recv()
        except EOFError:
            return
        for operator, case in cases_of(module):
            chosen = re.search(only, operator) or re.search(only, case.name)
            if chosen and case.name not in skip:
                pipe.send((operator, case.name))
                pipe.send(examine(operator, case, seed))
        pipe.send("done")


def by_operator(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """Counts of outcomes, by operator."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[result.operator][result.outcome] += 1
    return dict(sorted(counts.items()))


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The counts as lines of text, their sums first."""
    total: Counter[str] = Counter()
    for found in counts.values():
        total.update(found)
    rows = [("operator", *OUTCOMES)]
    rows += [
        (name, *(str(found.get(o) or "") for o in OUTCOMES))
        for name, found in (("all", total), *counts.items())
    ]
    return aligned(rows)


# The figures that docs/reference/operators.md shows; a slow test says whether they are up to date. --

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_CORNERS = (
    "to align corners, onnxruntime uses the output size after rounding, whereas the standard uses the "
    "product of the input size and the scale"
)
RUNTIME_DIFFERS = {
    "test_maxunpool_export_with_output_shape": (
        "onnxruntime interprets the indices as positions in a tensor of the shape output_shape; the "
        "standard interprets them as positions in a tensor of the size that kernel and strides determine"
    ),
    "test_resize_downsample_scales_cubic_align_corners": _CORNERS,
    "test_resize_downsample_scales_linear_align_corners": _CORNERS,
}
"""Why onnxruntime's forward values of a case are known to differ from the standard's."""


def figures(results: Iterable[Result]) -> dict[str, Any]:
    """Versions, counts by operator, and why cases are refused or the runtime differs."""
    results = list(results)
    told = [r for r in results if r.outcome in ("refused", "runtime differs")]
    reasons = Counter(
        (r.operator, r.outcome, _short(RUNTIME_DIFFERS.get(r.name, r.message))) for r in told
    )
    return {
        "onnx": onnx.__version__,
        "onnxruntime": require_runtime().version,
        "operators": {
            name: {o: found[o] for o in OUTCOMES if found[o]}
            for name, found in by_operator(results).items()
        },
        "reasons": [[*key, count] for key, count in sorted(reasons.items())],
    }


def _short(message: str) -> str:
    """What a message says, without the place in the graph, the code of onnxruntime and the advice."""
    if found := re.search(r"Could not find an implementation for (\w+)\(", message):
        return f"onnxruntime has no kernel for {found[1]} with these data types"
    if "ValidateOpsetForDomain" in message:
        return "onnxruntime does not read this opset, and the types exist in it only"
    if found := re.search(
        r"no gradient rule for the operator (.*?)( of ai\.onnx|, node |\. )", message
    ):
        return f"no gradient rule for {found[1].strip()}"
    text = re.sub(r"^(by the runtime \([^)]*\)[^:]*: )?\w+: ", "", message)
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return re.sub(r"test_\w+", "…", text.split(". ")[0])[:200]


def text_of(made: dict[str, Any]) -> str:
    """JSON with one line for each operator and each reason."""
    operators = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in made["operators"].items()
    )
    reasons = ",\n".join(map(json.dumps, made["reasons"]))
    versions = "".join(
        f"{json.dumps(k)}: {json.dumps(made[k])},\n" for k in ("onnx", "onnxruntime")
    )
    return f'{{\n{versions}"operators": {{\n{operators}\n}},\n"reasons": [\n{reasons}\n]\n}}\n'


def written() -> dict[str, Any]:
    """The figures as they are checked in."""
    found: dict[str, Any] = json.loads((FOLDER / reference.FIGURES).read_text(encoding="utf-8"))
    return found


def write(results: Iterable[Result]) -> None:
    """Write the figures, and the pages that show them."""
    target = FOLDER / reference.FIGURES
    fresh = target.with_suffix(".new")
    fresh.write_text(text_of(figures(results)), encoding="utf-8")
    fresh.replace(target)
    reference.main(str(FOLDER))


def stale(results: Iterable[Result]) -> list[str]:
    """In which lines the figures that are checked in differ from those of ``results``."""
    new, old = text_of(figures(results)).splitlines(), text_of(written()).splitlines()
    return [f"+ {line}" for line in new if line not in old] + [
        f"- {line}" for line in old if line not in new
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases and print their outcomes by operator; 1 if one is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression for operators or names")
    parser.add_argument("--every", type=int, default=1, help="one operator of so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument(
        "--write", action="store_true", help="write the figures in docs/reference and their pages"
    )
    given = parser.parse_args(arguments)
    if given.write and (given.only or given.every != 1):
        parser.error("--write takes all cases: leave --only and --every out")
    results = sorted(
        run_all(given.seed, given.only, given.every, given.workers), key=lambda r: r.name
    )
    print(table(by_operator(results)))
    for outcome in OUTCOMES:
        if outcome not in ("right", "not differentiable"):
            for result in results:
                if result.outcome == outcome:
                    print(f"{outcome}: {result.name}: {result.message}")
    if given.json:
        given.json.write_text(json.dumps([attrs.asdict(r) for r in results], indent=1))
    if given.write:
        write(results)
    return int(any(r.outcome in ("wrong", "crashed") for r in results))


if __name__ == "__main__":
    # Results travel between processes: under the name that both sides import them by.
    from tests.node_cases import main as run_main

    sys.exit(run_main())
