"""Changes of a model before its training: what the plugins of the kind ``edits`` call."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph import sizes
from ortflex_core.compiler.graph.control_flow import constant_of
from ortflex_core.compiler.graph.nodes import ancestor_nodes, reads
from ortflex_core.compiler.graph.ops import FLOATS, Tensor, Trace
from ortflex_core.compiler.graph.program import build, fresh_name, rename_within
from ortflex_core.compiler.graph.protos import refill, settings, subgraphs_of
from ortflex_core.compiler.graph.shape_inference import inferred
from ortflex_core.compiler.model import class_axes, heads, shape_probe
from ortflex_core.compiler.model.channel_removal import find_removal
from ortflex_core.compiler.model.channels import Channels, single_node
from ortflex_core.compiler.model.class_axes import element_type
from ortflex_core.compiler.model.heads import Head, Layer
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.products import find_products, module_of
from ortflex_core.compiler.model.targets import CLASSES, file_classes
from ortflex_core.compiler.onnx_files import functions, half_floats, model_file, vetting
from ortflex_core.compiler.runtime import memory_limits
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.calling import calling, whose
from ortflex_core.kernel.errors import BrokenPlugin, ConfigError, ModelError, short_repr, suggest
from ortflex_core.kernel.model_protocols import Edit
from ortflex_core.kernel.types import Array, Shape, TensorSpec

_PRODUCTS = ("MatMul", "Gemm", "Conv", "MatMulNBits")
_SAME_VALUES = ("Identity", "Cast")


def apply_edits(model: Model, edits: Sequence[Edit], seed: int, where: Sequence[str] = ()) -> Model:
    """The model with these edits, in their order; ``unedited`` of the result is the model itself.

    Args:
        model: the model, which is not changed.
        edits: the edits.
        seed: the seed of new values.
        where: the argument that names each edit, for messages; by default the edit's name.

    Raises:
        ConfigError, ModelError: an edit does not fit the model.
        BrokenPlugin: an edit raises another error.
    """
    out = model
    for k, edit in enumerate(edits):
        editor = Editor(out, [seed, k], where[k] if where else edit.name)
        with calling(edit, "apply"):
            returned: object = edit.apply(editor)
        if returned is not None:
            raise BrokenPlugin(
                f"{whose(edit)} returns {short_repr(returned)} from apply; an edit changes the model "
                "that the editor has, and returns nothing",
                edit,
            )
        out = editor.result()
    if out is not model:
        out.adapter_values = model.adapter_values
        out.unedited = model.as_read
    return out


class Editor:
    """A copy of a model's file that an edit changes.

    Shapes and types are those of the graphs: float32 where a file has float16. What an edit writes gets
    the types of the file.

    Args:
        model: the model as it is before the edit.
        seed: the seed of new values.
        where: the argument that names the edit, for messages.

    Example:
        >>> from onnx import parser
        >>> model = parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y) '
        ...     "<float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3, 1] v = {1, 2, 3}> "
        ...     "{ h = MatMul(x, w) y = MatMul(h, v) }"
        ... )
        >>> editor = Editor(Model(model), 0, "edits")
        >>> str(editor.head()), str(editor.tensor("h"))
        ("'v' (3 → 1, before y)", 'h: float32[batch, 3]')
        >>> editor.cut("h")
        >>> [output.name for output in editor.result().outputs]
        ['h']
    """

    def __init__(self, model: Model, seed: int | Sequence[int], where: str) -> None:
        self.where = where
        self._seed = [seed] if isinstance(seed, int) else list(seed)
        self.new_head: tuple[str, ...] = model.new_head
        """The initializers of the head that was changed last."""
        self._open(model, model.proto)

    def _open(self, model: Model, proto: ModelProto) -> None:
        self.__dict__.pop("heads", None)
        self.model = model
        shape_probe.complete_shapes(model)
        self.proto = ModelProto()
        whole = functions.inlined(proto, model.label) if proto.functions else proto
        self.proto.CopyFrom(functions.in_order(whole))
        self.graph = self.proto.graph
        self._types = self._types_in_file()
        self._read = {name for node in self.graph.node for name in reads(node)}
        self._taken = {*model.producers, *model._values, *model.initializers}

    # ------------------------------------------------------------------ what the model has

    @property
    def label(self) -> str:
        """The name of the model, for messages."""
        return self.model.label

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return [o.name for o in self.graph.output]

    @property
    def classes(self) -> list[Any] | None:
        """The labels of the classes in the file, None without them."""
        known = file_classes(self.model)
        return None if known is None else list(known.tolist())

    @property
    def initializers(self) -> dict[str, TensorSpec]:
        """Type and shape of every initializer, as graphs compute it."""
        return dict(self.model.initializers)

    def tensor(self, name: str) -> TensorSpec:
        """Type and shape of a tensor, as graphs compute it.

        Raises:
            ModelError: no tensor has that name.
        """
        return self.model.value(name)

    def constant(self, name: str) -> Array:
        """The value of an initializer, read-only.

        Raises:
            ModelError: no initializer has that name.
        """
        return self.model.initializer(name)

    def generator(self, key: str) -> np.random.Generator:
        """A generator of random numbers that depends only on the seed and a name."""
        return np.random.default_rng([*self._seed, zlib.crc32(key.encode())])

    def check_room(self, *shape: int) -> None:
        """Refuse a new weight before it is drawn, if the memory cannot hold it.

        Args:
            shape: its shape. Its values are counted three times: as they are drawn, in the file, and in
                the training.

        Raises:
            ModelError: it is too large.
        """
        need = 3 * 8 * math.prod(shape)
        weights = sum(sizes.spec_bytes(spec) for spec in self.model.initializers.values())
        most = vetting.most_bytes(weights)
        if (left := memory_limits.available()) is not None:
            most = min(most, left)
        if need > most:
            raise ModelError(
                f"{self.where}: a new weight {list(shape)} needs {need / 2**20:,.0f} MiB, and at most "
                f"{most / 2**20:,.0f} MiB can be used; use fewer classes or tokens"
            )

    def readers(self, name: str) -> list[NodeProto]:
        """The nodes that read a tensor."""
        return [node for node in self.graph.node if name in reads(node)]

    # ------------------------------------------------------------------ heads

    @cached_property
    def heads(self) -> list[Head]:
        """The heads of the model: the last products before its outputs."""
        return self._find_heads()[0]

    def _find_heads(self) -> tuple[list[Head], dict[str, str]]:
        by_output = {n.output[0]: n for n in self.graph.node if n.output}
        places = [
            place
            for place in find_products(self.model)
            if place.node.output[0] in by_output
            and by_output[place.node.output[0]].op_type in _PRODUCTS
        ]
        return heads.find_heads(self.graph, self._shape, places)

    def head(self, at: str = "") -> Head:
        """The head that a name or glob means: of an output, a module, a node, a weight; or the only head.

        Raises:
            ModelError: the model has no such head, or several, which are listed.
        """
        found, reasons = self._find_heads()
        return heads.choose(found, reasons, at, self.where, self.label)

    def values(self, head: Head) -> list[tuple[Array, Array | None]]:
        """M [inputs, classes] and b [classes] or None of each layer of a head, in float64.

        A head with one score s for two classes, p = sigmoid(s), has the values of the softmax of
        (-s/2, s/2), which is the same.

        Raises:
            ModelError: M is quantized or computed.
        """
        out = []
        for layer in head.layers:
            matrix, bias = self._matrix(layer), self._bias(layer)
            if head.reach.pairs:
                half = 1 if self._raw_of(head.reach.pairs[0]) else 2
                matrix = np.concatenate([-matrix, matrix], axis=1) / half
                bias = None if bias is None else np.concatenate([-bias, bias]) / half
            out.append((matrix, bias))
        return out

    def _matrix(self, layer: Layer) -> Array:
        place = layer.place
        if place.why:
            raise ModelError(f"{self.where}: the old classes cannot be kept: {place.why}")
        return place.matrix(self.constant(place.stored))

    def _bias(self, layer: Layer) -> Array | None:
        if layer.bias is None:
            return None
        node, position = layer.bias
        value = self._value_of(node.input[position])
        factor = heads.alpha(node)
        flat = np.asarray(value, np.float64).ravel() * factor
        return np.broadcast_to(flat, (layer.product.outputs,)) if flat.size == 1 else flat

    def resize(
        self,
        head: Head,
        layers: Sequence[tuple[Array, Array | None]],
        labels: Sequence[Any] | None = None,
    ) -> None:
        """Give a head other values and another number of classes; the outputs after it follow.

        Args:
            head: the head.
            layers: M [inputs, classes] and b [classes] or None of each of its layers, in their order.
            labels: the labels of the new classes.

        Raises:
            ConfigError: the model has strings as labels of its classes, and ``labels`` are missing.
        """
        count = layers[0][0].shape[1]
        if head.reach.pairs and count < 2:
            raise ConfigError(
                f"{self.where}: {self.label} has a number for each class; use 2 or more"
            )
        names = []
        for layer, (matrix, bias) in zip(head.layers, layers, strict=True):
            names.append(self._store_matrix(layer, matrix))
            if bias is not None:
                names.append(self._store_bias(layer, bias))
        self.new_head = tuple(names)
        self._follow(head, count)
        self._label(head, count, labels)

    def _follow(self, head: Head, count: int) -> None:
        """Change what depends on the number of classes of a head."""
        for pair in head.reach.pairs:
            self._separate(pair)
        for sized in head.reach.sized:
            old = self._value_of(sized.node.input[sized.position])
            new = old.copy()
            new.reshape(-1)[sized.index] = count
            self._set_input(sized.node, sized.position, new, "shape")
        for output in self.graph.output:
            if output.name in head.reach.axes:
                dims = list(output.type.tensor_type.shape.dim)
                axis = head.reach.axes[output.name]
                if len(dims) <= axis:  # the file drops the dimension of its one row
                    dims, axis = [d for d in dims if d.dim_value == head.classes], 0
                if len(dims) <= axis:
                    raise ModelError(
                        f"{self.where}: the output {output.name!r} of {self.label} is declared without a "
                        f"dimension of {head.classes} classes; export the model with a dynamic batch"
                    )
                dims[axis].dim_value = count
        self._forget_shapes([layer.node.output[0] for layer in head.layers])

    def _store_matrix(self, layer: Layer, matrix: Array) -> str:
        place, node = layer.place, layer.node
        if not place.why and self._is_own(place.stored, node):
            old = self.constant(place.stored)
            flat = matrix / place.factor
            flat = flat.T if place.transposed else flat
            self._set(place.stored, flat.reshape(*flat.shape, *old.shape[2:]))
            return place.stored
        if node.op_type == "MatMulNBits":
            node.op_type, node.domain = "MatMul", ""
            del node.attribute[:]
            del node.input[2:]
        given = settings(node)
        turned = node.op_type == "Conv" or bool(given.get("transB", 0))
        flat = matrix / heads.alpha(node, "alpha")
        flat = flat.T if turned else flat
        flat = flat.reshape(*flat.shape, *([1] * layer.product.axes))
        return self._set_input(node, 1, flat, f"{layer.product.module}.weight", own=True)

    def _store_bias(self, layer: Layer, bias: Array) -> str:
        if layer.bias is None:
            raise ModelError(f"{self.where}: {layer.product.module!r} has no bias")
        node, position = layer.bias
        old = self._value_of(node.input[position])
        values = heads.shaped_like(bias / heads.alpha(node), old.shape, layer.product.outputs)
        return self._set_input(node, position, values, f"{layer.product.module}.bias")

    def _is_own(self, name: str, node: NodeProto) -> bool:
        """Whether only one node reads an initializer, possibly through a Transpose or a Cast."""
        while (found := self.readers(name)) and found != [node]:
            if len(found) > 1 or found[0].op_type not in ("Transpose", *_SAME_VALUES):
                return False
            name = found[0].output[0]
        return True

    def _separate(self, pair: NodeProto) -> None:
        """Concat(1 - p, p) with p = Sigmoid(z) becomes a Softmax of z, for any number of classes.

        Concat(-z, z) becomes z.
        """
        if scores := self._raw_of(pair):
            pair.op_type = "Identity"
            del pair.attribute[:], pair.input[:]
            pair.input.append(scores)
            return
        producers = {o: n for n in self.graph.node for o in n.output}
        name = pair.input[1]
        while (node := producers[name]).op_type in ("Identity", "Cast", "Reshape"):
            name = node.input[0]
        if node.op_type != "Sigmoid":
            raise ModelError(f"{self.where}: {pair.output[0]!r} does not come from a Sigmoid")
        pair.op_type = "Softmax"
        del pair.attribute[:], pair.input[:]
        pair.input.append(node.input[0])
        pair.attribute.append(helper.make_attribute("axis", 1))

    def _raw_of(self, pair: NodeProto) -> str:
        """Z of Concat(-z, z), "" for Concat(1 - p, p)."""
        negative = next(n for n in self.graph.node if pair.input[0] in n.output)
        return "" if negative.op_type == "Sub" else str(pair.input[1])

    def label_classes(self, labels: Sequence[Any] | None) -> None:
        """Write the labels of the classes to the metadata; None removes them."""
        self.metadata(CLASSES, None if labels is None else json.dumps(list(labels)))

    def _label(self, head: Head, count: int, labels: Sequence[Any] | None) -> None:
        """Give the classes their labels: in the nodes that map classes to labels, else in the metadata."""
        known = self.classes
        given = None if labels is None else list(labels)
        if given is None and head.reach.maps:
            if known and isinstance(known[0], str):
                raise ConfigError(
                    f"{self.where}.classes: {self.label} has the labels {', '.join(known[:5])}, …; "
                    f"pass the labels of the {count} classes: classes=[…]"
                )
            given = list(range(count))
        self.label_classes(None if head.reach.maps else given)
        if given is None:
            return
        for node in head.reach.maps:
            self._map(node, given, known)
        if known is None or type(known[0]) is not type(given[0]):
            self._retype(head.reach.labels, element_type(given))

    def _map(self, node: NodeProto, labels: list[Any], known: list[Any] | None) -> None:
        kind = element_type(labels)
        if node.op_type == "ZipMap":
            key = "classlabels_strings" if kind == TensorProto.STRING else "classlabels_int64s"
            del node.attribute[:]
            node.attribute.append(helper.make_attribute(key, labels))
            for output in self.graph.output:
                if output.name == node.output[0]:
                    maps = output.type.sequence_type.elem_type.map_type
                    maps.key_type = kind
            return
        table = self._value_of(node.input[0])
        same = known is not None and isinstance(known[0], str) == isinstance(labels[0], str)
        array = np.asarray(labels, object if kind == TensorProto.STRING else np.int64)
        if same and kind != TensorProto.STRING:
            array = array.astype(table.dtype)
        self._set_input(node, 0, array.reshape([-1]), "classes")

    def _retype(self, names: set[str], kind: int) -> None:
        """Give tensors with labels another element type."""
        for node in self.graph.node:
            if node.op_type == "Cast" and node.output[0] in names:
                node.op_type = "Identity"
                del node.attribute[:]
        for output in self.graph.output:
            if output.name in names:
                output.type.tensor_type.elem_type = kind

    # ------------------------------------------------------------------ tokens

    @property
    def embeddings(self) -> dict[str, str]:
        """The tables of which a Gather reads rows by data, each with the module of its node."""
        constant = class_axes.Constants(self.graph).names
        out: dict[str, str] = {}
        for node in self.graph.node:
            name = node.input[0] if node.op_type == "Gather" else ""
            known = self.model.initializers.get(name)
            if known is None or known.dtype not in FLOATS or len(known.shape or ()) != 2:
                continue
            if node.input[1] not in constant and settings(node).get("axis", 0) == 0:
                out.setdefault(name, module_of(node, name))
        return out

    def add_tokens(self, table: str, rows: Array) -> None:
        """Add rows to an embedding, and the same columns to a head whose matrix is its transpose.

        Args:
            table: the initializer, one of :attr:`embeddings`.
            rows: [tokens, width].

        Raises:
            ModelError: another node reads the table in a way that is not known.
        """
        old = self.constant(table)
        grown = np.concatenate([old, rows.astype(old.dtype)])
        tied = [h for h in self.heads if self._is_tied(h, table, old)]
        own = {h.layers[0].node.output[0] for h in tied}
        for node in self.readers(table):
            ends = self.readers(node.output[0]) if node.op_type == "Transpose" else [node]
            if not all(n.op_type == "Gather" or n.output[0] in own for n in ends):
                raise ModelError(
                    f"{self.where}: the {node.op_type} {node.name!r} also reads {table!r}"
                )
        for head in tied:
            layer, obstacle = head.layers[0], head.obstacle
            if obstacle:
                raise ModelError(f"{self.where}: the tied head {head} cannot grow: {obstacle}")
            if layer.place.stored != table:
                self._store_matrix(layer, np.asarray(grown.T, np.float64))
            if (bias := self._bias(layer)) is not None:
                mean = np.full(len(rows), bias.mean())
                self._store_bias(layer, np.concatenate([bias, mean]))
            self._follow(head, len(grown))
        self._set(table, grown)

    def _is_tied(self, head: Head, table: str, old: Array) -> bool:
        place = head.layers[0].place
        if len(head.layers) > 1 or place.why or head.classes != len(old):
            return False
        return place.stored == table or np.array_equal(self._matrix(head.layers[0]), old.T)

    # ------------------------------------------------------------------ channels

    @property
    def channels(self) -> Channels:
        """The channels of the graph, as it is now."""
        return self._channels(_FoldedConstants(self))

    def _channels(self, known: _FoldedConstants) -> Channels:
        return Channels(
            self.graph.node, self.outputs, self._shape, known.value, known.is_shared, known.run
        )

    def joined_weights(self, names: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Weights whose channels can only be removed together, such as those before an addition.

        Args:
            names: the weights to look at. Those whose channels cannot be removed are left out.
        """
        known = _FoldedConstants(self)
        channels = self._channels(known)
        found: dict[tuple[int, ...], dict[str, None]] = {}
        for layer in channels.layers:
            name = known.source(layer.node.input[layer.position])
            ids = [int(i) for i in layer.channels.ids]
            if name in names and not any(map(channels.reason, ids)):
                found.setdefault(tuple(map(channels.root, ids)), {}).setdefault(name)
        return tuple(tuple(group) for group in found.values() if len(group) > 1)

    def remove_channels(self) -> int:
        """Remove the channels that the outputs do not need (:mod:`.channel_removal`).

        Returns:
            The number of channels that are gone.
        """
        count = 0
        # Without some channels, rows of the next product can be zero.
        while removed := self._remove_channels():
            count += removed
        return count

    def _remove_channels(self) -> int:
        known = _FoldedConstants(self)
        removal = find_removal(self._channels(known), known.value)
        if not removal.count:
            return 0
        del self.graph.value_info[:]
        for node, position, values in removal.constants:
            node.input.extend([""] * (position + 1 - len(node.input)))
            known.set(node, position, values)
        for node, where, numbers in removal.counts:
            if isinstance(where, str):
                new: Any = int(numbers[0]) if numbers.size == 1 else numbers.tolist()
                _set_attribute(node, where, new)
                continue
            _set_attribute(node, "num_outputs", None)
            node.input.extend([""] * (where + 1 - len(node.input)))
            self._set_input(node, where, numbers, "sizes", own=True)
        self._open(self.result(), self.proto)
        return removal.count

    # ------------------------------------------------------------------ constants

    def replace(self, name: str, values: Array) -> None:
        """Give an initializer other values, of any shape; its element type stays.

        Raises:
            ModelError: no initializer has that name.
        """
        self.constant(name)
        self._set(name, np.asarray(values))

    def _tensor_of(self, name: str) -> TensorProto | None:
        return next((t for t in self.graph.initializer if t.name == name), None)

    def _value_of(self, name: str) -> Array:
        """The value, in the file's type, of an initializer or of what nodes compute from constants."""
        if (tensor := self._tensor_of(name)) is not None:
            return model_file.array_of(tensor, self.model.files)
        node = next(n for n in self.graph.node if name in n.output)
        if node.op_type != "Constant":
            folded = class_axes.Constants(self.graph).value(name)
            return self._value_of(node.input[0]) if folded is None else folded
        kind, value = next(iter(settings(node).items()))
        return numpy_helper.to_array(value) if kind == "value" else np.asarray(value)

    def _set(self, name: str, values: Array) -> None:
        tensor = self._tensor_of(name)
        if tensor is None:
            raise ModelError(f"{self.where}: {name!r} is not an initializer of the file's graph")
        new = _tensor(name, values, tensor.data_type)
        new.metadata_props.extend(tensor.metadata_props)
        tensor.CopyFrom(new)
        self._forget_shapes([name])
        for info in self.graph.input:  # older files also list every initializer as an input
            if info.name == name:
                kind = new.data_type
                info.CopyFrom(helper.make_tensor_value_info(name, kind, list(values.shape)))

    def _set_input(
        self, node: NodeProto, position: int, values: Array, hint: str, *, own: bool = False
    ) -> str:
        """Give a constant input of a node other values; other readers keep theirs. Returns its name."""
        name = self._source(str(node.input[position]))
        tensor = self._tensor_of(name)
        is_same = tensor is not None and (
            values.dtype.kind == "f" or numpy_helper.to_array(tensor).dtype == values.dtype
        )
        if not own and is_same and len(self.readers(name)) == 1:
            self._set(name, values)
            return name
        return self._add(node, position, values, hint)

    def _source(self, name: str) -> str:
        """The tensor of which a tensor is the only Identity or Cast, or its own name."""
        while len(self.readers(name)) == 1:
            makers = [n for n in self.graph.node if name in n.output]
            if not makers or makers[0].op_type not in _SAME_VALUES:
                break
            name = makers[0].input[0]
        return name

    def _add(self, node: NodeProto, position: int, values: Array, hint: str) -> str:
        kind = self._float_type(node) if values.dtype.kind == "f" else None
        name = fresh_name(hint, self._taken)
        model_file.add_initializer(self.proto, _tensor(name, values, kind))
        node.input[position] = name
        return name

    def _float_type(self, node: NodeProto) -> int:
        """The element type in the file of the data that a node computes with."""
        known = [self._tensor_of(i) for i in node.input]
        kinds = [t.data_type for t in known if t is not None and t.data_type in FLOATS]
        if kinds:
            return int(kinds[0])
        computed = self._in_file(self.tensor(node.output[0])).dtype
        return computed if computed in FLOATS else int(TensorProto.FLOAT)

    # ------------------------------------------------------------------ the graph

    def cut(self, *tensors: str) -> None:
        """End the model at some tensors, which become its outputs; what they do not need is removed.

        Raises:
            ModelError: a name is not a tensor that a node computes.
        """
        computed = {o for node in self.graph.node for o in node.output if o}
        for name in tensors:
            if name not in computed:
                raise ModelError(
                    f"{self.where}: {self.label} computes no tensor {name!r}; {suggest(name, computed)}"
                )
        self._set_outputs([self._in_file(self.tensor(name)) for name in tensors])

    def _in_file(self, spec: TensorSpec) -> TensorSpec:
        """A tensor with the element type that it has in the file."""
        dtype = spec.dtype
        if dtype == TensorProto.FLOAT and self.model.half:
            dtype = self._types.get(spec.name) or self.model.half[0]
        return TensorSpec(spec.name, dtype, spec.shape)

    def _types_in_file(self) -> dict[str, int]:
        """The element types of a file with half types, which the model computes as float32."""
        if not self.model.half:
            return {}
        try:
            values = inferred(model_file.skeleton(self.proto), self.label)
        except ModelError:  # the annotations may be all that is known
            values = {v.name: TensorSpec.from_proto(v) for v in self.graph.value_info}
        return {name: spec.dtype for name, spec in values.items()}

    def _set_outputs(self, specs: Sequence[TensorSpec]) -> None:
        old = {o.name: o for o in self.graph.output}
        refill(self.graph.output, [old.get(spec.name) or spec.to_proto() for spec in specs])

    def append(
        self,
        output: str,
        formula: Callable[..., Tensor],
        tensors: Sequence[str],
        parameters: Mapping[str, Array],
    ) -> str:
        """Compute a new tensor, which becomes the only output.

        Args:
            output: its name; a number is added if it is in use.
            formula: the function ``formula(op, *tensors, **parameters)`` of traced tensors.
            tensors: the names of the tensors of the model that it reads.
            parameters: the values of its parameters, by the keywords of the formula; they are called
                ``OUTPUT.KEYWORD`` in the file.

        Returns:
            The name of the output.
        """
        specs = [self._in_file(self.tensor(name)) for name in tensors]
        kind = next((s.dtype for s in specs if s.dtype in FLOATS), TensorProto.FLOAT)
        name = fresh_name(output, self._taken)
        trace = Trace(self.model.opsets)
        given = [trace.input(s.name, s.dtype, s.shape) for s in specs]
        own = {}
        for keyword, values in parameters.items():
            initializer = fresh_name(f"{name}.{keyword}", self._taken)
            model_file.add_initializer(self.proto, _tensor(initializer, values, int(kind)))
            own[keyword] = trace.input(initializer, int(kind), tuple(values.shape))
        self.new_head = tuple(str(key) for key in trace.inputs if key not in tensors)
        result = formula(trace.op, *given, **own)
        branch = build(trace, {name: result}, name=name).proto().graph
        kept = {v.name for v in (*branch.input, *branch.output)}
        rename_within(branch, kept, name, self._taken)
        self.graph.initializer.extend(branch.initializer)
        self.graph.node.extend(branch.node)
        self._set_outputs([TensorSpec(name, int(kind), result.shape)])
        return name

    def metadata(self, key: str, value: str | None) -> None:
        """Set an entry of the file's metadata, or remove it."""
        kept = [(p.key, p.value) for p in self.proto.metadata_props if p.key != key]
        helper.set_model_props(self.proto, dict([*kept, *([(key, value)] if value else [])]))

    def _forget_shapes(self, tensors: Sequence[str]) -> None:
        """Remove recorded shapes of tensors and of what is computed from them."""
        stale = set(tensors)
        for node in self.graph.node:
            if not stale.isdisjoint(reads(node)):
                stale.update(node.output)
        kept = [v for v in self.graph.value_info if v.name not in stale]
        if len(kept) < len(self.graph.value_info):
            refill(self.graph.value_info, kept)

    def _shape(self, name: str) -> Shape | None:
        try:
            return self.model.value(name).shape
        except ModelError:
            return None

    def _prune(self) -> None:
        """Remove nodes and tensors that no output needs any more."""
        nodes = ancestor_nodes(self.graph.node, self.outputs)
        left = {name for node in nodes for name in reads(node)} | set(self.outputs)
        if len(nodes) < len(self.graph.node):
            refill(self.graph.node, nodes)
        for values in (self.graph.initializer, self.graph.input):
            for value in [v for v in values if v.name in self._read and v.name not in left]:
                values.remove(value)

    def result(self) -> Model:
        """The model with the changes.

        Raises:
            ModelError: the changes made it invalid, or no input is left.
        """
        self._prune()
        model = self.model.changed(self.proto)
        if self.model.inputs and not model.inputs:
            raise ModelError(
                f"{self.where}: {', '.join(map(repr, self.outputs))} is not computed from an input of "
                f"{self.label}; choose a tensor that depends on "
                f"{', '.join(repr(spec.name) for spec in self.model.inputs)}"
            )
        shape_probe.complete_shapes(model)
        model.new_head = self.new_head
        return model


def _set_attribute(node: NodeProto, name: str, value: Any) -> None:
    """Give a node another attribute; None removes it."""
    kept = [a for a in node.attribute if a.name != name]
    new = [] if value is None else [helper.make_attribute(name, value)]
    refill(node.attribute, [*kept, *new])


class _FoldedConstants:
    """The constants of a graph: initializers, and what nodes compute from them."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        graph = editor.graph
        self._tensors = {t.name: t for t in graph.initializer}
        self._producers = {o: n for n in graph.node for o in n.output if o}
        self._readers = Counter(name for node in graph.node for name in reads(node))
        self._readers.update(output.name for output in graph.output)
        self._known: dict[str, Array | None] = {}

    def value(self, name: str) -> Array | None:
        """The value of a tensor, None if inputs or the integers of a quantized weight are in it."""
        if name not in self._known:
            self._known[name] = None  # also of what depends on itself
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> Array | None:
        if name in self._tensors:
            editor = self._editor
            known = editor.model.initializers
            return editor.constant(name) if name in known else editor._value_of(name)
        node = self._producers.get(name)
        if node is None or node.op_type == "DequantizeLinear" or node.op_type.startswith("Random"):
            return None
        if node.op_type == "Constant":
            return constant_of(node)
        source = self._producers.get(node.input[0]) if node.input else None
        for shape in (node, source):
            if shape is not None and shape.op_type == "Shape":
                return self._sizes(node, shape)
        if node.domain not in ("", "ai.onnx") or subgraphs_of(node) or not node.input:
            return None
        arrays = [self.value(i) if i else np.zeros(0, np.float32) for i in node.input]
        full = [a for a in arrays if a is not None]
        return self.run(node, full) if len(full) == len(arrays) else None

    def _sizes(self, node: NodeProto, shape: NodeProto) -> Array | None:
        """The sizes that a Shape, or a Gather from one, gives; None if they depend on the inputs."""
        given = settings(shape)
        known = self._editor._shape(shape.input[0])
        sizes = None if known is None else known[given.get("start", 0) : given.get("end")]
        if sizes is not None and node.op_type == "Gather":
            index = self.value(node.input[1])
            if index is None or not (np.abs(index) <= len(sizes) - 1).all():
                return None
            found = [sizes[int(i)] for i in index.ravel()]
            if all(isinstance(size, int) for size in found):
                return np.array(found, np.int64).reshape(index.shape)
        if sizes is None or node is not shape or not all(isinstance(size, int) for size in sizes):
            return None
        return np.array(sizes, np.int64)

    def run(self, node: NodeProto, arrays: Sequence[Array]) -> Array | None:
        """The first output of a node, None if the runtime cannot compute it."""
        model = single_node(node, arrays, self._editor.proto)
        try:
            return np.asarray(cpu_session(model).run(None, {})[0])
        except Exception:  # the runtime has errors of its own, such as a missing kernel
            return None

    def is_shared(self, name: str) -> bool:
        """Whether several nodes read a constant, or the initializer that it is a view of."""
        return any(self._readers[part] > 1 for part, _ in self._chain(name))

    def _chain(self, name: str) -> Iterator[tuple[str, list[int] | None]]:
        """A tensor, and what it is a transpose of, with the order of the dimensions."""
        yield name, None
        while (node := self._producers.get(name)) is not None and (
            node.op_type in ("Transpose", "Identity")
        ):
            order = settings(node).get("perm") if node.op_type == "Transpose" else []
            name = node.input[0]
            yield name, None if order is None else list(order)

    def source(self, name: str) -> str:
        """The tensor of which another one is a transposed or other view."""
        *_, (last, _) = self._chain(name)
        return last

    def set(self, node: NodeProto, position: int, values: Array) -> None:
        """Give a constant input other values: those of its initializer, if no other node reads that."""
        name = str(node.input[position])
        if name and not self.is_shared(name):
            *_, (last, _) = chain = list(self._chain(name))
            if last in self._tensors:
                for _, order in chain[1:]:
                    if order != []:
                        values = values.transpose(None if order is None else np.argsort(order))
                self._editor._set(last, values)
                return
        hint = name or f"{module_of(node, node.input[1])}.bias"
        self._editor._set_input(node, position, values, hint, own=True)


def _tensor(name: str, values: Array, kind: int | None = None) -> TensorProto:
    """An initializer with an element type; by default that of the values."""
    if kind is None or kind not in FLOATS:
        return numpy_helper.from_array(np.asarray(values, order="C"), name)
    if kind in half_floats.HALF:
        raw = half_floats.rounded(np.asarray(values, np.float32), kind, name)
    else:
        raw = np.asarray(values, helper.tensor_dtype_to_np_dtype(kind))
    content = np.ascontiguousarray(raw).tobytes()
    return TensorProto(name=name, data_type=kind, dims=values.shape, raw_data=content)
