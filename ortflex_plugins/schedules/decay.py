"""Schedules that fall, and the constant one.

``constant``, ``exponential``, ``step``, ``multi_step``, ``polynomial``, ``invscaling``, ``optimal``.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs

from ortflex_core import (
    ConfigError,
    Progress,
    Schedule,
    ScheduleContext,
    Unit,
    number,
    one_of,
    setting,
)


def length_field(what: str) -> Any:
    """A positive length in the unit of the schedule, or None for the whole run."""
    return setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0)),
        help=f"{what}; by default, the whole run",
    )


def known_length(schedule: Schedule, name: str, progress: Progress) -> float:
    """The length in the field ``name`` of a schedule, or the length of the run.

    Raises:
        ConfigError: the field is None and the length of the run is unknown.
    """
    given: float | None = getattr(schedule, name)
    length = schedule.duration(progress) if given is None else given
    if length is None:
        raise ConfigError(
            f"{schedule.name}: {name}=None is the length of the run in units of {schedule.by!r}, "
            f"which is not known for this data source; set {name}="
        )
    return length


@attrs.frozen(kw_only=True)
class Constant(Schedule):
    """A constant learning rate: ``rate(t) = base``.

    >>> Constant().rate(0.1, Progress(step=1000))
    0.1
    """

    name: ClassVar[str] = "constant"

    # With "epoch", the loop computes the rate only once per epoch.
    by: Unit = setting(
        default="epoch",
        validator=one_of("step", "epoch", "rows"),
        help="the unit of time: completed steps, epochs or rows",
    )

    def rate(self, base: float, progress: Progress) -> float:
        """The base rate."""
        return base


@attrs.frozen(kw_only=True)
class Exponential(Schedule):
    """Exponential decay: ``rate(t) = base·gammaᵗ``, with ``t`` in the unit ``by``.

    Raises:
        ValueError: ``gamma`` is not positive.

    >>> Exponential(by="epoch", gamma=0.5).rate(0.1, Progress(epoch=1))
    0.05

    Source: torch.optim.lr_scheduler.ExponentialLR, which corresponds to ``by="epoch"``.
    """

    name: ClassVar[str] = "exponential"

    gamma: float = setting(default=0.99, validator=number(gt=0), help="the factor per unit of time")

    def rate(self, base: float, progress: Progress) -> float:
        """``base·gammaᵗ``."""
        return float(base * float(self.gamma) ** self.time(progress))


@attrs.frozen(kw_only=True)
class StepDecay(Schedule):
    """Multiplies the learning rate by a factor at equal intervals: ``rate(t) = base·gamma^⌊t / size⌋``.

    ``t`` and ``size`` are in the unit ``by``.

    Raises:
        ValueError: ``size`` or ``gamma`` is not positive.

    >>> StepDecay(by="epoch", size=10).rate(0.5, Progress(epoch=10))
    0.05

    Source: torch.optim.lr_scheduler.StepLR, which corresponds to ``by="epoch"``.
    """

    name: ClassVar[str] = "step"

    size: float = setting(default=10, validator=number(gt=0), help="the length of an interval")
    gamma: float = setting(
        default=0.1,
        validator=number(gt=0),
        help="the factor by which the learning rate is multiplied",
    )

    def rate(self, base: float, progress: Progress) -> float:
        """``base·gamma^⌊t / size⌋``."""
        return float(base * float(self.gamma) ** (self.time(progress) // self.size))


@attrs.frozen(kw_only=True)
class MultiStep(Schedule):
    """Multiplies the learning rate by a factor at each milestone: ``rate(t) = base·gammaⁿ``.

    n is the number of milestones up to and including time ``t``. ``t`` and the milestones are in the
    unit ``by``.

    Raises:
        ValueError: a milestone is negative, or ``gamma`` is not positive.

    >>> MultiStep(milestones=(3, 5), gamma=0.5).rate(0.8, Progress(step=4))
    0.4

    Source: torch.optim.lr_scheduler.MultiStepLR, which corresponds to ``by="epoch"``.
    """

    name: ClassVar[str] = "multi_step"

    milestones: tuple[int, ...] = setting(
        converter=tuple,
        validator=attrs.validators.deep_iterable(number(ge=0)),
        help="the times at which the learning rate is multiplied by gamma",
    )
    gamma: float = setting(default=0.1, validator=number(gt=0), help="the factor at each milestone")

    def rate(self, base: float, progress: Progress) -> float:
        time = self.time(progress)
        return float(base * float(self.gamma) ** sum(m <= time for m in self.milestones))


@attrs.frozen(kw_only=True)
class Polynomial(Schedule):
    """Polynomial decay to zero: ``rate(t) = base·(1 − min(t, length) / length)^power``.

    ``t`` and ``length`` are in the unit ``by``. By default, ``length`` is the length of the run.

    Raises:
        ValueError: ``power`` or ``length`` is not positive.
        ConfigError: ``length`` is None and the length of the run is unknown.

    >>> Polynomial(length=4).rate(0.5, Progress(step=2))
    0.25

    Source: torch.optim.lr_scheduler.PolynomialLR, whose default length is 5.
    """

    name: ClassVar[str] = "polynomial"

    length: float | None = length_field("the time until the learning rate reaches zero")
    power: float = setting(
        default=1.0, validator=number(gt=0), help="the exponent; with 1, the decay is linear"
    )

    def rate(self, base: float, progress: Progress) -> float:
        length = known_length(self, "length", progress)
        remaining = 1 - min(self.time(progress) / max(length, 1), 1)
        return float(base * remaining ** float(self.power))


@attrs.frozen(kw_only=True)
class InverseScaling(Schedule):
    """Inverse scaling, a power-law decay: ``rate(t) = base / (scale·t + 1)^power``.

    ``t`` is in the unit ``by``. To get the learning rates of scikit-learn, use the following arguments:

    - SGDRegressor: ``by="rows"`` and the default ``power=0.25``.
    - SGDClassifier: ``by="rows"`` and ``power=0.5``.
    - MLPClassifier and MLPRegressor: ``by="epoch"``, ``power=0.5``, and the number of training rows as
      ``scale``. They count rows, but change the learning rate only after each epoch.

    Raises:
        ValueError: ``power`` is negative, or ``scale`` is not positive.

    >>> InverseScaling(power=0.5).rate(0.1, Progress(step=3))
    0.05

    Source: sklearn.linear_model.SGDRegressor and sklearn.neural_network.MLPRegressor with
    ``learning_rate="invscaling"``.
    """

    name: ClassVar[str] = "invscaling"

    power: float = setting(default=0.25, validator=number(ge=0), help="the exponent")
    scale: float = setting(
        default=1, validator=number(gt=0), help="the factor by which t is multiplied"
    )

    def rate(self, base: float, progress: Progress) -> float:
        """``base / (scale·t + 1)^power``."""
        return float(base / (self.scale * self.time(progress) + 1) ** float(self.power))


@attrs.frozen(kw_only=True)
class Optimal(Schedule):
    """Bottou's learning rate for strongly convex problems: ``rate(t) = 1 / (alpha·(t0 + t))``.

    The base learning rate is not used. ``t`` is in the unit ``by``. To get the learning rates of
    scikit-learn's SGDRegressor and SGDClassifier, use ``by="rows"``.

    By default, ``t0`` is computed at the start of the run so that the first step is as large as a
    typical weight. The size of a typical weight is ``τ = alpha^(−¼)``, which gives
    ``t0 = 1 / (alpha·τ / max(1, slope(−τ, 1)))``. Here, ``slope(s, y)`` is the derivative of the loss
    with respect to the score.

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
        default=1e-4, validator=number(gt=0), help="the strength of the penalty ½ alpha·Σw²"
    )
    t0: float | None = setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0)),
        help="the offset that is added to t; by default, it is computed from the loss",
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
