"""Bad input is an ortflex error that says what, where, expected and got; never a C++ traceback."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import (
    DataError,
    OrtflexError,
    PluginError,
    TrainingDiverged,
    Unsupported,
    require_runtime,
)
from ortflex_core.compiler.problem.groups import GROUP_KEYS
from tests import models
from tests.training import every_backend, make, regression, same

X, Y = regression(rows=20)


# Numbers and names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("learning_rate", float("inf"), "learning_rate: expected a finite number > 0, got inf"),
        ("learning_rate", "0.1", "learning_rate: expected a finite number > 0, got '0.1'"),
        ("dropout", "of", "dropout: expected 'file', 'off' or a number >= 0 and < 1, got 'of'"),
        ("device", "cuda:x", "device: expected a number after the colon, got 'cuda:x'"),
        ("loss", [], "loss: at least one loss is needed"),
        ("loss", 3, "loss: expected a name, a mapping with the key 'name', or a loss, got 3"),
        ("penalty", {"coef": {"l3": 1}}, r"penalty.*l3: unknown parameter"),
        ("penalty", {"l2": 0.1}, r"penalty\.l2 may be a penalty or the name of a parameter"),
        ("reinitialize", "W*", r"reinitialize: no trained parameter matches 'W\*'"),
    ],
)
def test_options_out_of_range(option: str, value: Any, text: str) -> None:
    with pytest.raises(OrtflexError, match=text):
        make(models.linear(), **{option: value})


_KINDS = [True, 1, -1, 1.5, np.nan, "coef", "sgd", "x", None, [], [1], ["coef"], [None]]
_KINDS += [{}, {"a": 1}]


@pytest.mark.parametrize("key", sorted(GROUP_KEYS))
def test_a_value_of_any_type_in_a_group_is_taken_or_refused_by_name(key: str) -> None:
    """Class: the value of a key has another type than its check expects, and is iterated over."""
    refused = []
    for value in _KINDS:
        try:
            make(models.linear(), groups=[{"params": "coef", key: value}])
        except OrtflexError as error:
            refused.append(str(error))
    for message in refused:
        assert re.search(rf"groups\[0\](\.{key}|: )", message)
    assert 0 < len(refused) < len(_KINDS)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("loss", "sqared_error", "unknown loss 'sqared_error'; did you mean 'squared_error'"),
        ("penalty", "l22", "unknown penalty 'l22'; did you mean"),
        ("optimizer", "adm", "unknown optimizer 'adm'; did you mean 'adam'"),
        ("schedule", "cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
        ("device", "gpu", "unknown device 'gpu'; .*cuda"),
        ("backend", "trainingagent", "unknown backend 'trainingagent'; its name .* 'training_ag"),
        ("metrics", ["acuracy"], "unknown metric 'acuracy'; did you mean 'accuracy'"),
        ("callbacks", ["example_stp"], "unknown callback 'example_stp'; did you mean 'example_sto"),
        ("gradients", ["matmull"], "unknown gradient family 'matmull'; did you mean 'matmul'"),
    ],
)
def test_unknown_names(option: str, value: Any, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        make(models.linear(), **{option: value})


def test_cuda_without_cuda() -> None:
    if "CUDAExecutionProvider" in require_runtime().providers:
        pytest.skip("this onnxruntime has the CUDA provider")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(Unsupported, match=r"the device 'cuda' cannot be used: .*install"):
            make(models.linear(), device=device)


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (models.two_headed(), "squared_error", r"has 2 float outputs \(amount, scores\) and the"),
        (models.two_headed(), {"amuont": "squared_error"}, "has no tensor 'amuont'; did you mean"),
        (models.linear(), {"name": "squared_error", "predicted": "Z"}, "has no tensor 'Z'"),
    ],
)
def test_what_the_loss_sees(model: Any, loss: Any, text: str) -> None:
    with pytest.raises(OrtflexError, match=text):
        make(model, loss=loss)


# Data ---------------------------------------------------------------------------------------------


def cut(array: Any, value: Any, at: int = 3) -> Any:
    out = array.copy()
    out[at] = value
    return out


@pytest.mark.parametrize(
    ("x", "y", "w", "text"),
    [
        (X[:, 0], Y, None, r"X has shape \[20\], but 'X' expects \[N, 5\]"),
        (X.astype("U"), Y, None, r"X has type <U\d+, but 'X' expects float32"),
        (X, None, None, "expects labels 'label', y has none"),
        (cut(X, np.nan), Y, None, r"X has a value that is not finite \(first in row 3\)"),
        (cut(X, np.inf), Y, None, r"X has a value that is not finite \(first in row 3\)"),
        (X, cut(Y, np.nan), None, r"y has a value that is not finite \(first in row 3\)"),
        (X, Y[:, None], None, r"\[batch, 1\], got .* float32\[batch, 1, 1\].*y\.reshape\(-1, 1\)"),
        (X, np.hstack([Y, Y]), None, r"shape \[batch, 1\], got label: float32\[batch, 2\]"),
        (X, Y.astype("U"), None, "has type <U.*, expected numbers"),
        (X, Y, cut(np.ones(20), -1.0), r"sample_weight must be >= 0, but row 3 has -1"),
        (X, Y, cut(np.ones(20), np.nan), "sample_weight has a value that is not finite"),
        (X, Y, np.ones((20, 3)), r"sample weights of shape \[batch, 3\] do not broadcast"),
        (X, Y, {"wieght": np.ones(20)}, "sample_weight has 'wieght', which no loss uses"),
        (X, {"lable": Y}, None, "label"),
        ({"Z": X}, Y, None, "X has 'Z', .*Known: X"),
    ],
)
def test_data_that_do_not_fit(x: Any, y: Any, w: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make(models.linear(), epochs=1).fit(x, y, w)


def test_values_are_checked_once_an_array_and_only_if_wanted() -> None:
    trainer = make(models.linear(), epochs=1, check_finite=False)
    trainer.fit(X, Y)
    assert np.isnan(trainer.predict(cut(X, np.nan))[3]).all()
    with pytest.raises(DataError, match="check_finite=False"):
        make(models.linear()).predict(cut(X, np.nan))


@pytest.mark.parametrize("bad", [-1, 3, 1000])
def test_labels_out_of_range(bad: int) -> None:
    x = X[:, :4]
    y = np.arange(20) % 3
    trainer = make(models.classifier(), loss="softmax_cross_entropy")
    with pytest.raises(DataError, match=rf"at least 0 and at most 2.*first is {bad} in row 3"):
        trainer.fit(x, cut(y, bad))


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**64 - 100])
def test_integers_that_the_type_does_not_hold(value: int) -> None:
    """They would become other integers: 2⁶⁴ − 100 the label −100, which softmax ignores."""
    labels = cut((np.arange(20) % 3).astype(np.uint64), value)
    trainer = make(models.classifier(), loss="softmax_cross_entropy", epochs=1)
    with pytest.raises(DataError, match=rf"y has {value} in row 3, but 'label' expects int64"):
        trainer.fit(X[:, :4], labels)
    trainer.fit(X[:, :4], cut(labels, 2))


@every_backend
@pytest.mark.parametrize("least", [1e-42, 1e-45])
@pytest.mark.parametrize("rows", [slice(None), slice(10, None)], ids=["all", "half"])
def test_sample_weights_whose_inverse_overflows(backend: str, least: float, rows: slice) -> None:
    """A batch of such rows would diverge on some backends and train on others."""
    weights = cut(np.ones(20), least, rows)
    trainer = make(models.linear(), backend=backend, epochs=1, batch_size=10, shuffle=False)
    row, largest = rows.start or 0, weights.astype(np.float32).max()
    text = rf"sample_weight: row {row} has the weight 1.*e-4\d.*largest is {largest:.3g}; multiply"
    with pytest.raises(DataError, match=text):
        trainer.fit(X, Y, weights)
    same(trainer.get_state(), models.weights_of(models.linear()), 0)
    trainer.fit(X, Y, weights * 1e10)  # what the message says


@pytest.mark.parametrize("shape", [(12,), (12, 1, 1), (12, 3, 1), (12, 1, 2)], ids=str)
def test_weights_with_an_axis_of_size_1_count_for_all_its_values(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    places = "float[N, 3, 4] X", "float[N, 3, 2] Y"
    model = models.parsed("Y = MatMul(X, W)", {"W": rng.standard_normal((4, 2))}, *places)
    x, y = (rng.standard_normal((12, 3, n)).astype(np.float32) for n in (4, 2))
    weights = rng.uniform(0.5, 2, shape)
    wide = weights.reshape(shape if len(shape) == 3 else (12, 1, 1))
    one, other = (make(model, epochs=1, batch_size=12, backend="fused") for _ in range(2))
    found = one.fit(x, y, weights)["loss"]
    assert found == pytest.approx(other.fit(x, y, np.broadcast_to(wide, y.shape))["loss"], rel=1e-6)
    same(one.get_state(), other.get_state(), 1e-6)


@every_backend
def test_sample_weights_that_all_round_to_zero(backend: str) -> None:
    trainer = make(models.linear(), backend=backend, epochs=1)
    with pytest.raises(DataError, match=r"sample_weight: row 0 has the weight 1e-300, .*multiply"):
        trainer.fit(X, Y, np.full(20, 1e-300))
    trainer.fit(X, Y, cut(np.ones(20), 1e-300))  # next to a 1 that is 0


def test_small_sample_weights_of_a_sum_are_no_denominator() -> None:
    make(models.linear(), reduction="sum", epochs=1).fit(X, Y, np.full(20, 1e-42))


def spoiled(model: onnx.ModelProto, name: str, value: float) -> onnx.ModelProto:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(cut(models.weights_of(model)[name], value), name))
    return model


@every_backend
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_in_the_file_are_named(backend: str, value: float) -> None:
    """A smaller learning rate would not help; what came of finite weights is another message."""
    what = "NaN" if np.isnan(value) else "infinities"
    params = None if np.isnan(value) else ["coef"]  # unless it is asked for, a mask
    model = spoiled(models.linear(), "coef", value)
    trained = make(model, backend=backend, epochs=1, params=params)
    with pytest.raises(TrainingDiverged, match=rf"weight 'coef' has {what} \(1 of 5 values\)") as e:
        trained.fit(X, Y)
    assert "learning_rate" not in str(e.value)


@every_backend
def test_constants_that_are_nan_in_the_file_are_named(backend: str) -> None:
    model = spoiled(models.linear(), "coef", np.nan)
    with pytest.raises(TrainingDiverged, match="'coef', which is not trained, has NaN"):
        make(model, backend=backend, epochs=1, params=["intercept"]).fit(X, Y)


def test_class_labels_the_model_does_not_know() -> None:
    x, names = X[:, :4], np.array(["ant", "bee", "cat"])[np.arange(20) % 3]
    for classes, text in (
        (None, r"does not define their order; pass classes=\[…\]"),
        (["ant", "bee", "dog"], r"the class 'cat' \(row 2\).*'ant', 'bee', 'dog'"),
    ):
        with pytest.raises(DataError, match=text):
            make(models.classifier(), loss="softmax_cross_entropy", classes=classes).fit(x, names)


@every_backend
def test_a_batch_dimension_that_is_fixed(backend: str) -> None:
    model = models.linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    trainer = make(model, backend=backend, batch_size=4, epochs=1)
    assert len(trainer.fit(X, Y)) == 1
    assert trainer.predict(X).shape == (20, 1)
    with pytest.raises(DataError, match=r"fixed batch dimension.*a batch has 8 rows; pass"):
        make(model, backend=backend, batch_size=8).fit(X, Y)
    with pytest.raises(DataError, match=r"fixed batch dimension.*18 rows leave a last batch of 2"):
        make(model, backend=backend, batch_size=4).fit(X[:18], Y[:18])


def test_states_that_do_not_fit() -> None:
    trainer = make(models.linear())
    for state, text in (
        ({"coeff": np.zeros((5, 1))}, "unknown parameter 'coeff'; did you mean 'coef'"),
        ({"coef": np.zeros(5)}, r"'coef' is float32\[5, 1\], got float64\[5\]"),
        ({"coef": np.full((5, 1), "a")}, r"'coef' is float32\[5, 1\], got <U1\[5, 1\]"),
    ):
        with pytest.raises(DataError, match=text):
            trainer.set_state(state)
