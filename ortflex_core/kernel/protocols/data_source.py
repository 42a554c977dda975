"""Data sources: data by name."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import attrs

from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.training.data.columns import Columns
    from ortflex_core.training.data.iterables import Batches
    from ortflex_core.training.data.pieces import Pieces


@attrs.frozen(kw_only=True)
class DataSource(Component, abc.ABC):
    """A data source reads the data of a recipe, usually from a file or a folder."""

    whole_folder: ClassVar[bool] = False
    """Whether its path is a folder whose files belong together, so that a single file is not valid."""

    def found(self, like: DataSource | None = None) -> DataSource:
        """The same source with what it finds, which run folders keep; ``like`` is that of the training."""
        return self

    def proposed(self) -> DataSource:
        """The source that ``ortflex init`` writes: with what it finds and guesses."""
        return self.found()

    @abc.abstractmethod
    def load(self) -> Columns | Pieces | Batches:
        """Open the source; data that can be memory-mapped or read lazily is not read yet.

        Columns are arrays by name; Pieces are read one by one in every epoch; Batches are read from
        an iterable.

        Raises:
            DataError: the source is missing, broken, or lacks requested columns.
        """
