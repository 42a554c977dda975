"""Symbolic tensors: formulas are Python functions of them, and tracing a formula creates ONNX nodes.

Nodes are created only here. A :class:`Trace` is one graph under construction; ``trace.op``
has every operator of the standard (``op.Abs(x)``), tensors have Python's arithmetic. Values have
no names until :func:`ortflex_core.build` writes them into a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, overload

import numpy as np
from onnx import AttributeProto, TensorProto

from ortflex_core.compiler.graph import inference, schemas
from ortflex_core.compiler.graph.ports import InParts, Key, Part
from ortflex_core.compiler.graph.shortcuts import Shortcuts
from ortflex_core.compiler.graph.simplify import simplify
from ortflex_core.kernel import host_scalars as host
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.types import Array, Shape, dtype_name, numpy_dtype, onnx_dtype, shape_text

if TYPE_CHECKING:
    # A stub with one method per operator; at run time they are found by name.
    from ortflex_core.compiler.graph.operators import Operators
else:
    Operators = object

Number: TypeAlias = "Tensor | Host | float | Array | np.generic"
"""The other operand of arithmetic with a tensor."""
Operand: TypeAlias = "Number | str | Sequence[Operand]"
"""An input of an operator: a tensor, or a value that becomes one."""
Inputs: TypeAlias = "Sequence[Tensor | None]"
"""The inputs of a node; an optional one that is absent is None."""

FLOATS = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
)
# Two calls of these give different values, so they are never merged.
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

    def _binary(self, op_type: str, other: Number, swap: bool = False) -> Tensor:
        if not isinstance(other, Tensor | Host | int | float | np.ndarray | np.generic):
            return NotImplemented
        operands = (other, self) if swap else (self, other)
        return self.trace.op(op_type, *operands)

    def __add__(self, other: Number) -> Tensor:
        return self._binary("Add", other)

    def __radd__(self, other: Number) -> Tensor:
        return self._binary("Add", other, swap=True)

    def __sub__(self, other: Number) -> Tensor:
        return self._binary("Sub", other)

    def __rsub__(self, other: Number) -> Tensor:
        return self._binary("Sub", other, swap=True)

    def __mul__(self, other: Number) -> Tensor:
        return self._binary("Mul", other)

    def __rmul__(self, other: Number) -> Tensor:
        return self._binary("Mul", other, swap=True)

    def __truediv__(self, other: Number) -> Tensor:
        return self._binary("Div", other)

    def __rtruediv__(self, other: Number) -> Tensor:
        return self._binary("Div", other, swap=True)

    def __pow__(self, other: Number) -> Tensor:
        return self._binary("Pow", other)

    def __matmul__(self, other: Number) -> Tensor:
        return self._binary("MatMul", other)

    def __lt__(self, other: Number) -> Tensor:
        return self._binary("Less", other)

    def __gt__(self, other: Number) -> Tensor:
        return self._binary("Greater", other)

    def __le__(self, other: Number) -> Tensor:
        return self._binary("LessOrEqual", other)

    def __ge__(self, other: Number) -> Tensor:
        return self._binary("GreaterOrEqual", other)

    def __neg__(self) -> Tensor:
        return self.trace.op.Neg(self)

    def __abs__(self) -> Tensor:
        return self.trace.op.Abs(self)


class Node:
    """One operator call; ``captures`` are outer values that its subgraphs read, by their name.

    ``part`` is the part of a training step that it belongs to (:meth:`Trace.part`). ``stops`` marks
    a node whose outputs are constants for differentiation (:meth:`Ops.stop_gradient`).
    """

    __slots__ = (
        *("attributes", "captures", "domain", "inputs", "name", "op_type", "outputs", "part"),
        "stops",
    )

    def __init__(
        self,
        op_type: str,
        domain: str,
        inputs: tuple[Tensor | None, ...],
        attributes: Mapping[str, AttributeProto],
        captures: Mapping[str, Tensor],
        name: str = "",
        part: Part | None = None,
    ) -> None:
        self.part = part
        self.op_type = op_type
        self.domain = domain
        self.inputs = inputs
        self.attributes = attributes
        self.captures = captures
        self.name = name
        self.outputs: tuple[Tensor, ...] = ()
        self.stops = False

    @property
    def arguments(self) -> Iterable[Tensor]:
        """Every value the node depends on."""
        return (*(i for i in self.inputs if i is not None), *self.captures.values())

    def __repr__(self) -> str:
        return f"{self.op_type}({', '.join(map(repr, self.inputs))})"


class Ops(Operators):
    """The operators of ONNX as functions of tensors, for formulas: ``op.Abs(x)``.

    Numbers get the type of the tensor operands; arrays keep theirs. An argument that is an input in
    newer opsets and an attribute in older ones (``axes``) is passed by keyword in both:
    ``op.ReduceMax(x, axes=[1], keepdims=0)``. ``outputs=n`` requests n outputs, ``domain=`` an
    operator outside the standard. If all operands are host scalars, the result is a host scalar.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def opset(self) -> int:
        """Version of the standard operators in this graph."""
        return self._trace.opsets[""]

    if not TYPE_CHECKING:  # a misspelt operator is an error there

        def __getattr__(self, op_type: str) -> Any:
            if op_type.startswith("_"):
                raise AttributeError(op_type)
            return functools.partial(self, op_type)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *schemas.operator_names(self.opset)})

    def constant(self, value: Any, dtype: int | None = None) -> Tensor:
        """A constant tensor; ``dtype`` is an ONNX element type."""
        return self._trace.constant(value, dtype)

    def stop_gradient(self, x: Tensor) -> Tensor:
        """The value of ``x``, which is a constant for differentiation.

        For parts of a formula that are chosen, not learned: the assignment of boxes to anchors, the
        labels that a model computes for itself.
        """
        return self._trace.stopped(x)

    @overload
    def __call__(
        self,
        op_type: str,
        *inputs: Any,
        outputs: Literal[1] = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Tensor: ...
    @overload
    def __call__(
        self, op_type: str, *inputs: Any, outputs: int, domain: str = "", **attributes: Any
    ) -> tuple[Tensor, ...]: ...
    def __call__(
        self, op_type: str, *inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> Any:
        """The operator ``op_type``; a tuple of tensors when ``outputs`` > 1."""
        hosts = domain == "" and op_type in host.OPERATORS and not attributes
        known = all(isinstance(i, Host | int | float) for i in inputs)
        if hosts and known and any(isinstance(i, Host) for i in inputs):
            return Host.apply(op_type, *inputs)
        return self._trace.call(op_type, inputs, outputs=outputs, domain=domain, **attributes)


class Mark(NamedTuple):
    """A point in the construction of a trace, see :meth:`Trace.rewind`."""

    nodes: int
    hosts: int
    seen: int


class Trace(InParts):
    """One graph under construction.

    >>> trace = Trace({"": 17})
    >>> x = trace.input("x", np.float32, ("N", 3))
    >>> trace.op.Abs(x) * 2 + 1
    <Add: float32[N, 3]>
    """

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self.opsets = dict(opsets)
        self.nodes: list[Node] = []
        self.inputs: dict[Key, Tensor] = {}
        self.hosts: dict[tuple[Host, int], Tensor] = {}
        # Host symbols whose values the graph computes: float64 tensors of rank 0.
        self.symbols: dict[str, Tensor] = {}
        self.op = Ops(self)
        self.shortcuts: Shortcuts | None = None
        self.unrolled_copies = 1  # of the body of a loop that is being unrolled
        # The nodes of all loops unrolled so far, one number that traces inside this one share.
        self.unrolled_nodes = [0]
        # Nodes that were differentiated through their function bodies.
        self.by_body: list[Node] = []
        self._constants: dict[Any, Tensor] = {}
        self._seen: dict[Any, tuple[Tensor, ...]] = {}

    def input(self, key: Key, dtype: Any, shape: Shape | None) -> Tensor:
        """Declare an input of the graph; ``dtype`` is a numpy dtype or an ONNX element type.

        ``key`` is the port of the input, or its required name.
        """
        if key in self.inputs:
            raise GraphError(f"the graph has two inputs named {key!r}")
        elem_type = dtype if isinstance(dtype, int) else onnx_dtype(dtype)
        tensor = Tensor(self, elem_type, shape, hint=key if isinstance(key, str) else key.label)
        self.inputs[key] = tensor
        return tensor

    def constant(self, value: Any, dtype: int | None = None) -> Tensor:
        """A constant; equal constants are one tensor.

        Python's floats are float32, its integers int64. An empty list is int64, too: no axes, the
        shape of a scalar.
        """
        array = np.asarray(value, dtype=None if dtype is None else numpy_dtype(dtype))
        if (
            dtype is None
            and array.dtype == np.float64
            and not isinstance(value, np.ndarray | np.generic)
        ):
            array = array.astype(np.float32 if array.size else np.int64)
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes())
        tensor = self._constants.get(key)
        if tensor is None:
            tensor = Tensor(self, onnx_dtype(array.dtype), array.shape, constant=array)
            self._constants[key] = tensor
        return tensor

    def bind(self, value: Host, dtype: int) -> Tensor:
        """The rank-0 input that carries a host expression in the given element type.

        If the graph computes one of its symbols (:attr:`symbols`), it is computed by float64 nodes.
        """
        if self.symbols and not value.symbols.isdisjoint(self.symbols):
            made = host.HostNodes(self._symbol, self._double, self.op).value(value)
            return made if made.dtype == dtype else self.op.Cast(made, to=dtype)
        tensor = self.hosts.get((value, dtype))
        if tensor is None:
            tensor = Tensor(self, dtype, (), host=value, hint=repr(value))
            self.hosts[value, dtype] = tensor
        return tensor

    def _symbol(self, name: str) -> Tensor:
        """The value of a host symbol as a float64 tensor."""
        known = self.symbols.get(name)
        return self.bind(Host.symbol(name), TensorProto.DOUBLE) if known is None else known

    def _double(self, value: float) -> Tensor:
        return self.constant(value, TensorProto.DOUBLE)

    def call(
        self, op_type: str, inputs: Sequence[Any], *, outputs: int, domain: str, **attributes: Any
    ) -> Any:
        """Create a node from Python values; one tensor, or a tuple when ``outputs`` > 1."""
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
        """Create a node, or return the tensors of an equal node or of a simplification.

        ``types`` are the outputs' element types and shapes where they are known; otherwise they are
        inferred.
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
        node = Node(
            op_type, domain, tuple(inputs), attributes, captures or {}, name, self.current_part
        )
        if types is None:
            types = inference.output_types(self, node, outputs)
        node.outputs = tuple(
            Tensor(self, dtype, shape, node=node, index=k) for k, (dtype, shape) in enumerate(types)
        )
        self.nodes.append(node)
        if key is not None:
            self._seen[key] = node.outputs
        return node.outputs

    def stopped(self, x: Tensor) -> Tensor:
        """An Identity that ends every path of a gradient; it disappears when the graph is optimized."""
        key = ("stop_gradient", id(x))
        if x.constant is not None or x.host is not None:
            return x
        if key not in self._seen:
            node = Node("Identity", "", (x,), {}, {}, part=self.current_part)
            node.stops = True
            node.outputs = (Tensor(self, x.dtype, x.shape, node=node),)
            self.nodes.append(node)
            self._seen[key] = node.outputs
        return self._seen[key][0]

    def more_outputs(self, node: Node, count: int) -> tuple[Tensor, ...]:
        """Add optional outputs to an existing node."""
        if len(node.outputs) < count:
            types = inference.output_types(self, node, count)
            new = [
                Tensor(self, dtype, shape, node=node, index=k)
                for k, (dtype, shape) in enumerate(types)
                if k >= len(node.outputs)
            ]
            node.outputs = (*node.outputs, *new)
        return node.outputs

    def mark(self) -> Mark:
        """The present point, for :meth:`rewind`."""
        return Mark(len(self.nodes), len(self.hosts), len(self._seen))

    def rewind(self, mark: Mark) -> None:
        """Remove all nodes and host scalars created since a point; their tensors must not be used again."""
        del self.nodes[mark.nodes :]
        for table, size in ((self.hosts, mark.hosts), (self._seen, mark.seen)):
            while len(table) > size:
                table.popitem()

    def _promote(self, schema: schemas.Schema, inputs: Sequence[Any]) -> list[Tensor | None]:
        """Convert numbers, arrays and host scalars to tensors of the types that the schema requires."""
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
        given = [i for i in inputs if isinstance(i, Tensor) and i.dtype == TensorProto.BOOL]
        for place, value in zip(places, inputs, strict=True):
            # Where(g > 0, self.up, 1.0) has the type of g.
            real = isinstance(value, Host | float) and not isinstance(value, np.generic)
            if not (real and given) or place is None or len(place.types) == 1:
                continue
            if place.type_str not in known and (dtype := _float_behind(given)) is not None:
                known[place.type_str] = dtype
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


def _float_behind(tensors: Sequence[Tensor]) -> int | None:
    """The float type of some tensors, or of those that they are computed from; None if they differ."""
    found: set[int] = set()
    pending, done = list(tensors), set[int]()
    while pending:
        tensor = pending.pop()
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        if tensor.dtype in FLOATS:
            found.add(tensor.dtype)
        elif tensor.node is not None:
            pending.extend(tensor.node.arguments)
    return found.pop() if len(found) == 1 else None
