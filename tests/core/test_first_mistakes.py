"""Mistakes of a first day: each is an error that says what to do, never a traceback of Python."""

from typing import ClassVar

import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import (
    CheckpointError,
    ConfigError,
    DataError,
    Loss,
    ModelError,
    OrtflexError,
    Trainer,
    TrainingDiverged,
)
from ortflex_core.compiler.model.quantizer import BITS
from ortflex_core.kernel.errors import ArgumentError
from ortflex_core.training.config.arguments import TYPES
from tests import models

ROWS = 12
Y = np.zeros((ROWS, 3), np.float32)


def model(softmax=False):
    """x·w, with a Softmax behind it on request."""
    weight = np.random.default_rng(0).standard_normal((4, 3))
    body = "t = MatMul(x, w)  y = Softmax<axis = 1>(t)" if softmax else "y = MatMul(x, w)"
    return models.parsed(body, {"w": weight}, "float[n, 4] x", "float[n, 3] y")


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
        value = wrong()
        if place == "predict" and hasattr(value, "__next__"):
            pytest.skip("predict takes an iterable of batches")
        if place in ("y", "weight") and value is None:
            pytest.skip("no labels and no weights are allowed")
        calls = {
            "X": lambda made: made.fit(value, Y),
            "y": lambda made: made.fit(X, value),
            "mapping": lambda made: made.fit({"x": value}, Y),
            "weight": lambda made: made.fit(X, Y, sample_weight=value),
            "predict": lambda made: made.predict(value),
        }
        name = {"y": "y", "weight": "sample_weight"}.get(place, "X")
        with pytest.raises(DataError, match=rf"^{name}\b.*, expected "):
            calls[place](trainer())

    def test_an_unknown_input_is_named_with_those_of_the_model(self, X):
        with pytest.raises(DataError, match=r"'z', which is not an input of the model; Known: x$"):
            trainer().fit({"z": X}, Y)

    @pytest.mark.parametrize("names", [["a", "b"], [*"abcd"]], ids=["too few", "too many"])
    def test_classes_are_as_many_as_the_scores(self, names, X):
        loss = "softmax_cross_entropy"
        made = Trainer(model(softmax=True), loss=loss, classes=names, progress=False)
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
            ("loss", "huber", r"create a new one: Trainer\(…, loss=…\)"),
            ("optimizer", "sgd", "create a new one"),
            ("schedule", "cosine", "create a new one"),
            ("model", "other.onnx", "create a new one"),
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
        history = made.fit(X, Y)
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


FOREIGN = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html>404</html>", "download the file itself"),
    "torch": (b"PK\x03\x04" + bytes(40), "a zip archive"),
    "keras": (b"\x89HDF\r\n\x1a\n" + bytes(40), "tf2onnx"),
    "gzip": (b"\x1f\x8b\x08" + bytes(40), "unpack it"),
    "ort": (b"\x00\x00\x00\x00ORTM" + bytes(40), "ORT format"),
    "tflite": (b"\x1c\x00\x00\x00TFL3" + bytes(40), "TensorFlow Lite"),
    "text": (b"hello", "is not an ONNX model"),
    "zeros": (bytes(100), "is not an ONNX model or is truncated"),
    "noise": (bytes(range(256)) * 4, "is not an ONNX model or is truncated"),
    "empty": (b"", "no graph"),
}


class TestFiles:
    @pytest.mark.parametrize(("content", "text"), FOREIGN.values(), ids=FOREIGN)
    @pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
    def test_a_file_that_is_no_model_is_recognized(self, content, text, large, tmp_path):
        path = tmp_path / "model.onnx"
        path.write_bytes(content + bytes(2**21) * (large and len(content) > 8))
        with pytest.raises(ModelError, match=text):
            Trainer(path, loss="squared_error")

    @pytest.mark.parametrize("wrong", [None, "", 3, ["a"]], ids=repr)
    @pytest.mark.parametrize("method", ["save", "restore", "resume", "export_step"])
    def test_what_is_no_path_is_an_argument_error(self, method, wrong):
        owner = Trainer if method == "resume" else trainer()
        with pytest.raises(ArgumentError, match=rf"Trainer\.{method}: expected a path"):
            getattr(owner, method)(wrong)
        with pytest.raises(ArgumentError, match="expected a path, got 3"):
            trainer().export(3)


class TestCheckpoints:
    @pytest.fixture
    def saved(self, tmp_path, X):
        made = trainer()
        made.fit(X, Y)
        return made.save(tmp_path / "saved")

    def test_a_mistyped_argument_is_not_the_fault_of_the_checkpoint(self, saved):
        with pytest.raises(ArgumentError, match="no argument 'epoch'; did you mean 'epochs'"):
            Trainer.resume(saved, epoch=3)

    def test_what_is_no_checkpoint_says_what_it_is(self, saved, tmp_path):
        with pytest.raises(CheckpointError, match=r"does not exist; did you mean 'saved'"):
            Trainer.resume(tmp_path / "savd")
        with pytest.raises(CheckpointError, match="it is a file, and a checkpoint is a folder"):
            Trainer.resume(saved / "checkpoint.json")
        with pytest.raises(CheckpointError, match=r"a checkpoint: it has no checkpoint\.json"):
            Trainer.resume(tmp_path)
        run = tmp_path / "run"
        run.mkdir()
        (run / "history.csv").write_text("epoch\n")
        with pytest.raises(CheckpointError, match=r"this run wrote no checkpoints.*callback"):
            Trainer.resume(run)
        (run / "checkpoints").mkdir()
        with pytest.raises(CheckpointError, match=r"before its first checkpoint\. Start the run"):
            Trainer.resume(run)


class Squared(Loss):
    name = "squared"

    def per_sample(self, op, predicted, expected):
        return (predicted - expected) ** 2


class Duck:
    def per_sample(self, op, predicted, expected):
        return predicted


class Whole(Squared):
    name = "whole"

    def per_sample(self, op, predicted, expected):
        return op.Cast(predicted - expected, to=TensorProto.INT64)


class TestNames:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"loss": Squared}, r"pass an object, Squared\("),
            ({"loss": Duck()}, r"a subclass of ortflex_core\.Loss"),
            ({"precision": "fp16"}, "its name in ortflex is 'fp16_mixed'"),
            ({"precision": "float16"}, "its name in ortflex is 'fp16_mixed'"),
            ({"precision": "bfloat16"}, "its name in ortflex is 'bf16_mixed'"),
        ],
    )
    def test_the_message_has_the_name_or_the_form(self, arguments, text):
        with pytest.raises(OrtflexError, match=text):
            trainer(**arguments)

    def test_the_type_of_a_loss_is_in_the_message(self, X):
        with pytest.raises(OrtflexError, match="not of int64"):
            trainer(loss=Whole()).fit(X, Y)

    def test_an_array_of_names_is_a_head(self, X):
        names = np.array(["ant", "bee"])
        made = trainer(head=names, loss="softmax_cross_entropy")
        made.fit(X, np.resize(names, ROWS))
        assert made.predict(X).shape == (ROWS, 2)


def turned():
    """The model with its rows in the last axis: [3, n]."""
    body, weights = "t = MatMul(x, w)  y = Transpose<perm = [1, 0]>(t)", {"w": np.ones((4, 3))}
    return models.parsed(body, weights, "float[n, 4] x", "float[3, n] y")


class TestLosses:
    def test_rows_in_another_axis_are_refused_before_the_training(self, X):
        text = r"y: float32\[3, (n|batch)\] has the rows in axis 1, not in the"
        with pytest.raises(ModelError, match=text):
            Trainer(turned(), loss="squared_error")
        Trainer(turned(), loss={"t": "squared_error"}, epochs=1, progress=False).fit(X, Y)

    def test_a_mistyped_key_of_one_loss_is_not_only_an_unknown_tensor(self):
        with pytest.raises(ModelError, match=r"no tensor 'names'; .*loss = \{ name = 'huber' \}"):
            trainer(loss={"names": "huber"})
        with pytest.raises(ModelError, match="no tensor 'elsewhere'") as error:
            trainer(loss={"elsewhere": "huber"})
        assert "the key name" not in str(error.value)

    def test_a_loss_that_is_not_finite_at_once_is_not_blamed_on_the_rate(self, X):
        def undefined(op, predicted, expected):
            return op.Log(predicted * 0.0 - 1.0)

        with pytest.raises(TrainingDiverged, match=r"at step 1 .*No update has been made yet"):
            trainer(loss=undefined).fit(X, Y)


def test_a_list_of_another_length_than_the_inputs_is_called_a_list(X):
    body, inputs = "x = Add(a, b)  y = MatMul(x, w)", "float[n, 4] a, float[n, 4] b"
    proto = models.parsed(body, {"w": np.ones((4, 3))}, inputs, "float[n, 3] y")
    made = Trainer(proto, loss="squared_error", epochs=1, progress=False)
    for wrong, text in (
        ([X, X, X], "X is a list of 3, but there are 2 inputs"),
        (X, "X is one array, but there are 2 inputs"),
        (None, "X is None, expected an array"),
        ("data.npz", r"X is the string 'data\.npz'"),
    ):
        with pytest.raises(DataError, match=text):
            made.fit(wrong, Y)
    made.fit([X, X], Y)


class TestValidation:
    """An error of the validation data says so: the training data may have the same names and shapes."""

    GOOD = np.zeros((ROWS, 4), np.float32), np.arange(ROWS) % 3
    WRONG: ClassVar = {
        "shape": (np.zeros((ROWS, 5), np.float32), GOOD[1]),
        "not finite": (np.full((ROWS, 4), np.nan, np.float32), GOOD[1]),
        "text": (np.zeros((ROWS, 4), "U1"), GOOD[1]),
        "empty": (GOOD[0][:0], GOOD[1][:0]),
        "class": (GOOD[0], np.full(ROWS, 3)),
        "rows": (GOOD[0], GOOD[1][1:]),
        "type": (GOOD[0], GOOD[1].astype(np.float32)),
        "no labels": (GOOD[0], None),
    }

    @pytest.mark.parametrize("case", WRONG)
    @pytest.mark.parametrize("batches", [False, True])
    def test_arrays_and_batches(self, case, batches):
        made = trainer("softmax_cross_entropy")
        wrong = [self.WRONG[case]] if batches else self.WRONG[case]
        with pytest.raises(DataError, match=r"^validation"):
            made.fit(*self.GOOD, validation_data=wrong)
        made.fit(*self.GOOD, validation_data=self.GOOD)

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            (20, "a fraction > 0 and < 1, got 20"),
            (0, "a fraction > 0 and < 1, got 0"),
            ("val.npz", r"got 'val\.npz'"),
            (np.zeros((3, 4), np.float32), r"validation_data: expected \(X, y\)"),
            ((np.zeros((3, 4), np.float32),), "got tuple of 1"),
            (1.0, r"must be > 0 and < 1.* 1\.0 of 12 rows does not"),
            (0.01, r"must be > 0 and < 1.* 0\.01 of 12 rows is 0"),
        ],
    )
    def test_what_is_no_validation_data(self, wrong, text):
        with pytest.raises(DataError, match=text):
            trainer("softmax_cross_entropy").fit(*self.GOOD, validation_data=wrong)


@pytest.mark.parametrize(
    ("taken", "given"), [((3, 6, 5), (6, 5, 3)), ((6, 5, 3), (3, 6, 5)), ((1, 8, 8), (8, 8, 1))]
)
def test_channels_on_the_other_axis_have_the_transpose_that_fits(taken, given):
    """The message is tried: what it says is evaluated, and the result trains."""
    proto = models.parsed(
        "f = Flatten(x)  y = MatMul(f, w)",
        {"w": np.full((int(np.prod(taken)), 1), 0.1)},
        f"float[n, {', '.join(map(str, taken))}] x",
        "float[n, 1] y",
    )
    made = Trainer(proto, loss="squared_error", epochs=1, progress=False)
    X, y = np.zeros((ROWS, *given), np.float32), np.zeros((ROWS, 1), np.float32)
    with pytest.raises(DataError, match=r"X\.transpose\(.*\) fits") as caught:
        made.fit(X, y)
    order = str(caught.value).split("transpose(")[1].split(")")[0]
    made.fit(X.transpose([int(k) for k in order.split(",")]), y)


@pytest.mark.parametrize("path", ["", "."])
def test_a_folder_in_place_of_a_file(path):
    with pytest.raises(ModelError, match="is a folder"):
        Trainer(path, loss="squared_error")
    with pytest.raises(ConfigError, match="is a folder"):
        trainer({"name": "distillation", "teacher": path or "./", "alpha": 1.0})


def test_weights_that_are_all_0_train_nothing(X):
    made = trainer()
    for call in (made.fit, made.find_rate):
        with pytest.raises(DataError, match=f"0 for all {ROWS} rows"):
            call(X, Y, sample_weight=np.zeros(ROWS))
    made.fit(X, Y, sample_weight=np.eye(1, ROWS)[0])


def test_a_freeze_of_everything_is_the_reason_that_nothing_trains():
    with pytest.raises(ModelError, match="freeze= freezes all"):
        trainer(freeze="*")


@pytest.mark.parametrize(
    ("part", "text"), [(0.5, "did you mean 'validation_loss'"), (None, "validation_data=")]
)
def test_a_column_of_the_validation_is_found_by_the_word_of_others(X, part, text):
    with pytest.raises(ConfigError, match=text):
        trainer().fit(X, Y, validation_data=part)["val_loss"]


def test_a_path_is_no_place_to_draw(X, tmp_path):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "x.png")
    for made in (trainer().fit(X, Y), trainer().find_rate(X, Y)):
        with pytest.raises(ArgumentError, match="savefig"):
            made.plot(ax=path)


PAIR = r"; expected \(X, y\)"
BATCHES = {
    "X alone": (lambda X, y: X, "the batch is a ndarray" + PAIR),
    "a tuple of one": (lambda X, y: (X,), "the batch is a tuple of 1" + PAIR),
    "four": (lambda X, y: (X, y, y, y), "the batch is a tuple of 4" + PAIR),
    "a generator": (lambda X, y: iter([(X, y)]), "the batch is a list_iterator" + PAIR),
    "two batches": (lambda X, y: [(X, y)] * 2, "different shapes: pass .*for step as one batch"),
    "fewer labels": (lambda X, y: (X, y[:7]), "x has 12, label has 7; pass arrays of equal"),
    "one row": (lambda X, y: (X[0], y[:1]), r"equal length; for a single row, pass X\[None\]"),
    "fewer columns": (lambda X, y: (X[:, :3], y), r"shape \[12, 3\], but 'x' expects \[n, 4\]"),
    "other labels": (lambda X, y: (X, y[:, :2]), r"labels must have the shape \[batch, 3\]"),
}


@pytest.mark.parametrize(("batch", "text"), BATCHES.values(), ids=BATCHES)
def test_a_step_on_what_is_no_batch_says_what_it_takes(batch, text, X):
    """In a new Trainer and after a step, whose weights stay as they are."""
    made = trainer()
    for _ in range(2):
        before = made.get_state()["w"]
        with pytest.raises(DataError, match=text):
            made.step(batch(X, Y))
        np.testing.assert_array_equal(made.get_state()["w"], before)
        made.step((X, Y))


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_x_and_y_in_one_tuple_are_two_arguments(method, X):
    with pytest.raises(DataError, match="different shapes: pass X and y as two arguments"):
        getattr(trainer(), method)((X, Y))
