"""Comparing backends: those that are right agree, and a wrong one is caught where it is wrong.

The float64 twin of a model, which they are compared with, is well typed, and computes what the model does.
The class: an operator gives float32 by default (a default type, a fixed one), or reads it, and its
neighbors are float64 by then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx.reference import ReferenceEvaluator

from ortflex_core import (
    Batch,
    Comparison,
    ConfigError,
    DataError,
    Device,
    GraphError,
    Problem,
    Runtime,
    TrainingDiverged,
    Unsupported,
    compare,
    internals_of,
    step_program,
)
from ortflex_core.tools import comparison
from ortflex_core.tools.double_precision import widened, widened_model
from ortflex_plugins.cli.main import main
from tests import models
from tests.training import make, regression

plain = pytest.importorskip("ortflex_example.plain")
X, Y = regression(rows=30, features=6)


class WrongEngine(plain.PlainEngine):  # type: ignore[misc, name-defined]
    """The plain engine with one mistake."""

    def __init__(self, problem: Problem, device: Device, wrong: str) -> None:
        super().__init__(problem, device)
        self.wrong = wrong

    def _one(self, batch: Batch, rate: float) -> tuple[float, float]:
        before = dict(self._weights)
        loss, penalty = super()._one(batch, rate)
        if self.wrong in ("loss", "tensor"):
            return 2 * loss, penalty
        factors: Mapping[str, float] = {}
        if self.wrong == "gradient":  # what a wrong rule of Tanh in the second layer gives
            factors = dict.fromkeys(("W1", "b1", "W2", "b2"), 1.5)
        if self.wrong == "update" and self.problem.optimizer.name == "adam":
            factors = {"b2": 1.01}
        for name, factor in factors.items():
            self._weights[name] = before[name] + factor * (self._weights[name] - before[name])
        return loss, penalty

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Any]:
        found = super().predict(batch, outputs)
        if self.wrong == "tensor":
            for name in {"h2", "m3", "Y"} & set(found):
                found[name] = found[name] * 1.01
        return found  # type: ignore[no-any-return]


@attrs.frozen(kw_only=True)
class Wrong(plain.Plain):  # type: ignore[misc, name-defined]
    name = "wrong"
    wrong: str = "gradient"

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> WrongEngine:
        return WrongEngine(problem, device, self.wrong)


def compared(wrong: str | None = None, **options: Any) -> Comparison:
    backend = "auto" if wrong is None else Wrong(wrong=wrong)
    trainer = make(models.mlp(), backend=backend, optimizer="adam", batch_size=8, **options)
    names = ["fused", "example_numpy"] if wrong is None else ["example_numpy", "wrong"]
    return compare(trainer, X, Y, steps=6, backends=names)


def test_backends_that_are_right_agree() -> None:
    found = compared(penalty={"name": "elastic", "l1": 0.01, "l2": 0.1})
    assert found.agree, found.differences
    assert found.reference == "float64"
    assert [r.backend for r in found.results] == ["fused", "example_numpy"]
    for result in found.results:
        np.testing.assert_allclose(result.losses, found.reference_losses, rtol=1e-5)
        assert len(result.losses) == 6
        assert result.us_per_step > 0
        assert sorted(result.gradient_errors) == ["W1", "W2", "W3", "b1", "b2", "b3"]
        assert max(result.gradient_errors.values()) < 1e-4


def test_the_steps_are_those_of_a_training() -> None:
    found = compared()
    seen: list[float] = []

    def step_end(loss: float, penalty: float) -> None:
        seen.append(loss + penalty)

    options: dict[str, Any] = {"optimizer": "adam", "batch_size": 8, "callbacks": [step_end]}
    make(models.mlp(), backend="fused", epochs=2, **options).fit(X, Y)
    np.testing.assert_allclose(found.reference_losses, seen[:6], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"constraint": {"name": "max_norm", "bound": 0.5}},
        {"averaging": {"name": "ema", "decay": 0.8}, "clip_norm": 0.05},
        {"groups": [{"params": "W1", "penalty": "l2"}, {"params": "b*", "optimizer": "momentum"}]},
        {"groups": [{"params": "W*", "start_epoch": 1}], "averaging": "swa"},
    ],
)
def test_everything_between_gradients_and_weights_is_compared(options: dict[str, Any]) -> None:
    """The gradients are read off engines of plain descent, which have nothing of it."""
    found = compared(**options)
    assert found.agree, found.differences
    assert found.reference == "float64"
    largest = [max(r.gradient_errors.values()) for r in found.results]
    assert max(largest) < 1e-4
    parted = compared("gradient", **options)
    assert parted.differences[0].kind == "gradient"


def test_steps_of_several_batches_are_compared() -> None:
    trainer = make(dropping(), backend="fused", batch_size=5, accumulate=3, epochs=2)
    # The last batch of an epoch is smaller.
    found = compare(trainer, X[:28], Y[:28], steps=4, backends=["fused"])
    assert found.agree, found.differences
    assert found.reference == "float64"
    history = trainer.fit(X[:28], Y[:28])
    means = np.reshape(found.reference_losses, (2, 2)) @ [15 / 28, 13 / 28]
    np.testing.assert_allclose(means, history.losses, rtol=1e-5)


def test_a_diverging_training_is_compared_up_to_the_last_finite_step() -> None:
    found = compared(learning_rate=1e30, clip_norm=1e38)
    told = "float64 is not finite at step 1, with the rate 1e+30: the comparison ends before it"
    assert list(found.notes) == [told]
    assert found.agree
    assert len(found.reference_losses) == 1
    with pytest.raises(TrainingDiverged, match="float64 is not finite at step 0, with the rate"):
        compared(learning_rate=1e300)


def test_a_comparison_does_not_change_the_trainer() -> None:
    trainer = make(models.mlp(), batch_size=8)
    compare(trainer, X, Y, steps=3, backends=["example_numpy"])
    for name, array in models.weights_of(models.mlp()).items():
        np.testing.assert_array_equal(trainer.get_state()[name], array)


@pytest.mark.parametrize(
    ("wrong", "kind", "name", "node", "text"),
    [
        ("tensor", "tensor", "h2", "act2", "the tensor 'h2', which Tanh node 'act2' computes, is"),
        ("loss", "loss", "squared_error", "", "while every tensor before it agrees .*squared_err"),
        ("gradient", "gradient", "b2", "add2", "'b2', which Add .* look at add2, act2, matmul3"),
        ("update", "weight", "b2", "", "all gradients agree; look at the optimizer adam"),
    ],
)
def test_the_first_wrong_tensor_of_a_backend_is_found(
    wrong: str, kind: str, name: str, node: str, text: str
) -> None:
    found = compared(wrong)
    (difference,) = found.differences
    assert not found.agree
    assert (difference.backend, difference.step, difference.kind) == ("wrong", 0, kind)
    assert (difference.name, difference.node) == (name, node)
    assert re.search(text, str(difference))


def test_convolutions_are_compared_although_they_have_no_float64_kernel() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 1, 6, 6)).astype(np.float32)
    trainer = make(models.conv_net(), loss="softmax_cross_entropy", batch_size=8, backend="auto")
    found = compare(trainer, x, np.arange(20) % 4, steps=2, backends=["fused", "example_numpy"])
    assert found.agree
    assert found.reference in ("float64", "fused")
    assert bool(found.notes) == (found.reference == "fused")


def dropping() -> onnx.ModelProto:
    model = models.mlp((6, 16, 1), "Relu")
    model.graph.node[-2].input[0] = "dropped"
    dropout = onnx.helper.make_node("Dropout", ["h1", "ratio", "on"], ["dropped"], name="drop")
    model.graph.node.insert(3, dropout)
    for name, array in (("ratio", np.array(0.3, np.float32)), ("on", np.array(True))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def test_dropout_and_relu_are_compared_with_float64() -> None:
    found = compare(make(dropping(), backend="auto", batch_size=8), X, Y, steps=5)
    assert found.reference == "float64", found.notes
    assert found.agree, found.differences
    assert len(found.results) >= 2


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        ((X, Y), {"steps": 0}, ConfigError, "steps: expected an integer >= 1, got 0"),
        ((X, Y), {"backends": ["fusd"]}, ConfigError, "'fusd'; did you mean 'fused'"),
        (([(X, Y)],), {}, DataError, "an iterable of batches cannot be used for a comparison"),
    ],
)
def test_what_cannot_be_compared(given: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        compare(make(models.mlp(), batch_size=8), *given, **options)


def test_a_problem_that_no_backend_can_train_cannot_be_compared() -> None:
    weights = {"W": np.ones((6, 1))}
    rounded = models.parsed("XW = MatMul(X, W)  Y = Floor(XW)", weights, outputs="float[N, 1] Y")
    with pytest.raises(Unsupported, match=r"can train this problem on this machine:\n  fused: "):
        compare(make(rounded), X, Y, backends=["fused"])


def test_a_widened_model_computes_in_float64() -> None:
    x = np.full((1, 6), 1 / 3)
    wide = widened_model(models.mlp())
    (found,) = ReferenceEvaluator(wide).run(None, {"X": x})
    assert found.dtype == np.float64
    h, weights = x, models.weights_of(models.mlp())
    for k in (1, 2, 3):
        h = h @ weights[f"W{k}"] + weights[f"b{k}"]
        h = np.tanh(h) if k < 3 else h
    np.testing.assert_allclose(found, h, rtol=1e-14)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=X, y=Y)
    path = tmp_path / "train.toml"
    files = 'model = "model.onnx"\ndata = "data.npz"\n'
    path.write_text(files + 'loss = "squared_error"\nbatch_size = 8\nvalidation = 0.2\n')
    return path


def test_the_command(recipe: Path) -> None:
    result = CliRunner().invoke(main, ["compare", str(recipe), "optimizer=momentum", "--steps=4"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split()[:4] == ["backend", "µs/step", "first", "loss"]
    assert [line.split()[0] for line in lines if line.startswith(("fused", "example_numpy"))]
    assert "all agree within float32 rounding over 4 steps" in result.output
    assert {p.name for p in recipe.parent.iterdir()} == {"data.npz", "model.onnx", "train.toml"}
    result = CliRunner().invoke(main, ["compare", str(recipe), "optimizer=adm"])
    assert result.exit_code == 1
    assert "unknown optimizer 'adm'; did you mean 'adam'" in result.output


def test_the_command_in_json(recipe: Path) -> None:
    arguments = ["compare", str(recipe), "--json", "--steps=2", "--backend=example_numpy"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    table = json.loads(result.output)
    assert table["agree"] is True
    assert [r["backend"] for r in table["results"]] == ["example_numpy"]
    assert len(table["reference_losses"]) == 2


SAMPLE = np.random.default_rng(3).standard_normal((2, 3)).astype(np.float32)
SIZED = "r = Reshape(x, four)  u = Resize(r, , s)  y = Reshape(u, back)"
"""Resize reads its scales in float32, whatever they come from."""
DEFAULTS = {
    "constant of shape without a value": "s = Shape(x)  z = ConstantOfShape(s)  y = Sub(x, z)",
    "constant of shape": "s = Shape(x)  z = ConstantOfShape<value = float[1] {2}>(s)  y = Sub(x, z)",
    "cast": "k = Greater(x, x)  z = Cast<to = 1>(k)  y = Sub(x, z)",
    "cast to a like": "k = Greater(x, x)  z = CastLike(k, x)  y = Sub(x, z)",
    "a number": "z = Constant<value_float = 0.5>()  y = Sub(x, z)",
    "numbers": "z = Constant<value_floats = [0.5, 1.5, 2.5]>()  y = Sub(x, z)",
    "a tensor": "z = Constant<value = float[3] {1, 2, 3}>()  y = Sub(x, z)",
    "a mask": "k = Greater(x, w)  y = Where(k, x, w)",
    "a matrix of ones": "t = Expand(w, square)  e = EyeLike<dtype = 1>(t)  y = MatMul(x, e)",
    "a window": "z = HannWindow(three)  y = Sub(x, z)",
    "a size": "r = Reshape(x, four)  u = Resize(r, , scale)  y = Reshape(u, back)",
    "a branch": (
        "k = Constant<value = bool {1}>()  y = If(k) <then_branch = a () => (float[N, 3] p) "
        "{ s = Shape(x)  z = ConstantOfShape(s)  p = Add(x, z) }, "
        "else_branch = b () => (float[N, 3] q) { q = Neg(x) }>"
    ),
    "a whole number": "k = Constant<value_int = 2>()  z = Cast<to = 1>(k)  y = Sub(x, z)",
    "whole numbers": "k = Constant<value_ints = [1, 2, 3]>()  z = CastLike(k, x)  y = Sub(x, z)",
    "a loop": (
        "t = Constant<value_int = 3>()  k = Constant<value = bool {1}>()  s, all = Loop(t, k, x) "
        "<body = b (int64 i, bool c, float[N, 3] a) "
        "=> (bool d, float[N, 3] e, float[N, 3] f) { d = Identity(c)  e = Mul(a, w)  f = Neg(e) }>  "
        "m = ReduceSum<keepdims = 0>(all, first)  y = Add(s, m)"
    ),
    **{
        f"a size from {what}": f"{text}  {SIZED}"
        for what, text in {
            "the first state of a loop": (
                "t = Constant<value_int = 2>()  k = Constant<value = bool {1}>()  "
                "s, v, l = Loop(t, k, scale, x) <body = b "
                "(int64 i, bool c, float[4] a, float[N, 3] p) => "
                "(bool d, float[4] e, float[N, 3] q, float h) "
                "{ d = Identity(c)  e = Abs(a)  q = Neg(p)  h = ReduceMax<keepdims = 0>(e) }>"
            ),
            "what a loop collects": (
                "t = Constant<value_int = 4>()  k = Constant<value = bool {1}>()  "
                "v, w1 = Loop(t, k, x) <body = b (int64 i, bool c, float[N, 3] p) => "
                "(bool d, float[N, 3] q, float h) "
                "{ d = Identity(c)  q = Neg(p)  h = Constant<value_float = 1.0>() }>  s = Reshape(w1, flat)"
            ),
            "a scan": (
                "v, s = Scan<num_scan_inputs = 1, body = b (float[N, 3] p, float a) => "
                "(float[N, 3] q, float e) { q = Neg(p)  e = Abs(a) }>(x, scale)"
            ),
            "a branch": (
                "k = Constant<value = bool {1}>()  "
                "v, s = If(k) <then_branch = a () => (int64 i, float[4] p) "
                "{ i = Constant<value_int = 2>()  p = Abs(scale) }, "
                "else_branch = b () => (int64 j, float[4] q) "
                "{ j = Constant<value_int = 3>()  q = Neg(scale) }>"
            ),
        }.items()
    },
    "a norm of a declared type": (
        "z, m, v = LayerNormalization<stash_type = 1>(x, one)  u = Sub(x, m)  y = Mul(u, v)"
    ),
    "a norm": "z, m, v = LayerNormalization(x, one)  u = Sub(x, m)  y = Add(u, z)",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_float64_twin_is_typed_and_computes_the_same(name: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 3] y)
        <float[3] w = {{0.1, 0.2, 0.3}}, int64[2] square = {{3, 3}}, int64 three = {{3}},
         int64[4] four = {{1, 1, -1, 3}}, int64[2] back = {{-1, 3}}, float[4] scale = {{1, 1, 1, 1}},
         float[3] one = {{1, 1, 1}}, int64[1] first = {{0}},
         int64[1] flat = {{4}}> {{ {DEFAULTS[name]} }}"""
    )
    onnx.checker.check_model(model, full_check=True)
    twin = widened_model(model)
    onnx.checker.check_model(twin, full_check=True)
    pairs = ((model, SAMPLE), (twin, SAMPLE.astype(np.float64)))
    found = [ReferenceEvaluator(proto).run(["y"], {"x": x})[0] for proto, x in pairs]
    assert found[1].dtype == np.float64
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_a_widened_program_says_what_it_takes_and_gives() -> None:
    """The specs of inputs, host scalars and outputs are the types of its graph."""
    model = models.parsed(  # the first node gives float32
        "z = ConstantOfShape(three)  d = Sub(x, z)  y = MatMul(d, w)",
        {"w": np.ones((3, 1)), "three": np.array([3])},
        "float[N, 3] x",
        "float[N, 1] y",
    )
    trainer = make(model)
    trainer.step(regression(rows=4, features=3))
    program = step_program(internals_of(trainer).problem)
    twin = widened(program)
    graph = twin.proto().graph
    given = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    hosts = [h.spec for h in twin.hosts]
    specs = [*twin.inputs, *hosts, *twin.outputs]
    assert {s.name: s.dtype for s in specs} == given
    assert {s.dtype for s in specs} == {onnx.TensorProto.DOUBLE}
    before = (*program.inputs, *(h.spec for h in program.hosts), *program.outputs)
    assert [s.name for s in specs] == [s.name for s in before]
    assert twin.nodes == len(graph.node)
    assert "float64" in twin.name
    assert [h.expression for h in twin.hosts] == [h.expression for h in program.hosts]
    assert widened(program).key == twin.key


def test_a_backend_compared_with_itself_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a float64 reference the first backend is one, and nothing is said of it."""
    refused = mock.Mock(side_effect=GraphError("no kernel"))
    monkeypatch.setattr(comparison, "Double", refused)
    x, y = regression(rows=20)
    found = compare(make(models.linear()), x, y, steps=2, backends=["fused"])
    assert found.reference == "fused"
    assert not found.agree
    assert any("only fused can train this problem" in note for note in found.notes)
    both = compare(make(models.linear()), x, y, steps=2, backends=["fused", "example_numpy"])
    assert both.agree
