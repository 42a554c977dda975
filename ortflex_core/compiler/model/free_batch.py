"""A fixed batch dimension made dynamic internally, if the graph treats every row alike.

Exporters that trace a model with one batch write its size into the inputs and into the targets of
Reshape. Both are replaced, and the result is tested: it has to agree with the original on a batch
of the old size, and on each half of a batch of twice that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from ortflex_core.compiler.graph import nodes
from ortflex_core.compiler.graph.bounded_inference import infer_shapes
from ortflex_core.compiler.graph.control_flow import captured_names
from ortflex_core.compiler.graph.protos import copied
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.compiler.operators.equivalence import (
    Runner,
    difference,
    fitting_inputs,
    graph_inputs,
    random_inputs,
)
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.kernel.errors import GraphError, ModelError
from ortflex_core.kernel.types import Array, Arrays

SYMBOL = "batch"


def free_batch(
    model: ModelProto, label: str, large: Arrays, as_computed: Callable[[ModelProto], ModelProto]
) -> ModelProto:
    """The model with a symbolic first dimension of its inputs; the same model if no input has a fixed one.

    Functions are already inlined. ``large`` are tensors that are inputs because they do not fit into the
    graph; ``as_computed`` converts a graph to the form that the runtime computes.

    Raises:
        ModelError: the inputs have different batch sizes, or the graph depends on the size.
    """
    sizes = batch_sizes(model, label, large)
    if not sizes:
        return model
    batch = next(iter(sizes.values()))
    out = copied(model)
    for value in (*out.graph.input, *out.graph.output):
        dims = value.type.tensor_type.shape.dim
        named = value.name in sizes or value in out.graph.output
        if named and dims and dims[0].dim_value == batch:
            dims[0].dim_param = SYMBOL
    del out.graph.value_info[:]
    _reshape(out, list(sizes), batch, _rows(model))
    _verify(as_computed(model), as_computed(out), label, batch, list(sizes), large)
    return out


def batch_sizes(model: ModelProto, label: str, large: Arrays) -> dict[str, int]:
    """The fixed first dimensions of inputs; a ModelError if they are not the same."""
    inputs = [i for i in graph_inputs(model) if i.name not in large]
    sizes = {i.name: i.shape[0] for i in inputs if i.shape and isinstance(i.shape[0], int)}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ModelError(
            f"{label}: free_batch=True needs inputs with one batch size, but {text}; export "
            "the model again with a dynamic batch dimension"
        )
    return sizes


def _rows(model: ModelProto) -> dict[str, int]:
    """First dimensions that can be inferred from the fixed batch."""
    try:
        graph = infer_shapes(model).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return {}
    out = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if dims and dims[0].HasField("dim_value"):
            out[value.name] = dims[0].dim_value
    return out


def _reshape(model: ModelProto, inputs: Sequence[str], batch: int, rows: Mapping[str, int]) -> None:
    """Make constant targets that begin with the batch size dynamic: 0 copies the size, −1 infers it."""
    graph = model.graph
    known = nodes.constants(graph)
    following = set(inputs)
    for k, node in enumerate(graph.node):
        reads = {*node.input, *captured_names(node)}
        if not following & reads:
            continue
        following.update(o for o in node.output if o)
        if node.op_type != "Reshape" or len(node.input) < 2 or node.input[0] not in following:
            continue
        constant = known.get(node.input[1])
        if constant is None or len(constant.dims) != 1 or not constant.dims[0]:
            continue
        target = onnx.numpy_helper.to_array(constant)
        dynamic = _target(node, target, batch, rows.get(node.input[0]))
        if dynamic is not None:
            name = f"{node.output[0]}/free_batch.{k}"
            model_file.add_initializer(model, onnx.numpy_helper.from_array(dynamic, name))
            node.input[1] = name


def _target(node: NodeProto, target: Array, batch: int, rows: int | None) -> Array | None:
    """The target of a Reshape with a dynamic first size; None to keep the target."""
    first = int(target[0])
    if first <= 0 or (first != batch and (batch == 1 or first % batch)):
        return None
    dynamic = target.astype(np.int64)
    allowzero = [a for a in node.attribute if a.name == "allowzero" and a.i]
    # 0 first: shape inference follows the batch through it by name.
    if first == batch and rows == batch and not (allowzero and (target == 0).any()):
        dynamic[0] = 0
        for attribute in allowzero:  # torch sets it everywhere; it says how to read a 0
            node.attribute.remove(attribute)
    elif not (target == -1).any():
        dynamic[0] = -1
    else:
        return None
    return dynamic


def _verify(
    model: ModelProto, out: ModelProto, label: str, batch: int, inputs: Sequence[str], large: Arrays
) -> None:
    head = f"{label}: the batch dimension of {batch} cannot be freed"
    ways = (
        f"Train with batch_size={batch}, or export the model again with a dynamic batch dimension"
    )
    require_runtime()
    try:
        old, new = Runner(model, large), Runner(out, large)
        first, size = fitting_inputs(old, batch)
        second = random_inputs(old.inputs, batch, size, seed=1)
        first_outputs, second_outputs = old(first), old(second)
        freed_outputs = new(first)
    except GraphError as error:
        raise ModelError(f"{head}: {error}. {ways}.") from error
    if wrong := difference(freed_outputs, first_outputs):
        raise ModelError(f"{head}: on a batch of {batch} rows {wrong}. {ways}.")
    joined = {n: np.concatenate([a, second[n]]) if n in inputs else a for n, a in first.items()}
    per_row = {
        n: np.concatenate([a, second_outputs[n]])
        for n, a in first_outputs.items()
        if isinstance(a, np.ndarray) and a.shape[:1] == (batch,)
    }
    try:
        joined_outputs = new(joined)
    except GraphError as error:
        raise ModelError(f"{head}: it fails on {2 * batch} rows: {error}. {ways}.") from error
    if wrong := difference(joined_outputs, per_row):
        raise ModelError(f"{head}: on {2 * batch} rows {wrong}. {ways}.")
