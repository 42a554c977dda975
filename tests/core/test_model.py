"""A user's file: read, asked about its tensors, and replayed into graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from ortflex_core import Model, ModelError, Program, TensorSpec, Trace, build, captured_names
from tests import models

helper = models.helper


def replayed(model: Model, outputs: list[str], parameters: list[str] = ()) -> Program:  # type: ignore[assignment]
    """The model once more, with inputs and ``parameters`` as inputs."""
    trace = Trace(model.opsets)
    specs = {i.name: i for i in model.inputs} | {n: model.initializers[n] for n in parameters}
    given = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
    return build(trace, model.replay(trace, outputs, given), name="replay")


def run(program: Program, feeds: dict[str, Any]) -> dict[str, Any]:
    return models.predict(program.proto(), {i.name: feeds[i.name] for i in program.inputs})


@pytest.mark.parametrize(
    "proto",
    [
        *(models.linear(), models.mlp(activation="Relu"), models.conv_net(), models.two_headed()),
        models.classifier(),
    ],
)
def test_a_replay_computes_what_the_file_computes(proto: Any) -> None:
    model = Model(proto)
    rng = np.random.default_rng(0)
    shapes = {i.name: (7, *(i.shape or ())[1:]) for i in model.inputs}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    names = [o.name for o in model.outputs]
    floats = list(models.weights_of(proto))
    program = replayed(model, names, floats)
    assert {i.name for i in program.inputs} == {*shapes, *floats}
    found = run(program, feeds | models.weights_of(proto))
    for name, expected in models.predict(proto, feeds).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6)


def test_a_replay_has_only_what_its_outputs_need() -> None:
    program = replayed(Model(models.two_headed()), ["amount"])
    assert [n.op_type for n in program.proto().graph.node] == ["Concat", "MatMul", "Tanh", "MatMul"]
    names = {t.name for t in program.proto().graph.initializer}
    assert not any("scores" in n for n in names)


def test_path_bytes_and_proto_are_the_same_model(tmp_path: Path) -> None:
    proto = models.mlp()
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    for source in (proto, path, str(path), path.read_bytes()):
        assert Model(source).proto == proto


def test_tensors_have_types_and_shapes_and_the_batch_has_a_name() -> None:
    model = Model(models.mlp())
    assert model.inputs == (TensorSpec("X", 1, ("N", 6)),)  # as the file calls it
    assert model.value("X") == TensorSpec("X", 1, ("batch", 6))
    assert model.value("h1") == TensorSpec("h1", 1, ("batch", 8))
    assert model.value("W1") == TensorSpec("W1", 1, (6, 8))
    anonymous = models.mlp()
    anonymous.graph.input[0].type.tensor_type.shape.dim[0].ClearField("value")
    assert Model(anonymous).value("Y").shape == ("batch", 1)
    with pytest.raises(ModelError, match="has no tensor 'hh1'; did you mean 'h1'"):
        model.value("hh1")
    with pytest.raises(ModelError, match="has no initializer 'W'"):
        model.initializer("W")


def test_initializers_are_shared_and_cannot_be_written() -> None:
    model = Model(models.mlp())
    assert model.initializer("W1") is model.initializer("W1")
    with pytest.raises(ValueError, match="read-only"):
        model.initializer("W1")[0] = 0


def test_functions_are_inlined_inside_only() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[N, 5] X) => (float[N, 1] Z) '
        "<float[5, 1] w = {1, 2, 3, 4, 5}> { Y = MatMul(X, w)  Z = own.Square(Y) } "
        '<domain: "own", opset_import: ["": 17]> Square (a) => (b) { b = Mul(a, a) }'
    )
    model = Model(proto)
    assert [n.op_type for n in model.internal.graph.node] == ["MatMul", "Mul"]
    assert model.proto == proto
    x = np.ones((2, 5), np.float32)
    np.testing.assert_allclose(run(replayed(model, ["Z"]), {"X": x})["Z"], 15.0**2, rtol=1e-6)


def conditional() -> Any:
    """``Y = X @ W if flag else X @ W + b``, the branches reading outer values."""
    body = (
        "XW = MatMul(X, W)  Y = If(flag) <then_branch = a () => (float[N, 2] t) "
        "{ t = Identity(XW) }, else_branch = b () => (float[N, 2] t) { t = Add(XW, b) }>"
    )
    weights = {"W": np.arange(6.0).reshape(3, 2), "b": np.array([1.0, 2.0])}
    return models.parsed(body, weights, "float[N, 3] X, bool flag", "float[N, 2] Y")


@pytest.mark.parametrize("flag", [True, False])
def test_subgraphs_read_outer_values_under_their_new_names(flag: bool) -> None:
    proto = conditional()
    model = Model(proto)
    assert sorted(captured_names(model.internal.graph.node[1])) == ["XW", "b"]
    feeds = {"X": np.ones((2, 3), np.float32), "flag": np.array(flag)}
    program = replayed(model, ["Y"], ["W", "b"])
    found = run(program, feeds | models.weights_of(proto))["Y"]
    np.testing.assert_allclose(found, models.predict(proto, feeds)["Y"])


def test_large_frozen_initializers_are_inputs_not_constants() -> None:
    proto = models.mlp((40, 60, 1))
    model = Model(proto)
    program = replayed(model, ["Y"], ["b1"])
    assert {i.name for i in program.inputs} == {"X", "b1", "W1"}
    assert max(len(t.raw_data) for t in program.proto().graph.initializer) < 4 * 1024
    x = np.ones((2, 40), np.float32)
    found = run(program, {"X": x} | models.weights_of(proto))["Y"]
    np.testing.assert_allclose(found, models.predict(proto, {"X": x})["Y"], rtol=1e-5)


def test_an_input_that_is_no_tensor_is_refused() -> None:
    proto = models.linear()
    tensor = helper.make_tensor_type_proto(1, [None])
    sequence = helper.make_value_info("list", helper.make_sequence_type_proto(tensor))
    proto.graph.input.append(sequence)
    with pytest.raises(ModelError, match="input 'list' has the type sequence_type, but only tens"):
        Model(proto)


def of_functions(*opsets: int) -> onnx.ModelProto:
    """Each function doubles; the graph imports their domain alone."""
    calls = "  ".join(f"y{k + 1} = own.Double{opset}(y{k})" for k, opset in enumerate(opsets))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["own": 1]> g (float[?, 2] y0) => '
        f"(float[?, 2] y{len(opsets)}) {{ {calls} }}"
    )
    double = '<domain: "own", opset_import: ["": {0}]> Double{0} (x) => (y) {{ y = Add(x, x) }}'
    model.functions.extend(onnx.parser.parse_function(double.format(opset)) for opset in opsets)
    return model


@pytest.mark.parametrize("opsets", [(17,), (17, 18)])
def test_a_graph_of_other_domains_need_not_import_the_standard(opsets: tuple[int, ...]) -> None:
    """The class: a valid file is refused for an import that it does not need, or gets a wrong one."""
    proto = of_functions(*opsets)
    model = Model(proto)
    assert model.opset == max(opsets)
    assert [o.domain for o in proto.opset_import] == ["own"]  # the caller's is not changed
    x = np.array([[1, 2]], np.float32)
    [result] = run(replayed(model, [model.outputs[0].name]), {"y0": x}).values()
    np.testing.assert_array_equal(result, 2 ** len(opsets) * x)


def test_a_graph_of_a_runtimes_operators_gets_the_oldest_opset() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["ai.onnx.ml": 1]> g (float[?, 2] X) => (float[?, 2] Y) '
        "{ Y = ai.onnx.ml.Binarizer <threshold = 1.0> (X) }"
    )
    assert Model(model).opset == 13


def test_an_attribute_that_a_function_of_the_standard_needs_may_be_left_out() -> None:
    """The class: onnx infers through the function's body, and forgets the default there."""
    values = "float[2, 3, 4, 4] X", "float[2, 3, 4, 4] Y"
    read = Model(models.parsed("Y = MeanVarianceNormalization(X)", {}, *values))
    assert read.value("Y").shape == (2, 3, 4, 4)
    assert not read.proto.graph.node[0].attribute  # what is exported is as it was
