"""Programs as functions over arrays: every node through the table of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from ortflex_core import (
    AGAIN,
    Program,
    body_of,
    changed_attributes,
    is_copy,
    onnx_dtype,
    repeat_forward,
)
from ortflex_plugins.operators import control, elementwise, indexing, products, reductions, shapes
from ortflex_plugins.operators.calls import Call, NotTranslatable, Operator, Value
from ortflex_plugins.operators.numpy_forms import NumpyForms

_FAMILIES = (elementwise, shapes, reductions, products, indexing, control)
OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {name: f for family in _FAMILIES for name, f in family.TABLE.operators.items()}
)
"""All operators of the standard with a direct translation; others are translated by their function body."""
DECLARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: names for family in _FAMILIES for name, names in family.TABLE.declared.items()}
)
"""The attributes of operators that their functions need not read."""
_KNOWN = NumpyForms()
M = TypeVar("M")
T = TypeVar("T")


class Translation:
    """A program as a function of arrays, on numpy, JAX, or the arrays of C.

    >>> import numpy as np
    >>> from ortflex_core import Trace, build
    >>> trace = Trace({"": 17})
    >>> x = trace.input("x", np.float32, (3,))
    >>> program = build(trace, {"y": trace.op.Abs(x)}, name="abs")
    >>> Translation(program, NumpyForms())({"x": np.float32([-1, 2, -3])})["y"]
    array([1., 2., 3.], dtype=float32)
    """

    def __init__(self, program: Program, forms: Any) -> None:
        self.program = program
        self._model = _Model(repeat_forward(program), forms)
        self._names = [spec.name for spec in program.outputs]

    def __call__(self, feeds: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs by name.

        Raises:
            NotTranslatable: an operator or a form of it that the table does not have.
        """
        values = self._model.run(self._model.proto.graph, dict(feeds), {})
        return dict(zip(self._names, values, strict=True))


class ModelFunction:
    """An ONNX model as a function of its inputs by position, for the tests of the table."""

    def __init__(self, model: onnx.ModelProto, forms: Any) -> None:
        self._model = _Model(model, forms)

    def __call__(self, inputs: Sequence[Value]) -> list[Value]:
        """The outputs in order."""
        names = [i.name for i in self._model.proto.graph.input]
        feeds = dict(zip(names, inputs, strict=False))
        return self._model.run(self._model.proto.graph, feeds, {})


class _Model:
    """The nodes of a model, read once."""

    def __init__(self, proto: onnx.ModelProto, forms: Any) -> None:
        self.proto, self.forms = proto, forms
        self.opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
        self._known: dict[tuple[str, int], Any] = {}
        self._alive: list[Any] = []

    def run(
        self, graph: GraphProto, feeds: Mapping[str, Value], outer: Mapping[str, Value]
    ) -> list[Value]:
        """The outputs of a graph; ``outer`` are values of the graphs around it."""
        values = {**outer, **self._once(_initializers, graph), **feeds}
        self._nodes(graph.node, values)
        return [values[o.name] for o in graph.output]

    def _nodes(self, nodes: Any, values: dict[str, Value]) -> None:
        latest: Value = None  # the last result that is not computed a second time
        for node in nodes:
            if is_copy(node):
                results = self._node(node, self._delayed(node, values, latest))
            else:
                results = self._node(node, values)
                latest = next(filter(_is_traced, results), latest)
            values.update((n, v) for n, v in zip(node.output, results, strict=False) if n)

    def _delayed(self, node: NodeProto, values: dict[str, Value], gate: Value) -> dict[str, Value]:
        """The inputs of a node that is computed a second time, one of them known only after ``gate``.

        The compiler would merge the node with the first one otherwise.
        """
        names = [n for n in node.input if n and _is_traced(values[n])]
        if not names or gate is None or any(n.endswith(AGAIN) for n in names):
            return values
        return {**values, names[0]: self.forms.after(values[names[0]], gate)}

    def _once(self, read: Callable[[M], T], message: M) -> T:
        """What a function reads from a graph or a node, which is kept alive, because its id is the key."""
        key = read.__name__, id(message)  # a bound method would keep this object alive
        if key not in self._known:
            self._alive.append(message)
            self._known[key] = read(message)
        found: T = self._known[key]
        return found

    def _node(self, node: NodeProto, values: dict[str, Value]) -> Sequence[Value]:
        inputs = [values[name] if name else None for name in node.input]
        function = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if function is None:
            return self._by_body(node, inputs)
        attributes = self._once(_settings, node)
        known = all(isinstance(v, np.ndarray) for v in inputs if v is not None)
        outputs = len(node.output)
        while outputs > 1 and not node.output[outputs - 1]:
            outputs -= 1

        def run(graph: GraphProto, arguments: Sequence[Value]) -> list[Value]:
            names = [i.name for i in graph.input]
            return self.run(graph, dict(zip(names, arguments, strict=True)), values)

        forms = self.forms
        if known and not _reads_outside(attributes):
            forms = _KNOWN
        call = Call(
            name=node.op_type,
            attributes=attributes,
            outputs=outputs,
            opset=self.opset,
            xp=forms.xp,
            forms=forms,
            run=run,
        )
        if forms is _KNOWN:
            with np.errstate(all="ignore"):
                result = function(call, *inputs)
        else:
            result = function(call, *inputs)
        results = result if isinstance(result, tuple | list) else (result,)
        changed = self._once(self._changed, node)
        if left := changed - call.asked - set(DECLARED.get(node.op_type, ())):
            raise NotTranslatable(
                f"the operator {node.op_type} with the attribute {min(left)!r} at another value than "
                "its default"
            )
        return [np.asarray(r) if isinstance(r, np.generic) else r for r in results]

    def _by_body(self, node: NodeProto, inputs: list[Value]) -> Sequence[Value]:
        """The function body that the standard defines for a node."""
        types = [
            None
            if v is None
            else onnx.helper.make_tensor_type_proto(onnx_dtype(np.dtype(v.dtype)), v.shape)
            for v in inputs
        ]
        body = body_of(node, self.opset, types)
        if body is None:
            domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
            raise NotTranslatable(f"the operator {domain}{node.op_type}")
        self._alive.append(body)
        values = dict(zip(body.input, inputs, strict=False))
        values |= dict.fromkeys(body.input[len(inputs) :])
        values = {name: v for name, v in values.items() if v is not None}
        present = _Absent(values)
        self._nodes(body.node, present)
        return [present.get(name) for name in body.output]

    def _changed(self, node: NodeProto) -> frozenset[str]:
        """The attributes that are not at their defaults."""
        return frozenset(changed_attributes(node.attribute, node.op_type, self.opset))


class _Absent(dict[str, Value]):
    """The values of a function body, in which a formal input may be left out."""

    def __missing__(self, key: str) -> Value:
        return None


def _initializers(graph: GraphProto) -> dict[str, Value]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}


def _settings(node: NodeProto) -> dict[str, Any]:
    return {a.name: _value(a) for a in node.attribute}


def _is_traced(value: Value) -> bool:
    """Whether a value is a tensor with elements that are unknown before a run."""
    return not isinstance(value, np.ndarray | list | None) and value.size > 0


def _reads_outside(attributes: Mapping[str, Any]) -> bool:
    """Whether a node has subgraphs, which may read values of a run."""
    return any(isinstance(v, GraphProto) for v in attributes.values())


def _value(attribute: AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if attribute.type == AttributeProto.TENSOR:
        return onnx.numpy_helper.to_array(value)
    if attribute.type == AttributeProto.GRAPH:
        return value
    if not isinstance(value, float | int | str):
        return [v.decode() if isinstance(v, bytes) else v for v in value]
    return value
