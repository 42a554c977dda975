"""Several run folders as one page: curves, results, and where the recipes differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortflex_core import MALFORMED, ConfigError, OrtflexError
from ortflex_plugins.pictures import charts, html
from ortflex_plugins.pictures.charts import Numbers
from ortflex_plugins.pictures.run_files import Run, read_run
from ortflex_plugins.pictures.scene import clean

_LONGEST = 200
_LARGEST = 1e307  # the difference of two values, and of the ticks around them, is still finite


def report_several(folders: Sequence[Path]) -> str:
    """The page about several folders that ``ortflex train`` wrote; it loads nothing from elsewhere.

    Folders that are not run folders or have a broken file are listed with the reason.
    """
    if len({path.resolve() for path in folders}) < len(folders):
        raise ConfigError("report: a run folder is given twice; give each one once")
    runs: dict[str, Run] = {}
    broken: dict[str, str] = {}
    for name, folder in zip(_names(folders), folders, strict=True):
        try:
            runs[name] = _drawable(name, folder)
        except (OrtflexError, OSError, RecursionError, *MALFORMED) as error:
            known = isinstance(error, OrtflexError)
            broken[name] = str(error) if known else f"{type(error).__name__}: {error}"
    if not runs:
        raise ConfigError([f"{name} is broken: {reason}" for name, reason in broken.items()])
    body = [_results(runs, broken), _curves(runs), _differences(runs)]
    running = any(run.may_run for run in runs.values())
    return html.page(f"{len(folders)} runs", "\n".join(body), refresh=running)


def _drawable(name: str, folder: Path) -> Run:
    """Read a run, and make every part of the page for it once, so that broken files are found."""
    run = read_run(folder)
    for column, values in run.history.items():
        large = next((v for v in values if math.isfinite(v) and abs(v) > _LARGEST), None)
        if large is not None:
            raise ConfigError(
                f"history.csv: {column} has {large:g}; a chart shows numbers up to {_LARGEST:g}"
            )
    for part in (_results, _curves, _differences):
        part({name: run})
    return run


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are different for all folders.

    >>> _names([Path("/runs/a/x"), Path("/runs/b/x")])
    ['a/x', 'b/x']
    """
    paths = [path.resolve().parts for path in folders]
    names: list[str] = []
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _results(runs: Mapping[str, Run], broken: Mapping[str, str] | None = None) -> str:
    columns = [n for n in _columns(runs) if n == "loss" or n.startswith("validation_")]
    head = ["run", "state", "epochs", *(f"last {n.replace('_', ' ')}" for n in columns), "seconds"]
    rows = []
    for name, run in runs.items():
        cells = [name, run.state, str(len(run.history.get("epoch", ())))]
        for column in columns:
            last = [v for v in run.history.get(column, ()) if math.isfinite(v)]
            cells.append(f"{last[-1]:.5g}" if last else "–")
        rows.append([*cells, f"{sum(run.history.get('seconds', ())):.3g}"])
    for name, reason in (broken or {}).items():
        rows.append([name, f"broken: {reason}", *["–"] * (len(head) - 2)])
    return "<h2>Results</h2>" + _table(head, rows)


def _curves(runs: Mapping[str, Run]) -> str:
    figures = []
    for column in _columns(runs):
        if column not in ("loss", "rate") and not column.startswith("validation_"):
            continue
        # A run without this column keeps its color and its place in the legend.
        series: dict[str, Numbers] = {
            name: run.history.get(column, ()) for name, run in runs.items()
        }
        heading = "learning rate" if column == "rate" else column.replace("_", " ")
        chart = charts.lines(series, log=False if column == "rate" else None, legend=False)
        figures.append(html.figure(clean(heading.capitalize(), 60), chart))
    if not figures:
        return ""
    return f"<h2>Curves</h2>{charts.legend(list(runs))}{html.charts(figures)}"


def _columns(runs: Mapping[str, Run]) -> list[str]:
    return list(dict.fromkeys(column for run in runs.values() for column in run.history))


def _differences(runs: Mapping[str, Run]) -> str:
    flat = {name: dict(_flat(run.keys)) for name, run in runs.items()}
    keys = list(dict.fromkeys(key for table in flat.values() for key in table))
    rows = []
    for key in keys:
        values = [flat[name].get(key, "–") for name in runs]
        if key != "output" and len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return '<h2>Recipes</h2><p class="note">The recipes are the same.</p>'
    return "<h2>Where the recipes differ</h2>" + _table(["key", *runs], rows)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Nested tables as dotted keys.

    >>> list(_flat({"optimizer": {"name": "adam"}}))
    [('optimizer.name', 'adam')]
    """
    if not isinstance(value, dict):
        yield path, html.setting(value)
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = (html.row(row, limit=_LONGEST) for row in rows)
    return html.table([html.row(head, "th", _LONGEST), *body])
