"""The kit of backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from ortflex_core import Array, Backend, DataError, Unsupported, compare
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import compositions, frozen, running, step_programs
from ortflex_core.testing.component import RuntimeKit
from ortflex_core.testing.reference import Reference
from ortflex_core.testing.running import close, require

RATE = 0.1


class BackendKit(RuntimeKit):
    """Override ``component``; skipped, with its reasons, where the backend is not available."""

    kind: ClassVar[str] = "backends"
    draws: ClassVar[int] = 1
    """The number of recipes drawn for each feature of a run."""
    programs: ClassVar[int] = 6
    """The number of (network, optimizer, loss) drawn; with the most, 17, each optimizer comes up."""

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_step(self, here: Backend, reduction: str) -> None:
        """Loss and new weights of single steps equal float64, with sample weights."""
        x, y = running.regression(rows=10)
        weight = np.linspace(0.5, 2, 10).astype(np.float32)
        model = running.network_model()
        trainer = running.trainer(model, backend=here, learning_rate=RATE, reduction=reduction)
        for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
            before = {n: a.astype(np.float64) for n, a in trainer.get_state().items()}
            denominator = weight[rows].sum() if reduction == "mean" else 1.0
            scale = weight[rows, None] / denominator

            def cost(w: Arrays, rows: slice = rows, s: Array = scale) -> Array:
                return np.asarray(s * np.square(running.network(w, x[rows]) - y[rows]))

            got = trainer.step((x[rows], y[rows], weight[rows]))
            close(got, cost(before).sum(), 1e-4, "the loss of a step")
            for name, after in trainer.get_state().items():

                def cost_of(moved: Array, n: str = name, w: Arrays = before) -> Array:
                    return cost({**w, n: moved})

                slope = running.differences(cost_of, before[name], np.ones(()))
                close(after, before[name] - RATE * slope, 1e-4, f"{name} after a step")

    def test_penalty(self, here: Backend) -> None:
        """A penalty is added once a step, to the cost and to the gradient."""
        x, y = running.regression(rows=4)
        model = running.linear_model()
        before = running.weights_of(model)
        penalty = {"name": "l2", "l2": 0.5}
        trainer = running.trainer(model, backend=here, learning_rate=RATE, penalty=penalty)
        history = trainer.fit(x, y)
        close(history["penalty"][0], 0.5 * _squares(before), 1e-4, "the penalty of a step")
        slopes = running.linear_gradients(before, x, y)
        for name, after in trainer.get_state().items():
            wanted = before[name] - RATE * (slopes[name] + before[name])
            close(after, wanted, 1e-4, f"{name} after a step with a penalty")

    def test_adam(self, here: Backend) -> None:
        """Three steps of Adam, which depend on step number and slots, equal float64."""
        x, y = running.regression(rows=10)
        model = running.linear_model()
        trainer = running.trainer(model, backend=here, optimizer="adam", learning_rate=RATE)
        trainer.fit(x, y)  # batches of 4, 4 and 2
        weights = running.weights_of(model)
        m = {n: np.zeros_like(w) for n, w in weights.items()}
        v = {n: np.zeros_like(w) for n, w in weights.items()}
        for step in range(1, 4):
            rows = slice(4 * step - 4, 4 * step)
            for name, g in running.linear_gradients(weights, x[rows], y[rows]).items():
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.999 * v[name] + 0.001 * g * g
                mean, root = m[name] / (1 - 0.9**step), np.sqrt(v[name] / (1 - 0.999**step))
                weights[name] = weights[name] - RATE * mean / (root + 1e-8)
        for name, array in trainer.get_state().items():
            close(array, weights[name], 1e-3, f"{name} after three steps of Adam")

    def test_evaluation_changes_nothing(self, here: Backend) -> None:
        """Predictions and losses equal the exported model in onnxruntime; the state does not change."""
        x, y = running.regression(rows=7)
        trainer = running.trainer(running.network_model(), backend=here, optimizer="adam")
        trainer.step((x[:4], y[:4]))
        before = {**trainer.get_state(), **trainer.engine.slots()}
        predicted = trainer.predict(x)
        loss = trainer.evaluate(x, y)["loss"]
        running.same_bits(before, {**trainer.get_state(), **trainer.engine.slots()}, "evaluation")
        wanted = _inference(trainer.export(), x)
        close(predicted, wanted, 1e-5, "predictions and those of the exported model")
        close(loss, np.square(wanted - y).mean(), 1e-5, "the loss of an evaluation")

    def test_state(self, here: Backend) -> None:
        """Loaded values are read back; copies are independent."""
        trainer = running.trainer(running.linear_model(), backend=here)
        x, y = running.regression(rows=4)
        trainer.step((x, y))
        fresh = {n: np.full_like(a, 0.25) for n, a in trainer.get_state().items()}
        trainer.engine.load(fresh)
        running.same_bits(trainer.engine.state(), fresh, "load and state")
        for array in trainer.engine.state().values():
            array[...] = 9
        running.same_bits(
            trainer.engine.state(), fresh, "the state after a caller has changed its copy"
        )
        close(trainer.predict(x), _inference(trainer.export(), x), 1e-5, "predictions after load")

    def test_slots(self, here: Backend) -> None:
        """A run continues from weights and slots as if it had never stopped."""
        x, y = running.regression(rows=12)
        options: dict[str, Any] = {"backend": here, "optimizer": "adam", "learning_rate": RATE}
        complete = running.trainer(running.linear_model(), **options)
        continued = running.trainer(running.linear_model(), **options)
        continued.step((x[8:], y[8:]))
        for step in range(3):
            if step == 2:
                continued.engine.load(complete.engine.state())
                continued.engine.load_slots(complete.engine.slots())
                continued.step((x[8:], y[8:]))
            complete.step((x[4 * step : 4 * step + 4], y[4 * step : 4 * step + 4]))
        running.same_bits(complete.get_state(), continued.get_state(), "a run that continues")

    def test_state_is_checked(self, here: Backend) -> None:
        """A name that the engine does not have, and an array of another shape, are a DataError."""
        x, y = running.regression(rows=4)
        trainer = running.trainer(running.linear_model(), backend=here, optimizer="adam")
        trainer.step((x, y))
        engine = trainer.engine
        slots = {n: a for n, a in engine.slots().items() if n != "step"}
        loads = {"load": engine.state(), "load_slots": slots, "load_buffers": engine.buffers()}
        for method, known in loads.items():
            with pytest.raises(DataError):
                getattr(engine, method)({"no such tensor": np.zeros(3, np.float32)})
            for name, array in known.items():
                with pytest.raises(DataError):
                    getattr(engine, method)({name: np.zeros((*array.shape, 2), array.dtype)})
            now = {"load": engine.state, "load_slots": engine.slots, "load_buffers": engine.buffers}
            kept = {n: a for n, a in now[method]().items() if n in known}
            running.same_bits(known, kept, f"a refused {method}")

    def test_determinism(self, here: Backend) -> None:
        """The same training gives bit-identical results."""
        x, y = running.regression(rows=10)
        states = []
        for _ in range(2):
            trainer = running.trainer(
                running.network_model(), backend=here, optimizer="adam", epochs=2, shuffle=True
            )
            trainer.fit(x, y)
            states.append(trainer.get_state())
        running.same_bits(states[0], states[1], "the same training twice")

    @pytest.mark.parametrize("form", frozen.FORMS)
    def test_frozen(self, here: Backend, form: str) -> None:
        """Gradients through frozen square matrices and kernels of 2 to 64 equal float64.

        A step reads them plainly and transposed, and one form shares them between two products.
        """
        try:
            frozen.check_every_size(here, form)
        except Unsupported as error:
            pytest.skip(str(error))

    def test_what_it_refuses(self, here: Backend) -> None:
        """An operator without a gradient is refused with a reason, not trained without it."""
        x, y = running.regression(rows=4)
        model = running.network_model("Softplus")
        model.graph.node[2].domain, model.graph.node[2].op_type = "nobody.knows", "Mystery"
        model.opset_import.append(onnx.helper.make_opsetid("nobody.knows", 1))
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info("h1", onnx.TensorProto.FLOAT, ["N", 4])
        )
        with pytest.raises(Unsupported, match="Mystery"):
            running.trainer(model, backend=here).step((x, y))

    def test_graphs_and_counters(self, here: Backend) -> None:
        """Its graphs can be read by onnx, its counters are numbers, and closing twice does no harm."""
        x, y = running.regression(rows=4)
        trainer = running.trainer(running.linear_model(), backend=here)
        trainer.step((x, y))
        graphs = trainer.save_onnx_graph()
        require(graphs, "programs() is empty")
        for name, graph in graphs.items():
            require(isinstance(graph, onnx.ModelProto) and graph.graph.node, f"{name} is empty")
        counters = trainer.engine.counters()
        good = all(type(v) is int and v >= 0 for v in counters.values())
        require(good, f"counters() gives {counters}")
        trainer.engine.close()
        trainer.engine.close()

    @pytest.mark.parametrize("feature", list(compositions.FEATURES))
    def test_composition(self, here: Backend, feature: str) -> None:
        """Random combinations of the features of a run equal float64, or are refused.

        Compared are, for every step separately, loss, gradients, weights, slots, averages and running
        statistics; for whole trainings, weights, predictions, losses and the export. ``draws`` is the
        number of combinations.
        """
        for seed in range(self.draws):
            try:
                check_composition(here, compositions.draw(feature, seed))
            except Unsupported:  # the backend may not support this feature
                try:
                    check_composition(here, compositions.draw(feature, seed, alone=True))
                except Unsupported as error:
                    pytest.skip(str(error))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Request the number ``programs`` of step programs."""
        if "program" in metafunc.fixturenames:
            drawn = step_programs.sample(17)[: self.programs]
            metafunc.parametrize("program", drawn, ids="-".join)

    def test_step_program(self, here: Backend, program: tuple[str, str, str]) -> None:
        """Steps of common kinds of networks, with every optimizer and loss, equal float64.

        The networks have Relus with inputs of exactly 0. ``ortflex_core.testing.step_programs.every()``
        has all combinations, and :func:`check_program` checks one.
        """
        try:
            check_program(here, *program)
        except Unsupported as error:
            pytest.skip(str(error))


def check_program(backend: Backend, network: str, optimizer: str, loss: str) -> None:
    """Compare the steps of a network with an optimizer and a loss with float64.

    Unsupported: the backend refuses them, without further features, too.
    """
    try:
        check_composition(backend, step_programs.draw(network, optimizer, loss))
    except Unsupported:
        check_composition(backend, step_programs.draw(network, optimizer, loss, alone=True))


def check_composition(backend: Backend, made: compositions.Composition) -> None:
    """Compare single steps with float64, then a whole training."""
    try:
        _check_composition(backend, made)
    except (AssertionError, Unsupported):
        raise
    except Exception as error:
        raise AssertionError(f"{made.describe()}: {error!r}") from error


def _check_composition(backend: Backend, made: compositions.Composition) -> None:
    options = {"loss": "squared_error", **made.options}
    data = (made.x, made.y, made.weight)
    trainer = running.trainer(made.model, backend=backend, **options)
    found = compare(trainer, *data, steps=3, backends=[backend.name])
    if found.notes:  # else the backend would be compared with itself
        raise Unsupported("; ".join(found.notes))
    require(found.agree, f"{made.describe()}: {'; '.join(map(str, found.differences))}")
    history = trainer.fit(*data)
    exact = running.trainer(made.model, backend=Reference(), **options)
    wanted = exact.fit(*data)
    where = f"after a run with {made.describe()}"
    close(history.losses, wanted.losses, 1e-3, f"losses {where}")
    for name, array in exact.get_state(buffers=True).items():
        close(trainer.get_state(buffers=True)[name], array, 2e-3, f"{name} {where}")
    for name, array in _outputs(exact.predict(made.x)).items():
        close(
            _outputs(trainer.predict(made.x))[name], array, 2e-3, f"the prediction {name} {where}"
        )
        exported = _inference(trainer.export(inference=True), made.x, name)
        close(exported, array, 2e-3, f"{name} of the exported model {where}")
    for name, value in exact.evaluate(*data).items():
        close(trainer.evaluate(*data)[name], value, 2e-3, f"the evaluation's {name} {where}")


def _outputs(found: Any) -> Arrays:
    return found if isinstance(found, Mapping) else {"Y": found}


def _squares(weights: Arrays) -> float:
    return float(sum(np.square(w).sum() for w in weights.values()))


def _inference(model: onnx.ModelProto, x: Array, output: str = "Y") -> Array:
    return np.asarray(cpu_session(model).run([output], {"X": x})[0])
