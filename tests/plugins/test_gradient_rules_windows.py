"""Convolutions and pooling: every form of a kernel's gradient, ties, torch, small planes, refusals."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from ortflex_core import Array, NoGradientRule, Trace, build, gradient_model, gradients
from ortflex_plugins.gradients import convolution
from tests import models
from tests.gradcheck import RULES, computed, data, jacobian, run
from tests.plugins.gradient_cases import CONV, Case, call
from tests.plugins.gradient_samples import sample
from tests.training import make

FORMS = {
    "one convolution": {"_FEW_CHANNELS": 0, "_FEW_CHANNELS_OF_MANY": 0},
    "side by side": {"_TINY": 0, "_FEW_CHANNELS": 1 << 60, "_MANY_OUTPUTS": 1 << 60},
}


@functools.cache
def convolutions(operator: str) -> list[tuple[Case, Array, dict[str, Array]]]:
    """Written and drawn cases, their values and their central differences."""
    found = [*(CONV if operator == "Conv" else []), *sample(operator, 14)]
    return [(c, *jacobian(lambda feeds, c=c: c.oracle(**feeds), c.arrays)) for c in found]


def backward(case: Case, batch: int | str, *, seed: Any, opset: int = 17) -> dict[str, Any]:
    """Gradients where only the batch may be unknown, as in a training step; and the program."""
    trace = Trace({"": opset})
    tensors, feeds = {}, {"seed": seed}
    for name, array in case.arrays.items():
        feeds[name] = array.astype(np.float32)
        shape = (batch, *array.shape[1:]) if name == "x" else array.shape
        tensors[name] = trace.input(name, np.float32, shape)
    y = case.formula(trace.op, **tensors)
    cotangent = trace.input("seed", np.float32, (batch, *seed.shape[1:]))
    found = gradients([(y, cotangent)], list(tensors.values()), RULES)
    named = {f"d{name}": g for name, g in zip(tensors, found, strict=True)}
    program = build(trace, named, name="backward")
    values = run(program, feeds)
    return {name[1:]: value for name, value in values.items()} | {"program": program}


@pytest.mark.parametrize("batch", ["static", "N"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_every_form_of_a_kernels_gradient(
    operator: str, form: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in FORMS[form].items():
        monkeypatch.setattr(convolution, constant, value)
    for case, y, slopes in convolutions(operator):
        seed = data(*y.shape, seed=9).astype(np.float32)
        got = backward(case, len(case.arrays["x"]) if batch == "static" else batch, seed=seed)
        for input_, slope in slopes.items():
            exact = np.tensordot(slope, seed, seed.ndim).reshape(case.arrays[input_].shape)
            np.testing.assert_allclose(
                got[input_], exact, rtol=1e-4, atol=1e-5 * max(1.0, abs(exact).max()),
                err_msg=f"d{input_} of {case.name}",
            )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "y", "batch", "most"),
    [
        (call("Conv", x=data(2, 2, 7), w=data(3, 2, 3)), (3, 5), 2, 8),
        (call("Conv", x=data(2, 2, 7), w=data(3, 2, 3)), (3, 5), "N", 16),
        (call("Conv", x=data(2, 3, 3, 4), w=data(2, 3, 1, 1)), (2, 3, 4), 2, 9),
        (call("Conv", x=data(2, 3, 3, 4), w=data(2, 3, 1, 1)), (2, 3, 4), "N", 9),
        (
            call("ConvTranspose", x=data(2, 2, 3, 2), w=data(2, 2, 2, 2), strides=[2, 2]),
            (2, 6, 4),
            "N",
            17,
        ),
    ],
    ids=["1d", "1d of a batch", "1x1", "1x1 of a batch", "transposed"],
)
def test_known_sizes_ask_for_no_shape(case: Case, y: Any, batch: int | str, most: int) -> None:
    program = backward(case, batch, seed=np.ones((2, *y), np.float32))["program"]
    kinds = [n.op_type for n in program.proto().graph.node]
    assert "Shape" not in kinds
    assert len(kinds) <= most, kinds


@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "with padding"])
def test_the_first_of_equal_maxima_gets_all(tiles: bool) -> None:
    x = np.zeros((1, 1, 4, 4))
    x[0, 0, :2, 2:] = [[1, 5], [5, 5]]
    x[0, 0, 2:, :2] = [[2, 1], [2, 2]]
    pads = [0, 0, 0, 0] if tiles else [0, 0, 1, 1]
    got = computed(
        lambda op, x: op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2], pads=pads),
        {"x": x.astype(np.float32)},
        np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2),
        opset=17,
    )["x"]
    assert np.argwhere(got[0, 0]).tolist() == [[0, 0], [0, 3], [2, 0], [2, 2]]


def test_windows_that_tile_need_no_indices() -> None:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, ("N", 3, 4, 4))
    y = trace.op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
    seed = trace.input("seed", np.float32, y.shape)
    program = build(trace, {"dx": gradients([(y, seed)], [x], RULES)[0]}, name="backward")
    kinds = {n.op_type for n in program.proto().graph.node}
    assert not kinds & {"ScatterElements", "Shape"}


@pytest.mark.parametrize("ceil", [False, True])
def test_pooling_equals_torch(ceil: bool, torch: Any) -> None:
    pool = torch.nn.functional
    # Whole numbers: ties everywhere.
    x = np.random.default_rng(0).integers(0, 3, (2, 3, 8, 10)).astype(np.float32)
    for kernel, stride, pad in ((2, 2, 0), (3, 2, 1), (3, 1, 0)):
        settings: Any = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        sizes = {"kernel_size": kernel, "stride": stride, "padding": pad}
        for ours, theirs in (
            (
                lambda op, x, s=settings: op.MaxPool(x, ceil_mode=int(ceil), **s),
                partial(pool.max_pool2d, ceil_mode=ceil, **sizes),
            ),
            (
                lambda op, x, s=settings: op.AveragePool(x, count_include_pad=1, **s),
                partial(pool.avg_pool2d, **sizes),
            ),
            (
                lambda op, x, s=settings: op.AveragePool(x, **s),
                partial(pool.avg_pool2d, count_include_pad=False, **sizes),
            ),
        ):
            t = torch.tensor(x, requires_grad=True)
            y = theirs(t)
            seed = data(*y.shape, seed=3).astype(np.float32)
            y.backward(torch.tensor(seed))
            got = computed(ours, {"x": x}, seed, opset=17)["x"]
            np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_convolutions_of_common_sizes_equal_torch(torch: Any) -> None:
    """Sizes at which the large forms are chosen by themselves."""
    for x, w, settings in (
        ((16, 3, 20, 20), (8, 3, 5, 5), {}),
        ((8, 32, 24, 24), (32, 32, 3, 3), {"padding": 1}),
        ((16, 32, 24, 24), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
        ((4, 16, 17, 17), (32, 16, 3, 3), {"padding": 1, "stride": 2}),
        ((4, 24, 9, 9), (16, 24, 1, 1), {}),
    ):
        a, b = (torch.tensor(data(*s).astype(np.float32), requires_grad=True) for s in (x, w))
        y = torch.nn.functional.conv2d(a, b, **settings)
        seed = data(*y.shape, seed=4).astype(np.float32)
        y.backward(torch.tensor(seed))
        onnx_ = {
            "pads": [settings.get("padding", 0)] * 4,
            "strides": [settings.get("stride", 1)] * 2,
            "group": settings.get("groups", 1),
        }
        arrays = {"x": a.detach().numpy(), "w": b.detach().numpy()}
        got = computed(lambda op, x, w, s=onnx_: op.Conv(x, w, **s), arrays, seed, opset=17)
        for name, tensor in (("x", a), ("w", b)):
            exact = tensor.grad.numpy()
            np.testing.assert_allclose(got[name], exact, rtol=2e-4, atol=2e-5 * abs(exact).max())


@pytest.mark.parametrize(
    ("formula", "shapes", "known", "message"),
    [
        (
            lambda op, x, w: op.Conv(x, w, auto_pad="SAME_UPPER"),
            ((1, 1, 4, 4), (1, 1, 2, 2)),
            "names",
            "Conv with auto_pad=SAME_UPPER and a kernel of unknown size of ai.onnx",
        ),
        (
            lambda op, x, w: op.Conv(x, w),
            ((1, 1, 4, 4), (1, 1, 2, 2)),
            "nothing",
            "Conv on a tensor of unknown rank of ai.onnx",
        ),
        (
            lambda op, x, w: op.ConvTranspose(x, w, strides=[2, 2], output_shape=[7, 7]),
            ((1, 1, 3, 3), (1, 1, 2, 2)),
            "names",
            "ConvTranspose with output_shape on sizes that are not known",
        ),
        (
            lambda op, x, w: op.GlobalMaxPool(x) * op.ReduceSum(w),
            ((1, 1, 3, 3), (1,)),
            "nothing",
            "GlobalMaxPool on a tensor of unknown rank",
        ),
    ],
)
def test_what_cannot_be_known_is_refused(
    formula: Any, shapes: Any, known: Any, message: str
) -> None:
    arrays = {n: data(*s).astype(np.float32) for n, s in zip("xw", shapes, strict=True)}
    with pytest.raises(NoGradientRule, match=message):
        computed(formula, arrays, None, opset=17, known=known)


@pytest.mark.parametrize("pads", ["SAME_UPPER", "SAME_LOWER", None])
def test_a_shape_asked_of_a_transposed_convolution(pads: str | None) -> None:
    """The padding follows from the shape; the forward itself is the oracle: Y is linear in X and W."""
    x, w = (data(*s, seed=k).astype(np.float32) for k, s in enumerate(((1, 2, 3, 3), (2, 1, 3, 3))))
    how = {"auto_pad": pads} if pads else {"output_shape": [6, 5]}
    settings: dict[str, Any] = {"strides": [2, 2], **how}

    def forward(x: Any, w: Any) -> Any:
        trace = Trace({"": 17})
        inputs = {n: trace.input(n, np.float32, a.shape) for n, a in (("x", x), ("w", w))}
        y = trace.op.ConvTranspose(*inputs.values(), **settings)
        return run(build(trace, {"y": y}, name="forward"), {"x": x, "w": w})["y"]

    y = forward(x, w)
    seed = data(*y.shape, seed=5).astype(np.float32)
    formula = lambda op, x, w: op.ConvTranspose(x, w, **settings)  # noqa: E731
    got = computed(formula, {"x": x, "w": w}, seed, opset=17)
    for name, array in (("x", x), ("w", w)):
        other = data(*array.shape, seed=6).astype(np.float32)
        moved = forward(**{"x": x, "w": w, name: other})
        np.testing.assert_allclose((got[name] * other).sum(), (seed * moved).sum(), rtol=1e-4)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_a_window_that_begins_behind_the_last_row_is_refused(operator: str) -> None:
    """Inference says [3, 3], and so do old runtimes; newer ones compute [2, 2]."""
    text = f"y = {operator}<ceil_mode = 1, kernel_shape = [2, 2], strides = [3, 3]>(x)"
    model = models.parsed(text, {}, "float[1, 1, 6, 6] x", "float[1, 1, A, B] y", opset=18)
    with pytest.raises(NoGradientRule, match="a window that begins after the last row"):
        gradient_model(model, wrt=["x"])


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
    how = f"strides = {strides}, pads = {pads}, dilations = {dilations}, group = {group}"
    given = "z, W" if bias is None else "z, W, b"
    text = f"z = Mul(x, factor) y = Conv<{how}>({given})"
    arrays = {"W": weight, "factor": factor} | ({} if bias is None else {"b": bias})
    image = ", ".join(map(str, ("N", channels, *places)))
    model = models.parsed(text, arrays, f"float[{image}] x", f"float[{'A, ' * len(places)}A, A] y")
    model.graph.output[0].type.Clear()
    return onnx.shape_inference.infer_shapes(model)


def operators(trainer: Trainer) -> Counter[str]:
    """Of the graph that was run."""
    return Counter(n.op_type for g in trainer.save_onnx_graph().values() for n in g.graph.node)


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str, biased: bool, torch: Any) -> None:
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
    how = {"stride": strides, "dilation": dilations, "groups": group}
    result = convolve(inner, wide["W"], wide.get("b"), **how)
    y = draw(*result.shape)
    loss = ((result - torch.tensor(y)) ** 2).mean()
    loss.backward()

    model = network(case, arrays["W"], arrays["factor"], arrays["b"])
    trainer = make(model, learning_rate=1.0, params=["*", "factor"], backend="fused")
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
    case = CASES["strides, dilations, uneven pads"]
    arrays = draw(32, 64, 3, 2, scale=0.05), draw(1, 64, 4, 3), draw(32)
    x, y = draw(5, 64, 4, 3), None
    states = []
    for params in (["*", "factor"], trained):
        trainer = make(network(case, *arrays), params=params, backend="fused")
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
def test_larger_planes_are_left_to_onnxruntime(places: Any, group: int, side: int) -> None:
    case = (32, 32, places, (side, side), [1, 1], [side // 2] * 4, [1, 1], group)
    model = network(case, draw(32, 32 // group, side, side), draw(1, 32, *places), None)
    trainer = make(model, params=["*", "factor"], backend="fused")
    x = draw(3, 32, *places)
    trainer.step((x, x))
    assert operators(trainer)["Conv"] >= 1
