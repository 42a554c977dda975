"""Tracebacks of users' mistakes are short, in Python and in notebooks; those of bugs are whole."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex import Recipe, Trainer, check_model, compare
from ortflex_core import Batches, BrokenPlugin, OrtflexError, apply_state, hook
from tests import models
from tests.training import make, regression

X, Y = regression()


def caught(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def frames(error: BaseException) -> list[str]:
    """The functions in a traceback, after the two of this module that every error passes."""
    names = [f.name for f in traceback.extract_tb(error.__traceback__)]
    return names[names.index("caught") + 2 :]


def text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


MISTAKES: dict[str, Callable[[], Any]] = {
    "an unknown loss": lambda: Trainer(models.linear(), loss="squard_error"),
    "several wrong arguments": lambda: make(models.linear(), optimizer="addam", device="gpu"),
    "labels of strings": lambda: make(models.linear()).fit(X, np.array(["a"] * len(X))),
    "a wrong number of columns": lambda: make(models.linear()).fit(X[:, :3], Y),
    "no labels": lambda: make(models.linear()).fit(X),
    "prediction on a wrong shape": lambda: make(models.linear()).predict(X[:, :3]),
    "a weight of another shape": lambda: make(models.linear()).set_state({"W": np.zeros(3)}),
    "a loss that diverges": lambda: make(models.linear(), learning_rate=1e20).fit(X, Y),
    "an engine before there is one": lambda: make(models.linear()).save_onnx_graph(),
    "a model that does not exist": lambda: check_model("no_such_file.onnx"),
    "a checkpoint that does not exist": lambda: Trainer.resume("no_such_folder"),
    "a recipe that does not exist": lambda: Recipe.load("no_such_file.toml"),
    "a comparison of nothing": lambda: compare(make(models.linear()), X, Y, backends=["no_such"]),
    "a state that does not exist": lambda: apply_state("no.onnx", "no.safetensors"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_no_frame_of_ours(mistake: str) -> None:
    error = caught(MISTAKES[mistake])
    assert isinstance(error, OrtflexError)
    assert frames(error) in ([], ["make"])
    assert "During handling" not in text(error)
    assert "direct cause" not in text(error)


def test_estimators_have_short_tracebacks() -> None:
    pytest.importorskip("sklearn")
    from ortflex import OrtClassifier, OrtRegressor

    for estimator in (OrtRegressor(optimizer="addam"), OrtClassifier(loss="hing")):
        error = caught(lambda e=estimator: e.fit(X, (Y[:, 0] > 0).astype(int)))
        assert isinstance(error, ValueError)
        assert frames(error) == []


def test_frames_of_the_users_callback_stay() -> None:
    class Changes:
        @hook
        def steps_end(self, trainer: Any) -> None:
            trainer.set_state({})

    error = caught(lambda: make(models.linear(), callbacks=[Changes()]).fit(X, Y))
    assert frames(error) == ["steps_end"]


def test_exceptions_of_the_user_stay() -> None:
    """One that is the cause, and one that is handled where ours is raised."""

    def read() -> Any:
        raise KeyError("no such column")
        yield X, Y

    error = caught(lambda: make(models.linear()).fit(Batches(read)))
    assert "no such column" in text(error)
    assert "read" in text(error)

    def handle() -> None:
        try:
            int("x")
        except ValueError:
            make(models.linear()).fit(X)

    assert "invalid literal for int()" in text(caught(handle))


def test_a_bug_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflex_core.training import fit

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(fit, "train", broken)
    whole = ["short", "fit", "fit", "_fit", "broken"]
    assert frames(caught(lambda: make(models.linear()).fit(X, Y))) == whole


def test_a_broken_plugin_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortflex_plugins.schedules.decay import Constant

    def rate(*_: Any) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Constant, "rate", rate)
    error = caught(lambda: make(models.linear()).fit(X, Y))
    assert isinstance(error, BrokenPlugin)
    assert len(frames(error)) > 3
    assert "ZeroDivisionError" in text(error)


@pytest.mark.parametrize("how", ["environment", "logging"])
def test_whole_tracebacks_on_request(how: str, monkeypatch: Any, caplog: Any) -> None:
    if how == "environment":
        monkeypatch.setenv("ORTFLEX_DEBUG", "1")
    else:
        caplog.set_level(logging.DEBUG, "ortflex")
    assert len(frames(caught(MISTAKES["a wrong number of columns"]))) > 4
    assert "direct cause" in text(caught(MISTAKES["a model that does not exist"]))


def test_public_functions_keep_their_signatures_and_documentation() -> None:
    assert "learning_rate" in inspect.signature(Trainer).parameters
    assert list(inspect.signature(Trainer.fit).parameters)[:3] == ["self", "X", "y"]
    assert (Trainer.fit.__doc__ or "").startswith("Train on arrays")
    assert next(iter(inspect.signature(Trainer.resume).parameters)) == "folder"


def test_warnings_point_at_the_caller() -> None:
    sklearn = pytest.importorskip("sklearn.exceptions")
    from ortflex import OrtRegressor

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        OrtRegressor(max_iter=11, tol=0.0, learning_rate=1e-4).fit(X, Y[:, 0])
    [warning] = [w for w in seen if w.category is sklearn.ConvergenceWarning]
    assert Path(warning.filename) == Path(__file__)
