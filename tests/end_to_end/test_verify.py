"""Exports are verified in another process, from their files alone: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end import verify_campaign
from tests.end_to_end.recipe_cases import draw

pytestmark = pytest.mark.once


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*")
def test_drawn_recipes_are_repeated_in_another_process(count: int, tmp_path: Path) -> None:
    for number in range(count):
        verify_campaign.train(draw(24, number), tmp_path / f"{number:04d}")
    lines = verify_campaign.in_another_process(tmp_path)
    assert [line.split(" ", 1)[1] for line in lines] == ["identical"] * count
