"""The kit of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import numpy as np
import pytest

from ortflex_core.compiler.autodiff.cotangents import full
from ortflex_core.compiler.autodiff.families import load_rules
from ortflex_core.compiler.autodiff.reverse import gradients
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ops import Ops, Tensor
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.kernel.errors import DataError, OrtflexError
from ortflex_core.kernel.protocols.loss import Loss
from ortflex_core.kernel.types import Array, TensorSpec, onnx_dtype, shape_text
from ortflex_core.testing import running
from ortflex_core.testing.component import FormulaKit, check_hyperparameters
from ortflex_core.testing.running import close, require
from ortflex_core.training.data.columns import spec_of

Reference = Callable[[Array, Array | None], Array]
RATE = 0.1


class LossKit(FormulaKit):
    """Override ``component`` and ``reference``; if no default labels fit, ``labels``.

    ``reference(predicted, expected)`` is the value of every sample, in numpy and float64. Without a
    reference (None), the values are not compared. A loss that needs no labels gets None.
    """

    kind: ClassVar[str] = "losses"

    @pytest.fixture
    def predicted(self) -> Array:
        """Scores of six rows, three a row."""
        return np.random.default_rng(1).normal(size=(6, 3))

    @pytest.fixture
    def labels(self, component: Loss, predicted: Array) -> Array | None:
        """The first labels that the loss accepts of: numbers, fractions, 0 or 1, −1 or 1, class numbers.

        None for a loss that needs no labels.
        """
        if not component.needs_labels:
            return None
        for candidate in _candidates(predicted.shape):
            if not _refused(component, predicted, candidate):
                return candidate
        raise AssertionError(
            f"{component.name} refuses all labels that the kit knows; override the fixture 'labels'"
        )

    def test_value(
        self, component: Loss, reference: Reference | None, predicted: Array, labels: Array | None
    ) -> None:
        """``per_sample`` is the reference's value."""
        if reference is None:
            pytest.skip("no reference was given")
        got = Run(component, predicted, labels)()["value"]
        close(got, reference(predicted, labels), 1e-9, "per_sample compared with the reference")

    def test_gradient(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """The gradient, given or derived, is the slope of the value, for every cotangent."""
        check_gradient(component, predicted, labels, seed=None)

    def test_scores_of_0_and_100(
        self, component: Loss, reference: Reference | None, predicted: Array, labels: Array | None
    ) -> None:
        """Value and gradient are finite and right at 0 and ±100, also in float32."""
        for score in (0.0, 100.0, -100.0):
            scores = np.full(predicted.shape, score)
            exact = Run(component, scores, labels)()
            if reference is not None:
                wanted = reference(scores, labels)
                close(exact["value"], wanted, 1e-6, f"values at a score of {score:g}")
            single = Run(component, scores.astype(np.float32), labels)()
            for what, array in exact.items():
                require(
                    np.isfinite(array).all(),
                    f"{what} at a score of {score:g} is {array.ravel()[0]} in float64",
                )
                # Values beyond the range of float32 are not compared.
                in_range = np.abs(array) < 1e38
                close(
                    np.where(in_range, single[what], 0),
                    np.where(in_range, array, 0),
                    1e-4,
                    f"{what} at a score of {score:g} in float32",
                )

    def test_dynamic_batch(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """One graph computes batches of any size; the values are [B, …], and rows are independent."""
        run = Run(component, predicted, labels)
        shape = run.program.outputs[0].shape
        require(
            shape is not None and shape[:1] == ("N",),
            f"per_sample returns {shape_text(shape)}, expected [N, …]: at least one value per "
            "sample, and no mean over the batch",
        )
        whole = run()
        require(
            whole["value"].ndim <= predicted.ndim,
            f"per_sample returns {shape_text(whole['value'].shape)} for predictions "
            f"{shape_text(predicted.shape)}",
        )
        for rows in (slice(0, 1), slice(2, 5)):
            part = run(rows)
            close(
                part["value"],
                whole["value"][rows],
                1e-12,
                "the value of a row depends on other rows",
            )
            close(
                part["gradient"],
                whole["gradient"][rows],
                1e-12,
                "the gradient of a row depends on other rows",
            )

    def test_float64(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        run = Run(component, predicted, labels)
        wide, narrow = run(), Run(component, predicted.astype(np.float32), labels)()
        for what in wide:
            require(wide[what].dtype == np.float64, f"{what} of float64 is {wide[what].dtype}")
            require(narrow[what].dtype == np.float32, f"{what} of float32 is {narrow[what].dtype}")
        step = 1e-10  # float32 would lose it
        moved = run(predicted=predicted + step)["value"] - wide["value"]
        change, slope = float((run.seed * moved).sum()), float(wide["gradient"].sum())
        require(
            abs(change / step - slope) < 0.1 * max(1.0, abs(slope)),
            "float64 is computed with the accuracy of float32",
        )

    def test_sample_weights(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """A weight multiplies value and gradient of its row, and a Trainer reports Σ w·l / Σ w."""
        weight = np.resize([0.0, 2.0, 1.0, 0.5, 3.0, 0.25], len(predicted))
        check_gradient(component, predicted, labels, seed=weight)
        model = running.shifted_model(predicted.shape[1:])
        trainer = running.trainer(model, loss=component, params=["shift"])
        got = trainer.evaluate(predicted.astype(np.float32), labels, weight)["loss"]
        close(got, weighted(component, predicted, labels, weight)[0], 1e-4, "Σ w·l / Σ w")

    def label_weights(self, component: Loss, labels: Array | None) -> Array | None:
        """Override it for a loss that weights its values by their labels: those weights, per value."""
        return None

    def test_counts(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """``counts`` are the mask, times the weights by which the loss multiplies its values."""
        run = Run(component, predicted, labels)
        found, weights = run(), self.label_weights(component, labels)
        wanted = found["mask"] if weights is None else found["mask"] * weights
        close(
            np.broadcast_to(found["counts"], run.shape),
            np.broadcast_to(wanted, run.shape),
            1e-6,
            "counts, by which the loss is divided, compared with the mask and label_weights of the kit",
        )

    def test_backends(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """Every backend that supports the loss computes the step of its gradient."""
        weight = np.linspace(0.5, 2.0, len(predicted))
        value, slopes = weighted(component, predicted, labels, weight)
        model = running.shifted_model(predicted.shape[1:])

        def train(backend: str) -> None:
            trainer = running.trainer(
                model, loss=component, backend=backend, params=["shift"], learning_rate=RATE
            )
            got = trainer.step((predicted.astype(np.float32), labels, weight))
            close(got, value, 1e-4, f"the loss on {backend}")
            moved = trainer.get_state()["shift"]
            close(moved, -RATE * slopes.sum(axis=0), 1e-4, f"the step on {backend}")

        running.on_every_backend(train, f"the loss {component.name}")

    def test_determinism(self, component: Loss, predicted: Array, labels: Array | None) -> None:
        """The same rows give the same bits, and the same formula the same graph."""
        first, second = (Run(component, predicted, labels) for _ in range(2))
        running.same_bits(first(), second(), component.name)
        require(
            first.program.key == second.program.key,
            f"{component.name}: two traces give different graphs",
        )

    def test_hyperparameters_are_symbols(
        self, component: Loss, predicted: Array, labels: Array | None
    ) -> None:
        """Another value of a hyperparameter needs no new graph, and it changes the result."""
        check_hyperparameters(component, lambda c: Run(c, predicted, labels).program)

    def test_wrong_labels_are_refused(self, component: Loss, predicted: Array) -> None:
        """Labels with another number of columns are an error; they are never broadcast."""
        if not component.needs_labels:
            pytest.skip("the loss needs no labels")
        trainer = running.trainer(
            running.shifted_model(predicted.shape[1:]), loss=component, params=["shift"]
        )
        x, last = predicted.astype(np.float32), predicted.shape[-1]
        for columns in (1, last + 4) if last > 1 else (last + 4,):
            with pytest.raises(DataError):
                trainer.evaluate(x, np.zeros((*predicted.shape[:-1], columns)))


class Run:
    """Value, gradient and mask of a loss as one graph of predictions, labels and a cotangent."""

    def __init__(
        self, loss: Loss, predicted: Array, labels: Array | None, seed: Array | None = None
    ) -> None:
        twin, rules = symbolic(loss), load_rules(running.plugins())
        arrays = {"predicted": predicted}
        if labels is not None:
            wanted = loss.label(_spec(predicted), spec_of("y", labels))
            arrays["expected"] = labels.astype(wanted.numpy)
        self._values = loss.hyper_values()

        def value(
            op: Ops, predicted: Tensor, expected: Tensor | None = None
        ) -> Mapping[str, Tensor]:
            return {"value": calls.per_sample(twin, op, predicted, expected)}

        alone = running.traced(value, arrays, batch="N")
        self.shape = running.run(alone, arrays, self._values)["value"].shape
        """The shape of the values."""
        drawn = running.signed(np.random.default_rng(2), self.shape)
        self.seed = drawn if seed is None else self.by_row(seed) if seed.ndim == 1 else seed
        self._arrays = {**arrays, "seed": self.seed.astype(predicted.dtype)}

        def formula(
            op: Ops, predicted: Tensor, seed: Tensor, expected: Tensor | None = None
        ) -> dict[str, Tensor]:
            made = calls.per_sample(twin, op, predicted, expected)
            pairs = calls.loss_gradient(twin, op, predicted, expected, seed)
            if pairs is None:
                own = gradients([(made, seed)], [predicted], rules)[0]
            else:
                ((_, own),) = pairs
            ones = op.constant(np.ones(1, self._arrays["seed"].dtype))
            given: dict[str, Tensor | None] = {"mask": None, "counts": None}
            if expected is not None:
                given = {"mask": twin.mask(op, expected), "counts": twin.counts(op, expected)}
            factors = {
                n: ones if f is None else op.Cast(f, to=predicted.dtype) for n, f in given.items()
            }
            return {"value": made, "gradient": full(op, own, predicted), **factors}

        self.program = running.traced(formula, self._arrays, batch="N")

    def __call__(
        self, rows: slice = slice(None), predicted: Array | None = None
    ) -> dict[str, Array]:
        """Value, gradient of Σ seed·value, mask and counts of some rows, or of other predictions."""
        given = self._arrays if predicted is None else {**self._arrays, "predicted": predicted}
        return running.run(self.program, {n: a[rows] for n, a in given.items()}, self._values)

    def by_row(self, weight: Array) -> Array:
        """One weight per row, in a shape that broadcasts with the values."""
        return weight.reshape(-1, *[1] * (len(self.shape) - 1))


def check_gradient(loss: Loss, predicted: Array, labels: Array | None, seed: Array | None) -> None:
    """Fail unless the gradient with this cotangent is the slope of Σ seed·value."""
    run = Run(loss, predicted, labels, seed)
    slopes = running.differences(
        lambda moved: run(predicted=moved)["value"], predicted, np.broadcast_to(run.seed, run.shape)
    )
    close(run()["gradient"], slopes, 1e-5, f"the gradient of {loss.name} and finite differences")


def weighted(
    loss: Loss, predicted: Array, labels: Array | None, weight: Array
) -> tuple[float, Array]:
    """Σ w·l / Σ w and its gradient, with the mask and the counts of the loss."""
    run = Run(loss, predicted, labels)
    found, w = run(), run.by_row(weight)
    denominator = np.broadcast_to(w * found["counts"], run.shape).sum()
    factors = np.broadcast_to(w * found["mask"], run.shape) / denominator
    slopes = Run(loss, predicted, labels, factors)()["gradient"]
    return float((factors * found["value"]).sum()), slopes


def _spec(predicted: Array) -> TensorSpec:
    return TensorSpec("predicted", onnx_dtype(predicted.dtype), ("N", *predicted.shape[1:]))


def _candidates(shape: tuple[int, ...]) -> Iterator[Array]:
    rng = np.random.default_rng(6)
    yield rng.normal(size=shape)
    yield rng.uniform(0.1, 0.9, shape)
    yield rng.integers(0, 2, shape).astype(np.float64)
    yield 2.0 * rng.integers(0, 2, shape) - 1
    if len(shape) > 1:
        yield rng.integers(0, shape[1], (shape[0], *shape[2:]))


def _refused(loss: Loss, predicted: Array, labels: Array) -> bool:
    try:
        spec = loss.label(_spec(predicted), spec_of("y", labels))
        loss.check_labels(_spec(predicted), labels.astype(spec.numpy))
    except OrtflexError:
        return True
    return False
