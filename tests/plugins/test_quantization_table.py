"""The tables of docs/explanation/quantization.md: where training gains, and where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from ortflex_core import require_runtime
from tests.benchmarks import quantization
from tests.benchmarks.quantized_networks import NETWORKS, TEST

LINES = quantization.read()
LOSES = {("W4A8", "gru"): 0.74, ("W2A16", "mobilenet"): 0.81, ("W2A16", "squeeze-excite"): 0.88}
"""Where less than 0.9 of the added loss comes back: the share."""
NOTHING_LOST = {("W4A16", "unet")}
GROWS = {"W4A8": {"mobilenet", "gru", "lstm"}, "W4A16": {"gru", "lstm"}, "W2A16": {"gru", "lstm"}}
"""The files that are larger than the float file."""


def losses(name: str, bits: str, epochs: int) -> Any:
    return quantization.losses_of(quantization.lines_of(LINES, name, bits, epochs))


def test_the_page_has_the_tables_of_the_measured_lines() -> None:
    """Nobody edits a figure by hand; every network is in them, with 2,000 rows or more."""
    text = quantization.PAGE.read_text(encoding="utf-8")
    assert f"{quantization.START}\n{quantization.table(LINES)}{quantization.END}" in text
    assert TEST >= 2000
    assert len(NETWORKS) == 16


@pytest.mark.parametrize("bits", GROWS)
def test_few_bits_win_and_lose_as_the_page_says(bits: str) -> None:
    """Nine tenths of the added loss come back, but for the networks that are named here."""
    for name in NETWORKS:
        rows, place = losses(name, bits, 60), (bits, name)
        assert len(rows) >= 3, name
        assert (not quantization.costs(rows)) == (place in NOTHING_LOST), name
        if place in NOTHING_LOST:
            assert rows[:, 3].mean() < 1.005 * rows[:, 0].mean(), name
        elif place in LOSES:
            assert quantization.recovered(rows) == pytest.approx(LOSES[place], abs=0.02), name
            assert LOSES[place] < 0.9
        else:
            assert quantization.recovered(rows) >= 0.9, name
        (line, *_) = quantization.lines_of(LINES, name, bits, 60)
        assert (line["bytes"][2] > line["bytes"][0]) == (name in GROWS[bits]), name


def test_eight_bits_cost_as_much_as_with_quantize_static() -> None:
    """Losses and accuracies of the calibrated file and that of onnxruntime, which is not trained either."""
    for name in NETWORKS:
        rows = losses(name, "W8A8", 0)
        assert len(rows), name
        original, calibrated, static = rows[:, :3].mean(0)
        assert calibrated < 1.02 * original, name
        assert calibrated < 1.01 * static, name


@pytest.mark.once
def test_training_takes_back_what_two_bits_cost_and_gains_nothing_at_eight() -> None:
    """Without labels. Eight bits cost less than 2 % of the loss before and after the training."""
    if require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no int4")
    found = {r["bits"]: r for r in quantization.measure("mlp", 0, ["W8A8", "W2A16"], {"epochs": 5})}
    original, *others = found["W8A8"]["loss"]
    assert np.abs(np.array(others) / original - 1).max() < 0.02
    original, calibrated, _, trained = found["W2A16"]["loss"]
    assert calibrated > 1.2 * original
    assert calibrated - trained > 0.8 * (calibrated - original)
    accuracy, size = found["W2A16"]["accuracy"], found["W2A16"]["bytes"]
    assert accuracy[3] > accuracy[1] + 0.04
    assert size[2] < 0.22 * size[0]
