"""The step as ONNX's TrainingInfoProto: run as the standard says, it trains as the portable step does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

from tests import models
from tests.core.test_statistics import COPIES, LAYERS, network
from tests.end_to_end.portable_cases import batches, columns, compile_for, fused, runner
from tests.training import regression


def combined(model: ModelProto) -> ModelProto:
    """The training graph by the standard: the lists of the model and of the algorithm, joined."""
    out = ModelProto()
    out.CopyFrom(model)
    del out.training_info[:]
    (info,) = model.training_info
    for field in ("input", "output", "initializer", "node", "value_info"):
        getattr(out.graph, field).extend(getattr(info.algorithm, field))
    known = {v.name for v in out.graph.input}
    # To replace their values at every run, the variables are inputs with defaults.
    for tensor in out.graph.initializer:
        if tensor.name in {b.key for b in info.update_binding} - known:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            out.graph.input.append(value)
    return out


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (models.mlp(), {"optimizer": "adam", "penalty": "l2", "averaging": "ema"}),
    "frozen": (models.mlp((3, 700, 1)), {"params": ["!W1"], "optimizer": "momentum"}),
    "accumulation": (models.mlp((3, 4, 1)), {"accumulate": 2}),
    "statistics": (
        network(COPIES + LAYERS.replace("y = MatMul (n2", "d = Dropout (n2)\n y = MatMul (d")),
        {"batch_norm": "train", "dropout": 0.3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_standard_training_graph_makes_the_same_steps(tmp_path: Path, name: str) -> None:
    model, options = CASES[name]
    features = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    X, y = regression(48, features)
    given = batches(X, y, None, 8)
    trainer = fused(model, **options)
    compile_for(trainer, given[0], fixed=True)
    trainer.export_step(tmp_path / "step", rows=8)
    path = tmp_path / "step" / "training_info.onnx"
    onnx.checker.check_model(path, full_check=True)
    stored = onnx.load(path)
    session = ort.InferenceSession(path)
    feed = {session.get_inputs()[0].name: X}
    assert [i.name for i in session.get_inputs()] == [model.graph.input[0].name]
    predicted = session.run(None, feed)[0]
    np.testing.assert_allclose(predicted, trainer.predict(X), rtol=1e-4, atol=1e-6)

    whole = combined(stored)
    onnx.checker.check_model(whole, full_check=True)
    training = ort.InferenceSession(whole.SerializeToString())
    (info,) = stored.training_info
    tensors = (*stored.graph.initializer, *info.algorithm.initializer)
    keys = {binding.key: binding.value for binding in info.update_binding}
    assert len(keys) == len(info.update_binding)
    variables = {t.name: numpy_helper.to_array(t) for t in tensors if t.name in keys}
    assert variables.keys() == keys.keys()

    step = runner().Step(tmp_path / "step")
    count = step.manifest["batches_per_run"]
    places = {
        i["of"] + (f"@0.{i['batch']}" if i["batch"] else ""): i
        for i in step.manifest["step"]
        if i["batch"] is not None
    }
    for k in range(0, len(given) - count + 1, count):
        parts = [columns(batch) for batch in given[k : k + count]]
        cost = step.run(parts)
        feeds = {n: parts[i["batch"]][i["role"]] for n, i in places.items()}
        results = training.run([*keys.values(), "loss"], {**variables, **feeds})
        variables = dict(zip(keys, results, strict=False))
        if "penalty" not in options:
            np.testing.assert_allclose(results[-1], cost, rtol=1e-6)
    assert len(variables) == len(step.state)
    for item in step.moving:
        np.testing.assert_allclose(
            variables[item["in"]], step.state[item["in"]], rtol=1e-5, atol=1e-6
        )
