"""What a training says at its end, or before it, where it did not do what was probably meant."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from ortflex_core import OrtflexError
from tests import models
from tests.plugins.commands import prepare, refused, works
from tests.training import make, regression

pytestmark = pytest.mark.once

X, Y = regression(rows=32)


def remarks(caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    held = options.pop("validation_data", None)
    with caplog.at_level(logging.WARNING, logger="ortflex"):
        make(models.linear(), backend="fused", **options).fit(X, Y, validation_data=held)
    return caplog.text


@pytest.mark.parametrize("rate", [3.0, 5.0])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_loss_that_rose_is_remarked_on(caplog: Any, rate: float, epochs: int) -> None:
    """In the first epoch already, whose mean hides where it began, and over the epochs."""
    told = remarks(caplog, learning_rate=rate, epochs=epochs, batch_size=8)
    assert "the loss rose from" in told
    assert f"try a smaller learning_rate (it was {rate:.4g})" in told


@pytest.mark.parametrize("rate", [1e-4, 0.05])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_a_loss_that_did_not_rise_is_not(caplog: Any, rate: float, batch_size: int) -> None:
    """A single row may cost far less than the mean: that is no rise."""
    assert "rose" not in remarks(caplog, learning_rate=rate, epochs=3, batch_size=batch_size)


def test_metrics_without_validation_data_are_remarked_on(caplog: Any) -> None:
    for options in ({"metrics": ["mae"], "validation_data": 0.25}, {}):
        assert "validation" not in remarks(caplog, epochs=1, **options)
    told = remarks(caplog, metrics=["mae", "rmse"], epochs=1)
    assert "metrics (mae, rmse) are computed on validation data, which are missing" in told


def test_the_command_line_shows_them(tmp_path: Path) -> None:
    recipe = (
        'model = "model.onnx"\nloss = "squared_error"\nlearning_rate = 3.0\nepochs = 2\n'
        'metrics = ["mae"]\nprogress = false\noutput = "run"\ndata = "data.npz"\n'
    )
    result = works("train", str(prepare(tmp_path, recipe) / "train.toml"))
    assert "warning: the loss rose from" in result.output
    assert "warning: metrics (mae) are computed on validation data" in result.output


@pytest.mark.parametrize("content", [b"", b"\xff", None])
def test_models_and_recipes_that_changed_places(tmp_path: Path, content: bytes | None) -> None:
    model = models.linear().SerializeToString() + b"\xff\xff"
    (tmp_path / "m.onnx").write_bytes(model if content is None else content)
    (tmp_path / "train.toml").write_bytes(content or b"epochs = 3\n")
    for command in ("check", "init"):
        result = refused(command, str(tmp_path / "train.toml"))
        assert "is a recipe" in result.output
        assert "ortflex train" in result.output
    result = refused("train", str(tmp_path / "m.onnx"))
    if content != b"":
        assert "is an ONNX model, not a recipe: `ortflex init" in result.output


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"params": "b*", "penalty": "l2"}, "has the penalty of groups"),
        ({"params": "b*", "frozen": True}, "is frozen by groups"),
    ],
)
@pytest.mark.parametrize("pattern", ["b1", "b*", "*1"])
def test_a_penalty_of_what_a_group_has_says_whose_it_is(
    group: dict[str, Any], why: str, pattern: str
) -> None:
    """A parameter that is trained, or frozen, is not said to be unknown; other mistakes are."""
    groups = [{"params": "W2", "rate": 0.5}, group]

    def penalized(name: str) -> None:
        penalty = {"by_parameter": {name: "l2"}}
        make(models.mlp(), groups=groups, backend="fused", penalty=penalty)

    if pattern != "*1":
        with pytest.raises(OrtflexError, match=rf"{pattern[0]}.*matches 'b\d', which {why}\[1\]"):
            penalized(pattern)
    else:
        penalized(pattern)  # W1 is left
    with pytest.raises(OrtflexError, match="no trained parameter matches 'c1'"):
        penalized("c1")


MERGED = """
    h = MatMul(X, one)  copy = Identity(zero)  b = Add(h, zero)  r = Tanh(b)
    m = MatMul(r, two)  c = Add(m, copy)  t = Tanh(c)  Y = MatMul(t, last)  unseen = MatMul(X, one)
"""


def merged(*, tied: bool = True) -> onnx.ModelProto:
    """Two layers; one bias that an exporter wrote once and copied, as torch's older one does."""
    rng = np.random.default_rng(0)
    body = MERGED if tied else MERGED.replace("Identity(zero)", "Neg(h)")
    shapes = {"one": (5, 4), "zero": (4,), "two": (4, 4), "last": (4, 1)}
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return models.parsed(body, weights, "float[N, 5] X", "float[N, 1] Y")


def test_a_parameter_that_several_nodes_read_is_remarked_on_once(caplog: Any) -> None:
    """The class: weights that an exporter merged, which train as one without an error.

    Readers are named after copies; a node that leads to no loss is no reader.
    """
    trainer = make(merged(), backend="fused", epochs=1, batch_size=8)
    with caplog.at_level(logging.WARNING, logger="ortflex"):
        trainer.fit(X, Y)
        trainer.fit(X, Y)
    messages = [r.getMessage() for r in caplog.records if "is trained as one" in r.getMessage()]
    assert len(messages) == 1
    assert "is trained as one: zero (2: #2, #5). This is right" in messages[0]
    assert "docs/howto/choose-what-is-trained.md" in messages[0]
    guide = Path(__file__).parents[2] / "docs/howto/choose-what-is-trained.md"
    assert "## If two layers have the same weights" in guide.read_text(encoding="utf-8")

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ortflex"):
        for tied, params in ((False, None), (True, ["!zero"])):  # of one node, or frozen
            make(merged(tied=tied), backend="fused", epochs=1, params=params).fit(X, Y)
    assert "trained as one" not in caplog.text


def test_a_long_list_of_shared_parameters_is_cut(caplog: Any) -> None:
    products = (f"h{k + 1} = MatMul(h{k}, w{k % 5})" for k in range(10))
    body = f"h0 = Identity(X)  {'  '.join(products)}  Y = Tanh(h10)"
    weights = {f"w{k}": np.eye(5) * (1 + k / 10) for k in range(5)}
    model = models.parsed(body, weights, "float[N, 5] X", "float[N, 5] Y")
    with caplog.at_level(logging.WARNING, logger="ortflex"):
        make(model, backend="fused", epochs=1).fit(X, np.tile(Y.reshape(-1, 1), 5))
    assert "w0 (2: #1, #6), w1 (2: #2, #7), w2 (2: #3, #8), and 2 more. This" in caplog.text


# ---------------------------------------------------------------------- inputs that are out of scale

IMAGES = np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), np.uint8)
TABLE = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
PLAIN, SCALED = "h = Identity(x)", "h = Div(x, scale)"


def averaged(first: str, shape: tuple[int, ...]) -> onnx.ModelProto:
    """``first`` nodes from x to h, then Conv or MatMul and the mean of its values."""
    images = len(shape) == 4
    sizes = (4, shape[1], 3, 3) if images else (shape[1], 4)
    weights = {"w": np.random.default_rng(2).normal(size=sizes) * 0.3, "scale": np.array(255.0)}
    product = f"{'Conv' if images else 'MatMul'}(h, w)"
    mean = f"y = ReduceMean <axes = {list(range(1, len(shape)))}, keepdims = 0> (c)"
    given = f"float[n, {', '.join(map(str, shape[1:]))}] x"
    return models.parsed(f"{first}  c = {product}  {mean}", weights, given, "float[n] y")


@pytest.mark.parametrize(
    ("first", "x", "repair"),
    [
        (PLAIN, IMAGES, "/ 255"),
        (PLAIN, TABLE * 1e4, "X.std(0)"),
        (PLAIN, IMAGES.astype(np.float32) / 255, None),
        (PLAIN, np.uint8(IMAGES > 99), None),
        (PLAIN, TABLE, None),
        (PLAIN, TABLE * 1e-3, None),
        (SCALED, IMAGES, None),
        (SCALED, TABLE * 1e4, None),
    ],
)
def test_inputs_out_of_scale_have_one_warning_with_the_line_that_repairs_it(
    caplog: Any, first: str, x: Any, repair: str | None
) -> None:
    options = {"learning_rate": 1e-9, "params": ["w"], "epochs": 1}
    trainer = make(averaged(first, x.shape), backend="fused", **options)
    with caplog.at_level(logging.WARNING, "ortflex"):
        trainer.fit(x, np.zeros(len(x), np.float32))
        trainer.fit(x, np.zeros(len(x), np.float32))
    messages = [r.getMessage() for r in caplog.records]
    found = [text for text in messages if "repair" in text or "size" in text]
    assert len(found) == (repair is not None)
    assert repair is None or repair in found[0]
