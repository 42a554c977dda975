"""Processes that do not fit together: a clear error in each of them, and none that waits."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import ConfigError, OrtflexError, RanksDiffer, Unsupported, run_ranks
from ortflex_core.training import agreement
from tests import children
from tests.core.test_process_groups import X, Y, training

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
    for error in run_ranks(3, lambda g: training(distributed=g).fit(X, Y)):
        assert isinstance(error, RanksDiffer), error
        assert f"differ in {fact}: rank 0 has " in str(error)
        assert "rank 1 has another" in str(error)
    assert time.monotonic() - start < 30


def test_more_processes_than_rows_are_refused() -> None:
    for error in run_ranks(4, lambda g: training(distributed=g).fit(X[:3], Y[:3])):
        assert isinstance(error, Unsupported), error
        assert "3 rows cannot be divided among 4 processes" in str(error)


def test_a_group_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    absent = {"torch", "mpi4py"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in absent else found(name, *rest),
    )
    for group, extra in (("torch", "distributed"), ("mpi", "mpi")):
        with pytest.raises(ConfigError, match=rf"is not installed: pip install .*\[{extra}\]"):
            training(distributed=group)
    with pytest.raises(OrtflexError, match="unknown process group 'nccl'"):
        training(distributed="nccl")


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
    """No process waits for longer than 30 s."""
    pytest.importorskip("torch.distributed")
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = children.run([*LAUNCH, "2", str(tmp_path / "script.py"), what], env=env, seconds=90)
    assert done.returncode != 0
    assert text in done.stderr
