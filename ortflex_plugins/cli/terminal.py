"""Strings from files on a terminal."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortflex_core.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

_ROOM = 30
"""The smallest width of a column of sentences; in less space, sentences are below their row."""


def plain(text: str) -> str:
    r"""A string for rich: no markup, no control characters, one line.

    >>> plain("[red]W\x1b[2J\n")
    '\\[red]W·[2J·'
    """
    from rich.markup import escape

    return escape(printable(text, lines=False))


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
    from rich.table import Table
    from rich.text import Text

    short = len(columns) - long
    widths = [
        max(Text.from_markup(row[k]).cell_len for row in (columns, *rows)) for k in range(short)
    ]
    left = console.width - sum(widths) - 2 * short
    if left >= _ROOM * long:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for k, column in enumerate(columns):
            table.add_column(column, no_wrap=k < short, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    for k, row in enumerate((columns, *rows)):
        line = Text("  ").join(
            Text.from_markup(cell, style="" if k else "bold") for cell in _padded(row, widths)
        )
        line.rstrip()
        console.print(line, soft_wrap=True)
        for cell in row[short:] if k else ():
            console.print(Padding(cell, (0, 0, 0, 2), expand=False))


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
    r"""The lines that :func:`show_table` prints for strings that are no markup, without colours.

    >>> folded_table(["name", "what it is"], [["l1", "a sum"]])
    'name  what it is\nl1    a sum'
    """
    from rich.console import Console

    width = terminal_columns() or 10_000
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        show_table(console, columns, [list(map(plain, row)) for row in rows])
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    from rich.text import Text

    return [
        cell + " " * (width - Text.from_markup(cell).cell_len)
        for cell, width in zip(row, widths, strict=False)
    ]
