"""Updates of large parameters in place, block by block, instead of in the graph of a step.

onnxruntime's elementwise kernels write every intermediate result of a large update to memory, and
the graph needs a second version of weights and slots. Here the blocks stay in the cache, and only
one version exists. numpy computes them, or a kernel that is compiled from the formula and reads and
writes memory once. Both have the same bits, so a kernel may replace numpy in any step: it is
compiled while the first steps run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.updating import slot_port
from ortflex_core.compiler.programs.formulas import (
    PARAMETER,
    Constant,
    Formula,
    Operand,
    gradient_factor,
    update_formula,
)
from ortflex_core.kernel.host_scalars import Host, HostProgram
from ortflex_core.kernel.types import Array

_FUNCTIONS: Mapping[str, np.ufunc] = {
    "Abs": np.absolute,
    "Add": np.add,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Reciprocal": np.reciprocal,
    "Sign": np.sign,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
}
_BLOCK = 2**16
"""Elements of a block: fewer cost more calls, more do not stay in the cache."""
_LARGE = 2**18
"""Smaller parameters are updated in the graph: the kernels find them in the cache."""
_SHORT = 4
"""An update with fewer operators stays in the graph, where it may be part of a matrix product."""
_RATE, _COUNTER = Port("rate").label, Port("counter").label
_Place = Port | int | np.ndarray[Any, Any]
"""Where an operand is: an input, the memory of an intermediate result, or a scalar."""
_Call = tuple[np.ufunc, tuple[_Place, ...], Port | int]
"""A function of numpy, its operands, and where its result is."""
_BoundCall = tuple[np.ufunc, tuple[Array, ...], Array]
_Run = Callable[[], None]
"""Updates a part of a parameter."""
_SHARE = 2**19
"""Elements of a compiled update for which one more thread is worth its start."""


class UpdateKernel(Protocol):
    """A compiled formula: one pass over memory, with the bits of numpy's functions.

    It returns without the lock of the interpreter held meanwhile, so that several run at a time.
    """

    def bind(
        self, tensors: Mapping[Port, Array], scalars: Mapping[Host, Array]
    ) -> Callable[[], None]:
        """A call that updates tensors in place.

        Args:
            tensors: parameter, gradient and slots by their ports: contiguous, of one length and type.
            scalars: the host scalars of the formula, as arrays of rank 0 that are filled before a call.
        """


KernelCompiler = Callable[[Formula, "np.dtype[Any]"], UpdateKernel | None]
"""Compiles a formula for a type of numbers; None if it cannot. It is called from a thread."""


def host_formulas(problem: Problem) -> dict[str, Formula]:
    """The updates of the large parameters, if numpy computes them faster than the graph does.

    The gradients of these parameters are outputs of the graph then.
    """
    # A step that recomputes tensors updates a weight as soon as it can, to free the gradient.
    if problem.is_lowered or problem.sharing or problem.recomputed is not False:
        return {}
    large = [n for n in problem.parameters if math.prod(problem.shape_of(n)) >= _LARGE]
    # The sum of the gradients of several batches does not include a factor.
    factor = gradient_factor(problem) if problem.updating.accumulate == 1 else None
    of_kind: dict[Any, Formula | None] = {}  # equal layers have equal formulas
    formulas = {}
    for name in large:
        kind = _kind(problem, name)
        if kind not in of_kind:
            of_kind[kind] = _host_formula(problem, name, factor)
        if (formula := of_kind[kind]) is not None:
            formulas[name] = formula
    return formulas


def _kind(problem: Problem, name: str) -> tuple[Any, ...]:
    """Everything on which the formula of a parameter depends, within one problem."""
    group = problem.updating.group(name)
    constraints = tuple(c.prefix for c in problem.updating.constraints if name in c.parameters)
    dtype = problem.model.initializers[name].dtype
    return dtype, problem.shape_of(name), None if group is None else group.index, constraints


def _host_formula(problem: Problem, name: str, factor: Host | None) -> Formula | None:
    """The update of a parameter, if numpy can compute it in place."""
    shape, dtype = problem.shape_of(name), problem.model.initializers[name].dtype
    slots = [problem.slot_specs[slot_port(slot, name)] for slot in problem.slots_of(name)]
    if dtype not in (TensorProto.FLOAT, TensorProto.DOUBLE) or any(s.shape != shape for s in slots):
        return None
    formula = update_formula(problem, name, shape, _FUNCTIONS, factor)
    if formula is None or len(formula.lines) < _SHORT:
        return None
    for line in formula.lines:
        constants = [o for o in line.operands if isinstance(o, Constant)]
        if len(line.operands) != _FUNCTIONS[line.operator].nin or any(c.shape for c in constants):
            return None
        if not any(isinstance(o, Port | int) for o in line.operands):
            return None  # one number, not a tensor
    return formula if _is_in_place(formula) else None


def _is_in_place(formula: Formula) -> bool:
    """Whether each new value has a line of its own, after which no line reads the old value."""
    last, lines = formula.last_uses, set(formula.results.values())
    return len(lines) == len(formula.results) and all(
        isinstance(line, int) and last.get(port, -1) <= line
        for port, line in formula.results.items()
    )


class HostUpdates:
    """The updates of some parameters, whose tensors have one version.

    Args:
        problem: what is trained.
        formulas: the updates by parameter, as :func:`host_formulas` returns them.
        views: the memory of every parameter, of its gradient and of its slots, by their ports.
        compiler: compiles formulas; without one, or until its kernels are there, numpy computes.
    """

    def __init__(
        self,
        problem: Problem,
        formulas: Mapping[str, Formula],
        views: Mapping[Port, Array],
        compiler: KernelCompiler | None = None,
    ) -> None:
        self._values: dict[str, float] = dict(problem.constants())
        self._scalars: dict[tuple[Host, Any], Array] = {}
        self._threads = problem.threads
        self._updates: list[tuple[Formula, dict[Port, Array]]] = []
        for name, formula in formulas.items():
            of_parameter = {
                attrs.evolve(port, of=None): view.reshape(-1)
                for port, view in views.items()
                if port.of == name
            }
            self._updates.append((formula, of_parameter))
        self._parts = self._by_numpy(self._updates)
        self._hosts = HostProgram([expression for expression, _ in self._scalars])
        self.compiled = 0
        """The number of parameters that kernels update."""
        self._kernels: Future[list[UpdateKernel | None]] | None = None
        if compiler is not None:
            wanted = [(formula, tensors[PARAMETER].dtype) for formula, tensors in self._updates]
            pool = ThreadPoolExecutor(1)
            self._kernels = pool.submit(_compile, compiler, wanted)
            pool.shutdown(wait=False)  # the thread ends with its only task

    def wait(self) -> None:
        """Wait until kernels are compiled; the next step uses them."""
        if self._kernels is not None:
            self._kernels.result()

    def run(self, rate: float, step: int) -> None:
        """Update all parameters from their gradients; ``step`` is counted from 1."""
        if self._kernels is not None and self._kernels.done():
            self._use(self._kernels.result())
        self._values[_RATE], self._values[_COUNTER] = rate, step
        numbers = self._hosts(self._values)
        for scalar, number in zip(self._scalars.values(), numbers, strict=True):
            scalar.fill(number)
        first, *others = self._parts
        if not others:
            _run_all(first)
            return
        # New threads in every step: a child after a fork would wait for those of its parent.
        with ThreadPoolExecutor(len(others)) as pool:
            pending = [pool.submit(_run_all, part) for part in others]
            _run_all(first)
        for future in pending:
            future.result()

    def _by_numpy(self, updates: Sequence[tuple[Formula, dict[Port, Array]]]) -> list[list[_Run]]:
        """The updates by numpy, in parts for threads."""
        blocks = []
        for formula, tensors in updates:
            calls = self._calls(formula, tensors[PARAMETER].dtype)
            for start in range(0, tensors[PARAMETER].size, _BLOCK):
                block = {p: v[start : start + _BLOCK] for p, v in tensors.items()}
                blocks.append((calls, block))
        threads = min(self._threads, len(blocks))
        # Every thread has its own blocks, and its own memory for intermediate results.
        bound = [_bind(blocks[k::threads]) for k in range(threads)]
        return [[functools.partial(_run, calls)] for calls in bound]

    def _use(self, kernels: Sequence[UpdateKernel | None]) -> None:
        """Replace numpy by kernels where there are some."""
        self._kernels = None
        both = list(zip(self._updates, kernels, strict=True))
        parts = self._by_numpy([update for update, kernel in both if kernel is None])
        compiled = [(tensors, kernel) for (_, tensors), kernel in both if kernel is not None]
        total = sum(tensors[PARAMETER].size for tensors, _ in compiled)
        threads = max(1, min(self._threads, total // _SHARE))
        parts += [[] for _ in range(threads - len(parts))]
        for tensors, kernel in compiled:
            dtype = tensors[PARAMETER].dtype
            scalars = {
                host: array for (host, kind), array in self._scalars.items() if kind == dtype
            }
            for k, (start, end) in enumerate(_shares(tensors[PARAMETER].size, threads)):
                share = {port: view[start:end] for port, view in tensors.items()}
                parts[k].append(kernel.bind(share, scalars))
        self._parts, self.compiled = parts, len(compiled)

    def _calls(self, formula: Formula, dtype: Any) -> list[_Call]:
        """The calls for a block, with as few intermediate results at a time as possible."""
        ports = {line: port for port, line in formula.results.items()}
        last = formula.last_uses
        places: dict[Operand, Port | int] = {}
        calls: list[_Call] = []
        free: list[int] = []
        count = 0
        for k, line in enumerate(formula.lines):
            operands: list[_Place] = []
            for operand in line.operands:
                if isinstance(operand, Host):
                    scalar = self._scalars.setdefault((operand, dtype), np.empty((), dtype))
                    operands.append(scalar)
                elif isinstance(operand, Constant):
                    operands.append(operand.array)
                else:
                    operands.append(places[operand] if isinstance(operand, int) else operand)
            free += [
                place
                for operand in set(line.operands)
                if isinstance(place := places.get(operand), int) and last[operand] == k
            ]
            if k in ports:
                places[k] = ports[k]
            elif free:
                places[k] = free.pop()
            else:
                places[k] = count
                count += 1
            calls.append((_FUNCTIONS[line.operator], tuple(operands), places[k]))
        return calls


def _bind(blocks: Sequence[tuple[Sequence[_Call], Mapping[Port, Array]]]) -> list[_BoundCall]:
    """The calls of all blocks with their arrays; the blocks share memory for intermediate results."""
    memory: dict[tuple[int, Any], Array] = {}

    def array(place: _Place, block: Mapping[Port, Array]) -> Array:
        if isinstance(place, Port):
            return block[place]
        if isinstance(place, int):
            of_block = block[PARAMETER]
            key = (place, of_block.dtype)
            if key not in memory:
                memory[key] = np.empty(_BLOCK, of_block.dtype)
            return memory[key][: of_block.size]
        return place

    return [
        (function, tuple(array(place, block) for place in operands), array(result, block))
        for calls, block in blocks
        for function, operands, result in calls
    ]


def _compile(
    compiler: KernelCompiler, wanted: Sequence[tuple[Formula, np.dtype[Any]]]
) -> list[UpdateKernel | None]:
    """The kernels of formulas; equal layers share one."""
    found: dict[tuple[int, np.dtype[Any]], UpdateKernel | None] = {}
    for formula, dtype in wanted:
        key = (id(formula), dtype)
        if key not in found:
            found[key] = compiler(formula, dtype)
    return [found[id(formula), dtype] for formula, dtype in wanted]


def _shares(size: int, count: int) -> Iterator[tuple[int, int]]:
    """The ranges of almost equal parts, which begin at whole lines of the cache."""
    step = max(-(-size // count // 16) * 16, 1)
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _run_all(part: Sequence[_Run]) -> None:
    for run in part:
        run()


def _run(calls: Sequence[_BoundCall]) -> None:
    with np.errstate(all="ignore"):  # the loss reports a run that diverged
        for function, operands, result in calls:
            function(*operands, out=result)
