"""The kit of edits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from ortflex_core import Array, BrokenPlugin, Edit, Model, OrtflexError, Trainer, apply_edits
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit
from ortflex_core.testing.running import close, require

Reference = Callable[[Arrays, Arrays, Array], Array]


class EditKit(ReferenceKit):
    """Override ``component`` and ``reference``, and ``model`` if the edit does not fit the usual one.

    ``reference(before, after, x)`` is the first output of the edited model, in numpy and float64;
    ``before`` and ``after`` are the initializers of the model and of the edited model by name. The
    usual model is ``Y = tanh(X @ W1 + b1) @ W2 + b2``, X [N, 3].
    """

    kind: ClassVar[str] = "edits"
    has_formula: ClassVar[bool] = False

    @pytest.fixture
    def model(self) -> onnx.ModelProto:
        """A model that the edit fits, with one input."""
        return running.network_model()

    def test_value(self, component: Edit, reference: Reference, model: onnx.ModelProto) -> None:
        """The exported model computes what the reference computes."""
        edited = apply_edits(Model(model), [component], 0).export({})
        x = rows_of(model)
        before, after = running.weights_of(model), running.weights_of(edited)
        wide = x.astype(np.float64) if x.dtype.kind == "f" else x
        wanted = reference(before, after, wide)
        close(run(edited, x), wanted, 1e-5, f"the output of {component.name}")

    def test_original(self, component: Edit, model: onnx.ModelProto) -> None:
        """The model itself is not changed, neither its file nor what is known of it."""
        source = Model(model)
        bits, specs = model.SerializeToString(), dict(source.initializers)
        apply_edits(source, [component], 0)
        require(model.SerializeToString() == bits, f"{component.name} changes the user's model")
        again = source.export({}).SerializeToString()
        same = again == Model(model).export({}).SerializeToString()
        require(same and specs == dict(source.initializers), f"{component.name} changes its model")

    def test_determinism(self, component: Edit, model: onnx.ModelProto) -> None:
        """One seed always gives the same file, also in another order of calls."""
        edited = [apply_edits(Model(model), [component], seed) for seed in (3, 4, 3)]
        files = [one.export({}).SerializeToString(deterministic=True) for one in edited]
        require(files[0] == files[2], f"{component.name}: one seed gives two files")

    def test_errors(self, component: Edit) -> None:
        """A model that the edit does not fit is refused with an error of ours, or edited."""
        for odd in odd_models():
            try:
                apply_edits(Model(odd), [component], 0)
            except BrokenPlugin as error:
                require(False, f"{component.name} fails on a model that it does not fit: {error}")
            except OrtflexError as error:
                require(len(str(error)) > 20, f"{component.name}: the error says only {error}")

    def test_backends(self, component: Edit, model: onnx.ModelProto) -> None:
        """On every backend, training lowers the loss, and the export has the Trainer's predictions."""
        x = rows_of(model)

        def train(backend: str) -> None:
            made = trainer(model, component, backend=backend)
            y = 0.1 * made.predict(x)
            first = made.step((x, y))
            for _ in range(4):
                last = made.step((x, y))
            text = f"the loss goes from {first} to {last}"
            require(last < first, f"{component.name} on {backend}: {text}")
            close(run(made.export(), x), made.predict(x), 1e-5, f"the export of {backend}")

        running.on_every_backend(train, f"the edit {component.name}")

    def test_resume(self, component: Edit, model: onnx.ModelProto, tmp_path: Path) -> None:
        """Checkpoints and pickles of a Trainer continue with bit-identical results."""
        x = rows_of(model)
        made = trainer(model, component)
        y = 0.1 * made.predict(x)
        made.step((x, y))
        made.save(tmp_path / "saved")
        again = Trainer.resume(tmp_path / "saved", plugins=running.plugins(), edits=[component])
        pickled = pickle.loads(pickle.dumps(made))
        made.step((x, y))
        for twin in (again, pickled):
            twin.step((x, y))
            running.same_bits(made.get_state(), twin.get_state(), f"{component.name}, continued")


def trainer(model: onnx.ModelProto, edit: Edit, **options: Any) -> Trainer:
    """A Trainer of the edited model."""
    return running.trainer(model, edits=[edit], **{"learning_rate": 0.01, **options})


def rows_of(model: onnx.ModelProto, rows: int = 6) -> Array:
    """Rows of the input of a model: numbers, or token ids 0, 1 and 2."""
    (info,) = [i for i in model.graph.input if i.name not in running.weights_of(model)]
    sizes = [d.dim_value or rows for d in info.type.tensor_type.shape.dim]
    rng = np.random.default_rng(8)
    if info.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        return rng.integers(0, 3, sizes)
    return rng.standard_normal(sizes).astype(np.float32)


def run(model: onnx.ModelProto, x: Array) -> Array:
    """The first output of a model, by onnxruntime."""
    opened = cpu_session(model)
    return np.asarray(opened.run(None, {opened.get_inputs()[0].name: x})[0])


def odd_models() -> list[onnx.ModelProto]:
    """Models without a product, without an initializer, and with an output that is the input's shape."""
    node = onnx.helper.make_node
    nothing = running.model_of([node("Relu", ["X"], ["Y"])], (3,), (3,), {})
    weights = {"w": np.array([1.0, 2.0, 3.0])}
    constant = running.model_of([node("Mul", ["X", "w"], ["Y"])], (3,), (3,), weights)
    square = [node("Transpose", ["X"], ["T"], perm=[1, 0]), node("MatMul", ["X", "T"], ["P"])]
    mean = node("ReduceMean", ["P"], ["Y"], keepdims=1)
    return [nothing, constant, running.model_of([*square, mean], (3,), (1,), {})]
