"""The files of a run folder, which may come from elsewhere."""

from __future__ import annotations

import csv
import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.errors import ConfigError
from ortflex_core.locks import lock_handle

_LOCK = ".run.lock"


@attrs.frozen
class Run:
    """A run folder: the text and the keys of its recipe, and what else there is.

    ``state`` is ``finished``, ``interrupted`` (Ctrl-C), ``stopped`` (killed, or failed), ``running``,
    or ``running or stopped`` where the file system has no locks.
    """

    recipe: str
    keys: Mapping[str, Any]
    history: dict[str, list[float]]
    versions: dict[str, Any]
    measures: dict[str, Any]
    state: str

    @property
    def may_run(self) -> bool:
        """Whether the run may have more epochs soon."""
        return self.state.startswith("running")


def read_run(folder: Path) -> Run:
    """Read what is there.

    Raises:
        ConfigError: it is no run folder, or one of its files is broken.
    """
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a run folder: expected a folder with recipe.toml and history.csv, "
            "as `ortflex train` writes it"
        )
    recipe = _read_text(folder / "recipe.toml")
    try:
        keys = tomllib.loads(recipe)
    except (ValueError, RecursionError):  # the page shows its text
        keys = {}
    versions = _json(folder / "versions.json")
    mark = versions.pop("state", None)
    return Run(
        recipe,
        keys,
        _history(folder / "history.csv"),
        versions,
        _json(folder / "measures.json"),
        _state(folder, mark),
    )


def is_running(folder: Path) -> bool | None:
    """Whether a training holds the folder's lock; None where that cannot be known.

    The lock's file is left as it is, and a lock on it is shared and held for a moment.
    """
    path = folder / _LOCK
    if not path.is_file():  # a pipe would wait for its writer
        return False
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        free = lock_handle(handle, shared=True)
    finally:
        os.close(handle)
    return None if free is None else not free


def _state(folder: Path, mark: object) -> str:
    """How far a run is, by its lock and the mark in versions.json."""
    running = is_running(folder)
    if running:
        return "running"
    if mark in ("finished", "interrupted"):
        written = (folder / "trained.onnx").is_file()
        return str(mark) if written else "stopped"
    if running is None:
        return "running or stopped"
    # Earlier versions wrote no mark.
    return "finished" if mark is None and (folder / "trained.onnx").is_file() else "stopped"


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r}: expected an object, got {type(found).__name__}")
    return found


def _history(path: Path) -> dict[str, list[float]]:
    """Columns of history.csv; an empty cell is not a number."""
    if not path.is_file():
        return {}
    try:
        rows = list(csv.DictReader(_read_text(path).splitlines()))
        names = list(rows[0]) if rows else []
        return {n: [float(row[n]) if row[n] else math.nan for row in rows] for n in names}
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise ConfigError(f"{str(path)!r} is not a History: {error}") from error
