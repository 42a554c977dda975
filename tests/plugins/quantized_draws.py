"""Small networks and quantizers drawn at random, and what a quantized file computes, in torch's float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ortflex_core import Array, require_runtime
from tests import models

_FUSED = ["Conv", "Gemm", "MatMul", "Add", "GlobalAveragePool", "AveragePool"]
_SUMS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
_SIZES = {"image": [2, 6, 6], "signal": [2, 9], "rows": [8], "tokens": [3, 8], "ids": [3]}


class Draw:
    """A network from x to y [N, 4], and how it is quantized."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, np.random.default_rng([7, seed])
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        newest = require_runtime().max_opset
        self.kind = [*_SIZES][self.seed % len(_SIZES)]
        self.opset = int(min(newest, self.rng.choice([13, 15, 17, 18, 19, 21, 23, newest])))
        last, shape = "x", list(_SIZES[self.kind])
        if self.kind == "ids":
            last, shape = self._gather(), [3, 8]
        for _ in range(int(self.rng.integers(2, 4))):
            last, shape = self._block(last, shape)
        self._end(last, shape)
        self._settings()

    # ------------------------------------------------------------------ the network

    def _add(self, op: str, *inputs: str, **settings: Any) -> str:
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], f"{op}{out}", **settings))
        return out

    def _weight(self, *shape: int, spread: float | None = None) -> str:
        name = f"w{len(self.weights)}"
        depth = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        values = self.rng.standard_normal(shape) * (spread or 1 / np.sqrt(depth))
        self.weights[name] = values.astype(np.float32)
        return name

    def _gather(self) -> str:
        return self._add("Gather", self._weight(20, 8, spread=1.0), "x")

    def _block(self, x: str, shape: list[int]) -> tuple[str, list[int]]:
        names = self._of_channels if self.kind in ("image", "signal") else self._of_features
        return names(x, shape)

    def _of_channels(self, x: str, shape: list[int]) -> tuple[str, list[int]]:
        """A block of [channels, …]."""
        channels, *sizes = shape
        dims = len(sizes)
        choice = self.rng.choice(["conv", "transposed", "residual", "concat", "gate", "pool"])
        if choice == "pool" and min(sizes) >= 4:
            op = str(self.rng.choice(["MaxPool", "AveragePool"]))
            window = {"kernel_shape": [2] * dims, "strides": [2] * dims}
            return self._add(op, x, **window), [channels, *(s // 2 for s in sizes)]
        if choice == "transposed" and max(sizes) < 12:
            made = int(self.rng.integers(2, 4))
            group = 2 if channels % 2 == 0 and self.rng.random() < 0.3 else 1
            kernel = self._weight(channels, made, *[2] * dims)
            bias = [self._weight(made * group, spread=0.3)] if self.rng.integers(2) else []
            y = self._add("ConvTranspose", x, kernel, *bias, strides=[2] * dims, group=group)
            return self._active(y), [made * group, *(2 * s for s in sizes)]
        y = self._conv(x, channels, channels if choice in ("residual", "gate") else 4, dims)
        made = channels if choice in ("residual", "gate") else 4
        if choice == "residual":
            y = self._add("Add", y, x)
        elif choice == "gate":
            y = self._add("Mul", self._add("Sigmoid", y), x)
        elif choice == "concat":
            y, made = self._add("Concat", y, x, axis=1), made + channels
        return self._active(y), [made, *sizes]

    def _conv(self, x: str, channels: int, made: int, dims: int) -> str:
        group = 2 if channels % 2 == 0 and made % 2 == 0 and self.rng.random() < 0.3 else 1
        inputs = [x, self._weight(made, channels // group, *[3] * dims)]
        if self.rng.random() < 0.7:
            inputs.append(self._weight(made, spread=0.3))
        return self._add("Conv", *inputs, pads=[1] * (2 * dims), group=group)

    def _of_features(self, x: str, shape: list[int]) -> tuple[str, list[int]]:
        """A block of […, features]."""
        features = shape[-1]
        choice = self.rng.choice(["linear", "residual", "concat", "gate", "norm"])
        if choice == "norm" and self.opset >= 17:
            gain, shift = self._weight(features, spread=1.0), self._weight(features, spread=0.3)
            return self._add("LayerNormalization", x, gain, shift), shape
        made = features if choice in ("residual", "gate") else int(self.rng.integers(3, 9))
        y = self._linear(x, features, made, len(shape))
        if choice == "residual":
            y = self._add("Add", y, x)
        elif choice == "gate":
            y = self._add("Mul", self._add("Sigmoid", y), x)
        elif choice == "concat":
            y, made = self._add("Concat", y, x, axis=-1), made + features
        return self._active(y), [*shape[:-1], made]

    def _linear(self, x: str, features: int, made: int, rank: int) -> str:
        if rank == 1 and self.rng.random() < 0.6:
            turned = bool(self.rng.integers(2))
            weight = self._weight(*((made, features) if turned else (features, made)))
            bias = [self._weight(made, spread=0.3)] if self.rng.integers(2) else []
            return self._add("Gemm", x, weight, *bias, transB=int(turned))
        y = self._add("MatMul", x, self._weight(features, made))
        if self.rng.random() < 0.5:
            y = self._add("Add", y, self._weight(made, spread=0.3))
        return y

    def _active(self, x: str) -> str:
        op = str(self.rng.choice(["Relu", "Tanh", "Clip", ""]))
        if op == "Clip":
            self.weights |= {"low": np.float32(-1.5), "high": np.float32(2.5)}
            return self._add("Clip", x, "low", "high")
        return self._add(op, x) if op else x

    def _end(self, x: str, shape: list[int]) -> None:
        features = shape[-1]
        if self.kind in ("image", "signal"):
            features = shape[0]
            if self.rng.random() < 0.5:
                x = self._add("GlobalAveragePool", x)
            else:
                features = int(np.prod(shape))
            x = self._add("Flatten", x)
        elif len(shape) > 1 and self.opset >= 18:
            self.weights["axes"] = np.array([1])
            x = self._add("ReduceMean", x, "axes", keepdims=0)
        elif len(shape) > 1:
            x = self._add("ReduceMean", x, axes=[1], keepdims=0)
        self._linear(x, features, 4, 1)
        self.nodes[-1].output[0] = "y"

    @property
    def model(self) -> ModelProto:
        """The float file."""
        kind = TensorProto.INT64 if self.kind == "ids" else TensorProto.FLOAT
        given = helper.make_tensor_value_info("x", kind, ["N", *_SIZES[self.kind]])
        opsets = [helper.make_opsetid("", self.opset)]
        ir = max(helper.find_min_ir_version_for(opsets, ignore_unknown=True), 8)
        ends = [given], [models.floats("y", "N", 4)]
        return models.model(self.nodes, *ends, self.weights, opset=self.opset, ir=ir)

    def rows(self, count: int, seed: int) -> Array:
        """Rows of x."""
        rng = np.random.default_rng([8, self.seed, seed])
        if self.kind == "ids":
            return rng.integers(0, 20, (count, 3))
        return rng.standard_normal((count, *_SIZES[self.kind])).astype(np.float32)

    def _settings(self) -> None:
        def any_of(*values: Any) -> Any:
            return values[int(self.rng.integers(len(values)))]

        whole = ["ConvTranspose", "Mul", "Concat", "MaxPool"]
        self.quantize = {
            "name": any_of("minmax", "mse"),
            "weights": any_of("int8", "int8", "int4", "int2"),
            "activations": any_of("uint8", "uint8", "int8", "none"),
            "per_channel": any_of(True, True, False),
            "symmetric": any_of(True, False),
            "symmetric_activations": any_of(False, True),
            "reduce_range": any_of(False, True),
            "train_scales": any_of(True, True, False),
            "block_size": any_of(0, 0, 4, 8),
            "operators": any_of(_FUSED, [*_FUSED, *whole]),
        }


class Pairs:
    """A quantized file in float64: leaves with gradients are the tensors that a Trainer trains.

    Codes of weights and biases are computed in float32, as in the file. ``margins`` has, for each row,
    the smallest distance of an activation from a number between two codes, or from the end of a slope.
    After the backward pass, ``added`` has the sum of the absolute values of which the gradient of a scale
    is the difference.
    """

    def __init__(self, file: ModelProto, state: Mapping[str, Array], bits: int) -> None:
        import torch

        self.torch, self.file, self.bits = torch, file, bits
        self.constants = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
        self.leaves = {
            n: torch.tensor(np.asarray(a, np.float64), requires_grad=True) for n, a in state.items()
        }
        self.producers = {o: n for n in file.graph.node for o in n.output}
        self.added: Counter[str] = Counter()

    def fake(
        self, x: Any, scale: Any, zero: Any, low: int, high: int, *, exact: bool, name: str = ""
    ) -> Any:
        """``(clip(round(x / s) + z, low, high) - z)·s``, straight through for x, LSQ for s."""
        torch = self.torch
        steps = x / scale
        codes = torch.round(x.float() / scale.float()).double() if exact else torch.round(steps)
        inside = ((codes + zero >= low) & (codes + zero <= high)).detach()
        whole = (torch.clip(codes + zero, low, high) - zero).detach()
        passed = torch.where(inside, steps, torch.zeros_like(steps))
        y = (whole + (passed - passed.detach())) * scale
        if y.requires_grad and name:
            y.register_hook(lambda g: self.added.update({name: float((g * whole).abs().sum())}))
        return y

    def _leaf(self, name: str) -> Any:
        """A trained tensor, or a constant."""
        if name in self.leaves:
            return self.leaves[name]
        values = np.asarray(self.constants[name])
        integers = values.dtype.kind in "iu" and name != ""
        return self.torch.tensor(values.astype(np.int64 if integers else np.float64))

    def _spread(self, values: Any, shape: Any, axis: int, block: int) -> Any:
        if block:
            return values.repeat_interleave(block, axis).narrow(axis, 0, shape[axis])
        if values.dim() == 0 or values.numel() == 1:
            return values.reshape(())
        return values.reshape([-1 if k == axis % len(shape) else 1 for k in range(len(shape))])

    def _scales(self, node: Any, shape: Any) -> tuple[Any, Any]:
        given = {a.name: a.i for a in node.attribute}
        axis, block = given.get("axis", 1), given.get("block_size", 0)
        zero = self.torch.tensor(0.0, dtype=self.torch.float64)
        if len(node.input) > 2:
            places = self.constants[node.input[2]].astype(np.float64)
            zero = self._spread(self.torch.tensor(places), shape, axis, block)
        return self._spread(self._leaf(node.input[1]), shape, axis, block), zero

    def _dequantized(self, node: Any) -> Any:
        name = node.input[0]
        if name in self.values:
            return self.values[name]
        if self.constants[name].dtype == np.int32:
            return None  # a bias, whose unit is known where it is read
        if name in self.leaves:
            master = self.leaves[name]
            scale, zero = self._scales(node, master.shape)
            high = 2 ** (self.bits - 1)
            own = node.input[1]
            return self.fake(master, scale, zero, -high, high - 1, exact=True, name=own)
        codes = self.torch.tensor(self.constants[name].astype(np.float64))
        scale, zero = self._scales(node, codes.shape)
        return (codes - zero) * scale

    def _quantized(self, node: Any) -> Any:
        x = self.values[node.input[0]]
        scale, zero = self._scales(node, x.shape)
        limits = np.iinfo(self.constants[node.input[2]].dtype)
        steps = (x / scale).detach().reshape(len(x), -1)
        distance = (steps - steps.floor() - 0.5).abs() / (1 + steps.abs())
        self.margins = self.torch.minimum(self.margins, distance.min(dim=1).values)
        own = node.input[1]
        return self.fake(x, scale, zero, limits.min, limits.max, exact=False, name=own)

    def _keep_from(self, x: Any, end: float, is_sum: bool) -> None:
        """Add the distance of values from an end of a slope to the margins.

        Values that no sum has made are at the end in float32, too.
        """
        distance = (x.detach() - end).abs().reshape(len(x), -1)
        if not is_sum:
            distance = self.torch.where(distance == 0, 1.0, distance)
        self.margins = self.torch.minimum(self.margins, distance.min(dim=1).values)

    def _bias(self, node: Any) -> Any:
        torch, read = self.torch, self.producers.get(node.input[2])
        if read is None or read.op_type != "DequantizeLinear":
            return self._leaf(node.input[2])
        bias = self.leaves[read.input[0]]
        data, own = (self._leaf(self.producers[name].input[1]) for name in node.input[:2])
        unit = (data.float() * own.float()).detach()
        codes = torch.round(bias.detach().float() / unit)
        return bias + ((codes * unit).double() - bias).detach()

    def __call__(self, x: Array) -> Any:
        """The output y."""
        torch = self.torch
        kind = torch.int64 if x.dtype.kind == "i" else torch.float64
        self.values = {"x": torch.tensor(x, dtype=kind)}
        self.margins = torch.full((len(x),), 1.0, dtype=torch.float64)
        for node in self.file.graph.node:
            self.values[node.output[0]] = self._computed(node)
        return self.values["y"]

    def _computed(self, node: Any) -> Any:
        if node.op_type == "DequantizeLinear":
            return self._dequantized(node)
        if node.op_type == "QuantizeLinear":
            return self._quantized(node)
        torch, f = self.torch, self.torch.nn.functional
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            return torch.tensor(numpy_helper.to_array(given["value"]))
        place = [self.values.get(n) if n in self.values else None for n in node.input]
        has_bias = node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.input) > 2
        read = zip(place[: 2 if has_bias else None], node.input, strict=False)
        own = [v if v is not None else self._leaf(n) for v, n in read]
        bias = self._bias(node) if has_bias else None
        x = own[0]
        dims = x.dim() - 2
        before = self.producers.get(node.input[0])
        is_sum = before is not None and before.op_type in _SUMS
        match node.op_type:
            case "Conv":
                made = [f.conv1d, f.conv2d][dims - 1]
                pads = tuple(given["pads"][:dims])
                return made(x, own[1], bias, padding=pads, groups=given["group"])
            case "ConvTranspose":
                made = [f.conv_transpose1d, f.conv_transpose2d][dims - 1]
                return made(x, own[1], bias, stride=tuple(given["strides"]), groups=given["group"])
            case "Gemm":
                y = x @ (own[1].T if given.get("transB") else own[1])
                return y if bias is None else y + bias
            case "MatMul":
                return x @ own[1]
            case "Add":
                return x + own[1]
            case "Mul":
                return x * own[1]
            case "Relu" | "Tanh" | "Sigmoid":
                if node.op_type == "Relu":
                    self._keep_from(x, 0.0, is_sum)
                return getattr(torch, node.op_type.lower())(x)
            case "Clip":
                for end in own[1:]:
                    self._keep_from(x, float(end), is_sum)
                return torch.clip(x, float(own[1]), float(own[2]))
            case "Concat":
                return torch.cat(own, given["axis"])
            case "MaxPool":
                return [f.max_pool1d, f.max_pool2d][dims - 1](x, 2, 2)
            case "AveragePool":
                return [f.avg_pool1d, f.avg_pool2d][dims - 1](x, 2, 2)
            case "GlobalAveragePool":
                return x.mean(tuple(range(2, x.dim())), keepdim=True)
            case "Flatten":
                return x.flatten(1)
            case "LayerNormalization":
                return f.layer_norm(x, x.shape[-1:], own[1], own[2])
            case "Gather":
                return x[own[1]]
            case "ReduceMean":
                return x.mean(1)
        raise NotImplementedError(node.op_type)
