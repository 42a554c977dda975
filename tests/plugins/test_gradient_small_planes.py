"""Convolutions on planes of few places: products give what torch's convolutions give in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ortflex import Trainer
from tests.training import usable

# Channels in and out, places, kernel, strides, pads, dilations, groups.
CASES: dict[str, Sequence[Any]] = {
    "same": (64, 32, (4, 4), (3, 3), [1, 1], [1, 1, 1, 1], [1, 1], 1),
    "strides, dilations, uneven pads": (64, 32, (4, 3), (3, 2), [2, 1], [1, 0, 0, 1], [1, 2], 1),
    "more windows than places": (64, 32, (2, 2), (2, 2), [1, 1], [1, 1, 1, 1], [1, 1], 1),
    "windows that leave places out": (64, 32, (4, 4), (2, 2), [3, 3], [0, 0, 0, 0], [1, 1], 1),
    "1×1": (64, 512, (2, 2), (1, 1), [1, 1], [0, 0, 0, 0], [1, 1], 1),
    "1×1, strides": (64, 128, (4, 4), (1, 1), [2, 2], [0, 0, 0, 0], [1, 1], 1),
    "1×1, pads": (64, 128, (2, 2), (1, 1), [1, 1], [1, 0, 0, 1], [1, 1], 1),
    "one axis": (64, 64, (7,), (5,), [2], [3, 1], [1], 1),
    "three axes": (64, 64, (2, 2, 3), (2, 1, 3), [1, 2, 1], [0, 1, 1, 1, 0, 1], [1, 1, 1], 1),
    "depthwise": (64, 64, (4, 4), (3, 3), [1, 1], [1, 1, 1, 1], [1, 1], 64),
    "depthwise, strides": (48, 48, (8, 7), (3, 3), [2, 1], [1, 1, 0, 1], [1, 2], 48),
    "depthwise, one axis": (64, 64, (9,), (3,), [1], [1, 1], [2], 64),
}
RNG = np.random.default_rng(8)


def draw(*shape: int, scale: float = 1.0) -> Any:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def network(case: Sequence[Any], weight: Any, factor: Any, bias: Any | None) -> onnx.ModelProto:
    """x times a factor, then the convolution: the factor's gradient is that of the input."""
    channels, _, places, _, strides, pads, dilations, group = case
    given = ["z", "W"] if bias is None else ["z", "W", "b"]
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["z"]),
        helper.make_node(
            "Conv", given, ["y"], strides=strides, pads=pads, dilations=dilations, group=group
        ),
    ]
    arrays = {"W": weight, "factor": factor} | ({} if bias is None else {"b": bias})
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", channels, *places])],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def operators(trainer: Trainer) -> Counter[str]:
    """Of the graph that was run."""
    return Counter(n.op_type for g in trainer.save_onnx_graph().values() for n in g.graph.node)


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str, biased: bool) -> None:
    torch = pytest.importorskip("torch")
    usable("fused")
    case = CASES[name]
    channels, out, places, kernel, strides, pads, dilations, group = case
    fan = channels // group
    arrays = {
        "W": draw(out, fan, *kernel, scale=(fan * np.prod(kernel)) ** -0.5),
        "factor": draw(1, channels, *places),
        "b": draw(out) if biased else None,
    }
    x, n = draw(5, channels, *places), len(kernel)
    wide = {
        k: torch.tensor(a, dtype=torch.float64, requires_grad=True)
        for k, a in arrays.items()
        if a is not None
    }
    around = [side for axis in reversed(range(n)) for side in (pads[axis], pads[axis + n])]
    inner = torch.nn.functional.pad(torch.tensor(x, dtype=torch.float64) * wide["factor"], around)
    convolve = getattr(torch.nn.functional, f"conv{n}d")
    result = convolve(
        inner, wide["W"], wide.get("b"), stride=strides, dilation=dilations, groups=group
    )
    y = draw(*result.shape)
    loss = ((result - torch.tensor(y)) ** 2).mean()
    loss.backward()

    trainer = Trainer(
        network(case, arrays["W"], arrays["factor"], arrays["b"]),
        loss="squared_error",
        optimizer="sgd",
        learning_rate=1.0,
        params=["*", "factor"],
        backend="fused",
        progress=False,
    )
    found = trainer.step((x, y))
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    for key, tensor in wide.items():
        wanted = (tensor - tensor.grad).detach().numpy()
        moved = float(tensor.grad.abs().max())
        np.testing.assert_allclose(
            trainer.get_state()[key], wanted, rtol=1e-6, atol=2e-6 + 1e-5 * moved, err_msg=key
        )
    used = operators(trainer)
    assert used["Conv"] + used["ConvTranspose"] == 0


@pytest.mark.parametrize("trained", [["W"], ["factor"]], ids="".join)
def test_one_gradient_alone(trained: list[str]) -> None:
    """What is not trained needs no gradient, and changes none."""
    usable("fused")
    case = CASES["strides, dilations, uneven pads"]
    arrays = draw(32, 64, 3, 2, scale=0.05), draw(1, 64, 4, 3), draw(32)
    x, y = draw(5, 64, 4, 3), None
    states = []
    for params in (["*", "factor"], trained):
        trainer = Trainer(
            network(case, *arrays),
            loss="squared_error",
            params=params,
            backend="fused",
            progress=False,
        )
        y = trainer.predict(x) + 1 if y is None else y
        trainer.step((x, y))
        states.append(trainer.get_state())
    (name,) = trained
    assert states[1][name].tobytes() == states[0][name].tobytes()


@pytest.mark.parametrize(
    ("places", "group", "side"),
    [((5, 4), 1, 3), ((9, 8), 32, 3), ((8, 8), 32, 17)],
    ids=["dense", "depthwise", "a kernel that is larger than the plane"],
)
def test_larger_planes_and_kernels_are_left_to_onnxruntime(
    places: tuple[int, int], group: int, side: int
) -> None:
    usable("fused")
    case = (32, 32, places, (side, side), [1, 1], [side // 2] * 4, [1, 1], group)
    trainer = Trainer(
        network(case, draw(32, 32 // group, side, side), draw(1, 32, *places), None),
        loss="squared_error",
        params=["*", "factor"],
        backend="fused",
        progress=False,
    )
    x = draw(3, 32, *places)
    trainer.step((x, x))
    assert operators(trainer)["Conv"] >= 1
