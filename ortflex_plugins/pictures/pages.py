"""A run as one page: recipe, curves, times, weights, the graph, versions."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import attrs

from ortflex_core import (
    MALFORMED,
    Arguments,
    ConfigError,
    History,
    Model,
    OrtflexError,
    Parts,
    Plugins,
    Trainer,
    edited_model,
    find_changes,
    internals_of,
    short_repr,
    to_toml,
    write_bytes,
)
from ortflex_plugins.pictures import charts, html
from ortflex_plugins.pictures.charts import Numbers
from ortflex_plugins.pictures.measure import Measures
from ortflex_plugins.pictures.picture import Picture, draw, draw_changed
from ortflex_plugins.pictures.run_files import Run, read_run
from ortflex_plugins.pictures.scene import COLORS, clean

_KNOWN = ("epoch", "loss", "penalty", "rate", "rows", "seconds")
_OPEN = 8  # histograms that are shown without a click
_LONGEST = 100_000  # characters of a recipe


@attrs.frozen(kw_only=True)
class Page:
    """A page about a run; a notebook shows it, ``save`` writes it.

    Attributes:
        title: the heading.
        html: the page, a single file that loads nothing from other places.
    """

    title: str
    html: str = attrs.field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page.

        Raises:
            ConfigError: the name does not end with .html.
            OutputError: the file cannot be written; an existing file is not changed.
        """
        target = Path(path)
        if target.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"report: expected a name that ends with .html, got {str(target)!r}")
        write_bytes(target, self.html.encode())
        return target

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style does not change the notebook."""
        return (
            f'<iframe title="{escape(self.title)}" sandbox="allow-scripts" '
            f'style="width:100%;height:600px;border:0" srcdoc="{escape(self.html)}"></iframe>'
        )


def report(
    what: Trainer | History | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Page:
    """Make a page about a run: its curves, times, weights, graph, arguments and versions.

    The page of a Trainer shows everything that is known. It has histograms of the weights, norms of
    gradients and the times of a step if :class:`Measures` was one of the callbacks. The page of a History
    has only the curves.

    Args:
        what: a Trainer after ``fit``, a History, a run folder of ``ortflex train``, or several folders,
            which the page compares.
        path: the .html file to write.
        title: the heading.

    Raises:
        ConfigError: a folder is not a run folder, or the path does not end with .html.
        OutputError: the file cannot be written.

    >>> page = report(History(({"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25})), title="Two epochs")
    >>> page
    Page(title='Two epochs')
    >>> "<svg" in page.html
    True
    """
    if isinstance(what, Trainer):
        page = _page_of_trainer(what, title)
    elif isinstance(what, History):
        run = _run_of(what, "", {}, {})
        page = _page(title or "A training", [_summary(run), _curves(run.history, run.measures)])
    elif isinstance(what, str | os.PathLike):
        folder = Path(what)
        page = Page(
            title=title or f"Run {folder.resolve().name}", html=page_of_folder(folder, title)
        )
    elif (
        isinstance(what, list | tuple)
        and what
        and all(isinstance(p, str | os.PathLike) for p in what)
    ):
        from ortflex_plugins.pictures.several import report_several

        folders = [Path(folder) for folder in what]
        page = Page(title=f"{len(folders)} runs", html=report_several(folders))
    else:
        raise ConfigError(
            "report: expected a Trainer, a History, a run folder or a list of run folders, got "
            f"{short_repr(what)}"
        )
    if path is not None:
        page.save(path)
    return page


def _page(title: str, parts: Sequence[str]) -> Page:
    return Page(title=title, html=html.page(title, "\n".join(parts)))


def _run_of(
    history: History, recipe: str, versions: dict[str, Any], measures: dict[str, Any]
) -> Run:
    columns = {name: [float(v) for v in history[name]] for name in history.columns}
    state = "interrupted" if history.interrupted else "finished"
    return Run(recipe, {}, columns, versions, measures, state)


def _page_of_trainer(trainer: Trainer, title: str | None) -> Page:
    inner = internals_of(trainer)
    taken = [c for c in inner.setup.callbacks if isinstance(c, Measures)]
    versions = {
        "runtime": str(inner.runtime),
        "backend": inner.live.backend or "–",
        "device": inner.setup.device.name,
    }
    measures = taken[0].content() if taken else {}
    run = _run_of(trainer.history_, "\n".join(_arguments(trainer)), versions, measures)
    label = Path(trainer.model.label).name
    try:
        loss = inner.arguments["loss"]
        picture = draw(trainer.model, loss=loss, title=label, plugins=inner.plugins)
        graph = _drawn(picture)
    except OrtflexError as error:
        graph = f"<h2>Graph</h2>{html.paragraph(str(error))}"
    parts = [_summary(run), _curves(run.history, run.measures), _weights(run.measures), graph]
    return _page(
        title or f"Training of {label}", [*parts, _recipe(run.recipe), _versions(versions)]
    )


def _arguments(trainer: Trainer) -> Iterator[str]:
    """The arguments of a Trainer, one line each, as in a recipe."""
    inner = internals_of(trainer)
    parts = Parts(inner.plugins)
    for field in attrs.fields(Arguments):
        value = inner.arguments[field.name]
        if value is None:
            continue
        try:
            yield f"{field.name} = {to_toml(parts.spell_out(field.name, value))}"
        except (OrtflexError, TypeError):
            yield f"{field.name} = … (objects that no file can hold)"


def page_of_folder(folder: Path, title: str | None = None) -> str:
    """The page about a folder that ``ortflex train`` wrote; it loads nothing from elsewhere.

    Missing parts are left out: measurements that were not taken, or the graph if the model does not
    exist any more. Every string is escaped.
    """
    run = read_run(folder)
    history, versions, measures = run.history, run.versions, run.measures
    try:
        shown = [_summary(run), _curves(history, measures), _weights(measures)]
    except OrtflexError:
        raise
    except MALFORMED as error:
        raise ConfigError(
            f"history.csv or measures.json of {str(folder)!r} does not have the "
            "form that `ortflex train` writes: "
            f"{type(error).__name__}: {error}"
        ) from error
    parts = [*shown, _graph(folder, run.keys), _recipe(run.recipe), _versions(versions)]
    heading = title or f"Run {folder.resolve().name}"
    return html.page(heading, "\n".join(parts), refresh=run.may_run)


def _summary(run: Run) -> str:
    history, versions = run.history, run.versions
    facts: dict[str, str] = {} if run.state == "finished" else {"state": run.state}
    if history.get("loss"):
        facts["epochs"] = str(len(history["loss"]))
        for name in ("loss", *(n for n in history if n.startswith("validation_"))):
            last = [v for v in history[name] if math.isfinite(v)]
            if _number(start := run.measures.get("begun", {}).get(name)):
                facts[f"{name.replace('_', ' ')} before the training"] = f"{start:.5g}"
            facts[f"last {name.replace('_', ' ')}"] = f"{last[-1]:.5g}" if last else "–"
    if history.get("seconds"):
        seconds = sum(history["seconds"])
        facts["seconds"] = f"{seconds:.3g}"
        if seconds and history.get("rows"):
            facts["rows per second"] = f"{sum(history['rows']) / seconds:,.0f}"
    for key in ("backend", "device"):
        if key in versions:
            facts[key] = str(versions[key])
    if not facts:
        return html.paragraph("No epoch was finished.")
    cells = (
        f"<div><b>{html.text(v)}</b><span>{html.text(k)}</span></div>" for k, v in facts.items()
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _curves(history: Mapping[str, Sequence[float]], measures: Mapping[str, Any]) -> str:
    figures = []
    if history.get("loss"):
        series: dict[str, Numbers] = {"training": history["loss"]}
        if any(history.get("penalty", ())):
            series["penalty"] = history["penalty"]
        if "validation_loss" in history:
            series["validation"] = history["validation_loss"]
        figures.append(html.figure("Loss", charts.lines(series)))
    for name, column in history.items():
        if name.startswith("validation_") and name != "validation_loss":
            shown = name.removeprefix("validation_")
            figures.append(html.figure(f"Validation: {shown}", charts.lines({shown: column})))
    if history.get("rate"):
        figures.append(
            html.figure("Learning rate", charts.lines({"rate": history["rate"]}, log=False))
        )
    # If the run continued from a checkpoint, only its later epochs were measured.
    measured = {e.get("epoch"): e for e in measures.get("epochs", ()) if isinstance(e, dict)}
    epochs = [measured.get(k, {}) for k in history.get("epoch", ())]
    norms = _column(epochs, "gradient_norm")
    if any(v is not None for v in norms):
        note = "of the first batch, with the weights at the end of each epoch"
        figures.append(html.figure("Gradient norm", charts.lines({"norm": norms}), note))
    seconds: dict[str, Numbers] = {}
    if history.get("seconds"):
        seconds["epoch"] = history["seconds"]
    if seconds:
        figures.append(html.figure("Seconds per epoch", charts.lines(seconds, log=_wide(seconds))))
    timed = {str(k): float(v) for k, v in measures.get("parts", {}).items() if _number(v)}
    if timed:
        scale, unit = next(
            ((s, u) for s, u in ((1.0, "s"), (1e3, "ms")) if max(timed.values()) * s >= 1),
            (1e6, "µs"),
        )
        timed = {name: value * scale for name, value in timed.items()}
        colors = {kind: line for kind, (_, line, _) in COLORS.items()}
        note = (
            "measured by onnxruntime's profiler after the training, operator by operator, unfused"
        )
        chart = charts.shares(timed, colors, unit)
        figures.append(html.figure("Time of the parts of a step", chart, note))
    notes = "".join(html.paragraph(str(note)) for note in measures.get("notes", ()))
    return f"<h2>Curves</h2>{html.charts(figures)}{notes}" if figures else ""


def _wide(series: Mapping[str, Numbers]) -> bool:
    """Whether times need a logarithmic axis; the first epoch does not count, because it compiles."""
    times = [v for row in series.values() for v in row[1:] if v is not None and v > 0]
    return bool(times) and max(times) > 1000 * min(times)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [float(row[name]) if _number(row.get(name)) else None for row in rows]


def _weights(measures: Mapping[str, Any]) -> str:
    figures = []
    for entry in measures.get("weights", ()):
        try:
            low, high = float(entry["low"]), float(entry["high"])
            before, after = ([int(c) for c in entry[key]] for key in ("before", "after"))
            title = f"{entry['name']} {'×'.join(map(str, entry['shape']))}"
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"measures.json: a histogram is broken: {error!r}") from error
        chart = charts.histograms(low, high, before, after)
        figures.append(html.figure(clean(title, 60), chart))
    if not figures:
        return ""
    out = f"<h2>Weights, before and after</h2>{html.charts(figures[:_OPEN])}"
    if folded := figures[_OPEN:]:
        out += f"<details><summary>{len(folded)} more</summary>{html.charts(folded)}</details>"
    return out


def draw_folder(folder: Path, **options: Any) -> Picture:
    """The graph of the model of a run folder; ``options`` are arguments of :func:`draw`.

    Raises:
        ConfigError: this is not a run folder, or it has no model.
        ModelError: its model is not an ONNX model.
    """
    picture = _draw_run(folder, read_run(folder).keys, **options)
    if picture is None:
        raise ConfigError(
            f"{str(folder)!r} has no trained.onnx, and the model of its recipe is gone"
        )
    return picture


def _graph(folder: Path, keys: Mapping[str, Any]) -> str:
    try:
        picture = _draw_run(folder, keys)
    except OrtflexError as error:
        return f"<h2>Graph</h2>{html.paragraph(str(error))}"
    return "" if picture is None else _drawn(picture)


def _draw_run(folder: Path, keys: Mapping[str, Any], **options: Any) -> Picture | None:
    """The graph of the trained model, or of the one that the recipe names, with the colors of a training.

    What the recipe's edits changed is marked, if the file before them still exists. A picture only shows
    a run: its recipe is data, and no class that it names is imported for a color. None without a model.
    """
    models = [folder / "trained.onnx", folder / "last_good.onnx"]
    named = folder / str(keys.get("model", ""))
    try:
        found = [p for p in (*models, named) if p.is_file()]
    except ValueError:  # a path with a null byte
        found = [p for p in models if p.is_file()]
    if not found:
        return None
    plugins = Plugins.discover().for_data(f"the recipe of {str(folder)!r}")
    path: Path | Model = found[0]
    edits, changes = {k: keys[k] for k in ("head", "edits") if keys.get(k)}, None
    if edits and named in found:
        with contextlib.suppress(OrtflexError):
            edited = edited_model(named, plugins=plugins, **edits)
            path, changes = edited if path is named else path, find_changes(edited)
    chosen = {key: keys[key] for key in ("loss", "params", "freeze") if key in keys}
    options = {"title": found[0].name, "plugins": plugins, **options}
    for trial in (chosen, {k: chosen[k] for k in chosen if k == "params"}):
        with contextlib.suppress(OrtflexError):
            return draw_changed(path, changes, **trial, **options)
    return draw_changed(path, changes, **options)


def _drawn(picture: Picture) -> str:
    graph = html.graph(picture.level, picture.title)
    changes = "".join(html.paragraph(f"{what}: {s}") for what, s in picture.changes.items())
    return f"<h2>Graph</h2>{html.paragraph(picture.note)}{changes}{graph}"


def _recipe(recipe: str) -> str:
    lines = [line for line in recipe[:_LONGEST].splitlines() if line and line[0] != "#"]
    return "<h2>Recipe</h2><pre>" + "\n".join(html.text(line, 2000) for line in lines) + "</pre>"


def _versions(versions: Mapping[str, Any]) -> str:
    rows = []
    for key, value in versions.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{k} {html.setting(v)}" for k, v in value.items())
        else:
            shown = html.setting(value)
        rows.append([f"<th>{html.text(key, 30)}</th>", f"<td>{html.text(shown, 1000) or '–'}</td>"])
    return f"<h2>Versions</h2>{html.table(rows)}" if rows else ""
