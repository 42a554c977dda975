"""Models with operators, types or sizes that shape inference does not know: pipelines, custom domains."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from ortflex_core import (
    GraphError,
    Model,
    ModelError,
    NoGradientRule,
    Plugins,
    TensorSpec,
    Trainer,
    Unsupported,
    check_model,
    complete_shapes,
    gradient_model,
    internals_of,
    require_runtime,
)
from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.compiler.operators import kernels
from ortflex_core.compiler.operators.equivalence import Runner, check_size
from ortflex_core.compiler.runtime import session
from tests import models
from tests.training import every_backend, make

SCALE = "scaled = ai.onnx.ml.Scaler <offset = [1.0], scale = [0.5]> (X)"
"""Shape inference does not know this operator."""


def after_scaler(body: str, weights: Any, given: str, *, scale: str = SCALE) -> Any:
    return models.parsed(
        f"{scale} {body}", weights, f"float[{given}] X", "float[?, ?] Y", ai_onnx_ml=3
    )


def scaled(rows: Any = "N") -> Any:
    """A Scaler before a linear model."""
    weights = {"W": np.ones((4, 1)), "b": np.zeros(1)}
    return after_scaler("p = MatMul(scaled, W)  Y = Add(p, b)", weights, f"{rows}, 4")


def test_shapes_are_found_by_running_the_model() -> None:
    model = Model(scaled())
    assert model.unknown()
    complete_shapes(model)
    assert model.unknown() == []
    assert model.value("scaled").shape == ("batch", 4)
    assert model.value("Y").shape == ("batch", 1)

    proto = scaled()
    proto.graph.node[0].op_type = "Scalr"  # cannot be run
    with pytest.raises(Exception, match="Scalr"):
        Model(proto)


@every_backend
def test_a_scaler_before_the_first_parameter_is_no_obstacle(backend: str) -> None:
    if backend in ("openvino", "xla", "c"):
        pytest.skip(f"{backend} has no operators of ai.onnx.ml")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    y = ((x - 1) * 0.5) @ np.array([[1.0], [-1.0], [2.0], [0.5]], np.float32)
    trainer = make(scaled(), backend=backend, epochs=60, learning_rate=0.3, batch_size=10)
    trainer.fit(x, y)
    assert internals_of(trainer).problem.parameters == ("W", "b")
    assert trainer.train_losses_[-1] < 0.01


def wide(features: int, outputs: int, *, offset: int | None = None, rows: Any = "N") -> Any:
    """A Scaler before one product and a bias; with another ``offset`` the runtime cannot run it."""
    weight = np.random.default_rng(0).standard_normal((features, outputs)) / 8
    numbers = [f"[{', '.join([n] * (offset or features))}]" for n in ("1.0", "0.5")]
    scale = SCALE.replace("[1.0]", numbers[0]).replace("[0.5]", numbers[1])
    body, weights = "product = MatMul(scaled, W)  Y = Add(product, b)", {"W": weight}
    weights["b"] = np.zeros(outputs)
    return after_scaler(body, weights, f"{rows}, {features}", scale=scale)


@pytest.mark.parametrize("elements", [1024, 1025, 40_000])
def test_weights_of_any_size_behind_an_operator_without_inference(elements: int) -> None:
    """The class: what the skeleton leaves out (over 1,024 elements) is missing where the model is run."""
    features = 5 if elements == 1025 else 8
    model = Model(wide(features, elements // features))
    complete_shapes(model)
    assert (model.unknown(), model.unlearned) == ([], "")
    assert model.value("Y").shape == ("batch", elements // features)
    x = np.random.default_rng(1).standard_normal((12, features)).astype(np.float32)
    y = np.zeros((12, elements // features), np.float32)
    trainer = make(model, backend="fused", epochs=2, learning_rate=0.1, batch_size=4)
    expected = (x - 1) * 0.5 @ model.initializer("W")
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-5, atol=1e-5)
    trainer.fit(x, y)
    assert trainer.train_losses_[-1] < trainer.train_losses_[0]


def test_tensors_that_stay_in_their_file_are_fed_from_there(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model over 1 GiB: neither the skeleton nor the ModelProto has its large tensors."""
    monkeypatch.setattr(model_file, "HUGE", 1000)
    path = tmp_path / "wide.onnx"
    onnx.save(wide(8, 300), path, save_as_external_data=True, location="data", size_threshold=0)
    model = Model(path)
    assert onnx.external_data_helper.uses_external_data(model.proto.graph.initializer[0])
    complete_shapes(model)
    assert model.value("Y").shape == ("batch", 300)
    x = np.full((4, 8), 3.0, np.float32)
    trainer = make(path, backend="fused", epochs=2, learning_rate=0.1)
    trainer.fit(x, np.zeros((4, 300), np.float32))
    assert trainer.train_losses_[-1] < trainer.train_losses_[0]


def test_large_tensors_that_onnxruntime_is_not_fed_are_inside() -> None:
    """A bfloat16 table after an operator without inference; arrays of that type cannot be fed."""
    proto = wide(8, 4)
    half = helper.make_tensor("table", onnx.TensorProto.BFLOAT16, [300, 8], [1.0] * 2400)
    proto.graph.initializer.append(half)
    proto.graph.node[0].input[0] = "moved"
    proto.graph.node.insert(0, helper.make_node("Add", ["X", "mean"], ["moved"]))
    proto.graph.node.insert(0, helper.make_node("ReduceMean", ["wider"], ["mean"], axes=[0]))
    proto.graph.node.insert(0, helper.make_node("Cast", ["table"], ["wider"], to=1))
    model = Model(proto)
    complete_shapes(model)
    assert (model.unlearned, model.value("Y").shape) == ("", ("batch", 4))


def test_why_a_model_could_not_be_run_is_part_of_every_error_that_follows(caplog: Any) -> None:
    """The class: a failed probe is kept on the model and said where it stops something, not before."""
    why = "running the model to measure .* failed: .*Scaler"
    model = Model(wide(8, 4, offset=5))
    with caplog.at_level("DEBUG", "ortflex"):
        complete_shapes(model)
        complete_shapes(model)
    assert "Scaler" in model.unlearned
    assert [r.levelname for r in caplog.records] == ["DEBUG"]
    assert "'scaled'" in caplog.text
    x, y = np.ones((6, 8), np.float32), np.ones((6, 4), np.float32)
    loss = {"name": "squared_error", "predicted": "product"}
    with pytest.raises(ModelError, match=f"the rank of 'product' is unknown.*{why}"):
        make(model, loss=loss, backend="fused").fit(x, y)
    proto = wide(8, 4, offset=5)
    with pytest.raises((NoGradientRule, Unsupported), match=f"(?s)unknown rank.*{why}"):
        make(proto, backend="fused").fit(x, y)
    with pytest.raises(NoGradientRule, match=f"(?s)unknown rank.*{why}"):
        gradient_model(proto, ["W"])
    report = check_model(proto)
    assert any("Scaler" in note for note in report.notes)
    assert "note: the types or shapes" in report.summary


def mixed(names: str) -> Any:
    """An output of an operator without inference (Scaler), as long as a symbol, and twice as long."""
    return after_scaler("Y = Concat <axis = 1> (scaled, scaled)", {}, names)


@pytest.mark.parametrize(
    ("names", "scaled", "y"),
    [
        ("N, T", ("batch", "T"), ("batch", None)),
        ("N, ?", ("batch", None), ("batch", None)),
        ("N, 4", ("batch", 4), ("batch", 8)),
        ("3, T", (3, "T"), (3, None)),
    ],
)
def test_sizes_that_follow_a_symbol_are_not_taken_for_fixed(
    names: str, scaled: Any, y: Any
) -> None:
    """The class: a size that was seen once is no fixed one where an input's free size made it."""
    model = Model(mixed(names))
    complete_shapes(model)
    assert model.value("scaled").shape == scaled
    assert model.value("Y").shape == y


@pytest.mark.parametrize("width", [16, 64])
def test_symbols_that_have_one_size_that_fits_are_found(width: int) -> None:
    """A free dimension may have to be as wide as a weight."""
    proto = wide(width, 3)
    proto.graph.input[0].CopyFrom(models.floats("X", "N", "F"))
    model = Model(proto)
    complete_shapes(model)
    assert model.value("Y").shape == ("batch", 3)


def test_a_pipeline_of_scikit_learn_is_fine_tuned_behind_its_scaler() -> None:
    pytest.importorskip("skl2onnx")
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    x = (5 + 3 * rng.standard_normal((60, 4))).astype(np.float32)
    y = np.where(x[:, 0] + x[:, 1] > 10, "high", "low")
    network = MLPClassifier(hidden_layer_sizes=(5,), solver="lbfgs", max_iter=20, random_state=0)
    pipeline = make_pipeline(StandardScaler(), network).fit(x, y)
    onx = to_onnx(pipeline, x[:1], target_opset=17, options={"zipmap": False})
    options: Any = {"optimizer": "sgd", "learning_rate": 0.1, "metrics": ["accuracy"]}
    trainer = Trainer(onx, loss="log_loss", epochs=3, **options)
    assert len(internals_of(trainer).problem.parameters) == 4
    before = trainer.evaluate(x, y[:, None])
    trainer.fit(x, y[:, None])
    assert trainer.evaluate(x, y[:, None])["loss"] < before["loss"]


@pytest.mark.parametrize(
    "text",
    [
        "e = Exp(x) r = ReduceSum<keepdims=1>(e, axes) z = Log(r) y = Mul(x, z)",
        "e = Exp(x) s = Add(axes, axes) r = ReduceMean<keepdims=1>(e, s) y = Mul(x, r)",
    ],
)
def test_shapes_that_follow_the_values_of_inputs_stay_unknown(text: str) -> None:
    """The class: a shape seen for made-up axes is taken for that of all axes, and sums go wrong."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[3, 2, 5] x, int64[1] axes) => '
        f"(float[A, B, C] y) {{ {text} }}"
    )
    proto = gradient_model(model, "x")
    rng = np.random.default_rng(0)
    g, at = rng.standard_normal((3, 2, 5)), np.array([1], np.int64)
    x = rng.standard_normal((3, 2, 5)).astype(np.float32)
    feeds = {"x": x, "axes": at, "cotangent/y": g.astype(np.float32)}
    got = Runner(proto, {})(feeds)["gradient/x"]
    wide = x.astype(np.float64)
    axis, e = 1 if "Log" in text else 2, np.exp(wide)
    total, along = e.sum(axis, keepdims=True), (g * wide).sum(axis, keepdims=True) * e
    expected = g * np.log(total) + along / total if axis == 1 else (g * total + along) / 5
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "whole", "width"),
    [
        ("f = Cast <to = 1> (ids)  m = Add(x, f)", "int64[N, 4] ids", 4),
        ("m = Compress <axis = 1> (x, ids)", "bool[4] ids", None),
    ],
)
def test_an_input_of_whole_numbers_leaves_known_what_does_not_follow_them(
    text: str, whole: str, width: int | None
) -> None:
    """The class: whole numbers as inputs, and an operator without inference after them.

    A width that follows their values stays unknown, another one is learned.
    """
    scale = "a = ai.onnx.ml.Scaler <offset = [0.0], scale = [2.0]> (m)"
    places = f"float[N, 4] x, {whole}", "float[N, k] y"
    model = Model(models.parsed(f"{text}  {scale}  y = Neg(a)", {}, *places, ai_onnx_ml=3))
    assert model.unknown()
    complete_shapes(model)
    assert model.unlearned == ""
    shape = model.value("a").shape
    assert (shape or (None, None))[-1] == width
    assert width is None or shape == ("batch", 4)


def behind_a_product(operator: str, after: str) -> Any:
    """A product by a large constant, then nodes from ``product``; the last one gives Y."""
    turned = operator == "Gemm"
    weight = np.random.default_rng(0).standard_normal((300, 400) if turned else (400, 300))
    call = f"{operator} {'<transB = 1>' if turned else ''} (X, W)"
    body = f"product = {call}  shape = Shape(product)  {after}"
    return models.parsed(
        body, {"W": weight, "axes": np.asarray([1])}, "float[N, 400] X", "float[?, ?] Y"
    )


@pytest.mark.parametrize("operator", ["MatMul", "Gemm"])
def test_products_by_large_constants_are_not_computed(operator: str, monkeypatch: Any) -> None:
    given: list[Any] = []

    class Noting(Runner):
        def __init__(self, model: Any, large: Any) -> None:
            given.append((model, large))
            super().__init__(model, large)

    monkeypatch.setattr("ortflex_core.compiler.model.shape_probe.Runner", Noting)
    model = Model(behind_a_product(operator, "Y = Reshape(product, shape)"))
    assert model.unknown()
    complete_shapes(model)
    ((probe, large),) = given
    assert model.value("Y").shape == ("batch", 300)
    assert operator not in {node.op_type for node in probe.graph.node}
    assert not large
    assert probe.ByteSize() < 10_000


def test_products_whose_values_decide_sizes_are_computed() -> None:
    found = "places = NonZero(product)  second = Gather <axis = 0> (places, axes)"
    model = Model(behind_a_product("MatMul", f"{found}  Y = Cast <to = 1> (second)"))
    nodes = model.ancestors(["Y"])
    products = shape_probe._large_products(model, nodes)
    assert products == {"product": 300}
    assert shape_probe._decide_sizes(nodes, products)


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
