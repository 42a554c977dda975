"""A program of known sizes as one file of C99: all its loops, and the memory that they need.

The file has no static state and calls ``math.h`` only, so several instances run side by side. Its
function runs some steps::

    int ortflex_step(struct ortflex_state *s, struct ortflex_arena *a, const void *const *data,
                     const int64_t *rows, int64_t steps, const double *hosts, double *costs);

``s`` is what the program keeps between steps, ``a`` memory for intermediate tensors, ``data`` the
columns of the training data and the frozen tensors, ``rows`` the rows of all batches, ``hosts`` the
host scalars of all steps, and ``costs`` what they cost. The result is not 0 if a position that the
data give was out of range. Names and numbers of the model are never part of the text, but for
constants and sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, Key, Program, numpy_dtype, onnx_dtype
from ortflex_plugins.c import functions, products
from ortflex_plugins.c.arena import Need, plan
from ortflex_plugins.c.arrays import CForms, Tensor, Tracing, row_major
from ortflex_plugins.c.loops import (
    Kernel,
    assemble_kernel,
    c_type,
    cumulate_kernel,
    indented,
    map_kernel,
    plain_strides,
    reduce_kernel,
    scatter_kernel,
)
from ortflex_plugins.c.products import Machine, product_kernel
from ortflex_plugins.c.scalars import C_TYPES, HEADERS, literal
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.translation import Translation

_MOST_TEXT = 500_000
"""Characters of a file: the compiler needs about 10 seconds for them."""
_MOST_CONSTANTS = 1 << 20
"""The bytes of tables of constants."""


@attrs.frozen
class Memory:
    """A tensor that the program keeps: its key among the inputs and outputs, shape and type."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@attrs.frozen
class Place:
    """Where a tensor of the state is: the member of ``struct ortflex_state``, and its first element."""

    member: str
    offset: int
    start: int
    """The offset in bytes from the beginning of the struct."""


@attrs.frozen
class Layout:
    """The state of a program: what is where, and the bytes of all."""

    memory: tuple[Memory, ...]
    places: tuple[Place, ...]
    members: tuple[tuple[str, str, int], ...]
    """Name, type and number of elements of the members of the struct."""
    size: int

    @classmethod
    def of(cls, memory: Sequence[Memory]) -> Layout:
        """Tensors of one type are side by side, each at a multiple of 64 bytes."""
        places: dict[int, Place] = {}
        members = []
        start = 0
        for dtype in dict.fromkeys(m.dtype for m in memory):
            if dtype.name not in C_TYPES:
                raise NotTranslatable(f"tensors of {dtype.name}")
            count, align = 0, 64 // dtype.itemsize
            for k, own in enumerate(memory):
                if own.dtype == dtype:
                    places[k] = Place(member_of(dtype), count, start + count * dtype.itemsize)
                    count += -(-int(np.prod(own.shape, dtype=np.int64)) // align) * align
            members.append((member_of(dtype), C_TYPES[dtype.name], count))
            start += count * dtype.itemsize
        ordered = tuple(places[k] for k in range(len(memory)))
        return cls(tuple(memory), ordered, tuple(members), start)

    @property
    def by_key(self) -> dict[Key, Place]:
        """The places by the keys of the tensors."""
        return {m.key: place for m, place in zip(self.memory, self.places, strict=True)}


def member_of(dtype: np.dtype[Any]) -> str:
    """The member of a struct that has the tensors of a type."""
    return f"{dtype.kind}{dtype.itemsize * 8}"


@attrs.frozen
class Generated:
    """A file of C.

    Attributes:
        source: its text.
        arena: the bytes of ``struct ortflex_arena``.
        columns: the keys of the columns, in their order in ``data``.
        frozen: the keys of the frozen tensors, which follow them.
        data: shapes and types of both; the rows of a column are those of a batch.
        costs: the number of costs of a step.
        nodes: the number of functions that a step calls.
        flops: the operations of the products of a step.
    """

    source: str
    arena: int
    columns: tuple[Key, ...]
    frozen: tuple[Key, ...]
    data: tuple[tuple[tuple[int, ...], str], ...]
    costs: int
    nodes: int
    flops: int


def generate(
    program: Program,
    layout: Layout,
    columns: Sequence[Key],
    costs: Sequence[Key],
    machine: Machine | None = None,
    most_flops: float = float("inf"),
) -> Generated:
    """The file of a program.

    Args:
        program: its sizes are all known.
        layout: what it keeps. An output with such a key becomes the new value.
        columns: the inputs that are rows of the data.
        costs: the outputs of one element that are given back, in this order.
        machine: what the products are written for.
        most_flops: the most operations of a step's products.

    Raises:
        NotTranslatable: an operator, a type or a size that is unknown, or a step that is too large.
    """
    return _File(program, layout, columns, costs, machine or Machine(), most_flops).generated()


class _File:
    def __init__(
        self,
        program: Program,
        layout: Layout,
        columns: Sequence[Key],
        costs: Sequence[Key],
        machine: Machine,
        most_flops: float,
    ) -> None:
        self._layout, self._machine = layout, machine
        self._trace = Tracing()
        self._columns: dict[Key, Tensor] = {}
        self._frozen: dict[Key, Tensor] = {}
        self._states: dict[int, Tensor] = {}
        kept = {m.key: k for k, m in enumerate(layout.memory)}
        feeds: dict[str, Any] = {}
        for key, spec in program.takes.items():
            shape = tuple(n for n in spec.shape or () if isinstance(n, int))
            if spec.shape is None or len(shape) < len(spec.shape):
                raise NotTranslatable(f"the input {spec.name!r} whose size is unknown")
            if key in kept:
                own = layout.memory[kept[key]]
                tensor = self._trace.input("state", kept[key], own.shape, own.dtype)
                self._states[kept[key]] = tensor
                feeds[spec.name] = tensor.reshape(shape)
                continue
            kind, known = ("column", self._columns) if key in columns else ("frozen", self._frozen)
            known[key] = self._trace.input(kind, len(known), shape, numpy_dtype(spec.dtype))
            feeds[spec.name] = known[key]
        for k, host in enumerate(program.hosts):
            feeds[host.spec.name] = self._trace.input("host", k, (), host.spec.numpy)
        self._hosts = [h.spec.numpy for h in program.hosts]
        try:
            found = Translation(program, CForms(self._trace))(feeds)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise NotTranslatable(f"this model: {str(error).splitlines()[0]}") from error
        results = {key: found[spec.name] for key, spec in program.gives.items()}
        self._costs = [self._trace.lift(results[key]).reshape(()) for key in costs]
        self._new: dict[int, Tensor] = {}
        for key, k in kept.items():
            if key in results:
                own = layout.memory[k]
                value = self._trace.lift(results[key])
                if value.size != int(np.prod(own.shape, dtype=np.int64)):
                    raise NotTranslatable(f"a new value of {key} with the shape {value.shape}")
                self._new[k] = value.astype(own.dtype).reshape(own.shape)
        self._order: list[Kernel] = []
        self._target: dict[int, int] = {}
        self._widths: set[tuple[str, int]] = set()
        self.flops = 0
        self._analyse(most_flops)

    # What is computed where --------------------------------------------------------------------

    def _analyse(self, most_flops: float) -> None:
        copies = self._targets()
        roots = [*self._costs, *self._new.values(), *copies]
        needed = self._reach(roots)
        for node in needed.values():
            if node.op == "dot":
                depth = node.inputs[0].shape[-1]
                self.flops += 2 * node.size * depth
        if self.flops > most_flops:
            raise NotTranslatable(
                f"products of {self.flops / 1e6:.0f} million operations a step (its limit is "
                f"{most_flops / 1e6:.0f} million)"
            )
        uses: dict[int, list[tuple[Tensor | None, bool]]] = {}
        for node in needed.values():
            if node.op == "view":
                continue
            for k, value in enumerate(node.inputs):
                base = value.strided()[0]
                direct = value is base and not (node.op == "gather" and k == 0)
                uses.setdefault(base.number, []).append((node, direct))
        for root in roots:
            uses.setdefault(root.strided()[0].number, []).append((None, False))
        inlined: dict[int, Tensor] = {}
        for node in needed.values():
            own = uses.get(node.number, [])
            if node.op not in ("map", "gather") or node.number in self._target or len(own) != 1:
                continue
            consumer, direct = own[0]
            if direct and consumer is not None and consumer.op in _TAKES_ELEMENTS:
                inlined[node.number] = consumer
        hosted = self._hosted(needed, uses, inlined)
        self._build(needed, inlined, hosted)

    def _targets(self) -> list[Tensor]:
        """Find the nodes that become new values of the state; returns copies that are needed."""
        copies = []
        for k, value in self._new.items():
            base, offset, strides = value.strided()
            whole = offset == 0 and value.size == base.size
            whole = whole and strides in (row_major(value.shape), plain_strides(value.shape))
            if whole and base is self._states.get(k):
                continue
            free = base.op not in ("input", "constant", "view") and base.number not in self._target
            if not (whole and free):
                base = self._copy_to(k, value)
                copies.append(base)
            self._target[base.number] = k
        return copies

    def _copy_to(self, k: int, value: Tensor) -> Tensor:
        """A node that copies a value into the state ``k``.

        Equal nodes are one node; ``k`` is in its data, so that two states of one value have a copy each.
        """
        return self._trace.node(
            "map", (value,), ("Identity", ("state", k)), value.shape, value.dtype
        )

    def _reach(self, roots: Sequence[Tensor]) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node.number not in found:
                found[node.number] = node
                waiting.extend(node.inputs)
        return dict(sorted(found.items()))

    def _hosted(
        self,
        needed: Mapping[int, Tensor],
        uses: Mapping[int, list[tuple[Tensor | None, bool]]],
        inlined: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """For a node whose elements are a function of a product's: the product that computes it."""
        hosted: dict[int, Tensor] = {}
        for node in reversed(list(needed.values())):
            own = uses.get(node.number, [])
            if node.op != "dot" or node.number in self._target or len(own) != 1:
                continue
            root, direct = own[0]
            if not direct or root is None or root.op != "map":
                continue
            while root.number in inlined and inlined[root.number].op == "map":
                root = inlined[root.number]
            if root.number not in inlined and root.number not in hosted:
                hosted[root.number] = node
        return hosted

    def _build(
        self,
        needed: Mapping[int, Tensor],
        inlined: Mapping[int, Tensor],
        hosted: Mapping[int, Tensor],
    ) -> None:
        inside = set(inlined)
        given = {dot.number for dot in hosted.values()}
        kernels: list[Kernel] = []
        again: dict[int, Any] = {}
        for node in needed.values():
            if node.op in ("input", "constant", "view") or node.number in inside | given:
                continue
            kernel, make = self._kernel(node, inside, hosted.get(node.number))
            kernels.append(kernel)
            again[node.number] = make
        self._order = self._schedule(kernels, again)

    def _kernel(self, node: Tensor, inside: set[int], dot: Tensor | None) -> tuple[Kernel, Any]:
        make: Any
        if node.op in ("map", "gather") and dot is None:
            register = 0 if node.number in self._target else 4 * self._machine.lanes
            make = partial(map_kernel, node, inside, register=register)
        elif node.op in ("dot", "map"):
            make = partial(product_kernel, dot or node, node, inside, self._machine, self._widths)
        elif node.op in _KERNELS:
            make = lambda _: _KERNELS[node.op](node, inside)  # noqa: E731
        else:
            raise NotTranslatable(f"the operation {node.op}")
        return make(None), make

    def _schedule(self, kernels: list[Kernel], again: Mapping[int, Any]) -> list[Kernel]:
        """An order in which a state is written after all others have read its old value.

        Without one, the new value has memory of its own and is copied in the end.
        """
        by_number = {k.out.number: k for k in kernels}
        readers: dict[int, list[int]] = {}
        needs: dict[int, set[int]] = {}
        for kernel in kernels:
            number = kernel.out.number
            needs[number] = {t.number for t in kernel.reads if t.number in by_number}
            for tensor in kernel.reads:
                if tensor.op == "input" and tensor.data[0] == "state":
                    readers.setdefault(tensor.data[1], []).append(number)
        late: dict[int, set[int]] = {}
        copied: list[int] = []
        for number, k in list(self._target.items()):
            old = self._states.get(k)
            kernel = by_number[number]
            if _reads(kernel, old) and old is not None and old.number not in kernel.identity:
                copied.append(number)
            else:
                late[number] = {r for r in readers.get(k, ()) if r != number}
        after: dict[int, list[int]] = {}
        missing: dict[int, int] = {}
        for number in by_number:
            before = needs[number] | late.get(number, set())
            missing[number] = len(before)
            for b in before:
                after.setdefault(b, []).append(number)
        ready = [n for n, count in missing.items() if count == 0]
        heapq.heapify(ready)
        done: dict[int, None] = {}
        while len(done) < len(by_number):
            if not ready:
                number = min(
                    n
                    for n in late
                    if n not in done and needs[n] <= done.keys() and not late[n] <= done.keys()
                )
                copied.append(number)
                for b in late.pop(number) - done.keys():
                    after[b].remove(number)
                ready.append(number)
                missing[number] = 0
            number = heapq.heappop(ready)
            done[number] = None
            for n in after.get(number, ()):
                missing[n] -= 1
                if missing[n] == 0:
                    heapq.heappush(ready, n)
        order = []
        for number in done:
            kernel = by_number[number]
            old = self._states.get(self._target.get(number, -1))
            if number not in copied and old is not None and _reads(kernel, old):
                kernel = again[number](old)
            order.append(kernel)
        for number in copied:
            k = self._target.pop(number)
            copy = self._copy_to(k, by_number[number].out)
            self._target[copy.number] = k
            order.append(map_kernel(copy, set()))
        return order

    def generated(self) -> Generated:
        """The file."""
        offsets, members, size = self._plan()
        tables: dict[int, str] = {}
        names: dict[str, str] = {}
        calls = [self._call(k, names, offsets, tables) for k in self._order]
        used = {name for kernel in self._order for name in kernel.calls}
        text = [
            HEADERS,
            "#if defined(_WIN32)\n#define EXPORT __declspec(dllexport)\n#elif defined(__GNUC__)",
            '#define EXPORT __attribute__((visibility("default")))\n#else\n#define EXPORT\n#endif',
            products.HELPERS,
            products.definitions(sorted(self._widths), self._machine),
            functions.definitions(sorted(used)),
            self._structs(members),
            *self._tables(tables),
            *(body.format(name) for body, name in names.items()),
            *self._step(calls, offsets, tables),
        ]
        source = "\n".join(text) + "\n"
        if len(source) > _MOST_TEXT:
            raise NotTranslatable(
                f"a step of {len(self._order)} loops: its file is too long to compile"
            )
        return Generated(
            source=source,
            arena=size,
            columns=tuple(self._columns),
            frozen=tuple(self._frozen),
            data=tuple(
                (t.shape, t.dtype.name) for t in (*self._columns.values(), *self._frozen.values())
            ),
            costs=len(self._costs),
            nodes=len(self._order),
            flops=self.flops,
        )

    def _plan(self) -> tuple[dict[int, tuple[str, int]], list[tuple[str, str, int]], int]:
        """Where intermediate tensors are: members of ``struct ortflex_arena`` and elements."""
        first: dict[int, tuple[Tensor, int]] = {}
        last: dict[int, int] = {}
        for tensor in self._columns.values():
            first[tensor.number] = (tensor, -1)
            last[tensor.number] = -1
        for step, kernel in enumerate(self._order):
            if kernel.out.number not in self._target:
                first[kernel.out.number] = (kernel.out, step)
                last[kernel.out.number] = step
            for tensor in kernel.reads:
                if tensor.number in last:
                    last[tensor.number] = step
        for tensor in self._costs:
            number = tensor.strided()[0].number
            if number in last:
                last[number] = len(self._order)
        offsets: dict[int, tuple[str, int]] = {}
        members, size = [], 0
        for dtype in dict.fromkeys(t.dtype for t, _ in first.values()):
            own = {n: (t, at) for n, (t, at) in first.items() if t.dtype == dtype}
            needs = [Need(n, t.size * dtype.itemsize, at, last[n]) for n, (t, at) in own.items()]
            made = plan(needs)
            member = member_of(dtype)
            for number, offset in made.offsets.items():
                offsets[number] = (member, offset // dtype.itemsize)
            members.append((member, C_TYPES[dtype.name], made.size // dtype.itemsize))
            size += made.size
        return offsets, members, size

    def _structs(self, members: Sequence[tuple[str, str, int]]) -> str:
        lines = []
        for name, own in (("state", self._layout.members), ("arena", members)):
            fields = " ".join(f"{kind} {member}[{count}];" for member, kind, count in own)
            lines.append(f"struct ortflex_{name} {{ {fields or 'char none[64];'} }};")
        return "\n".join(lines)

    def _tables(self, tables: Mapping[int, str]) -> list[str]:
        lines, size = [], 0
        for number, name in tables.items():
            node = self._trace.nodes[number]
            values: Array = np.frombuffer(node.data[0], node.dtype)
            size += values.nbytes
            if size > _MOST_CONSTANTS:
                raise NotTranslatable(f"constants of more than {_MOST_CONSTANTS >> 20} MiB")
            text = ", ".join(literal(v, onnx_dtype(node.dtype)) for v in values)
            lines.append(f"static const {c_type(node)} {name}[] = {{ {text} }};")
        return lines

    def _pointer(
        self, x: Tensor, offsets: Mapping[int, tuple[str, int]], tables: dict[int, str], at: int
    ) -> str:
        if x.number in self._target:
            place = self._layout.places[self._target[x.number]]
            return f"s->{place.member} + {place.offset + at}"
        if x.number in offsets:
            member, offset = offsets[x.number]
            return f"a->{member} + {offset + at}"
        if x.op == "constant":
            return f"{tables.setdefault(x.number, f'q{len(tables)}')} + {at}"
        kind, number = x.data
        if kind == "state":
            place = self._layout.places[number]
            return f"s->{place.member} + {place.offset + at}"
        if kind == "host":
            return f"&h{number}"
        return f"z{number} + {at}"

    def _call(
        self,
        kernel: Kernel,
        names: dict[str, str],
        offsets: Mapping[int, tuple[str, int]],
        tables: dict[int, str],
    ) -> str:
        name = names.setdefault(kernel.text, f"k{len(names)}")
        given = [self._pointer(kernel.out, offsets, tables, 0)]
        given += [self._pointer(t, offsets, tables, at) for t, at in kernel.arguments]
        given += ["&wrong"] if kernel.flags else []
        return f"{name}({', '.join(given)});"

    def _step(
        self, calls: Sequence[str], offsets: Mapping[int, tuple[str, int]], tables: dict[int, str]
    ) -> list[str]:
        head = []
        for k, tensor in enumerate(self._frozen.values()):
            kind = c_type(tensor)
            head.append(
                f"const {kind} *const z{k} = (const {kind} *)data[{len(self._columns) + k}];"
            )
        rows = {t.shape[0] for t in self._columns.values()}
        for k, tensor in enumerate(self._columns.values()):
            head.append(
                f"const {c_type(tensor)} *const c{k} = (const {c_type(tensor)} *)data[{k}];"
            )
        inner = []
        for k, dtype in enumerate(self._hosts):
            inner.append(f"const {C_TYPES[dtype.name]} h{k} = ({C_TYPES[dtype.name]})hosts[{k}];")
        for k, tensor in enumerate(self._columns.values()):
            member, offset = offsets[tensor.number]
            width = tensor.size // tensor.shape[0]
            target, source = f"a->{member} + {offset}", f"c{k} + rows[i] * {width}"
            kind = c_type(tensor)
            copy = f"memcpy({target} + i * {width}, {source}, {width} * sizeof({kind}));"
            if width == 1:
                copy = f"({target})[i] = c{k}[rows[i]];"
            inner.append(f"for (int i = 0; i < {tensor.shape[0]}; i++) {copy}")
        inner += calls
        for k, tensor in enumerate(self._costs):
            base, offset, _ = tensor.strided()
            inner.append(f"costs[{k}] = (double)*({self._pointer(base, offsets, tables, offset)});")
        inner.append(f"rows += {max(rows, default=0)};")
        inner.append(f"hosts += {len(self._hosts)};")
        inner.append(f"costs += {len(self._costs)};")
        return [
            "EXPORT int ortflex_step(struct ortflex_state *s, struct ortflex_arena *a,",
            "    const void *const *data, const int64_t *rows, int64_t steps, const double *hosts,",
            "    double *costs) {",
            *indented(["int wrong = 0;", *head], 1),
            "    for (int64_t n = 0; n < steps; n++) {",
            *indented(inner, 2),
            "    }",
            "    return wrong;",
            "}",
        ]


def _reads(kernel: Kernel, tensor: Tensor | None) -> bool:
    return any(t is tensor for t in kernel.reads)


_TAKES_ELEMENTS = ("map", "gather", "reduce", "assemble", "scatter", "cumulate")
_KERNELS = {
    "reduce": reduce_kernel,
    "assemble": assemble_kernel,
    "scatter": scatter_kernel,
    "cumulate": cumulate_kernel,
}
