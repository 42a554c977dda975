"""Loops of C over the elements of a tensor: expressions, sums, gathered and scattered elements.

A kernel is one function of C. Its text has no name and no number of the model but sizes, so kernels
with equal code are one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from ortflex_core import onnx_dtype
from ortflex_plugins.c.arrays import Tensor, row_major
from ortflex_plugins.c.scalars import C_TYPES, expression, literal
from ortflex_plugins.operators.calls import NotTranslatable

PARTS = 16
"""The number of partial sums along an axis whose elements lie side by side."""


def c_type(x: Tensor) -> str:
    """The type of an element in C."""
    return C_TYPES[x.dtype.name]


@attrs.define(eq=False)
class Leaf:
    """A tensor in memory that a kernel reads: a pointer, and how far apart the elements are."""

    base: Tensor
    offset: int
    strides: tuple[int, ...]
    name: str = ""
    terms: tuple[tuple[str, int], ...] = ()
    """Positions that are data: expressions, and how far apart these elements are."""


@attrs.define(eq=False)
class Kernel:
    """One function of C, and the memory of its arguments.

    Attributes:
        out: the tensor that it computes.
        arguments: the memory of its pointers after the first, with offsets in elements.
        flags: whether it reports positions that are out of range.
        text: parameters and body; ``{}`` is the name of the function.
        identity: the tensors that are read only at the position that is written.
        calls: the functions of :mod:`.functions` that it calls.
    """

    out: Tensor
    arguments: list[tuple[Tensor, int]] = attrs.field(factory=list)
    flags: bool = False
    text: str = ""
    identity: set[int] = attrs.field(factory=set)
    calls: set[str] = attrs.field(factory=set)

    @property
    def reads(self) -> list[Tensor]:
        """The tensors that it reads."""
        return [t for t, _ in self.arguments]


class Body:
    """The expressions of a kernel: lines that compute, for one position, what a node is.

    Elements of ``inlined`` nodes are computed where they are needed; ``given`` are expressions of nodes
    that the kernel has already computed.
    """

    def __init__(
        self, kernel: Kernel, inlined: set[int], given: Mapping[int, str] | None = None
    ) -> None:
        self.kernel, self._inlined = kernel, inlined
        self._given = dict(given or {})
        self.leaves: list[Leaf] = []
        self._steps: list[tuple[str, Leaf | str]] = []
        self._done: dict[int, str] = {}
        self._count = 0

    def place(self, x: Tensor) -> str:
        """An expression for an element of ``x``, whose shape is that of the loops."""
        if x.number in self._given:
            return self._given[x.number]
        base, offset, strides = x.strided()
        if base.op == "constant" and not any(strides):
            value = np.frombuffer(base.data[0], base.dtype)[offset]
            return literal(value, onnx_dtype(base.dtype))
        if base.op == "input" and base.data[0] == "host":
            return self._argument_value(base)
        if x.number in self._inlined:
            return self._inline(x)
        return self._load(Leaf(base, offset, strides), c_type(base))

    def _argument_value(self, x: Tensor) -> str:
        return self._load(Leaf(x, 0, ()), c_type(x))

    def _load(self, leaf: Leaf, kind: str) -> str:
        for known in self.leaves:
            same = known.base is leaf.base and known.offset == leaf.offset
            if same and known.strides == leaf.strides and known.terms == leaf.terms:
                leaf = known
                break
        else:
            self.leaves.append(leaf)
        key = -1 - self.leaves.index(leaf)
        if key not in self._done:
            self._done[key] = self._line(kind, leaf)
        return self._done[key]

    def _line(self, kind: str, value: Leaf | str) -> str:
        name = f"v{self._count}"
        self._count += 1
        self._steps.append((f"const {kind} {name} = ", value))
        return name

    def _inline(self, x: Tensor) -> str:
        if x.number in self._done:
            return self._done[x.number]
        if x.op == "gather":
            text = self._gathered(x)
        else:
            arguments = [self.place(v) for v in x.inputs]
            made = element(x, arguments, self.kernel.calls)
            text = self._line(c_type(x), made)
        self._done[x.number] = text
        return text

    def _gathered(self, x: Tensor) -> str:
        base, offset, strides = x.inputs[0].strided()
        terms, own = [], [0] * x.ndim
        self.kernel.flags = True
        for axis, source in enumerate(x.data):
            if source >= 0:
                own[source] = strides[axis]
                continue
            index = self.place(x.inputs[-source])
            size = x.inputs[0].shape[axis]
            out = f"{index} < 0 || {index} >= {size}"
            self._steps.append(("", f"wrong |= {out}"))
            place = self._line("int64_t", f"{out} ? 0 : (int64_t){index}")
            terms.append((place, strides[axis]))
        return self._load(Leaf(base, offset, tuple(own), terms=tuple(terms)), c_type(base))

    def lines(self, address: Callable[[Leaf], str]) -> list[str]:
        """The statements, with the position of each leaf by ``address``."""
        out = []
        for head, value in self._steps:
            text = value if isinstance(value, str) else address(value)
            out.append(f"{head}{text};")
        return out


def element(x: Tensor, arguments: list[str], calls: set[str]) -> str:
    """The expression of a map node.

    Raises:
        NotTranslatable: the operator has no expression for the type.
    """
    name = x.data[0]
    dtype = x.inputs[-1].dtype
    attributes = {}
    if name in ("BitShiftLeft", "BitShiftRight"):
        attributes, name = {"direction": name[8:].upper()}, "BitShift"
        dtype = x.inputs[0].dtype
    elif name == "Fmod":
        attributes, name = {"fmod": 1}, "Mod"
    elif name == "IsFinite":
        return f"({arguments[0]} - {arguments[0]} == 0)"
    elif name in ("Expm1", "Log1p"):
        called = f"f32_{name.lower()}"
        calls.add(called)
        return f"{called}({arguments[0]})"
    made = expression(name, onnx_dtype(dtype), arguments, attributes, onnx_dtype(x.dtype))
    if made is None:
        raise NotTranslatable(f"the operator {name} of {dtype}")
    calls.update(made.calls)
    return made.text


# Loops ---------------------------------------------------------------------------------------------


@attrs.frozen
class Axis:
    """A loop: its length, and whether its elements are joined to one number."""

    size: int
    reduced: bool
    strides: tuple[int, ...]
    """How far apart the elements of each tensor are."""


def merge(
    shape: Sequence[int], tensors: Sequence[Sequence[int]], reduced: Sequence[int]
) -> list[Axis]:
    """Loops over a shape; neighbors whose elements continue one another in all tensors are one."""
    axes: list[Axis] = []
    for k, size in enumerate(shape):
        if size == 1:
            continue
        own = Axis(size, k in reduced, tuple(t[k] for t in tensors))
        if axes and axes[-1].reduced == own.reduced:
            last = axes[-1]
            joined = all(a == b * size for a, b in zip(last.strides, own.strides, strict=True))
            if joined:
                axes[-1] = Axis(last.size * size, own.reduced, own.strides)
                continue
        axes.append(own)
    return axes


def address(name: str, strides: Sequence[int], variables: Sequence[str]) -> str:
    """An element of an array."""
    terms = [
        v if s == 1 else f"{v} * {s}" for v, s in zip(variables, strides, strict=True) if s != 0
    ]
    return f"{name}[{' + '.join(terms) or '0'}]"


def indented(lines: Sequence[str], depth: int) -> list[str]:
    """Lines inside of blocks."""
    return ["    " * depth + line for line in lines]


def nest(axes: Sequence[tuple[str, int]], inner: Sequence[str]) -> list[str]:
    """Loops around lines."""
    out: list[str] = []
    for depth, (name, size) in enumerate(axes):
        out += indented([f"for (int {name} = 0; {name} < {size}; {name}++) {{"], depth)
    out += indented(inner, len(axes))
    for depth in reversed(range(len(axes))):
        out += indented(["}"], depth)
    return out


_LONG = 8
"""The number of elements from which a loop is worth vectors."""


def each(axes: Sequence[tuple[str, int]], inner: Sequence[str]) -> list[str]:
    """Loops around lines that write one element and read no other element of what they write."""
    if not axes or axes[-1][1] < _LONG:
        return nest(axes, inner)
    return nest(axes[:-1], ["EACH", *nest(axes[-1:], inner)])


def finish(kernel: Kernel, body: Body, lines: list[str], out: str = "o") -> None:
    """The parameters of a kernel: what it writes, then what it reads."""
    # Not restrict: gcc 12 computes wrong sums then, where it unrolls the loops of a kernel that it inlines.
    parameters = [f"{c_type(kernel.out)} *{out}"]
    seen: set[str] = set()
    for leaf in body.leaves:
        if leaf.name == out or leaf.name in seen:
            continue
        seen.add(leaf.name)
        kernel.arguments.append((leaf.base, leaf.offset))
        parameters.append(f"const {c_type(leaf.base)} *{leaf.name}")
    if kernel.flags:
        parameters.append("int *e")
        lines = ["int wrong = 0;", *lines, "*e |= wrong;"]
    kernel.text = "\n".join(
        [
            f"static void {{}}({', '.join(parameters)}) {{{{",
            *(brace(x) for x in indented(lines, 1)),
            "}}",
        ]
    )


def brace(line: str) -> str:
    """A line for :meth:`str.format`."""
    return line.replace("{", "{{").replace("}", "}}")


def name_leaves(body: Body, inplace: Tensor | None = None, first: int = 0) -> None:
    """Names of the pointers, numbered from ``first``; the memory that is written has that of the output."""
    for k, leaf in enumerate(body.leaves, first):
        leaf.name = "o" if inplace is not None and leaf.base is inplace else f"p{k}"


class Loops:
    """The loops of a body over a shape, and the element that they write.

    Attributes:
        axes: the loops, outermost first.
        variables: their variables.
        target: the element of the output.
    """

    def __init__(
        self,
        body: Body,
        shape: Sequence[int],
        strides: Sequence[int],
        reduced: Sequence[int] = (),
        out: str = "o",
    ) -> None:
        self._body = body
        none = (0,) * len(shape)
        self.axes = merge(shape, [strides, *(x.strides or none for x in body.leaves)], reduced)
        self.variables = [f"i{k}" for k in range(len(self.axes))]
        self.target = address(out, [a.strides[0] for a in self.axes], self.variables)

    @property
    def ranges(self) -> list[tuple[str, int]]:
        """Variables and lengths."""
        return [(v, a.size) for v, a in zip(self.variables, self.axes, strict=True)]

    def lines(self, names: Sequence[str] | None = None) -> list[str]:
        """The statements of the body; ``names`` replace the variables."""

        def at(leaf: Leaf) -> str:
            strides = [a.strides[1 + self._body.leaves.index(leaf)] for a in self.axes]
            return dynamic_address(leaf, strides, self.variables if names is None else names)

        return self._body.lines(at)


def map_kernel(
    x: Tensor, inlined: set[int], inplace: Tensor | None = None, register: int = 0
) -> Kernel:
    """The elements of a map or gather node, of an intermediate tensor in whole registers of some bytes."""
    kernel = Kernel(x)
    body = Body(kernel, inlined | {x.number})
    result = body.place(x)
    natural = plain_strides(x.shape)
    name_leaves(body, inplace)
    loops = Loops(body, x.shape, natural)
    write = nest if kernel.flags else each
    ranges = [(v, _padded(n, body, register)) for v, n in loops.ranges]
    whole = write(ranges, [*loops.lines(), f"{loops.target} = {result};"])
    note_identity(kernel, body, natural)
    finish(kernel, body, whole)
    return kernel


def _padded(size: int, body: Body, register: int) -> int:
    """The length of a loop that also computes the rest of the last register, which is not read.

    Every tensor in memory of ours has room for that: it ends at a multiple of 64 bytes.
    """
    out = body.kernel.out
    read = [leaf for leaf in body.leaves if any(leaf.strides) or leaf.terms]
    count = register // max(t.dtype.itemsize for t in (out, *(leaf.base for leaf in read)))
    if count < 2 or size < _LONG or size != out.size:
        return size
    for leaf in read:
        ours = leaf.base.op not in ("input", "constant") or leaf.base.data[0] in ("state", "column")
        if leaf.base.size != size or leaf.offset or leaf.terms or not ours:
            return size
    return -(-size // count) * count


def plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row by row; 0 for axes with one element, as views have them."""
    return tuple(0 if n == 1 else s for n, s in zip(shape, row_major(shape), strict=True))


def note_identity(kernel: Kernel, body: Body, natural: Sequence[int]) -> None:
    """Find the tensors that are read only where their position is written."""
    by_base: dict[int, bool] = {}
    for leaf in body.leaves:
        own = [0 if n == 1 else s for n, s in zip(kernel.out.shape, leaf.strides, strict=False)]
        same = leaf.offset == 0 and not leaf.terms and tuple(own) == tuple(natural)
        same = same and leaf.base.size == kernel.out.size
        by_base[leaf.base.number] = by_base.get(leaf.base.number, True) and same
    kernel.identity = {number for number, same in by_base.items() if same}


def dynamic_address(leaf: Leaf, strides: Sequence[int], variables: Sequence[str]) -> str:
    """The element of a leaf, at positions that may be data."""
    text = address(leaf.name, strides, variables)
    if leaf.terms:
        more = " + ".join(f"{place} * {stride}" for place, stride in leaf.terms)
        return text[:-1] + f" + {more}]"
    return text


# Reductions ----------------------------------------------------------------------------------------

_JOIN: dict[str, Callable[[str, str], str]] = {
    "sum": lambda a, b: f"{a} + {b}",
    "prod": lambda a, b: f"{a} * {b}",
    "max": lambda a, b: f"({a} < {b} || {b} != {b}) ? {b} : {a}",
    "min": lambda a, b: f"({a} > {b} || {b} != {b}) ? {b} : {a}",
}


def _start(name: str, x: Tensor) -> str:
    dtype = onnx_dtype(x.dtype)
    if name in ("sum", "prod"):
        return literal(0 if name == "sum" else 1, dtype)
    if x.dtype.kind == "f":
        return literal(-math.inf if name == "max" else math.inf, dtype)
    if x.dtype == bool:
        return "0" if name == "max" else "1"
    bounds = np.iinfo(x.dtype)
    return literal(bounds.min if name == "max" else bounds.max, dtype)


def reduce_kernel(x: Tensor, inlined: set[int]) -> Kernel:
    """Sums and extremes: along neighbors by 16 partial results and a tree, otherwise in order."""
    name, reduced = x.data
    source = x.inputs[0]
    kernel = Kernel(x)
    body = Body(kernel, inlined)
    value = body.place(source)
    name_leaves(body)
    kept = iter(plain_strides(x.shape))
    out = [0 if k in reduced else next(kept) for k in range(source.ndim)]
    loops = Loops(body, source.shape, out, reduced)
    outer = [r for r, a in zip(loops.ranges, loops.axes, strict=True) if not a.reduced]
    inner = [r for r, a in zip(loops.ranges, loops.axes, strict=True) if a.reduced]
    if name in ("argmax", "argmin"):
        lines = _positions(name, source, loops, value, outer, inner)
    elif loops.axes[-1].reduced:
        lines = _along(name, source, loops, value, outer, inner)
    else:
        last = outer.pop()
        join = _JOIN[name](loops.target, value)
        first = nest([last], [f"{loops.target} = {_start(name, source)};"])
        whole = nest([*inner, last], [*loops.lines(), f"{loops.target} = {join};"])
        lines = nest(outer, [*first, *whole])
    finish(kernel, body, lines)
    return kernel


def _along(
    name: str,
    source: Tensor,
    loops: Loops,
    value: str,
    outer: list[tuple[str, int]],
    inner: list[tuple[str, int]],
) -> list[str]:
    """Along the last axis."""
    last, size = inner[-1]
    start, kind = _start(name, source), c_type(source)
    if size < PARTS:
        lines = nest(inner, [*loops.lines(), f"s = {_JOIN[name]('s', value)};"])
        return nest(outer, [f"{kind} s = {start};", *lines, f"{loops.target} = s;"])
    whole, rest = size // PARTS * PARTS, size % PARTS
    names = [f"({v} + j)" if v == last else v for v in loops.variables]
    step = [*loops.lines(names), f"s[j] = {_JOIN[name]('s[j]', value)};"]
    run = [f"for (int {last} = 0; {last} < {whole}; {last} += {PARTS}) {{"]
    run += indented(nest([("j", PARTS)], step), 1)
    run += ["}"]
    if rest:
        run += [
            "{",
            f"    const int {last} = {whole};",
            *indented(nest([("j", rest)], step), 1),
            "}",
        ]
    lines = [f"{kind} s[{PARTS}];", *nest([("j", PARTS)], [f"s[j] = {start};"])]
    lines += nest(inner[:-1], run)
    lines += tree("s", _JOIN[name])
    return nest(outer, [*lines, f"{loops.target} = s[0];"])


def tree(name: str, join: Callable[[str, str], str]) -> list[str]:
    """Join partial results in pairs."""
    lines, half = [], PARTS // 2
    while half:
        a, b = f"{name}[j]", f"{name}[j + {half}]"
        lines.append(f"for (int j = 0; j < {half}; j++) {a} = {join(a, b)};")
        half //= 2
    return lines


def _positions(
    name: str,
    source: Tensor,
    loops: Loops,
    value: str,
    outer: list[tuple[str, int]],
    inner: list[tuple[str, int]],
) -> list[str]:
    sign = ">" if name == "argmax" else "<"
    if not inner:
        return nest(outer, [f"{loops.target} = 0;"])
    ((variable, _),) = inner
    better = f"{variable} == 0 || {value} {sign} best"
    step = [*loops.lines(), f"if ({better}) {{ best = {value}; where = {variable}; }}"]
    head = [f"{c_type(source)} best = 0;", "int64_t where = 0;"]
    return nest(outer, [*head, *nest(inner, step), f"{loops.target} = where;"])


# Moves ---------------------------------------------------------------------------------------------


def assemble_kernel(x: Tensor, inlined: set[int]) -> Kernel:
    """Parts on a background."""
    fill, places = x.data
    kernel = Kernel(x)
    lines: list[str] = []
    leaves: list[Leaf] = []
    if fill is not None:
        text = literal(fill, onnx_dtype(x.dtype))
        lines += nest([("i", x.size)], [f"o[i] = {text};"])
    shared = None
    for source, (offset, strides) in zip(x.inputs, places, strict=True):
        body = Body(kernel, inlined)
        value = body.place(source)
        name_leaves(body, first=len(leaves))
        loops = Loops(body, source.shape, strides, out=f"(o + {offset})")
        # One element has no loop: its block has the names of its values.
        part = nest(loops.ranges, [*loops.lines(), f"{loops.target} = {value};"])
        lines += part if loops.ranges else ["{", *indented(part, 1), "}"]
        leaves += body.leaves
        shared = body
    assert shared is not None
    shared.leaves = leaves
    finish(kernel, shared, lines)
    return kernel


_COMBINE: dict[str, Callable[[str, str], str]] = {
    "none": lambda a, b: b,
    "add": lambda a, b: f"{a} + {b}",
    "mul": lambda a, b: f"{a} * {b}",
    "max": _JOIN["max"],
    "min": _JOIN["min"],
}


def scatter_kernel(x: Tensor, inlined: set[int]) -> Kernel:
    """A copy with elements replaced or combined, in the order of the updates."""
    kernel = Kernel(x, flags=True)
    first = Body(kernel, inlined)
    value = first.place(x.inputs[0])
    name_leaves(first)
    copy = Loops(first, x.shape, plain_strides(x.shape))
    lines = nest(copy.ranges, [*copy.lines(), f"{copy.target} = {value};"])
    updates, places = x.inputs[1], x.inputs[2:]
    body = Body(kernel, inlined)
    update = body.place(updates)
    index = [body.place(p) for p in places]
    name_leaves(body, first=len(first.leaves))
    strides = row_major(x.shape)
    rest = (*(0,) * (updates.ndim - (x.ndim - len(places))), *strides[len(places) :])
    loops = Loops(body, updates.shape, rest)
    checks = " || ".join(f"{i} < 0 || {i} >= {n}" for i, n in zip(index, x.shape, strict=False))
    at_index = " + ".join(f"(int64_t){i} * {s}" for i, s in zip(index, strides, strict=False))
    target = f"{loops.target[:-1]} + {at_index}]"
    step = [
        *loops.lines(),
        f"if ({checks}) {{ wrong = 1; continue; }}",
        f"{target} = {_COMBINE[x.data](target, update)};",
    ]
    lines += nest(loops.ranges or [("i0", 1)], step)
    body.leaves = [*first.leaves, *body.leaves]
    finish(kernel, body, lines)
    return kernel


def cumulate_kernel(x: Tensor, inlined: set[int]) -> Kernel:
    """Running sums or products along an axis."""
    name, axis = x.data
    kernel = Kernel(x)
    body = Body(kernel, inlined)
    value = body.place(x.inputs[0])
    name_leaves(body)
    axis %= x.ndim
    variables = [f"i{k}" for k in range(x.ndim)]
    natural = row_major(x.shape)

    def at(leaf: Leaf) -> str:
        return dynamic_address(leaf, leaf.strides or (0,) * x.ndim, variables)

    target = address("o", natural, variables)
    symbol = "+" if name == "Add" else "*"
    before = f"{target[:-1]} - {natural[axis]}]"
    step = [*body.lines(at), f"{target} = i{axis} == 0 ? {value} : {before} {symbol} {value};"]
    order = [axis, *(k for k in range(x.ndim) if k != axis)]
    finish(kernel, body, nest([(variables[k], x.shape[k]) for k in order], step))
    return kernel
