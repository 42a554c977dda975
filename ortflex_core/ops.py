"""Symbolic tensors: formulas are Python functions of them, and tracing one makes ONNX nodes.

This is the only place that makes nodes. A :class:`Trace` is one graph in the making; ``trace.op``
has every operator of the standard (``op.Abs(x)``), tensors have Python's arithmetic. Values have
no names until :mod:`ortflex_core.compose` builds a graph of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto
from onnx.shape_inference import InferenceError, infer_node_outputs

from ortflex_core import host, schemas
from ortflex_core.errors import GraphError
from ortflex_core.host import Host
from ortflex_core.shortcuts import Shortcuts
from ortflex_core.simplify import simplify
from ortflex_core.types import Array, Shape, dtype_name, numpy_dtype, onnx_dtype, shape_text

FLOATS = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
)
# Two calls of these are two different values, so they are never merged.
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"}
    | {"Multinomial", "Dropout"}
)


class Tensor:
    """A value of the graph being traced: an input, a constant or the output of a node."""

    __slots__ = ("constant", "dtype", "hint", "host", "index", "node", "shape", "trace")
    __array_ufunc__ = None
    __iter__ = None
    # Identity: a comparison of tensors is op.Equal, and tensors are keys of dictionaries.
    __hash__ = object.__hash__

    def __init__(
        self,
        trace: Trace,
        dtype: int,
        shape: Shape | None,
        *,
        node: Node | None = None,
        index: int = 0,
        constant: Array | None = None,
        host: Host | None = None,
        hint: str = "",
    ) -> None:
        self.trace = trace
        self.dtype = dtype
        self.shape = shape
        self.node = node
        self.index = index
        self.constant = constant
        self.host = host
        self.hint = hint

    @property
    def rank(self) -> int | None:
        """Number of dimensions, or None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether the element type is a floating-point one."""
        return self.dtype in FLOATS

    def __repr__(self) -> str:
        origin = self.hint or (self.node.op_type if self.node else "constant")
        return f"<{origin}: {dtype_name(self.dtype)}{shape_text(self.shape)}>"

    def __bool__(self) -> NoReturn:
        raise GraphError(
            f"{self!r} has no value while a formula is traced; use op.Where instead of 'if'"
        )

    def _binary(self, op_type: str, other: Any, swap: bool = False) -> Any:
        if not isinstance(other, Tensor | Host | int | float | np.ndarray | np.generic):
            return NotImplemented
        operands = (other, self) if swap else (self, other)
        return self.trace.op(op_type, *operands)

    def __add__(self, other: Any) -> Tensor:
        return self._binary("Add", other)  # type: ignore[no-any-return]

    def __radd__(self, other: Any) -> Tensor:
        return self._binary("Add", other, swap=True)  # type: ignore[no-any-return]

    def __sub__(self, other: Any) -> Tensor:
        return self._binary("Sub", other)  # type: ignore[no-any-return]

    def __rsub__(self, other: Any) -> Tensor:
        return self._binary("Sub", other, swap=True)  # type: ignore[no-any-return]

    def __mul__(self, other: Any) -> Tensor:
        return self._binary("Mul", other)  # type: ignore[no-any-return]

    def __rmul__(self, other: Any) -> Tensor:
        return self._binary("Mul", other, swap=True)  # type: ignore[no-any-return]

    def __truediv__(self, other: Any) -> Tensor:
        return self._binary("Div", other)  # type: ignore[no-any-return]

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._binary("Div", other, swap=True)  # type: ignore[no-any-return]

    def __pow__(self, other: Any) -> Tensor:
        return self._binary("Pow", other)  # type: ignore[no-any-return]

    def __matmul__(self, other: Any) -> Tensor:
        return self._binary("MatMul", other)  # type: ignore[no-any-return]

    def __lt__(self, other: Any) -> Tensor:
        return self._binary("Less", other)  # type: ignore[no-any-return]

    def __gt__(self, other: Any) -> Tensor:
        return self._binary("Greater", other)  # type: ignore[no-any-return]

    def __le__(self, other: Any) -> Tensor:
        return self._binary("LessOrEqual", other)  # type: ignore[no-any-return]

    def __ge__(self, other: Any) -> Tensor:
        return self._binary("GreaterOrEqual", other)  # type: ignore[no-any-return]

    def __neg__(self) -> Tensor:
        return self.trace.op.Neg(self)  # type: ignore[no-any-return]

    def __abs__(self) -> Tensor:
        return self.trace.op.Abs(self)  # type: ignore[no-any-return]


class Node:
    """One operator call; ``captures`` are outer values that its subgraphs read, by their name."""

    __slots__ = ("attributes", "captures", "domain", "inputs", "name", "op_type", "outputs")

    def __init__(
        self,
        op_type: str,
        domain: str,
        inputs: tuple[Tensor | None, ...],
        attributes: Mapping[str, AttributeProto],
        captures: Mapping[str, Tensor],
        name: str = "",
    ) -> None:
        self.op_type = op_type
        self.domain = domain
        self.inputs = inputs
        self.attributes = attributes
        self.captures = captures
        self.name = name
        self.outputs: tuple[Tensor, ...] = ()

    @property
    def arguments(self) -> Iterable[Tensor]:
        """Every value the node depends on."""
        return (*(i for i in self.inputs if i is not None), *self.captures.values())

    def __repr__(self) -> str:
        return f"{self.op_type}({', '.join(map(repr, self.inputs))})"


class Ops:
    """The operators of ONNX as functions of tensors, for formulas: ``op.Abs(x)``.

    Numbers take the type of the tensors beside them; arrays keep theirs. What a newer opset calls
    an input and an older one an attribute (``axes``) is given by keyword under either:
    ``op.ReduceMax(x, axes=[1], keepdims=0)``. ``outputs=n`` asks for n outputs, ``domain=`` for an
    operator outside the standard. Host scalars alone give a host scalar.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def opset(self) -> int:
        """Version of the standard operators in this graph."""
        return self._trace.opsets[""]

    def __getattr__(self, op_type: str) -> Any:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return functools.partial(self, op_type)

    def constant(self, value: Any, dtype: int | None = None) -> Tensor:
        """A constant tensor; ``dtype`` is an ONNX element type."""
        return self._trace.constant(value, dtype)

    def __call__(
        self, op_type: str, *inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> Any:
        """The operator ``op_type``; a tuple of tensors when ``outputs`` > 1."""
        hosts = domain == "" and op_type in host.OPERATORS and not attributes
        known = all(isinstance(i, Host | int | float) for i in inputs)
        if hosts and known and any(isinstance(i, Host) for i in inputs):
            return Host.apply(op_type, *inputs)
        return self._trace.call(op_type, inputs, outputs=outputs, domain=domain, **attributes)


class Trace:
    """One graph in the making.

    >>> trace = Trace({"": 17})
    >>> x = trace.input("x", np.float32, ("N", 3))
    >>> trace.op.Abs(x) * 2 + 1
    <Add: float32[N, 3]>
    """

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self.opsets = dict(opsets)
        self.nodes: list[Node] = []
        self.inputs: dict[str, Tensor] = {}
        self.hosts: dict[tuple[Host, int], Tensor] = {}
        self.op = Ops(self)
        self.shortcuts: Shortcuts | None = None
        self._constants: dict[Any, Tensor] = {}
        self._seen: dict[Any, tuple[Tensor, ...]] = {}

    def input(self, name: str, dtype: Any, shape: Shape | None) -> Tensor:
        """Declare an input of the graph; ``dtype`` is a numpy dtype or an ONNX element type."""
        if name in self.inputs:
            raise GraphError(
                f"the graph has two inputs of the name {name!r}; if one is the model's, rename it: "
                "<input>@<step> and <slot>/<parameter> are names of the training's own"
            )
        elem_type = dtype if isinstance(dtype, int) else onnx_dtype(dtype)
        tensor = Tensor(self, elem_type, shape, hint=name)
        self.inputs[name] = tensor
        return tensor

    def constant(self, value: Any, dtype: int | None = None) -> Tensor:
        """A constant; equal constants are one tensor."""
        array = np.asarray(value, dtype=None if dtype is None else numpy_dtype(dtype))
        if (
            dtype is None
            and array.dtype == np.float64
            and not isinstance(value, np.ndarray | np.generic)
        ):
            array = array.astype(np.float32)
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes())
        tensor = self._constants.get(key)
        if tensor is None:
            tensor = Tensor(self, onnx_dtype(array.dtype), array.shape, constant=array)
            self._constants[key] = tensor
        return tensor

    def bind(self, value: Host, dtype: int) -> Tensor:
        """The rank-0 input that carries a host expression in the given element type."""
        tensor = self.hosts.get((value, dtype))
        if tensor is None:
            tensor = Tensor(self, dtype, (), host=value, hint=repr(value))
            self.hosts[value, dtype] = tensor
        return tensor

    def call(
        self, op_type: str, inputs: Sequence[Any], *, outputs: int, domain: str, **attributes: Any
    ) -> Any:
        """Make a node from Python values; one tensor, or a tuple when ``outputs`` > 1."""
        schema = schemas.schema(op_type, self.opsets.get(domain, 0), domain)
        if schema is None:
            raise GraphError(schemas.unknown_operator(op_type, self.opsets.get(domain), domain))
        arguments, protos = schemas.arrange(schema, list(inputs), attributes)
        made = self.node(
            op_type, self._promote(schema, arguments), protos, outputs=outputs, domain=domain
        )
        return made[0] if outputs == 1 else made

    def node(
        self,
        op_type: str,
        inputs: Sequence[Tensor | None],
        attributes: Mapping[str, AttributeProto],
        *,
        outputs: int = 1,
        domain: str = "",
        name: str = "",
        captures: Mapping[str, Tensor] | None = None,
        types: Sequence[tuple[int, Shape | None]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Make a node, or find the equal one that is there already, or do without it.

        ``types`` are the outputs' element types and shapes where somebody knows them already;
        otherwise they are inferred.
        """
        key = None
        if not captures and op_type not in RANDOM:
            if domain == "" and outputs == 1:
                simpler = simplify(self, op_type, inputs, attributes)
                if simpler is not None:
                    return (simpler,)
            settings = tuple(sorted((k, v.SerializeToString()) for k, v in attributes.items()))
            key = (domain, op_type, outputs, tuple(map(id, inputs)), settings)
            if key in self._seen:
                return self._seen[key]
        node = Node(op_type, domain, tuple(inputs), attributes, captures or {}, name)
        if types is None:
            types = self._infer(node, outputs)
        node.outputs = tuple(
            Tensor(self, dtype, shape, node=node, index=k) for k, (dtype, shape) in enumerate(types)
        )
        self.nodes.append(node)
        if key is not None:
            self._seen[key] = node.outputs
        return node.outputs

    def more_outputs(self, node: Node, count: int) -> tuple[Tensor, ...]:
        """Ask a node that is there already for its further, optional outputs."""
        if len(node.outputs) < count:
            types = self._infer(node, count)
            new = [
                Tensor(self, dtype, shape, node=node, index=k)
                for k, (dtype, shape) in enumerate(types)
                if k >= len(node.outputs)
            ]
            node.outputs = (*node.outputs, *new)
        return node.outputs

    def _promote(self, schema: schemas.Schema, inputs: Sequence[Any]) -> list[Tensor | None]:
        """Turn numbers, arrays and host scalars into tensors of the type their place asks for."""
        formals = schema.inputs
        places = [
            formals[min(i, len(formals) - 1)] if formals else None for i in range(len(inputs))
        ]
        variadic = formals and formals[-1].option == schemas.Schema.FormalParameterOption.Variadic
        if len(inputs) > len(formals) and not variadic:
            raise GraphError(
                f"{schema.name} takes at most {len(formals)} inputs, got {len(inputs)}"
            )
        known: dict[str, int] = {}
        for place, value in zip(places, inputs, strict=True):
            if isinstance(value, Tensor) and place is not None:
                if value.trace is not self:
                    raise GraphError(f"{schema.name} mixes tensors of two graphs: {value!r}")
                known.setdefault(place.type_str, value.dtype)
        out: list[Tensor | None] = []
        for place, value in zip(places, inputs, strict=True):
            if value is None or isinstance(value, Tensor):
                out.append(value)
                continue
            wanted = None if place is None else known.get(place.type_str)
            if wanted is None and place is not None and len(place.types) == 1:
                wanted = schemas.ELEMENT_TYPES.get(next(iter(place.types)))
            if isinstance(value, Host):
                out.append(self.bind(value, TensorProto.FLOAT if wanted is None else wanted))
            elif isinstance(value, np.ndarray | np.generic):
                out.append(self.constant(value))
            else:
                out.append(self.constant(value, schemas.type_of_number(schema.name, value, wanted)))
        return out

    def _infer(self, node: Node, outputs: int) -> list[tuple[int, Shape | None]]:
        schema = schema_of(self, node)
        if schema is None:
            return [(TensorProto.UNDEFINED, None)] * outputs
        names = ["" if t is None else f"i{k}" for k, t in enumerate(node.inputs)]
        results = [f"o{k}" for k in range(outputs)]
        proto = onnx.NodeProto(
            op_type=node.op_type, domain=node.domain, input=names, output=results
        )
        proto.attribute.extend(node.attributes.values())
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for label, tensor in zip(names, node.inputs, strict=True):
            if tensor is None:
                continue
            # What comes from an operator that nobody declared is taken for float32.
            dtype = tensor.dtype or TensorProto.FLOAT
            types[label] = onnx.helper.make_tensor_type_proto(dtype, tensor.shape)
            if tensor.constant is not None and tensor.constant.size <= 64:
                data[label] = onnx.numpy_helper.from_array(tensor.constant)
        imports = [onnx.helper.make_opsetid(d, v) for d, v in self.opsets.items()]
        try:
            found = infer_node_outputs(schema, proto, types, data, opset_imports=imports)
        except (InferenceError, onnx.checker.ValidationError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise GraphError(f"{node!r} is ill-typed: {reason}") from error
        out: list[tuple[int, Shape | None]] = []
        for label in results:
            tensor_type = found[label].tensor_type if label in found else onnx.TypeProto.Tensor()
            shape: Shape | None = None
            if tensor_type.HasField("shape"):
                shape = tuple(
                    d.dim_value if d.HasField("dim_value") else (d.dim_param or None)
                    for d in tensor_type.shape.dim
                )
            out.append((tensor_type.elem_type, shape))
        if out[0][0] == TensorProto.UNDEFINED:
            raise GraphError(f"{node!r} is ill-typed: the type of its output cannot be inferred")
        return out


def schema_of(trace: Trace, node: Node) -> schemas.Schema | None:
    """The schema that a node follows in its graph, or None for an operator nobody declared."""
    return schemas.schema(node.op_type, trace.opsets.get(node.domain, 0), node.domain)
