"""Shared by parquet and arrow files: the roles of columns, and their values as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, Columns, DataError, suggest
from ortflex_plugins.data._columns import DEFAULT_WEIGHT

_STRINGS = 2**28
"""The largest number of bytes of strings that are read together."""
Target = str | Sequence[str] | Mapping[str, str]
Features = Sequence[str] | Mapping[str, str | Sequence[str]] | None


def pyarrow() -> Any:
    """The package ``pyarrow``.

    Raises:
        DataError: it cannot be imported.
    """
    try:
        import pyarrow as package
    except ImportError as error:
        raise DataError(
            f"parquet and arrow files are read by pyarrow, which cannot be imported ({error}); "
            "pip install 'ortflex[parquet]'"
        ) from error
    return package


def files(path: str, ending: str) -> list[Path]:
    """The file, or the files of a folder, in the order of their names.

    Raises:
        DataError: the path does not exist, or the folder has no file with this ending.
    """
    given = Path(path)
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise DataError(f"{given}: no such file or folder")
    paths = sorted(file for file in given.glob(f"*.{ending}") if file.is_file())
    if not paths:
        raise DataError(f"{given}: expected .{ending} files in this folder, found none")
    return paths


@attrs.frozen
class Plan:
    """The columns of a table for each input, label and sample weight.

    A string is one column; a tuple is several columns of numbers side by side.
    """

    inputs: Mapping[str, str | tuple[str, ...]]
    labels: Mapping[str, str | tuple[str, ...]]
    weights: Mapping[str, str]
    schema: Any
    file: Path

    @classmethod
    def of(
        cls,
        schema: Any,
        file: Path,
        target: Target,
        weight: str | None,
        columns: Features,
        input: str,
    ) -> Plan:
        """The plan for a schema.

        Raises:
            DataError: a column is missing, two columns have one name, or no column is left for the
                features.
        """
        counts = Counter(schema.names)
        twice = [name for name, times in counts.items() if times > 1]
        if twice:
            raise DataError(f"{file}: two columns are named {twice[0]!r}; rename one")
        labels: dict[str, str | tuple[str, ...]]
        if isinstance(target, str):
            labels = {"y": target}
        elif isinstance(target, Mapping):
            labels = dict(target)
        else:
            labels = {"y": tuple(target)}
        weights = {} if weight is None else {DEFAULT_WEIGHT: weight}
        taken = {*_names(labels.values()), *weights.values()}
        if isinstance(columns, Mapping):
            inputs = {n: c if isinstance(c, str) else tuple(c) for n, c in columns.items()}
        else:
            features = [n for n in counts if n not in taken] if columns is None else columns
            inputs = _side_by_side(list(features), schema, input)
        if not _names(inputs.values()):
            raise DataError(
                f"{file}: no column is left for the features; all are labels or weights"
            )
        plan = cls(inputs, labels, weights, schema, file)
        if missing := [name for name in plan.columns if name not in counts]:
            raise DataError(f"{file}: no column {missing[0]!r}; {suggest(missing[0], counts)}")
        for name in _names(
            c for c in (*inputs.values(), *labels.values()) if not isinstance(c, str)
        ):
            if not _is_number(schema.field(name).type):
                raise DataError(
                    f"{file}: the column {name!r} is {schema.field(name).type}, which cannot be joined "
                    "with columns of numbers; choose others with columns=[…]"
                )
        return plan

    @property
    def columns(self) -> list[str]:
        """Every column that is read."""
        groups = chain(self.inputs.values(), self.labels.values(), self.weights.values())
        return list(dict.fromkeys(_names(groups)))

    def check(self, schema: Any, file: Path) -> None:
        """Refuse a file whose columns differ from those of the first.

        Raises:
            DataError: a column is missing, duplicate or of another type; names both files.
        """
        if schema.equals(self.schema):
            return
        counts = Counter(schema.names)
        for name in self.columns:
            if counts[name] != 1:
                raise DataError(
                    f"{file}: no column {name!r}, which {self.file} has; "
                    f"{suggest(name, schema.names)}"
                )
            kind, first_kind = schema.field(name).type, self.schema.field(name).type
            if kind != first_kind:
                raise DataError(
                    f"{file}: the column {name!r} is {kind}, in {self.file} it is {first_kind}; write all "
                    "files with one schema"
                )

    def read(self, batch: Any, where: str) -> Columns:
        """Convert some rows of a table to arrays.

        Raises:
            DataError: a value is missing, lists differ in length, or arrays cannot have the type.
        """

        def one(what: str | tuple[str, ...]) -> Array:
            if isinstance(what, str):
                return _array(batch.column(what), f"{where}, column {what!r}")
            arrays = [_array(batch.column(name), f"{where}, column {name!r}") for name in what]
            return _stack(arrays)

        return Columns(
            inputs={name: one(what) for name, what in self.inputs.items()},
            labels={name: one(what) for name, what in self.labels.items()},
            weights={name: one(what) for name, what in self.weights.items()},
        )


def _names(groups: Iterable[str | tuple[str, ...]]) -> list[str]:
    return [name for group in groups for name in ((group,) if isinstance(group, str) else group)]


def _side_by_side(
    names: Sequence[str], schema: Any, input: str
) -> dict[str, str | tuple[str, ...]]:
    """The inputs: columns of numbers side by side are one, and each column of lists is another."""
    known = set(schema.names)
    lists = [n for n in names if n in known and _is_list(schema.field(n).type)]
    flat = tuple(n for n in names if n not in lists)
    if len(lists) == 1 and not flat:
        return {input: lists[0]}
    return {**({input: flat} if flat else {}), **{n: n for n in lists}}


def _is_number(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or hasattr(kind, "storage_type")
    )


def _stack(arrays: Sequence[Array]) -> Array:
    """Columns side by side; some rows are copied at a time, so that the result stays in the cache."""
    rows = len(arrays[0])
    out = np.empty((rows, len(arrays)), np.result_type(*arrays))
    step = max(1, 2**20 // max(1, out.itemsize * len(arrays)))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for k, array in enumerate(arrays):
            out[start:stop, k] = array[start:stop]
    return out


def _check_strings(values: Any, rows: int, where: str) -> None:
    """Refuse strings that take much memory once each row has the length of the longest one.

    Raises:
        DataError: says how long it is.
    """
    types = pyarrow().types
    if not types.is_string(values.type) and not types.is_large_string(values.type):
        return
    import pyarrow.compute as compute

    longest = compute.max(compute.binary_length(values)).as_py() or 0
    if longest * rows > _STRINGS:
        raise DataError(
            f"{where}: a string has {longest} bytes; {rows} rows of that length take more than {_STRINGS} "
            "bytes; make it shorter"
        )


def _array(values: Any, where: str) -> Array:
    """An array of arrow as an array of numpy."""
    package = pyarrow()
    types, kind = package.types, values.type
    if values.null_count:
        row = values.is_null().index(True).as_py()
        raise DataError(f"{where}: row {row} has no value; fill missing values, or drop such rows")
    if isinstance(values, package.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(kind, package.FixedShapeTensorType):
        return np.asarray(values.to_numpy_ndarray())
    if hasattr(kind, "storage_type"):
        return _array(values.storage, where)
    if types.is_dictionary(kind):
        _check_strings(values.dictionary, len(values), where)
        return _array(values.dictionary_decode(), where)
    if types.is_fixed_size_list(kind):
        flat = _array(values.flatten(), where)
        return flat.reshape(len(values), kind.list_size, *flat.shape[1:])
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = np.asarray(values.value_lengths())
        if len(lengths) and (lengths != lengths[0]).any():
            row = int((lengths != lengths[0]).argmax())
            raise DataError(
                f"{where}: the list of row {row} has {lengths[row]} values, that of row 0 has "
                f"{lengths[0]}; all lists must have the same length"
            )
        flat = _array(values.flatten(), where)
        return flat.reshape(len(values), int(lengths[0]) if len(lengths) else 0, *flat.shape[1:])
    if _is_number(kind):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    if types.is_string(kind) or types.is_large_string(kind):
        _check_strings(values, len(values), where)
        return np.array(values.to_pylist() or [""])[: len(values)]
    raise DataError(
        f"{where}: values of type {kind}; expected numbers, strings, or lists of numbers"
    )
