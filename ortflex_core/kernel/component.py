"""The base of all components: hyperparameters and validators.

A component is a frozen attrs class with keyword-only fields. A field made by :func:`hyper` may
change from one run to the next without a new graph: while a formula is traced it is a host scalar
(a symbol), and its value is bound when the graph runs. Any other field is a constant of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Literal

import attrs

from ortflex_core.kernel.errors import short_repr, suggest
from ortflex_core.kernel.signatures import explained

_HYPER = "ortflex.hyper"
RATES = ("lr", "learning_rate", "rate")
"""Names that users give the learning rate, which is an argument of the Trainer, not of a component."""

MOST = 2**31 - 1
"""The largest valid count of rows, batches, epochs or steps; far larger than any practical one."""


def is_count(value: Any, least: int = 1, most: int = MOST) -> bool:
    """Whether a value is an integer within the bounds, and not a boolean.

    >>> is_count(5), is_count(True), is_count(10**25)
    (True, False, False)
    """
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and least <= value <= most


def expected_count(value: Any, least: int = 1, most: int = MOST) -> str:
    """The expected and the given value, for a message about a value that is no count.

    >>> expected_count(0)
    'expected an integer >= 1, got 0'
    >>> expected_count(2**31)
    'expected an integer from 1 to 2147483647, got 2147483648'
    """
    beyond = isinstance(value, int) and value > most
    bounds = f"from {least} to {most}" if beyond else f">= {least}"
    return f"expected an integer {bounds}, got {short_repr(value)}"


def is_number(value: Any) -> bool:
    """Whether a value is a real, finite number of Python or numpy, and not a boolean.

    >>> is_number(0.5), is_number(float("inf")), is_number(10**400), is_number(True)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer that no float holds
        return False


@attrs.frozen(kw_only=True)
class Bounds:
    """Validator: a finite real number inside the given bounds.

    >>> @attrs.frozen(kw_only=True)
    ... class Momentum:
    ...     beta: float = attrs.field(default=0.9, validator=Bounds(ge=0, lt=1))
    >>> Momentum(beta=2.0)
    Traceback (most recent call last):
    ValueError: Momentum.beta must be a number >= 0 and < 1, got 2.0
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    @property
    def range(self) -> str:
        """The bounds in words, for messages and the reference."""
        bounds = {">": self.gt, ">=": self.ge, "<": self.lt, "<=": self.le}
        return " and ".join(f"{sign} {b:g}" for sign, b in bounds.items() if b is not None)

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Refuse any other value."""
        bounds = ((gt, self.gt), (ge, self.ge), (lt, self.lt), (le, self.le))
        if not is_number(value) or not all(b is None or holds(value, b) for holds, b in bounds):
            where = f"{type(instance).__name__}.{attribute.name}"
            text = f"{where} must be a number {self.range}".rstrip() + f", got {short_repr(value)}"
            raise (ValueError if isinstance(value, int | float) else TypeError)(text)


number = Bounds
"""The name of the validator where fields are declared: ``validator=number(ge=0, lt=1)``."""


def satisfying(
    text: str, accepts: Callable[[Any], bool], error: type[Exception] = ValueError
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Validator: a value that a function accepts; for others, ``text`` says what it must be."""

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not accepts(value):
            where = f"{type(instance).__name__}.{attribute.name}"
            raise error(f"{where} {text}, got {short_repr(value)}")

    return validate


def one_of(*choices: Any) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Validator: one of the given values."""
    return satisfying(f"must be one of {', '.join(map(repr, choices))}", choices.__contains__)


def listed(value: Any) -> Any:
    """Converter: a string as a tuple of one, other sequences as tuples."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    # Not by their classes: no import of numpy.
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def hyper(
    *,
    default: float,
    validator: Callable[[Any, attrs.Attribute[Any], Any], None] | None = None,
    help: str = "",
) -> Any:
    """Declare a hyperparameter: a number that is bound at run time; a new value needs no new graph."""
    return attrs.field(
        default=default,
        validator=validator or number(),
        converter=_plain,
        metadata={_HYPER: True, "help": help},
    )


def setting(*, help: str = "", **options: Any) -> Any:
    """Declare a field that is a constant of graphs; options of ``attrs.field``, and what lists show."""
    return attrs.field(metadata={"help": help}, **{"converter": _plain, **options})


@attrs.frozen(kw_only=True)
class Component:
    """Base of all components; subclasses are frozen, keyword-only attrs classes."""

    name: ClassVar[str] = ""
    """The name of the component in the registry."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Its names in other libraries, in lowercase; they are not accepted, but messages suggest ``name``."""

    stability: ClassVar[Literal["stable", "experimental"]] = "stable"
    """``experimental``: parameters and results may change in any version, without a deprecation."""

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        """Explain a call of the constructor that does not fit."""
        cls.__init__ = explained(cls.__init__, _hint)  # type: ignore[method-assign]

    @classmethod
    def hyper_names(cls) -> tuple[str, ...]:
        """Names of the fields that are bound at run time."""
        return tuple(f.name for f in attrs.fields(cls) if f.metadata.get(_HYPER))

    def hyper_values(self) -> dict[str, float]:
        """Values of the fields that are bound at run time."""
        return {name: float(getattr(self, name)) for name in self.hyper_names()}

    def describe(self) -> dict[str, Any]:
        """The component as a mapping that a recipe can hold and read back."""
        out: dict[str, Any] = {"name": self.name}
        for field in attrs.fields(type(self)):
            out[field.alias or field.name] = _described(getattr(self, field.name))
        return out


def _hint(name: str, known: Mapping[str, Any]) -> str:
    """The end of a message about an unknown parameter."""
    rate = "the learning rate is an argument of Trainer and a key of recipes: learning_rate=…"
    return rate if name in RATES and not {*RATES} & {*known} else suggest(name, known)


def _described(value: Any) -> Any:
    """Components, and sequences of them, as mappings."""
    if isinstance(value, Component):
        return value.describe()
    return tuple(map(_described, value)) if isinstance(value, tuple | list) else value
