"""What happens during a training, told to everybody who wants to know.

A hook plugin is any object with methods of these names, decorated with :data:`hook`; it is active
by being installed (entry-point group ``ortflex``) or by being handed to a Trainer
(``callbacks=[…]``). All arguments are keywords and their number can grow: take those you need.

    from ortflex_core.hookspecs import hook

    class PrintLoss:
        @hook
        def epoch_end(self, trainer, record):
            print(record["epoch"], record["loss"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from ortflex_core.types import Progress

if TYPE_CHECKING:
    from ortflex_core.checkpoint import Saved
    from ortflex_core.config import Recipe
    from ortflex_core.program import Program
    from ortflex_core.trainer import Trainer

PROJECT = "ortflex"
hook = pluggy.HookimplMarker(PROJECT)
_spec = pluggy.HookspecMarker(PROJECT)


class Hooks:
    """The hooks; each docstring says when it is called. A true ``stop`` ends the training."""

    @_spec
    def recipe_resolved(self, trainer: Trainer, recipe: Recipe) -> None:
        """Every name is resolved and every value valid; nothing is compiled yet."""

    @_spec
    def graph_built(self, trainer: Trainer, name: str, program: Program | bytes) -> None:
        """A graph is about to be used (``training``, ``loss``, ``update``, …)."""

    @_spec
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Before the first step of a ``fit``."""

    @_spec
    def epoch_start(self, trainer: Trainer, progress: Progress) -> None:
        """Before the first step of an epoch."""

    @_spec
    def step_end(
        self, trainer: Trainer, progress: Progress, loss: float, penalty: float, rate: float
    ) -> Any:
        """After every step; return True to stop. Costs what it does, each step.

        An epoch that is cut short is not an epoch: validation's scores are in its line of the History,
        ``epoch_end`` is not told, and a checkpoint from here goes on in the middle of it.
        """

    @_spec
    def steps_end(
        self,
        trainer: Trainer,
        progress: Progress,
        losses: Sequence[float],
        penalties: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        """After every run of one or several steps, for those who only watch: it cannot stop."""

    @_spec
    def validation_end(
        self, trainer: Trainer, progress: Progress, scores: Mapping[str, float]
    ) -> None:
        """After the validation data were evaluated (``loss`` and the metrics)."""

    @_spec
    def epoch_end(self, trainer: Trainer, progress: Progress, record: Mapping[str, float]) -> Any:
        """After an epoch and its validation, with its line of the History; return True to end.

        A checkpoint of a training that has ended goes on only if it is given more epochs.
        """

    @_spec
    def settled(self, trainer: Trainer, progress: Progress) -> None:
        """After every run of steps and every epoch, when all is decided: the moment to save."""

    @_spec
    def checkpoint_saving(self, trainer: Trainer, progress: Progress, saved: Saved) -> None:
        """A checkpoint is written: ``saved.put("my_callback", {…})`` keeps numbers, texts, arrays."""

    @_spec
    def checkpoint_loading(self, trainer: Trainer, saved: Saved) -> None:
        """A checkpoint was read: ``saved.get("my_callback")`` has what was put there, or None."""

    @_spec
    def train_end(self, trainer: Trainer, progress: Progress) -> None:
        """After the last step, also when the training was interrupted or failed."""

    @_spec
    def exception(self, trainer: Trainer, progress: Progress, error: BaseException) -> None:
        """The training is about to raise ``error`` (Ctrl-C included)."""


NAMES = tuple(name for name in dir(Hooks) if not name.startswith("_"))
"""The names of all hooks."""
