"""Batches that hooks change before their step: augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from ortflex_core.kernel.batches import Batch, Block, Epoch, Source, totals
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array
from ortflex_core.training.data.preparation import Preparation
from ortflex_core.training.data.ranks import RankBatches

Hook = Callable[..., Mapping[str, Array] | None]

_SALT = 0xBA7C4
"""Separates the draws of hooks from those that shuffle an epoch."""
_SECOND = 0x2D
"""Separates the second draw of the same rows from the first."""


class AlteredBatches:
    """A source that yields the batches of another source after the hooks ``batch_drawn``.

    The hooks get a generator that depends on the seed, the epoch, the number of the batch and the
    position of the hook, so a resumed run sees the same batches. All other calls go to the
    inner source.
    """

    def __init__(
        self,
        source: Source,
        hooks: Sequence[tuple[str, Hook]],
        seed: Sequence[int],
        preparing: Preparation,
    ) -> None:
        self._source, self._hooks = source, tuple(hooks)
        self._seed, self._preparing = tuple(seed), preparing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of the source, changed."""
        if isinstance(self._source, RankBatches):  # before the batch is announced
            self._source.alter = self._altered
            yield from self._source.batches(epoch)
            return
        drawn = self._source.batches(epoch)
        start = epoch.start
        with closing(drawn):  # type: ignore[type-var]  # generators, all of them
            for group in drawn:
                batches = [self._altered(b, epoch.number, start + k) for k, b in enumerate(group)]
                start += len(batches)
                yield _block(batches) if isinstance(group, Block) else batches

    def _altered(self, batch: Batch, epoch: int, number: int) -> Batch:
        # Copies: a hook may write into them.
        again = self._preparing.problem.model.drawn_again
        arrays = {name: np.array(batch.array(name)) for name in batch.columns if name not in again}
        second = {name: array.copy() for name, array in arrays.items()} if again else {}
        place = (*self._seed, _SALT, epoch, number)
        arrays = self._drawn(arrays, place, epoch)
        if again:
            second = self._drawn(second, (*place, _SECOND), epoch)
            arrays |= {own: second[name] for own, name in again.items()}
        denominators = totals(self._preparing.denominators(arrays), batch.size)
        return Batch(arrays, None, batch.size, denominators)

    def _drawn(
        self, arrays: dict[str, Array], place: Sequence[int], epoch: int
    ) -> dict[str, Array]:
        """The arrays of a batch after all hooks; ``place`` decides the draws."""
        for k, (whose, hook) in enumerate(self._hooks):
            rng = np.random.default_rng([*place, k])
            answer = hook(batch=arrays, rng=rng, epoch=epoch)
            if answer is not None:
                arrays = arrays | _checked(answer, arrays, whose)
        return arrays


def _block(batches: Sequence[Batch]) -> Block:
    """Batches of one size, side by side."""
    size = batches[0].size
    columns = {
        name: np.concatenate([batch.columns[name] for batch in batches])
        for name in batches[0].columns
    }
    rows = np.arange(size * len(batches))
    return Block(columns, rows, size, [batch.denominators for batch in batches])


def _checked(answer: Any, given: Mapping[str, Array], whose: str) -> dict[str, Array]:
    what = f"the hook 'batch_drawn' of {whose}"
    if not isinstance(answer, Mapping):
        raise DataError(
            f"{what} returns {type(answer).__name__}, expected None or a mapping of arrays by the names "
            f"{', '.join(given)}"
        )
    out = {}
    for name, value in answer.items():
        if name not in given:
            raise DataError(
                f"{what} returns the unknown array {name!r}; the batch has {', '.join(given)}"
            )
        array, before = np.asarray(value), given[name]
        if array.shape != before.shape:
            raise DataError(
                f"{what} returns {name!r} of shape {list(array.shape)}, expected {list(before.shape)}"
            )
        if array.dtype != before.dtype and (array.dtype.kind, before.dtype.kind) != ("f", "f"):
            raise DataError(
                f"{what} returns {name!r} of type {array.dtype}, expected {before.dtype}: "
                f"array.astype({before.dtype.name!r})"
            )
        out[name] = np.ascontiguousarray(array, before.dtype)
    return out
