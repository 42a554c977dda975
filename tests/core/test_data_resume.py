"""A training on data larger than memory continues where it was, to the last bit."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import Batches, CheckpointError, DataError, Trainer, internals_of
from ortflex_plugins.data.npy import NpyFolder
from tests import children, models
from tests.training import SaveAt, bits, in_bytes, make, plugins, regression

pytestmark = pytest.mark.once

ROWS = 61


def parts() -> list[Any]:
    """Batches of 5, 6, 7, … rows."""
    x, y = regression(rows=ROWS, features=6)
    ends = np.minimum(np.cumsum([0, 5, 6, 7, 8, 9, 10, 16]), ROWS)
    return [(x[a:b], y[a:b]) for a, b in pairwise(ends)]


class Stateful:
    """Batches in an order drawn again every time, and a state that says where it is."""

    def __init__(self) -> None:
        self._turn, self._next = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self._turn, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._turn, self._next = state["turn"], state["next"]

    def __iter__(self) -> Iterator[Any]:
        batches = parts()
        order = np.random.default_rng(self._turn).permutation(len(batches))
        while self._next < len(order):
            self._next += 1
            yield batches[order[self._next - 1]]
        self._turn, self._next = self._turn + 1, 0


def by_epoch(epoch: int) -> Iterator[Any]:
    return iter(parts() if epoch % 2 else parts()[::-1])


def from_start(epoch: int, start: int) -> Iterator[Any]:
    return iter((parts() if epoch % 2 else parts()[::-1])[start:])


def forever(epoch: int, start: int) -> Iterator[Any]:
    return (parts()[k % 7] for k in itertools.count(start))


SOURCES: dict[str, Any] = {
    "a list": parts,
    "a function of epoch and start": lambda: from_start,
    "an object with a state": Stateful,
    "an endless function": lambda: forever,
}


def train(source: Any, folder: Path, *steps: int, **options: Any) -> tuple[Trainer, SaveAt]:
    limit = options.pop("limit", None)
    saver = SaveAt(folder, *steps)
    usual = {"epochs": 3, "batch_size": 4, "learning_rate": 0.01, "optimizer": "adam"}
    usual |= {"backend": "fused", "callbacks": [saver]}
    trainer = make(models.mlp(), **(usual | options))
    trainer.fit(source, steps_per_epoch=limit)
    return trainer, saver


def resumed(saver: SaveAt) -> Trainer:
    """The training of its first checkpoint."""
    return Trainer.resume(saver.written[0], plugins=plugins())


def goes_on(folder: Path, trainer: Trainer, *data: Any, **fit: Any) -> Any:
    """The history of a resumed training, which ends in the bits of the whole one."""
    again = Trainer.resume(folder, plugins=plugins())
    history = again.fit(*data, **fit)
    assert bits(again) == bits(trainer), folder
    return history


@pytest.mark.parametrize(
    ("buffer", "prefetch", "accumulate"),
    [(0, 0, 1), (0, 2, 1), (17, 0, 1), (17, 2, 3), (200, 1, 1)],
)
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_resumes_at_its_position(
    name: str, buffer: int, prefetch: int, accumulate: int, tmp_path: Path
) -> None:
    limit = 5 if name == "an endless function" else None

    def source() -> Batches:
        return Batches(SOURCES[name](), buffer=buffer, prefetch=prefetch)

    ends = (15, 16) if buffer else (7, 8)
    steps = [2, *ends, 20] if accumulate == 1 else [2, 5, 6, 9]
    if limit:
        steps = [2, 5, 6, 13] if accumulate == 1 else [1, 2, 3, 5]
    trainer, saver = train(source(), tmp_path, *steps, limit=limit, accumulate=accumulate)
    assert len(saver.written) >= 3
    for folder in saver.written:
        assert len(goes_on(folder, trainer, source(), steps_per_epoch=limit)) == 3


def write_shards(folder: Path, *ends: int) -> None:
    x, y = regression(rows=ROWS, features=6)
    for k, (a, b) in enumerate(pairwise(ends)):
        (folder / f"shard-{k}").mkdir(parents=True, exist_ok=True)
        np.save(folder / f"shard-{k}" / "X.npy", x[a:b])
        np.save(folder / f"shard-{k}" / "y.npy", y[a:b])


@pytest.fixture
def shards(tmp_path: Path) -> NpyFolder:
    write_shards(tmp_path / "data", 0, 20, 21, ROWS)
    return NpyFolder(path=str(tmp_path / "data"), buffer=17)


@pytest.mark.parametrize(
    ("backend", "shuffle", "weighted"),
    [
        ({"name": "fused", "steps_per_run": 1}, True, False),
        ({"name": "fused", "steps_per_run": 4}, True, True),
        ({"name": "fused", "steps_per_run": 4}, False, False),
        ("training_agent", True, True),
        ("training_session", True, True),
    ],
    ids=str,
)
def test_files_read_in_pieces_resume_at_their_position(
    shards: NpyFolder, backend: Any, shuffle: bool, weighted: bool, tmp_path: Path
) -> None:
    if weighted:
        for k, rows in enumerate((20, 1, 40)):
            weights = np.random.default_rng(k).random(rows)
            np.save(Path(shards.path) / f"shard-{k}" / "sample_weight.npy", weights)
    trainer, saver = train(shards, tmp_path, 2, 8, 16, 30, 48, shuffle=shuffle, backend=backend)
    assert len(saver.written) == 5
    for folder in saver.written:
        goes_on(folder, trainer, shards)


def test_another_process_continues_to_the_same_bits(shards: NpyFolder, tmp_path: Path) -> None:
    trainer, saver = train(shards, tmp_path, 21)
    code = (
        "import sys, numpy as np\n"
        "from ortflex_core import Trainer\n"
        "from ortflex_plugins.data.npy import NpyFolder\n"
        "trainer = Trainer.resume(sys.argv[1])\n"
        "trainer.fit(NpyFolder(path=sys.argv[2], buffer=17))\n"
        "np.savez(sys.argv[3], **trainer.get_state())\n"
    )
    out = tmp_path / "state.npz"
    arguments = [str(saver.written[0]), shards.path, str(out)]
    children.run([sys.executable, "-c", code, *arguments], check=True)
    with np.load(out) as found:
        assert in_bytes(found) == in_bytes(trainer.get_state())


@pytest.mark.parametrize("buffer", [0, 17])
@pytest.mark.parametrize("name", ["a function", "a function of epoch", "an iterable"])
def test_iterables_without_a_position_resume_only_at_the_end_of_an_epoch(
    name: str, buffer: int, tmp_path: Path
) -> None:
    """Whatever is only iterated or called: its epochs' ends resume to the same bits, else an error."""

    class Iterable:
        def __iter__(self) -> Iterator[Any]:
            return iter(parts())

    sources = {"a function": lambda: parts, "a function of epoch": lambda: by_epoch}
    source = sources.get(name, Iterable)
    steps = (10, 16, 16) if buffer else (3, 7, 7)
    # After the last step it is not known yet that the epoch is over.
    trainer, saver = train(Batches(source(), buffer=buffer), tmp_path, *steps)
    end = saver.written[2]
    with pytest.raises(DataError, match=r"at batch \d of an epoch, .* state_dict"):
        resumed(saver).fit(Batches(source(), buffer=buffer))
    goes_on(end, trainer, Batches(source(), buffer=buffer))


def test_an_endless_source_that_cannot_go_to_a_place_is_refused(tmp_path: Path) -> None:
    def endless() -> Iterator[Any]:
        return itertools.cycle(parts())

    _, saver = train(Batches(endless), tmp_path, 5, limit=5)
    with pytest.raises(DataError, match=r"at batch \d of an epoch, .*function of \(epoch, start\)"):
        resumed(saver).fit(Batches(endless), steps_per_epoch=5)


@pytest.mark.parametrize("buffer", [0, 17])
def test_other_batches_than_before_are_refused(buffer: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def unseeded(epoch: int, start: int) -> Iterator[Any]:
        for x, y in parts()[start:]:
            yield x + rng.standard_normal(x.shape).astype(np.float32), y

    _, saver = train(Batches(unseeded, buffer=buffer), tmp_path, 10)
    for other, text in (
        (unseeded, r"that batch differs from the earlier one.*with a seed"),
        (lambda epoch, start: parts()[start:1], r"at batch \d of the iterable, but it ends"),
    ):
        with pytest.raises(DataError, match=text):
            resumed(saver).fit(Batches(other, buffer=buffer))


def test_data_in_another_order_are_refused(shards: NpyFolder, tmp_path: Path) -> None:
    _, saver = train(shards, tmp_path / "shards", 21)
    x, y = regression(rows=ROWS, features=6)
    for given, text in (
        ((attrs.evolve(shards, buffer=18),), "had buffer = 17, but these data have 18"),
        ((x, y), "had files that are read piece by piece, but this one has arrays"),
        ((attrs.evolve(shards, buffer=100),), "but this one has arrays, or data that fit into"),
    ):
        with pytest.raises(DataError, match=text):
            resumed(saver).fit(*given)
    wider = attrs.evolve(shards, buffer=40)
    _, saver = train(wider, tmp_path / "wider", 21)
    write_shards(Path(shards.path), 0, 19, 21)  # as many pieces of two rows or one
    with pytest.raises(DataError, match="had the same number of pieces of data, but their sizes"):
        resumed(saver).fit(wider)
    _, saver = train(Batches(parts(), buffer=17), tmp_path / "list", 21)
    with pytest.raises(DataError, match="had buffer = 17, but this one has 18"):
        resumed(saver).fit(Batches(parts(), buffer=18))


def test_a_state_that_is_not_json_cannot_be_saved(tmp_path: Path) -> None:
    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"rng": np.random.default_rng(0)}

    with pytest.raises((DataError, CheckpointError), match=r"state_dict\(\) of Odd cannot be"):
        train(Batches(Odd()), tmp_path, 3)


def test_looking_at_a_batch_draws_none(shards: NpyFolder) -> None:
    seen = []

    def train_start(trainer: Trainer) -> None:
        loop = internals_of(trainer).loop
        assert loop is not None
        seen.append(loop.plan.source.sample().size)

    for source, size in ((shards, 4), (Batches(iter(parts())), 5), (regression(ROWS, 6), 4)):
        given = source if isinstance(source, tuple) else (source,)
        options: Any = {"epochs": 1, "batch_size": 4, "callbacks": [train_start]}
        trainer = make(models.mlp(), backend="fused", **options)
        assert trainer.fit(*given)["rows"] == [ROWS]
        assert seen.pop() == size
