"""The table of operators of the backend xla, by the standard's own cases: numpy's form and JAX's."""

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

from ortflex_plugins.backends.xla.namespaces import JaxForms
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.numpy_forms import NumpyForms
from ortflex_plugins.operators.translation import OPERATORS, ModelFunction
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
