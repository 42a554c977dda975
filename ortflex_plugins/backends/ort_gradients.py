"""Obstacles between a problem and onnxruntime's own gradient builder, and ways around them.

The builder is fast and mostly correct, but for some operators and attributes it raises, aborts the
process, or silently returns wrong gradients. The backends that rely on it call this module first:
:func:`rewrite` replaces nodes by operators that the builder differentiates correctly,
:func:`reasons` refuses the rest. The correct cases were found by tests: see
:mod:`ortflex_plugins.backends.ort_gradients_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from ortflex_core import (
    GraphError,
    Model,
    Modes,
    Problem,
    Program,
    Rewrite,
    Runtime,
    Tensor,
    TensorSpec,
    Trace,
    captured_names,
    dtype_name,
    forward_program,
    inactive_dropout,
    ports_of,
    reads,
    trains_statistics,
)
from ortflex_plugins.backends.ort_gradients_rewrites import RULES
from ortflex_plugins.backends.ort_gradients_table import (
    DISCRETE,
    FLAT,
    FLOATS,
    TABLE,
    VIEWS,
    Entry,
    View,
    attributes_of,
)

_COUNTED = ("MaxPool", "Split")


@attrs.frozen
class Obstacle:
    """A node that the builder cannot differentiate, and the parameters before it."""

    text: str
    node: NodeProto | None = None
    before: tuple[str, ...] = ()


def reasons(problem: Problem, runtime: Runtime) -> list[str]:
    """The reasons why onnxruntime's builder cannot train a problem correctly, one line per obstacle.

    The graph that is checked is the one that would be trained, after :func:`rewrite`.
    """
    blocked = precision_reasons(problem) or _modes(problem)
    if blocked:
        return blocked
    try:
        program = forward_program(problem, rewrite(problem))
    except GraphError as error:
        return [str(error)]
    outputs = [o.name for o in program.outputs]
    names = names_of(program, problem.parameters)
    obstacle_list = obstacles(program.proto(), names, outputs, runtime)
    return [f"{o.text}. {help_for(problem, o)}".rstrip() for o in obstacle_list]


def precision_reasons(problem: Problem) -> list[str]:
    """Why a gradient that onnxruntime builds does not have the problem's precision."""
    if not problem.is_lowered or problem.precision is None:
        return []
    return [
        "onnxruntime builds the backward pass itself, without the casts of precision = "
        f"{problem.precision.name!r}"
    ]


def names_of(program: Program, parameters: Iterable[str]) -> list[str]:
    """The names of the parameters in a program's graph."""
    takes, ports = program.takes, ports_of("parameter", parameters)
    return [takes[port].name if port in takes else name for name, port in ports.items()]


def help_for(problem: Problem, obstacle: Obstacle) -> str:
    """What a user can do about an obstacle."""
    ways = []
    if "fused" in problem.plugins["backends"]:
        ways.append("use backend='fused'")
    if obstacle.before and set(obstacle.before) != set(problem.parameters):
        left_out = ", ".join(f"'!{name}'" for name in obstacle.before)
        if len(obstacle.before) > 4:
            first = ", ".join(map(repr, obstacle.before[:3]))
            ways.append(f"leave out the {len(obstacle.before)} parameters before it ({first}, …)")
        else:
            ways.append(f"leave out the parameters before it: params=['*', {left_out}]")
    text = ", or ".join(ways)
    return text[:1].upper() + text[1:]


def _modes(problem: Problem) -> list[str]:
    """Dropout and BatchNormalization in training mode, wherever they are."""
    lines = []
    if problem.observing:
        lines.append("quantize.observe: the scales would not follow the batches; leave observe out")
    fused = ", or use backend='fused'" if "fused" in problem.plugins["backends"] else ""
    for node in problem.model.ancestors(problem.predicted):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Dropout" and not inactive_dropout(problem, node):
            lines.append(f"{describe(node)} is in training mode; set dropout='off'{fused}")
        elif node.op_type == "BatchNormalization" and trains_statistics(problem, node):
            lines.append(
                f"{describe(node)}: the running statistics would not be updated; "
                f"set batch_norm='freeze'{fused}"
            )
    return lines


def describe(node: NodeProto) -> str:
    """A node in messages: its name, its operator and its output."""
    name = f"node {node.name!r}" if node.name else "a node"
    domain = f"{node.domain}." if node.domain else ""
    return f"{name} ({domain}{node.op_type}, output {node.output[0]!r})"


def rewrite(problem: Problem) -> Rewrite:
    """Replace nodes that the builder differentiates incorrectly by equivalent ones.

    For :meth:`ortflex_core.compiler.model.Model.replay`. Frozen BatchNormalization and inactive Dropout
    are replaced everywhere, as the builder would switch them to training; other nodes only where
    a parameter reaches them.
    """
    modes = Modes(problem, {})
    others = replacing(problem.model, problem.parameters, problem.predicted)

    def replace(
        trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        if node.domain in ("", "ai.onnx"):
            if node.op_type == "Dropout":
                return modes(trace, node, inputs)
            if node.op_type == "BatchNormalization":
                return None if trains_statistics(problem, node) else modes(trace, node, inputs)
        return others(trace, node, inputs)

    return replace


def replacing(model: Model, wrt: Iterable[str], outputs: Iterable[str]) -> Rewrite:
    """The rewrites that do not depend on modes, of the nodes between ``wrt`` and ``outputs``."""
    reached = set(wrt)
    for node in model.ancestors(outputs):
        if reached.intersection(reads(node)):
            reached.update(node.output)

    def replace(
        trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if rule is None or not reached.intersection(node.input):
            return None
        count = len([o for o in node.output if o])
        extra = {"count": count} if node.op_type in _COUNTED else {}
        replacement = rule(trace.op, attributes_of(node), *inputs, **extra)
        return (replacement,) if isinstance(replacement, Tensor) else replacement

    return replace


def operators_without_gradient(
    program: ModelProto, wrt: Iterable[str], output: str, runtime: Runtime
) -> list[str]:
    """Check every node between ``wrt`` and a scalar of a finished graph: one line for each obstacle.

    For TrainingSession, which differentiates float32 only.

    >>> runtime = Runtime(
    ...     distribution="onnxruntime-training", version="1.16.3", max_opset=19, max_ir=9
    ... )
    >>> graph = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     f (float[2] w) => (float y) { a = Atan (w)  y = ReduceSum <keepdims = 0> (a) }''')
    >>> [text] = operators_without_gradient(graph, ["w"], "y", runtime)
    >>> text[:62]
    "a node (Atan, output 'a'): the gradient builder of onnxruntime"
    """
    return [o.text for o in obstacles(program, wrt, (output,), runtime, float64=False)]


def obstacles(
    program: ModelProto,
    wrt: Iterable[str],
    outputs: Iterable[str],
    runtime: Runtime,
    float64: bool = True,
    updates: bool = True,
) -> list[Obstacle]:
    """The obstacles to the builder's gradients of ``outputs`` with respect to ``wrt``.

    With ``updates``, ``wrt`` are parameters that the runtime may change within a run.
    """
    check = _Check(program, tuple(wrt), tuple(outputs), runtime, float64)
    return check.run(updates)


class _Check:
    def __init__(
        self,
        program: ModelProto,
        wrt: tuple[str, ...],
        outputs: tuple[str, ...],
        runtime: Runtime,
        float64: bool,
    ) -> None:
        self._wrt = wrt
        self._outputs = outputs
        self._runtime = runtime
        self._float64 = float64
        graph = onnx.shape_inference.infer_shapes(program, data_prop=True).graph
        self._nodes = graph.node
        self._specs = {
            v.name: TensorSpec.from_proto(v)
            for v in (*graph.input, *graph.value_info, *graph.output)
            if v.type.HasField("tensor_type")
        }
        self._constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        for name, array in self._constants.items():
            dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            self._specs[name] = TensorSpec(name, dtype, array.shape)
        self._opset = next(o.version for o in program.opset_import if o.domain == "")
        self._before: dict[str, dict[str, None]] = {name: {name: None} for name in wrt}
        self._used = set(outputs)
        self._shared = set(wrt)

    def _places(self, node: NodeProto) -> list[int]:
        """The inputs through which a gradient may flow back."""
        if node.domain == "" and node.op_type in DISCRETE:
            return []
        if node.op_type == "Cast" and attributes_of(node).get("to") not in _ALL_FLOATS:
            return []
        entry = _entry(node)
        discrete = entry.discrete if entry is not None else ()
        return [k for k, name in enumerate(node.input) if name and k not in discrete]

    def _flow(self, node: NodeProto) -> set[str]:
        """The values that a gradient may flow back to, those that subgraphs read included."""
        return {node.input[k] for k in self._places(node)} | set(captured_names(node))

    def run(self, updates: bool = True) -> list[Obstacle]:
        """Mark what parameters reach, then what the outputs need, then check."""
        for node in self._nodes:
            reached = {p: None for name in self._flow(node) for p in self._before.get(name, ())}
            if reached:
                self._before.update((o, reached) for o in node.output if o)
            if node.op_type in VIEWS and node.input[0] in self._shared:
                self._shared.update(node.output)
        for node in reversed(self._nodes):
            if self._used.intersection(node.output):
                self._used |= self._flow(node)
        if not updates:
            self._shared.clear()
        problems = []
        readers: dict[str, list[NodeProto]] = {}
        for node in self._nodes:
            active = self._before.keys() & self._flow(node)
            if not active or not self._used.intersection(node.output):
                continue
            for name in active.intersection(self._wrt):
                readers.setdefault(name, []).append(node)
            text = self._wrong(node)
            if text is not None:
                before = tuple(self._before[node.output[0]])
                problems.append(Obstacle(f"{describe(node)}: {text}", node, before))
        return [*problems, *_twice(readers), *([] if problems else self._unreached())]

    def _wrong(self, node: NodeProto) -> str | None:
        active = frozenset(k for k in self._places(node) if node.input[k] in self._before)
        builder = f"the gradient builder of {self._runtime}"
        entry = _entry(node)
        if node.domain == "" and node.op_type in FLAT:
            return "its derivative is zero almost everywhere, so nothing trains through it"
        if entry is None:
            return f"{builder} has no correct gradient for this operator"
        for place in sorted(active):
            if entry.differentiable is not None and place not in entry.differentiable:
                return f"{builder} has no gradient for its input {node.input[place]!r}"
        for name in (*(node.input[k] for k in active), node.output[0]):
            dtype = self._specs[name].dtype if name in self._specs else TensorProto.UNDEFINED
            if dtype not in FLOATS:
                return f"{name!r} is {dtype_name(dtype)}, float32 and float64 can be trained"
            if dtype == TensorProto.DOUBLE and not self._float64:
                return f"{name!r} is float64, TrainingSession trains float32 only"
            if dtype == TensorProto.DOUBLE and not entry.float64:
                return f"{builder} has no float64 kernels for it"
        view = View(
            node=node,
            opset=self._opset,
            specs=self._specs,
            constants=self._constants,
            active=active,
            parameters=frozenset(self._shared),
            used=frozenset(self._used),
        )
        text = entry.check(view) if entry.check is not None else None
        return text or self._merged(node)

    def _merged(self, node: NodeProto) -> str | None:
        """Whether onnxruntime may merge a slice into one Split with others that have no gradient."""
        if node.op_type not in ("Gather", "Slice"):
            return None
        for other in self._nodes:
            if (other.op_type, other.input[:1]) != (node.op_type, node.input[:1]):
                continue
            if other.output[0] not in self._used:
                return (
                    f"onnxruntime 1.19 merges it with {describe(other)}, which has no gradient, "
                    "and the gradient of both together is wrong"
                )
        return None

    def _unreached(self) -> list[Obstacle]:
        return [
            Obstacle(
                f"the parameter {name!r} does not reach {', '.join(map(repr, self._outputs))} "
                "through operators with a derivative",
                before=(name,),
            )
            for name in self._wrt
            if name not in self._used
        ]


def _twice(readers: dict[str, list[NodeProto]]) -> list[Obstacle]:
    """Parameters that one node reads twice and no other node reads: two gradients of one name."""
    return [
        Obstacle(f"{describe(nodes[0])}: the builder fails where {name!r} alone is both inputs")
        for name, nodes in readers.items()
        if len(nodes) == 1 and list(nodes[0].input).count(name) > 1
    ]


def _entry(node: NodeProto) -> Entry | None:
    return TABLE.get(node.op_type) if node.domain == "" else None


_ALL_FLOATS = (*FLOATS, TensorProto.FLOAT16, TensorProto.BFLOAT16)
