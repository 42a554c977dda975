"""Processes that differ, fail, end or are interrupted: all of them end, with the error of the one."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    ConfigError,
    OrtflexError,
    Peers,
    RankFailed,
    RanksDiffer,
    ThreadGroup,
    Trainer,
    TrainingDiverged,
    Unsupported,
    hook,
    internals_of,
    run_ranks,
)
from ortflex_core.training import agreement
from tests import children, models
from tests.core.test_process_groups import ROWS, X, Y, outcome, refused, results, training

DIFFERENT: Mapping[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "model": (lambda rank: {"model": models.mlp((6, 8 + rank, 1))}, "the model"),
    "weights": (lambda rank: {"model": models.mlp(seed=rank)}, "the weights and the optimizer's"),
    "recipe": (lambda rank: {"learning_rate": 0.1 + rank}, "the argument learning_rate"),
    "seed": (lambda rank: {"seed": rank}, "the argument seed"),
    "fewer rows": (lambda rank: {"rows": ROWS - 10 * rank}, "the number of rows"),
    "other rows": (lambda rank: {"shift": rank}, "the column X"),
    # Longer than what a message shows, and different at its end alone.
    "a long argument": (lambda rank: {"params": ["W1"] * 99 + [f"b{rank + 1}"]}, "argument params"),
    "validation": (lambda rank: {"held": rank}, "the validation column X"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_processes_that_differ_are_refused_on_all_ranks(what: str) -> None:
    def job(group: ThreadGroup) -> Any:
        options = DIFFERENT[what][0](group.join().rank)
        rows, shift = options.pop("rows", ROWS), options.pop("shift", 0)
        held = (X + options.pop("held"), Y) if "held" in options else None
        x = X.copy()
        x[0] += shift
        return training(distributed=group, **options).fit(x[:rows], Y[:rows], validation_data=held)

    start = time.monotonic()
    for error in run_ranks(3, job):
        assert isinstance(error, RanksDiffer), error
        assert re.search(f"differ in .*{DIFFERENT[what][1]}", str(error))
        assert "rank 1 has" in str(error)
    assert time.monotonic() - start < 30


class FailsInRank1:
    every_rank = True

    @hook
    def step_end(self, trainer: Trainer, progress: Any) -> None:
        if trainer.rank == 1 and progress.step == 5:
            raise ZeroDivisionError("planted")


@pytest.mark.parametrize("where", ["hook", "data", "validation"])
def test_an_error_of_one_process_ends_all_with_that_error(where: str) -> None:
    def job(group: ThreadGroup) -> Any:
        rank = group.join().rank
        options = {"callbacks": [FailsInRank1()]} if where == "hook" else {}
        y = np.full_like(Y, np.nan) if (rank, where) == (1, "data") else Y
        held = (X[:, : 6 - (rank == 1)], Y) if where == "validation" else None
        return training(distributed=group, **options).fit(X, y, validation_data=held)

    out = run_ranks(3, job)
    assert not isinstance(out[1], RankFailed)
    own = re.escape(type(out[1]).__name__)
    for rank in (0, 2):
        assert isinstance(out[rank], RankFailed), out[rank]
        assert re.match(f"the process of rank 1 failed: {own}: ", str(out[rank]))


def test_a_loss_that_is_not_finite_ends_all_with_the_same_error() -> None:
    out = run_ranks(2, lambda g: training(distributed=g, learning_rate=1e30).fit(X, Y))
    assert all(isinstance(error, TrainingDiverged) for error in out)
    assert str(out[0]) == str(out[1])


def test_a_process_that_ended_ends_the_others() -> None:
    def job(group: ThreadGroup) -> Any:
        if group.join().rank == 1:
            group.join().close()
            return "gone"
        return training(distributed=group).fit(X, Y)

    refused(run_ranks(2, job)[:1], RankFailed, "has ended")


@pytest.mark.parametrize("size", [2, 3])
def test_a_process_that_does_not_answer_is_named_and_not_called_ended(size: int) -> None:
    """The class of errors: a cause in a message that was not observed. Only the silence was."""

    class Silent:
        rank = 0

        def __init__(self) -> None:
            self.size, self.answers = size, 2

        def all_gather(self, array: Any) -> Any:
            if not self.answers:
                raise TimeoutError("no message within 7 s")
            self.answers -= 1
            return [array] * self.size

        def close(self) -> None:
            """Nothing."""

    peers = Peers(Silent())
    peers.any("start", flag=False)
    peers.any("decision", flag=False)
    with pytest.raises(RankFailed) as caught:
        peers.any("weights 1", flag=False)
    text = str(caught.value)
    assert "has ended" not in text
    for known in ("within 7 s", "'weights 1'", "'decision'", "1, 2" if size == 3 else "of rank 1"):
        assert known in text
    silent = Silent()
    silent.answers = 0
    peers = Peers(silent)
    with pytest.raises(RankFailed, match="it has sent no message yet"):
        peers.any("start", flag=False)


def test_an_interrupt_in_one_process_ends_all_after_the_same_step() -> None:
    """What the signal's handler notes in one of them; threads get no signals."""

    class Interrupts:
        every_rank = True

        @hook
        def steps_end(self, trainer: Any, progress: Any) -> None:
            if trainer.rank == 1 and progress.step == 9:
                internals_of(trainer).loop._interrupts.came = True

    def job(group: ThreadGroup) -> Any:
        trainer = training(distributed=group, callbacks=[Interrupts()])
        history = trainer.fit(X, Y)
        return history.interrupted, history["rows"], internals_of(trainer).live.standing.manual.step

    first, second = results(run_ranks(2, job))
    assert first == second
    assert first[0]
    assert first[2] == 10


def test_steps_by_hand_that_differ_end_all() -> None:
    def other(group: ThreadGroup) -> Any:
        return training(distributed=group, learning_rate=1.0 + group.join().rank).step((X, Y))

    assert all("the argument learning_rate" in str(error) for error in run_ranks(2, other))

    def broken(group: ThreadGroup) -> Any:
        trainer = training(distributed=group)
        trainer.step((X, Y))
        return trainer.step((X, Y[: 50 + 51 * trainer.rank]))

    first, second = run_ranks(2, broken)
    assert not isinstance(first, RankFailed)
    assert "the process of rank 0 failed" in str(second)


def test_what_cannot_be_trained_in_several_processes_is_refused() -> None:
    numpy = {"backend": "example_numpy"}
    for text, options, data in (
        ("iterable", {}, ([(X, Y), (X, Y)],)),
        ("does not support several processes", numpy, (X, Y)),
    ):
        out = run_ranks(2, lambda g, o=options, d=data: training(distributed=g, **o).fit(*d))
        assert all(isinstance(error, OrtflexError) for error in out), out
        assert any(isinstance(e, Unsupported) and text in str(e) for e in out), out


def test_without_a_launcher_the_error_shows_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="not started by a launcher") as raised:
        training(distributed="auto")
    assert "ortflex train train.toml" in str(raised.value)
    with pytest.raises(OrtflexError, match="distributed: unknown process group 'trch'"):
        training(distributed="trch")


def test_a_group_of_one_process_is_a_training_without_one() -> None:
    one = outcome(training(distributed=ThreadGroup()), (X, Y))
    assert one == outcome(training(), (X, Y))


@pytest.mark.parametrize("sizes", [(0, 0), (3, 5000), (5000, 3), (70_000, 70_001), (990, 991)])
def test_messages_of_any_size(sizes: tuple[int, int]) -> None:
    """Within a frame and after it; of one process small and of the other one large."""

    def job(group: ThreadGroup) -> list[int]:
        peers = Peers(group.join())
        own = np.full(sizes[peers.rank], peers.rank + 1, np.uint8)
        parts = peers.gather("test", own)
        assert [set(p.tolist()) - {k + 1} for k, p in enumerate(parts)] == [set(), set()]
        return [len(p) for p in parts]

    assert results(run_ranks(2, job)) == [list(sizes)] * 2


def test_processes_at_different_places_are_an_error_not_a_wrong_sum() -> None:
    def job(group: ThreadGroup) -> Any:
        peers = Peers(group.join())
        return peers.any("here" if peers.rank else "there", flag=True)

    refused(run_ranks(2, job), RankFailed, "not at the same point")


CALLS: dict[str, tuple[Callable[[Trainer, Path], Any], str]] = {
    "export_step": (lambda t, folder: t.export_step(folder / "step"), "with shard_state"),
    "save": (lambda t, folder: t.save(folder / "saved"), "with shard_state"),
    "pickle": (lambda t, folder: pickle.dumps(t), "with shard_state"),
    "copy": (lambda t, folder: copy.deepcopy(t), "with shard_state"),
    "step": (lambda t, folder: t.step((X, Y)), "the same calls"),
    "fit": (lambda t, folder: t.fit(X, Y), "the same calls"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("silent", [False, True])
def test_a_call_of_one_process_that_all_have_to_make(
    call: str, silent: bool, tmp_path: Path
) -> None:
    """Whether the others have ended, or do something else."""
    made, text = CALLS[call]
    trained = threading.Event()  # rank 0 has the last message of fit

    def job(group: ThreadGroup) -> Any:
        communicator = group.join()
        trainer = training(distributed=group, shard_state=True, optimizer="adam")
        trainer.fit(X, Y)
        if communicator.rank == 0:
            trained.set()
            return made(trainer, tmp_path)
        assert trained.wait(30)
        if silent:
            return internals_of(trainer).setup.problem.peers.any("elsewhere", flag=False)
        return communicator.close()

    refused(run_ranks(2, job)[:1], RankFailed, text, "every process has to")


# Groups that do not fit together: a clear error in each process, and none that waits ---------------

LAUNCH = [sys.executable, "-m", "ortflex_core.testing.launch"]


@pytest.mark.parametrize("fact", ["ortflex", "the runtime", "the argument device", "the backend"])
def test_other_versions_and_devices_are_refused(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = agreement.facts

    def of_rank(trainer: Any, *rest: Any) -> dict[str, str]:
        own = facts(trainer, *rest)
        assert fact in own
        return own | ({fact: "another"} if trainer.rank == 1 else {})

    monkeypatch.setattr(agreement, "facts", of_rank)
    start = time.monotonic()
    out = run_ranks(3, lambda g: training(distributed=g).fit(X, Y))
    refused(out, RanksDiffer, f"differ in {fact}: rank 0 has ", "rank 1 has another")
    assert time.monotonic() - start < 30


def test_more_processes_than_rows_are_refused() -> None:
    out = run_ranks(4, lambda g: training(distributed=g).fit(X[:3], Y[:3]))
    refused(out, Unsupported, "3 rows cannot be divided among 4 processes")


def test_a_group_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name in ("torch", "mpi4py") else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    for group, extra in (("torch", "distributed"), ("mpi", "mpi")):
        with pytest.raises(ConfigError, match=rf"is not installed: pip install .*\[{extra}\]"):
            training(distributed=group)


SCRIPT = """
import os, sys
from tests.core.test_process_groups import X, Y, training
rank, what = int(os.environ["RANK"]), sys.argv[1]
if what == "variables" and rank:
    del os.environ["MASTER_PORT"]
options = {"learning_rate": 0.1 + rank} if what == "recipe" else {}
rows = len(X) - 10 * rank if what == "rows" else len(X)
group = {"name": "torch", "timeout": 10.0}
training(distributed=group, **options).fit(X[:rows], Y[:rows])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("recipe", "differ in the argument learning_rate"),
        ("rows", "differ in the number of rows"),
        ("variables", "but not MASTER_PORT"),
    ],
)
def test_processes_end_with_an_error(what: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = children.run([*LAUNCH, "2", str(tmp_path / "script.py"), what], env=env, seconds=90)
    assert done.returncode != 0
    assert text in done.stderr
