"""Edited models in ``check``, in pictures, in several processes and in other files; more tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import OrtflexError, check_model, run_ranks
from ortflex_plugins.pictures import draw
from tests import models
from tests.plugins.commands import works
from tests.plugins.test_edits import ROWS, SOFTMAX, TAILS, integers, scores, tail
from tests.training import make, results, same

node = helper.make_node


def test_check_shows_the_model_with_its_head(tmp_path: Path) -> None:
    path = str(tmp_path / "model.onnx")
    onnx.save(models.classifier(), path)
    report = check_model(path, "softmax_cross_entropy", head=["a", "b", "c", "d", "e"])
    assert report.trainable
    assert any("float32[N, 5]" in note for note in report.notes)
    assert "new: W float32[4, 5], was [4, 3]; b float32[5], was [3]; 25 new numbers" in report.notes
    two = check_model(models.two_headed(), edits={"name": "cut", "at": "amount"})
    assert two.outputs == ("amount",)
    with pytest.raises(OrtflexError, match="nowhere"):
        check_model(path, head={"outputs": 5, "at": "nowhere"})
    result = works("check", path, "--loss", "softmax_cross_entropy", "--head", "5")
    assert "[N, 5]" in result.output


EDITS: dict[str, dict[str, Any]] = {
    "a head": {"head": 5},
    "a head of the same size": {"head": 4},
    "more classes": {"edits": {"name": "more_classes", "add": 2}},
    "a layer on features": {"head": {"on": "h", "outputs": 3}},
    "a cut": {"edits": {"name": "cut", "at": "p"}},
    "two edits": {"edits": {"name": "cut", "at": "h"}, "head": {"on": "p", "outputs": 3}},
}


@pytest.mark.parametrize("name", EDITS)
def test_views_of_an_edited_model_say_what_is_new(name: str) -> None:
    """The summary and the picture, counted here from the two files.

    The class of mistakes: a view shows the file, or does not say which weights have random values.
    """
    source = tail(SOFTMAX)
    trainer = make(source, **EDITS[name])
    (old, own) = (models.weights_of(m) for m in (source, trainer.export()))
    head = set(trainer.model.new_head)
    new = {n for n in own if n not in old or n in head or own[n].shape != old[n].shape}
    kept = 0
    for n in new & old.keys():
        same = own[n][tuple(slice(size) for size in old[n].shape)]
        kept += old[n].size if np.array_equal(same, old[n]) else 0
    facts = trainer.summary().facts
    assert ("new" in facts) == bool(new)
    if new:
        assert f"; {sum(own[n].size for n in new) - kept} new numbers" in facts["new"]
        assert all(f"{n} float32{list(own[n].shape)}" in facts["new"] for n in new)
    gone = old.keys() - own.keys()
    assert all(n in facts["removed"] for n in gone)
    rows = {row[0] for row in trainer.summary().tensors if row[3].endswith(", new")}
    assert rows == new
    assert all(n in trainer.describe().partition("; new: ")[2] for n in head)
    picture = draw(source, **EDITS[name])
    chips = [chip for item in picture.level.items for chip in item.chips if chip.kind == "new"]
    added = {o for n in trainer.model.proto.graph.node for o in n.output}
    added -= {o for n in source.graph.node for o in n.output}
    assert sorted(c.text.partition(" ")[0] for c in chips) == sorted([*new, *["new"] * len(added)])
    assert dict(picture.changes) == {k: w for k, w in facts.items() if k in ("new", "removed")}
    assert "new, by an edit" in picture.svg() or not new


def test_pictures_of_recipes_and_runs_have_their_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe, its training step, a finished run, its page, and a run whose file is gone."""
    monkeypatch.chdir(tmp_path)
    onnx.save(tail(SOFTMAX), "model.onnx")
    np.savez("data.npz", X=ROWS, y=np.arange(12) % 3)
    recipe = 'model="model.onnx"\ndata="data.npz"\nloss="softmax_cross_entropy"\nhead=3\nepochs=1\n'
    Path("train.toml").write_text(f'{recipe}freeze="backbone"\n')

    def seen(*line: str) -> str:
        return works(*line).output

    seen("train", "train.toml", "output=run")
    words = "w2 float32[5, 3], was [5, 4]; b2 float32[3], was [4]; 18 new numbers"
    for given in (["train.toml"], ["train.toml", "--training"], ["run"], ["run", "--training"]):
        assert f"new: {words}" in seen("graph", *given, "-o", "out.svg")
        assert ">w2 5×3<" in Path("out.svg").read_text("utf-8")
    assert "24 new numbers" in seen("graph", "model.onnx", "--head", "4", "-o", "out.svg")
    seen("report", "run")
    page = Path("run/report.html").read_text("utf-8")
    assert f"new: {words}" in page
    assert "w1 6×5" in page
    recipe = seen("init", "model.onnx", "--classes", "3", "--force")
    assert words in recipe + Path("train.toml").read_text("utf-8")
    Path("model.onnx").unlink()
    assert "new:" not in seen("graph", "run", "-o", "out.svg")
    assert ">w2 5×3<" in Path("out.svg").read_text("utf-8")


def test_several_processes_train_one_head() -> None:
    x = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32)
    y = np.arange(24) % 5
    options = {"loss": "softmax_cross_entropy", "head": 5, "backend": "fused", "epochs": 2}
    alone = make(models.classifier(), batch_size=4, accumulate=2, **options)
    alone.fit(x, y)

    def train(group: Any) -> Any:
        run = make(models.classifier(), batch_size=4, distributed=group, **options)
        run.fit(x, y)
        return run.get_state()

    for state in results(run_ranks(2, train)):
        same(state, alone.get_state(), tolerance=1e-6)


COMPUTED: dict[str, Callable[[str, Any], list[Any]]] = {
    "reshaped": lambda name, v: [constant(f"{name}/row", v[None]), constant("one", integers(-1)),
                                 node("Reshape", [f"{name}/row", "one"], [name])],
    "joined": lambda name, v: [*(constant(f"{name}{k}", v[k : k + 1]) for k in range(len(v))),
                               node("Concat", [f"{name}{k}" for k in range(len(v))], [name], axis=0)],
    "selected": lambda name, v: [constant(f"{name}/more", np.append(v[::-1], 9)),
                                 constant(f"{name}/of", np.arange(len(v))[::-1].copy()),
                                 node("Gather", [f"{name}/more", f"{name}/of"], [name])],
}  # fmt: skip
WITH_INTEGERS = [
    name
    for name, (source, _) in TAILS.items()
    if any(t.data_type == TensorProto.INT64 for t in source.graph.initializer)
]


def constant(name: str, values: Any) -> Any:
    return node("Constant", [], [name], value=numpy_helper.from_array(values))


@pytest.mark.parametrize("way", COMPUTED)
@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_axes_and_shapes_that_nodes_compute_from_constants(name: str, way: str) -> None:
    """torch's newer exporter writes them so, without its optimizer; every shape and axis is one case."""
    source = copy.deepcopy(TAILS[name][0])
    values = {
        t.name: numpy_helper.to_array(t)
        for t in source.graph.initializer
        if t.data_type == TensorProto.INT64
    }
    kept = [t for t in source.graph.initializer if t.name not in values]
    made = {n.output[0]: n for name, v in values.items() for n in COMPUTED[way](name, v)}
    nodes = [*made.values(), *source.graph.node]
    del source.graph.initializer[:], source.graph.node[:]
    source.graph.initializer.extend(kept)
    source.graph.node.extend(nodes)
    trainer = make(source, head=3)
    edited = trainer.export()
    (y,) = models.predict(edited, {"X": ROWS}).values()
    np.testing.assert_allclose(y, TAILS[name][1](scores(edited)), rtol=1e-5, atol=1e-6)
    assert y.size == 3 * len(ROWS)


@pytest.mark.per_python
@pytest.mark.parametrize(("tied", "columns"), [("same", 9), ("copy", 9), ("own", 6)])
def test_more_tokens_grow_a_tied_head_too(tied: str, columns: int) -> None:
    trainer = make(models.language_model(tied), edits=[{"name": "more_tokens", "add": 3}])
    edited = trainer.export()
    table = models.weights_of(edited)["table"]
    old = models.weights_of(models.language_model(tied))["table"]
    assert np.array_equal(table[:6], old)
    np.testing.assert_allclose(table[6:], np.tile(old.mean(axis=0), (3, 1)), atol=1e-3)
    assert len(np.unique(table[6:], axis=0)) == 3
    ids = np.array([[0, 8, 3]])
    logits = models.predict(edited, {"ids": ids})["logits"]
    w = models.weights_of(edited)
    head = table.T if tied != "own" else w["turned"]
    assert logits.shape == (1, 3, columns)
    np.testing.assert_allclose(logits[0], table[ids[0]] @ w["mix"] @ head, rtol=1e-5, atol=1e-6)


@pytest.mark.per_python
@pytest.mark.parametrize(
    ("at", "grown"), [("", "long"), ("short", "short"), ("z_short", "short"), ("z", "z")]
)
def test_more_tokens_grow_the_longest_table_unless_one_is_named(at: str, grown: str) -> None:
    """Neither the first one in the file, nor the first or last one by name."""
    sizes = {"short": 4, "long": 9, "z": 5}
    rng = np.random.default_rng(2)
    nodes = [node("Gather", [name, "ids"], [f"{name}.row"], f"/z_{name}/Gather") for name in sizes]
    model = models.model(
        [*nodes, node("Sum", [f"{name}.row" for name in sizes], ["y"])],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])],
        [models.floats("y", "N", 3)],
        {name: rng.standard_normal((size, 3)).astype(np.float32) for name, size in sizes.items()},
    )
    edit = {"name": "more_tokens", "add": 300} | ({"at": at} if at else {})
    tables = models.weights_of(make(model, edits=[edit]).export())
    assert {n: len(tables[n]) for n in sizes} == sizes | {grown: sizes[grown] + 300}
    old, new = np.split(tables[grown].astype(np.float64), [sizes[grown]])
    spread = (new - old.mean(axis=0)).std(axis=0) / old.std(axis=0)
    np.testing.assert_allclose(spread, 10**-4.5, rtol=0.25)  # near the mean, and no two are equal
