"""A fixed batch dimension: refused with the way out, and freed where every row is treated alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex_core import DataError, Model, ModelError
from tests import models
from tests.plugins.commands import ortflex
from tests.training import make, regression, same

X, Y = regression(rows=22, features=6)
node = helper.make_node


def fixed(model: ModelProto, batch: int) -> ModelProto:
    """The model as an exporter writes it that traced it with one batch."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model


def reshaping(target: list[int], **attributes: Any) -> ModelProto:
    """Two Reshapes of the hidden layer; the first one's target is given."""
    rng = np.random.default_rng(0)
    model = models.parsed(
        "h = MatMul(X, W)  r = Reshape(h, there)  t = Tanh(r)  b = Reshape(t, back)  Y = MatMul(b, V)",
        {
            "W": rng.standard_normal((6, 4)),
            "V": rng.standard_normal((4, 1)),
            "there": np.array(target),
            "back": np.array([4, 4]),
        },
        outputs="float[N, 1] Y",
    )
    for name, value in attributes.items():
        model.graph.node[1].attribute.append(helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize(
    "model",
    [
        models.mlp(),
        reshaping([4, 2, 2]),
        reshaping([4, -1, 2]),
        # As torch writes x.view(x.size(0), -1).
        reshaping([4, -1, 2], allowzero=1),
        reshaping([4, -1], allowzero=1),
    ],
)
def test_it_trains_on_batches_of_any_size(model: ModelProto) -> None:
    free = models.renamed(model, {})
    trainer = make(fixed(model, 4), free_batch=True, backend="fused", batch_size=8, epochs=2)
    trainer.fit(X, Y)
    assert trainer.predict(X).shape == (22, 1)
    if any(n.op_type == "Reshape" for n in free.graph.node):
        for attribute in list(free.graph.node[1].attribute):  # a 0 copies the rows
            free.graph.node[1].attribute.remove(attribute)
        for tensor in free.graph.initializer:
            if tensor.name in ("there", "back"):
                array = onnx.numpy_helper.to_array(tensor).copy()
                array[0] = 0
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    twin = make(free, backend="fused", batch_size=8, epochs=2)
    twin.fit(X, Y)
    same(trainer.get_state(), twin.get_state())


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
    assert [n.op_type for n in model.internal.graph.node] == [
        n.op_type for n in models.mlp().graph.node
    ]
    assert model.inputs[0].shape == ("N", 6)


LINEAR = {"W": np.random.default_rng(0).standard_normal((6, 1))}


def mixing_rows() -> ModelProto:
    body = "r = MatMul(X, W)  m = ReduceMean<axes = [0], keepdims = 1>(r)  Y = Sub(r, m)"
    return fixed(models.parsed(body, LINEAR, outputs="float[N, 1] Y"), 4)


def one_weight_a_row() -> ModelProto:
    weights = {**LINEAR, "factor": np.arange(4.0).reshape(4, 1)}
    model = models.parsed("r = MatMul(X, W)  Y = Mul(r, factor)", weights, outputs="float[N, 1] Y")
    model.graph.node[1].name = "own"
    return fixed(model, 4)


def unequal() -> ModelProto:
    model = fixed(models.two_headed(), 4)
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 3
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (mixing_rows(), r"batch dimension of 4 cannot be freed: on 8 rows the output 'Y' differs"),
        (one_weight_a_row(), r"it fails on 8 rows: .*own.*Train with batch_size=4"),
        (unequal(), r"inputs with one batch size, but left has 4, right has 3"),
    ],
)
def test_a_graph_that_depends_on_the_batch_is_refused(model: ModelProto, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        Model(model, free_batch=True)


def test_functions_are_exported_as_they_were() -> None:
    model = fixed(models.mlp(), 4)
    body = [helper.make_node("Tanh", ["x"], ["y"])]
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Act", ["x"], ["y"], body, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    for one in model.graph.node:
        if one.op_type == "Tanh":
            one.op_type, one.domain = "Act", "own"
    trainer = make(model, free_batch=True, backend="fused", batch_size=8, epochs=1)
    trainer.fit(X, Y)
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
