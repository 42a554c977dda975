"""Arguments about updates, read and checked: parameter groups, constraints, averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.compiler.problem import parameters as selection
from ortflex_core.compiler.problem.losses import (
    by_glob,
    penalty_terms,
    read_by_glob,
    read_penalties,
)
from ortflex_core.compiler.problem.module_paths import Paths
from ortflex_core.compiler.problem.parameters import Choice
from ortflex_core.compiler.problem.problem import PenaltyTerm
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.compiler.problem.updating import ConstraintTerm, Group
from ortflex_core.kernel.component import expected_count, is_count, is_number
from ortflex_core.kernel.errors import short_repr, suggest
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Average, Optimizer
from ortflex_core.kernel.synonyms import translate_key

GROUP_KEYS = {
    "params": "names and globs of parameters; a parameter belongs to the first group that matches it",
    "rate": "factor of the learning rate",
    "optimizer": "the optimizer of the group",
    "penalty": "the penalty of the group, instead of the Trainer's",
    "start_epoch": "the first epoch in which the group is trained, counted from 0",
    "frozen": "not trained at all",
}

_MEANT = {"learning_rate": "rate"}
"""What arguments of the Trainer are in a group."""


def table_problems(name: str, tables: Any) -> Iterator[str]:
    """The errors in keys and values of the tables, one line each; ``name`` is the argument."""
    if not isinstance(tables, list | tuple):
        yield f"{name}: expected a list of tables, got {short_repr(tables)}"
        return
    for k, table in enumerate(tables):
        yield from _table_problems(table, f"{name}[{k}]")


def _table_problems(table: Any, path: str) -> Iterator[str]:
    if not isinstance(table, Mapping):
        yield f"{path}: expected a table with the key params, got {short_repr(table)}"
        return
    for key in table:
        if key not in GROUP_KEYS:
            meant = _MEANT.get(translate_key(str(key)), translate_key(str(key)))
            hint = suggest(str(key), GROUP_KEYS)
            if meant in GROUP_KEYS:
                hint = f"did you mean {meant!r} ({GROUP_KEYS[meant]})?"
            yield f"{path}.{key}: unknown key; {hint}"
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


def components(tables: Any) -> Iterator[tuple[str, str, Any]]:
    """The path, the kind and the value of every component in the tables of ``groups=``."""
    for k, table in enumerate(tables):
        for key, kind in (("optimizer", "optimizers"), ("penalty", "penalties")):
            if isinstance(table, Mapping) and key in table:
                yield f"groups[{k}].{key}", kind, table[key]


def read_tables(tables: Any, plugins: Plugins) -> list[dict[str, Any]]:
    """The tables of ``groups=``, with components as objects; errors have the paths of what is wrong."""
    problems = Problems()
    problems.extend(table_problems("groups", tables))
    out = [dict(table) for table in (tables if not problems.lines else ())]
    for k, table in enumerate(out):
        if "optimizer" in table:
            given = ("optimizers", table["optimizer"], f"groups[{k}].optimizer")
            table["optimizer"] = problems.collect(plugins.component, *given)
        if "penalty" in table:
            asked = (table["penalty"], plugins, f"groups[{k}].penalty")
            table["penalty"] = problems.collect(read_penalties, *asked)
    problems.raise_all()
    return out


def read_constraints(spec: Any, plugins: Plugins) -> Any:
    """Read ``constraint=``: None, one for all parameters, or ``{parameter glob: constraint}``."""
    if spec is None:
        return None
    if isinstance(spec, Mapping) and "name" not in spec:
        return read_by_glob("constraints", spec, plugins, "constraint")
    return plugins.component("constraints", spec, "constraint")


def sort(
    tables: Sequence[Mapping[str, Any]],
    choices: Sequence[Choice],
    optimizer: Optimizer,
    *,
    penalty: Any,
    constraint: Any,
    average: Average | None,
    known_as: Callable[[object], str],
) -> Grouped:
    """Sort the parameters into groups.

    ``choices`` are the parameters that are trained without groups. Those whose group names none have the
    optimizer and the penalty of the Trainer. A penalty or a constraint is one for all, or one by glob.

    Raises:
        ConfigError, ModelError: all errors at once; a glob that matches no parameter.
    """
    problems = Problems()
    names = [c.name for c in choices if c.trained]
    owner = _owners(tables, names, {c.name: c.paths for c in choices}, problems)
    frozen = {n for n, k in owner.items() if tables[k].get("frozen")}
    trained = [n for n in names if n not in frozen]
    if names and not trained:
        problems.extend(["groups: every parameter is frozen, so nothing is left to train"])
    first = min((_start(tables[owner[n]]) if n in owner else 0 for n in trained), default=0)
    if first:
        line = f"groups: no parameter is trained before epoch {first + 1}"
        problems.extend([f"{line}; the smallest start_epoch must be 0, which is the default"])
    reasons = {
        n: f"has the penalty of groups[{k}]" for n, k in owner.items() if "penalty" in tables[k]
    }
    reasons |= {n: f"is frozen by groups[{owner[n]}]" for n in frozen}
    others = [n for n in trained if n not in reasons]
    terms: list[PenaltyTerm] = []
    terms += problems.collect(penalty_terms, penalty, others, reasons) or ()
    groups = []
    for k, table in enumerate(tables):
        own = tuple(n for n in trained if owner.get(n) == k)
        path = f"groups[{k}].penalty"
        terms += problems.collect(penalty_terms, table.get("penalty"), own, path=path) or ()
        own_optimizer = table.get("optimizer")
        if own:
            groups.append(
                Group(
                    index=k,
                    parameters=own,
                    optimizer=own_optimizer or optimizer,
                    optimizer_name=None if own_optimizer is None else known_as(own_optimizer),
                    rate=float(table.get("rate", 1.0)),
                    start_epoch=_start(table),
                )
            )
    constraints = problems.collect(_constraints, constraint, trained) or ()
    problems.raise_all()
    return Grouped(
        choices=tuple(
            c.left_out("frozen by its group", "by groups=") if c.name in frozen else c
            for c in choices
        ),
        penalties=tuple(attrs.evolve(term, index=k) for k, term in enumerate(terms)),
        groups=tuple(groups),
        constraints=constraints,
        average=average,
    )


def _start(table: Mapping[str, Any]) -> int:
    return int(table.get("start_epoch", 0))


def _owners(
    tables: Sequence[Mapping[str, Any]], names: Sequence[str], paths: Paths, problems: Problems
) -> dict[str, int]:
    """The number of the group of each parameter: the first group that matches."""
    owner: dict[str, int] = {}
    for k, table in enumerate(tables):
        patterns = dict.fromkeys(_patterns(table))
        where = f"groups[{k}].params"
        hits = problems.collect(selection.matching, patterns, names, where, paths=paths)
        for name in hits or ():
            owner.setdefault(name, k)
        if hits and k not in owner.values():
            line = f"groups[{k}].params: an earlier group already has {', '.join(hits)}"
            problems.extend([f"{line}; a parameter belongs to the first group that matches it"])
    return owner


def _constraints(constraint: Any, names: Sequence[str]) -> tuple[ConstraintTerm, ...]:
    if constraint is None:
        return ()
    pairs = [(constraint, tuple(names))]
    if isinstance(constraint, Mapping):
        pairs = by_glob(constraint, selection.matching(constraint, names, "constraint"))
    return tuple(
        ConstraintTerm(index=k, constraint=component, parameters=own)
        for k, (component, own) in enumerate(pairs)
    )
