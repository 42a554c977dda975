"""The backend xla next to fused: the same losses, weights and state, with what a Trainer does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer, TrainingDiverged, hook
from ortflex_core.compiler.runtime import session
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.plugins.damaged_files import WAYS, damage
from tests.plugins.fitted_workloads import fitted
from tests.training import make, regression

jax = pytest.importorskip("jax")


def agree(one: Trainer, other: Trainer, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(one.train_losses_, other.train_losses_, rtol=tolerance)
    state = other.get_state(buffers=True)
    for name, array in one.get_state(buffers=True).items():
        scale = np.abs(state[name]).max() or 1.0
        assert np.abs(array - state[name]).max() <= tolerance * scale, name


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W5", "W6"])
def test_xla_trains_a_workload_as_fused_does(name: str) -> None:
    agree(fitted(name, "xla"), fitted(name, "fused"))


@pytest.mark.parametrize("name", ["W3", "W8"])
def test_xla_in_bfloat16_follows_the_losses_of_float32(name: str) -> None:
    exact, rounded = (
        fitted(name, "xla", epochs=1, steps=4, precision=precision)
        for precision in ("float32", "bf16_mixed")
    )
    np.testing.assert_allclose(rounded.train_losses_, exact.train_losses_, rtol=0.02)
    assert not np.array_equal(rounded.train_losses_, exact.train_losses_)


def test_xla_repeats_a_run_without_float32_sums_if_xla_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_xla_restores_the_good_state_of_a_training_that_diverges() -> None:
    x, y, _ = data(WORKLOADS["W5"])
    options = {"loss": "squared_error", "batch_size": 15, "reduction": "sum", "progress": False}
    options |= {"optimizer": "sgd", "learning_rate": 1e3}
    trainer = Trainer(network(WORKLOADS["W5"]), backend="xla", **options)
    before = trainer.get_state()
    with pytest.raises(TrainingDiverged, match="at the start of epoch 1 is kept"):
        trainer.fit(x, y)
    for name, array in trainer.get_state().items():
        assert np.array_equal(array, before[name])


def test_xla_makes_single_steps_for_a_hook_and_ends_in_the_same_weights() -> None:
    class Counts:
        steps = 0

        @hook
        def step_end(self) -> None:
            self.steps += 1

    counts = Counts()
    watched = fitted("W1", "xla", callbacks=[counts])
    assert counts.steps == watched.engine.counters()["runs"] == 8
    agree(watched, fitted("W1", "xla"), 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "optimizer": "adam", "learning_rate": 1e-3},
        {"averaging": "ema", "clip_norm": 0.5, "penalty": "l2"},
        {"optimizer": "adam", "learning_rate": 1e-3, "schedule": "cosine", "epochs": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_xla_combines_features_as_fused_does(options: dict[str, Any]) -> None:
    agree(fitted("W1", "xla", **options), fitted("W1", "fused", **options), 2e-4)


def test_xla_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    class Saves:
        @hook
        def epoch_end(self, trainer: Trainer, record: Any) -> None:
            if record["epoch"] == 2:
                trainer.save(tmp_path / "half")

    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3, "epochs": 3}
    whole = fitted("W1", "xla", callbacks=[Saves()], **options)
    x, y, _ = data(WORKLOADS["W1"])
    rest = Trainer.resume(tmp_path / "half")
    assert rest.fit(x[:53], y[:53]).losses == whole.history_.losses
    for name, array in rest.get_state().items():
        assert np.array_equal(array, whole.get_state()[name]), name


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
