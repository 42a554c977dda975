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
LOSES = {
    ("W4A8", "gru"): 0.74,
    ("W4A16", "vgg"): 0.88,
    ("W2A16", "mobilenet"): 0.80,
    ("W2A16", "squeeze-excite"): 0.86,
}
"""Where less than 0.9 of the added loss comes back: the share."""
SEEDS = 5
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
        assert len(rows) == SEEDS, name
        assert quantization.costs(rows), name
        if place in LOSES:
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
        assert len(rows) == SEEDS, name
        original, calibrated, static = rows[:, :3].mean(0)
        assert calibrated < 1.02 * original, name
        assert calibrated < 1.01 * static, name


def test_accuracies_are_those_of_torchao() -> None:
    """Of the networks without convolutions, which torchao can train; differences are within the noise."""
    trained = {r["network"] for r in LINES if r["bits"] == quantization.PEER}
    assert trained == {"mlp", "regression", "gru", "lstm", "transformer", "vit", "mixer"}
    for name in trained:
        bits = "W4A8", quantization.PEER
        both = (quantization.lines_of(LINES, name, b, 60) for b in bits)
        ours, theirs = both
        assert len(ours) == len(theirs) == SEEDS
        losses = [np.mean([r["loss"][3] for r in lines]) for lines in (ours, theirs)]
        assert losses[0] < 1.03 * losses[1], name
        if name != "regression":
            means = [np.mean([r["accuracy"][3] for r in lines]) for lines in (ours, theirs)]
            assert abs(means[0] - means[1]) < 0.005, name


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
