"""What check_model says of nodes, parameters and backends.

Backends that are not available are one line wherever backends are listed; the reasons are on request.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto

from ortflex_core import (
    ModelError,
    ModelReport,
    Plugins,
    Trainer,
    Unsupported,
    check_model,
    refusals,
    require_runtime,
    time_backends,
)
from ortflex_core.compiler.runtime import session
from ortflex_core.training.engines.backend_choice import Absent
from ortflex_plugins.backends.fused import FusedBackend
from ortflex_plugins.cli.check import check as command
from ortflex_plugins.cli.main import main
from tests import models
from tests.training import make, plugins, regression, with_backends


def report(source: ModelProto, **options: Any) -> ModelReport:
    return check_model(source, plugins=plugins(), **options)


def by_name(found: ModelReport) -> dict[str, Any]:
    return {node.name or node.operator: node for node in found.nodes}


def model(body: str, weights: dict[str, Any], **domains: int) -> ModelProto:
    return models.parsed(body, weights, "float[N, 3] x", "float[N, 2] y", **domains)


U = {"w": np.ones((3, 2)), "u": [0.5, 2.0]}
W = {"w": np.ones((3, 2)), "v": np.eye(2) + 0.5}


def test_a_network_that_trains() -> None:
    found = report(models.mlp())
    nodes = by_name(found)
    assert (nodes["matmul1"].status, nodes["act1"].status) == ("trainable", "passes")
    assert nodes["matmul1"].parameters == ("W1",)
    assert nodes["matmul1"].reason == "by a gradient rule of the family 'matmul'"
    assert not any(node.blocks for node in found.nodes)
    assert found.backends["fused"] == ()
    assert found.trainable
    assert found.notes == ()
    assert found.shared == {}
    assert "6 parameters; a gradient from Y reaches 6 of them" in found.summary
    assert "fused: can train this model" in found.summary


def test_what_lies_before_the_parameters_or_aside_is_frozen() -> None:
    nodes = by_name(report(models.mlp(), params=["W3", "b3"]))
    assert nodes["matmul1"].status == "frozen"
    assert nodes["matmul1"].reason == "no trained parameter is before it"
    assert nodes["matmul3"].status == "trainable"
    aside = model("m = MatMul(x, w)  y = MatMul(m, v)  z = Exp(m)", W)
    found = by_name(report(aside))["Exp"]
    assert (found.status, found.reason) == ("frozen", "it does not affect the tensors of the loss")


def test_an_operator_without_a_rule_blocks_what_is_before_it() -> None:
    source = model("m = MatMul(x, w)  s = my.company.Silu(m)  y = Mul(s, u)", U, my_company=1)
    found = report(source)
    silu = by_name(found)["Silu"]
    assert (silu.status, silu.blocks) == ("no rule", ("w",))
    assert silu.reason == "no gradient rule for Silu of my.company opset 1 is installed"
    assert "2 parameters; a gradient from y reaches 1 of them" in found.summary
    assert "operator Silu of my.company" in found.backends["fused"][0]
    after = report(source, params=["u"])
    assert by_name(after)["Silu"].status == "frozen"
    assert "no kernel on cpu for the operator Silu of my.company" in after.backends["fused"][0]


def test_a_form_without_a_rule_differs_from_an_operator_without_a_rule() -> None:
    regressor = 'ai.onnx.ml.LinearRegressor<coefficients=[1.0, 2.0], post_transform="PROBIT">'
    source = model(f"m = MatMul(x, w)  y = {regressor}(m)", W, ai_onnx_ml=3)
    found = by_name(report(source))["LinearRegressor"]
    assert found.status == "no rule"
    assert found.reason.startswith("no gradient rule for the operator LinearRegressor with post_tr")


def test_a_parameter_is_blocked_if_every_path_has_an_operator_without_gradient() -> None:
    both = model("m = MatMul(x, w)  f = Floor(m)  s = Add(m, f)  y = MatMul(s, v)", W)
    floor = by_name(report(both))["Floor"]
    assert (floor.status, floor.blocks) == ("not differentiable", ())
    assert floor.reason == "no gradient passes through Floor"
    wall = model("m = MatMul(x, w)  f = Floor(m)  y = MatMul(f, v)", W)
    found = report(wall)
    assert by_name(found)["Floor"].blocks == ("w",)
    assert "no gradient reaches 'w'" in found.backends["fused"][0]
    cast = model("m = MatMul(x, w) i = Cast <to = 7> (m) f = Cast <to = 1> (i) y = Add(f, m)", W)
    assert [n.status for n in report(cast).nodes[1:3]] == ["not differentiable"] * 2


def test_quantized_weights_and_control_flow_pass_a_gradient() -> None:
    source = model(
        """scale = Constant <value = float {0.01}> ()  zero = Constant <value = int8 {0}> ()
        q = QuantizeLinear(w, scale, zero)  d = DequantizeLinear(q, scale, zero)
        m = MatMul(x, d)  n = Constant <value = int64 {2}> ()
        y = Loop(n, , m) <body = b (int64 i, bool go, float[] s) => (bool on, float[] t) {
            on = Identity(go)  t = MatMul(s, v) }>""",
        W,
    )
    found = report(source)
    status = {node.operator: node.status for node in found.nodes}
    assert status["QuantizeLinear"] == "trainable"
    assert (status["DequantizeLinear"], status["Loop"]) == ("passes", "trainable")
    assert found.backends["fused"] == ()
    # By its name, too, although only the body reads it.
    inside = report(source, params=["v"])
    assert [c.name for c in inside.choices if c.trained] == ["v"]
    assert inside.backends["fused"] == ()


def test_each_backend_has_its_reasons() -> None:
    found = report(models.linear())
    assert set(found.backends) == set(plugins()["backends"].names())
    for name, reasons in found.backends.items():
        loaded = plugins()["backends"].load(name)
        assert list(reasons) == loaded.available(require_runtime())


def test_several_outputs_and_a_loss_of_choice() -> None:
    assert report(models.two_headed()).outputs == ("amount", "scores")
    found = report(models.classifier(), loss="softmax_cross_entropy")
    assert found.outputs == ("scores",)  # seen through the softmax
    assert by_name(found)["Softmax"].status == "frozen"
    with pytest.raises(ModelError, match="unknown parameter 'nothing'"):
        report(models.linear(), params="nothing")


def test_a_model_newer_than_the_runtime_cannot_be_trained() -> None:
    future = model("y = MatMul(x, w)", W)
    future.opset_import[0].version = 99
    assert "has opset 99 and IR version 8; the installed" in report(future).backends["fused"][0]


def test_an_operator_that_an_older_opset_has_a_kernel_for() -> None:
    pooled = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 22]>
        g (float[N, 1, 4, 4] x, float[R, 5] r) => (float[R, 1, 2, 2] y) <float[1, 1, 1, 1] w = {2}>
        { m = Conv(x, w)  y = MaxRoiPool<pooled_shape = [2, 2]>(m, r) }"""
    )
    reasons = report(pooled, params=["w"]).backends["fused"]
    if require_runtime().max_opset < 22:
        assert reasons == ()  # it is written at an older opset, where it means the same
    else:
        reason = reasons[0]
        assert "no kernel on cpu for the operator MaxRoiPool of ai.onnx opset 22" in reason
        assert "export the model with opset <= 21" in reason


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """What the command says of a model that was written to a file."""

    def run(source: ModelProto, *options: str) -> Any:
        path = str(tmp_path / "model.onnx")
        onnx.save(source, path)
        return CliRunner().invoke(command, [path, *options])

    return run


def test_the_command_prints_a_table_or_json(saved: Any) -> None:
    shown = saved(models.mlp(), "--all")
    assert shown.exit_code == 0
    assert "matmul1" in shown.output
    assert "6 parameters; a gradient from Y reaches 6 of them" in shown.output
    told = json.loads(saved(models.mlp(), "--json").output)
    assert told["backends"]["fused"] == {"can_train": True, "reasons": []}
    assert told["counts"]["trainable"] == 6
    assert told["nodes"][0]["parameters"] == ["W1"]
    assert [p["name"] for p in told["parameters"]] == ["W1", "b1", "W2", "b2", "W3", "b3"]
    wall = model("m = MatMul(x, w)  y = Floor(m)", W)
    assert saved(wall, "--params", "w").exit_code == 1


def test_what_several_nodes_read_is_one_parameter(saved: Any) -> None:
    tied = model("m = MatMul(x, w)  s = Mul(m, u)  t = Tanh(s)  y = Add(t, u)", U)
    assert report(tied).shared == {"u": ("#1", "#3")}
    assert "one parameter, read by 2 nodes: u (#1, #3)" in saved(tied).output
    assert json.loads(saved(tied, "--json").output)["shared"] == {"u": ["#1", "#3"]}


def test_json_output_also_reports_models_that_cannot_be_checked(tmp_path: Path) -> None:
    missing, broken = tmp_path / "nothing.onnx", tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    for path, text in (
        (missing, f"the file {str(missing)!r} does not exist"),
        (broken, "is not an ONNX model or is truncated"),
    ):
        made = CliRunner().invoke(command, [str(path), "--json"])
        told = json.loads(made.output)
        assert (made.exit_code, told["trainable"]) == (1, False)
        assert text in told["error"]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_fixed_batch_gives_the_same_message_on_every_backend(rows: int) -> None:
    """The class: a backend that knows the rows of a batch has to be asked with the file's own."""
    source = models.parsed(
        "flat = Flatten(X)  Y = Gemm<transB = 1>(flat, w, b)",
        {"w": np.ones((4, 6)), "b": np.zeros(4)},
        f"float[{rows}, 2, 3] X",
        f"float[{rows}, 4] Y",
    )
    found = report(source, loss="softmax_cross_entropy")
    ill = [r for reasons in found.backends.values() for r in reasons if "ill-typed" in r]
    assert not ill
    assert found.backends["fused"] == found.backends["example_numpy"] == ()
    [note] = found.notes
    assert f"fixed batch of {rows}: train with free_batch=true" in note
    assert f"note: {note}" in found.summary
    assert found.to_dict()["notes"] == [note]
    keys = {"model", "opset", "outputs", "trainable", "counts", "shared", "parameters", "nodes"}
    keys |= {"adapter_targets", "backends", "notes"}
    assert set(found.to_dict()) - {"memory"} == keys
    x, y = np.ones((2 * rows, 2, 3), np.float32), np.zeros(2 * rows, np.int64)
    for options in ({"batch_size": rows}, {"batch_size": 2 * rows, "free_batch": True}):
        make(source, loss="softmax_cross_entropy", epochs=1, backend="fused", **options).fit(x, y)


def test_forms_for_which_onnxruntime_deviates_from_the_standard_are_reported() -> None:
    weights = {"w": np.full((1, 1, 1, 1), 2.0), "s": np.array([1, 1, 0.8, 0.8])}
    shapes = "float[N, 1, 4, 4] x", "float[N, 1, A, B] y"
    for mode, told in (("align_corners", True), ("half_pixel", False)):
        resize = f'Resize<mode="cubic", coordinate_transformation_mode="{mode}">'
        source = models.parsed(f"h = Mul(x, w) y = {resize}(h, , s)", weights, *shapes, opset=18)
        notes = report(source, params=["w"]).notes
        assert any("Resize: onnxruntime rounds sizes" in n for n in notes) == told


X, Y = regression(rows=40)
LINE = "not available here: far, further (`ortflex doctor` shows why)"
WHY = "far is not installed: pip install far"


@attrs.frozen(kw_only=True)
class Far(FusedBackend):
    name: ClassVar[str] = "far"

    def available(self, runtime: Any) -> list[str]:
        return [WHY]


@attrs.frozen(kw_only=True)
class Further(Far):
    name: ClassVar[str] = "further"


@attrs.frozen(kw_only=True)
class Choosy(FusedBackend):
    name: ClassVar[str] = "choosy"

    def supports(self, problem: Any, device: Any, runtime: Any) -> list[str]:
        return ["it is Monday"]


def with_absent() -> Plugins:
    return with_backends(Far, Further, Choosy, keep=("fused",))


@pytest.mark.once
def test_the_check_has_one_line_for_all_of_them() -> None:
    found = check_model(models.linear(), plugins=with_absent())
    lines = found.summary.splitlines()
    assert lines[2:] == ["fused: can train this model", "choosy: it is Monday", LINE]
    assert found.backends["far"] == (WHY,)
    assert found.to_dict()["backends"]["far"] == {"can_train": False, "reasons": [WHY]}


@pytest.mark.once
def test_equal_reasons_are_one_line() -> None:
    reasons = dict.fromkeys(("a", "b", "c"), ("the model is broken",))
    assert refusals(reasons) == ["a, b, c: the model is broken"]
    absent = refusals({"a": [Absent("x")], "b": []}, "not measured: ")
    assert absent == ["not available here: a (`ortflex doctor` shows why)"]
    assert refusals({}) == []


def trainer(**options: Any) -> Trainer:
    options |= {"loss": "squared_error", "epochs": 1, "plugins": with_absent()}
    return Trainer(models.linear(), **options)


@pytest.mark.once
def test_a_backend_that_is_asked_for_by_name_has_its_reason() -> None:
    with pytest.raises(Unsupported, match=rf"far cannot train this here(.|\n)*{WHY}"):
        trainer(backend="far", progress=False).fit(X, Y)


@pytest.mark.once
def test_the_table_of_times_has_one_row_for_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    rows = time_backends(trainer(progress=False), X, Y).table()
    assert rows[0][0] == "backend"
    assert sorted(row[0] for row in rows[1:-1]) == ["choosy", "fused"]
    assert (rows[-1][0], rows[-1][-1]) == ("others", LINE)
    session._cache.clear()
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer(backend="fastest").fit(X, Y)
    [line] = [m for m in caplog.messages if "far" in m]
    assert LINE in line
    session._cache.clear()


@pytest.mark.once
@pytest.mark.parametrize("times", [False, True])
def test_commands_say_it_once(times: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plugins, "discover", classmethod(lambda cls: with_absent()))
    onnx.save(models.linear(), tmp_path / "m.onnx")
    (tmp_path / "data.csv").write_text("a,b,c,d,e,y\n" + "1,2,3,4,5,6\n2,2,1,4,5,7\n" * 8, "utf-8")
    lines = ('model = "m.onnx"', 'data = "data.csv"', 'loss = "squared_error"', "batch_size = 4")
    recipe = tmp_path / "train.toml"
    recipe.write_text("\n".join(lines), "utf-8")
    command = ["compare", str(recipe), "--steps", "2"]
    result = CliRunner().invoke(main, [*command, "--time"] if times else command)
    assert result.output.count("far") == 1, result.output
    assert LINE in result.output.splitlines()
    assert "choosy: it is Monday" in result.output
    assert WHY not in result.output
    result = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx"), "--all"])
    assert LINE in result.output
    assert f"far cannot train this model: {WHY}" in result.output
    result = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx")])
    assert WHY not in result.output
