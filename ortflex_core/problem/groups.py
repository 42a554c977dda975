"""Arguments about updates, read and checked: parameter groups, constraints, averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from ortflex_core.component import expected_count, is_count, is_number
from ortflex_core.errors import short_repr, suggest
from ortflex_core.parameters import selection
from ortflex_core.parameters.selection import Choice
from ortflex_core.problem.losses import penalty_terms
from ortflex_core.problem.problem import PenaltyTerm
from ortflex_core.problem.problems import Problems
from ortflex_core.problem.updating import ConstraintTerm, Group, TransformTerm
from ortflex_core.protocols import Average
from ortflex_core.registry import Plugins

GROUP_KEYS = {
    "params": "names and globs of parameters; a parameter belongs to the first group that matches it",
    "rate": "factor of the learning rate",
    "optimizer": "the optimizer of the group",
    "penalty": "the penalty of the group, instead of the Trainer's",
    "start_epoch": "the first epoch in which the group is trained, counted from 0",
    "frozen": "not trained at all",
}


def table_problems(name: str, tables: Any) -> Iterator[str]:
    """The errors in keys and values of the tables, one line each; ``name`` is the argument."""
    if not isinstance(tables, list | tuple):
        yield f"{name}: expected a list of tables, got {tables!r}"
        return
    for k, table in enumerate(tables):
        yield from _table_problems(table, f"{name}[{k}]")


def _table_problems(table: Any, path: str) -> Iterator[str]:
    if not isinstance(table, Mapping):
        yield f"{path}: expected a table with the key params, got {table!r}"
        return
    for key in table:
        if key not in GROUP_KEYS:
            yield f"{path}.{key}: unknown key; {suggest(str(key), GROUP_KEYS)}"
    given = table.get("params", [])
    names = [given] if isinstance(given, str) else given
    if not (isinstance(names, list | tuple) and all(isinstance(p, str) for p in names)):
        yield f"{path}.params: expected a string or a list of strings, got {short_repr(given)}"
    elif not names:
        yield f"{path}.params: is missing; {GROUP_KEYS['params']}"
    rate = table.get("rate", 1.0)
    if not (is_number(rate) and rate >= 0):
        yield f"{path}.rate: expected a finite number >= 0, got {short_repr(rate)}"
    start = table.get("start_epoch", 0)
    if not is_count(start, 0):
        yield f"{path}.start_epoch: {expected_count(start, 0)}"
    if not isinstance(table.get("frozen", False), bool):
        yield f"{path}.frozen: expected true or false, got {table['frozen']!r}"


def _patterns(table: Mapping[str, Any]) -> list[str]:
    given = table["params"]
    return [given] if isinstance(given, str) else list(given)


@attrs.frozen(kw_only=True)
class Grouped:
    """The parameters sorted into groups."""

    choices: tuple[Choice, ...]
    penalties: tuple[PenaltyTerm, ...]
    groups: tuple[Group, ...]
    constraints: tuple[ConstraintTerm, ...]
    average: Average | None


def read(
    given: Sequence[Mapping[str, Any]],
    choices: Sequence[Choice],
    optimizer: Any,
    plugins: Plugins,
    *,
    penalty: Any,
    constraint: Any,
    averaging: Any,
) -> Grouped:
    """Sort the parameters into groups and build the components of each.

    Args:
        given: the tables of ``groups=``, already checked by :func:`table_problems`.
        choices: the parameters that are trained without groups.
        optimizer: the Trainer's optimizer, for parameters whose group has none.
        plugins: the plugins with the components.
        penalty: the Trainer's penalty, for parameters whose group has none.
        constraint: one for all parameters, or ``{parameter glob: constraint}``.
        averaging: the mean of the weights during the training.

    Raises:
        ConfigError, ModelError: all errors at once; a glob that matches no parameter.
    """
    found = Problems()
    tables = [dict(t) for t in given]
    names = [c.name for c in choices if c.trained]
    owner = _owners(tables, names, found)
    frozen = {n for n, k in owner.items() if tables[k].get("frozen")}
    trained = [n for n in names if n not in frozen]
    if names and not trained:
        found.extend(["groups: every parameter is frozen, so nothing is left to train"])
    first = min((_start(tables[owner[n]]) if n in owner else 0 for n in trained), default=0)
    if first:
        line = f"groups: no parameter is trained before epoch {first + 1}"
        found.extend([f"{line}; the smallest start_epoch must be 0, which is the default"])
    apart = {
        n: f"has the penalty of groups[{k}]" for n, k in owner.items() if "penalty" in tables[k]
    }
    apart |= {n: f"is frozen by groups[{owner[n]}]" for n in frozen}
    terms: list[PenaltyTerm] = []
    rest = [n for n in trained if n not in apart]
    terms += found.collect(lambda: penalty_terms(penalty, rest, plugins, apart)) or ()
    groups = []
    for k, table in enumerate(tables):
        own = tuple(n for n in trained if owner.get(n) == k)
        if "penalty" in table:
            where = f"groups[{k}].penalty"
            read_penalty = partial(penalty_terms, table["penalty"], own, plugins, path=where)
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
                    optimizer_name=plugins["optimizers"].known_as(mine) if mine else None,
                    rate=float(table.get("rate", 1.0)),
                    start_epoch=_start(table),
                )
            )
    constraints = found.collect(lambda: _constraints(constraint, trained, plugins)) or ()
    average = None
    if averaging is not None:
        average = found.collect(lambda: plugins.component("averages", averaging, "averaging"))
    found.raise_all()
    return Grouped(
        choices=tuple(
            attrs.evolve(c, trained=False, reason="frozen by its group", sort="by groups=")
            if c.name in frozen
            else c
            for c in choices
        ),
        penalties=tuple(attrs.evolve(term, index=k) for k, term in enumerate(terms)),
        groups=tuple(groups),
        constraints=constraints,
        average=average,
    )


def read_transforms(
    short: Mapping[str, float | None], given: Sequence[Any], plugins: Plugins
) -> tuple[TransformTerm, ...]:
    """Build the transforms: those with a bound among ``short``, by name, then those of the list.

    Raises:
        ConfigError, PluginError: everything that is wrong.
    """
    found = Problems()
    specs: dict[str, Any] = {
        name: {"name": name, "bound": float(bound)}
        for name, bound in short.items()
        if bound is not None
    }
    specs |= {f"transforms[{k}]": spec for k, spec in enumerate(given)}
    get = partial(plugins.component, "transforms")
    made = [found.collect(partial(get, spec, where)) for where, spec in specs.items()]
    found.raise_all()
    return tuple(TransformTerm(index=k, transform=one) for k, one in enumerate(made))


def _start(table: Mapping[str, Any]) -> int:
    return int(table.get("start_epoch", 0))


def _owners(
    tables: Sequence[Mapping[str, Any]], names: Sequence[str], found: Problems
) -> dict[str, int]:
    """The group of each parameter: the first that matches."""
    owner: dict[str, int] = {}
    for k, table in enumerate(tables):
        patterns = dict.fromkeys(_patterns(table))
        hits = found.collect(partial(selection.matching, patterns, names, f"groups[{k}].params"))
        for name in hits or ():
            owner.setdefault(name, k)
        if hits and k not in owner.values():
            line = f"groups[{k}].params: an earlier group already has {', '.join(hits)}"
            found.extend([f"{line}; a parameter belongs to the first group that matches it"])
    return owner


def _constraints(spec: Any, names: Sequence[str], plugins: Plugins) -> tuple[ConstraintTerm, ...]:
    """Read ``constraint=``: None, one for all parameters, or ``{parameter glob: constraint}``."""
    if spec is None:
        return ()
    if not isinstance(spec, Mapping) or "name" in spec:
        made = plugins.component("constraints", spec, "constraint")
        return (ConstraintTerm(index=0, constraint=made, parameters=tuple(names)),)
    chosen = selection.matching(spec, names, "constraint")
    found = Problems()
    out = []
    for k, (pattern, inner) in enumerate(spec.items()):
        get = partial(plugins.component, "constraints", inner, f"constraint.{pattern}")
        hit = tuple(n for n in names if chosen.get(n) == pattern)
        out.append(ConstraintTerm(index=k, constraint=found.collect(get), parameters=hit))
    found.raise_all()
    return tuple(out)
