"""Operators without a kernel or a rule: computed by their function bodies, or by a library of kernels.

The class of the defect: an operator that the standard defines by others was refused, or computed
otherwise than the file says, although its definition is there. Libraries are named by code, loaded by
every session, and refused by their name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import (
    Entry,
    Model,
    ModelError,
    PluginError,
    Plugins,
    Trace,
    Unsupported,
    build,
    check_model,
    gradients,
    load_rules,
)
from ortflex_core.compiler.operators import function_bodies, kernels
from ortflex_core.compiler.operators.reverse_mode import Rules, RuleTable
from ortflex_core.compiler.runtime import session
from ortflex_core.compiler.runtime.installation import version_tuple
from tests import models
from tests.gradcheck import FAMILIES, data
from tests.model_gradients import agree, parsed
from tests.tracing import NEWEST
from tests.training import make, plugins, usable

BATCH_FIRST = {
    "RNN": (1, "x, w, r, b, , h0", "y, h"),
    "GRU": (3, "x, w, r, b, , h0", "y, h"),
    "LSTM": (4, "x, w, r, b, , h0, c0", "y, h, c"),
}


def recurrent(operator: str, direction: str) -> tuple[str, dict[str, Any]]:
    gates, given, results = BATCH_FIRST[operator]
    sides = 2 if direction == "bidirectional" else 1
    feeds = {
        "x": data(2, 3, 2),
        "w": data(sides, gates * 2, 2, seed=1) / 2,
        "r": data(sides, gates * 2, 2, seed=2) / 2,
        "b": data(sides, gates * 4, seed=3) / 2,
        "h0": data(2, sides, 2, seed=4) / 2,
    }
    if operator == "LSTM":
        feeds["c0"] = data(2, sides, 2, seed=5) / 2
    formals = ", ".join(f"FLOAT[{', '.join(map(str, a.shape))}] {n}" for n, a in feeds.items())
    outputs = ", ".join(f"FLOAT[] {n}" for n in results.split(", "))
    outputs = outputs.replace("FLOAT[]", "FLOAT[a, b, c]").replace("[a, b, c] y", "[a, b, c, d] y")
    node = f'{operator} <hidden_size=2, layout=1, direction="{direction}"> ({given})'
    return f"({formals}) => ({outputs}) {{ {results} = {node} }}", feeds


oracle_of_recurrence = pytest.mark.skipif(
    version_tuple(onnx.__version__) < (1, 23),
    reason="onnx's reference, the oracle, has not all of it, and its RNN is wrong in reverse",
)


def by_hand(operator: str, direction: str) -> Any:
    """The same with the time first and transpositions in numpy, by onnx's reference."""
    text, _ = recurrent(operator, direction)
    turned = parsed(text.replace("layout=1, ", ""), "double", 14)
    for value in (*turned.graph.input, *turned.graph.output):
        value.type.tensor_type.ClearField("shape")
    reference = onnx.reference.ReferenceEvaluator(turned)

    def run(**feeds: Any) -> list[Any]:
        given = {n: a.swapaxes(0, 1) if n in ("x", "h0", "c0") else a for n, a in feeds.items()}
        y, *states = reference.run(None, given)
        return [y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in states)]

    return run


@oracle_of_recurrence
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", BATCH_FIRST)
def test_recurrent_operators_with_the_batch_first(operator: str, direction: str) -> None:
    text, feeds = recurrent(operator, direction)
    agree(text, feeds, opset=14, oracle=by_hand(operator, direction))


def trained() -> onnx.ModelProto:
    text, feeds = recurrent("GRU", "forward")
    source = parsed(text, "float", 14)
    for name in ("w", "r", "b"):
        array = feeds[name].astype(np.float32)
        source.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    kept = [i for i in source.graph.input if i.name in ("x", "h0")]
    for value in kept:
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    del source.graph.output[:1]
    for value in [i for i in source.graph.input if i.name in ("w", "r", "b")]:
        source.graph.input.remove(value)
    return source


def test_training_check_and_export_of_a_node_that_no_runtime_computes() -> None:
    source = trained()
    report = check_model(source, plugins=plugins())
    assert [c.name for c in report.choices if c.trained] == ["w", "r", "b"]
    assert report.backends["fused"] == ()
    text = "GRU is computed by simpler operators in the training, but not in the file: "
    assert len([note for note in report.notes if note.startswith(text)]) == 1
    rng = np.random.default_rng(0)
    x = {"x": rng.normal(size=(16, 3, 2)).astype("f4"), "h0": np.zeros((16, 1, 2), "f4")}
    trainer = make(source, optimizer="adam", backend="fused", batch_size=4, epochs=4)
    trainer.fit(x, rng.uniform(-0.5, 0.5, (16, 1, 2)).astype("f4"))
    assert trainer.train_losses_[-1] < trainer.train_losses_[0]
    exported = trainer.export()
    assert [n.op_type for n in exported.graph.node] == ["GRU"]
    assert exported.graph.node[0] == source.graph.node[0]


CAUSAL = """(FLOAT[1, 2, 2, 2] q, FLOAT[1, 2, 1, 2] k, FLOAT[1, 2, 1, 2] v,
             FLOAT[1, 2, 2, 2] pk, FLOAT[1, 2, 2, 2] pv) => (FLOAT[1, 2, 2, 2] y, FLOAT[a, b, c, d] keys)
{ y, keys, values = Attention<is_causal=1>(q, k, v, , pk, pv) }"""


@pytest.mark.skipif(NEWEST < 23, reason="the operator needs opset 23")
def test_a_form_that_runtimes_compute_otherwise_is_computed_as_the_file_says() -> None:
    rows = {"q": 2, "k": 1, "v": 1, "pk": 2, "pv": 2}
    feeds = {name: data(1, 2, n, 2, seed=k) for k, (name, n) in enumerate(rows.items())}
    source = agree(CAUSAL, feeds, opset=23)
    plain = models.predict(source, {n: a.astype("f4") for n, a in feeds.items()})
    made = Model(source)
    assert "Attention" not in {n.op_type for n in made.internal.graph.node}
    assert "differently from the standard" in made.apart["y"]
    assert [n.op_type for n in made.export({}).graph.node] == ["Attention"]
    assert plain["y"].shape == (1, 2, 2, 2)


@oracle_of_recurrence
def test_nodes_of_subgraphs_are_taken_apart_too() -> None:
    text, feeds = recurrent("RNN", "forward")
    head, _, body = text.partition("{")
    formals = head[head.index("(") : head.index("=>")]
    inner = body.rstrip("} ").replace("y, h = ", "yi, hi = ")
    other = inner.replace("yi, hi", "yn, hn").replace("forward", "reverse")
    source = f"""{formals} => (FLOAT[a, b, c, d] y, FLOAT[a, b, c] h) {{
        s = ReduceSum<keepdims=0>(x) zero = Constant<value = FLOAT {{0}}>() go = Less(s, zero)
        y, h = If(go) <
        then_branch = t () => (FLOAT[a, b, c, d] yi, FLOAT[a, b, c] hi) {{ {inner} }},
        else_branch = e () => (FLOAT[a, b, c, d] yn, FLOAT[a, b, c] hn) {{ {other} }} > }}"""
    for sign, direction in ((-1, "forward"), (1, "reverse")):
        given = {**feeds, "x": sign * np.abs(feeds["x"])}
        agree(source, given, opset=14, oracle=by_hand("RNN", direction))


def test_nothing_is_done_to_a_model_whose_operators_have_kernels() -> None:
    body = "a = Relu(x) b = Softmax(a) y = LayerNormalization(b, b)"
    bare = models.parsed(body, {}, "float[N, 2] x", "float[N, 2] y")
    assert kernels.inlined(bare) == (bare, {})
    assert kernels.inlined(bare)[0] is bare


BODIES = {
    "Celu": (13, {"alpha": 0.7}, [(2, 3)]),
    "Elu": (13, {}, [(2, 3)]),
    "GroupNormalization": (21, {"num_groups": 2, "epsilon": 0.1}, [(2, 4, 3), (4,), (4,)]),
    "HardSwish": (14, {}, [(2, 3)]),
    "LayerNormalization": (17, {"axis": 1}, [(2, 3), (3,), (3,)]),
    "LogSoftmax": (18, {"axis": 0}, [(2, 3)]),
    "MeanVarianceNormalization": (18, {"axes": [0, 2]}, [(2, 3, 2)]),
    "PRelu": (16, {}, [(2, 3), (3,)]),
    "RMSNormalization": (23, {}, [(2, 3), (3,)]),
    "RotaryEmbedding": (23, {"interleaved": 1}, [(1, 2, 3, 4), (1, 3, 2), (1, 3, 2)]),
    "Selu": (13, {}, [(2, 3)]),
    "Softmax": (18, {}, [(2, 3)]),
    "Softplus": (18, {}, [(2, 3)]),
    "Swish": (24, {"alpha": 0.3}, [(2, 3)]),
    "ThresholdedRelu": (18, {"alpha": 0.2}, [(2, 3)]),
}


@pytest.mark.parametrize("operator", BODIES)
def test_a_body_gives_the_gradient_of_the_rule(operator: str) -> None:
    """Every family is there but the one of the operator, whose rule is what the result must equal."""
    since, attributes, shapes = BODIES[operator]
    if since > NEWEST:
        pytest.skip(f"the operator needs opset {since}")
    arrays = {f"x{k}": data(*shape, seed=k).astype("f4") for k, shape in enumerate(shapes)}
    without = {}
    for name, rules in FAMILIES.items():
        table = {key: rule for key, rule in rules.table.items() if key != ("", operator)}
        without[name] = Rules(table=table, declared=rules.declared)
    found = []
    for families in (FAMILIES, without):
        trace = Trace({"": max(since, 18)})
        inputs = [trace.input(n, a.dtype, a.shape) for n, a in arrays.items()]
        y = trace.op(operator, *inputs, **attributes)
        slopes = gradients([(y * y, None)], inputs, RuleTable(families))
        program = build(trace, {f"d{k}": g for k, g in enumerate(slopes)}, name="backward")
        found.append(models.predict(program.proto(), arrays))
        assert [n.op_type for n in trace.by_body] == ([operator] if len(found) == 2 else [])
    for name, wanted in found[0].items():
        np.testing.assert_allclose(found[1][name], wanted, 1e-4, 1e-4, err_msg=name)


def test_what_has_no_body_has_none() -> None:
    node = onnx.helper.make_node("MatMul", ["a", "b"], ["c"])
    assert function_bodies.body_of(node, 17, [None, None]) is None
    assert not any(map(function_bodies.has_body, ("MatMul", "SequenceMap", "NoSuchOperator")))


@pytest.mark.parametrize("dtype", [1, 10, 11, 16])
def test_masked_attention_is_differentiated_in_every_float_type(dtype: int) -> None:
    """The lowest number of a type takes the place of minus infinity; bfloat16 had none."""
    trace = Trace({"": 23})
    q, k, v = (trace.input(name, dtype, (1, 2, 3, 4)) for name in "qkv")
    y = trace.op.Attention(q, k, v, is_causal=1)
    found = gradients([(y, None)], [q, k, v], RuleTable(FAMILIES))
    assert [(g.dtype, g.shape) for g in found] == [(dtype, (1, 2, 3, 4))] * 3


# Functions of a model whose opset is another than the model's: inlined, computing the same --------


X = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)

SAME = "h = Abs (a)  y = Add (h, a)"
"""Operators that mean the same in all opsets used here."""
NESTED = "h = inner (a)  y = Add (h, a)"


def model(body: str, opset: int, function: int, inner: str = "y = Neg (a)") -> onnx.ModelProto:
    imports = f'"": {function}, "local": 1'
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}, "local": 1]>
        g (float[N, 3] x) => (float[N, 3] out)
        <float[3, 3] w = {{1, 0, 0.5, 0, 1, 0, 0.25, 0, 1}}>
        {{ p = MatMul (x, w)  out = local.called (p) }}
        <domain: "local", opset_import: [{imports}]> called (a) => (y)
        {{ {body.replace("inner", "local.inner")} }}
        <domain: "local", opset_import: [{imports}]> inner (a) => (y) {{ {inner} }}"""
    )


def expected(body: str) -> Any:
    p = X @ np.array([[1, 0, 0.5], [0, 1, 0], [0.25, 0, 1]], np.float32)
    return abs(p) + p if body == SAME else p - p


@pytest.mark.parametrize(
    ("body", "opset", "function"),
    [(SAME, 17, 17), (SAME, 17, 15), (SAME, 18, 13), (NESTED, 21, 13)],
)
def test_functions_of_another_opset_are_inlined(body: str, opset: int, function: int) -> None:
    proto = model(body, opset, function)
    source = Model(proto)
    assert not source.internal.functions
    assert {n.domain for n in source.internal.graph.node} <= {"", "ai.onnx"}
    trainer = make(proto, backend="fused", epochs=2, learning_rate=0.01)
    np.testing.assert_allclose(trainer.predict(X), expected(body), rtol=1e-5, atol=1e-5)
    trainer.fit(X, np.ones_like(X))
    assert np.isfinite(trainer.train_losses_).all()
    if body != NESTED:
        assert trainer.train_losses_[-1] < trainer.train_losses_[0]


def test_a_function_whose_operators_mean_something_else_is_refused() -> None:
    """The axes of ReduceSum are an attribute until opset 12, an input from 13 on."""
    body = "h = ReduceSum <axes=[1], keepdims=1> (a)  y = Mul (h, a)"
    with pytest.raises(ModelError, match=r"ReduceSum.*not compatible"):
        Model(model(body, 17, 11))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that session options are given, in the order of the calls."""
    calls: list[str] = []
    real = onnxruntime.SessionOptions

    class Options(real):  # type: ignore[misc, valid-type]
        def register_custom_ops_library(self, path: str) -> None:
            calls.append(path)

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(session, "_libraries", {})
    return calls


def test_a_missing_library_is_named() -> None:
    with pytest.raises(PluginError, match=r"cannot load the custom-operator library '/none/x\.so'"):
        session.use_library(Path("/none/x.so"))
    session.session_options(1)  # and is forgotten


def test_every_session_loads_what_was_named_once(loaded: list[str]) -> None:
    session.session_options(1)
    assert loaded == []
    for path in ("one.so", "one.so", "other.so"):
        session.use_library(path)
    del loaded[:]
    session.session_options(1)
    assert loaded == ["one.so", "other.so"]


def bringing(*libraries: str | Callable[[], str]) -> Rules:
    """A family of rules with kernels in libraries."""
    family = Rules()
    for one in libraries:
        family.kernels(one)
    return family


def test_a_family_brings_its_library_along(loaded: list[str]) -> None:
    found = with_family(bringing("direct.so", lambda: "asked.so"))
    assert loaded == []  # listing plugins loads nothing
    rules = load_rules(found)
    rules.lookup("", "Relu", 17)
    assert loaded == []  # ours have this operator
    rules.lookup("custom", "Cube", 1)
    assert loaded == ["direct.so", "asked.so"]


def test_the_kernels_of_a_family_are_asked_for_once(loaded: list[str]) -> None:
    """However often the family is: by name, by preference, and by each of its operators."""
    asked = []

    def library() -> str:
        asked.append("asked")
        return "asked.so"

    found = with_family(bringing(library))
    found.prefer = ("tests", *found.prefer)
    rules = load_rules(found, first=["custom"])
    for name in ("Cube", "Cube", "Sphere"):
        rules.lookup("custom", name, 1)
    assert asked == ["asked"]


def test_a_family_whose_kernels_fail_is_tried_once_unless_it_is_named(
    loaded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def library() -> str:
        tried.append("tried")
        raise OSError("no such kernel")  # each text is a warning once in a process

    found = with_family(bringing(library))
    rules = load_rules(found)
    assert [rules.lookup("custom", name, 1)[0] for name in ("Cube", "Sphere")] == [False, False]
    assert tried == ["tried"]
    assert "no such kernel" in caplog.text
    with pytest.raises(PluginError):
        load_rules(found, first=["custom"])


def with_family(family: Rules) -> Plugins:
    class Point(EntryPoint):
        def load(self) -> Any:
            return family

    point = Point("custom", "nowhere:RULES", "ortflex.gradients")
    entry = Entry("gradients", "custom", "nowhere:RULES", "tests", "1", point)
    return Plugins([*(e for registry in plugins() for e in registry), entry])


MODEL = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.contrib": 1]>
g (float[N, 2] X) => (float[N, 1] Y) <float[2, 1] w = {0.5, -0.25}>
{ z = MatMul(X, w)  Y = ai.onnx.contrib.OrtflexCube(z) }"""


@cache
def library() -> Callable[[], str]:
    """A library with a kernel written in Python; a second kernel of the name would spoil it for good."""
    extensions = pytest.importorskip("onnxruntime_extensions")

    @extensions.onnx_op(  # type: ignore[untyped-decorator]
        op_type="OrtflexCube", inputs=[extensions.PyOp.dt_float], outputs=[extensions.PyOp.dt_float]
    )
    def kernel(x: Any) -> Any:
        return x**3

    found: Callable[[], str] = extensions.get_library_path
    return found


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_an_operator_of_a_library_is_trained_or_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable(backend)
    monkeypatch.setattr(session, "_libraries", {})  # other tests do without

    family = bringing(library())

    @family.rule("OrtflexCube", domain="ai.onnx.contrib")
    def cube(op: Any, node: Any, g: Any) -> Any:
        return [3 * node.inputs[0] * node.inputs[0] * g]

    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    options: dict[str, Any] = {"backend": backend, "learning_rate": 0.1}
    trainer = make(onnx.parser.parse_model(MODEL), plugins=with_family(family), **options)
    if backend != "fused":
        with pytest.raises(Unsupported, match="OrtflexCube"):
            trainer.step((x, y))
        return
    w = np.array([[0.5], [-0.25]])
    z = x @ w
    slope = x.T @ (2 * (z**3 - y) * 3 * z**2 / len(x))
    loss = trainer.step((x, y))
    np.testing.assert_allclose(loss, np.square(z**3 - y).mean(), rtol=1e-5)
    np.testing.assert_allclose(trainer.get_state()["w"], w - 0.1 * slope, rtol=1e-5)
    now = x @ trainer.get_state()["w"]
    np.testing.assert_allclose(trainer.predict(x), now**3, rtol=1e-4, atol=1e-6)
