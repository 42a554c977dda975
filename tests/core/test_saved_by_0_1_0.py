"""Files that version 0.1.0 wrote: checkpoints and pickles of users continue, to the same weights."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import Trainer
from ortflex_core.runtime import require_runtime
from tests.models import weights_of

SAVED = Path(__file__).parents[1] / "fixtures" / "saved_by_0_1_0"
SAME_RUNTIME = require_runtime().version == "1.31.1"
"""Another onnxruntime rounds differently in the last bits."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of other versions of scikit-learn


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(47, 6)).astype(np.float32)
    return x, x.sum(1, keepdims=True).astype(np.float32)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert set(a) == set(b)
    for name in a:
        if SAME_RUNTIME:
            np.testing.assert_array_equal(a[name], b[name])
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_0_1_0_continues_to_the_same_weights(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000024"
    shutil.copytree(SAVED / "checkpoint", folder)
    trainer = Trainer(
        SAVED / "model.onnx",
        loss="squared_error",
        optimizer="adam",
        epochs=6,
        batch_size=8,
        progress=False,
        seed=3,
        backend="fused",
    )
    trainer.resume(folder)
    trainer.fit(*data())
    trainer.export(tmp_path / "again.onnx")
    equal(
        weights_of(onnx.load(tmp_path / "again.onnx")), weights_of(onnx.load(SAVED / "whole.onnx"))
    )


def test_a_pickled_trainer_has_its_weights() -> None:
    trainer = pickle.loads((SAVED / "trainer.pkl").read_bytes())
    saved = np.load(SAVED / "state.npz")
    state = trainer.get_state()
    for name in saved:
        np.testing.assert_array_equal(state[name], saved[name])


def test_a_pickled_estimator_predicts_the_same() -> None:
    pytest.importorskip("sklearn")
    estimator = pickle.loads((SAVED / "est.pkl").read_bytes())
    predicted = estimator.predict(data()[0])
    np.testing.assert_allclose(predicted, np.load(SAVED / "est.npy"), rtol=1e-5, atol=1e-6)
