"""Pictures of graphs: what is drawn, what is folded, and that names do no harm."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

from ortflex_core import ConfigError, gradient_model, internals_of
from ortflex_plugins.pictures import draw, draw_step
from ortflex_plugins.pictures.building import Repeat, repeats
from ortflex_plugins.pictures.layout import GAP_X, Box, Drawing, layout, spread, width
from ortflex_plugins.pictures.scene import COLORS, Item, Level
from ortflex_plugins.pictures.svg import svg
from tests import models
from tests.plugins.commands import ortflex, refused, works
from tests.training import make, regression

pytestmark = pytest.mark.once

NASTY = "</script><script>alert(1)</script>&\"'\x00\x1b\u202e\ud7ff]]>" + "n/" * 40_000


def kinds(level: Level) -> Counter[str]:
    return Counter(item.kind for item in level.items)


def named(level: Level, title: str) -> Item:
    (item,) = [i for i in level.items if i.title == title]
    return item


def blocks(count: int, width: int = 4) -> ModelProto:
    """A residual network: x + tanh(x · w + b), ``count`` times, its nodes without names."""
    body = [
        f"p{k} = MatMul(x{k}, w{k}) s{k} = Add(p{k}, b{k}) t{k} = Tanh(s{k}) "
        f"x{k + 1} = Add(x{k}, t{k})"
        for k in range(count)
    ]
    text = f"(float[N, {width}] x0) => (float[N, {width}] y) {{ {' '.join(body)} y = Sigmoid(x{count}) }}"
    weights = {f"w{k}": (width, width) for k in range(count)}
    return models.of_text(text, weights | {f"b{k}": (width,) for k in range(count)})


def with_function() -> ModelProto:
    return parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[N, 2] x) => (float[N, 2] y)
          <float[2, 2] w = {1, 2, 3, 4}, float[2] s = {1, 2}>
        { a = Abs(x)  h = own.Dense(a, w, s)  y = Tanh(h) }
        <domain: "own", opset_import: ["": 17]> Dense (v, m, c) => (r)
        { p = MatMul(v, m)  r = Add(p, c) }"""
    )


def test_boxes_and_edges_are_those_of_the_graph() -> None:
    level = draw(models.conv_net()).level
    titles = [item.title for item in level.items]
    assert titles == ["X", "Conv", "Relu", "MaxPool", "Flatten", "Gemm", "scores"]
    assert sorted(level.edges) == [(k, k + 1) for k in range(6)]
    assert [c.text for c in named(level, "Conv").chips] == ["kernel 3×1×3×3", "bias 3"]


def test_colors_say_what_check_says() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 1] y)
          <float[2, 2] u = {1, 2, 3, 4}, float[2, 1] w = {1, 2}>
        { a = Abs(x) p = MatMul(a, u) r = Round(p) q = MatMul(r, w) y = Tanh(q) }"""
    )
    level = draw(model).level
    colors = ["io", "frozen", "trainable", "not differentiable", "trainable", "passes", "io"]
    assert [i.kind for i in level.items] == colors
    frozen = draw(model, params=["w"]).level
    first, second = [i for i in frozen.items if i.title == "MatMul"]
    assert (first.kind, first.chips[0].kind) == ("frozen", "constant")
    assert (second.kind, second.chips[0].kind) == ("trainable", "parameter")


def test_an_operator_nobody_knows_is_red() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "mine": 1]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
        { p = MatMul(x, w) z = mine.Mystery(p) y = Tanh(z) }"""
    )
    item = named(draw(model).level, "Mystery")
    assert item.kind == "no rule"
    assert "no gradient rule for Mystery" in item.tip
    assert "#fecaca" in draw(model).svg()


def test_the_parts_of_a_training_step() -> None:
    trainer = make(models.linear(), optimizer="momentum", penalty="l2")
    level = draw_step(trainer, fold=False).level
    found = kinds(level)
    assert all(found[part] for part in ("forward", "loss", "backward", "penalty", "update"))
    assert found["forward"] == len(models.linear().graph.node)
    chips = {(c.text.split(" ")[0], c.kind) for i in level.items for c in i.chips}
    assert any("rate" in c.text for i in level.items for c in i.chips if c.kind == "host")
    assert {kind for _, kind in chips} >= {"parameter", "slot", "host"}
    outputs = {i.title for i in level.items if i.kind == "io"}
    assert {f"new/{n}" for n in internals_of(trainer).problem.parameters} <= outputs


def test_graphs_in_use_have_the_colors_of_their_parts() -> None:
    trainer = make(models.mlp(), backend="fused", epochs=1, optimizer="adam")
    trainer.fit(*regression(8, 6))
    step = next(g for name, g in trainer.save_onnx_graph().items() if name.startswith("step"))
    found = set(draw(step, fold=False).level.kinds())
    assert found >= {"forward", "loss", "backward", "update", "parameter", "slot"}


def test_a_gradient_model_is_its_forward_pass_and_its_backward_pass() -> None:
    model = models.mlp()
    weights = [t.name for t in model.graph.initializer]
    made = gradient_model(model, wrt=weights)
    found = kinds(draw(made, fold=False).level)
    # A bias joins the product before it.
    assert found["forward"] == [n.op_type for n in model.graph.node].count("MatMul") + 2
    assert found["backward"] == len(made.graph.node) - found["forward"]


def test_several_steps_in_one_graph_and_their_parts() -> None:
    backend = {"name": "fused", "steps_per_run": 2}
    trainer = make(models.mlp(), backend=backend, epochs=1, batch_size=4, penalty="l2")
    trainer.fit(*regression(8, 6))
    graphs = trainer.save_onnx_graph()
    (both,) = [g for name, g in graphs.items() if "2-at-once" in name]
    level = draw(both, fold=False).level
    assert kinds(level).keys() == {"io", "forward", "loss", "backward", "penalty", "update"}
    forward = Counter(i.title for i in level.items if i.kind == "forward")
    assert forward == {"Gemm": 2 * 3, "Tanh": 2 * 2}  # products and their biases are one here


def test_a_model_that_we_made_is_a_model() -> None:
    made = models.mlp()
    made.producer_name = "ortflex"
    assert set(draw(made).level.kinds()) == {"io", "trainable", "passes", "parameter"}


def test_repeated_blocks_are_found_by_their_structure() -> None:
    level = draw(blocks(12)).level
    (folded,) = [i for i in level.items if i.inner is not None]
    assert folded.title.endswith("×12")
    assert [c.text for c in folded.chips] == ["48 operators", "24 trained parameters"]
    assert folded.inner is not None
    inside = [i.title for i in folded.inner.items]
    assert inside == ["x0", "MatMul", "Add", "Tanh", "Add", "x1"]
    assert [i.title for i in level.items if i.inner is None] == ["x0", "Sigmoid", "y"]


def test_blocks_of_another_wiring_are_no_repetition() -> None:
    # The last two Adds read the same tensors as in a block, but the other way round in time.
    same = [[-1], [0], [1], [2], [3], [4], [5], [6], [7], [8]]
    assert repeats("xABABABABy", same) == [Repeat(start=1, period=2, count=4)]
    other = [list(row) for row in same]
    other[5] = [0]  # reads from the first block, not from the one before it
    assert all(r.count < 4 for r in repeats("xABABABABy", other))


def test_small_graphs_stay_as_they_are_unless_told() -> None:
    assert all(i.inner is None for i in draw(blocks(5)).level.items)
    assert any(i.inner is not None for i in draw(blocks(5), fold=True).level.items)
    assert all(i.inner is None for i in draw(blocks(12), fold=False).level.items)


def test_functions_are_folded_and_their_insides_have_colors() -> None:
    level = draw(with_function()).level
    dense = named(level, "Dense")
    assert dense.kind == "trainable"
    assert dense.inner is not None
    assert [i.title for i in dense.inner.items] == ["v", "MatMul", "Add", "r"]
    assert [i.kind for i in dense.inner.items[1:3]] == ["trainable", "trainable"]
    assert level.edges == ((0, 1), (1, 2), (2, 3), (3, 4))


def test_control_flow_has_its_bodies_inside() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N] x, bool c) => (float[N] y)
        { y = If (c) <then_branch = t () => (float[N] a) { a = Abs(x) },
                      else_branch = e () => (float[N] a) { a = Neg(x) }> }"""
    )
    inner = named(draw(model).level, "If").inner
    assert inner is not None
    assert Counter(i.title for i in inner.items) == {"Abs": 1, "Neg": 1, "a": 2}


def overlapping(drawing: Drawing) -> list[tuple[str, str]]:
    boxes = [b for b in drawing.boxes if b.item is not None]
    return [
        (a.title, b.title)
        for k, a in enumerate(boxes)
        for b in boxes[k + 1 :]
        if abs(a.x - b.x) < (a.w + b.w) / 2 and abs(a.y - b.y) < (a.h + b.h) / 2
    ]


@pytest.mark.parametrize("unfold", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_no_box_lies_on_another_and_edges_go_down(fold: bool, unfold: bool) -> None:
    drawings = [layout(draw(blocks(125), fold=fold).level, unfold=unfold)]
    while drawings:
        drawing = drawings.pop()
        assert not overlapping(drawing)
        for way in drawing.edges:
            assert all(a.y + a.h / 2 < b.y - b.h / 2 for a, b in pairwise(way))
        for box in drawing.boxes:
            assert box.w / 2 - 0.1 <= box.x <= drawing.w - box.w / 2 + 0.1
        drawings += [b.inner for b in drawing.boxes if b.inner is not None]


def test_what_is_not_connected_lies_side_by_side() -> None:
    parts = [(k, k + 1) for k in range(8)] + [(k, k + 1) for k in range(9, 12)]
    wide = tuple((12, k) for k in range(13, 30))
    items = tuple(Item(title=f"n{k}", kind="plain") for k in range(30))
    drawing = layout(Level(items, (*parts, *wide)))
    assert not overlapping(drawing)
    rows = [sorted(layer, key=lambda b: b.x) for layer in drawing.layers]
    top = [b for b in rows[0] if b.item is not None]
    gaps = [b.x - a.x - (a.w + b.w) / 2 for a, b in pairwise(top)]
    assert min(gaps) >= GAP_X - 0.1
    assert drawing.w < 1.2 * 17 * (64 + GAP_X)


def test_long_chains_do_not_drift_away_and_are_readable_folded() -> None:
    drawing = layout(draw(blocks(125), fold=False).level)
    assert len(drawing.layers) > 500
    assert drawing.w < 400
    folded = layout(draw(blocks(125)).level)
    assert len([b for b in folded.boxes if b.item is not None]) == 4
    assert folded.w < 400


def test_spread_is_the_least_squares_solution() -> None:
    # Two boxes of width 10 that want the same place part evenly; the third stays where it wants.
    boxes = [Box(Item(title="", kind="plain"), 0, w=10) for _ in range(3)]
    spread(boxes, [0.0, 0.0, 500.0])
    half = (10 + GAP_X) / 2
    assert [b.x for b in boxes] == pytest.approx([-half, half, 500.0])


@pytest.mark.parametrize("room", [0.0, 100.0, 400.0, 10_000.0])
def test_a_legend_is_in_rows_from_the_left_as_full_as_there_is_room(room: float) -> None:
    """The class: marks lie on one another, outside the picture, or in rows that begin elsewhere."""
    known = [kind for kind in COLORS if kind not in ("io", "plain")]
    text = svg(Drawing([], [], room, 50.0), ["io", "unknown", *known, "plain"], "t")
    groups = [g for g in ET.fromstring(text) if g.tag.endswith("}g")]
    parts = list(groups[0])
    assert len(parts) == 2 * len(known)
    rows: dict[float, list[tuple[float, float]]] = {}
    for kind, mark, label in zip(known, parts[::2], parts[1::2], strict=True):
        assert label.text == COLORS[kind][2]
        left, line = float(label.get("x", "")) - 17, float(label.get("y", ""))
        round_ = mark.tag.endswith("}circle")
        assert float(mark.get("cx" if round_ else "x", "")) == pytest.approx(left + 6 * round_)
        assert line - 11 < float(mark.get("cy" if round_ else "y", "")) < line
        rows.setdefault(line, []).append((left, left + 24 + width(COLORS[kind][2], 11)))
    assert all(b - a > 12 for a, b in pairwise(rows))
    assert list(rows) == sorted(rows)
    allowed = max(room, 360.0)
    for row in rows.values():
        assert row[0][0] == 0.0
        assert [left for left, _ in row[1:]] == pytest.approx([end for _, end in row[:-1]], abs=0.1)
        assert len(row) == 1 or row[-1][1] <= allowed + 0.1
    for one, (first, *_) in pairwise(rows.values()):
        assert one[-1][1] + first[1] > allowed


def hostile() -> ModelProto:
    model = models.renamed(models.mlp(), {"X": NASTY + "i", "W1": NASTY + "w", "b1": NASTY + "b"})
    for node in model.graph.node:
        node.name = NASTY + node.name
    return model


def test_names_are_harmless_in_svg(tmp_path: Path) -> None:
    picture = draw(hostile(), title=NASTY)
    text = picture.save(tmp_path / "graph.svg").read_text("utf-8")
    root = ET.fromstring(text)  # well-formed: no control character, nothing unescaped
    assert {e.tag.rpartition("}")[2] for e in root.iter()} <= {
        "svg", "g", "rect", "path", "text", "title", "circle"
    }  # fmt: skip
    assert len(text) < 60_000
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", text)
    assert max(len(e.text or "") for e in root.iter() if e.tag.endswith("}text")) <= 60


def test_names_are_harmless_in_html(tmp_path: Path) -> None:
    page = draw(hostile(), title=NASTY).save(tmp_path / "graph.html").read_text("utf-8")
    assert page.count("<script") == 2  # the data and our program
    assert "alert(1)</script>" not in page
    data = re.search(r'<script type="application/json">(.*?)</script>', page, re.S)
    assert data is not None
    scene: dict[str, Any] = json.loads(data[1])
    assert len([b for b in scene["root"]["boxes"] if "title" in b]) == 10
    # Nothing is loaded from anywhere.
    assert not re.search(r"(src|href)\s*=|url\(|@import", page)
    assert "default-src 'none'" in page


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Image = pytest.importorskip("PIL.Image")  # noqa: N806

    model = models.renamed(models.conv_net(), {"X": r"$\frac{$ 入力"})
    path = draw(model, title="$x$").save(tmp_path / "graph.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    colors = {tuple(c) for c in pixels.reshape(-1, 3)[::7].tolist()}
    assert (0xD1, 0xFA, 0xE5) in colors  # trainable
    assert (0xE0, 0xF2, 0xFE) in colors  # passes a gradient on


def test_a_folded_box_does_not_show_its_inside_in_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ortflex_plugins.pictures.figures import figure

    level = draw(with_function()).level
    for unfold in (False, True):
        shown = figure(layout(level, unfold=unfold), [], "a function")
        assert ("MatMul" in [text.get_text() for text in shown.axes[0].texts]) == unfold


def test_a_suffix_that_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.svg, \.html, \.png, got '\.gif'"):
        draw(models.linear()).save(tmp_path / "graph.gif")


def test_a_graph_that_cannot_be_checked_is_drawn_plain() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (int64[N] x) => (int64[N] y) { y = Neg(x) }"""
    )
    picture = draw(model)
    assert "without the colors" in picture.note
    assert named(picture.level, "Neg").kind == "plain"


def with_types() -> ModelProto:
    """A model of nodes whose attributes are types: of a tensor, a sequence, an optional."""
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 5] x) => (float[N, 1] y) <float[5, 1] w = {1, 2, 3, 4, 5}>
        { y = MatMul(x, w)  none = Optional()  more = Optional()  some = Optional() }"""
    )
    tensor = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2])
    sequence = onnx.helper.make_sequence_type_proto(tensor)
    optional = onnx.helper.make_optional_type_proto(sequence)
    for node, kind in zip(list(made.graph.node)[1:], (tensor, sequence, optional), strict=True):
        node.attribute.append(onnx.helper.make_attribute("type", kind))
    return made


@pytest.mark.parametrize("check", [True, False])
def test_attributes_that_are_types_are_drawn(check: bool) -> None:
    """A type is neither a number nor a list: attributes of every kind have a text."""
    model = with_types()
    if not check:  # drawn plain, as no model that could be trained
        model.opset_import[0].version = 3
    picture = draw(model)
    assert ("without the colors" in picture.note) is not check
    tips = [item.tip for item in picture.level.items if item.title == "Optional"]
    assert len(tips) == 3
    assert all("type=TypeProto" in str(tip) for tip in tips)


def test_the_command_draws_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(models.linear(), "model.onnx")
    onnx.save(with_types(), "types.onnx")
    np.savez("data.npz", X=np.zeros((4, 5), np.float32), y=np.zeros((4, 1), np.float32))
    Path("train.toml").write_text('model="model.onnx"\ndata="data.npz"\nloss="huber"\n')
    for arguments, title in (
        (["model.onnx"], "model.onnx"),
        (["types.onnx"], "types.onnx"),
        (["train.toml"], "model.onnx"),
        (["train.toml", "--training"], "One step of training"),
        (["model.onnx", "--training", "--loss", "elastic"], "One step of training"),
    ):
        assert "wrote out.svg" in works("graph", *arguments, "-o", "out.svg").output
        assert title in ET.fromstring(Path("out.svg").read_text("utf-8"))[0].text  # type: ignore[operator]
    works("graph", "model.onnx")
    assert Path("model.svg").exists()
    for option in ("--loss=huber", "--params=w", "--head=3"):
        result = ortflex("graph", "train.toml", "--training", option)
        assert result.exit_code == 2
        assert f"a recipe has the key {option[2:].partition('=')[0]}" in result.output
    assert "the file 'nothing.onnx' does not exist" in refused("graph", "nothing.onnx").output
