"""What ``ortflex init`` knows of data: folders of images, shapes that will not fit, other classes."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import Recipe
from tests import models
from tests.plugins.commands import ortflex, refused, works

pytestmark = pytest.mark.per_python


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(path, graph, **shapes):
    onnx.save(models.of_text(graph, shapes), path)


def convolution(path):
    save(
        path,
        "(float[n, 3, 16, 12] x) => (float[n, 4] y) { c = Conv(x, w) r = Relu(c) "
        "p = GlobalAveragePool(r) f = Flatten(p) s = Gemm(f, v, b) y = Softmax<axis = 1>(s) }",
        w=(5, 3, 3, 3),
        v=(5, 4),
        b=(4,),
    )


def done(*arguments):
    return works(*arguments).output


@pytest.mark.parametrize("classes", [3, 4])
def test_a_folder_of_images_trains_without_a_warning(classes):
    image = pytest.importorskip("PIL.Image")
    convolution("m.onnx")
    rng = np.random.default_rng(1)
    for name in ["ant", "bee", "cat", "dog"][:classes]:
        Path("photos", name).mkdir(parents=True)
        for k in range(14):
            pixels = rng.integers(0, 256, (20, 18, 3), np.uint8)
            image.fromarray(pixels).save(f"photos/{name}/{k}.png")
    done("init", "m.onnx", "--data", "photos")
    recipe = Recipe.load("train.toml")
    assert list(recipe.data["size"]) == [16, 12]
    assert len(recipe.data["mean"]) == len(recipe.data["std"]) == 3
    assert recipe.head == (3 if classes == 3 else None)
    assert "warning" not in done("train", "train.toml", "epochs=1", "output=run").lower()
    for path, rows in [("photos/bee", 14), ("photos/bee/0.png", 1)]:  # without labels
        done("predict", "run", path, "-o", "p.npz", "--force")
        with np.load("p.npz") as predicted:
            assert [len(array) for array in predicted.values()] == [rows]
    outputs = onnx.load("run/trained.onnx").graph.output
    assert outputs[0].type.tensor_type.shape.dim[1].dim_value == classes


@pytest.mark.parametrize(
    ("shape", "way_out"), [((8, 16, 12, 3), "transpose(0, 3, 1, 2)"), ((8, 3, 9, 9), "expects")]
)
def test_shapes_that_will_fail_are_refused(shape, way_out):
    convolution("m.onnx")
    np.savez("d.npz", X=np.zeros(shape, np.float32), y=np.arange(8) % 4)
    assert way_out in refused("init", "m.onnx", "--data", "d.npz").output
    assert not Path("train.toml").exists()
    np.savez("d.npz", X=np.zeros((8, 3, 16, 12), np.float32), y=np.arange(8) % 4)
    done("init", "m.onnx", "--data", "d.npz")


def scores(path, name, shape, after="Identity"):
    """x [n, 4] -> one product, perhaps an operator after it, and a name for the result."""
    *rows, count = map(str, shape)
    kinds = f"(float[{','.join(rows)},4] x) => (float[{','.join(rows)},{count}] {name})"
    if after == "Identity":
        save(path, f"{kinds} {{ {name} = MatMul(x, w) }}", w=(4, int(count)))
    else:
        save(path, f"{kinds} {{ h = MatMul(x, w) {name} = {after}(h) }}", w=(4, int(count)))


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
def test_names_and_shapes_choose_the_loss_without_data(name, shape, loss):
    scores("m.onnx", name, shape)
    np.savez("data.npz", X=np.zeros((2, 4), np.float32))  # the path of the recipe
    done("init", "m.onnx")
    assert Recipe.load("train.toml").loss == loss


def language_model(path, tokens=12, scores=12):
    """Token ids [n, t] -> scores [n, t, scores], which depend on the token in the same place."""
    save(
        path,
        f"(int32[n, t] ids) => (float[n, t, {scores}] logits) "
        "{ i = Cast<to = 7>(ids) e = Gather(embedding, i) logits = MatMul(e, w) }",
        embedding=(tokens, 8),
        w=(8, scores),
    )


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
def test_a_language_model_predicts_the_next_token(labels, loss):
    """Labels that are the inputs: without a shift, the identity would be learned."""
    language_model("m.onnx")
    np.savez("d.npz", X=IDS.astype(np.int32), y=labels)
    done("init", "m.onnx", "--data", "d.npz")
    assert Recipe.load("train.toml").loss == loss
    said = done("train", "train.toml", "output=run", "epochs=60", "learning_rate=0.05")
    if loss == "causal_lm":
        last = said[said.rindex("validation_token_accuracy") :].split()
        assert float(last[2]) > 0.9


def test_a_language_model_without_labels():
    """By its embedding, without data; with data that have no labels, the error says what they are."""
    language_model("m.onnx")
    language_model("tagger.onnx", scores=5)
    np.savez("data.npz", X=IDS.astype(np.int32))
    for name, loss in (("m.onnx", "causal_lm"), ("tagger.onnx", BY_TOKEN)):
        done("init", name, "--force")
        assert Recipe.load("train.toml").loss == loss
    said = refused("init", "m.onnx", "--data", "data.npz", "--force").output
    assert "save the tokens as y" in said


LETTERS = np.array(["b", "a", "d", "c"])
ROWS = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)


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
def test_other_classes_than_the_model_s(count, labels, key, value):
    scores("m.onnx", "y", ["n", count])
    np.savez("d.npz", X=ROWS, y=labels)
    done("init", "m.onnx", "--data", "d.npz")
    recipe = Recipe.load("train.toml")
    for name in ("head", "classes"):
        assert getattr(recipe, name) == (value if name == key else None)
    assert recipe.stratify
    assert "warning" not in done("train", "train.toml", "output=run", "epochs=1")
    # The recipe has stratify = true, which is only for a fraction.
    text = Path("train.toml").read_text("utf-8")
    for other in ('validation = "d.npz"', ""):
        Path("train.toml").write_text(text.replace("validation = 0.2", other), "utf-8")
        done("train", "train.toml", "output=run", "epochs=1", "--force")


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_classes_as_floats_are_said_to_be_floats(softmax, table):
    """The advice is tried; other numbers have none."""
    scores("m.onnx", "y", ["n", 3], "Softmax" if softmax else "Identity")
    kinds = np.arange(60) % 3

    def init(command, labels):
        if table:
            rows = [["a", "b", "c", "d", "y"], *zip(*ROWS.T, labels, strict=True)]
            Path("d.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
        else:
            np.savez("d.npz", X=ROWS, y=labels)
        data = "d.csv" if table else "d.npz"
        return command("init", "m.onnx", "--data", data, "--force").output

    said = init(refused, kinds.astype(float))
    assert "(0.0, 1.0, 2.0): if they are classes, save them as integers" in said
    assert not Path("train.toml").exists()
    assert "if they are classes" not in init(ortflex, np.linspace(0, 1, 60))
    init(works, kinds)
    assert Recipe.load("train.toml").loss == "softmax_cross_entropy"


def test_a_regression_on_few_whole_numbers_says_how_they_become_classes():
    scores("m.onnx", "y", ["n", 1])
    whole = np.arange(60) % 3
    for labels, few in ((whole, True), (whole * 1.0, True), (np.arange(60.0), False)):
        np.savez("d.npz", X=ROWS, y=labels)
        done("init", "m.onnx", "--data", "d.npz", "--force")
        text = " ".join(Path("train.toml").read_text("utf-8").replace("#", " ").split())
        assert ("`ortflex init --classes 3`" in text) == few
        assert Recipe.load("train.toml").loss == "squared_error"
    np.savez("d.npz", X=ROWS, y=whole)
    done("init", "m.onnx", "--data", "d.npz", "--force", "--classes", "3")


def test_labels_that_no_loss_takes_are_refused():
    scores("m.onnx", "y", ["n", 3])
    np.savez("d.npz", X=np.zeros((60, 4), np.float32), y=np.linspace(0, 1, 60))
    refused("init", "m.onnx", "--data", "d.npz")
    assert not Path("train.toml").exists()


def test_two_embeddings_without_labels_are_pairs():
    graph = "(float[n, 4] a, float[n, 5] b) => (float[n, 3] question, float[n, 3] answer)"
    towers = "{ question = MatMul(a, v) answer = MatMul(b, w) }"
    save("m.onnx", f"{graph} {towers}", v=(4, 3), w=(5, 3))
    rng = np.random.default_rng(1)
    rows = {n: rng.normal(size=(60, s)).astype(np.float32) for n, s in [("a", 4), ("b", 5)]}
    np.savez("pairs.npz", **rows)
    done("init", "m.onnx", "--data", "pairs.npz")
    loss = Recipe.load("train.toml").loss
    assert loss["name"] == "contrastive"
    assert "Not trained" not in Path("train.toml").read_text()
    assert dict(loss["predicted"]) == {"anchor": "question", "positive": "answer"}
    for data in ([], ["data=pairs.npz"]):  # the path alone is enough where no loss reads labels
        done("train", "train.toml", "output=run", "epochs=1", "--force", *data)
    refused("train", "train.toml", "data=pairs.npz", "loss={question='squared_error'}")
    np.savez("judged.npz", **rows, y=np.arange(60) % 2)
    assert "contrastive" in refused("init", "m.onnx", "--data", "judged.npz", "-o", "j.toml").output


def test_the_columns_of_features_are_an_option():
    scores("m.onnx", "y", ["n", 1])
    Path("d.csv").write_text(
        "date;a;b;c;d;price\n"
        + "".join(f"2024-01-0{k % 9 + 1};{k},5;1;{k % 7};2;{k}\n" for k in range(60))
    )
    options = ["init", "m.onnx", "--data", "d.csv", "--target", "price"]
    assert "--columns" in refused(*options).output
    done(*options, "--columns", "a, b,c,d")
    assert list(Recipe.load("train.toml").data["columns"]) == ["a", "b", "c", "d"]
    Path("c.csv").write_text(
        "id,a,city,b,c,price\n"
        + "".join(f"n{k},{k},{'Rom' if k % 3 else 'Bern'},1,2,{k}\n" for k in range(60))
    )
    options = ["init", "m.onnx", "--data", "c.csv", "--target", "price", "-o", "c.toml"]
    done(*options, "--columns", "a,city,b,c")
    assert Recipe.load("c.toml").data["columns"] == {"city": ("Bern", "Rom"), "id": "unused"}
    done("train", "c.toml", "output=mixed", "epochs=1")
    Path("new.csv").write_text("a,city,b,c\n1,Rom,1,2\n")  # an unused column may be missing
    done("predict", "mixed", "new.csv")
    # The ending of a path names the source, in a table as in a string.
    table = 'data={path = "d.csv", target = "price", columns = ["a", "b", "c", "d"]}'
    done("train", "train.toml", table, "output=run", "epochs=1")
