"""Gradient rules against torch, at kinks and quantizers; where there is no slope, torch's is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortflex_core import gradient_model, require_runtime
from tests.gradcheck import computed, data
from tests.tracing import NEWEST

pytest.importorskip("torch")

import torch

from tests.torch_files import exported

F = torch.nn.functional

KINKS = np.array([[-2.0, -1.0, -0.3], [0.0, 0.4, 3.0]])

# name, since, ONNX, torch; smooth ones are drawn, and compared with torch's, in test_gradient_rules.py
UNARY: list[tuple[str, int, Any, Any]] = [
    ("Abs", 13, lambda op, x: op.Abs(x), torch.abs),
    ("Relu", 13, lambda op, x: op.Relu(x), torch.relu),
    ("LeakyRelu", 13, lambda op, x: op.LeakyRelu(x, alpha=0.1), lambda x: F.leaky_relu(x, 0.1)),
    ("Elu", 13, lambda op, x: op.Elu(x, alpha=1.0), F.elu),
    ("Selu", 13, lambda op, x: op.Selu(x), F.selu),
    ("Softsign", 13, lambda op, x: op.Softsign(x), F.softsign),
    ("Clip", 13, lambda op, x: op.Clip(x, -1.0, 3.0), lambda x: torch.clamp(x, -1, 3)),
    ("Hardtanh", 13, lambda op, x: op.Max(op.Min(x, 2), -0.7), lambda x: F.hardtanh(x, -0.7, 2)),
    (
        "HardSigmoid",
        13,
        lambda op, x: op.HardSigmoid(x * 2, alpha=1 / 6, beta=0.5),
        lambda x: F.hardsigmoid(x * 2),
    ),
    ("HardSwish", 14, lambda op, x: op.HardSwish(x), F.hardswish),
    ("Celu", 13, lambda op, x: op.Celu(x, alpha=0.6), lambda x: F.celu(x, 0.6)),
    (
        "ThresholdedRelu",
        13,
        lambda op, x: op.ThresholdedRelu(x, alpha=0.4),
        lambda x: F.threshold(x, 0.4, 0.0),
    ),
    ("Pow-2", 13, lambda op, x: x**2, lambda x: x**2),
    ("Pow-3", 13, lambda op, x: x**3, lambda x: x**3),
    ("Pow-0", 13, lambda op, x: x**0, lambda x: x**0),
    ("ReduceL2", 13, lambda op, x: op.ReduceL2(x, axes=[1]), lambda x: torch.linalg.norm(x, dim=1)),
    ("ReduceL2-zero", 13, lambda op, x: op.ReduceL2(x * 0), lambda x: torch.linalg.norm(x * 0)),
    ("ReduceProd", 13, lambda op, x: op.ReduceProd(x, axes=[1]), lambda x: torch.prod(x, dim=1)),
    ("LogSoftmax", 13, lambda op, x: op.LogSoftmax(x * 50), lambda x: (x * 50).log_softmax(-1)),
    (
        "ReduceLogSumExp",
        13,
        lambda op, x: op.ReduceLogSumExp(x * 50, axes=[1]),
        lambda x: torch.logsumexp(x * 50, 1),
    ),
    (
        "Pad-reflect",
        13,
        lambda op, x: op.Pad(x, [0, 1, 0, 2], mode="reflect"),
        lambda x: F.pad(x, (1, 2), "reflect"),
    ),
]


@pytest.mark.parametrize(
    ("since", "formula", "function"), [u[1:] for u in UNARY], ids=[u[0] for u in UNARY]
)
def test_equals_torch(since: int, formula: Any, function: Any) -> None:
    if since > NEWEST:
        pytest.skip(f"needs opset {since}, this onnxruntime has {NEWEST}")
    x = torch.tensor(KINKS, dtype=torch.float64, requires_grad=True)
    y = function(x)
    seed = data(*y.shape, seed=9)
    y.backward(torch.tensor(seed))
    ours = computed(
        formula,
        {"x": KINKS.astype(np.float32)},
        seed.astype(np.float32).reshape(_kept(formula, y.shape)),
        opset=since,
    )
    np.testing.assert_allclose(ours["x"], x.grad.numpy(), rtol=1e-5, atol=1e-6)


def _kept(formula: Any, shape: Any) -> tuple[int, ...]:
    """Reductions keep their axes here; torch drops them."""
    return {0: (1, 1), 1: (2, 1)}.get(len(shape), tuple(shape))


@pytest.mark.parametrize(
    ("formula", "function", "x", "s"),
    [
        (lambda op, x, s: op.Pow(x, s), torch.pow, [0.0, 0.5, 2.0, 0.0], [2.0, 1.5, -0.7, 0.0]),
        (lambda op, x, s: op.PRelu(x, s), F.prelu, [[-1.0, 0.0, 2.0]], [0.25]),
    ],
    ids=["powers of learned exponents", "PRelu at zero"],
)
def test_slopes_by_two_inputs_equal_torch(formula: Any, function: Any, x: Any, s: Any) -> None:
    arrays = {"x": np.array(x), "s": np.array(s)}
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays.values()]
    function(*tensors).sum().backward()
    ours = computed(formula, arrays, None, opset=17)
    for name, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(ours[name], tensor.grad.numpy(), rtol=1e-12)


def test_attention_equals_torch() -> None:
    """A transformer's core: products in batches, a mask, softmax, reshapes."""
    q, k, v = (data(2, 4, 6, seed=s) for s in range(3))
    mask = np.tril(np.ones((4, 4), bool))

    def formula(op: Any, q: Any, k: Any, v: Any) -> Any:
        def heads(x: Any) -> Any:
            return op.Transpose(op.Reshape(x, [0, 0, 2, 3]), perm=[0, 2, 1, 3])

        scores = op.MatMul(heads(q), op.Transpose(heads(k), perm=[0, 1, 3, 2])) * 3**-0.5
        weights = op.Softmax(op.Where(op.constant(mask), scores, -1e9))
        return op.Reshape(op.Transpose(op.MatMul(weights, heads(v)), perm=[0, 2, 1, 3]), [0, 0, 6])

    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    split = [t.reshape(2, 4, 2, 3).transpose(1, 2) for t in tensors]
    y = F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(2, 4, 6)
    seed = data(2, 4, 6, seed=5)
    y.backward(torch.tensor(seed))
    ours = computed(formula, {"q": q, "k": k, "v": v}, seed, opset=17, known="names")
    for name, tensor in zip("qkv", tensors, strict=True):
        # onnxruntime moves the factor 3**-0.5 into its fused product, as float32.
        np.testing.assert_allclose(ours[name], tensor.grad.numpy(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_embedding_bag(mode: str, dynamo: bool) -> None:
    """A loop over the bags that gathers rows; the newer exporter appends the rows to a sequence."""
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(7, 3, mode=mode)
    rows, offsets = torch.tensor([1, 2, 2, 5, 0, 6, 1]), torch.tensor([0, 2, 3])
    proto = exported(bag, (rows, offsets), ["rows", "offsets"], dynamo=dynamo)
    graph = gradient_model(proto, wrt=["weight"])
    bag(rows, offsets).square().sum().backward()
    feeds = {"rows": rows.numpy(), "offsets": offsets.numpy()}
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    cotangent = next(i.name for i in session.get_inputs() if i.name.startswith("cotangent"))
    feeds["weight"] = bag.weight.detach().numpy()
    feeds[cotangent] = 2 * bag(rows, offsets).detach().numpy()
    known = {i.name for i in session.get_inputs()}
    found = session.run(["gradient/weight"], {n: a for n, a in feeds.items() if n in known})[0]
    np.testing.assert_allclose(found, bag.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


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
            places = [-1 if k == axis else 1 for k in range(len(shape))]
            return v if axis is None else v.reshape(places)

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
