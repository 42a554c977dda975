"""The schedule ``optimal``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import ConfigError, Progress, Schedule, ScheduleContext, number, setting


@attrs.frozen(kw_only=True)
class Optimal(Schedule):
    """Bottou's rate for a strongly convex problem: ``rate(t) = 1 / (alpha·(t0 + t))``.

    The base rate is not used, and ``t`` is in the unit ``by``; scikit-learn's SGDRegressor and
    SGDClassifier count rows. If ``t0`` is None, it is computed when the run starts, so that the
    first step is as large as typical weights, ``τ = alpha^(−¼)``:
    ``t0 = 1 / (alpha·τ / max(1, slope(−τ, 1)))``, where ``slope(s, y)`` is the derivative of the loss by
    the score.

    Raises:
        ValueError: ``alpha`` or ``t0`` is not positive.
        ConfigError: :meth:`rate` was called before :meth:`bind`, and ``t0`` is None.

    >>> Optimal(alpha=0.01, t0=100.0).rate(0.1, Progress(step=0))
    1.0

    Source: L. Bottou, "Stochastic gradient descent tricks" (2012); sklearn.linear_model's
    ``learning_rate="optimal"``.
    """

    name: ClassVar[str] = "optimal"

    alpha: float = setting(
        default=1e-4, validator=number(gt=0), help="strength of the penalty, ½ alpha·Σw²"
    )
    t0: float | None = setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0)),
        help="the start of the time; None: computed from the loss",
    )

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule with its ``t0``, from the slope of the loss at the score −τ, label 1."""
        if self.t0 is not None:
            return self
        typical = math.sqrt(1 / math.sqrt(self.alpha))
        first_rate = typical / max(1.0, float(context.slope(-typical, 1.0)))
        return attrs.evolve(self, t0=1 / (first_rate * self.alpha))

    def rate(self, base: float, progress: Progress) -> float:
        """``1 / (alpha·(t0 + t))``."""
        if self.t0 is None:
            raise ConfigError(
                "optimal: t0 depends on the loss and is not known yet. A Trainer computes it "
                "when the run starts; elsewhere call bind(ScheduleContext(slope=…)) first, "
                "or pass t0="
            )
        return 1 / (self.alpha * (self.t0 + self.time(progress)))
