"""Quantization against torch's fake quantization with a learned scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import require_runtime
from tests.gradcheck import computed, data

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_learned_scale_equals_torch(axis: int | None) -> None:
    x = data(4, 3, low=-3, high=3).astype(np.float32)
    scale = np.array(0.013, np.float32)
    if axis is not None:
        scale = data(x.shape[axis], low=0.005, high=0.03, seed=1).astype(np.float32)
    seed = data(4, 3, seed=2).astype(np.float32)
    tensors = [torch.tensor(v, requires_grad=True) for v in (x, scale.reshape(-1))]
    zeros = torch.zeros(scale.size)
    if axis is None:
        y = torch._fake_quantize_learnable_per_tensor_affine(*tensors, zeros, -128, 127, 1.0)
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(*tensors, zeros, axis, -128, 127, 1.0)
    y.backward(torch.tensor(seed))
    at = {} if axis is None else {"axis": axis}

    def pair(op, x, s):  # type: ignore[no-untyped-def]
        zero = np.zeros(scale.shape, np.int8)
        return op.DequantizeLinear(op.QuantizeLinear(x, s, zero, **at), s, zero, **at)

    got = computed(pair, {"x": x, "s": scale}, seed, opset=17)
    np.testing.assert_allclose(got["x"], tensors[0].grad.numpy(), rtol=1e-5)
    inside = np.abs(x / (scale if axis is None else np.moveaxis(scale[None], -1, axis))) < 127
    assert 0 < inside.sum() < x.size
    # Beyond the range the scale learns from the bound that is taken, as in torch.
    np.testing.assert_allclose(got["s"].reshape(-1), tensors[1].grad.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("between", ["clip", "moved"])
@pytest.mark.parametrize(
    ("axis", "low", "high", "zero"), [(None, 0, 127, 64), (None, -127, 127, 0), (1, -7, 7, 0)]
)
def test_a_clip_of_integers_is_the_range_of_the_quantization(
    axis: int | None, low: int, high: int, zero: int, between: str
) -> None:
    """torch's FakeQuantize with a reduced range is QuantizeLinear, Clip, DequantizeLinear in a file.

    The class: operators on integers between both, which used to cut the gradient.
    """
    x = data(4, 3, low=-3, high=3).astype(np.float32)
    scale = np.array(0.013 if high > 7 else 0.2, np.float32)
    if axis is not None:
        scale = data(x.shape[axis], low=0.1, high=0.3, seed=1).astype(np.float32)
    seed = data(4, 3, seed=2).astype(np.float32)
    tensors = [torch.tensor(v, requires_grad=True) for v in (x, scale.reshape(-1))]
    zeros = torch.full((scale.size,), float(zero))
    if axis is None:
        y = torch._fake_quantize_learnable_per_tensor_affine(*tensors, zeros, low, high, 1.0)
        fixed = torch.tensor(x, requires_grad=True)
        plain = torch.fake_quantize_per_tensor_affine(fixed, float(scale), zero, low, high)
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(*tensors, zeros, axis, low, high, 1.0)
        fixed = torch.tensor(x, requires_grad=True)
        plain = torch.fake_quantize_per_channel_affine(
            fixed, torch.tensor(scale), zeros.int(), axis, low, high
        )
    y.backward(torch.tensor(seed))
    plain.backward(torch.tensor(seed))
    kind = np.uint8 if low == 0 else np.int8
    at = {} if axis is None else {"axis": axis}

    def chain(op, x, s):  # type: ignore[no-untyped-def]
        place = np.full(scale.shape, zero, kind)
        q = op.Clip(op.QuantizeLinear(x, s, place, **at), kind(low), kind(high))
        if between == "moved":
            q = op.Transpose(op.Reshape(op.Unsqueeze(q, axes=[0]), [4, 3]), perm=[1, 0])
            return op.Transpose(
                op.DequantizeLinear(q, s, place, **({} if axis is None else {"axis": 1 - axis})),
                perm=[1, 0],
            )
        return op.DequantizeLinear(q, s, place, **at)

    got = computed(chain, {"x": x, "s": scale}, seed, opset=17)
    np.testing.assert_allclose(got["x"], tensors[0].grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got["x"], fixed.grad.numpy(), rtol=1e-5)
    assert 0 < np.count_nonzero(got["x"]) < x.size
    np.testing.assert_allclose(got["s"].reshape(-1), tensors[1].grad.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("group", range(6))
def test_drawn_pairs_equal_torch(group: int) -> None:
    """Ten drawn pairs each: ranks, axes, blocks, types, zero points, values in and outside of the range."""
    for number in range(10):
        draw = np.random.default_rng([group, number])
        blocks = draw.random() < 0.25 and require_runtime().version_info >= (1, 20)
        shape = (
            (6, int(draw.integers(1, 5)))
            if blocks
            else tuple(draw.integers(2, 5, draw.integers(2, 5)))
        )
        axis = 0 if blocks else [None, *range(len(shape))][draw.integers(0, len(shape) + 1)]
        kind = np.int8 if draw.random() < 0.5 else np.uint8
        low, high = (int(v) for v in (np.iinfo(kind).min, np.iinfo(kind).max))
        sizes = (2, shape[1]) if blocks else () if axis is None else (shape[axis],)
        scale = draw.uniform(0.01, 0.03, sizes).astype(np.float32)
        zero = draw.integers(low // 2, high // 2 + 1, sizes).astype(kind)
        # Between two codes: a tie is rounded by the last bit of the division.
        codes = draw.integers(low - 60, high + 60, shape) + draw.uniform(-0.4, 0.4, shape)
        at = {"axis": axis, "block_size": 3} if blocks else {} if axis is None else {"axis": axis}

        def spread(v: Any, *, shape: Any = shape, axis: Any = axis, blocks: Any = blocks) -> Any:
            if blocks:
                return np.repeat(v, 3, 0)
            return (
                v
                if axis is None
                else v.reshape([-1 if k == axis else 1 for k in range(len(shape))])
            )

        x = ((codes - spread(zero.astype(np.float64))) * spread(scale)).astype(np.float32)
        seed = draw.standard_normal(shape).astype(np.float32)

        def lines(v: Any, *, blocks: Any = blocks, shape: Any = shape, axis: Any = axis) -> Any:
            """The elements of a block, or of all, in a line, as of a channel."""
            if axis is None:
                return v.reshape(1, -1)
            return v.reshape(2, 3, shape[1]).swapaxes(1, 2).reshape(-1, 3) if blocks else v

        tensors = [torch.tensor(v, requires_grad=True) for v in (lines(x), scale.reshape(-1))]
        zeros = torch.tensor(zero.reshape(-1).astype(np.float32))
        # As one channel: the kernel for whole tensors truncates negative codes, it does not round.
        y = torch._fake_quantize_learnable_per_channel_affine(
            *tensors, zeros, axis or 0, low, high, 1.0
        )
        y.backward(torch.tensor(lines(seed)))

        def pair(op: Any, x: Any, s: Any, *, zero: Any = zero, at: Any = at) -> Any:
            return op.DequantizeLinear(op.QuantizeLinear(x, s, zero, **at), s, zero, **at)

        got = computed(pair, {"x": x, "s": scale}, seed, opset=21 if blocks else 17)
        wanted = [t.grad.numpy() for t in tensors]
        what = f"{shape}, {at}, {kind.__name__}"
        np.testing.assert_allclose(lines(got["x"]), wanted[0], rtol=1e-6, err_msg=what)
        error = np.abs(got["s"].reshape(-1) - wanted[1]).max()
        assert error <= 1e-6 * np.abs(seed).sum() * 200, what  # the sum of up to 200 units each
        assert 0 < np.count_nonzero(got["x"]) < x.size or x.size < 24, what
