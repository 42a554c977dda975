"""Gradient descent and its velocities: ``sgd``, ``momentum``, ``nesterov``, ``lars``, ``lion``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number, setting
from ortflex_plugins.optimizers._fields import decay_rate, decoupled_decay, norm


@attrs.frozen(kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent, with a default learning rate of 0.001.

    ``w ← w − rate·(g + weight_decay·w)``. There is no optimizer state. Unlike a penalty,
    ``weight_decay`` is not part of the loss, and gradient transforms such as clipping do not affect it.

    Raises:
        ValueError: ``weight_decay`` is negative.

    >>> Sgd(weight_decay=0.01).describe()
    {'name': 'sgd', 'weight_decay': 0.01}

    Source: H. Robbins and S. Monro, "A stochastic approximation method" (1951);
    torch.optim.SGD(weight_decay=…).
    """

    name: ClassVar[str] = "sgd"
    default_rate: ClassVar[float] = 1e-3

    # A constant of the graph, because a hyperparameter would cost a product per weight, even at 0.
    weight_decay: float = setting(
        default=0.0,
        validator=number(ge=0),
        help="the product weight_decay·w is added to the gradient",
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """``(1 − rate·weight_decay)·w − rate·g``, in which the gradient is only scaled."""
        if self.weight_decay:
            weight = (1 - rate * self.weight_decay) * weight
        return weight - rate * gradient, {}


@attrs.frozen(kw_only=True)
class Momentum(Optimizer):
    """Gradient descent with momentum and a default learning rate of 0.001.

    ``v ← beta·v + g``, ``w ← w − rate·v``. The optimizer state is the slot ``velocity`` (v in the
    formulas), which has the shape of w and starts at 0.

    Raises:
        ValueError: ``beta`` is not in [0, 1).

    >>> Momentum(beta=0.95).describe()
    {'name': 'momentum', 'beta': 0.95}

    Source: B. Polyak, "Some methods of speeding up the convergence of iteration methods" (1964);
    torch.optim.SGD(momentum=beta), which also uses ``v = g`` in the first step.
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
    """Gradient descent with Nesterov momentum and a default learning rate of 0.001.

    ``v ← beta·v + g``, ``w ← w − rate·(g + beta·v)``. The optimizer state is the slot
    ``velocity`` (v in the formulas), which has the shape of w and starts at 0.

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


@attrs.frozen(kw_only=True)
class Lars(Optimizer):
    """LARS scales the momentum step in proportion to each weight's norm; its default learning rate is 1.

    ``d = g + weight_decay·w``, ``v ← beta·v + rate·local·d``, ``w ← w − v`` with
    ``local = trust·‖w‖ / (‖g‖ + weight_decay·‖w‖)``, or 1 if ``w`` or ``g`` is 0. The norms are
    Euclidean norms of the whole tensor. The optimizer state is the slot ``velocity`` (v in the
    formulas), which has the shape of w and starts at 0. Biases and normalization scales are usually
    trained with another optimizer, which you can set with the ``groups`` argument of the Trainer.

    Raises:
        ValueError: ``beta`` is not in [0, 1), ``trust`` is not positive, or ``weight_decay`` is negative.

    >>> Lars(trust=0.02).describe()["beta"]
    0.9

    Source: Y. You, I. Gitman and B. Ginsburg, "Large batch training of convolutional networks"
    (2017), algorithm 1.
    """

    name: ClassVar[str] = "lars"
    default_rate: ClassVar[float] = 1.0
    slots: ClassVar[tuple[str, ...]] = ("velocity",)
    elementwise: ClassVar[bool] = False

    beta: float = hyper(
        default=0.9, validator=number(ge=0, lt=1), help="the fraction of the velocity that is kept"
    )
    trust: float = hyper(
        default=1e-3,
        validator=number(gt=0),
        help="the trust coefficient, to which each step is proportional",
    )
    weight_decay: float = hyper(default=5e-4, validator=number(ge=0), help="the factor of w in d")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        size_w, size_g = norm(op, weight), norm(op, gradient)
        local = self.trust * size_w / (size_g + self.weight_decay * size_w)
        # Where both norms are 0, the quotient is 0/0 and is not used.
        local = op.Where(op.Greater(op.Min(size_w, size_g), 0.0), local, 1.0)
        move = (rate * local) * (gradient + self.weight_decay * weight)
        velocity = self.beta * slots["velocity"] + move
        return weight - velocity, {"velocity": velocity}


@attrs.frozen(kw_only=True)
class Lion(Optimizer):
    """Lion updates each element by the sign of a momentum term; its default learning rate is 0.0001.

    ``d = sign(beta1·m + (1 − beta1)·g)``, ``m ← beta2·m + (1 − beta2)·g``,
    ``w ← (1 − rate·weight_decay)·w − rate·d``. The optimizer state is the slot m, which has the shape
    of w and starts at 0.

    Raises:
        ValueError: a beta is not in [0, 1), or ``weight_decay`` is negative.

    >>> Lion().describe()["beta2"]
    0.99

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms" (2023), program 1.
    """

    name: ClassVar[str] = "lion"
    default_rate: ClassVar[float] = 1e-4
    slots: ClassVar[tuple[str, ...]] = ("m",)

    beta1: float = hyper(
        default=0.9,
        validator=number(ge=0, lt=1),
        help="the weight of m in the direction of the step",
    )
    beta2: float = decay_rate(0.99, "the moving average of g")
    weight_decay: float = decoupled_decay(0.0)

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        move = op.Sign(self.beta1 * slots["m"] + (1 - self.beta1) * gradient)
        m = self.beta2 * slots["m"] + (1 - self.beta2) * gradient
        return (1 - rate * self.weight_decay) * weight - rate * move, {"m": m}
