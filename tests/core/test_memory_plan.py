"""Planned memory: random graphs give the same values in one block, with new values over old ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from ortflex_core import Array, TensorSpec, Trainer
from ortflex_core.compiler.runtime import liveness, recompute, session
from ortflex_core.compiler.runtime.memory_plan import place_tensors, update_in_place
from ortflex_plugins.backends.fused import FusedBackend
from tests import models
from tests.training import make, regression

ROWS = 6
FORMULAS: dict[str, Any] = {
    "Add": np.add,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Tanh": np.tanh,
    "MatMul": np.matmul,
    "Identity": np.array,
}
FORMULAS["Reshape"] = lambda x, shape: x


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
        given = [values[n] for n in node.input if n != "shape"]
        given += [values["shape"]] if "shape" in node.input else []
        out = values[node.output[0]]
        result = FORMULAS[node.op_type](*given)
        if node.op_type == "MatMul":
            out[...] = 0  # as a product that adds up in its output
            result = FORMULAS["MatMul"](*given)
        out[...] = result


def seeded(names: list[str], seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    values = {n: rng.standard_normal((ROWS, ROWS)) / 3 for n in names}
    return values | {"shape": np.array([ROWS, ROWS])}


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
    specs = {n.output[0]: TensorSpec(n.output[0], TensorProto.DOUBLE, (ROWS, ROWS)) for n in nodes}
    block, places = place_tensors(nodes, specs, bound, 0)
    assert block < 60 * ROWS * ROWS * 8 / 2
    assert block >= max(liveness.bytes_of(s) + offset for s, offset in places.items())
    inputs = seeded(["a", "b"], seed)
    wanted = expected(nodes, inputs)
    flat = np.zeros(block + 8, np.uint8)
    memory = {n: np.zeros((ROWS, ROWS)) for n in specs}
    for spec, offset in places.items():
        part = flat[offset : offset + liveness.bytes_of(spec)]
        memory[spec.name] = part.view(np.float64).reshape(ROWS, ROWS)
    run(nodes, memory, inputs)
    for name in bound:
        np.testing.assert_array_equal(memory[name], wanted[name])


def test_tensors_have_no_place_if_onnxruntime_runs_their_nodes_early() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Shape", ["y"], ["z"])]
    specs = {n: TensorSpec(n, TensorProto.DOUBLE, (ROWS, ROWS)) for n in "yz"}
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
    memory = {n.output[0]: np.zeros((ROWS, ROWS)) for n in ordered}
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
    planned = [node for node in nodes if node.op_type not in ("Shape", "Size")]
    events = json.loads(Path(last.end_profiling()).read_text())
    names = [e["name"].removesuffix("_kernel_time") for e in events if e.get("cat") == "Node"]
    ran = [n for n in names if n in {node.name for node in planned}]
    assert ran == [node.name for node in planned]


def test_weights_have_one_version_where_they_are_updated_in_place() -> None:
    x, y = regression(rows=39)

    def versions(**options: Any) -> bool:
        trainer = made(models.mlp((x.shape[1], 8, 1)), **options)
        trainer.step((x, y))
        engine: Any = trainer.engine
        parts = (engine._weights, engine._slots)
        return all(
            a.data_ptr() == b.data_ptr()
            for part in parts
            for a, b in zip(*(v.values() for v in part.versions), strict=True)
        )

    assert versions(recompute=2)
    assert not versions()
    assert not versions(recompute=2, accumulate=2)
