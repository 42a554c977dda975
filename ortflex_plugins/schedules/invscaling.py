"""The schedule ``invscaling``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting


@attrs.frozen(kw_only=True)
class InverseScaling(Schedule):
    """A negative power of the time: ``rate(t) = base / (scale·t + 1)^power``.

    ``t`` is in the unit ``by``. scikit-learn's SGDRegressor corresponds to ``by="rows"`` and
    ``power=0.25`` (the default here), its SGDClassifier and perceptrons to ``power=0.5``. The
    perceptrons count rows, but change the rate only after each epoch: use ``by="epoch"`` and the number
    of rows of the training data as ``scale``.

    Raises:
        ValueError: ``power`` is negative, or ``scale`` is not positive.

    >>> InverseScaling(power=0.5).rate(0.1, Progress(step=3))
    0.05

    Source: sklearn.linear_model.SGDRegressor and sklearn.neural_network.MLPRegressor,
    ``learning_rate="invscaling"``.
    """

    name: ClassVar[str] = "invscaling"

    power: float = setting(default=0.25, validator=number(ge=0), help="exponent of the time")
    scale: float = setting(default=1, validator=number(gt=0), help="the factor of the time t")

    def rate(self, base: float, progress: Progress) -> float:
        """``base / (scale·t + 1)^power``."""
        return float(base / (self.scale * self.time(progress) + 1) ** float(self.power))
