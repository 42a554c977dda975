"""Small charts as SVG: lines over epochs, bars with percentages, two overlaid histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ortflex_plugins.pictures.svg import text

_W, _H = 380, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 26, 34
_COLORS = ("#1d4ed8", "#c2410c", "#15803d", "#6d28d9", "#be185d", "#0e7490")
_DASHES = ("6 3", "2 3", "8 3 2 3", "3 6")

Numbers = Sequence[float | None]


def lines(series: Mapping[str, Numbers], *, log: bool | None = None, legend: bool = True) -> str:
    """Lines over the epochs 1, 2, …, with gaps where there is no number.

    A line that would hide an earlier one is dashed, so that both colors are visible.
    """
    values = [v for row in series.values() for v in row if v is not None and math.isfinite(v)]
    if not values:
        return _frame(['<text x="190" y="120" text-anchor="middle">no values</text>'])
    low, high = min(values), max(values)
    if log is None:
        log = low > 0 and high / low > 100
    scale = _Scale(low, high, log)
    count = max(len(row) for row in series.values())
    out = [*(_names(list(series)) if legend else []), *_y_axis(scale)]
    for tick in _epoch_ticks(count):
        x = _across(tick - 1, count)
        out.append(_label(x, _H - _BOTTOM + 15, str(tick), "middle"))
    out.append(_label(_W - _RIGHT, _H - 4, "epoch", "end"))
    rows = list(series.values())
    for k, row in enumerate(rows):
        style = _style(k)
        color = style["stroke"]
        if any(_hides(row, earlier, scale) for earlier in rows[:k]):
            style = style | {"stroke-dasharray": "9 9"}
        for piece in _pieces(row):
            points = [(_across(i, count), scale.y(v)) for i, v in piece]
            if len(points) == 1 or count <= 30:
                out += [
                    f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in points
                ]
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            out.append(f'<path d="M{path}" fill="none" {_attributes(style)} stroke-width="1.8"/>')
    return _frame(out)


def shares(parts: Mapping[str, float], colors: Mapping[str, str], unit: str) -> str:
    """Horizontal bars, each with its value and its percentage of the sum."""
    total = sum(parts.values()) or 1.0
    largest = max(parts.values(), default=1.0) or 1.0
    out = []
    for k, (name, value) in enumerate(parts.items()):
        y = 26 + 38 * k
        width = max(1.0, 190 * value / largest)
        out += [
            _label(80, y + 13, name, "end"),
            f'<rect x="88" y="{y}" width="{width:.1f}" height="18" rx="3" '
            f'fill="{colors.get(name, _COLORS[0])}"/>',
            _label(94 + width, y + 13, f"{value:.4g} {unit}, {value / total:.0%}", "start"),
        ]
    return _frame(out)


def histograms(low: float, high: float, before: Sequence[int], after: Sequence[int]) -> str:
    """The distributions of values before (an area) and after (a line), over the same bins."""
    # The axis ends at 4 or above, so that the ticks are integers.
    scale = _Scale(0.0, float(max([*before, *after, 4])), False)
    out = [*_names(("before", "after")), *_y_axis(scale)]
    for k, (counts, color) in enumerate(zip((before, after), _COLORS, strict=False)):
        step = (_W - _LEFT - _RIGHT) / max(len(counts), 1)
        points = [f"{_LEFT} {scale.y(0):.1f}"]
        for i, count in enumerate(counts):
            y = scale.y(count)
            points += [f"{_LEFT + i * step:.1f} {y:.1f}", f"{_LEFT + (i + 1) * step:.1f} {y:.1f}"]
        points.append(f"{_W - _RIGHT} {scale.y(0):.1f}")
        fill = f'fill="{color}" fill-opacity="0.18"' if k == 0 else 'fill="none"'
        out.append(f'<path d="M{"L".join(points)}" {fill} stroke="{color}" stroke-width="1.5"/>')
    for value, x, anchor in ((low, _LEFT, "start"), (high, _W - _RIGHT, "end")):
        out.append(_label(x, _H - _BOTTOM + 15, f"{value:.3g}", anchor))
    return _frame(out)


class _Scale:
    """The heights of values on a linear or logarithmic axis, with round ticks."""

    def __init__(self, low: float, high: float, log: bool) -> None:
        self.log = log
        if log:
            self.ticks = _decades(low, high)
            low, high = math.log10(low), math.log10(high)
        if high - low < 1e-12 * max(abs(high), abs(low), 1e-30):
            pad = abs(high) / 2 or 0.5
            low, high = low - pad, high + pad
        if not log:
            self.ticks = _round(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        self._low, self._high = low, high

    def y(self, value: float) -> float:
        position = math.log10(value) if self.log and value > 0 else value
        return (
            _H - _BOTTOM - (_H - _TOP - _BOTTOM) * (position - self._low) / (self._high - self._low)
        )


def _round(low: float, high: float) -> list[float]:
    """About five round numbers that span the range."""
    raw = (high - low) / 4
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(f * base for f in (1, 2, 2.5, 5, 10) if f * base >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, (last - first) // 5 + 1)
    return [10.0**k for k in range(first, last + 1, every)]


def _epoch_ticks(count: int) -> list[int]:
    """At most seven epochs with a label, including the first."""
    step = next(s for e in range(12) for s in (10**e, 2 * 10**e, 5 * 10**e) if count / s <= 7)
    return sorted({1, *range(step, count + 1, step)} - ({2} if step == 2 and count > 8 else set()))


def _across(k: int, count: int) -> float:
    return _LEFT + 6 + (_W - _LEFT - _RIGHT - 12) * (k / (count - 1) if count > 1 else 0.5)


def _pieces(row: Numbers) -> list[list[tuple[int, float]]]:
    out: list[list[tuple[int, float]]] = [[]]
    for k, value in enumerate(row):
        if value is not None and math.isfinite(value):
            out[-1].append((k, value))
        elif out[-1]:
            out.append([])
    return [piece for piece in out if piece]


def _y_axis(scale: _Scale) -> list[str]:
    out = []
    for tick in scale.ticks:
        y = scale.y(tick)
        out.append(f'<path d="M{_LEFT} {y:.1f}H{_W - _RIGHT}" stroke="#e2e8f0" stroke-width="1"/>')
        out.append(_label(_LEFT - 6, y + 4, f"{0.0 if abs(tick) < 1e-300 else tick:.4g}", "end"))
    return out


def legend(names: Sequence[str]) -> str:
    """The names of lines as HTML, for charts that have the same lines."""
    marks = (
        '<svg width="24" height="8"><path d="M0 4H24" stroke-width="3" '
        + _attributes(_style(k))
        + f"/></svg>{text(name, 80)}"
        for k, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(f"<span>{mark}</span>" for mark in marks)}</div>'


def _style(k: int) -> dict[str, str]:
    """The color of a line; lines with the color of an earlier line are dashed."""
    dashed = {"stroke-dasharray": _DASHES[k // len(_COLORS) % len(_DASHES)]}
    return {"stroke": _COLORS[k % len(_COLORS)]} | (dashed if k >= len(_COLORS) else {})


def _attributes(style: Mapping[str, str]) -> str:
    return " ".join(f'{key}="{value}"' for key, value in style.items())


def _hides(row: Numbers, other: Numbers, scale: _Scale) -> bool:
    """Whether a line covers another one: they are less than a pixel apart wherever both have values."""
    both = [
        (a, b)
        for a, b in zip(row, other, strict=False)
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]
    return bool(both) and all(abs(scale.y(a) - scale.y(b)) < 1 for a, b in both)


def _names(names: Sequence[str]) -> list[str]:
    if len(names) < 2:
        return []
    out, x = [], float(_LEFT)
    for k, name in enumerate(names):
        color = _COLORS[k % len(_COLORS)]
        out.append(f'<rect x="{x:.0f}" y="6" width="12" height="4" rx="2" fill="{color}"/>')
        out.append(_label(x + 16, 12, name, "start"))
        x += 34 + 7 * len(name)
    return out


def _label(x: float, y: float, value: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(value, 40)}</text>'


def _frame(parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_W} {_H}" role="img" font-size="12" fill="#334155">'
        + "".join(parts)
        + "</svg>"
    )
