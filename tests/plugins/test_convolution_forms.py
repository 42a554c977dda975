"""Training of convolutions in every form of their gradients, on every backend, next to numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array
from tests import models
from tests.plugins import window_oracles as oracles
from tests.training import every_backend, make

RNG = np.random.default_rng(5)
# Channels in and out, places, kernel, strides, pads, dilations, groups, samples.
SQUARE = (3, 3), [1, 1], [1, 1, 1, 1], [1, 1]
CASES: dict[str, tuple[Any, ...]] = {
    "small planes": (16, 32, (7, 7), *SQUARE, 1, 9),
    "small planes, few samples": (16, 32, (7, 7), *SQUARE, 1, 3),
    "small planes of Y": (32, 16, (8, 8), *SQUARE, 1, 8),
    "small planes of Y alone": (16, 32, (9, 10), (3, 4), [1, 1], [0, 0, 0, 0], [1, 1], 1, 8),
    "small planes, all different": (32, 24, (9, 5), (3, 2), [2, 1], [1, 0, 0, 1], [1, 2], 1, 8),
    "small planes, a rest": (32, 16, (6, 8), (3, 3), [2, 2], [0, 1, 0, 1], [1, 1], 1, 8),
    "small planes of one axis": (64, 16, (40,), (5,), [1], [2, 1], [2], 1, 9),
    "planes": (8, 32, (12, 11), *SQUARE, 1, 4),
    "planes, all different": (8, 6, (13, 10), (2, 3), [2, 3], [1, 0, 1, 2], [2, 1], 1, 5),
    "planes, one axis": (8, 8, (40,), (4,), [3], [1, 2], [1], 1, 8),
    "planes, three axes": (
        8,
        4,
        (5, 6, 4),
        (3, 2, 3),
        [2, 1, 1],
        [1, 0, 1, 1, 1, 0],
        [1, 1, 2],
        1,
        6,
    ),
    "planes, groups": (16, 12, (9, 8), (3, 3), [2, 2], [1, 1, 0, 1], [1, 1], 2, 6),
    "few channels": (2, 8, (12, 12), *SQUARE, 1, 8),
    "few channels, many outputs": (3, 32, (10, 10), *SQUARE, 1, 8),
    "depthwise, large planes": (6, 12, (18, 18), *SQUARE, 6, 8),
}


def draw(*shape: int, scale: float = 1.0) -> Array:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def network(case: tuple[Any, ...], weight: Array, factor: Array) -> onnx.ModelProto:
    """x times a factor, then the convolution: the factor's gradient is that of the input."""
    channels, _, places, _, strides, pads, dilations, group, _ = case
    how = f"strides = {strides}, pads = {pads}, dilations = {dilations}, group = {group}"
    text = f"z = Mul(x, factor) y = Conv<{how}>(z, W)"
    image = ", ".join(map(str, ("N", channels, *places)))
    arrays = {"W": weight, "factor": factor}
    model = models.parsed(text, arrays, f"float[{image}] x", f"float[{'A, ' * len(places)}A, A] y")
    model.graph.output[0].type.Clear()
    return onnx.shape_inference.infer_shapes(model)


def expected(case: tuple[Any, ...], x: Array, y: Array, weight: Array, factor: Array) -> Any:
    """The loss, and the gradients of the weight and the factor."""
    *_, strides, pads, dilations, group, samples = case
    n, out = len(strides), y.shape[2:]
    how = {"strides": strides, "pads": pads, "dilations": dilations}
    z = x.astype(np.float64) * factor
    wide = weight.astype(np.float64)
    difference = oracles.conv(z, wide, group=group, **how) - y
    g = 2 * difference / difference.size
    slope = np.zeros_like(wide)
    count = int(np.prod(out))
    split = g.reshape(samples, group, -1, count)
    sizes = weight.shape[2:]
    for place, part in oracles.taps(z, sizes, strides, dilations, pads, out, 0.0):
        parts = part.reshape(samples, group, -1, count)
        total = np.einsum("ngml,ngcl->gmc", split, parts)
        slope[(..., *place)] = total.reshape(wide.shape[:2])
    spans = zip(x.shape[2:], pads[:n], pads[n:], out, strides, dilations, sizes, strict=True)
    rest = [a + p + q - (o - 1) * s - d * (k - 1) - 1 for a, p, q, o, s, d, k in spans]
    back = oracles.conv_transpose(g, wide, group=group, more=rest, **how)
    return (difference**2).mean(), slope, (back * x).sum(0, keepdims=True)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("small planes", {3}),  # everything has the samples as an axis
        ("small planes of Y", {2, 3}),  # the gradient of X has not
        ("small planes, few samples", {2, 3}),  # the gradient of the kernel has the channels as one
        ("few channels", {2}),
        ("planes, three axes", {3}),
    ],
)
def test_convolutions_have_an_additional_axis_where_that_is_faster(
    name: str, axes: set[int]
) -> None:
    case = CASES[name]
    channels, out, places, kernel, *_, samples = case
    model = network(case, draw(out, channels, *kernel), draw(1, channels, *places))
    trainer = make(model, params=["*", "factor"], backend="fused", batch_size=samples)
    x = draw(samples, channels, *places)
    trainer.step((x, trainer.predict(x)))
    nodes = [n for g in trainer.save_onnx_graph().values() for n in g.graph.node]
    found = [n for n in nodes if n.op_type in ("Conv", "ConvTranspose")]
    assert {len(a.ints) for n in found for a in n.attribute if a.name == "strides"} == axes


@every_backend
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_every_backend_is_that_of_numpy(name: str, backend: str) -> None:
    case = CASES[name]
    channels, out, places, kernel, *_, group, samples = case
    fan = channels // group
    weight = draw(out, fan, *kernel, scale=(fan * np.prod(kernel)) ** -0.5)
    factor, x = draw(1, channels, *places), draw(samples, channels, *places)
    model = network(case, weight, factor)
    trainer = make(model, learning_rate=1.0, params=["*", "factor"], backend=backend)
    y = draw(*trainer.predict(x).shape)
    loss, *slopes = expected(case, x, y, weight, factor)
    np.testing.assert_allclose(trainer.step((x, y)), loss, rtol=1e-5)
    for key, old, slope in zip(("W", "factor"), (weight, factor), slopes, strict=True):
        tolerance = 2e-6 + 1e-5 * abs(slope).max()
        np.testing.assert_allclose(
            trainer.get_state()[key], old - slope, rtol=1e-6, atol=tolerance, err_msg=key
        )
