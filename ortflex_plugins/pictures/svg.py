"""A drawing as SVG: plain shapes and escaped strings, which load nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from ortflex_plugins.pictures import layout as place
from ortflex_plugins.pictures.layout import Box, Drawing
from ortflex_plugins.pictures.scene import CHIPS, COLORS, clean

MARGIN = 16
_FONT = "system-ui, 'DejaVu Sans', Arial, sans-serif"


def svg(drawing: Drawing, kinds: Sequence[str], title: str) -> str:
    """A document with the title, a legend of ``kinds``, and the drawing."""
    legend, legend_width, legend_height = _legend(kinds, max(drawing.w, 360.0))
    head = MARGIN + 20
    w = max(drawing.w, legend_width, place.width(clean(title, 60), 14)) + 2 * MARGIN
    top = head + legend_height + 18
    h = top + drawing.h + MARGIN
    left = (w - drawing.w) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0f}" height="{h:.0f}" '
        f'viewBox="0 0 {w:.0f} {h:.0f}" font-family="{_FONT}" font-size="{place.FONT}">',
        f"<title>{text(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="{head - 6}" font-size="14" font-weight="bold" fill="#0f172a">'
        f"{text(title, 60)}</text>",
        f'<g transform="translate({MARGIN},{head + 6})">{"".join(legend)}</g>',
        f'<g transform="translate({left:.1f},{top:.1f})">',
        *_level(drawing),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def text(value: str, limit: int = 300) -> str:
    """A string, escaped for XML."""
    return escape(clean(value, limit), {'"': "&quot;"})


def lines(value: str) -> str:
    """A string of several lines."""
    return "\n".join(text(line) for line in value.split("\n"))


def path(way: Sequence[Box]) -> str:
    """A smooth line through boxes, from the bottom of the first box to the top of the last one."""
    first = way[0]
    x, y = first.x, first.y + first.h / 2
    out = [f"M{x:.1f} {y:.1f}"]
    for box in way[1:]:
        top = box.y - box.h / 2
        middle = (y + top) / 2
        out.append(f"C{x:.1f} {middle:.1f} {box.x:.1f} {middle:.1f} {box.x:.1f} {top:.1f}")
        x, y = box.x, box.y + box.h / 2
        if box.item is None:
            out.append(f"V{y:.1f}")
    return "".join(out)


def _level(drawing: Drawing) -> Iterable[str]:
    for way in drawing.edges:
        yield f'<path d="{path(way)}" fill="none" stroke="#94a3b8" stroke-width="1.2"/>'
        end = way[-1]
        x, y = end.x, end.y - end.h / 2
        yield (
            f'<path d="M{x - 3.5:.1f} {y - 6:.1f}L{x:.1f} {y:.1f}L{x + 3.5:.1f} {y - 6:.1f}z" '
            'fill="#94a3b8"/>'
        )
    for box in drawing.boxes:
        if box.item is not None:
            yield from _box(box)


def _box(box: Box) -> Iterable[str]:
    item = box.item
    assert item is not None
    fill, line, _ = COLORS[item.kind]
    x, y = box.x - box.w / 2, box.y - box.h / 2
    if item.inner is not None and not box.open:
        yield (
            f'<rect x="{x + 4:.1f}" y="{y + 4:.1f}" width="{box.w:.1f}" height="{box.h:.1f}" rx="5" '
            f'fill="{fill}" stroke="{line}"/>'
        )
    yield (
        f'<g><title>{lines(item.tip or item.title)}</title><rect x="{x:.1f}" y="{y:.1f}" '
        f'width="{box.w:.1f}" height="{box.h:.1f}" rx="{14 if item.round else 5}" '
        f'fill="{fill}" stroke="{line}" fill-opacity="{0.45 if box.open else 1}"/>'
    )
    baseline = y + place.PAD + 10
    yield (
        f'<text x="{box.x:.1f}" y="{baseline:.1f}" text-anchor="middle" font-weight="600" '
        f'fill="#0f172a">{text(box.title)}</text>'
    )
    if box.open and box.inner is not None:
        left = box.x - box.inner.w / 2
        yield f'<g transform="translate({left:.1f},{y + place.PAD + place.LINE + 4:.1f})">'
        yield from _level(box.inner)
        yield "</g></g>"
        return
    for chip in box.lines:
        baseline += place.LINE
        dot = chip.kind in CHIPS
        if dot:
            yield (
                f'<circle cx="{x + place.PAD + 3:.1f}" cy="{baseline - 4:.1f}" r="3.5" '
                f'fill="{COLORS[chip.kind][0]}"/>'
            )
        where = f'x="{x + place.PAD + 11:.1f}"' if dot else f'x="{box.x:.1f}" text-anchor="middle"'
        yield f'<text {where} y="{baseline:.1f}" font-size="11" fill="#334155">{text(chip.text)}</text>'
    yield "</g>"


def _legend(kinds: Sequence[str], room: float) -> tuple[list[str], float, float]:
    """The marks of a legend in rows of at most the width ``room``; their width and height."""
    out, x, y, widest = [], 0.0, 10.0, 0.0
    for kind in kinds:
        if kind in ("io", "plain") or kind not in COLORS:
            continue
        fill, line, meaning = COLORS[kind]
        step = 24 + place.width(meaning, 11)
        if x and x + step > room:
            x, y = 0.0, y + 18
        mark = (
            f'<circle cx="{x + 6:.1f}" cy="{y - 4:.1f}" r="4" fill="{fill}"/>'
            if kind in CHIPS
            else f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="3" fill="{fill}" '
            f'stroke="{line}"/>'
        )
        label = f'<text x="{x + 17:.1f}" y="{y:.1f}" font-size="11" fill="#334155">{meaning}</text>'
        out += [mark, label]
        x += step
        widest = max(widest, x)
    return out, widest, y if out else 0.0
