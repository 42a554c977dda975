"""The internals of a Trainer, for callbacks and tools, and deprecated public attributes."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.kernel.errors import OrtflexError, short_repr

if TYPE_CHECKING:
    from ortflex_core.compiler.problem.problem import Problem
    from ortflex_core.compiler.runtime.installation import Runtime
    from ortflex_core.kernel.hooks import HookManager
    from ortflex_core.kernel.loop import Loop
    from ortflex_core.kernel.protocols.backend import Engine
    from ortflex_core.kernel.registry import Plugins
    from ortflex_core.training.setup import Setup
    from ortflex_core.training.state import Live
    from ortflex_core.training.trainer import Trainer


@attrs.define(kw_only=True, eq=False, repr=False)
class Internals:
    """The internal parts of a Trainer (see :func:`internals_of`).

    Args:
        arguments: the arguments of the Trainer.
        setup: the resolved and checked arguments.
        hooks: the callbacks and hook plugins.
        live: the weights, and the engine that holds them after the first data.
        loop: the loop that runs now, if there is one.
    """

    arguments: dict[str, Any]
    setup: Setup
    hooks: HookManager
    live: Live
    loop: Loop | None = None

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

    def forget_engine(self) -> None:
        """Build the engine again at the next step, with the state of the current one."""
        self.live.forget()


_MOVED = (
    *("arguments", "setup", "hooks", "live", "loop", "runtime", "problem"),
    *("sharing_errors", "forget_engine"),
)
_ARGUMENTS = ("check_finite", "threads")


def moved_attribute(trainer: Trainer, name: str) -> Any:
    """An attribute of a Trainer in version 0.1, with a warning that names its new place.

    Raises:
        AttributeError: no version had it.
    """
    if name not in (*_MOVED, *_ARGUMENTS):
        raise AttributeError(f"'Trainer' object has no attribute {name!r}", name=name, obj=trainer)
    place = f"arguments[{name!r}]" if name in _ARGUMENTS else name
    text = (
        f"Trainer.{name} is deprecated and will be removed in 0.3; use internals_of(trainer).{place}, "
        "from ortflex_core import internals_of"
    )
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    inner = internals_of(trainer)
    return inner.arguments[name] if name in _ARGUMENTS else getattr(inner, name)


def internals_of(trainer: Trainer) -> Internals:
    """The internals of a Trainer: problem, state, hooks, and the loop that runs now.

    Raises:
        TypeError: the argument is not a Trainer.
    """
    inner = getattr(trainer, "_internals", None)
    if not isinstance(inner, Internals):
        raise TypeError(f"expected a Trainer, got {short_repr(trainer)}")
    return inner


def call_hook(trainer: Trainer, name: str, **values: Any) -> None:
    """Call a hook of a Trainer's callbacks, if any of them implements it."""
    hook = internals_of(trainer).hooks.callables(trainer).get(name)
    if hook is not None:
        hook(**values)
