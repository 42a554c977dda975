"""Every plugin of ours, and of the example distribution, passes the kit of its kind.

A plugin without a line in ``conformance_references`` is checked for all but its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import (
    AdapterKit,
    AverageKit,
    BackendKit,
    ConstraintKit,
    DeviceKit,
    EditKit,
    GradientCase,
    GradientKit,
    LossKit,
    MetricKit,
    OptimizerKit,
    PenaltyKit,
    PrecisionKit,
    QuantizerKit,
    ScheduleKit,
    TransformKit,
)
from ortflex_core.testing.running import plugins
from tests.plugins import conformance_references

# What has no default, and other values than those that the references are made for.
PARAMETERS: dict[str, dict[str, Any]] = {
    "new_head": {"outputs": 3},
    "more_classes": {"add": 2},
    "cut": {"at": "h1"},
    "more_tokens": {"add": 2},
    "multi_step": {"milestones": [3, 5]},
    "sequential": {
        "schedules": [{"name": "warmup", "length": 3}, "exponential"],
        "milestones": [5],
    },
    "chained": {"schedules": ["exponential", {"name": "step", "size": 4}]},
    "sklearn": {"score": "mean_absolute_error"},
    "top_k": {"k": 2},
    "f1": {"average": "macro"},
}


OTHER_LOSSES = (
    *("cosine_embedding", "causal_lm"),  # kits of their own below
    # Rows that depend on one another, or several tensors: tests/plugins/test_losses_of_tensors.py.
    *("triplet", "mined_triplet", "contrastive", "supervised_contrastive", "margin_softmax", "ctc"),
    *("ssd", "retinanet", "task_aligned"),  # test_detection.py
    *("distillation", "feature_matching"),  # which read a teacher: test_teachers.py
    "consistency",  # of two draws of the rows: test_consistency.py
)


def ours(kind: str) -> Any:
    """A fixture parameter for every plugin of a kind that is ours or the example's."""
    names = [e.name for e in plugins()[kind] if e.distribution in ("ortflex", "ortflex-example")]
    return [pytest.param((kind, name), id=name) for name in names]


def made(wanted: tuple[str, str]) -> Any:
    kind, name = wanted
    return plugins().component(kind, {"name": name, **PARAMETERS.get(name, {})})


class Known:
    """A kit with the formula in numpy of each component that has one."""

    kind: ClassVar[str]
    with_fields: ClassVar[bool] = True
    """Whether the formula gets the fields of the component, too."""

    @pytest.fixture
    def reference(self, component: Any) -> Callable[..., Any] | None:
        found = conformance_references.ALL[self.kind].get(component.name)
        values = component.hyper_values()
        return found and (partial(found, **values) if self.with_fields and values else found)


class TestLosses(Known, LossKit):
    @pytest.fixture(params=[p for p in ours("losses") if p.id not in OTHER_LOSSES])
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestClassNumbers(LossKit):
    """softmax_cross_entropy with class indices, some of them ignored."""

    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("losses", {"name": "softmax_cross_entropy", "ignore_index": 0})

    @pytest.fixture
    def reference(self) -> Any:
        return partial(conformance_references.LOSSES["softmax_cross_entropy"], ignore_index=0)

    @pytest.fixture
    def labels(self) -> Any:
        return np.array([0, 1, 2, 2, 0, 1])


class TestPairs(Known, LossKit):
    """cosine_embedding: its margin is there for pairs alone."""

    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("losses", {"name": "cosine_embedding", "margin": 0.1})

    @pytest.fixture
    def predicted(self) -> Any:
        return np.random.default_rng(1).normal(size=(6, 2, 3))

    @pytest.fixture
    def labels(self) -> Any:
        return np.array([1.0, -1, -1, 1, -1, -1])


class TestTokens(Known, LossKit):
    """causal_lm: class indices that are shifted by one position."""

    @pytest.fixture
    def component(self) -> Any:
        return made(("losses", "causal_lm"))

    @pytest.fixture
    def predicted(self) -> Any:
        return np.random.default_rng(1).normal(size=(6, 3, 4))

    @pytest.fixture
    def labels(self) -> Any:
        return np.array([[0, 1, 2], [3, 2, -100], [0, 0, 0], [1, 3, 3], [2, 2, 1], [1, -100, 0]])


class TestTriplets(Known, LossKit):
    """triplet: a loss of three tensors, without labels."""

    @pytest.fixture
    def component(self) -> Any:
        return made(("losses", "triplet"))


class TestOwnTensors(Known, LossKit):
    """margin_softmax: a loss with trained tensors of its own."""

    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("losses", {"name": "margin_softmax", "classes": 3, "scale": 4.0})

    @pytest.fixture
    def labels(self) -> Any:
        return np.array([0, 1, 2, 2, 0, 1])


class TestComparedRows(Known, LossKit):
    """contrastive: the values of a batch depend on all of its rows."""

    independent = False

    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("losses", {"name": "contrastive", "temperature": 0.3})


class TestNoPenalty(Known, PenaltyKit):
    has_formula = False

    @pytest.fixture
    def component(self) -> Any:
        return made(("penalties", "none"))


class TestPenalties(Known, PenaltyKit):
    @pytest.fixture(params=[p for p in ours("penalties") if p.id != "none"])
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestOptimizers(Known, OptimizerKit):
    @pytest.fixture(params=ours("optimizers"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestSchedules(Known, ScheduleKit):
    @pytest.fixture(params=ours("schedules"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestEdits(Known, EditKit):
    @pytest.fixture(params=ours("edits"))
    def component(self, request: Any) -> Any:
        return made(request.param)

    @pytest.fixture
    def model(self, component: Any) -> Any:
        return conformance_references.edited_model(component)


class TestQuantizers(Known, QuantizerKit):
    @pytest.fixture(params=ours("quantizers"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestAdapters(Known, AdapterKit):
    @pytest.fixture(params=ours("adapters"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestTransforms(Known, TransformKit):
    @pytest.fixture(params=ours("transforms"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestConstraints(Known, ConstraintKit):
    @pytest.fixture(params=ours("constraints"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestAverages(Known, AverageKit):
    @pytest.fixture(params=ours("averages"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestPrecisions(PrecisionKit):
    @pytest.fixture(params=ours("precisions"))
    def component(self, request: Any) -> Any:
        return made(request.param)


CLASSES = ("accuracy", "top_k", "f1", "roc_auc")
TOKENS = ("token_accuracy", "perplexity")
BOXES = ("average_precision",)  # in test_average_precision.py


class TestMetrics(Known, MetricKit):
    @pytest.fixture(
        params=[
            p for p in ours("metrics") if p.id not in (*CLASSES, *TOKENS, *BOXES, "example_worst")
        ]
    )
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestMetricsOfClasses(Known, MetricKit):
    with_fields = False

    @pytest.fixture(params=CLASSES)
    def component(self, request: Any) -> Any:
        return made(("metrics", request.param))

    @pytest.fixture
    def expected(self) -> Any:
        return np.random.default_rng(1).integers(0, 3, 12)

    @pytest.fixture
    def predicted(self) -> Any:
        return np.random.default_rng(2).normal(size=(12, 3))

    @pytest.fixture
    def perfect(self, expected: Any) -> Any:
        return np.eye(3)[expected]


class TestMetricsOfTokens(Known, MetricKit):
    with_fields = False

    @pytest.fixture(params=TOKENS)
    def component(self, request: Any) -> Any:
        return made(("metrics", request.param))

    @pytest.fixture
    def expected(self) -> Any:
        return np.random.default_rng(1).integers(0, 3, (12, 4))

    @pytest.fixture
    def predicted(self) -> Any:
        return np.random.default_rng(2).normal(size=(12, 4, 3))

    @pytest.fixture
    def perfect(self, expected: Any) -> Any:
        return 100 * np.eye(3)[np.roll(expected, -1, axis=1)]

    @pytest.fixture
    def loss(self) -> str:
        return "causal_lm"


class TestWorst(Known, MetricKit):
    weighted = False

    @pytest.fixture
    def component(self) -> Any:
        pytest.importorskip("ortflex_example")
        return made(("metrics", "example_worst"))


class TestDevices(DeviceKit):
    @pytest.fixture(params=ours("devices"))
    def component(self, request: Any) -> Any:
        return made(request.param)


class TestBackends(BackendKit):
    @pytest.fixture(params=ours("backends"))
    def component(self, request: Any) -> Any:
        return made(request.param)


# Gradient rules: the tables of tests/plugins/test_gradient_rules.py ask far more ------------------


class TestQuickGelu(GradientKit):
    @pytest.fixture
    def component(self) -> Any:
        return pytest.importorskip("ortflex_example.quick_gelu").RULES

    @pytest.fixture
    def cases(self) -> Sequence[GradientCase]:
        return [
            GradientCase(
                op_type="QuickGelu",
                domain="com.microsoft",
                opset=1,
                inputs=[np.linspace(-2, 2, 6).reshape(2, 3)],
                attributes={} if alpha is None else {"alpha": alpha},
                reference=lambda x, a=alpha or 1.702: x / (1 + np.exp(-a * x)),
            )
            for alpha in (None, 0.5)
        ]


def smooth(*shape: int) -> Any:
    return np.random.default_rng(3).uniform(0.5, 1.5, shape)


# One operator of a family; tests/plugins/test_gradient_rules.py has all of them.
CALLS: dict[str, Any] = {
    "elementwise": ("Tanh", [smooth(3, 2)], {}, np.tanh),
    "reduction": ("ReduceMean", [smooth(3, 2)], {"axes": [1], "keepdims": 0}, lambda x: x.mean(1)),
    "shape": ("Transpose", [smooth(3, 2)], {"perm": [1, 0]}, lambda x: x.T),
    "matmul": ("MatMul", [smooth(3, 2), smooth(2, 4)], {}, lambda a, b: a @ b),
    "indexing": ("Gather", [smooth(3, 2), np.array([2, 0, 2])], {}, lambda x, k: x[k]),
    "einsum": (
        "Einsum",
        [smooth(3, 2), smooth(3, 2)],
        {"equation": "ni,ni->n"},
        lambda a, b: (a * b).sum(1),
    ),
}


class TestFamilies(GradientKit):
    test_every_rule_has_a_case = None  # type: ignore[assignment]

    @pytest.fixture(params=CALLS)
    def family(self, request: Any) -> Any:
        return request.param

    @pytest.fixture
    def component(self, family: str) -> Any:
        return plugins()["gradients"].load(family)

    @pytest.fixture
    def cases(self, family: str) -> Sequence[GradientCase]:
        op_type, inputs, attributes, reference = CALLS[family]
        return [
            GradientCase(op_type=op_type, inputs=inputs, attributes=attributes, reference=reference)
        ]


def test_built_in_families_are_entry_points() -> None:
    families = [e for e in plugins()["gradients"] if e.distribution == "ortflex"]
    assert families
    for entry in families:
        GradientKit().test_entry_point(entry.load())
