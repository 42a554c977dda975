"""Derived columns of data that are read in pieces: all columns of the step, in stores of rows.

The pieces are read once, in their order. What the step reads (derived columns, other inputs, labels,
sample weights) goes into stores of consecutive rows: one in memory, or files of bounded size. The epochs
read the stores in the order in which they would have read the pieces, so the training is the same.

Each file has a key of its own: a killed run finds the files that were complete, and only a damaged one is
computed again. Several processes compute different stores. On one computer they share the files; on
several they exchange the rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing

import attrs
import numpy as np

from ortflex_core.kernel.digests import of_array
from ortflex_core.kernel.errors import DataError, OrtflexError
from ortflex_core.kernel.types import Array, shape_text
from ortflex_core.training.data import column_files
from ortflex_core.training.data.column_files import layout_of
from ortflex_core.training.data.derived import Derivation
from ortflex_core.training.data.pieces import Conversion, PieceBatches, Pieces, head, rows_of
from ortflex_core.training.data.prefetch import Prefetch
from ortflex_core.training.data.shuffle_buffer import Buffer, Layout, Part, fill_buffers
from ortflex_core.training.engines.peers import pack, unpack

_log = logging.getLogger("ortflex")
STORE = 64 * 2**20
"""The bytes of a file, unless there would be more than ``MOST`` files."""
MOST = 64
_READ = 4 * 2**20
"""The bytes that are read together in an epoch."""


@attrs.frozen(kw_only=True, eq=False)
class Stores:
    """All rows of some pieces, in the columns that the graphs read.

    Attributes:
        arrays: the columns of each store.
        rows: the rows of each store; the last one may have fewer.
        starts: the number of the first row of each piece.
        denominators: as :class:`ortflex_core.training.data.pieces.Conversion` has them.
    """

    arrays: Sequence[Mapping[str, Array]]
    rows: int
    starts: Array
    denominators: Conversion

    def parts(self, layout: Layout, row: int, end: int) -> Iterator[Part]:
        """Rows of an epoch, from number ``row`` on; as :meth:`PieceBatches.parts` reads them."""
        width = sum(array[:1].nbytes for array in self.arrays[0].values())
        count = max(1, _READ // max(1, width))
        for start in range(row, end, count):
            numbers = np.arange(start, min(end, start + count))
            places = np.searchsorted(layout.ends, numbers, side="right")
            before = np.where(places > 0, layout.ends[places - 1], 0)
            own = self.starts[layout.pieces[places]] + numbers - before
            columns = self._take(own)
            yield Part(
                columns=columns,
                denominators=self.denominators.denominators(columns),
                rows=len(own),
                where=f"rows {start} to {numbers[-1]} of the epoch",
            )

    def _take(self, rows: Array) -> dict[str, Array]:
        places = rows // self.rows
        found = np.unique(places).tolist()
        if len(found) == 1:
            own = rows - found[0] * self.rows
            return {name: array[own] for name, array in self.arrays[found[0]].items()}
        out = {
            name: np.empty((len(rows), *array.shape[1:]), array.dtype)
            for name, array in self.arrays[0].items()
        }
        for place in found:
            chosen = places == place
            own = rows[chosen] - place * self.rows
            for name, array in self.arrays[place].items():
                out[name][chosen] = array[own]
        return out


def store(
    derivation: Derivation,
    pieces: Pieces,
    conversion: Conversion,
    labels: str,
    *,
    needed: bool = True,
) -> Stores | None:
    """Compute the columns of all rows, or find those that an earlier run computed.

    If they are not ``needed``, the result is None if ``"auto"`` has not the room.

    Raises:
        DataError: the rows cannot be read, have other shapes than the first ones, or do not fit the
            model; or the memory or the disk has not enough room.
    """
    storing = _Storing.of(derivation, pieces, conversion, labels)
    if not needed and (reason := storing.too_many):
        _log.info("cache: rows are read and computed again for each validation, because %s", reason)
        return None
    return storing.run()


@attrs.frozen(kw_only=True, eq=False)
class _Storing:
    """The work of :func:`store`.

    ``first`` has some rows of each column, ``size`` is the number of rows that are computed together,
    ``spans`` are the rows of each store, and the names of their files start with ``begin``.
    """

    derivation: Derivation
    pieces: Pieces
    conversion: Conversion
    first: Mapping[str, Array]
    size: int
    spans: Sequence[range]
    on_disk: bool
    begin: str
    facts: str

    @classmethod
    def of(
        cls, derivation: Derivation, pieces: Pieces, conversion: Conversion, labels: str
    ) -> _Storing:
        rows = rows_of(pieces)
        few = head(pieces, derivation.fixed or 2)
        given = conversion.part(few, pieces.place(0)).columns
        size = derivation.at_once({n: given[n] for n in derivation.taken}, few.rows)
        first = derivation.of_batch(given)
        layout = layout_of(first, rows)
        on_disk = derivation.on_disk(layout)
        count = rows
        if on_disk:
            width = max(1, column_files.bytes_of(layout) // rows)
            count = max(1, STORE // width, -(-rows // MOST))
            count = -(-count // size) * size
        # Without a digest nothing says that these are the rows of another run.
        known = pieces.digest or secrets.token_hex(16)
        if derivation.peers is not None and not pieces.digest:
            known = derivation.peers.values("name of columns", known)[0]
        begin = derivation.name_of(known)
        rows_seen = sorted((name, of_array(array)) for name, array in {**given, **first}.items())
        columns = [(name, str(a.dtype), a.shape[1:]) for name, a in first.items()]
        facts = repr(
            (known, derivation.sessions, rows_seen, columns, labels, size, list(pieces.sizes))
        )
        return cls(
            derivation=derivation,
            pieces=pieces,
            conversion=conversion,
            first=first,
            size=size,
            spans=[range(k, min(rows, k + count)) for k in range(0, rows, count)],
            on_disk=on_disk,
            begin=begin,
            facts=hashlib.sha256(facts.encode()).hexdigest(),
        )

    def run(self) -> Stores:
        arrays: dict[int, Mapping[str, Array]] = {}
        for k in range(len(self.spans)):
            found = self._find(k)
            if found is not None:
                arrays[k] = found
        missing = [k for k in range(len(self.spans)) if k not in arrays]
        peers = self.derivation.peers
        if peers is not None:
            given = peers.values("columns to compute", missing)
            missing = sorted({k for one in given for k in one})
        if missing:
            self._check_room([k for k in missing if k not in arrays])
            arrays |= self._compute(missing)
        sizes = np.asarray(self.pieces.sizes, np.int64)
        return Stores(
            arrays=[arrays[k] for k in range(len(self.spans))],
            rows=len(self.spans[0]),
            starts=np.cumsum(sizes) - sizes,
            denominators=self.conversion,
        )

    @property
    def too_many(self) -> str:
        """Why ``"auto"`` does not compute the columns; "" if it does."""
        layout = layout_of(self.first, rows_of(self.pieces))
        return self.derivation.too_many(column_files.bytes_of(layout), self.pieces.digest)

    def _key(self, k: int) -> str:
        facts = f"{self.facts} {self.spans[k]}"
        return self.begin + hashlib.sha256(facts.encode()).hexdigest()[:24]

    def _find(self, k: int) -> Mapping[str, Array] | None:
        files = self.derivation.files
        if self.on_disk:
            return files.find(self._key(k), layout_of(self.first, len(self.spans[k])))
        return files.recall(self._key(k))

    def _new(self, k: int, stack: contextlib.ExitStack) -> dict[str, Array]:
        layout = layout_of(self.first, len(self.spans[k]))
        return self.derivation.files.new(self._key(k), layout, stack, on_disk=self.on_disk)

    def _check_room(self, missing: Sequence[int]) -> None:
        """Refuse columns that do not fit, before the first of them is computed."""
        layout = layout_of(self.first, sum(len(self.spans[k]) for k in missing))
        if self.on_disk:
            column_files.check_room(layout)
        else:
            self.derivation.check_memory(layout)

    def _compute(self, missing: Sequence[int]) -> dict[int, Mapping[str, Array]]:
        """The stores that any process lacks; each process computes the next one in turn."""
        peers = self.derivation.peers
        rank, ranks = (0, 1) if peers is None else (peers.rank, peers.size)
        shared = peers is not None and self._is_shared()
        out: dict[int, Mapping[str, Array]] = {}
        done, total = 0, sum(len(self.spans[k]) for k in missing)
        with self.derivation.counting(total) as show:
            for first in range(0, len(missing), ranks):
                group = missing[first : first + ranks]
                own = group[rank] if rank < len(group) else None
                wanted = group if not shared else [k for k in group if k == own]
                with contextlib.ExitStack() as stack:
                    held = {k: self._new(k, stack) for k in wanted}
                    for rows in self._rounds(group, own, held, shared):
                        show(done + rows)
                done += sum(len(self.spans[k]) for k in group)
                out |= held
        if shared:
            assert peers is not None
            peers.values("columns are complete", True)
            out |= {k: self._of_another(k) for k in missing if k not in out}
        return out

    def _is_shared(self) -> bool:
        """Whether all processes write the same files to one folder.

        Processes that read copies of the data have other files.
        """
        peers = self.derivation.peers
        assert peers is not None
        if not self.on_disk or peers.neighbors < peers.size:
            return False
        place = f"{column_files.identity()} {self.facts}"
        return len(set(peers.values("folder of columns", place))) == 1

    def _of_another(self, k: int) -> Mapping[str, Array]:
        """A store that another process of this computer wrote."""
        found = self._find(k)
        if found is None:
            raise OrtflexError(
                f"the derived columns of the rows {self.spans[k].start} to {self.spans[k][-1]}, which "
                "another process wrote, are not in the folder for temporary files; start the training "
                "again, or pass cache=False"
            )
        return found

    def _rounds(
        self,
        group: Sequence[int],
        own: int | None,
        held: Mapping[int, Mapping[str, Array]],
        shared: bool,
    ) -> Iterator[int]:
        """Fill the stores of a group, some rows of each at a time; yields the rows so far."""
        peers = self.derivation.peers
        counts = [-(-len(self.spans[k]) // self.size) for k in group]
        names = list(self.first)
        with closing(self._drawn(own)) as drawn:
            done = 0
            for number in range(max(counts)):
                part = next(drawn, None)
                if own is not None and part is not None:
                    self._write(part, number, own, held[own])
                if peers is not None:
                    payload = np.zeros(0, np.uint8)
                    if part is not None and not shared:
                        payload = pack([part[n] for n in names])
                    given = peers.gather("derived columns", payload)
                    for k, message in zip(group, given, strict=False):  # the last may be few
                        if k != own and len(message):
                            columns = dict(zip(names, unpack(message), strict=True))
                            self._write(columns, number, k, held[k])
                left = [n - number * self.size for n in (len(self.spans[k]) for k in group)]
                done += sum(min(self.size, max(0, n)) for n in left)
                yield done

    def _drawn(self, k: int | None) -> Generator[dict[str, Array]]:
        """The columns of a store, ``size`` rows at a time; a thread reads ahead."""
        if k is None:
            return
        span = self.spans[k]
        reader = PieceBatches(self.pieces, self.conversion, self.size)
        layout = Layout.draw(self.pieces.sizes, None)

        def buffers() -> Iterator[Buffer]:
            parts = reader.parts(layout, span.start, span.stop)
            return fill_buffers(parts, self.size, 0, None)

        ahead = Prefetch(buffers, ahead=2)
        try:
            for buffer in ahead:
                yield self.derivation.of_batch(buffer.part.columns)
        finally:
            ahead.close()

    def _write(
        self, part: Mapping[str, Array], number: int, k: int, out: Mapping[str, Array]
    ) -> None:
        start = number * self.size
        for name, array in part.items():
            if out[name].shape[1:] != array.shape[1:]:
                raise DataError(
                    f"a row of {name!r} has the shape {shape_text(array.shape[1:])} from row "
                    f"{self.spans[k].start + start} on, and {shape_text(out[name].shape[1:])} in the first "
                    "rows, so they cannot be one column; pad the rows, or pass cache=False, which "
                    "computes the whole model in each step"
                )
            out[name][start : start + len(array)] = array
