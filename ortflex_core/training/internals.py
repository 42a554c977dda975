"""The internals of a Trainer, and the settings that a run reads from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import attrs

from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.runtime.installation import Runtime
from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.errors import OrtflexError, short_repr
from ortflex_core.kernel.hooks import HookManager
from ortflex_core.kernel.loop import Loop
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Schedule
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.setup import Setup
from ortflex_core.training.state import Live
from ortflex_core.training.views.history import History


class Settings(Protocol):
    """The public attributes of a Trainer that may change between two calls, and its History.

    Hooks get the object that has them, which is the Trainer.
    """

    batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    learning_rate: float
    schedule: Schedule
    progress: bool | None
    history_: History


@attrs.define(kw_only=True, eq=False, repr=False)
class Internals:
    """The internal parts of a Trainer (see :func:`internals_of`).

    Args:
        arguments: the arguments of the Trainer.
        setup: the resolved and checked arguments.
        hooks: the callbacks and hook plugins.
        live: the weights, and the engine that holds them after the first data.
        loop: the loop that runs now, if there is one.
        feed: the rows of the training while ``fit`` runs.
    """

    arguments: dict[str, Any]
    setup: Setup
    hooks: HookManager
    live: Live
    loop: Loop | None = None
    feed: Feed | None = None

    @property
    def runtime(self) -> Runtime:
        """The installed onnxruntime."""
        return self.setup.runtime

    @property
    def plugins(self) -> Plugins:
        """The plugins with the components, and the preferred distributions."""
        return self.setup.plugins

    @property
    def problem(self) -> Problem:
        """What is trained; the loss terms exist after the first data."""
        return self.live.problem

    @property
    def engine(self) -> Engine:
        """The compiled problem.

        Raises:
            OrtflexError: nothing is compiled yet.
        """
        if self.live.engine is None:
            raise OrtflexError("nothing is compiled yet: call fit or step first")
        return self.live.engine

    @property
    def rank(self) -> int:
        """The number of this process if several processes train, otherwise 0."""
        peers = self.setup.problem.peers
        return 0 if peers is None else peers.rank

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Send an error that is raised here to the other processes, so that they end, too."""
        peers = self.setup.problem.peers
        return nullcontext() if peers is None else peers.sharing_errors()

    def refuse_in_observers(self, what: str) -> None:
        """Refuse a change of the state in a hook that only observes.

        Raises:
            OrtflexError: such a hook is running.
        """
        if self.loop is not None and self.loop.in_observer:
            raise OrtflexError(
                f"{what} cannot be changed in the hooks steps_end and settled, which come after a "
                "run of several steps of the backend; use step_end, which comes after every step, "
                "or epoch_end"
            )

    def forget_engine(self) -> None:
        """Build the engine again at the next step, with the state of the current one."""
        self.live.forget()


def internals_of(trainer: object) -> Internals:
    """The internals of a Trainer: problem, state, hooks, and the loop that runs now.

    Raises:
        TypeError: the argument is not a Trainer.
    """
    inner = getattr(trainer, "_internals", None)
    if not isinstance(inner, Internals):
        raise TypeError(f"expected a Trainer, got {short_repr(trainer)}")
    return inner


def call_hook(trainer: object, name: str, **values: Any) -> None:
    """Call a hook of a Trainer's callbacks, if any of them implements it."""
    hook = internals_of(trainer).hooks.callables(trainer).get(name)
    if hook is not None:
        hook(**values)
