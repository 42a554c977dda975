"""The operators of ONNX as typed methods: ``python -m tests.core.typed_operators`` writes the stub.

The stub ``ortflex_core/compiler/graph/operators.pyi`` is read by type checkers and editors alone: at
run time :class:`ortflex_core.Ops` finds operators by name, and nothing is imported for it. The test
in test_public_names.py compares the file with what is written here.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.defs import OpSchema

from ortflex_core.kernel.host_scalars import OPERATORS

STUB = Path(__file__).parents[2] / "ortflex_core" / "compiler" / "graph" / "operators.pyi"

_HEAD = '''"""The operators of ONNX opset {opset} as methods, for type checkers and editors.

Written by ``python -m tests.core.typed_operators`` from the schemas: change the generator, not this file.
Inputs stand first, attributes are keywords. ``outputs=n`` asks for n outputs, where there can be
several. Arithmetic of host scalars alone gives a host scalar.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, overload

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto, TypeProto

from ortflex_core import Array, Host, Tensor
from ortflex_core.compiler.graph.ops import Operand

_Scalar: TypeAlias = Host | float
_Array: TypeAlias = Tensor | Array | np.generic | Sequence[float]

class Operators:
    """One method an operator; :class:`ortflex_core.Ops` has them."""
'''

_TYPES = {
    "FLOAT": "float",
    "FLOATS": "Sequence[float]",
    "GRAPH": "GraphProto",
    "INT": "int",
    "INTS": "Sequence[int]",
    "SPARSE_TENSOR": "SparseTensorProto",
    "STRING": "str",
    "STRINGS": "Sequence[str]",
    "TENSOR": "TensorProto",
    "TYPE_PROTO": "TypeProto",
}
_MANY = 8
"""More outputs than this are any number of them."""
_Option = OpSchema.FormalParameterOption


def operators() -> list[OpSchema]:
    """The standard operators of the newest opset, by name; those that are deprecated are left out."""
    found = [s for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated]
    return sorted(found, key=lambda schema: str(schema.name))


def _default(attribute: OpSchema.Attribute) -> Any:
    """The value that an attribute has where it is not given, or None."""
    value = onnx.helper.get_attribute_value(attribute.default_value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return value.decode() if isinstance(value, bytes) else value


def _attributes(schema: OpSchema) -> Iterator[str]:
    ordered = sorted(schema.attributes.values(), key=lambda a: (not a.required, a.name))
    for attribute in ordered:
        kind = _TYPES[attribute.type.name]
        if attribute.required:
            yield f"{attribute.name}: {kind}"
        elif attribute.default_value.type:
            yield f"{attribute.name}: {kind} = {json.dumps(_default(attribute))}"
        else:
            yield f"{attribute.name}: {kind} | None = None"


def _inputs(schema: OpSchema) -> Iterator[str]:
    for place in schema.inputs:
        if place.option == _Option.Variadic:
            yield f"*{place.name}: Operand"
        elif place.option == _Option.Optional and schema.name != "Loop":
            yield f"{place.name}: Operand | None = None"
        else:
            optional = place.option == _Option.Optional
            yield f"{place.name}: Operand{' | None' if optional else ''}"


def _signatures(schema: OpSchema) -> list[tuple[list[str], list[str], str]]:
    """Inputs, keywords and result of every overload."""
    attributes = list(_attributes(schema))
    names = [place.name for place in schema.inputs]
    if schema.name in OPERATORS and schema.inputs[-1].option == _Option.Variadic:
        name = names[0]
        return [
            ([f"*{name}: _Scalar"], [], "Host"),
            (["first: _Array", "/", f"*{name}: Operand"], [], "Tensor"),
            (["first: Operand", "second: _Array", "/", f"*{name}: Operand"], [], "Tensor"),
        ]
    if schema.name in OPERATORS:
        places: list[list[str]] = [["_Scalar"] * len(names)]
        places += [
            ["_Array" if k == i else "Operand" for i in range(len(names))]
            for k in range(len(names))
        ]
        return [
            ([f"{n}: {t}" for n, t in zip(names, kinds, strict=True)], attributes, result)
            for kinds, result in zip(places, ["Host"] + ["Tensor"] * len(names), strict=True)
        ]
    inputs = list(_inputs(schema))
    if schema.max_output == 1:
        return [(inputs, attributes, "Tensor")]
    out = [(inputs, ["outputs: Literal[1] = 1", *attributes], "Tensor")]
    if schema.max_output <= _MANY:
        for count in range(2, schema.max_output + 1):
            result = f"tuple[{', '.join(['Tensor'] * count)}]"
            out.append((inputs, [f"outputs: Literal[{count}]", *attributes], result))
    out.append((inputs, ["outputs: int", *attributes], "tuple[Tensor, ...]"))
    return out


def _method(schema: OpSchema) -> Iterator[str]:
    results = ", ".join(place.name for place in schema.outputs)
    some = "Outputs" if len(schema.outputs) > 1 else "Output"
    text = f'"""ONNX operator {schema.name}, since opset {schema.since_version}.'
    text = f'{text} {some}: {results}."""'
    if len(text) > 92:
        about, _, more = text.partition(". ")
        text = f'{about}.\n\n{more[:-3]}\n"""'
    signatures = _signatures(schema)
    for inputs, keywords, result in signatures:
        yield ""
        if len(signatures) > 1:
            yield "    @overload"
        variadic = any(i.startswith("*") for i in inputs)
        star = ["*"] if keywords and not variadic else []
        parts = ["self", *inputs, *star, *keywords]
        line = f"    def {schema.name}({', '.join(parts)}) -> {result}:"
        if len(line) <= 100:
            yield line
        else:
            yield f"    def {schema.name}("
            joined = ", ".join(parts)
            if len(joined) <= 92:
                yield f"        {joined}"
            else:
                yield from (f"        {part}," for part in parts)
            yield f"    ) -> {result}:"
        yield textwrap.indent(text, " " * 8)


def stub() -> str:
    """The text of the stub file."""
    lines = [_HEAD.format(opset=onnx.defs.onnx_opset_version()).rstrip("\n")]
    for schema in operators():
        lines += _method(schema)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
