"""The graphs of a layer: the model as it runs, and its vector-Jacobian product."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import attrs
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from ortflex_core import (
    GraphError,
    Program,
    Rewrite,
    RuleTable,
    Tensor,
    TensorSpec,
    Trace,
    ancestor_nodes,
    build,
    gradients,
    optimize,
    reads,
    split_nodes,
)
from ortflex_plugins.layers.mode import Mode

COTANGENT, GRADIENT, NEW = "cotangent/", "gradient/", "new/"


def gradient_program(
    mode: Mode, wrt: Sequence[str], outputs: Sequence[str], rules: RuleTable
) -> Program:
    """Outputs, ``new/<statistic>`` and ``gradient/<name>`` from inputs, weights and cotangents."""
    trace, values, updates, given = _replayed(mode, wrt)
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for name in outputs:
        y = values[name]
        pairs.append((y, trace.input(f"{COTANGENT}{name}", y.dtype, y.shape)))
    results = gradients(pairs, [given[name] for name in wrt], rules)
    named = {f"{GRADIENT}{name}": gradient for name, gradient in zip(wrt, results, strict=True)}
    return build(*optimize(trace, {**values, **updates, **named}), name="gradient")


def forward_program(mode: Mode, wrt: Sequence[str], replacing: Rewrite) -> Program:
    """Outputs and ``new/<statistic>``, for a backend that differentiates by itself."""
    trace, values, updates, _ = _replayed(mode, wrt, replacing)
    return build(trace, {**values, **updates}, name="forward")


def _replayed(
    mode: Mode, wrt: Sequence[str], replacing: Rewrite | None = None
) -> tuple[Trace, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model = mode.model
    trace = Trace(model.opsets)
    statistics = mode.statistics()
    specs = _inputs(mode, wrt) | statistics
    given = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
    own = mode.rewrite({n: given[n] for n in statistics}, plain=replacing is not None)

    def rewrite(trace, node, inputs):  # type: ignore[no-untyped-def]  # a Rewrite
        outputs = own(trace, node, inputs)
        if outputs is not None or replacing is None:
            return outputs
        return replacing(trace, node, inputs)

    values = model.replay(trace, [o.name for o in model.outputs], given, rewrite)
    updates = {f"{NEW}{name}": tensor for name, tensor in own.updates.items()}
    return trace, values, updates, given


def _inputs(mode: Mode, wrt: Sequence[str]) -> dict[str, TensorSpec]:
    weights: Mapping[str, TensorSpec] = mode.model.initializers
    named = {spec.name: mode.model.value(spec.name) for spec in mode.model.inputs}
    return named | {name: weights[name] for name in wrt if name in weights}


@attrs.frozen(kw_only=True)
class Halves:
    """The forward and the backward graph; ``saved`` are the tensors that the first passes to the second.

    The outputs of ``forward`` are those of the model, then the saved tensors. The inputs of ``backward``
    are cotangents, saved tensors, and those inputs of the model that it reads.
    """

    forward: ModelProto
    backward: ModelProto
    saved: tuple[str, ...]


def split(model: ModelProto, wanted: Container[str] | None = None) -> Halves:
    """Split a model made by :func:`ortflex_core.gradient_model`.

    The forward pass saves the tensors that the backward pass needs, so nothing is computed twice. Only
    gradients with ``wanted`` names are kept; None keeps all of them.
    """
    graph = model.graph
    cotangents = [i.name for i in graph.input if i.name.startswith("cotangent/")]
    before, after = split_nodes(graph.node, cotangents)
    gradients = [o for o in graph.output if o.name.startswith("gradient/")]
    results = [o for o in graph.output if not o.name.startswith("gradient/")]
    if wanted is not None:
        gradients = [o for o in gradients if o.name.removeprefix("gradient/") in wanted]
        after = ancestor_nodes(after, [o.name for o in gradients])
    early = {o for node in before for o in node.output if o}
    needed = _needed(after) | {o.name for o in gradients}
    saved = tuple(sorted(n for n in needed if n in early))
    before = ancestor_nodes(before, {*saved, *(o.name for o in results)})
    kinds = _types(model)
    missing = [n for n in saved if n not in kinds]
    if missing:
        raise GraphError(f"the type of {missing[0]!r} cannot be inferred, so it cannot be saved")
    copies = [n for n in saved if n not in {o.name for o in results}]
    forward = _graph(model, "forward", before, (), [*results, *(kinds[n] for n in copies)])
    extra = [kinds[n] for n in saved]
    backward = _graph(model, "backward", after, extra, gradients)
    return Halves(forward=forward, backward=backward, saved=saved)


def _needed(nodes: Iterable[NodeProto]) -> set[str]:
    return {name for node in nodes for name in reads(node)}


def _types(model: ModelProto) -> dict[str, ValueInfoProto]:
    inferred = onnx.shape_inference.infer_shapes(model)
    out = {}
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        kind = value.type.tensor_type.elem_type
        if kind != TensorProto.UNDEFINED:
            # Without the sizes that inference guessed, which onnxruntime would compare with the memory.
            out[value.name] = helper.make_tensor_value_info(value.name, kind, None)
    return out


def _graph(
    model: ModelProto,
    name: str,
    nodes: list[NodeProto],
    extra: Iterable[ValueInfoProto],
    outputs: Iterable[ValueInfoProto],
) -> ModelProto:
    results = list(outputs)
    used = _needed(nodes) | {o.name for o in results}
    source = model.graph
    graph = helper.make_graph(
        nodes,
        name,
        [*(i for i in source.input if i.name in used), *extra],
        results,
        [t for t in source.initializer if t.name in used],
    )
    return helper.make_model(
        graph, ir_version=model.ir_version, opset_imports=list(model.opset_import)
    )
