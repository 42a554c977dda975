"""recompute=: tensors are computed again with the same bits, and take no memory in between."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from ortflex_core import Array, ConfigError, GraphError, TensorSpec, Trainer, Unsupported
from ortflex_core.compiler.problem import problem
from ortflex_core.compiler.runtime import liveness, recompute, session
from ortflex_core.testing import compositions, step_programs
from ortflex_plugins.backends.fused import FusedBackend
from tests import models
from tests.training import make, regression, same

ONE = FusedBackend(steps_per_run=1)
WAYS: tuple[Any, ...] = (2, 3, 6, True)
FLOW = """
    a = MatMul (X, A)
    t = Tanh (a)
    size = ReduceSum <keepdims = 0> (t)
    positive = Greater (size, zero)
    u = If (positive) <
        then_branch = g1 () => (float[N, 6] p) { p = Mul (t, a) },
        else_branch = g2 () => (float[N, 6] q) { q = Sub (t, a) }
    >
    v = MatMul (u, B)
    w = Loop (three, yes, v) <
        body = step (int64 i, bool on, float[N, 6] x) => (bool still, float[N, 6] z) {
            still = Identity (on)
            s = Sigmoid (x)
            z = Mul (s, t)
        }
    >
    c = MatMul (w, C)
    left = Tanh (c)
    right = Tanh (c)
    both = Mul (left, right)
    Y = Add (both, t)
"""


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size are computed again, since those of tests are small."""
    monkeypatch.setattr(recompute, "SMALL", 0)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of copies in every graph that is made."""
    counts: list[int] = []
    real = recompute.apply

    def counted(model: Any, *given: Any) -> None:
        real(model, *given)
        counts.append(sum(node.name.endswith("/again") for node in model.graph.node))

    monkeypatch.setattr(recompute, "apply", counted)
    return counts


def everything(made: compositions.Composition, **options: Any) -> dict[str, Array]:
    """Weights, slots, statistics and losses after a training."""
    trainer = Trainer(
        made.model,
        progress=False,
        backend=ONE,
        **{"loss": "squared_error"} | made.options | options,
    )
    data = (made.x, made.y) if made.weight is None else (made.x, made.y, made.weight)
    history = trainer.fit(*data)
    state = {**trainer.get_state(buffers=True), **trainer.engine.slots()}
    return state | {"losses": np.array(history["loss"])}


def compare(made: compositions.Composition, ways: tuple[Any, ...] = WAYS) -> None:
    wanted = everything(made)
    for way in ways:
        got = everything(made, recompute=way)
        assert got.keys() == wanted.keys()
        for name, array in wanted.items():
            assert np.isfinite(array).all(), name
            assert got[name].tobytes() == array.tobytes(), (way, name, made.describe())


@pytest.mark.sampled
@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("feature", compositions.FEATURES)
def test_a_training_has_the_same_bits(feature: str) -> None:
    compare(compositions.draw(feature, 5), (2, True))


@pytest.mark.sampled
@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("network", step_programs.NETWORKS)
def test_networks_have_the_same_bits(network: str, copies: list[int]) -> None:
    loss = "softmax_cross_entropy"
    compare(step_programs.draw(network, "adam", loss, alone=True))
    compare(step_programs.draw(network, "momentum", loss))
    assert max(copies) > 0 or network not in ("lenet", "transformer")


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16_mixed"])
def test_mixed_precision_has_the_same_bits(precision: str) -> None:
    made = step_programs.draw("mlp, dropping", "adam", "softmax_cross_entropy", alone=True)
    made.options["precision"] = precision
    try:
        everything(made)
    except Unsupported as error:
        pytest.skip(str(error)[:80])
    compare(made)


PAIRS = """
    a = MatMul (X, A)
    q = QuantizeLinear (a, scale, zero)
    d = DequantizeLinear (q, scale, zero)
    t = Tanh (d)
    m = Mul (t, d)
    s = Sub (m, d)
    Y = MatMul (s, B)
"""


def composition(model: Any, x: Any, y: Any, **options: Any) -> compositions.Composition:
    options = {"batch_size": 8} | options
    return compositions.Composition(model=model, options=options, x=x, y=y, weight=None)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("network", ["pairs", *step_programs.NETWORKS])
def test_the_runtime_runs_the_planned_nodes(network: str, monkeypatch: Any, tmp_path: Path) -> None:
    """A node that the runtime adds would read memory that the plan has given to another tensor."""
    found: list[tuple[onnx.ModelProto, Any]] = []
    real = session.open_session

    def opened(model: bytes, options: Any, *given: Any) -> Any:
        if options.execution_order.name != "PRIORITY_BASED":
            return real(model, options, *given)
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / f"profile{len(found)}")
        found.append((onnx.load_from_string(model), real(model, options, *given)))
        return found[-1][1]

    monkeypatch.setattr(session, "open_session", opened)
    monkeypatch.setattr(session, "_cache", OrderedDict())
    if network == "pairs":
        rng = np.random.default_rng(0)
        weights = {"A": rng.standard_normal((12, 12)), "B": rng.standard_normal((12, 3))}
        weights |= {"scale": np.array(0.05), "zero": np.array(120, np.uint8)}
        model = models.parsed(PAIRS, weights, "float[N, 12] X")
        x, y = (rng.standard_normal((16, n)).astype(np.float32) for n in (12, 3))
        made = composition(model, x, y)
    else:
        made = step_programs.draw(network, "adam", "softmax_cross_entropy", alone=True)
    everything(made, recompute=3)
    assert found
    for planned_model, runner in found:
        events = json.loads(Path(runner.end_profiling()).read_text())
        ran = Counter(e["args"]["op_name"] for e in events if e["name"].endswith("_kernel_time"))
        nodes = Counter(node.op_type for node in planned_model.graph.node)
        runs = ran.total() // nodes.total()
        assert ran == Counter({name: runs * count for name, count in nodes.items()})


@pytest.mark.usefixtures("whole")
def test_control_flow_has_the_same_bits_and_is_not_copied(copies: list[int]) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((6, 6)) for name in "ABC"}
    weights |= {"zero": np.array(0.0), "three": np.array(3), "yes": np.array(True)}
    model = models.parsed(FLOW, weights, outputs="float[N, 6] Y")
    x = rng.standard_normal((26, 6)).astype(np.float32)
    options = {"epochs": 2, "learning_rate": 0.01, "optimizer": "adam"}
    made = composition(model, x, x[:, ::-1].copy(), **options)
    compare(made, (*WAYS, ["v"], ["t", "c"]))
    assert max(copies) > 0


@pytest.mark.usefixtures("whole")
def test_random_values_are_drawn_once(copies: list[int]) -> None:
    """The gradient of a product with random values is that of the values of the forward pass."""
    text = """
        a = MatMul (X, A)  noise = RandomNormalLike <seed = 3.0> (a)  b = Mul (a, noise)
        c = MatMul (b, B)  d = Tanh (c)  e = MatMul (d, C)  Y = Tanh (e)
    """
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((4, 4)) for name in "ABC"}
    model = models.parsed(text, weights, "float[N, 4] X", "float[N, 4] Y")
    x = rng.standard_normal((8, 4)).astype(np.float32)
    compare(composition(model, x, x, epochs=1), (2, 3, ["e"]))
    assert max(copies) > 0


def planned(path: Path, way: Any, monkeypatch: pytest.MonkeyPatch) -> liveness.Peak:
    """The peak of the graph that runs."""
    peaks = []
    real = recompute.apply

    def measured(model: Any, losses: Any, sizes: Any, given: Any, frozen: Any) -> None:
        real(model, losses, sizes, given, frozen)
        nodes = list(model.graph.node)
        known = recompute.with_copies(liveness.completed(nodes, sizes), nodes)
        peaks.append(liveness.peak(nodes, known, {o.name for o in model.graph.output}))

    with monkeypatch.context() as patch:
        patch.setattr(recompute, "apply", measured)
        trainer = make(str(path), backend=ONE, batch_size=512, recompute=way)
        trainer.step(regression(rows=512, features=64))
    return peaks[-1]


def test_the_peak_of_a_chain_grows_with_the_root_of_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of n layers of one size keeps n tensors, with k segments k + n / k, and a few."""
    layers, one = 36, 512 * 64 * 4
    path = tmp_path / "chain.onnx"
    onnx.save(models.mlp((64,) * layers + (1,)), path)
    for way in (2, 4, 6):
        most = way + layers / way + 4
        assert planned(path, way, monkeypatch).size <= most * one
    assert planned(path, True, monkeypatch).size <= 16 * one


def test_liveness_of_a_small_graph_is_that_of_paper_and_pencil() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),  # over a
        helper.make_node("Reshape", ["b", "s"], ["c"]),  # the memory of b
        helper.make_node("MatMul", ["c", "w"], ["d"]),
        helper.make_node("Mul", ["d", "b"], ["e"]),  # over d or b
        helper.make_node("ReduceSum", ["e"], ["y"]),
    ]
    sizes = {"a": 100, "b": 100, "c": 100, "d": 30, "e": 100, "y": 4}
    peak = liveness.peak(nodes, sizes, {"y"})
    assert (peak.size, peak.node) == (130, 3)
    assert peak.live == {"b": 100, "d": 30}


def test_names_and_numbers_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="recompute: no node of the model computes 'nowhere'"):
        make(models.mlp(), recompute=["nowhere"])
    for wrong in (0, 1, -3, 2.5, ()):
        with pytest.raises(ConfigError, match="recompute: expected True, False, an integer >= 2"):
            make(models.mlp(), recompute=wrong)
    trainer = make(models.mlp(), backend="fused", recompute=100)
    assert np.isfinite(trainer.step(regression(rows=8, features=6)))


def test_a_tensor_inside_a_fused_operator_is_named() -> None:
    """MatMul and Add become one Gemm, and the product between them is no tensor."""
    body = "product = MatMul(X, A)  h = Add(product, b)  t = Tanh(h)  Y = MatMul(t, C)"
    weights = {"A": np.array([[1.0, 2], [3, 4]]), "b": np.ones(2), "C": np.ones((2, 1))}
    model = models.parsed(body, weights, "float[N, 2] X", "float[N, 1] Y")
    x = np.ones((4, 2), np.float32)
    trainer = make(model, backend="fused", recompute=["product"])
    with pytest.raises(GraphError, match=r"the tensor 'product' is not computed .* Name another"):
        trainer.step((x, x[:, :1]))


@pytest.mark.parametrize("backend", ["training_agent", "training_session", "c", "openvino"])
def test_other_backends_refuse(backend: str) -> None:
    trainer = Trainer(models.mlp(), loss="squared_error", recompute=True, backend=backend)
    with pytest.raises(Unsupported, match=r"recompute="):
        trainer.fit(*regression(rows=8, features=6))


@pytest.mark.parametrize("again", [False, True])
def test_memory_is_not_planned_ahead_where_tensors_are_computed_again(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of onnxruntime keeps the memory of a tensor for a later one of the same size."""
    plans: list[bool] = []
    real = session.open_session

    def seen(model: Any, options: Any, *more: Any) -> Any:
        if not options.optimized_model_filepath:
            plans.append(options.enable_mem_reuse)
        return real(model, options, *more)

    monkeypatch.setattr(session, "open_session", seen)
    # A number of rows that no other test has: nothing is in the cache.
    make(models.linear(), backend=ONE, recompute=again).step(regression(rows=37))
    assert plans
    # Training builds of 1.16 never reuse memory. The last session is the one that runs.
    assert plans[-1] is not (again or session._reuses_too_early(onnxruntime.__version__))


def test_matrices_of_frozen_tensors_are_computed_before_their_readers() -> None:
    """onnxruntime orders all nodes that read no data first, with all their results in memory."""
    matrices = [helper.make_node("Cast", [f"q{k}"], [f"w{k}"], to=1) for k in range(8)]
    turned = [helper.make_node("Transpose", [f"w{k}"], [f"t{k}"]) for k in range(8)]
    products = [helper.make_node("MatMul", [f"x{k}", f"t{k}"], [f"x{k + 1}"]) for k in range(8)]
    graph = onnx.GraphProto(node=[*matrices, *turned, *products])
    graph.output.add(name="x8")
    sizes = {o: 10_000 for node in graph.node for o in node.output}
    before = liveness.peak(graph.node, sizes, {"x8"}).size
    model = onnx.ModelProto(graph=graph)
    frozen = [f"q{k}" for k in range(8)]
    recompute.apply(model, ["x8"], sizes, True, frozen)
    names = [node.output[0] for node in model.graph.node]
    assert names == [
        f"{letter}{k + i}" for k in range(8) for letter, i in (("w", 0), ("t", 0), ("x", 1))
    ]
    after = liveness.peak(model.graph.node, sizes, {"x8"}).size
    assert before >= 80_000
    assert after <= 40_000


def test_floats_of_frozen_codes_are_computed_again_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing else: activations are kept, and the floats of trained weights."""
    graphs: list[onnx.GraphProto] = []
    real = recompute.apply

    def kept(model: Any, *given: Any) -> None:
        real(model, *given)
        graphs.append(model.graph)

    monkeypatch.setattr(recompute, "apply", kept)
    rng = np.random.default_rng(0)
    body = """
        a = MatMul (X, A)  t = Tanh (a)  q = DequantizeLinear (codes, scale)  w = Mul (q, q)
        b = MatMul (t, w)  u = Tanh (b)  Y = MatMul (u, B)
    """
    weights = {"A": rng.standard_normal((6, 150)), "B": rng.standard_normal((150, 1))}
    weights |= {"codes": rng.integers(-99, 99, (150, 150)).astype(np.int8), "scale": np.array(0.01)}
    model = models.parsed(body, weights, "float[N, 6] X", "float[N, 1] Y")
    made = composition(model, *regression(rows=32, features=6), params=["A", "B"])
    wanted = everything(made)
    assert not graphs
    monkeypatch.setattr(problem, "_MUCH", 4 * 150 * 150)
    monkeypatch.setattr(recompute, "SMALL", 0)
    got = everything(made)
    assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in wanted.items()}
    again = {n.op_type for n in graphs[-1].node if recompute.is_copy(n)}
    assert {"DequantizeLinear", "Mul"} <= again <= {"DequantizeLinear", "Mul", "Transpose"}
    monkeypatch.setattr(problem, "_MUCH", 4 * 150 * 150 + 1)
    graphs.clear()
    everything(made)
    assert not graphs


@pytest.mark.parametrize(("way", "most"), [(1, 9 + 2), (2, 6 + 2), (("x1",), 9 + 2)], ids=str)
def test_matrices_of_frozen_tensors_are_not_kept_for_the_gradient(way: Any, most: int) -> None:
    """Of eight activations and eight matrices of one size, at most two matrices are in memory."""
    node = helper.make_node
    graph = onnx.GraphProto()
    for k in range(8):
        graph.node.append(node("DequantizeLinear", [f"q{k}", "s"], [f"w{k}"]))
        graph.node.append(node("MatMul", [f"x{k}", f"w{k}"], [f"p{k}"]))
        graph.node.append(node("Tanh", [f"p{k}"], [f"x{k + 1}"]))
    graph.node.append(node("ReduceSum", ["x8"], ["loss"]))
    graph.node.append(node("Expand", ["loss", "size"], ["g8"]))
    for k in range(7, -1, -1):
        graph.node.append(node("TanhGrad", [f"g{k + 1}", f"x{k + 1}"], [f"h{k}"]))
        graph.node.append(node("Gemm", [f"h{k}", f"w{k}"], [f"g{k}"], transB=1))
    graph.output.extend([onnx.ValueInfoProto(name="loss"), onnx.ValueInfoProto(name="g0")])
    one = 10_000
    sizes = {o: one for n in graph.node for o in n.output} | {"loss": 4}
    assert liveness.peak(graph.node, sizes, {"loss", "g0"}).size >= 16 * one
    model = onnx.ModelProto(graph=graph)
    recompute.apply(model, ["loss"], sizes, way, ["s", *(f"q{k}" for k in range(8))])
    nodes = list(model.graph.node)
    peak = liveness.peak(nodes, recompute.with_copies(sizes, nodes), {"loss", "g0"})
    assert peak.size <= most * one


def backward_of_a_chain(first: int) -> tuple[onnx.ModelProto, dict[str, int]]:
    """``x_k+1 = tanh(x_k W_k)`` and its gradient; ``first`` transposed inputs come before the gradient."""
    layers, node = 12, helper.make_node
    forward: list[onnx.NodeProto] = []
    turned: list[onnx.NodeProto] = []
    backward: list[onnx.NodeProto] = []
    for k in range(layers):
        forward += [
            node("MatMul", [f"x{k}", f"w{k}"], [f"p{k}"]),
            node("Tanh", [f"p{k}"], [f"x{k + 1}"]),
        ]
        turned.append(node("Transpose", [f"x{k}"], [f"t{k}"]))
        backward[:0] = [
            node("Mul", [f"x{k + 1}", f"g{k + 1}"], [f"d{k}"]),
            node("MatMul", [f"t{k}", f"d{k}"], [f"w{k} new"]),
            node("MatMul", [f"d{k}", f"w{k}"], [f"g{k}"]),
        ]
    loss = node("ReduceSum", [f"x{layers}"], ["loss"])
    start = node("Exp", [f"x{layers}"], [f"g{layers}"])
    late = [[turned[k]] if k >= first else [] for k in reversed(range(layers))]
    after = [n for k, extra in enumerate(late) for n in (*extra, *backward[3 * k : 3 * k + 3])]
    nodes = [*forward, loss, *turned[:first], start, *after]
    graph = onnx.GraphProto(node=nodes)
    for name in ("loss", *(f"w{k} new" for k in range(layers))):
        graph.output.add(name=name)
    sizes = {o: 100_000 for n in nodes for o in n.output} | {"loss": 4}
    sizes |= {f"w{k} new": 10 for k in range(layers)}
    return onnx.ModelProto(graph=graph), sizes


@pytest.mark.parametrize("first", [0, 5, 12])
def test_the_order_of_the_runtime_makes_no_segment_early(first: int) -> None:
    """Nodes that read only forward tensors are not computed before the gradient arrives at them.

    The order of large graphs has them first, so that every segment was computed again at once.
    """
    model, sizes = backward_of_a_chain(first)
    recompute.apply(model, ["loss"], sizes, True)
    nodes = list(model.graph.node)
    outputs = {o.name for o in model.graph.output}
    peak = liveness.peak(nodes, recompute.with_copies(sizes, nodes), outputs)
    assert peak.size <= 9 * 100_000  # 3 of 4 segments, of 3 layers each, and the gradient
    done: set[str] = {"x0", *(f"w{k}" for k in range(12))}
    for node in nodes:
        assert done.issuperset(node.input)
        done.update(node.output)


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_large_transposed_matrices_are_read_as_they_are(rows: int) -> None:
    """A graph that is too large for the optimizer of the runtime has no transposed copies of matrices.

    The product of one row would have other bits.
    """
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((512, 600), (rows, 600)))
    weights = {"w": w, "small": rng.standard_normal((4, 600))}
    body = "t = Transpose <perm = [1, 0]> (w)  s = Transpose <perm = [1, 0]> (small)"
    outputs = "float[N, 512] y, float[N, 4] z"
    body += "  y = MatMul(x, t)  z = MatMul(x, s)"
    built = models.parsed(body, weights, "float[N, 600] x", outputs)
    shapes = {"t": (600, 512), "s": (600, 4), "y": (rows, 512)}
    specs = {name: TensorSpec(name, 1, shape) for name, shape in shapes.items()}
    kinds = [n.op_type for n in built.graph.node]
    before = models.predict(built, {"x": x})
    recompute.fuse_transposes(built, specs)
    fused = ["Transpose", "FusedMatMul", "MatMul"]
    assert [n.op_type for n in built.graph.node] == (fused if rows > 1 else kinds)
    same(models.predict(built, {"x": x}), before, 0)


def test_a_transposed_matrix_that_a_branch_gives_is_kept() -> None:
    body = """
        t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)
        z = If (c) <
            then_branch = yes () => (float[1024, 1024] t) { unread = Identity(x) },
            else_branch = no () => (float[1024, 1024] k) { k = Identity(x) }
        >
    """
    size = "float[1024, 1024]"
    built = models.parsed(body, {}, f"{size} x, {size} w, bool c", f"{size} y, {size} z")
    specs = {name: TensorSpec(name, 1, (1024, 1024)) for name in "xwtyz"}
    recompute.fuse_transposes(built, specs)
    assert "t" in [o for node in built.graph.node for o in node.output]
