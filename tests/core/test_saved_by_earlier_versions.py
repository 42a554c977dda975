"""Files that earlier versions wrote: checkpoints, and pickles of 0.2, continue to the same weights."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import require_runtime
from tests.models import weights_of
from tests.training import make

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = {"saved_by_0_1_0": "1.31.1", "saved_by_0_2_0": "1.32.0"}
"""The onnxruntime that wrote each; another one rounds differently in the last bits."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of other versions of scikit-learn
numpy_2 = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "1.26.0", reason="numpy 2, which older ones cannot read"
)


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(47, 6)).astype(np.float32)
    return x, x.sum(1, keepdims=True).astype(np.float32)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray], exact: bool) -> None:
    assert set(a) == set(b)
    for name in a:
        if exact:
            np.testing.assert_array_equal(a[name], b[name])
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_continues_to_the_same_weights(version: str, tmp_path: Path) -> None:
    saved = FIXTURES / version
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved / "checkpoint", folder)
    options = {"optimizer": "adam", "epochs": 6, "batch_size": 8, "seed": 3}
    trainer = make(saved / "model.onnx", backend="fused", **options)
    trainer.resume(folder)
    trainer.fit(*data())
    trainer.export(tmp_path / "again.onnx")
    files = (tmp_path / "again.onnx", saved / "whole.onnx")
    again, whole = (weights_of(onnx.load(path)) for path in files)
    equal(again, whole, exact=require_runtime().version == VERSIONS[version])


@numpy_2
def test_a_pickled_trainer_of_0_2_has_its_weights() -> None:
    """A pickle names classes by module; the modules of 0.2 are found where they are now."""
    saved = FIXTURES / "saved_by_0_2_0"
    trainer = pickle.loads((saved / "trainer.pkl").read_bytes())
    equal(trainer.get_state(), dict(np.load(saved / "state.npz")), exact=True)


@numpy_2
def test_a_pickled_estimator_predicts_the_same() -> None:
    pytest.importorskip("sklearn")
    saved = FIXTURES / "saved_by_0_1_0"
    estimator = pickle.loads((saved / "est.pkl").read_bytes())
    predicted = estimator.predict(data()[0])
    np.testing.assert_allclose(predicted, np.load(saved / "est.npy"), rtol=1e-5, atol=1e-6)
