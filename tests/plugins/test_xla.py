"""The backend xla next to fused: the same losses, weights and state, with what a Trainer does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core.compiler.runtime import session
from tests import models
from tests.plugins.compiled_training import CompiledTraining
from tests.plugins.damaged_files import WAYS, damage
from tests.plugins.fitted_workloads import fitted
from tests.training import make, regression

jax = pytest.importorskip("jax")


class TestTraining(CompiledTraining):
    backend = "xla"


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
