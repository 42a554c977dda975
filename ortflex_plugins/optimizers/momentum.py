"""Gradient descent with a velocity: ``momentum``, ``nesterov``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Momentum(Optimizer):
    """Gradient descent with momentum: ``v ← beta·v + g``, ``w ← w − rate·v``; default rate 0.001.

    v is the slot ``velocity``, which has the shape of w and starts at 0.

    Raises:
        ValueError: ``beta`` is not in [0, 1).

    >>> Momentum(beta=0.95).describe()
    {'name': 'momentum', 'beta': 0.95}

    Source: B. Polyak, "Some methods of speeding up the convergence of iteration methods" (1964);
    torch.optim.SGD(momentum=beta), whose first step also has ``v = g``.
    """

    name: ClassVar[str] = "momentum"
    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    beta: float = hyper(
        default=0.9, validator=number(ge=0, lt=1), help="the fraction of the velocity that is kept"
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """``w − rate·v`` with the new velocity."""
        velocity = self.beta * slots["velocity"] + gradient
        return weight - rate * velocity, {"velocity": velocity}


@attrs.frozen(kw_only=True)
class Nesterov(Momentum):
    """Nesterov's momentum: ``v ← beta·v + g``, ``w ← w − rate·(g + beta·v)``; default rate 0.001.

    v is the slot ``velocity``, which has the shape of w and starts at 0.

    Raises:
        ValueError: ``beta`` is not in [0, 1).

    >>> Nesterov().describe()
    {'name': 'nesterov', 'beta': 0.9}

    Source: I. Sutskever et al., "On the importance of initialization and momentum in deep
    learning" (2013), in the form of torch.optim.SGD(momentum=beta, nesterov=True).
    """

    name: ClassVar[str] = "nesterov"

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """``w − rate·(g + beta·v)`` with the new velocity."""
        velocity = self.beta * slots["velocity"] + gradient
        return weight - rate * (gradient + self.beta * velocity), {"velocity": velocity}
