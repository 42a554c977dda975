"""Memory: estimates of it, its limits before the first step, and planned places for tensors in one block.

estimate_memory and `ortflex check --memory` are compared with sums by hand and with measured peaks. What
the system says comes from files like those of Linux, as machines, containers of both versions of control
groups, and limits of a process have them. Planned memory: random graphs give the same values in one block,
with new values over old ones.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from ortflex_core import (
    Array,
    ConfigError,
    OrtflexError,
    TensorSpec,
    Trainer,
    Unsupported,
    estimate_memory,
)
from ortflex_core.compiler.runtime import liveness, memory_limits, recompute, session
from ortflex_core.compiler.runtime.memory_plan import place_tensors, update_in_place
from ortflex_plugins.backends.fused import FusedBackend
from tests import models
from tests.plugins.commands import ortflex, works
from tests.training import every_backend, make, regression, same

WIDTH, ROWS = 64, 512
ONE = WIDTH * ROWS * 4


def sequences() -> onnx.ModelProto:
    """A model with two axes that its file does not give, one of them without a name."""
    inputs, body = "float[N, S, 8] x, float[N, ?, 8] z", "h = MatMul(x, w)  y = Add(h, z)"
    return models.parsed(body, {"w": np.eye(8)}, inputs, "float[N, S, 8] y")


def test_the_parts_of_a_chain_are_those_of_paper_and_pencil() -> None:
    layers = 12
    model = models.mlp((WIDTH,) * (layers + 1))
    numbers = sum(int(np.prod(t.dims)) for t in model.graph.initializer) * 4
    found = estimate_memory(model, batch_size=ROWS, optimizer="adam")
    assert found.parts["weights, two versions"] == 2 * numbers
    assert found.parts["optimizer state, two versions"] == 4 * numbers
    assert found.parts["a batch of data"] == 2 * ONE
    assert "frozen tensors" not in found.parts
    # One tensor a layer for the backward pass, one or two more at a time, and gradients of weights.
    step = found.parts["tensors of the step at its peak"]
    assert (layers - 1) * ONE <= step <= (layers + 2) * ONE + numbers
    assert found.total == sum(found.parts.values())
    assert found.recomputed < found.total
    assert found.largest[0].size == ONE


def test_large_weights_and_their_optimizer_state_have_one_version() -> None:
    model = models.mlp((512, 512, 64))
    large, small = 4 * 512 * 512, 4 * (512 * 64 + 512 + 64)
    parts = estimate_memory(model, batch_size=ROWS, optimizer="adam").parts
    assert parts["weights, two versions of the small ones"] == large + 2 * small
    assert parts["optimizer state, two versions of the small ones"] == 2 * large + 4 * small
    assert parts["gradients of the large ones"] == large
    again = estimate_memory(model, batch_size=ROWS, optimizer="adam", recompute=True).parts
    assert again["weights"] == large + small
    # The update of SGD is short, and stays in the graph.
    parts = estimate_memory(model, batch_size=ROWS, optimizer="sgd").parts
    assert parts["weights, two versions"] == 2 * (large + small)


def test_more_rows_take_more_and_fewer_weights_less() -> None:
    model = models.mlp((WIDTH,) * 7)
    step = "tensors of the step at its peak"
    small, large = (estimate_memory(model, batch_size=n).parts[step] for n in (256, 1024))
    assert 3.5 < large / small <= 4
    frozen = estimate_memory(model, batch_size=256, params=["W6"])
    assert frozen.parts[step] < small / 2
    assert frozen.parts["frozen tensors"] > frozen.parts["weights, two versions"]


def test_the_estimate_with_recompute_is_what_the_plain_one_foretells() -> None:
    model = models.mlp((WIDTH,) * 30)
    plain = estimate_memory(model, batch_size=ROWS)
    again = estimate_memory(model, batch_size=ROWS, recompute=True)
    assert again.total == plain.recomputed == again.recomputed
    assert plain.total - again.total > 10 * ONE


def test_sizes_that_the_file_lacks_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigError) as raised:
        estimate_memory(sequences(), batch_size=4)
    assert [line.split("'")[1] for line in raised.value.problems] == ["S", "z[1]"]
    found = estimate_memory(sequences(), {"S": 10, "z[1]": 10}, batch_size=4)
    assert found.parts["a batch of data"] == 3 * 4 * 10 * 8 * 4


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    path = str(tmp_path / "model.onnx")
    onnx.save(models.mlp((WIDTH,) * 5), path)
    given = ["check", path, "--memory", "--batch-size", "512", "--optimizer", "adam"]
    told = works(*given).output
    wanted = estimate_memory(path, batch_size=512, optimizer="adam")
    assert wanted.summary in told
    assert all(what in told for what in wanted.parts)
    assert json.loads(works(*given, "--json").output)["memory"] == wanted.to_dict()
    onnx.save(sequences(), path)
    refusal = ortflex("check", path, "--memory")
    assert "--size S=128" in str(refusal.output) + str(refusal.exception)
    sized = ("check", path, "--memory", "--size", "S=3", "--size", "z[1]=3", "--json")
    assert json.loads(works(*sized).output)["memory"]["batch_size"] == 32


SIZES = {"W4": 4096, "W7": 1024, "W8": 256, "resnet": 8, "gpt2": 8}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", SIZES)
def test_estimates_are_near_measured_peaks(name: str, tmp_path: Path) -> None:
    """Within a fifth, up to 15 MiB of the libraries; convolutions also need working memory."""
    pytest.importorskip("torch")
    from tests.benchmarks import memory

    size = {"width": 192, "heads": 6, "words": 1000} if name == "gpt2" else {}
    path = str(memory.write(name, SIZES[name], tmp_path, **size))
    least = 0.6 if name == "resnet" else 0.8
    for way in ("False", "True"):
        measured = memory.fresh("peak", name, path, way)["mib"]
        estimated = memory.fresh("estimate", name, path, way)["mib"]
        assert least * measured - 15 <= estimated <= 1.2 * measured + 15


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_recompute_takes_less_memory_in_a_process(tmp_path: Path) -> None:
    """A block with planned places: onnxruntime's allocator would lose a quarter of the memory."""
    pytest.importorskip("torch")
    from tests.benchmarks import memory

    path = str(memory.write("W8", 256, tmp_path))
    plain, again = (memory.fresh("peak", "W8", path, way)["mib"] for way in ("False", "True"))
    assert again < 0.5 * plain


MIB = 2**20


MEMORY = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nSwapFree: 10 kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
GROUP = "proc/self/cgroup"
CURRENT = f"{V2}/a/memory.current"
# A group without a limit inside one with a limit.
NESTED = {GROUP: "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/b/memory.current": "5\n"}
NESTED |= {f"{V2}/a/memory.max": "3000000\n", CURRENT: "2000000"}
NESTED |= {f"{V2}/a/memory.stat": "anon 7\ninactive_file 9\n"}
# A container sees its own group as the root.
CONTAINER = {GROUP: "0::/x\n", f"{V2}/memory.max": "700", f"{V2}/memory.current": "800"}
OLD = {GROUP: "5:cpu,cpuacct:/c\n4:memory:/m\n0::/\n", f"{V1}/m/memory.limit_in_bytes": "900"}
OLD |= {f"{V1}/m/memory.usage_in_bytes": "200", f"{V1}/memory.usage_in_bytes": "300"}
OLD |= {f"{V1}/memory.limit_in_bytes": str(2**63 - 4096)}
SYSTEMS: dict[str, tuple[dict[str, str], int | None]] = {
    "unknown": ({}, None),
    "machine": (MEMORY, 8010 * 1024),
    "nested groups": (MEMORY | NESTED, 1000009),
    "container": (CONTAINER, 0),
    "version 1": (MEMORY | OLD, 700),
}


@pytest.mark.once
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_smallest_of_all_limits(tmp_path: Path, name: str) -> None:
    files, expected = SYSTEMS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert memory_limits.available(tmp_path) == expected


@pytest.mark.once
def test_the_limit_of_the_process() -> None:
    resource = pytest.importorskip("resource")
    if memory_limits.available() is None:
        pytest.skip("the system does not say it")
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmSize:")[2].split()[0]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * MIB, hard))
    try:
        left = memory_limits.available()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert left is not None
    assert 200 * MIB < left <= 300 * MIB


@every_backend
@pytest.mark.parametrize("changed", [{}, {"recompute": True}, {"accumulate": 2}], ids=str)
def test_a_step_that_cannot_be_in_memory_is_an_error_before_it(
    monkeypatch: Any, caplog: Any, changed: dict[str, Any], backend: str
) -> None:
    """300,000 rows of 16 hidden values are 18 MiB for each tensor."""
    rows = 300_000 * changed.get("accumulate", 1)
    x, y = np.ones((rows, 6), np.float32), np.ones((rows, 1), np.float32)
    options: dict[str, Any] = {"batch_size": 300_000, "epochs": 1, "backend": backend, **changed}

    def fit(left: int | None) -> Any:
        monkeypatch.setattr(memory_limits, "available", lambda: left)
        trainer = make(models.mlp((6, 16, 16, 1)), **options)
        before = trainer.get_state()
        try:
            trainer.fit(x, y)
        except Unsupported as error:
            pytest.skip(str(error))
        except OrtflexError as error:
            same(trainer.get_state(), before, 0)
            return str(error)
        return ""

    refused = fit(10 * MIB)
    for word in (" graph", "10 MiB", "batch_size", "recompute=True", "check MODEL --memory"):
        assert word in refused
    assert "needs about" not in caplog.text
    with caplog.at_level(logging.WARNING, "ortflex"):
        needed = int(fit(MIB).split("about ")[1].split(" MiB")[0])
        assert not fit((needed - 2) * MIB)
    assert "needs about" in caplog.text
    caplog.clear()
    for enough in (1000 * MIB, None):
        assert not fit(enough)
    assert "needs about" not in caplog.text


WINDOWS = """
    n = Shape <start = 0, end = 1> (x)
    h = Shape <start = 1, end = 2> (x)
    v = Shape <start = 2, end = 3> (x)
    half = Div(h, two)
    wide = Div(v, two)
    parts = Concat <axis = 0> (n, half, two, wide, two, c)
    split = Reshape(x, parts)
    turned = Transpose <perm = [0, 1, 3, 2, 4, 5]> (split)
    bent = Tanh(turned)
    flat = Reshape(bent, back)
    scores = MatMul(flat, w)
    y = ReduceMean <axes = [1], keepdims = 0> (scores)
"""


def test_sizes_that_no_one_knows_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of images of any size: a guess for each axis counted a Reshape as gigabytes.

    The class: an estimate above all that a run can take refuses a model that runs.
    """
    weights = {"w": np.array([[1, -1], [2, 0], [0, 1], [3, 1.0]]), "two": np.array([2])}
    weights |= {"back": np.array([0, -1, 4]), "c": np.array([4])}
    model = models.parsed(WINDOWS, weights, "float[N, H, W, 4] x", "float[N, 2] y")
    monkeypatch.setattr(memory_limits, "available", lambda: 100 * MIB)
    trainer = make(model, backend="fused", loss="softmax_cross_entropy")
    x = np.random.default_rng(0).standard_normal((3, 8, 6, 4)).astype(np.float32)
    assert np.isfinite(trainer.step((x, np.arange(3) % 2)))
    assert trainer.predict(x).shape == (3, 2)


SIDE = 6
FORMULAS: dict[str, Any] = {
    "Add": np.add,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Tanh": np.tanh,
    "MatMul": np.matmul,
    "Identity": np.array,
    "Reshape": lambda x, shape: x,
}


def graph(rng: np.random.Generator, inputs: list[str], count: int) -> list[NodeProto]:
    """Nodes over square matrices in an order in which they can run."""
    names, nodes = list(inputs), []
    for k in range(count):
        operator = str(rng.choice(list(FORMULAS)))
        arity = 2 if operator in ("Add", "Mul", "MatMul") else 1
        given = [str(rng.choice(names[-12:])) for _ in range(arity)]
        given += ["shape"] if operator == "Reshape" else []
        nodes.append(helper.make_node(operator, given, [f"t{k}"]))
        names.append(f"t{k}")
    return nodes


def run(nodes: list[NodeProto], memory: dict[str, Array], inputs: dict[str, Array]) -> None:
    """Compute every node into the memory of its output; a kernel that is no elementwise one reads first."""
    values = {**inputs, **memory}
    for node in nodes:
        given, out = [values[n] for n in node.input], values[node.output[0]]
        result = FORMULAS[node.op_type](*given)
        if node.op_type == "MatMul":
            out[...] = 0  # as a product that adds up in its output
            result = FORMULAS["MatMul"](*given)
        out[...] = result


def seeded(names: list[str], seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    values = {n: rng.standard_normal((SIDE, SIDE)) / 3 for n in names}
    return values | {"shape": np.array([SIDE, SIDE])}


def expected(nodes: list[NodeProto], inputs: dict[str, Array]) -> dict[str, Array]:
    values = dict(inputs)
    for node in nodes:
        values[node.output[0]] = FORMULAS[node.op_type](*(values[n] for n in node.input))
    return values


@pytest.mark.parametrize("seed", range(30))
def test_tensors_in_one_block_do_not_overwrite_one_another(seed: int) -> None:
    nodes = graph(np.random.default_rng(seed), ["a", "b"], 60)
    bound = {n.output[0] for n in nodes[-3:]}
    # An input of the graph is not in the block, and neither are its views.
    specs = {n.output[0]: TensorSpec(n.output[0], TensorProto.DOUBLE, (SIDE, SIDE)) for n in nodes}
    block, places = place_tensors(nodes, specs, bound, 0)
    assert block < 60 * SIDE * SIDE * 8 / 2
    assert block >= max(liveness.bytes_of(s) + offset for s, offset in places.items())
    inputs = seeded(["a", "b"], seed)
    wanted = expected(nodes, inputs)
    flat = np.zeros(block + 8, np.uint8)
    memory = {n: np.zeros((SIDE, SIDE)) for n in specs}
    for spec, offset in places.items():
        part = flat[offset : offset + liveness.bytes_of(spec)]
        memory[spec.name] = part.view(np.float64).reshape(SIDE, SIDE)
    run(nodes, memory, inputs)
    for name in bound:
        np.testing.assert_array_equal(memory[name], wanted[name])


def test_tensors_have_no_place_if_onnxruntime_runs_their_nodes_early() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Shape", ["y"], ["z"])]
    specs = {n: TensorSpec(n, TensorProto.DOUBLE, (SIDE, SIDE)) for n in "yz"}
    assert {spec.name for spec in place_tensors(nodes, specs, (), 0)[1]} == {"y"}


@pytest.mark.parametrize("seed", range(30))
def test_new_values_overwrite_old_ones_after_their_last_readers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = graph(rng, ["p", "q", "r", "x"], 40)
    # New values anywhere in the graph, which later nodes read, too.
    computed = [n.output[0] for n in nodes]
    state = dict(zip("pqr", map(str, rng.choice(computed, 3, replace=False)), strict=True))
    inputs = seeded(["p", "q", "r", "x"], seed)
    wanted = expected(nodes, inputs)
    ordered = update_in_place(nodes, state)
    memory = {n.output[0]: np.zeros((SIDE, SIDE)) for n in ordered}
    held = {name: inputs[name].copy() for name in state}
    memory |= {new: held[old] for old, new in state.items()}
    run(ordered, memory, inputs | held)
    for old, new in state.items():
        np.testing.assert_array_equal(held[old], wanted[new], err_msg=new)
    assert {n for node in ordered for n in node.output} >= set(computed)


def test_new_values_that_wait_for_each_other_are_copied() -> None:
    nodes = [helper.make_node("MatMul", ["q", "q"], ["new p"])]
    nodes += [helper.make_node("MatMul", ["p", "p"], ["new q"])]
    ordered = update_in_place(nodes, {"p": "new p", "q": "new q"})
    assert sorted(n.op_type for n in ordered).count("Identity") == 1


def made(model: onnx.ModelProto, **options: Any) -> Trainer:
    return make(model, optimizer="adam", backend=FusedBackend(steps_per_run=1), **options)


@pytest.mark.parametrize("way", [3, True])
def test_nodes_run_in_the_order_of_the_plan(way: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Planned memory is right only in this order; Shape and Size may run earlier."""
    monkeypatch.setattr(recompute, "SMALL", 0)
    real_options, real_open = session.session_options, session.open_session
    opened: list[tuple[bytes, Any]] = []

    def options(threads: int, **given: Any) -> Any:
        made = real_options(threads, **given)
        made.enable_profiling = True
        made.profile_file_prefix = str(tmp_path / "profile")
        return made

    def opening(model: bytes, *given: Any) -> Any:
        opened.append((model, real_open(model, *given)))
        return opened[-1][1]

    monkeypatch.setattr(session, "session_options", options)
    monkeypatch.setattr(session, "open_session", opening)
    x, y = regression(rows=41)
    made(models.mlp((x.shape[1], 8, 8, 8, 1)), recompute=way).step((x, y))
    model, last = opened[-1]
    nodes = onnx.load_from_string(model).graph.node
    planned = [node.name for node in nodes if node.op_type not in ("Shape", "Size")]
    events = json.loads(Path(last.end_profiling()).read_text())
    names = [e["name"].removesuffix("_kernel_time") for e in events if e.get("cat") == "Node"]
    assert [n for n in names if n in planned] == planned


def test_weights_have_one_version_where_they_are_updated_in_place() -> None:
    x, y = regression(rows=39)

    def versions(**options: Any) -> bool:
        trainer = made(models.mlp((x.shape[1], 8, 1)), **options)
        trainer.step((x, y))
        engine: Any = trainer.engine
        return all(
            a.data_ptr() == b.data_ptr()
            for part in (engine._weights, engine._slots)
            for a, b in zip(*(v.values() for v in part.versions), strict=True)
        )

    assert versions(recompute=2)
    assert not versions()
    assert not versions(recompute=2, accumulate=2)
