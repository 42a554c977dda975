"""Reverse-mode differentiation of a traced graph.

The walk is in this module, the formulas are in plugins: a rule gets ``op``, a view of its node and
one cotangent per output, and returns one entry per input (see
:class:`ortflex_core.Rules`). Only nodes between ``wrt`` and the roots are visited.

Source of the method: Griewank and Walther, "Evaluating Derivatives" (2nd ed., 2008), §3.2;
the table of rules with one shared ``unbroadcast`` is autograd's idea.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from ortflex_core.compiler.graph.inference import schema_of
from ortflex_core.compiler.graph.ops import Inputs, Node, Ops, Tensor, Trace
from ortflex_core.compiler.graph.schemas import changed_attributes
from ortflex_core.compiler.operators import function_bodies
from ortflex_core.compiler.operators.cotangents import full, unbroadcast
from ortflex_core.compiler.operators.gradient_rules import Gradient as Gradient
from ortflex_core.compiler.operators.gradient_rules import Rule as Rule
from ortflex_core.compiler.operators.gradient_rules import Rules as Rules
from ortflex_core.compiler.operators.gradient_rules import RuleTable as RuleTable
from ortflex_core.kernel.errors import (
    GraphError,
    NoGradientRule,
    NotDifferentiable,
    OrtflexError,
    PluginError,
    describe_error,
)
from ortflex_core.kernel.types import dtype_name, shape_text

_UNDEFINED = onnx.TensorProto.UNDEFINED


class NodeView:
    """The view of a node that its rule gets."""

    __slots__ = ("_asked", "_node", "_rules", "_wanted", "inputs", "outputs", "trace")

    def __init__(self, trace: Trace, node: Node, wanted: frozenset[int], rules: RuleTable) -> None:
        self.trace = trace
        self._node = node
        self._wanted = wanted
        self._rules = rules
        self._asked: set[str] = set()
        # Any instead of Tensor | None, because the author of a rule knows which inputs may be omitted.
        self.inputs: tuple[Any, ...] = node.inputs
        self.outputs = node.outputs

    def __getattr__(self, name: str) -> Any:
        """An attribute of the operator, with the schema's default; None if it has neither."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._asked.add(name)
        proto = self._node.attributes.get(name)
        if proto is None:
            schema = schema_of(self.trace, self._node)
            declared = schema.attributes.get(name) if schema is not None else None
            proto = declared.default_value if declared is not None else None
            if proto is None or proto.type == onnx.AttributeProto.UNDEFINED:
                return None
        value = onnx.helper.get_attribute_value(proto)
        return value.decode() if isinstance(value, bytes) else value

    def settings(self, *names: str) -> dict[str, Any]:
        """Some attributes by their names, to be passed to another node."""
        return {name: getattr(self, name) for name in names}

    def check_read(self) -> None:
        """Refuse a node with an attribute that the rule neither asked for nor declares.

        An operator gets new attributes in new opsets, and the rule of an old one would ignore them.

        Raises:
            NoGradientRule: the attribute, which is not at its default, and its value.
        """
        node = self._node
        read = self._asked | self._rules.attributes(node.domain, node.op_type)
        opset = self.trace.opsets.get(node.domain, 0)
        given = [proto for name, proto in node.attributes.items() if name not in read]
        for name, value in changed_attributes(given, node.op_type, opset, node.domain).items():
            raise NoGradientRule(f"with the attribute {name} = {value!r}, which its rule ignores")

    @property
    def op_type(self) -> str:
        """The operator's name."""
        return self._node.op_type

    @property
    def captures(self) -> Mapping[str, Tensor]:
        """Outer values that the node's subgraphs read, by the names they have there.

        A rule returns their gradients after those of its inputs, in this order.
        """
        return self._node.captures

    def input(self, index: int) -> Any:
        """An input, or None if the node omits it."""
        return self.inputs[index] if index < len(self.inputs) else None

    def needs(self, index: int) -> bool:
        """Whether the gradient of this input (or, counted on, this capture) is needed."""
        return index in self._wanted

    def more_outputs(self, count: int) -> tuple[Tensor, ...]:
        """The node's outputs, optional ones included, up to ``count``."""
        self.outputs = self.trace.more_outputs(self._node, count)
        return self.outputs

    def replace(self, attributes: Mapping[str, Any], more: Sequence[Tensor]) -> None:
        """Replace the subgraphs of the node by larger ones, which compute ``more`` outputs."""
        self._node.attributes = {**self._node.attributes, **attributes}
        self._node.outputs = self.outputs = (*self._node.outputs, *more)
        for index, output in enumerate(more, start=len(self.outputs) - len(more)):
            output.node, output.index = self._node, index

    def differentiate(
        self, roots: Sequence[tuple[Tensor, Tensor | None]], wrt: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Gradients by ``wrt`` in the graph (or subgraph) of the roots; None without a gradient."""
        return (
            _independent_gradients(roots, wrt, self._rules) if roots and wrt else [None] * len(wrt)
        )

    def through(self, outputs: Sequence[Tensor], *gs: Tensor | None) -> list[Gradient]:
        """The gradients of a rule, computed through an equivalent formula of other operators.

        For an operator that the standard defines by simpler operators: ``outputs`` are traced from
        ``inputs`` with the simpler operators, and differentiated by their rules.
        """
        pairs = [(y, g) for y, g in zip(outputs, gs, strict=False) if g is not None]
        wanted = {id(self.inputs[k]): self.inputs[k] for k in sorted(self._wanted)}
        found = _independent_gradients(pairs, list(wanted.values()), self._rules)
        gradients_by_id = dict(zip(wanted, found, strict=True))
        # An input that is used in two places occurs once: its gradient is the sum of both.
        return [
            gradients_by_id.pop(id(i), None) if k in self._wanted else None
            for k, i in enumerate(self.inputs)
        ]


def gradients(
    roots: Sequence[tuple[Tensor, Tensor | None]], wrt: Sequence[Tensor], rules: RuleTable
) -> list[Tensor]:
    """Gradients of Σ⟨seed, root⟩ with respect to ``wrt``, each of its tensor's shape.

    Args:
        roots: pairs (tensor, seed); a seed has the shape of its root or broadcasts to it, and
            None stands for 1.
        wrt: the tensors to differentiate by.
        rules: the gradient rules.

    Raises:
        NoGradientRule: an operator on the path has no rule.
        NotDifferentiable: every path from one of ``wrt`` ends at an operator without a gradient.
        GraphError: one of ``wrt`` does not reach a root at all.
    """
    return [found for _, found in _gradients(roots, wrt, rules, every=True)]


def gradients_of_some(
    roots: Sequence[tuple[Tensor, Tensor | None]], wrt: Sequence[Tensor], rules: RuleTable
) -> list[tuple[Tensor, Tensor]]:
    """Those of ``wrt`` that have a gradient, each with it; as :func:`gradients` if none of them has one."""
    return _gradients(roots, wrt, rules, every=False)


def _gradients(
    roots: Sequence[tuple[Tensor, Tensor | None]],
    wrt: Sequence[Tensor],
    rules: RuleTable,
    every: bool,
) -> list[tuple[Tensor, Tensor]]:
    if not roots:
        raise GraphError("nothing to differentiate: expected at least one root, got none")
    nodes = _nodes_between(roots[0][0].trace, [root for root, _ in roots], wrt)
    collected, stopped = _walk(roots, wrt, nodes, rules)
    op = roots[0][0].trace.op
    totals = [(tensor, _total(collected.get(id(tensor)))) for tensor in wrt]
    found = [(tensor, full(op, total, tensor)) for tensor, total in totals if total is not None]
    missing = [tensor for tensor, total in totals if total is None]
    if missing and (every or not found):
        raise _explain_missing(missing[0], nodes, stopped)
    return found


def _independent_gradients(
    roots: Sequence[tuple[Tensor, Tensor | None]], wrt: Sequence[Tensor], rules: RuleTable
) -> list[Tensor | None]:
    """Gradients by ``wrt``, whose tensors are treated as independent; None without a gradient."""
    nodes = _nodes_between(roots[0][0].trace, [root for root, _ in roots], wrt, cut=True)
    collected, _ = _walk(roots, wrt, nodes, rules)
    return [_total(collected.get(id(tensor))) for tensor in wrt]


def _walk(
    roots: Sequence[tuple[Tensor, Tensor | None]],
    wrt: Sequence[Tensor],
    nodes: Sequence[Node],
    rules: RuleTable,
) -> tuple[dict[int, list[Tensor]], dict[int, Node]]:
    """Contributions to the gradient of each of ``wrt``, and the nodes at which other paths ended."""
    trace = roots[0][0].trace
    op = trace.op
    live = set(map(id, wrt))
    for node in nodes:
        live.update(map(id, node.outputs))
    collected: dict[int, list[Tensor]] = {}
    asked = set(map(id, wrt))
    for root, seed in roots:
        if id(root) in live:
            collected.setdefault(id(root), []).append(
                op.constant(1.0, root.dtype) if seed is None else seed
            )
    stopped: dict[int, Node] = {}
    for node in reversed(nodes):
        arrived = [_total(collected.get(id(o))) for o in node.outputs]
        # A cotangent that has arrived is dropped, unless it is requested, as for an inner tensor.
        for output in node.outputs:
            if id(output) not in asked:
                collected.pop(id(output), None)
        if all(g is None for g in arrived):
            continue
        arguments = (*node.inputs, *node.captures.values())
        leading = [k for k, i in enumerate(arguments) if i is not None and id(i) in live]
        known, rule = rules.lookup(node.domain, node.op_type, trace.opsets.get(node.domain, 1))
        wanted = frozenset(
            k for k in leading if (rule is not None or not known) and _varies(arguments[k], rules)
        )
        view = NodeView(trace, node, wanted, rules)
        try:
            answers: Sequence[Tensor | None] = ()
            if not known or (rule and wanted):
                answers = _by_rule_or_body(op, view, node, rule, arrived)
            passed = _pair_gradients(op, node, arguments, wanted, answers, rules)
        except NoGradientRule as error:  # the operator has a rule, but not for this form
            if error.complete:  # the error is about an operator of a subgraph and names it
                raise
            form = f" {error}" if known else ""
            text = _no_rule(trace, node, wrt, rules, form)
            raise NoGradientRule(text, complete=True) from None
        except OrtflexError:
            raise
        except Exception as error:  # a rule is code of a plugin
            family = rules.source(node.domain, node.op_type)
            raise GraphError(
                f"the gradient rule for {node.op_type} of the family {family} fails on the node "
                f"{_label(node)}: {describe_error(error)}"
            ) from error
        for argument, gradient in passed:
            collected.setdefault(id(argument), []).append(gradient)
        through = {id(argument) for argument, _ in passed}
        ends = {id(arguments[k]) for k in leading} - through
        stopped.update(dict.fromkeys(ends, node))
    return collected, stopped


def _computed(answer: Gradient, needed: bool) -> Tensor | None:
    """A result of a rule; one that is a function is called if it is needed."""
    if isinstance(answer, Tensor) or answer is None:
        return answer
    return answer() if needed else None


def _by_rule_or_body(
    op: Ops, view: NodeView, node: Node, rule: Rule | None, gs: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The gradients by the rule or, if it does not support this form, by the function body."""
    refusal = NoGradientRule("")
    if rule is not None:
        try:
            answers = [_computed(a, view.needs(k)) for k, a in enumerate(rule(op, view, *gs))]
            if any(a is not None for a in answers):
                view.check_read()
            return answers
        except NoGradientRule as error:
            if error.complete:
                raise
            refusal = error
    outputs = function_bodies.expanded(view.trace, node)
    if outputs is None:
        raise refusal
    view.trace.by_body.append(node)
    return [_computed(a, view.needs(k)) for k, a in enumerate(view.through(outputs, *gs))]


def _varies(argument: Tensor | None, rules: RuleTable) -> bool:
    """Whether a value can change continuously; an undeclared operator may return any type."""
    return argument is not None and (
        argument.is_float or argument.dtype == _UNDEFINED or _quantized(argument, rules)
    )


def _quantized(argument: Tensor, rules: RuleTable) -> bool:
    """Whether integers stand for real numbers, so that a gradient may pass straight through."""
    node = argument.node
    while (
        node is not None and rules.carries(node.domain, node.op_type) and node.inputs[0] is not None
    ):
        argument = node.inputs[0]
        node = argument.node
    return node is not None and argument.index == 0 and rules.rounds(node.domain, node.op_type)


def _pair_gradients(
    op: Ops,
    node: Node,
    arguments: Inputs,
    wanted: frozenset[int],
    answers: Sequence[Tensor | None],
    rules: RuleTable,
) -> list[tuple[Tensor, Tensor]]:
    """Pairs (input, gradient) from the results of a rule, summed over broadcast axes."""
    out = []
    for k in sorted(wanted):
        argument = arguments[k]
        if k >= len(answers):
            raise PluginError(
                f"the gradient rule for {node.op_type} returns {len(answers)} gradients for "
                f"{len(arguments)} inputs; return None for an input without a gradient"
            )
        answer = answers[k]
        if answer is None or argument is None:
            continue
        if argument.dtype not in (answer.dtype, _UNDEFINED) and not _quantized(argument, rules):
            raise PluginError(
                f"the gradient rule for {node.op_type} returns a gradient of type "
                f"{dtype_name(answer.dtype)} for input {k}, but the input is "
                f"{dtype_name(argument.dtype)}"
            )
        out.append((argument, unbroadcast(op, answer, argument)))
    return out


def _nodes_between(
    trace: Trace, roots: Sequence[Tensor], wrt: Sequence[Tensor], *, cut: bool = False
) -> list[Node]:
    """The nodes that depend on ``wrt`` and that a root depends on, in the order of the trace.

    With ``cut``, nodes before one of ``wrt`` are not included.
    """
    needed: set[int] = set()
    ends = set(map(id, wrt)) if cut else set()
    pending = [root.node for root in roots if root.node is not None and id(root) not in ends]
    while pending:
        node = pending.pop()
        if id(node) not in needed:
            needed.add(id(node))
            pending.extend(
                a.node for a in node.arguments if a.node is not None and id(a) not in ends
            )
    reached = set(map(id, wrt))
    nodes = []
    for node in trace.nodes:
        if node.stops:
            continue
        if id(node) in needed and any(id(a) in reached for a in node.arguments):
            nodes.append(node)
            reached.update(map(id, node.outputs))
    return nodes


def _total(parts: list[Tensor] | None) -> Tensor | None:
    if not parts:
        return None
    return functools.reduce(lambda a, b: a + b, parts)


def _label(node: Node) -> str:
    return f"{node.name!r} ({node.op_type})" if node.name else node.op_type


def _path(trace: Trace, node: Node, wrt: Iterable[Tensor]) -> str:
    """The path from a parameter to the node: 'W -> MatMul -> Foo'."""
    came: dict[int, tuple[int, str]] = {id(t): (0, t.hint or "parameter") for t in wrt}
    for other in trace.nodes:
        source = next((a for a in other.arguments if id(a) in came), None)
        if source is not None:
            for output in other.outputs:
                came.setdefault(id(output), (id(source), _label(other)))
        if other is node:
            break
    steps: list[str] = []
    tensor_id = id(node.outputs[0])
    while tensor_id in came:
        tensor_id, text = came[tensor_id]
        steps.append(text)
    return " -> ".join(reversed(steps))


def _no_rule(
    trace: Trace, node: Node, wrt: Iterable[Tensor], rules: RuleTable, form: str = ""
) -> str:
    opset = trace.opsets.get(node.domain, 1)
    elsewhere = "".join(
        f" A family that was not loaded may have it: {e}." for e in rules.broken.values()
    )
    return (
        f"no gradient rule for the operator {node.op_type}{form} of {node.domain or 'ai.onnx'} "
        f"opset {opset}, node {_label(node)}, reached by {_path(trace, node, wrt)}. Freeze the "
        "parameters before it (params=['*', '!name']), or write a rule: an entry point of "
        f"'ortflex.gradients' of about ten lines (docs/howto/write-a-gradient-rule.md).{elsewhere}"
    )


def _describe_obstacle(node: Node, reached: set[int]) -> str:
    """The node at which the gradient stops, with the node of its integer input if this input stops it."""
    for argument in node.arguments:
        maker = argument.node
        if id(argument) in reached and maker is not None and not argument.is_float:
            return f"{_label(node)} with the {dtype_name(argument.dtype)} values of {_label(maker)}"
    return _label(node)


def _explain_missing(
    tensor: Tensor, nodes: Sequence[Node], stopped: Mapping[int, Node]
) -> Exception:
    """The error for a tensor without a gradient: it does not reach a root, or every path is blocked."""
    label = tensor.hint or repr(tensor)
    reached = {id(tensor)}
    obstacles = [stopped[id(tensor)]] if id(tensor) in stopped else []
    for node in nodes:
        if any(id(a) in reached for a in node.arguments):
            reached.update(map(id, node.outputs))
            obstacles.extend(stopped[id(o)] for o in node.outputs if id(o) in stopped)
    if obstacles:
        names = ", ".join(dict.fromkeys(_describe_obstacle(o, reached) for o in obstacles))
        return NotDifferentiable(
            f"no gradient reaches {label!r} {shape_text(tensor.shape)}: every path from it to the "
            f"output ends at an operator without a gradient ({names})"
        )
    return GraphError(f"{label!r} does not reach the output, so it has no gradient")
