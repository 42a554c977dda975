"""``checkpoint.json``: its content, sealed by a digest, and the valid range of every value."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from ortflex_core.kernel.construct import converter, explain
from ortflex_core.kernel.errors import LONG, CheckpointError, printable, short_repr
from ortflex_core.kernel.plan import Position
from ortflex_core.kernel.regular_files import TABLE, read_json, reason
from ortflex_core.kernel.types import Progress, Size

FORMAT = 2
"""The format that is written; format 1 (of 0.1.0) is read as well, but cannot be verified."""
NAME = "checkpoint.json"

OLD_DEFAULTS = {"batch_norm": "train", "cache": False}
"""The values that arguments had in records that do not name them, where the default is another now."""

_MOST = 2**63
_LINE = ("epoch", "loss", "penalty", "rate", "rows", "seconds")


@attrs.frozen(kw_only=True)
class Record:
    """The content of checkpoint.json.

    ``arguments`` has the arguments of the Trainer, components as tables; ``unnamed`` has the names of
    arguments whose objects cannot be written to a file. ``versions`` has the distributions with plugins
    in use. ``files`` has the sha256 of every other file of the checkpoint, ``frozen`` a digest of every
    initializer that is not trained; both are None in format 1.
    """

    format: int
    structure: str
    arguments: dict[str, Any]
    unnamed: tuple[str, ...]
    versions: dict[str, str]
    runtime: str
    backend: str | None
    size: Size | None
    fits: int
    manual: Progress
    position: Position | None
    callbacks: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    files: dict[str, str] | None = None
    frozen: dict[str, str] | None = None


@attrs.frozen(kw_only=True)
class _Column:
    dtype: str
    shape: tuple[int, ...]
    digest: str


@attrs.frozen(kw_only=True)
class _Arrays:
    kind: Literal["arrays"]
    columns: dict[str, _Column] | None = None


@attrs.frozen(kw_only=True)
class _Pieces:
    kind: Literal["pieces"]
    pieces: int
    sizes: int
    buffer: int
    streams: int = 1
    ranks: int = 1
    columns: dict[str, _Column] | None = None


@attrs.frozen(kw_only=True)
class _Spot:
    turn: int
    item: int
    offset: int
    state: Any


@attrs.frozen(kw_only=True)
class _Batches:
    kind: Literal["batches"]
    buffer: int
    ranks: int = attrs.field(default=1, kw_only=True)


@attrs.frozen(kw_only=True)
class _Drawn(_Batches):
    spot: _Spot
    check: int
    epoch: int
    window: int
    taken: int


def _place_class(data: Mapping[str, Any]) -> type:
    if data.get("kind") == "batches":
        return _Drawn if "spot" in data else _Batches
    return _Pieces if data.get("kind") == "pieces" else _Arrays


def seal(table: Mapping[str, Any]) -> dict[str, Any]:
    """A record as JSON, with the digest of its content."""
    content = json.loads(
        json.dumps({k: v for k, v in table.items() if k != "digest"}, default=to_json)
    )
    return {**content, "digest": _digest(content)}


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: Path) -> Record:
    """The record of a checkpoint."""
    path = folder / NAME
    try:
        table = read_json(path, TABLE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {reason(error)}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{str(path)!r} is broken: expected a table, got {_shown(table)}")
    digest = table.pop("digest", None)
    if digest is not None and digest != _digest(table):
        raise CheckpointError(f"{str(path)!r} is damaged: its sha256 differs from the recorded one")
    written = table.get("format")
    if isinstance(written, bool) or written not in (1, FORMAT):
        raise CheckpointError(
            f"{str(path)!r} has the format {_shown(written)}, but this version reads formats 1 "
            f"and {FORMAT}; use the version of ortflex that wrote it"
        )
    if written == FORMAT and digest is None:
        raise CheckpointError(f"{str(path)!r} is damaged: its digest is missing")
    try:
        record: Record = converter(tuple).structure(table, Record)
        record = attrs.evolve(record, arguments=OLD_DEFAULTS | record.arguments)
        problems = [*_missing(table), *_problems(record)]
    except Exception as error:  # cattrs raises groups
        problems = explain(error, NAME)
    if problems:
        lines = "; ".join(printable(p, lines=False) for p in problems[:5])
        raise CheckpointError(f"the checkpoint {str(folder)!r} is broken: {lines}")
    return record


def _missing(table: Mapping[str, Any]) -> Iterator[str]:
    """The keys that a file must have, although the class has a default, and that it lacks."""
    position = table["position"]
    parts: list[tuple[str, Any, type]] = [
        (NAME, table, Record),
        ("manual", table["manual"], Progress),
    ]
    if position is not None:
        parts.append(("position", position, Position))
        parts.append(("position.progress", position["progress"], Progress))
    later = ("apart", "losses", *(("files", "frozen") if table["format"] == 1 else ()))
    for place, part, cls in parts:
        names = [field.name for field in attrs.fields(cls) if field.name not in later]
        yield from (f"{place}: {name} is missing" for name in names if name not in part)


def _problems(record: Record) -> Iterator[str]:
    """The problems of values that have the right types."""
    if record.format == FORMAT:
        if record.files is None or record.frozen is None:
            yield f"{NAME}: the digests of files and frozen weights are missing"
        for name in record.files or ():
            inside = name.removeprefix("model/")
            if name != "state.safetensors" and (inside == name or not _plain(inside)):
                yield f"{NAME}.files: {_shown(name)} is not a file of a checkpoint"
    for place, least in _COUNTS.items():
        number = _value_at(record, place)
        if number is not None and not least <= number < _MOST:
            expected = f"a count >= {least}" if least else "a count"
            yield f"{place} is {_shown(number)}, expected {expected}"
    position = record.position
    if position is None:
        return
    for name, value in (("seconds", position.seconds), ("rate", position.rate)):
        unknown = name == "rate" and math.isnan(value)  # before the first step
        if not unknown and not (math.isfinite(value) and value >= 0):
            yield f"position.{name} is {_shown(value)}, expected a finite number >= 0"
    costs = {"loss": position.loss, "penalty": position.penalty}
    costs |= {f"losses[{k}]": cost for k, cost in enumerate(position.losses)}
    for name, cost in costs.items():
        if not math.isfinite(cost):
            yield f"position.{name} is {_shown(cost)}, expected a finite number"
    if not position.seed or any(s < 0 for s in position.seed):
        yield f"position.seed is {_shown(position.seed)}, expected integers >= 0"
    for k, line in enumerate(position.records):
        if missing := [name for name in _LINE if name not in line]:
            yield f"position.records[{k}] lacks {missing[0]!r}"
    if len(position.records) != position.progress.epoch:
        yield (
            f"position.records has {len(position.records)} lines, but {position.progress.epoch} "
            "epochs are finished"
        )
    for where, progress in (("manual", record.manual), ("position.progress", position.progress)):
        if progress.history:
            yield f"{where}.history is not empty"
    if position.data is not None:
        try:
            converter(tuple).structure(position.data, _place_class(position.data))
        except Exception as error:  # cattrs raises groups
            yield from explain(error, "position.data")


def _plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not any(c in name for c in "/\\\0")


_PROGRESS = ("step", "epoch", "rows", "epochs", "steps_per_epoch", "rows_per_epoch")
_COUNTS = {
    "fits": 0,
    "size.rows": 1,
    "size.epoch_steps": 0,
    **{f"{place}.{name}": 0 for place in ("manual", "position.progress") for name in _PROGRESS},
    "position.steps": 0,
    "position.rows": 0,
    "position.at_once": 1,
    "position.apart": 1,
}
"""Every integer of a record, with its smallest valid value."""


def _value_at(record: Record, place: str) -> Any:
    """The value at a place such as ``size.rows``; None if it is missing."""
    value: Any = record
    for name in place.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return printable(text if len(text) <= 80 else f"{text[:80]}…", lines=False)


def to_json(value: Any) -> Any:
    """A value in the types of JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(v) for v in value]
    if isinstance(value, int) and abs(value) >= LONG:
        raise OverflowError(short_repr(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{short_repr(value)} is not JSON")
