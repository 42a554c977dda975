"""Pages: each is one file that loads nothing, and every string is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ortflex_plugins.pictures import layout, svg
from ortflex_plugins.pictures.layout import Box, Drawing
from ortflex_plugins.pictures.scene import COLORS, Level, clean

_HERE = Path(__file__).parent


def page(title: str, body: str, *, note: str = "", refresh: bool = False) -> str:
    """A complete page; ``body`` is HTML, title and note are plain strings.

    With ``refresh``, browsers load the page again every five seconds.
    """
    style = (_HERE / "page.css").read_text("utf-8")
    script = (_HERE / "page.js").read_text("utf-8")
    reload = '<meta http-equiv="refresh" content="5">\n' if refresh else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{reload}"
        # The page may load nothing, for all strings that a file can contain.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{text(title)}</title>\n<style>\n{style}</style></head>\n"
        f"<body><h1>{text(title)}</h1>\n{paragraph(note)}{body}\n<script>\n{script}</script></body></html>\n"
    )


def text(value: str, limit: int = 300) -> str:
    """A string, escaped for HTML."""
    return escape(clean(value, limit))


def paragraph(note: str) -> str:
    """A note, or nothing if it is empty."""
    return f'<p class="note">{text(note)}</p>' if note else ""


def figure(title: str, chart: str, note: str = "") -> str:
    """A chart, which is SVG, with a title and a note below it."""
    below = f'<div class="note">{text(note)}</div>' if note else ""
    return f"<figure><figcaption>{text(title)}</figcaption>{chart}{below}</figure>"


def charts(figures: Iterable[str]) -> str:
    """Figures side by side."""
    return f'<div class="charts">{"".join(figures)}</div>'


def row(cells: Iterable[object], tag: str = "td", limit: int = 1000) -> list[str]:
    """The cells of a row of a table."""
    return [f"<{tag}>{text(str(cell), limit)}</{tag}>" for cell in cells]


def table(rows: Iterable[Iterable[str]]) -> str:
    """A table of rows of cells that are HTML."""
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{lines}</table></div>'


def setting(value: Any) -> str:
    """A value of a recipe or of JSON in words.

    >>> setting([{"name": "checkpoint", "every": 5}, "epoch_line", True])
    'checkpoint (every 5), epoch_line, true'
    """
    if isinstance(value, dict):
        fields = ", ".join(f"{key} {setting(v)}" for key, v in value.items() if key != "name")
        name = setting(value["name"]) if "name" in value else ""
        return f"{name} ({fields})" if name and fields else name or fields
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def graph(level: Level, title: str) -> str:
    """A graph whose folded boxes open at a click; without JavaScript, the folded picture is shown."""
    drawing = layout.layout(level)
    folded = svg.svg(drawing, level.kinds(), title)
    scene = {"colors": COLORS, "root": _level(drawing)}
    data = json.dumps(scene, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    buttons = ""
    if any(item.inner is not None for item in level.items):
        buttons = (
            '<div class="buttons"><button type="button" data-open="1">unfold all</button> '
            '<button type="button" data-open="">fold all</button> '
            "<span>click a stacked box to open it</span></div>"
        )
    return (
        f'<div class="graph">{buttons}<div class="legend">{_legend(level)}</div>'
        f'<div class="canvas" tabindex="0">{folded}</div>'
        f'<script type="application/json">{data}</script></div>'
    )


def _legend(level: Level) -> str:
    out = []
    for kind in level.kinds():
        if kind not in ("io", "plain"):
            fill, line, meaning = COLORS[kind]
            out.append(
                f'<span><i style="background:{fill};border-color:{line}"></i>{meaning}</span>'
            )
    return "".join(out)


def _level(drawing: Drawing) -> dict[str, Any]:
    """The data with which page.js places the boxes again: orders, sizes and positions."""
    number = {id(box): k for k, box in enumerate(drawing.boxes)}
    return {
        "layers": [[number[id(b)] for b in layer] for layer in drawing.layers],
        "boxes": [_box(box) for box in drawing.boxes],
        "edges": [[number[id(b)] for b in way] for way in drawing.edges],
    }


def _box(box: Box) -> dict[str, Any]:
    size: dict[str, Any] = {"x": round(box.x, 1), "w": round(box.w, 1), "h": round(box.h, 1)}
    if box.item is None:
        return {**size, "h": 0}
    out = {
        **size,
        "title": box.title,
        "kind": box.item.kind,
        "chips": [[chip.text, chip.kind] for chip in box.lines],
        "tip": "\n".join(clean(line) for line in box.item.tip.split("\n")),
    }
    if box.inner is not None:
        out["inner"] = _level(box.inner)
    return out
