"""Fine-tune a scikit-learn classifier on digits from a bad scanner, with ortflex.

    make demo        or        python docs/examples/demo.py --folder runs/demo

Prints the accuracy on held-out digits before and after the run, and a table of the backends that work
here. The folder then has trained.onnx, history.csv, losses.png and the data.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ortflex import OrtflexError, Trainer
from ortflex_core.kernel import registry

sys.path.insert(0, str(Path(__file__).parent))
from demo_picture import draw
from make_digits_classifier import make

RECIPE: dict[str, Any] = {
    "loss": "softmax_cross_entropy",
    "penalty": {"name": "l2", "l2": 1e-4},
    "optimizer": "adam",
    "learning_rate": 0.01,
    "schedule": "cosine",
    "batch_size": 32,
    "metrics": ["accuracy"],
}


def load(path: Path) -> tuple[Any, Any]:
    """X and y of an npz file."""
    with np.load(path) as arrays:
        return arrays["X"], arrays["y"]


def backends(model: Path, data: tuple[Any, Any], console: Console) -> list[str]:
    """Print the time of a step for each backend that is available here; returns their names."""
    table = Table("backend", title="Backends on this machine", title_justify="left", box=None)
    table.add_column("µs a step", justify="right")
    table.add_column("", overflow="fold")
    usable, absent = [], []
    for name in registry.Plugins.discover()["backends"].names():
        trainer = Trainer(model, backend=name, epochs=9, progress=False, **RECIPE | {"metrics": []})
        try:
            history = trainer.fit(*data)
        except OrtflexError:
            absent.append(name)
            continue
        steps = -(-len(data[0]) // trainer.batch_size)
        # The first epoch warms up.
        seconds = median(history["seconds"][1:])
        table.add_row(name, f"{seconds / steps * 1e6:.0f}", f"{trainer.summary().facts['runtime']}")
        usable.append(name)
    console.print(table)
    if absent:
        console.print(f"not available here: {', '.join(absent)} (`ortflex doctor` shows why)")
    return usable


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the demo; returns the accuracies."""
    parser = argparse.ArgumentParser(description="Fine-tune a classifier on handwritten digits.")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    logging.basicConfig(format="%(message)s")

    console.print(
        "scikit-learn trains a classifier on clean digits, skl2onnx writes it to a file …"
    )
    files = make(options.folder)
    train, validation, test, clean = (
        load(files[name]) for name in ("train", "validation", "test", "clean")
    )
    console.print(
        f"… and {len(train[0])} images, most of them from a bad scanner, are there to learn from.\n"
    )
    if not backends(files["digits"], train, console):
        raise SystemExit("no backend works here: see `ortflex doctor`")

    console.print("\nFine-tuning:")
    logging.getLogger("ortflex").setLevel(logging.INFO)
    trainer = Trainer(files["digits"], epochs=options.epochs, backend=options.backend, **RECIPE)
    guessed = trainer.predict(test[0], "probabilities").argmax(axis=1)
    before = float((guessed == test[1]).mean())
    before_clean = float((trainer.predict(clean[0], "label") == clean[1]).mean())
    start = trainer.evaluate(*validation)
    started = time.perf_counter()
    history = trainer.fit(*train, validation_data=validation)
    seconds = time.perf_counter() - started
    after = trainer.evaluate(*test)["accuracy"]
    after_clean = trainer.evaluate(*clean)["accuracy"]

    table = Table(f"{len(test[0])} digits held out", box=None)
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row("from the scanner", f"{before:.1%}", f"[bold green]{after:.1%}[/]")
    table.add_row("clean, as it had learnt them", f"{before_clean:.1%}", f"{after_clean:.1%}")
    console.print(f"{options.epochs} epochs in {seconds:.1f} s\n")
    console.print(table)

    trainer.export(options.folder / "trained.onnx")
    history.to_csv(options.folder / "history.csv")
    learnt = trainer.predict(test[0], "probabilities").argmax(axis=1)
    draw(
        options.folder / "losses.png",
        history=history,
        start=start,
        images=(clean[0], test[0]),
        labels=test[1],
        guesses=(guessed, learnt),
        accuracy=(before, after),
    )
    console.print(f"\nWritten to {options.folder}: trained.onnx, history.csv, losses.png")
    return {
        "before": before,
        "after": after,
        "clean_before": before_clean,
        "clean_after": after_clean,
    }


if __name__ == "__main__":
    main()
