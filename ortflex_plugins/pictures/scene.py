"""The content of a picture without positions: items, the edges between them, and levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

COLORS: Mapping[str, tuple[str, str, str]] = {
    # kind: (fill, line, meaning)
    "io": ("#ffffff", "#475569", "input or output"),
    "plain": ("#f8fafc", "#64748b", "operator"),
    "trainable": ("#d1fae5", "#047857", "reads a trained parameter"),
    "passes": ("#e0f2fe", "#0369a1", "passes a gradient on"),
    "frozen": ("#e5e7eb", "#6b7280", "frozen"),
    "not differentiable": ("#fef3c7", "#b45309", "not differentiable"),
    "no rule": ("#fecaca", "#b91c1c", "no gradient rule"),
    "forward": ("#dbeafe", "#1d4ed8", "forward"),
    "loss": ("#fce7f3", "#be185d", "loss"),
    "backward": ("#ffedd5", "#c2410c", "backward"),
    "penalty": ("#ede9fe", "#6d28d9", "penalty"),
    "transform": ("#ccfbf1", "#0f766e", "transform of gradients"),
    "update": ("#dcfce7", "#15803d", "update"),
    "mixed": ("#f1f5f9", "#334155", "several of these, folded"),
    "parameter": ("#047857", "#047857", "trained parameter"),
    "new": ("#be185d", "#be185d", "new, by an edit"),
    "constant": ("#9ca3af", "#9ca3af", "constant or frozen weight"),
    "slot": ("#6d28d9", "#6d28d9", "optimizer state"),
    "host": ("#c2410c", "#c2410c", "number from the host"),
    "far": ("#1d4ed8", "#1d4ed8", "value computed far above"),
}
"""Fill, line and meaning of every kind; the kinds of chips come last."""

CHIPS = ("parameter", "new", "constant", "slot", "host", "far")


def clean(text: str, limit: int = 300) -> str:
    r"""A string for files and screens: without control characters, and not too long.

    >>> clean("a" * 30 + "/weight", 16)
    'aaaaaaaa…/weight'
    >>> clean("tab\t\x00end")
    'tab··end'
    """
    if len(text) > limit:
        half = (limit - 1) // 2
        text = text[: limit - 1 - half] + "…" + text[-half:]
    return "".join(c if c.isprintable() else "·" for c in text)


@attrs.frozen
class Chip:
    """A line in a box: a weight, a constant, or a value that is computed far above."""

    text: str
    kind: str


@attrs.frozen(kw_only=True)
class Item:
    """A box: an operator, an input, an output, or a folded part with a level of its own inside."""

    title: str
    kind: str
    chips: tuple[Chip, ...] = ()
    tip: str = ""
    inner: Level | None = None

    @property
    def round(self) -> bool:
        """Whether it is an input or output of the graph."""
        return self.kind == "io"


@attrs.frozen
class Level:
    """Items and the edges ``(from, to)`` between them; every edge leads to a later item."""

    items: tuple[Item, ...]
    edges: tuple[tuple[int, int], ...]

    def kinds(self) -> list[str]:
        """The kinds of all items and chips, including folded ones, in the order of :data:`COLORS`."""
        names: set[str] = set()
        pending = [self]
        while pending:
            for item in pending.pop().items:
                names.add(item.kind)
                names.update(chip.kind for chip in item.chips)
                if item.inner is not None:
                    pending.append(item.inner)
        return [kind for kind in COLORS if kind in names]


def describe(values: Mapping[str, Any]) -> str:
    """The lines of a tooltip; empty values are left out.

    >>> describe({"name": "conv1", "reason": ""})
    'name: conv1'
    """
    return "\n".join(f"{key}: {clean(str(v))}" for key, v in values.items() if str(v))
