"""The operators that the installed onnxruntime computes, and replacements of the others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper

from ortflex_core.compiler.graph.bounded_inference import infer_shapes
from ortflex_core.compiler.graph.program import ir_for
from ortflex_core.compiler.graph.protos import (
    all_nodes,
    copied,
    node_label,
    opsets_of,
    plain_domain,
    refill,
    subgraphs_of,
)
from ortflex_core.compiler.graph.schemas import schema
from ortflex_core.compiler.operators import function_bodies
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.errors import RuntimeUnavailable, error_reason

_NEW = 18
"""Operators that are older than this opset have a kernel in all supported runtimes."""
_DOMAIN = "ortflex.body"
_LAYOUT = frozenset({"RNN", "GRU", "LSTM"})


def inlined(model: ModelProto) -> tuple[ModelProto, dict[str, str]]:
    """The model with simpler operators in place of those without a kernel in the installed runtime.

    Returns it (the model itself if nothing has to be replaced) and, for each replaced node, by the name of
    its first output, a sentence that says why. Local functions are inlined before.
    """
    opset = opsets_of(model).get("", 0)
    with contextlib.suppress(RuntimeUnavailable):
        newest = require_runtime().max_opset
        return _inlined(model, opset, min(opset, newest))
    return model, {}


def _inlined(model: ModelProto, opset: int, written: int) -> tuple[ModelProto, dict[str, str]]:
    if not any(_may_lack_kernel(node) for node in all_nodes(model.graph.node)):
        return model, {}
    typed = infer_shapes(model)
    functions: dict[str, FunctionProto] = {}
    reasons: dict[str, str] = {}
    _replace(typed.graph, {}, opset, written, functions, reasons)
    if not functions:
        return model, {}
    typed.functions.extend(functions.values())
    inlined = function_bodies.inline_domain(typed, _DOMAIN)
    # These inferred types may be less precise than the types that are inferred elsewhere.
    refill(inlined.graph.value_info, model.graph.value_info)
    return inlined, reasons


def _may_lack_kernel(node: NodeProto) -> bool:
    """Whether a runtime may lack a kernel for a standard node that can be replaced."""
    if node.domain not in function_bodies.DOMAINS:
        return False
    if node.op_type in _LAYOUT:
        return any(a.name == "layout" and a.i for a in node.attribute)
    if not function_bodies.has_body(node.op_type, domain=node.domain):
        return False
    return bool(plain_domain(node.domain)) or _first_opset(node.op_type) >= _NEW


@functools.cache
def _first_opset(op_type: str) -> int:
    """The opset that introduced an operator."""
    every = onnx.defs.get_all_schemas_with_history()
    return min(s.since_version for s in every if s.domain == "" and s.name == op_type)


def _replace(
    graph: GraphProto,
    outer: Mapping[str, TypeProto],
    opset: int,
    written: int,
    functions: dict[str, FunctionProto],
    reasons: dict[str, str],
) -> None:
    """Replace nodes without a kernel by calls of a function of the model that computes the same."""
    types = {**outer, **{t.name: _type_of(t) for t in graph.initializer}}
    known: list[ValueInfoProto] = [*graph.input, *graph.value_info, *graph.output]
    types |= {v.name: v.type for v in known}
    for node in graph.node:
        for inner in subgraphs_of(node):
            _replace(inner, types, opset, written, functions, reasons)
        if not _may_lack_kernel(node):
            continue
        given = [types.get(name) if name else None for name in node.input]
        if any(name and t is None for name, t in zip(node.input, given, strict=True)):
            continue
        why = _explain_refusal(node, given, written)
        body = function_bodies.body_of(node, opset, given) if why else None
        if body is None:
            continue
        body.domain, body.name = _DOMAIN, f"{node.op_type}{len(functions)}"
        functions[body.name] = body
        reasons[node.output[0]] = (
            f"{node_label(node)} is computed by simpler operators in the training, but not in the "
            f"file: {why}"
        )
        del body.attribute[:], body.attribute_proto[:]
        node.op_type, node.domain = body.name, _DOMAIN
        del node.attribute[:]


def _type_of(tensor: onnx.TensorProto) -> TypeProto:
    return helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))


def _explain_refusal(node: NodeProto, types: list[TypeProto | None], written: int) -> str:
    """The reason why the installed runtime cannot compute a node; empty if it can."""
    preview = bool(plain_domain(node.domain))
    if not preview and schema(node.op_type, written, "") is None:
        return f"the installed onnxruntime reads opset {written}, which does not have it yet"
    if _computes_differently(node):
        return "onnxruntime computes this form of it differently from the standard"
    alone = copied(node)
    alone.name = ""
    alone.input[:] = [f"i{k}" if name else "" for k, name in enumerate(node.input)]
    alone.output[:] = [f"o{k}" if name else "" for k, name in enumerate(node.output)]
    graph = GraphProto(name="alone", node=[alone])
    for name, kind in zip(alone.input, types, strict=True):
        if name and kind is not None:
            bare = copied(kind)
            for size in bare.tensor_type.shape.dim:
                size.Clear()
            graph.input.append(ValueInfoProto(name=name, type=bare))
    graph.output.extend(ValueInfoProto(name=name) for name in alone.output if name)
    model = ModelProto(ir_version=ir_for(written), graph=graph)
    model.opset_import.append(helper.make_opsetid("", written))
    if preview:
        model.opset_import.append(helper.make_opsetid(node.domain, 1))
    return _trial(model.SerializeToString(deterministic=True))


def _computes_differently(node: NodeProto) -> bool:
    """Whether runtimes up to 1.31.1 compute this form of a node differently from the standard.

    With past keys, they start a causal mask at the first of these keys. They refuse a mask shorter than
    the keys together with nonpad_kv_seqlen, and 1.23 adds the mask before the softcap.
    """
    if node.op_type != "Attention":
        return False
    settings = {a.name: a for a in node.attribute}
    given = [k for k, name in enumerate(node.input) if name]
    causal = "is_causal" in settings and settings["is_causal"].i
    capped = "softcap" in settings and settings["softcap"].f
    whole = len(node.output) > 3 and bool(node.output[3])
    masked = 3 in given
    return bool(
        (causal and 4 in given) or (6 in given and masked) or (capped and (masked or whole))
    )


def deviations(model: ModelProto) -> Iterator[str]:
    """Sentences about nodes for which onnxruntime computes something other than the standard.

    The standard's node cases (``tests/node_cases.py``) show them in 1.31.1.
    """
    for node in all_nodes(model.graph.node):
        settings = {a.name: a for a in node.attribute}
        mode = settings.get("coordinate_transformation_mode")
        scaled = len(node.input) > 2 and bool(node.input[2])
        reason = ""
        if node.op_type == "MaxUnpool" and len(node.input) > 2 and node.input[2]:
            reason = "treats the indices as positions in output_shape"
        elif node.op_type == "Resize" and scaled and mode and mode.s == b"align_corners":
            reason = (
                "rounds sizes before it aligns corners if a scale does not give an integer size"
            )
        if reason and not plain_domain(node.domain):
            yield (
                f"{node_label(node)}: onnxruntime {reason}; the training and its gradients follow "
                "onnxruntime, and another runtime may compute other values"
            )


@functools.lru_cache(maxsize=1024)
def _trial(model: bytes) -> str:
    """The reason why onnxruntime cannot open a model; empty if it can."""
    try:
        cpu_session(model)
    except Exception as error:  # onnxruntime has its own exception classes, made in C++
        return f"the installed onnxruntime does not compute it: {error_reason(error)}"
    return ""
