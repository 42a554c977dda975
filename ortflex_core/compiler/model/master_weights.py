"""Quantized weights of a file, which are trained as float master weights.

A file that is quantized already has a weight as integers before a DequantizeLinear. A gradient step
is smaller than the distance of two integers, so the training has a float copy of the weight, its master
weight, and a QuantizeLinear rounds it in every step. The export rounds it once, with the same
arithmetic, so that the file keeps its layout and computes what the training computed.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference" (arXiv:1712.05877), section 3.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import attrs
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph import shape_inference
from ortflex_core.compiler.graph.control_flow import captured_names
from ortflex_core.compiler.graph.nodes import plain_domain, readers_of, reads
from ortflex_core.compiler.graph.ops import FLOATS, Inputs, Ops, Tensor, Trace
from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.compiler.graph.protos import copied, refill
from ortflex_core.compiler.model.model import Model, Rewrite
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.types import Array, Arrays, numpy_dtype

_INTEGERS: Mapping[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(2**15), 2**15 - 1),
    TensorProto.UINT16: (0, 2**16 - 1),
    TensorProto.INT32: (-(2**31), 2**31 - 1),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT2: (-2, 1),
    TensorProto.UINT2: (0, 3),
}
"""The ranges of the integers that a DequantizeLinear can read."""
_FLOATS8: Mapping[int, float] = {
    TensorProto.FLOAT8E4M3FN: 448.0,
    TensorProto.FLOAT8E4M3FNUZ: 240.0,
    TensorProto.FLOAT8E5M2: 57344.0,
    TensorProto.FLOAT8E5M2FNUZ: 57344.0,
}
"""The largest of the floats of one byte that a DequantizeLinear can read."""
_BYTES = {
    kind: TensorProto.INT8 if low < 0 else TensorProto.UINT8
    for kind, (low, high) in _INTEGERS.items()
    if high - low < 256
}
"""The type of bytes that holds the codes of a type."""
BITS = "ortflex.bits"
"""The entry of a file's metadata with the bits of weights that are stored in a larger type, as JSON."""


@attrs.frozen
class Packing:
    """Integers in the bytes of an initializer, the lowest bits first."""

    bits: int
    stored: tuple[int, ...]
    """The shape of the bytes."""
    shape: tuple[int, int]
    """The shape of the integers."""

    def unpacked(self, stored: Array) -> Array:
        """The integers."""
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        parts = (stored.reshape(-1, 1) >> shifts) & np.uint8(2**self.bits - 1)
        return np.ascontiguousarray(parts).reshape(self.shape)

    def packed(self, codes: Array) -> Array:
        """The bytes."""
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        parts = codes.astype(np.uint8).reshape(-1, len(shifts)) << shifts
        return np.asarray(np.bitwise_or.reduce(parts, axis=1), np.uint8).reshape(self.stored)


@attrs.frozen
class Quantized:
    """How a weight is stored: ``weight = (codes - zero) · scale``."""

    name: str
    dtype: int
    scale: str
    zero: str = ""
    axis: int = 1
    block: int = 0
    """The number of elements along ``axis`` that have one scale; 0 for one scale per index or tensor."""
    bits: int = 0
    """The number of bits of the codes, if the type has more; 0 for all of them."""
    of: tuple[str, ...] = ()
    """The two scales whose product is the scale of a bias."""
    packing: Packing | None = None
    """How the file has several codes in a byte, if its type does not say it."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        low, high = _INTEGERS[self.dtype]
        if not self.bits:
            return low, high
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if low else (0, 2**self.bits - 1)

    @property
    def is_float(self) -> bool:
        """Whether the codes are floats of one byte."""
        return self.dtype in _FLOATS8

    @property
    def in_bytes(self) -> bool:
        """Whether the codes are rounded to bytes and then clipped: no runtime rounds to their type."""
        if self.is_float:
            return False
        own = _INTEGERS[self.dtype]
        return not self.is_bias and (self.bounds != own or own[1] - own[0] < 15)

    @property
    def is_bias(self) -> bool:
        """Whether it is the int32 bias of an integer product, whose rounding is smaller than float32's."""
        return self.dtype == TensorProto.INT32

    def weight(self, codes: Array, scale: Array, zero: Array | None) -> Array:
        """The float32 values of the codes."""
        real = codes.astype(np.float64 if self.is_bias else np.float32)
        if zero is not None:
            real = real - self.spread(zero, codes.shape).astype(real.dtype)
        values = real * self.spread(scale, codes.shape)
        return np.asarray(values, np.float32, order="C")

    def codes(self, weight: Array, scale: Array, zero: Array | None) -> Array:
        """The codes of float values, to nearest (ties to even), as QuantizeLinear computes them."""
        width = np.float64 if self.is_bias else np.float32
        steps = weight.astype(width) / self.spread(scale, weight.shape).astype(width)
        if self.is_float:
            largest = _FLOATS8[self.dtype]
            steps = np.clip(steps, -largest, largest)
            return np.asarray(steps.astype(numpy_dtype(self.dtype)), order="C")
        steps = np.rint(steps)
        if zero is not None:
            steps = steps + self.spread(zero, weight.shape).astype(width)
        low, high = self.bounds
        whole = np.clip(steps.astype(np.float64), low, high).astype(np.int64)
        return np.asarray(whole.astype(numpy_dtype(self.dtype)), order="C")

    def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Scales or zero points in a shape that broadcasts with the weight."""
        if self.block:
            axis = self.axis % len(shape)
            return np.take(np.repeat(values, self.block, axis), range(shape[axis]), axis)
        if values.size == 1:
            return values.reshape(())
        return values.reshape([-1 if k == self.axis % len(shape) else 1 for k in range(len(shape))])


class MasterModel(Model):
    """The model of a file, ``base``, with float master weights in place of some quantized weights."""

    def __init__(self, base: Model, weights: Mapping[str, Quantized]) -> None:
        self.__dict__.update(base.__dict__)
        self.__dict__.pop("initializers", None)
        self.base, self.weights = base, weights
        known = base.quantization
        self._first = {} if known is None else known.masters
        self._initializers = dict(base._initializers)
        self._arrays = {n: a for n, a in base._arrays.items() if n not in weights}
        # Kept only while they are in use: the engine has copies.
        self._masters: WeakValueDictionary[str, Array] = WeakValueDictionary()
        for name, weight in weights.items():
            dims = self._initializers[name].dims if weight.packing is None else weight.packing.shape
            bare = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT)
            self._initializers[name] = bare  # in the shape of the codes; the values are kept apart
        self._build()

    def initializer(self, name: str) -> Array:
        """As of a Model; of a quantized weight, its first master weight in float32."""
        weight = self.weights.get(name)
        if weight is None or name in self._arrays:
            return super().initializer(name)
        values = self._masters.get(name)
        if values is None:
            if name in self._first:
                return self._first[name]
            codes = self.base.initializer(name)
            codes = weight.packing.unpacked(codes) if weight.packing else codes
            values = weight.weight(codes, *self._scale_and_zero(weight))
            values.setflags(write=False)
            self._masters[name] = values
        return values

    def _scale_and_zero(
        self, weight: Quantized, state: Arrays | None = None
    ) -> tuple[Array, Array | None]:
        """The scales and the zero points of a weight."""
        given = {} if state is None else state

        def value(name: str) -> Array:
            return given[name] if name in given else self.base.initializer(name)

        if weight.of and not given.keys().isdisjoint(weight.of):
            data, own = map(value, weight.of)
            scale = np.asarray(data * own, np.float32)
        else:
            scale = value(weight.scale)
        return scale, self.base.initializer(weight.zero) if weight.zero else None

    def _tied(self, state: Arrays) -> set[str]:
        """The biases whose scale is the product of scales that are in a state."""
        return {n for n, w in self.weights.items() if not state.keys().isdisjoint(w.of)}

    def _build(self) -> None:
        """The graph with a QuantizeLinear after each master weight; biases are read as they are."""
        self.internal = copied(self.base.internal)
        graph = self.internal.graph
        for tensor in graph.initializer:
            if tensor.name in self.weights:
                tensor.CopyFrom(numpy_helper.from_array(self.initializer(tensor.name), tensor.name))
        for value in graph.input:
            if value.name in self.weights:
                dims = list(self._initializers[value.name].dims)
                value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, dims))
        refill(graph.value_info, [v for v in graph.value_info if v.name not in self.weights])
        taken = {*self.base.producers, *self.base._values, *self._initializers}
        nodes: list[NodeProto] = []
        codes: dict[str, str] = {}
        zeros: dict[str, str] = {}
        self._biases: dict[str, Quantized] = {}
        unpacked = {
            name: stored
            for name, (stored, _) in self.base.decomposed.packed.items()
            if stored in self.weights
        }
        for node in _without_makers(graph.node, unpacked):
            weight = None
            if node.op_type == "DequantizeLinear":
                weight = self.weights.get(unpacked.get(node.input[0], node.input[0]))
            if weight is None:
                nodes.append(node)
            elif weight.is_bias:
                nodes.append(helper.make_node("Identity", node.input[:1], node.output, node.name))
                self._biases[node.output[0]] = weight
            else:
                if weight.name not in codes:
                    codes[weight.name] = fresh_name(f"{weight.name}/codes", taken)
                    rounding = self._rounding(weight, codes[weight.name], taken)
                    (rounded,) = (n for n in rounding if n.op_type == "QuantizeLinear")
                    zeros[weight.name] = rounded.input[2]
                    nodes.extend(rounding)
                node.input[0] = codes[weight.name]
                # onnxruntime may put a QuantizeLinear of uint8 after the Transpose or Reshape of a
                # DequantizeLinear without a zero point.
                if weight.in_bytes or not weight.zero:
                    del node.input[2:]
                    node.input.append(zeros[weight.name])
                nodes.append(node)
        refill(graph.node, nodes)
        values = shape_inference.one_batch(self._inferred(self.internal), graph)
        masters = {name: values[name] for name in self.weights if name in values}
        self._values = {**values, **self.base._values, **masters}
        self.producers = {o: n for n in graph.node for o in n.output if o}

    def _rounding(self, weight: Quantized, codes: str, taken: set[str]) -> list[NodeProto]:
        """The QuantizeLinear of a master weight, to the type of its zero point, and a Clip to its bits."""
        zero, kind = weight.zero, _BYTES[weight.dtype] if weight.in_bytes else weight.dtype
        if not zero or weight.in_bytes:
            scale = self.base.initializer(weight.scale)
            values = self.base.initializer(zero) if zero else np.zeros(scale.shape)
            zero = self._new(f"{weight.name}/zero", values.astype(numpy_dtype(kind)), taken)
        whole = fresh_name(f"{codes}/all", taken) if weight.in_bytes else codes
        without, scale_name = self._without_scale(weight), weight.scale
        nodes = []
        if without is not None:
            scale_name = fresh_name(f"{weight.name}/divisor", taken)
            added = self._new(f"{weight.name}/without scale", without, taken)
            nodes = [helper.make_node("Add", [weight.scale, added], [scale_name], scale_name)]
        layout: dict[str, Any] = {"axis": weight.axis}
        if weight.block:
            layout["block_size"] = weight.block
        inputs, label = [weight.name, scale_name, zero], f"{codes}/round"
        nodes.append(helper.make_node("QuantizeLinear", inputs, [whole], label, **layout))
        if not weight.in_bytes:
            return nodes
        ends = [
            self._new(f"{codes}/{end}", np.array(bound, numpy_dtype(kind)), taken)
            for end, bound in zip(("lowest", "highest"), weight.bounds, strict=True)
        ]
        return [*nodes, helper.make_node("Clip", [whole, *ends], [codes], f"{codes}/clip")]

    def _without_scale(self, weight: Quantized) -> Array | None:
        """1 where the scale of the file is 0, so that nothing is divided by 0; None if it never is.

        Some quantizers write the scale 0 for a block or a channel of zeros: whatever its codes are, its
        values are 0, and nothing moves them.
        """
        scale = self._scale_and_zero(weight)[0]
        return None if scale.all() else np.asarray(scale == 0, scale.dtype)

    def _new(self, name: str, values: Array, taken: set[str]) -> str:
        """A constant of the graph."""
        name = fresh_name(name, taken)
        tensor = numpy_helper.from_array(values, name)
        self._initializers[name] = tensor
        self.internal.graph.initializer.append(tensor)
        return name

    def replay(
        self,
        trace: Trace,
        outputs: Iterable[str],
        given: Mapping[str, Tensor],
        rewrite: Rewrite | None = None,
        *,
        infer: bool = False,
    ) -> dict[str, Tensor]:
        """As of a Model, with biases that are rounded."""

        def constant(weight: Quantized, values: Array) -> Tensor:
            return trace.constant(
                weight.spread(values, tuple(self._initializers[weight.name].dims))
            )

        def scale(weight: Quantized) -> Tensor:
            if given.keys().isdisjoint(weight.of):
                return constant(weight, self._scale_and_zero(weight)[0])
            data, own = (
                given[name] if name in given else trace.constant(self.initializer(name))
                for name in weight.of
            )
            return trace.op.stop_gradient(data * own)

        def rounding(trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
            weight = self._biases.get(node.output[0]) if node.output else None
            if weight is not None and inputs[0] is not None:
                unit, without = scale(weight), self._without_scale(weight)
                divisor = unit if without is None else unit + constant(weight, without)
                return [_rounded_bias(trace.op, inputs[0], unit, divisor)]
            return None if rewrite is None else rewrite(trace, node, inputs)

        return super().replay(trace, outputs, given, rounding, infer=infer)

    @property
    def stamp(self) -> str:
        """As of a Model, and the number of quantized weights that are trained."""
        count = len(self.weights)
        what = "quantized tensor is" if count == 1 else "quantized tensors are"
        note = (
            f"{count} {what} trained as float32 and rounded in every step; exports keep the layout"
        )
        return "; ".join(filter(None, (super().stamp, note)))

    def file_values(self, state: Arrays) -> Arrays:
        """The state, with trained weights in the integers that the file has."""
        tied = self._tied(state)
        codes = {}
        for name, weight in self.weights.items():
            if name in state or name in tied:
                values = state[name] if name in state else self.initializer(name)
                codes[name] = self._codes(weight, values, state)
        scales = {
            self.weights[n].scale: self._scale_and_zero(self.weights[n], state)[0] for n in tied
        }
        return {**state, **scales, **codes}

    def _codes(self, weight: Quantized, values: Array, state: Arrays) -> Array:
        """The integers of a weight as the file stores them; those whose scale is 0 stay."""
        scale, zero = self._scale_and_zero(weight, state)
        without, packing = self._without_scale(weight), weight.packing
        whole = weight.codes(values, scale if without is None else scale + without, zero)
        if without is not None:
            first = self.base.initializer(weight.name)
            first = packing.unpacked(first) if packing else first
            whole = np.where(weight.spread(scale == 0, whole.shape), first, whole)
        return packing.packed(whole) if packing else whole


def without_masters(model: Model) -> Model:
    """The model with its quantized weights as they are in the file."""
    return model.base if isinstance(model, MasterModel) else model


def with_masters(model: Model, names: Iterable[str] | None = None) -> Model:
    """The model with master weights for its quantized weights; without such weights, the model itself.

    ``names`` has the weights that get one and the scales that are trained, None for all weights. Two biases
    with one scale, which trained scales would make two, are refused.
    """
    base = without_masters(model)
    found = quantized_weights(base)
    wanted = set(found if names is None else names)
    # The scale of a bias follows that of its weight, so its codes change even if it is frozen.
    chosen = {n: w for n, w in found.items() if n in wanted or not wanted.isdisjoint(w.of)}
    for name, weight in chosen.items():
        trained = [n for n in weight.of if n in wanted]
        others = [n for n, w in found.items() if w.scale == weight.scale and w.of != weight.of]
        if trained and others:
            raise ModelError(
                f"{model.label}: the scale {trained[0]!r} cannot be trained, because the scale "
                f"{weight.scale!r} of the bias {name!r} follows it, and {others[0]!r} has the same one; "
                f"leave {trained[0]!r} out of params="
            )
    if isinstance(model, MasterModel) and model.weights.keys() == chosen.keys():
        return model
    scales = None if base.quantization is None else base.quantization.scales
    return MasterModel(base, chosen) if chosen or scales else base


def quantized_weights(model: Model) -> dict[str, Quantized]:
    """The initializers of codes that only DequantizeLinear nodes of one layout read.

    Codes are integers or floats of one byte. Their scales and zero points are initializers as well.
    Those that a branch or a loop reads itself, and those that are outputs, stay as they are.
    """
    graph = model.internal.graph
    readers = readers_of(graph.node)
    fixed = {o.name for o in graph.output} | {
        n for node in graph.node for n in captured_names(node)
    }
    bits, products = _bits(model), _scales_of_biases(model, readers)
    out: dict[str, Quantized] = _packed(model, readers, fixed)
    for name, spec in model.initializers.items():
        nodes = readers.get(name, [])
        layouts = {_layout(node, spec.dtype) for node in nodes if node.input[0] == name}
        known = spec.dtype in _INTEGERS or spec.dtype in _FLOATS8
        if not known or name in fixed or len(layouts) != 1 or 0 in (spec.shape or ()):
            continue
        (layout,) = layouts
        places = {i for node in nodes for i in range(len(node.input)) if node.input[i] == name}
        if layout is None or places != {0} or not _is_known(model, layout):
            continue
        of = products.get(nodes[0].output[0], ()) if layout.is_bias and len(nodes) == 1 else ()
        width = 0 if layout.is_bias else bits.get(name, 0)
        out[name] = attrs.evolve(layout, name=name, bits=width, of=of)
    return out


def _packed(
    model: Model, readers: Mapping[str, list[NodeProto]], fixed: set[str]
) -> dict[str, Quantized]:
    """The weights with several codes in a byte, which nodes unpack for one DequantizeLinear."""
    stored = [name for name, _ in model.decomposed.packed.values()]
    out = {}
    for codes, (name, bits) in model.decomposed.packed.items():
        nodes, spec = readers.get(codes, []), model.initializers.get(name)
        layout = _layout(nodes[0], TensorProto.UINT8) if len(nodes) == 1 else None
        if (
            layout is None
            or spec is None
            or name in fixed
            or stored.count(name) > 1
            or len(readers[name]) > 8 // bits
        ):
            continue
        shape = tuple(d for d in spec.shape or () if isinstance(d, int))
        if spec.dtype != TensorProto.UINT8 or not _is_known(model, layout):
            continue
        rows = math.prod(model.initializers[layout.scale].shape or ())  # type: ignore[arg-type]
        packing = Packing(bits, shape, (rows, math.prod(shape) * (8 // bits) // rows))
        out[name] = attrs.evolve(layout, name=name, bits=bits % 8, packing=packing)
    return out


def _without_makers(nodes: Iterable[NodeProto], names: Iterable[str]) -> list[NodeProto]:
    """The nodes without those that only compute some tensors."""
    every, gone = list(nodes), set(names)
    if not gone:
        return every
    counts = Counter(i for node in every for i in reads(node))
    left = []
    for node in reversed(every):
        if set(node.output) <= gone:
            counts.subtract(reads(node))
            gone.update(i for i in reads(node) if not counts[i])
        else:
            left.append(node)
    return left[::-1]


def _bits(model: Model) -> dict[str, int]:
    """The bits of weights in the metadata of a file, where they fit the type."""
    text = next((p.value for p in model.proto.metadata_props if p.key == BITS), "{}")
    try:
        given = json.loads(text) if len(text) < 2**20 else {}
    except ValueError:
        return {}
    if not isinstance(given, dict):
        return {}
    out = {}
    for name, spec in model.initializers.items():
        width = given.get(name)
        low, high = _INTEGERS.get(spec.dtype, (0, 0))
        if isinstance(width, int) and width >= 2 and 2**width < high - low + 1:
            out[name] = width
    return out


def _scales_of_biases(
    model: Model, readers: Mapping[str, list[NodeProto]]
) -> dict[str, tuple[str, str]]:
    """The scales of data and weight by the biases of products, where theirs is the product of both."""
    graph = model.internal.graph
    pairs = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
    out = {}
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or len(node.input) < 3:
            continue
        data, weight, bias = (pairs.get(name) for name in node.input[:3])
        if data is None or weight is None or bias is None:
            continue
        if len(readers[node.input[2]]) > 1 or [*node.input].count(node.input[2]) > 1:
            continue
        names = (data.input[1], weight.input[1], bias.input[1])
        if not all(n in model.initializers for n in names):
            continue
        a, b, product = map(model.initializer, names)
        if a.size == 1 and np.array_equal(np.asarray(a.reshape(()) * b, np.float32), product):
            out[bias.output[0]] = names[:2]
    return out


def _rounded_bias(op: Ops, bias: Tensor, scale: Tensor, divisor: Tensor) -> Tensor:
    """The value of the codes of a bias, whose gradient is that of the bias."""
    codes = op.Clip(op.Round(bias / divisor), *map(float, _INTEGERS[TensorProto.INT32]))
    return bias + op.stop_gradient(codes * scale - bias)


def _layout(node: NodeProto, dtype: int) -> Quantized | None:
    """How a node reads a quantized weight; None if it is not a DequantizeLinear."""
    if plain_domain(node.domain) or node.op_type != "DequantizeLinear":
        return None
    given = {a.name: a.i for a in node.attribute}
    zero = node.input[2] if len(node.input) > 2 else ""
    return Quantized(
        "", dtype, node.input[1], zero, given.get("axis", 1), given.get("block_size", 0)
    )


def _is_known(model: Model, layout: Quantized) -> bool:
    """Whether the scales are floats of the file, and the zero points, if any, are constants of it."""
    specs = model.initializers
    if layout.scale not in specs or specs[layout.scale].dtype not in FLOATS:
        return False
    if not layout.zero:
        return True
    if layout.zero not in specs:
        return False
    return not ((layout.is_bias or layout.is_float) and model.initializer(layout.zero).any())
