"""What a person sees of a Trainer and of a training: texts, bars, lines, tables, plots, traces."""

from __future__ import annotations

import html.parser
import json
import logging
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    ConfigError,
    History,
    OrtflexError,
    Trainer,
    epoch_summary,
    internals_of,
    list_checkpoints,
    text_table,
)
from ortflex_core.training.views.progress import Display
from ortflex_core.training.views.summary import html_table
from tests import models
from tests.training import make, regression

X, Y = regression(rows=40)


class Cells(html.parser.HTMLParser):
    """The texts of the cells of HTML tables, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        self._inside = tag in ("td", "th")
        if self._inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def line(epoch: int, **values: float) -> dict[str, float]:
    return {"epoch": epoch, "loss": 1 / epoch, "penalty": 0.0, "rows": 40} | values


# ---------------------------------------------------------------------- Trainer


def test_a_trainer_says_what_it_trains_with_what() -> None:
    """Counted here from the model itself; the backend is known after the first batch."""
    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.02, "params": ["!b1"]}
    trainer = make(models.mlp(), backend="fused", metrics=["r2"], penalty="l2", **options)
    sizes = {name: array.size for name, array in trainer.get_state().items()}
    every = {i.name: math.prod(i.dims) for i in models.mlp().graph.initializer}
    assert set(every) - set(sizes) == {"b1"}
    counts = f"{len(sizes)} of {len(every)} tensors, {sum(sizes.values())} of {sum(every.values())}"
    assert counts in repr(trainer)
    assert "squared_error on Y; adam, learning rate 0.02" in repr(trainer)
    assert "\n" not in repr(trainer)
    assert "chosen when the data are known" in repr(trainer)
    x, y = regression(features=6)
    trainer.fit(x, y)
    assert "fused, on cpu" in repr(trainer)
    text = str(trainer.summary())
    for name, size in every.items():
        row = next(row for row in text.splitlines() if row.startswith(f"{name} "))
        assert f" {size} " in row
        assert row.rstrip().endswith("yes") == (name != "b1")
    rows = Cells(trainer._repr_html_()).rows
    assert ["penalty", "l2"] in rows
    facts = trainer.summary().facts
    assert facts["inputs"] == "X: float32[N, 6]"
    assert facts["outputs"].startswith("Y: float32[")
    assert sorted(row[0] for row in rows if row[0] in every) == sorted(every)


def test_names_of_a_file_do_not_become_markup() -> None:
    assert html_table(["<i>"], [["<script>\x1b[2J"]]).count("<script>") == 0
    assert Cells(html_table(["a"], [["<script>"]])).rows == [["a"], ["<script>"]]
    assert "\x1b" not in "".join(text_table([["\x1b[2J", "b"]]))


# ---------------------------------------------------------------------- progress


def fitted(capfd: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    make(models.linear(), epochs=3, backend="fused", **options).fit(X, Y, validation_data=0.25)
    captured = capfd.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_line_an_epoch_where_there_is_no_terminal(capfd: Any, caplog: Any) -> None:
    lines = fitted(capfd, progress=None, metrics=["r2"])
    assert lines[0].startswith("training 2 tensors with 6 numbers")
    assert [text.split(":")[0] for text in lines[1:]] == ["epoch 1", "epoch 2", "epoch 3"]
    assert all("validation_r2" in text and "penalty" not in text for text in lines[1:])
    assert fitted(capfd, progress=False) == []
    with caplog.at_level(logging.INFO, logger="ortflex"):  # then the logging has them
        assert fitted(capfd, progress=None) == []
    assert sum(r.getMessage().startswith("epoch ") for r in caplog.records) == 3
    assert sum("training 2 tensors" in r.getMessage() for r in caplog.records) == 1


def test_the_callback_that_prints_epochs_replaces_the_lines(capfd: Any) -> None:
    make(models.linear(), epochs=2, callbacks=["epoch_line"], progress=None).fit(X, Y)
    captured = capfd.readouterr()
    assert captured.out.count("epoch ") == 2
    assert captured.err.count("epoch ") == 0


class Notebook:
    """A stand-in of IPython in a kernel; it keeps every picture that is displayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
        self.shown: list[str] = []
        top, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        top.get_ipython = lambda: types.SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
        display.HTML = str  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", top)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, picture: str, display_id: bool) -> Notebook:
        self.shown.append(picture)
        return self

    def update(self, picture: str) -> None:
        self.shown.append(picture)


def test_a_notebook_has_a_bar_that_ends_full(monkeypatch: Any, capfd: Any) -> None:
    notebook = Notebook(monkeypatch, object())
    trainer = make(models.linear(), epochs=3, backend="fused", progress=None, batch_size=10)
    trainer.fit(X, Y, validation_data=0.25)
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("training 2 tensors")
    assert captured.out.count("\n") == 1
    last = notebook.shown[-1]
    assert last.startswith("epoch 3 ")
    assert 'value="9" max="9"' in last
    assert "validation_loss" in last


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: Any, capfd: Any) -> None:
    notebook = Notebook(monkeypatch, None)
    assert len(fitted(capfd, progress=None)) == 4
    assert notebook.shown == []


def test_a_bar_ends_full_and_has_the_validation(capfd: Any) -> None:
    text = "\n".join(fitted(capfd, progress=True, batch_size=10))
    assert "9/9" in text
    assert "validation_loss" in text


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_cuts_the_text_not_the_numbers(
    capfd: Any, monkeypatch: Any, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer = make(models.linear(), progress=True, epochs=30, batch_size=4, metrics=["r2", "mae"])
    trainer.fit(X, Y, validation_data=(X, Y))
    last = capfd.readouterr().err.rstrip().splitlines()[-1]
    assert re.match("epoch 30 +━{14} 300/300 loss [0-9.]+ ", last)
    assert "…" in last
    assert len(last) <= columns


def test_an_endless_training_has_a_bar_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, object())
    with Display(None, None) as display:
        display.show(7, 0, 0.5, 0.1, 70)
    assert "<progress ></progress> 7 steps, loss 0.5" in notebook.shown[-1]


# ---------------------------------------------------------------------- History


def test_a_history_is_one_line_and_a_table() -> None:
    history = History((line(1, validation_r2=0.5), line(2, validation_r2=0.75)), interrupted=True)
    cut = History((line(1, validation_r2=0.5), line(2)), interrupted=True)  # within its second
    for one, text in (
        (history, "2 epochs: loss 1 → 0.5, validation_r2 0.5 → 0.75, interrupted"),
        (cut, "2 epochs: loss 1 → 0.5, validation_r2 0.5, interrupted"),
        (History((line(1),)), "1 epoch: loss 1"),
        (History(), "0 epochs"),
    ):
        assert repr(one) == f"<History of {text}>"
    head = ["epoch", "loss", "rows", "validation_r2"]
    rows = Cells(history._repr_html_()).rows
    assert rows == [head, ["1", "1", "40", "0.5"], ["2", "0.5", "40", "0.75"]]
    assert "interrupted" in history._repr_html_()


def test_the_table_of_a_long_history_is_cut_in_its_middle() -> None:
    rows = Cells(History(tuple(line(k) for k in range(1, 501)))._repr_html_()).rows
    assert [rows[1][0], rows[31][0], rows[-1][0]] == ["1", "…", "500"]
    assert len(rows) == 62


def test_epochs_are_numbered_from_one_everywhere(tmp_path: Path) -> None:
    trainer = make(models.linear(), epochs=2, backend="fused")
    trainer.fit(X, Y).to_csv(tmp_path / "history.csv")
    history = trainer.fit(X, Y)
    assert repr(history["epoch"]) == "[1, 2]"  # integers
    text = (tmp_path / "history.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in text] == ["epoch", "1", "2"]
    assert epoch_summary(history.epochs[0]).startswith("epoch 1: ")


def test_a_resumed_training_numbers_its_epochs_on(tmp_path: Path) -> None:
    """Also from a checkpoint of version 0.1, whose lines count from 0."""
    spec = {"name": "checkpoint", "folder": str(tmp_path / "c"), "best": False}
    make(models.linear(), epochs=2, backend="fused", callbacks=[spec]).fit(X, Y)
    folder = max(list_checkpoints(tmp_path / "c"))
    again = Trainer.resume(folder, epochs=4, progress=False, callbacks=[])
    position = internals_of(again).live.standing.position
    assert position is not None
    for record in position.records:
        record["epoch"] -= 1  # type: ignore[index]
    assert again.fit(X, Y)["epoch"] == [1, 2, 3, 4]


def test_to_frame_is_indexed_by_the_epoch() -> None:
    pandas = pytest.importorskip("pandas")
    frame = History((line(1), line(2, validation_loss=0.5))).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [1, 2]
    assert (frame.index.name, list(frame["loss"])) == ("epoch", [1.0, 0.5])
    assert json.dumps(list(frame["rows"])) == "[40, 40]"
    assert math.isnan(frame["validation_loss"][1])


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, method in (("pandas", "to_frame"), ("matplotlib", "plot")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"History.{method} needs .*pip install"):
            getattr(History((line(1),)), method)()


def test_plot_draws_the_columns_over_epochs_from_one() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    history = History((line(1, validation_loss=3.0), line(2, validation_loss=2.0)))
    axes = history.plot(ax=figure.Figure().add_subplot())
    drawn = {c.get_label(): (list(c.get_xdata()), list(c.get_ydata())) for c in axes.lines}
    assert drawn == {"training": ([1, 2], [1.0, 0.5]), "validation": ([1, 2], [3.0, 2.0])}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "loss")
    axes = history.plot("validation_loss", ax=figure.Figure().add_subplot())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "validation_loss")
    with pytest.raises(ConfigError, match="no column 'validation_los'; did you mean"):
        history.plot("validation_los")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = len(pyplot.get_fignums())
    axes = history.plot()  # in a figure of its own
    assert len(pyplot.get_fignums()) == before + 1
    pyplot.close(axes.figure)


def test_a_column_that_no_epoch_has_is_an_error_with_the_nearest() -> None:
    """NaN would look like a training that diverged."""
    history = History((line(1, validation_loss=3.0), line(2)))
    with pytest.raises(ConfigError, match="no column 'val_loss'; did you mean 'validation_loss'"):
        _ = history["val_loss"]
    assert np.isnan(history["validation_loss"][1])
    assert History(())["loss"] == []


def test_a_number_is_an_epoch_and_a_name_is_a_column() -> None:
    rows = tuple(map(line, (1, 2, 3)))
    history = History(rows)
    assert history[-1] == rows[-1] == history[np.int64(2)]
    assert history[1:]["loss"] == [1 / 2, 1 / 3]
    assert isinstance(history[1:], History)
    for number in (3, -4):
        with pytest.raises(OrtflexError, match="3 epochs, so it has no entry") as error:
            history[number]
        assert isinstance(error.value, IndexError)
    with pytest.raises(OrtflexError, match="columns by name"):
        history[None]  # type: ignore[call-overload]


# ORTFLEX_TRACE_PLUGINS ----------------------------------------------------------------------------


LINE = re.compile(
    r"ortflex: +\d+\.\d{3} ms  (\w+) of the ([a-z ]+) '(\w+)' \(\S+, from (\S+) \S+\)"
)


def train() -> None:
    x = np.ones((8, 3), np.float32)
    y = np.ones((8, 1), np.float32)
    options = {"loss": "squared_error", "optimizer": "adam", "schedule": "cosine", "epochs": 1}
    callbacks = ["early_stopping", "epoch_line"]
    Trainer(models.linear(3), progress=False, callbacks=callbacks, **options).fit(x, y)


def test_a_trace_names_call_component_and_distribution(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("ORTFLEX_TRACE_PLUGINS", "1")
    train()
    lines = capsys.readouterr().err.splitlines()
    calls = {match.groups() for line in lines if (match := LINE.fullmatch(line))}
    assert {
        ("per_sample", "loss", "squared_error", "ortflex"),
        ("update", "optimizer", "adam", "ortflex"),
        ("available", "device", "cpu", "ortflex"),
        ("rate", "schedule", "cosine", "ortflex"),
        ("train_start", "callback", "early_stopping", "ortflex"),
    } <= calls
    (shared,) = (line for line in lines if " epoch_end of " in line)
    assert "'early_stopping'" in shared
    assert "'epoch_line'" in shared
    assert any(call == "build" and kind == "backend" for call, kind, _, _ in calls)


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_is_printed(value: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("ORTFLEX_TRACE_PLUGINS", value)
    train()
    assert "ortflex:" not in capsys.readouterr().err
