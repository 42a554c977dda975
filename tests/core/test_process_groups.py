"""N processes with batch B are one process with batch B and accumulate=N, to the last bit.

The processes are threads here, which a group of the tests joins; tests/plugins/test_process_group_torch.py
has processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    RanksDiffer,
    ThreadGroup,
    Trainer,
    Unsupported,
    hook,
    internals_of,
    run_ranks,
)
from tests import models
from tests.training import in_bytes, plugins, usable
from tests.training import results as results

rng = np.random.default_rng(12)
ROWS = 101  # 13 batches of 8, the last one of 5 rows
X = rng.standard_normal((ROWS, 6)).astype(np.float32)
Y = rng.standard_normal((ROWS, 1)).astype(np.float32)
CLASSES = rng.integers(0, 3, ROWS)
WEIGHT = rng.uniform(0.1, 3, ROWS)
HELD = (X[:50], Y[:50], WEIGHT[:50])


def training(model: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 8, "epochs": 3, "threads": 1}
    settings["backend"] = {"name": "fused", "steps_per_run": 1}
    usual = {"loss": "squared_error", "progress": False, "plugins": plugins()}
    return Trainer(models.mlp() if model is None else model, **usual | settings | options)


def outcome(trainer: Trainer, data: Any, **fit: Any) -> dict[str, Any]:
    """All that a training leaves, in bytes, but for seconds."""
    history = trainer.fit(*data, **fit)
    state = trainer.get_state(buffers=True) | {
        f"mean {n}": a for n, a in trainer.get_state(averaged=True).items()
    }
    columns = {c: list(history[c]) for c in history.columns if c != "seconds"}
    slots = in_bytes(internals_of(trainer).live.slots())
    return in_bytes(state) | {"slots": slots, "history": columns}


def refused(out: list[Any], kind: type[Exception], *texts: str) -> None:
    """Every process has ended with an error of this kind, which says all of this."""
    for error in out:
        assert isinstance(error, kind), error
        assert all(text in str(error) for text in texts), error


def equal(size: int, data: Any, per_rank: int = 1, **options: Any) -> None:
    """``size`` processes that accumulate ``per_rank`` batches, and one that accumulates all of them."""
    fit = options.pop("fit", {})
    make: Callable[..., Trainer] = options.pop("make", training)
    together = outcome(make(accumulate=size * per_rank, **options), data, **fit)

    def job(group: ThreadGroup) -> dict[str, Any]:
        return outcome(make(accumulate=per_rank, distributed=group, **options), data, **fit)

    for rank, one in enumerate(results(run_ranks(size, job))):
        assert one.keys() == together.keys()
        for name, value in together.items():
            assert one[name] == value, f"{name} on rank {rank} of {size}"


def classifier(dropout: bool = False) -> Any:
    w = np.random.default_rng(5)
    weights = {"a": w.standard_normal((6, 7)) / 2, "b": w.standard_normal((7, 3)) / 2}
    if dropout:
        weights |= {"ratio": np.float32(0.3), "on": np.array(True)}
    last = "Dropout(t, ratio, on)" if dropout else "Identity(t)"
    return models.parsed(f"h = MatMul(X, a)  t = Tanh(h)  d = {last}  Y = MatMul(d, b)", weights)


WEIGHTED = {"name": "softmax_cross_entropy", "ignore_index": -1, "class_weight": [0.5, 2.0, 1.0]}
SQUARED, HUBER = {"name": "squared_error"}, {"name": "huber", "factor": 0.5}
ELASTIC = {"name": "elastic", "l1": 0.01, "l2": 0.1}
MAX_NORM = {"name": "max_norm", "bound": 1.0}
LATE = {"params": "W2", "optimizer": "adam", "start_epoch": 1}
PLATEAU = {"name": "plateau", "patience": 1}
STOPPING = [{"name": "early_stopping", "patience": 1}]
VALIDATED = {"validation_data": HELD}
RECIPES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "plain": ((X, Y), {}),
    "in the given order": ((X, Y), {"shuffle": False, "reduction": "sum", "learning_rate": 0.002}),
    "sample weights, Adam": ((X, Y, WEIGHT), {"optimizer": "adam"}),
    "batches without weight": ((X, Y, np.where(np.arange(ROWS) < 60, 0.0, 1)), {"shuffle": False}),
    "class weights and a mask": (
        (X, np.where(np.arange(ROWS) % 5 == 0, -1, CLASSES)),
        {"model": classifier(), "loss": WEIGHTED},
    ),
    "dropout": (
        (X, CLASSES),
        {"model": classifier(dropout=True), "loss": "softmax_cross_entropy", "seed": 3},
    ),
    "two losses": (
        (X, {"first": Y, "second": Y}),
        {"loss": [{**SQUARED, "expected": "first"}, {**HUBER, "expected": "second"}]},
    ),
    "penalty, clipping, momentum": (
        (X, Y),
        {"penalty": ELASTIC, "clip_norm": 0.5, "clip_value": 0.2, "optimizer": "momentum"},
    ),
    "groups": ((X, Y), {"groups": [{"params": "W1", "rate": 0.3}, LATE]}),
    "averages and constraints": (
        (X, Y),
        {"averaging": "ema", "constraint": MAX_NORM, "optimizer": "adamw"},
    ),
    "schedules by step and rows": ((X, Y), {"schedule": {"name": "cosine", "by": "rows"}}),
    "validation, metrics, plateau": (
        (X, Y, WEIGHT),
        {"metrics": ["mae", "r2"], "schedule": PLATEAU, "fit": VALIDATED, "epochs": 5},
    ),
    "early stopping": (
        (X, Y),
        {
            "callbacks": STOPPING,
            "fit": {"validation_data": 0.3},
            "epochs": 30,
            "learning_rate": 0.4,
        },
    ),
}


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_processes_are_batches_of_one_step(recipe: str, backend: str) -> None:
    data, options = RECIPES[recipe]
    options = dict(options)
    if usable(backend) == "training_agent":
        if recipe == "dropout":
            pytest.skip("onnxruntime's own builder differentiates no Dropout in training")
        options["backend"] = backend
    equal(3, data, **options)


@pytest.mark.parametrize(("size", "per_rank"), [(2, 1), (2, 3), (4, 1), (5, 2)])
def test_any_number_of_processes_and_of_batches_in_each(size: int, per_rank: int) -> None:
    """Also where the last steps of an epoch have no batch for some of them."""
    equal(size, (X, Y, WEIGHT), per_rank, optimizer="adam")


def test_evaluation_in_chunks_is_that_of_one_process() -> None:
    """More rows than are evaluated at a time, in metrics that need all of them."""
    many = rng.standard_normal((5000, 6)).astype(np.float32)
    held = (many, many[:, :1] - many[:, 1:2])
    equal(3, (X, Y), metrics=["mae", "r2", "rmse"], epochs=1, fit={"validation_data": held})


def test_a_step_end_hook_of_rank_0_stops_all_after_the_same_step() -> None:
    def step_end(progress: Any) -> bool:
        return progress.step >= 7

    equal(2, (X, Y), callbacks=[step_end], epochs=9)


def test_callbacks_run_in_rank_0_unless_they_ask_for_every_rank() -> None:
    def job(group: ThreadGroup) -> list[str]:
        seen: list[str] = []

        def epoch_end(progress: Any) -> None:
            seen.append("once")

        class Everywhere:
            every_rank = True

            @hook
            def epoch_end(self) -> None:
                seen.append("everywhere")

        training(distributed=group, callbacks=[epoch_end, Everywhere()], epochs=1).fit(X, Y)
        return sorted(seen)

    assert results(run_ranks(2, job)) == [["everywhere", "once"], ["everywhere"]]


def test_a_callback_of_rank_0_that_changes_weights_is_refused() -> None:
    def epoch_end(trainer: Any) -> None:
        trainer.set_state({n: 2 * a for n, a in trainer.get_state().items()})

    out = run_ranks(2, lambda g: training(distributed=g, callbacks=[epoch_end]).fit(X, Y))
    refused(out, RanksDiffer, "every_rank = True")


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_a_checkpoint_continues_in_another_number_of_processes(
    backend: str, tmp_path: Path
) -> None:
    """4 processes, then 2 that accumulate 2, then one that accumulates 4, of the same step."""
    spec: Any = {"backend": backend} if usable(backend) == "training_agent" else {}
    options = {"optimizer": "adam", **spec}
    whole = outcome(training(accumulate=4, epochs=6, **options), (X, Y))

    def epoch_end(progress: Any) -> bool:
        return progress.epoch >= 2

    def interrupted(group: ThreadGroup) -> None:
        saver = {"name": "checkpoint", "folder": str(tmp_path / "kept"), "best": False}
        callbacks = [saver, epoch_end]
        training(distributed=group, epochs=6, callbacks=callbacks, **options).fit(X, Y)

    results(run_ranks(4, interrupted))

    def second_half(group: ThreadGroup) -> Any:
        changes = {"distributed": group, "callbacks": (), "epochs": 6}
        trainer = Trainer.resume(tmp_path / "kept", plugins=plugins(), **changes)
        return outcome(trainer, (X, Y))

    alone = Trainer.resume(tmp_path / "kept", plugins=plugins(), callbacks=(), epochs=6)
    assert internals_of(alone).arguments["accumulate"] == 4
    for one in (*results(run_ranks(2, second_half)), outcome(alone, (X, Y))):
        assert {**one, "history": whole["history"]} == whole
    refused(run_ranks(3, second_half), Unsupported, "divided among 3")


def normalizing(twice: bool = False) -> Any:
    w = np.random.default_rng(6)
    norm = "BatchNormalization <momentum = 0.7>"
    body = f"h = MatMul(X, a)  n0 = {norm} (h, s, b, m, v)"
    body += f"  n1 = {norm} (n0, s, b, m, v)  t = Tanh(n1)" if twice else "  t = Tanh(n0)"
    body += "  u = MatMul(t, c)  Y = BatchNormalization(u, s2, b2, m2, v2)"
    weights = {"a": w.standard_normal((6, 5)), "c": w.standard_normal((5, 1))}
    weights |= {n: w.uniform(0.5, 1.5, 5) for n in "sbmv"}
    weights |= {f"{n}2": w.uniform(0.5, 1.5, 1) for n in "sbmv"}
    return models.parsed(body, weights, outputs="float[N, 1] Y")


def test_a_layer_that_is_used_twice_moves_its_statistics_twice() -> None:
    equal(3, (X, Y, WEIGHT), model=normalizing(twice=True), optimizer="adam")


@pytest.mark.parametrize("optimizer", ["prodigy", "adafactor"])
def test_state_that_parameters_share(optimizer: str) -> None:
    groups = [{"params": "*2", "rate": 0.5}]
    equal(2, (X, Y, WEIGHT), optimizer=optimizer, learning_rate=None, groups=groups)


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_steps_by_hand_have_a_batch_of_each_process(backend: str) -> None:
    """The same as fit with these batches in this order: a row more in one of them counts as a row."""
    spec: Any = {"backend": backend} if usable(backend) == "training_agent" else {}
    options = {"optimizer": "adam", "schedule": {"name": "exponential", "by": "step"}, **spec}
    losses: list[float] = []

    def step_end(loss: float) -> None:
        losses.append(loss)

    whole = training(shuffle=False, epochs=1, accumulate=2, callbacks=[step_end], **options)
    whole.fit(X[:92], Y[:92], WEIGHT[:92])

    def job(group: ThreadGroup) -> Any:
        trainer, costs = training(distributed=group, **options), []
        for start in range(8 * trainer.rank, 92, 16):
            rows = slice(start, min(start + 8, 92))
            costs.append(trainer.step((X[rows], Y[rows], WEIGHT[rows])))
        return in_bytes(trainer.get_state() | internals_of(trainer).live.slots()), costs

    for state, costs in results(run_ranks(2, job)):
        assert costs == losses
        assert state == in_bytes(whole.get_state() | internals_of(whole).live.slots())


@pytest.mark.parametrize(("size", "per_rank"), [(2, 1), (3, 1), (2, 3)])
def test_running_statistics_move_by_all_batches_in_their_order(size: int, per_rank: int) -> None:
    trained = training(normalizing(), accumulate=2)
    before = trained.model.initializer("m").copy()
    trained.fit(X, Y)
    assert (trained.get_state(buffers=True)["m"] != before).all()
    fit = {"validation_data": HELD}
    equal(size, (X, Y, WEIGHT), per_rank, model=normalizing(), optimizer="adam", fit=fit)
