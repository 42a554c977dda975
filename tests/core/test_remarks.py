"""What a training says at its end, or before it, where it did not do what was probably meant."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from ortflex_core import OrtflexError
from ortflex_plugins.cli.main import main
from tests import models
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
def test_a_loss_that_rose_is_remarked_on(
    caplog: pytest.LogCaptureFixture, rate: float, epochs: int
) -> None:
    """In the first epoch already, whose mean hides where it began, and over the epochs."""
    told = remarks(caplog, learning_rate=rate, epochs=epochs, batch_size=8)
    assert "the loss rose from" in told
    assert f"try a smaller learning_rate (it was {rate:.4g})" in told


@pytest.mark.parametrize("rate", [1e-4, 0.05])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_a_loss_that_did_not_rise_is_not(
    caplog: pytest.LogCaptureFixture, rate: float, batch_size: int
) -> None:
    """A single row may cost far less than the mean: that is no rise."""
    assert "rose" not in remarks(caplog, learning_rate=rate, epochs=3, batch_size=batch_size)


def test_metrics_without_validation_data_are_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    assert "metrics (mae, rmse) are computed on validation data, which are missing" in remarks(
        caplog, metrics=["mae", "rmse"], epochs=1
    )


@pytest.mark.parametrize("options", [{"metrics": ["mae"], "validation_data": 0.25}, {}])
def test_metrics_with_validation_data_are_not(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    assert "validation" not in remarks(caplog, epochs=1, **options)


def test_the_command_line_shows_them(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(models.linear().SerializeToString())
    np.savez(tmp_path / "d.npz", X=X, y=Y)
    (tmp_path / "train.toml").write_text(
        'model = "m.onnx"\nloss = "squared_error"\nlearning_rate = 3.0\nepochs = 2\n'
        'metrics = ["mae"]\nprogress = false\noutput = "run"\n[data]\nname = "npz"\npath = "d.npz"\n'
    )
    result = CliRunner().invoke(main, ["train", str(tmp_path / "train.toml")])
    assert result.exit_code == 0, result.output
    assert "warning: the loss rose from" in result.output
    assert "warning: metrics (mae) are computed on validation data" in result.output


@pytest.mark.parametrize("content", [b"", b"\xff", None])
def test_models_and_recipes_that_changed_places(tmp_path: Path, content: bytes | None) -> None:
    model = models.linear().SerializeToString() + b"\xff\xff"
    (tmp_path / "m.onnx").write_bytes(model if content is None else content)
    (tmp_path / "train.toml").write_bytes(content or b"epochs = 3\n")
    for command in ("check", "init"):
        result = CliRunner().invoke(main, [command, str(tmp_path / "train.toml")])
        assert result.exit_code == 1
        assert "is a recipe" in result.output
        assert "ortflex train" in result.output
    result = CliRunner().invoke(main, ["train", str(tmp_path / "m.onnx")])
    assert result.exit_code == 1
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
    options: dict[str, Any] = {"groups": [{"params": "W2", "rate": 0.5}, group], "backend": "fused"}
    if pattern != "*1":
        with pytest.raises(OrtflexError, match=rf"{pattern[0]}.*matches 'b\d', which {why}\[1\]"):
            make(models.mlp(), penalty={"by_parameter": {pattern: "l2"}}, **options)
    else:
        make(models.mlp(), penalty={"by_parameter": {pattern: "l2"}}, **options)  # W1 is left
    with pytest.raises(OrtflexError, match="no trained parameter matches 'c1'"):
        make(models.mlp(), penalty={"by_parameter": {"c1": "l2"}}, **options)


MERGED = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 5] X) => (float[N, 1] Y)
    { h = MatMul(X, one)  copy = Identity(zero)  b = Add(h, zero)  r = Tanh(b)
      m = MatMul(r, two)  c = Add(m, copy)  t = Tanh(c)  Y = MatMul(t, last)  unseen = MatMul(X, one) }"""


def merged(*, tied: bool = True) -> onnx.ModelProto:
    """Two layers; one bias that an exporter wrote once and copied, as torch's older one does."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(MERGED if tied else MERGED.replace("Identity(zero)", "Neg(h)"))
    shapes = {"one": (5, 4), "zero": (4,), "two": (4, 4), "last": (4, 1)}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def test_a_parameter_that_several_nodes_read_is_remarked_on_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


@pytest.mark.parametrize(("tied", "params"), [(False, None), (True, ["!zero"])])
def test_a_parameter_of_one_node_or_a_frozen_one_is_not(
    caplog: pytest.LogCaptureFixture, tied: bool, params: list[str] | None
) -> None:
    with caplog.at_level(logging.WARNING, logger="ortflex"):
        make(merged(tied=tied), backend="fused", epochs=1, params=params).fit(X, Y)
    assert "trains as one" not in caplog.text


def test_a_long_list_of_shared_parameters_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 5] X) => (float[N, 5] Y) {'
        + "  ".join(f"h{k} = MatMul({f'h{k - 1}' if k else 'X'}, w{k % 5})" for k in range(10))
        + "  Y = Tanh(h9) }"
    )
    for k in range(5):
        array = np.eye(5, dtype=np.float32) * (1 + k / 10)
        model.graph.initializer.append(numpy_helper.from_array(array, f"w{k}"))
    with caplog.at_level(logging.WARNING, logger="ortflex"):
        make(model, backend="fused", epochs=1).fit(X, np.tile(Y.reshape(-1, 1), 5))
    assert "w0 (2: #0, #5), w1 (2: #1, #6), w2 (2: #2, #7), and 2 more. This" in caplog.text
