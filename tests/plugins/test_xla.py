"""The backend xla next to fused: the same losses, weights and state; recompute=; its operators."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from ortflex_core.compiler.runtime import session
from ortflex_plugins.backends.xla.namespaces import JaxForms
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.translation import ModelFunction
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.plugins.compiled_training import CompiledTraining, fitted
from tests.plugins.damaged_files import WAYS, damage
from tests.plugins.test_operators import as_array, check, standard_cases
from tests.training import make, regression

jax = pytest.importorskip("jax")

SAMPLE = int(os.environ.get("ORTFLEX_TEST_SAMPLE", "8")) * 4


class TestTraining(CompiledTraining):
    backend = "xla"


@pytest.mark.parametrize("name", ["W3", "W8"])
def test_xla_in_bfloat16_follows_the_losses_of_float32(name: str) -> None:
    runs = (fitted(name, "xla", epochs=1, steps=4, precision=p) for p in ("float32", "bf16_mixed"))
    exact, rounded = runs
    np.testing.assert_allclose(rounded.train_losses_, exact.train_losses_, rtol=0.02)
    assert not np.array_equal(rounded.train_losses_, exact.train_losses_)


def test_xla_repeats_a_run_without_float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the run that failed were a copy."""
    failures = []
    real = jax.block_until_ready

    def wait(results: Any) -> Any:
        if not failures:
            failures.append(results)
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: DotThunk: BF16 x BF16 = F32")
        return real(results)

    options = {"epochs": 2, "steps": 3, "precision": "bf16_mixed", "seed": 5}
    monkeypatch.setattr(jax, "block_until_ready", wait)
    found = fitted("W2", "xla", **options)
    monkeypatch.undo()
    assert failures
    exact = fitted("W2", "xla", **{**options, "precision": "float32"})
    np.testing.assert_allclose(found.train_losses_, exact.train_losses_, rtol=0.02)


def test_xla_leaves_the_types_of_other_jax_code_as_they_are() -> None:
    trainer = fitted("W5", "xla")
    assert jax.numpy.arange(3).dtype == np.int32
    assert jax.numpy.asarray(np.float64(1)).dtype == np.float32
    assert trainer.engine.counters()["steps"] == 8


def test_xla_runs_the_steps_of_an_epoch_at_once() -> None:
    trainer = fitted("W5", "xla", epochs=3, steps=9)
    # Eight whole batches and the shorter one, three times.
    assert trainer.engine.steps_per_run == 8
    assert trainer.engine.counters() == {"steps": 27, "runs": 6}


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Path]:
    """A folder where JAX keeps what it compiles."""
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def configure(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    configure(settings)
    yield tmp_path
    configure(before)


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_cache_of_jax_changes_no_result(
    way: str, jax_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What JAX cannot read is compiled again."""

    def trained() -> dict[str, bytes]:
        monkeypatch.setattr(session, "_cache", OrderedDict())  # as in another process
        jax.clear_caches()
        trainer = make(models.mlp((3, 4, 1)), backend="xla", epochs=1, batch_size=4)
        trainer.fit(*regression(rows=12, features=3))
        return {name: array.tobytes() for name, array in trainer.get_state().items()}

    wanted = trained()
    assert trained() == wanted
    damage(jax_cache, way)
    with pytest.warns(UserWarning, match="jit__"):  # so the entry was read
        assert trained() == wanted


def test_jax_form_gives_the_expected_outputs_of_the_standard() -> None:
    forms, count = JaxForms(), 0
    for _, case in standard_cases():
        if zlib.crc32(case.name.encode()) % SAMPLE:
            continue
        inputs = [as_array(v) for v in case.data_sets[0][0]]
        # Real inputs are data; integers may be sizes, which have to be known.
        data = [k for k, v in enumerate(inputs) if v.dtype.kind not in "biuOSU"]
        function = ModelFunction(case.model, forms)

        def on_data(*arrays: Any, f: Any = function, i: Any = inputs, d: Any = data) -> list[Any]:
            values = list(i)
            for k, array in zip(d, arrays, strict=True):
                values[k] = array
            return f(values)  # type: ignore[no-any-return]

        with jax.enable_x64(True):
            try:
                got = jax.jit(on_data)(*[inputs[k] for k in data])
            except NotTranslatable:
                continue
            check(case, got)
        count += 1
    assert count >= 20


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_convolutions_of_other_platforms(operator: str) -> None:
    """They have XLA's own kernel, which this CPU can run, too; a CPU has it for large kernels only."""
    whole = JaxForms()
    small, large = (np.zeros((1, 1, side, side), np.float32) for side in (3, 12))
    how = [1, 1], [(0, 0), (0, 0)], [1, 1], 1
    assert whole.convolve(large, small, *how) is None
    assert whole.convolve(large, large, *how).shape == (1, 1, 1, 1)
    used: list[Any] = []

    class Seen(JaxForms):
        def convolve(self, *arguments: Any) -> Any:
            used.append(super().convolve(*arguments))
            return used[-1]

    cases = [c for _, c in standard_cases() if c.model.graph.node[0].op_type == operator]
    for case in cases:
        inputs = [as_array(v) for v in case.data_sets[0][0]]
        function = ModelFunction(case.model, Seen("tpu"))
        check(case, jax.jit(lambda *arrays, f=function: f(list(arrays)))(*inputs))
    assert len(used) >= 4
    assert all(out is not None for out in used)


LAYERS, WIDTH, ROWS = 12, 64, 2048
ONE = WIDTH * ROWS * 4
"""The bytes of what a layer computes."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that XLA compiles."""
    from ortflex_plugins.backends.xla.steps import StepFunction

    steps: list[Any] = []
    real = StepFunction.run_of

    def seen(self: Any, *given: Any) -> Any:
        steps.append(real(self, *given))
        return steps[-1]

    monkeypatch.setattr(StepFunction, "run_of", seen)
    return steps


def trained(recompute: Any, steps: int, **options: Any) -> Trainer:
    """A deep network after some steps on random rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * ROWS, WIDTH)).astype(np.float32)
    options |= {"loss": "squared_error", "optimizer": "adam", "learning_rate": 1e-3}
    options |= {"batch_size": ROWS, "backend": {"name": "xla", "steps_per_run": steps}}
    model = models.mlp((WIDTH,) * (LAYERS + 1))
    trainer = Trainer(model, recompute=recompute, progress=False, **options)
    trainer.fit(x, np.tanh(x))
    return trainer


def assert_same(again: Trainer, plain: Trainer) -> None:
    np.testing.assert_allclose(again.train_losses_, plain.train_losses_, rtol=1e-6)
    state = plain.get_state()
    for name, array in again.get_state().items():
        assert np.abs(array - state[name]).max() <= 1e-5 * np.abs(state[name]).max(), name


@pytest.mark.parametrize("steps", [1, 3])
def test_xla_needs_less_memory_with_recompute(steps: int, compiled: list[Any]) -> None:
    plain, again = trained(False, steps), trained(True, steps)
    assert_same(again, plain)
    before, after = (c.memory_analysis().temp_size_in_bytes for c in (compiled[0], compiled[-1]))
    assert before > LAYERS * ONE
    assert after < before - (LAYERS // 3) * ONE


def test_xla_keeps_the_tensors_that_are_named() -> None:
    hidden = [node.output[0] for node in models.mlp((WIDTH,) * (LAYERS + 1)).graph.node]
    assert_same(trained(hidden[5], 1), trained(False, 1))


def test_xla_recomputes_a_transformer_and_adds_up_batches(compiled: list[Any]) -> None:
    x, y, _ = data(WORKLOADS["W8"])

    def fitted(recompute: Any) -> Trainer:
        options = {"loss": "softmax_cross_entropy", "optimizer": "sgd", "learning_rate": 0.01}
        options |= {"batch_size": 16, "accumulate": 2, "progress": False}
        options["backend"] = {"name": "xla", "steps_per_run": 1}
        trainer = Trainer(network(WORKLOADS["W8"]), recompute=recompute, **options)
        trainer.fit(x[:32], y[:32])
        return trainer

    assert_same(fitted(4), fitted(False))
    text = [c.as_text() for c in compiled]
    assert text[0].count(" dot(") > text[-1].count(" dot(")
