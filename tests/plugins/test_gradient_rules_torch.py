"""Gradient rules against torch, at kinks too: where a function has no slope, torch's is taken."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import gradient_model
from tests.gradcheck import computed, data
from tests.tracing import NEWEST

torch = pytest.importorskip("torch")
F = torch.nn.functional

KINKS = np.array([[-2.0, -1.0, -0.3], [0.0, 0.4, 3.0]])

# name, since, ONNX, torch
UNARY: list[tuple[str, int, Any, Any]] = [
    ("Abs", 13, lambda op, x: op.Abs(x), torch.abs),
    ("Relu", 13, lambda op, x: op.Relu(x), torch.relu),
    ("LeakyRelu", 13, lambda op, x: op.LeakyRelu(x, alpha=0.1), lambda x: F.leaky_relu(x, 0.1)),
    ("Elu", 13, lambda op, x: op.Elu(x, alpha=1.0), F.elu),
    ("Selu", 13, lambda op, x: op.Selu(x), F.selu),
    ("Softplus", 13, lambda op, x: op.Softplus(x), F.softplus),
    ("Softsign", 13, lambda op, x: op.Softsign(x), F.softsign),
    ("Sigmoid", 13, lambda op, x: op.Sigmoid(x), torch.sigmoid),
    ("Tanh", 13, lambda op, x: op.Tanh(x), torch.tanh),
    ("Erf", 13, lambda op, x: op.Erf(x), torch.erf),
    ("Clip", 13, lambda op, x: op.Clip(x, -1.0, 3.0), lambda x: torch.clamp(x, -1, 3)),
    (
        "Hardtanh",
        13,
        lambda op, x: op.Max(op.Min(x, 1.5), -0.7),
        lambda x: F.hardtanh(x, -0.7, 1.5),
    ),
    (
        "HardSigmoid",
        13,
        lambda op, x: op.HardSigmoid(x * 2, alpha=1 / 6, beta=0.5),
        lambda x: F.hardsigmoid(x * 2),
    ),
    ("HardSwish", 14, lambda op, x: op.HardSwish(x), F.hardswish),
    ("Mish", 18, lambda op, x: op.Mish(x), F.mish),
    ("Gelu", 20, lambda op, x: op.Gelu(x), F.gelu),
    (
        "Gelu-tanh",
        20,
        lambda op, x: op.Gelu(x, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
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
    ("Softmax", 13, lambda op, x: op.Softmax(x, axis=0), lambda x: torch.softmax(x, 0)),
    (
        "LogSoftmax",
        13,
        lambda op, x: op.LogSoftmax(x * 50),
        lambda x: torch.log_softmax(x * 50, -1),
    ),
    (
        "ReduceLogSumExp",
        13,
        lambda op, x: op.ReduceLogSumExp(x * 50, axes=[1]),
        lambda x: torch.logsumexp(x * 50, 1),
    ),
    ("CumSum", 14, lambda op, x: op.CumSum(x, 1), lambda x: torch.cumsum(x, 1)),
    ("Gather", 16, lambda op, x: op.Gather(x, [1, 1, 0], axis=1), lambda x: x[:, [1, 1, 0]]),
    ("Trilu", 14, lambda op, x: op.Trilu(x), torch.triu),
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


def test_powers_of_learned_exponents_equal_torch() -> None:
    base, exponent = np.array([0.0, 0.5, 2.0, 0.0]), np.array([2.0, 1.5, -0.7, 0.0])
    x, e = (torch.tensor(v, requires_grad=True) for v in (base, exponent))
    (x**e).sum().backward()
    ours = computed(lambda op, x, e: op.Pow(x, e), {"x": base, "e": exponent}, None, opset=17)
    np.testing.assert_allclose(ours["x"], x.grad.numpy(), rtol=1e-12)
    np.testing.assert_allclose(ours["e"], e.grad.numpy(), rtol=1e-12)


def test_prelu_equals_torch_at_zero() -> None:
    points, slopes = np.array([[-1.0, 0.0, 2.0]]), np.array([0.25])
    x, s = (torch.tensor(v, requires_grad=True) for v in (points, slopes))
    F.prelu(x, s).sum().backward()
    ours = computed(lambda op, x, s: op.PRelu(x, s), {"x": points, "s": slopes}, None, opset=16)
    np.testing.assert_allclose(ours["x"], x.grad.numpy())
    np.testing.assert_allclose(ours["s"], s.grad.numpy())


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_embedding_bag(mode: str, dynamo: bool) -> None:
    """A loop over the bags that gathers rows; the newer exporter appends the rows to a sequence."""
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(7, 3, mode=mode)
    rows, offsets = torch.tensor([1, 2, 2, 5, 0, 6, 1]), torch.tensor([0, 2, 3])
    names = ["rows", "offsets"]
    if dynamo:
        sizes = ({0: torch.export.Dim("N")}, {0: torch.export.Dim("B")})
        made = torch.onnx.export(
            bag,
            (rows, offsets),
            dynamo=True,
            dynamic_shapes=sizes,
            input_names=names,
            verbose=False,
        )
        proto = made.model_proto
    else:
        file = io.BytesIO()
        axes = {"rows": {0: "N"}, "offsets": {0: "B"}}
        torch.onnx.export(
            bag, (rows, offsets), file, dynamo=False, opset_version=17,
            input_names=names, output_names=["y"], dynamic_axes=axes,
        )  # fmt: skip
        proto = onnx.load_from_string(file.getvalue())
    graph = gradient_model(proto, wrt=["weight"])
    bag(rows, offsets).square().sum().backward()
    feeds = {"rows": rows.numpy(), "offsets": offsets.numpy()}
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    cotangent = next(i.name for i in session.get_inputs() if i.name.startswith("cotangent"))
    feeds |= {
        "weight": bag.weight.detach().numpy(),
        cotangent: 2 * bag(rows, offsets).detach().numpy(),
    }
    known = {i.name for i in session.get_inputs()}
    found = session.run(["gradient/weight"], {n: a for n, a in feeds.items() if n in known})[0]
    np.testing.assert_allclose(found, bag.weight.grad.numpy(), rtol=1e-5, atol=1e-6)
