"""Which parts of a model can be trained, by node and by backend; no data are needed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from onnx import ModelProto, NodeProto, TensorProto

from ortflex_core.compiler.graph import sequences
from ortflex_core.compiler.graph.nodes import plain_domain, reads
from ortflex_core.compiler.graph.ops import FLOATS, Trace
from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.model.changes import find_changes
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.products import find_products
from ortflex_core.compiler.operators import decompositions, function_bodies, kernels
from ortflex_core.compiler.operators.gradient_families import load_rules
from ortflex_core.compiler.operators.reverse_mode import RuleTable, gradients
from ortflex_core.compiler.problem import losses
from ortflex_core.compiler.problem import parameters as parameters
from ortflex_core.compiler.problem import quantized_parameters as quantized
from ortflex_core.compiler.problem.parameters import Choice
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs import cost, stages
from ortflex_core.compiler.programs.prefix import Prefix, check_strings, find_prefix
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.compiler.runtime.session import get_session
from ortflex_core.kernel.engine_protocols import Device
from ortflex_core.kernel.errors import (
    GraphError,
    NoGradientRule,
    NotDifferentiable,
    OrtflexError,
    PluginError,
    RuntimeUnavailable,
)
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.tracebacks import short_traceback
from ortflex_core.tools.report import ModelReport, NodeReport, Status
from ortflex_core.training.config.arguments import ASSUMED_LOSS, Arguments, default
from ortflex_core.training.config.components import Parts
from ortflex_core.training.engines import backend_choice
from ortflex_core.training.setup import check_version, edit_model

_STRONGEST: Sequence[Status] = ("no rule", "trainable", "passes", "not differentiable", "frozen")
"""The status of a node among those of the nodes that it was decomposed into."""


@short_traceback
def check_model(
    model: str | os.PathLike[str] | bytes | ModelProto | Model,
    loss: Any = None,
    params: str | Iterable[str] | None = None,
    *,
    freeze: str | Iterable[str] = (),
    head: Any = None,
    edits: Any = (),
    families: Sequence[str] = (),
    plugins: Plugins | None = None,
) -> ModelReport:
    """Check which nodes can be trained, and which backends can train the model.

    A node is *trainable* (it reads a trained parameter and has a gradient), *passes* a gradient on,
    is *frozen* (no trained parameter before it, or it does not lead to the loss), *not
    differentiable* (by definition), or has *no rule*.

    Args:
        model: a path, the file's bytes, a ModelProto, or a :class:`Model`.
        loss: as for :class:`Trainer`; None is the squared error on every float output.
        params: as for :class:`Trainer`: what to train; None for all parameters.
        freeze: as for :class:`Trainer`: what is not trained.
        head: as for :class:`Trainer`; the model is checked with it.
        edits: as for :class:`Trainer`; the model is checked as they leave it.
        families: families of gradient rules that take precedence if two define an operator.
        plugins: the plugins to use; None for the installed ones.

    Raises:
        ModelError: the model is broken, or a name does not occur in it.
        ConfigError, PluginError: the loss cannot be built.

    Example:
        >>> import onnx.parser
        >>> made = onnx.parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y) '
        ...     "<float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"
        ... )
        >>> [(node.operator, node.status) for node in check_model(made).nodes]
        [('MatMul', 'trainable')]
    """
    plugins = Plugins.given(plugins)
    source = edited_model(model, head=head, edits=edits, plugins=plugins)
    rules = load_rules(plugins, families, source.internal.graph.node)  # which may contain kernels
    with contextlib.suppress(RuntimeUnavailable):
        require_runtime()
        shape_probe.complete_shapes(source)
    spec = loss
    if loss is None:
        floats = [o.name for o in source.outputs if o.dtype in FLOATS]
        spec = dict.fromkeys(floats, ASSUMED_LOSS) if len(floats) > 1 else ASSUMED_LOSS
    read = Parts(plugins).build("loss", spec)
    source, requests = losses.loss_requests(source, read, plugins)
    outputs = tuple(losses.tensors_of(requests))
    source, chosen = parameters.trainable_model(source, outputs, params, freeze)
    choices = tuple(chosen)
    nodes = _nodes(source, outputs, [c.name for c in choices if c.trained], rules)
    names = plugins["backends"].names()
    notes = [*_of_edits(source), *_notes(source)]
    try:
        problem = _problem(source, requests, choices, rules, plugins)
        prefix = find_prefix(problem, outputs)
        notes += [] if prefix is None else _of_prefix(prefix, source)
        notes += [f"{r.loss.name} reads {r.teacher}" for r in requests if r.teacher is not None]
        backends = _backends(problem, prefix, plugins)
    except OrtflexError as error:
        backends = dict.fromkeys(names, (str(error),))
    return ModelReport(
        model=source.label,
        opset=source.opset,
        outputs=outputs,
        choices=choices,
        nodes=tuple(nodes),
        backends=backends,
        products=tuple(place.product for place in find_products(source)),
        notes=tuple(notes),
    )


def edited_model(
    model: str | os.PathLike[str] | bytes | ModelProto | Model,
    *,
    head: Any = None,
    edits: Any = (),
    plugins: Plugins | None = None,
) -> Model:
    """A model as the arguments ``head`` and ``edits`` of :class:`Trainer` leave it.

    Args:
        model: a path, the file's bytes, a ModelProto, or a :class:`Model`.
        head: as for :class:`Trainer`.
        edits: as for :class:`Trainer`.
        plugins: the plugins to use; None for the installed ones.

    Raises:
        ModelError, ConfigError, PluginError: an edit does not exist, or does not fit the model.

    Example:
        >>> import onnx.parser
        >>> made = onnx.parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y) '
        ...     "<float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"
        ... )
        >>> str(edited_model(made, head=3).outputs[0])
        'y: float32[N, 3]'
    """
    plugins = Plugins.given(plugins)
    source = model if isinstance(model, Model) else Model(model, plugins=plugins)
    parts, given = Parts(plugins), Arguments(loss=ASSUMED_LOSS, edits=edits).edits
    found = {f"edits[{k}]": edit for k, edit in enumerate(parts.build("edits", given))}
    found |= {} if head is None else {"head": parts.build("head", head)}
    return edit_model(source, found, 0)


def _of_edits(model: Model) -> Iterator[str]:
    if model.unedited is not None and model.quantization is None:
        yield f"checked as its edits leave it: {', '.join(map(str, model.outputs))}"
        for what, words in find_changes(model).facts.items():
            yield f"{what}: {words}"


def _notes(model: Model) -> Iterator[str]:
    if model.stamp:
        yield model.stamp
    if model.unlearned:
        yield shape_probe.explanation(model)
    if (fixed := model.fixed_batch) is not None:
        spec, rows = fixed
        yield (
            f"the input {spec} has a fixed batch of {rows}: train with free_batch=true, or with "
            f"batch_size={rows} and a multiple of {rows} rows, or export the model with a dynamic "
            "batch dimension"
        )
    yield from model.apart.values()
    yield from kernels.deviations(model.internal)


def _nodes(
    model: Model, outputs: Sequence[str], trained: Sequence[str], rules: RuleTable
) -> list[NodeReport]:
    """Find what depends on a parameter by a forward walk, and what has a gradient by a backward walk."""
    leading = set(map(id, model.ancestors(outputs)))
    weights = set(trained)
    # The parameters that each tensor depends on.
    sources: dict[str, frozenset[str]] = {name: frozenset([name]) for name in trained}
    judgments: list[_Judgment] = []
    for node in model.internal.graph.node:
        read = dict.fromkeys(reads(node))
        parameters = frozenset().union(*(sources.get(n, frozenset()) for n in read))
        if id(node) not in leading:
            reason = "it does not affect the tensors of the loss"
            judgments.append(_Judgment("frozen", reason))
        elif not parameters:
            is_quantized = any(quantized.is_weight(model, name) for name in node.input)
            reason = (
                "its weight is quantized" if is_quantized else "no trained parameter is before it"
            )
            judgments.append(_Judgment("frozen", reason))
        else:
            sources.update((output, parameters) for output in node.output if output)
            judgment = _judge(model, node, [n for n in read if n in sources], rules)
            if judgment.status == "passes" and weights & set(read):
                judgment = attrs.evolve(judgment, status="trainable")
            judgments.append(judgment)
    judged = list(zip(model.internal.graph.node, judgments, strict=True))
    reached = set(outputs)
    for node, judgment in reversed(judged):
        if reached & set(node.output):
            reached |= judgment.passing
    reports = [(node, _report(node, j, sources, weights, reached)) for node, j in judged]
    return [attrs.evolve(report, index=k) for k, report in enumerate(_merged(model, reports))]


def _merged(model: Model, reports: Sequence[tuple[NodeProto, NodeReport]]) -> list[NodeReport]:
    """A report for each node of the file: those that one was decomposed into are reported together."""
    groups: dict[int, tuple[NodeProto | None, list[NodeReport]]] = {}
    for k, (node, report) in enumerate(reports):
        origin = model.decomposed.origins.get(node.output[0]) if node.output else None
        key = k if origin is None else -id(origin)
        groups.setdefault(key, (origin, []))[1].append(report)
    out = []
    for origin, parts in groups.values():
        if origin is None:
            out += parts
            continue
        status = next(s for s in _STRONGEST if any(r.status == s for r in parts))
        reason = next(r.reason for r in parts if r.status == status)
        if status in ("trainable", "passes"):
            operators = dict.fromkeys(r.operator for r in parts if r.operator != "Constant")
            reason = f"decomposed into {', '.join(operators)}"
        frozen = [model.decomposed.frozen.get(name) for name in origin.input]
        out.append(
            NodeReport(
                index=0,
                name=origin.name,
                operator=origin.op_type,
                domain=decompositions.domain_of(origin),
                status=status,
                reason="; ".join(dict.fromkeys([reason, *filter(None, frozen)])),
                parameters=tuple(dict.fromkeys(n for r in parts for n in r.parameters)),
                blocks=tuple(dict.fromkeys(n for r in parts for n in r.blocks)),
            )
        )
    return out


def _report(
    node: NodeProto,
    judgment: _Judgment,
    sources: Mapping[str, frozenset[str]],
    weights: set[str],
    reached: set[str],
) -> NodeReport:
    parameters = sorted(set().union(*(sources.get(n, frozenset()) for n in reads(node))))
    blocks: list[str] = []
    if judgment.status == "no rule":
        blocks = parameters
    elif judgment.status == "not differentiable":
        blocks = [name for name in parameters if name not in reached]
    return NodeReport(
        index=0,
        name=node.name,
        operator=node.op_type,
        domain=node.domain or "ai.onnx",
        status=judgment.status,
        reason=judgment.reason,
        parameters=tuple(n for n in dict.fromkeys(reads(node)) if n in weights),
        blocks=tuple(blocks),
    )


@attrs.frozen
class _Judgment:
    """The status of a node, the reason, and the inputs to which it passes a gradient."""

    status: Status
    reason: str
    passing: set[str] = attrs.field(factory=set)


def _judge(model: Model, node: NodeProto, live: Sequence[str], rules: RuleTable) -> _Judgment:
    """Judge a node, some of whose inputs, ``live``, depend on parameters.

    The node is differentiated by itself: an operator may have a rule, but not for this form of it.
    """
    domain = plain_domain(node.domain)
    label = f"{node.op_type} of {domain or 'ai.onnx'} opset {model.opsets.get(domain, 1)}"
    try:
        known, rule = rules.lookup(domain, node.op_type, model.opsets.get(domain, 1))
    except PluginError as error:
        return _Judgment("no rule", str(error))
    if not domain and node.op_type in sequences.SEQUENCE_OPERATORS:
        return _Judgment("passes", "sequences are resolved while the graph is traced", set(live))
    if (refused := model.decomposed.refused.get(node.output[0])) is not None and not known:
        return _Judgment("no rule", refused)
    if not known and (domain or not function_bodies.has_body(node.op_type)):
        return _Judgment("no rule", f"no gradient rule for {label} is installed")
    if known and rule is None:
        return _Judgment("not differentiable", f"no gradient passes through {node.op_type}")
    passing: set[str] = set()
    by_body = False
    for name in live:
        try:
            by_body |= _differentiate(model, node, live, name, rules)
        except NoGradientRule as error:
            return _Judgment("no rule", str(error).split(f" of {domain or 'ai.onnx'} opset")[0])
        except (NotDifferentiable, GraphError):
            continue
        passing.add(name)
    if not passing:
        reason = "no gradient passes to an input that depends on parameters"
        return _Judgment("not differentiable", reason)
    if by_body:
        reason = f"by the function body that the standard has for {node.op_type}"
        return _Judgment("passes", reason, passing)
    family = rules.family(domain, node.op_type)
    how = "straight-through, " if rules.rounds(domain, node.op_type) else ""
    return _Judgment("passes", f"{how}by a gradient rule of the family {family!r}", passing)


def _real(model: Model, name: str, rules: RuleTable) -> tuple[str, ...]:
    """The tensors from which integers that represent real numbers are computed."""
    maker = model.producers.get(name)
    if maker is None or model.value(name).dtype in FLOATS:
        return (name,)
    key = maker.domain, maker.op_type
    if not rules.rounds(*key) and not rules.carries(*key):
        return (name,)
    return tuple(dict.fromkeys(n for i in reads(maker) for n in _real(model, i, rules)))


def _differentiate(
    model: Model, node: NodeProto, live: Sequence[str], wrt: str, rules: RuleTable
) -> bool:
    """Differentiate a single node, and say whether its function body was used."""
    trace = Trace(model.opsets)
    given = {}
    # A node that reads integers that represent real numbers passes its gradient to those.
    real = {name: _real(model, name, rules) for name in reads(node)}
    live = [n for name in live for n in real[name][:1]]
    wrt = real[wrt][0]
    for name in dict.fromkeys(n for names in real.values() for n in names):
        spec = model.value(name)
        if name in live or name not in model.initializers:
            # The output type of an operator outside the standard is not known.
            given[name] = trace.input(name, spec.dtype or TensorProto.FLOAT, spec.shape)
    results = [n for n in node.output if n]
    values = model.replay(trace, results, given)
    roots = [(t, None) for t in values.values() if t.is_float or not t.dtype]
    # Integers that represent real numbers pass a gradient if the node that reads them does.
    key = node.domain, node.op_type
    if (rules.rounds(*key) or rules.carries(*key)) and not values[results[0]].is_float:
        roots = [(values[results[0]], None)]
        seed = trace.constant(1.0, given[wrt].dtype)
        gradients([(roots[0][0], seed)], [given[wrt]], rules)
        return False
    if not roots:
        raise NotDifferentiable(f"{node.op_type} has no float output")
    gradients(roots, [given[wrt]], rules)
    return any(n.op_type == node.op_type for n in trace.by_body)


def _of_prefix(prefix: Prefix, model: Model) -> Iterator[str]:
    """What is computed once for each row, and what that saves."""
    if not prefix.work and not prefix.reads_strings:
        return
    whole, rest = (cost.step_flops(p) for p in (prefix.problem, prefix.cut(prefix.problem)))
    saved = f", {1 - rest / whole:.1%} of the operations of the model" if whole else ""
    sizes = [
        spec.shape[1:] for spec in prefix.columns if spec.shape and spec.name in prefix.computed
    ]
    known = [math.prod(d for d in s if isinstance(d, int)) for s in sizes if None not in s]
    width = f"; at least {sum(known)} numbers for each row" if known else ""
    yield (
        f"{len(prefix.nodes)} of {len(model.internal.graph.node)} nodes come before everything that is "
        f"trained{saved}: cache= computes them once for each row, up to {prefix.summary}{width}"
    )


def _problem(
    model: Model,
    requests: Sequence[losses.LossRequest],
    choices: Sequence[Choice],
    rules: RuleTable,
    plugins: Plugins,
) -> Problem:
    """What is trained; the labels have the type that each loss expects."""
    check_version(model, require_runtime())
    labels = losses.expected_labels(model, requests)
    optimizer = plugins.component("optimizers", default("optimizer"))
    return Problem(
        model=model,
        terms=losses.bind_terms(model, requests, labels, {}),
        penalties=(),
        optimizer=optimizer,
        optimizer_name=plugins["optimizers"].known_as(optimizer),
        choices=tuple(choices),
        reduction="mean",
        rules=rules,
        plugins=plugins,
        batch_size=fixed[1] if (fixed := model.fixed_batch) else 1,
    )


def _backends(
    problem: Problem, prefix: Prefix | None, plugins: Plugins
) -> dict[str, tuple[str, ...]]:
    """Why each backend cannot train the model, or the rest of it after a prefix that is worth it."""
    device, runtime = plugins.component("devices", default("device")), require_runtime()
    check_strings(problem, problem.predicted)
    losses.check_precision(problem.model, problem.parameters)
    refused = _refused(problem, device)
    if prefix is not None and (prefix.work or prefix.reads_strings):
        problem = prefix.cut(problem)
    reasons: dict[str, tuple[str, ...]] = {}
    for name in plugins["backends"].names():
        try:
            backend = plugins.component("backends", name)
            refusal = backend_choice.Setting(problem, device, runtime).reasons_against(backend)
        except OrtflexError as error:
            refusal = [str(error)]
        reasons[name] = tuple(refusal or refused)
    return reasons


def _refused(problem: Problem, device: Device) -> list[str]:
    """The reason why onnxruntime cannot run the model, such as an operator without a kernel."""
    try:
        get_session(stages.prediction_program(problem, problem.predicted), device, optimize=False)
    except GraphError as error:
        return [str(error)]
    return []
