"""Assembly of several programs into one ONNX graph, connected by names.

The nodes of a program are copied unchanged, so the optimized programs keep their operators, their
order and the bits of their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.program import Program, fresh_name, ir_for, rename_captures
from ortflex_core.kernel.types import Shape, TensorSpec


@attrs.frozen(kw_only=True)
class Entry:
    """An input or output of a graph, or both: a tensor of state has the names of its old and new value.

    ``default`` is the value of an optional input.
    """

    port: Port
    name: str
    spec: TensorSpec
    new: str | None = None
    default: float | None = None


class Assembly:
    """A graph under construction from programs and a few nodes."""

    def __init__(self, name: str, opsets: Mapping[str, int]) -> None:
        self.graph = GraphProto(name=name)
        self.inputs: dict[Port, TensorSpec] = {}
        self._opsets = {"": opsets[""]}
        self._taken: set[str] = set()
        self._constants: dict[Any, str] = {}

    def input(self, port: Port, wanted: str, dtype: int, shape: Shape) -> str:
        """The name of the input for a port, which is added if it is new."""
        if port not in self.inputs:
            spec = TensorSpec(fresh_name(wanted, self._taken), dtype, shape)
            self.inputs[port] = spec
            self.graph.input.append(spec.to_proto(port.role))
        return self.inputs[port].name

    def name(self, wanted: str) -> str:
        """Reserve a unique name."""
        return fresh_name(wanted, self._taken)

    def constant(self, value: Any, dtype: Any = np.float64, label: str = "sizes") -> str:
        """The name of a constant; ``label`` is that of a vector."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = fresh_name(label if array.ndim else "scalar", self._taken)
            self.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return self._constants[key]

    def node(self, op_type: str, *inputs: str, label: str = "host", **attributes: Any) -> str:
        """Add a node with one output; returns the name of that."""
        output = fresh_name(f"{label}/{op_type}", self._taken)
        self.graph.node.append(
            onnx.helper.make_node(op_type, inputs, [output], name=output, **attributes)
        )
        return output

    def add(self, program: Program, given: Mapping[str, str]) -> dict[str, str]:
        """Copy the nodes of a program.

        Returns:
            The names in this graph of the program's outputs, by their names there.
        """
        model = program.proto()
        source = model.graph
        for imported in model.opset_import:
            self._opsets.setdefault(imported.domain, imported.version)
        self._taken.update(inner_names(source))
        names = dict(given)
        for tensor in source.initializer:
            names[tensor.name] = tensor.name = fresh_name(tensor.name, self._taken)
            self.graph.initializer.append(tensor)
        for node in source.node:
            for output in node.output:
                if output:
                    names[output] = fresh_name(output, self._taken)
        for value in source.value_info:
            value.name = names[value.name]
            self.graph.value_info.append(value)
        self.graph.node.extend(renamed(node, names) for node in source.node)
        return {spec.name: names[spec.name] for spec in program.outputs}

    def output(
        self,
        tensor: str,
        dtype: int,
        shape: Shape | None,
        role: str,
        wanted: str | None = None,
        *,
        reserved: bool = False,
    ) -> str:
        """Make a tensor an output; returns its name, which is ``wanted`` if it is free.

        With ``reserved`` the name is one that :meth:`name` has returned.
        """
        name = tensor
        known = {o.name for o in self.graph.output} | {i.name for i in self.graph.input}
        if (wanted or tensor) != tensor or tensor in known:
            name = wanted if reserved and wanted else self.name(wanted or tensor)
            self.graph.node.append(
                onnx.helper.make_node("Identity", [tensor], [name], name=f"output/{name}")
            )
        self.graph.output.append(TensorSpec(name, dtype, shape).to_proto(role))
        return name

    def model(self, order: Sequence[str], defaults: Mapping[str, float]) -> ModelProto:
        """The graph as a model."""
        graph = GraphProto()
        graph.CopyFrom(self.graph)
        places = {name: k for k, name in enumerate(order)}
        inputs = sorted(graph.input, key=lambda value: places[value.name])
        specs = {value.name: TensorSpec.from_proto(value) for value in inputs}
        del graph.input[:]
        graph.input.extend(inputs)
        for name, value in defaults.items():
            sizes = [size for size in specs[name].shape or () if isinstance(size, int)]
            array = np.full(sizes, value, specs[name].numpy)
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        taken: set[str] = set()
        for node in graph.node:
            node.name = fresh_name(node.name or node.op_type, taken)
        out = ModelProto(ir_version=ir_for(self._opsets[""]), producer_name="ortflex", graph=graph)
        imports = [onnx.helper.make_opsetid(d, v) for d, v in sorted(self._opsets.items())]
        out.opset_import.extend(imports)
        return out


def inner_names(graph: GraphProto) -> set[str]:
    """The names of all values in the bodies of control flow."""
    names: set[str] = set()
    for node in graph.node:
        bodies = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
        for body in [*bodies, *(g for a in node.attribute for g in a.graphs)]:
            names |= {v.name for v in (*body.input, *body.initializer)}
            names |= {o for inner in body.node for o in inner.output if o}
            names |= inner_names(body)
    return names


def renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """A copy of a node that reads and writes the values under other names."""
    out = NodeProto()
    out.CopyFrom(node)
    del out.input[:], out.output[:], out.attribute[:]
    out.input.extend(names.get(i, i) for i in node.input)
    out.output.extend(names.get(o, o) for o in node.output)
    out.attribute.extend(rename_captures(a, names) for a in node.attribute)
    return out
