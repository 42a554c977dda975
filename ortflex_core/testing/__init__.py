"""Conformance kits: the requirements on each kind of plugin, as tests to inherit.

For example::

    from ortflex_core.testing import LossKit

    class TestMyLoss(LossKit):
        @pytest.fixture
        def component(self):
            return MyLoss(scale=0.5)

        @pytest.fixture
        def reference(self):  # the formula a second time, in numpy
            return lambda predicted, expected: np.log1p(((predicted - expected) / 0.5) ** 2)

Override two fixtures, ``component`` and its reference; the other fixtures of a kit (the data,
say) have defaults. Each check is a separate test, named after its property. ``ortflex new-plugin``
writes a package with such a test. Needs pytest (extra ``testing``).
"""

from __future__ import annotations

try:
    import pytest  # noqa: F401  # imported first, for the message
except ImportError as error:
    raise ImportError(
        "ortflex_core.testing needs pytest: pip install 'ortflex[testing]'"
    ) from error

from ortflex_core.testing.adapter import AdapterKit
from ortflex_core.testing.average import AverageKit
from ortflex_core.testing.backend import BackendKit
from ortflex_core.testing.callback import CallbackKit
from ortflex_core.testing.constraint import ConstraintKit
from ortflex_core.testing.decomposition import DecompositionCase, DecompositionKit
from ortflex_core.testing.device import DeviceKit
from ortflex_core.testing.emulated import Emulated
from ortflex_core.testing.gradient import GradientCase, GradientKit
from ortflex_core.testing.loss import LossKit
from ortflex_core.testing.metric import MetricKit
from ortflex_core.testing.optimizer import OptimizerKit
from ortflex_core.testing.penalty import PenaltyKit
from ortflex_core.testing.precision import PrecisionKit
from ortflex_core.testing.process_group import ProcessGroupKit
from ortflex_core.testing.schedule import ScheduleKit
from ortflex_core.testing.source import DataSourceKit
from ortflex_core.testing.threads import ThreadGroup, run_ranks
from ortflex_core.testing.transform import TransformKit

__all__ = [
    "AdapterKit",
    "AverageKit",
    "BackendKit",
    "CallbackKit",
    "ConstraintKit",
    "DataSourceKit",
    "DecompositionCase",
    "DecompositionKit",
    "DeviceKit",
    "Emulated",
    "GradientCase",
    "GradientKit",
    "LossKit",
    "MetricKit",
    "OptimizerKit",
    "PenaltyKit",
    "PrecisionKit",
    "ProcessGroupKit",
    "ScheduleKit",
    "ThreadGroup",
    "TransformKit",
    "run_ranks",
]
