"""The backend c next to fused: the same losses, weights and state, with what a Trainer does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Trainer, Unsupported
from ortflex_plugins.c import compiler
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.plugins.compiled_training import CompiledTraining, agree
from tests.plugins.fitted_workloads import fitted

pytestmark = pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))


class TestTraining(CompiledTraining):
    backend = "c"


def test_c_runs_the_steps_of_an_epoch_at_once() -> None:
    trainer = fitted("W5", "c", epochs=3, steps=9)
    # Eight whole batches and the shorter one, three times.
    assert trainer.engine.steps_per_run == 8
    assert trainer.engine.counters() == {"steps": 27, "runs": 6, "compiled": 2}


def test_steps_at_once_and_one_by_one_give_the_same_bits() -> None:
    states = [
        fitted("W1", {"name": "c", "steps_per_run": count}, epochs=2, steps=5).get_state()
        for count in (1, 5)
    ]
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name])


def test_large_products_are_left_to_fused() -> None:
    with pytest.raises(Unsupported, match="million operations"):
        fitted("W4", "c", epochs=1, steps=1)


def test_two_engines_in_one_process_have_states_of_their_own() -> None:
    one, two = (fitted("W5", "c", epochs=1, steps=4) for _ in range(2))
    before = two.get_state()
    x, y, _ = data(WORKLOADS["W5"])
    one.step((x[:15], y[:15]))
    for name, array in two.get_state().items():
        np.testing.assert_array_equal(array, before[name])


def embedding() -> Any:
    """Y = mean of rows of a table by the tokens X."""
    table = np.random.default_rng(0).standard_normal((5, 2))
    nodes = "rows = Gather(table, X) Y = ReduceMean <axes = [1], keepdims = 0> (rows)"
    return models.parsed(nodes, {"table": table}, "int64[N, 3] X", "float[N, 2] Y")


def test_an_index_out_of_range_is_an_error_and_not_another_address() -> None:
    options: dict[str, Any] = {"loss": "squared_error", "batch_size": 4, "progress": False}
    trainer = Trainer(embedding(), backend="c", params=["table"], **options)
    x = np.array([[0, 1, 2], [3, 4, -5], [1, 1, 1], [-1, -2, 0]])
    y = np.ones((4, 2), np.float32)
    trainer.fit(x, y)
    other = Trainer(embedding(), backend="fused", params=["table"], **options)
    other.fit(x, y)
    agree(trainer, other)
    for wrong in (5, -6, 2**40):
        with pytest.raises(DataError, match="outside"):
            trainer.fit(np.where(x == 4, wrong, x), y)


def recurrent() -> Any:
    """Y = a product with the last state of a GRU over the steps of X [N, 6, 3]."""
    rng = np.random.default_rng(0)
    sizes = {"W": (1, 12, 3), "R": (1, 12, 4), "B": (1, 24), "out": (4, 2)}
    weights = {n: rng.standard_normal(s) / 2 for n, s in sizes.items()}
    nodes = """
        T = Transpose <perm = [1, 0, 2]> (X)
        every, H = GRU <hidden_size = 4, linear_before_reset = 1> (T, W, R, B)
        S = Squeeze(H, axis)
        Y = MatMul(S, out)
    """
    ends = "float[N, 6, 3] X", "float[N, 2] Y"
    return models.parsed(nodes, {**weights, "axis": np.array([0])}, *ends)


def test_a_recurrent_network_trains_as_on_fused() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, 6, 3)).astype(np.float32)
    y = rng.standard_normal((8, 2)).astype(np.float32)
    trained = []
    options: dict[str, Any] = {"loss": "squared_error", "optimizer": "adam", "batch_size": 4}
    for backend in ("c", "fused"):
        trainer = Trainer(recurrent(), **options, epochs=2, backend=backend, progress=False)
        trainer.fit(x, y)
        trained.append(trainer)
    agree(*trained)


def test_names_of_the_model_are_not_in_the_file() -> None:
    """A model's names are data: in C they are numbers."""
    from ortflex_plugins.backends.c.steps import part_of

    model = network(WORKLOADS["W5"])
    hostile = '*/ }; int main(void) { system("x"); } /* \\\n#include "y"'
    for holder in (model.graph.node[0].input, model.graph.node[0].output):
        for k, name in enumerate(holder):
            holder[k] = f"{hostile} {name}"
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = f"{hostile} {value.name}"
    x, y, _ = data(WORKLOADS["W5"])
    sources = []
    for proto in (model, network(WORKLOADS["W5"])):
        options: dict[str, Any] = {"loss": "squared_error", "batch_size": 15, "progress": False}
        trainer = Trainer(proto, backend="c", **options)
        trainer.fit(x[:30], y[:30])
        engine: Any = trainer.engine
        sources.append(part_of(engine.problem, "step", 15).generated.source)
    assert "system" not in sources[0]
    assert 'include "y' not in sources[0]
    assert sources[0] == sources[1]
