"""A user's .onnx file: reading, analysis, replay into graphs, and export with new weights.

The file itself is never edited in place. Everything here works on an internal copy with functions
inlined; the export is the user's own model with only the trained tensors changed.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from weakref import WeakValueDictionary

import attrs
from onnx import ModelProto, NodeProto, TensorProto

from ortflex_core.compiler.graph import protos, shape_inference, sizes
from ortflex_core.compiler.graph.control_flow import captured_names as captured_names
from ortflex_core.compiler.graph.control_flow import trace_node
from ortflex_core.compiler.graph.nodes import ancestor_nodes, plain_domain, reads, tensor_name
from ortflex_core.compiler.graph.ops import Inputs, Tensor, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.protos import copied, opsets_of, subgraphs_of
from ortflex_core.compiler.model import attribute_weights, inference_mode
from ortflex_core.compiler.model import free_batch as freeing
from ortflex_core.compiler.model.quantizer import Quantization
from ortflex_core.compiler.onnx_files import (
    attributes,
    export,
    functions,
    half_floats,
    model_file,
    vetting,
)
from ortflex_core.compiler.onnx_files.content import RECEIPT, Content, content_of
from ortflex_core.compiler.onnx_files.external_data import DataFiles
from ortflex_core.compiler.operators import (
    decompositions,
    downgrade,
    integer_weights,
    kernels,
    loop_bounds,
    upgrade,
)
from ortflex_core.compiler.operators.gradient_families import has_rule
from ortflex_core.kernel import digests
from ortflex_core.kernel.errors import MALFORMED, GraphError, ModelError, OrtflexError, suggest
from ortflex_core.kernel.notebook import displayed_briefly
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array, Arrays, Specs, TensorSpec

OLDEST_OPSET = 13
# Larger initializers that are not trained are inputs of the compiled graphs, which share them.
LARGE = 1024

Source = str | os.PathLike[str] | bytes | ModelProto
Rewrite = Callable[[Trace, NodeProto, Inputs], Sequence[Tensor] | None]
"""Replaces a node during a replay: its outputs, or None to keep it as it is.

It is called with every node, except those that read a sequence.
"""


class Model:
    """An ONNX model to train.

    Args:
        source: a path, the file's bytes, or a ModelProto (which is copied).
        free_batch: make a fixed batch dimension dynamic inside (see
            :mod:`ortflex_core.compiler.model.free_batch`).
        raise_half: compute float16 and bfloat16 tensors as float32 (see
            :mod:`ortflex_core.compiler.onnx_files.half_floats`); exports keep the file's types.
        plugins: the plugins with decompositions of operators; None for the installed ones.
        files: the open files with the tensors of a ModelProto that are not inside.

    Raises:
        ModelError: missing, truncated, not ONNX, invalid, of an opset that cannot be converted, or
            with a batch dimension that cannot be freed.
    """

    attached: Mapping[str, bool] = {}
    """Initializers that adapters added, and whether they are trained; then the others are frozen."""

    unextended: Model | None = None
    """The model without the tensors that only losses read; None if it has none of them."""
    loss_inputs: tuple[str, ...] = ()
    """The inputs that only losses read: predictions do not need them, and the file lacks them."""
    drawn_again: Mapping[str, str] = MappingProxyType({})
    """Those of them that have the rows of other inputs, after a second draw of ``batch_drawn``."""
    loss_parameters: tuple[str, ...] = ()
    """The trained tensors of losses, which the file lacks."""
    of_losses: frozenset[str] = frozenset()
    """The computed tensors that only losses read, which the file lacks."""

    unedited: Model | None = None
    """The model before the edits of its file; None if it has no edits."""
    new_head: tuple[str, ...] = ()
    """The initializers of the head that an edit has put in."""
    quantization: Quantization | None = None
    """What a quantizer has put in; None for files that are quantized already, and for float models."""

    def __init__(
        self,
        source: Source,
        *,
        free_batch: bool = False,
        raise_half: bool = True,
        plugins: Plugins | None = None,
        files: DataFiles | None = None,
    ) -> None:
        self.path = Path(source) if isinstance(source, str | os.PathLike) else None
        self.label = str(self.path) if self.path else "the model"
        self.free_batch, self._plugins = free_batch, plugins
        self.half: list[int] = []
        """The types of the file that are raised to float32."""
        self._raise_half = raise_half
        self.adapter_values: Arrays = {}
        """The values of adapters in a resumed run, by the names of their tensors."""
        self.unlearned = ""
        """The reason why a run of the model did not determine missing shapes (see ``shape_probe``)."""
        self._file, self.files = model_file.load(source, self.label, files)
        self.proto, self._in_attributes = attribute_weights.unfold(self._file)
        model_file.import_standard(self.proto, OLDEST_OPSET)
        self.opsets = opsets_of(self.proto)
        self.opset = self.opsets.get("", 0)
        self._check()
        self._arrays: dict[str, Array] = {}
        # Kept only while they are in use: the tensors of the file would otherwise be in memory twice.
        self._large_arrays: WeakValueDictionary[str, Array] = WeakValueDictionary()
        self._prepare()
        self.opsets = opsets_of(self.internal)
        graph = self.internal.graph
        values = self._inferred(self.internal)
        self._values = shape_inference.one_batch(values, graph)
        self.producers: dict[str, NodeProto] = {o: n for n in graph.node for o in n.output if o}
        self.inputs = tuple(
            values[tensor_name(i, self.label)]
            for i in graph.input
            if i.name not in self._initializers
        )
        self.outputs = tuple(values[o.name] for o in graph.output if o.type.HasField("tensor_type"))

    def _check(self) -> None:
        if not self.opset:
            raise ModelError(f"{self.label} imports no standard operators (domain ai.onnx)")
        if not self.proto.graph.node:
            raise ModelError(f"{self.label} has no nodes")

    def _prepare(self) -> None:
        """The internal graph: functions inlined, the batch freed and the opset upgraded where needed.

        ``apart`` has the reasons why operators were expanded, by the name of their first output.
        """
        bare = model_file.skeleton(self.proto)
        inlined = functions.inlined(decompositions.mark(bare, self._plugins), self.label)
        if self.proto.functions:
            attributes.check_all(inlined.graph, self.label)
        self.half = half_floats.half_types(inlined) if self._raise_half else []
        internal = self._bounded(inlined)
        # Tensors that the skeleton lacks are inputs of it, under the same names.
        inside = {t.name for t in internal.graph.initializer}
        given = self.proto.graph.initializer if bare is not self.proto else ()
        large = [t for t in given if t.name not in inside]
        self._initializers = {t.name: t for t in (*internal.graph.initializer, *large)}
        values = {t.name: self.initializer(t.name) for t in large}
        if self.free_batch or self.opset < OLDEST_OPSET:
            if self.free_batch:
                freeing.batch_sizes(internal, self.label, values)
            self._inferred(internal)  # before it is run
        if self.free_batch:
            internal = freeing.free_batch(internal, self.label, values, self._raised)
        self._freed = internal
        internal = self._raised(internal)
        internal, self.decomposed = decompositions.decompose(
            internal, self._plugins, has_rule, large=values
        )
        self.decomposed.frozen.update({s.name: s.frozen for s in self._in_attributes if s.frozen})
        if self.opset < OLDEST_OPSET:
            internal = upgrade.upgrade_opset(internal, self.label, self.opset, values)
        internal, origins = integer_weights.dequantized(internal, self._initializers.values())
        self.decomposed.origins.update(origins)
        internal, self.apart = kernels.inlined(internal)
        internal, self.unreadable = downgrade.readable(internal, self.label)
        # Operators of a body may also lack kernels.
        self.internal, within = kernels.inlined(internal) if self.apart else (internal, {})
        self.apart |= within
        internal = self.internal
        # In the file's order; conversions may add constants.
        initializers = {t.name: t for t in internal.graph.initializer}
        known = [t.name for t in self.proto.graph.initializer]
        everything = {**self._initializers, **initializers}
        self._initializers = {
            n: everything[n] for n in dict.fromkeys([*known, *initializers]) if n in everything
        }

    def _inferred(self, proto: ModelProto) -> dict[str, TensorSpec]:
        values = shape_inference.inferred(proto, self.label)
        attributes.check_axes(proto.graph, values, self.label)
        most, weights = self._most(proto, values)
        vetting.vet_values(values.values(), most, weights, self.label)
        if any(shape_inference.has_unknown_dims(spec.shape) for spec in values.values()) or any(
            subgraphs_of(node) for node in proto.graph.node
        ):
            sized = shape_inference.sized(proto, sizes.UNKNOWN)
            vetting.vet_values(sized, most, weights, self.label)
        return values

    def _bounded(self, internal: ModelProto) -> ModelProto:
        """The internal graph, with a bound on each of its loops."""
        self._initializers = {t.name: t for t in self.proto.graph.initializer}
        if not loop_bounds.within(internal):
            return internal
        values = shape_inference.inferred(internal, self.label)
        return loop_bounds.bounded(internal, values, self._most(internal, values)[0])

    def _most(self, proto: ModelProto, values: Specs) -> tuple[int, int]:
        """The largest number of bytes of a tensor, and the bytes of all weights and inputs."""
        weights = sum(map(vetting.bytes_of, self._initializers.values()))
        inputs = [values[i.name] for i in proto.graph.input if i.name in values]
        weights += sum(sizes.spec_bytes(i) for i in inputs if i.name not in self._initializers)
        return vetting.most_bytes(weights), weights

    def initializer(self, name: str) -> Array:
        """An initializer's value (shared, do not write to it).

        Raises:
            ModelError: no initializer has that name, or its file was changed in place.
        """
        self.files.verify()
        if (known := self._arrays.get(name, self._large_arrays.get(name))) is not None:
            return known
        if name not in self._initializers:
            raise ModelError(
                f"{self.label} has no initializer {name!r}; {suggest(name, self._initializers)}"
            )
        tensor = self._initializers[name]
        array = model_file.array_of(tensor, self.files)
        array = half_floats.raised_array(array, tensor.data_type, self.half)
        kept = self._arrays if model_file.is_small(tensor) else self._large_arrays
        kept[name] = array
        return array

    def _raised(self, proto: ModelProto) -> ModelProto:
        return half_floats.raise_to_float32(proto, self.half)

    def digest(self) -> str:
        """A digest of the graph and the weights of the file."""
        digest = hashlib.sha256(protos.structure(self.proto).encode())
        for tensor in self.proto.graph.initializer:
            digest.update(tensor.name.encode())
            digest.update(digests.of_array(model_file.array_of(tensor, self.files)).encode())
        return digest.hexdigest()[:32]

    @property
    def stamp(self) -> str:
        """The differences in opset and types between the file and the graphs, in one line, or ""."""
        is_quantized = self.quantization is not None
        half = self.as_read.half if is_quantized else self.half
        raised = half_floats.note(half, quantized=is_quantized)
        notes = (upgrade.note(self.opset, self.opsets[""]), raised)
        return "; ".join(filter(None, notes))

    def holding(self, values: Arrays) -> Model:
        """The same model with new values of some initializers; :meth:`export` keeps the file's values."""
        model = copy.copy(self)
        model._arrays = {**self._arrays, **values}
        return model

    @property
    def as_read(self) -> Model:
        """The model of the file: without edits."""
        return self.unedited or self

    @cached_property
    def content(self) -> Content:
        """Digests of the user's file."""
        return content_of(self._file, self.files)

    @property
    def receipt(self) -> str | None:
        """The receipt in the file's metadata, as text (:mod:`ortflex_core.training.receipt`)."""
        entries = self._file.metadata_props
        return next((entry.value for entry in entries if entry.key == RECEIPT), None)

    def changed(self, proto: ModelProto) -> Model:
        """A model like this one, of the same file, with a changed graph.

        Raises:
            ModelError: the graph is not valid.
        """
        model = Model(
            proto,
            free_batch=self.free_batch,
            raise_half=self._raise_half,
            plugins=self._plugins,
            files=self.files,
        )
        model.path, model.label = self.path, self.label
        return model

    @cached_property
    def initializers(self) -> dict[str, TensorSpec]:
        """Type and shape of every initializer, in the file's order."""
        return {
            name: TensorSpec(name, half_floats.raised_type(t.data_type, self.half), tuple(t.dims))
            for name, t in self._initializers.items()
        }

    @property
    def fixed_batch(self) -> tuple[TensorSpec, int] | None:
        """The first input whose first dimension is a number, and that number."""
        for spec in self.inputs:
            if spec.shape and isinstance(spec.shape[0], int):
                return spec, spec.shape[0]
        return None

    def value(self, name: str) -> TensorSpec:
        """Type and shape of any tensor of the graph.

        Raises:
            ModelError: no tensor has that name.
        """
        if name in self._values:
            return self._values[name]
        if name in self.producers:
            return TensorSpec(name, TensorProto.UNDEFINED, None)
        known = [*self.producers, *self._values]
        raise ModelError(f"{self.label} has no tensor {name!r}; {suggest(name, known)}")

    def unknown(self) -> list[str]:
        """Tensors whose type or rank (of outputs: sizes) could not be inferred, in the graph's order."""
        known = {n for n, s in self._values.items() if s.dtype and s.shape is not None}
        # Inference calls unknown sizes unk__0, unk__1, …
        vague = {
            o.name
            for o in self.outputs
            if any(d is None for d in o.shape or ()) or shape_inference.has_unknown_dims(o.shape)
        }
        return [name for name in self.producers if name not in known or name in vague]

    def learn(self, specs: Iterable[TensorSpec]) -> None:
        """Add types and shapes that do not come from inference; sizes that it knows stay."""
        for spec in specs:
            shape, known = spec.shape, self._values.get(spec.name)
            if shape is not None and known is not None and len(known.shape or ()) == len(shape):
                pairs = zip(shape, known.shape or (), strict=True)
                shape = tuple(old if isinstance(old, int) else new for new, old in pairs)
            self._values[spec.name] = attrs.evolve(spec, shape=shape)
        self.outputs = tuple(self._values[o.name] for o in self.outputs)

    def ancestors(self, names: Iterable[str]) -> list[NodeProto]:
        """The nodes that the given tensors depend on, in the graph's order."""
        return ancestor_nodes(self.internal.graph.node, names)

    def replay(
        self,
        trace: Trace,
        outputs: Iterable[str],
        given: Mapping[str, Tensor],
        rewrite: Rewrite | None = None,
        *,
        infer: bool = False,
    ) -> dict[str, Tensor]:
        """Trace the part of the graph that ``outputs`` depend on.

        ``given`` has tensors for graph inputs and, where they are not constants, initializers; any
        other tensor of the graph may be given too; the nodes before it are then left out. Large
        initializers that are not given become inputs of the trace, under their own names. With
        ``infer`` types and shapes are inferred again from the tensors given, instead of taken from
        the model: for inputs of a known batch size.
        """
        values: dict[str, Tensor] = dict(given)
        wanted = list(outputs)
        for node in self._remaining(wanted, values):
            arguments = [self._argument(trace, name, values) for name in node.input]
            outputs_made: Sequence[Tensor] | None = None
            # Rewrites are for tensors: they are not called with nodes that read a sequence.
            plain = all(a is None or isinstance(a, Tensor) for a in arguments)
            try:
                outputs_made = rewrite(trace, node, arguments) if rewrite and plain else None
                if outputs_made is None:
                    outputs_made = self._retrace(trace, node, arguments, values, infer)
            except OrtflexError:
                raise
            except MALFORMED as error:
                raise GraphError(
                    f"{self.label}: the {node.op_type} {node.name!r} does not match the "
                    f"definition of its operator: {type(error).__name__}: {error}"
                ) from error
            for name, tensor in zip(node.output, outputs_made, strict=False):
                if name:
                    if isinstance(tensor, Tensor):  # and not a sequence of them
                        tensor.hint = tensor.hint or name
                    values[name] = tensor
        return {name: self._argument(trace, name, values) for name in wanted}  # type: ignore[misc]

    def _remaining(self, outputs: list[str], given: Mapping[str, Tensor]) -> list[NodeProto]:
        wanted: set[int] = set()
        pending = [n for n in outputs if n not in given]
        while pending:
            node = self.producers.get(pending.pop())
            if node is not None and id(node) not in wanted:
                wanted.add(id(node))
                pending.extend(i for i in reads(node) if i not in given)
        return [node for node in self.internal.graph.node if id(node) in wanted]

    def _argument(self, trace: Trace, name: str, values: dict[str, Tensor]) -> Tensor | None:
        if not name:
            return None
        if name not in values:
            if name not in self._initializers:
                raise ModelError(f"{self.label}: no node computes the tensor {name!r}")
            spec = self.initializers[name]
            size = math.prod(self._initializers[name].dims)
            port = Port("frozen", of=name)
            if port in trace.inputs:  # a node of an earlier step in the same graph
                values[name] = trace.inputs[port]
            elif size > LARGE and spec.dtype != TensorProto.STRING:
                values[name] = trace.input(port, spec.dtype, spec.shape)
            else:
                values[name] = trace.constant(self.initializer(name), spec.dtype)
        return values[name]

    def _retrace(
        self,
        trace: Trace,
        node: NodeProto,
        arguments: Inputs,
        values: dict[str, Tensor],
        infer: bool,
    ) -> tuple[Tensor, ...]:
        captures = {
            name: tensor
            for name in captured_names(node)
            if (tensor := self._argument(trace, name, values)) is not None
        }
        specs = [self._values.get(o) if o else None for o in node.output]
        standard = not plain_domain(node.domain)
        known = not (infer and standard) and all(
            s is not None and s.dtype and not (standard and s.shape is None) for s in specs
        )
        vague = any(shape_inference.has_unknown_dims(s.shape) for s in specs if s is not None)
        if known and standard and vague:
            return self._sharpened(trace, node, arguments, captures, specs)
        types = [(s.dtype, s.shape) for s in specs if s is not None] if known else None
        return trace_node(trace, node, arguments, captures, types)

    def _sharpened(
        self,
        trace: Trace,
        node: NodeProto,
        arguments: Inputs,
        captures: Mapping[str, Tensor],
        specs: Sequence[TensorSpec | None],
    ) -> tuple[Tensor, ...]:
        """A node whose sizes are unknown in the file, but may be known in the trace.

        Nodes often compute sizes, and the trace has folded such nodes.
        """
        tensors = trace_node(trace, node, arguments, captures)
        for tensor, spec in zip(tensors, specs, strict=False):
            if spec is None or spec.shape is None:  # or a sequence
                continue
            if tensor.shape is None:
                tensor.shape = spec.shape
            elif len(tensor.shape) == len(spec.shape):
                pairs = zip(tensor.shape, spec.shape, strict=True)
                tensor.shape = tuple(new if isinstance(new, int) else old for new, old in pairs)
        return tensors

    def export(
        self,
        state: Arrays,
        path: str | os.PathLike[str] | None = None,
        *,
        free_batch: bool = False,
        inferring: bool = False,
        edit: Callable[[ModelProto, Arrays], None] | None = None,
    ) -> ModelProto:
        """The user's model with new values of some initializers, otherwise unchanged.

        With a path the file is written too, completely or not at all. External tensors, and large
        tensors of a model of more than 1 GB, are written to ``<name>.data`` next to it, or to
        ``<name>.<hash>.data`` if a model is replaced; the ModelProto then refers to them there.
        Exporting over the file that this model was read from changes nothing here. ``free_batch``
        writes the dynamic batch dimension that the training used, and ``inferring`` switches nodes
        that are in training mode; ``edit`` changes the copy before it is written, and gets the values
        of tensors that are not in it.

        Raises:
            ModelError: ``free_batch`` for a model that was created without it, or has functions; or
                a file with its tensors was changed in place since it was read.
            OutputError: the file cannot be written; an old one of that name is untouched.
        """
        values = self.file_values(state)
        out = copied(self._dynamic() if free_batch else self._file)
        if not free_batch:
            attribute_weights.fold(out, self._in_attributes, values)
        for tensor in out.graph.initializer:
            if tensor.name in values:
                model_file.replace(tensor, values[tensor.name])
        model_file.own_values(out, values)
        if inferring:
            inference_mode.switch_to_inference(out)
        if edit is not None:
            edit(out, values)
        if path is None:
            return displayed_briefly(export.inline_tensors(out, self.files, values))
        return displayed_briefly(export.write(out, Path(path), self.files, values))

    def file_values(self, state: Arrays) -> Arrays:
        """The values of the file's initializers in a state of the training: the state itself."""
        return state

    def _dynamic(self) -> ModelProto:
        if not self.free_batch:
            raise ModelError(
                f"{self.label}: the batch dimension was not freed for the training; create the "
                "Trainer with free_batch=True to export a dynamic batch dimension"
            )
        if self.proto.functions:
            raise ModelError(
                f"{self.label} has functions, which free_batch inlines: it is exported as it was, "
                "without free_batch=True"
            )
        freed = decompositions.unmark(self._freed)
        return model_file.with_tensors(loop_bounds.unbounded(freed), self.proto)


def as_model(source: Source | Model, free_batch: bool, plugins: Plugins | None = None) -> Model:
    """A Model from any source; a Model is returned unchanged.

    Raises:
        ModelError: as :class:`Model`; or a Model that was created without ``free_batch``.
    """
    if not isinstance(source, Model):
        return Model(source, free_batch=free_batch, plugins=plugins)
    if free_batch and not source.free_batch:
        raise ModelError(f"{source.label}: create it with Model(…, free_batch=True)")
    return source
