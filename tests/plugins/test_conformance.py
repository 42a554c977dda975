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
from tests.plugins.kit_fixtures import component_of, gives, normals

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
    # Rows that depend on one another, or several tensors: tests/plugins/test_losses_table.py.
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


def each(kind: str, *without: str, only: Sequence[str] = ()) -> Any:
    """The fixture ``component``: every plugin of ours of a kind, but for some, or some alone."""
    found = [p for p in ours(kind) if p.id not in without and (not only or p.id in only)]

    @pytest.fixture(params=found)
    def component(self: Any, request: Any) -> Any:
        return made(request.param)

    return component


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
    component = each("losses", *OTHER_LOSSES)


class TestClassNumbers(LossKit):
    """softmax_cross_entropy with class indices, some of them ignored."""

    component = component_of("losses", "softmax_cross_entropy", ignore_index=0)
    reference = gives(
        partial(conformance_references.LOSSES["softmax_cross_entropy"], ignore_index=0)
    )
    labels = gives(np.array([0, 1, 2, 2, 0, 1]))


class TestPairs(Known, LossKit):
    """cosine_embedding: its margin is there for pairs alone."""

    component = component_of("losses", "cosine_embedding", margin=0.1)
    predicted = normals(1, 6, 2, 3)
    labels = gives(np.array([1.0, -1, -1, 1, -1, -1]))


class TestTokens(Known, LossKit):
    """causal_lm: class indices that are shifted by one position."""

    component = component_of("losses", "causal_lm")
    predicted = normals(1, 6, 3, 4)
    labels = gives(
        np.array([[0, 1, 2], [3, 2, -100], [0, 0, 0], [1, 3, 3], [2, 2, 1], [1, -100, 0]])
    )


class TestTriplets(Known, LossKit):
    """triplet: a loss of three tensors, without labels."""

    component = component_of("losses", "triplet")


class TestOwnTensors(Known, LossKit):
    """margin_softmax: a loss with trained tensors of its own."""

    component = component_of("losses", "margin_softmax", classes=3, scale=4.0)
    labels = gives(np.array([0, 1, 2, 2, 0, 1]))


class TestComparedRows(Known, LossKit):
    """contrastive: the values of a batch depend on all of its rows."""

    independent = False
    component = component_of("losses", "contrastive", temperature=0.3)


class TestNoPenalty(Known, PenaltyKit):
    has_formula = False
    component = component_of("penalties", "none")


class TestPenalties(Known, PenaltyKit):
    component = each("penalties", "none")


class TestOptimizers(Known, OptimizerKit):
    component = each("optimizers")


class TestSchedules(Known, ScheduleKit):
    component = each("schedules")


class TestEdits(Known, EditKit):
    component = each("edits")

    @pytest.fixture
    def model(self, component: Any) -> Any:
        return conformance_references.edited_model(component)


class TestQuantizers(Known, QuantizerKit):
    component = each("quantizers")


class TestAdapters(Known, AdapterKit):
    component = each("adapters")


class TestTransforms(Known, TransformKit):
    component = each("transforms")


class TestConstraints(Known, ConstraintKit):
    component = each("constraints")


class TestAverages(Known, AverageKit):
    component = each("averages")


class TestPrecisions(PrecisionKit):
    component = each("precisions")


CLASSES = ("accuracy", "top_k", "f1", "roc_auc")
TOKENS = ("token_accuracy", "perplexity")
BOXES = ("average_precision",)  # in test_detection.py


class TestMetrics(Known, MetricKit):
    component = each("metrics", *CLASSES, *TOKENS, *BOXES, "example_worst")


class TestMetricsOfClasses(Known, MetricKit):
    with_fields = False
    component = each("metrics", only=CLASSES)
    expected = gives(np.random.default_rng(1).integers(0, 3, 12))
    predicted = normals(2, 12, 3)

    @pytest.fixture
    def perfect(self, expected: Any) -> Any:
        return np.eye(3)[expected]


class TestMetricsOfTokens(Known, MetricKit):
    with_fields = False
    component = each("metrics", only=TOKENS)
    expected = gives(np.random.default_rng(1).integers(0, 3, (12, 4)))
    predicted = normals(2, 12, 4, 3)

    @pytest.fixture
    def perfect(self, expected: Any) -> Any:
        return 100 * np.eye(3)[np.roll(expected, -1, axis=1)]

    loss = gives("causal_lm")


class TestWorst(Known, MetricKit):
    weighted = False
    component = component_of("metrics", "example_worst", "ortflex_example")


class TestDevices(DeviceKit):
    component = each("devices")


class TestBackends(BackendKit):
    component = each("backends")


# Gradient rules: tests/plugins/test_gradient_rules.py asks far more ------------------


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


def test_built_in_families_are_entry_points() -> None:
    families = [e for e in plugins()["gradients"] if e.distribution == "ortflex"]
    assert families
    for entry in families:
        GradientKit().test_entry_point(entry.load())
