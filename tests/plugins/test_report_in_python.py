"""``ortflex.report``: the page of a Trainer, a History or run folders, in a file and in a notebook."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from ortflex import History, Measures, OrtflexError, Trainer, report
from tests import models
from tests.training import make, regression

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    made = make(models.mlp(), backend="fused", epochs=3, callbacks=[Measures()], metrics=["mae"])
    made.fit(*regression(features=6), validation_data=0.2)
    return made


def test_the_page_of_a_trainer_has_what_is_known(trainer: Trainer, tmp_path: Path) -> None:
    page = report(trainer, tmp_path / "run.html", title="<My run>")
    assert (tmp_path / "run.html").read_text("utf-8") == page.html
    for part in ("Loss", "Validation: mae", "Gradient norm", "Weights, before and after", "Graph"):
        assert part in page.html
    assert "&lt;My run&gt;" in page.html
    assert "epochs = 3" in page.html
    assert "fused" in page.html
    assert "http" not in page.html.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_the_page_of_a_history_has_the_curves(trainer: Trainer) -> None:
    page = report(trainer.history_)
    assert "Validation: mae" in page.html
    assert "Graph" not in page.html
    assert "No epoch was finished." in report(History()).html
    large = History(({"epoch": 1, "loss": float("inf")}, {"epoch": 2, "loss": 1e300}))
    assert "<svg" in report(large).html


def test_a_notebook_shows_the_page_in_a_frame(trainer: Trainer) -> None:
    page = report(trainer.history_)
    shown = page._repr_html_()
    assert shown.startswith("<iframe")
    assert html.unescape(shown.split('srcdoc="')[1].removesuffix('"></iframe>')) == page.html


@pytest.mark.parametrize("what", [3, None, [3], "not-there", []])
def test_other_things_are_refused(what: Any, trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(OrtflexError):
        report(what)
    with pytest.raises(OrtflexError, match="html"):
        report(trainer.history_, tmp_path / "run.txt")
    assert not list(tmp_path.iterdir())
