"""A user's .onnx file: read, understood, replayed into graphs, written back with other weights.

The file itself is never edited in place. Everything here works on an internal copy with functions
inlined; the export is the user's own model with only the trained tensors changed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from ortflex_core import freeing, inference, modelfile, raising, shapes, vetting
from ortflex_core.errors import MALFORMED, GraphError, ModelError, OrtflexError, nearest
from ortflex_core.ops import Tensor, Trace
from ortflex_core.subgraphs import captured as captured
from ortflex_core.subgraphs import trace_node
from ortflex_core.types import Array, TensorSpec

OLDEST_OPSET = 13
# Larger initializers that nobody trains are inputs of the compiled graphs, shared by all of them.
LARGE = 1024

Rewrite = Callable[[Trace, NodeProto, Sequence[Tensor | None]], Sequence[Tensor] | None]
"""Replaces a node during a replay: its outputs, or None to keep it as it is."""


class Model:
    """An ONNX model to train.

    Args:
        source: a path, the file's bytes, or a ModelProto (which is copied).
        free_batch: make a fixed batch dimension dynamic inside (see :mod:`ortflex_core.freeing`).

    Raises:
        ModelError: missing, truncated, not ONNX, invalid, of an opset that cannot be raised to one
            that is known, or with a batch dimension that cannot be freed.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes | ModelProto, *, free_batch: bool = False
    ) -> None:
        self.path = Path(source) if isinstance(source, str | os.PathLike) else None
        self.label = str(self.path) if self.path else "the model"
        self.free_batch = free_batch
        self.proto = modelfile.read(source, self.label)
        self._folder = self.path.parent if self.path else None
        self.opsets = {_domain(o.domain): o.version for o in self.proto.opset_import}
        self.opset = self.opsets.get("", 0)
        self._check()
        self._arrays: dict[str, Array] = {}
        self._prepare()
        self.opsets = {_domain(o.domain): o.version for o in self.internal.opset_import}
        graph = self.internal.graph
        values = self._inferred(self.internal)
        self._values = shapes.one_batch(values, graph)
        self.producers: dict[str, NodeProto] = {o: n for n in graph.node for o in n.output if o}
        self.inputs = tuple(
            values[_tensor(i, self.label)] for i in graph.input if i.name not in self._initializers
        )
        self.outputs = tuple(values[o.name] for o in graph.output if o.type.HasField("tensor_type"))

    def _check(self) -> None:
        if not self.opset:
            raise ModelError(f"{self.label} imports no standard operators (domain ai.onnx)")
        if not self.proto.graph.node:
            raise ModelError(f"{self.label} has no nodes")

    def _prepare(self) -> None:
        """The internal graph: inlined, its batch freed and its opset raised where that is wanted."""
        bare = modelfile.skeleton(self.proto)
        internal = _inline(bare, self.label)
        # What the skeleton lacks is an input of it, under the same name.
        inside = {t.name for t in internal.graph.initializer}
        large = [
            t
            for t in self.proto.graph.initializer
            if bare is not self.proto and t.name not in inside
        ]
        self._initializers = {t.name: t for t in (*internal.graph.initializer, *large)}
        values = {t.name: self.initializer(t.name) for t in large}
        if self.free_batch or self.opset < OLDEST_OPSET:
            if self.free_batch:
                freeing.batch_sizes(internal, self.label, values)
            self._inferred(internal)  # before it is run
        if self.free_batch:
            internal = freeing.freed(internal, self.label, values)
        self._freed = internal
        if self.opset < OLDEST_OPSET:
            internal = raising.raised(internal, self.label, self.opset, values)
        self.internal = internal
        # In the file's order; conversions may add constants of their own.
        made = {t.name: t for t in internal.graph.initializer}
        known = [t.name for t in self.proto.graph.initializer]
        everything = {**self._initializers, **made}
        self._initializers = {
            n: everything[n] for n in dict.fromkeys([*known, *made]) if n in everything
        }

    def _inferred(self, proto: ModelProto) -> dict[str, TensorSpec]:
        values = shapes.inferred(proto, self.label)
        weights = sum(map(modelfile.size_of, self._initializers.values()))
        vetting.vet_values(proto, values, weights, self.label)
        return values

    def initializer(self, name: str) -> Array:
        """An initializer's value (shared, do not write to it)."""
        if name not in self._arrays:
            if name not in self._initializers:
                raise ModelError(
                    f"{self.label} has no initializer {name!r}; {nearest(name, self._initializers)}"
                )
            self._arrays[name] = modelfile.array_of(self._initializers[name], self._folder)
        return self._arrays[name]

    def holding(self, values: Mapping[str, Array]) -> Model:
        """The same model with other values of some initializers; :meth:`export` keeps the file's."""
        twin = copy.copy(self)
        twin._arrays = {**self._arrays, **values}
        return twin

    @cached_property
    def initializers(self) -> dict[str, TensorSpec]:
        """Type and shape of every initializer, in the file's order."""
        return {
            name: TensorSpec(name, t.data_type, tuple(t.dims))
            for name, t in self._initializers.items()
        }

    def value(self, name: str) -> TensorSpec:
        """Type and shape of any tensor of the graph.

        Raises:
            ModelError: there is no tensor of that name.
        """
        if name in self._values:
            return self._values[name]
        if name in self.producers:
            return TensorSpec(name, TensorProto.UNDEFINED, None)
        known = [*self.producers, *self._values]
        raise ModelError(f"{self.label} has no tensor {name!r}; {nearest(name, known)}")

    def unknown(self) -> list[str]:
        """Tensors whose type or rank (of outputs: sizes) could not be inferred, in the graph's order."""
        known = {n for n, s in self._values.items() if s.dtype and s.shape is not None}
        # Inference calls what it does not know unk__0, unk__1, …
        vague = {
            o.name
            for o in self.outputs
            if any(d is None for d in o.shape or ()) or shapes.vague(o.shape)
        }
        return [name for name in self.producers if name not in known or name in vague]

    def learn(self, specs: Iterable[TensorSpec]) -> None:
        """Take in types and shapes that were found by other means than inference."""
        self._values.update({spec.name: spec for spec in specs})
        self.outputs = tuple(self._values[o.name] for o in self.outputs)

    def ancestors(self, names: Iterable[str]) -> list[NodeProto]:
        """The nodes that the given tensors depend on, in the graph's order."""
        wanted: set[int] = set()
        pending = [self.producers[n] for n in names if n in self.producers]
        while pending:
            node = pending.pop()
            if id(node) not in wanted:
                wanted.add(id(node))
                pending.extend(self.producers[i] for i in reads(node) if i in self.producers)
        return [node for node in self.internal.graph.node if id(node) in wanted]

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
        other tensor of the graph may be given too, and what lies before it is then left out.
        Large initializers that are not given become inputs of the trace, under their own names.
        With ``infer`` types and shapes are inferred anew from the tensors given, instead of taken
        from the model: for inputs of a known batch size.
        """
        values: dict[str, Tensor] = dict(given)
        wanted = list(outputs)
        for node in self._remaining(wanted, values):
            arguments = [self._argument(trace, name, values) for name in node.input]
            made: Sequence[Tensor] | None = None
            try:
                made = rewrite(trace, node, arguments) if rewrite else None
                if made is None:
                    made = self._retrace(trace, node, arguments, values, infer)
            except OrtflexError:
                raise
            except MALFORMED as error:
                raise GraphError(
                    f"{self.label}: the {node.op_type} {node.name!r} is not as its operator asks for: "
                    f"{type(error).__name__}: {error}"
                ) from error
            for name, tensor in zip(node.output, made, strict=False):
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
                raise ModelError(f"{self.label}: nothing computes the tensor {name!r}")
            proto = self._initializers[name]
            size = int(np.prod(proto.dims, dtype=np.int64))
            if name in trace.inputs:  # of a step before, in the same graph
                values[name] = trace.inputs[name]
            elif size > LARGE and proto.data_type != TensorProto.STRING:
                values[name] = trace.input(name, proto.data_type, tuple(proto.dims))
            else:
                values[name] = trace.constant(self.initializer(name), proto.data_type)
        return values[name]

    def _retrace(
        self,
        trace: Trace,
        node: NodeProto,
        arguments: Sequence[Tensor | None],
        values: dict[str, Tensor],
        infer: bool,
    ) -> tuple[Tensor, ...]:
        captures = {
            name: tensor
            for name in captured(node)
            if (tensor := self._argument(trace, name, values)) is not None
        }
        specs = [self._values.get(o) if o else None for o in node.output]
        standard = not _domain(node.domain)
        known = not (infer and standard) and all(
            s is not None and s.dtype and not (standard and s.shape is None) for s in specs
        )
        if known and standard and any(shapes.vague(s.shape) for s in specs if s is not None):
            return self._sharpened(trace, node, arguments, captures, specs)
        types = [(s.dtype, s.shape) for s in specs if s is not None] if known else None
        return trace_node(trace, node, arguments, captures, types)

    def _sharpened(
        self,
        trace: Trace,
        node: NodeProto,
        arguments: Sequence[Tensor | None],
        captures: Mapping[str, Tensor],
        specs: Sequence[TensorSpec | None],
    ) -> tuple[Tensor, ...]:
        """A node whose sizes inference did not find in the file, but perhaps in the trace.

        Sizes are often computed by nodes, which the trace has folded by now.
        """
        made = trace_node(trace, node, arguments, captures)
        for tensor, spec in zip(made, specs, strict=False):
            if spec is None or spec.shape is None:  # or a sequence
                continue
            if tensor.shape is None:
                tensor.shape = spec.shape
            elif len(tensor.shape) == len(spec.shape):
                pairs = zip(tensor.shape, spec.shape, strict=True)
                tensor.shape = tuple(new if isinstance(new, int) else old for new, old in pairs)
        return made

    def export(
        self,
        state: Mapping[str, Array],
        path: str | os.PathLike[str] | None = None,
        *,
        free_batch: bool = False,
        inferring: bool = False,
    ) -> ModelProto:
        """The user's model with new values of some initializers, otherwise unchanged.

        With a path the file is written too: in whole, or not at all. Of a file of more than 2 GB
        the large tensors are in ``<name>.data`` beside it; the ModelProto then refers to them
        there. ``free_batch`` writes the dynamic batch dimension that the training used, and
        ``inferring`` switches nodes that are in training mode.

        Raises:
            ModelError: ``free_batch`` and the model was not made with it, or has functions.
            OutputError: the file cannot be written; an old one of that name is untouched.
        """
        out = ModelProto()
        out.CopyFrom(self._dynamic() if free_batch else self.proto)
        for tensor in out.graph.initializer:
            if tensor.name in state:
                modelfile.replace(tensor, state[tensor.name])
        modelfile.own_values(out, state)
        if inferring:
            inference.inferring(out)
        if path is None:
            return modelfile.inside(out, self._folder, state)
        return modelfile.write(out, Path(path), self.path, state)

    def _dynamic(self) -> ModelProto:
        if not self.free_batch:
            raise ModelError(
                f"{self.label}: the batch dimension was not freed for the training; make the Trainer "
                "with free_batch=True to export it freed"
            )
        if self.proto.functions:
            raise ModelError(
                f"{self.label} has functions, which free_batch inlines: it is exported as it was, "
                "without free_batch=True"
            )
        return modelfile.with_tensors(self._freed, self.proto)


def as_model(
    source: str | os.PathLike[str] | bytes | ModelProto | Model, free_batch: bool
) -> Model:
    """A model, made unless it is one already.

    Raises:
        ModelError: as :class:`Model`; or a Model that was made without ``free_batch``.
    """
    if not isinstance(source, Model):
        return Model(source, free_batch=free_batch)
    if free_batch and not source.free_batch:
        raise ModelError(f"{source.label}: make it with Model(…, free_batch=True)")
    return source


def reads(node: NodeProto) -> list[str]:
    """The names of outer values a node depends on, its subgraphs included."""
    return [i for i in node.input if i] + captured(node)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _inline(proto: ModelProto, label: str) -> ModelProto:
    try:
        onnx.checker.check_model(proto)
        return onnx.inliner.inline_local_functions(proto) if proto.functions else proto
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        raise ModelError(f"{label} is not a valid ONNX model: {error}") from error


def _tensor(info: onnx.ValueInfoProto, label: str) -> str:
    """The name of an input, which has to be a tensor."""
    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"{label}: the input {info.name!r} is a {info.type.WhichOneof('value')}, "
            "only tensors can be fed"
        )
    return info.name


def find_nodes(graph: GraphProto, op_type: str, domain: str = "") -> list[NodeProto]:
    """Nodes of one operator at the top level of a graph."""
    return [n for n in graph.node if n.op_type == op_type and _domain(n.domain) == domain]
