"""Checkpoints of earlier versions and of strangers: the same weights, or an error; pickles of 0.2."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    Arguments,
    CheckpointError,
    OrtflexError,
    Trainer,
    internals_of,
    require_runtime,
)
from ortflex_core.compiler.graph.protos import structure
from tests import edited_checkpoints, models
from tests.models import weights_of
from tests.training import make, plugins, regression

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = {"saved_by_0_1_0": "1.31.1", "saved_by_0_2_0": "1.32.0"}
"""The onnxruntime that wrote each; another one rounds differently in the last bits."""

of_others = pytest.mark.filterwarnings("ignore")  # of other versions of scikit-learn
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


@of_others
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


@of_others
@numpy_2
def test_a_pickled_trainer_of_0_2_has_its_weights() -> None:
    """A pickle names classes by module; the modules of 0.2 are found where they are now."""
    saved = FIXTURES / "saved_by_0_2_0"
    trainer = pickle.loads((saved / "trainer.pkl").read_bytes())
    equal(trainer.get_state(), dict(np.load(saved / "state.npz")), exact=True)


@of_others
@numpy_2
def test_a_pickled_estimator_predicts_the_same() -> None:
    pytest.importorskip("sklearn")
    saved = FIXTURES / "saved_by_0_1_0"
    estimator = pickle.loads((saved / "est.pkl").read_bytes())
    predicted = estimator.predict(data()[0])
    np.testing.assert_allclose(predicted, np.load(saved / "est.npy"), rtol=1e-5, atol=1e-6)


PACKED = {"weights": "int4", "activations": "none", "layout": "MatMulNBits", "block_size": 16}
STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "25e7dfa2"),
    "int8": ({"quantize": "int8"}, "b8056dde"),
    "blocks": ({"quantize": {**PACKED, "layout": "QDQ"}}, "49061b21"),
    "packed": ({"quantize": PACKED}, "3bdc04d8"),
    "head": ({"head": 4}, "b5143540"),
}
"""The options that rewrite a model, and the first digits of the hash that checkpoints have of it."""


@pytest.mark.once
@pytest.mark.parametrize("name", STRUCTURES)
def test_rewritten_models_have_the_structure_that_checkpoints_know(name: str) -> None:
    """Another order of nodes or attributes would refuse every checkpoint of such a model."""
    options, expected = STRUCTURES[name]
    rng = np.random.default_rng(0)
    weights = {"V": rng.standard_normal((32, 16)), "b": rng.standard_normal(16)}
    weights |= {"W": rng.standard_normal((16, 8)), "s": np.ones(16), "m": np.zeros(16)}
    body = """
        g = Gemm(X, V, b) n = BatchNormalization(g, s, b, m, s) t = Relu(n) Y = MatMul(t, W)
    """
    model = models.parsed(body, weights, "float[N, 32] X", "float[N, 8] Y", opset=21)
    trainer = make(model, loss="squared_error", **options)
    assert structure(internals_of(trainer).setup.model.proto)[:8] == expected


# Arguments that a checkpoint records --------------------------------------------------------------


# The class of the defect: a value of JSON that no Trainer accepts is read from a checkpoint and fails
# later, with an error that is not one of ortflex (``classes=3`` was a TypeError in ``fit``).
X, Y = regression(rows=6)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 3, 0.5, "no_such_name", [1, "a"], [None]),
    *({"a": 1}, {"name": 3}, {"object": 3}),
)
# The group is not recorded, and the names of the trained tensors replace params.
NAMES = [f.name for f in attrs.fields(Arguments) if f.name not in ("distributed", "params")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = make(models.linear(), epochs=1)
    trainer.fit(X, Y)
    return trainer.save(tmp_path_factory.mktemp("recorded") / "checkpoint")


@pytest.mark.per_python
@pytest.mark.parametrize("name", NAMES)
def test_values_that_no_trainer_accepts_are_refused(saved: Path, name: str) -> None:
    """Each argument with values of every type of JSON, from Python and from a checkpoint."""
    old: list[Any] = []
    edited_checkpoints.edit(saved, lambda r: old.append(dict(r["arguments"])))
    try:
        for value in VALUES:
            refused = None
            try:
                make(models.linear(), **{"epochs": 1, name: value})
            except OrtflexError as error:
                refused = error
            arguments = {**old[0], name: value}
            edited_checkpoints.edit(saved, lambda r, a=arguments: r.update(arguments=a))  # type: ignore[misc]
            if refused is None:
                continue
            with pytest.raises(OrtflexError, match=name) as caught:
                Trainer.resume(saved, plugins=plugins())
            assert not isinstance(caught.value, CheckpointError) or str(saved) in str(caught.value)
    finally:
        edited_checkpoints.edit(saved, lambda r: r.update(arguments=old[0]))


@pytest.mark.per_python
@pytest.mark.parametrize(
    "classes",
    [3, "ab", [], [1, "a"], ["a", "a"], [float("nan"), 1], [[1], [2]], {"a": 1}, np.array(3)],
    ids=repr,
)
def test_classes_that_are_no_list_of_labels_are_refused(classes: Any) -> None:
    with pytest.raises(OrtflexError, match="classes: expected"):
        make(models.linear(), classes=classes)


@pytest.mark.per_python
@pytest.mark.parametrize("classes", [["a", "b"], (0, 1), np.array([2.0, 1.0]), [True, False]])
def test_lists_and_arrays_of_labels_are_classes(classes: Any) -> None:
    make(models.linear(), classes=classes)
