"""The files of drawn recipes with every compiler: equal bits, and no finding of the sanitizers.

``python -m tests.end_to_end.c_campaign --seed 1 --count 50`` takes the steps of drawn recipes
(:mod:`.recipe_campaign` compares their trainings with float64: ``--backend c``), writes each file of C
with a program that runs it on random data, and builds it with gcc and clang, with -O2 and -O3, for vectors
of several widths, and with the sanitizers for addresses and undefined behavior. It prints what
differs or is found, and counts at the end.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core import OrtflexError, Problem, Trainer
from ortflex_plugins.backends.c import steps
from ortflex_plugins.backends.c.steps import first_state, layout_of
from ortflex_plugins.c.compiler import FLAGS
from ortflex_plugins.c.generator import Generated, Layout
from ortflex_plugins.c.products import Machine
from tests import children
from tests.end_to_end.recipe_cases import arguments_of, draw, model_of
from tests.training import plugins

STEPS = 6
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
BUILDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gcc", ("-O2",)),
    ("gcc", ("-O3",)),
    ("clang", ("-O2",)),
    ("clang", ("-O3",)),
    ("gcc", ("-O0", *SANITIZERS)),
    ("clang", ("-O0", *SANITIZERS)),
)
"""Compilers and flags; the first one gives the bits that are expected."""
MACHINES = (Machine(), Machine(lanes=8), Machine(lanes=16, registers=32))
"""Widths of vectors. Fused multiply-add is left out: it gives other bits by its definition."""
_FILES = tuple(f for f in FLAGS if f not in ("-shared", "-fPIC", "-fvisibility=hidden", "-O3"))
_MAIN = """
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **names) {{
    FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
    struct ortflex_state *s = malloc(sizeof *s);
    struct ortflex_arena *a = malloc(sizeof *a);
    const size_t sizes[] = {{ {sizes} 1 }};
    void *data[{columns} + 1];
    int64_t *rows = malloc({rows} * sizeof *rows);
    double *hosts = malloc(({hosts} + 1) * sizeof *hosts), *costs = malloc(({costs} + 1) * sizeof *costs);
    if (count != 3 || !in || !out || fread(s, 1, sizeof *s, in) != sizeof *s) return 2;
    for (int k = 0; k < {columns}; k++) {{
        data[k] = malloc(sizes[k]);
        if (fread(data[k], 1, sizes[k], in) != sizes[k]) return 2;
    }}
    if (fread(rows, sizeof *rows, {rows}, in) != {rows}) return 2;
    if (fread(hosts, sizeof *hosts, {hosts}, in) != {hosts}) return 2;
    int wrong = ortflex_step(s, a, (const void *const *)data, rows, {steps}, hosts, costs);
    fwrite(s, 1, sizeof *s, out);
    fwrite(costs, sizeof *costs, {costs}, out);
    fclose(out);
    fclose(in);
    for (int k = 0; k < {columns}; k++) free(data[k]);
    free(s); free(a); free(rows); free(hosts); free(costs);
    return wrong ? 3 : 0;
}}
"""


@attrs.frozen
class Case:
    """A file of C, and the input of its program."""

    label: str
    source: str
    data: bytes


def cases(seed: int, number: int, machine: Machine) -> Iterator[Case]:
    """The files of the steps of a recipe.

    Raises:
        OrtflexError: the backend refuses the recipe.
    """
    recipe = draw(seed, number)
    trainer = Trainer(
        model_of(recipe), backend="c", progress=False, plugins=plugins(), **arguments_of(recipe)
    )
    inputs = recipe.data if len(recipe.data) > 1 else next(iter(recipe.data.values()))
    trainer.epochs = 1
    trainer.fit(inputs, recipe.label, recipe.weight)
    engine: Any = trainer.engine
    problem: Problem = engine.problem
    kinds = ["step"] if problem.updating.accumulate == 1 else ["gradient", "update"]
    for kind in kinds:
        rows = None if kind == "update" else problem.batch_size
        part = steps.build_part(problem, kind, rows, machine)
        generated: Generated = part.generated
        count = len(part.program.hosts)
        yield Case(
            f"{recipe.describe()} {kind}",
            generated.source + main_of(problem, generated, count),
            data_of(problem, layout_of(problem), generated, count),
        )


def main_of(problem: Problem, generated: Generated, hosts: int) -> str:
    """A program that reads everything from a file and writes state and costs to another."""
    arrays = arrays_of(problem, generated)
    return _MAIN.format(
        sizes="".join(f"{a.nbytes}, " for a in arrays),
        columns=len(arrays),
        rows=max(1, STEPS * problem.batch_size),
        hosts=STEPS * hosts,
        costs=STEPS * generated.costs,
        steps=STEPS,
    )


def arrays_of(problem: Problem, generated: Generated) -> list[Any]:
    """Columns with as many rows as a batch, and frozen tensors."""
    rng = np.random.default_rng(0)
    out = []
    for shape, dtype in generated.data:
        if np.dtype(dtype).kind == "f":
            out.append(np.ascontiguousarray(rng.standard_normal(shape), dtype))
        else:
            out.append(np.ascontiguousarray(rng.integers(0, 2, shape), dtype))
    return out


def data_of(problem: Problem, layout: Layout, generated: Generated, hosts: int) -> bytes:
    """The input: state, data, rows and host scalars."""
    rng = np.random.default_rng(1)
    block = np.zeros(layout.size, np.uint8)
    start = first_state(problem)
    for memory, place in zip(layout.memory, layout.places, strict=True):
        if memory.key not in start:  # a sum of gradients: zero
            continue
        raw = np.frombuffer(np.ascontiguousarray(start[memory.key]).tobytes(), np.uint8)
        block[place.start : place.start + len(raw)] = raw
    rows = rng.integers(0, max(1, problem.batch_size), max(1, STEPS * problem.batch_size))
    numbers = rng.uniform(0.001, 0.1, STEPS * hosts)
    parts = [a.tobytes() for a in arrays_of(problem, generated)]
    return block.tobytes() + b"".join(parts) + rows.astype(np.int64).tobytes() + numbers.tobytes()


def run(case: Case, compiler: str, flags: tuple[str, ...], folder: Path) -> bytes | str:
    """State and costs after some steps, or what the compiler or a sanitizer says."""
    (folder / "step.c").write_text(case.source)
    (folder / "in").write_bytes(case.data)
    command = [compiler, *_FILES, "-march=native", *flags, "step.c", "-o", "step", "-lm"]
    made = children.run(command, cwd=folder, seconds=900)
    if made.returncode:
        return f"{compiler}: {made.stderr[:400]}"
    done = children.run(["./step", "in", "out"], cwd=folder, seconds=900)
    if done.returncode not in (0, 3):
        return f"{done.returncode}: {done.stderr[:600]}"
    return (folder / "out").read_bytes()


def check(seed: int, number: int, builds: Any = BUILDS, machines: Any = MACHINES) -> list[str]:
    wrong: list[str] = []
    wanted: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as name:
        for machine in machines:
            for case in cases(seed, number, machine):
                # One width with every compiler, the others with the first one.
                for compiler, flags in builds if machine is machines[-1] else builds[:1]:
                    found = run(case, compiler, flags, Path(name))
                    where = f"{case.label} with {compiler} {' '.join(flags)}, {machine}"
                    if isinstance(found, str):
                        wrong.append(f"{where}: {found}")
                    elif wanted.setdefault(case.label, found) != found:
                        wrong.append(f"{where}: other bits")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    builds = tuple(b for b in BUILDS if shutil.which(b[0]))
    start, refused, found = time.perf_counter(), 0, 0
    for number in range(given.first, given.first + given.count):
        try:
            wrong = check(given.seed, number, builds)
        except OrtflexError as error:
            refused += 1
            print("refused", number, str(error)[:300], flush=True)
            continue
        found += len(wrong)
        print("done", number, flush=True)
        for text in wrong:
            print("WRONG", number, text, flush=True)
    names = ", ".join(f"{c} {f[0]}{' sanitized' * (len(f) > 1)}" for c, f in builds)
    print(
        f"{given.count} recipes with {names}: {found} findings, {refused} refused; "
        f"{time.perf_counter() - start:.0f} s"
    )
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
