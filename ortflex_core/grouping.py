"""What the user says about updates, read: parameter groups, constraints, averages, clipping."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from ortflex_core import parameters
from ortflex_core.errors import Problems, nearest
from ortflex_core.parameters import Choice
from ortflex_core.problem import PenaltyTerm
from ortflex_core.registry import Plugins
from ortflex_core.terms import penalty_terms
from ortflex_core.updates import ConstraintTerm, Group, Updating

GROUP_KEYS = {
    "params": "names and globs of the parameters; the first group that fits takes one",
    "rate": "factor of the learning rate",
    "optimizer": "an optimizer of their own",
    "penalty": "instead of the Trainer's penalty",
    "start_epoch": "trained from this epoch on, counted from 0",
    "frozen": "not trained at all",
}


@attrs.frozen(kw_only=True)
class Asked:
    """The arguments of a Trainer that say how weights are updated, as they were given."""

    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    groups: Any = ()
    constraint: Any = None
    averaging: Any = None


def problems(asked: Asked) -> Iterator[str]:
    """What is wrong with the numbers and the keys, one line each."""
    for name in ("clip_norm", "clip_value"):
        value = getattr(asked, name)
        if value is not None and not (_is_number(value) and value > 0):
            yield f"{name}: expected a finite number > 0, got {value!r}"
    count = asked.accumulate
    if type(count) is not int or count < 1:
        yield f"accumulate: expected an integer >= 1, got {count!r}"
    if not isinstance(asked.groups, list | tuple):
        yield f"groups: expected a list of tables, got {asked.groups!r}"
        return
    for k, table in enumerate(asked.groups):
        yield from _table_problems(table, f"groups[{k}]")


def _table_problems(table: Any, path: str) -> Iterator[str]:
    if not isinstance(table, Mapping):
        yield f"{path}: expected a table with the key params, got {table!r}"
        return
    for key in table:
        if key not in GROUP_KEYS:
            yield f"{path}.{key}: unknown key; {nearest(str(key), GROUP_KEYS)}"
    if not _patterns(table):
        yield f"{path}.params: is missing; {GROUP_KEYS['params']}"
    rate = table.get("rate", 1.0)
    if not (_is_number(rate) and rate >= 0):
        yield f"{path}.rate: expected a finite number >= 0, got {rate!r}"
    start = table.get("start_epoch", 0)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        yield f"{path}.start_epoch: expected an integer >= 0, got {start!r}"
    if not isinstance(table.get("frozen", False), bool):
        yield f"{path}.frozen: expected true or false, got {table['frozen']!r}"


def _is_number(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and abs(value) <= sys.float_info.max  # isfinite fails for integers beyond


def _patterns(table: Mapping[str, Any]) -> list[str]:
    given = table.get("params")
    return [given] if isinstance(given, str) else [p for p in given or () if isinstance(p, str)]


@attrs.frozen(kw_only=True)
class Grouped:
    """The parameters sorted into groups."""

    choices: tuple[Choice, ...]
    penalties: tuple[PenaltyTerm, ...]
    updating: Updating


def read(
    asked: Asked,
    choices: Sequence[Choice],
    penalty: Any,
    optimizer: Any,
    plugins: Plugins,
) -> Grouped:
    """Sort the parameters into groups and build what they ask for.

    Args:
        asked: the Trainer's arguments.
        choices: what is trained without groups.
        penalty: the Trainer's penalty, for all without one of their own.
        optimizer: the Trainer's optimizer, for all without one of their own.
        plugins: where components are found.

    Raises:
        ConfigError, ModelError: everything that is wrong; a glob that fits no parameter.
    """
    found = Problems()
    tables = [dict(t) for t in asked.groups]
    names = [c.name for c in choices if c.trained]
    owner = _owners(tables, names, found)
    frozen = {n for n, k in owner.items() if tables[k].get("frozen")}
    trained = [n for n in names if n not in frozen]
    if names and not trained:
        found.extend(["groups: every parameter is frozen, so that nothing is left to train"])
    first = min((_start(tables[owner[n]]) if n in owner else 0 for n in trained), default=0)
    if first:
        line = f"groups: nothing is trained before epoch {first + 1}"
        found.extend(
            [f"{line}; the least start_epoch has to be 0, which it is without being given"]
        )
    apart = {n for n, k in owner.items() if "penalty" in tables[k]}
    terms: list[PenaltyTerm] = []
    rest = [n for n in trained if n not in apart]
    terms += found.collect(lambda: penalty_terms(penalty, rest, plugins)) or ()
    groups = []
    for k, table in enumerate(tables):
        own = tuple(n for n in trained if owner.get(n) == k)
        if "penalty" in table:
            read_penalty = partial(penalty_terms, table["penalty"], own, plugins)
            terms += found.collect(read_penalty) or ()
        mine = None
        if "optimizer" in table:
            path = f"groups[{k}].optimizer"
            mine = found.collect(partial(plugins.component, "optimizers", table["optimizer"], path))
        if own:
            groups.append(
                Group(
                    index=k,
                    parameters=own,
                    optimizer=mine or optimizer,
                    optimizer_name=plugins["optimizers"].name_of(mine) if mine else None,
                    rate=float(table.get("rate", 1.0)),
                    start_epoch=_start(table),
                )
            )
    constraints = found.collect(lambda: _constraints(asked.constraint, trained, plugins)) or ()
    average = None
    if asked.averaging is not None:
        average = found.collect(lambda: plugins.component("averages", asked.averaging, "averaging"))
    found.raise_all()
    return Grouped(
        choices=tuple(
            attrs.evolve(c, trained=False, reason="frozen by its group") if c.name in frozen else c
            for c in choices
        ),
        penalties=tuple(attrs.evolve(term, index=k) for k, term in enumerate(terms)),
        updating=Updating(
            clip_value=asked.clip_value,
            clip_norm=asked.clip_norm,
            groups=tuple(groups),
            constraints=constraints,
            average=average,
            accumulate=asked.accumulate,
        ),
    )


def _start(table: Mapping[str, Any]) -> int:
    return int(table.get("start_epoch", 0))


def _owners(
    tables: Sequence[Mapping[str, Any]], names: Sequence[str], found: Problems
) -> dict[str, int]:
    """Which group each parameter is in; the first that fits."""
    owner: dict[str, int] = {}
    for k, table in enumerate(tables):
        patterns = dict.fromkeys(_patterns(table))
        hits = found.collect(partial(parameters.matching, patterns, names, f"groups[{k}].params"))
        for name in hits or ():
            owner.setdefault(name, k)
        if hits and k not in owner.values():
            line = f"groups[{k}].params: an earlier group has {', '.join(hits)} already"
            found.extend([f"{line}; the first group that fits takes a parameter"])
    return owner


def _constraints(spec: Any, names: Sequence[str], plugins: Plugins) -> tuple[ConstraintTerm, ...]:
    """Read ``constraint=``: None, one for all parameters, or ``{parameter glob: constraint}``."""
    if spec is None:
        return ()
    if not isinstance(spec, Mapping) or "name" in spec:
        made = plugins.component("constraints", spec, "constraint")
        return (ConstraintTerm(index=0, constraint=made, parameters=tuple(names)),)
    chosen = parameters.matching(spec, names, "constraint")
    found = Problems()
    out = []
    for k, (pattern, inner) in enumerate(spec.items()):
        get = partial(plugins.component, "constraints", inner, f"constraint.{pattern}")
        hit = tuple(n for n in names if chosen.get(n) == pattern)
        out.append(ConstraintTerm(index=k, constraint=found.collect(get), parameters=hit))
    found.raise_all()
    return tuple(out)
