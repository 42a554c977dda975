"""Blocks of Markdown for the generated pages: a page is its blocks, with empty lines between them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence


def join_blocks(blocks: Iterable[str]) -> str:
    """The content of a page."""
    return "\n\n".join(blocks) + "\n"


def paragraph(text: str) -> str:
    """A paragraph in lines of at most 98 characters."""
    return textwrap.fill(text, 98, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A table; a cell is one line, and a ``|`` in it is escaped.

    >>> print(table(["name", "what it is"], [["abs", "|x|"], ["run", "`<t>` or <t>"]]))
    | name | what it is |
    |---|---|
    | abs | \|x\| |
    | run | `<t>` or \<t> |
    """
    return "\n".join([_row(head), "|---" * len(head) + "|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(" ".join(cell.split())) for cell in cells) + " |"


def _escaped(cell: str) -> str:
    """A cell whose ``|`` ends no column and whose ``<`` begins no tag; in code ``<`` needs no escape."""
    parts = cell.replace("|", "\\|").split("`")
    text = [
        part if k % 2 else re.sub("<(?=[A-Za-z/!])", r"\<", part) for k, part in enumerate(parts)
    ]
    return "`".join(text)
