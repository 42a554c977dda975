"""Activations of recurrent layers in the table of operators, beside onnxruntime's kernels.

The class: a number that a file leaves out, and a name in other letters, which the standard allows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from ortflex_core import require_runtime
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.numpy_forms import NumpyForms
from ortflex_plugins.operators.translation import ModelFunction

pytestmark = pytest.mark.once

RNG = np.random.default_rng(0)
SHAPES = {"X": (3, 2, 4), "W": (1, 3, 4), "R": (1, 3, 3)}
FEEDS = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
NUMBERS = {"LeakyRelu": "a", "ThresholdedRelu": "a", "Elu": "a"}
NUMBERS |= dict.fromkeys(("HardSigmoid", "Affine", "ScaledTanh"), "ab")
NAMES = ["Tanh", "Sigmoid", "Relu", "Softsign", "Softplus", *NUMBERS]
WITHOUT_DEFAULTS = ("ThresholdedRelu", "Affine", "ScaledTanh")


def layer(name: str, given: str) -> onnx.ModelProto:
    numbers = {"a": ("activation_alpha", 0.3), "b": ("activation_beta", 0.4)}
    options = {key: [value] for key, value in (numbers[letter] for letter in given)}
    node = helper.make_node("RNN", [*FEEDS], ["Y"], hidden_size=3, activations=[name], **options)
    inputs = [helper.make_tensor_value_info(n, 1, shape) for n, shape in SHAPES.items()]
    outputs = [helper.make_tensor_value_info("Y", 1, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def computed(model: onnx.ModelProto) -> Any:
    return ModelFunction(model, NumpyForms())([*FEEDS.values()])[0]


def by_runtime(model: onnx.ModelProto) -> Any:
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(None, FEEDS)[0]


@pytest.mark.parametrize("given", ["", "a", "b", "ab"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_given_or_left_out(name: str, given: str) -> None:
    model = layer(name, given)
    if name in WITHOUT_DEFAULTS and not set(NUMBERS[name]) <= set(given):
        with pytest.raises(NotTranslatable, match=f"{name} without its activation_alpha or _beta"):
            computed(model)
        return
    if set(NUMBERS.get(name, "")) - set(given) and require_runtime().version_info < (1, 23):
        pytest.skip("older runtimes take 0 for a number that is left out")
    np.testing.assert_allclose(computed(model), by_runtime(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["", "ab"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WITHOUT_DEFAULTS)))
def test_names_in_other_letters(name: str, given: str) -> None:
    """onnxruntime 1.32 knows the standard's spelling only, so that is the oracle."""
    for other in (name.lower(), name.upper()):
        np.testing.assert_array_equal(computed(layer(other, given)), computed(layer(name, given)))


def test_an_unknown_name() -> None:
    with pytest.raises(NotTranslatable, match="RNN with the activation Cosine"):
        computed(layer("Cosine", ""))
