"""Tensors that only losses read: in the graph that is trained, but not in the user's file."""

from __future__ import annotations

import copy

import attrs
from onnx import NodeProto, helper, numpy_helper

from ortflex_core.compiler.graph import shape_inference
from ortflex_core.compiler.graph.nodes import ancestor_nodes, reads
from ortflex_core.compiler.graph.program import rename_captures
from ortflex_core.compiler.graph.protos import copied, refill
from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.types import Array, TensorSpec


class Extension:
    """Adds tensors to the graph of a copy of a model, :attr:`model`; its export does not have them."""

    def __init__(self, model: Model) -> None:
        self.model = copy.copy(model)
        self.model.unextended = model
        self.model.__dict__.pop("initializers", None)
        self.model._initializers = dict(model._initializers)
        self.model._arrays = dict(model._arrays)
        self.model._values = dict(model._values)
        self.model.internal = copied(model.internal)
        nodes = self.model.internal.graph.node
        self.model.producers = {o: node for node in nodes for o in node.output if o}

    def _unused(self, name: str) -> str:
        if name in self.model._values or name in self.model.producers:
            raise ModelError(
                f"{self.model.label} already has a tensor {name!r}, which a loss adds; rename it"
            )
        return name

    def _add(self, node: NodeProto) -> None:
        self.model.internal.graph.node.append(node)
        added = self.model.internal.graph.node[-1]
        self.model.of_losses |= {name for name in added.output if name}
        self.model.producers.update((name, added) for name in added.output if name)

    def column(self, name: str, dtype: int, prototype: TensorSpec | None = None) -> str:
        """A further input of the model, [batch] or of the shape of a prototype."""
        if name in self.model.loss_inputs:
            return name
        spec = TensorSpec(self._unused(name), dtype, ("batch",))
        if prototype is not None:
            spec = attrs.evolve(prototype, name=name)
        info = helper.make_tensor_value_info(name, spec.dtype, spec.shape)
        self.model.internal.graph.input.append(info)
        self.model.inputs = (*self.model.inputs, spec)
        self.model.loss_inputs = (*self.model.loss_inputs, name)
        self.model._values[name] = spec
        return name

    def parameter(self, name: str, array: Array) -> str:
        """A trained tensor, which losses read as the returned tensor."""
        tensor = numpy_helper.from_array(array, self._unused(name))
        self.model._initializers[name], self.model._arrays[name] = tensor, array
        self.model.__dict__.pop("initializers", None)
        self.model.internal.graph.initializer.append(tensor)
        self.model.loss_parameters = (*self.model.loss_parameters, name)
        spec = TensorSpec(name, tensor.data_type, array.shape)
        value = self._unused(f"{name}/value")
        self.model._values |= {name: spec, value: attrs.evolve(spec, name=value)}
        self._add(helper.make_node("Identity", [name], [value], name=value))
        return value

    def twin(self, tensor: str, prefix: str, *, drawn_again: bool = False) -> str:
        """The same tensor with the same weights, computed from inputs of its own: ``prefix/input``.

        With ``drawn_again`` these have the rows of the inputs, after a second draw of ``batch_drawn``.
        """
        model = self.model
        inputs = {spec.name: spec for spec in model.inputs}
        names: dict[str, str] = {}
        for node in ancestor_nodes(list(model.internal.graph.node), [tensor]):
            for name in reads(node):
                if name in inputs and name not in names:
                    own = self.column(f"{prefix}/{name}", inputs[name].dtype, inputs[name])
                    names[name] = own
                    if drawn_again:
                        self.model.drawn_again = {**self.model.drawn_again, own: name}
            if not any(name in names for name in reads(node)):
                continue  # computed from constants only, so shared
            for name in filter(None, node.output):
                names[name] = self._unused(f"{prefix}/{name}")
                if name in model._values:
                    spec = attrs.evolve(model._values[name], name=names[name])
                    model._values[names[name]] = spec
            self._add(_renamed(node, names, prefix))
        if tensor not in names:
            raise ModelError(f"{model.label}: {tensor!r} does not depend on an input of the model")
        return names[tensor]

    def learn(self) -> None:
        """Infer the types and shapes of added tensors that are not known."""
        values = shape_inference.one_batch(
            self.model._inferred(self.model.internal), self.model.internal.graph
        )
        self.model._values = {**values, **self.model._values}


def _renamed(node: NodeProto, names: dict[str, str], prefix: str) -> NodeProto:
    out = copied(node)
    out.name = f"{prefix}/{node.name}" if node.name else ""
    for values in (out.input, out.output):
        values[:] = [names.get(value, value) for value in values]
    refill(out.attribute, [rename_captures(a, names) for a in node.attribute])
    return out
