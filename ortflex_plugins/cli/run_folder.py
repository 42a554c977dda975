"""The run folder of ``ortflex train``: what was asked for, with what, and what came out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflex_core.checkpoint import numbered
from ortflex_core.files import make_folder, write_bytes

if TYPE_CHECKING:
    from ortflex_core.config import Recipe
    from ortflex_core.trainer import Trainer
    from ortflex_core.types import History
    from ortflex_plugins.pictures.measure import Measures

_PACKAGES = ("ortflex", "numpy", "onnx", "onnx-ir")


def make(recipe: Recipe, resume: Path | None = None) -> Path:
    """The recipe's ``output``, or a new folder ``runs/<time>-<model>`` in the current one.

    A training that goes on from a run folder goes on in there.

    Raises:
        OutputError: it cannot be made or written to.
    """
    if recipe.output is None and resume is not None and (resume / "versions.json").is_file():
        return make_folder(resume)
    if recipe.output is not None:
        return make_folder(Path(recipe.output))
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(recipe.model).stem}"
    folder, count = stem, 1
    while folder.exists():  # two within a second
        count += 1
        folder = stem.with_name(f"{stem.name}-{count}")
    return make_folder(folder)


def checkpoint(given: Path) -> Path:
    """The folder of checkpoints inside a run folder; any other folder itself."""
    inside = given / "checkpoints"
    return inside if numbered(inside) else given


def begin(folder: Path, resolved: Recipe, trainer: Trainer) -> None:
    """Write recipe.toml and versions.json.

    Raises:
        OutputError: the folder cannot be written to.
    """
    write_bytes(folder / "recipe.toml", resolved.to_toml(folder).encode())
    versions = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "runtime": str(trainer.runtime),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "plugins": _owners(trainer),
        "hooks": trainer.hooks.installed,
    }
    _write_json(folder / "versions.json", versions)


def finish(folder: Path, trainer: Trainer, history: History, measures: Measures) -> None:
    """Write trained.onnx, history.csv, measures.json, the backend and, with matplotlib, loss.png.

    Raises:
        OutputError: the folder cannot be written to.
    """
    trainer.export(folder / "trained.onnx")
    history.to_csv(folder / "history.csv")
    write_bytes(folder / "measures.json", json.dumps(measures.content()).encode())
    path = folder / "versions.json"
    versions = json.loads(path.read_text())
    _write_json(path, {**versions, "backend": trainer.backend_, "device": trainer.device.name})
    if len(history) and importlib.util.find_spec("matplotlib") is not None:
        write_bytes(folder / "loss.png", _plot(history))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def _owners(trainer: Trainer) -> dict[str, str]:
    """Every distribution that brings plugins here; nothing is imported."""
    entries = (entry for registry in trainer.plugins for entry in registry)
    return {entry.distribution: entry.version for entry in entries}


def _plot(history: History) -> bytes:
    # The object-oriented way: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="epoch", ylabel="loss", title="Loss (and penalty) of the training"
    )
    epochs = [int(e) + 1 for e in history["epoch"]]
    axes.plot(epochs, history.losses, marker=".", label="training")
    if "validation_loss" in history.columns:
        axes.plot(epochs, history["validation_loss"], marker=".", label="validation")
        axes.legend()
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()
