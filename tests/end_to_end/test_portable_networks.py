"""Workloads and networks, a hundred steps: the runner of the docs against the fused backend, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.portable_cases import NETWORKS, compare_steps, network_trainer, workload

STEPS = 100
BOTH = pytest.mark.parametrize("fixed", [True, False], ids=["rows", "any rows"])
QUICK = {"W1", "W5", "W6", "vision mlp", "sequence autoencoder"}


def slow_but(names: object) -> list[object]:
    every: list[str] = list(names)  # type: ignore[call-overload]
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in every]


@BOTH
@pytest.mark.parametrize("name", slow_but(f"W{k}" for k in range(1, 9)))
def test_workloads(tmp_path: Path, name: str, fixed: bool) -> None:
    trainer, given = workload(name)
    compare_steps(trainer, tmp_path / "step", given, STEPS, fixed=fixed)


@BOTH
@pytest.mark.parametrize("name", slow_but(NETWORKS))
def test_networks(tmp_path: Path, name: str, fixed: bool) -> None:
    pytest.importorskip("torch")
    if name.startswith("dynamo"):
        pytest.importorskip("onnxscript")
    optimizer = "adam" if list(NETWORKS).index(name) % 2 else "sgd"
    trainer, given = network_trainer(name, optimizer)
    compare_steps(trainer, tmp_path / "step", given, STEPS, fixed=fixed)
