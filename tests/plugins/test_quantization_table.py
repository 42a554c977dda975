"""A sample of the table of docs/explanation/quantization.md: where training gains, where it does not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from ortflex_core import require_runtime
from tests.benchmarks.quantization import measure

pytestmark = pytest.mark.once


def test_training_takes_back_what_two_bits_cost_and_gains_nothing_at_eight() -> None:
    """Without labels. Eight bits cost less than 2 % of the loss before and after the training."""
    if require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no int4")
    found = measure("mlp", 0, 5, ["W8A8", "W2A16"])
    original, calibrated, static, trained, *_ = found["W8A8"]
    for loss in (calibrated, static, trained):
        assert abs(loss / original - 1) < 0.02
    original, calibrated, _, trained, *accuracies, size = found["W2A16"]
    assert calibrated > 1.2 * original
    assert calibrated - trained > 0.8 * (calibrated - original)
    assert accuracies[2] > accuracies[1] + 0.04
    assert size < 0.2
