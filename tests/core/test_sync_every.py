"""Local SGD (sync_every): every process trains by itself, and the means are what all go on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    CheckpointError,
    ConfigError,
    OrtflexError,
    ThreadGroup,
    Trainer,
    Unsupported,
    hook,
    internals_of,
    run_ranks,
)
from tests import models
from tests.core.test_process_groups import (
    CLASSES,
    HELD,
    WEIGHT,
    X,
    Y,
    classifier,
    normalizing,
    outcome,
    refused,
    results,
    training,
)
from tests.training import in_bytes, plugins, same, usable

ROWS, SIZE = len(X), 8


def mean(arrays: list[Any]) -> Any:
    """The sum in the order of the ranks, in float64; integers are those of rank 0."""
    if arrays[0].dtype.kind != "f":
        return arrays[0]
    total = np.zeros(arrays[0].shape)
    for array in arrays:
        total = total + array.astype(np.float64)
    return (total / len(arrays)).astype(arrays[0].dtype)


def synchronize(members: list[Trainer]) -> None:
    """Plain means of all that trainers have, put into every one."""
    engines = [member.engine for member in members]
    calls = {"state": "load", "slots": "load_slots", "buffers": "load_buffers"}
    # All are read before any is written: weights that are set start their averages anew.
    parts = {read: [getattr(engine, read)() for engine in engines] for read in calls}
    for read, write in calls.items():
        means = {name: mean([part[name] for part in parts[read]]) for name in parts[read][0]}
        for engine in engines:
            getattr(engine, write)(means)


def simulated(
    size: int, every: int, data: Any, accumulate: int = 1, epochs: int = 3, **options: Any
) -> tuple[Mapping[str, Any], list[float]]:
    """Trainers of one process each that step by themselves; their state, and the losses of the epochs."""
    members = [training(**options) for _ in range(size)]
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng([0, 0, epoch]).permutation(ROWS)
        batches = [order[k : k + SIZE] for k in range(0, ROWS, SIZE)]
        steps = [batches[k : k + size] for k in range(0, len(batches), size)]
        total = 0.0
        for number, step in enumerate(steps):
            costs = [
                member.step(tuple(column[rows] for column in data))
                for member, rows in zip(members, step, strict=False)
            ]
            total += sum(len(rows) * cost for rows, cost in zip(step, costs, strict=True))
            if (number + 1) % every == 0 or number + 1 == len(steps):
                synchronize(members)
        losses.append(total / ROWS)
    return members[0].get_state(buffers=True) | internals_of(members[0]).live.slots(), losses


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
@pytest.mark.parametrize(
    ("size", "every", "options"),
    [
        (2, 3, {"optimizer": "adam"}),
        (3, 2, {"optimizer": "momentum", "penalty": {"name": "l2", "l2": 0.01}}),
        (3, 1, {"optimizer": "adam", "averaging": "ema", "clip_norm": 0.5}),
        (2, 100, {"optimizer": "prodigy", "learning_rate": 1.0}),
        (2, 2, {"model": normalizing(), "optimizer": "adamw"}),
    ],
)
def test_local_steps_and_means_are_a_plain_simulation(
    size: int, every: int, options: dict[str, Any], backend: str
) -> None:
    """To the bit in all processes; with the short last batch, and a last step without a batch for some."""
    options = dict(options)
    if usable(backend) == "training_agent":
        if every == 2 and size == 2:
            pytest.skip("onnxruntime's own builder moves no running statistics")
        options["backend"] = backend
    data = (X, Y, WEIGHT)
    state, losses = simulated(size, every, data, **options)

    def job(group: ThreadGroup) -> tuple[Any, list[float]]:
        trainer = training(distributed=group, sync_every=every, **options)
        history = trainer.fit(*data)
        return trainer.get_state(buffers=True) | internals_of(trainer).live.slots(), history.losses

    for got, of_epochs in results(run_ranks(size, job)):
        assert got.keys() == state.keys()
        assert in_bytes(got) == in_bytes(state)
        np.testing.assert_allclose(of_epochs, losses, rtol=1e-6)


def test_gradient_descent_of_two_processes_in_numpy() -> None:
    """A linear model in float64, two local steps between the means."""
    x, y = X.astype(np.float64), Y.astype(np.float64)
    start = models.weights_of(models.mlp((6, 1)))
    order = np.random.default_rng([0, 0, 0]).permutation(ROWS)
    batches = [order[k : k + SIZE] for k in range(0, ROWS, SIZE)]
    own = [tuple(start[name].astype(np.float64) for name in ("W1", "b1")) for _ in range(2)]
    for number in range(0, len(batches), 2):
        for rank, rows in enumerate(batches[number : number + 2]):
            w, b = own[rank]
            error = 2 * (x[rows] @ w + b - y[rows]) / len(rows)
            own[rank] = (w - 0.05 * x[rows].T @ error, b - 0.05 * error.sum(0))
        if number // 2 % 2 == 1 or number + 2 >= len(batches):
            middle = tuple((a + b) / 2 for a, b in zip(*own, strict=True))
            own = [middle, middle]

    def job(group: ThreadGroup) -> Any:
        options = {"epochs": 1, "optimizer": "sgd", "distributed": group, "sync_every": 2}
        made = training(models.mlp((6, 1)), **options)
        made.fit(X, Y)
        return made.get_state()

    for state in results(run_ranks(2, job)):
        same(state, dict(zip(("W1", "b1"), own[0], strict=True)), 2e-5)


def test_validation_and_early_stopping_see_the_means() -> None:
    def job(group: ThreadGroup) -> Any:
        options = {"callbacks": [{"name": "early_stopping", "patience": 1}], "learning_rate": 0.4}
        trainer = training(distributed=group, sync_every=3, epochs=30, metrics=["mae"], **options)
        history = trainer.fit(X, Y, validation_data=HELD)
        alone = training()
        alone.set_state(trainer.get_state())
        scores = trainer.evaluate(*HELD)
        assert scores["loss"] == alone.evaluate(*HELD)["loss"]
        assert np.array_equal(trainer.predict(X), alone.predict(X))
        columns = {c: list(history[c]) for c in history.columns if c != "seconds"}
        return columns, trainer.get_state()

    first, second = results(run_ranks(2, job))
    assert first[0] == second[0]
    assert len(first[0]["loss"]) < 30
    same(second[1], first[1], 0)


def test_masks_of_dropout_differ_between_processes() -> None:
    """Rows that are the same in both would have the same masks if both drew by one seed."""
    twice, labels = np.tile(X[:8], (2, 1)), np.tile(CLASSES[:8], 2)
    seen: dict[int, Any] = {}

    def job(group: ThreadGroup) -> None:
        options: dict[str, Any] = {"loss": "softmax_cross_entropy", "epochs": 1, "shuffle": False}
        trainer = training(classifier(True), distributed=group, sync_every=1, **options)

        class Sees:
            every_rank = True

            @hook
            def train_start(self, trainer: Any) -> None:
                engine = trainer.engine._engine
                run = engine.run

                def watched(batches: Any, rates: Any) -> Any:
                    out = run(batches, rates)
                    seen[trainer.rank] = engine.state()
                    return out

                engine.run = watched

        internals_of(trainer).hooks = type(internals_of(trainer).hooks)(trainer.plugins, [Sees()])
        trainer.fit(twice, labels)

    results(run_ranks(2, job))
    assert any(not np.array_equal(a, seen[1][n]) for n, a in seen[0].items())


@pytest.mark.parametrize("every", [2, 5])
def test_a_checkpoint_within_an_epoch_continues_to_the_same_bits(
    every: int, tmp_path: Path
) -> None:
    options = {"optimizer": "adam", "sync_every": every, "epochs": 4}
    fit = {"validation_data": HELD}

    def whole(group: ThreadGroup) -> Any:
        return outcome(training(distributed=group, **options), (X, Y), **fit)

    class Ends:
        every_rank = True

        @hook
        def steps_end(self, progress: Any) -> None:
            assert progress.step % 7 in (0, *range(every, 7, every))
            if progress.step > 9:
                raise ZeroDivisionError("planted")

    def first(group: ThreadGroup) -> None:
        saver = {"name": "checkpoint", "folder": str(tmp_path), "steps": 1, "best": False}
        training(distributed=group, callbacks=[saver, Ends()], **options).fit(X, Y, **fit)

    def second(group: ThreadGroup) -> Any:
        trainer = Trainer.resume(tmp_path, plugins=plugins(), distributed=group, callbacks=())
        assert internals_of(trainer).live.standing.position is not None
        assert internals_of(trainer).live.standing.position.steps
        return outcome(trainer, (X, Y), **fit)

    expected = results(run_ranks(2, whole))
    assert expected[0] == expected[1]
    out = run_ranks(2, first)
    assert all(isinstance(error, ZeroDivisionError | OrtflexError) for error in out)
    assert results(run_ranks(2, second)) == expected
    out = run_ranks(1, lambda g: Trainer.resume(tmp_path, plugins=plugins(), callbacks=()))
    refused(out, CheckpointError, "needs distributed")


def test_another_number_of_processes_is_another_training(tmp_path: Path) -> None:
    options = {"sync_every": 2, "accumulate": 2, "epochs": 2}
    saver = {"name": "checkpoint", "folder": str(tmp_path), "best": False}

    def first(group: ThreadGroup) -> None:
        training(distributed=group, callbacks=[saver], **options).fit(X, Y)

    def second(group: ThreadGroup) -> None:
        changes = {"distributed": group, "callbacks": (), "epochs": 3}
        Trainer.resume(tmp_path, plugins=plugins(), **changes).fit(X, Y)

    results(run_ranks(2, first))
    refused(run_ranks(4, second), Unsupported, "had 2 processes that train separately")


def test_local_steps_of_a_backend_that_knows_nothing_of_processes() -> None:
    def train(backend: str) -> list[Any]:
        options = {"sync_every": 2, "backend": backend}
        return results(
            run_ranks(2, lambda g: outcome(training(distributed=g, **options), (X, Y, WEIGHT)))
        )

    first, second = train("example_numpy")
    assert first == second
    fused = train("fused")[0]
    np.testing.assert_allclose(first["history"]["loss"], fused["history"]["loss"], rtol=1e-4)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="sync_every: needs distributed"):
        training(sync_every=2)
    with pytest.raises(ConfigError, match="sync_every: expected an integer >= 1, got 0"):
        training(sync_every=0, distributed=ThreadGroup())

    def step_end(progress: Any) -> None:
        """Wants to see every step."""

    def made(group: ThreadGroup, **options: Any) -> Trainer:
        return training(distributed=group, sync_every=2, **options)

    out = run_ranks(2, lambda g: made(g, callbacks=[step_end]).fit(X, Y))
    refused(out, Unsupported, "sync_every: a callback with the hook step_end")
    refused(run_ranks(2, lambda g: made(g).step((X, Y))), Unsupported)
    other = run_ranks(2, lambda g: training(distributed=g, sync_every=2 + g.join().rank).fit(X, Y))
    assert all("differ in the argument sync_every" in str(error) for error in other)
    alone = outcome(training(distributed=ThreadGroup(), sync_every=3), (X, Y))
    assert alone == outcome(training(), (X, Y))
