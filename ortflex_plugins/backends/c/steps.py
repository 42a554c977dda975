"""The programs of a step as compiled functions on memory of the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Key,
    Port,
    Problem,
    Program,
    get_program,
    gradient_program,
    problem_key,
    step_program,
    update_program,
)
from ortflex_plugins.backends.epoch_runs import PENALTY, HostNumbers, first_state
from ortflex_plugins.c.compiler import find_compiler, load_library
from ortflex_plugins.c.generator import Generated, Layout, Memory, generate
from ortflex_plugins.c.products import Machine

MOST_FLOPS = 2e8
"""Operations of a step's products: beyond, onnxruntime's products are faster."""


def machine() -> Machine:
    """What the products are written for: the CPU that the compiler compiles for."""
    abilities = find_compiler().abilities
    lanes, registers = 4, 16
    if "__AVX512F__" in abilities:
        lanes, registers = 16, 32
    elif "__AVX__" in abilities:
        lanes = 8
    elif "__aarch64__" in abilities:
        registers = 32
    fma = not abilities.isdisjoint({"__FMA__", "__aarch64__", "__AVX512F__"})
    return Machine(lanes=lanes, registers=registers, fma=fma)


def layout_of(problem: Problem) -> Layout:
    """What the engine keeps: weights, slots, running statistics, and gradients of several batches."""
    state = first_state(problem)
    if problem.updating.accumulate > 1:
        state |= {
            Port("gradient", of=n): state[Port("parameter", of=n)] for n in problem.parameters
        }
    return Layout.of([Memory(port, a.shape, a.dtype) for port, a in state.items()])


@attrs.frozen
class Part:
    """A program of a step: its graph, its file of C, and its host scalars."""

    program: Program
    generated: Generated
    numbers: HostNumbers


def part_of(problem: Problem, kind: str, rows: int | None) -> Part:
    """The part ``"step"``, ``"gradient"`` or ``"update"`` for batches of some rows.

    Raises:
        NotTranslatable: what has no form in C.
    """
    target = machine()
    key = ("c", kind, problem_key(problem), rows, problem.batch_size, target)
    made: Part = get_program(key, lambda: build_part(problem, kind, rows, target))
    return made


def build_part(problem: Problem, kind: str, rows: int | None, target: Machine) -> Part:
    """A part for a machine; see :func:`part_of`."""
    costs: list[Key] = []
    if kind == "update":
        program = update_program(problem)
    elif kind == "gradient":
        program = gradient_program(problem, rows=rows, relu_mask="Sign")
    else:
        program = step_program(problem, rows=rows, relu_mask="Sign")
    if kind != "update":
        costs += [t.total_port for t in problem.terms]
    if PENALTY in program.gives:
        costs.append(PENALTY)
    columns = list(problem.column_ports.values())
    made = generate(program, layout_of(problem), columns, costs, target, MOST_FLOPS)
    return Part(program, made, HostNumbers(program))


_BYTE = ctypes.c_char


class Compiled:
    """A part as a function, with the memory of its intermediate tensors."""

    def __init__(self, part: Part, state: int) -> None:
        self.part = part
        self._library = load_library(part.generated.source)
        self._function = self._library.ortflex_step
        kinds: list[Any] = [ctypes.c_void_p] * 7
        kinds[4] = ctypes.c_int64
        self._function.argtypes = kinds
        self._function.restype = ctypes.c_int
        self._state = state
        self._memory = aligned(part.generated.arena)
        self._arena = address(self._memory)
        self._data: Any = None
        self._pointers: Any = None
        self._columns = 0
        self._hosts: Array | None = None
        self._host_address = 0

    def __call__(
        self, data: Sequence[Array], rows: Array, steps: int, hosts: Array
    ) -> tuple[Array, bool]:
        """Run steps: the costs of each, and whether all positions were in range.

        ``data`` are the columns and the frozen tensors, C-contiguous and of the sizes of the program.
        """
        if data is not self._data:
            self._data = data
            self._pointers = (ctypes.c_void_p * max(1, len(data)))(*map(address, data))
            self._columns = ctypes.addressof(self._pointers)
        if hosts is not self._hosts:
            self._hosts, self._host_address = hosts, address(hosts)
        costs = np.empty((steps, self.part.generated.costs))
        wrong = self._function(
            self._state,
            self._arena,
            self._columns,
            address(rows),
            steps,
            self._host_address,
            address(costs),
        )
        return costs, not wrong


def address(array: Array) -> int:
    """Where an array begins."""
    if array.size and array.flags.writeable:
        return ctypes.addressof(_BYTE.from_buffer(array.data))  # in half the time of the next line
    return array.ctypes.data


def aligned(size: int) -> Array:
    """Zeroed memory at a multiple of 64."""
    whole = np.zeros(size + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + size]


def views(layout: Layout, block: Array) -> Mapping[Key, Array]:
    """The tensors of a state in its memory."""
    out: dict[Key, Array] = {}
    for memory, place in zip(layout.memory, layout.places, strict=True):
        size = int(np.prod(memory.shape, dtype=np.int64)) * memory.dtype.itemsize
        own = block[place.start : place.start + size].view(memory.dtype)
        out[memory.key] = own.reshape(memory.shape)
    return out
