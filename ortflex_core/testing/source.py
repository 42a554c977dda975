"""The kit of data sources."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Columns, DataError, DataSource, Pieces
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing.component import ReferenceKit
from ortflex_core.testing.running import require
from ortflex_core.training.data.pieces import concat_columns, head, rows_of

STARTS = 40
"""The number of rows of a piece from which the kit starts to read."""


class DataSourceKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference`` are the arrays that the source must return: inputs, labels and weights, by their names.
    """

    kind: ClassVar[str] = "data"
    has_formula: ClassVar[bool] = False

    def test_columns(self, component: DataSource, reference: Arrays) -> None:
        """The columns have the reference's names, shapes and values."""
        columns = _columns(component)
        got = dict(columns)
        names, wanted = sorted(got), sorted(reference)
        require(names == wanted, f"columns {names}, expected {wanted}")
        for name, array in reference.items():
            shape = got[name].shape
            text = f"{name!r} has the shape {shape}, expected {array.shape}"
            require(shape == array.shape, text)
            if array.dtype.kind in "fiub":
                np.testing.assert_allclose(got[name], array, rtol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(np.asarray(got[name]), array, err_msg=name)
        require(columns.labels, "no column is a label, so nothing can be trained")

    def test_rows(self, component: DataSource) -> None:
        """Any rows can be taken, in any order."""
        columns = _columns(component)
        rows = np.array([columns.rows - 1, 0, 0])
        taken = dict(columns.take(rows))
        for name, array in columns:
            np.testing.assert_array_equal(taken[name], np.asarray(array)[rows], err_msg=name)

    def test_pieces(self, component: DataSource) -> None:
        """A piece can be read from any row on, at which a resumed run continues."""
        loaded = component.load()
        if not isinstance(loaded, Pieces):
            pytest.skip("all rows are read at once")
        require(len(loaded.sizes) > 0, "the source has no pieces")
        for piece, size in enumerate(loaded.sizes):
            whole = dict(concat_columns(list(loaded.read(piece))))
            rows = {len(array) for array in whole.values()}
            text = f"piece {piece} has {rows} rows, but its declared size is {size}"
            require(rows == {size}, text)
            starts = np.unique(np.linspace(0, size - 1, min(size, STARTS)).astype(int))
            for start in starts.tolist():
                part = dict(concat_columns(list(loaded.read(piece, start))))
                for name, array in whole.items():
                    what = f"{name}: piece {piece} from row {start}"
                    np.testing.assert_array_equal(part[name], array[start:], err_msg=what)

    def test_determinism(self, component: DataSource) -> None:
        """A source that is opened twice has the same rows in the same order, for resumed trainings."""
        first, second = dict(_columns(component)), dict(_columns(component))
        for name, array in first.items():
            equal = np.array_equal(np.asarray(array), np.asarray(second[name]))
            require(equal, f"{name!r}: the rows differ between two openings")

    def test_missing_file(self, component: DataSource) -> None:
        """A path that does not exist is a DataError that names the path."""
        if "path" not in {f.name for f in attrs.fields(type(component))}:
            pytest.skip("the source has no path")
        with pytest.raises(DataError, match="no-such-place"):
            attrs.evolve(component, path="no-such-place").load()  # type: ignore[call-arg]


def _columns(source: DataSource) -> Columns:
    """All rows of a source, also if it is read in pieces."""
    loaded = source.load()
    if isinstance(loaded, Pieces):
        return head(loaded, rows_of(loaded))
    require(isinstance(loaded, Columns), f"load returns {loaded!r}, expected Columns or Pieces")
    assert isinstance(loaded, Columns)
    return loaded
