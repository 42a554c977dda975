"""Edits of models: heads found through what follows them, labels, cuts, and the ways out."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortflex_core import ConfigError, Model, ModelError, OrtflexError, apply_edits
from ortflex_plugins.edits.heads import NewHead
from ortflex_plugins.edits.removal import Cut
from tests import models
from tests.plugins.commands import works
from tests.training import make

pytestmark = pytest.mark.per_python

ROWS = np.random.default_rng(0).standard_normal((12, 6)).astype(np.float32)


def tail(nodes: str, dims: str = "N, 4", bias: bool = True, **weights: Any) -> onnx.ModelProto:
    """``h = tanh(X·w1); s = h·w2 + b2`` and some nodes that compute Y from s."""
    rng = np.random.default_rng(1)
    known = {"w1": rng.standard_normal((6, 5)), "w2": rng.standard_normal((5, 4))}
    known |= {"b2": rng.standard_normal(4)} if bias else {}
    last = "q = MatMul(h, w2) s = Add(q, b2)" if bias else "s = MatMul(h, w2)"
    whole = f"p = MatMul(X, w1) h = Tanh(p) {last} {nodes}"
    return models.parsed(whole, {**known, **weights}, outputs=f"float[{dims}] Y")


SOFTMAX = "Y = Softmax(s)"


def scores(model: onnx.ModelProto, w2: str = "w2", b2: str = "b2") -> Any:
    """s of :func:`tail`, in float64."""
    w = models.weights_of(model)
    hidden = np.tanh(ROWS.astype(np.float64) @ w["w1"])
    return hidden @ w[w2] + w.get(b2, 0.0)


def softmax(s: Any) -> Any:
    exponents = np.exp(s - s.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def integers(*values: int) -> Any:
    return np.array(values, np.int64)


TAILS: dict[str, tuple[onnx.ModelProto, Any]] = {
    "nothing": (tail("Y = Identity(s)"), lambda s: s),
    "no bias": (tail("Y = Identity(s)", bias=False), lambda s: s),
    "softmax": (tail(SOFTMAX), softmax),
    "logarithms": (tail("Y = LogSoftmax(s)"), lambda s: np.log(softmax(s))),
    "sigmoid": (tail("Y = Sigmoid(s)"), lambda s: 1 / (1 + np.exp(-s))),
    "reshaped": (
        tail("Y = Reshape(s, n)", n=integers(-1, 4, 1), dims="N, 4, 1"),
        lambda s: s[..., None],
    ),
    "reshaped by zeros": (
        tail("Y = Reshape(s, n)", n=integers(0, -1, 1), dims="N, 4, 1"),
        lambda s: s[..., None],
    ),
    "unsqueezed and turned": (
        tail(
            """u = Unsqueeze(s, a) t = Transpose<perm = [2, 0, 1]>(u) v = Squeeze(t, a1)
            Y = Transpose<perm = [1, 0]>(v)""",
            **{"a": integers(1), "a1": integers(2)},
        ),
        lambda s: s,
    ),
    "flattened": (tail("u = Unsqueeze(s, a) Y = Flatten(u)", a=integers(2)), lambda s: s),
    "centered": (
        tail("m = ReduceMean<axes = [1]>(s) Y = Sub(s, m)"),
        lambda s: s - s.mean(axis=1, keepdims=True),
    ),
    "scaled": (tail("Y = Mul(s, c)", c=np.float32([0.5])), lambda s: s / 2),
}


@pytest.mark.parametrize("name", TAILS)
def test_a_head_is_found_through_what_follows_it(name: str) -> None:
    """The edited file computes the formula of its new weights; the body is that of the file."""
    source, after = TAILS[name]
    trainer = make(source, head=3)
    edited = trainer.export()
    assert models.weights_of(edited)["w2"].shape == (5, 3)
    assert np.array_equal(models.weights_of(edited)["w1"], models.weights_of(source)["w1"])
    (y,) = models.predict(edited, {"X": ROWS}).values()
    np.testing.assert_allclose(y, after(scores(edited)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.predict(ROWS), y, rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(edited, full_check=True)


@pytest.mark.parametrize("name", TAILS)
def test_old_classes_stay_when_more_are_added(name: str) -> None:
    source, _ = TAILS[name]
    edited = make(source, edits=[{"name": "more_classes", "add": 2}]).export()
    assert np.array_equal(scores(edited)[:, :4], scores(source))
    assert models.predict(edited, {"X": ROWS})["Y"].shape[1] == 6


def test_new_values_are_those_of_torchs_layers_and_follow_the_seed() -> None:
    """Uniform in ±1/√inputs: the bound, the mean and the variance; another seed, other values."""
    weights = {"w": np.random.default_rng(1).standard_normal((10, 400)), "b": np.zeros(10)}
    ends = "float[N, 400] X", "float[N, 10] Y"
    source = models.parsed("Y = Gemm<transB = 1>(X, w, b)", weights, *ends)
    drawn = [make(source, head=50, seed=seed).get_state() for seed in (1, 1, 2)]
    w, b = drawn[0]["w"], drawn[0]["b"]
    assert w.shape == (50, 400)
    assert 0.0499 < abs(w).max() <= 0.05
    assert abs(b).max() <= 0.05
    assert abs(w.mean()) < 1e-3
    assert w.var() == pytest.approx(0.05**2 / 3, rel=0.05)
    assert np.array_equal(w, drawn[1]["w"])
    assert not np.array_equal(w, drawn[2]["w"])


def test_the_bias_of_a_single_output_gets_the_new_classes() -> None:
    """Its one number could also be a scalar that is added to all classes."""
    model = make(models.mlp(), loss="softmax_cross_entropy", head=3).export()
    sizes = {i.name: list(i.dims) for i in model.graph.initializer}
    assert (sizes["W3"], sizes["b3"]) == ([4, 3], [3])


def test_two_heads_are_listed_and_at_decides() -> None:
    source = models.two_headed()
    outputs = [o.name for o in source.graph.output]
    loss = {outputs[0]: "squared_error"}
    with pytest.raises(ModelError) as raised:
        make(source, head=3, loss=loss)
    assert all(name in str(raised.value) for name in outputs)
    for k, name in enumerate(outputs):
        edited = make(source, head={"outputs": 3, "at": name}, loss=loss).model
        sizes = [o.shape[-1] for o in edited.outputs if o.shape]
        before = [o.shape[-1] for o in Model(source).outputs if o.shape]
        assert sizes == [3 if j == k else size for j, size in enumerate(before)]


def test_a_head_on_whose_scores_another_output_depends() -> None:
    """The other output also has a product of its own, of another size."""
    nodes = "Y = Identity(s) t = MatMul(h, v) m = ReduceMean<axes = [1]>(s) Z = Mul(t, m)"
    source = tail(nodes, v=np.ones((5, 1)))
    source.graph.output.append(models.floats("Z", "N", 1))
    edited = make(source, head=3, loss={"Y": "squared_error"}).export()
    found = models.predict(edited, {"X": ROWS})
    np.testing.assert_allclose(found["Y"], scores(edited), rtol=1e-5, atol=1e-6)
    wanted = np.tanh(ROWS @ models.weights_of(edited)["w1"]).sum(axis=1, keepdims=True)
    wanted = wanted * scores(edited).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found["Z"], wanted, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_also_read_elsewhere_is_not_changed_there() -> None:
    source = tail("r = MatMul(s, back) Y = MatMul(r, w2)", back=np.ones((4, 5)))
    edited = make(source, head=3).export()
    known = models.weights_of(edited)
    assert np.array_equal(known["w2"], models.weights_of(source)["w2"])
    (new,) = known.keys() - models.weights_of(source).keys()
    assert known[new].shape == (5, 3)


def test_a_layer_on_a_tensor_of_features_ends_the_model() -> None:
    edited = make(tail(SOFTMAX), head={"on": "h", "outputs": 3}).export()
    known = models.weights_of(edited)
    (y,) = models.predict(edited, {"X": ROWS}).values()
    wanted = scores(edited, "scores.weight", "scores.bias")
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    assert set(known) == {"w1", "scores.weight", "scores.bias"}


def test_a_cut_model_has_what_its_outputs_need() -> None:
    edited = make(tail(SOFTMAX), edits=[{"name": "cut", "at": "h"}]).export()
    assert [n.op_type for n in edited.graph.node] == ["MatMul", "Tanh"]
    assert set(models.weights_of(edited)) == {"w1"}
    assert [o.name for o in edited.graph.output] == ["h"]


def image_model(dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A segmentation network: a convolution, a 1×1 head, and a resize to the size of the image."""
    rng = np.random.default_rng(3)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    sizes = {"k": (4, 3, 3, 3), "w": (7, 4, 1, 1), "b": (7,)}
    weights = {name: rng.standard_normal(size).astype(kind) for name, size in sizes.items()}
    nodes = """
        c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(X, k)
        r = Relu(c) s = Conv(r, w, b) Y = Resize<mode = "nearest">(s, , , n)
    """
    name = {TensorProto.FLOAT: "float", TensorProto.FLOAT16: "float16"}[dtype]
    ends = f"{name}[2, 3, 8, 8] X", f"{name}[2, 7, 8, 8] Y"
    return models.parsed(nodes, {**weights, "n": integers(2, 7, 8, 8)}, *ends)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_segmentation_head_of_a_fixed_batch(dtype: int, tmp_path: Path) -> None:
    """The sizes of the Resize follow; float16 files stay float16."""
    trainer = make(image_model(dtype), head=3, batch_size=2, loss="softmax_cross_entropy")
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float16)
    trainer.fit(x.astype(helper.tensor_dtype_to_np_dtype(dtype)), np.ones((4, 8, 8), np.int64))
    edited = trainer.export()
    assert [d.dim_value for d in edited.graph.output[0].type.tensor_type.shape.dim] == [2, 3, 8, 8]
    kinds = {t.data_type for t in edited.graph.initializer} - {TensorProto.INT64}
    assert kinds == {dtype}
    fed = x[:2].astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert models.predict(edited, {"X": fed})["Y"].shape == (2, 3, 8, 8)


@pytest.mark.parametrize("blocked", [[], ["MatMul"], ["Tanh", "Add"]], ids=" ".join)
def test_every_tensor_of_a_float16_file_can_be_the_end(blocked: list[str]) -> None:
    """A converter computes some operators in float32, between Casts that it writes at the end.

    The class of mistakes: an output, or a layer on it, gets the type of the other part of the graph.
    """
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    source = tail(SOFTMAX)
    source.graph.value_info.append(models.floats("w2", 5, 4))
    for k, each in enumerate(source.graph.node):
        each.name = f"node{k}"  # older converters name the new tensors by their nodes
    file = float16.convert_float_to_float16(source, keep_io_types=True, op_block_list=blocked)
    model = Model(file)
    ends = [n for n in model.producers if any(n in made.output for made in file.graph.node)]
    assert len(ends) > 4
    weights = {t.name for t in file.graph.initializer}
    casts = {n.output[0] for n in file.graph.node if n.input[0] in weights}
    for name in ends:
        if name in casts:
            with pytest.raises(ModelError, match="input"):
                make(file, edits=[{"name": "cut", "at": name}])
            continue
        seen = copy.deepcopy(file)
        seen.graph.output.extend([onnx.ValueInfoProto(name=name)] if name != "Y" else [])
        whole = models.predict(seen, {"X": ROWS})[name]
        (cut,) = models.predict(apply_edits(model, [Cut(at=name)], 0).proto, {"X": ROWS}).values()
        assert cut.dtype == whole.dtype
        assert np.array_equal(cut, whole)
        headed = apply_edits(model, [NewHead(on=name, outputs=3)], 0).proto
        (y,) = models.predict(headed, {"X": ROWS}).values()
        assert (y.shape, y.dtype) == ((12, 3), whole.dtype)


def test_external_data_of_the_old_head_are_not_read_again(tmp_path: Path) -> None:
    outside = {"save_as_external_data": True, "size_threshold": 0}
    onnx.save(tail(SOFTMAX), tmp_path / "m.onnx", **outside)
    trainer = make(tmp_path / "m.onnx", head=3)
    trainer.export(tmp_path / "out.onnx")
    weights = models.weights_of(onnx.load(tmp_path / "out.onnx"))
    assert np.array_equal(weights["w2"], trainer.get_state()["w2"])


# ---------------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[onnx.ModelProto, dict[str, Any], tuple[str, ...]]] = {
    "a constant for each class": (tail("Y = Mul(s, c)", c=np.ones(4)), {"head": 3}, ("c", "on=")),
    "classes merged with positions": (
        tail("Y = Reshape(s, n)", n=integers(-1, 2), dims="M, 2"),
        {"head": 3},
        ("Reshape", "on="),
    ),
    "some classes are selected": (
        tail("Y = Gather<axis = 1>(s, i)", i=integers(0, 2), dims="N, 2"),
        {"head": 3},
        ("Gather",),
    ),
    "no head": (tail("Y = LpPool<kernel_shape = [1]>(s)"), {"head": 3}, ("LpPool",)),
    "too many tokens": (
        models.language_model("own"),
        {"edits": [{"name": "more_tokens", "add": 2**31 - 1}]},
        ("edits[0]", "MiB", "tokens"),
    ),
}
OF_A_CLASSIFIER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "at names nothing": ({"head": {"outputs": 3, "at": "w9"}}, ("w9", "w2")),
    "on names nothing": ({"head": {"outputs": 3, "on": "hh"}}, ("hh", "h")),
    "cut at nothing": ({"edits": [{"name": "cut", "at": "z"}]}, ("'z'",)),
    "no embedding": ({"edits": [{"name": "more_tokens", "add": 1}]}, ("Gather",)),
    "no classes": ({"head": {}}, ("head", "outputs")),
    "too many classes": ({"head": 2**31 - 1}, ("head", "MiB", "classes")),
    "a number of classes": ({"head": 0}, ("head",)),
    "twice the same class": ({"head": ["a", "a"]}, ("head", "'a'")),
    "numbers and texts": ({"head": ["a", 1]}, ("head",)),
    "two numbers": ({"head": {"outputs": 3, "classes": ["a"]}}, ("head",)),
    "misspelt": ({"head": {"output": 3}}, ("head.output", "outputs")),
    "an unknown edit": ({"edits": ["new_haed"]}, ("edits[0]", "new_head")),
}
REFUSED |= {name: (tail(SOFTMAX), *row) for name, row in OF_A_CLASSIFIER.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_an_error_with_the_way_out(name: str) -> None:
    source, options, words = REFUSED[name]
    with pytest.raises((ConfigError, ModelError, OrtflexError)) as raised:
        make(source, **options)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_labels_outside_of_the_classes_name_the_head() -> None:
    """Before the first step, and nothing is trained."""
    trainer = make(tail(SOFTMAX), loss="softmax_cross_entropy")
    before = trainer.get_state()
    with pytest.raises(OrtflexError, match="head="):
        trainer.fit(ROWS, np.arange(12) % 6)
    assert all(np.array_equal(before[n], a) for n, a in trainer.get_state().items())


def test_class_names_of_a_new_head_are_in_the_file() -> None:
    """Labels of fit are these names; a later training of the exported file knows them."""
    names = ["ant", "bee", "fly"]
    trainer = make(tail(SOFTMAX), head=names, loss="softmax_cross_entropy", epochs=2)
    labels = np.arange(12) % 3
    trainer.fit(ROWS, np.array(names)[labels])
    again = make(trainer.export(), loss="softmax_cross_entropy", metrics="accuracy")
    found = again.evaluate(ROWS, np.array(names)[labels])["accuracy"]
    assert found == pytest.approx(np.mean(trainer.predict(ROWS).argmax(axis=1) == labels))


# ---------------------------------------------------------------------- commands and recipes


@pytest.mark.parametrize(("given", "head"), [("3", "3"), ("ant, bee,fly", '["ant", "bee", "fly"]')])
def test_a_run_with_own_classes_from_the_command_line(
    given: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init, train, evaluate and predict; the trained file keeps its head when it is read again."""
    monkeypatch.chdir(tmp_path)
    onnx.save(tail(SOFTMAX), "model.onnx")
    labels = np.arange(12) % 3
    names = np.array(["ant", "bee", "fly"])[labels]
    np.savez("data.npz", X=ROWS, y=labels if given == "3" else names)
    more = "'freeze=\"backbone\"' 'callbacks=[\"checkpoint\"]'"
    for line in (
        f"init model.onnx --data data.npz --classes '{given}'",
        f"train train.toml epochs=2 output=run {more}",
        "evaluate run data.npz",
        "predict run data.npz -o out.npz",
        f"train train.toml --resume run epochs=3 {more}",
    ):
        works(*shlex.split(line))
    assert f"\nhead = {head}" in Path("train.toml").read_text("utf-8")
    trained = onnx.load("run/trained.onnx")
    assert models.weights_of(trained)["w2"].shape == (5, 3)
    source = onnx.load("model.onnx")
    assert np.array_equal(models.weights_of(trained)["w1"], models.weights_of(source)["w1"])
    (out,) = np.load("out.npz").values()
    assert out.shape == (12, 3)


# ---------------------------------------------------------------------- names people know


@pytest.mark.parametrize("names", ["torchscript", "dynamo"])
def test_paths_of_modules_select_weights_of_every_exporter(names: str) -> None:
    """Of files whose weights have made-up names, and whose nodes say where they are."""
    source = tail(SOFTMAX)
    renamed = models.renamed(source, {"w1": "onnx::MatMul_7", "w2": "val_3"})
    modules = ["body.0", "body.1", "fc", "fc", "act"]
    for made, module in zip(renamed.graph.node, modules, strict=True):
        if names == "torchscript":
            made.name = f"/{module.replace('.', '/body.')}/{made.op_type}"
        else:
            scopes = repr(["", *([module[:4]] if "." in module else []), module, "linear"])
            made.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    for options, trained in (
        ({"params": ["body*"]}, {"onnx::MatMul_7"}),
        ({"params": ["fc"]}, {"val_3", "b2"}),
        ({"params": ["!body.0"]}, {"val_3", "b2"}),
        ({"freeze": "body"}, {"val_3", "b2"}),
        ({"freeze": ["fc.weight"]}, {"onnx::MatMul_7", "b2"}),
        ({"freeze": "backbone"}, {"val_3", "b2"}),
        ({"groups": [{"params": "body", "frozen": True}]}, {"val_3", "b2"}),
    ):
        assert set(make(renamed, **options).get_state()) == trained, options
    with pytest.raises(OrtflexError, match="body"):
        make(renamed, params=["bodi*"])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_recorded_shapes_of_the_old_head_are_forgotten(elsewhere: bool) -> None:
    """Some exporters record shapes of weights, too; a weight that is read elsewhere keeps its shape."""
    source = tail(SOFTMAX + " negative = Neg(w2)" * elsewhere)
    if elsewhere:
        source.graph.output.append(models.floats("negative", 5, 4))
    shapes: dict[str, tuple[Any, ...]] = {"w2": (5, 4), "b2": (4,), "s": ("N", 4), "q": ("N", 4)}
    source.graph.value_info.extend(models.floats(name, *dims) for name, dims in shapes.items())
    edited = make(source, head={"outputs": 3, "at": "Y"}, loss={"Y": "squared_error"}).export()
    recorded = {v.name for v in edited.graph.value_info}
    assert recorded == ({"w2"} if elsewhere else set())
    onnx.checker.check_model(edited, full_check=True)
    assert models.predict(edited, {"X": ROWS})["Y"].shape == (12, 3)


@pytest.mark.parametrize(
    ("nodes", "two"),
    [
        ("o = Neg(s) c = Concat<axis = 1>(o, s) Y = Softmax(c)", True),
        ("o = Mul(s, minus) c = Concat<axis = 1>(o, s) Y = Softmax(c)", True),
        ("e = Sigmoid(s) o = Sub(one, e) Y = Concat<axis = 1>(o, e)", True),
        ("o = Abs(s) c = Concat<axis = 1>(o, s) Y = Softmax(c)", False),
        ("e = Sigmoid(s) o = Sub(e, one) Y = Concat<axis = 1>(o, e)", False),
        ("e = Sigmoid(s) o = Mul(e, one) Y = Concat<axis = 1>(o, e)", False),
    ],
)
def test_one_score_of_two_classes_becomes_the_scores_of_several(nodes: str, two: bool) -> None:
    rng = np.random.default_rng(0)
    weights = {"w1": rng.standard_normal((6, 5)), "w2": rng.standard_normal((5, 1))}
    weights |= {"b2": rng.standard_normal(1), "one": np.ones(1), "minus": np.full(1, -1.0)}
    whole = f"p = MatMul(X, w1) h = Tanh(p) q = MatMul(h, w2) s = Add(q, b2) {nodes}"
    model = models.parsed(whole, weights, outputs="float[N, 2] Y")
    options = {"head": 3, "loss": "softmax_cross_entropy"}
    if not two:
        with pytest.raises(ModelError, match="joins several groups of classes"):
            make(model, **options)
        return
    export = make(model, **options).export()
    found = models.predict(export, {"X": ROWS})["Y"]
    assert found.shape == (len(ROWS), 3)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert not {node.op_type for node in export.graph.node} & {"Concat", "Neg", "Sub"}
