"""Tables of gradient rules: one family, which a plugin contains, and all families together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.compiler.graph.ops import Tensor
from ortflex_core.kernel.errors import BrokenPlugin, PluginError, suggest

Gradient = Tensor | Callable[[], Tensor] | None
"""The result of a rule for one input: a tensor, a function that computes it if needed, or None."""

Rule = Callable[..., Sequence[Gradient]]


@attrs.frozen
class Rules:
    """A family of gradient rules: the derivatives of operators.

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

    Attributes of a node are read as ``node.axis``. A node with an attribute that is not at its default,
    and that the rule did not ask for, has no gradient: a rule that was written for an old opset would
    ignore an attribute of a new one. ``attributes=`` declares those that change nothing in the
    formula (because it uses the shape of the output, say), or that it reads in some cases only.
    """

    table: dict[tuple[str, str], list[tuple[int, Rule | None]]] = attrs.field(factory=dict)
    rounding: set[tuple[str, str]] = attrs.field(factory=set)
    libraries: list[str | Callable[[], str]] = attrs.field(factory=list)
    declared: dict[tuple[str, str], set[str]] = attrs.field(factory=dict)
    carrying: set[tuple[str, str]] = attrs.field(factory=set)

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

    def carries_integers(self, *op_types: str, domain: str = "") -> None:
        """Declare operators that pass integers for real numbers on, from the first input to the output.

        If the first input stands for real numbers (see ``straight_through``), so does the output, and the
        rules of these operators pass a gradient per unit of these integers.
        """
        self.carrying.update((domain, op_type) for op_type in op_types)

    def rule(
        self, *op_types: str, domain: str = "", since: int = 1, attributes: Iterable[str] = ()
    ) -> Callable[[Rule], Rule]:
        """Register the decorated function for one or several operators.

        ``attributes`` are attributes that the function does not have to ask for (see the class).
        """

        def register(function: Rule) -> Rule:
            for op_type in op_types:
                self._add(domain, op_type, since, function)
                self.declared.setdefault((domain, op_type), set()).update(attributes)
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
            keys: set[object] = {*self.table, *self.rounding, *self.carrying, *self.declared}
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
        self._families = dict(families)
        self._rounding = frozenset().union(*(family.rounding for family in families.values()))
        self._carrying = frozenset().union(*(family.carrying for family in families.values()))
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

    def carries(self, domain: str, op_type: str) -> bool:
        """Whether an operator passes integers that represent real numbers on."""
        return (domain, op_type) in self._carrying

    def attributes(self, domain: str, op_type: str) -> frozenset[str]:
        """The attributes that an operator's rules declare."""
        name = self.family(domain, op_type)
        declared = {} if name is None else self._families[name].declared
        return frozenset(declared.get((domain, op_type), ()))

    def family(self, domain: str, op_type: str) -> str | None:
        """The family that an operator's rules come from."""
        entry = self._entries.get((domain, op_type))
        return None if entry is None else entry[0]
