"""A drawing as a matplotlib figure, and the figure as PNG."""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING, Any

from ortflex_core import ConfigError, install_command
from ortflex_plugins.pictures import layout as place
from ortflex_plugins.pictures.layout import Box, Drawing
from ortflex_plugins.pictures.scene import CHIPS, COLORS, clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 72 / 100  # points per unit of the layout, of which 100 are an inch
_MOST = 14_000  # pixels per side that viewers open
_LONGEST = 32_000  # pixels of one side that most viewers open if the other side is short


def figure(drawing: Drawing, kinds: list[str], title: str) -> Figure:
    """Draw with matplotlib; one unit of the layout is 1/100 inch."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"PNG needs matplotlib: {install_command('plot')}; or draw .svg or .html"
        ) from error
    shown = [k for k in kinds if k not in ("io", "plain")]
    top = 30 + 18 * len(shown)
    w, h = max(drawing.w, 320) + 32, drawing.h + top + 32
    drawn = Figure(figsize=(w / 100, h / 100), dpi=100)
    axes = drawn.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, w)
    axes.set_ylim(h, 0)
    axes.set_axis_off()
    axes.text(16, 22, clean(title, 60), fontsize=13 * _POINTS, fontweight="bold", parse_math=False)
    for k, kind in enumerate(shown):
        fill, line, meaning = COLORS[kind]
        axes.plot(
            [22],
            [40 + 18 * k],
            marker="o" if kind in CHIPS else "s",
            color=fill,
            markeredgecolor=line,
            markersize=8 * _POINTS,
        )
        axes.text(34, 40 + 18 * k, meaning, fontsize=11 * _POINTS, va="center", parse_math=False)
    _level(axes, drawing, (w - drawing.w) / 2, top + 16)
    return drawn


def resolution(width: float, height: float) -> float:
    """Pixels per inch: two per unit, or fewer if the image would be too large, unless text is illegible.

    >>> resolution(10, 10), resolution(5, 100), resolution(5, 300)
    (200.0, 140.0, 80.0)
    """
    longer, area = max(width, height), width * height
    readable = min(80.0, _LONGEST / longer, _MOST / math.sqrt(area))
    return max(min(200.0, _MOST / longer), readable)


def png(drawn: Figure) -> bytes:
    """The figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    FigureCanvasAgg(drawn)
    with warnings.catch_warnings():
        # matplotlib warns about each letter that the font does not have, and draws a box instead.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        drawn.savefig(out, format="png", dpi=resolution(*drawn.get_size_inches()))
    return out.getvalue()


def _level(axes: Any, drawing: Drawing, dx: float, dy: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for way in drawing.edges:
        x, y = way[0].x + dx, way[0].y + way[0].h / 2 + dy
        points, codes = [(x, y)], [Path.MOVETO]
        for box in way[1:]:
            bx, top = box.x + dx, box.y - box.h / 2 + dy
            points += [(x, (y + top) / 2), (bx, (y + top) / 2), (bx, top)]
            codes += [Path.CURVE4] * 3
            x, y = bx, box.y + box.h / 2 + dy
            if box.item is None:
                points.append((x, y))
                codes.append(Path.LINETO)
        axes.add_patch(PathPatch(Path(points, codes), fill=False, ec="#94a3b8", lw=0.9))
        end = way[-1]
        x, y = end.x + dx, end.y - end.h / 2 + dy
        axes.fill([x - 3.5, x, x + 3.5], [y - 6, y, y - 6], color="#94a3b8", lw=0)
    for box in drawing.boxes:
        if box.item is not None:
            _box(axes, box, dx, dy)


def _box(axes: Any, box: Box, dx: float, dy: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    item = box.item
    assert item is not None
    fill, line, _ = COLORS[item.kind]
    x, y = box.x - box.w / 2 + dx, box.y - box.h / 2 + dy
    style = f"round,pad=0,rounding_size={12 if item.round else 4}"
    for shift in (4, 0) if item.inner is not None and not box.open else (0,):
        axes.add_patch(
            FancyBboxPatch(
                (x + shift, y + shift), box.w, box.h, boxstyle=style, fc=fill, ec=line, lw=0.8
            )
        )
    middle = y + place.PAD + 6
    # A dollar sign in a name must not begin a formula.
    plain = {"va": "center", "parse_math": False, "clip_on": True}
    axes.text(
        box.x + dx,
        middle,
        box.title,
        ha="center",
        fontsize=12 * _POINTS,
        fontweight="bold",
        **plain,
    )
    if box.open and box.inner is not None:
        left = box.x + dx - box.inner.w / 2
        _level(axes, box.inner, left, y + place.PAD + place.LINE + 4)
        return
    for chip in box.lines:
        middle += place.LINE
        if chip.kind in CHIPS:
            axes.plot(
                [x + place.PAD + 3], [middle], "o", color=COLORS[chip.kind][0], ms=6 * _POINTS
            )
            axes.text(x + place.PAD + 11, middle, chip.text, fontsize=11 * _POINTS, **plain)
        else:
            axes.text(box.x + dx, middle, chip.text, ha="center", fontsize=11 * _POINTS, **plain)
