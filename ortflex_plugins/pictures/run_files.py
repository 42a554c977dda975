"""The files of a run folder; they are checked, because others may have written them."""

from __future__ import annotations

import csv
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ortflex_core import (
    TABLE,
    TEXT,
    ConfigError,
    NotRegular,
    lock_handle,
    no_file,
    open_regular,
    read_json,
    read_text,
    reason,
)

_LOCK = ".run.lock"


@attrs.frozen
class Run:
    """The content of a run folder: the recipe as a string and as keys, and the other files.

    ``state`` is ``finished``, ``interrupted`` (by Ctrl-C), ``stopped`` (killed, or ended by an error),
    ``running``, or ``running or stopped`` if the file system has no locks.
    """

    recipe: str
    keys: Mapping[str, Any]
    history: dict[str, list[float]]
    versions: dict[str, Any]
    measures: dict[str, Any]
    state: str

    @property
    def may_run(self) -> bool:
        """Whether the run may be in progress."""
        return self.state.startswith("running")


def read_run(folder: Path) -> Run:
    """Read the files of a run folder."""
    if not (folder / "recipe.toml").is_file():
        if not folder.exists():
            raise ConfigError(f"{str(folder)!r} is not a run folder: {no_file(folder)}")
        inside = sorted(str(p.parent) for p in folder.glob("*/recipe.toml"))
        raise ConfigError(
            f"{str(folder)!r} is not a run folder: expected a folder with recipe.toml and history.csv, "
            "as `ortflex train` writes it" + f"; runs in it: {', '.join(inside[:5])}" * bool(inside)
        )
    recipe = _read_text(folder / "recipe.toml", TEXT)
    try:
        keys = tomllib.loads(recipe)
    except (ValueError, RecursionError):  # the page shows the recipe as it is
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
    """Whether a run holds the lock of the folder; None if the file system has no locks.

    The file of the lock is not changed, and only a shared lock on it is held for a moment.
    """
    path = folder / _LOCK
    try:
        with open_regular(path) as file:
            free = lock_handle(file.fileno(), shared=True)
    except (FileNotFoundError, NotRegular):
        return False
    except OSError:
        return None
    return None if free is None else not free


def _state(folder: Path, mark: object) -> str:
    """The state of a run, from its lock and the mark in versions.json."""
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


def _read_text(path: Path, most: int) -> str:
    try:
        return read_text(path, most)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {reason(error)}") from error


def _json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r}: expected an object, got {type(content).__name__}")
    return content


def _history(path: Path) -> dict[str, list[float]]:
    """The columns of history.csv; an empty cell is NaN."""
    if not os.path.lexists(path):
        return {}
    try:
        rows = list(csv.DictReader(_read_text(path, TABLE).splitlines()))
        names = list(rows[0]) if rows else []
        return {n: [float(row[n]) if row[n] else math.nan for row in rows] for n in names}
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise ConfigError(f"{str(path)!r} is not a History: {error}") from error
