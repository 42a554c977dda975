"""What a Trainer shows: in the cells of a notebook, and to those who type a dot.

The cells run in a real kernel where there is one; ``internals_of`` has the parts for those who look inside.
"""

from __future__ import annotations

import copy
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Internals, internals_of
from ortflex_core.kernel.notebook import displayed_briefly, one_line
from ortflex_core.training.views.progress import say
from tests import models
from tests.training import make, regression

X, Y = regression(rows=40)
PUBLIC = {
    *("fit", "step", "predict", "evaluate", "per_sample_losses", "calibrate", "find_rate"),
    *("summary", "describe", "get_state", "set_state", "update_bn"),
    *("save", "resume", "restore", "from_recipe", "from_hub", "push_to_hub"),
    *("export", "export_step", "export_adapter", "export_base", "save_onnx_graph"),
    *("model", "optimizer", "schedule", "device", "learning_rate", "plugins", "progress"),
    *("batch_size", "epochs", "shuffle", "seed"),
    *("history_", "train_losses_", "validation_losses_", "backend_"),
    *("engine", "folder", "rank"),
}
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


def test_public_attributes_of_a_trainer_are_those_that_users_use() -> None:
    trainer = make(models.linear())
    for _ in range(2):
        assert {name for name in dir(trainer) if not name.startswith("_")} == PUBLIC
        trainer.fit(X, Y)


def test_internals_follow_the_training() -> None:
    trainer = make(models.linear())
    inner = internals_of(trainer)
    assert isinstance(inner, Internals)
    assert inner.problem.terms == ()
    trainer.fit(X, Y)
    assert internals_of(trainer) is inner
    assert inner.problem.terms
    assert inner.engine is trainer.engine
    assert inner.loop is None
    assert inner.plugins is trainer.plugins


def test_internals_of_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a Trainer, got 'a name'"):
        internals_of("a name")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_copies_have_internals_of_their_own(copied: Any) -> None:
    trainer = make(models.linear())
    trainer.fit(X, Y)
    again = copied(trainer)
    assert internals_of(again) is not internals_of(trainer)
    np.testing.assert_array_equal(again.predict(X), trainer.predict(X))
