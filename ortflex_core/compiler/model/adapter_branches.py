"""The nodes of adapters: the formula of an adapter becomes nodes after its product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
from onnx import ModelProto, NodeProto, helper

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ops import Ops, Tensor, Trace
from ortflex_core.compiler.graph.program import build, fresh_name, rename_within
from ortflex_core.compiler.graph.protos import copied, settings
from ortflex_core.compiler.model.products import Place
from ortflex_core.kernel.calling import whose
from ortflex_core.kernel.errors import BrokenPlugin
from ortflex_core.kernel.model_protocols import Adapter, Product
from ortflex_core.kernel.types import Specs, TensorSpec


@attrs.frozen(kw_only=True)
class Attached:
    """One adapter at one module: its tensors, and the module's places in the graph."""

    adapter: Adapter
    product: Product
    places: tuple[Place, ...]
    tensors: Specs
    """The tensors in the graph, by the adapter's names of them."""


def initializer_name(product: Product, tensor: str, label: str) -> str:
    """The name of an adapter's tensor in the graph: ``layers.0.q_proj.lora_A``."""
    return f"{product.module}.{tensor}" + (f".{label}" if label else "")


def insert_branches(
    nodes: Sequence[NodeProto],
    attachments: Sequence[Attached],
    opsets: Mapping[str, int],
    spec_of: Callable[[str], TensorSpec],
    taken: set[str],
) -> list[NodeProto]:
    """A graph's nodes with those of adapters; the products among them are copies.

    The place of an adapter is found by the first output of its node. New names are added to ``taken``.
    """
    by_output: dict[str, list[Attached]] = {}
    for attached in attachments:
        for place in attached.places:
            by_output.setdefault(place.node.output[0], []).append(attached)
    out: list[NodeProto] = []
    for node in nodes:
        own = by_output.get(node.output[0] if node.output else "")
        if not own:
            out.append(node)
            continue
        plain = copied(node)
        plain.output[0] = fresh_name(f"{node.output[0]}/base", taken)
        branch = _branch(plain, node.output[0], own, opsets, spec_of)
        names = {v.name for v in (*branch.graph.input, *branch.graph.output)}
        rename_within(branch.graph, names, node.output[0], taken)
        constants = [
            helper.make_node("Constant", [], [t.name], value=t) for t in branch.graph.initializer
        ]
        out += [plain, *constants, *branch.graph.node]
    return out


def _branch(
    plain: NodeProto,
    output: str,
    attachments: Sequence[Attached],
    opsets: Mapping[str, int],
    spec_of: Callable[[str], TensorSpec],
) -> ModelProto:
    trace = Trace(opsets)
    known = spec_of(output)
    x_spec = spec_of(plain.input[0])
    x = trace.input(plain.input[0], x_spec.dtype or known.dtype, x_spec.shape)
    y = trace.input(plain.output[0], known.dtype or x_spec.dtype, known.shape)
    x = _in_layout(trace.op, plain, x)
    for attached in attachments:
        tensors = {
            n: trace.input(spec.name, spec.dtype, spec.shape)
            for n, spec in attached.tensors.items()
        }
        y = calls.adapted(attached.adapter, trace.op, x, y, tensors, attached.product)
    program = build(trace, {output: y}, name="adapters")
    if program.hosts:
        raise BrokenPlugin(
            f"{whose(attachments[0].adapter)} has hyperparameters of a step in its formula; "
            "declare them as fields without hyper()",
            attachments[0].adapter,
        )
    return program.proto()


def _in_layout(op: Ops, node: NodeProto, x: Tensor) -> Tensor:
    """The data in the layout of the product: transposed, or without the positions that strides skip."""
    given = settings(node)
    if node.op_type == "Gemm" and given.get("transA", 0):
        return op.Transpose(x, perm=[1, 0])
    strides = list(given.get("strides", ())) if node.op_type == "Conv" else []
    if any(s > 1 for s in strides):
        axes = list(range(2, 2 + len(strides)))
        starts, ends = [0] * len(axes), [2**31 - 1] * len(axes)
        return op.Slice(x, starts, ends, axes, strides)
    return x
