"""The kit of edits rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Edit, EditKit, Editor, number, setting
from ortflex_core.testing import running
from tests.core.planted import Planted, PlantedMistakes, Subject

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Prune(Edit):
    """Sets small numbers of matrices to 0."""

    name: ClassVar[str] = "prune"
    bound: float = setting(default=0.1, validator=number(gt=0))

    def apply(self, editor: Editor) -> None:
        for name, spec in editor.initializers.items():
            if len(spec.shape or ()) == 2:
                values = editor.constant(name)
                editor.replace(name, np.where(np.abs(values) < self.bound, 0, values))


class Everything(Prune):
    """Prunes biases, too."""

    def apply(self, editor: Editor) -> None:
        for name in editor.initializers:
            values = editor.constant(name)
            editor.replace(name, np.where(np.abs(values) < self.bound, 0, values))


class InPlace(Prune):
    """Changes what the model knows of itself, which others may read later."""

    def apply(self, editor: Editor) -> None:
        super().apply(editor)
        editor.model.initializers.pop("b1")


class Counting(Prune):
    """Depends on how often it was applied."""

    calls: ClassVar[list[int]] = []

    def apply(self, editor: Editor) -> None:
        super().apply(editor)
        self.calls.append(1)
        editor.replace("b1", editor.constant("b1") + len(self.calls))


class Once(Prune):
    """Has another network when it is applied again."""

    calls: ClassVar[list[int]] = []

    def apply(self, editor: Editor) -> None:
        super().apply(editor)
        self.calls.append(1)
        if len(self.calls) > 1:
            next(n for n in editor.graph.node if n.op_type == "Tanh").op_type = "Relu"


class Careless(Prune):
    """Assumes the names of a file."""

    def apply(self, editor: Editor) -> None:
        matrices = {n: s for n, s in editor.initializers.items() if len(s.shape or ()) == 2}
        editor.replace("W1", editor.constant({n: n for n in matrices}["W1"]))


class Broken(Prune):
    """Divides by zero."""

    def apply(self, editor: Editor) -> None:
        for name in editor.initializers:
            editor.replace(name, np.full_like(editor.constant(name), np.nan))


def reference(before: Any, after: Any, x: Any) -> Any:
    w1, w2 = (np.where(np.abs(before[n]) < 0.1, 0, before[n]) for n in ("W1", "W2"))
    return np.tanh(x @ w1 + before["b1"]) @ w2 + before["b2"]


class TestKitOfEdits(PlantedMistakes):
    subjects = (
        Subject(
            EditKit,
            Prune(),
            [
                Planted("test_value", Everything(bound=0.5), "the output of prune"),
                Planted("test_original", InPlace(), "changes its model"),
                Planted("test_determinism", Counting(), "one seed gives two files"),
                Planted("test_errors", Careless(), "KeyError"),
                Planted("test_backends", Broken(), "not finite|nan"),
                Planted("test_resume", Once(), "continued|differ|other"),
            ],
            {"reference": reference, "model": running.network_model()},
        ),
    )
