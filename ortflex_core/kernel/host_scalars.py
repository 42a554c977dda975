"""Host scalars: numbers that are symbols while a formula is traced and have values when it runs.

Expressions of host scalars and constants alone are evaluated here, on the host, in float64, and only the
result enters the graph. In float32 the Adam correction 1 - 0.999**t would be off by 1.3e-5 at t = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np

from ortflex_core.kernel.errors import GraphError

OPERATORS: Mapping[str, str] = {
    "Add": "{} + {}",
    "Sub": "{} - {}",
    "Mul": "{} * {}",
    "Div": "{} / {}",
    "Pow": "{} ** {}",
    "Neg": "-{}",
    "Abs": "abs({})",
    "Sqrt": "sqrt({})",
    "Exp": "exp({})",
    "Log": "log({})",
    "Reciprocal": "1.0 / {}",
    "Min": "min({all})",
    "Max": "max({all})",
    "Floor": "float(floor({}))",
    "Identity": "{}",
}
"""The ONNX operators that can be evaluated on the host, as Python expressions."""
T = TypeVar("T")
_FILE = "<host scalars>"
_NAMES = {name: getattr(math, name) for name in ("sqrt", "exp", "log", "floor", "inf", "nan")}


class Host:
    """A symbol (``Host.symbol("rate")``) or an expression of symbols and numbers.

    >>> beta, step = Host.symbol("beta"), Host.symbol("step")
    >>> HostProgram([1 - beta**step])({"beta": 0.9, "step": 1})
    [0.09999999999999998]
    """

    __slots__ = ("_hash", "_key", "args", "op")
    # Makes a numpy scalar on the left use the operators of this class.
    __array_ufunc__ = None

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        self.op = op
        self.args = args
        # Numbers by their repr: 0.0 and -0.0 are equal, but not the same.
        self._key = (op, tuple(repr(a) if isinstance(a, float) else a for a in args))
        self._hash = hash(self._key)

    @classmethod
    def symbol(cls, name: str) -> Host:
        """A scalar whose value is passed as ``name`` when the graph runs."""
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
        if _is_number(other):
            self._refuse()
        return isinstance(other, Host) and self._key == other._key

    def __lt__(self, other: object) -> bool:
        self._refuse()

    __le__ = __gt__ = __ge__ = __lt__

    def __repr__(self) -> str:
        if self.op == "symbol":
            return str(self.args[0])
        return f"{self.op}({', '.join(map(repr, self.args))})"

    def __bool__(self) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise GraphError(
            f"the host scalar {self!r} has no value while a formula is traced, so it cannot be compared "
            "with a number or decide an 'if'; use op.Min and op.Max (op.Min(step - 1, 1.0) is 0 at "
            "the first step and 1 afterwards) or op.Where"
        )

    def _binary(self, op: str, other: Host | float, swap: bool = False) -> Host:
        if isinstance(other, bool) or not isinstance(other, Host | int | float):
            return cast("Host", NotImplemented)
        return Host.apply(op, *((other, self) if swap else (self, other)))

    def __add__(self, other: Host | float) -> Host:
        return self._binary("Add", other)

    def __radd__(self, other: Host | float) -> Host:
        return self._binary("Add", other, swap=True)

    def __sub__(self, other: Host | float) -> Host:
        return self._binary("Sub", other)

    def __rsub__(self, other: Host | float) -> Host:
        return self._binary("Sub", other, swap=True)

    def __mul__(self, other: Host | float) -> Host:
        return self._binary("Mul", other)

    def __rmul__(self, other: Host | float) -> Host:
        return self._binary("Mul", other, swap=True)

    def __truediv__(self, other: Host | float) -> Host:
        return self._binary("Div", other)

    def __rtruediv__(self, other: Host | float) -> Host:
        return self._binary("Div", other, swap=True)

    def __pow__(self, other: Host | float) -> Host:
        return self._binary("Pow", other)

    def __rpow__(self, other: Host | float) -> Host:
        return self._binary("Pow", other, swap=True)

    def __neg__(self) -> Host:
        return Host.apply("Neg", self)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.ndarray)


class HostNodes(Generic[T]):
    """Host expressions as float64 nodes of a graph; equal expressions are computed once.

    ``symbol`` and ``constant`` give the float64 scalars of a symbol and of a number, ``node`` adds a node
    of a standard operator.
    """

    def __init__(
        self, symbol: Callable[[str], T], constant: Callable[[float], T], node: Callable[..., T]
    ) -> None:
        self._symbol, self._constant, self._node = symbol, constant, node
        self._known: dict[Host, T] = {}

    def value(self, expression: Host | float) -> T:
        """The float64 scalar of an expression."""
        if not isinstance(expression, Host):
            return self._constant(expression)
        if expression not in self._known:
            if expression.op == "symbol":
                self._known[expression] = self._symbol(str(expression.args[0]))
            else:
                self._known[expression] = self._operator(expression)
        return self._known[expression]

    def _operator(self, expression: Host) -> T:
        places = [self.value(a) for a in expression.args]
        first = expression.args[0]
        if expression.op == "Div" and not isinstance(first, Host) and first == 1.0:
            # onnxruntime replaces a product (1/a)·b by b/a, which differs in the last bit.
            return self._node("Reciprocal", places[1])
        return self._node(expression.op, *places)


class HostProgram:
    """Evaluates several host expressions at once; common subexpressions are computed once.

    Called with the values of the symbols, it returns one number per expression. A name that is
    missing is a :class:`GraphError`.
    """

    def __init__(self, expressions: Sequence[Host]) -> None:
        # A Python function with one line per operator: a graph of many steps has hundreds.
        self._lines: list[str] = []
        self._origins: list[Host] = []
        self._known: dict[Host, str] = {}
        results = [self._place(e) for e in expressions]
        self.symbols = frozenset(e.args[0] for e in self._known if e.op == "symbol")
        body = [*self._lines, f"return [{', '.join(results)}]"]
        source = "def program(values):\n" + "".join(f" {line}\n" for line in body)
        names: dict[str, Any] = dict(_NAMES)
        exec(compile(source, _FILE, "exec"), names)
        # Removed from its globals, so that no reference cycle keeps both alive.
        self._program: Callable[[Mapping[str, float]], list[float]] = names.pop("program")

    def _place(self, value: Host | float) -> str:
        """The name of the variable with a value, or the number."""
        if not isinstance(value, Host):
            return f"({value!r})"
        if value not in self._known:
            if value.op == "symbol":
                line = f"values[{value.args[0]!r}]"
            else:
                places = [self._place(a) for a in value.args]
                line = OPERATORS[value.op].format(*places, all=", ".join(places))
            self._known[value] = f"v{len(self._lines)}"
            self._lines.append(f"{self._known[value]} = {line}")
            self._origins.append(value)
        return self._known[value]

    def __call__(self, values: Mapping[str, float]) -> list[float]:
        """The values of the expressions, in their order."""
        try:
            return self._program(values)
        except KeyError as error:
            raise GraphError(f"no value was given for the host scalar {error}") from error
        except (ArithmeticError, ValueError) as error:
            trace = error.__traceback__
            assert trace is not None
            assert trace.tb_next is not None
            expression = self._origins[trace.tb_next.tb_lineno - 2]
            used = {name: values[name] for name in expression.symbols}
            raise GraphError(
                f"the host scalar {expression!r} is undefined at {used}: {error}"
            ) from error
