"""Prunings: constraints by which a growing share of the weights is zero."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.kernel.component import is_count, is_number, listed, number, satisfying, setting
from ortflex_core.kernel.errors import ConfigError
from ortflex_core.kernel.step_protocols import Constraint
from ortflex_core.kernel.types import Array, Arrays

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor

Axes = tuple[int, ...]
"""The axes of a weight that belong to its outputs; () if they are not known."""
_CHANGES = 20
"""The number of changes of the share, if ``every`` does not say it."""


def _is_moment(value: Any) -> bool:
    share = isinstance(value, float) and is_number(value) and 0 <= value <= 1
    return share or (isinstance(value, int) and is_count(value, 0))


_moment = satisfying(
    "must be a number of steps (an integer >= 0) or a share of the run (a float from 0.0 to 1.0)",
    _is_moment,
)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


@attrs.frozen(kw_only=True)
class Pruning(Constraint, abc.ABC):
    """A constraint by which a growing share of the weights is zero.

    At some steps t from the step ``first`` (``begin``) to the step ``last`` (``end``), the share

        s(t) = final + (initial − final) · (1 − (t − first) / (last − first))³

    of the weights becomes zero; :meth:`masks` is the formula of which. In between and afterwards, zeros
    stay zero: in every step a weight and its gradient are multiplied by ``sign(|w|)``, whatever the
    optimizer, its momentum, weight decay and averages do. The mask is therefore part of the weights, and so
    of checkpoints, exports and portable steps. Weights that are zero in the file stay zero, too.

    Source: Zhu & Gupta, "To prune, or not to prune", arXiv:1710.01878, section 3.
    """

    stability: ClassVar[Literal["stable", "experimental"]] = "experimental"

    params: tuple[str, ...] = setting(
        default=(),
        converter=listed,
        validator=satisfying("must be a list of names and globs", _are_names, TypeError),
        help="names and globs of the weights to prune; by default, the weights of matrix products, "
        "convolutions and recurrent layers, except biases",
    )
    initial: float = setting(
        default=0.0, validator=number(ge=0, lt=1), help="the share of zeros at the start"
    )
    begin: float = setting(
        default=0.0,
        validator=_moment,
        help="when pruning begins: after a number of steps (an integer) or a fraction of the run (a float)",
    )
    end: float = setting(
        default=0.5,
        validator=_moment,
        help="when the share reaches its final value: after a number of steps or a fraction of the run",
    )
    every: int = setting(
        default=0,
        validator=satisfying("must be an integer >= 0", lambda v: is_count(v, 0)),
        help="the number of steps between two changes to the share; with 0, the share changes twenty times "
        "between ``begin`` and ``end``",
    )

    @property
    @abc.abstractmethod
    def final(self) -> float:
        """The share of zeros at the end."""

    @property
    def whole_channels(self) -> bool:
        """Whether whole channels of outputs become zero.

        Their biases, and their scales and offsets in normalizations that follow, are zero then, too.
        """
        return False

    @abc.abstractmethod
    def masks(self, weights: Arrays, axes: Mapping[str, Axes], share: float) -> dict[str, Array]:
        """The elements that stay, as booleans of the shapes of the weights.

        It depends on the weights alone, and it is the same for the weights that it leaves: a share that
        is zero already stays.

        Args:
            weights: by name.
            axes: the axes of outputs of each weight; () if they are not known.
            share: the share of zeros.
        """

    def refusal(self, shape: tuple[int, ...], axes: Axes) -> str:
        """The reason why a weight cannot have such zeros; "" if it can."""
        return ""

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The weight itself: :meth:`masks` decides on the host which elements are zero."""
        return weight

    def project(
        self,
        weights: Arrays,
        axes: Mapping[str, Axes],
        share: float,
        together: Sequence[Sequence[str]] = (),
    ) -> dict[str, Array]:
        """The weights with a share of zeros.

        Args:
            weights: by name.
            axes: the axes of outputs of each weight; () if they are not known.
            share: the share of zeros.
            together: weights that have the same channels, because an addition joins them: their rows for a
                channel count as one long row.
        """
        own, known = dict(weights), dict(axes)
        groups = [[n for n in group if n in weights] for group in together]
        for first, *others in filter(None, groups):
            rows = [_rows(weights[n], axes[n][0]) for n in (first, *others)]
            own[first], known[first] = np.concatenate(rows, axis=1), (0,)
            for name in others:
                del own[name]
        masks = self.masks(own, known, share)
        for group in filter(None, groups):
            stays = masks[group[0]].any(axis=1)
            for name in group:
                shape = [-1 if k == axes[name][0] else 1 for k in range(weights[name].ndim)]
                masks[name] = np.broadcast_to(stays.reshape(shape), weights[name].shape)
        return {n: np.where(masks[n], a, np.zeros((), a.dtype)) for n, a in weights.items()}

    def changes(self, steps: int | None) -> list[tuple[int, float]]:
        """The steps before which the share changes, with the share from there on.

        Args:
            steps: the number of steps of the training; None if it is not known.

        Raises:
            ConfigError: ``begin`` or ``end`` is a share of a training whose length is not known.
        """
        first = self._step("begin", self.begin, steps)
        last = max(first, self._step("end", self.end, steps))
        every = self.every or max(1, -(-(last - first) // _CHANGES))
        moments = [*range(first, last, every), last]
        return [(t, self._share(t, first, last)) for t in moments]

    def _share(self, step: int, first: int, last: int) -> float:
        rest = 1 - (step - first) / (last - first) if last > first else 0.0
        return self.final + (min(self.initial, self.final) - self.final) * rest**3

    def _step(self, name: str, value: float, steps: int | None) -> int:
        if isinstance(value, int):
            return value
        if steps is None:
            raise ConfigError(
                f"constraint.{name}: {value!r} is a share of the run, whose length is not known here; "
                "set a number of steps (an integer), or train with fit, and steps_per_epoch= for endless "
                "data"
            )
        return round(value * steps)


def _rows(weight: Array, channel: int) -> Array:
    """A weight as a matrix with a row per channel."""
    return np.moveaxis(weight, channel, 0).reshape(weight.shape[channel], -1)
