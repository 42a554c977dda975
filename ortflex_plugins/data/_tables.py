"""Shared by parquet and arrow files: the roles of columns, and their values as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, Columns, DataError, install_command, suggest
from ortflex_plugins.data._columns import DEFAULT_WEIGHT
from ortflex_plugins.data._features import Features, Fill, Kind, is_kind

_STRINGS = 2**28
"""The largest number of bytes of strings that are read together."""
Target = str | Sequence[str] | Mapping[str, str]
Chosen = Sequence[str] | Mapping[str, str | Sequence[str]] | None
"""Columns of features; ``{input: column or columns}``; or what columns are, ``{column: kind}``."""


@attrs.frozen
class Padding:
    """What fills lists that are shorter than ``length``; None for an error."""

    value: float | None = None
    length: int | None = None


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
            f"{install_command('parquet')}"
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
    known: Features
    padding: Padding

    @classmethod
    def of(
        cls,
        schema: Any,
        file: Path,
        target: Target,
        weight: str | None,
        columns: Chosen,
        input: str,
        fill: Fill = None,
        padding: Padding = Padding(),
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
        given = columns if isinstance(columns, Mapping) else {}
        kinds = {name: what for name, what in given.items() if _says_kind(what, counts)}
        inputs = {
            name: what if isinstance(what, str) else tuple(what)
            for name, what in given.items()
            if name not in kinds
        }
        if not inputs:
            listed = columns is not None and not isinstance(columns, Mapping)
            taken |= Features(kinds, None).unused
            features = list(columns or ()) if listed else [n for n in counts if n not in taken]
            inputs = _side_by_side(features, schema, input, kinds)
        if not _names(inputs.values()):
            raise DataError(
                f"{file}: no column is left for the features; all are labels or weights"
            )
        plan = cls(inputs, labels, weights, schema, file, Features(kinds, fill), padding)
        used = [name for name, kind in kinds.items() if kind != "unused"]
        if missing := [name for name in (*plan.columns, *used) if name not in counts]:
            raise DataError(f"{file}: no column {missing[0]!r}; {suggest(missing[0], counts)}")
        for name in _names(
            c for c in (*inputs.values(), *labels.values()) if not isinstance(c, str)
        ):
            kind = schema.field(name).type
            if not _is_number(kind) and name not in kinds:
                what = "year" if pyarrow().types.is_temporal(kind) else "category"
                raise DataError(
                    f"{file}: the column {name!r} is {kind}, which cannot be joined with columns of "
                    f"numbers; columns = {{ {name} = {what!r} }} makes it numbers, {name} = 'unused' "
                    "leaves it out"
                )
        return plan

    @property
    def features(self) -> list[str]:
        """The columns of the inputs."""
        return list(dict.fromkeys(_names(self.inputs.values())))

    @property
    def lists(self) -> list[str]:
        """The columns of the inputs that are lists."""
        return [n for n in self.features if _is_list(self.schema.field(n).type)]

    @property
    def unknown(self) -> list[str]:
        """The columns whose values have to be looked at: for categories, medians, the longest list."""
        ragged = self.padding.value is not None and self.padding.length is None
        lists = self.lists
        seen = [n for n in self.features if n not in lists and self.known.unknown(n)]
        return [*seen, *(lists if ragged else [])]

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

        def feature(name: str) -> Array:
            values = batch.column(name)
            known, kind = self.known, self.known.kind(name)
            listed = _is_list(values.type)
            told = name in known.kinds or known.fill_of(name) is not None
            if kind != "number" or (told and not listed):
                return known.encode(name, cells(values), where)
            return _array(values, f"{where}, column {name!r}", self.padding)

        def one(what: str | tuple[str, ...]) -> Array:
            return feature(what) if isinstance(what, str) else _stack([feature(n) for n in what])

        def plain(what: str | tuple[str, ...]) -> Array:
            names = (what,) if isinstance(what, str) else what
            arrays = [_array(batch.column(name), f"{where}, column {name!r}") for name in names]
            return arrays[0] if isinstance(what, str) else _stack(arrays)

        return Columns(
            inputs={name: one(what) for name, what in self.inputs.items()},
            labels={name: plain(what) for name, what in self.labels.items()},
            weights={name: plain(what) for name, what in self.weights.items()},
        )


def _says_kind(what: str | Sequence[str], columns: Collection[str]) -> bool:
    """Whether a value of ``columns`` says what a column is; names of columns make an input."""
    names = {what} if isinstance(what, str) else {*what}
    return is_kind(what) and not names <= {*columns}


def cells(values: Any) -> list[Any]:
    """The values of a column of arrow as objects of Python."""
    return list(values.to_pylist())


def lengths_of(values: Any) -> list[int]:
    """The numbers of values in the lists of a column."""
    kind = values.type
    if hasattr(kind, "storage_type"):
        return [0]  # tensors of one shape
    if pyarrow().types.is_fixed_size_list(kind):
        return [int(kind.list_size)]
    found: list[int] = values.drop_null().value_lengths().to_pylist()
    return found


def odd_kind(kind: Any) -> str:
    """What a column of a type that is no number may be; "" for numbers and lists."""
    types = pyarrow().types
    if types.is_temporal(kind):
        return "year"
    texts = types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)
    return "category" if texts else ""


def _names(groups: Iterable[str | tuple[str, ...]]) -> list[str]:
    return [name for group in groups for name in ((group,) if isinstance(group, str) else group)]


def _side_by_side(
    names: Sequence[str], schema: Any, input: str, kinds: Mapping[str, Kind]
) -> dict[str, str | tuple[str, ...]]:
    """The inputs: columns of numbers side by side are one, each column of lists or strings is another."""
    known = set(schema.names)
    lists = [
        n
        for n in names
        if n in known and (kinds.get(n) == "string" or _is_list(schema.field(n).type))
    ]
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
    """Refuse strings that take much memory once each row has the length of the longest one."""
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


def _padded(values: Any, lengths: Array, where: str, padding: Padding) -> Array:
    """Lists of different lengths as one array, padded at the end."""
    length = int(lengths.max(initial=0)) if padding.length is None else padding.length
    if (long := np.flatnonzero(lengths > length)).size:
        row = int(long[0])
        raise DataError(
            f"{where}: the list of row {row} has {lengths[row]} values, more than length = {length}; set a "
            "larger length, or cut the lists"
        )
    flat = _array(values.flatten(), where)
    if flat.ndim > 1:
        raise DataError(f"{where}: pad fills lists of numbers, not lists of lists")
    value = padding.value or 0
    whole = flat.dtype.kind != "f" and value == int(value)
    kind = flat.dtype if whole else np.result_type(flat.dtype, np.float32)
    out = np.full((len(lengths), length), value, kind)
    out[np.arange(length) < lengths[:, None]] = flat
    return out


def _array(values: Any, where: str, padding: Padding = Padding()) -> Array:
    """An array of arrow as an array of numpy."""
    package = pyarrow()
    types, kind = package.types, values.type
    if values.null_count:
        row = values.is_null().index(True).as_py()
        raise DataError(
            f"{where}: row {row} has no value; fill = 'median' or a number replaces missing features; or "
            "drop such rows"
        )
    if isinstance(values, package.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(kind, package.FixedShapeTensorType):
        return np.asarray(values.to_numpy_ndarray())
    if hasattr(kind, "storage_type"):
        return _array(values.storage, where, padding)
    if types.is_dictionary(kind):
        _check_strings(values.dictionary, len(values), where)
        return _array(values.dictionary_decode(), where)
    if types.is_fixed_size_list(kind):
        flat = _array(values.flatten(), where)
        return flat.reshape(len(values), kind.list_size, *flat.shape[1:])
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = np.asarray(values.value_lengths())
        if padding.value is not None:
            return _padded(values, lengths, where, padding)
        if len(lengths) and (lengths != lengths[0]).any():
            row = int((lengths != lengths[0]).argmax())
            raise DataError(
                f"{where}: the list of row {row} has {lengths[row]} values, that of row 0 has "
                f"{lengths[0]}; pad = 0 fills the shorter lists with zeros"
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
