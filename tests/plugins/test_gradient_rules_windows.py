"""Convolutions and pooling: every form of a kernel's gradient, ties, torch, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import NoGradientRule, Trace, build, gradient_model, gradients
from ortflex_plugins.gradients import convolution
from tests import models
from tests.gradcheck import RULES, computed, data, jacobian, run
from tests.plugins import gradient_cases_windows as cases
from tests.plugins.gradient_cases import Case

FORMS = {
    "swapped": {"_TINY": 1 << 60},
    "side by side": {"_TINY": 0, "_LARGE": 1 << 60},
    "place by place": {"_TINY": 0, "_LARGE": 0, "_MANY_CHANNELS": 1},
}
CONVOLUTIONS = {c.name: c for c in (*cases.CONV, *cases.TRANSPOSED)}


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
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_form_of_a_kernels_gradient(
    name: str, form: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CONVOLUTIONS[name]
    for constant, value in FORMS[form].items():
        monkeypatch.setattr(convolution, constant, value)
    value, slopes = jacobian(lambda feeds: case.oracle(**feeds), case.arrays)
    seed = data(*value.shape, seed=9).astype(np.float32)
    got = backward(case, len(case.arrays["x"]) if batch == "static" else batch, seed=seed)
    for input_, slope in slopes.items():
        exact = np.tensordot(slope, seed, seed.ndim).reshape(case.arrays[input_].shape)
        np.testing.assert_allclose(
            got[input_], exact, rtol=1e-4, atol=1e-5 * abs(exact).max(), err_msg=input_
        )


@pytest.mark.parametrize(
    ("name", "batch", "most"),
    [
        ("Conv-1d", 2, 6),
        ("Conv-1d", "N", 16),
        ("Conv-1x1", 2, 9),
        ("Conv-1x1", "N", 9),
        ("ConvTranspose-2d-up", "N", 17),
    ],
)
def test_known_sizes_ask_for_no_shape(name: str, batch: int | str, most: int) -> None:
    case = CONVOLUTIONS[name]
    value = case.oracle(**case.arrays)
    arrays = dict(case.arrays)
    arrays["x"] = np.concatenate([arrays["x"]] * 2)[:2]
    wide = Case(case.name, case.formula, arrays)
    seed = np.ones((2, *value.shape[1:]), np.float32)
    kinds = [n.op_type for n in backward(wide, batch, seed=seed)["program"].proto().graph.node]
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
    rows, columns = np.nonzero(got[0, 0])
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (0, 0),
        (0, 3),
        (2, 0),
        (2, 2),
    ]


def test_windows_that_tile_need_no_indices() -> None:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, ("N", 3, 4, 4))
    y = trace.op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
    seed = trace.input("seed", np.float32, y.shape)
    program = build(trace, {"dx": gradients([(y, seed)], [x], RULES)[0]}, name="backward")
    kinds = {n.op_type for n in program.proto().graph.node}
    assert not kinds & {"ScatterElements", "Shape"}


@pytest.mark.parametrize("ceil", [False, True])
def test_pooling_equals_torch(ceil: bool) -> None:
    torch = pytest.importorskip("torch")
    pool = torch.nn.functional
    # Whole numbers: ties everywhere.
    x = np.random.default_rng(0).integers(0, 3, (2, 3, 8, 10)).astype(np.float32)
    for kernel, stride, pad in ((2, 2, 0), (3, 2, 1), (3, 1, 0)):
        settings: Any = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        for ours, theirs in (
            (
                lambda op, x, s=settings: op.MaxPool(x, ceil_mode=int(ceil), **s),
                lambda t, k=kernel, s=stride, p=pad: pool.max_pool2d(t, k, s, p, ceil_mode=ceil),
            ),
            (
                lambda op, x, s=settings: op.AveragePool(x, count_include_pad=1, **s),
                lambda t, k=kernel, s=stride, p=pad: pool.avg_pool2d(t, k, s, p),
            ),
            (
                lambda op, x, s=settings: op.AveragePool(x, **s),
                lambda t, k=kernel, s=stride, p=pad: pool.avg_pool2d(
                    t, k, s, p, count_include_pad=False
                ),
            ),
        ):
            t = torch.tensor(x, requires_grad=True)
            y = theirs(t)
            seed = data(*y.shape, seed=3).astype(np.float32)
            y.backward(torch.tensor(seed))
            got = computed(ours, {"x": x}, seed, opset=17)["x"]
            np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_convolutions_of_common_sizes_equal_torch() -> None:
    """Sizes at which the large forms are chosen by themselves."""
    torch = pytest.importorskip("torch")
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
    settings: dict[str, Any] = {"strides": [2, 2]}
    if pads is None:
        settings["output_shape"] = [6, 5]
    else:
        settings["auto_pad"] = pads

    def forward(x: Any, w: Any) -> Any:
        trace = Trace({"": 17})
        inputs = {n: trace.input(n, np.float32, a.shape) for n, a in (("x", x), ("w", w))}
        y = trace.op.ConvTranspose(*inputs.values(), **settings)
        return run(build(trace, {"y": y}, name="forward"), {"x": x, "w": w})["y"]

    y = forward(x, w)
    seed = data(*y.shape, seed=5).astype(np.float32)
    got = computed(
        lambda op, x, w: op.ConvTranspose(x, w, **settings), {"x": x, "w": w}, seed, opset=17
    )
    for name, array in (("x", x), ("w", w)):
        other = data(*array.shape, seed=6).astype(np.float32)
        moved = forward(**{"x": x, "w": w, name: other})
        np.testing.assert_allclose((got[name] * other).sum(), (seed * moved).sum(), rtol=1e-4)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_a_window_that_begins_behind_the_last_row_is_refused(operator: str) -> None:
    """Inference says [3, 3], and so do old runtimes; newer ones compute [2, 2]."""
    pool = onnx.helper.make_node(
        operator, ["x"], ["y"], kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1
    )
    image = models.floats("x", 1, 1, 6, 6)
    model = models.model([pool], [image], [models.floats("y", 1, 1, None, None)], {}, opset=18)
    with pytest.raises(NoGradientRule, match="a window that begins after the last row"):
        gradient_model(model, wrt=["x"])
