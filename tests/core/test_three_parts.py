"""Rows and batches of three parts: the third is sample_weight, as in Keras; datasets of torch may differ.

Only its place makes a part a weight, so a run says how it is read, and an error about labels or weights
says it, too. Arguments with names, and mappings with the key ``sample_weight``, need no such line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, DataError, Trainer
from tests import models
from tests.training import same

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 5)).astype(np.float32)
Y = X[:, :1] * 2
THREE = re.compile(r"parts of a row or batch are read as \(X, y, sample_weight\)")
LINE = "is its sample_weight"


class Rows:
    """A dataset of rows, as torch has them."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return tuple(part[row] for part in self.parts)


FORMS: dict[str, Callable[..., Any]] = {
    "rows": Rows,
    "batches": lambda *parts: [parts, parts],
    "a generator": lambda *parts: (parts for _ in range(2)),
    "a buffer": lambda *parts: Batches([parts, parts], buffer=8),
}
CALLS: dict[str, Callable[[Trainer, Any], Any]] = {
    "fit": Trainer.fit,
    "evaluate": Trainer.evaluate,
    "find_rate": lambda t, data: t.find_rate(data, steps=3),
}
WRONG = {
    "two inputs": (X, X, Y),
    "no weights": (X, Y, -np.abs(Y)),
    "a word": (X, Y, Y.astype(str)),
    "fewer": (X, Y, Y[:5]),
    "labels that do not fit": (X, Y[:, :, None], Y),
}


def made(**arguments: Any) -> Trainer:
    given = {"epochs": 1, "progress": None, "receipt": False, "batch_size": 6, **arguments}
    return Trainer(models.linear(), loss="squared_error", **given)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WRONG)
def test_an_error_about_labels_or_weights_says_how_three_parts_are_read(
    case: str, form: str, call: str
) -> None:
    if case == "fewer" and form == "rows":
        pytest.skip("each row has all parts")
    with pytest.raises(DataError) as error:
        CALLS[call](made(), FORMS[form](*WRONG[case]))
    assert len(THREE.findall(str(error.value))) == 1
    with pytest.raises(DataError, match=THREE):
        made().step(WRONG[case])


@pytest.mark.parametrize("form", FORMS)
def test_a_run_says_that_the_third_part_is_a_weight(form: str, capsys: Any) -> None:
    weights = np.arange(12, dtype=np.float32)
    made().fit(FORMS[form](X, Y, weights))
    assert capsys.readouterr().err.count(LINE) == 1


@pytest.mark.parametrize("form", FORMS)
def test_two_parts_and_named_ones_need_no_line(form: str, capsys: Any) -> None:
    weights = np.ones(12, np.float32)
    made().fit(FORMS[form](X, Y))
    made().fit(X, Y, weights)
    made().fit([{"X": X, "y": Y, "sample_weight": weights}])
    assert LINE not in capsys.readouterr().err
    for call in (lambda: made().fit(X, X), lambda: made().fit(FORMS[form](X, X))):
        with pytest.raises(DataError) as error:
            call()
        assert not THREE.search(str(error.value))
    with pytest.raises(DataError) as error:  # not about labels or weights
        made().fit(FORMS[form](X[:, :4], Y, weights))
    assert not THREE.search(str(error.value))


def test_the_weights_are_those_of_the_rows() -> None:
    """The same training as with the argument, to the bit."""
    weights = np.linspace(0, 2, 12, dtype=np.float32)
    one, other = made(seed=3), made(seed=3)
    one.fit(Rows(X, Y, weights))
    other.fit(X, Y, weights)
    same(one.get_state(), other.get_state(), 0)
