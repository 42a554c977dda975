"""The average ``swa``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.graph import Host, Ops
from ortflex_core.protocols import Average


@attrs.frozen(kw_only=True)
class Swa(Average):
    """Stochastic weight averaging: the mean of the weights after some of the steps.

    Those are ``start``, ``start + every``, ``start + 2·every``, …; before them the average is the
    weight itself. Steps count from 1; with 600 steps an epoch, ``Swa(start=6000, every=600)`` averages the
    weights at the end of the 10th and of every later epoch.

    Raises:
        ValueError: ``start`` or ``every`` is less than 1.

    >>> Swa(start=100, every=10).describe()
    {'name': 'swa', 'start': 100, 'every': 10}

    Source: P. Izmailov et al., "Averaging weights leads to wider optima and better generalization"
    (UAI 2018); ``torch.optim.swa_utils.AveragedModel``.
    """

    name: ClassVar[str] = "swa"

    start: float = hyper(default=1, validator=number(ge=1), help="the first step that is averaged")
    every: float = hyper(
        default=1,
        validator=number(ge=1),
        help="the number of steps between averaged steps",
    )

    def share(self, op: Ops, step: Host) -> Host:
        """1/n at the n-th step that counts, 0 at others, and 1 before the first."""
        past = op.Floor((step - self.start) / self.every)
        counts = past - op.Floor((step - 1 - self.start) / self.every)
        early = op.Min(op.Max(self.start - step, 0.0), 1.0)
        return op.Max(counts / (op.Max(past, 0.0) + 1), early)
