"""Texts of files on a terminal."""

from __future__ import annotations

from ortflex_core.errors import printable


def plain(text: str) -> str:
    r"""A text as rich prints it: no markup, no control characters, one line.

    >>> plain("[red]W\x1b[2J\n")
    '\\[red]W·[2J·'
    """
    from rich.markup import escape

    return escape(printable(text, lines=False))
