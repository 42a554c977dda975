"""Mistakes of a first day: each is an error that says what to do, never a traceback of Python."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import ConfigError, DataError, Trainer
from ortflex_core.compiler.model.quantizer import BITS
from ortflex_core.training.config.arguments import TYPES

ROWS = 12


def model(columns=3, softmax=False):
    """x·w, with a Softmax behind it on request."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((4, columns)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t" if softmax else "y"])]
    if softmax:
        nodes.append(helper.make_node("Softmax", ["t"], ["y"], axis=1))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def X():
    return np.random.default_rng(1).random((ROWS, 4), np.float32)


def trainer(loss="squared_error", **arguments):
    return Trainer(model(), loss=loss, **{"epochs": 1, "progress": False, **arguments})


NO_ARRAYS = {
    "none": lambda: None,
    "generator": lambda: (row for row in np.zeros((ROWS, 4), np.float32)),
    "map": lambda: map(float, range(ROWS)),
    "set": lambda: {1.0, 2.0},
    "object": object,
    "number": lambda: 3.0,
    "string": lambda: "data.npz",
}


class TestData:
    @pytest.mark.parametrize("wrong", NO_ARRAYS.values(), ids=NO_ARRAYS)
    @pytest.mark.parametrize("place", ["X", "y", "mapping", "weight", "predict"])
    def test_what_is_no_array_is_a_data_error_that_names_the_argument(self, wrong, place, X):
        y = np.zeros((ROWS, 3), np.float32)
        value = wrong()
        if place == "predict" and hasattr(value, "__next__"):
            pytest.skip("predict takes an iterable of batches")
        if place in ("y", "weight") and value is None:
            pytest.skip("no labels and no weights are allowed")
        calls = {
            "X": lambda made: made.fit(value, y),
            "y": lambda made: made.fit(X, value),
            "mapping": lambda made: made.fit({"x": value}, y),
            "weight": lambda made: made.fit(X, y, sample_weight=value),
            "predict": lambda made: made.predict(value),
        }
        name = {"y": "y", "weight": "sample_weight"}.get(place, "X")
        with pytest.raises(DataError, match=rf"^{name}\b.*, expected "):
            calls[place](trainer())

    def test_an_unknown_input_is_named_with_those_of_the_model(self, X):
        with pytest.raises(DataError, match=r"'z', which is not an input of the model; Known: x$"):
            trainer().fit({"z": X}, np.zeros((ROWS, 3), np.float32))

    @pytest.mark.parametrize("names", [["a", "b"], [*"abcd"]], ids=["too few", "too many"])
    def test_classes_are_as_many_as_the_scores(self, names, X):
        made = Trainer(
            model(softmax=True), loss="softmax_cross_entropy", classes=names, progress=False
        )
        with pytest.raises(DataError, match=rf"there are {len(names)} classes, .* have 3 columns"):
            made.fit(X, ["a", "b"] * (ROWS // 2))


class TestAttributes:
    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("learning_rate", "x", "expected a finite number > 0, got 'x'"),
            ("learning_rate", None, "expected a finite number > 0, got None"),
            ("epochs", 2.5, "expected an integer >= 1"),
            ("batch_size", "32", "expected an integer >= 1"),
            ("seed", -1, "expected an integer >= 0"),
            ("loss", "huber", r"make another one: Trainer\(…, loss=…\)"),
            ("optimizer", "sgd", "make another one"),
            ("schedule", "cosine", "make another one"),
            ("model", "other.onnx", "make another one"),
            ("learning_rte", 0.1, "did you mean 'learning_rate'"),
            ("lr", 0.1, "did you mean 'learning_rate'"),
            ("epoch", 3, "did you mean 'epochs'"),
        ],
    )
    def test_an_assignment_that_no_training_would_read_is_refused(self, name, value, text):
        made = trainer()
        before = made.learning_rate, made.epochs, made.batch_size, made.seed
        with pytest.raises(ConfigError, match=text):
            setattr(made, name, value)
        assert (made.learning_rate, made.epochs, made.batch_size, made.seed) == before

    def test_what_may_be_changed_is_used(self, X):
        made = trainer()
        made.epochs, made.learning_rate = 2, 0.5
        made.notes = "an attribute of the user"
        history = made.fit(X, np.zeros((ROWS, 3), np.float32))
        assert len(history) == 2
        assert list(history["rate"]) == [0.5, 0.5]


class TestQuantize:
    def test_every_type_of_weights_has_a_short_form(self):
        assert sorted(TYPES) == sorted(BITS)

    @pytest.mark.parametrize("weights", TYPES)
    def test_a_type_alone_is_the_table_with_it(self, weights, X):
        short = trainer(quantize=weights)._internals.setup.quantizer
        assert short == trainer(quantize={"weights": weights})._internals.setup.quantizer
        assert short.weights == weights
