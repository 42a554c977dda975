"""The table of operators of the backend xla: the standard's own cases, and recurrent activations."""

from __future__ import annotations

import importlib
import os
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex_core import require_runtime
from ortflex_plugins.backends.xla.namespaces import JaxForms
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.numpy_forms import NumpyForms
from ortflex_plugins.operators.translation import OPERATORS, ModelFunction
from tests import models
from tests.node_cases import modules

pytestmark = pytest.mark.once

# numpy has no product of bfloat16 with float32 that stays bfloat16, and no Einsum of it.
_PLAIN = (np.ndarray, np.generic, onnx.TensorProto)
NOT_IN_NUMPY = ("bf16", "bfloat16")
SAMPLE = int(os.environ.get("ORTFLEX_TEST_SAMPLE", "8")) * 4


def every_case() -> Iterator[tuple[str, Any]]:
    """(operator, case) of the standard's cases on tensors; the modules may be imported already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cases overflow on purpose
        for module in modules():
            importlib.import_module(module)
    package = importlib.import_module("onnx.backend.test.case.node")
    operator, seen = "", set()
    for case in package._NodeTestCases:
        if "_expanded" not in case.name:
            operator = case.model.graph.node[0].op_type
        plain = all(isinstance(v, _PLAIN) for part in case.data_sets[0] for v in part)
        standard = all(o.domain in ("", "ai.onnx") for o in case.model.opset_import)
        if plain and standard and case.name not in seen:
            seen.add(case.name)
            yield operator, case


def array(value: Any) -> Any:
    """An input or output of a case as an array."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return np.asarray(value)


def check(case: Any, got: list[Any]) -> None:
    for mine, theirs in zip(got, case.data_sets[0][1], strict=False):
        if mine is None:
            continue
        value, wanted = np.asarray(mine), array(theirs)
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), case.name
        if wanted.dtype.kind == "O":
            continue
        if wanted.dtype.kind not in "biu":
            loose = wanted.dtype.itemsize <= 2
            value, wanted = value.astype(np.float64), wanted.astype(np.float64)
            tolerance = 2e-2 if loose else 1e-4
            close = np.allclose(value, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert close, f"{case.name}: {np.nanmax(np.abs(value - wanted))}"
        else:
            assert np.array_equal(value, wanted), case.name


def test_numpy_form_gives_the_expected_outputs_of_the_standard() -> None:
    translated: set[str] = set()
    for operator, case in every_case():
        if any(word in case.name for word in NOT_IN_NUMPY):
            continue
        inputs = [array(v) for v in case.data_sets[0][0]]
        try:
            got = ModelFunction(case.model, NumpyForms())(inputs)
        except NotTranslatable:
            continue
        check(case, got)
        translated.add(operator)
    assert len(translated) >= 150
    assert set(OPERATORS) - translated == {"GlobalLpPool"}  # it has no case


def test_jax_form_gives_the_expected_outputs_of_the_standard() -> None:
    jax = pytest.importorskip("jax")
    forms, count = JaxForms(), 0
    for _, case in every_case():
        if zlib.crc32(case.name.encode()) % SAMPLE:
            continue
        inputs = [array(v) for v in case.data_sets[0][0]]
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
    inputs = [models.floats(n, *shape) for n, shape in SHAPES.items()]
    return models.model([node], inputs, [helper.make_tensor_value_info("Y", 1, None)], {})


def computed(model: onnx.ModelProto) -> Any:
    return ModelFunction(model, NumpyForms())([*FEEDS.values()])[0]


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
    wanted = models.predict(model, FEEDS)["Y"]
    np.testing.assert_allclose(computed(model), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["", "ab"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WITHOUT_DEFAULTS)))
def test_names_in_other_letters(name: str, given: str) -> None:
    """onnxruntime 1.32 knows the standard's spelling only, so that is the oracle."""
    for other in (name.lower(), name.upper()):
        np.testing.assert_array_equal(computed(layer(other, given)), computed(layer(name, given)))


def test_an_unknown_name() -> None:
    with pytest.raises(NotTranslatable, match="RNN with the activation Cosine"):
        computed(layer("Cosine", ""))
