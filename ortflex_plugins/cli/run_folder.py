"""The run folder of ``ortflex train``: the recipe, the versions and the results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import os
import platform
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core import (
    TABLE,
    FolderLock,
    History,
    OutputError,
    hook,
    internals_of,
    list_checkpoints,
    make_folder,
    read_json,
    read_text,
    reason,
    write_bytes,
)

if TYPE_CHECKING:
    from ortflex_core import Progress, Recipe, Trainer
    from ortflex_plugins.pictures.measure import Measures

_log = logging.getLogger("ortflex")
_RECIPE, _VERSIONS, _HISTORY = "recipe.toml", "versions.json", "history.csv"
_CHECKPOINTS = "checkpoints"
_RESULTS = {"trained.onnx", "trained.onnx.data", "last_good.onnx", "measures.json", "loss.png"}
_WRITTEN = {_RECIPE, _VERSIONS, _HISTORY, _CHECKPOINTS, *_RESULTS}
_PACKAGES = ("ortflex", "numpy", "onnx")


@attrs.frozen(kw_only=True)
class Place:
    """A run folder with its lock, and what has to be undone if the run is refused.

    ``new`` are the folders that did not exist, the inner ones first; ``before`` are the names that were
    in the folder; ``renamed`` is the new path of an earlier run.
    """

    folder: Path
    lock: FolderLock
    new: tuple[Path, ...] = ()
    before: frozenset[str] = frozenset()
    renamed: Path | None = None

    def discard(self) -> None:
        """Remove the files of a refused run, unless it has written more than its settings.

        Files and folders that existed before are kept, and an earlier run gets its name back.
        """
        with contextlib.suppress(OSError):
            own = {p.name for p in self.folder.iterdir()} - {self.lock.name} - self.before
            if _CHECKPOINTS in own and not _filled(self.folder / _CHECKPOINTS):
                (self.folder / _CHECKPOINTS).rmdir()
                own.remove(_CHECKPOINTS)
            if not own <= {_RECIPE, _VERSIONS}:
                return
            for name in own:
                (self.folder / name).unlink()
            self.lock.release()
            for folder in self.new:
                folder.rmdir()  # fails if the folder is not empty
            if self.renamed is not None and not os.path.lexists(self.folder):
                os.rename(self.renamed, self.folder)
                _log.info("the earlier run was moved back to %s", self.folder)


def _missing(folder: Path) -> tuple[Path, ...]:
    """The folders that will be created with a folder, the inner ones first."""
    return tuple(itertools.takewhile(lambda p: not p.exists(), (folder, *folder.parents)))


def make(recipe: Recipe, resume: Path | None = None, *, force: bool = False) -> Place:
    """Make and lock the recipe's ``output``, or a new folder ``runs/<time>-<model>``.

    A run that continues from a run folder continues in that folder. Any other folder with a run, or
    with files that this run would replace, is refused; ``force`` renames it first.
    """
    folder = None if recipe.output is None else Path(recipe.output)
    if folder is None and resume is not None and (resume / _VERSIONS).is_file():
        folder = resume
    if folder is None:
        parents = _missing(Path("runs"))
        folder, lock = _taken(_fresh(Path("runs"), Path(recipe.model).stem))
        return Place(folder=folder, lock=lock, new=(folder, *parents))
    continues = resume is not None and resume.resolve().is_relative_to(folder.resolve())
    new = _missing(folder)
    lock = _taken(make_folder(folder))[1]
    if continues or not (names := _at_risk(folder)):
        before = frozenset(p.name for p in folder.iterdir())
        return Place(folder=folder, lock=lock, new=new, before=before)
    lock.release()
    if not force:
        raise OutputError(_refusal(folder, names))
    renamed = _rename(folder, recipe)
    lock = _taken(make_folder(folder))[1]
    return Place(folder=folder, lock=lock, new=(folder,), renamed=renamed)


def _taken(folder: Path) -> tuple[Path, FolderLock]:
    lock = FolderLock(".run.lock")
    try:
        free = lock.acquire(folder)
        if not free:  # `ortflex report` holds the lock for a moment while it reads
            time.sleep(0.1)
            free = lock.acquire(folder)
    except OSError as error:
        raise OutputError(f"cannot write to {str(folder)!r}: {error.strerror or error}") from error
    if not free:
        raise OutputError(
            f"the run folder {str(folder)!r} is in use: {lock.holder(folder)} trains there. Wait until "
            "it ends, or set another output folder"
        )
    return folder, lock


def _fresh(parent: Path, name: str) -> Path:
    """Create a folder, even if another process tries the same name at the same time."""
    make_folder(parent)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for count in itertools.count(1):
        folder = parent / (stem if count == 1 else f"{stem}-{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise OutputError(
                f"cannot create the folder {str(folder)!r}: {error.strerror or error}"
            ) from error
        return folder
    raise AssertionError  # the loop never ends


def _at_risk(folder: Path) -> list[str]:
    """The files that a new run would replace or mix with its own; settings alone do not count."""
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    if _VERSIONS in names:
        results = sorted(names - {_VERSIONS, _RECIPE})
        return [name for name in results if name != _CHECKPOINTS or _filled(folder / name)]
    return sorted(names & _WRITTEN)


def _filled(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def _refusal(folder: Path, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    if not (folder / _VERSIONS).is_file():
        return (
            f"the folder {str(folder)!r} contains {shown}, which this run would replace; set another "
            "output folder, or rename this one with --force"
        )
    state = "is finished" if "trained.onnx" in names else "has begun"
    state = "was interrupted" if was_interrupted(folder) else state
    has_checkpoints = _CHECKPOINTS in names
    return (
        f"the folder {str(folder)!r} contains a run that {state} ({shown}). "
        + f"To continue it, use --resume {folder}. " * has_checkpoints
        + "To start a new run, use --force, which renames the old folder, or set another output folder"
    )


def was_interrupted(folder: Path) -> bool:
    """Whether Ctrl-C ended the run of a folder; False if its versions.json cannot be read."""
    try:
        return bool(read_json(folder / _VERSIONS)["state"] == "interrupted")
    except (OSError, TypeError, ValueError, KeyError):
        return False


def _rename(folder: Path, recipe: Recipe) -> Path:
    """Rename a folder, unless the recipe reads from it; returns its new path."""
    for path in (Path.cwd(), *_inputs(recipe)):
        if path.resolve().is_relative_to(folder.resolve()):
            raise OutputError(
                f"{str(folder)!r} cannot be renamed: {str(path)!r}, which this run needs, is in it; "
                "set another output folder"
            )
    for count in itertools.count(1):
        target = folder.with_name(f"{folder.name}-old-{count}")
        if not os.path.lexists(target):
            break
    try:
        os.rename(folder, target)
    except OSError as error:
        raise OutputError(
            f"cannot rename {str(folder)!r} to {str(target)!r}: {error.strerror or error}"
        ) from error
    _log.info("the earlier run in %s was moved to %s", folder, target)
    return target


def _inputs(recipe: Recipe) -> Iterator[Path]:
    for value in (recipe.model, recipe.data, recipe.validation):
        path = value.get("path") if isinstance(value, Mapping) else value
        if isinstance(path, str) and "://" not in path:
            yield Path(path)


def checkpoint(given: Path) -> Path:
    """The folder of checkpoints in a run folder; for any other folder, the folder itself."""
    inside = given / _CHECKPOINTS
    return inside if list_checkpoints(inside) else given


def plain_descent(recipe: Path, overrides: Sequence[str], given: Path) -> list[str]:
    """``optimizer=sgd`` for a run that began with it, if neither a recipe nor overrides name one.

    It was the default of 0.2; a training continues with the optimizer that it had.
    """
    try:
        named = "optimizer" in tomllib.loads(read_text(recipe))
        folder = checkpoint(given)
        newest = [folder, *list_checkpoints(folder)][-1]
        was = read_json(newest / "checkpoint.json", TABLE)["arguments"]["optimizer"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the checkpoint is refused when it is read
    keys = [text.partition("=")[0].partition(".")[0].strip() for text in overrides]
    return ["optimizer=sgd"] if was == "sgd" and not named and "optimizer" not in keys else []


class Curves:
    """Keeps history.csv up to date, so that a killed run leaves its curves.

    If an epoch is shorter than 20 times the time of writing, several epochs are written together. If the
    file cannot be written, there is a warning, and the training continues.
    """

    def __init__(self) -> None:
        self._due = 0.0

    @hook
    def epoch_end(self, trainer: Trainer, progress: Progress) -> None:
        """Write the epochs so far, unless the last write was too recent."""
        start = time.monotonic()
        if start < self._due:
            return
        try:
            History(tuple(progress.history)).to_csv(trainer.folder / _HISTORY)
        except OutputError as error:
            _log.warning("epoch %d: %s", progress.epoch, error)
        end = time.monotonic()
        self._due = end + 20 * (end - start)


def rescue(trainer: Trainer, folder: Path) -> str:
    """Save a run whose results could not be written; returns a message for the command line.

    It writes a checkpoint if the training can continue, or trained.onnx if it has ended: to the run
    folder or, if that fails, to a new temporary folder. If the other processes have ended with their parts
    of the optimizer's state, it writes the weights of a training that has not ended to rescued.onnx.
    """
    inner = internals_of(trainer)
    peers, unfinished = inner.setup.problem.peers, inner.live.standing.last is not None
    name = "rescued" if unfinished else "trained.onnx"
    if unfinished and peers is not None and peers.shards:
        name, unfinished = "rescued.onnx", False
    for temporary in (False, True):
        try:
            place = Path(tempfile.mkdtemp(prefix="ortflex-")) if temporary else folder
            target = place / name
            if unfinished:
                trainer.save(target)
            else:
                trainer.export(target)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            trainer.history_.to_csv(place / _HISTORY)
        return f"the weights are in {target}" + (f"; continue with --resume {target}" * unfinished)
    return f"the weights are lost: neither {folder} nor {tempfile.gettempdir()} can be written to"


def begin(folder: Path, resolved: Recipe, trainer: Trainer) -> None:
    """Write recipe.toml and versions.json."""
    inner = internals_of(trainer)
    write_bytes(folder / _RECIPE, resolved.to_toml(folder).encode())
    versions = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "runtime": str(inner.runtime),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "plugins": {e.distribution: e.version for registry in trainer.plugins for e in registry},
        "hooks": inner.hooks.installed,
        "state": "begun",
    }
    _write_json(folder / _VERSIONS, versions)


def finish(folder: Path, trainer: Trainer, measures: Measures) -> None:
    """Write the results, the backend and the state of the run and, with matplotlib, loss.png."""
    history = trainer.history_
    trainer.export(folder / "trained.onnx")
    history.to_csv(folder / _HISTORY)
    write_bytes(folder / "measures.json", json.dumps(measures.content()).encode())
    path = folder / _VERSIONS
    try:
        versions = dict(read_json(path))
    except (OSError, TypeError, ValueError) as error:
        what = f"write the state of the run into {str(path)!r}"
        raise OutputError.of(what, OSError(reason(error))) from error
    done = {
        "backend": trainer.backend_,
        "device": trainer.device.name,
        "state": "interrupted" if history.interrupted else "finished",
    }
    _write_json(path, {**versions, **done})
    if len(history) and importlib.util.find_spec("matplotlib") is not None:
        write_bytes(folder / "loss.png", _plot(history))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def _plot(history: History) -> bytes:
    # matplotlib's object-oriented interface needs no window system and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = history.plot(ax=figure.add_subplot())
    axes.set_title("Loss (and penalty) of the training")
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()
