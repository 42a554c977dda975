"""Networks, the files that onnxruntime's tools make of them, and what these compute, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

from ortflex_core import Array
from tests import models

_SEED = 25
_draws = [np.random.default_rng(_SEED)]
"""What draws the next weight; every network begins with the seed, whatever was drawn before."""


def draw(*shape: int) -> Array:
    """A weight whose products have about the variance of the data."""
    depth = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return np.asarray(_draws[0].standard_normal(shape) / np.sqrt(depth), np.float32)


def network(
    nodes: Sequence[NodeProto], weights: Mapping[str, Any], *sizes: int, opset: int = 17
) -> ModelProto:
    """A float network from x [N, …] to y [N, 4]."""
    _draws[0] = np.random.default_rng(_SEED)
    ends = [models.floats("x", "N", *sizes)], [models.floats("y", "N", 4)]
    return models.model(nodes, *ends, weights, opset=opset)


def parsed(text: str, weights: Mapping[str, Any], *sizes: int) -> ModelProto:
    """A network of onnx's text; weights that are shapes are drawn, and all nodes have names."""
    nodes = list(onnx.parser.parse_graph(f"g (float x) => (float y) {{ {text} }}").node)
    for node in nodes:
        node.name = node.name or node.output[0]
    arrays = {n: draw(*a) if isinstance(a, tuple) else a for n, a in weights.items()}
    return network(nodes, arrays, *sizes)


def mlp() -> ModelProto:
    """MatMul, Add, Relu, Gemm."""
    nodes = """
        [matmul] h = MatMul(x, W) [add] a = Add(h, b) [relu] r = Relu(a) [gemm] y = Gemm(r, V, c)
    """
    return parsed(nodes, {"W": (8, 16), "b": (16,), "V": (16, 4), "c": (4,)}, 8)


def cnn() -> ModelProto:
    """Convolutions, pooling, a residual, activations, Concat, and a Gemm of the turned weight."""
    nodes = """
        [conv1] h = Conv<pads = [1, 1, 1, 1]>(x, K, a) [relu] r = Relu(h)
        [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
        [conv2] i = Conv<pads = [1, 1, 1, 1], group = 2>(p, L, b) [sigmoid] s = Sigmoid(i)
        [add] t = Add(s, p) [leaky] l = LeakyRelu<alpha = 0.1>(t) [mul] m = Mul(l, s)
        [concat] j = Concat<axis = 1>(m, p) [mean] g = GlobalAveragePool(j)
        [flatten] f = Flatten(g) [gemm] y = Gemm<transB = 1>(f, V, c)
    """
    weights = {"K": (6, 2, 3, 3), "a": (6,), "L": (6, 3, 3, 3), "b": (6,), "V": (4, 12), "c": (4,)}
    return parsed(nodes, weights, 2, 8, 8)


def attention() -> ModelProto:
    """A convolution into patches, AveragePool, and attention over them."""
    nodes = """
        [conv] h = Conv<pads = [1, 1, 1, 1]>(x, K, a)
        [pool] p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(h)
        [turn] t = Transpose<perm = [0, 2, 3, 1]>(p) [reshape] s = Reshape(t, shape)
        [queries] q = MatMul(s, Q) [keys] k = MatMul(s, P)
        [turn2] o = Transpose<perm = [0, 2, 1]>(k) [scores] z = MatMul(q, o)
        [softmax] w = Softmax<axis = -1>(z) [mixed] v = MatMul(w, q)
        [mean] m = ReduceMean<axes = [1], keepdims = 0>(v) [last] y = MatMul(m, V)
    """
    weights = {"K": (6, 2, 3, 3), "a": (6,), "Q": (6, 5), "P": (6, 5), "V": (5, 4)}
    return parsed(nodes, {**weights, "shape": np.array([0, -1, 6])}, 2, 8, 8)


def moves() -> ModelProto:
    """Operators that only move integers: padded and overlapping windows, Resize, Split, Squeeze."""
    modes = 'nearest_mode = "floor", coordinate_transformation_mode = "asymmetric"'
    nodes = f"""
        [conv1] h = Conv(x, K, a) [relu] r = Relu(h)
        [pool] p = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(r)
        [resize] u = Resize<mode = "nearest", {modes}>(p, , scales)
        [split] u1, u2 = Split<axis = 1>(u) [conv2] i = Conv(u1, L) [add] s = Add(i, u2)
        [matmul] m = MatMul(s, P) [squeeze] q = Squeeze(m, last)
        [unsqueeze] o = Unsqueeze(q, last) [flatten] f = Flatten(o) [gemm] y = Gemm(f, V, c)
    """
    weights = {"K": (6, 2, 1, 1), "a": (6,), "L": (3, 3, 1, 1), "P": (8, 1)}
    others = {"scales": np.array([1, 1, 2, 2], np.float32), "last": np.array([3])}
    return parsed(nodes, {**weights, "V": (24, 4), "c": (4,), **others}, 2, 8, 8)


NETWORKS: Mapping[str, Callable[[], ModelProto]] = {
    f.__name__: f for f in (mlp, cnn, attention, moves)
}


def rows(model: ModelProto, count: int, seed: int = 1) -> Array:
    """Rows for the input of a network."""
    kind = model.graph.input[0].type.tensor_type
    sizes = (count, *(d.dim_value for d in kind.shape.dim[1:]))
    rng = np.random.default_rng(seed)
    if kind.elem_type == onnx.TensorProto.INT64:
        return rng.integers(0, 20, sizes)
    return rng.standard_normal(sizes).astype(np.float32)


def static(model: ModelProto, folder: Path, form: str, **settings: Any) -> ModelProto:
    """What ``quantize_static`` makes of a network, in the format "QDQ" or "QOperator"."""
    from onnxruntime import quantization

    data = rows(model, 64)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = iter([{"x": data[i : i + 16]} for i in range(0, 64, 16)])

        def get_next(self) -> Any:
            return next(self.left, None)

    onnx.save(model, folder / "float.onnx")
    paths = folder / "float.onnx", folder / "quantized.onnx"
    kind = quantization.QuantFormat[form]
    quantization.quantize_static(*paths, Reader(), quant_format=kind, **settings)
    return onnx.load(folder / "quantized.onnx")


def dynamic(model: ModelProto, folder: Path, **settings: Any) -> ModelProto:
    """What ``quantize_dynamic`` makes of a network."""
    from onnxruntime import quantization

    onnx.save(model, folder / "float.onnx")
    quantization.quantize_dynamic(folder / "float.onnx", folder / "dynamic.onnx", **settings)
    return onnx.load(folder / "dynamic.onnx")


def embedding() -> ModelProto:
    """Rows of a table, their mean and a product; the input is ids [N, 5]."""
    nodes = """
        [gather] e = Gather(T, x) [matmul] h = MatMul(e, W)
        [mean] y = ReduceMean<axes = [1], keepdims = 0>(h)
    """
    model = parsed(nodes, {"T": (20, 6), "W": (6, 4)}, 5)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    return model


def arrays(model: ModelProto) -> dict[str, Array]:
    """The initializers."""
    return models.weights_of(model)


PLAIN: Mapping[str, Callable[[Any, Any], Any]] = {
    "Cast": lambda x, given: x,
    "Relu": lambda x, given: x.relu(),
    "Sigmoid": lambda x, given: x.sigmoid(),
    "Softmax": lambda x, given: x.softmax(-1),
    "LeakyRelu": lambda x, given: x.maximum(given["alpha"] * x),
    "GlobalAveragePool": lambda x, given: x.mean((2, 3), keepdim=True),
    "AveragePool": lambda x, given: x.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)),
    "Split": lambda x, given: tuple(x.chunk(2, 1)),
    "Squeeze": lambda x, given: x.squeeze(-1),
    "Unsqueeze": lambda x, given: x.unsqueeze(-1),
    "Flatten": lambda x, given: x.flatten(1),
    "Transpose": lambda x, given: x.permute(given["perm"]),
    "ReduceMean": lambda x, given: x.mean(1),
    "Resize": lambda x, given: x.repeat_interleave(2, 2).repeat_interleave(2, 3),
}
"""Operators of one tensor, with their attributes; with QLinear before their name rounded, too."""


class InTorch:
    """What a file in the format QOperator computes on real numbers, with torch's fake quantization.

    Every quantized tensor has the name of its integers. ``masters`` has the weights: leaves with a
    gradient.
    """

    def __init__(self, model: ModelProto) -> None:
        import torch

        self.torch, self.model, self.constants = torch, model, arrays(model)
        self.masters: dict[str, Any] = {}

    def real(self, names: Sequence[str], axis: int = 0) -> Any:
        """A tensor by the names of its integers, scale and zero point."""
        if names[0] in self.values:
            return self.values[names[0]]
        whole, scale, zero = (self.constants[n] for n in names)
        if scale.size > 1:
            shape = [-1 if k == axis % whole.ndim else 1 for k in range(whole.ndim)]
            spread = (whole.astype(np.float32) - zero.reshape(shape)) * scale.reshape(shape)
        else:
            spread = (whole.astype(np.float32) - zero) * scale
        master = self.masters.setdefault(
            names[0], self.torch.tensor(spread.astype(np.float32), requires_grad=True)
        )
        return self.rounded(master, names[1:], axis)

    def rounded(self, y: Any, names: Sequence[str], axis: int = 0) -> Any:
        """Fake quantization by the names of a scale and a zero point."""
        torch, (scale, zero) = self.torch, (self.constants[n] for n in names)
        bounds = (0, 255) if zero.dtype == np.uint8 else (-128, 127)
        if scale.size > 1:
            zeros = torch.tensor(zero.astype(np.int32))
            axis %= y.ndim
            made = torch.fake_quantize_per_channel_affine
            return made(y, torch.tensor(scale), zeros, axis, *bounds)
        made = torch.fake_quantize_per_tensor_affine
        return made(y, float(scale.reshape(())), int(zero.reshape(())), *bounds)

    def bias(self, name: str, data: str, own: str) -> Any:
        """An int32 bias, whose rounding is smaller than float32's."""
        unit = self.constants[data].reshape(()) * self.constants[own]
        values = (self.constants[name] * unit).astype(np.float32)
        made = self.torch.tensor(values, requires_grad=True)
        return self.masters.setdefault(name, made)

    def __call__(self, x: Array) -> Any:
        """The output, which depends on ``masters``."""
        self.values: dict[str, Any] = {"x": self.torch.tensor(x)}
        for node in self.model.graph.node:
            self.settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            made = self.computed(node.op_type, list(node.input))
            made = made if isinstance(made, tuple) else (made,)
            self.values.update(zip(node.output, made, strict=True))
        return self.values["y"]

    def computed(self, op_type: str, i: list[str]) -> Any:
        if (method := getattr(self, f"_{op_type.lower()}", None)) is not None:
            return method(i)
        made = PLAIN[op_type.removeprefix("QLinear")](self.values[i[0]], self.settings)
        return self.rounded(made, i[3:5]) if op_type.startswith("QLinear") else made

    def _quantizelinear(self, i: list[str]) -> Any:
        return self.rounded(self.values[i[0]], i[1:])

    def _dequantizelinear(self, i: list[str]) -> Any:
        return self.values[i[0]]

    def _qlinearconv(self, i: list[str]) -> Any:
        weight, x = self.real(i[3:6]), self.values[i[0]]
        bias = self.bias(i[8], i[1], i[4]) if len(i) > 8 else None
        pads = self.settings.get("pads", [0] * 4)
        groups = self.settings.get("group", 1)
        y = self.torch.nn.functional.conv2d(x, weight, bias, padding=pads[:2], groups=groups)
        return self.rounded(y, i[6:8])

    def _qlinearmatmul(self, i: list[str]) -> Any:
        return self.rounded(self.real(i[:3], -2) @ self.real(i[3:6], -1), i[6:8])

    def _qgemm(self, i: list[str]) -> Any:
        turned = self.settings.get("transB", 0)
        weight = self.real(i[3:6], 0 if turned else 1)
        y = self.values[i[0]] @ (weight.T if turned else weight) + self.bias(i[6], i[1], i[4])
        return self.rounded(y, i[7:9])

    def _qlinearadd(self, i: list[str]) -> Any:
        return self.rounded(self.real(i[:3]) + self.real(i[3:6]), i[6:8])

    def _qlinearmul(self, i: list[str]) -> Any:
        return self.rounded(self.real(i[:3]) * self.real(i[3:6]), i[6:8])

    def _qlinearconcat(self, i: list[str]) -> Any:
        parts = [self.values[name] for name in i[2::3]]
        return self.rounded(self.torch.cat(parts, self.settings["axis"]), i[:2])

    def _maxpool(self, i: list[str]) -> Any:
        pads = self.settings.get("pads", [0] * 4)
        size, step = self.settings["kernel_shape"], self.settings["strides"]
        return self.torch.nn.functional.max_pool2d(self.values[i[0]], size, step, pads[:2])

    def _reshape(self, i: list[str]) -> Any:
        x = self.values[i[0]]
        return x.reshape(len(x), -1, 6)


class DynamicInTorch(InTorch):
    """What a file of ``quantize_dynamic`` computes on real numbers.

    A product has both scales; the nodes after it that multiply by them are skipped.
    """

    def value(self, name: str) -> Any:
        """A value, or a float weight."""
        if name in self.values:
            return self.values[name]
        made = self.torch.tensor(self.constants[name])
        return self.masters.setdefault(name, made.requires_grad_(made.is_floating_point()))

    def _dynamicquantizelinear(self, i: list[str]) -> Any:
        x = self.values[i[0]]
        low, high = x.detach().min().clamp(max=0), x.detach().max().clamp(min=0)
        scale = (high - low) / 255
        zero = (-low / scale).round().clamp(0, 255)
        whole = ((x / scale).round() + zero).clamp(0, 255)
        return x + ((whole - zero) * scale - x).detach(), None, None

    def weight(self, i: list[str], axis: int) -> Any:
        """The weight of a product, whose scale has a name like it."""
        return self.real([i[1], i[1].replace("quantized", "scale"), i[3]], axis)

    def _matmulinteger(self, i: list[str]) -> Any:
        return self.values[i[0]] @ self.weight(i, -1)

    def _convinteger(self, i: list[str]) -> Any:
        pads, groups = self.settings.get("pads", [0] * 4), self.settings.get("group", 1)
        made = self.torch.nn.functional.conv2d
        return made(self.values[i[0]], self.weight(i, 0), padding=pads[:2], groups=groups)

    def _mul(self, i: list[str]) -> Any:
        if i[0].endswith("_scale"):
            return None
        product, factor = (self.value(name) for name in i)
        return product if factor is None else product * factor

    def _add(self, i: list[str]) -> Any:
        return self.value(i[0]) + self.value(i[1])

    def _matmul(self, i: list[str]) -> Any:
        return self.value(i[0]) @ self.value(i[1])

    def _reshape(self, i: list[str]) -> Any:
        x, shape = self.value(i[0]), self.constants[i[1]].tolist()
        return x.reshape([x.shape[k] if d == 0 else d for k, d in enumerate(shape)])

    def _concat(self, i: list[str]) -> Any:
        return self.torch.cat([self.values[name] for name in i], 1)

    def _gather(self, i: list[str]) -> Any:
        names = [i[0].replace("quantized", part) for part in ("quantized", "scale", "zero_point")]
        return self.real(names)[self.values[i[1]]]


class PairsInTorch(DynamicInTorch):
    """What a file in the format QDQ computes: fake quantization where pairs stand."""

    def _dequantizelinear(self, i: list[str]) -> Any:
        if i[0] in self.values:
            return self.values[i[0]]
        if self.constants[i[0]].dtype == np.int32:
            values = self.constants[i[0]] * self.constants[i[1]]
            made = self.torch.tensor(values.astype(np.float32), requires_grad=True)
            return self.masters.setdefault(i[0], made)
        return self.real(i, self.settings.get("axis", 1))

    def _conv(self, i: list[str]) -> Any:
        pads, groups = self.settings.get("pads", [0] * 4), self.settings.get("group", 1)
        x, *others = (self.value(name) for name in i)
        made = self.torch.nn.functional.conv2d
        return made(x, *others, padding=pads[:2], groups=groups)

    def _gemm(self, i: list[str]) -> Any:
        x, weight, bias = (self.value(name) for name in i)
        return x @ (weight.T if self.settings.get("transB") else weight) + bias

    def _mul(self, i: list[str]) -> Any:
        return self.value(i[0]) * self.value(i[1])
