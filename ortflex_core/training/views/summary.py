"""The summary of a Trainer: a table of its settings and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import attrs

from ortflex_core.kernel.errors import printable
from ortflex_core.training.views.tables import html_table, text_table

_COLUMNS = ("tensor", "type", "numbers", "trained")


@attrs.frozen(kw_only=True, repr=False)
class Summary:
    """The settings and tensors of a Trainer, as :meth:`Trainer.summary` returns them.

    ``print(summary)`` and a notebook show it as tables.

    Attributes:
        model: the name of the model.
        facts: the settings of the run, such as the loss and the optimizer, by their names.
        tensors: a tuple for each float initializer on which the losses depend: its name, its type with
            its shape, its number of elements, and "yes" if it is trained, otherwise the reason.

    >>> print(Summary(
    ...     model="line.onnx",
    ...     facts={"loss": "squared_error"},
    ...     tensors=(("w", "float32[2, 1]", 2, "yes"), ("b", "float32[1]", 1, "no: frozen")),
    ... ))
    line.onnx
    loss  squared_error
    <BLANKLINE>
    tensor  type           numbers  trained
    w       float32[2, 1]  2        yes
    b       float32[1]     1        no: frozen
    """

    model: str
    facts: Mapping[str, str]
    tensors: tuple[tuple[str, str, int, str], ...]

    def __str__(self) -> str:
        rows = [(n, t, f"{k:,}", why) for n, t, k, why in self.tensors]
        facts = text_table(list(self.facts.items()))
        return "\n".join([printable(self.model), *facts, "", *text_table([_COLUMNS, *rows])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The facts, and the tensors in an expandable part."""
        rows = [(n, t, f"{k:,}", why) for n, t, k, why in self.tensors]
        return (
            f"<b>{escape(printable(self.model))}</b>{html_table((), list(self.facts.items()))}"
            f"<details><summary>{len(rows)} tensors</summary>{html_table(_COLUMNS, rows)}</details>"
        )
