"""What ``ortflex init`` knows of data: folders of images, shapes that will not fit, other classes."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import Recipe
from ortflex_plugins.cli.main import main

pytestmark = pytest.mark.per_python


def convolution(path, shape=("n", 3, 16, 12), classes=4):
    rng = np.random.default_rng(0)
    weights = {"w": (5, 3, 3, 3), "v": (5, classes), "b": (classes,)}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gemm", ["f", "v", "b"], ["s"]),
            helper.make_node("Softmax", ["s"], ["y"], axis=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
        [
            numpy_helper.from_array((rng.normal(size=s) * 0.3).astype(np.float32), n)
            for n, s in weights.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


def run(*arguments):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize("classes", [3, 4])
def test_a_folder_of_images_trains_without_a_warning(tmp_path, monkeypatch, classes):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    convolution("m.onnx")
    rng = np.random.default_rng(1)
    for name in ["ant", "bee", "cat", "dog"][:classes]:
        Path("photos", name).mkdir(parents=True)
        for k in range(14):
            pixels = rng.integers(0, 256, (20, 18, 3), np.uint8)
            image.fromarray(pixels).save(f"photos/{name}/{k}.png")
    made = run("init", "m.onnx", "--data", "photos")
    assert made.exit_code == 0, made.output
    recipe = Recipe.load("train.toml")
    assert list(recipe.data["size"]) == [16, 12]
    assert len(recipe.data["mean"]) == len(recipe.data["std"]) == 3
    assert recipe.head == (3 if classes == 3 else None)
    trained = run("train", "train.toml", "epochs=1", "output=run")
    assert trained.exit_code == 0, trained.output
    assert "warning" not in trained.output.lower()
    for path, rows in [("photos/bee", 14), ("photos/bee/0.png", 1)]:  # without labels
        assert run("predict", "run", path, "-o", "p.npz", "--force").exit_code == 0
        with np.load("p.npz") as predicted:
            assert [len(array) for array in predicted.values()] == [rows]
    outputs = onnx.load("run/trained.onnx").graph.output
    assert outputs[0].type.tensor_type.shape.dim[1].dim_value == classes


@pytest.mark.parametrize(
    ("shape", "way_out"), [((8, 16, 12, 3), "transpose(0, 3, 1, 2)"), ((8, 3, 9, 9), "expects")]
)
def test_shapes_that_will_fail_are_refused(tmp_path, monkeypatch, shape, way_out):
    monkeypatch.chdir(tmp_path)
    convolution("m.onnx")
    np.savez("d.npz", X=np.zeros(shape, np.float32), y=np.arange(8) % 4)
    refused = run("init", "m.onnx", "--data", "d.npz")
    assert refused.exit_code == 1
    assert way_out in refused.output
    assert not Path("train.toml").exists()
    fitting = np.zeros((8, 3, 16, 12), np.float32)
    np.savez("d.npz", X=fitting, y=np.arange(8) % 4)
    assert run("init", "m.onnx", "--data", "d.npz").exit_code == 0


def scores(path, name, shape, after=""):
    """x [n, 4] -> one product, perhaps an operator after it, and a name for the result."""
    count = shape[-1]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t" if after else name])]
    nodes += [helper.make_node(after, ["t"], [name])] if after else []
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*shape[:-1], 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones((4, count), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("name", "shape", "loss"),
    [
        ("scores", ["n", 5], "softmax_cross_entropy"),
        ("class_logits", ["n", 3], "softmax_cross_entropy"),
        ("output", ["n", 1000], "softmax_cross_entropy"),
        ("logits", ["n", 1], "log_loss"),
        ("logits", ["n", "t", 30], {"name": "softmax_cross_entropy", "axis": -1}),
        ("output", ["n", 5], "squared_error"),
        ("price", ["n", 1], "squared_error"),
    ],
)
def test_names_and_shapes_choose_the_loss_without_data(tmp_path, monkeypatch, name, shape, loss):
    monkeypatch.chdir(tmp_path)
    scores("m.onnx", name, shape)
    np.savez("data.npz", X=np.zeros((2, 4), np.float32))  # the path of the recipe
    assert run("init", "m.onnx").exit_code == 0
    assert Recipe.load("train.toml").loss == loss


def language_model(path, tokens=12, scores=12):
    """Token ids [n, t] -> scores [n, t, scores], which depend on the token in the same place."""
    draw = np.random.default_rng(0)
    shapes = {"embedding": (tokens, 8), "w": (8, scores)}
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["ids"], ["numbers"], to=TensorProto.INT64),
            helper.make_node("Gather", ["embedding", "numbers"], ["e"]),
            helper.make_node("MatMul", ["e", "w"], ["logits"]),
        ],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, ["n", "t"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", "t", scores])],
        [
            numpy_helper.from_array(draw.normal(size=s).astype(np.float32), n)
            for n, s in shapes.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


IDS = (np.random.default_rng(1).integers(0, 12, (60, 1)) + np.arange(10)) % 12
BY_TOKEN = {"name": "softmax_cross_entropy", "axis": -1}


@pytest.mark.parametrize(
    ("labels", "loss"),
    [
        (IDS, "causal_lm"),
        (np.where(np.arange(10) < 7, IDS, -100), "causal_lm"),
        (np.roll(IDS, -1, 1), BY_TOKEN),  # shifted already
    ],
)
def test_a_language_model_predicts_the_next_token(tmp_path, monkeypatch, labels, loss):
    """Labels that are the inputs: without a shift, the identity would be learned."""
    monkeypatch.chdir(tmp_path)
    language_model("m.onnx")
    np.savez("d.npz", X=IDS.astype(np.int32), y=labels)
    assert run("init", "m.onnx", "--data", "d.npz").exit_code == 0
    assert Recipe.load("train.toml").loss == loss
    done = run("train", "train.toml", "output=run", "epochs=60", "learning_rate=0.05")
    assert done.exit_code == 0, done.output
    if loss == "causal_lm":
        last = done.output[done.output.rindex("validation_token_accuracy") :].split()
        assert float(last[2]) > 0.9


def test_a_language_model_without_labels(tmp_path, monkeypatch):
    """By its embedding, without data; with data that have no labels, the error says what they are."""
    monkeypatch.chdir(tmp_path)
    language_model("m.onnx")
    language_model("tagger.onnx", scores=5)
    np.savez("data.npz", X=IDS.astype(np.int32))
    for name, loss in (("m.onnx", "causal_lm"), ("tagger.onnx", BY_TOKEN)):
        assert run("init", name, "--force").exit_code == 0
        assert Recipe.load("train.toml").loss == loss
    refused = run("init", "m.onnx", "--data", "data.npz", "--force")
    assert refused.exit_code == 1
    assert "save the tokens as y" in refused.output


LETTERS = np.array(["b", "a", "d", "c"])


@pytest.mark.parametrize(
    ("count", "labels", "key", "value"),
    [
        (1000, np.arange(60) % 5, "head", 5),
        (3, np.arange(60) % 5, "head", 5),
        (9, np.arange(60) % 5, None, None),  # some of the classes do not occur
        (9, LETTERS[np.arange(60) % 4], "head", ("a", "b", "c", "d")),
        (4, LETTERS[np.arange(60) % 4], "classes", ("a", "b", "c", "d")),
        (3, np.arange(60) % 3 + 1, "classes", (1, 2, 3)),
        (1, LETTERS[np.arange(60) % 2], "classes", ("a", "b")),
    ],
)
def test_other_classes_than_the_model_s(tmp_path, monkeypatch, count, labels, key, value):
    monkeypatch.chdir(tmp_path)
    scores("m.onnx", "y", ["n", count])
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez("d.npz", X=x, y=labels)
    made = run("init", "m.onnx", "--data", "d.npz")
    assert made.exit_code == 0, made.output
    recipe = Recipe.load("train.toml")
    for name in ("head", "classes"):
        assert getattr(recipe, name) == (value if name == key else None)
    assert recipe.stratify
    done = run("train", "train.toml", "output=run", "epochs=1")
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output
    # The recipe has stratify = true, which is only for a fraction.
    text = Path("train.toml").read_text("utf-8")
    for other in ('validation = "d.npz"', ""):
        Path("train.toml").write_text(text.replace("validation = 0.2", other), "utf-8")
        done = run("train", "train.toml", "output=run", "epochs=1", "--force")
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_classes_as_floats_are_said_to_be_floats(tmp_path, monkeypatch, softmax, table):
    """The advice is tried; other numbers have none."""
    monkeypatch.chdir(tmp_path)
    scores("m.onnx", "y", ["n", 3], "Softmax" * softmax)
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    kinds = np.arange(60) % 3

    def init(labels):
        if table:
            head = ",".join([*"abcd", "y"])
            rows = [
                "\n" + ",".join(map(str, [*row, label]))
                for row, label in zip(x, labels, strict=True)
            ]
            Path("d.csv").write_text(head + "".join(rows))
        else:
            np.savez("d.npz", X=x, y=labels)
        return run("init", "m.onnx", "--data", "d.csv" if table else "d.npz", "--force")

    refused = init(kinds.astype(float))
    assert refused.exit_code == 1
    assert "(0.0, 1.0, 2.0): if they are classes, save them as integers" in refused.output
    assert not Path("train.toml").exists()
    assert "if they are classes" not in init(np.linspace(0, 1, 60)).output
    assert init(kinds).exit_code == 0
    assert Recipe.load("train.toml").loss == "softmax_cross_entropy"


def test_a_regression_on_few_whole_numbers_says_how_they_become_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores("m.onnx", "y", ["n", 1])
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    for labels, few in (
        (np.arange(60) % 3, True),
        (np.arange(60.0) % 3, True),
        (np.arange(60.0), False),
    ):
        np.savez("d.npz", X=x, y=labels)
        assert run("init", "m.onnx", "--data", "d.npz", "--force").exit_code == 0
        text = " ".join(Path("train.toml").read_text("utf-8").replace("#", " ").split())
        assert ("`ortflex init --classes 3`" in text) == few
        assert Recipe.load("train.toml").loss == "squared_error"
    np.savez("d.npz", X=x, y=np.arange(60) % 3)
    made = run("init", "m.onnx", "--data", "d.npz", "--force", "--classes", "3")
    assert made.exit_code == 0, made.output


def test_labels_that_no_loss_takes_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores("m.onnx", "y", ["n", 3])
    x = np.zeros((60, 4), np.float32)
    np.savez("d.npz", X=x, y=np.linspace(0, 1, 60))
    made = run("init", "m.onnx", "--data", "d.npz")
    assert made.exit_code == 1
    assert not Path("train.toml").exists()


def save(path, nodes, inputs, outputs, **weights):
    kinds = {"ids": TensorProto.INT64}
    values = [
        [helper.make_tensor_value_info(n, kinds.get(n[:3], TensorProto.FLOAT), s) for n, s in side]
        for side in (inputs.items(), outputs.items())
    ]
    rng = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n)
        for n, s in weights.items()
    ]
    graph = helper.make_graph([helper.make_node(*n) for n in nodes], "g", *values, tensors)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def test_two_embeddings_without_labels_are_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    towers = [("MatMul", ["a", "v"], ["question"]), ("MatMul", ["b", "w"], ["answer"])]
    sizes = {"question": ["n", 3], "answer": ["n", 3]}
    save("m.onnx", towers, {"a": ["n", 4], "b": ["n", 5]}, sizes, v=(4, 3), w=(5, 3))
    rng = np.random.default_rng(1)
    rows = {n: rng.normal(size=(60, s)).astype(np.float32) for n, s in [("a", 4), ("b", 5)]}
    np.savez("pairs.npz", **rows)
    made = run("init", "m.onnx", "--data", "pairs.npz")
    assert made.exit_code == 0, made.output
    loss = Recipe.load("train.toml").loss
    assert loss["name"] == "contrastive"
    assert "Not trained" not in Path("train.toml").read_text()
    assert dict(loss["predicted"]) == {"anchor": "question", "positive": "answer"}
    for data in ([], ["data=pairs.npz"]):  # the path alone is enough where no loss reads labels
        done = run("train", "train.toml", "output=run", "epochs=1", "--force", *data)
        assert done.exit_code == 0, done.output
    supervised = run("train", "train.toml", "data=pairs.npz", "loss={question='squared_error'}")
    assert supervised.exit_code == 1
    np.savez("judged.npz", **rows, y=np.arange(60) % 2)
    judged = run("init", "m.onnx", "--data", "judged.npz", "-o", "judged.toml")
    assert judged.exit_code == 1
    assert "contrastive" in judged.output


def test_the_columns_of_features_are_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores("m.onnx", "y", ["n", 1])
    Path("d.csv").write_text(
        "date;a;b;c;d;price\n"
        + "".join(f"2024-01-0{k % 9 + 1};{k},5;1;{k % 7};2;{k}\n" for k in range(60))
    )
    options = ["init", "m.onnx", "--data", "d.csv", "--target", "price"]
    refused = run(*options)
    assert refused.exit_code == 1
    assert "--columns" in refused.output
    made = run(*options, "--columns", "a, b,c,d")
    assert made.exit_code == 0, made.output
    assert list(Recipe.load("train.toml").data["columns"]) == ["a", "b", "c", "d"]
    Path("c.csv").write_text(
        "id,a,city,b,c,price\n"
        + "".join(f"n{k},{k},{'Rom' if k % 3 else 'Bern'},1,2,{k}\n" for k in range(60))
    )
    options = ["init", "m.onnx", "--data", "c.csv", "--target", "price", "-o", "c.toml"]
    mixed = run(*options, "--columns", "a,city,b,c")
    assert mixed.exit_code == 0, mixed.output
    assert Recipe.load("c.toml").data["columns"] == {"city": ("Bern", "Rom"), "id": "unused"}
    assert run("train", "c.toml", "output=mixed", "epochs=1").exit_code == 0
    Path("new.csv").write_text("a,city,b,c\n1,Rom,1,2\n")  # an unused column may be missing
    predicted = run("predict", "mixed", "new.csv")
    assert predicted.exit_code == 0, predicted.output
    # The ending of a path names the source, in a table as in a string.
    table = 'data={path = "d.csv", target = "price", columns = ["a", "b", "c", "d"]}'
    done = run("train", "train.toml", table, "output=run", "epochs=1")
    assert done.exit_code == 0, done.output
