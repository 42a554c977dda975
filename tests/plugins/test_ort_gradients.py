"""Gradients by onnxruntime's builder: what is let through is right, the rest is refused in words."""

from __future__ import annotations

import functools
import pickle
import re
import sys
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortflex_core import Runtime, gradient_model, internals_of, require_runtime
from ortflex_core.compiler.programs import stages
from ortflex_plugins.backends import ort_gradients
from ortflex_plugins.backends.ort_gradients_rewrites import RULES
from ortflex_plugins.backends.ort_gradients_table import TABLE
from ortflex_plugins.pictures import draw
from tests import builder_worker, children
from tests.models import floats, in_float64, mlp, model, predict, weights_of
from tests.plugins.ort_gradient_cases import CASES, Case, graph, ints, pos, problem, rn
from tests.training import make, regression
from tests.training import plugins as installed

OLD = Runtime(distribution="onnxruntime-training", version="1.16.3", max_opset=19, max_ir=9)
INSTALLED = require_runtime()
ACCEPTED = [n for n, c in CASES.items() if c.model.opset_import[0].version <= INSTALLED.max_opset]
every_case = pytest.mark.parametrize("name", ACCEPTED)


@functools.cache
def rewritten(name: str) -> Any:
    """The graph that is differentiated instead of the case's model."""
    case = CASES[name]
    posed = problem(case.model, case.parameters)
    return stages.forward_program(posed, ort_gradients.rewrite(posed))


def weights(case: Case) -> dict[str, Any]:
    """All initializers of a case's model."""
    return weights_of(case.model)


def cotangent(case: Case) -> Any:
    """The same random cotangent for every way to a gradient."""
    shape = run(case.model, {"X": case.data})["Y"].shape
    return np.random.default_rng(3).standard_normal(shape)


def run(proto: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """One inference on the installed runtime, of the feeds that it takes."""
    return predict(proto, {i.name: feeds[i.name] for i in proto.graph.input})


HOW = ["agent", "session"] if INSTALLED.has_training_session else ["agent"]
WAYS = [pytest.param(how, marks=pytest.mark.backend(f"training_{how}")) for how in HOW]


@pytest.fixture(scope="module", params=WAYS)
def by_builder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gradients of all cases by one way through onnxruntime, computed in one process."""
    how = request.param
    if not INSTALLED.has_training_agent:
        pytest.skip(f"{INSTALLED} has neither TrainingAgent nor TrainingSession")
    jobs = {}
    for name in ACCEPTED:
        case, program = CASES[name], rewritten(name)
        if how == "session" and _session_reasons(name):
            continue
        feeds = {"X": case.data} | weights(case)
        dtype = program.outputs[0].numpy
        seeds = {"Y": cotangent(case).astype(dtype)}
        jobs[name] = (program.model, feeds, list(case.parameters), seeds)
    folder = tmp_path_factory.mktemp("builder")
    source, target = folder / "jobs", folder / "results"
    source.write_bytes(pickle.dumps(jobs))
    command = [sys.executable, builder_worker.__file__, how, str(source), str(target)]
    done = children.run(command, seconds=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return how, pickle.loads(target.read_bytes())


def _session_reasons(name: str) -> list[str]:
    proto, parameters = rewritten(name).proto(), CASES[name].parameters
    return ort_gradients.operators_without_gradient(proto, parameters, "Y", OLD)


def differences(case: Case) -> dict[str, Any]:
    """Central differences of Σ cotangent · Y: in float64, or of the runtime's own float32."""
    seed = cotangent(case)
    parameters = {n: weights(case)[n].astype(np.float64) for n in case.parameters}
    if case.reference:
        evaluator = ReferenceEvaluator(_with_inputs(_to_float64(case.model), case.parameters))
        data = case.data.astype(np.float64)
        step, call = case.step, lambda p: evaluator.run(["Y"], {"X": data, **p})[0]
    else:
        wide = _with_inputs(case.model, case.parameters)
        step = 1e-3

        def call(p: dict[str, Any]) -> Any:
            narrow = {n: a.astype(np.float32) for n, a in p.items()}
            return run(wide, {"X": case.data} | narrow)["Y"]

    gradients = {}
    for name, value in parameters.items():
        gradient = np.zeros(value.shape)
        for index in np.ndindex(value.shape):
            costs = []
            for sign in (1, -1):
                moved = value.copy()
                moved[index] += sign * step
                costs.append(float((seed * call(parameters | {name: moved})).sum()))
            gradient[index] = (costs[0] - costs[1]) / (2 * step)
        gradients[name] = gradient
    return gradients


def _with_inputs(source: Any, names: tuple[str, ...]) -> Any:
    """A copy with the parameters as inputs instead of initializers."""
    proto = onnx.ModelProto()
    proto.CopyFrom(source)
    for tensor in [t for t in proto.graph.initializer if t.name in names]:
        info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        proto.graph.input.append(info)
        proto.graph.initializer.remove(tensor)
    return proto


def _to_float64(source: Any) -> Any:
    proto = in_float64(source)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
    return proto


@every_case
def test_the_gradient_is_that_of_central_differences(name: str, by_builder: Any) -> None:
    how, found = by_builder
    if name not in found:
        pytest.skip("float64, which TrainingSession does not train")
    assert isinstance(found[name], dict), found[name]
    case = CASES[name]
    # A weight before minus the weight after, in float32, has that weight's rounding.
    loose = 10 if how == "session" or case.step > 1e-5 else 1
    for parameter, expected in differences(case).items():
        got = found[name][parameter]
        assert got.shape == expected.shape
        scale = 1 + np.abs(expected).max()
        tolerance = scale * (2e-3 if not case.reference else loose * 5e-5)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@every_case
def test_a_rewritten_graph_computes_the_same(name: str) -> None:
    case, program = CASES[name], rewritten(name)
    before = run(case.model, {"X": case.data})["Y"]
    after = run(program.proto(), {"X": case.data} | weights(case))["Y"]
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    np.testing.assert_allclose(after, before, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Softplus", "Softsign", "Elu", "Selu", "Celu", "HardSwish"])
def test_an_activation_stays_finite_far_out(name: str) -> None:
    case = CASES[name]
    data = np.array([[-1e4, -100, 100, 1e4], [-1, -1e-3, 1e-3, 1]], np.float32)
    before = run(case.model, {"X": data})["Y"]
    after = run(rewritten(name).proto(), {"X": data} | weights(case))["Y"]
    np.testing.assert_allclose(after, before, rtol=2e-6, atol=2e-7)


@every_case
def test_nothing_is_said_against_what_is_right(name: str) -> None:
    case = CASES[name]
    assert ort_gradients.reasons(problem(case.model, case.parameters), OLD) == []


def test_every_operator_that_is_trusted_or_rewritten_has_a_case() -> None:
    tried = {node.op_type for case in CASES.values() for node in case.model.graph.node}
    made = {n.op_type for name in CASES for n in rewritten(name).proto().graph.node}
    always = {"AveragePool", "Identity", "Split"}  # rewritten wherever it is right
    # What the installed runtime is too old for is expanded before the builder sees it.
    first: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            opset = schema.since_version
            first[schema.name] = min(opset, first.get(schema.name, opset))
    newer = {operator for operator in TABLE if first[operator] > INSTALLED.max_opset}
    assert set(TABLE) - (tried & made) - always == newer
    assert set(RULES) - tried == set()


def one(op_type: str, x: Any, *rest: Any, opset: int = 17, **attributes: Any) -> Any:
    """A problem with one node after ``X · w``; arrays are constants."""
    names = [f"c{k}" for k in range(len(rest))]
    arrays = dict(zip(names, rest, strict=True))
    nodes = [
        helper.make_node("Mul", ["X", "w"], ["a"], name="scaled"),
        helper.make_node(op_type, ["a", *names], ["Y"], name="culprit", **attributes),
    ]
    x = x.astype(np.float32)
    made = {"w": np.ones((1, *x.shape[1:]), np.float32)}
    made |= {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in arrays.items()}
    return problem(graph(nodes, x, made, opset), ["w"])


BUILDER = r"the gradient builder of onnxruntime-training 1\.16\.3"
INDEX = np.array([[1], [3]])
IMAGE = rn(2, 2, 6, 6)
REFUSED = {
    "no gradient": (one("Atan", rn(3, 4)), rf"\(Atan, output 'Y'\): {BUILDER} has no correct"),
    "no kernel": (one("ConvTranspose", IMAGE, rn(2, 3, 3, 3)), r"\(ConvTranspose, .* no correct"),
    "flat": (one("Floor", rn(3, 4)), r"its derivative is zero almost everywhere"),
    "scatter nd": (
        one("ScatterND", rn(4, 3), INDEX, rn(2, 3), reduction="add"),
        "wrong with reduction='add'",
    ),
    "scatter": (
        one("ScatterElements", rn(4, 3), INDEX, rn(2, 1), reduction="mul"),
        "wrong with reduction='mul'",
    ),
    "ceil": (
        one("AveragePool", rn(1, 1, 5, 5), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        "its gradient is wrong with ceil_mode",
    ),
    "window": (
        one("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1),
        "a window may begin after the last row",
    ),
    "cube": (one("Conv", rn(1, 2, 4, 4, 4), rn(4, 1, 2, 2, 2), group=2), "wrong with groups"),
    "pad": (one("Pad", rn(3, 4), ints(0, 1, 0, 1), mode="edge"), r"'constant' only, got 'edge'"),
    "slice": (one("Slice", rn(3, 4), *map(ints, (3, -9, 1, -1))), "fails with negative steps"),
    "power": (one("Pow", pos(3, 1), pos(3, 4)), "wrong where the base is broadcast"),
    "to integers": (one("Cast", rn(3, 4), to=TensorProto.INT64), r"'w' does not reach 'Y'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_builder_has_wrong_is_refused(what: str) -> None:
    posed, text = REFUSED[what]
    [reason] = ort_gradients.reasons(posed, OLD)
    assert re.search(text, reason), reason
    if what != "to integers":
        assert reason.startswith("node 'culprit' (")


# What has no gradient, and a window that runtimes do not agree about.
@pytest.mark.parametrize("what", sorted(set(REFUSED) - {"flat", "to integers", "window"}))
def test_where_the_builder_is_wrong_our_gradient_is_right(what: str) -> None:
    """Central differences along a random direction, of the runtime's own float32."""
    proto = REFUSED[what][0].model.internal
    rng = np.random.default_rng(11)
    rows = [d.dim_value or 4 for d in proto.graph.input[0].type.tensor_type.shape.dim]
    rows[0] = 3 if what == "power" else 4
    x = rng.uniform(0.5, 2, rows).astype(np.float32)
    [w] = [onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "w"]
    step = gradient_model(proto, wrt=["w"])
    y = run(proto, {"X": x})["Y"]
    seed = rng.standard_normal(y.shape).astype(np.float32)
    got = run(step, {"X": x, "w": w, "cotangent/Y": seed})["gradient/w"]
    forward = _with_inputs(proto, ("w",))
    direction = rng.standard_normal(w.shape).astype(np.float32)
    by = np.float32(2**-10)
    ends = [run(forward, {"X": x, "w": w + k * by * direction})["Y"] for k in (1, -1)]
    slope = (seed.astype(float) * (ends[0].astype(float) - ends[1])).sum() / (2.0 * by)
    size = np.linalg.norm(got) * np.linalg.norm(direction)
    assert size > 0.1
    np.testing.assert_allclose((got.astype(float) * direction).sum(), slope, atol=2e-3 * size)


def chain(*operators: str) -> Any:
    """Products with W0, W1, … and an operator after each."""
    nodes, value = [], "X"
    for k, operator in enumerate(operators):
        nodes.append(helper.make_node("MatMul", [value, f"W{k}"], [f"p{k}"]))
        value = "Y" if k == len(operators) - 1 else f"a{k}"
        nodes.append(helper.make_node(operator, [f"p{k}"], [value]))
    arrays = {f"W{k}": rn(3, 3) for k in range(len(operators))}
    return model(nodes, [floats("X", "N", 3)], [floats("Y", "N", 3)], arrays)


def test_a_refusal_tells_what_would_help() -> None:
    with_fused = problem(chain("Atan", "Tanh"), ["W0", "W1"], plugins=installed())
    [reason] = ort_gradients.reasons(with_fused, OLD)
    assert reason.startswith("node 'Atan.1' (Atan, output 'a0'): ")
    assert reason.endswith(
        ". Use backend='fused', or leave out the parameters before it: params=['*', '!W0']"
    )
    alone = problem(chain("Atan", "Tanh"), ["W0", "W1"])
    assert "fused" not in ort_gradients.reasons(alone, OLD)[0]
    last = problem(chain("Tanh", "Atan"), ["W0", "W1"])
    assert ort_gradients.reasons(last, OLD)[0].endswith("gradient for this operator.")
    # What no parameter reaches does not matter.
    assert ort_gradients.reasons(problem(chain("Atan", "Tanh"), ["W1"]), OLD) == []


def test_a_control_flow_node_is_refused() -> None:
    identity = helper.make_node("Identity", ["p0"], ["b"])
    branch = helper.make_graph([identity], "branch", [], [floats("b", "N", 3)])
    proto = chain("Tanh", "Tanh")
    proto.graph.node[1].CopyFrom(
        helper.make_node("If", ["yes"], ["a0"], name="if", then_branch=branch, else_branch=branch)
    )
    proto.graph.input.append(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
    [reason] = ort_gradients.reasons(problem(proto, ["W0", "W1"]), OLD)
    assert reason.startswith("node 'if' (If, output 'a0'): ")


def test_operators_of_other_domains_are_refused() -> None:
    proto = chain("Trilu")
    proto.graph.node[1].domain = "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    [reason] = ort_gradients.reasons(problem(proto, ["W0"]), OLD)
    assert reason.startswith("node 'Trilu.1' (com.microsoft.Trilu, output 'Y'): ")


def test_batch_normalization_trains_only_frozen() -> None:
    case = CASES["BatchNormalization"]
    posed = problem(case.model, ["w"], batch_norm="train")
    [reason] = ort_gradients.reasons(posed, OLD)
    assert reason.startswith("node 'node' (BatchNormalization, output 'Y'): the running statistics")
    assert reason.endswith("set batch_norm='freeze'")
    [reason] = ort_gradients.reasons(attrs.evolve(posed, plugins=installed()), OLD)
    assert reason.endswith("set batch_norm='freeze', or use backend='fused'")


def test_dropout_in_training_mode_is_refused() -> None:
    posed = one("Dropout", rn(3, 4), np.array(0.5), np.array(True))
    [reason] = ort_gradients.reasons(posed, OLD)
    place = "node 'culprit' (Dropout, output 'Y')"
    assert reason.startswith(f"{place} is in training mode; set dropout='off'")
    assert ort_gradients.reasons(attrs.evolve(posed, dropout="off"), OLD) == []


def finished(nodes: list[Any], inputs: dict[str, int]) -> Any:
    """A graph as TrainingSession gets it, its weights among the inputs."""
    values = [helper.make_tensor_value_info(n, t, [3, 3]) for n, t in inputs.items()]
    total = helper.make_tensor_value_info("total", values[0].type.tensor_type.elem_type, [])
    return model(nodes, values, [total], {})


def summed(*nodes: Any) -> list[Any]:
    return [*nodes, helper.make_node("ReduceSum", ["q"], ["total"], keepdims=0)]


@pytest.mark.parametrize(
    ("nodes", "dtype", "text"),
    [
        ([("Mul", "w v")], TensorProto.DOUBLE, "is float64, TrainingSession trains float32 only"),
        ([("Mul", "w w")], TensorProto.FLOAT, "the builder fails where 'w' alone is both inputs"),
        ([("Div", "w v")], TensorProto.FLOAT, "TrainingSession updates the numerator before"),
        ([("ReduceMax", "w")], TensorProto.FLOAT, "has no correct gradient"),
    ],
)
def test_a_finished_graph_is_checked(nodes: Any, dtype: int, text: str) -> None:
    made = [helper.make_node(op_type, names.split(), ["q"]) for op_type, names in nodes]
    proto = finished(summed(*made), {"w": dtype, "v": dtype})
    wrt = ["w", "v"] if " v" in nodes[0][1] else ["w"]
    reasons = ort_gradients.operators_without_gradient(proto, wrt, "total", OLD)
    assert text in reasons[0]


@pytest.mark.parametrize("axes", [[], ["axes"]])
def test_a_mean_over_given_axes_keeps_them(axes: list[str]) -> None:
    """The builder's gradient is wrong only where axes are given and dropped."""
    mean = helper.make_node("ReduceMean", ["w", *axes], ["q"], keepdims=0)
    proto = finished(summed(mean), {"w": TensorProto.FLOAT})
    proto.opset_import[0].version = 18
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
    reasons = ort_gradients.operators_without_gradient(proto, ["w"], "total", OLD)
    assert ["keepdims=0" in reason for reason in reasons] == [True] * len(axes)


def test_a_square_is_fine_beside_another_reader() -> None:
    nodes = [
        helper.make_node("Mul", ["w", "w"], ["s"]),
        helper.make_node("MatMul", ["v", "w"], ["p"]),
        helper.make_node("Add", ["s", "p"], ["q"]),
    ]
    proto = finished(summed(*nodes), {"w": TensorProto.FLOAT, "v": TensorProto.FLOAT})
    assert ort_gradients.operators_without_gradient(proto, ["w"], "total", OLD) == []


def test_training_session_reads_weights_before_it_writes_them() -> None:
    """At rate 1 a gradient computed from updated weights would be wrong at once."""
    options = {"params": ["W*"], "learning_rate": 1.0, "batch_size": 4}
    trainer = make(chain("Tanh", "Tanh", "Tanh"), backend="training_session", **options)
    x, y = rn(4, 3).astype(np.float32), rn(4, 3).astype(np.float32)
    before = {n: a.astype(np.float64) for n, a in trainer.get_state().items()}
    values = [x.astype(np.float64)]
    for k in range(3):
        values.append(np.tanh(values[-1] @ before[f"W{k}"]))
    back = 2 * (values[-1] - y) / y.size
    expected = {}
    for k in reversed(range(3)):
        back = back * (1 - values[k + 1] ** 2)
        expected[f"W{k}"] = before[f"W{k}"] - values[k].T @ back
        back = back @ before[f"W{k}"].T
    trainer.epochs = 1
    trainer.fit(x, y)
    for name, after in trainer.get_state().items():
        np.testing.assert_allclose(after, expected[name], rtol=0, atol=1e-6)


def test_pictures_of_the_four_graphs_of_forward_backward() -> None:
    trainer = make(mlp(), backend="training_agent", epochs=1, penalty="l2")
    trainer.fit(*regression(8, 6))
    names = internals_of(trainer).problem.parameters
    graphs = trainer.save_onnx_graph()
    levels = {n: draw(g, params=names, fold=False).level for n, g in graphs.items()}
    assert {name: {i.kind for i in level.items} for name, level in levels.items()} == {
        "forward": {"io", "forward"},
        "gradient": {"io", "forward", "backward"},
        "loss": {"io", "loss", "backward"},
        "update": {"io", "penalty", "backward", "update"},
    }
    for name in ("forward", "update"):
        items = levels[name].items
        trained = {c.text.split(" ")[0] for i in items for c in i.chips if c.kind == "parameter"}
        assert trained == set(names), name
