"""Docstrings, comments, messages and help texts are plain English: some words do not occur in them."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
CHECKED = [
    *sorted(path.name for path in (ROOT / "ortflex_core").glob("*.py")),
    "graph",
    "runtime",
    "opsets",
    "autodiff",
    "model",
    "parameters",
    "data",
    "engines",
    "reference",
    "config",
    "checkpoints",
    "comparison",
    "testing",
]
"""Modules and packages of the core."""
KINDS = [
    "data",
    "metrics",
    "callbacks",
    "devices",
    "cli",
    "pictures",
    "layers",
    "losses",
    "penalties",
    "schedules",
    "optimizers",
    "gradients",
]
"""Packages of the plugins."""
PLACES = [f"ortflex_core/{name}" for name in CHECKED] + [f"ortflex_plugins/{k}" for k in KINDS]
INSTEAD = {
    r"beside": "next to, compared with, in addition to",
    r"nobody|somebody|whoever|everybody|anybody|everyone|someone": "unknown, or name who",
    r"nobody's|somebody's|anybody's": "name the owner",
    r"(?-i:(is|are) none)": "is not …",
    r"as here": "say what applies",
    r"mends?|mended|mending": "repair, correct",
    r"anew": "again",
    r"told": "given, reported, by default",
    r"behind": "after",
    r"truth values?": "boolean",
    r"all the same": "anyway",
    r"so many": "name the number",
    r"the like": "name the things",
    r"by and by": "gradually",
    r"texts|a text": "string",
}
ALLOWED = {"nobody.knows", '"told"'}
"""Names in the code: a domain of operators in a test kit, and a name of 0.1 that warns."""
BANNED = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b".replace(" ", r"\s+"), re.IGNORECASE)


def remarks(source: str) -> Iterator[str]:
    """Every use of a banned word in a string or comment, with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # From Python 3.12 on the words of an f-string are tokens of another type.
        kind = tokenize.tok_name[token.type]
        if kind not in ("STRING", "COMMENT", "FSTRING_MIDDLE"):
            continue
        text = token.string
        for name in ALLOWED:
            text = text.replace(name, "")
        text = re.sub(r"\{[^{}]*\}", "{}", text) if kind == "STRING" else text
        for match in BANNED.finditer(text):
            yield f"line {token.start[0] + text[: match.start()].count(chr(10))}: {match.group()!r}"


@pytest.mark.parametrize("place", PLACES)
def test_banned_words_do_not_occur(place: str) -> None:
    path = ROOT / place
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}, {remark}"
        for file in files
        for remark in remarks(file.read_text("utf-8"))
    ]
    assert not found, "\n".join([*found, "write instead:", *map(str, INSTEAD.items())])


def test_a_banned_word_is_found_where_users_read_it() -> None:
    """Docstrings, comments and f-strings are read; names of variables are not."""
    source = '"""A list, beside it."""\nbehind = f"nobody {behind} knows"  # anew\n'
    assert list(remarks(source)) == ["line 1: 'beside'", "line 2: 'nobody'", "line 2: 'anew'"]
