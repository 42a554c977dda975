"""``shrink`` of graphs written by hand: what no exporter of :mod:`tests.plugins.test_shrink` writes.

The class of errors: a channel is removed where a second reader, another type or a number in the graph
depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ortflex_core import shrink
from tests import models

pytestmark = pytest.mark.once


def outputs(model: onnx.ModelProto, x: Any) -> Any:
    return next(iter(models.predict(model, {"x": x}).values()))


def widths(model: onnx.ModelProto) -> dict[str, int]:
    """The elements of every weight, by its name."""
    return {t.name: int(np.prod(t.dims)) for t in model.graph.initializer if len(t.dims) > 1}


def test_weights_that_two_products_share_are_not_cut() -> None:
    w = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    w[:, :3] = 0
    text = "a = MatMul(x, w) r = Relu(a) y = MatMul(r, w)"
    before = models.of_text(f"(float[N, 6] x) => (float[N, 6] y) {{ {text} }}", {"w": w})
    assert widths(shrink(before).export()) == {"w": 36}


def chain(
    *between: onnx.NodeProto,
    dtype: Any = np.float32,
    inputs: Sequence[onnx.ValueInfoProto] = (),
    outputs: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    """``h = x·w + b`` with four constant channels of eight, nodes that make ``r``, and ``y = r·v``."""
    rng = np.random.default_rng(0)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    w, b, v = (rng.standard_normal(shape) for shape in ((6, 8), 8, (8, 2)))
    w[:, :4] = 0
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        *between,
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, kind, ["N", s]) for n, s in (("x", 6), ("y", 2)))
    made = models.model(nodes, [x, *inputs], [y, *outputs], {})
    arrays = {"w": w, "b": b, "v": v}
    made.graph.initializer.extend(
        numpy_helper.from_array(array.astype(dtype), name) for name, array in arrays.items()
    )
    return made


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_shrink_as_float32(dtype: Any) -> None:
    """A constant of the file's type is next to the values of channels, which are float64."""
    value = numpy_helper.from_array(np.array(0.5, dtype))
    between = [
        helper.make_node("Constant", [], ["half"], value=value),
        helper.make_node("Mul", ["h", "half"], ["m"]),
        helper.make_node("Tanh", ["m"], ["r"]),
    ]
    before = chain(*between, dtype=dtype)
    small = shrink(before)
    assert [(layer.before, layer.after) for layer in small.layers] == [(8, 5), (2, 2)]
    x = np.random.default_rng(1).standard_normal((3, 6)).astype(dtype)
    rtol = 1e-2 if dtype == np.float16 else 1e-10
    np.testing.assert_allclose(outputs(small.export(), x), outputs(before, x), rtol=rtol)
    assert widths(small.export()) == {"w": 30, "v": 10}


def test_a_number_of_channels_that_sizes_another_tensor_stays() -> None:
    """The shape of one tensor is that to which another one is reshaped."""
    before = chain(
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Shape", ["h"], ["sizes"]),
        helper.make_node("Reshape", ["z", "sizes"], ["t"]),
        inputs=[models.floats("z", "N", 4, 2)],
        outputs=[models.floats("t", "N", 8)],
    )
    small = shrink(before)
    assert widths(small.export()) == widths(before)
    assert any("number of channels" in reason for reason in small.kept)


def test_a_weight_that_is_an_output_stays() -> None:
    before = chain(helper.make_node("Relu", ["h"], ["r"]), outputs=[models.floats("w", 6, 8)])
    small = shrink(before).export()
    assert widths(small)["w"] == 48


def test_channels_whose_places_a_pool_gives_stay() -> None:
    """MaxPool's second output counts places through all channels."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 3, 1, 1)).astype(np.float32)
    w[:2] = 0
    sizes = "kernel_shape = [2, 2], strides = [2, 2]"
    before = models.of_text(
        "(float[N, 3, 4, 4] x) => (float[N, 4, 4, 4] y) "
        f"{{ h = Conv(x, w) p, i = MaxPool<{sizes}>(h) q = Conv(p, v) y = MaxUnpool<{sizes}>(q, i) }}",
        {"w": w, "v": (4, 4, 1, 1)},
    )
    small = shrink(before)
    assert widths(small.export()) == widths(before)
    x = rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
    np.testing.assert_array_equal(outputs(small.export(), x), outputs(before, x))


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_sizes_of_a_split_follow(opset: int) -> None:
    """The sizes are an attribute, an input, or equal parts."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((6, 8)).astype(np.float32)
    w[:, [0, 1, 7]] = 0
    split = {
        11: "Split<axis = 1, split = [5, 3]>(h)",
        13: "Split<axis = 1>(h, sizes)",
        18: "Split<axis = 1, num_outputs = 2>(h)",
    }[opset]
    first = 4 if opset == 18 else 5
    weights: dict[str, Any] = {"w": w, "u": (first, 2), "v": (8 - first, 2)}
    before = models.of_text(
        "(float[N, 6] x) => (float[N, 2] y) "
        f"{{ h = MatMul(x, w) p, q = {split} a = MatMul(p, u) b = MatMul(q, v) y = Add(a, b) }}",
        weights | ({"sizes": [5, 3]} if opset == 13 else {}),
        opset=opset,
    )
    x = rng.standard_normal((3, 6)).astype(np.float32)
    small = shrink(before)
    assert widths(small.export()) == {"w": 30, "u": 2 * (first - 2), "v": 2 * (7 - first)}
    np.testing.assert_allclose(outputs(small.export(), x), outputs(before, x), atol=1e-5)
