"""Operators as simpler ones: function bodies of the standard, and replacements of layouts without a kernel.

A body replaces its operator if the installed runtime has no kernel for the operator, so that every
backend can train it, or if no gradient rule supports the node. The exported file keeps the node.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, helper

from ortflex_core.compiler.graph import schemas, sequences
from ortflex_core.compiler.graph.control_flow import replay
from ortflex_core.compiler.graph.ops import Node, Tensor, Trace
from ortflex_core.compiler.graph.protos import copied, refill, subgraphs_of
from ortflex_core.kernel.errors import GraphError

_RECURRENT: Mapping[str, int] = {"RNN": 1, "GRU": 1, "LSTM": 2}
"""Recurrent operators and the number of their states; the first state is input 5."""
_STATES = 5
_PREVIEW = "ai.onnx.preview"
DOMAINS = frozenset({"", "ai.onnx", _PREVIEW})
"""The domains of standard operators."""


def body_of(node: NodeProto, opset: int, types: Sequence[TypeProto | None]) -> FunctionProto | None:
    """The operators that compute a standard node, or None if the standard does not define them.

    Args:
        node: the node to expand.
        opset: the version of the standard operators of its graph.
        types: the types of its inputs, None for omitted ones.

    Returns:
        A function of that opset, with the attributes of the node put in their places.
    """
    if node.op_type in sequences.SEQUENCE_OPERATORS or node.domain not in DOMAINS:
        return None
    if node.op_type in _RECURRENT and _setting(node, "layout"):
        return _time_first(node, opset)
    schema = None if node.domain == _PREVIEW else schemas.schema(node.op_type, opset, "")
    schema = schema or _newest(node.op_type, node.domain)
    body = _declared(schema, node, opset, types)
    if schema is None or body is None or not _same_operators(body.node, body, opset):
        return None
    del body.opset_import[:]
    body.opset_import.append(helper.make_opsetid("", opset))
    given = {a.name: a for a in schema.attributes.values() if a.default_value.type}
    values = {name: a.default_value for name, a in given.items()}
    values |= {a.name: a for a in node.attribute}
    _bind(body.node, values)
    return body


def inline_domain(model: ModelProto, domain: str) -> ModelProto:
    """The model with the calls of its functions replaced by their bodies, which are all in ``domain``."""
    model.opset_import.append(helper.make_opsetid(domain, 1))
    inlined = onnx.inliner.inline_local_functions(model)
    refill(inlined.opset_import, [o for o in inlined.opset_import if o.domain != domain])
    return inlined


def expanded(trace: Trace, node: Node) -> tuple[Tensor, ...] | None:
    """The outputs of a node, computed by the operators of its function body; None without a body."""
    if node.domain not in DOMAINS or node.captures:
        return None
    names = ["" if t is None else f"input{k}" for k, t in enumerate(node.inputs)]
    proto = NodeProto(op_type=node.op_type, domain=node.domain, input=names)
    proto.output.extend(f"output{k}" for k in range(len(node.outputs)))
    proto.attribute.extend(node.attributes.values())
    types = [
        None if t is None else helper.make_tensor_type_proto(t.dtype, t.shape) for t in node.inputs
    ]
    function = body_of(proto, trace.opsets[""], types)
    if function is None:
        return None
    graph = GraphProto(node=function.node)
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    made = {o for n in function.node for o in n.output} | set(function.input)
    wanted = function.output[: len(node.outputs)]
    if not made.issuperset(wanted):
        raise GraphError(f"the function body of {node.op_type} computes {sorted(made)}")
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    missing = len(function.input) - len(node.inputs)
    formals = [*node.inputs, *([None] * missing)]
    return tuple(replay(trace, graph, formals, {}))


def _newest(op_type: str, domain: str = "") -> schemas.Schema | None:
    """The newest schema of an operator, which may be newer than the graph's opset."""
    newest = onnx.defs.onnx_opset_version()
    return schemas.schema(op_type, newest, domain if domain == _PREVIEW else "")


def _declared(
    schema: Any, node: NodeProto, opset: int, types: Sequence[TypeProto | None]
) -> FunctionProto | None:
    """The body that an operator's schema has for a node, of the newest version up to ``opset``."""
    raw: Any = None
    if schema is not None and schema.has_function:
        at = _version(schema.function_opset_versions, opset)
        raw = schema.get_function_with_opset_version(at)
    elif schema is not None and schema.has_context_dependent_function:
        at = _version(schema.context_dependent_function_opset_versions, opset)
        given = [(t or TypeProto()).SerializeToString() for t in types]
        raw = schema.get_context_dependent_function_with_opset_version(
            at, node.SerializeToString(), given
        )
    body = FunctionProto()
    if isinstance(raw, bytes):
        body.ParseFromString(raw)
    elif raw is not None:
        body.CopyFrom(raw)
    return body if body.node else None


def _version(versions: Sequence[int], opset: int) -> int:
    return max((v for v in versions if v <= opset), default=min(versions))


def _same_operators(nodes: Iterable[NodeProto], function: FunctionProto, opset: int) -> bool:
    """Whether the operators of a body have the same meaning at ``opset``.

    An operator that is newer than ``opset`` has its own body.
    """
    written = next((o.version for o in function.opset_import if o.domain == ""), opset)
    for node in nodes:
        if node.domain:
            return False
        mine = schemas.schema(node.op_type, written, "")
        theirs = schemas.schema(node.op_type, opset, "")
        if mine is not None and theirs is not None and _form(mine) != _form(theirs):
            return False
        if theirs is None and not has_body(node.op_type):
            return False
        if not all(_same_operators(g.node, function, opset) for g in subgraphs_of(node)):
            return False
    return True


def has_body(op_type: str, opset: int | None = None, domain: str = "") -> bool:
    """Whether the standard defines an operator by a function body; by default the newest version."""
    schema: Any = _newest(op_type, domain)
    if opset is not None:
        schema = schemas.schema(op_type, opset, domain)
    if schema is None or op_type in sequences.SEQUENCE_OPERATORS:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


@functools.cache
def _form_of(op_type: str, since: int) -> tuple[tuple[str, ...], ...]:
    schema = onnx.defs.get_schema(op_type, since, "")
    places = [tuple(formal.name for formal in part) for part in (schema.inputs, schema.outputs)]
    return (*places, tuple(sorted(schema.attributes)))


def _form(schema: schemas.Schema) -> tuple[tuple[str, ...], ...]:
    """The names of an operator's inputs, outputs and attributes."""
    return _form_of(schema.name, schema.since_version)


def _bind(nodes: Iterable[NodeProto], values: Mapping[str, AttributeProto]) -> None:
    """Replace references to the function's attributes by values; those without a value are removed."""
    for node in nodes:
        kept = []
        for attribute in node.attribute:
            name = attribute.ref_attr_name
            if name and name not in values:
                continue
            bound = copied(values[name] if name else attribute)
            bound.name = attribute.name
            kept.append(bound)
        refill(node.attribute, kept)
        for graph in subgraphs_of(node):
            _bind(graph.node, values)


def _setting(node: NodeProto, name: str) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), 0)


def _time_first(node: NodeProto, opset: int) -> FunctionProto:
    """A recurrent operator with the batch as the first axis, computed with the time as the first axis."""
    states = range(_STATES, _STATES + _RECURRENT[node.op_type])
    inputs = [f"x{k}" if name else "" for k, name in enumerate(node.input)]
    outputs = [f"y{k}" if name else "" for k, name in enumerate(node.output)]
    inner = NodeProto(op_type=node.op_type, input=inputs, output=outputs)
    inner.attribute.extend(a for a in node.attribute if a.name != "layout")
    before, after = [], []
    for k, name in enumerate(inputs):
        if name and (k == 0 or k in states):
            inner.input[k] = f"{name}/turned"
            before.append(helper.make_node("Transpose", [name], [inner.input[k]], perm=[1, 0, 2]))
    for k, name in enumerate(outputs):
        if name:
            inner.output[k] = f"{name}/turned"
            perm = [1, 0, 2] if k else [2, 0, 1, 3]
            after.append(helper.make_node("Transpose", [inner.output[k]], [name], perm=perm))
    formals = [name or f"left out {k}" for k, name in enumerate(inputs)]
    results = [name for name in outputs if name]
    imports = [helper.make_opsetid("", opset)]
    nodes = [*before, inner, *after]
    return helper.make_function("", node.op_type, formals, results, nodes, imports)
