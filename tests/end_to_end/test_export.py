"""What comes out is the user's own file: only the trained tensors are others."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from ortflex_core import ModelError, OrtflexError, OutputError, internals_of
from ortflex_core.compiler.onnx_files.export import OTHER_FORMATS
from tests import models
from tests.training import every_backend, make, regression


def masked(model: ModelProto, trained: Any) -> ModelProto:
    """A copy without receipt and the values of trained initializers; their encoding stays visible."""
    out = models.without_receipt(model)
    for tensor in out.graph.initializer:
        if tensor.name in trained:
            for field in ("raw_data", "float_data", "double_data"):
                content = getattr(tensor, field)
                if isinstance(content, bytes):
                    if content:
                        tensor.raw_data = b"\0" * len(content)
                else:
                    content[:] = [0.0] * len(content)
    return out


def assert_same_but(model: ModelProto, exported: ModelProto, trained: Any) -> None:
    """Every byte of the two is the same, the values of ``trained`` aside; and those did change."""
    assert masked(model, trained) == masked(exported, trained)
    before, after = models.weights_of(model), models.weights_of(exported)
    for name in trained:
        assert before[name].dtype == after[name].dtype
        assert not np.array_equal(before[name], after[name]), name


def decorated(model: ModelProto) -> ModelProto:
    """With everything a file can carry next to its graph."""
    model.producer_name, model.producer_version = "another tool", "7.1"
    model.domain, model.model_version, model.doc_string = "org.example", 42, "what it is for"
    helper.set_model_props(model, {"author": "somebody", "license": "CC0"})
    model.graph.doc_string = "the graph"
    model.graph.node[0].doc_string = "the first node"
    model.graph.value_info.append(models.floats(model.graph.node[0].output[0], "N", None))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3), "unused"))
    model.graph.initializer[0].doc_string = "a weight"
    return model


def trained(model: Any, backend: str = "example_numpy", **options: Any) -> Any:
    options = {"epochs": 2, "learning_rate": 0.05} | options
    trainer = make(model, backend=backend, **options)
    features = trainer.model.inputs[0].shape[1]
    outputs = trainer.model.outputs[0].shape[1]
    trainer.fit(*regression(features=features, outputs=outputs))
    return trainer


@every_backend
def test_only_the_trained_tensors_change(backend: str, tmp_path: Path) -> None:
    model = decorated(models.mlp())
    before = model.SerializeToString(deterministic=True)
    trainer = trained(model, backend, params=["W*", "!W2"])
    assert internals_of(trainer).problem.parameters == ("W1", "W3")
    returned = trainer.export(tmp_path / "out.onnx")
    assert_same_but(model, returned, ["W1", "W3"])
    assert onnx.load(tmp_path / "out.onnx") == returned
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    assert sorted(os.listdir(tmp_path)) == ["out.onnx"]
    assert model.SerializeToString(deterministic=True) == before


def test_values_keep_the_encoding_they_had() -> None:
    model = models.linear()
    old = models.weights_of(model)
    model.graph.initializer[0].CopyFrom(
        helper.make_tensor("coef", TensorProto.FLOAT, [5, 1], old["coef"].ravel().tolist())
    )
    assert len(model.graph.initializer[0].float_data) == 5
    exported = trained(model).export()
    assert_same_but(model, exported, ["coef", "intercept"])
    assert not exported.graph.initializer[0].HasField("raw_data")
    assert exported.graph.initializer[1].HasField("raw_data")


def double_model(raw: bool) -> ModelProto:
    model = models.linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        content = array.tobytes() if raw else array.ravel().tolist()
        tensor.CopyFrom(
            helper.make_tensor(tensor.name, TensorProto.DOUBLE, array.shape, content, raw=raw)
        )
    return model


@pytest.mark.parametrize("raw", [True, False])
def test_float64_is_trained_and_written_as_float64(raw: bool) -> None:
    model = double_model(raw)
    x, y = regression(features=5)
    trainer = make(model, epochs=1, batch_size=40, learning_rate=0.1)
    weights = models.weights_of(model)
    error = x.astype(float) @ weights["coef"] + weights["intercept"] - y
    trainer.fit(x.astype(float), y.astype(float))
    expected = weights["coef"] - 0.1 * 2 * x.astype(float).T @ error / 40
    # Far more digits than float32 has: scales and rates are bound as float64, too.
    np.testing.assert_allclose(trainer.get_state()["coef"], expected, rtol=1e-12)
    assert_same_but(model, trainer.export(), ["coef", "intercept"])


def test_external_data_stay_external(tmp_path: Path) -> None:
    model = models.mlp()
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    onnx.save(
        model,
        tmp_path / "in" / "m.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=64,
    )
    bare = onnx.load(tmp_path / "in" / "m.onnx", load_external_data=False)
    external = {t.name for t in bare.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert external
    assert len(external) < len(bare.graph.initializer)
    trainer = trained(tmp_path / "in" / "m.onnx")
    trainer.export(tmp_path / "out" / "m.onnx")
    assert sorted(os.listdir(tmp_path / "out")) == ["m.onnx", "m.onnx.data"]
    written = onnx.load(tmp_path / "out" / "m.onnx", load_external_data=False)
    assert {
        t.name for t in written.graph.initializer if t.data_location == TensorProto.EXTERNAL
    } == external
    whole = onnx.load(tmp_path / "out" / "m.onnx")
    assert_same_but(
        onnx.load(tmp_path / "in" / "m.onnx"), whole, internals_of(trainer).problem.parameters
    )
    x, _ = regression(features=6)
    np.testing.assert_allclose(models.predict(whole, {"X": x})["Y"], trainer.predict(x), rtol=1e-6)
    # Over the file it came from, as well.
    before = onnx.load(tmp_path / "in" / "m.onnx")
    trainer.export(tmp_path / "in" / "m.onnx")
    assert_same_but(
        before, onnx.load(tmp_path / "in" / "m.onnx"), internals_of(trainer).problem.parameters
    )


def with_function() -> ModelProto:
    model = models.mlp()
    body = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("Mul", ["x", "t"], ["y"]),
    ]
    function = helper.make_function(
        "own", "XTanh", ["x"], ["y"], body, [helper.make_opsetid("", 17)]
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    for node in model.graph.node:
        if node.op_type == "Tanh":
            node.op_type, node.domain = "XTanh", "own"
    return model


@every_backend
def test_functions_stay_functions(backend: str) -> None:
    model = with_function()
    trainer = trained(model, backend)
    assert len(internals_of(trainer).problem.parameters) == 6
    assert_same_but(model, trainer.export(), internals_of(trainer).problem.parameters)
    x, _ = regression(features=6)
    found = models.predict(trainer.export(), {"X": x})["Y"]
    np.testing.assert_allclose(found, trainer.predict(x), rtol=1e-5, atol=1e-6)


AWKWARD = {
    "coef": "0",
    "intercept": "a bias, of/the::model.1",
    "XW": "host/rate",
    "X": "Größe [m²]",
    "Y": "out put",
}


@every_backend
def test_names_are_only_names(backend: str) -> None:
    model = models.renamed(models.linear(), AWKWARD)
    plain = trained(models.linear(), backend, optimizer="sgd", penalty="l2")
    odd = trained(model, backend, optimizer="sgd", penalty="l2")
    for old, new in (("coef", "0"), ("intercept", AWKWARD["intercept"])):
        np.testing.assert_array_equal(plain.get_state()[old], odd.get_state()[new])
    assert_same_but(model, odd.export(), ["0", AWKWARD["intercept"]])


HOSTILE: list[dict[str, str]] = [
    *({"W1": name} for name in ("rate", "label", "weight", "step", "penalty", "loss", "total")),
    {"W1": "sample_weight", "Y": "label"},
    {"W1": "new/b1", "b1": "new/W1", "X": "new/m/W2"},
    {"W1": "gradient/b1", "b1": "gradient/W1", "Y": "gradient/W2"},
    {"W1": "m/b1", "b1": "v/W2", "W2": "m/W2", "b2": "average/W1"},
    {"W1": "penalty/b1", "b1": "batch/W1", "Y": "total/0"},
    {"X": "X@1", "W1": "label@1", "b1": "step@1", "W2": "rate#1", "b2": "sample_weight@0"},
    {"X": "label", "W1": "sample_weight", "Y": "y"},
    {"X": "sample_weight", "W1": "label"},
    {"W1": "cotangent/Y", "b1": "loss0/scale", "W2": "optimizer.beta1", "X": "host/rate"},
    {"W1": "W2_grad", "b1": "Moment_1_W2", "W2": "Learning_Rate", "b2": "Update_Count_W2"},
    {"W1": "constant.1", "b1": "MatMul.1", "W2": "Add.2", "b2": "W1.1", "X": "W1.2"},
]
"""Names that the graphs of a training had for their own values, or runtimes have."""


def trained_with_names(names: dict[str, str], backend: str) -> dict[str, Any]:
    """Weights and predictions after two epochs of whole and part batches, by the plain names."""
    x, y = regression(rows=44, features=6)
    share = np.linspace(0.5, 2, len(x), dtype=np.float32)
    trainer = make(
        models.renamed(models.mlp(), names),
        backend=backend,
        optimizer="adam",
        penalty="l2",
        epochs=2,
        batch_size=8,
    )
    trainer.fit(x, y, sample_weight=share)
    back = {new: old for old, new in names.items()}
    state = {back.get(n, n): a for n, a in trainer.get_state().items()}
    scores = trainer.evaluate(x, y, share)
    return {**state, "loss": scores["loss"], "prediction": trainer.predict(x)}


@functools.cache
def trained_plainly(backend: str) -> dict[str, Any]:
    return trained_with_names({}, backend)


@every_backend
@pytest.mark.parametrize("names", HOSTILE, ids=lambda names: ",".join(names.values()))
def test_every_name_trains_to_the_same_bits(backend: str, names: dict[str, str]) -> None:
    """Values of a training are found by what they are, so a tensor of a model may have any name."""
    odd, plain = trained_with_names(names, backend), trained_plainly(backend)
    assert sorted(odd) == sorted(plain)
    for name, value in plain.items():
        np.testing.assert_array_equal(odd[name], value)


@pytest.mark.parametrize("opset", [13, 15, 17])
def test_opset_and_ir_stay_as_they_were(opset: int) -> None:
    model = models.mlp()
    model.opset_import[0].version = opset
    model.ir_version = 7
    exported = trained(model).export()
    assert (exported.opset_import[0].version, exported.ir_version) == (opset, 7)


def test_a_classifier_of_skl2onnx_comes_back_with_label_and_probabilities(tmp_path: Path) -> None:
    sklearn = pytest.importorskip("sklearn.neural_network")
    skl2onnx = pytest.importorskip("skl2onnx")
    from skl2onnx.common.data_types import FloatTensorType

    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 4)).astype(np.float32)
    y = np.where(x[:, 0] + x[:, 1] > 0.5, "yes", np.where(x[:, 2] > 0, "no", "maybe"))
    fitted = sklearn.MLPClassifier((5,), max_iter=3, random_state=0)
    with pytest.warns(match="Maximum iterations"):
        fitted.fit(x, y)
    for zipmap in (False, True):
        model = skl2onnx.to_onnx(
            fitted,
            initial_types=[("X", FloatTensorType([None, 4]))],
            options={"zipmap": zipmap},
            target_opset=17,
        )
        trainer = make(
            model, loss="softmax_cross_entropy", learning_rate=0.5, epochs=60, metrics=["accuracy"]
        )
        before = trainer.evaluate(x, y)["accuracy"]
        trainer.fit(x, y)
        after = trainer.evaluate(x, y)["accuracy"]
        assert after > max(before, 0.9)
        exported = trainer.export(tmp_path / "c.onnx")
        assert_same_but(model, exported, internals_of(trainer).problem.parameters)
        found = models.predict(exported, {"X": x})
        label, probabilities = found[model.graph.output[0].name], found[model.graph.output[1].name]
        assert np.mean(label == y) == pytest.approx(after)
        if zipmap:
            probabilities = np.array([[row[c] for c in fitted.classes_] for row in probabilities])
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_array_equal(fitted.classes_[probabilities.argmax(axis=1)], label)


@every_backend
def test_graphs_in_use_are_saved_and_are_models(backend: str, tmp_path: Path) -> None:
    trainer = trained(models.mlp(), backend, penalty="l2", epochs=1)
    in_memory = trainer.save_onnx_graph()
    assert in_memory
    written = trainer.save_onnx_graph(tmp_path / "new" / "folder")
    assert sorted(written) == sorted(in_memory)
    for name, path in written.items():
        assert Path(path) == tmp_path / "new" / "folder" / f"{name}.onnx"
        assert onnx.load(path) == in_memory[name]
        assert in_memory[name].graph.node
        trained_names = {t.name for t in in_memory[name].graph.initializer}
        assert not trained_names & set(internals_of(trainer).problem.parameters)


def test_saving_graphs_before_anything_is_compiled_says_what_to_do() -> None:
    with pytest.raises(OrtflexError, match="nothing is compiled yet: call fit or step first"):
        make(models.linear()).save_onnx_graph()


def unwritable(tmp_path: Path) -> Path:
    """A file where a folder is wanted: no one may write there, root included."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    return blocked


def test_an_export_that_cannot_be_written_says_where_and_what(tmp_path: Path) -> None:
    trainer = trained(models.linear())
    for path in (unwritable(tmp_path) / "out.onnx", tmp_path / "missing" / "out.onnx"):
        with pytest.raises(OutputError, match=r"cannot write .*out\.onnx.*choose a folder"):
            trainer.export(path)


def test_graphs_that_cannot_be_written_say_where(tmp_path: Path) -> None:
    trainer = trained(models.linear())
    with pytest.raises(OutputError, match=r"cannot create the folder .*file"):
        trainer.save_onnx_graph(unwritable(tmp_path))
    with pytest.raises(OutputError, match="cannot create the folder"):
        trainer.save_onnx_graph(tmp_path / "file" / "below")


def test_a_value_of_another_shape_is_not_written() -> None:
    trainer = trained(models.linear())
    with pytest.raises(ModelError, match=r"'coef' has shape \[5, 1\], got \[1, 5\]"):
        trainer.model.export({"coef": np.zeros((1, 5), np.float32)})


@pytest.mark.parametrize("suffix", sorted(OTHER_FORMATS))
def test_a_suffix_of_another_format_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix.upper()}"
    with pytest.raises(OutputError, match="is an ONNX model") as error:
        make(models.linear(), backend="fused").export(path)
    assert "model.onnx" in str(error.value)
    assert not list(tmp_path.iterdir())
