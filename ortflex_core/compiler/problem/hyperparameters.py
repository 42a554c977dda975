"""The hyperparameters of a component in a graph: host scalars that represent them, and their values."""

from __future__ import annotations

from typing import TypeVar

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.host_scalars import Host

C = TypeVar("C", bound=Component)


def symbolic(component: C, prefix: str = "") -> C:
    """Return a copy of a component whose hyperparameters are host scalars.

    The formulas of the copy then compute with symbols, whose values :func:`hypers` returns.
    Validators are not called, because a symbol has no value yet.
    """
    twin = object.__new__(type(component))
    symbols = {name: Host.symbol(_key(prefix, name)) for name in component.hyper_names()}
    for field in attrs.fields(type(component)):
        value = symbols.get(field.name, getattr(component, field.name))
        object.__setattr__(twin, field.name, value)
    return twin


def hypers(prefix: str, component: Component) -> dict[str, float]:
    """Return the values of the host scalars that :func:`symbolic` made."""
    return {_key(prefix, name): value for name, value in component.hyper_values().items()}


def _key(prefix: str, name: str) -> str:
    # Not "/": a hyperparameter called "scale" is not the scale of its loss.
    return f"{prefix}.{name}" if prefix else name
