"""The kit of backends rejects planted mistakes; HostEngine, which they are planted in, passes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Backend, BackendKit, HostEngine, run_arrays
from ortflex_core.testing import step_programs
from ortflex_core.testing.running import cpu
from tests.core.planted import SHARED, Planted, PlantedMistakes, Subject
from tests.core.test_statistics import batches, network
from tests.training import make

pytestmark = pytest.mark.once


def by_onnxruntime(program: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    return run_arrays(program, dict(feeds), cpu())


@attrs.frozen(kw_only=True)
class Good(Backend):
    """Arrays in, arrays out."""

    name: ClassVar[str] = "good"
    engine: ClassVar[Any] = HostEngine

    @classmethod
    def available(cls, runtime: Any) -> list[str]:
        return []

    def supports(self, problem: Any, device: Any, runtime: Any) -> list[str]:
        return HostEngine.reasons(problem)

    def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
        return by_onnxruntime(program, feeds)

    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        return self.engine(problem, self.execute)


class SaysNothing(Good):
    @classmethod
    def available(cls, runtime: Any) -> Any:
        return None


class ScaledGradients(Good):
    def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
        made = by_onnxruntime(program, feeds)
        return {n: 0.9 * a if n.startswith("gradient/") else a for n, a in made.items()}


class LostPenalty(Good):
    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        return self.engine(attrs.evolve(problem, penalties=()), self.execute)


class AlwaysTheFirst(Good):
    """Every step is the first for it."""

    class engine(HostEngine):
        def run(self, batches: Any, rates: Any) -> Any:
            self._step = 0
            return super().run(batches, rates)


class LearnsFromEvaluation(Good):
    class engine(HostEngine):
        def evaluate(self, batch: Any, outputs: Any) -> Any:
            self._weights = {n: 0.99 * a for n, a in self._weights.items()}
            return super().evaluate(batch, outputs)


class TakesEverything(Good):
    """Stores whatever it is given."""

    class engine(HostEngine):
        def load(self, state: Any) -> None:
            self._weights |= state


class Lends(Good):
    """Hands out its own arrays."""

    class engine(HostEngine):
        def state(self) -> Any:
            return dict(self._weights)


class ForgetsTheStep(Good):
    class engine(HostEngine):
        def load_slots(self, slots: Any) -> None:
            super().load_slots({**slots, "step": 0})


class Shaky(Good):
    def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
        made = by_onnxruntime(program, feeds)
        noise = 1 + 1e-6 * np.random.default_rng().random()
        return {n: (a * noise).astype(a.dtype) for n, a in made.items()}


class TakesAll(Good):
    """Trains whatever it is given, as far as it can."""

    def supports(self, problem: Any, device: Any, runtime: Any) -> list[str]:
        return []

    class engine(HostEngine):
        def __init__(self, problem: Any, execute: Any) -> None: ...

        def load(self, state: Any) -> None: ...

        def programs(self, *given: Any) -> Any:
            return {}

        evaluate = predict = state = buffers = load_buffers = programs
        slots = load_slots = counters = close = programs

        def run(self, batches: Any, rates: Any) -> Any:
            class Done:
                def read(self) -> Any:
                    return [(0.0, 0.0)]

            return Done()


class NoGraphs(Good):
    class engine(HostEngine):
        def programs(self) -> Any:
            return {}


class IgnoresTransforms(Good):
    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        updating = attrs.evolve(problem.updating, transforms=())
        return super().build(attrs.evolve(problem, updating=updating), device, runtime)


class IgnoresGroups(Good):
    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        updating = attrs.evolve(problem.updating, groups=())
        return super().build(attrs.evolve(problem, updating=updating), device, runtime)


class IgnoresConstraints(Good):
    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        updating = attrs.evolve(problem.updating, constraints=())
        return super().build(attrs.evolve(problem, updating=updating), device, runtime)


class IgnoresTheReduction(Good):
    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        return super().build(attrs.evolve(problem, reduction="mean"), device, runtime)


class PredictsWithWeights(Good):
    """Keeps averages, and uses the weights anyway."""

    class engine(HostEngine):
        def averages(self) -> Any:
            return dict(self._weights)


class ExportsWeights(Good):
    """Predicts with averages, and hands out weights as such."""

    class engine(HostEngine):
        def slots(self) -> Any:
            means = {f"average/{n}": a for n, a in self._weights.items()}
            return {n: means.get(n, a) for n, a in super().slots().items()}


class TrainsOnTheFirstBatch(Good):
    """Of several batches that make a step it takes one."""

    class engine(HostEngine):
        def _one(self, batches: Any, rate: Any) -> Any:
            return super()._one(batches[:1], rate)


class EvaluatesHalf(Good):
    class engine(HostEngine):
        def evaluate(self, batch: Any, outputs: Any) -> Any:
            totals, made = super().evaluate(batch, outputs)
            return [t / 2 for t in totals], made


class LosesTheLastSlot(Good):
    """Its second slot stays what it was."""

    class engine(HostEngine):
        def _one(self, batches: Any, rate: Any) -> Any:
            before = {n: a for n, a in self._slots.items() if n.startswith("v/")}
            made = super()._one(batches, rate)
            self._slots |= before
            return made


class DividesByNothing(Good):
    """A batch without weight is one over nothing."""

    class engine(HostEngine):
        def _one(self, batches: Any, rate: Any) -> Any:
            if not all(d for batch in batches for d in batch.denominators):
                self._weights = {n: a * np.nan for n, a in self._weights.items()}
            return super()._one(batches, rate)


class OneLossOfSeveral(Good):
    def build(self, problem: Any, device: Any, runtime: Any) -> Any:
        terms = [
            attrs.evolve(t, factor=t.factor if k == 0 else 0.0) for k, t in enumerate(problem.terms)
        ]
        return super().build(attrs.evolve(problem, terms=tuple(terms)), device, runtime)


class PacksConstantsOnce(Good):
    """Reads a square constant as its first reader does, transposed or not, as compilers have done."""

    def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
        proto = program.proto()
        square = {
            t.name
            for t in proto.graph.initializer
            if len(t.dims) == 2 and t.dims[0] == t.dims[1] > 1
        }
        first: dict[str, int] = {}
        for node in proto.graph.node:
            name = node.input[1] if node.op_type in ("Gemm", "MatMul") else ""
            if name in square:
                turned = {a.name: a for a in node.attribute}.get("transB")
                kept = first.setdefault(name, turned.i if turned else 0)
                if turned is not None:
                    turned.i = kept
        return by_onnxruntime(attrs.evolve(program, model=proto.SerializeToString()), feeds)


def combined(mistake: Any, feature: str, match: str) -> Planted:
    return Planted("test_composition", mistake, match, {"feature": feature})


PLANTED = [
    combined(IgnoresTransforms(), "clip_norm", "is off by"),
    combined(IgnoresTransforms(), "clip_value", "is off by"),
    combined(IgnoresTransforms(), "transforms", "is off by"),
    combined(IgnoresGroups(), "group_rate", "the step of '.*' is off"),
    combined(IgnoresGroups(), "group_optimizer", "optimizer"),
    combined(IgnoresConstraints(), "constraint", "the step of '.*' is off"),
    combined(IgnoresTheReduction(), "sum", "the loss is off"),
    combined(PredictsWithWeights(), "averaging", "the (evaluation|prediction) of '.*' is off"),
    combined(ExportsWeights(), "averaging", "is off by"),
    combined(TrainsOnTheFirstBatch(), "accumulate", "is off by"),
    combined(EvaluatesHalf(), "penalty", "the evaluation of '.*' is off"),
    combined(LosesTheLastSlot(), "adam", "'v/.*' .* is off by"),
    combined(DividesByNothing(), "batch_without_weight", "batch_without_weight|is off by"),
    combined(OneLossOfSeveral(), "several_losses", "is off by"),
    Planted("test_available", SaysNothing(), "available returns None, expected a list of reasons"),
    Planted("test_step", ScaledGradients(), "after a step"),
    Planted("test_penalty", LostPenalty(), "the penalty of a step"),
    Planted("test_adam", AlwaysTheFirst(), "after three steps of Adam"),
    Planted("test_evaluation_changes_nothing", LearnsFromEvaluation(), "evaluation: '.*' differs"),
    Planted("test_state", Lends(), "the state after a caller has changed its copy: '.*' differs"),
    Planted("test_state_is_checked", TakesEverything(), "DID NOT RAISE"),
    Planted("test_slots", ForgetsTheStep(), "a run that continues: '.*' differs"),
    Planted("test_determinism", Shaky(), "the same training twice: '.*' differs"),
    *(
        Planted("test_frozen", PacksConstantsOnce(), "the movement of .* is wrong", {"form": form})
        for form in ("plain", "shared", "lora")
    ),
    Planted("test_what_it_refuses", TakesAll(), "DID NOT RAISE"),
    Planted("test_graphs_and_counters", NoGraphs(), r"programs\(\) is empty"),
]
KNOWN = {
    "reduction": "mean",
    "feature": "penalty",
    "form": "kernel",
    "program": step_programs.sample(17)[0],
}


class TestBackends(PlantedMistakes):
    # Mistakes in step programs: test_testing_step_programs.py.
    elsewhere = frozenset({*SHARED, BackendKit.test_step_program})
    subjects = (Subject(BackendKit, Good(), PLANTED, KNOWN, elsewhere),)


def test_a_graph_of_the_engine_is_all_that_execute_gets() -> None:
    """Host scalars are inputs like others: what runs a graph needs to know of nothing else."""
    from ortflex_core.testing import running

    seen: dict[str, set[str]] = {}

    @attrs.frozen(kw_only=True)
    class Looking(Good):
        def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
            seen[program.name] = {i.name for i in program.proto().graph.input} ^ set(feeds)
            return by_onnxruntime(program, feeds)

    x, y = running.regression()
    trainer = running.trainer(running.linear_model(), backend=Looking(), optimizer="adam")
    trainer.fit(x, y, validation_data=(x, y))
    trainer.predict(x)
    assert seen == {"gradient": set(), "update": set(), "evaluation": set(), "prediction": set()}


def test_it_moves_running_statistics_and_adds_gradients_up() -> None:
    """As the fused backend does, batch by batch; the last step of the epoch has one batch."""
    trained = {}
    for backend in (Good(), "fused"):
        trainer = make(
            network(), backend=backend, accumulate=2, batch_size=6, optimizer="adam", epochs=2
        )
        trainer.fit(batches(5))
        trained[trainer.backend_] = trainer.get_state(buffers=True), trainer.history_.losses
    (ours, losses), (other, other_losses) = trained.values()
    assert {"mean1", "var2"} <= set(ours)
    for name, array in other.items():
        np.testing.assert_allclose(ours[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
