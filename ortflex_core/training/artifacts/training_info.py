"""The same step as ONNX's own ``TrainingInfoProto``: a model that contains its training step.

In the standard, a training step is the graph of the model together with the graph ``algorithm``;
``update_binding`` says which output replaces which initializer. So the algorithm shares the data and the
weights with the model, and all of its other values have names that the model does not use.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto

from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.kernel.types import Array
from ortflex_core.training.artifacts.step_assembly import inner_names, renamed
from ortflex_core.training.artifacts.step_graph import STATE, PortableGraph


def training_info(
    step: PortableGraph, predict: PortableGraph, arrays: Mapping[str, Array]
) -> ModelProto:
    """The model with its state as initializers, and the step as its training information."""
    model = ModelProto()
    model.CopyFrom(predict.model)
    graph, source = model.graph, step.model.graph
    state = {e.name for e in step.entries if e.name and e.port.role in STATE}
    taken = _names(graph) | _names(source)
    shared = {value.name for value in graph.input}
    for value in [value for value in graph.input if value.name in state]:
        graph.input.remove(value)
        graph.initializer.append(_tensor(value.name, arrays[value.name]))
    known = {name: inside for inside, name in predict.frozen.items()}
    graph.initializer.extend(_tensor(inside, arrays[name]) for name, inside in known.items())
    # Only the inputs and frozen weights of a step are shared with the model.
    names = {name: name for name in shared}
    names |= {inside: known[name] for inside, name in step.frozen.items() if name in known}
    own = _own_names(graph)
    for name in [*(v.name for v in source.input), *_own_names(source), *step.frozen]:
        if name not in names:
            names[name] = fresh_name(name, taken) if name in own else name
    for imported in step.model.opset_import:
        if imported.domain not in {o.domain for o in model.opset_import}:
            model.opset_import.append(imported)
    info = model.training_info.add()
    _fill(info.algorithm, source, names, shared | state)
    info.algorithm.initializer.extend(
        _tensor(names[name], arrays[name]) for name in sorted(state - shared)
    )
    info.algorithm.initializer.extend(
        _tensor(names[inside], arrays[name])
        for inside, name in step.frozen.items()
        if name not in known
    )
    for entry in step.entries:
        if entry.name in state and entry.new is not None:
            info.update_binding.add(key=names[entry.name], value=names[entry.new])
    return model


def _fill(
    algorithm: GraphProto, source: GraphProto, names: Mapping[str, str], without: set[str]
) -> None:
    """The nodes, inputs, outputs and constants of a step under other names."""
    algorithm.name = source.name
    for values, copies in (
        ([v for v in source.input if v.name not in without], algorithm.input),
        (source.output, algorithm.output),
        (source.value_info, algorithm.value_info),
        (source.initializer, algorithm.initializer),
    ):
        for value in values:
            copy = copies.add()
            copy.CopyFrom(value)
            copy.name = names[value.name]
    for node in source.node:
        copy = algorithm.node.add()
        copy.CopyFrom(renamed(node, names))
        copy.name = f"step/{node.name}"


def _own_names(graph: GraphProto) -> set[str]:
    """The names of the values and inputs of a graph."""
    computed = {output for node in graph.node for output in node.output if output}
    return computed | {t.name for t in graph.initializer} | {v.name for v in graph.input}


def _names(graph: GraphProto) -> set[str]:
    return _own_names(graph) | inner_names(graph)


def _tensor(name: str, array: Array) -> TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(array, order="C"), name)
