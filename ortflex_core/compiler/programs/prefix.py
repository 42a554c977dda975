"""The prefix of a model: what depends on its inputs, and on nothing that training changes.

A node belongs to the prefix if it depends on an input, but on no trained tensor, no random draw and no
statistic of a batch. The tensors at the end of the prefix are functions of a row, so they can be
computed once and become columns of the data, which the rest of the model reads as its inputs. They need
no gradient, and the tensors before them may be strings.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import attrs
from onnx import NodeProto, TensorProto

from ortflex_core.compiler.graph import shape_inference
from ortflex_core.compiler.graph.nodes import plain_domain, reads
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.graph.protos import all_nodes, copied, refill, subgraphs_of
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.training_mode import (
    inactive_dropout,
    normalized_by_batch,
    observed_scales,
)
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.teachers import Teacher
from ortflex_core.compiler.problem.updating import Updating
from ortflex_core.compiler.programs import stages
from ortflex_core.kernel.errors import ModelError, PluginError
from ortflex_core.kernel.types import TensorSpec, shape_text

_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
    | {"RandomUniformLike"}
)
_WORK = frozenset(
    {"Attention", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm"}
    | {"ImageDecoder", "LSTM", "MatMul", "MatMulInteger", "NonMaxSuppression", "QLinearConv"}
    | {"QLinearMatMul", "RNN", "Resize", "TfIdfVectorizer"}
)
"""Operators of the standard that are worth computing once."""
_GUESS = 64
"""The assumed size of an axis that the model does not know."""


@attrs.frozen(kw_only=True, eq=False)
class Prefix:
    """The prefix before some tensors of a model, whose whole problem is ``problem``.

    The rest of the model reads the ``columns``: ends of the prefix, and inputs. The ``nodes`` are those
    that the columns depend on; ``moved`` are names of tensors without an axis of rows, which the rest
    computes.
    """

    problem: Problem
    columns: tuple[TensorSpec, ...]
    nodes: tuple[NodeProto, ...]
    moved: frozenset[str]

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """The columns that the prefix computes."""
        inputs = {i.name for i in self.problem.model.inputs}
        return tuple(c.name for c in self.columns if c.name not in inputs)

    @property
    def summary(self) -> str:
        """The computed columns in a few words."""
        specs = [c for c in self.columns if c.name in self.computed]
        few = ", ".join(f"{c.name} {shape_text(c.shape)}" for c in specs[:3])
        return few + (f" and {len(specs) - 3} others" if len(specs) > 3 else "")

    @property
    def takes(self) -> tuple[TensorSpec, ...]:
        """The inputs of the model that the prefix reads."""
        used = {name for node in self.nodes for name in reads(node)}
        return tuple(i for i in self.problem.model.inputs if i.name in used)

    @property
    def reads_strings(self) -> bool:
        """Whether an input has strings, which only the prefix can read."""
        return any(map(_is_text, self.problem.model.inputs))

    @cached_property
    def widest(self) -> int:
        """The bytes of a row in the largest tensor of the prefix, estimated where a size is not known."""
        names = [name for node in self.nodes for name in node.output if name]
        specs = [self.problem.model.value(name) for name in names]
        sizes = [
            math.prod(d if isinstance(d, int) else _GUESS for d in (spec.shape or ())[1:])
            * (8 if spec.dtype in (0, TensorProto.STRING) else spec.numpy.itemsize)
            for spec in specs
        ]
        return max(sizes, default=1)

    @cached_property
    def work(self) -> str:
        """The operator because of which the prefix is worth computing once; "" without one.

        It is a product, or an operator of another domain that has no gradient rule.
        """
        rules, opsets = self.problem.rules, self.problem.model.opsets
        for node in self.nodes:
            domain = plain_domain(node.domain)
            inner = [n.op_type for part in subgraphs_of(node) for n in all_nodes(part.node)]
            if not domain and (found := [op for op in (node.op_type, *inner) if op in _WORK]):
                return found[0]
            with contextlib.suppress(PluginError):  # two families have rules, and none was chosen
                if domain and not rules.lookup(domain, node.op_type, opsets.get(domain, 1))[0]:
                    return node.op_type
        return ""

    def program(self) -> Program:
        """The graph of the prefix, in inference mode; its outputs are the computed columns."""
        return stages.prediction_program(self.problem, self.computed)

    def cut(self, problem: Problem) -> Problem:
        """A problem of this model without the prefix: the columns are its inputs."""
        return attrs.evolve(problem, model=_without(problem.model, self.columns, self.moved))


def find_prefix(problem: Problem, outputs: Sequence[str]) -> Prefix | None:
    """The prefix before some tensors, in training and in inference; None if there is no node in it."""
    model = problem.model
    changing = _changing(problem, outputs)
    fixed: dict[str, NodeProto | None] = {i.name: None for i in model.inputs}
    read, wanted = list(outputs), set(outputs)
    for node in model.ancestors(outputs):
        names = reads(node)
        # A tensor that the losses read stays computed: TrainingAgent returns no input as an output.
        kept = not changing.isdisjoint((*names, *node.output)) or not wanted.isdisjoint(node.output)
        if kept or _is_changing(problem, node, changing):
            changing.update(o for o in node.output if o)
            read += names
        elif not fixed.keys().isdisjoint(names):
            fixed.update((o, node) for o in node.output if o)
    ends = [name for name in read if name in fixed]
    columns, moved = _columns(model, fixed, ends, _rows(model))
    if not any(fixed[n] for n in columns) or any(_is_text(c) for c in columns.values()):
        # An unknown size may be the rows: a run on the data shows it.
        columns, moved = _columns(model, fixed, ends, {*_rows(model), None})
    ends = [name for name in columns if fixed[name] is not None]
    if not ends:
        return None
    nodes = [n for n in model.ancestors(ends) if not fixed.keys().isdisjoint(n.output)]
    order = {name: k for k, name in enumerate(fixed)}
    return Prefix(
        problem=problem,
        columns=tuple(sorted(columns.values(), key=lambda spec: order[spec.name])),
        nodes=tuple(nodes),
        moved=frozenset(moved),
    )


def teacher_prefix(problem: Problem, teachers: Sequence[Teacher]) -> Prefix:
    """The tensors of one teacher, as a prefix without a rest: nothing of a teacher is trained."""
    model = teachers[0].model
    names = [teacher.tensor.name for teacher in teachers]
    alone = attrs.evolve(
        problem,
        model=model,
        terms=(),
        penalties=(),
        choices=(),
        updating=Updating(),
        later=frozenset(),
        batch_norm="freeze",
        dropout="off",
        recompute=False,
    )
    return Prefix(
        problem=alone,
        columns=tuple({t.tensor.name: t.tensor for t in teachers}.values()),
        nodes=tuple(model.ancestors(names)),
        moved=frozenset(),
    )


def _columns(
    model: Model,
    fixed: Mapping[str, NodeProto | None],
    names: Sequence[str],
    rows: set[int | str | None],
) -> tuple[dict[str, TensorSpec], set[str]]:
    """The tensors with an axis of rows from which some tensors follow, and those between them."""
    columns: dict[str, TensorSpec] = {}
    moved: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        spec, maker = model.value(name), fixed[name]
        if name in columns or name in moved:
            continue
        shape = spec.shape or ()
        unknown = shape_inference.has_unknown_dims(shape[:1])
        if maker is None or (shape and (None if unknown else shape[0]) in rows):
            columns[name] = spec
            if maker is not None and (unknown or shape[0] is None):
                columns[name] = attrs.evolve(spec, shape=("batch", *shape[1:]))
        else:
            moved.update(o for o in maker.output if o)
            pending += [n for n in reads(maker) if n in fixed]
    return columns, moved


def _rows(model: Model) -> set[int | str | None]:
    """The sizes of axes of rows."""
    return {"batch", *(i.shape[0] for i in model.inputs if i.shape)} - {None}


def _is_text(spec: TensorSpec) -> bool:
    return spec.dtype == TensorProto.STRING


def check_strings(problem: Problem, outputs: Sequence[str]) -> None:
    """Refuse models in which a trained part reads strings, which onnxruntime cannot bind."""
    if not any(map(_is_text, problem.model.inputs)):
        return
    prefix = find_prefix(problem, outputs)
    for spec in problem.model.inputs if prefix is None else prefix.columns:
        if not _is_text(spec):
            continue
        model = problem.model
        nodes = [n for n in model.internal.graph.node if spec.name in reads(n)]
        names = ", ".join(f"{n.op_type} {n.name!r}" for n in nodes[:3])
        if model.unlearned:
            raise ModelError(
                f"{model.label}: {spec} is read by {names}, but the types and shapes of what follows are "
                f"not known, because the model cannot be run: {model.unlearned}"
            )
        raise ModelError(
            f"{model.label}: {spec} is read by {names}, which depends on something that is trained or "
            "drawn, or has no axis of rows; onnxruntime cannot bind strings. Leave what is trained there "
            "out with params=['!name']"
        )


def _changing(problem: Problem, outputs: Sequence[str]) -> set[str]:
    """The tensors that training changes: parameters, running statistics, and what a batch decides."""
    changing = {*problem.parameters, *problem.later, *observed_scales(problem, outputs)}
    for node in normalized_by_batch(problem, outputs):
        changing.update(o for o in (*node.input[3:5], *node.output) if o)
    return changing


def _is_changing(problem: Problem, node: NodeProto, changing: set[str]) -> bool:
    """Whether a node draws random numbers, or uses the statistics of a batch."""
    if not changing.isdisjoint(node.output):
        return True
    inner = [n for part in subgraphs_of(node) for n in all_nodes(part.node)]
    if any(n.op_type in _RANDOM for n in (node, *inner)):
        return True
    if any(n.op_type in ("Dropout", "BatchNormalization") for n in inner):
        return True  # their modes are not known inside a body
    return node.op_type == "Dropout" and not inactive_dropout(problem, node)


def _without(model: Model, columns: Sequence[TensorSpec], moved: frozenset[str]) -> Model:
    """A model that has the columns as inputs, without the nodes before them."""
    rest = copy.copy(model)
    given = {spec.name for spec in columns}
    available = given | set(model.initializers)
    internal = copied(model.internal)
    del internal.graph.node[:]
    for node in model.internal.graph.node:
        ends = not given.isdisjoint(node.output) and moved.isdisjoint(node.output)
        if not ends and available.issuperset(reads(node)):
            available.update(o for o in node.output if o)
            internal.graph.node.append(node)
    own = [i for i in internal.graph.input if i.name in model.initializers]
    refill(internal.graph.input, [*(spec.to_proto() for spec in columns), *own])
    rest.internal = internal
    rest.producers = {o: n for n in internal.graph.node for o in n.output if o}
    rest.inputs = tuple(columns)
    rest._values = {**model._values, **{spec.name: spec for spec in columns}}
    rest.outputs = tuple(o for o in model.outputs if o.name in available)
    return rest
