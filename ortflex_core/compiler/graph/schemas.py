"""Schemas of operators, and the conversion of Python values to inputs and attributes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from ortflex_core.kernel.errors import GraphError, suggest
from ortflex_core.kernel.types import dtype_name, numpy_dtype, onnx_dtype

Schema = onnx.defs.OpSchema


@functools.cache
def schema(op_type: str, opset: int, domain: str) -> Schema | None:
    """The schema of an operator at an opset, or None for an undeclared operator."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def changed_attributes(
    attributes: Iterable[AttributeProto], op_type: str, opset: int, domain: str = ""
) -> dict[str, Any]:
    """The attributes of a node that are not at the defaults of its operator, with their values.

    Those without a default, and all of an undeclared operator, are included.

    >>> given = onnx.helper.make_attribute("axis", 2), onnx.helper.make_attribute("keepdims", 1)
    >>> changed_attributes(given, "ArgMax", 13)
    {'axis': 2}
    """
    declared = schema(op_type, opset, domain)
    defaults = {} if declared is None else declared.attributes
    changed = {}
    for proto in attributes:
        value = onnx.helper.get_attribute_value(proto)
        default = defaults[proto.name].default_value if proto.name in defaults else None
        if default is None or default.type == AttributeProto.UNDEFINED:
            same = False
        else:
            same = bool(onnx.helper.get_attribute_value(default) == value)
        if not same:
            changed[proto.name] = value.decode() if isinstance(value, bytes) else value
    return changed


def operator_names(opset: int) -> list[str]:
    """The standard operators of an opset, without those that it deprecates."""
    history = (s for s in onnx.defs.get_all_schemas_with_history() if s.domain == "")
    schemas = {s.name: schema(s.name, opset, "") for s in history if s.since_version <= opset}
    return sorted(name for name, s in schemas.items() if s is not None and not s.deprecated)


def unknown_operator(op_type: str, opset: int | None, domain: str) -> str:
    """The message for an operator that has no schema: too new, or probably misspelt."""
    where = f"{domain or 'ai.onnx'} opset {opset}"
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == domain}
    if op_type in names:
        return f"the operator {op_type} is not in {where} yet"
    return f"{where} has no operator {op_type!r}; {suggest(op_type, names).split(' Known')[0]}"


def _element_types() -> dict[str, int]:
    from onnx.helper import tensor_dtype_to_string

    types = {}
    for name, code in TensorProto.DataType.items():
        if name != "UNDEFINED":
            text = tensor_dtype_to_string(code).removeprefix("TensorProto.").lower()
            types[f"tensor({text})"] = code
    return types


ELEMENT_TYPES = _element_types()
"""Element types by the names that schemas give them: ``tensor(float)``."""


def type_of_number(op_type: str, value: Any, wanted: int | None) -> int | None:
    """The element type that a Python number (or a list of numbers) takes as an input.

    An empty list has no type of its own: it gets the type of the input, or, if the schema allows
    several, the default of the trace (see :meth:`ortflex_core.compiler.graph.Trace.constant`).
    """
    sample = np.asarray(value)
    if sample.size == 0:
        return wanted
    if wanted is None:
        return onnx_dtype(np.int64) if sample.dtype.kind in "iu" else None
    kind = numpy_dtype(wanted).kind if wanted != TensorProto.BFLOAT16 else "f"
    if sample.dtype.kind == "f" and kind in "iub":
        raise GraphError(
            f"{op_type}: the float {value!r} is combined with a tensor of {dtype_name(wanted)}; "
            "cast the tensor with op.Cast(x, to=…) first"
        )
    return wanted


def arrange(
    schema: Schema, inputs: list[Any], attributes: Mapping[str, Any]
) -> tuple[list[Any], dict[str, AttributeProto]]:
    """Divide keyword arguments into attributes and inputs, as this opset defines them."""
    protos: dict[str, AttributeProto] = {}
    names = [formal.name for formal in schema.inputs]
    for key, value in attributes.items():
        if value is None:
            continue
        if key in schema.attributes:
            if isinstance(value, AttributeProto):
                protos[key] = value
            else:
                kind = int(schema.attributes[key].type.value)  # type: ignore[attr-defined]
                protos[key] = onnx.helper.make_attribute(key, value, attr_type=kind)
        elif key in names:
            place = names.index(key)
            inputs.extend([None] * (place + 1 - len(inputs)))
            inputs[place] = value
        else:
            known = [*schema.attributes, *names]
            raise GraphError(
                f"{schema.name} has no attribute {key!r} at opset {schema.since_version}; "
                + suggest(key, known)
            )
    while inputs and inputs[-1] is None:
        inputs.pop()
    return inputs, protos
