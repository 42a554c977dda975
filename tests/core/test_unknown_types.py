"""What the analysis does with types, sizes and lists that say nothing: it leaves them, or names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortflex_core import GraphError, Model, ModelError, Plugins, TensorSpec, require_runtime
from ortflex_core.compiler.operators import kernels
from ortflex_core.compiler.operators.equivalence import check_size
from ortflex_core.compiler.runtime import session
from tests import models


@pytest.mark.parametrize("known", [False, True])
def test_a_node_whose_input_has_no_known_type_is_not_replaced(known: bool) -> None:
    """Alone, without the type of its input, every runtime would refuse it."""
    before, values = "Tanh" if known else "com.example.Unknown", ("float[N, 3] X", "float[N, 3] Y")
    body = f"h = {before}(X)  Y = Gelu(h)"
    model = models.parsed(body, {}, *values, opset=20, com_example=1)
    model.ir_version = 9
    if require_runtime().max_opset < 20:
        pytest.skip("this runtime has no Gelu")
    made, reasons = kernels.inlined(model)
    assert not reasons
    assert [n.op_type for n in made.graph.node] == [before.rpartition(".")[2], "Gelu"]


@pytest.mark.parametrize(
    ("shape", "fits"), [((0, 3), True), ((2, 3), True), ((-1, 3), False), ((7, 3), False)]
)
def test_sizes_for_which_values_are_drawn(shape: tuple[int, ...], fits: bool) -> None:
    """A tensor without elements has values, namely none; a file may claim any other size."""
    spec = TensorSpec("X", TensorProto.FLOAT, shape)
    if fits:
        check_size(spec, shape, most=20)
        return
    with pytest.raises(GraphError, match="test values cannot be made for the input"):
        check_size(spec, shape, most=20)


@pytest.mark.parametrize("name", ["strides", "dilations", "kernel_shape"])
@pytest.mark.parametrize("numbers", [[], [0, 1]])
def test_an_attribute_without_numbers_is_an_error_of_the_model(
    name: str, numbers: list[int]
) -> None:
    node = helper.make_node("Conv", ["X", "W"], ["Y"], name="step")
    kind: Any = onnx.AttributeProto.INTS
    node.attribute.append(onnx.AttributeProto(name=name, type=kind, ints=numbers))
    values = models.floats("X", "N", 1, 4, 4), models.floats("Y", "N", 1, 3, 3)
    model = models.model([node], [values[0]], [values[1]], {"W": np.ones((1, 1, 2, 2))})
    with pytest.raises(ModelError, match="step"):
        Model(model)


@pytest.mark.parametrize("level", ["ORT_ENABLE_ALL", "ORT_ENABLE_BASIC"])
def test_a_graph_that_is_refused_is_tried_once(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only fusions that the runtime itself refuses are a reason to try again without them."""
    import onnxruntime

    calls = []

    def refuse(*given: Any, **options: Any) -> Any:
        calls.append(given)
        raise RuntimeError("no kernel for Unknown")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    options = session.session_options(1)
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    device = Plugins.discover().component("devices", "cpu", "device")
    with pytest.raises(RuntimeError, match="no kernel for Unknown"):
        session.open_session(b"", options, device)
    assert len(calls) == 1
    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, level)
