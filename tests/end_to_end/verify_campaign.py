"""Drawn recipes, trained in one process and verified in another: every receipt gives the same bits.

``python -m tests.end_to_end.verify_campaign --seed 1 --count 50`` prints the recipes whose verdict is not
``identical``, and counts at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortflex_core import Trainer, Verdict, verify
from tests import children
from tests.end_to_end.recipe_cases import Recipe, arguments_of, draw, model_of
from tests.training import plugins

ROOT = Path(__file__).parents[2]


def train(recipe: Recipe, folder: Path) -> None:
    """Write the model, the data and the export of a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model_of(recipe), folder / "model.onnx")
    weight = {} if recipe.weight is None else {"weight/": recipe.weight}
    inputs = {f"input/{name}": array for name, array in recipe.data.items()}
    np.savez(folder / "data.npz", **inputs, **weight, **{"label/": recipe.label})
    trainer = Trainer(
        folder / "model.onnx", progress=False, plugins=plugins(), **arguments_of(recipe)
    )
    trainer.fit(*data_of(folder))
    trainer.export(folder / "trained.onnx")


def data_of(folder: Path) -> tuple[Any, Any, Any]:
    with np.load(folder / "data.npz") as arrays:
        inputs = {n.removeprefix("input/"): arrays[n] for n in arrays if n.startswith("input/")}
        weight = arrays.get("weight/")
        return inputs, arrays["label/"], weight


def judge(folder: Path) -> Verdict:
    return verify(
        folder / "trained.onnx", folder / "model.onnx", data_of(folder), plugins=plugins()
    )


def in_another_process(folder: Path) -> list[str]:
    """One line for each of the exports in the folders of a folder: its name, and the verdict."""
    call = [sys.executable, "-m", "tests.end_to_end.verify_campaign", "--judge", str(folder)]
    return children.run(call, check=True, seconds=600, cwd=ROOT).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--judge", type=Path)
    given = parser.parse_args()
    if given.judge is not None:
        for folder in sorted(given.judge.iterdir()):
            verdict = judge(folder)
            print(f"{folder.name} {verdict.outcome} {'; '.join(verdict.reasons)}".strip())
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.count):
            train(draw(given.seed, number), Path(name) / f"{number:04d}")
        lines = in_another_process(Path(name))
    counts = Counter()
    for line in lines:
        verdict = line.split(" ", 1)[1]
        counts[verdict if verdict == "identical" else "wrong"] += 1
        if verdict != "identical":
            print(f"{line}: {draw(given.seed, int(line[:4])).describe()}")
    print(f"{dict(counts)} of {given.count} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
