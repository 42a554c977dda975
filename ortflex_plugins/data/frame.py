"""Frames of pandas, polars and pyarrow as data, with categories, dates, missing values and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Columns, DataError, DataSource, satisfying, setting, suggest
from ortflex_plugins.data._columns import DEFAULT_WEIGHT, ListTableSource
from ortflex_plugins.data._features import Features, check_kinds, is_missing, kinds_of, padded

_frame = satisfying(
    "must be a frame of pandas, polars or pyarrow, or a mapping",
    lambda v: isinstance(v, Mapping) or hasattr(v, "columns"),
    TypeError,
)


@attrs.frozen(kw_only=True, eq=False)
class Frame(ListTableSource):
    """A frame in memory, or a mapping of lists and arrays, read as a ``csv`` file is.

    Numbers, categories, booleans and dates are side by side in the float32 input ``input``; a column of
    lists, and one that is a ``"string"``, is an input with its own name, or ``input`` if it is alone.

    Raises:
        DataError: a column does not exist; a value is missing, is no number, or lists differ in length,
            with row and column.

    >>> frame = {"city": ["Rom", "Bern"], "size": [1.5, None], "y": [0, 1]}
    >>> source = Frame(frame=frame, columns={"city": "category"}, fill="median")
    >>> source.load().inputs["X"].tolist()
    [[1.0, 1.5], [0.0, 1.5]]
    """

    name: ClassVar[str] = "frame"

    frame: Any = setting(converter=lambda frame: frame, validator=_frame, help="the frame")
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = setting(
        default=None,
        validator=check_kinds,
        help="the columns of features, or what columns are, as {city = 'category'}; None: all others",
    )

    def load(self) -> Columns:
        known = self._features
        side: list[str] = []
        own: list[str] = []
        for name in self._names:
            first = next((v for v in self._cells(name) if not is_missing(v)), None)
            listed = isinstance(first, list | tuple | np.ndarray)
            (own if listed or known.kind(name) == "string" else side).append(name)
        inputs = {}
        if side:
            inputs[self.input] = np.stack([self._column(n, known) for n in side], axis=1)
        for name in own:
            inputs[self.input if not side and len(own) == 1 else name] = self._column(name, known)
        target = {"y": self.target} if isinstance(self.target, str) else self.target
        if isinstance(target, Mapping):
            labels = {label: self._labels(column) for label, column in target.items()}
        else:
            labels = {"y": np.stack([self._column(n, Features({}, None)) for n in target], axis=1)}
        weights = {}
        if self.weight is not None:
            weights = {DEFAULT_WEIGHT: self._column(self.weight, Features({}, None))}
        return Columns(inputs=inputs, labels=labels, weights=weights)

    def found(self, like: DataSource | None = None) -> Frame:
        """With the names of categories, the medians and the length of lists."""
        theirs = Features(kinds_of(like.columns), like.fill) if isinstance(like, Frame) else None
        known = self._features.found(self._names, self._cells, like=theirs)
        length = self.length or (like.length if isinstance(like, Frame) else None)
        if self.pad is not None and length is None:
            cells = (v for name in self._names for v in self._cells(name))
            lengths = [len(v) for v in cells if isinstance(v, list | tuple | np.ndarray)]
            length = max(lengths, default=None)
        columns = known.kinds if isinstance(self.columns, Mapping) else self.columns
        return attrs.evolve(self, columns=columns, fill=known.fill, length=length)

    @property
    def _features(self) -> Features:
        return Features(kinds_of(self.columns), self.fill)

    @property
    def _header(self) -> list[str]:
        names = self.frame
        if not isinstance(names, Mapping):
            names = getattr(names, "column_names", names.columns)  # pyarrow has both
        return [str(name) for name in names]

    @property
    def _names(self) -> list[str]:
        """The columns of features."""
        unused = self._features.unused
        for name in self._features.kinds:
            if name not in unused:
                self._check(name)
        if self.columns is not None and not isinstance(self.columns, Mapping):
            return list(self.columns)
        taken = {self.weight, *self._targets, *unused}
        names = [name for name in self._header if name not in taken]
        if not names:
            raise DataError("the frame: no column is left for the features")
        return names

    def _check(self, name: str) -> None:
        if name not in self._header:
            raise DataError(f"the frame has no column {name!r}; {suggest(name, self._header)}")

    def _cells(self, name: str) -> list[Any]:
        """The values of a column as objects of Python; None where one is missing."""
        self._check(name)
        column = self.frame[name]
        for method in ("to_pylist", "to_list", "tolist"):
            if hasattr(column, method):
                values = getattr(column, method)()
                break
        else:
            values = list(column)
        # pandas.NA and NaT are equal to nothing, not even to themselves.
        return [None if _is_nothing(value) else value for value in values]

    def _column(self, name: str, known: Features) -> Any:
        cells = self._cells(name)
        if any(isinstance(value, list | tuple | np.ndarray) for value in cells):
            return padded(cells, self.pad, self.length, f"the frame, column {name!r}")
        return known.encode(name, cells, "the frame")

    def _labels(self, name: str) -> Any:
        """Class names, whole numbers or numbers as they are."""
        cells = self._cells(name)
        if None in cells:
            raise DataError(
                f"the frame, row {cells.index(None)}, column {name!r}: the label is missing"
            )
        return np.array(cells)


def _is_nothing(value: Any) -> bool:
    if isinstance(value, list | tuple | np.ndarray):
        return False
    return is_missing(value) or type(value).__name__ in ("NAType", "NaTType")
