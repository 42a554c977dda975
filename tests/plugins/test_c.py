"""The backend c next to fused: the same losses, weights and state; compiled updates next to numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import (
    DataError,
    Formula,
    Host,
    Ops,
    Optimizer,
    Port,
    Slots,
    Tensor,
    Trainer,
    Unsupported,
    Updated,
)
from ortflex_core.compiler.programs.formulas import GRADIENT, PARAMETER, Line
from ortflex_core.training.engines import host_updates
from ortflex_plugins.backends import fused
from ortflex_plugins.backends.c import steps
from ortflex_plugins.c import compiler
from ortflex_plugins.c.products import Machine
from ortflex_plugins.c.updates import compile_update
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.plugins.compiled_training import CompiledTraining, agree, fitted
from tests.training import bits, make, plugins, regression, same

pytestmark = pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))


class TestTraining(CompiledTraining):
    backend = "c"


def test_c_runs_the_steps_of_an_epoch_at_once() -> None:
    trainer = fitted("W5", "c", epochs=3, steps=9)
    # Eight whole batches and the shorter one, three times.
    assert trainer.engine.steps_per_run == 8
    assert trainer.engine.counters() == {"steps": 27, "runs": 6, "compiled": 2}


def test_steps_at_once_and_one_by_one_give_the_same_bits() -> None:
    states = [
        fitted("W1", {"name": "c", "steps_per_run": count}, epochs=2, steps=5).get_state()
        for count in (1, 5)
    ]
    same(*states, 0)


def test_large_products_are_left_to_fused() -> None:
    with pytest.raises(Unsupported, match="million operations"):
        fitted("W4", "c", epochs=1, steps=1)


def test_two_engines_in_one_process_have_states_of_their_own() -> None:
    one, two = (fitted("W5", "c", epochs=1, steps=4) for _ in range(2))
    before = two.get_state()
    x, y, _ = data(WORKLOADS["W5"])
    one.step((x[:15], y[:15]))
    same(two.get_state(), before, 0)


def on_both(model: Any, x: Any, y: Any, **options: Any) -> list[Trainer]:
    """A model trained with c, and with fused."""
    trainers = [make(model, backend=backend, **options) for backend in ("c", "fused")]
    for trainer in trainers:
        trainer.fit(x, y)
    return trainers


def embedding() -> Any:
    """Y = mean of rows of a table by the tokens X."""
    table = np.random.default_rng(0).standard_normal((5, 2))
    nodes = "rows = Gather(table, X) Y = ReduceMean <axes = [1], keepdims = 0> (rows)"
    return models.parsed(nodes, {"table": table}, "int64[N, 3] X", "float[N, 2] Y")


def test_an_index_out_of_range_is_an_error_and_not_another_address() -> None:
    x = np.array([[0, 1, 2], [3, 4, -5], [1, 1, 1], [-1, -2, 0]])
    y = np.ones((4, 2), np.float32)
    trainer, other = on_both(embedding(), x, y, optimizer="adam", batch_size=4, params=["table"])
    agree(trainer, other)
    for wrong in (5, -6, 2**40):
        with pytest.raises(DataError, match="outside"):
            trainer.fit(np.where(x == 4, wrong, x), y)


def recurrent() -> Any:
    """Y = a product with the last state of a GRU over the steps of X [N, 6, 3]."""
    rng = np.random.default_rng(0)
    sizes = {"W": (1, 12, 3), "R": (1, 12, 4), "B": (1, 24), "out": (4, 2)}
    weights = {n: rng.standard_normal(s) / 2 for n, s in sizes.items()}
    nodes = """
        T = Transpose <perm = [1, 0, 2]> (X)
        every, H = GRU <hidden_size = 4, linear_before_reset = 1> (T, W, R, B)
        S = Squeeze(H, axis)
        Y = MatMul(S, out)
    """
    ends = "float[N, 6, 3] X", "float[N, 2] Y"
    return models.parsed(nodes, {**weights, "axis": np.array([0])}, *ends)


def test_a_recurrent_network_trains_as_on_fused() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, 6, 3)).astype(np.float32)
    y = rng.standard_normal((8, 2)).astype(np.float32)
    agree(*on_both(recurrent(), x, y, optimizer="adam", batch_size=4, epochs=2))


def test_names_of_the_model_are_not_in_the_file() -> None:
    """A model's names are data: in C they are numbers."""
    model = network(WORKLOADS["W5"])
    hostile = '*/ }; int main(void) { system("x"); } /* \\\n#include "y"'
    for holder in (model.graph.node[0].input, model.graph.node[0].output):
        for k, name in enumerate(holder):
            holder[k] = f"{hostile} {name}"
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = f"{hostile} {value.name}"
    x, y, _ = data(WORKLOADS["W5"])
    sources = []
    for proto in (model, network(WORKLOADS["W5"])):
        trainer = make(proto, backend="c", batch_size=15)
        trainer.fit(x[:30], y[:30])
        engine: Any = trainer.engine
        sources.append(steps.part_of(engine.problem, "step", 15).generated.source)
    assert "system" not in sources[0]
    assert 'include "y' not in sources[0]
    assert sources[0] == sources[1]


# Sums over leading axes. gcc 12 made wrong ones of kernels whose pointers were ``restrict``: of a kernel
# that is inlined where all offsets are known, whose loops are unrolled and vectorized. They were the
# gradients of positional embeddings with frozen tokens, wrong by up to 70 %.


def positioned(positions: int, width: int) -> Any:
    """Tokens and positions, normalized, with a layer after them; as in small transformers."""
    nodes = """
        t = Gather(E, X) h = Add(t, P)
        m = ReduceMean <axes = [-1]> (h) c = Sub(h, m) s = Mul(c, c)
        v = ReduceMean <axes = [-1]> (s) ve = Add(v, eps) d = Sqrt(ve) n = Div(c, d)
        o = MatMul(n, W) Y = Add(o, h)
    """
    rng = np.random.default_rng(0)
    weights = {
        "E": rng.standard_normal((7, width)),
        "P": rng.standard_normal((positions, width)),
        "W": rng.standard_normal((width, width)) / 3,
        "eps": np.float32(1e-5),
    }
    ends = f"int64[N, {positions}] X", f"float[N, {positions}, {width}] Y"
    return models.parsed(nodes, weights, *ends)


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
@pytest.mark.parametrize(("positions", "width"), [(5, 10), (4, 8), (3, 17), (6, 9)])
def test_gradients_of_positions_are_those_of_fused(rows: int, positions: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.integers(0, 7, (rows, positions))
    y = rng.standard_normal((rows, positions, width)).astype(np.float32)
    model = positioned(positions, width)
    options = {"params": ["P"], "learning_rate": 1.0, "epochs": 1}
    before = models.weights_of(model)["P"]
    moved = [t.get_state()["P"] - before for t in on_both(model, x, y, **options)]
    np.testing.assert_allclose(*moved, rtol=2e-4, atol=1e-6)


def test_no_pointer_of_a_kernel_is_restrict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels a compiler gets wrong depends on sizes and offsets, so none of them may be."""
    sources, load = [], steps.load_library

    def loaded(source: str, *given: Any) -> Any:
        sources.append(source)
        return load(source, *given)

    monkeypatch.setattr(steps, "load_library", loaded)
    trainer = make(positioned(5, 10), backend="c")
    trainer.step((np.zeros((2, 5), np.int64), np.zeros((2, 5, 10), np.float32)))
    kernels = [line for line in sources[0].splitlines() if line.startswith("static void k")]
    assert len(kernels) > 5
    assert not [line for line in kernels if "restrict" in line]


@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
def test_places_of_extremes_are_whole_numbers(kind: str) -> None:
    """They choose rows of a table, as in a vector quantizer, here by their remainders."""
    nodes = f"""
        k = {kind} <axis = 1, keepdims = 0> (X)
        r = Mod(k, three) t = Gather(T, r) Y = MatMul(t, W)
    """
    rng = np.random.default_rng(0)
    weights = {"T": rng.standard_normal((3, 3)), "W": rng.standard_normal((3, 2))}
    weights["three"] = np.array(3)
    model = models.parsed(nodes, weights, "float[N, 4] X", "float[N, 2] Y")
    x = rng.standard_normal((6, 4)).astype(np.float32)
    y = rng.standard_normal((6, 2)).astype(np.float32)
    options = {"optimizer": "adam", "params": ["T", "W"], "epochs": 1, "cache": False}
    same(*(trainer.get_state() for trainer in on_both(model, x, y, **options)), 2e-6)


@pytest.mark.parametrize("rows", [9, 15, 33])
def test_loops_over_whole_registers_change_no_bit(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over an intermediate tensor ends at a register; what lies beyond the tensor is not kept."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((3 * rows, 5)).astype(np.float32)
    y = (rng.random((3 * rows, 1)) < 0.5).astype(np.float32)
    weight = rng.random(3 * rows).astype(np.float32)
    blocks, texts = [], []
    for lanes in (1, 4, 8, 16):
        own = Machine(lanes=lanes, registers=32 if lanes == 16 else 16)
        monkeypatch.setattr(steps, "machine", lambda own=own: own)
        options: dict[str, Any] = {"loss": "log_loss", "optimizer": "adam", "batch_size": rows}
        trainer = make(models.linear(5), **options, epochs=2, backend="c")
        trainer.fit(x, y, weight)
        engine: Any = trainer.engine
        blocks.append(engine._block.tobytes())
        texts.append(steps.part_of(engine.problem, "step", rows).generated.source)
        kept = np.ones(engine._block.size, bool)
        for memory, place in zip(engine._layout.memory, engine._layout.places, strict=True):
            size = int(np.prod(memory.shape, dtype=np.int64)) * memory.dtype.itemsize
            kept[place.start : place.start + size] = False
        assert not engine._block[kept].any()
    assert len(set(blocks)) == 1
    padded = -(-rows // 16) * 16
    assert f"i0 < {padded};" in texts[-1]
    assert f"i0 < {padded};" not in texts[0]


# Compiled updates of large parameters.

X, Y = regression(features=6, rows=37)
OPTIMIZERS = sorted(plugins()["optimizers"].names())
IN_GRAPH = {"adafactor", "lamb", "lars", "nadam", "prodigy", "sgd"}
"""Optimizers with norms, with slots of other shapes than the weight, or with few operators."""


@attrs.frozen(kw_only=True)
class Cautious(Optimizer):
    """An optimizer of a third party, with every operator of the formulas."""

    name: ClassVar[str] = "cautious"
    default_rate: ClassVar[float] = 0.01
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        m = 0.9 * slots["m"] + 0.1 * gradient
        v = op.Max(0.99 * slots["v"], op.Abs(gradient))
        same = op.Max(op.Sign(m) * op.Sign(gradient), 0.0 * m)
        moved = op.Min(m * same * op.Reciprocal(op.Sqrt(v) + 1e-3), -op.Neg(v) + 1.0)
        return weight - rate * (1 + 1 / step) * moved, {"m": m, "v": v}


def trained(optimizer: Any, compiled: bool, **options: Any) -> tuple[Trainer, int]:
    """A trainer after four epochs, the last three with compiled updates, and the number of these."""
    arguments = {"learning_rate": 0.01, "batch_size": 10, "threads": 2, **options}
    trainer = make(models.mlp(), backend="fused", optimizer=optimizer, epochs=1, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        # Small parameters count as large, and are divided between two threads.
        for name, size in {"_LARGE": 6, "_BLOCK": 7, "_SHARE": 16}.items():
            patch.setattr(host_updates, name, size)
        if not compiled:
            patch.setattr(fused, "compile_update", None)
        trainer.fit(X, Y)
        updates = trainer.engine.host_updates  # type: ignore[attr-defined]
        if updates is not None:
            updates.wait()
        for _ in range(3):
            trainer.fit(X, Y)
    return trainer, 0 if updates is None else updates.compiled


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, Cautious()], ids=str)
def test_an_optimizer_has_the_bits_of_numpy(optimizer: Any) -> None:
    found, count = trained(optimizer, True)
    assert (count > 0) == (optimizer not in IN_GRAPH)
    if count:
        expected, none = trained(optimizer, False)
        assert bits(found) == bits(expected)
        assert none == 0


@pytest.mark.parametrize(
    "options",
    [
        {"penalty": "l2", "clip_norm": 0.5, "averaging": "ema"},
        {"accumulate": 2, "transforms": ["centralize"]},
        {"schedule": "cosine", "groups": [{"params": ["W1"], "rate": 0.3, "optimizer": "rmsprop"}]},
        {"constraint": {"W1": "non_negative"}, "threads": 1},
        {"constraint": {"name": "sparsity", "share": 0.75}, "clip_norm": 0.5},
    ],
    ids=lambda o: next(iter(o)),
)
def test_an_option_has_the_bits_of_numpy(options: dict[str, Any]) -> None:
    found, count = trained("adam", True, **options)
    assert count
    assert bits(found) == bits(trained("adam", False, **options)[0])


def formulas() -> Iterator[tuple[str, Formula]]:
    for name, function in host_updates._FUNCTIONS.items():
        lines = [Line(name, (PARAMETER, GRADIENT)[: function.nin])]
        yield name, Formula(tuple(lines), {PARAMETER: 0})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "formula"), list(formulas()))
@np.errstate(all="ignore")
def test_an_operator_has_the_bits_of_numpy(name: str, formula: Formula, dtype: Any) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, 1, -1, 3, 1e30], dtype)
    a, b = (np.tile(g.ravel(), 5) for g in np.meshgrid(special, special))
    expected = host_updates._FUNCTIONS[name](*(a, b)[: host_updates._FUNCTIONS[name].nin])
    kernel = compile_update(formula, np.dtype(dtype))
    assert kernel is not None
    tensors: dict[Port, Any] = {PARAMETER: a.copy(), GRADIENT: b}
    kernel.bind(tensors, {})()
    found = tensors[PARAMETER]
    nan = np.isnan(found) & np.isnan(expected)  # the sign of NaN is not defined
    words = np.uint32 if dtype == np.float32 else np.uint64
    assert (nan | (found.view(words) == expected.view(words))).all(), [
        (x, y, f, e) for x, y, f, e in zip(a, b, found, expected, strict=True) if f != e and f == f
    ]


def test_without_a_compiler_numpy_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    found, count = trained("adam", True)
    assert count == 0
    assert bits(found) == bits(trained("adam", False)[0])
