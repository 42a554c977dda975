"""Matrix products in C: tiles of registers, vectors along the columns, every sum in the order of k.

So the bits depend neither on the width of a vector nor on the compiler. Only a product with a single
column whose rows lie side by side has 16 partial sums, which are joined in pairs. A vector type wider
than the machine's registers is split by the compiler; without vector types (``lanes=1``) a tile has
named scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from ortflex_plugins.c.arrays import Tensor
from ortflex_plugins.c.loops import (
    PARTS,
    Body,
    Kernel,
    Leaf,
    address,
    c_type,
    dynamic_address,
    each,
    finish,
    indented,
    name_leaves,
    nest,
    note_identity,
    plain_strides,
    tree,
)

_MOST_ROWS = 8
Element = Callable[[str, str, str], list[str]]
"""The statements that write an element, from its row, its column and the value of the sum."""


@attrs.frozen
class Machine:
    """What the products are written for.

    Attributes:
        lanes: the numbers of float32 in a register; 1 for C without vector types.
        registers: the vector registers.
        fma: whether a product and a sum are rounded once. This changes bits: without an instruction
            for it, it is a call of the library.
    """

    lanes: int = 1
    registers: int = 16
    fma: bool = False


def vector(kind: str, width: int) -> str:
    """The name of a type of a number of elements."""
    short = "f32" if kind == "float" else "f64"
    return kind if width == 1 else f"{short}x{width}"


def definitions(used: Sequence[tuple[str, int]], machine: Machine) -> str:
    """The vector types of a file, and their multiply-add functions."""
    lines = []
    for kind, width in sorted(set(used)):
        name, size = vector(kind, width), width * (4 if kind == "float" else 8)
        function = "fmaf" if kind == "float" else "fma"
        one = "{f}(a, b, c)" if machine.fma else "a * b + c"
        if width == 1:
            text = one.format(f=function)
            lines.append(
                f"static inline {kind} {kind}_add({kind} a, {kind} b, {kind} c) {{ return {text}; }}"
            )
            continue
        alignment = 4 if kind == "float" else 8
        lines.append(
            f"typedef {kind} {name} __attribute__((vector_size({size}), aligned({alignment}), "
            "may_alias));"
        )
        text = f"{function}(a[j], b[j], c[j])" if machine.fma else "a[j] * b[j] + c[j]"
        loop, every = f"for (int j = 0; j < {width}; j++)", ", ".join(["a"] * width)
        lines += [
            f"static inline {name} {name}_add({name} a, {name} b, {name} c) {{ {name} r; "
            f"{loop} r[j] = {text}; return r; }}",
            f"static inline {name} {name}_of({kind} a) {{ {name} r = {{ {every} }}; return r; }}",
        ]
    return "\n".join(lines)


HELPERS = """\
/* The elements of the next loop are independent. gcc vectorizes a short loop only if it is not unrolled. */
#if defined(__GNUC__) && !defined(__clang__)
#define EACH _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#else
#define EACH
#endif
/* Without this gcc loads a row of the right factor again for each row of a tile. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define KEEP(x) __asm__("" : "+v"(x))
#else
#define KEEP(x) (void)0
#endif
/* Without this clang takes the vectors of a tile apart before it knows the loop that reads them. */
#if defined(__GNUC__)
#define STORED(x) __asm__ volatile("" : : "r"(x) : "memory")
#else
#define STORED(x) (void)0
#endif"""


@attrs.frozen
class Factor:
    """A pointer, and how far apart its rows, columns and matrices are."""

    name: str
    row: int
    column: int


def product_kernel(
    x: Tensor,
    root: Tensor,
    inlined: set[int],
    machine: Machine,
    widths: set[tuple[str, int]],
    inplace: Tensor | None = None,
) -> Kernel:
    """A product ``x``, and the function of its elements ``root`` (``x`` itself without one)."""
    kernel = Kernel(root)
    kind = c_type(x)
    a, b = x.inputs
    (base_a, offset_a, of_a), (base_b, offset_b, of_b) = a.strided(), b.strided()
    rows, depth, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    front = x.shape[:-2]
    body = Body(kernel, inlined | ({root.number} if root is not x else set()), {x.number: "t"})
    result = body.place(root)
    natural = plain_strides(root.shape)
    name_leaves(body, inplace)
    batch = [f"g{k}" for k in range(len(front))]
    left, right = Factor("a", of_a[-2], of_a[-1]), Factor("b", of_b[-2], of_b[-1])
    turned = False
    partial = False
    if columns == 1 and not (left.row == 1 and rows > 1):
        partial = True
    elif columns == 1 or (rows == 1 and right.column != 1):
        # The transposed product: its columns are the rows.
        turned = True
        partial = rows == 1 and columns > 1
        left, right = Factor("b", right.column, right.row), Factor("a", left.column, left.row)
        rows, columns = columns, rows
    assert partial or right.column == 1, x

    def element(row: str, column: str, value: str) -> list[str]:
        """The statements that write an element of the result."""
        names = [*batch, *((column, row) if turned else (row, column))]

        def at(leaf: Leaf) -> str:
            return dynamic_address(leaf, leaf.strides or (0,) * root.ndim, names)

        lines = body.lines(at)
        target = address("o", natural, names)
        if root is x:
            return [*lines, f"{target} = {value};"]
        return [f"const {kind} t = {value};", *lines, f"{target} = {result};"]

    if partial:
        lines = _rows(kind, left, right, rows, depth, machine, widths, element)
    else:
        plain = root is x and natural[-1 if not turned else -2] == 1
        stride = natural[-2 if not turned else -1]
        lines = _tiles(
            kind,
            left,
            right,
            (rows, depth, columns),
            machine,
            widths,
            element,
            stride if plain and not front else None,
        )
    if front:
        shift = [
            f"const {kind} *const a = a0 + {_sum(batch, of_a)};",
            f"const {kind} *const b = b0 + {_sum(batch, of_b)};",
        ]
        lines = nest(list(zip(batch, front, strict=True)), [*shift, *lines])
    names = ("a0", "b0") if front else ("a", "b")
    of_factors = [Leaf(base_a, offset_a, (), names[0]), Leaf(base_b, offset_b, (), names[1])]
    note_identity(kernel, body, natural)
    kernel.identity -= {base_a.number, base_b.number}
    body.leaves = [*of_factors, *body.leaves]
    finish(kernel, body, lines)
    return kernel


def _sum(names: Sequence[str], strides: Sequence[int]) -> str:
    return " + ".join(f"{n} * {s}" for n, s in zip(names, strides, strict=False)) or "0"


def _split(columns: int, lanes: int) -> list[tuple[int, int]]:
    """Columns as vectors: the first column and the width of each.

    The last one may be narrower, because some CPUs compute a vector of 512 bits in two halves, and it
    overlaps the one before it where columns are left: the sum of a column does not depend on the
    vector that it is in.
    """
    width = min(lanes, 1 << (columns.bit_length() - 1))
    vectors = [(at, width) for at in range(0, columns - width + 1, width)]
    if rest := columns % width:
        narrow = max(1 << (rest - 1).bit_length(), lanes // 4)
        last = narrow if width == lanes and narrow <= width // 2 else width
        vectors.append((columns - last, last))
    return vectors


def _blocks(rows: int, most: int, block: Callable[[int], list[str]]) -> list[str]:
    """Rows in blocks of equal size, then the rows left; ``block`` has a number of rows from ``i`` on."""
    count = -(-rows // most)
    even = [n for n in range(most, most // 2, -1) if rows % n == 0]
    size = even[0] if even else -(-rows // count)
    whole = rows // size * size
    lines = [f"for (int i = 0; i < {whole}; i += {size}) {{", *indented(block(size), 1), "}"]
    if rest := rows - whole:
        lines += ["{", f"    const int i = {whole};", *indented(block(rest), 1), "}"]
    return lines


def _tiles(
    kind: str,
    left: Factor,
    right: Factor,
    sizes: tuple[int, int, int],
    machine: Machine,
    widths: set[tuple[str, int]],
    element: Element,
    plain: int | None,
) -> list[str]:
    """Blocks of rows by blocks of columns, each sum in a register."""
    rows, depth, columns = sizes
    lanes = machine.lanes if kind == "float" else max(1, machine.lanes // 2)
    vectors = _split(columns, lanes)
    widths |= {(kind, width) for _, width in vectors}
    wide = machine.registers >= 32
    most, room = (4, 24) if wide else (3, 12)
    if machine.lanes == 1:
        most, room = 4, 8
    most = room if rows == 1 else most
    lines: list[str] = []
    for k in range(0, len(vectors), most):
        chunk = vectors[k : k + most]
        own = chunk, k * vectors[0][1], min(columns, (k + most) * vectors[0][1])
        tile = partial(_tile, kind, left, right, depth, own, element, plain)
        lines += _blocks(rows, max(1, min(_MOST_ROWS, room // len(chunk))), tile)
    return lines


def _tile(
    kind: str,
    left: Factor,
    right: Factor,
    depth: int,
    columns: tuple[Sequence[tuple[int, int]], int, int],
    element: Element,
    plain: int | None,
    rows: int,
) -> list[str]:
    """The rows from ``i`` on, and the columns from ``first`` to ``end`` in vectors."""
    vectors, first, end = columns
    names = [vector(kind, width) for _, width in vectors]
    zeros = ["0" if width == 1 else "{0}" for _, width in vectors]
    lines = [
        f"{name} s{r}_{c} = {zero};"
        for r in range(rows)
        for c, (name, zero) in enumerate(zip(names, zeros, strict=True))
    ]
    run = []
    for c, (at, width) in enumerate(vectors):
        spot = f"{right.name} + k * {right.row} + {at}"
        run.append(f"{names[c]} b{c} = *(const {names[c]} *)({spot});")
        run += [f"KEEP(b{c});"] if width > 1 else []
    for r in range(rows):
        value = f"{left.name}[(i + {r}) * {left.row} + k * {left.column}]"
        for width in dict.fromkeys(width for _, width in vectors):
            if width > 1:
                name = vector(kind, width)
                run += [f"{name} a{r}_{width} = {name}_of({value});", f"KEEP(a{r}_{width});"]
            else:
                run.append(f"const {kind} a{r}_1 = {value};")
        run += [
            f"s{r}_{c} = {name}_add(a{r}_{width}, b{c}, s{r}_{c});"
            for c, (name, (_, width)) in enumerate(zip(names, vectors, strict=True))
        ]
    lines += nest([("k", depth)], run)
    if plain is not None:
        for r in range(rows):
            lines += [
                f"*({name} *)(o + (i + {r}) * {plain} + {at}) = s{r}_{c};"
                for c, (name, (at, _)) in enumerate(zip(names, vectors, strict=True))
            ]
        return lines
    # Each vector has a place of its own, as a load must not span two stores.
    wide, count = vectors[0][1], len(vectors)
    lines.append(f"{kind} s[{rows * count * wide}];")
    for r in range(rows):
        lines += [
            f"*({name} *)(s + {(r * count + c) * wide}) = s{r}_{c};" for c, name in enumerate(names)
        ]
    lines.append("STORED(s);")
    covered = first + (count - 1) * wide - vectors[-1][0]
    whole = (count - 1) * wide if covered else end - first
    inner: list[str] = []
    if whole:
        column = f"({first} + j)" if first else "j"
        step = element("(i + r)", column, f"s[r * {count * wide} + j]")
        inner += each([("j", whole)], step)
    if covered:
        at = vectors[-1][0] + covered
        step = element(
            "(i + r)", f"({at} + j)", f"s[(r * {count} + {count - 1}) * {wide} + {covered} + j]"
        )
        inner += each([("j", end - at)], step)
    return lines + nest([("r", rows)], inner)


def _rows(
    kind: str,
    left: Factor,
    right: Factor,
    rows: int,
    depth: int,
    machine: Machine,
    widths: set[tuple[str, int]],
    element: Element,
) -> list[str]:
    """Products of rows with one column; both lie side by side."""
    if depth < PARTS or left.column != 1 or right.row != 1:
        widths.add((kind, 1))
        spot = f"{left.name}[i * {left.row} + k * {left.column}]"
        step = f"s = {kind}_add({spot}, {right.name}[k * {right.row}], s);"
        whole_sum = [f"{kind} s = 0;", *nest([("k", depth)], [step])]
        return nest([("i", rows)], [*whole_sum, *element("i", "0", "s")])
    lanes = min(PARTS, machine.lanes if kind == "float" else max(1, machine.lanes // 2))
    widths |= {(kind, lanes), (kind, min(4, lanes)), (kind, 1)}

    def block(count: int) -> list[str]:
        inner = element("(i + r)", "0", f"s[r * {PARTS}]")
        sums = _row_block(kind, left, right, count, depth, lanes)
        return [*sums, *nest([("r", count)], inner)]

    # The sums of a block take half of the registers, but of few rows all of them.
    most = max(4 if lanes * 4 >= PARTS else 2, machine.registers // 2 * lanes // PARTS)
    return _blocks(rows, most, block)


def _row_block(
    kind: str, left: Factor, right: Factor, rows: int, depth: int, lanes: int
) -> list[str]:
    name, parts = vector(kind, lanes), PARTS // lanes
    whole, rest = depth // PARTS * PARTS, depth % PARTS
    zero = "0" if lanes == 1 else "{0}"
    lines = [f"{name} s{r}_{c} = {zero};" for r in range(rows) for c in range(parts)]
    run = [
        f"const {name} b{c} = *(const {name} *)({right.name} + k + {c * lanes});"
        for c in range(parts)
    ]
    for r in range(rows):
        for c in range(parts):
            spot = f"{left.name} + (i + {r}) * {left.row} + k + {c * lanes}"
            value = f"*(const {name} *)({spot})"
            run.append(f"s{r}_{c} = {name}_add({value}, b{c}, s{r}_{c});")
    lines += [f"for (int k = 0; k < {whole}; k += {PARTS}) {{", *indented(run, 1), "}"]
    lines.append(f"{kind} s[{rows * PARTS}];")
    for r in range(rows):
        for c in range(parts):
            lines.append(f"*({name} *)(s + {r * PARTS + c * lanes}) = s{r}_{c};")
    lines.append("STORED(s);")
    each = []
    if rest:
        spot = f"{left.name}[(i + r) * {left.row} + {whole} + j]"
        value = f"{kind}_add({spot}, {right.name}[{whole} + j], q[j])"
        each += nest([("j", rest)], [f"q[j] = {value};"])
    if lanes < 4 or rest % 4:
        each += tree("q", lambda a, b: f"{a} + {b}")
    else:
        # The same pairs in a register; after stores of single numbers its loads would wait.
        four = vector(kind, 4)
        u = [f"*(const {four} *)(q + {at})" for at in (0, 8, 4, 12)]
        each.append(f"const {four} u = ({u[0]} + {u[1]}) + ({u[2]} + {u[3]});")
        each.append("q[0] = (u[0] + u[2]) + (u[1] + u[3]);")
    return lines + nest([("r", rows)], [f"{kind} *const q = s + r * {PARTS};", *each])
