"""Host scalars and updates on the host.

Scalars are float64 on the host, and symbols while a formula is traced. Updates of large parameters by
numpy are compared with the same updates in the graph of the step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import (
    GraphError,
    Host,
    HostProgram,
    Optimizer,
    Trace,
    Trainer,
    TrainingDiverged,
    host_formulas,
    internals_of,
)
from ortflex_core.kernel.host_scalars import OPERATORS
from ortflex_core.training.engines import host_updates
from ortflex_plugins.backends import fused
from tests import models
from tests.training import make, plugins, regression, same

BETA, STEP = Host.symbol("beta"), Host.symbol("step")


def value(expression: Host, **symbols: float) -> float:
    return HostProgram([expression])(symbols)[0]


def test_corrections_of_adam_are_computed_in_float64() -> None:
    assert value(1 - BETA**STEP, beta=0.999, step=1) == 1 - 0.999
    assert abs(float(np.float32(1) - np.float32(0.999)) - 0.001) > 1e-8


FORMULAS = ("b + 1", "1 + b", "b - 1", "1 - b", "b * 3", "3 * b", "b / 4", "4 / b")


@pytest.mark.parametrize("formula", [*FORMULAS, "b**3", "3**b", "-b"])
def test_python_arithmetic(formula: str) -> None:
    assert value(eval(formula, {"b": BETA}), beta=2) == eval(formula, {"b": 2.0})


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators_mean_what_numpy_means(name: str) -> None:
    others = {"Sub": "subtract", "Mul": "multiply", "Div": "divide", "Pow": "power"}
    others |= {"Neg": "negative", "Min": "minimum", "Max": "maximum", "Identity": "positive"}
    function = getattr(np, others.get(name, name.lower()))
    numbers = (1.7, 0.6)[: function.nin]
    op = Trace({"": 17}).op
    found = op(name, *(Host.symbol(n) for n in "ab"[: function.nin]))
    assert isinstance(found, Host)
    assert value(found, a=1.7, b=0.6) == pytest.approx(float(function(*numbers)), rel=1e-15)


def test_common_subexpressions_are_computed_once() -> None:
    power = BETA**STEP
    program = HostProgram([1 - power, 2 - Host.apply("Pow", BETA, STEP)])
    assert program({"beta": 0.5, "step": 2}) == [0.75, 1.75]
    assert sum("**" in line for line in program._lines) == 1


def test_numbers_keep_their_sign_and_value() -> None:
    exponent = Host.apply("Pow", -2.0, STEP)
    assert value(exponent, step=2) == 4.0
    assert math.copysign(1, value(Host.apply("Mul", -0.0, STEP), step=1)) == -1
    assert value(Host.apply("Min", STEP, math.inf), step=3) == 3
    assert value(Host.apply("Max", STEP, 1.0, 7.0), step=3) == 7
    assert value(STEP * 0.1, step=1) == 0.1


def test_a_program_can_be_run_again_with_other_values() -> None:
    program = HostProgram([BETA, BETA * STEP, BETA])
    assert program({"beta": 2, "step": 3}) == [2, 6, 2]
    assert program({"beta": 5, "step": 1}) == [5, 5, 5]
    assert program.symbols == {"beta", "step"}


def test_equality_is_structural_and_keeps_the_sign_of_zero() -> None:
    assert Host.symbol("beta") * 2 == BETA * 2
    assert len({BETA + 1, 1 + BETA, Host.symbol("beta") + 1}) == 2
    positive, negative = HostProgram([BETA * 0.0, BETA * -0.0])({"beta": 1})
    assert math.copysign(1, positive) == 1
    assert math.copysign(1, negative) == -1


def test_a_condition_is_refused() -> None:
    with pytest.raises(GraphError, match=r"the host scalar beta has no value .* op\.Where"):
        bool(BETA)


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(GraphError, match="no value was given for the host scalar 'step'"):
        value(BETA**STEP, beta=0.9)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (1 / BETA, r"Div\(1.0, beta\) is undefined at \{'beta': 0\}.*zero"),
        (Host.apply("Log", BETA), r"Log\(beta\) is undefined at \{'beta': 0\}"),
        (Host.apply("Sqrt", BETA - 1), r"Sqrt\(Sub\(beta, 1.0\)\) is undefined at \{'beta': 0\}"),
        (BETA**-1, r"Pow\(beta, -1.0\) is undefined"),
    ],
)
def test_an_undefined_host_scalar_names_its_use(expression: Host, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        value(expression, beta=0)


def test_a_numpy_array_with_a_host_scalar_is_refused() -> None:
    with pytest.raises(TypeError):
        np.ones(3) * BETA


@pytest.mark.parametrize("kind", [int, float, np.float32, np.int64])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("swapped", [False, True])
def test_no_comparison_with_a_number_has_an_answer(name: str, kind: Any, swapped: bool) -> None:
    """The class of errors: a comparison that is decided while the formula is traced."""
    compare, number = getattr(operator, name), kind(1)
    with pytest.raises(GraphError, match=r"the host scalar step has no value.*op\.Where"):
        compare(number, STEP) if swapped else compare(STEP, number)


def test_symbols_have_no_order_but_equal_expressions_are_equal() -> None:
    with pytest.raises(GraphError, match="the host scalar step has no value"):
        _ = STEP < BETA
    assert 1 - BETA == 1 - BETA
    assert STEP != BETA
    assert STEP in {STEP: 1}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_numbers_between_two_cases_have_the_type_of_the_condition(dtype: Any) -> None:
    """``op.Where(g > 0, self.up, 1.0)`` is float64 in a model of float64."""
    trace = Trace({"": 17})
    op, g = trace.op, trace.input("g", dtype, ("N",))
    up = op.And(op.Greater(g, 0), op.Not(op.Less(g, 5)))
    for chosen in (op.Where(up, BETA, 1.0), op.Where(up, 0.5, BETA), op.Where(up, 0.5, 2.0)):
        assert chosen.dtype == g.dtype
    assert op.Where(up, 1, 0).dtype == TensorProto.INT64
    known = trace.input("flag", np.bool_, ("N",))
    assert op.Where(known, BETA, 1.0).dtype == TensorProto.FLOAT


ELEMENTWISE = ["adadelta", "adagrad", "adam", "adamax", "adamw", "momentum", "nadam", "nesterov"]
ELEMENTWISE += ["radam", "rmsprop"]
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "penalty and clip_norm": {"penalty": "l2", "clip_norm": 0.5},
    "transforms": {"transforms": ["centralize"]},
    "average": {"averaging": "ema"},
    "constraint": {"constraint": {"W1": "non_negative"}},
    "pruning": {"constraint": {"name": "sparsity", "share": 0.75}},
    "pruning of channels": {"constraint": {"name": "sparsity", "method": "channels"}},
    "group": {"groups": [{"params": ["W1"], "rate": 0.3, "optimizer": "rmsprop"}]},
    "later group": {"groups": [{"params": ["W2"], "start_epoch": 2}]},
    "two threads": {"threads": 2},
    "two batches": {"accumulate": 2},
    "two batches, penalty and clip_norm": {"accumulate": 2, "penalty": "l2", "clip_norm": 0.5},
    "schedule": {"schedule": "cosine"},
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters count as large, and have several blocks, the last of which is shorter."""
    monkeypatch.setattr(host_updates, "_LARGE", 6)
    monkeypatch.setattr(host_updates, "_BLOCK", 7)


X, Y = regression(features=6, rows=37)


def trained(
    model: Any = None, in_graph: bool = False, data: tuple[Any, Any] = (X, Y), **options: Any
) -> Trainer:
    """A trainer after four epochs, whose last batches are shorter."""
    with pytest.MonkeyPatch.context() as patch:
        if in_graph:
            patch.setattr(fused, "host_formulas", lambda problem: {})
        arguments = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 10, "epochs": 4}
        trainer = make(model or models.mlp(), backend="fused", **arguments | options)
        trainer.fit(*data)
    return trainer


def on_host(trainer: Trainer) -> list[str]:
    return sorted(host_formulas(internals_of(trainer).problem))


def assert_equal(found: Trainer, expected: Trainer) -> None:
    same(found.get_state(), expected.get_state())
    same(found.engine.slots(), expected.engine.slots())
    np.testing.assert_allclose(found.history_["loss"], expected.history_["loss"], rtol=1e-6)


class Earlier(Optimizer):
    """Moves by the mean of the gradient and the step before; reads old values late."""

    name, default_rate, slots = "earlier", 0.01, ("m", "before")

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        m = 0.5 * slots["m"] + 0.5 * gradient * gradient
        new = weight - rate * gradient / (op.Sqrt(m) + 1e-3) - 0.1 * (weight - slots["before"])
        return new, {"m": m + 0.01 * op.Abs(slots["m"]), "before": weight * 1.0}


class Passing(Earlier):
    """Its slot becomes the gradient itself."""

    name = "passing"

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        new, after = super().update(op, weight, gradient, rate, step, slots)
        return new, {**after, "before": gradient}


@pytest.mark.usefixtures("small")
class TestUpdatesByNumpy:
    @pytest.mark.parametrize("optimizer", ELEMENTWISE)
    def test_an_optimizer_has_the_same_results(self, optimizer: str) -> None:
        found = trained(optimizer=optimizer)
        if optimizer in ("adam", "adamw", "momentum", "rmsprop", "adadelta"):
            assert on_host(found) == ["W1", "W2", "b1"]  # else the graph is compared with itself
        assert_equal(found, trained(in_graph=True, optimizer=optimizer))

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
    def test_an_option_has_the_same_results(self, options: dict[str, Any]) -> None:
        found = trained(**options)
        assert on_host(found)
        assert_equal(found, trained(in_graph=True, **options))

    def test_float64_has_the_same_results(self) -> None:
        model = models.in_float64(models.linear(features=6))
        found = trained(model)
        assert on_host(found) == ["coef"]
        assert_equal(found, trained(model, in_graph=True))

    def test_gradients_for_numpy_are_written_without_a_copy(self) -> None:
        """The gradient of a convolution is a matrix in the graph; a Reshape to an output would copy it."""
        images = np.random.default_rng(0).standard_normal((48, 4, 12, 12), dtype=np.float32)
        targets = np.random.default_rng(1).standard_normal((48, 48), dtype=np.float32)
        kernels = {"K1": (8, 4, 3, 3), "K2": (3, 8, 3, 3)}
        model = models.of_text(
            """(float[N, 4, 12, 12] X) => (float[N, 48] Y) {
            H1 = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(X, K1)
            H2 = Tanh(H1)  H3 = Conv(H2, K2)  Y = Flatten(H3) }""",
            kernels,
        )
        options: dict[str, Any] = {"batch_size": 16, "optimizer": "momentum", "learning_rate": 1e-4}
        plain, trainer = (
            trained(model, way, (images, targets), **options) for way in (True, False)
        )
        np.testing.assert_allclose(trainer.history_["loss"], plain.history_["loss"], rtol=1e-6)
        graphs = [g for n, g in trainer.save_onnx_graph().items() if n.startswith("step")]
        gradients = [o.name for o in graphs[0].graph.output if o.name.startswith("gradient")]
        copied = [n for g in graphs for n in g.graph.node if n.op_type == "Reshape"]
        assert len(gradients) == 2
        assert not {o for n in copied for o in n.output} & set(gradients)

    @pytest.mark.parametrize("optimizer", [Earlier(), Passing()], ids=lambda o: o.name)
    def test_an_update_that_reads_old_values_late_stays_in_the_graph(
        self, optimizer: Optimizer
    ) -> None:
        found = trained(optimizer=optimizer)
        assert not on_host(found)
        assert_equal(found, trained(in_graph=True, optimizer=optimizer))

    @pytest.mark.parametrize("optimizer", ["sgd", "lamb", "adafactor"])
    def test_short_updates_and_those_with_norms_stay_in_the_graph(self, optimizer: str) -> None:
        assert not on_host(trained(optimizer=optimizer))

    def test_the_tensors_of_the_updates_have_one_version(self) -> None:
        engine: Any = trained().engine
        for twins, own in ((engine._weights, ["W1"]), (engine._slots, ["m/W1", "v/W1"])):
            first, second = twins.versions
            assert all(first[name] is second[name] for name in own)
            small = "b3" if twins is engine._weights else "m/b3"
            assert first[small] is not second[small]

    def test_a_resumed_training_has_the_same_bits(self, tmp_path: Path) -> None:
        plain = trained(epochs=2)
        plain.save(tmp_path / "run")
        resumed = Trainer.resume(tmp_path / "run", plugins=plugins())
        for trainer in (plain, resumed):
            trainer.fit(X, Y)
        same(resumed.get_state(), plain.get_state(), 0)

    def test_a_diverged_training_restores_the_last_good_state(self) -> None:
        trainer = trained(check_finite=False)
        good = trainer.get_state()
        labels = Y.copy()
        labels[25] = np.inf
        with pytest.raises(TrainingDiverged):
            trainer.fit(X, labels)
        same(trainer.get_state(), good, 0)

    @pytest.mark.parametrize("name", ["constraint", "group"])
    def test_equal_layers_may_have_updates_of_their_own(self, name: str) -> None:
        """The constraint is a Relu, which stays in the graph; the other layer does not."""
        model, options = models.mlp((6, 6, 6, 1)), OPTIONS[name]
        found = trained(model, **options)
        assert set(on_host(found)) & {"W1", "W2"} == (
            {"W2"} if name == "constraint" else {"W1", "W2"}
        )
        assert_equal(found, trained(model, in_graph=True, **options))
        plain = trained(model)
        assert not np.allclose(found.get_state()["W1"], plain.get_state()["W1"])
