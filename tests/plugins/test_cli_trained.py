"""``ortflex predict`` and ``ortflex evaluate``: a run is used as it was trained, on its data or others."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, require_runtime
from ortflex_plugins.cli.predict import _encode
from tests import models
from tests.plugins.commands import ortflex, prepare, refused, save_classifier, works
from tests.training import regression

pytestmark = pytest.mark.per_python

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
metrics = ["rmse", "r2"]
epochs = 3
learning_rate = 0.05
averaging = "ema"
callbacks = ["checkpoint"]
output = "run"
"""
X, Y = regression()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a finished run in ``run``."""
    prepare(tmp_path, RECIPE)
    monkeypatch.chdir(tmp_path)
    works("train", "train.toml")
    return tmp_path


def expected(x: np.ndarray) -> np.ndarray:
    """What the trained file computes, by numpy in float64."""
    weights = models.weights_of(onnx.load("run/trained.onnx"))
    return np.asarray(x.astype(np.float64) @ weights["coef"] + weights["intercept"])


def at_first(x: np.ndarray) -> np.ndarray:
    """What the file computes that nobody has trained."""
    weights = models.weights_of(onnx.load("model.onnx"))
    return np.asarray(x @ weights["coef"] + weights["intercept"])


@pytest.mark.parametrize("ending", ["npz", "npy", "csv"])
def test_predictions_are_those_of_the_trained_file(folder: Path, ending: str) -> None:
    result = works("predict", "run", "-o", f"out.{ending}")
    assert "Y [40, 1], predicted by run (trained) for the recipe's data" in result.output
    if ending == "npz":
        found = np.load("out.npz")["Y"]
    elif ending == "npy":
        found = np.load("out.npy")
    else:
        assert (folder / "out.csv").read_text().splitlines()[0] == "Y"
        found = np.loadtxt("out.csv", delimiter=",", skiprows=1)[:, None]
    np.testing.assert_allclose(found, expected(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize("labeled", [True, False])
def test_other_data_with_labels_or_without(folder: Path, kind: str, labeled: bool) -> None:
    x, y = X[:7] + 1, Y[:7]
    if kind == "npz":
        np.savez("other.npz", X=x, **({"y": y} if labeled else {}))
    else:
        table = np.hstack([x, y]) if labeled else x
        head = ",".join([*(f"x{k}" for k in range(5)), *(["y"] if labeled else [])])
        np.savetxt("other.csv", table, delimiter=",", header=head, comments="", fmt="%.9g")
    works("predict", "run", f"other.{kind}", "-o", "out.npy")
    np.testing.assert_allclose(np.load("out.npy"), expected(x), rtol=1e-5, atol=1e-5)


def test_a_recipe_stands_for_its_own_model(folder: Path) -> None:
    works("predict", "train.toml", "-o", "out.npy")
    np.testing.assert_allclose(np.load("out.npy"), at_first(X), rtol=1e-5, atol=1e-5)


def test_tensors_by_name_and_files_that_hold_one(folder: Path) -> None:
    inner = onnx.load("run/trained.onnx").graph.node[0].output[0]
    assert (
        ortflex("predict", "run", "-o", "o.npz", "--tensor", "Y", "--tensor", inner).exit_code == 0
    )
    assert sorted(np.load("o.npz")) == sorted({"Y", inner})
    if inner != "Y":
        result = ortflex("predict", "run", "-o", "o.npy", "--tensor", "Y", "--tensor", inner)
        assert "choose one with --tensor" in result.output


def test_evaluate_prints_what_numpy_computes(folder: Path) -> None:
    result = works("evaluate", "run", "--json")
    scores = json.loads(result.output)
    error = expected(X) - Y
    assert scores["loss"] == pytest.approx(float((error**2).mean()), rel=1e-5)
    assert scores["rmse"] == pytest.approx(float(np.sqrt((error**2).mean())), rel=1e-5)
    assert scores["data"].startswith("the recipe's data (")
    np.savez("other.npz", X=X[:9], y=Y[:9])
    lines = ortflex("evaluate", "run", "other.npz").output.splitlines()
    assert lines[0] == "run (trained) on other.npz"
    assert [line.split()[0] for line in lines[1:]] == ["loss", "rmse", "r2"]
    assert float(lines[1].split()[1]) == pytest.approx(float((error[:9] ** 2).mean()), rel=1e-4)


def test_evaluate_takes_metrics_in_place_of_the_recipes(folder: Path) -> None:
    error = expected(X) - Y
    scores = json.loads(ortflex("evaluate", "run", "--metric", "mae", "--json").output)
    assert sorted(scores) == ["data", "loss", "mae"]
    assert scores["mae"] == pytest.approx(float(np.abs(error).mean()), rel=1e-5)
    before = ortflex("evaluate", "train.toml", "--metric", "mae", "--metric", "r2").output
    assert [line.split()[0] for line in before.splitlines()[1:]] == ["loss", "mae", "r2"]
    assert "did you mean 'mae'?" in refused("evaluate", "run", "--metric", "mea").output


def test_validation_data_of_the_recipe_are_the_default(folder: Path) -> None:
    np.savez("held.npz", X=X[:9], y=Y[:9])
    (folder / "train.toml").write_text(RECIPE + 'validation = "held.npz"\n')
    scores = json.loads(ortflex("evaluate", "train.toml", "--json").output)
    assert scores["data"].startswith("the recipe's validation (")


def test_the_rows_that_the_run_held_out_are_the_default(folder: Path) -> None:
    """With a fraction as validation, both commands use the rows that no step has seen."""
    (folder / "train.toml").write_text(RECIPE + "validation = 0.3\nseed = 5\n")
    works("train", "train.toml", "output=held")
    with (folder / "held" / "history.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    scores = json.loads(ortflex("evaluate", "held", "--json").output)
    assert scores["loss"] == pytest.approx(float(last["validation_loss"]), rel=1e-5)
    assert scores["rmse"] == pytest.approx(float(last["validation_rmse"]), rel=1e-5)
    held = round(0.3 * len(X))
    assert f"{held} of the {len(X)} rows" in scores["data"]
    works("predict", "held", "-o", "held.npz")
    with np.load("held.npz") as arrays:
        [predicted] = arrays.values()
    chosen = np.sort(np.random.default_rng([5, 0x5A11D]).permutation(len(X))[:held])
    assert float(((predicted - Y[chosen]) ** 2).mean()) == pytest.approx(scores["loss"], rel=1e-5)


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_what_is_not_a_finished_run_is_refused(folder: Path, command: str) -> None:
    (folder / "empty").mkdir()
    for given, message in {
        "model.onnx": "is a model, which contains no data",
        "empty": "is not the folder of a finished run: it has no recipe.toml",
        "none.toml": "does not exist",
    }.items():
        assert message in refused(command, given).output
    assert "none.npz' does not exist" in refused(command, "run", "none.npz").output
    works("train", "train.toml", "output=kept", 'callbacks=["checkpoint"]')
    Path("other").mkdir()
    Path("kept/trained.onnx").unlink()  # as after a kill
    result = ortflex(command, "kept")
    assert "ortflex train RECIPE --resume kept" in result.output
    assert "one of the checkpoints in 'kept/checkpoints'" in result.output
    Path("kept/checkpoints/best").rename("other/mine")
    assert "or one of the checkpoints in it: other/mine" in ortflex(command, "other").output
    shutil.rmtree("kept/checkpoints")
    Path("kept/checkpoints").mkdir()  # as after a kill before the first checkpoint
    result = ortflex(command, "kept")
    assert "it has no trained.onnx" in result.output
    assert "--resume" not in result.output


def test_a_model_a_checkpoint_and_a_single_array(folder: Path) -> None:
    """What `predict` and `evaluate` take, and that their output says which model computed."""
    np.save("X.npy", X)
    np.savez("other.npz", X=X, y=Y)
    works("train", "train.toml", "output=kept", 'callbacks=["checkpoint"]')
    weights = models.weights_of(onnx.load("kept/trained.onnx"))
    wanted = X @ weights["coef"] + weights["intercept"]
    steps = sorted(p.name for p in Path("kept/checkpoints").glob("step-*"))
    for given, values, word in (
        ("kept", wanted, "(trained)"),
        ("kept/trained.onnx", wanted, "(trained)"),
        (f"kept/checkpoints/{steps[-1]}", wanted, "(trained)"),
        ("kept/checkpoints", wanted, f"kept/checkpoints/{steps[-1]} (trained)"),
        ("model.onnx", at_first(X), "(as the file is)"),
        ("train.toml", at_first(X), "(not trained"),
    ):
        assert word in works("predict", given, "X.npy", "-o", "p.npy", "--force").output
        np.testing.assert_allclose(np.load("p.npy"), values, rtol=1e-5, atol=1e-5)
        scores = json.loads(ortflex("evaluate", given, "other.npz", "--json").output)
        assert scores["loss"] == pytest.approx(float(((values - Y) ** 2).mean()), rel=1e-4)
    assert "has no labels" in ortflex("evaluate", "kept", "X.npy").output


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "out.npz").write_bytes(b"mine")
    assert "exists and was not changed" in ortflex("predict", "run", "-o", "out.npz").output
    assert (folder / "out.npz").read_bytes() == b"mine"
    works("predict", "run", "-o", "out.npz", "--force")
    assert (
        "expected a file name that ends with" in ortflex("predict", "run", "-o", "out.txt").output
    )


def test_class_labels_of_a_pipeline_are_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("skl2onnx")
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    monkeypatch.chdir(tmp_path)
    kinds = np.array(["no", "yes"])[(Y.ravel() > 0).astype(int)]
    fitted = LogisticRegression().fit(X, kinds)
    opset = min(require_runtime().max_opset, 18)
    model = to_onnx(
        fitted, X[:1], options={"zipmap": False}, target_opset=opset, black_op=["LinearClassifier"]
    )
    onnx.save(model, "model.onnx")
    np.savez("data.npz", X=X, y=kinds)
    Path("train.toml").write_text(
        'model = "model.onnx"\ndata = "data.npz"\n'
        'loss = {name = "log_loss", on = "probabilities", predicted = "probabilities"}\n'
    )
    works("predict", "train.toml", "-o", "out.npz")
    np.testing.assert_array_equal(np.load("out.npz")["label"], fitted.predict(X))


def test_a_run_of_several_processes_is_used_by_one(folder: Path) -> None:
    """Class: what says how a training was started, in a recipe whose result is used."""
    path = folder / "run" / "recipe.toml"
    path.write_text(f'distributed = "auto"\n{path.read_text()}')
    for command in (["predict", "run", "-o", "out.npy"], ["evaluate", "run"]):
        works(*command)


def test_a_tensor_without_rows_is_not_repeated_for_each_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class: tensors that do not have one row for each row of the data, over several batches."""
    result = works("predict", "run", "--tensor", "intercept", "-o", "out.npz")
    assert "intercept [1], predicted by run (trained)" in result.output
    assert np.load("out.npz")["intercept"].shape == (1,)
    np.savez("big.npz", X=np.zeros((5000, 5), np.float32), y=np.zeros((5000, 1), np.float32))
    result = refused("predict", "run", "big.npz", "--tensor", "intercept", "-o", "big.out.npz")
    assert "its first axis does not count the rows" in result.output
    works("predict", "run", "big.npz", "-o", "big.out.npz")


@pytest.mark.parametrize("name", ["file", "allow_pickle", "a/b", "args"])
def test_any_name_of_a_tensor_may_be_written(name: str) -> None:
    content = _encode({name: np.arange(3.0), "y": np.ones(2)}, ".npz")
    with np.load(io.BytesIO(content)) as found:
        np.testing.assert_array_equal(found[name], np.arange(3.0))
        np.testing.assert_array_equal(found["y"], np.ones(2))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a,b", 'c"d', "e\nf"], object),
        np.array([0.1234567890123456, 1e300, -0.0]),
        np.array([[0.1, 3e-45], [7.0, np.inf]], np.float32),
        np.array([2**62, -1]),
        np.array([True, False]),
    ],
    ids=["strings", "float64", "float32", "integers", "booleans"],
)
def test_csv_is_read_back_as_it_was(array: np.ndarray) -> None:
    rows = list(csv.reader(io.StringIO(_encode({"p,q": array}, ".csv").decode())))
    columns = array.reshape(len(array), -1).shape[1]
    assert rows[0] == (["p,q"] if columns == 1 else [f"p,q_{k}" for k in range(columns)])
    found = np.array(rows[1:]).reshape(array.shape)
    if array.dtype == object:
        assert found.tolist() == array.tolist()
    elif array.dtype == bool:
        assert found.tolist() == [str(value) for value in array]
    else:
        np.testing.assert_array_equal(found.astype(array.dtype), array)


@pytest.mark.parametrize("there", [(), ("y",), ("w",), ("y", "w")])
def test_data_without_labels_or_weights_are_enough(folder: Path, there: tuple[str, ...]) -> None:
    """Class: columns of the training that predictions do not need; none becomes a feature."""
    table = np.hstack([X, Y, np.ones_like(Y)])
    head = ",".join([*(f"x{k}" for k in range(5)), "y", "w"])
    np.savetxt("all.csv", table, delimiter=",", header=head, comments="", fmt="%.9g")
    chosen = np.hstack([X, *(Y for _ in there)])
    head = ",".join([*(f"x{k}" for k in range(5)), *there])
    np.savetxt("x.csv", chosen, delimiter=",", header=head, comments="", fmt="%.9g")
    source = '{name = "csv", path = "all.csv", target = ["y"], weight = "w"}'
    text = RECIPE.replace('"data.npz"', source).replace('"run"', '"weighted"')
    Path("weighted.toml").write_text(text)
    works("train", "weighted.toml")
    works("predict", "weighted", "x.csv", "-o", "out.npy")
    weights = onnx.load("weighted/trained.onnx").graph.initializer
    coef, intercept = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in weights)
    np.testing.assert_allclose(np.load("out.npy"), X @ coef + intercept, rtol=1e-4, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize(
    "labels",
    [np.arange(40) % 2, np.arange(40) % 3, np.array(["ant", "bee", "cat", "doe"] * 10)],
    ids=["2", "3", "names"],
)
def test_the_probabilities_are_written_with_the_labels(
    labels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_classifier(X, labels)
    works("init", "model.onnx", "--data", "d.npz", "-o", "t.toml")
    works("train", "t.toml", "epochs=1", "output=run")
    chosen, maps = models.predict(onnx.load("run/trained.onnx"), {"X": X}).values()
    classes = list(maps[0])
    expected = np.array([[row[c] for c in classes] for row in maps])

    for ending in ("npz", "csv", "npy"):
        done = works("predict", "run", "-o", f"out.{ending}")
        if ending == "npy":
            assert "out.npy has no 'output_probability'; --tensor " in done.output
            tensor = done.output.split("--tensor ")[1].split()[0]
            assert list(np.load("out.npy").astype(str)) == list(map(str, chosen))
            works("predict", "run", "-o", "p.npy", "--tensor", tensor)
            np.testing.assert_allclose(np.load("p.npy"), expected, atol=1e-6)
            continue
        assert "--tensor" not in done.output
        assert f"output_probability [40, {len(classes)}]" in done.output
        if ending == "npz":
            with np.load("out.npz") as found:
                assert set(found) == {"output_label", "output_probability"}
                np.testing.assert_allclose(found["output_probability"], expected, atol=1e-6)
                assert list(found["output_label"].astype(str)) == list(map(str, chosen))
            continue
        head, *rows = list(csv.reader(Path("out.csv").read_text("utf-8").splitlines()))
        assert head == ["output_label", *(f"output_probability_{c}" for c in classes)]
        assert [row[0] for row in rows] == list(map(str, chosen))
        np.testing.assert_allclose(
            np.array([row[1:] for row in rows], np.float32), expected, atol=1e-6
        )


@pytest.mark.once
def test_tensors_of_different_lengths_are_no_table() -> None:
    with pytest.raises(ConfigError, match=r"different numbers of rows: a \[3\], b \[2, 2\]"):
        _encode({"a": np.zeros(3), "b": np.zeros((2, 2))}, ".csv")
    text = _encode({"a": np.arange(2), "b": np.zeros((2, 2), np.float32)}, ".csv").decode()
    assert text == "a,b_0,b_1\n0,0,0\n1,0,0\n"
