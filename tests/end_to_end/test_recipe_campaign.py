"""A few drawn recipes on the backends that are installed; ``recipe_campaign`` runs any number of them.

The class of errors: numbers that are wrong in silence, where parts that are right alone meet: frozen and
adapted weights, penalties, transforms, schedules, accumulation, averages and sample weights. The
twin is torch in float64; its results are in a file, for environments without torch.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest

from tests.end_to_end import recipe_campaign
from tests.end_to_end.recipe_cases import NETWORKS, draw
from tests.training import every_backend, usable

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
