"""The optimizer's state divided among processes (ZeRO-1): the bits of the training without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from ortflex_core import (
    ConfigError,
    OutputError,
    RankFailed,
    ThreadGroup,
    Trainer,
    Unsupported,
    hook,
    internals_of,
    run_ranks,
)
from ortflex_core.training.engines.state_shards import divide
from tests import models
from tests.core.test_process_groups import (
    ELASTIC,
    MAX_NORM,
    WEIGHT,
    X,
    Y,
    equal,
    normalizing,
    outcome,
    refused,
    results,
    training,
)
from tests.training import in_bytes, plugins

BIASES = {"params": "b*", "optimizer": "momentum", "rate": 0.1, "start_epoch": 1}
WIDE = 520  # 520 × 520 weights: an update outside of the graph


def wide() -> Any:
    return models.mlp((6, WIDE, WIDE, 1))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "momentum"},
        {"optimizer": "adam"},
        {"optimizer": "adamw", "clip_norm": 0.5},
        {"optimizer": "sgd", "penalty": ELASTIC},
        {"optimizer": "adam", "model": normalizing(), "constraint": MAX_NORM},
        {"optimizer": "adam", "groups": [BIASES], "schedule": "cosine"},
        {"optimizer": "adam", "precision": "fp16_mixed"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_the_bits_of_one_process(size: int, options: dict[str, Any]) -> None:
    """Weights, state and History, and those of one process that accumulates as many batches."""
    equal(size, (X, Y, WEIGHT), make=sharding, **options)


def test_more_processes_than_tensors_and_several_batches_each() -> None:
    equal(3, (X, Y), make=sharding, model=models.linear(6), optimizer="adam")
    equal(2, (X, Y), 2, make=sharding, optimizer="momentum", penalty="l2")


def test_large_weights_are_updated_by_their_process() -> None:
    equal(2, (X, Y), make=sharding, model=wide(), optimizer="adam", epochs=1, learning_rate=1e-3)


def sharding(**options: Any) -> Trainer:
    """A Trainer with ``shard_state`` if it is one of several processes."""
    several = options.get("distributed") is not None
    return training(**options, **({"shard_state": True} if several else {}))


def test_each_tensor_is_kept_once() -> None:
    """The bytes of the slots of all processes together are those of one; the parts are almost equal."""

    def kept(group: ThreadGroup) -> tuple[int, set[str]]:
        trainer = sharding(distributed=group, model=wide(), optimizer="adam", epochs=1)
        trainer.fit(X, Y)
        engine: Any = trainer.engine
        slots = engine._slots.read()
        return sum(a.nbytes for a in slots.values()), set(slots)

    alone = training(wide(), optimizer="adam", epochs=1, accumulate=2)
    alone.fit(X, Y)
    whole = {n: a for n, a in alone.engine.slots().items() if n != "step"}
    found = results(run_ranks(2, kept))
    assert sum(size for size, _ in found) == sum(a.nbytes for a in whole.values())
    assert found[0][1] | found[1][1] == set(whole)
    assert not found[0][1] & found[1][1]


@pytest.mark.parametrize(("ranks", "least"), [(1, 100), (2, 54), (3, 36), (4, 30)])
def test_the_division_is_even(ranks: int, least: int) -> None:
    sizes = {"a": 30, "b": 20, "c": 20, "d": 16, "e": 14}
    parts = divide(sizes, ranks)
    assert sorted(n for part in parts for n in part) == sorted(sizes)
    assert max(sum(sizes[n] for n in part) for part in parts) == least


@pytest.mark.parametrize("further", [1, 2, 3, 6])
def test_a_checkpoint_continues_in_another_number_of_processes(
    further: int, tmp_path: Path
) -> None:
    """Written by two processes that divide the state; read by any number, dividing it or not."""
    saves = {"callbacks": [{"name": "checkpoint", "folder": str(tmp_path), "steps": 1}]}

    def begin(group: ThreadGroup) -> None:
        sharding(distributed=group, accumulate=3, optimizer="adam", epochs=2, **saves).fit(X, Y)

    def resumed(group: ThreadGroup | None, shard: bool) -> Any:
        changes: dict[str, Any] = {"callbacks": (), "epochs": 4, "plugins": plugins()}
        if group is not None:
            changes |= {"distributed": group, "shard_state": shard}
        return outcome(Trainer.resume(tmp_path, **changes), (X, Y))

    results(run_ranks(2, begin))
    whole = outcome(training(accumulate=6, optimizer="adam", epochs=4), (X, Y))
    for shard in (True, False) if further > 1 else (False,):
        if further == 1:
            found = [resumed(None, shard)]
        else:
            found = results(run_ranks(further, lambda g, s=shard: resumed(g, s)))
        for one in found:
            assert one == whole


def test_every_process_calls_save_and_one_writes(tmp_path: Path) -> None:
    def job(group: ThreadGroup) -> dict[str, bytes]:
        trainer = sharding(distributed=group, optimizer="adam", epochs=2)
        for k in range(0, 64, 16):
            start = k + 8 * trainer.rank
            trainer.step((X[start : start + 8], Y[start : start + 8]))
        trainer.save(tmp_path / "kept")
        return in_bytes(internals_of(trainer).live.slots())

    slots = results(run_ranks(2, job))
    read = internals_of(Trainer.resume(tmp_path / "kept", plugins=plugins())).live.slots()
    assert slots[0] == slots[1] == in_bytes(read)


def test_one_process_exports_and_predicts(tmp_path: Path) -> None:
    def job(group: ThreadGroup) -> None:
        trainer = sharding(distributed=group, optimizer="adam")
        trainer.fit(X, Y, validation_data=0.2)
        if trainer.rank == 0:
            trainer.export(tmp_path / "trained.onnx")
            trainer.predict(X)

    results(run_ranks(2, job, seconds=20))
    alone = training(optimizer="adam", accumulate=2)
    alone.fit(X, Y, validation_data=0.2)
    weights = models.weights_of(onnx.load(tmp_path / "trained.onnx"))
    assert in_bytes(weights) == in_bytes(models.weights_of(alone.export()))


def at(name: str, act: Any, **attributes: Any) -> Any:
    def method(self: Any, trainer: Trainer) -> None:
        act(trainer)

    method.__name__ = name
    return type("At", (), {name: hook(method), **attributes})()


@pytest.mark.parametrize("name", ["epoch_end", "settled"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_failure_of_a_process_ends_all(rank: int, name: str, tmp_path: Path) -> None:
    saves = {"name": "checkpoint", "folder": str(tmp_path)}

    def fail(trainer: Trainer) -> None:
        if trainer.rank == rank:
            raise ZeroDivisionError("as planned")

    def job(group: ThreadGroup) -> None:
        callbacks = [saves, at(name, fail, every_rank=True)]
        sharding(distributed=group, optimizer="adam", callbacks=callbacks).fit(X, Y)

    found = run_ranks(2, job, seconds=20)
    assert isinstance(found[rank], ZeroDivisionError)
    refused([found[1 - rank]], RankFailed, "as planned")


@pytest.mark.parametrize("name", ["epoch_end", "train_end"])
def test_a_callback_that_one_process_calls_is_told_how_to_save(name: str, tmp_path: Path) -> None:
    def job(group: ThreadGroup) -> None:  # in the hook the other processes do not wait for it
        callbacks = [at(name, lambda trainer: trainer.save(tmp_path / "kept"))]
        sharding(distributed=group, optimizer="adam", callbacks=callbacks).fit(X, Y)

    refused(run_ranks(2, job, seconds=20), RankFailed, "shard_state", "every_rank = True")


@pytest.mark.parametrize("shard", [False, True])
def test_what_is_kept_after_a_full_disk(shard: bool, tmp_path: Path) -> None:
    """The note says what can still be written, which is the weights if the state is divided."""
    make = sharding if shard else training

    def settled(progress: Any) -> None:
        if progress.step >= 5:
            raise OutputError("the disk is full")

    def job(group: ThreadGroup) -> None:
        trainer = make(distributed=group, optimizer="adam", callbacks=[settled])
        with pytest.raises(OutputError if trainer.rank == 0 else RankFailed) as error:
            trainer.fit(X, Y)
        if trainer.rank == 0:
            notes = "\n".join(error.value.__notes__)
            assert "trainer.export" in notes
            assert ("trainer.save" in notes) is not shard
            trainer.export(tmp_path / "kept.onnx")
            if not shard:
                trainer.save(tmp_path / "kept")

    results(run_ranks(2, job, seconds=20))
    assert (tmp_path / "kept.onnx").is_file()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"averaging": "ema"}, Unsupported),
        ({"optimizer": "prodigy"}, Unsupported),
        ({"sync_every": 2}, ConfigError),
        ({"distributed": None}, ConfigError),
        ({"backend": "training_agent"}, Unsupported),
    ],
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    def job(group: ThreadGroup) -> None:
        trainer = training(**{"distributed": group, "shard_state": True, **options})
        assert "backend" in options, "refused before the training, unless the backend refuses it"
        trainer.fit(X, Y)

    refused(run_ranks(2, job, seconds=20), error, "shard_state", options.get("backend", ""))
