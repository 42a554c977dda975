"""The average ``swa``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Average, Host, Ops, hyper, number


@attrs.frozen(kw_only=True)
class Swa(Average):
    """Stochastic weight averaging: the mean of the weights after selected steps.

    The selected steps are ``start``, ``start + every``, ``start + 2·every`` and so on, counted from 1.
    Before the first of them, the average equals the current weights. With 600 steps per epoch,
    ``Swa(start=6000, every=600)`` averages the weights at the end of epoch 10 and of every later epoch.

    Raises:
        ValueError: ``start`` or ``every`` is less than 1.

    >>> Swa(start=100, every=10).describe()
    {'name': 'swa', 'start': 100, 'every': 10}

    Source: P. Izmailov et al., "Averaging weights leads to wider optima and better generalization"
    (UAI 2018); ``torch.optim.swa_utils.AveragedModel``.
    """

    name: ClassVar[str] = "swa"

    start: float = hyper(default=1, validator=number(ge=1), help="the first of the selected steps")
    every: float = hyper(
        default=1,
        validator=number(ge=1),
        help="the number of steps from one selected step to the next",
    )

    def share(self, op: Ops, step: Host) -> Host:
        """1/n at the n-th averaged step, 0 at the steps between, and 1 before the first averaged step."""
        past = op.Floor((step - self.start) / self.every)
        counts = past - op.Floor((step - 1 - self.start) / self.every)
        early = op.Min(op.Max(self.start - step, 0.0), 1.0)
        return op.Max(counts / (op.Max(past, 0.0) + 1), early)
