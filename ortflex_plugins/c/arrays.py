"""Arrays of a program that becomes C: what an operator computes is a node, of one of a few kinds.

The table of operators (:mod:`ortflex_plugins.operators`) runs on these arrays as it runs on numpy and on
JAX. Equal nodes are one node. The kinds are

========== ==========================================================================================
input      memory that the caller has: state, a column of the data, a frozen tensor, a host scalar
constant   numbers that are known
view       elements of another node, by an offset and a stride for each axis
map        a function of the elements at one position
gather     elements at positions that are data
reduce     a sum, a product, an extreme or the position of an extreme along some axes
dot        a matrix product
assemble   parts side by side, on a background
scatter    a tensor with some elements replaced or combined
cumulate   running sums or products along an axis
convolve   a convolution
========== ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ortflex_core import Array
from ortflex_plugins.c.scalars import C_TYPES
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.elementwise import SAME
from ortflex_plugins.operators.numpy_forms import NumpyForms

Index = Any
_MOST_NODES = 20_000
"""The nodes of a program: the compiler needs about a millisecond for each."""


class Tensor:
    """A value of the program: a node with its shape and type, used like an array of numpy."""

    __slots__ = ("data", "dtype", "inputs", "number", "op", "shape", "trace")
    __array_ufunc__ = None  # so that numpy leaves mixed operations to this class

    def __init__(
        self,
        trace: Tracing,
        op: str,
        inputs: tuple[Tensor, ...],
        data: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        number: int,
    ) -> None:
        self.trace, self.op, self.inputs, self.data = trace, op, inputs, data
        self.shape, self.dtype, self.number = shape, dtype, number

    def __repr__(self) -> str:
        return f"{self.op}{self.number}[{', '.join(map(str, self.shape))}] of {self.dtype}"

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def T(self) -> Tensor:  # noqa: N802
        """The axes in reverse order."""
        return self.trace.view(self, np.transpose)

    def astype(self, dtype: Any) -> Tensor:
        """The elements in another type."""
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else self.trace.map("Cast", self, dtype=dtype)

    def reshape(self, *sizes: Any) -> Tensor:
        """The same elements, row by row, in another shape."""
        shape = (
            sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int | np.integer) else sizes
        )
        return self.trace.reshape(self, tuple(int(n) for n in shape))

    def transpose(self, *order: Any) -> Tensor:
        """The axes in another order."""
        axes = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
        return self.trace.view(self, lambda a: np.transpose(a, axes or None))

    def __getitem__(self, index: Index) -> Tensor:
        return self.trace.item(self, index)

    def strided(self) -> tuple[Tensor, int, tuple[int, ...]]:
        """The node whose memory has the elements, an offset, and a stride for each axis."""
        if self.op == "view":
            return (self.inputs[0], *self.data)
        return self, 0, row_major(self.shape)

    def __neg__(self) -> Tensor:
        return self.trace.map("Neg", self)

    def __ne__(self, other: object) -> Any:
        return self.trace.map("Not", self.trace.map("Equal", self, other))

    def __floordiv__(self, other: Any) -> Tensor:
        """Of integers, downwards; the quotient in C is towards zero."""
        other = self.trace.lift(other, self.dtype)
        towards = self.trace.map("Div", self, other)
        whole = self.trace.map("Equal", self.trace.map("Mul", towards, other), self)
        below = [self.trace.map("Less", v, 0) for v in (self, other)]
        stays = self.trace.map("Or", whole, self.trace.map("Equal", *below))
        return self.trace.map("Where", stays, towards, self.trace.map("Sub", towards, 1))

    def __hash__(self) -> int:
        return self.number


def _operator(name: str, turned: bool) -> Callable[[Tensor, Any], Tensor]:
    def apply(self: Tensor, other: Any) -> Tensor:
        return self.trace.map(name, *((other, self) if turned else (self, other)))

    return apply


for _method, _name in {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "truediv": "Div",
    "mod": "Mod",
    "pow": "Pow",
    "and": "And",
    "or": "Or",
    "xor": "Xor",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "eq": "Equal",
}.items():
    setattr(Tensor, f"__{_method}__", _operator(_name, False))
    setattr(Tensor, f"__r{_method}__", _operator(_name, True))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of elements that lie row by row."""
    out, stride = [], 1
    for n in reversed(shape):
        out.append(stride)
        stride *= n
    return tuple(reversed(out))


def _same_memory(array: Array, shape: tuple[int, ...]) -> Array:
    """An array in another shape, which never reads its elements.

    Raises:
        ValueError, AttributeError: with this shape they would have to be copied.
    """
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        return np.reshape(array, shape, copy=False)
    array = array.view()
    array.shape = shape  # deprecated since numpy 2.5
    return array


_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsFinite")
_LOGICAL = {"And": "BitwiseAnd", "Or": "BitwiseOr", "Xor": "BitwiseXor"}


class Tracing:
    """All nodes of a program."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self._known: dict[Hashable, Tensor] = {}
        self.xp = Namespace(self)

    # Nodes -------------------------------------------------------------------------------------

    def node(
        self, op: str, inputs: Sequence[Tensor], data: Hashable, shape: Sequence[int], dtype: Any
    ) -> Tensor:
        """A node; the same one for the same arguments."""
        dtype, shape = np.dtype(dtype), tuple(int(n) for n in shape)
        if dtype.name not in C_TYPES:
            raise NotTranslatable(f"tensors of {dtype.name}")
        if 0 in shape:
            raise NotTranslatable("a tensor without elements")
        key = (op, tuple(t.number for t in inputs), data, shape, dtype.str)
        if key not in self._known:
            if len(self.nodes) >= _MOST_NODES:
                raise NotTranslatable(f"a program of more than {_MOST_NODES} operations")
            made = Tensor(self, op, tuple(inputs), data, shape, dtype, len(self.nodes))
            self.nodes.append(made)
            self._known[key] = made
        return self._known[key]

    def input(self, kind: str, number: int, shape: Sequence[int], dtype: Any) -> Tensor:
        """Memory of the caller."""
        return self.node("input", (), (kind, number), shape, dtype)

    def constant(self, value: Any, dtype: Any = None) -> Tensor:
        """Known numbers; equal ones are a single number."""
        array = np.asarray(value, dtype)
        if array.size > 1 and array.tobytes() == array.ravel()[:1].tobytes() * array.size:
            return self.broadcast(self.constant(array.ravel()[0]), array.shape)
        array = np.array(array, order="C")
        return self.node("constant", (), (array.tobytes(),), array.shape, array.dtype)

    def lift(self, value: Any, dtype: Any = None) -> Tensor:
        """A value as a node; ``dtype`` is that of a Python number."""
        if isinstance(value, Tensor):
            return value
        return self.constant(value, dtype if isinstance(value, bool | int | float) else None)

    def map(self, name: str, *values: Any, dtype: Any = None, data: Any = None) -> Tensor:
        """A function of the elements of one type; of known numbers numpy computes it."""
        given = values[1:] if name == "Where" else values
        common = np.result_type(*(v if _is_number(v) else v.dtype for v in given))
        tensors = [self.lift(v, common) for v in values]
        if name == "Where":
            tensors[1:] = [t.astype(common) for t in tensors[1:]]
        elif name not in ("Cast", "BitShiftLeft", "BitShiftRight"):
            tensors = [t.astype(common) for t in tensors]
        shape = np.broadcast_shapes(*(t.shape for t in tensors))
        tensors = [self.broadcast(t, shape) for t in tensors]
        if name in _LOGICAL and common.kind != "b":
            name = _LOGICAL[name]
        out = common if dtype is None else np.dtype(dtype)
        out = np.dtype(bool) if name in _COMPARISONS else out
        return self.node("map", tensors, (name, data), shape, out)

    # Views -------------------------------------------------------------------------------------

    def view(self, x: Tensor, change: Callable[[Array], Array]) -> Tensor:
        """The elements that a change of a numpy array, which copies nothing, would show."""
        base, offset, strides = x.strided()
        shown = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), x.shape, strides)
        seen = change(shown)
        if 0 in seen.shape:
            raise NotTranslatable("a tensor without elements")
        moved = _address(seen) - _address(shown)
        return self._view(base, offset + moved, seen.shape, seen.strides)

    def _view(
        self, base: Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        # The stride of an axis with one element has no meaning.
        plain = tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))
        natural = [
            0 if n == 1 else s for n, s in zip(base.shape, row_major(base.shape), strict=True)
        ]
        if offset == 0 and tuple(shape) == base.shape and plain == tuple(natural):
            return base
        return self.node("view", (base,), (offset, plain), shape, base.dtype)

    def broadcast(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The elements repeated along new axes and axes of one element."""
        shape = tuple(int(n) for n in shape)
        return x if x.shape == shape else self.view(x, lambda a: np.broadcast_to(a, shape))

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; a copy if they do not lie row by row."""
        if -1 in shape:
            others = math.prod(n for n in shape if n != -1)
            shape = [x.size // others if n == -1 else n for n in shape]
        if tuple(shape) == x.shape:
            return x
        _, _, strides = x.strided()
        shown = np.lib.stride_tricks.as_strided(np.empty(1, np.int8), x.shape, strides)
        try:
            shown = _same_memory(shown, tuple(shape))
        except (AttributeError, ValueError):
            return self.reshape(self.copy(x), shape)
        base, offset, _ = x.strided()
        return self._view(base, offset, shown.shape, shown.strides)

    def copy(self, x: Tensor) -> Tensor:
        """The elements row by row in memory of their own, unless they lie so already."""
        if x.op in ("view", "constant") or not x.shape:
            return self.node("map", (x,), ("Identity", None), x.shape, x.dtype)
        return x

    def item(self, x: Tensor, index: Index) -> Tensor:
        """Indexing: slices are views, arrays of positions are gathered."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if not any(isinstance(p, Tensor | np.ndarray) for p in parts):
            # With an ellipsis, numpy gives a view of a single element instead of its value.
            whole = (*parts, ...) if Ellipsis not in parts else tuple(parts)
            return self.view(x, lambda a: a[whole])
        if Ellipsis in [p for p in parts if not isinstance(p, Tensor | np.ndarray)]:
            raise NotTranslatable("an index of arrays and an ellipsis")
        arrays = [p for p in parts if isinstance(p, Tensor | np.ndarray)]
        if len(arrays) == 1 and isinstance(arrays[0], np.ndarray):
            at = next(k for k, p in enumerate(parts) if p is arrays[0])
            run = _progression(arrays[0])
            # Next to an array, numpy treats an integer as an array, too.
            if run is not None and not any(isinstance(p, int) for p in parts):
                return self.item(x, tuple(run if k == at else p for k, p in enumerate(parts)))
        if len(arrays) < len(parts):
            raise NotTranslatable("an index of arrays and slices")
        return self.gather(x, [self.lift(a) for a in arrays], 0)

    def gather(self, x: Tensor, places: Sequence[Tensor], axis: int) -> Tensor:
        """Elements whose positions along the axes from ``axis`` on are given, broadcast to one shape."""
        shape = np.broadcast_shapes(*(p.shape for p in places))
        out = (*x.shape[:axis], *shape, *x.shape[axis + len(places) :])
        own = self.spread(places, out, axis)
        axes = [
            *range(axis),
            *(-1 - k for k in range(len(places))),
            *range(axis + len(shape), len(out)),
        ]
        return self.node("gather", (x, *own), tuple(axes), out, x.dtype)

    def spread(self, places: Sequence[Tensor], shape: tuple[int, ...], axis: int) -> list[Tensor]:
        """Positions, broadcast to one shape along the axes from ``axis`` on, in a larger shape."""
        own = np.broadcast_shapes(*(p.shape for p in places))
        wide = (*own, *(1,) * (len(shape) - axis - len(own)))
        return [self.broadcast(self.broadcast(p, own).reshape(wide), shape) for p in places]

    # Larger operations ---------------------------------------------------------------------------

    def reduce(self, name: str, x: Tensor, axis: Any, keepdims: bool) -> Tensor:
        """One number for all elements along some axes."""
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        reduced = sorted({a % x.ndim for a in axes}) if x.ndim else []
        shape = [n for k, n in enumerate(x.shape) if k not in reduced]
        dtype: Any = np.int64 if name in ("argmax", "argmin") else x.dtype
        if name in ("any", "all"):
            name = "max" if name == "any" else "min"
        out = x
        if any(x.shape[a] > 1 for a in reduced) or name in ("argmax", "argmin"):
            out = self.node("reduce", (x,), (name, tuple(reduced)), shape, dtype)
        else:
            out = out.reshape(shape)
        wide = [1 if k in reduced else n for k, n in enumerate(x.shape)]
        return out.reshape(wide) if keepdims else out

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the last two axes; those before are broadcast."""
        front = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a = self.broadcast(a, (*front, *a.shape[-2:]))
        b = self.broadcast(b, (*front, *b.shape[-2:]))
        if a.shape[-1] != b.shape[-2]:
            raise NotTranslatable(f"a product of {list(a.shape)} and {list(b.shape)}")
        if a.dtype != b.dtype or a.dtype.kind != "f":
            raise NotTranslatable(f"a product of {a.dtype} and {b.dtype}")
        if a.shape[-1] == 1:
            return self.map("Mul", a, b)
        a, b = self._ready(a, b)
        return self.node("dot", (a, b), None, (*front, a.shape[-2], b.shape[-1]), a.dtype)

    def _ready(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Factors as :mod:`.products` reads them: one with its columns side by side, or two rows."""
        rows, columns = a.shape[-2], b.shape[-1]
        (_, _, of_a), (_, _, of_b) = a.strided(), b.strided()
        if columns > 1 and rows > 1:
            return a, b if of_b[-1] == 1 else self.copy(b)
        if columns == 1:
            if (of_a[-2] == 1 and rows > 1) or (of_a[-1] == 1 and of_b[-2] == 1):
                return a, b
            if of_a[-1] == 1:
                return a, self.copy(b)
            return self.copy(a), b if of_b[-2] == 1 else self.copy(b)
        if of_b[-1] == 1 or (of_b[-2] == 1 and of_a[-1] == 1):
            return a, b
        return (a if of_a[-1] == 1 else self.copy(a)), (b if of_b[-2] == 1 else self.copy(b))

    def assemble(
        self,
        shape: Sequence[int],
        fill: Any,
        parts: Sequence[tuple[Tensor, int, tuple[int, ...]]],
        dtype: Any,
    ) -> Tensor:
        """Parts, each at an offset and with strides, on a background of one number."""
        data = (None if fill is None else float(fill), tuple((o, s) for _, o, s in parts))
        return self.node("assemble", [t for t, _, _ in parts], data, shape, dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _progression(index: Array) -> slice | None:
    """Known positions as a slice."""
    if index.dtype == bool or index.ndim != 1 or not len(index):
        return None
    first, last = int(index[0]), int(index[-1])
    step = int(index[1]) - first if len(index) > 1 else 1
    if step == 0 or min(first, last) < 0 or not (np.diff(index) == step).all():
        return None
    end = last + (1 if step > 0 else -1)
    return slice(first, None if end < 0 else end, step)


_FUNCTIONS = {function: operator for operator, function in SAME.items()} | {
    "isfinite": "IsFinite",
    "divide": "Div",
    "power": "Pow",
    "maximum": "Max",
    "minimum": "Min",
    "left_shift": "BitShiftLeft",
    "right_shift": "BitShiftRight",
    "fmod": "Fmod",
    "mod": "Mod",
}
"""The functions of elements that are not below, and their operators."""
_RUNNING = {"cumsum": "Add", "cumprod": "Mul"}
_REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
_VIEWS = ("transpose", "flip", "moveaxis", "swapaxes", "squeeze", "expand_dims", "broadcast_to")


class Namespace:
    """The functions of numpy on :class:`Tensor`; of values that are all known, numpy's own."""

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        trace = self._trace
        if name in ("zeros", "ones", "arange"):
            return getattr(np, name)
        if name in _FUNCTIONS:

            def apply(*values: Any) -> Any:
                if not any(isinstance(v, Tensor) for v in values):
                    return getattr(np, name)(*values)
                return trace.map(_FUNCTIONS[name], *values)

            return apply
        if name in _VIEWS:
            change = getattr(np, name)

            def show(x: Any, *arguments: Any, **options: Any) -> Any:
                if not isinstance(x, Tensor):
                    return change(x, *arguments, **options)
                return trace.view(x, lambda a: change(a, *arguments, **options))

            return show
        if name in _RUNNING:

            def run(x: Any, axis: int) -> Any:
                if not isinstance(x, Tensor):
                    return getattr(np, name)(x, axis)
                return trace.node("cumulate", (x,), (_RUNNING[name], axis), x.shape, x.dtype)

            return run
        if name in _REDUCTIONS:

            def reduce(
                x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None
            ) -> Any:
                if not isinstance(x, Tensor):
                    more = {} if initial is None else {"initial": initial}
                    return np.asarray(getattr(np, name)(x, axis=axis, keepdims=keepdims, **more))
                return trace.reduce(name, x, axis, keepdims)

            return reduce
        raise NotTranslatable(f"the function {name}")

    def asarray(self, value: Any, dtype: Any = None) -> Any:
        if isinstance(value, Tensor):
            return value if dtype is None else value.astype(dtype)
        return np.asarray(value, dtype)

    def zeros_like(self, x: Any) -> Array:
        return np.zeros(x.shape, x.dtype)

    def full_like(self, x: Any, value: Any) -> Array:
        return np.full(x.shape, value, x.dtype)

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        if not any(isinstance(v, Tensor) for v in (condition, yes, no)):
            return np.where(condition, yes, no)
        if (
            isinstance(condition, np.ndarray)
            and condition.size
            and (condition.all() or not condition.any())
        ):
            shapes = [np.shape(condition), *(np.shape(v) for v in (yes, no))]
            chosen = self._trace.lift(yes if condition.all() else no)
            return self._trace.broadcast(chosen, np.broadcast_shapes(*shapes))
        return self._trace.map("Where", condition, yes, no)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        return self.minimum(self.maximum(x, low), high)

    def expm1(self, x: Any) -> Any:
        """eˣ − 1, also near 0 (Kahan)."""
        if isinstance(x, Tensor) and x.dtype == np.float32:
            return self._trace.map("Expm1", x)
        e = self.exp(x)
        less = e - 1
        near = less * x / self.log(e)
        return self.where(self.equal(e, 1), x, self.where(self.equal(less, -1), less, near))

    def log1p(self, x: Any) -> Any:
        """log(1 + x), also near 0 (Kahan)."""
        if isinstance(x, Tensor) and x.dtype == np.float32:
            return self._trace.map("Log1p", x)
        u = 1 + x
        exact = self.where(self.equal(u, np.inf), u, self.log(u) * x / (u - 1))
        return self.where(self.equal(u, 1), x, exact)

    def sinh(self, x: Any) -> Any:
        """(eˣ − e⁻ˣ) / 2, also near 0."""
        less = self.expm1(self.abs(x))
        half = self.where(self.isfinite(less), (less + less / (less + 1)) * 0.5, less)
        return self.where(x < 0, -half, half)

    def cosh(self, x: Any) -> Any:
        """(eˣ + e⁻ˣ) / 2."""
        power = self.exp(self.abs(x))
        return (power + 1 / power) * 0.5

    def tan(self, x: Any) -> Any:
        return self.sin(x) / self.cos(x)

    def arctan(self, x: Any) -> Any:
        """The polynomial of Cephes (atanf) on a third of the range, and two reflections."""
        size = self.abs(x)
        far, middle = size > 2.414213562373095, size > 0.4142135623730950
        near = self.where(middle, (size - 1) / (size + 1), size)
        z = self.where(far, -1 / size, near)
        start = self.where(far, math.pi / 2, self.where(middle, math.pi / 4, size * 0))
        square = z * z
        series = 8.05374449538e-2 * square - 1.38776856032e-1
        series = (series * square + 1.99777106478e-1) * square - 3.33329491539e-1
        angle = start + (series * square * z + z)
        return self.where(x < 0, -angle, angle)

    def arcsin(self, x: Any) -> Any:
        """By the arctangent of the opposite over the adjacent side."""
        return self.arctan(x / self.sqrt((1 - x) * (1 + x)))

    def arccos(self, x: Any) -> Any:
        """π/2 less the arcsine."""
        return math.pi / 2 - self.arcsin(x)

    def arcsinh(self, x: Any) -> Any:
        """log(x + √(x² + 1)), also near 0."""
        size = self.abs(x)
        square = size * size
        out = self.log1p(size + square / (1 + self.sqrt(square + 1)))
        return self.where(x < 0, -out, out)

    def arccosh(self, x: Any) -> Any:
        """log(x + √(x² − 1))."""
        above = x - 1
        return self.log1p(above + self.sqrt(above * (x + 1)))

    def arctanh(self, x: Any) -> Any:
        """log((1 + x) / (1 − x)) / 2, also near 0."""
        return self.log1p(2 * x / (1 - x)) * 0.5

    def logaddexp(self, a: Any, b: Any) -> Any:
        return self.maximum(a, b) + self.log1p(self.exp(-self.abs(self.subtract(a, b))))

    def mean(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        total = self.sum(x, axis=axis, keepdims=keepdims)
        return total / np.asarray(x.size // max(1, total.size), x.dtype)

    def split(self, x: Any, parts: int, axis: int = 0) -> list[Any]:
        if not isinstance(x, Tensor):
            return np.split(x, parts, axis)
        size = x.shape[axis] // parts
        front = (slice(None),) * (axis % x.ndim)
        return [x[(*front, slice(k * size, (k + 1) * size))] for k in range(parts)]

    def stack(self, values: Sequence[Any], axis: int = 0) -> Any:
        return self.concatenate([self.expand_dims(v, axis) for v in values], axis=axis)

    def concatenate(self, values: Sequence[Any], axis: int = 0) -> Any:
        if not any(isinstance(v, Tensor) for v in values):
            return np.concatenate(values, axis=axis)
        tensors = [self._trace.lift(v) for v in values if np.size(v) or isinstance(v, Tensor)]
        if len(tensors) == 1:
            return tensors[0]
        first = tensors[0]
        axis %= first.ndim
        sizes = [t.shape[axis] for t in tensors]
        shape = [*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :]]
        strides = row_major(shape)
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        parts = [(t, s * strides[axis], strides) for t, s in zip(tensors, starts, strict=True)]
        return self._trace.assemble(shape, None, parts, first.dtype)

    def tile(self, x: Any, repeats: Sequence[int]) -> Any:
        if not isinstance(x, Tensor):
            return np.tile(x, repeats)
        wide = x.reshape([n for size in x.shape for n in (1, size)])
        shape = [n for size, many in zip(x.shape, repeats, strict=True) for n in (many, size)]
        out = [size * many for size, many in zip(x.shape, repeats, strict=True)]
        return self._trace.broadcast(wide, shape).reshape(out)

    def pad(self, x: Any, widths: Any, mode: Any = "constant") -> Any:
        """Padding that repeats elements: by their positions."""
        if not isinstance(x, Tensor):
            return np.pad(x, widths, mode)
        for axis, width in enumerate(widths):
            if any(width):
                places = np.pad(np.arange(x.shape[axis]), width, mode=mode)
                x = self._trace.gather(x, [self._trace.lift(places)], axis)
        return x

    def take_along_axis(self, x: Any, index: Any, axis: int) -> Any:
        if not isinstance(x, Tensor) and not isinstance(index, Tensor):
            return np.take_along_axis(x, index, axis)
        x, index = self._trace.lift(x), self._trace.lift(index)
        places = [
            np.arange(n).reshape([-1 if j == k else 1 for j in range(x.ndim)])
            for k, n in enumerate(index.shape)
        ]
        own = [index if k == axis % x.ndim else self._trace.lift(p) for k, p in enumerate(places)]
        return self._trace.gather(x, own, 0)

    def matmul(self, a: Any, b: Any) -> Any:
        return CForms(self._trace).matmul(a, b)


class CForms(NumpyForms):
    """The functions that differ between namespaces, for :class:`Tensor`.

    A convolution is the product of its windows, and nothing is computed a second time.
    """

    samples_first = True

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace
        self.xp = trace.xp

    def erf(self, x: Any) -> Any:
        return self._trace.map("Erf", x)

    def dot(self, a: Any, b: Any, transposed: tuple[bool, bool]) -> Any:
        a, b = self._trace.lift(a), self._trace.lift(b)
        return self._trace.dot(a.T if transposed[0] else a, b.T if transposed[1] else b)

    def matmul(self, a: Any, b: Any) -> Any:
        a, b = self._trace.lift(a), self._trace.lift(b)
        left = a.reshape(1, *a.shape) if a.ndim == 1 else a
        right = b.reshape(*b.shape, 1) if b.ndim == 1 else b
        out = self._trace.dot(left, right)
        if a.ndim == 1:
            out = out.reshape(*out.shape[:-2], out.shape[-1])
        return out.reshape(out.shape[:-1]) if b.ndim == 1 else out

    def pad(self, x: Any, value: float, pads: Sequence[tuple[int, int, int]]) -> Any:
        x = self._trace.lift(x)
        sizes = [n + max(0, n - 1) * p[2] for n, p in zip(x.shape, pads, strict=True)]
        shape = [n + low + high for n, (low, high, _) in zip(sizes, pads, strict=True)]
        if any(low < 0 or high < 0 for low, high, _ in pads):
            cut = [(max(0, low), max(0, high), inner) for low, high, inner in pads]
            wide = self.pad(x, value, cut)
            keep = [
                slice(max(0, -low), size - max(0, -high))
                for size, (low, high, _) in zip(wide.shape, pads, strict=True)
            ]
            return wide[tuple(keep)]
        if tuple(shape) == x.shape:
            return x
        strides = row_major(shape)
        offset = sum(s * low for s, (low, _, _) in zip(strides, pads, strict=True))
        apart = tuple(s * (inner + 1) for s, (_, _, inner) in zip(strides, pads, strict=True))
        return self._trace.assemble(shape, value, [(x, offset, apart)], x.dtype)

    def scatter(self, x: Any, index: tuple[Any, ...], updates: Any, how: str) -> Any:
        x, updates = self._trace.lift(x), self._trace.lift(updates)
        places = [self._trace.lift(p) for p in index]
        shape = np.broadcast_shapes(*(p.shape for p in places))
        whole = (*shape, *x.shape[len(places) :])
        own = self._trace.spread(places, whole, 0)
        updates = self._trace.broadcast(updates, whole)
        return self._trace.node("scatter", (x, updates, *own), how, x.shape, x.dtype)

    def take(self, x: Any, index: Any, axis: int) -> Any:
        x = self._trace.lift(x)
        if isinstance(index, np.ndarray) and index.ndim == 0:
            return x[(*(slice(None),) * axis, int(index))]
        if isinstance(index, np.ndarray) and (run := _progression(index)) is not None:
            return x[(*(slice(None),) * axis, run)]
        return self._trace.gather(x, [self._trace.lift(index)], axis)

    def cond(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """Both branches are computed."""
        pairs = list(zip(yes(), no(), strict=True))
        if any(np.shape(a) != np.shape(b) for a, b in pairs):
            raise TypeError("the branches have different shapes")
        return tuple(self.xp.where(condition.reshape(()), a, b) for a, b in pairs)

    def while_loop(self, test: Any, body: Any, state: Any) -> Any:
        raise NotTranslatable("a Loop that ends by a condition of the data")
