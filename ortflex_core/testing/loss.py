"""The kit of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    OrtflexError,
    Tensor,
    TensorSpec,
    Trainer,
    full,
    load_rules,
    onnx_dtype,
    shape_text,
)
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.operators.reverse_mode import gradients_of_some
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism, check_hyperparameters
from ortflex_core.testing.running import close, require
from ortflex_core.training.data.columns import spec_of

Predicted: TypeAlias = Array | Arrays
"""What a loss reads: an array, or several by its names for them."""
Labels: TypeAlias = Array | None
Reference = Callable[[Any, Labels], Array]
RATE = 0.1
_ALONE = "predicted"
"""The name of the tensor of a loss that reads one."""
_EXPECTED, _SEED = "/expected", "/seed"


class LossKit(ReferenceKit):
    """Override ``component`` and ``reference``; if no default fits, ``predicted`` and ``labels``.

    ``reference(predicted, expected)`` is the value of every sample, in numpy and float64. Without a
    reference (None), the values are not compared. A loss that needs no labels gets None. A loss of
    several ``tensors`` gets them by name, with its columns and its own trained tensors.
    """

    kind: ClassVar[str] = "losses"
    independent: ClassVar[bool] = True
    """Whether the value of a row depends on this row alone; not if rows are compared with one another."""

    @pytest.fixture
    def predicted(self, component: Loss) -> Predicted:
        """Scores of six rows, three a row; for each of the loss's ``tensors``, without its ``columns``."""
        if not component.tensors:
            return np.random.default_rng(1).normal(size=(6, 3))
        names = [n for n in component.tensors if n not in component.columns]
        return {n: np.random.default_rng(k).normal(size=(6, 3)) for k, n in enumerate(names, 1)}

    @pytest.fixture
    def labels(self, component: Loss, predicted: Predicted) -> Labels:
        """The first labels that the loss accepts: real numbers, values in [0, 1], 0 or 1, ±1, or classes.

        None for a loss that needs no labels.
        """
        if not component.needs_labels:
            return None
        for candidate in _candidates(_first(predicted).shape):
            if not _refused(component, predicted, candidate):
                return candidate
        raise AssertionError(
            f"{component.name} refuses all labels that the kit knows; override the fixture 'labels'"
        )

    def test_value(
        self, component: Loss, compared: Reference, predicted: Predicted, labels: Labels
    ) -> None:
        """``per_sample`` is the reference's value."""
        run = Run(component, predicted, labels)
        wanted = compared(run.read, labels)
        close(run()["value"], wanted, 1e-9, "per_sample compared with the reference")

    def test_gradient(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
        """The gradients, given or derived, are the slopes of the value, for every cotangent."""
        check_gradient(component, predicted, labels, seed=None)

    def test_scores_of_0_and_100(
        self, component: Loss, reference: Reference | None, predicted: Predicted, labels: Labels
    ) -> None:
        """Value and gradient are finite and right at 0 and ±100, also in float32."""
        for score in (0.0, 100.0, -100.0):
            scores = _each(predicted, partial(np.full_like, fill_value=score))
            run = Run(component, scores, labels)
            exact = run()
            if reference is not None:
                wanted = reference(run.read, labels)
                close(exact["value"], wanted, 1e-6, f"values at a score of {score:g}")
            single = Run(component, _single(scores), labels)()
            for what, array in exact.items():
                where = f"{what} at a score of {score:g}"
                require(np.isfinite(array).all(), f"{where} is {array.ravel()[0]} in float64")
                # Values beyond the range of float32 are not compared.
                ours, theirs = (np.where(np.abs(array) < 1e38, a, 0) for a in (single[what], array))
                close(ours, theirs, 1e-4, f"{where} in float32")

    def test_dynamic_batch(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
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
            whole["value"].ndim <= max(a.ndim for a in _named(predicted).values()),
            f"per_sample returns {shape_text(whole['value'].shape)} for predictions "
            f"{shape_text(_first(predicted).shape)}",
        )
        for rows in (slice(0, 1), slice(2, 5)):
            part = run(rows)
            shapes = {n: a.shape for n, a in run.read_rows(rows).items()}
            for name in run.moving:
                require(
                    part[f"gradient of {name}"].shape == shapes[name],
                    f"the gradient of {name} has another shape in a batch of other size",
                )
            if not self.independent:
                continue
            gradients = [f"gradient of {n}" for n in _named(predicted) if n in run.moving]
            for what in ("value", *gradients):
                text = f"the {what.split()[0]} of a row depends on other rows"
                close(part[what], whole[what][rows], 1e-12, text)

    def test_float64(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        run = Run(component, predicted, labels)
        wide, narrow = run(), Run(component, _single(predicted), labels)()
        for what in wide:
            require(wide[what].dtype == np.float64, f"{what} of float64 is {wide[what].dtype}")
            require(narrow[what].dtype == np.float32, f"{what} of float32 is {narrow[what].dtype}")
        step = 1e-10  # float32 would lose it
        names = [n for n in _named(predicted) if n in run.moving]
        moved = run(moved={n: _named(predicted)[n] + step for n in names})["value"] - wide["value"]
        change = float((run.seed * moved).sum())
        slope = float(sum(wide[f"gradient of {n}"].sum() for n in names))
        require(
            abs(change / step - slope) < 0.1 * max(1.0, abs(slope)),
            "float64 is computed with the accuracy of float32",
        )

    def test_sample_weights(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
        """A weight multiplies value and gradient of its row, and a Trainer reports Σ w·l / Σ w."""
        weight = np.resize([0.0, 2.0, 1.0, 0.5, 3.0, 0.25], len(_first(predicted)))
        check_gradient(component, predicted, labels, seed=weight)
        trainer = _trainer(component, predicted)
        got = trainer.evaluate(_inputs(component, predicted), labels, weight)["loss"]
        close(got, weighted(component, predicted, labels, weight)[0], 1e-4, "Σ w·l / Σ w")

    def label_weights(self, component: Loss, labels: Labels) -> Array | None:
        """Override it for a loss that weights its values by their labels: those weights, per value."""
        return None

    def test_counts(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
        """``counts`` are the mask, times the weights by which the loss multiplies its values."""
        run = Run(component, predicted, labels)
        found, weights = run(), self.label_weights(component, labels)
        wanted = found["mask"] if weights is None else found["mask"] * weights
        counts, wanted = (np.broadcast_to(a, run.shape) for a in (found["counts"], wanted))
        what = "counts, by which the loss is divided, compared with the mask and label_weights"
        close(counts, wanted, 1e-6, f"{what} of the kit")

    def test_backends(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
        """Every backend that supports the loss computes the step of its gradients."""
        weight = np.linspace(0.5, 2.0, len(_first(predicted)))
        value, slopes = weighted(component, predicted, labels, weight)
        own = own_tensors(component, predicted)

        def train(backend: str) -> None:
            trainer = _trainer(component, predicted, backend=backend, learning_rate=RATE)
            got = trainer.step((_inputs(component, predicted), labels, weight))
            close(got, value, 1e-4, f"the loss on {backend}")
            after = trainer.get_state()
            for name, slope in slopes.items():
                if name in own:
                    moved = after[f"{component.name}.{name}"] - own[name]
                else:
                    moved = after[f"shift/{name}"]
                    slope = slope.sum(axis=0)
                close(moved, -RATE * slope, 1e-4, f"the step of {name} on {backend}")

        running.on_every_backend(train, f"the loss {component.name}")

    def test_determinism(self, component: Loss, predicted: Predicted, labels: Labels) -> None:
        """The same rows give bit-identical results, and the same formula the same graph."""
        make = partial(Run, component, predicted, labels)
        check_determinism(component, lambda: make()(), lambda: make().program)

    def test_hyperparameters_are_symbols(
        self, component: Loss, predicted: Predicted, labels: Labels
    ) -> None:
        """Another value of a hyperparameter needs no new graph, and it changes the result."""
        check_hyperparameters(component, lambda c: Run(c, predicted, labels).program)

    def test_wrong_labels_are_refused(self, component: Loss, predicted: Predicted) -> None:
        """Labels with another number of columns are an error; they are never broadcast."""
        if not component.needs_labels:
            pytest.skip("the loss needs no labels")
        trainer = _trainer(component, predicted)
        shape = _first(predicted).shape
        for columns in (1, shape[-1] + 4) if shape[-1] > 1 else (shape[-1] + 4,):
            with pytest.raises(DataError):
                trainer.evaluate(_inputs(component, predicted), np.zeros((*shape[:-1], columns)))


class Run:
    """Value, gradients and mask of a loss as one graph of its tensors, labels and a cotangent."""

    def __init__(
        self, loss: Loss, predicted: Predicted, labels: Labels, seed: Array | None = None
    ) -> None:
        twin, rules = symbolic(loss), load_rules(running.plugins())
        tensors = _named(predicted)
        dtype = _first(predicted).dtype
        specs = {name: _spec(name, array) for name, array in tensors.items()}
        self.own = own_tensors(loss, predicted)
        self._several = bool(loss.tensors)
        arrays = {**tensors, **self.own}
        self.moving = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        """The tensors that have a gradient."""
        self._names = list(arrays)
        if labels is not None:
            wanted = loss.label(_seen(loss, specs), spec_of("y", labels))
            arrays[_EXPECTED] = labels.astype(wanted.numpy)
        self._values = loss.hyper_values()

        def read(given: Mapping[str, Tensor]) -> tuple[Tensor | dict[str, Tensor], Tensor | None]:
            seen = {name: given[name] for name in self._names}
            return _seen(loss, seen), given.get(_EXPECTED)

        def value(op: Ops, **given: Tensor) -> Mapping[str, Tensor]:
            return {"value": calls.per_sample(twin, op, *read(given))}

        alone = running.traced(value, arrays, batch="N", whole=self.own)
        self.shape = running.run(alone, arrays, self._values)["value"].shape
        """The shape of the values."""
        drawn = running.signed(np.random.default_rng(2), self.shape)
        self.seed = drawn if seed is None else self.by_row(seed) if seed.ndim == 1 else seed
        self._arrays = {**arrays, _SEED: self.seed.astype(dtype)}

        def formula(op: Ops, **given: Tensor) -> dict[str, Tensor]:
            seen, expected = read(given)
            made = calls.per_sample(twin, op, seen, expected)
            pairs = calls.loss_gradient(twin, op, seen, expected, given[_SEED])
            if pairs is None:
                inputs = [given[name] for name in self.moving]
                pairs = gradients_of_some([(made, given[_SEED])], inputs, rules)
            found = {id(tensor): gradient for tensor, gradient in pairs}
            ones = op.constant(np.ones(1, dtype))
            none = op.constant(np.zeros((), dtype))
            factors: dict[str, Tensor | None] = {"mask": None, "counts": None}
            if expected is not None:
                factors = {"mask": twin.mask(op, expected), "counts": twin.counts(op, expected)}
            return {
                "value": made,
                **{
                    f"gradient of {name}": full(op, found.get(id(given[name]), none), given[name])
                    for name in self.moving
                },
                **{n: ones if f is None else op.Cast(f, to=made.dtype) for n, f in factors.items()},
            }

        self.program = running.traced(formula, self._arrays, batch="N", whole=self.own)

    @property
    def read(self) -> Any:
        """What the formula reads: an array, or arrays by name, with columns and own tensors."""
        return self.read_rows(slice(None)) if self._several else self._arrays[_ALONE]

    def read_rows(self, rows: slice) -> dict[str, Array]:
        """Rows of what the formula reads, by name; own tensors have no rows."""
        return {n: a for n, a in self._cut(rows, {}).items() if n in self._names}

    def _cut(self, rows: slice, moved: Arrays) -> dict[str, Array]:
        arrays = {**self._arrays, **moved}
        return {n: a if n in self.own else a[rows] for n, a in arrays.items()}

    def __call__(self, rows: slice = slice(None), moved: Arrays | None = None) -> dict[str, Array]:
        """Value, gradients of Σ seed·value, mask and counts of some rows, or of other tensors."""
        return running.run(self.program, self._cut(rows, moved or {}), self._values)

    def by_row(self, weight: Array) -> Array:
        """One weight per row, in a shape that broadcasts with the values."""
        return weight.reshape(-1, *[1] * (len(self.shape) - 1))


def own_tensors(loss: Loss, predicted: Predicted) -> dict[str, Array]:
    """The loss's own trained tensors, in the type of the predictions."""
    if not loss.tensors:
        return {}
    specs = {name: _spec(name, array) for name, array in _named(predicted).items()}
    given = loss.parameters(specs, np.random.default_rng(7))
    return {name: np.asarray(array, _first(predicted).dtype) for name, array in given.items()}


def check_gradient(loss: Loss, predicted: Predicted, labels: Labels, seed: Array | None) -> None:
    """Fail unless the gradients with this cotangent are the slopes of Σ seed·value."""
    run = Run(loss, predicted, labels, seed)
    found = run()
    for name in run.moving:
        slopes = running.differences(
            lambda array, name=name: run(moved={name: array})["value"],  # type: ignore[misc]
            run.read_rows(slice(None))[name],
            np.broadcast_to(run.seed, run.shape),
        )
        which = "" if name == _ALONE else f" by {name}"
        what = f"the gradient of {loss.name}{which} and finite differences"
        close(found[f"gradient of {name}"], slopes, 1e-5, what)


def weighted(
    loss: Loss, predicted: Predicted, labels: Labels, weight: Array
) -> tuple[float, dict[str, Array]]:
    """Σ w·l / Σ w and its gradients by name, with the mask and the counts of the loss."""
    run = Run(loss, predicted, labels)
    found, w = run(), run.by_row(weight)
    denominator = np.broadcast_to(w * found["counts"], run.shape).sum()
    factors = np.broadcast_to(w * found["mask"], run.shape) / denominator
    slopes = Run(loss, predicted, labels, factors)()
    return float((factors * found["value"]).sum()), {
        name: slopes[f"gradient of {name}"] for name in run.moving
    }


def _named(predicted: Predicted) -> Arrays:
    return predicted if isinstance(predicted, Mapping) else {_ALONE: predicted}


def _first(predicted: Predicted) -> Array:
    return next(iter(_named(predicted).values()))


def _seen(loss: Loss, named: Mapping[str, Any]) -> Any:
    """What the methods of a loss get: all by name, or the only one."""
    return dict(named) if loss.tensors else named[_ALONE]


def _each(predicted: Predicted, change: Callable[[Array], Array]) -> Predicted:
    """Float arrays, changed; columns of integers stay."""
    if not isinstance(predicted, Mapping):
        return change(predicted)
    return {n: change(a) if a.dtype.kind == "f" else a for n, a in predicted.items()}


def _single(predicted: Predicted) -> Predicted:
    return _each(predicted, lambda array: array.astype(np.float32))


def _inputs(loss: Loss, predicted: Predicted) -> Any:
    """X for the model of :func:`_trainer`."""
    given = _named(_single(predicted))
    return {n if n in loss.columns else f"in/{n}": array for n, array in given.items()}


def _trainer(loss: Loss, predicted: Predicted, **options: Any) -> Trainer:
    """A trainer of a shift of each tensor, and of the loss's own tensors."""
    tensors = {n: a for n, a in _named(predicted).items() if n not in loss.columns}
    model = running.shifted_outputs({n: a.shape[1:] for n, a in tensors.items()})
    given = {"params": [f"shift/{n}" for n in tensors], "batch_size": len(_first(predicted))}
    trainer = running.trainer(model, loss=loss, **given, **options)
    if own := own_tensors(loss, predicted):
        trainer.set_state({f"{loss.name}.{n}": a.astype(np.float32) for n, a in own.items()})
    return trainer


def _spec(name: str, predicted: Array) -> TensorSpec:
    return TensorSpec(name, onnx_dtype(predicted.dtype), ("N", *predicted.shape[1:]))


def _candidates(shape: tuple[int, ...]) -> Iterator[Array]:
    rng = np.random.default_rng(6)
    yield rng.normal(size=shape)
    yield rng.uniform(0.1, 0.9, shape)
    yield rng.integers(0, 2, shape).astype(np.float64)
    yield 2.0 * rng.integers(0, 2, shape) - 1
    if len(shape) > 1:
        yield rng.integers(0, shape[1], (shape[0], *shape[2:]))


def _refused(loss: Loss, predicted: Predicted, labels: Array) -> bool:
    seen = _seen(loss, {n: _spec(n, a) for n, a in _named(predicted).items()})
    try:
        spec = loss.label(seen, spec_of("y", labels))
        loss.check_labels(seen, labels.astype(spec.numpy))
    except OrtflexError:
        return True
    return False
