"""Labels and a tensor of which one has a single value along an axis of unknown size: never broadcast.

The class: a call that reads labels, where numpy's rules would make equal shapes of different ones and the
result would be a wrong number without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

from ortflex_core import DataError, Trainer
from tests import models

ROWS = 8
CALLS: dict[str, Callable[[Trainer, Any, Any], Any]] = {
    "step": lambda trainer, x, y: trainer.step((x, y)),
    "fit": lambda trainer, x, y: trainer.fit(x, y),
    "batches": lambda trainer, x, y: trainer.fit([(x, y)]),
    "validation": lambda trainer, x, y: (
        trainer.fit(x, x[..., :1], validation_data=(x, y))
        if isinstance(x, np.ndarray)
        else trainer.fit(x, x["X"][..., :1], validation_data=(x, y))
    ),
    "evaluate": lambda trainer, x, y: trainer.evaluate(x, y),
    "per_sample_losses": lambda trainer, x, y: trainer.per_sample_losses(x, y),
}


def network(inputs: int) -> bytes:
    """A product for each of any number of positions.

    The sum of two inputs has an axis whose name no input has: its size is known after a run only.
    """
    nodes = [helper.make_node("MatMul", ["H" if inputs == 2 else "X", "W"], ["Y"], name="product")]
    values = [models.floats("X", "N", "T", 3)]
    if inputs == 2:
        nodes.insert(0, helper.make_node("Add", ["X", "Z"], ["H"], name="sum"))
        values.append(models.floats("Z", "N", "S", 3))
    made = models.model(nodes, values, [models.floats("Y", "N", "M", 1)], {"W": np.ones((3, 1))})
    return bytes(made.SerializeToString())


def rows(inputs: int, positions: int, labels: int) -> tuple[Any, Any]:
    x = np.random.default_rng(positions).standard_normal((ROWS, positions, 3)).astype(np.float32)
    return {"X": x, "Z": 0 * x} if inputs == 2 else x, np.full((ROWS, labels, 1), 0.5, np.float32)


def made(inputs: int, loss: str, backend: str = "fused") -> Trainer:
    if backend == "xla":
        pytest.importorskip("jax")
    return Trainer(
        network(inputs), loss=loss, backend=backend, epochs=1, batch_size=ROWS, progress=False
    )


@pytest.mark.parametrize("backend", ["fused", "xla"])
@pytest.mark.parametrize("loss", ["squared_error", "softmax_cross_entropy", "kullback_leibler"])
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("positions", "labels"), [(1, 4), (4, 1)])
def test_one_value_is_not_repeated(
    positions: int, labels: int, call: str, inputs: int, loss: str, backend: str
) -> None:
    trainer = made(inputs, loss, backend)
    with pytest.raises(DataError) as error:
        CALLS[call](trainer, *rows(inputs, positions, labels))
    if loss == "squared_error":
        assert f"[{ROWS}, {labels}, 1]" in str(error.value)
        assert f"[{ROWS}, {positions}, 1]" in str(error.value)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("positions", [1, 4])
def test_equal_shapes_are_compared_once(inputs: int, positions: int) -> None:
    """The name of an input's axis says the size; without one the model is run, once for each shape."""
    trainer = made(inputs, "squared_error")
    x, y = rows(inputs, positions, positions)
    for _ in range(3):
        trainer.step((x, y))
    trainer.fit(x, y, validation_data=(x, y))
    trainer.fit([(x, y), (x, y)])
    assert len(trainer._internals.live.fitting) == inputs - 1
    expected = np.square((x if inputs == 1 else x["X"]) @ trainer.get_state()["W"] - y)
    values = trainer.per_sample_losses(x, y)
    np.testing.assert_allclose(values.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
