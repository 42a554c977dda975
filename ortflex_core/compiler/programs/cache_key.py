"""A cache key for compiled steps: problems with equal keys share programs.

Hyperparameters are bound when a graph runs, so their values are not in the key. Classes and families
of rules are compared by identity: one that was defined again is different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ortflex_core.compiler.graph import protos
from ortflex_core.compiler.model.model import LARGE
from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.compiler.problem.problem import Problem
    from ortflex_core.compiler.problem.updating import Group


class Same:
    """An object compared by identity and kept alive by the key."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing


def problem_key(problem: Problem) -> Hashable:
    """The key of everything that the graphs of a problem depend on, except the batch size."""
    updating = problem.updating
    return (
        _model_key(problem),
        problem.parameters,
        # Whether a loss reads labels may depend on the value of a hyperparameter.
        tuple((component_key(t.loss), t.label_port, _rest(t, "loss")) for t in problem.terms),
        tuple((component_key(t.penalty), _rest(t, "penalty")) for t in problem.penalties),
        component_key(problem.optimizer),
        tuple(component_key(term.transform) for term in updating.transforms),
        updating.accumulate,
        tuple(_group_key(group) for group in updating.groups),
        tuple((component_key(t.constraint), _rest(t, "constraint")) for t in updating.constraints),
        None if updating.average is None else component_key(updating.average),
        component_key(problem.precision) if problem.precision is not None else None,
        tuple(Same(family) for family in problem.rules.families),
        problem.rules.identity,
        (problem.reduction, problem.batch_norm, problem.dropout, problem.seed, problem.buffers),
        problem.observing,
        _value(problem.recomputed),
    )


def _group_key(group: Group) -> Hashable:
    # A group that names an optimizer has hyperparameters of its own, even if they are equal.
    own = component_key(group.optimizer), bool(group.optimizer_name)
    return own, group.index, group.parameters, group.rate == 1.0, bool(group.start_epoch)


def component_key(component: Component) -> Hashable:
    """A component's class and its constants."""
    hypers = component.hyper_names()
    fields = [f.name for f in attrs.fields(type(component)) if f.name not in hypers]
    return type(component), tuple((n, _value(getattr(component, n))) for n in fields)


def _rest(term: Any, without: str) -> Hashable:
    names = [f.name for f in attrs.fields(type(term)) if f.name != without]
    return tuple((n, _value(getattr(term, n))) for n in names)


def _value(value: Any) -> Hashable:
    if isinstance(value, Component):
        return component_key(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return tuple(_value(v) for v in value)
    if isinstance(value, Mapping):
        return tuple((k, _value(v)) for k, v in value.items())
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value  # 1, 1.0 and True are equal, but not the same constant


def _model_key(problem: Problem) -> str:
    """The graph, and the values that are constants of it."""
    model = problem.model
    digest = hashlib.sha256(protos.structure(model.internal).encode())
    trained = set(problem.parameters)
    for name, spec in model.initializers.items():
        size = int(np.prod(spec.shape or (), dtype=np.int64))  # type: ignore[arg-type]
        if name not in trained and size <= LARGE:
            array = model.initializer(name)
            raw = repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
            digest.update(name.encode() + b"\0" + raw)
    return digest.hexdigest()
