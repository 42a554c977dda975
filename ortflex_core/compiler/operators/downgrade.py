"""Conversion of models with a newer opset than the runtime reads to the newest that it reads.

Most operators of a new opset keep their meaning: the opset adds types, or an attribute whose default
is the old behavior. If all nodes have the same meaning in both opsets, the internal graph gets the
older opset. An operator that is new, or that a node uses in a new way, is replaced by its function
body if the standard has one. The file and its export are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx
import onnx.parser
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from ortflex_core.compiler.graph import shape_inference
from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.graph.program import ir_for
from ortflex_core.compiler.graph.protos import all_nodes, copied, opsets_of, plain_domain, refill
from ortflex_core.compiler.graph.schemas import ELEMENT_TYPES, Schema, schema
from ortflex_core.compiler.operators import function_bodies
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.kernel.errors import ModelError, RuntimeUnavailable
from ortflex_core.kernel.types import TensorSpec

READ_BY_ALL = 17
"""All supported runtimes read this opset."""
_DOMAIN = "ortflex.bodies"
_DEEPEST = 8
"""The depth of bodies within bodies."""
_UNSET = AttributeProto.UNDEFINED
_NAMES = {code: name for name, code in ELEMENT_TYPES.items()}

Types = Mapping[str, int]
"""The element types of tensors, by name, where they are known."""


def lowered(model: ModelProto, label: str, newest: int) -> tuple[ModelProto | None, str]:
    """The model at an older opset and "", or None and the first node with a different meaning there.

    Its functions are already inlined.
    """
    known, opset = onnx.defs.onnx_opset_version(), _opset(model)
    if opset > known:
        return None, f"the installed onnx {onnx.__version__} has opsets up to {known}"
    out = copied(model)
    if opset > newest:
        types = _types(out, label)
        for _ in range(_DEEPEST):
            different = [node for node, _ in _find_differences(out.graph, opset, newest, types)]
            if not different:
                break
            protos = {n: spec.to_proto().type for n, spec in _specs(out, label).items()}
            try:
                out = _inlined(out, different, opset, protos)
            except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
                return None, f"a function body cannot be inlined: {error}"
            types = _types(out, label)
        for node, reason in _find_differences(out.graph, opset, newest, types):
            return None, f"the node {node.name or node.op_type!r}: {reason}"
        _trim(out.graph, opset, newest)
        for entry in out.opset_import:
            if not plain_domain(entry.domain):
                entry.version = newest
    return out, ""


def readable(model: ModelProto, label: str) -> tuple[ModelProto, str]:
    """The model at an opset that the installed runtime reads, and "".

    If it reads no such opset, the unchanged model and the reason; without a runtime, the unchanged model
    and "".
    """
    if _opset(model) <= READ_BY_ALL and model.ir_version <= ir_for(READ_BY_ALL):
        return model, ""
    try:
        runtime = require_runtime()
    except RuntimeUnavailable:
        return model, ""
    reason = ""
    if _opset(model) > runtime.max_opset:
        converted, reason = lowered(model, label, runtime.max_opset)
        model = converted or model
    if not reason and model.ir_version > runtime.max_ir:
        # A new IR version adds element types, which operators must accept, too.
        copy = copied(model)
        copy.ir_version = min(ir_for(_opset(model)), runtime.max_ir)
        model = copy
    return model, reason


def _opset(model: ModelProto) -> int:
    return opsets_of(model).get("", 0)


def _specs(model: ModelProto, label: str) -> dict[str, TensorSpec]:
    try:
        return shape_inference.inferred(model, label)
    except ModelError:  # the error is raised where shapes are needed
        return {}


def _types(model: ModelProto, label: str) -> Types:
    return {name: spec.dtype for name, spec in _specs(model, label).items()}


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Every node with an operator of the standard, also in subgraphs."""
    return (node for node in all_nodes(graph.node) if not plain_domain(node.domain))


def _find_differences(
    graph: GraphProto, opset: int, newest: int, types: Types
) -> list[tuple[NodeProto, str]]:
    """The nodes that have a different meaning, or none, at the older opset, and the reasons."""
    return [
        (node, reason)
        for node in _nodes(graph)
        if (reason := _difference(node, opset, newest, types))
    ]


def _difference(node: NodeProto, opset: int, newest: int, types: Types) -> str:
    new, old = schema(node.op_type, opset, ""), schema(node.op_type, newest, "")
    if new is None:
        return ""  # the error is raised when it is traced
    if old is None or old.deprecated:
        return f"opset {newest} has no operator {node.op_type}"
    if new.since_version == old.since_version:
        return ""
    where = f"{node.op_type} of opset {new.since_version}"
    change = _CHANGED.get(node.op_type)
    if change and old.since_version < change[0] <= new.since_version and change[1](node, types):
        return f"{where} differs in meaning from {node.op_type} of opset {old.since_version}"
    reason = (
        _in_attributes(node, new, old)
        or _in_places(node.input, new.inputs, old.inputs)
        or _in_places(node.output, new.outputs, old.outputs)
        or _in_types(node, old, types)
    )
    return f"{where} has {reason}" if reason else ""


def _in_attributes(node: NodeProto, new: Schema, old: Schema) -> str:
    given = {a.name: a for a in node.attribute}
    for name, attribute in given.items():
        if name not in old.attributes and not _is_default(attribute, new):
            return f"the attribute {name!r}, which that of opset {old.since_version} does not have"
    for name, formal in old.attributes.items():
        if name in given:
            continue
        known = name in new.attributes
        if formal.required or (known and _default(new, name) != _default(old, name)):
            return f"another default of the attribute {name!r}"
        if not known and formal.default_value.type != _UNSET:
            return f"no attribute {name!r}"
    return ""


def _default(schema: Schema, name: str) -> bytes:
    value: bytes = schema.attributes[name].default_value.SerializeToString(deterministic=True)
    return value


def _is_default(attribute: AttributeProto, schema: Schema) -> bool:
    """Whether an attribute has its default value."""
    if attribute.name not in schema.attributes:
        return False
    default = schema.attributes[attribute.name].default_value
    if default.type == _UNSET:
        return False
    value = onnx.helper.get_attribute_value
    return bool(default.type == attribute.type and value(default) == value(attribute))


def _in_places(
    names: Sequence[str],
    new: Sequence[Schema.FormalParameter],
    old: Sequence[Schema.FormalParameter],
) -> str:
    """The reason why inputs or outputs do not fit the older operator, or ""."""
    for k, name in enumerate(names):
        if not name:
            continue
        formal, old_formal = new[min(k, len(new) - 1)], old[min(k, len(old) - 1)]
        variadic = old_formal.option == Schema.FormalParameterOption.Variadic
        if (k >= len(old) and not variadic) or formal.name.lower() != old_formal.name.lower():
            return f"{formal.name!r}, which the older one does not have"
    return ""


def _in_types(node: NodeProto, old: Schema, types: Types) -> str:
    """The reason why the older operator does not accept the types of the tensors, or ""."""
    bound: dict[str, int] = {}
    for names, formals in ((node.input, old.inputs), (node.output, old.outputs)):
        for k, name in enumerate(names):
            dtype = types.get(name, 0)
            if not dtype or not formals:
                continue
            formal = formals[min(k, len(formals) - 1)]
            same = bound.setdefault(formal.type_str, dtype) if formal.is_homogeneous else dtype
            if _NAMES.get(dtype) not in formal.types or same != dtype:
                return (
                    f"{_NAMES.get(dtype)} for {formal.name!r}, which the older one does not accept"
                )
    return ""


def _inlined(
    model: ModelProto, nodes: Sequence[NodeProto], opset: int, types: Mapping[str, TypeProto]
) -> ModelProto:
    """The model with function bodies in place of some of its nodes; the given model is changed, too."""
    for node in nodes:
        text = _BODIES.get(node.op_type)
        given = [types.get(name, TypeProto()) if name else None for name in node.input]
        body = (
            onnx.parser.parse_function(text)
            if text
            else function_bodies.body_of(node, opset, given)
        )
        if body is None:
            continue
        body.domain, body.name = _DOMAIN, f"{node.op_type}.{len(model.functions)}"
        for entry in body.opset_import:
            if entry.domain == "":
                entry.version = opset  # the meaning of its operators did not change
        node.domain, node.op_type = _DOMAIN, body.name
        del node.attribute[:]
        model.functions.append(body)
    return function_bodies.inline_domain(model, _DOMAIN)


def _trim(graph: GraphProto, opset: int, newest: int) -> None:
    """Remove the attributes that the older operators do not have; their values are the defaults."""
    for node in _nodes(graph):
        old = schema(node.op_type, newest, "")
        if old is not None and old != schema(node.op_type, opset, ""):
            kept = [a for a in node.attribute if a.name in old.attributes]
            if len(kept) < len(node.attribute):
                refill(node.attribute, kept)


def _rounds_up(node: NodeProto, types: Types) -> bool:
    return any(a.name == "ceil_mode" and a.i for a in node.attribute)


def _expand_mod(node: NodeProto, types: Types) -> bool:
    """Mod of floats with the sign of the divisor, which older opsets do not have."""
    truncates = any(a.name == "fmod" and a.i for a in node.attribute)
    return not truncates and types.get(node.input[0], TensorProto.FLOAT) in FLOATS


def _always(node: NodeProto, types: Types) -> bool:
    return True


# Operators whose meaning changed in an opset, with the same inputs, outputs and attributes.
_CHANGED: Mapping[str, tuple[int, Callable[[NodeProto, Types], bool]]] = {
    "AveragePool": (22, _rounds_up),
    "GroupNormalization": (21, _always),
    "LpPool": (22, _rounds_up),
    "MaxPool": (22, _rounds_up),
    "Mod": (28, _expand_mod),
}

# Function bodies of operators that the standard defines only in text.
_BODIES: Mapping[str, str] = {
    # The remainder of truncation, plus B where the remainder and B have different signs.
    "Mod": """
        <opset_import: ["" : 17], domain: "ortflex.bodies"> Mod (A, B) => (C) {
            r = Mod<fmod = 1>(A, B)
            nought = Constant<value_float = 0.0>()
            zero = CastLike(nought, B)
            left = Less(r, zero)
            right = Greater(r, zero)
            below = Less(B, zero)
            above = Greater(B, zero)
            first = And(left, above)
            second = And(right, below)
            off = Or(first, second)
            moved = Add(r, B)
            C = Where(off, moved, r)
        }
    """
}
