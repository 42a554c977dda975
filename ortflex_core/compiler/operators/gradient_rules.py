"""Tables of gradient rules: one family, which a plugin contains, and all families together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.compiler.graph.ops import Tensor
from ortflex_core.kernel.errors import BrokenPlugin, PluginError, suggest

Gradient = Tensor | Callable[[], Tensor] | None
"""The result of a rule for one input: a tensor, a function that computes it if needed, or None."""

Rule = Callable[..., Sequence[Gradient]]


@attrs.frozen
class Rules:
    """A family of gradient rules defines the derivatives of operators.

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
            keys: list[object] = [*self.table, *self.rounding, *self.carrying, *self.declared]
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


Source = Callable[[tuple[str, str]], Mapping[str, Rules]]
"""The families, by name, that may have rules for an operator, which is (domain, name)."""


def _is_key(key: object) -> bool:
    """Whether this is (domain, operator)."""
    return isinstance(key, tuple) and len(key) == 2 and all(isinstance(k, str) for k in key)


class RuleTable:
    """Several families together; a family is imported when one of its operators is looked up.

    The rules of an operator come from the first of these that has it: each family of ``first``, the
    other ``families`` together, each source of ``later``. Two families of one of these places are an
    error if such a node is differentiated.

    Args:
        families: families by name.
        first: the names of those that take precedence, in order.
        later: functions from an operator (domain, name) to the families that may have it.
        broken: the reasons of families that cannot be loaded; sources may add some.
        owners: the distribution of each family, likewise.
        identity: what distinguishes tables with equal ``families``, for the cache of programs.
    """

    def __init__(
        self,
        families: Mapping[str, Rules],
        first: Sequence[str] = (),
        broken: dict[str, str] | None = None,
        owners: dict[str, str] | None = None,
        *,
        later: Sequence[Source] = (),
        identity: Hashable = (),
    ) -> None:
        self.broken = {} if broken is None else broken
        self._owners = {} if owners is None else owners
        for name in first:
            if name not in families:
                raise PluginError(
                    f"no family of gradient rules {name!r}; {suggest(name, families)}"
                )
        rest = {name: family for name, family in families.items() if name not in first}
        given = [*({name: families[name]} for name in first), rest]
        self._sources: tuple[Source, ...] = (*(lambda _, f=f: f for f in given), *later)
        self._families: dict[str, Rules] = {}
        self._names: dict[tuple[str, str], tuple[str, ...]] = {}
        self.identity = identity
        self.families = tuple(families[name] for name in dict.fromkeys([*first, *families]))
        """The given families and those of prepared operators; with ``identity``, a key of the table."""

    def prepare(self, operators: Iterable[tuple[str, str]]) -> None:
        """Import the families of a model's operators now."""
        names = dict.fromkeys(name for key in operators for name in self._find(key))
        needed = [self._families[name] for name in names]
        self.families += tuple(f for f in needed if all(f is not known for known in self.families))

    def _find(self, key: tuple[str, str]) -> tuple[str, ...]:
        """The families of the first place that has rules for an operator; several are an error."""
        if key not in self._names:
            self._names[key] = ()
            for source in self._sources:
                families = source(key)
                self._families.update(families)
                if names := tuple(n for n, family in families.items() if key in family.table):
                    self._names[key] = names
                    break
        return self._names[key]

    def lookup(self, domain: str, op_type: str, opset: int) -> tuple[bool, Rule | None]:
        """(known, rule): ``(True, None)`` is declared not differentiable, ``(False, None)`` is unknown.

        Raises:
            PluginError: several families have the operator, and none was chosen.
        """
        names = self._find((domain, op_type))
        if len(names) > 1:
            raise PluginError(self._twice(op_type, names))
        entries = self._families[names[0]].table[domain, op_type] if names else []
        fitting = [rule for since, rule in entries if since <= opset]
        return (True, fitting[-1]) if fitting else (False, None)

    def _twice(self, op_type: str, names: Sequence[str]) -> str:
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
        self._find((domain, op_type))
        return any((domain, op_type) in family.rounding for family in self._families.values())

    def carries(self, domain: str, op_type: str) -> bool:
        """Whether an operator passes integers that represent real numbers on."""
        self._find((domain, op_type))
        return any((domain, op_type) in family.carrying for family in self._families.values())

    def attributes(self, domain: str, op_type: str) -> frozenset[str]:
        """The attributes that an operator's rules declare."""
        name = self.family(domain, op_type)
        declared = {} if name is None else self._families[name].declared
        return frozenset(declared.get((domain, op_type), ()))

    def family(self, domain: str, op_type: str) -> str | None:
        """The family that an operator's rules come from."""
        return next(iter(self._find((domain, op_type))), None)
