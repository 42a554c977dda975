"""Inputs that are out of scale: one warning with the line that repairs it, and none for others."""

import logging

import numpy as np
import pytest

from tests import models
from tests.training import make

pytestmark = pytest.mark.once
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), np.uint8)
TABLE = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)


def model(first, shape, outputs=4):
    """``first`` nodes from x to h, then Conv or Gemm and the mean of its values."""
    images = len(shape) == 4
    sizes = (outputs, shape[1], 3, 3) if images else (shape[1], outputs)
    weights = {"w": np.random.default_rng(2).normal(size=sizes) * 0.3, "scale": np.array(255.0)}
    product = f"{'Conv' if images else 'MatMul'}(h, w)"
    mean = f"y = ReduceMean <axes = {list(range(1, len(shape)))}, keepdims = 0> (c)"
    given = f"float[n, {', '.join(map(str, shape[1:]))}] x"
    return models.parsed(f"{first}  c = {product}  {mean}", weights, given, "float[n] y")


def warnings_of(caplog, first, X):
    y = np.zeros(len(X), np.float32)
    with caplog.at_level(logging.WARNING, "ortflex"):
        options = {"learning_rate": 1e-9, "params": ["w"], "epochs": 1}
        trainer = make(model(first, X.shape), backend="fused", **options)
        trainer.fit(X, y)
        trainer.fit(X, y)
    messages = [r.getMessage() for r in caplog.records]
    return [text for text in messages if "repair" in text or "size" in text]


PLAIN, SCALED = "h = Identity(x)", "h = Div(x, scale)"


@pytest.mark.parametrize(
    ("first", "X", "repair"),
    [
        (PLAIN, IMAGES, "/ 255"),
        (PLAIN, TABLE * 1e4, "X.std(0)"),
        (PLAIN, IMAGES.astype(np.float32) / 255, None),
        (PLAIN, np.uint8(IMAGES > 99), None),
        (PLAIN, TABLE, None),
        (PLAIN, TABLE * 1e-3, None),
        (SCALED, IMAGES, None),
        (SCALED, TABLE * 1e4, None),
    ],
)
def test_one_warning_with_its_repair(caplog, first, X, repair):
    found = warnings_of(caplog, first, X)
    assert len(found) == (repair is not None)
    assert repair is None or repair in found[0]
