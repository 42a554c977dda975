"""The files of a run folder, which may come from elsewhere."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.errors import ConfigError
from ortflex_core.locks import FolderLock

_LOCK = ".run.lock"


@attrs.frozen
class Run:
    """A run folder: the text and the keys of its recipe, and what else there is.

    ``state`` is ``finished``, ``running`` or ``stopped``.
    """

    recipe: str
    keys: Mapping[str, Any]
    history: dict[str, list[float]]
    versions: dict[str, Any]
    measures: dict[str, Any]
    state: str


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
    running = is_running(folder)
    finished = (folder / "trained.onnx").is_file()
    return Run(
        recipe,
        keys,
        _history(folder / "history.csv"),
        _json(folder / "versions.json"),
        _json(folder / "measures.json"),
        "running" if running else "finished" if finished else "stopped",
    )


def is_running(folder: Path) -> bool:
    """Whether a training holds the folder's lock."""
    if not (folder / _LOCK).is_file():
        return False
    lock = FolderLock(_LOCK)
    try:
        free = lock.acquire(folder)
    except OSError:  # a folder that may be read only
        return False
    lock.release()
    return not free


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
