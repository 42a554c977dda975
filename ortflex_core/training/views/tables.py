"""Tables as plain text and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ortflex_core.kernel.errors import printable

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
