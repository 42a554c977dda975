"""Derived columns: what the prefix of a model computes from the rows of the data.

They replace the inputs of the model that only the prefix reads. The rows of arrays are computed once,
before the first step (:mod:`ortflex_core.training.data.derived_pieces`: those of pieces); rows that change
in each epoch are computed batch by batch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cached_property
from typing import Any, Literal

import attrs
import numpy as np

from ortflex_core.compiler.problem.description import fed
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs.prefix import Prefix
from ortflex_core.compiler.runtime import memory_limits
from ortflex_core.kernel.batches import Batch, Block, Epoch, Lasting, Source
from ortflex_core.kernel.digests import of_array
from ortflex_core.kernel.errors import DataError, GraphError
from ortflex_core.kernel.types import Array, shape_text
from ortflex_core.training.data import column_files
from ortflex_core.training.data.column_files import (
    MOST_MEMORY,
    ColumnFiles,
    Layout,
    bytes_of,
    layout_of,
)
from ortflex_core.training.data.prefix_session import PrefixSession
from ortflex_core.training.engines.peers import Peers, pack, unpack

Cache = Literal["auto", "memory", "disk", False]
"""Where derived columns are kept; False computes the whole model in every step."""

Counting = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Shows the progress of a number of rows; the function in the context gets the rows so far."""

_AT_ONCE = 1024
"""Rows that are computed together if they are small."""
_SMALL = 2**20
"""The bytes of a tensor of rows that are small together."""
PROBED = 8
"""Rows with which a prefix is tested."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """A prefix in its session: of the trained model, or a teacher.

    Attributes:
        prefix: what is computed.
        session: runs it.
        inputs: the columns of the data by the inputs of the prefix, where names differ.
        columns: the names of the derived columns by tensor, where names differ.
    """

    prefix: Prefix
    session: PrefixSession
    inputs: Mapping[str, str] = attrs.field(factory=dict)
    columns: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def takes(self) -> list[str]:
        """The columns of the data that it reads."""
        return [self.inputs.get(spec.name, spec.name) for spec in self.prefix.takes]

    @property
    def computed(self) -> list[str]:
        """The derived columns."""
        return [self.columns.get(name, name) for name in self.prefix.computed]

    def __call__(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The derived columns of some rows."""
        names = [spec.name for spec in self.prefix.takes]
        inputs = dict(zip(names, (given[n] for n in self.takes), strict=True))
        count = len(next(iter(given.values())))
        label = self.prefix.problem.model.label
        try:
            found = self.session(inputs)
        except GraphError as error:
            # The rows are some of those of the user, so their number says nothing.
            shapes = {n: ("rows", *array.shape[1:]) for n, array in inputs.items()}
            columns = fed(self.prefix.takes, shapes)
            raise DataError(f"{label} cannot run on {columns}: {error}") from error
        for name, array in found.items():
            if array.shape[:1] != (count,):
                raise self.mixed(
                    f"{name!r} has the shape {shape_text(array.shape)} for {count} rows"
                )
        return {self.columns.get(name, name): array for name, array in found.items()}

    def mixed(self, how: str) -> DataError:
        """The error about results that are not functions of a row."""
        label = self.prefix.problem.model.label
        if self.columns:
            return DataError(
                f"the teacher {label} mixes rows, so its results cannot be columns of the data: {how}; "
                "choose another tensor of it (teacher_tensor=), or export it without operators over the "
                "axis of rows"
            )
        return DataError(
            f"the prefix of {label} mixes rows, so its results cannot be columns of the data: {how}; "
            "pass cache=False, which computes the whole model in each step"
        )


@attrs.frozen(kw_only=True, eq=False)
class Derivation:
    """Computes columns from the columns of the data: of the rest of a model, and of teachers.

    Attributes:
        prefix: the part of the trained model that is computed here; None if the engine has all of it.
        parts: the prefix, and the teachers.
        batch_size: the rows that are computed together, unless they are small.
        once: whether the rows of arrays and pieces are computed before the first step.
        counting: shows the progress of a number of rows, given the rows that have been computed.
        cache: where columns that are computed once are kept.
        files: the files of columns that are not kept in memory.
        peers: the processes that share the work on rows that are computed once.
        classes: describes the order of the classes, which labels follow.
    """

    prefix: Prefix | None
    parts: tuple[Part, ...]
    batch_size: int
    once: bool = True
    counting: Counting
    cache: Cache
    files: ColumnFiles
    peers: Peers | None = None
    classes: str = ""

    @cached_property
    def dropped(self) -> frozenset[str]:
        """The inputs of the model that the rest does not read."""
        if self.prefix is None:
            return frozenset()
        kept = {spec.name for spec in self.prefix.columns}
        return frozenset(i.name for i in self.prefix.problem.model.inputs if i.name not in kept)

    @cached_property
    def computed(self) -> list[str]:
        """The columns that are computed here."""
        return [name for part in self.parts for name in part.computed]

    @property
    def reads_strings(self) -> bool:
        """Whether the prefix of the trained model has inputs of strings, which no engine can read."""
        return self.prefix is not None and self.prefix.reads_strings

    def cut(self, problem: Problem) -> Problem:
        """A problem of the trained model without its prefix, if that is computed here."""
        return problem if self.prefix is None else self.prefix.cut(problem)

    def rows(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The derived columns of some rows of the inputs.

        Rows that are fewer than a fixed batch dimension are computed with copies of the last one.
        """
        count = len(next(iter(given.values())))
        if self.fixed is not None and 0 < count < self.fixed:
            rows = np.minimum(np.arange(self.fixed), count - 1)
            given = {name: given[name][rows] for name in self.taken}
        found = {name: array for part in self.parts for name, array in part(given).items()}
        return {name: array[:count] for name, array in found.items()}

    @property
    def taken(self) -> list[str]:
        """The columns of the data that are read here."""
        return list(dict.fromkeys(name for part in self.parts for name in part.takes))

    def of_batch(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """All columns of a batch: computed, passed on, labels and sample weights."""
        return self._kept(given) | self.rows(given)

    def _kept(self, given: Mapping[str, Array]) -> dict[str, Array]:
        return {name: array for name, array in given.items() if name not in self.dropped}

    def of_all(self, given: Mapping[str, Array]) -> Lasting:
        """All columns of arrays, computed at once; several processes share the work.

        Raises:
            DataError: as :meth:`rows`; a column has another shape in another part of the rows; or the
                disk has not enough room.
        """
        inputs = {name: given[name] for name in self.taken}
        count = len(next(iter(inputs.values())))
        size = self.at_once(inputs, count)
        few = self.rows({n: a[: 2 if self.fixed is None else size] for n, a in inputs.items()})
        layout = layout_of(few, count)
        with contextlib.ExitStack() as stack:
            complete, out = self._room(layout, inputs, size, stack)
            if not complete:
                show = stack.enter_context(self.counting(count))
                parts = self._parts(inputs, range(0, count, size), size)
                for start, part in stack.enter_context(closing(parts)):
                    self._write(part, start, out)
                    show(min(count, start + size))
        return Lasting(self._kept(given) | out)

    def _write(self, part: Mapping[str, Array], start: int, out: Mapping[str, Array]) -> None:
        for name, array in part.items():
            if out[name].shape[1:] != array.shape[1:]:
                raise self._mixed(
                    name,
                    f"a row of {name!r} has the shape {shape_text(array.shape[1:])} from row {start} "
                    f"on, and {shape_text(out[name].shape[1:])} in the first rows",
                )
            out[name][start : start + len(array)] = array

    def _room(
        self, layout: Layout, inputs: Mapping[str, Array], size: int, stack: contextlib.ExitStack
    ) -> tuple[bool, dict[str, Array]]:
        """Arrays for the columns, and whether they have their values already."""
        on_disk = self.on_disk(layout)
        key = self._key(layout, inputs, size)
        kept = self.files.find(key, layout) if on_disk else self.files.recall(key)
        if self.peers is not None and self.peers.any("columns to compute", kept is None):
            kept = None
        if kept is not None:
            return True, kept
        if not on_disk:
            self.check_memory(layout)
        return False, self.files.new(key, layout, stack, on_disk=on_disk)

    def on_disk(self, layout: Layout) -> bool:
        """Whether the columns are kept in files."""
        return self.cache == "disk" or (self.cache == "auto" and bytes_of(layout) > MOST_MEMORY)

    def too_many(self, size: int, digest: str) -> str:
        """Why ``"auto"`` does not compute columns of that many bytes from some pieces; "" if it does.

        ``digest`` is that of the pieces. All processes get the same answer.
        """
        if self.cache != "auto":
            return ""
        reasons = [column_files.too_many(size, self.name_of(digest))]
        if self.peers is not None:
            reasons = self.peers.values("room for columns", reasons[0])
        return next(filter(None, reasons), "")

    def name_of(self, digest: str) -> str:
        """How the names of the files of some pieces begin; "" if the pieces have no digest."""
        facts = repr((digest, self.sessions)).encode()
        return hashlib.sha256(facts).hexdigest()[:8] if digest else ""

    @property
    def sessions(self) -> list[tuple[str, list[str]]]:
        """What computes the columns, and from which columns of the data."""
        return [(part.session.digest, part.takes) for part in self.parts]

    def check_memory(self, layout: Layout) -> None:
        """Refuse columns that do not fit into memory."""
        room = memory_limits.available()
        if room is not None and bytes_of(layout) > room:
            columns = ", ".join(f"{name} {shape_text(c.shape)}" for name, c in layout.items())
            raise DataError(
                f"cache={self.cache!r}: the derived columns ({columns}) need "
                f"{bytes_of(layout) / 1e9:.2f} GB, but this process can get {room / 1e9:.2f} GB of memory; "
                "pass cache='disk' or cache=False"
            )

    def _key(self, layout: Layout, inputs: Mapping[str, Array], size: int) -> str:
        """A digest of everything that the bits of the columns depend on."""
        columns = {n: of_array(a) for n, a in inputs.items()}
        facts = repr((self.sessions, sorted(columns.items()), list(layout), size))
        return hashlib.sha256(facts.encode()).hexdigest()[:32]

    def _parts(
        self, inputs: Mapping[str, Array], starts: range, size: int
    ) -> Generator[tuple[int, Mapping[str, Array]]]:
        """The computed columns of consecutive rows, and the number of the first of them."""

        def compute(start: int) -> dict[str, Array]:
            return self.rows({n: array[start : start + size] for n, array in inputs.items()})

        if self.peers is None:
            yield from ((start, compute(start)) for start in starts)
            return
        names = self.computed
        for first, own, present in self.peers.rounds(len(starts)):
            payload = np.zeros(0, np.uint8)
            if own is not None:
                found = compute(starts[own])
                payload = pack([found[name] for name in names])
            parts = self.peers.gather("derived columns", payload)
            for k in range(present):
                yield starts[first + k], dict(zip(names, unpack(parts[k]), strict=True))

    @cached_property
    def fixed(self) -> int | None:
        """The fixed batch dimension of a model; None without one."""
        found = [part.prefix.problem.model.fixed_batch for part in self.parts]
        return next((fixed[1] for fixed in found if fixed is not None), None)

    def at_once(self, inputs: Mapping[str, Array], count: int) -> int:
        """The number of rows that are computed together."""
        if self.fixed is not None:
            return self.fixed
        width = sum(array.nbytes for array in inputs.values()) // max(1, count)
        width = max(1, width, *(part.prefix.widest for part in self.parts))
        return max(self.batch_size, min(_AT_ONCE, _SMALL // width))

    def probe(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Test on some rows that each row of the columns depends on one row; returns the columns.

        The same rows in another order, and in two parts, have to give the same rows of the columns.
        """
        inputs = {name: given[name] for name in self.taken}
        count = len(next(iter(inputs.values())))
        count = min(count, PROBED) if self.fixed is None else self.fixed
        inputs = {name: array[:count] for name, array in inputs.items()}
        whole = self.rows(inputs)
        turned = self.rows({n: np.ascontiguousarray(a[::-1]) for n, a in inputs.items()})
        others = [{name: array[::-1] for name, array in turned.items()}]
        if self.fixed is None and count > 1:
            half = count // 2
            parts = [
                self.rows({n: a[rows] for n, a in inputs.items()})
                for rows in (slice(half), slice(half, count))
            ]
            for name in whole:
                if parts[0][name].shape[1:] != parts[1][name].shape[1:]:
                    raise self._mixed(name, "the shape of a row depends on the other rows")
            others.append({n: np.concatenate([p[n] for p in parts]) for n in whole})
        for other in others:
            for name, array in whole.items():
                if not _is_same(array, other[name]):
                    raise self._mixed(
                        name,
                        f"rows of {name!r} differ if the rows of the data are in another order or in "
                        "two parts",
                    )
        return whole

    def _mixed(self, name: str, how: str) -> DataError:
        return next(part for part in self.parts if name in part.computed).mixed(how)

    def batches(self, source: Source) -> Source:
        """The batches of a source of the model's inputs, each with its derived columns."""
        return DerivedBatches(source, self)

    def batch(self, batch: Batch) -> Batch:
        """A batch with derived columns, which are computed when they are first read."""
        columns = _Late(self, batch, batch.array)
        return Batch(columns, None, batch.size, batch.denominators)

    def block(self, block: Block) -> Block:
        """Several batches with derived columns."""
        columns = _Late(self, block, lambda name: block.columns[name][block.rows])
        rows = np.arange(len(block.rows))
        return Block(columns, rows, block.size, block.denominators)


class _Late(Mapping[str, Array]):
    """The columns of a batch; the prefix runs when the first of them is read.

    A batch of another process is never read, so its prefix never runs here.
    """

    def __init__(
        self, derivation: Derivation, batch: Batch | Block, array: Callable[[str], Array]
    ) -> None:
        self._names = [
            *(n for n in batch.columns if n not in derivation.dropped),
            *derivation.computed,
        ]
        self._derivation, self.given, self._array = derivation, batch, array

    @cached_property
    def _columns(self) -> dict[str, Array]:
        given = {name: self._array(name) for name in self.given.columns}
        return self._derivation.of_batch(given)

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class DerivedBatches:
    """A source whose batches have derived columns; all other calls go to the inner source."""

    def __init__(self, source: Source, derivation: Derivation) -> None:
        self._source, self._derivation = source, derivation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def sample(self) -> Batch:
        """A batch to inspect."""
        return self._derivation.batch(self._source.sample())

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of the source."""
        drawn = self._source.batches(epoch)
        with closing(drawn):  # type: ignore[type-var]  # generators, all of them
            for group in drawn:
                if isinstance(group, Block):
                    yield self._derivation.block(group)
                else:
                    yield [self._derivation.batch(batch) for batch in group]


def _is_same(array: Array, other: Array) -> bool:
    """Whether two arrays are equal, to rounding."""
    if array.shape != other.shape or array.dtype != other.dtype:
        return False
    if array.dtype.kind != "f":
        return bool(np.array_equal(array, other))
    scale = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    # A graph that mixes rows differs by much more; kernels of a GPU may round products to 10 bits.
    tolerance = {8: 1e-8, 4: 1e-3}.get(array.dtype.itemsize, 1e-2)
    return bool(np.allclose(array, other, tolerance, tolerance * scale, equal_nan=True))
