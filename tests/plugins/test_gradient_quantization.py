"""Quantization against torch's fake quantization with a learned scale."""

from __future__ import annotations

import numpy as np
import pytest

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
