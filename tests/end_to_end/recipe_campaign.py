"""Drawn recipes on any backend, compared with the same training by torch in float64.

``python -m tests.end_to_end.recipe_campaign --seed 1 --count 200 --backend fused`` prints the recipes whose
weights are wrong, or that are refused, and counts at the end. An environment without torch reads what one
with torch has written: ``--write expected.npz`` there, ``--expected expected.npz`` here.

A weight is wrong if its largest error, relative to its largest movement, exceeds ``TOLERANCE`` and
``SPREAD`` times the same error of torch in float32: some drawn trainings are badly conditioned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core import OrtflexError, Trainer
from tests.end_to_end.recipe_cases import Recipe, arguments_of, draw, model_of
from tests.training import plugins

TOLERANCE, SPREAD = 2e-3, 30.0
Expected = tuple[Mapping[str, Any], Mapping[str, float]]
"""The weights in float64, and the error of each in float32."""


@attrs.frozen
class Result:
    """The outcome of a recipe: the largest relative error, and what is wrong or refused."""

    error: float
    wrong: str = ""
    refused: str = ""


def expected_of(recipe: Recipe) -> Expected:
    import torch

    from tests.end_to_end.recipe_twin import train

    exact, rough = train(recipe), train(recipe, torch.float32)
    return exact, {n: error(recipe, n, rough[n], a) for n, a in exact.items()}


def error(recipe: Recipe, name: str, found: Any, exact: Any) -> float:
    """The largest error of a tensor, relative to its largest movement."""
    start = {**recipe.network.weights, **recipe.network.constants, **recipe.adapters}[name]
    moved = float(np.abs(exact - start).max())
    # A tensor that hardly moves in float64 has only rounding errors of its own size.
    least = 1e-4 * max(1.0, float(np.abs(start).max()))
    worst = float(np.abs(np.asarray(found, np.float64) - exact).max())
    return worst / max(moved, least) if np.isfinite(worst) else np.inf


def train(recipe: Recipe, backend: Any) -> dict[str, Any]:
    """What ortflex gives, by the names of the twin."""
    trainer = Trainer(
        model_of(recipe),
        backend=backend,
        progress=False,
        plugins=plugins(),
        **arguments_of(recipe),
    )
    if recipe.adapters:
        state = trainer.get_state()
        trainer.set_state({n: a.astype(state[n].dtype) for n, a in recipe.adapters.items()})
    inputs = recipe.data if len(recipe.data) > 1 else next(iter(recipe.data.values()))
    trainer.fit(inputs, recipe.label, recipe.weight)
    found = dict(trainer.get_state(averaged=bool(recipe.averaging)))
    return found | {
        n: a for n, a in trainer.get_state(buffers=True).items() if n in ("mean", "var")
    }


def compare(recipe: Recipe, backend: Any, expected: Expected) -> Result:
    exact, rough = expected
    try:
        found = train(recipe, backend)
    except OrtflexError as refusal:
        return Result(0.0, refused=f"{type(refusal).__name__}: {refusal}")
    errors = {n: error(recipe, n, found[n], a) for n, a in exact.items()}
    wrong = {n: e for n, e in errors.items() if e > max(TOLERANCE, SPREAD * rough[n])}
    named = ", ".join(f"{n} {e:.2g} (float32: {rough[n]:.2g})" for n, e in wrong.items())
    return Result(max(errors.values()), wrong=named)


def write(path: Path, seed: int, numbers: Any) -> None:
    arrays = {}
    for number in numbers:
        for name, array in zip(("exact", "rough"), expected_of(draw(seed, number)), strict=True):
            arrays |= {f"{seed}/{number}/{name}/{n}": np.asarray(a) for n, a in array.items()}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # names of arrays, no options


def read(path: Path, seed: int, number: int) -> Expected:
    """What torch gave for a recipe.

    Raises:
        KeyError: the file does not have that recipe.
    """
    with np.load(path) as file:
        parts = []
        for kind in ("exact", "rough"):
            start = f"{seed}/{number}/{kind}/"
            parts.append({n.removeprefix(start): file[n] for n in file if n.startswith(start)})
    if not parts[0]:
        raise KeyError(f"{path} lacks the recipe {number} of the seed {seed}")
    return parts[0], {n: float(e) for n, e in parts[1].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--backend", default="fused")
    parser.add_argument("--write", type=Path, help="write what torch gives, and train nothing else")
    parser.add_argument("--expected", type=Path, help="what torch gave in another environment")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.count)
    if given.write is not None:
        write(given.write, given.seed, numbers)
        return
    results, start = [], time.perf_counter()
    for number in numbers:
        recipe = draw(given.seed, number)
        expected = (
            expected_of(recipe)
            if given.expected is None
            else read(given.expected, given.seed, number)
        )
        result = compare(recipe, given.backend, expected)
        results.append(result)
        if text := result.wrong or result.refused:
            print("WRONG" if result.wrong else "refused", recipe.describe(), "::", text, flush=True)
    errors = np.array([r.error for r in results if not r.refused and not r.wrong] or [0.0])
    print(
        f"{given.backend}: {len(results)} recipes, {sum(bool(r.wrong) for r in results)} wrong, "
        f"{sum(bool(r.refused) for r in results)} refused; relative errors of the others: median "
        f"{np.median(errors):.1e}, 99 % {np.quantile(errors, 0.99):.1e}, largest {errors.max():.1e}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    raise SystemExit(any(r.wrong for r in results))


if __name__ == "__main__":
    main()
