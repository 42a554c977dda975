"""``manifest.json``: the inputs and outputs of a portable step, for the program that runs it.

Every entry is an input (``in``), an output (``out``), or a tensor of state with both names;
``role`` and ``of`` have the meaning that they have in :class:`~ortflex_core.Port`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from onnx import ModelProto

from ortflex_core.compiler.graph.ports import COLUMNS
from ortflex_core.kernel.construct import converter, explain
from ortflex_core.kernel.errors import CheckpointError, suggest
from ortflex_core.kernel.regular_files import read_json, reason
from ortflex_core.kernel.types import TensorSpec, dtype_name, shape_text
from ortflex_core.training.artifacts.rate_table import RateTable
from ortflex_core.training.artifacts.step_assembly import Entry

FORMAT = 1
NAME = "manifest.json"


@attrs.frozen(kw_only=True)
class Item:
    """An entry of the manifest.

    Attributes:
        name: the name of the input, ``in`` in the file; None if the entry is only an output.
        new: the name of the output, ``out`` in the file; None if the entry is only an input.
        role: the purpose: data, label, sample_weight, parameter, slot, average, buffer, counter,
            rate, hyperparameter, loss, penalty or output.
        of: the column of the data, the parameter or the hyperparameter that it belongs to.
        slot: the name among several tensors of that role, such as an optimizer's slot.
        batch: the number of its batch in the run, from 0; None if it is not a column of the data.
        dtype: the element type, as numpy names it.
        shape: the sizes; a string if any size is possible.
        default: the value of a rate or hyperparameter, a list with one value per step if there are
            several; it may be omitted if the graph has the default, too. "inf" and "nan" are
            strings. "nan" is the rate of the schedule.
    """

    name: str | None
    new: str | None
    role: str
    of: str | None
    slot: str | None
    batch: int | None
    dtype: str
    shape: tuple[int | str | None, ...]
    default: float | str | tuple[float | str, ...] | None = None

    @classmethod
    def of_entry(cls, entry: Entry, accumulate: int = 1) -> Item:
        """The item of an input or output, where steps have ``accumulate`` batches."""
        port, default = entry.port, _in_json(entry)
        return cls(
            name=entry.name or None,
            new=entry.new,
            role=port.role,
            of=port.of,
            slot=port.slot,
            batch=port.step * accumulate + port.batch if port.role in COLUMNS else None,
            dtype=dtype_name(entry.spec.dtype),
            shape=tuple(entry.spec.shape or ()),
            default=default,
        )


def _in_json(entry: Entry) -> float | str | tuple[float | str, ...] | None:
    if entry.default is None:
        return None
    value = entry.default if math.isfinite(entry.default) else str(entry.default)
    sizes = [size for size in entry.spec.shape or () if isinstance(size, int)]
    return (value,) * sizes[0] if sizes else value


@attrs.frozen(kw_only=True)
class Rates:
    """The table of learning rates in ``step.onnx``.

    Attributes:
        count: the number of rates; the last one holds after the end.
        steps: the number of steps with the same rate: 1, or the steps of an epoch.
        first: the value of the counter at the start of the table.
    """

    count: int
    steps: int
    first: int

    @classmethod
    def of_table(cls, table: RateTable) -> Rates:
        """The description of a table."""
        return cls(count=len(table.values), steps=table.interval, first=table.first)


@attrs.frozen(kw_only=True)
class Missing:
    """A part of training that the step does not have: its kind, its name, the reason, and advice."""

    what: str
    name: str
    why: str
    instead: str


@attrs.frozen(kw_only=True)
class Manifest:
    """The content of the file.

    Attributes:
        format: 1.
        ortflex: the version that wrote it.
        model: a hash of the computation of the model, without its weights.
        rows: the rows of every batch; None for any number.
        steps_per_run: the steps of one run of ``step.onnx``.
        batches_per_run: the batches of one run.
        step: the inputs and outputs of ``step.onnx``.
        predict: the inputs and outputs of ``predict.onnx``, with the same names of state as in the step.
        classes: the names of classes; their positions in this list are the labels of the graph.
        schedule: the settings of the schedule of the Trainer.
        rates: the table that the step reads where the input with the role rate is not a number; None
            if that input is the rate.
        not_portable: parts of training that the step does not have.
    """

    format: Literal[1]
    ortflex: str
    model: str
    rows: int | None
    steps_per_run: int
    batches_per_run: int
    step: tuple[Item, ...]
    predict: tuple[Item, ...]
    classes: tuple[Any, ...] | None
    schedule: dict[str, Any]
    not_portable: tuple[Missing, ...]
    rates: Rates | None = None

    @property
    def state(self) -> dict[str, Item]:
        """The tensors of state by their names."""
        return {i.name: i for i in self.step if i.name is not None and i.new is not None}

    def text(self) -> str:
        """The file."""
        table = attrs.asdict(self)
        for part in ("step", "predict"):
            table[part] = [_renamed(item) for item in table[part]]
        return json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _renamed(item: Mapping[str, Any]) -> dict[str, Any]:
    others = {k: v for k, v in item.items() if k not in ("name", "new", "default")}
    table = {"in": item["name"], "out": item["new"], **others}
    return table if item["default"] is None else {**table, "default": item["default"]}


def is_ours(path: Path) -> bool:
    """Whether a file has the keys of a manifest, of this version or another, so that it may be replaced."""
    try:
        table = read_json(path)
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(table, dict)
        and type(table.get("format")) is int
        and isinstance(table.get("model"), str)
        and isinstance(table.get("step"), list)
        and isinstance(table.get("predict"), list)
    )


def read(path: Path) -> Manifest:
    """Read a manifest."""
    try:
        table = read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{str(path)!r} does not exist; pass the folder that `ortflex export-step` wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {reason(error)}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        written = table.get("format") if isinstance(table, dict) else None
        raise CheckpointError(
            f"{str(path)!r} has the format {written!r}, but this version reads format {FORMAT}; "
            "it is not the manifest of a portable step, or a newer ortflex wrote it"
        )
    try:
        for part in ("step", "predict"):
            table[part] = [
                {"default": None, **item, "name": item["in"], "new": item["out"]}
                for item in table[part]
            ]
            for item in table[part]:
                del item["in"], item["out"]
        manifest: Manifest = converter(tuple).structure(table, Manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(path)!r} is broken: {error!r} is missing or wrong") from error
    except Exception as error:  # cattrs raises groups
        raise CheckpointError(
            f"{str(path)!r} is broken: {'; '.join(explain(error, ''))}"
        ) from error
    return manifest


def check(items: Iterable[Item], model: ModelProto, what: str) -> None:
    """Compare a manifest's items with the graph."""
    optional = {t.name for t in model.graph.initializer}
    inputs = {v.name: TensorSpec.from_proto(v) for v in model.graph.input}
    outputs = {v.name: TensorSpec.from_proto(v) for v in model.graph.output}
    items = tuple(items)
    for word, specs, names in (
        ("input", inputs, [(i.name, i) for i in items if i.name is not None]),
        ("output", outputs, [(i.new, i) for i in items if i.new is not None]),
    ):
        for name, item in names:
            if name not in specs:
                raise CheckpointError(
                    f"the manifest does not fit {what}: its {word} {name!r} is not in the graph; "
                    f"{suggest(name, specs)}"
                )
            spec = specs[name]
            shape = tuple(spec.shape or ())
            if (dtype_name(spec.dtype), shape) != (item.dtype, item.shape):
                raise CheckpointError(
                    f"the manifest does not fit {what}: its {word} {name!r} is "
                    f"{item.dtype}{shape_text(item.shape)}, in the graph it is "
                    f"{dtype_name(spec.dtype)}{shape_text(shape)}"
                )
        known = {name for name, _ in names} | (optional if word == "input" else set())
        if missing := sorted(set(specs) - known):
            raise CheckpointError(
                f"the manifest does not fit {what}: it lacks the {word} {missing[0]!r} of the graph"
            )
