"""Host scalars: numbers that are symbols while a formula is traced and known when it runs.

Expressions of host scalars and constants alone are evaluated here, on the host, in float64, and
only the result enters the graph. In float32 the Adam correction 1 - 0.999**t would be off by
1.3e-5 at t = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortflex_core.errors import GraphError

OPERATORS: Mapping[str, Callable[..., float]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Pow": lambda a, b: a**b,
    "Neg": lambda a: -a,
    "Abs": abs,
    "Sqrt": math.sqrt,
    "Exp": math.exp,
    "Log": math.log,
    "Reciprocal": lambda a: 1.0 / a,
    "Min": min,
    "Max": max,
    "Floor": lambda a: float(math.floor(a)),
    "Identity": lambda a: a,
}
"""The ONNX operators that have a meaning on the host."""


class Host:
    """A symbol (``Host.symbol("rate")``) or an expression of symbols and numbers.

    >>> beta, step = Host.symbol("beta"), Host.symbol("step")
    >>> HostProgram([1 - beta**step])({"beta": 0.9, "step": 1})
    [0.09999999999999998]
    """

    __slots__ = ("_hash", "_key", "args", "op")
    # A numpy scalar on the left must leave the operation to us.
    __array_ufunc__ = None

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        self.op = op
        self.args = args
        # Numbers as text: 0.0 and -0.0 are equal, but not the same.
        self._key = (op, tuple(repr(a) if isinstance(a, float) else a for a in args))
        self._hash = hash(self._key)

    @classmethod
    def symbol(cls, name: str) -> Host:
        """A scalar whose value is given under ``name`` when the graph runs."""
        return cls("symbol", (name,))

    @classmethod
    def apply(cls, op: str, *args: Host | float) -> Host:
        """The operator ``op`` of ONNX on host scalars and numbers."""
        return cls(op, tuple(a if isinstance(a, Host) else float(a) for a in args))

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols that the value depends on."""
        if self.op == "symbol":
            return frozenset(self.args)
        return frozenset().union(*(a.symbols for a in self.args if isinstance(a, Host)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Structural, unlike Tensor's: equal expressions share one slot of the graph's inputs.
        if self is other:
            return True
        return isinstance(other, Host) and self._key == other._key

    def __repr__(self) -> str:
        if self.op == "symbol":
            return str(self.args[0])
        return f"{self.op}({', '.join(map(repr, self.args))})"

    def __bool__(self) -> bool:
        raise GraphError(
            f"the host scalar {self!r} has no value while a formula is traced; "
            "use op.Min, op.Max or op.Where instead of 'if'"
        )

    def _binary(self, op: str, other: Any, swap: bool = False) -> Any:
        if isinstance(other, bool) or not isinstance(other, Host | int | float):
            return NotImplemented
        return Host.apply(op, *((other, self) if swap else (self, other)))

    def __add__(self, other: Any) -> Any:
        return self._binary("Add", other)

    def __radd__(self, other: Any) -> Any:
        return self._binary("Add", other, swap=True)

    def __sub__(self, other: Any) -> Any:
        return self._binary("Sub", other)

    def __rsub__(self, other: Any) -> Any:
        return self._binary("Sub", other, swap=True)

    def __mul__(self, other: Any) -> Any:
        return self._binary("Mul", other)

    def __rmul__(self, other: Any) -> Any:
        return self._binary("Mul", other, swap=True)

    def __truediv__(self, other: Any) -> Any:
        return self._binary("Div", other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary("Div", other, swap=True)

    def __pow__(self, other: Any) -> Any:
        return self._binary("Pow", other)

    def __rpow__(self, other: Any) -> Any:
        return self._binary("Pow", other, swap=True)

    def __neg__(self) -> Host:
        return Host.apply("Neg", self)


class HostProgram:
    """Evaluates several host expressions at once; common subexpressions are computed once.

    Called with the values of the symbols, it returns one number per expression. A name that is
    missing is a :class:`GraphError`.
    """

    def __init__(self, expressions: Sequence[Host]) -> None:
        self._cells: list[Any] = []
        self._symbols: list[tuple[int, str]] = []
        self._code: list[tuple[int, Callable[..., float], tuple[int, ...], Host]] = []
        self._known: dict[Any, int] = {}
        self._results = [self._place(e) for e in expressions]
        self.symbols = frozenset(name for _, name in self._symbols)

    def _place(self, value: Host | float) -> int:
        # Numbers are keyed apart from expressions, and -0.0 apart from 0.0.
        key: Any = value if isinstance(value, Host) else ("number", repr(value))
        if key in self._known:
            return self._known[key]
        if not isinstance(value, Host):
            cell = self._cell(value)
        elif value.op == "symbol":
            cell = self._cell(math.nan)
            self._symbols.append((cell, value.args[0]))
        else:
            places = tuple(self._place(a) for a in value.args)
            cell = self._cell(math.nan)
            self._code.append((cell, OPERATORS[value.op], places, value))
        self._known[key] = cell
        return cell

    def _cell(self, value: float) -> int:
        self._cells.append(value)
        return len(self._cells) - 1

    def __call__(self, values: Mapping[str, float]) -> list[float]:
        """The values of the expressions, in their order."""
        cells = self._cells
        try:
            for cell, name in self._symbols:
                cells[cell] = values[name]
        except KeyError as error:
            raise GraphError(f"no value was given for the host scalar {error}") from error
        for cell, function, places, expression in self._code:
            try:
                cells[cell] = function(*[cells[p] for p in places])
            except (ArithmeticError, ValueError) as error:
                used = {name: values[name] for name in expression.symbols}
                raise GraphError(
                    f"the host scalar {expression!r} is undefined at {used}: {error}"
                ) from error
        return [cells[p] for p in self._results]
