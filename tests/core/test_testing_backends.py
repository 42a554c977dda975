"""The kit of backends rejects planted mistakes, in step programs too; HostEngine passes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import Backend, BackendKit, HostEngine, Unsupported, run_arrays
from ortflex_core.testing import step_programs
from ortflex_core.testing.backend import check_program
from ortflex_core.testing.running import cpu, plugins
from tests import models
from tests.core.planted import SHARED, Planted, PlantedMistakes, Subject, but
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


def good(**methods: Any) -> Any:
    """The backend, whose engine has other methods."""
    return but(Good(), engine=type("engine", (HostEngine,), methods))


def made(change: Any) -> Any:
    """The backend, with each array that a graph returns changed, by its name."""

    def execute(self: Any, program: Any, feeds: Mapping[str, Any]) -> Any:
        return {n: change(n, a) for n, a in by_onnxruntime(program, feeds).items()}

    return but(Good(), execute=execute)


def ignoring(change: Any) -> Any:
    """The backend, for another problem than that which it gets."""

    def build(self: Any, problem: Any, device: Any, runtime: Any) -> Any:
        return Good.build(self, change(problem), device, runtime)

    return but(Good(), build=build)


def without(**parts: Any) -> Any:
    """The backend, which leaves out parts of the update."""
    return ignoring(lambda p: attrs.evolve(p, updating=attrs.evolve(p.updating, **parts)))


def of_one_loss(problem: Any) -> Any:
    first, *rest = problem.terms
    return attrs.evolve(problem, terms=(first, *(attrs.evolve(t, factor=0.0) for t in rest)))


def shaken(name: str, array: Any) -> Any:
    return (array * (1 + 1e-6 * np.random.default_rng().random())).astype(array.dtype)


def always_the_first(engine: Any, batches: Any, rates: Any) -> Any:
    engine._step = 0
    return HostEngine.run(engine, batches, rates)


def learning(engine: Any, batch: Any, outputs: Any) -> Any:
    engine._weights = {n: 0.99 * a for n, a in engine._weights.items()}
    return HostEngine.evaluate(engine, batch, outputs)


def half(engine: Any, batch: Any, outputs: Any) -> Any:
    totals, predicted = HostEngine.evaluate(engine, batch, outputs)
    return [t / 2 for t in totals], predicted


def weights_for_averages(engine: Any) -> Any:
    means = {f"average/{n}": a for n, a in engine._weights.items()}
    return {n: means.get(n, a) for n, a in HostEngine.slots(engine).items()}


def losing_the_last_slot(engine: Any, batches: Any, rate: Any) -> Any:
    before = {n: a for n, a in engine._slots.items() if n.startswith("v/")}
    cost = HostEngine._one(engine, batches, rate)
    engine._slots |= before
    return cost


def dividing_by_nothing(engine: Any, batches: Any, rate: Any) -> Any:
    """A batch without weight is one over nothing."""
    if not all(d for batch in batches for d in batch.denominators):
        engine._weights = {n: a * np.nan for n, a in engine._weights.items()}
    return HostEngine._one(engine, batches, rate)


def combined(mistake: Any, feature: str, match: str = "is off by") -> Planted:
    return Planted("test_composition", mistake, match, {"feature": feature})


NO_TRANSFORMS = without(transforms=())
FIRST_BATCH = good(_one=lambda engine, batches, rate: HostEngine._one(engine, batches[:1], rate))


PLANTED = [
    combined(NO_TRANSFORMS, "clip_norm"),
    combined(NO_TRANSFORMS, "clip_value"),
    combined(NO_TRANSFORMS, "transforms"),
    combined(without(groups=()), "group_rate", "the step of '.*' is off"),
    combined(without(groups=()), "group_optimizer", "optimizer"),
    combined(without(constraints=()), "constraint", "the step of '.*' is off"),
    combined(ignoring(lambda p: attrs.evolve(p, reduction="mean")), "sum", "the loss is off"),
    combined(
        good(averages=lambda engine: dict(engine._weights)),
        "averaging",
        "the (evaluation|prediction) of '.*' is off",
    ),
    combined(good(slots=weights_for_averages), "averaging"),
    combined(FIRST_BATCH, "accumulate"),
    combined(good(evaluate=half), "penalty", "the evaluation of '.*' is off"),
    combined(good(_one=losing_the_last_slot), "adam", "'v/.*' .* is off by"),
    combined(good(_one=dividing_by_nothing), "batch_without_weight", "batch_without_weight|is off"),
    combined(ignoring(of_one_loss), "several_losses"),
    Planted(
        "test_available",
        but(Good(), available=classmethod(lambda *_: None)),
        "available returns None, expected a list of reasons",
    ),
    Planted(
        "test_step",
        made(lambda name, a: 0.9 * a if name.startswith("gradient/") else a),
        "after a step",
    ),
    Planted(
        "test_penalty",
        ignoring(lambda problem: attrs.evolve(problem, penalties=())),
        "the penalty of a step",
    ),
    Planted("test_adam", good(run=always_the_first), "after three steps of Adam"),
    Planted("test_evaluation_changes_nothing", good(evaluate=learning), "evaluation: '.*' differs"),
    Planted("test_state", good(state=lambda engine: dict(engine._weights)), "the state after a"),
    Planted(
        "test_state_is_checked",
        good(load=lambda engine, state: engine._weights.update(state)),
        "DID NOT RAISE",
    ),
    Planted(
        "test_slots",
        good(load_slots=lambda engine, s: HostEngine.load_slots(engine, {**s, "step": 0})),
        "a run that continues: '.*' differs",
    ),
    Planted("test_determinism", made(shaken), "the same training twice: '.*' differs"),
    *(
        Planted("test_frozen", PacksConstantsOnce(), "the movement of .* is wrong", {"form": form})
        for form in ("plain", "shared", "lora")
    ),
    Planted("test_what_it_refuses", TakesAll(), "DID NOT RAISE"),
    Planted("test_graphs_and_counters", good(programs=lambda engine: {}), r"programs\(\) is empty"),
]
KNOWN = {
    "reduction": "mean",
    "feature": "penalty",
    "form": "kernel",
    "program": step_programs.sample(17)[0],
}


class TestBackends(PlantedMistakes):
    # Mistakes in step programs: below.
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


# Step programs ------------------------------------------------------------------------------------


PROGRAM = ("mlp", "momentum", "squared_error")


class HalfAtZero(Good):
    """Its mask of a Relu is 0.5 at 0, as OpenVINO's HardSigmoid with a huge slope is."""

    def execute(self, program: Any, feeds: Mapping[str, Any]) -> Any:
        # A slope that leaves 0 where the mistake has 0.5, next to 1 above and 0 below.
        proto = program.proto()
        for node in proto.graph.node:
            if node.op_type == "Sign":
                node.op_type = "HardSigmoid"
                for name, value in (("alpha", 3e38), ("beta", 0.5)):
                    node.attribute.append(onnx.helper.make_attribute(name, value))
        return by_onnxruntime(attrs.evolve(program, model=proto.SerializeToString()), feeds)


class StaleSlot(Good):
    """Every second step reads the slots of the step before."""

    class engine(HostEngine):
        def _one(self, batches: Any, rate: Any) -> Any:
            before = dict(self._slots)
            made = super()._one(batches, rate)
            if self._step % 2:
                self._slots = before
            return made


class WrongRate(Good):
    """Steps of a run after the first take the rate of the first, a hundredth too small."""

    class engine(HostEngine):
        def run(self, batches: Any, rates: Any) -> Any:
            return super().run(batches, [0.99 * rate for rate in rates])


@pytest.mark.parametrize("mistake", [HalfAtZero(), StaleSlot(), WrongRate()])
def test_step_programs_reject_planted_mistakes(mistake: Any) -> None:
    check_program(Good(), *PROGRAM)
    with pytest.raises(AssertionError, match=r"is off|after a training"):
        check_program(mistake, *PROGRAM)


def test_step_programs_have_every_optimizer_and_loss_that_is_ours() -> None:
    ours = {
        kind: {e.name for e in plugins()[kind] if e.distribution == "ortflex"}
        for kind in ("optimizers", "losses")
    }
    assert ours["optimizers"] == set(step_programs.OPTIMIZERS)
    # Of pairs, without labels, of several tensors or of sequences, with a teacher.
    others = {
        *("cosine_embedding", "entropy", "consistency", "distillation", "feature_matching"),
        *("triplet", "mined_triplet", "contrastive", "supervised_contrastive", "margin_softmax"),
        *("ctc", "causal_lm", "ssd", "retinanet", "task_aligned"),
    }
    assert ours["losses"] - set(step_programs.LOSSES) == others
    turns = zip(*step_programs.sample(17), strict=True)
    names = (step_programs.NETWORKS, step_programs.OPTIMIZERS, step_programs.LOSSES)
    assert all(set(found) == set(known) for found, known in zip(turns, names, strict=True))


def test_relus_of_step_programs_get_exact_zeros() -> None:
    made = step_programs.draw("mlp", "sgd", "squared_error", alone=True)
    weights = models.weights_of(made.model)
    assert (made.x[1] @ weights["W1"] + weights["b1"] == 0).all()
    assert np.count_nonzero(made.x) > made.x.size / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "c", "xla", "openvino"])
@pytest.mark.parametrize("program", [*step_programs.every()][::11], ids="-".join)
def test_every_kind_of_step_program(name: str, program: tuple[str, str, str]) -> None:
    if name not in ("fused", "c"):
        pytest.importorskip({"xla": "jax"}.get(name, name))
    try:
        check_program(plugins().component("backends", name), *program)
    except Unsupported as error:
        pytest.skip(str(error))
