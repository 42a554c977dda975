"""scikit-learn pipelines that read strings, as skl2onnx writes them, are trained further.

The oracle is a pipeline of scikit-learn that was fitted to the end, and the whole model in onnxruntime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import Array, Recipe, Trainer, internals_of
from tests.plugins.commands import ortflex
from tests.training import plugins

pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

pytestmark = pytest.mark.filterwarnings("ignore")
LOSS = {"name": "log_loss", "on": "probabilities"}


def converted(encoder: Any, x: Array, y: Array, shape: list[Any]) -> onnx.ModelProto:
    """An encoder and a logistic regression that is hardly fitted."""
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    pipeline = make_pipeline(encoder, LogisticRegression(max_iter=1)).fit(x, y)
    return skl2onnx.to_onnx(
        pipeline,
        initial_types=[("X", StringTensorType(shape))],
        options={"zipmap": False},
        target_opset=17,
        black_op={"LinearClassifier"},
    )


def categories() -> tuple[onnx.ModelProto, Array, Array]:
    from sklearn.preprocessing import OneHotEncoder

    rng = np.random.default_rng(0)
    x = rng.choice(["red", "green", "blue"], (200, 2))
    y = ((x[:, 0] == "red") | (x[:, 1] == "blue")).astype(int)
    return converted(OneHotEncoder(), x, y, [None, 2]), x, y


def sentences() -> tuple[onnx.ModelProto, Array, Array]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    rng = np.random.default_rng(1)
    words = ["good", "bad", "film", "the", "nice", "awful"]
    x = np.array([" ".join(rng.choice(words, 5)) for _ in range(200)], object)
    y = np.array([int("good" in text) for text in x])
    return converted(TfidfVectorizer(lowercase=False), x, y, [None]), x, y


@pytest.mark.parametrize("build", [categories, sentences])
def test_a_pipeline_with_strings_trains(build: Any, tmp_path: Path) -> None:
    model, x, y = build()
    trainer = Trainer(
        model, loss=LOSS, epochs=30, learning_rate=0.5, progress=False, plugins=plugins()
    )
    before = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, validation_data=0.2)
    after = trainer.evaluate(x, y)["loss"]
    assert after < min(0.25, before / 2)
    path = tmp_path / "trained.onnx"
    trainer.export(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    label, probabilities = session.run(None, {"X": x.astype(object)})
    mine = trainer.predict(x)
    np.testing.assert_allclose(mine["probabilities"], probabilities, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(mine["label"], label)
    expected = -np.log(np.clip(probabilities[np.arange(len(y)), y], 1e-12, None)).mean()
    assert after == pytest.approx(float(expected), rel=1e-3)


def test_the_prefix_is_the_encoder() -> None:
    model, *_ = sentences()
    trainer = Trainer(model, loss=LOSS, progress=False, plugins=plugins())
    prefix = internals_of(trainer).live.prefix
    assert prefix is not None
    assert [n.op_type for n in prefix.nodes] == [
        *("Tokenizer", "Flatten", "TfIdfVectorizer", "Mul", "Normalizer")
    ]


def test_a_recipe_trains_strings_of_a_file(tmp_path: Path) -> None:
    model, x, y = categories()
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", X=x, y=y)
    (tmp_path / "train.toml").write_text(
        'model = "m.onnx"\ndata = "d.npz"\nvalidation = 0.2\nepochs = 20\nlearning_rate = 0.5\n'
        'cache = "memory"\n[loss]\nname = "log_loss"\non = "probabilities"\n'
    )
    recipe = Recipe.load(tmp_path / "train.toml", (), plugins())
    trainer = Trainer.from_recipe(recipe, plugins())
    assert recipe.run(trainer).losses[-1] < 0.2


def test_three_commands_train_a_pipeline_with_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of ``init`` has the loss that fits the probabilities of two classes."""
    model, x, y = categories()
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "m.onnx")
    np.savez("d.npz", X=x.astype(str), y=y)
    for command in (
        ("init", "m.onnx", "--data", "d.npz"),
        ("train", "train.toml", "epochs=20", "learning_rate=0.5", 'output="run"'),
        ("predict", "run", "d.npz", "--output", "p.npz"),
    ):
        result = ortflex(*command)
        assert result.exit_code == 0, result.output
    with np.load("p.npz") as found:
        assert np.mean(found["probabilities"].argmax(axis=1) == y) > 0.95
