"""The summary of a Trainer, and tables as plain text and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import attrs

from ortflex_core.kernel.errors import printable

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


_STYLE = "text-align:left;white-space:pre-wrap"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns, two spaces apart.

    >>> text_table([["name", "numbers"], ["w", "12"]])
    ['name  numbers', 'w     12']
    """
    rows = [[printable(cell, lines=False) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; every cell is escaped.

    >>> html_table([], [["<b>"]]).endswith("&lt;b&gt;</td></tr></table>")
    True
    """

    def row(cells: Sequence[str], tag: str) -> str:
        elements = (f'<{tag} style="{_STYLE}">{escape(printable(cell))}</{tag}>' for cell in cells)
        return f"<tr>{''.join(elements)}</tr>"

    head = row(columns, "th") if columns else ""
    return f"<table>{head}{''.join(row(cells, 'td') for cells in rows)}</table>"
