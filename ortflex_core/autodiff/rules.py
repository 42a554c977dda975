"""Tables of gradient rules: one family, which a plugin contains, and all families together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.errors import BrokenPlugin, PluginError, suggest
from ortflex_core.graph.ops import Tensor

Gradient = Tensor | Callable[[], Tensor] | None
"""The result of a rule for one input: a tensor, a function that computes it if needed, or None."""

Rule = Callable[..., Sequence[Gradient]]


@attrs.frozen
class Rules:
    """A family of gradient rules; the object of an entry point of ``ortflex.gradients``.

    >>> rules = Rules()
    >>> @rules.rule("Neg")
    ... def neg(op, node, g):
    ...     return [-g]
    >>> rules.not_differentiable("ArgMax", "Shape")

    A cotangent has the shape of its output or broadcasts to it; a rule that needs the full shape
    calls ``full(op, g, node.outputs[0])``. The result for an input may have the broadcast shape;
    the engine sums it. For a form of the operator that the rule does not support it raises
    ``NoGradientRule("with mode='x'")``. A later definition for newer opsets carries ``since=``: the
    rule with the largest ``since`` up to the graph's opset applies.
    """

    table: dict[tuple[str, str], list[tuple[int, Rule | None]]] = attrs.field(factory=dict)
    rounding: set[tuple[str, str]] = attrs.field(factory=set)
    libraries: list[str | Callable[[], str]] = attrs.field(factory=list)

    def kernels(self, library: str | Callable[[], str]) -> None:
        """Declare a custom-operator library of onnxruntime, or a function that gives its path.

        It has the kernels of operators outside the standard; every session loads it after the
        family is loaded.
        """
        self.libraries.append(library)

    def straight_through(self, *op_types: str, domain: str = "") -> None:
        """Declare operators whose first output consists of integers that stand for real numbers.

        A node that reads it may then pass a float gradient to it, per unit of these integers.
        """
        self.rounding.update((domain, op_type) for op_type in op_types)

    def rule(self, *op_types: str, domain: str = "", since: int = 1) -> Callable[[Rule], Rule]:
        """Register the decorated function for one or several operators."""

        def register(function: Rule) -> Rule:
            for op_type in op_types:
                self._add(domain, op_type, since, function)
            return function

        return register

    def not_differentiable(self, *op_types: str, domain: str = "") -> None:
        """Declare operators that are not differentiable."""
        for op_type in op_types:
            self._add(domain, op_type, 1, None)

    def check(self, described: str) -> None:
        """Refuse a table with entries that are not rules.

        Raises:
            BrokenPlugin: ``described`` and what is wrong with it.
        """
        try:
            keys: list[object] = [*self.table, *self.rounding]
            rules: list[Any] = [rule for entries in self.table.values() for rule in entries]
            good = all(map(_is_key, keys)) and all(
                isinstance(since, int) and (rule is None or callable(rule)) for since, rule in rules
            )
            list(self.libraries)
        except (AttributeError, TypeError, ValueError):
            good = False
        if not good:
            raise BrokenPlugin(
                f"{described} has a table with entries that are not rules; fill it with "
                "RULES.rule, RULES.not_differentiable and RULES.kernels"
            )

    def _add(self, domain: str, op_type: str, since: int, rule: Rule | None) -> None:
        entries = self.table.setdefault((domain, op_type), [])
        if any(version == since for version, _ in entries):
            raise PluginError(f"two gradient rules for {op_type} since opset {since} in one family")
        entries.append((since, rule))
        entries.sort(key=lambda entry: entry[0])


def _is_key(key: object) -> bool:
    """Whether this is (domain, operator)."""
    return isinstance(key, tuple) and len(key) == 2 and all(isinstance(k, str) for k in key)


class RuleTable:
    """Several families together.

    Two rules for an operator are an error if such a node is differentiated, unless ``first``
    chooses one. ``broken`` has the reasons of families that cannot be loaded, ``owners`` the
    distribution of each family.
    """

    def __init__(
        self,
        families: Mapping[str, Rules],
        first: Sequence[str] = (),
        broken: Mapping[str, str] | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> None:
        self.broken, self._owners = dict(broken or {}), dict(owners or {})
        for name in first:
            if name not in families:
                raise PluginError(
                    f"no family of gradient rules {name!r}; {suggest(name, families)}"
                )
        order = [*first, *(name for name in families if name not in first)]
        self.families = tuple(families[name] for name in order)
        self._rounding = frozenset().union(*(family.rounding for family in families.values()))
        self._entries: dict[tuple[str, str], tuple[str, list[tuple[int, Rule | None]]]] = {}
        self.doubled: dict[tuple[str, str], tuple[str, ...]] = {}
        """The families of every operator with several rules of which none was chosen."""
        for name in order:
            for key, entries in families[name].table.items():
                owner, _ = self._entries.setdefault(key, (name, entries))
                if owner != name and owner not in first:
                    self.doubled[key] = (*self.doubled.get(key, (owner,)), name)

    def lookup(self, domain: str, op_type: str, opset: int) -> tuple[bool, Rule | None]:
        """(known, rule): ``(True, None)`` is declared not differentiable, ``(False, None)`` is unknown.

        Raises:
            PluginError: several families have the operator, and none was chosen.
        """
        if (domain, op_type) in self.doubled:
            raise PluginError(self._twice(domain, op_type))
        _, entries = self._entries.get((domain, op_type), ("", []))
        fitting = [rule for since, rule in entries if since <= opset]
        return (True, fitting[-1]) if fitting else (False, None)

    def _twice(self, domain: str, op_type: str) -> str:
        names = self.doubled[domain, op_type]
        families = [
            f"{n!r} (from {self._owners[n]})" if n in self._owners else repr(n) for n in names
        ]
        return (
            f"two gradient rules for {op_type}: from the families {' and '.join(families)}; order "
            f"them with gradients=[{names[-1]!r}] or [{names[0]!r}]"
        )

    def source(self, domain: str, op_type: str) -> str:
        """The family that an operator's rules come from, and its distribution, for messages."""
        name = self.family(domain, op_type)
        owner = self._owners.get(name or "")
        return f"{name!r} (from {owner})" if owner else repr(name)

    def rounds(self, domain: str, op_type: str) -> bool:
        """Whether an operator's first output is an integer that represents real numbers."""
        return (domain, op_type) in self._rounding

    def family(self, domain: str, op_type: str) -> str | None:
        """The family that an operator's rules come from."""
        entry = self._entries.get((domain, op_type))
        return None if entry is None else entry[0]
