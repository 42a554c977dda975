"""``backend="fastest"``: the quickest of backends whose speed is known, without a trace in the training.

The backends are ``fused`` with pauses, so their weights are equal, and one is known to be quicker.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    DataError,
    Plugins,
    RankFailed,
    ThreadGroup,
    Trainer,
    Unsupported,
    internals_of,
    run_ranks,
    time_backends,
)
from ortflex_core.compiler.runtime import session
from ortflex_core.training.artifacts import checkpoint
from ortflex_core.training.engines import timing
from tests import models
from tests.core.paced import BUILT, FAILURES, PAUSE, paced
from tests.core.test_process_groups import classifier
from tests.plugins.commands import refused, works
from tests.training import bits, regression
from tests.training import make as make_trainer

pytestmark = pytest.mark.once

X, Y = regression(rows=40, features=6)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Two backends, the second of which is the quicker one, and nothing remembered."""
    PAUSE.clear()
    PAUSE.update(first=0.01, second=0.0)
    FAILURES.clear()
    session._cache.clear()
    BUILT.clear()
    yield
    session._cache.clear()


def make(model: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"optimizer": "adam", "batch_size": 8, "epochs": 2}
    settings |= {"backend": "fastest", "plugins": paced()}
    return make_trainer(model or models.mlp(), **settings | options)


@pytest.mark.parametrize("quick", ["first", "second"])
def test_it_keeps_the_quick_one_in_both_orders(quick: str) -> None:
    slow = "second" if quick == "first" else "first"
    PAUSE.update({quick: 0.0, slow: 0.01})
    trainer = make()
    trainer.fit(X, Y)
    assert trainer.backend_ == quick
    assert BUILT == ["first", "second"]  # the measured engine trains; none is compiled twice


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "accumulate": 2},
        {"averaging": "ema", "clip_norm": 0.1},
        {"groups": [{"params": "W*", "start_epoch": 1}]},
        {"schedule": "cosine", "penalty": "l2"},
    ],
)
def test_the_training_is_that_of_the_backend_to_the_bit(options: dict[str, Any]) -> None:
    alike(lambda t: t.fit(X, Y), **options)


def alike(train: Callable[[Trainer], object], model: Any = None, **options: Any) -> None:
    """A training with the quickest backend and one with its name end in the same bits."""
    state = np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    measured, named = (make(model, backend=b, **options) for b in ("fastest", "second"))
    train(measured)
    train(named)
    assert measured.backend_ == "second"
    assert bits(measured) == bits(named)
    assert measured.train_losses_ == named.train_losses_
    assert np.random.get_state()[1].tolist() == state  # type: ignore[union-attr, index]


def test_running_statistics_and_dropout_start_as_without_a_measurement() -> None:
    x = np.random.default_rng(0).standard_normal((24, 6)).astype(np.float32)
    model = classifier(dropout=True)
    alike(lambda t: t.fit(x, np.arange(24) % 3), model, loss="softmax_cross_entropy")


def test_a_second_fit_continues_the_first_to_the_same_bits() -> None:
    """The measurement starts from the state of the training, here that of another engine."""

    def twice(trainer: Trainer) -> None:
        trainer.fit(X, Y)
        internals_of(trainer).forget_engine()
        trainer.fit(X, Y)

    alike(twice)


def test_data_that_come_once_are_not_consumed() -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for k in range(5):
            drawn.append(k)
            yield X[8 * k : 8 * k + 8], Y[8 * k : 8 * k + 8]

    alike(lambda t: t.fit(batches()), epochs=1)
    assert drawn == [*range(5)] * 2
    alike(lambda t: t.step((X[:8], Y[:8])), epochs=1)


def test_it_remembers_by_structure_and_batch() -> None:
    def built(**options: Any) -> list[str]:
        BUILT.clear()
        make(**options).fit(X, Y)
        return list(BUILT)

    assert built() == ["first", "second"]
    assert built() == ["second"]
    assert built(learning_rate=0.5, seed=3) == ["second"]  # bound when a step runs
    assert built(batch_size=4) == ["first", "second"]
    assert built(optimizer="sgd") == ["first", "second"]
    assert built(callbacks=[step_end]) == ["first", "second"]  # one step a run
    assert built() == ["second"]


def step_end(loss: float) -> None:
    """Asks for every step."""


def test_the_checkpoint_records_the_choice_and_a_resume_keeps_it(tmp_path: Path) -> None:
    def epoch_end(trainer: Trainer, record: Any) -> None:
        if record["epoch"] == 2:
            trainer.save(tmp_path / "c")

    whole = make(epochs=4, callbacks=[epoch_end])
    whole.fit(X, Y)
    assert checkpoint.read(tmp_path / "c").record.backend == "second"
    PAUSE.update(first=0.0, second=0.01)  # a measurement would now choose otherwise
    session._cache.clear()
    BUILT.clear()
    resumed = Trainer.resume(tmp_path / "c", plugins=paced(), epochs=4)
    resumed.save(tmp_path / "again")  # before anything is compiled
    assert checkpoint.read(tmp_path / "again").record.backend == "second"
    resumed.fit(X, Y)
    assert resumed.backend_ == "second"
    assert BUILT == ["second"]
    assert bits(resumed) == bits(whole)
    restored = make(epochs=2)
    restored.restore(tmp_path / "c")
    restored.fit(X, Y)
    assert restored.backend_ == "second"
    other = Trainer.resume(tmp_path / "c", plugins=paced(), epochs=4, backend="fastest")
    other.fit(X, Y)
    assert other.backend_ == "first"  # asked for anew


def test_a_recorded_backend_that_cannot_go_on_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make()
    trainer.fit(X, Y)
    trainer.save(tmp_path / "c")
    FAILURES["second"] = ("refuse", ValueError("not on Mondays"))
    resumed = Trainer.resume(tmp_path / "c", plugins=paced(), epochs=4)
    with caplog.at_level(logging.WARNING, "ortflex"):
        resumed.fit(X, Y)
    assert resumed.backend_ == "first"
    text = caplog.text
    assert "the backend second, which cannot continue it here (not on Mondays)" in text


def test_a_pickle_keeps_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plugins, "discover", lambda: paced())
    trainer = make(plugins=None)
    trainer.fit(X, Y)
    packed = pickle.dumps(trainer)

    def refuse(*given: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(timing, "measure", refuse)
    session._cache.clear()
    copy = pickle.loads(packed)
    copy.fit(X, Y)
    trainer.fit(X, Y)
    assert copy.backend_ == trainer.backend_
    assert bits(copy) == bits(trainer)


@pytest.mark.parametrize("when", ["build", "run", "refuse", "nan"])
def test_a_candidate_that_fails_has_its_reason(when: str, caplog: pytest.LogCaptureFixture) -> None:
    FAILURES["second"] = (when, RuntimeError("no paper left"))
    trainer = make()
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer.fit(X, Y)
    assert trainer.backend_ == "first"
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("second ")]
    assert ("its first loss is nan" if when == "nan" else "no paper left") in line


def error_of(backend: str, kind: type[Exception], x: Any) -> str:
    with pytest.raises(kind) as raised:
        make(backend=backend).fit(x, Y)
    return str(raised.value)


def test_without_a_candidate_the_error_is_that_of_auto() -> None:
    FAILURES["first"] = ("refuse", ValueError("too heavy"))
    FAILURES["second"] = ("refuse", ValueError("too light"))
    text = error_of("fastest", Unsupported, X)
    assert text == error_of("auto", Unsupported, X)
    assert "first: too heavy" in text
    assert "second: too light" in text


def test_wrong_data_give_the_error_of_auto_and_nothing_is_remembered() -> None:
    assert error_of("fastest", DataError, X[:, :3]) == error_of("auto", DataError, X[:, :3])
    trainer = make()
    trainer.fit(X, Y)
    assert trainer.backend_ == "second"


def test_the_table_is_shown_unless_progress_is_off(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    make(progress=None).fit(X, Y)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["backend", "ms/step", "compile", "s", "first", "step", "s"]
    assert [line.split()[0] for line in lines[1:3]] == ["first", "second"]
    assert float(lines[1].split()[1]) > 4  # 10 ms in each run of two steps
    assert lines[2].endswith("quickest")
    session._cache.clear()
    with caplog.at_level(logging.INFO, "ortflex"):
        make().fit(X, Y)
    assert capsys.readouterr().err == ""
    assert any(m.startswith("second") and m.endswith("quickest") for m in caplog.messages)


def test_priority_decides_between_equally_fast_backends() -> None:
    rows = [timing.Timing(backend=n, step_seconds=s) for n, s in (("a", 1.0), ("b", 0.97))]
    assert timing.quickest(rows) == "a"
    assert timing.quickest([attrs.evolve(rows[0], reason="no"), rows[1]]) == "b"
    assert timing.quickest([attrs.evolve(row, reason="no") for row in rows]) is None


def test_a_measurement_that_has_taken_long_compiles_no_further_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timing, "COMPILING", 0.0)
    trainer = make()
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer.fit(X, Y)
    assert trainer.backend_ == "first"
    assert any("second" in m and "not measured" in m for m in caplog.messages)


@pytest.mark.parametrize("options", [{}, {"sync_every": 2}])
def test_of_several_processes_the_first_one_measures(options: dict[str, Any]) -> None:
    measured: list[int] = []

    def job(group: ThreadGroup, backend: str = "fastest") -> Any:
        trainer = make(distributed=group, backend=backend, **options)
        internals_of(trainer).live._tell = lambda line: measured.append(trainer.rank)
        trainer.fit(X, Y)
        return trainer.backend_, bits(trainer)

    found = run_ranks(2, job)
    assert not [f for f in found if isinstance(f, BaseException)], found
    assert [f[0] for f in found] == ["second", "second"]
    assert found[0][1] == found[1][1]
    assert set(measured) == {0}
    assert run_ranks(2, lambda group: job(group, "second")) == found


def test_of_several_processes_all_end_with_an_error_of_the_first_one() -> None:
    FAILURES.update(first=("refuse", ValueError("x")), second=("refuse", ValueError("y")))

    def job(group: ThreadGroup) -> Any:
        make(distributed=group).fit(X, Y)

    found = run_ranks(2, job)
    assert all(isinstance(error, Unsupported | RankFailed) for error in found), found


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Plugins, "discover", lambda: paced())
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=X, y=Y)
    path = tmp_path / "train.toml"
    path.write_text(
        'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\nbatch_size = 8\n'
        'epochs = 1\nbackend = "fastest"\noutput = "run"\n'
    )
    return path


def test_the_command_compare_prints_the_times(recipe: Path) -> None:
    FAILURES["first"] = ("refuse", ValueError("it is Monday"))
    result = works("compare", str(recipe), "--time")
    lines = result.output.splitlines()
    assert lines[0].split() == ["backend", "ms/step", "compile", "s", "first", "step", "s"]
    assert lines[1].split()[0] == "second"
    wanted = ["not measured: first: it is Monday", 'backend = "fastest" chooses second']
    assert lines[2:] == wanted
    FAILURES.clear()
    result = works("compare", str(recipe), "--time", "--json")
    table = json.loads(result.output)
    assert table["fastest"] == "second"
    times = {row["backend"]: row["step_seconds"] for row in table["timings"]}
    assert times["first"] > 0.005 > times["second"]
    FAILURES.update({n: ("refuse", ValueError("closed")) for n in ("first", "second")})
    result = refused("compare", str(recipe), "--time")
    assert "no backend can train this here" in result.output


def test_a_recipe_names_it_and_the_run_records_the_choice(recipe: Path) -> None:
    works("train", str(recipe))
    assert [p for p in (recipe.parent / "run").rglob("*.json") if "second" in p.read_text()]


def test_measuring_backends_does_not_change_the_trainer() -> None:
    trainer = make(backend="second")
    trainer.fit(X, Y)
    before = bits(trainer)
    times = time_backends(trainer, X, Y)
    assert times.fastest == "second"
    assert bits(trainer) == before
    (only,) = time_backends(trainer, X, Y, backends=["first"]).timings
    assert only.backend == "first"
