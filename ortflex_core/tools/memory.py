"""An estimate of the memory of a training step, made without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from onnx import ModelProto

from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.model.model import Model, as_model
from ortflex_core.compiler.problem import losses
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs.step import gradient_program, step_program
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.compiler.runtime.memory_plan import Schedule
from ortflex_core.compiler.runtime.session import find_peak, make_schedule, takes_pattern
from ortflex_core.kernel.errors import ConfigError
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import TensorSpec
from ortflex_core.training.config.arguments import ASSUMED_LOSS, Arguments
from ortflex_core.training.engines.host_updates import host_formulas
from ortflex_core.training.setup import resolve

_MIB = 2**20
_LOST = 8
"""Without planned memory, onnxruntime needs about this fraction more: 1.05 to 1.2 were measured."""
_SESSIONS = 10 * _MIB
"""Sessions of steps with some hundred nodes, and what Python allocates with them."""


@attrs.frozen(kw_only=True)
class LargeTensor:
    """A tensor that is in memory when a step needs the most memory.

    Attributes:
        name: of the tensor.
        node: the name of the node that computes it, in the model or in the step.
        operator: its operator.
        size: in bytes.
    """

    name: str
    node: str
    operator: str
    size: int


@attrs.frozen(kw_only=True)
class MemoryReport:
    """The result of :func:`estimate_memory`.

    Attributes:
        batch_size: rows of a batch.
        parts: bytes by their purpose.
        largest: the largest tensors of the step at its peak, the largest first.
        recomputed: bytes of all parts with ``recompute=True``.
    """

    batch_size: int
    parts: Mapping[str, int]
    largest: tuple[LargeTensor, ...]
    recomputed: int

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def summary(self) -> str:
        """The total in one line, and the total with recompute=True."""
        return (
            f"a step with batch_size={self.batch_size} needs about {mebibytes(self.total)}, and with "
            f"recompute=True about {mebibytes(self.recomputed)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; sizes in bytes."""
        return {
            "batch_size": self.batch_size,
            "parts": dict(self.parts),
            "total": self.total,
            "recomputed": self.recomputed,
            "largest": [attrs.asdict(tensor) for tensor in self.largest],
        }


def mebibytes(size: int) -> str:
    """A size for messages.

    >>> mebibytes(3 * 2**20)
    '3.0 MiB'
    """
    return f"{size / _MIB:,.1f} MiB"


def estimate_memory(
    model: Any, sizes: Mapping[str, int] | None = None, **arguments: Any
) -> MemoryReport:
    """Estimate the memory that a step of the backend ``fused`` takes on a CPU.

    The step is planned as for training: the tensors that are alive at its peak are counted, next
    to weights and optimizer state, of which there may be two versions. The memory of Python and the
    libraries (about 150 MiB), the dataset, the working memory of kernels, and the copy of the state
    that ``fit`` keeps at the start of an epoch are not counted.

    Args:
        model: a path, the file's bytes, a ModelProto, or a :class:`Model`.
        sizes: the sizes of axes that the file does not define, except the batch, by their names in
            the file, or as ``input[axis]``.
        arguments: as for :class:`Trainer`; ``batch_size``, ``optimizer`` and ``recompute`` matter
            most. Without ``loss`` it is the squared error on every float output.

    Raises:
        ConfigError: a size is missing; all that are missing are named.
        ModelError, Unsupported: the model cannot be trained.

    Example:
        >>> import onnx.parser
        >>> made = onnx.parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y) '
        ...     "<float[2, 1] w = {1, 2}> { y = MatMul(x, w) }"
        ... )
        >>> estimate_memory(made, batch_size=64).parts["a batch of data"]
        768
    """
    source = _set_sizes(
        as_model(model, bool(arguments.get("free_batch", False))), dict(sizes or {})
    )
    if fixed := source.fixed_batch:
        arguments = {"batch_size": fixed[1], **arguments}
    if "loss" not in arguments:
        floats = [o.name for o in source.outputs if o.dtype in FLOATS]
        arguments["loss"] = (
            ASSUMED_LOSS if len(floats) == 1 else dict.fromkeys(floats, ASSUMED_LOSS)
        )
    plugins = Plugins.given(arguments.pop("plugins", None))
    setup = resolve(require_runtime(), plugins, source, Arguments(**arguments))
    labels = losses.expected_labels(setup.model, setup.requests)
    problem = attrs.evolve(
        setup.problem, terms=losses.bind_terms(setup.model, setup.requests, labels, {})
    )
    rows = problem.batch_size
    program = _make_program(attrs.evolve(problem, recompute=False))
    plain = make_schedule(program, setup.device)
    recomputing = attrs.evolve(problem, recompute=problem.recompute or True)
    again = make_schedule(_make_program(recomputing), setup.device)
    schedule = plain if problem.recompute is False else again
    peak = find_peak(schedule)
    nodes = {o: n for n in schedule.model.graph.node for o in n.output}
    parts = dict(_list_parts(problem, setup.model, schedule, peak.size))
    largest = tuple(
        LargeTensor(name=n, node=nodes[n].name, operator=nodes[n].op_type, size=size)
        for n, size in list(peak.live.items())[:10]
    )
    recomputed = sum(
        dict(_list_parts(recomputing, setup.model, again, find_peak(again).size)).values()
    )
    if problem.recompute is False and takes_pattern(program):
        parts["the same amount again, because small steps reserve it in advance"] = peak.size
    return MemoryReport(batch_size=rows, parts=parts, largest=largest, recomputed=recomputed)


def _make_program(problem: Problem) -> Program:
    """The graph that computes the gradients of a batch."""
    if problem.updating.accumulate > 1:
        return gradient_program(problem, rows=problem.batch_size)
    elsewhere = host_formulas(problem)
    return step_program(problem, rows=problem.batch_size, updated_elsewhere=elsewhere)


def _list_parts(
    problem: Problem, model: Model, schedule: Schedule, step: int
) -> Iterator[tuple[str, int]]:
    """The memory of a run by its purpose; ``step`` is that of the tensors of a step."""
    specs = model.initializers
    trained = sum(_bytes(specs[n], 1) for n in problem.parameters)
    every = sum(_bytes(spec, 1) for spec in specs.values())
    # Arrays of large models are in memory once, unless their type is raised.
    outside = frozenset() if model.half else model.files.outside
    once = outside - set(problem.parameters)
    copied = every - trained - sum(_bytes(specs[n], 1) for n in once if n in specs)
    adding = problem.updating.accumulate > 1
    large = set(host_formulas(problem))
    in_place = set(problem.parameters) if schedule.in_place and not adding else large
    twice = set(problem.parameters) - in_place
    label = "" if not twice else ", two versions"
    label += " of the small ones" if twice and in_place else ""
    state = {port: _bytes(spec, 1) for port, spec in problem.slot_specs.items()}
    weights = trained + sum(_bytes(specs[n], 1) for n in twice)
    slots = sum(state.values())
    slots += sum(size for port, size in state.items() if port.of not in in_place)
    yield "the model as read from the file", every
    yield f"weights{label}", weights
    if slots:
        yield f"optimizer state{label}", slots
    if large:
        yield "gradients of the large ones", sum(_bytes(specs[n], 1) for n in large)
    if adding:
        yield "gradients that are added up", 3 * trained
    if copied:
        yield "frozen tensors", copied
    batch = sum(_bytes(s, problem.batch_size) for s in problem.columns)
    yield "a batch of data", batch
    yield "tensors of the step at its peak", step
    if not schedule.block:
        yield "lost by onnxruntime's allocator between these tensors, about", step // _LOST
    yield "graphs and sessions, about", _SESSIONS
    # Before the first step, the values of the weights are copied from arrays to the engine.
    copying = 2 * trained - (weights + slots + batch + step)
    if copying > 0:
        yield "more than that while the weights are copied at the start", copying


def _bytes(spec: TensorSpec, rows: int) -> int:
    shape = [d if isinstance(d, int) else rows for d in spec.shape or ()]
    return math.prod(shape) * spec.numpy.itemsize


def _set_sizes(model: Model, sizes: dict[str, int]) -> Model:
    """The model with the sizes of axes that the file does not define."""
    open_axes = {
        (spec.name, k)
        for spec in model.inputs
        for k, d in enumerate(spec.shape or ())
        if k and not isinstance(d, int)  # the first axis is the batch
    }
    if not open_axes:
        return model
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    missing = {}
    for value in proto.graph.input:
        for k, dim in enumerate(value.type.tensor_type.shape.dim):
            if (value.name, k) not in open_axes:
                continue
            key = dim.dim_param or f"{value.name}[{k}]"
            size = sizes.get(key, sizes.get(f"{value.name}[{k}]"))
            if size is None:
                missing[key] = f"axis {k} of the input {value.name!r}"
            else:
                dim.dim_value = size
    if missing:
        raise ConfigError(
            f"memory: the size {key!r} ({place}) is not in the file; give it: sizes={{{key!r}: 128}}, "
            f"--size {key}=128"
            for key, place in missing.items()
        )
    return Model(proto, free_batch=model.free_batch, files=model.files)
