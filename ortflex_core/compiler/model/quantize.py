"""Pairs of QuantizeLinear and DequantizeLinear are put into a model, as a quantizer says."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph.nodes import plain_domain, readers_of, split_nodes
from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.compiler.graph.protos import copied, refill, settings
from ortflex_core.compiler.model import packed_products
from ortflex_core.compiler.model.editor import Editor
from ortflex_core.compiler.model.master_weights import BITS, Quantized
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.products import module_of
from ortflex_core.compiler.model.quantizer import Quantization, Quantizer
from ortflex_core.compiler.onnx_files import half_floats, model_file
from ortflex_core.compiler.operators import upgrade
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.calling import calling, whose
from ortflex_core.kernel.errors import BrokenPlugin, ConfigError, ModelError, short_repr, suggest
from ortflex_core.kernel.types import Array, numpy_dtype

WHERE = "quantize"
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SAME_VALUES = (
    *("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity"),
    *("Slice", "DepthToSpace", "SpaceToDepth"),
)
"""The outputs of these operators are elements of their first input, so both have one scale."""
_INTEGERS = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"),
    *("ConvInteger", "QLinearConv", "QLinearMatMul"),
)
_STORED = (("INT2", 2, 25), ("INT4", 4, 21), ("INT8", 8, 13))
"""The types of weights: the name, the bits and the first opset of DequantizeLinear with them."""


_LARGEST_BIAS = 2**27
"""The largest code of a bias, so that there is room in int32 for smaller scales and larger biases."""
_MOST_CONVERTED = 2**30
"""The largest number of bytes of a file whose opset is converted."""


@attrs.frozen
class _Weight:
    """A weight of a node, with the axis of its outputs and that of its inputs."""

    node: str
    op_type: str
    name: str
    axis: int
    inputs: int


def quantize_model(model: Model, quantizer: Quantizer) -> Model:
    """The model with quantized weights and activations; its ``quantization`` has the float weights.

    Activations without a range in ``quantizer.ranges`` get the scale 1; ``quantization.missing`` has
    their names.

    Raises:
        ConfigError: a name in ``skip`` or ``ranges`` that the model does not have.
        ModelError: the model is quantized already, nothing in it can be quantized, or its opset has no
            type for the codes and cannot be converted.
        BrokenPlugin: the quantizer returns something else than ranges.
    """
    found = {n.op_type for n in model.internal.graph.node if not plain_domain(n.domain)}
    if quantized := found.intersection(_INTEGERS):
        raise ModelError(
            f"{WHERE}: {model.label} is quantized already ({', '.join(sorted(quantized))}); train it "
            "without quantize=, it keeps its layout"
        )
    if quantizer.observe and quantizer.activations == "none":
        raise ConfigError(
            f"{WHERE}.observe: activations='none' leaves activations in float, so that no scale follows "
            "them; leave observe out, or set activations='uint8'"
        )
    _check_layout(quantizer, model.opset)
    source, model = model, _in_float32(model)
    kinds, opset, notes = _storage(model, quantizer)
    editor = Editor(model, 0, WHERE)
    if opset > model.opset:
        editor.proto.CopyFrom(_upgraded(model, editor, opset))
        editor.graph = editor.proto.graph  # a copy replaces the parts of a message
    _fold_normalizations(editor)
    if source.half:
        half_floats.give_types_of(source.proto, editor.proto)
        editor.graph = editor.proto.graph
    origin = editor.result()
    out = _Placement(origin, quantizer, kinds, notes).result()
    out.new_head, out.adapter_values = source.new_head, source.adapter_values
    out.unedited = source.as_read
    return out


def _in_float32(model: Model) -> Model:
    """The model with float32 weights, inputs and outputs, as kernels of integers need them.

    onnxruntime has QuantizeLinear and DequantizeLinear of float16 from opset 19 on, but fuses no product
    between them, and its CPU kernels have no bfloat16.
    """
    if not model.half:
        return model
    editor = Editor(model, 0, WHERE)
    size = sum(math.prod(t.dims) for t in editor.graph.initializer if t.data_type in model.half)
    if size > _MOST_CONVERTED // 4:
        raise ModelError(
            f"{WHERE}: {model.label} has {size:,} weights of 16 bits and is too large to be converted to "
            "float32 here; convert the file first"
        )
    for tensor in editor.graph.initializer:
        if tensor.data_type in model.half:
            values = model_file.array_of(tensor, model.files)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    editor.proto.CopyFrom(half_floats.raise_to_float32(editor.proto, model.half))
    editor.graph = editor.proto.graph
    known = editor.model.value
    half_floats.without_casts(editor.proto, lambda name: known(name).dtype == TensorProto.FLOAT)
    return editor.result()


def _check_layout(quantizer: Quantizer, opset: int) -> None:
    """Refuse a layout that the blocks or the runtime do not allow."""
    if quantizer.layout != packed_products.LAYOUT:
        return
    block, bits = quantizer.block_size, 8 if quantizer.weights == "int8" else quantizer.bits
    if not packed_products.is_size(block):
        raise ConfigError(
            f"{WHERE}.layout: {quantizer.layout} has blocks of {packed_products.SMALLEST}, 32, 64, … "
            f"inputs, got block_size={block}; set block_size=32 (--block-size 32), or layout='QDQ'"
        )
    if quantizer.reduce_range:
        raise ConfigError(
            f"{WHERE}.layout: {quantizer.layout} multiplies floats, so that nothing saturates: leave "
            "reduce_range out, or set layout='QDQ'"
        )
    if not packed_products.is_computed(bits, block, opset):
        raise ConfigError(
            f"{WHERE}.layout: {require_runtime()} does not compute {quantizer.layout} of {bits} bits in "
            f"blocks of {block}; install a newer one, or set layout='QDQ'"
        )


def _storage(model: Model, quantizer: Quantizer) -> tuple[list[int], int, list[str]]:
    """The types that hold the codes of weights and that can be read here, the smallest first; the opset."""
    notes: list[str] = []
    kinds: list[int] = []
    newest = model.opset
    for name, bits, opset in _STORED:
        if bits < min(quantizer.bits, 8):
            continue
        if quantizer.block_size:
            opset = max(opset, 21)
        why = "" if opset <= newest else _obstacle_to(model, opset)
        kind = _type(name)
        if not kind or not _multiplies(kind, max(opset, newest), _Product()):
            why = f"{require_runtime()} does not read it"
        if not why:
            newest = max(opset, newest)
            kinds.append(kind)
        elif not kinds:
            notes.append(
                f"weights of {quantizer.bits} bits are not stored as {name.lower()}: {why}"
            )
    if not kinds:
        raise ModelError(f"{WHERE}: {'; '.join(notes)}")
    return kinds, newest, notes


def _obstacle_to(model: Model, opset: int) -> str:
    """Why a model cannot be converted to an opset; "" if it can."""
    if opset > require_runtime().max_opset:
        return (
            f"it needs opset {opset}, and {require_runtime()} reads {require_runtime().max_opset}"
        )
    try:
        _upgraded(model, Editor(model, 0, WHERE), opset)
    except ModelError as error:
        return str(error)
    return ""


def _upgraded(model: Model, editor: Editor, opset: int) -> ModelProto:
    outside = any(t.data_location == TensorProto.EXTERNAL for t in editor.graph.initializer)
    if outside or editor.proto.ByteSize() > _MOST_CONVERTED:
        raise ModelError(
            f"{WHERE}: {model.label} has opset {model.opset} and is too large to be converted to {opset}"
        )
    return upgrade.upgrade_opset(editor.proto, model.label, model.opset, {}, opset)


@attrs.frozen
class _Product:
    """A product by a weight, as far as the kernels of runtimes differ for it."""

    op_type: str = "MatMul"
    outputs: int = 4
    block: int = 0
    has_zero: bool = False
    has_codes: bool = False
    """Whether the data are quantized, too."""
    has_float_result: bool = False
    """Whether the result is not quantized, although the data are."""


@functools.cache
def _multiplies(kind: int, opset: int, product: _Product) -> bool:
    """Whether the installed runtime loads a product by a weight of a type and computes it.

    onnxruntime 1.32 multiplies wrongly by int2 if the number of outputs is not a multiple of four, and
    does not load a Gemm of quantized data by int2 with a zero point. It has one scale per column in a
    MatMul of quantized data by int8 in blocks if the result is not quantized.
    """
    draw = np.random.default_rng(0)
    depth, outputs = 2 * product.block or 16, product.outputs
    codes, data = draw.integers(-2, 2, (depth, outputs)), draw.integers(-9, 9, (3, depth))
    scale = np.ones((2, outputs) if product.block else outputs, np.float32)
    scale[-1:] = 2
    spread = np.repeat(scale, product.block, 0) if product.block else scale
    layout: dict[str, Any] = {"axis": 1}
    if product.block:
        layout = {"axis": 0, "block_size": product.block}
    weight = codes
    if product.op_type == "Conv":
        layout, data = {"axis": 0}, data.reshape(3, depth, 1, 1)
        weight = codes.T.reshape(outputs, depth, 1, 1)
    tensors = [
        helper.make_tensor("codes", kind, weight.shape, weight.ravel().tolist()),
        numpy_helper.from_array(scale, "scale"),
        numpy_helper.from_array(np.array(1, np.float32), "one"),
        numpy_helper.from_array(np.array(20, np.uint8), "middle"),
    ]
    inputs = ["codes", "scale"]
    if product.has_zero:
        zero = np.zeros(scale.shape, np.int64)
        tensors.append(helper.make_tensor("zero", kind, zero.shape, zero.ravel().tolist()))
        inputs.append("zero")
    nodes = [helper.make_node("DequantizeLinear", inputs, ["w"], **layout)]

    def add_pair(x: str, y: str, *settings: str) -> None:
        nodes.append(helper.make_node("QuantizeLinear", [x, *settings], [f"{x} in codes"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{x} in codes", *settings], [y]))

    if product.has_codes:
        add_pair("x", "d", "one", "middle")
    has_pair = product.has_codes and not product.has_float_result
    factors = ["d" if product.has_codes else "x", "w"]
    nodes.append(helper.make_node(product.op_type, factors, ["p" if has_pair else "y"]))
    if has_pair:
        tensors.append(numpy_helper.from_array(np.array(4, np.float32), "four"))
        tensors.append(numpy_helper.from_array(np.array(128, np.uint8), "half"))
        add_pair("p", "y", "four", "half")
    given, made = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    opsets = [helper.make_opsetid("", opset)]
    least = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
    graph = helper.make_graph(nodes, "multiplies", [given], [made], tensors)
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=least)
    try:
        values = cpu_session(proto).run(None, {"x": data.astype(np.float32)})[0]
    except Exception:  # every runtime has errors of its own for what it does not know
        return False
    wanted, values = data.reshape(3, depth) @ (codes * spread), values.reshape(3, outputs)
    return bool(np.abs(values - wanted).max() <= 0.05 * np.abs(wanted).max())


def _fold_normalizations(editor: Editor) -> None:
    """``a·(W x + c - mean) / sqrt(var + e) + b`` as a product with another weight and bias."""
    graph = editor.graph
    tensors = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    producers = {o: node for node in graph.node for o in node.output}
    outputs = {o.name for o in graph.output}

    def floats(name: str) -> Array | None:
        if name not in tensors:
            return None
        return model_file.array_of(tensors[name], editor.model.files).astype(np.float64)

    folded = []
    for node in graph.node:
        before = producers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if before is None or before.op_type not in ("Conv", "Gemm"):
            continue
        given = settings(before) | settings(node)
        is_only_reader = len(editor.readers(before.output[0])) == 1
        if before.output[0] in outputs or not is_only_reader or given.get("training_mode"):
            continue
        if given.get("alpha", 1.0) != 1 or given.get("beta", 1.0) != 1:
            continue
        found = [floats(name) for name in (before.input[1], *node.input[1:5])]
        has_bias = len(before.input) > 2 and bool(before.input[2])
        bias = floats(before.input[2]) if has_bias else np.zeros(1)
        if bias is None or any(f is None for f in found):
            continue
        weight, gain, shift, mean, variance = (f for f in found if f is not None)
        factor = gain / np.sqrt(variance + given.get("epsilon", 1e-5))
        axis = 0 if before.op_type == "Conv" or given.get("transB", 0) else 1
        spread = factor.reshape([-1 if k == axis else 1 for k in range(weight.ndim)])
        _store(editor, before, 1, weight * spread)
        _store(editor, before, 2, (bias - mean) * factor + shift)
        before.output[0] = node.output[0]
        folded.append(node)
    for node in folded:
        graph.node.remove(node)


def _store(editor: Editor, node: NodeProto, position: int, values: Array) -> None:
    """A constant of a node with other values; it keeps its name if only this node has it."""
    graph = editor.graph
    name = node.input[position] if len(node.input) > position else ""
    known = {t.name: t for t in graph.initializer}
    if not name or len(editor.readers(name)) > 1 or name in editor.outputs:
        taken = {*known, *(o for n in graph.node for o in n.output)}
        name = fresh_name(name or f"{node.output[0]}/bias", taken)
        known[name] = graph.initializer.add()
    known[name].CopyFrom(numpy_helper.from_array(values.astype(np.float32), name))
    if len(node.input) > position:
        node.input[position] = name
    else:
        node.input.append(name)


class _Placement:
    """The graph of a model while it gets its pairs."""

    def __init__(
        self, model: Model, quantizer: Quantizer, kinds: Sequence[int], notes: Sequence[str]
    ) -> None:
        self.quantizer, self.kinds, self.notes = quantizer, kinds, list(notes)
        self.editor = Editor(model, 0, WHERE)
        graph = self.editor.graph
        self.nodes = list(graph.node)
        self.readers = readers_of(graph.node)
        self.producers = {o: node for node in graph.node for o in node.output if o}
        self.outputs = {o.name for o in graph.output}
        self.constants = {t.name: t for t in graph.initializer}
        self.taken = {*self.producers, *self.constants, *(i.name for i in graph.input)}
        free, _ = split_nodes(graph.node, [i.name for i in graph.input])
        self.computed = {o for node in free for o in node.output}
        """The tensors that do not depend on inputs."""
        self.weights: dict[str, list[_Weight]] = {}
        """The weights that become integers, with the nodes that read them."""
        self.points: dict[str, None] = {}
        """The activations that become integers."""
        self.biases: set[str] = set()
        """The biases that become integers; one node reads each of them."""
        self.floats: set[str] = set()
        """The first outputs of the nodes whose data are not rounded, even if others read them rounded."""
        self._choose()
        self.new: list[NodeProto] = []
        self.masters: dict[str, Array] = {}
        self.trained: dict[str, int] = {}
        self.observed: dict[str, str] = {}
        self.bits: dict[str, int] = {}
        self.scales: dict[str, tuple[str, Array]] = {}
        self.pairs: dict[str, list[str]] = {}
        self.blocks: dict[str, tuple[int, tuple[int, ...]]] = {}

    # ------------------------------------------------------------------ what is quantized

    def _skipped(self) -> set[int]:
        """The nodes that ``skip`` names."""
        graph, chosen = self.editor.graph, set()
        names: dict[int, set[str]] = {}
        for node in graph.node:
            own = {node.name, *node.input[1:], *node.output}
            weight = next((i for i in node.input if i in self.constants), "")
            module = module_of(node, weight)
            own.update(".".join(module.split(".")[:k]) for k in range(1, module.count(".") + 2))
            names[id(node)] = own - {""}
        for pattern in self.quantizer.skip:
            hits = {
                k for k, own in names.items() if any(fnmatch.fnmatchcase(n, pattern) for n in own)
            }
            if not hits:
                every = sorted(set().union(*names.values()))
                raise ConfigError(
                    f"{WHERE}.skip: nothing is called {pattern!r}; {suggest(pattern, every)}"
                )
            chosen |= hits
        return chosen

    def _choose(self) -> None:
        q, skipped = self.quantizer, self._skipped()
        for node in self.nodes:
            eligible = node.op_type in q.operators and not plain_domain(node.domain)
            if not eligible or id(node) in skipped:
                continue
            if node.op_type in _PRODUCTS:
                self._choose_product(node)
            elif q.activations != "none" and self._is_of_data(node):
                self._add_points(node, range(len(node.input)))
        for name in list(self.points):
            self._connect(name)
        for name, used in list(self.weights.items()):
            if why := self._obstacle_of(name, used):
                self.notes.append(f"{name} stays in float: {why}")
                del self.weights[name]
        if not self.weights and not self.points:
            known = sorted({n.op_type for n in self.nodes})
            why = "; ".join(self.notes) or f"its operators are {', '.join(known)}"
            raise ModelError(
                f"{WHERE}: {self.editor.label} has nothing to quantize: {why}. operators= is "
                f"{', '.join(q.operators)}"
            )

    def _choose_product(self, node: NodeProto) -> None:
        q = self.quantizer
        data = []
        weighted = False
        for position in (0, 1):
            name = node.input[position]
            if name not in self.constants:
                if self._is_float(name):
                    data.append(position)
                if name in self.computed:
                    self.notes.append(
                        f"{name} is not stored as integers: {self.producers[name].op_type} computes it "
                        "from constants; fold them first, as onnxruntime's offline optimization does"
                    )
                continue
            weight = self._weight(node, position)
            if weight is None:
                what = "it is a vector" if self._is_float(name) else "its type is not float32"
                self.notes.append(f"{name} stays in float: {what}")
                return
            self.weights.setdefault(name, []).append(weight)
            weighted = True
        if q.activations == "none" or not data or self._has_float_data(node, weighted):
            return
        if not weighted and len(data) < 2:
            return
        self._add_points(node, data)
        if weighted and not q.block_size and self._has_own_bias(node):
            self.biases.add(node.input[2])

    def _has_float_data(self, node: NodeProto, weighted: bool) -> bool:
        """Whether a product by blocks reads data in float, because the runtime fuses it wrongly."""
        q = self.quantizer
        if not (weighted and q.block_size) or node.op_type != "MatMul" or q.layout != "QDQ":
            return False
        name = next(n for n in node.input if n in self.constants)
        dims = self.constants[name].dims
        kind = self._kind(dims, self.weights[name][0], q.block_size)[0]
        product = _Product(block=q.block_size, has_zero=not q.symmetric, has_codes=True)
        product = attrs.evolve(product, has_float_result=True)
        if len(dims) > 2 or _multiplies(kind, self.editor.model.opset, product):
            return False
        self.notes.append(
            f"the MatMul by {name} reads data in float: {require_runtime()} computes a product of "
            f"quantized data by {numpy_dtype(kind).name} in blocks wrongly"
        )
        self.floats.add(node.output[0])
        return True

    def _weight(self, node: NodeProto, position: int) -> _Weight | None:
        name = node.input[position]
        tensor = self.constants[name]
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
            return None
        rank = len(tensor.dims)
        given = {a.name: a.i for a in node.attribute if a.name in ("transA", "transB", "group")}
        axes = (rank - 1, rank - 2)
        if node.op_type == "Conv" or (node.op_type == "Gemm" and given.get("transB")):
            axes = (0, 1)
        elif node.op_type == "ConvTranspose":
            axes = (1, 0)
        elif position == 0:
            axes = (rank - 2, rank - 1)
        return _Weight(node.output[0], node.op_type, name, *axes)

    def _obstacle_of(self, name: str, used: Sequence[_Weight]) -> str:
        """Why a weight cannot be stored as integers; "" if it can."""
        others = [n for n in self.readers[name] if n.output[0] not in {w.node for w in used}]
        if others:
            return f"the {others[0].op_type} {others[0].name!r} reads it, too"
        if len({(w.axis, w.inputs) for w in used}) > 1:
            return "two nodes read it along other axes"
        if name in self.outputs:
            return "it is an output"
        return ""

    def _has_own_bias(self, node: NodeProto) -> bool:
        if node.op_type not in ("Conv", "Gemm") or len(node.input) < 3 or not node.input[2]:
            return False
        bias = node.input[2]
        given = {a.name: a.f for a in node.attribute if a.name in ("alpha", "beta")}
        tensor = self.constants.get(bias)
        return (
            tensor is not None
            and tensor.data_type == TensorProto.FLOAT
            and len(tensor.dims) == 1
            and len(self.readers[bias]) == 1
            and bias not in self.outputs
            and all(value == 1.0 for value in given.values())
        )

    def _is_float(self, name: str) -> bool:
        return self.editor.model.value(name).dtype == TensorProto.FLOAT

    def _is_of_data(self, node: NodeProto) -> bool:
        """Whether all inputs of a node depend on data and one of them comes from a quantized node."""
        if any(i in self.constants or not i or not self._is_float(i) for i in node.input):
            return False
        sources = [self.producers.get(self.root_of_activation(i)) for i in node.input]
        return any(s is not None and s.op_type in self.quantizer.operators for s in sources)

    def root_of_activation(self, name: str) -> str:
        """The output of the product before a Relu or Clip, or the tensor itself."""
        node = self.producers.get(name)
        while node is not None and node.op_type in ("Relu", "Clip", *_SAME_VALUES):
            name = node.input[0]
            node = self.producers.get(name)
        return name

    def _add_points(self, node: NodeProto, positions: Sequence[int]) -> None:
        """Quantize inputs of a node, and its output after the activation that follows."""
        for position in positions:
            self.points.setdefault(node.input[position], None)
        out = node.output[0]
        if out in self.outputs:
            return
        followers = self.readers.get(out, [])
        if len(followers) == 1 and followers[0].op_type in ("Relu", "Clip"):
            out = followers[0].output[0]
        # A MatMul without a quantized reader ends in float: its bias is an Add.
        if node.op_type not in ("Gemm", "MatMul") and out not in self.outputs:
            self.points.setdefault(out, None)

    def _connect(self, name: str) -> None:
        """Quantize the tensors between two quantized ones with the same elements, as runtimes expect."""
        between: list[str] = []
        node = self.producers.get(name)
        while node is not None and node.op_type in _SAME_VALUES:
            if node.input[0] in self.points:
                self.points.update(dict.fromkeys(between))
                return
            between.append(node.input[0])
            node = self.producers.get(node.input[0])

    def root(self, name: str) -> str:
        """The quantized tensor whose scale a quantized tensor has."""
        node = self.producers.get(name)
        while node is not None and node.op_type in _SAME_VALUES and node.input[0] in self.points:
            name = node.input[0]
            node = self.producers.get(name)
        return name

    # ------------------------------------------------------------------ the new graph

    def result(self) -> Model:
        """The model with its pairs."""
        q, graph = self.quantizer, self.editor.graph
        missing = tuple(n for n in self.points if self.root(n) == n and n not in q.ranges)
        for name in q.ranges:
            if name not in self.points:
                raise ConfigError(
                    f"{WHERE}.ranges: no quantized tensor is called {name!r}; "
                    f"{suggest(name, list(self.points))}"
                )
        packed = [name for name in self.weights if self._is_packed(name)]
        read = {name: self._put_weight(name) for name in self.weights if name not in packed}
        products = {self.weights[name][0].node: self._put_packed(name) for name in packed}
        read |= {n: fresh_name(f"{n}/dequantized", self.taken) for n in self.points}
        for name in [i.name for i in graph.input if i.name in self.points]:
            self._put_pair(name, read[name])
        for node in self.nodes:
            own = read
            if node.output[0] in self.floats:
                own = {n: out for n, out in read.items() if n not in self.points}
            own = dict(own)
            bias = node.input[2] if len(node.input) > 2 else ""
            if bias in self.biases and node.input[1] in self.weights:
                own[bias] = self._put_bias(bias, node) or bias
            copy = copied(node)
            if node.output[0] in products:
                copy.CopyFrom(products[node.output[0]])
            for k, name in enumerate(copy.input):
                copy.input[k] = own.get(name, name)
            self.new.append(copy)
            for name in node.output:
                if name in self.points:
                    self._put_pair(name, read[name])
        refill(graph.node, self.new)
        for values in (graph.input, graph.value_info):
            for value in [v for v in values if v.name in self.masters]:
                values.remove(value)
        if self.bits:
            self.editor.metadata(BITS, json.dumps(self.bits))
        model = self.editor.result()
        model.quantization = Quantization(
            origin=self.editor.model,
            masters=self.masters,
            scales=self.trained if q.train_scales else {},
            missing=missing,
            notes=tuple(self.notes),
            observed=self.observed,
            epochs=q.observe,
            blocks=self.blocks,
        )
        return model

    def _constant(self, name: str, values: Array, kind: int) -> str:
        name = fresh_name(name, self.taken)
        array = np.asarray(np.asarray(values).astype(numpy_dtype(kind)), order="C")
        self.editor.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _scaled(self, values: Array) -> tuple[Array, Array]:
        """The scales and zero points of groups of a weight's values."""
        q = self.quantizer
        low, high = limits(q, values, q.weight_codes, symmetric=q.symmetric)
        return q.scale_of(low, high, q.weight_codes, symmetric=q.symmetric)

    def _dequantize(self, inputs: Sequence[str], name: str, layout: Mapping[str, Any]) -> str:
        """Add the DequantizeLinear of a tensor; returns its output."""
        out = fresh_name(f"{name}/dequantized", self.taken)
        label = f"{out}/DequantizeLinear"
        self.new.append(helper.make_node("DequantizeLinear", inputs, [out], label, **layout))
        return out

    def _put_weight(self, name: str) -> str:
        """The integers of a weight and its DequantizeLinear; returns the output of that node."""
        q, tensor, values = self.quantizer, self.constants[name], self._finite(name)
        groups, shape, given = _grouped(q, self.weights[name][0], values.astype(np.float64))
        scale, zero = (array.reshape(shape) for array in self._scaled(groups))
        inputs = [name, self._constant(f"{name}/scale", scale, TensorProto.FLOAT)]
        kind, notes = self._kind(values.shape, self.weights[name][0], given.get("block_size", 0))
        self.notes += [f"{name} is {note}" for note in notes]
        # onnxruntime fuses a Gemm into an integer kernel only if its weight has a zero point.
        is_fused = kind == TensorProto.INT8 and q.activations != "none"
        if is_fused or not q.symmetric:
            inputs.append(self._constant(f"{name}/zero_point", zero, kind))
        layout = attrs.evolve(_layout(given), name=name, dtype=kind, scale=inputs[1], bits=q.bits)
        codes = layout.codes(values, scale, None if q.symmetric else zero)
        tensor.CopyFrom(numpy_helper.from_array(codes, name))
        if q.bits != next(bits for text, bits, _ in _STORED if _type(text) == kind):
            self.bits[name] = q.bits
        self.masters[name] = np.array(values, np.float32)
        self.trained[inputs[1]] = values.size // scale.size * q.weight_codes[1]
        self.scales[name] = inputs[1], scale
        return self._dequantize(inputs, name, given)

    def _is_packed(self, name: str) -> bool:
        """Whether the product by a weight becomes MatMulNBits."""
        used = self.weights[name]
        if self.quantizer.layout != packed_products.LAYOUT or len(used) != 1:
            return False
        node = self.producers[used[0].node]
        bias = self.constants.get(node.input[2]) if len(node.input) > 2 else None
        sizes = () if bias is None else tuple(bias.dims)
        position = list(node.input).index(name)
        return packed_products.has_form(node, position, self.constants[name].dims, sizes)

    def _put_packed(self, name: str) -> NodeProto:
        """The bytes of a weight; returns the MatMulNBits that takes the place of its product."""
        q, tensor, used = self.quantizer, self.constants[name], self.weights[name][0]
        values = self._finite(name)
        lines = (values if used.inputs else values.T).astype(np.float64)  # a row for each output
        scale, zero = self._scaled(_grouped(q, attrs.evolve(used, inputs=1), lines)[0])
        bits, first = q.bits, q.weight_codes[0]
        blocks = packed_products.Blocks.of(values, used.inputs, q.block_size)
        inputs = ["", name, self._constant(f"{name}/scale", scale, TensorProto.FLOAT)]
        if not q.symmetric:
            places = blocks.packed_zeros(zero - first, bits)
            inputs.append(self._constant(f"{name}/zero_point", places, TensorProto.UINT8))
        tensor.CopyFrom(numpy_helper.from_array(blocks.packed(scale, zero - first, bits), name))
        self.masters[name] = blocks.values
        self.blocks[name] = used.inputs, values.shape
        self.trained[inputs[2]] = q.block_size * q.weight_codes[1]
        node = self.producers[used.node]
        inputs[0] = node.input[0]
        if len(node.input) > 2 and node.input[2]:
            inputs += [*[""] * (5 - len(inputs)), node.input[2]]
        layout, domain = packed_products.LAYOUT, packed_products.DOMAIN
        made = helper.make_node(layout, inputs, node.output, node.name, domain=domain)
        # In this order: checkpoints have a hash of the nodes, and make_node would sort them.
        made.attribute.extend(helper.make_attribute(*a) for a in blocks.attributes(bits).items())
        if all(o.domain != domain for o in self.editor.proto.opset_import):
            self.editor.proto.opset_import.append(helper.make_opsetid(domain, 1))
        return made

    def _finite(self, name: str) -> Array:
        """The values of a weight."""
        values = model_file.array_of(self.constants[name], self.editor.model.files)
        if not np.isfinite(values).all():
            raise ModelError(f"{WHERE}: the weight {name!r} has values that are not finite")
        return values

    def _kind(self, shape: Sequence[int], weight: _Weight, block: int) -> tuple[int, Sequence[str]]:
        """The smallest type of a weight by which this runtime multiplies rightly, and why not a smaller."""
        outputs = shape[weight.axis]
        product = _Product(
            op_type=weight.op_type,
            outputs=outputs if outputs < 64 else 64 + outputs % 64,
            block=block,
            has_zero=not self.quantizer.symmetric,
            has_codes=self.quantizer.activations != "none",
        )
        notes: list[str] = []
        for kind in self.kinds[:-1]:
            known = weight.op_type in ("Conv", "Gemm") or len(shape) == 2
            if not known or _multiplies(kind, self.editor.model.opset, product):
                return kind, notes
            text = numpy_dtype(kind).name
            notes.append(
                f"not stored as {text}: {require_runtime()} computes "
                f"{weight.op_type} wrongly, or not at all, for an {text} weight with {outputs} outputs"
            )
        return self.kinds[-1], notes

    def _put_bias(self, name: str, node: NodeProto) -> str:
        """The int32 codes of a bias in units of the product of both scales; "" if they do not fit.

        That is so for weights that are almost 0, as those of a channel whose normalization is folded, and
        for a bias of one element, which a Gemm repeats.
        """
        tensor = self.constants[name]
        values = model_file.array_of(tensor, self.editor.model.files)
        data = self.scales[self.root(node.input[0])][1]
        scale = np.asarray(data * self.scales[node.input[1]][1], np.float32)
        if scale.shape not in ((), values.shape):
            return ""
        largest = _LARGEST_BIAS * scale.astype(np.float64)
        if not (np.abs(values.astype(np.float64)) <= largest).all():
            return ""
        own = self._constant(f"{name}/scale", scale, TensorProto.FLOAT)
        given = {"axis": 0} if scale.ndim else {}
        layout = attrs.evolve(_layout(given), name=name, scale=own)
        codes = layout.codes(values, scale, None)
        tensor.CopyFrom(numpy_helper.from_array(codes.astype(np.int32), name))
        self.masters[name] = np.array(values, np.float32)
        return self._dequantize([name, own], name, given)

    def _put_pair(self, name: str, out: str) -> None:
        """QuantizeLinear and DequantizeLinear of an activation."""
        q, root = self.quantizer, self.root(name)
        kind = _type(q.activations.upper())
        if root not in self.pairs:
            low, high = map(np.asarray, q.ranges.get(root, (0.0, 0.0)))
            symmetric = q.symmetric_activations
            scale, zero = q.scale_of(low, high, q.activation_codes, symmetric=symmetric)
            names = [
                self._constant(f"{root}/scale", scale, TensorProto.FLOAT),
                self._constant(f"{root}/zero_point", zero, kind),
            ]
            self.pairs[root] = names
            self.scales[root] = names[0], scale
            size = self.editor.model.value(root).shape or ()
            count = math.prod(d for d in size[1:] if isinstance(d, int))
            if q.observe:
                self.observed[names[0]] = root
            else:
                self.trained[names[0]] = count * max(q.activation_codes[1], 1)
        codes = fresh_name(f"{name}/quantized", self.taken)
        pair, made = self.pairs[root], helper.make_node
        self.new += [
            made("QuantizeLinear", [name, *pair], [codes], f"{name}/QuantizeLinear"),
            made("DequantizeLinear", [codes, *pair], [out], f"{out}/DequantizeLinear"),
        ]


def limits(
    quantizer: Quantizer, values: Array, codes: tuple[int, int], *, symmetric: bool
) -> tuple[Array, Array]:
    """What the formula of a quantizer returns: two arrays of finite numbers; BrokenPlugin otherwise."""
    with calling(quantizer, "limits"):
        returned: object = quantizer.limits(values, codes, symmetric=symmetric)
    if isinstance(returned, tuple | list) and len(returned) == 2:
        low, high = (np.asarray(r, np.float64) for r in returned)
        if low.shape == high.shape == (len(values),) and np.isfinite([low, high]).all():
            return low, high
    raise BrokenPlugin(
        f"{whose(quantizer)} returns {short_repr(returned)} from limits, expected two arrays of "
        f"{len(values)} finite numbers: the lowest and the highest of each group",
        quantizer,
    )


def _type(name: str) -> int:
    return int(dict(TensorProto.DataType.items()).get(name, TensorProto.UNDEFINED))


def _layout(given: Mapping[str, int]) -> Quantized:
    """The layout that the attributes of a DequantizeLinear describe."""
    axis, block = given.get("axis", 1), given.get("block_size", 0)
    return Quantized("", TensorProto.INT32, "", axis=axis, block=block)


def _grouped(
    quantizer: Quantizer, weight: _Weight, values: Array
) -> tuple[Array, tuple[int, ...], dict[str, int]]:
    """The values that have one scale, [scales, n]; the shape of the scales; the attributes for them."""
    size = quantizer.block_size
    if size and values.ndim == 2:
        count = -(-values.shape[weight.inputs] // size)
        lines = np.moveaxis(values, weight.inputs, 1)
        lines = np.pad(lines, ((0, 0), (0, count * size - lines.shape[1])), "edge")
        shape = (count, len(lines)) if weight.inputs == 0 else (len(lines), count)
        groups = lines.reshape(len(lines), count, size)
        groups = groups.swapaxes(0, 1) if weight.inputs == 0 else groups
        return groups.reshape(-1, size), shape, {"axis": weight.inputs, "block_size": size}
    if quantizer.per_channel or size:
        lines = np.moveaxis(values, weight.axis, 0)
        return lines.reshape(len(lines), -1), (len(lines),), {"axis": weight.axis}
    return values.reshape(1, -1), (), {}
