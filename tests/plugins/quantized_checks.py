"""Training of quantized files, and what must hold of the file that comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto

from ortflex import Trainer
from ortflex_core import Array
from tests.plugins import quantized_forms as forms

Y = np.random.default_rng(7).standard_normal((16, 4)).astype(np.float32)


def run(model: ModelProto, x: Array) -> Array:
    """The output of a file, without fused kernels."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return np.asarray(session.run(None, {"x": x})[0])


def train(model: ModelProto, steps: int = 3, **settings: Any) -> tuple[Trainer, ModelProto, Array]:
    """The trainer after some steps, its export, and the rows."""
    x = forms.rows(model, 16, seed=2)
    settings = {"optimizer": "adam", "learning_rate": 0.01, **settings}
    trainer = Trainer(model, loss="squared_error", **settings)
    for _ in range(steps):
        trainer.step((x, Y))
    return trainer, trainer.export(), x


def check_layout(model: ModelProto, exported: ModelProto, trained: set[str]) -> None:
    """Fail unless a file differs by the values of ``trained`` alone."""
    bare = ModelProto.FromString(exported.SerializeToString())
    del bare.metadata_props[:]
    own = {t.name: t for t in model.graph.initializer}
    changed = set()
    for tensor in bare.graph.initializer:
        first = own[tensor.name]
        if tensor.SerializeToString() != first.SerializeToString():
            changed.add(tensor.name)
            assert (tensor.data_type, tensor.dims) == (first.data_type, first.dims)
            tensor.CopyFrom(first)
    assert changed == trained
    first = ModelProto.FromString(model.SerializeToString())
    del first.metadata_props[:]
    assert bare.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


def check_slopes(trainer: Trainer, masters: dict[str, Any]) -> None:
    """Fail unless a step of SGD with the rate 0.1 moved each weight by its gradient in torch."""
    state = trainer.get_state()
    assert set(state) == set(masters)
    for name, master in masters.items():
        moved = (master.detach().numpy() - state[name]) / 0.1
        slope = master.grad.numpy()
        tolerance = 2e-5 * max(1.0, np.abs(slope).max())
        np.testing.assert_allclose(moved, slope, rtol=2e-3, atol=tolerance, err_msg=name)


def check_codes(trainer: Trainer, exported: ModelProto, x: Array) -> None:
    """Fail if predictions of the file are far from those of the trainer, or many are a code away.

    The trainer predicts with fused kernels of integers, which round sums otherwise; a code of an inner
    tensor may change two of the output.
    """
    (last,) = (n for n in exported.graph.node if "y" in n.output)
    unit = float(forms.arrays(exported)[last.input[1]].reshape(()))
    codes = np.abs(trainer.predict(x) - run(exported, x)) / unit
    assert codes.max() <= 2.001, codes
    assert (codes > 0.5).mean() <= 0.1, codes
