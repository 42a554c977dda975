"""What cells of a notebook show, in a real kernel where there is one."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import onnx
import pytest

from ortflex_core.kernel.notebook import displayed_briefly, one_line
from tests import models
from tests.training import make, regression

X, Y = regression(rows=40)

CELLS = [
    "import ortflex\nfrom tests import models\nfrom tests.training import regression\n"
    "X, Y = regression(rows=40)\n"
    "trainer = ortflex.Trainer(models.linear(), loss='squared_error', epochs=3)",
    "trainer.fit(X, Y)",
    "trainer.history_.plot()",
    "trainer.export('trained.onnx')",
    "print(trainer.export('again.onnx'))",
    "ortflex.gradient_model(models.linear(), wrt=['coef'])",
    "repr(trainer)",
    "ortflex.Trainer(models.linear(), loss='squared_error', lr=0.1)",
]


def executed(cells: list[str], folder: Path) -> list[list[Any]]:
    """The outputs of each cell."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook()
    root = str(Path(__file__).parents[2])
    head = f"import os, sys\nos.chdir({str(folder)!r})\nsys.path.insert(0, {root!r})\n%matplotlib inline"
    book.cells = [nbformat.v4.new_code_cell(text) for text in (head, *cells)]
    nbclient.NotebookClient(book, timeout=300, allow_errors=True).execute()
    return [list(cell.outputs) for cell in book.cells[1:]]


def shown(outputs: list[Any]) -> str:
    """The plain text of outputs, errors included."""
    return "\n".join(
        o.get("text") or o.get("data", {}).get("text/plain") or "\n".join(o.get("traceback", []))
        for o in outputs
    )


@pytest.mark.once
def test_cells_show_what_a_reader_wants(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = executed(CELLS, tmp_path)
    _, fitted, plotted, exported, printed, gradient, line, wrong = made
    assert not [o for cell in made for o in cell if o.get("name") == "stderr"]
    assert "training 2 tensors with 6 numbers" in shown(fitted)
    assert "<Axes" not in shown(plotted)
    assert [o for o in plotted if "image/png" in o.get("data", {})]
    assert shown(exported).startswith("<ModelProto ")
    assert len(shown(exported)) < 120
    assert "initializer {" in shown(printed)  # print shows all
    assert shown(gradient).startswith("<ModelProto ")
    assert "fitted: 3 epochs: loss " in shown(line)
    assert "did you mean 'learning_rate'?" in shown(wrong)
    assert len(shown(wrong).splitlines()) < 15


class Shell:
    """A stand-in of IPython's shell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
        self.kernel = kernel
        formatter = types.SimpleNamespace(type_printers={})
        self.display_formatter = types.SimpleNamespace(formatters={"text/plain": formatter})
        self.printers: dict[type, Any] = formatter.type_printers
        ipython = types.ModuleType("IPython")
        ipython.get_ipython = lambda: self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)


def test_models_are_one_line_in_ipython_unless_the_user_displays_them(monkeypatch: Any) -> None:
    shell = Shell(monkeypatch, None)
    exported = make(models.linear()).export()
    pieces: list[str] = []
    printer = types.SimpleNamespace(text=pieces.append)
    shell.printers[onnx.ModelProto](exported, printer, False)
    assert pieces == [one_line(exported)]
    assert "initializer" in repr(exported)  # outside of IPython nothing changes
    own = shell.printers[onnx.ModelProto] = object()
    displayed_briefly(models.linear())
    assert shell.printers[onnx.ModelProto] is own


@pytest.mark.parametrize(("kernel", "stream"), [(object(), "out"), (None, "err")])
def test_what_is_trained_goes_to_the_output_of_a_cell(
    kernel: object, stream: str, monkeypatch: Any, capfd: Any
) -> None:
    from ortflex_core.training.views.progress import say

    Shell(monkeypatch, kernel)
    say("training 2 parameters")
    captured = capfd.readouterr()
    assert getattr(captured, stream) == "training 2 parameters\n"
    assert captured.out + captured.err == "training 2 parameters\n"


def test_a_trainer_shows_that_it_was_fitted() -> None:
    trainer = make(models.linear(), epochs=3)
    assert "fitted" not in repr(trainer)
    assert "fitted" not in str(trainer.summary())
    history = trainer.fit(X, Y)
    last = f"loss {history['loss'][0]:.4g} → {history['loss'][-1]:.4g}"
    assert f"fitted: 3 epochs: {last}" in repr(trainer)
    assert f"3 epochs: {last}" in str(trainer.summary())


def test_names_of_a_file_cannot_break_the_line() -> None:
    model = models.linear()
    model.graph.name = "g\x1b[2J\n" + "x" * 5000
    assert "\n" not in one_line(model)
    assert "\x1b" not in one_line(model)
    assert len(one_line(model)) < 2100
