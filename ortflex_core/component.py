"""What all components share: hyperparameters, validation, and their symbolic twins.

A component is a frozen attrs class with keyword-only fields. A field made by :func:`hyper` may
change from one run to the next without a new graph: while a formula is traced it is a host scalar
(a symbol), and its value is bound when the graph runs. Any other field is a constant of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs

C = TypeVar("C", bound="Component")
_HYPER = "ortflex.hyper"


def number(
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Validator: a finite real number inside the given bounds.

    >>> @attrs.frozen(kw_only=True)
    ... class Momentum:
    ...     beta: float = attrs.field(default=0.9, validator=number(ge=0, lt=1))
    >>> Momentum(beta=2.0)
    Traceback (most recent call last):
    ValueError: Momentum.beta must be a number >= 0 and < 1, got 2.0
    """
    bounds = {">": gt, ">=": ge, "<": lt, "<=": le}
    wanted = " and ".join(
        f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None
    )

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        good = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max  # isfinite fails for integers beyond
            and (gt is None or value > gt)
            and (ge is None or value >= ge)
            and (lt is None or value < lt)
            and (le is None or value <= le)
        )
        if not good:
            where = f"{type(instance).__name__}.{attribute.name}"
            text = f"{where} must be a number {wanted}".rstrip() + f", got {value!r}"
            raise (ValueError if isinstance(value, int | float) else TypeError)(text)

    validate.range = wanted  # type: ignore[attr-defined]  # for the reference
    return validate


def one_of(*choices: Any) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Validator: one of the given values."""

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            where = f"{type(instance).__name__}.{attribute.name}"
            raise ValueError(
                f"{where} must be one of {', '.join(map(repr, choices))}, got {value!r}"
            )

    return validate


def hyper(
    *,
    default: float,
    validator: Callable[[Any, attrs.Attribute[Any], Any], None] | None = None,
    help: str = "",
) -> Any:
    """Declare a hyperparameter: a number that is bound at run time, so that changing it is free."""
    return attrs.field(
        default=default,
        validator=validator or number(),
        metadata={_HYPER: True, "help": help},
    )


@attrs.frozen(kw_only=True)
class Component:
    """Base of all components; subclasses are frozen, keyword-only attrs classes."""

    name: ClassVar[str] = ""
    """The name the registry knows the component by."""

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


def _described(value: Any) -> Any:
    """Components, and sequences of them, as mappings."""
    if isinstance(value, Component):
        return value.describe()
    return tuple(map(_described, value)) if isinstance(value, tuple | list) else value


def symbolic(component: C, symbols: Mapping[str, Any]) -> C:
    """Return the component's twin for tracing, its hyperparameters replaced by ``symbols``.

    Validators are bypassed on purpose: a symbol has no value yet.
    """
    twin = object.__new__(type(component))
    for field in attrs.fields(type(component)):
        object.__setattr__(
            twin, field.name, symbols.get(field.name, getattr(component, field.name))
        )
    return twin
