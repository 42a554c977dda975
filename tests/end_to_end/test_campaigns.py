"""Samples of the campaigns with drawn recipes: torch's numbers, compilers of C, processes, receipts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import ThreadGroup, run_ranks
from ortflex_plugins.c import compiler
from tests import children
from tests.benchmarks.distributed_model import Network, fitted
from tests.end_to_end import c_campaign, distributed_campaign, recipe_campaign, verify_campaign
from tests.end_to_end.recipe_cases import NETWORKS, draw
from tests.training import every_backend, usable

# Recipes on every backend -------------------------------------------------------------------------


# The class of errors: numbers that are wrong in silence, where parts that are right alone meet: frozen and
# adapted weights, penalties, transforms, schedules, accumulation, averages and sample weights. The twin is
# torch in float64; its results are in a file, for environments without torch.
SEED, COUNT = 1, 8
EXPECTED = Path(__file__).parents[1] / "fixtures" / "recipes.npz"
"""``python -m tests.end_to_end.recipe_campaign --seed 1 --count 8 --write tests/fixtures/recipes.npz``."""


@every_backend
@pytest.mark.parametrize("number", range(COUNT))
def test_a_recipe_gives_what_torch_gives(number: int, backend: str) -> None:
    recipe = draw(SEED, number)
    expected = recipe_campaign.read(EXPECTED, SEED, number)
    result = recipe_campaign.compare(recipe, usable(backend), expected)
    assert not result.wrong, recipe.describe()
    if backend.startswith("training_") and result.refused:
        pytest.skip(result.refused)
    assert not result.refused, recipe.describe()


@pytest.mark.parametrize("number", range(COUNT))
def test_the_file_has_what_torch_gives(number: int) -> None:
    pytest.importorskip("torch")
    exact, _ = recipe_campaign.expected_of(draw(SEED, number))
    known, _ = recipe_campaign.read(EXPECTED, SEED, number)
    assert set(exact) == set(known)
    for name, array in exact.items():
        np.testing.assert_allclose(array, known[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_a_wrong_weight_is_found() -> None:
    """The Trainer gets another number of epochs, loss, or penalty than the twin."""
    recipe = draw(SEED, 0)
    expected = recipe_campaign.read(EXPECTED, SEED, 0)
    for change in ({"epochs": 1}, {"penalty": {"l2": 0.3}}, {"optimizer": "sgd"}):
        other = attrs.evolve(recipe, **change)
        assert recipe_campaign.compare(other, "fused", expected).wrong, change


def test_recipes_are_drawn_of_all_kinds() -> None:
    drawn = [draw(SEED, number) for number in range(100)]
    assert {r.kind for r in drawn} == set(NETWORKS)
    assert sum(bool(r.adapters) for r in drawn) > 10
    assert sum(len(r.trained) < len(r.network.weights) and not r.adapters for r in drawn) > 10


# Receipts -----------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*")
def test_drawn_recipes_are_repeated_in_another_process(count: int, tmp_path: Path) -> None:
    for number in range(count):
        verify_campaign.train(draw(24, number), tmp_path / f"{number:04d}")
    lines = verify_campaign.in_another_process(tmp_path)
    assert [line.split(" ", 1)[1] for line in lines] == ["identical"] * count


# Several processes --------------------------------------------------------------------------------


STEPS = {"name": "fused", "steps_per_run": 1}


def compare(case: dict[str, Any], size: int, backend: Any) -> None:
    alone = distributed_campaign.outcome(case, backend, accumulate=size * case["per_rank"])

    def job(group: ThreadGroup) -> dict[str, str]:
        return distributed_campaign.outcome(
            case, backend, distributed=group, accumulate=case["per_rank"]
        )

    for of_rank in run_ranks(size, job):
        if isinstance(of_rank, BaseException):
            raise of_rank
        assert distributed_campaign.differences(case, of_rank, alone) == [], case


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "number"),
    [*(("W1", k) for k in range(6)), *(("W3", k) for k in range(4)), ("W7", 0), ("W8", 2)],
)
def test_drawn_recipes_in_threads(name: str, number: int) -> None:
    compare(distributed_campaign.draw(name, number), 2 + number % 2, STEPS)


@pytest.mark.parametrize("number", range(3))
def test_drawn_recipes_on_training_agent(number: int) -> None:
    usable("training_agent")
    compare(distributed_campaign.draw("W1", number, simple=True), 2, "training_agent")


def test_three_processes_and_1001_rows() -> None:
    compare(distributed_campaign.draw("W1", 7, 1001), 3, STEPS)


def test_the_recipes_have_all_features() -> None:
    """What ten recipes of each workload have together."""
    cases = [
        distributed_campaign.draw(name, k) for name in distributed_campaign.NAMES for k in range(10)
    ]
    options = {key for case in cases for key in case["options"]}
    wanted = {
        "penalty",
        "clip_norm",
        "transforms",
        "groups",
        "averaging",
        "constraint",
        "callbacks",
    }
    assert wanted | {"metrics"} <= options
    schedules = {str(case["options"]["schedule"]) for case in cases}
    assert any("plateau" in text for text in schedules)
    for key in ("several", "weights", "norm", "dropout", "masked"):
        assert {case[key] for case in cases} == {True, False}, key
    assert {case["options"]["shuffle"] for case in cases} == {True, False}
    assert all(case["rows"] % distributed_campaign.BATCHES[case["name"]] for case in cases)
    assert "class_weight" in str(cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", ["torch", "mpi"])
def test_the_campaign(group: str) -> None:
    pytest.importorskip("torch" if group == "torch" else "mpi4py")
    module = "tests.end_to_end.distributed_campaign"
    call = [sys.executable, "-m", module, "--groups", group, "--sizes", "2"]
    children.run(call, seconds=1500, check=True)


# The model of what many processes cost ------------------------------------------------------------


def traffic(ranks: int, size: int, way: str) -> tuple[int, float]:
    """Messages and bytes that one process sends, of vectors that are really added up."""
    rng = np.random.default_rng(ranks)
    vectors = [rng.standard_normal(size).astype(np.float32) for _ in range(ranks)]
    expected = vectors[0].copy()
    for vector in vectors[1:]:
        expected += vector
    if way == "gathered":
        return ranks - 1, (ranks - 1) * vectors[0].nbytes
    parts = [np.array_split(vector, ranks) for vector in vectors]
    messages, sent = 0, 0.0
    sums = []
    for owner in range(ranks):
        total = parts[0][owner].copy()
        for rank in range(1, ranks):
            total += parts[rank][owner]
        sums.append(total)
    for owner in range(1, ranks):  # those that rank 0 sends its slices to, and its sum
        messages += 2
        sent += parts[0][owner].nbytes + sums[0].nbytes
    assert (
        np.concatenate(sums).tobytes() == expected.tobytes()
    )  # to the bit, in the order of the ranks
    return messages, sent


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_model_counts_messages_and_bytes(ranks: int) -> None:
    size = 64 * 100
    slow = 1e30
    for way in ("gathered", "sliced"):
        messages, sent = traffic(ranks, size, way)
        latency = getattr(Network(1.0, slow, slow), way)(ranks, 4 * size)
        transfer = getattr(Network(0.0, 1.0, slow), way)(ranks, 4 * size)
        assert latency == pytest.approx(messages)
        assert transfer == pytest.approx(sent)


def test_a_fit_finds_latency_and_bandwidth() -> None:
    times = {n: 2e-5 + n / 3e9 for n in (0, 1000, 10_000, 1_000_000, 16_000_000)}
    found = fitted(times, 1e10)
    assert found.latency == pytest.approx(2e-5)
    assert found.bandwidth == pytest.approx(3e9)


# Files of C ---------------------------------------------------------------------------------------


BUILDS = tuple(b for b in c_campaign.BUILDS if shutil.which(b[0]))
OBSTACLE = compiler.obstacle() or ("" if BUILDS else "neither gcc nor clang is installed")
with_compilers = pytest.mark.skipif(bool(OBSTACLE), reason=str(OBSTACLE))


@pytest.mark.once
@pytest.mark.slow
@with_compilers
def test_a_step_has_the_same_bits_with_every_compiler_and_no_finding() -> None:
    assert c_campaign.check(1, 0, BUILDS) == []


@pytest.mark.once
@pytest.mark.slow
@with_compilers
def test_another_cost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file for the second width of vectors adds to the cost."""
    wide = c_campaign.MACHINES[-1]
    real = c_campaign.run
    seen = []

    def run(case: c_campaign.Case, *given: object) -> object:
        source = case.source
        if seen:
            source = source.replace("costs[0] = (double)", "costs[0] = 1e-3 + (double)")
        seen.append(case)
        return real(c_campaign.Case(case.label, source, case.data), *given)  # type: ignore[arg-type]

    monkeypatch.setattr(c_campaign, "run", run)
    assert c_campaign.check(1, 0, BUILDS[:1], (c_campaign.MACHINES[0], wide))
