"""A user's file: read, asked about its tensors, and replayed into graphs of any batch size.

A fixed batch dimension is refused with the way out, and freed where every row is treated alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper

from ortflex_core import (
    DataError,
    GraphError,
    Model,
    ModelError,
    Program,
    TensorSpec,
    Trace,
    build,
    captured_names,
)
from tests import models
from tests.plugins.commands import ortflex
from tests.training import make, regression, same


def replayed(model: Model, outputs: list[str], parameters: list[str] = ()) -> Program:  # type: ignore[assignment]
    """The model once more, with inputs and ``parameters`` as inputs."""
    trace = Trace(model.opsets)
    specs = {i.name: i for i in model.inputs} | {n: model.initializers[n] for n in parameters}
    given = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
    return build(trace, model.replay(trace, outputs, given), name="replay")


def run(program: Program, feeds: dict[str, Any]) -> dict[str, Any]:
    return models.predict(program.proto(), {i.name: feeds[i.name] for i in program.inputs})


NETWORKS = [models.linear(), models.mlp(activation="Relu"), models.conv_net()]


@pytest.mark.parametrize("proto", [*NETWORKS, models.two_headed(), models.classifier()])
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
    graph = replayed(Model(models.two_headed()), ["amount"]).proto().graph
    assert [n.op_type for n in graph.node] == ["Concat", "MatMul", "Tanh", "MatMul"]
    assert not any("scores" in t.name for t in graph.initializer)


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


def squared() -> ModelProto:
    """``Z = (X @ w)²``, the square by a function."""
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[N, 5] X) => (float[N, 1] Z) '
        "<float[5, 1] w = {1, 2, 3, 4, 5}> { Y = MatMul(X, w)  Z = own.Square(Y) } "
        '<domain: "own", opset_import: ["": 17]> Square (a) => (b) { b = Mul(a, a) }'
    )


def test_functions_are_inlined_inside_only() -> None:
    proto = squared()
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
    with pytest.raises(GraphError, match="'list' must be a tensor; its type is sequence_type"):
        TensorSpec.from_proto(sequence)
    with pytest.raises(GraphError, match="'nothing' must be a tensor; its type is no type"):
        TensorSpec.from_proto(onnx.ValueInfoProto(name="nothing"))


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


X, Y = regression(rows=22, features=6)


def fixed(model: ModelProto, batch: int) -> ModelProto:
    """The model as an exporter writes it that traced it with one batch."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model


def reshaping(target: list[int], rows: int = 4, **attributes: Any) -> ModelProto:
    """Two Reshapes of the hidden layer; the first one's target is given."""
    rng = np.random.default_rng(0)
    model = models.parsed(
        "h = MatMul(X, W)  r = Reshape(h, there)  t = Tanh(r)  b = Reshape(t, back)  Y = MatMul(b, V)",
        {
            "W": rng.standard_normal((6, 4)),
            "V": rng.standard_normal((4, 1)),
            "there": np.array(target),
            "back": np.array([rows, 4]),
        },
        outputs="float[N, 1] Y",
    )
    for name, value in attributes.items():
        model.graph.node[1].attribute.append(helper.make_attribute(name, value))
    return model


RESHAPED: list[tuple[list[int], dict[str, int]]] = [([2, 2], {}), ([-1, 2], {})]
# As torch writes x.view(x.size(0), -1).
RESHAPED += [([-1, 2], {"allowzero": 1}), ([-1], {"allowzero": 1})]
# In a twin of any batch size a 0 copies the rows.
TWINS = [(reshaping([4, *r], **a), reshaping([0, *r], rows=0)) for r, a in RESHAPED]


@pytest.mark.parametrize(("model", "twin"), [(models.mlp(), models.mlp()), *TWINS])
def test_it_trains_on_batches_of_any_size(model: ModelProto, twin: ModelProto) -> None:
    trainer = make(fixed(model, 4), free_batch=True, backend="fused", batch_size=8, epochs=2)
    trainer.fit(X, Y)
    assert trainer.predict(X).shape == (22, 1)
    other = make(twin, backend="fused", batch_size=8, epochs=2)
    other.fit(X, Y)
    same(trainer.get_state(), other.get_state())


def test_rows_that_are_flattened_into_one_axis() -> None:
    model = fixed(reshaping([8, 2]), 4)
    trainer = make(model, free_batch=True, backend="fused", batch_size=5, epochs=1)
    trainer.fit(X, Y)
    assert trainer.predict(X[:3]).shape == (3, 1)


def test_the_export_keeps_the_file_s_batch_unless_asked() -> None:
    source = fixed(reshaping([4, 2, 2]), 4)
    trainer = make(source, free_batch=True, backend="fused", batch_size=8, epochs=1)
    trainer.fit(X, Y)
    kept, freed = trainer.export(), trainer.export(free_batch=True)
    assert kept.graph.input == source.graph.input
    assert kept.graph.node == source.graph.node
    expected = models.predict(kept, {"X": X[:4]})["Y"]
    np.testing.assert_allclose(models.predict(freed, {"X": X})["Y"][:4], expected, rtol=1e-5)
    onnx.checker.check_model(freed, full_check=True)
    same(models.weights_of(freed) | trainer.get_state(), models.weights_of(freed), 0)


@pytest.mark.parametrize("model", [models.mlp(), reshaping([4, 2, 2])])
def test_without_it_the_error_names_it(model: ModelProto) -> None:
    """Before a graph is built, in which the sizes of a Reshape that exporters write do not fit."""
    trainer = make(fixed(model, 4), backend="fused", batch_size=8)
    with pytest.raises(DataError, match=r"fixed batch dimension.*free_batch=True"):
        trainer.fit(X, Y)
    with pytest.raises(DataError, match=r"6 rows; pass free_batch=True, or batch_size=4"):
        trainer.fit(lambda: ((X[k : k + 6], Y[k : k + 6]) for k in range(0, 18, 6)))
    with pytest.raises(DataError, match=r"fixed batch dimension.*free_batch=True"):
        trainer.step((X, Y))
    with pytest.raises(ModelError, match="was not freed for the training; create the Trainer with"):
        trainer.export(free_batch=True)


def test_a_model_that_is_dynamic_already_is_left_as_it_is() -> None:
    model = Model(models.mlp(), free_batch=True)
    assert model.internal.graph.node == models.mlp().graph.node
    assert model.inputs[0].shape == ("N", 6)


def of_four(body: str) -> ModelProto:
    """A model of batches of 4 rows: a product, and what the body does with it."""
    weights = {"factor": np.arange(4.0).reshape(4, 1), "W": np.ones((6, 1))}
    model = models.parsed(f"r = MatMul(X, W)  {body}", weights, outputs="float[N, 1] Y")
    model.graph.node[1].name = "own"
    return fixed(model, 4)


def unequal() -> ModelProto:
    model = fixed(models.two_headed(), 4)
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 3
    return model


MIXING = "m = ReduceMean<axes = [0], keepdims = 1>(r)  Y = Sub(r, m)"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            of_four(MIXING),
            r"batch dimension of 4 cannot be freed: on 8 rows the output 'Y' differs",
        ),
        (of_four("Y = Mul(r, factor)"), r"it fails on 8 rows: .*own.*Train with batch_size=4"),
        (unequal(), r"inputs with one batch size, but left has 4, right has 3"),
    ],
)
def test_a_graph_that_depends_on_the_batch_is_refused(model: ModelProto, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        Model(model, free_batch=True)


def test_functions_are_exported_as_they_were() -> None:
    x = np.ones((22, 5), np.float32)
    trainer = make(fixed(squared(), 4), free_batch=True, backend="fused", batch_size=8, epochs=1)
    trainer.fit(x, Y)
    assert len(trainer.export().functions) == 1
    with pytest.raises(ModelError, match="has functions, which free_batch inlines"):
        trainer.export(free_batch=True)


def test_old_opsets_too() -> None:
    model = fixed(reshaping([4, 2, 2]), 4)
    model.opset_import[0].version, model.ir_version = 9, 4
    trainer = make(model, free_batch=True, backend="fused", batch_size=8, epochs=1)
    trainer.fit(X, Y)
    assert trainer.export(free_batch=True).opset_import[0].version == 9


def test_a_model_object_made_without_it() -> None:
    with pytest.raises(ModelError, match=r"create it with Model\(…, free_batch=True\)"):
        make(Model(fixed(models.mlp(), 4)), free_batch=True)


@pytest.mark.parametrize(("target", "freed"), [([4, 2, 2], True), ([2, 2, 4], False)])
def test_init_trains_on_any_batch_where_the_graph_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: list[int], freed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(fixed(reshaping(target), 4), "model.onnx")
    np.savez("data.npz", X=X[:20], y=Y[:20])
    assert ortflex("init", "model.onnx", "--data", "data.npz").exit_code == 0
    text = Path("train.toml").read_text("utf-8")
    assert ("\nfree_batch = true" in text) == freed
    assert ("\nbatch_size = 4" in text) != freed
    result = ortflex("train", "train.toml", "output=run", "validation=0.2")
    assert result.exit_code == 0, result.output
