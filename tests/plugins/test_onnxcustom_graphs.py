"""Batches and graphs of the older API: loaders, weights' names, losses inside, derivatives."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, DataError, ModelError, require_runtime
from ortflex_plugins.onnxcustom import (
    AbsoluteLearningLoss,
    DerivativeOptions,
    ElasticLearningLoss,
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    OrtDataLoader,
    SquareLearningLoss,
    add_loss_output,
    get_ort_device,
    get_train_initializer,
    numpy_to_ort_value,
    onnx_derivative,
    onnx_rename_weights,
    ort_device_to_string,
)
from ortflex_plugins.onnxcustom.weights import rename_tensors
from tests import models
from tests.plugins.test_onnxcustom_parts import CLASSES, FACTORS, FEW, TARGETS, Counting

RNG = np.random.default_rng(11)
run = models.predict


def test_random_batches_are_consecutive_rows_of_everything() -> None:
    X = np.arange(20, dtype=np.float32).reshape(10, 2)
    np.random.seed(3)
    loader = OrtDataLoader(X, np.arange(10), np.arange(10) * 10.0, batch_size=4)
    seen = set()
    for _ in range(40):
        batches = list(loader.iter_ortvalue())
        assert len(batches) == 3  # ⌈10 / 4⌉
        for x, y, w in batches:
            start = int(y.numpy()[0, 0])
            rows = np.arange(start, start + 4)
            assert y.shape() == [4, 1]
            np.testing.assert_array_equal(x.numpy(), X[rows])
            np.testing.assert_array_equal(w.numpy(), rows * 10)
            seen.update(rows.tolist())
    assert seen == set(range(10)), "the last row, too"


def test_the_global_seed_decides() -> None:
    X, y = np.zeros((30, 1), np.float32), np.arange(30)

    def drawn() -> list[int]:
        np.random.seed(7)
        loader = OrtDataLoader(X, y, batch_size=5)
        return [int(batch[1][0, 0]) for batch in loader.iter_numpy()]

    np.random.seed(7)
    expected = [int(np.random.randint(0, 26)) for _ in range(6)]
    assert drawn() == drawn() == expected


@pytest.mark.parametrize("weighted", [False, True])
def test_loaders_bind_what_they_iterate(weighted: bool) -> None:
    X, y = RNG.standard_normal((9, 2, 3)), RNG.standard_normal(9)
    weights = FACTORS[:1].repeat(9) if weighted else None
    loader = OrtDataLoader(X, y, weights, batch_size=4, random_iter=False)
    bind = Counting()
    names = ["X", "label", "weight"] if weighted else ["X", "label"]
    sizes = list(loader.iter_bind(bind, [*names, "Learning_Rate"]))
    assert sizes == [4, 4, 4]
    expected = [
        (name, array[start:].ctypes.data)
        for start in (0, 4, 5)
        for name, array in zip(names, loader.data_np, strict=True)
    ]
    assert bind.calls == expected
    with pytest.raises(DataError, match="expected as many names"):
        next(loader.iter_bind(bind, ["X"]))


def test_small_data_are_one_batch() -> None:
    X, y = np.zeros((3, 2), np.float32), np.arange(3)
    for loader in (OrtDataLoader(X, y, batch_size=20), OrtDataLoader(X, y, batch_size=0)):
        [(x, labels)] = loader.iter_ortvalue()
        assert (x.shape(), labels.shape()) == ([3, 2], [3, 1])
    twin = pickle.loads(pickle.dumps(loader))
    assert repr(twin) == "OrtDataLoader(..., ..., batch_size=0, device='cpu')"
    assert len(twin) == 3
    assert len(twin.data_ort) == 2


def test_loaders_refuse_lengths_that_differ() -> None:
    with pytest.raises(DataError, match="X has 3 rows, y has 2"):
        OrtDataLoader(np.zeros((3, 1)), np.zeros(2))
    with pytest.raises(DataError, match=r"sample_weight has the shape \[3, 2\], expected \[3\]"):
        OrtDataLoader(np.zeros((3, 1)), np.zeros(3), np.zeros((3, 2)))
    with pytest.raises(ConfigError, match="got 'cpu2'"):
        OrtDataLoader(np.zeros((3, 1)), np.zeros(3), device="cpu2")


def test_devices() -> None:
    for text, kind in {"cpu": "cpu", "gpu": "cuda", "cuda:0": "cuda", "gpu:2": "cuda:2"}.items():
        assert ort_device_to_string(get_ort_device(text)) == kind
    with pytest.raises(TypeError, match="got int"):
        get_ort_device(3)
    with pytest.raises(TypeError, match="got str"):
        ort_device_to_string("cpu")


def test_renamed_weights_sort_like_the_file() -> None:
    model = models.mlp((3,) + (2,) * 11)
    before = [t.name for t in model.graph.initializer]
    names = [t.name for t in onnx_rename_weights(model).graph.initializer]
    assert names == sorted(names) == [f"I{k:02d}_{n}" for k, n in enumerate(before)]
    onnx.checker.check_model(model, full_check=True)
    x = RNG.standard_normal((4, 3)).astype(np.float32)
    same = run(models.mlp((3,) + (2,) * 11), {"X": x})["Y"]
    np.testing.assert_array_equal(run(model, {"X": x})["Y"], same)
    assert list(get_train_initializer(model)) == names


def test_renaming_follows_weights_into_subgraphs() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] X, bool c) => (float[N, 1] Y)
        <float[2, 1] w = {1, 2}> {
          Y = If (c) <then_branch = a () => (float[N, 1] ya) { ya = MatMul (X, w) },
                      else_branch = b () => (float[N, 1] yb)
                      { w2 = Neg (w)  yb = MatMul (X, w2) }>
        }"""
    )
    renamed = onnx_rename_weights(copy.deepcopy(model))
    x = np.array([[1, 10]], np.float32)
    for c in (True, False):
        feeds = {"X": x, "c": np.array(c)}
        assert run(renamed, feeds)["Y"] == run(model, feeds)["Y"]


def test_a_subgraph_s_own_tensors_keep_their_names() -> None:
    """Exporters give tensors of a branch or the inputs of a body the names of outer ones."""
    proto = onnx.parser.parse_graph(
        """g (float[2] x, bool c, int64 n) => (float[2] y) <float[2] w = {1, 2}> {
          a = If (c) <then_branch = t () => (float[2] p) <float[2] w = {5, 6}> { p = Add (x, w) },
                      else_branch = e () => (float[2] q) { q = Mul (x, w) }>
          y = Loop (n, , a) <body = b (int64 i, bool go, float[2] w) => (bool on, float[2] v)
                             { on = Identity (go)  v = Neg (w) }>
        }"""
    )
    rename_tensors(proto, {"w": "I0"})
    names = {a.g.name: a.g for node in proto.node for a in node.attribute}
    assert list(names["t"].node[0].input) == ["x", "w"]
    assert names["t"].initializer[0].name == "w"
    assert list(names["e"].node[0].input) == ["x", "I0"]
    assert [i.name for i in names["b"].input] == ["i", "go", "w"]
    assert list(names["b"].node[1].input) == ["w"]
    assert proto.initializer[0].name == "I0"


def test_only_floats_are_trained() -> None:
    model = models.linear()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1]), "shape_tensor"))
    found = get_train_initializer(model)
    assert list(found) == ["coef", "intercept"]
    value, tensor = found["coef"]
    np.testing.assert_array_equal(value, onnx.numpy_helper.to_array(tensor))


WEIGHTS = {"l1_weight": 0.1, "l2_weight": 0.9}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("score", "options", "value"),
    [
        ("squared_error", {}, lambda e: e**2),
        ("l2", {}, lambda e: e**2),
        ("absolute_error", {}, np.abs),
        ("l1", {}, np.abs),
        ("elastic", {}, lambda e: 0.5 * np.abs(e) + 0.5 * e**2),
        ("elastic", WEIGHTS, lambda e: 0.1 * np.abs(e) + 0.9 * e**2),
    ],
)
def test_loss_output(score: str, options: dict[str, float], value: Any, weighted: bool) -> None:
    model = models.linear(3)
    before = model.SerializeToString()
    penalty = {"coef": {"l1": 0.2, "l2": 0.01}, "intercept": 0.5}
    weight = "weight" if weighted else None
    graph = add_loss_output(model, score, weight_name=weight, penalty=penalty, **options)
    assert model.SerializeToString() == before
    onnx.checker.check_model(graph, full_check=True)
    x = RNG.standard_normal((FEW, 3)).astype(np.float32)
    feeds = {"X": x, "label": TARGETS} | ({"weight": FACTORS} if weighted else {})
    assert [i.name for i in graph.graph.input] == list(feeds)
    out = run(graph, feeds)
    assert list(out) == ["loss", "Y"]
    coef, intercept = (a.astype(np.float64) for a, _ in get_train_initializer(model).values())
    rows = value(x @ coef + intercept - TARGETS)[:, 0] * (FACTORS if weighted else 1)
    cost = 0.2 * np.abs(coef).sum() + 0.01 * (coef**2).sum() + 0.5 * (intercept**2).sum()
    assert out["loss"].shape == (1, 1)
    np.testing.assert_allclose(out["loss"], [[rows.sum() + cost]], rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_log_loss_output(weighted: bool) -> None:
    model = models.of_text(
        "(float[N, 3] X) => (float[N, 2] label, float[N, 2] probabilities) "  # as skl2onnx does
        "{ label = MatMul(X, coef) probabilities = Softmax<axis = 1>(label) }",
        {"coef": (3, 2)},
    )
    weight = "weight" if weighted else None
    graph = add_loss_output(model, "log", output_index=1, weight_name=weight, eps=0.2)
    onnx.checker.check_model(graph, full_check=True)
    x = RNG.standard_normal((FEW, 3)).astype(np.float32)
    feeds = {"X": x, "label": CLASSES} | ({"weight": FACTORS} if weighted else {})
    out = run(graph, feeds)
    p = np.clip(out["probabilities"].astype(np.float64), 0.2, 0.8)
    p /= p.sum(1, keepdims=True)
    rows = -np.log(p[np.arange(FEW), CLASSES[:, 0]]) * (FACTORS if weighted else 1)
    np.testing.assert_allclose(out["loss"], [[rows.mean()]], rtol=1e-5)
    assert graph.graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.INT64


def test_an_output_with_the_name_of_the_labels_is_renamed() -> None:
    model = models.linear(3)
    model.graph.output[0].name = model.graph.node[-1].output[0] = "label"
    graph = add_loss_output(model)
    onnx.checker.check_model(graph, full_check=True)
    assert [i.name for i in graph.graph.input] == ["X", "label"]
    x = RNG.standard_normal((FEW, 3)).astype(np.float32)
    out = run(graph, {"X": x, "label": TARGETS})
    np.testing.assert_allclose(out["_label_"], run(model, {"X": x})["label"], rtol=1e-6)
    np.testing.assert_allclose(out["loss"], [[((out["_label_"] - TARGETS) ** 2).sum()]], rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (models.linear(), {"score_name": "square_error"}, "did you mean 'squared_error'"),
        (
            *(models.linear(), {"score_name": "elastic", "l1_wait": 0.1}),
            r"unknown parameter 'l1_wait' .* did you mean 'l1_weight'",
        ),
        (models.two_headed(), {}, r"choose the one to compare .* \['amount', 'scores'\]"),
        (models.two_headed(), {"output_index": "score"}, "'score' is not .* did you mean 'scores'"),
        (models.linear(), {"penalty": {"koef": 0.1}}, "'koef' is not .* did you mean 'coef'"),
        (models.linear(), {"weight_name": "coef"}, "already has a tensor 'coef'"),
    ],
)
def test_loss_output_says_what_is_wrong(model: Any, options: Any, text: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=text):
        add_loss_output(model, **options)


@pytest.mark.parametrize("fill", [False, True])
def test_derivative_is_the_gradient(fill: bool, torch: Any) -> None:
    model = models.mlp((3, 4, 2))
    options = DerivativeOptions.KeepOutputs | (DerivativeOptions.FillGrad if fill else 0)
    made = onnx_derivative(model, options=options)
    names = list(get_train_initializer(model))
    assert [o.name for o in made.graph.output] == [f"{n}_grad" for n in ["X", *names]] + ["Y"]
    inputs = ["X", *names] if fill else ["X", *names, "Y_grad"]
    assert [i.name for i in made.graph.input] == inputs
    x = RNG.standard_normal((FEW, 3)).astype(np.float32)
    seed = RNG.standard_normal((FEW, 2)).astype(np.float32)
    values = {"X": x} | {n: a for n, (a, _) in get_train_initializer(model).items()}
    out = run(made, values if fill else {**values, "Y_grad": seed})
    t = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in values.items()}
    y = torch.tanh(t["X"] @ t["W1"] + t["b1"]) @ t["W2"] + t["b2"]
    y.backward(torch.ones_like(y) if fill else torch.tensor(seed, dtype=torch.float64))
    np.testing.assert_allclose(out["Y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, tensor in t.items():
        np.testing.assert_allclose(out[f"{name}_grad"], tensor.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_derivative_options() -> None:
    model = models.linear(2)
    names = ["X_grad", "coef_grad", "intercept_grad"]
    assert [o.name for o in onnx_derivative(model).graph.output] == names
    some = onnx_derivative(model, weights=["coef"], inputs=[])
    assert [o.name for o in some.graph.output] == ["coef_grad"]
    kept = onnx_derivative(model, options=DerivativeOptions.KeepYieldOp)
    [node] = [n for n in kept.graph.node if n.op_type == "YieldOp"]
    assert (list(node.input), list(node.output)) == (["Y"], ["Y_grad"])
    assert [i.name for i in kept.graph.input] == ["X", "coef", "intercept"]
    with pytest.raises(TypeError, match="expected a DerivativeOptions, got int"):
        onnx_derivative(model, options=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="FillGrad requires KeepOutputs"):
        onnx_derivative(model, options=DerivativeOptions.FillGrad)
    both = DerivativeOptions.KeepYieldOp | DerivativeOptions.KeepOutputs
    with pytest.raises(ConfigError, match="KeepYieldOp cannot be combined"):
        onnx_derivative(model, options=both)


def test_derivative_of_a_loss(tmp_path: Path) -> None:
    model = add_loss_output(models.linear(3))
    path = str(tmp_path / "grad.onnx")
    given = {"loss": "loss", "label": "label", "path_name": path}
    made = onnx_derivative(model, options=DerivativeOptions.Loss, **given)  # type: ignore[arg-type]
    assert onnx.load(path) == made
    assert [o.name for o in made.graph.output] == ["X_grad", "loss", "Y"]
    x = RNG.standard_normal((FEW, 3)).astype(np.float32)
    out = run(made, {"X": x, "label": TARGETS})
    coef, intercept = (a.astype(np.float64) for a in models.weights_of(models.linear(3)).values())
    error = x @ coef + intercept - TARGETS
    np.testing.assert_allclose(out["X_grad"], 2 * error @ coef.T, rtol=1e-5, atol=1e-5)
    for options, text in (
        ({"loss": "loss", "label": "label"}, "path_name: required"),
        (given | {"loss": "los"}, "did you mean 'loss'"),
        (given | {"weights": ["coef"]}, "supports gradients of inputs only"),
    ):
        with pytest.raises(ConfigError, match=text):
            onnx_derivative(model, options=DerivativeOptions.Loss, **options)  # type: ignore[arg-type]


def test_graphs_are_written_to_files(tmp_path: Path) -> None:
    penalty = ElasticLearningPenalty()
    penalty.build_onnx_function(15, "cpu", 1)
    saved = penalty.save_onnx_graph(str(tmp_path), prefix="my_")
    names = [f"my_ElasticLPenalty.{n}.onnx" for n in ("penalty_grad_onnx_", "penalty_onnx_")]
    assert sorted(Path(f).name for f in saved.values()) == names
    assert onnx.load(saved["penalty_onnx_"]) == penalty.penalty_onnx_
    with pytest.warns(UserWarning, match="already exists"):
        penalty.save_onnx_graph(str(tmp_path), prefix="my_")
    with pytest.raises(OSError, match="does not exist"):
        penalty.save_onnx_graph(str(tmp_path / "nowhere"))


def test_opsets_beyond_the_runtime_are_not_asked_for() -> None:
    loss = SquareLearningLoss()
    loss.build_onnx_function(10_000, "cpu", None)
    assert loss.loss_grad_onnx_.opset_import[0].version == require_runtime().max_opset


PARTS = {
    "penalty": ElasticLearningPenalty(l1=0.1, l2=0.2),
    "rate": LearningRateSGD(0.1),
    "nesterov": LearningRateSGDNesterov(0.1, nesterov=True, momentum=0.5),
    "momentum": LearningRateSGDNesterov(0.1, nesterov=False, momentum=0.5),
    "squared": SquareLearningLoss(),
    "absolute": AbsoluteLearningLoss(),
    "elastic": ElasticLearningLoss(),
    "log": NegLogLearningLoss(),
}


@pytest.mark.parametrize("name", PARTS)
def test_every_graph_of_every_part_is_a_valid_file(name: str) -> None:
    """Whatever part of an optimizer: its graphs pass onnx's own check, shapes of inputs included."""
    part = copy.deepcopy(PARTS[name])
    arguments = dict.fromkeys(("penalty", "rate", "nesterov", "momentum"), 3)
    part.build_onnx_function(15, "cpu", arguments.get(name))
    saved = part.save_onnx_graph(bytes)
    assert saved
    for content in saved.values():
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 3, 2), (2, 1, 2, 3)])
def test_weights_of_any_rank_are_moved_by_one_graph(shape: tuple[int, ...]) -> None:
    """The graphs take vectors, so that their files are valid; weights keep their shapes."""
    rng = np.random.default_rng(3)
    weight, gradient, velocity = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    rate = LearningRateSGDNesterov(0.1, nesterov=True, momentum=0.5)
    rate.build_onnx_function(15, "cpu", 1)
    rate.init_learning_rate()
    values = [numpy_to_ort_value(a.copy()) for a in (weight, gradient, velocity)]
    rate.update_weights(0, "cpu", values[0], values[1], 1, values[2])
    z = 0.5 * velocity - 0.1 * gradient
    np.testing.assert_allclose(values[2].numpy(), z, rtol=1e-5, atol=1e-6)
    wanted = weight + 0.5 * z - 0.1 * gradient
    np.testing.assert_allclose(values[0].numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert values[0].numpy().shape == shape
    penalty = ElasticLearningPenalty(l1=0.1, l2=0.2)
    penalty.build_onnx_function(15, "cpu", 1)
    loss = numpy_to_ort_value(np.array([2], np.float32))
    own = numpy_to_ort_value(weight.copy())
    total = penalty.penalty_loss("cpu", loss, own).numpy()
    cost = 2 + (0.1 * np.abs(weight) + 0.2 * weight**2).sum()
    np.testing.assert_allclose(total, [cost], rtol=1e-5)
    penalty.update_weights(0, "cpu", own)
    np.testing.assert_allclose(own.numpy(), 0.6 * weight - 0.1 * np.sign(weight), rtol=1e-5)


def test_module_paths_of_the_older_documentation_import() -> None:
    """Every module path that the older package's pages name, and its version."""
    from ortflex_plugins import onnxcustom
    from ortflex_plugins.onnxcustom.training.optimizers import OrtGradientOptimizer
    from ortflex_plugins.onnxcustom.training.optimizers_partial import (
        OrtGradientForwardBackwardOptimizer,
    )
    from ortflex_plugins.onnxcustom.utils import orttraining_helper

    assert OrtGradientOptimizer is onnxcustom.OrtGradientOptimizer
    assert OrtGradientForwardBackwardOptimizer is onnxcustom.OrtGradientForwardBackwardOptimizer
    assert orttraining_helper.add_loss_output is onnxcustom.add_loss_output
    assert onnxcustom.__version__
