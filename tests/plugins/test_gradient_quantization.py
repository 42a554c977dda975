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
