"""Strings from files on a terminal."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortflex_core import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

_ROOM = 30
"""The smallest width of a column of sentences; if there is less, sentences are below their row."""


def plain(text: str) -> str:
    r"""A string for rich: no markup, no control characters, one line.

    >>> plain("[red]W\x1b[2J\n")
    '\\[red]W·[2J·'
    """
    from rich.markup import escape

    return escape(printable(text, lines=False))


def new_table(*columns: str | Column, show_header: bool = True) -> Table:
    """A table without lines, whose columns are two spaces apart."""
    from rich.table import Table

    return Table(*columns, box=None, padding=(0, 2, 0, 0), show_header=show_header)


def right(*headers: str) -> list[Column]:
    """Columns of numbers."""
    from rich.table import Column

    return [Column(header, justify="right") for header in headers]


def show_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], long: int = 1
) -> None:
    """Print a table whose last ``long`` columns are sentences; all cells are rich's markup.

    They are wrapped; on a narrow terminal they are printed below their row.

    >>> from rich.console import Console
    >>> show_table(Console(width=24), ["node", "why"], [["a_convolution", "it is frozen"]])
    node
    a_convolution
      it is frozen
    """
    from rich.padding import Padding
    from rich.table import Column
    from rich.text import Text

    short = len(columns) - long
    widths = [
        max(Text.from_markup(row[k]).cell_len for row in (columns, *rows)) for k in range(short)
    ]
    left = console.width - sum(widths) - 2 * short
    if left >= _ROOM * long:
        names = enumerate(columns)
        table = new_table(*(Column(n, no_wrap=k < short, overflow="fold") for k, n in names))
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    for k, row in enumerate((columns, *rows)):
        cells = [Text.from_markup(cell, style="" if k else "bold") for cell in row[:short]]
        for cell, width in zip(cells, widths, strict=True):
            cell.align("left", width)
        line = Text("  ").join(cells)
        line.rstrip()
        console.print(line, soft_wrap=True)
        for sentence in row[short:] if k else ():
            console.print(Padding(sentence, (0, 0, 0, 2), expand=False))


def terminal_columns() -> int | None:
    """The width of the terminal; None for a pipe, whose output is not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def open_console() -> Console:
    """The console of commands; lines are wrapped only in a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=terminal_columns() or 240)


def folded(text: str) -> str:
    """A paragraph in the width of the terminal."""
    columns = terminal_columns()
    return text if columns is None else textwrap.fill(text, columns)


def folded_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""The lines that :func:`show_table` prints for strings that are no markup, without colors.

    >>> folded_table(["name", "what it is"], [["l1", "a sum"]])
    'name  what it is\nl1    a sum'
    """
    from rich.console import Console

    width = terminal_columns() or 10_000
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        show_table(console, columns, [list(map(plain, row)) for row in rows])
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))
