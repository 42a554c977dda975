"""``cache=``: the prefix of a model is computed once for each row.

The classes of errors: a run with derived columns is another training than one without; columns that are
not a function of a row are kept; rows that change are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array, Batches, DataError, ModelError, Trainer, run_ranks
from ortflex_core.compiler.runtime import memory_limits
from ortflex_core.training.data.prefix_session import PrefixSession
from tests import models
from tests.training import every_backend, make, same

HEAD = ["full", "shift"]


def images(rows: int = 30, seed: int = 4) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 1, 8, 8)).astype(np.float32)
    return x, (x.mean((1, 2, 3)) * 40).astype(np.int64) % 4


X, Y = images()


def trainer(seed: int = 0, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"loss": "softmax_cross_entropy", "params": HEAD}
    settings |= {"batch_size": 8, "epochs": 3, "learning_rate": 0.05}
    return make(models.conv_net(side=8, seed=seed), **settings | options)


def both(
    made: Callable[..., Trainer], fit: Callable[[Trainer], object], **options: Any
) -> tuple[Trainer, Trainer]:
    """A training with derived columns, and one without."""
    runs = made(cache="auto", **options), made(cache=False, **options)
    for run in runs:
        fit(run)
    return runs


def inputs_of(trained: Trainer) -> list[str]:
    """The columns that the engine reads, except the labels."""
    return [i.name for i in trained.engine.problem.model.inputs]  # type: ignore[attr-defined]


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every run of a prefix."""
    counts: list[int] = []
    run = PrefixSession.__call__

    def counted(session: PrefixSession, inputs: Any) -> Any:
        counts.append(len(next(iter(inputs.values()))))
        return run(session, inputs)

    monkeypatch.setattr(PrefixSession, "__call__", counted)
    return counts


@every_backend
@pytest.mark.parametrize("weighted", [False, True])
def test_a_run_with_derived_columns_is_the_same_training(backend: str, weighted: bool) -> None:
    weight = np.linspace(0.1, 2, len(X)) if weighted else None
    held = (X[:11], Y[:11])
    options: dict[str, Any] = {"backend": backend, "epochs": 5}
    runs = both(trainer, lambda run: run.fit(X, Y, weight, validation_data=held), **options)
    derived, whole = runs
    same(derived.get_state(), whole.get_state())
    files = [run.export() for run in runs]
    same(models.weights_of(files[0]), models.weights_of(files[1]))
    assert files[0].graph.node == files[1].graph.node
    asked: list[tuple[Callable[[Trainer], Any], float]] = [
        (lambda run: run.train_losses_, 1e-5),
        (lambda run: run.validation_losses_, 1e-5),
        (lambda run: run.evaluate(X, Y, weight)["loss"], 1e-5),
        (lambda run: run.per_sample_losses(X, Y), 1e-4),
        (lambda run: run.predict(X), 1e-4),
        *((lambda run, name=name: run.predict(X, name), 1e-4) for name in ("c", "f", "scores")),
    ]
    for ask, tolerance in asked:
        np.testing.assert_allclose(ask(derived), ask(whole), rtol=tolerance, atol=tolerance / 10)


def test_every_row_is_computed_once(rows_run: list[int]) -> None:
    run = trainer(backend="fused", epochs=4)
    run.fit(X, Y, validation_data=(X[:10], Y[:10]))
    assert sum(rows_run) == 40 + 3 * 8 + 2 + 2  # three times the rows of the test, two for types
    assert inputs_of(run) == ["f"]


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_second_training_computes_no_row_again(cache: str, rows_run: list[int]) -> None:
    run, whole = trainer(backend="fused", cache=cache), trainer(backend="fused", cache=False)
    held = (X[:10], Y[:10])
    run.find_rate(X, Y, steps=4)
    run.fit(X, Y, validation_data=held)
    before = sum(rows_run)
    run.fit(X, Y, validation_data=held)
    few = 3 * 8 + 2 + 2  # the rows of the test, and of types
    assert sum(rows_run) - before == few
    for _ in range(2):
        whole.fit(X, Y, validation_data=held)
    same(run.get_state(), whole.get_state())
    changed = X.copy()
    changed[3] += 1
    run.fit(changed, Y)
    assert sum(rows_run) - before - few >= len(X)


def test_columns_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "available", lambda: 1000)
    with pytest.raises(DataError, match="cache='disk'"):
        trainer(backend="fused", cache="memory").fit(X, Y)


def test_a_plain_network_has_no_prefix(rows_run: list[int]) -> None:
    x = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    run = make(models.mlp(), backend="fused")
    run.fit(x, x[:, :1])
    assert (inputs_of(run), rows_run) == (["X"], [])


def batch_drawn(batch: dict[str, Array], rng: np.random.Generator) -> None:
    batch["X"] += rng.standard_normal(batch["X"].shape).astype(np.float32)


def test_rows_that_change_are_not_computed_once(rows_run: list[int]) -> None:
    states = []
    for cache in ("auto", "memory", False):
        run = trainer(backend="fused", cache=cache, callbacks=[batch_drawn])
        run.fit(X, Y)
        assert inputs_of(run) == ["X"]
        states.append(run.get_state())
    for state in states[1:]:
        same(state, states[0], 0)
    batches = trainer(backend="fused")
    batches.fit(Batches([(X[:8], Y[:8]), (X[8:16], Y[8:16])]))
    assert inputs_of(batches) == ["X"]
    assert rows_run == []


def test_step_computes_the_whole_model_until_fit_did_not(rows_run: list[int]) -> None:
    run, whole = trainer(backend="fused"), trainer(backend="fused", cache=False)
    for one in (run, whole):
        one.step((X[:8], Y[:8]))
    assert rows_run == []
    for one in (run, whole):
        one.fit(X, Y)
        one.step((X[:8], Y[:8]))
    same(run.get_state(), whole.get_state())
    assert inputs_of(run) == ["f"]


def test_groups_that_start_later_keep_the_columns(rows_run: list[int]) -> None:
    groups = [{"params": "shift", "start_epoch": 2}]
    runs = both(trainer, lambda run: run.fit(X, Y), backend="fused", groups=groups, epochs=4)
    same(*(run.get_state() for run in runs))
    assert sum(rows_run) == 30 + 3 * 8 + 2


def test_processes_share_the_rows(rows_run: list[int]) -> None:
    """Two processes leave the bits of one that accumulates two batches; each computes half of the rows."""
    x, y = images(64)
    options: dict[str, Any] = {"backend": {"name": "fused", "steps_per_run": 1}, "threads": 1}
    alone = trainer(accumulate=2, **options)
    alone.fit(x, y, validation_data=(x[:20], y[:20]))
    once = sum(rows_run)

    def train(group: Any) -> dict[str, Array]:
        run = trainer(distributed=group, **options)
        run.fit(x, y, validation_data=(x[:20], y[:20]))
        return run.get_state()

    for state in run_ranks(2, train):
        if isinstance(state, BaseException):
            raise state
        same(state, alone.get_state(), 0)
    tested = 3 * 8 + 2 + 2  # which each process does
    assert sum(rows_run) == 2 * once + tested


def mixing() -> onnx.ModelProto:
    """A frozen product, minus its mean over the rows, and a head."""
    rng = np.random.default_rng(2)
    return models.parsed(
        "a = MatMul(X, frozen)  m = ReduceMean<axes = [0], keepdims = 1>(a)  b = Sub(a, m)"
        "  Y = MatMul(b, head)",
        {"frozen": rng.standard_normal((4, 5)), "head": rng.standard_normal((5, 1))},
        "float[N, 4] X",
        "float[N, 1] Y",
    )


def test_a_prefix_that_mixes_rows_is_refused() -> None:
    x = np.random.default_rng(1).standard_normal((20, 4)).astype(np.float32)
    made = partial(make, mixing(), params="head", backend="fused")
    runs = both(made, lambda run: run.fit(x, x[:, :1]))
    assert [inputs_of(run) for run in runs] == [["X"], ["X"]]
    same(*(run.get_state() for run in runs), 0)
    with pytest.raises(DataError, match="cache=False"):
        made(cache="memory").fit(x, x[:, :1])


@pytest.mark.parametrize("batch_size", [1, 8])
def test_mixed_rows_are_found_where_neighbors_are_equal(batch_size: int) -> None:
    x = np.repeat(np.random.default_rng(1).standard_normal((4, 4)), 20, axis=0).astype(np.float32)
    run = make(mixing(), params="head", backend="fused", cache="memory", batch_size=batch_size)
    with pytest.raises(DataError, match="cache=False"):
        run.fit(x, x[:, :1])


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:

    def epoch_end(trainer: Trainer, progress: Any) -> None:
        if progress.epoch == 2:
            trainer.save(tmp_path / "run")

    whole = trainer(backend="fused", callbacks=[epoch_end], epochs=4)
    whole.fit(X, Y)
    resumed = Trainer.resume(tmp_path / "run", plugins=whole.plugins, callbacks=[])
    resumed.fit(X, Y)
    same(resumed.get_state(), whole.get_state(), 0)
    with pytest.raises(DataError, match="X"):
        Trainer.resume(tmp_path / "run", plugins=whole.plugins, callbacks=[]).fit(X[::-1], Y)


ENCODE = 'ai.onnx.ml.OneHotEncoder<cats_strings = ["a", "b", "c"]>'


def categories() -> onnx.ModelProto:
    """Two columns of strings, one-hot, and a linear model."""
    return models.parsed(
        f"h = {ENCODE}(X)  r = Reshape(h, shape)  s = MatMul(r, w)  Y = Add(s, b)",
        {"shape": np.array([-1, 6]), "w": np.zeros((6, 1)), "b": np.zeros(1)},
        "string[N, 2] X",
        "float[N, 1] Y",
        ai_onnx_ml=3,
    )


def texts(rows: int = 60) -> tuple[Array, Array]:
    x = np.random.default_rng(3).choice(["a", "b", "c"], (rows, 2))
    return x, (x[:, :1] == "a") * 2.0 - (x[:, 1:] == "b")


@every_backend
def test_strings_train(backend: str) -> None:
    x, y = texts()
    run = make(categories(), backend=backend, epochs=60, batch_size=8, learning_rate=0.1)
    assert run.evaluate(x, y)["loss"] == pytest.approx(float((y**2).mean()), rel=1e-6)
    run.fit(x, y, validation_data=0.2)
    assert run.validation_losses_[-1] < 1e-4
    np.testing.assert_allclose(run.predict(x), y, atol=0.05)
    encoded = run.predict(x[:1], "r")
    np.testing.assert_array_equal(encoded[0], [c == t for t in x[0] for c in "abc"])
    assert run.per_sample_losses(x, y).shape == y.shape
    run.step((x[:4], y[:4]))


def test_strings_that_change_or_come_in_batches() -> None:
    x, y = texts()
    plain = make(categories(), backend="fused", cache=False, batch_size=20, shuffle=False)
    plain.fit(x, y)
    batched = make(categories(), backend="fused")
    batched.fit(Batches([(x[k : k + 20], y[k : k + 20]) for k in range(0, 60, 20)]))
    same(batched.get_state(), plain.get_state(), 1e-6)

    def batch_drawn(batch: dict[str, Array]) -> None:
        assert batch["X"].dtype == object

    options: dict[str, Any] = {"batch_size": 20, "shuffle": False, "callbacks": [batch_drawn]}
    hooked = make(categories(), backend="fused", **options)
    hooked.fit(x, y)
    same(hooked.get_state(), plain.get_state(), 1e-6)


@pytest.mark.parametrize("wrong", [np.ones((4, 2)), np.array([["a", None]] * 4, object)])
def test_what_is_no_string_is_an_error(wrong: Array) -> None:
    with pytest.raises(DataError, match="expects strings"):
        make(categories(), backend="fused").fit(wrong, np.ones((4, 1)))


def test_strings_that_a_trained_part_reads_are_an_error() -> None:
    """Here a trained tensor decides which branch encodes the strings."""
    branches = ", ".join(
        f"{n}_branch = {n} () => (float[M, 2, 3] {n}) {{ {n} = {ENCODE}(X) }}"
        for n in ("then", "else")
    )
    proto = models.parsed(
        "sum = ReduceSum<keepdims = 0>(w)  positive = Cast<to = 9>(sum)"
        f"  h = If(positive) <{branches}>"
        "  r = Reshape(h, shape)  s = MatMul(r, w)  Y = Add(s, b)",
        models.weights_of(categories()),
        "string[N, 2] X",
        "float[N, 1] Y",
        ai_onnx_ml=3,
    )
    with pytest.raises(ModelError, match=r"X: string.* is read by If"):
        make(proto, params=["w"], backend="fused")


def test_a_frame_of_strings_is_an_input() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = texts()
    frame = pandas.DataFrame({"first": x[:, 0], "second": x[:, 1]})
    runs = [make(categories(), backend="fused") for _ in range(2)]
    runs[0].fit(frame, y)
    runs[1].fit(x, y)
    same(runs[0].get_state(), runs[1].get_state(), 0)
    np.testing.assert_array_equal(runs[0].predict(frame), runs[1].predict(x))


def test_the_columns_of_a_frame_are_inputs_of_their_names() -> None:
    """As skl2onnx writes a ColumnTransformer: an input [rows, 1] for each column."""
    model = models.parsed(
        f"h = {ENCODE}(color)  r = Reshape(h, shape)  all = Concat<axis = 1>(r, size)"
        "  Y = MatMul(all, w)",
        {"shape": np.array([-1, 3]), "w": np.zeros((4, 1))},
        "string[N, 1] color, float[N, 1] size",
        "float[N, 1] Y",
        ai_onnx_ml=3,
    )
    pandas = pytest.importorskip("pandas")
    x, _ = texts()
    size = np.linspace(-1, 1, len(x)).astype(np.float32)
    y = (x[:, :1] == "a") + 2 * size[:, None]
    run = make(model, params="w", backend="fused", epochs=80, batch_size=8, learning_rate=0.1)
    run.fit(pandas.DataFrame({"color": x[:, 0], "size": size}), y)
    assert run.train_losses_[-1] < 1e-4


def test_a_line_says_what_is_computed_once(capfd: pytest.CaptureFixture[str]) -> None:
    run = trainer(backend="fused", epochs=1, progress=None)
    for _ in range(3):
        run.fit(X, Y)
    trainer(backend="fused", epochs=1, progress=None, callbacks=[batch_drawn]).fit(X, Y)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cache: ")]
    assert len(lines) == 2
    assert "f [" in lines[0]
    assert "batch_drawn" in lines[1]
