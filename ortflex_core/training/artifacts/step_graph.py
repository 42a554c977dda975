"""The graphs of a portable step: the graphs of the fused backend, without computations on the host.

The tensors are computed by :func:`~ortflex_core.step_program`, or, if a step has several
batches, by the three programs that the fused backend runs one after the other. Here the
graph also computes or reads the values that the host computes there: denominators, the number of
the step, the rate and the hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
from onnx import ModelProto, TensorProto

from ortflex_core.compiler.graph.ports import COLUMNS, Key, Port, Role
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.model.training_mode import buffer_spec
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.compiler.programs import stages
from ortflex_core.compiler.programs.step import gradient_program, step_program, update_program
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.host_scalars import Host, HostNodes
from ortflex_core.kernel.types import Shape, TensorSpec
from ortflex_core.training.artifacts.rate_table import RateTable
from ortflex_core.training.artifacts.step_assembly import Assembly, Entry

DOUBLE, INT64 = TensorProto.DOUBLE, TensorProto.INT64
STATE: tuple[Role, ...] = ("parameter", "buffer", "slot", "average", "counter")
"""The roles of the values that a step updates."""
COUNTER, RATE, LOSS, PENALTY = Port("counter"), Port("rate"), Port("loss"), Port("penalty")
_ORDER = [*COLUMNS, *STATE, "rate", "hyperparameter"]


@attrs.frozen(kw_only=True)
class PortableGraph:
    """A graph with its inputs and outputs by their ports.

    ``frozen`` are the tensors of the model that it has as initializers, by their names in the graph;
    their values are not in ``model``.
    """

    model: ModelProto
    entries: tuple[Entry, ...]
    frozen: Mapping[str, str]


def step_graph(
    problem: Problem,
    rate: float,
    rates: RateTable | None,
    *,
    rows: int | None,
    steps: int,
    optional: bool = True,
) -> PortableGraph:
    """The graph of ``steps`` training steps; a rate of NaN, the default, selects one of ``rates``."""
    graph = _StepGraph(problem, rate, rates, rows, steps)
    graph.optional = optional
    return graph.build()


def predict_graph(
    problem: Problem, outputs: Sequence[str], state: Mapping[Port, Entry]
) -> PortableGraph:
    """The model in inference mode, with the tensors of the state that it reads as inputs.

    ``state`` has the names of these tensors in the step.
    """
    graph = _Graph(problem, "predict", None)
    program = stages.prediction_program(problem, outputs)
    given: dict[Key, str] = {}
    for key in program.takes:
        if isinstance(key, Port) and key.role in ("parameter", "buffer"):
            entry = state.get(Port("average", of=key.of)) or state[key]
            known = entry.spec
            given[key] = graph.assembly.input(
                entry.port, known.name, known.dtype, known.shape or ()
            )
    results = graph.run(program, given)
    entries = []
    for key, spec in program.gives.items():
        assert isinstance(key, Port)
        name = graph.assembly.output(results[key], spec.dtype, spec.shape, key.role)
        entries.append(Entry(port=key, name="", new=name, spec=spec))
    return graph.finished(entries)


class _Graph:
    """The base of both graphs: programs whose inputs are found by their ports."""

    def __init__(self, problem: Problem, name: str, rows: int | None) -> None:
        self.problem, self.rows = problem, rows
        self.assembly = Assembly(name, problem.model.opsets)
        self.defaults: dict[Port, float] = {}
        self.optional = True
        self._constants = problem.constants()
        self.shapes: dict[str, Shape | None] = {}
        self._frozen: dict[str, str] = {}
        self._scalars: dict[tuple[int, int], Scalars] = {}

    def run(
        self,
        program: Program,
        given: Mapping[Key, str] | None = None,
        place: tuple[int, int] = (0, 0),
    ) -> dict[Key, str]:
        """Add a program, whose data belong to the step and batch ``place``; returns its outputs."""
        given = given or {}
        names = {}
        for key, spec in program.takes.items():
            names[spec.name] = given.get(key) or self._tensor(key, spec, place)
        for host in program.hosts:
            names[host.spec.name] = self.scalars(place).cast(host.expression, host.spec.dtype)
        results = self.assembly.add(program, names)
        self.shapes |= {results[spec.name]: spec.shape for spec in program.outputs}
        return {key: results[spec.name] for key, spec in program.gives.items()}

    def _tensor(self, key: Key, spec: TensorSpec, place: tuple[int, int]) -> str:
        assert isinstance(key, Port), key
        if key.role in COLUMNS:
            moved = attrs.evolve(key, step=key.step + place[0], batch=key.batch + place[1])
            return self.column(moved, spec)
        if key.role == "frozen":
            name = str(key.of)
            if name not in self._frozen:
                self._frozen[name] = self.assembly.name(name)
            return self._frozen[name]
        known = self._state_spec(key)
        name = self.assembly.input(key, key.label, known.dtype, known.shape or ())
        if known.shape == spec.shape:
            return name
        # An optimized graph may take a bias as a matrix of one row.
        return self._reshaped(name, spec.shape)

    def _state_spec(self, port: Port) -> TensorSpec:
        """Type and shape of a tensor of state, as the model and a checkpoint have it."""
        if port.role == "parameter":
            return self.problem.model.initializers[str(port.of)]
        if port.role == "buffer":
            return buffer_spec(self.problem, str(port.of))
        return self.problem.slot_specs[port]

    def _reshaped(self, name: str, shape: Shape | None) -> str:
        return self.assembly.node("Reshape", name, self.assembly.constant(shape, "int64"))

    def column(self, port: Port, spec: TensorSpec) -> str:
        """The input for a column of a batch; its sizes have separate symbols."""
        place = f"@{port.step}.{port.batch}" if port.step or port.batch else ""
        shape: Shape = tuple(f"{d}{place}" if isinstance(d, str) else d for d in spec.shape or ())
        return self.assembly.input(port, port.label, spec.dtype, shape)

    def scalars(self, place: tuple[int, int]) -> Scalars:
        """Host expressions of the step and batch ``place``."""
        if place not in self._scalars:
            self._scalars[place] = Scalars(self.assembly, partial(self.symbol, place))
        return self._scalars[place]

    def symbol(self, place: tuple[int, int], name: str) -> str:
        """The value of a hyperparameter."""
        port = Port("hyperparameter", of=name)
        self.defaults[port] = float(self._constants[name])
        return self.assembly.input(port, name, DOUBLE, ())

    def finished(self, outputs: Sequence[Entry]) -> PortableGraph:
        new = {entry.port: entry.new for entry in outputs}
        entries = [
            Entry(port=p, name=s.name, spec=s, new=new.pop(p, None), default=self.defaults.get(p))
            for p, s in self.assembly.inputs.items()
        ]
        entries.sort(key=lambda entry: _ORDER.index(entry.port.role))
        entries += [entry for entry in outputs if entry.port in new]
        return PortableGraph(
            model=self.assembly.model(
                [e.name for e in entries if e.name],
                {e.name: e.default for e in entries if e.default is not None and self.optional},
            ),
            entries=tuple(entries),
            frozen={inside: name for name, inside in self._frozen.items()},
        )


class _StepGraph(_Graph):
    """Training steps with a counter, a rate and denominators."""

    def __init__(
        self, problem: Problem, rate: float, rates: RateTable | None, rows: int | None, steps: int
    ) -> None:
        super().__init__(problem, "step", rows)
        self._rates = rates
        self._steps, self._count = steps, problem.updating.accumulate
        self._per_step: Shape = () if steps == 1 else (steps,)
        self._places = {
            attrs.evolve(Port(role), step=k, batch=j).label: (role, k, j)
            for role in ("rate", "counter", "draw")
            for k in range(steps)
            for j in range(self._count)
        }
        self._terms = {
            term.at(k, j, rows).scale_symbol: (k, term)
            for k in range(steps)
            for j in range(self._count)
            for term in problem.terms
        }
        self._known: dict[tuple[int, int], str] = {}
        self._masks = [stages.mask_program(problem, term) for term in problem.terms]
        self.defaults[RATE] = rate if rates is None else math.nan
        self._names = {p: self.assembly.name(p.label) for p in (LOSS, PENALTY)}

    def build(self) -> PortableGraph:
        if self._steps == 1 and self._count > 1:
            results, losses = self._accumulated()
        else:
            program = step_program(self.problem, steps=self._steps, rows=self.rows, rounds=True)
            results = self.run(program)
            batches = range(self._count)
            losses = [
                self._added([cost for j in batches for cost in self._costs(results, k, j)])
                for k in range(self._steps)
            ]
        specs = {p: s for p, s in self.assembly.inputs.items() if p.role in STATE}
        outputs = []
        for port, spec in specs.items():
            new = results.get(port)
            if new is not None:
                if self.shapes.get(new, spec.shape) != spec.shape:
                    new = self._reshaped(new, spec.shape)
                wanted = f"new/{spec.name}"
                out = self.assembly.output(new, spec.dtype, spec.shape, port.role, wanted)
                outputs.append(Entry(port=port, name=spec.name, new=out, spec=spec))
        outputs.append(self._counted())
        outputs.append(self._stacked(LOSS, losses))
        penalties = [results.get(attrs.evolve(PENALTY, step=k)) for k in range(self._steps)]
        if penalties[0] is not None:
            cast = [self._wide(str(penalty)) for penalty in penalties]
            outputs.append(self._stacked(PENALTY, cast))
        return self.finished(outputs)

    def _accumulated(self) -> tuple[dict[Key, str], list[str]]:
        """One step of several batches: gradients one after the other, then the update."""
        program = gradient_program(self.problem, rows=self.rows, rounds=True)
        sums: dict[Key, str] = {}
        buffers: dict[Key, str] = {}
        losses = []
        for j in range(self._count):
            results = self.run(program, buffers, (0, j))
            buffers = {k: n for k, n in results.items() if _role(k) == "buffer"}
            losses.append(self._added(list(self._costs(results, 0, j, of=(0, 0)))))
            for key, gradient in results.items():
                if _role(key) == "gradient":
                    sums[key] = self._sum(sums[key], gradient) if key in sums else gradient
        results = self.run(update_program(self.problem), sums)
        return {**results, **buffers}, [self._added(losses)]

    def _sum(self, before: str, gradient: str) -> str:
        """A sum that onnxruntime does not merge with the matrix product of the gradient."""
        negative = self.assembly.node("Neg", gradient, label="add")
        return self.assembly.node("Sub", before, negative, label="add")

    def _costs(
        self, results: Mapping[Key, str], k: int, j: int, of: tuple[int, int] | None = None
    ) -> Sequence[str]:
        """The losses of a batch, scaled, whose totals have the ports of ``of``."""
        out = []
        for term in self.problem.terms:
            total = results[term.at(*(of or (k, j)), None).total_port]
            wide = self._wide(total)
            out.append(self.assembly.node("Mul", wide, self._scale(k, term)))
        return out

    def _wide(self, cost: str) -> str:
        """A cost of one element as a float64 scalar."""
        if self.shapes.get(cost) != ():
            cost = self._reshaped(cost, ())
        return self.assembly.node("Cast", cost, to=DOUBLE)

    def _added(self, scalars: Sequence[str]) -> str:
        total, *others = scalars
        for scalar in others:
            total = self.assembly.node("Add", total, scalar)
        return total

    def _stacked(self, port: Port, scalars: Sequence[str]) -> Entry:
        """An output with one number a step."""
        name = scalars[0]
        shape = self._per_step
        if shape:
            one = self.assembly.constant([1], "int64")
            each = [self.assembly.node("Reshape", s, one) for s in scalars]
            name = self.assembly.node("Concat", *each, axis=0)
        out = self.assembly.output(name, DOUBLE, shape, port.role, self._names[port], reserved=True)
        return Entry(port=port, name="", new=out, spec=TensorSpec(out, DOUBLE, shape))

    def _counter(self) -> str:
        return self.assembly.input(COUNTER, "step", INT64, ())

    def _counted(self) -> Entry:
        """The number of steps after this run."""
        before = self._counter()
        after = self.assembly.node("Add", before, self.assembly.constant(self._steps, "int64"))
        out = self.assembly.output(after, INT64, (), COUNTER.role, f"new/{before}")
        return Entry(port=COUNTER, name=before, new=out, spec=TensorSpec(before, INT64, ()))

    def symbol(self, place: tuple[int, int], name: str) -> str:
        """The value of any host symbol, in a program that begins at the step and batch ``place``."""
        if name in self._terms:
            return self._scale(*self._terms[name])
        if name not in self._places:
            return super().symbol(place, name)
        role, k, j = self._places[name]
        k, j = k + place[0], j + place[1]
        if role == "rate":
            return self._rate(k)
        number = self._counter()
        offset = k + 1
        if role == "draw":
            if self._count > 1:
                count = self.assembly.constant(self._count, "int64")
                number = self.assembly.node("Mul", number, count)
            offset = k * self._count + j + 1
        number = self.assembly.node("Add", number, self.assembly.constant(offset, "int64"))
        return self.assembly.node("Cast", number, to=DOUBLE)

    def _rate(self, k: int) -> str:
        """The rate of a step: the input, or, where that is NaN, the rate in the table."""
        node, number = self.assembly.node, partial(self.assembly.constant, dtype="int64")
        rate = self.assembly.input(RATE, "learning_rate", DOUBLE, self._per_step)
        if self._per_step:
            rate = node("Gather", rate, number(k), axis=0)
        if self._rates is None:
            return rate
        place = node("Add", self._counter(), number(k - self._rates.first))
        if self._rates.interval > 1:
            place = node("Div", place, number(self._rates.interval))
        place = node("Max", place, number(0))
        place = node("Min", place, number(len(self._rates.values) - 1))
        table = self.assembly.constant(self._rates.values, label="rates")
        scheduled = node("Gather", table, place, axis=0)
        return node("Where", node("IsNaN", rate), scheduled, rate)

    def _scale(self, k: int, term: LossTerm) -> str:
        """Factor / denominator of a step; 0 where the weights sum to 0."""
        if (k, term.index) not in self._known:
            self._known[k, term.index] = self._scale_of(k, term)
        return self._known[k, term.index]

    def _scale_of(self, k: int, term: LossTerm) -> str:
        alike = term.weight is None and self._masks[term.index] is None
        mean = self.problem.reduction == "mean"
        factor = self._factor(term)
        if alike and not mean:
            return factor
        known = self._fixed(term) if alike else None
        if known is not None:
            total = self.assembly.constant(known * self._count)
            return self.assembly.node("Div", factor, total)
        zero = self.assembly.constant(0.0)
        total = self._added([self._denominator(k, j, term) for j in range(self._count)])
        scale = self.assembly.node("Div", factor, total) if mean else factor
        empty = self.assembly.node("Equal", total, zero)
        return self.assembly.node("Where", empty, zero, scale)

    def _factor(self, term: LossTerm) -> str:
        """The factor of a loss, which is an input: onnxruntime would fuse products by a constant."""
        port = Port("hyperparameter", of=f"{term.prefix}/factor")
        self.defaults[port] = float(term.factor)
        return self.assembly.input(port, str(port.of), DOUBLE, ())

    def _fixed(self, term: LossTerm) -> float | None:
        """The denominator of a batch whose rows have equal weights, if all sizes are known."""
        sizes = [size for size in term.samples[1:] if isinstance(size, int)]
        if self.rows is None or len(sizes) < len(term.samples) - 1:
            return None
        return float(self.rows * math.prod(sizes))

    def _denominator(self, k: int, j: int, term: LossTerm) -> str:
        """The sum of the contributions of a batch's rows to the denominator."""
        node = self.assembly.node
        mask = self._masks[term.index]
        if mask is not None:
            return node("ReduceSum", self.run(mask, place=(k, j))["rows"], keepdims=0)
        moved = term.at(k, j, self.rows)
        if moved.label is not None and moved.label_port is not None:
            rows = label = self.column(moved.label_port, moved.label)
        else:
            data = self.problem.model.inputs[0]
            rows, label = self.column(Port("data", of=data.name, step=k, batch=j), data), ""
        elements = self._elements(term, label)
        if moved.weight is None or moved.weight_port is None:
            return node("Mul", self._size(rows, 0), elements)
        weight = self.column(moved.weight_port, moved.weight)
        wide = node("Cast", weight, to=DOUBLE)
        share = elements
        for axis, size in enumerate((moved.weight.shape or ())[1:], 1):
            if isinstance(size, int):
                # onnxruntime 1.16 and 1.19 crash while they fold Shape of an axis whose size is known.
                counted = self.assembly.constant(float(size))
            else:
                counted = self._size(weight, axis)
            share = node("Div", share, counted)
        return node("ReduceSum", node("Mul", wide, share), keepdims=0)

    def _elements(self, term: LossTerm, label: str) -> str:
        """The number of loss values in a row."""
        shape = None if term.label is None or not label else term.label.shape
        axes = {d: k for k, d in enumerate(shape or ())}
        number = self.assembly.constant(1.0)
        for size in term.samples[1:]:
            if isinstance(size, int):
                known = self.assembly.constant(float(size))
            elif size in axes:
                known = self._size(label, axes[size])
            else:
                raise GraphError(
                    f"the size {size!r} of the values of the {term.loss.name} loss is known "
                    "neither from the model nor from the labels; use reduction='sum'"
                )
            number = self.assembly.node("Mul", number, known)
        return number

    def _size(self, tensor: str, axis: int) -> str:
        """The size of an axis, in float64."""
        shape = self.assembly.node("Shape", tensor)
        size = self.assembly.node("Gather", shape, self.assembly.constant(axis, "int64"), axis=0)
        return self.assembly.node("Cast", size, to=DOUBLE)


def _role(key: Key) -> str:
    return key.role if isinstance(key, Port) else ""


class Scalars:
    """The values of host expressions as tensors of an assembly; equal expressions are computed once."""

    def __init__(self, assembly: Assembly, symbol: Callable[[str], str]) -> None:
        self._assembly = assembly
        self._nodes = HostNodes(symbol, assembly.constant, assembly.node)
        self._cast: dict[tuple[str, int], str] = {}

    def cast(self, expression: Host, dtype: int) -> str:
        """The name of a scalar of any type."""
        name = self._nodes.value(expression)
        if dtype == TensorProto.DOUBLE:
            return name
        if (name, dtype) not in self._cast:
            self._cast[name, dtype] = self._assembly.node("Cast", name, to=dtype)
        return self._cast[name, dtype]
