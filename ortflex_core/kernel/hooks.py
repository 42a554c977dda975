"""The hooks that are called during training, and the manager that calls them.

A hook plugin is any object with methods of these names, decorated with :data:`hook`. It is active when its
distribution is installed (entry-point group ``ortflex``) or when it is given to a Trainer
(``callbacks=[…]``). All arguments are keywords, and new ones may be added: name only those you need::

    from ortflex_core import Callback, hook

    class PrintLoss(Callback):
        @hook
        def epoch_end(self, trainer, record):
            print(record["epoch"], record["loss"])
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pluggy

from ortflex_core.kernel.entries import Entry, warn_once
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    ConfigError,
    OrtflexError,
    describe_error,
    short_repr,
)
from ortflex_core.kernel.kinds import HOOKS
from ortflex_core.kernel.plugin_trace import traced
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array, Progress

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.program import Program
    from ortflex_core.training.artifacts.checkpoint import Saved
    from ortflex_core.training.config.recipe import Recipe
    from ortflex_core.training.trainer import Trainer

PROJECT = "ortflex"
hook = pluggy.HookimplMarker(PROJECT)
_spec = pluggy.HookspecMarker(PROJECT)


class Hooks:
    """The hooks; each docstring says when it is called. A true result of some hooks ends training."""

    @_spec
    def recipe_resolved(self, trainer: Trainer, recipe: Recipe) -> None:
        """All names are resolved and all values are valid; nothing is compiled yet."""

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
    def batch_drawn(
        self, trainer: Trainer, batch: Mapping[str, Array], rng: np.random.Generator, epoch: int
    ) -> Mapping[str, Array] | None:
        """Before a batch is used for training: change its arrays, or return new ones by name.

        ``batch`` has copies of its rows by the names of the graph's inputs (labels and weights, too), in
        the types and shapes that the graphs take; types and shapes must not change. ``rng`` depends on the
        seed, the epoch and the batch only, so draw from it. ``epoch`` counts finished epochs.
        Callbacks are called in order; each gets the arrays that the earlier ones returned. Only ``fit``
        calls this hook, not ``evaluate``, ``predict`` or ``step``.
        """

    @_spec
    def step_end(
        self, trainer: Trainer, progress: Progress, loss: float, penalty: float, rate: float
    ) -> Any:
        """After every step; return True to stop. The hook takes time in every step.

        After a stop, the epoch is incomplete: its line of the History has the validation results,
        ``epoch_end`` is not called, and a run resumed from a checkpoint written here continues in the
        middle of the epoch.
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
        """After every group of steps, only for observation: it can neither stop nor change weights.

        The backend decides how many steps run together, so ``trainer.set_state`` is refused here.
        """

    @_spec
    def validation_end(
        self, trainer: Trainer, progress: Progress, scores: Mapping[str, float]
    ) -> None:
        """After the validation data was evaluated (``loss`` and the metrics)."""

    @_spec
    def epoch_end(self, trainer: Trainer, progress: Progress, record: Mapping[str, float]) -> Any:
        """After an epoch and its validation, with its line of the History; return True to end.

        A checkpoint that is written here after a stop can only be continued with more epochs.
        """

    @_spec
    def settled(self, trainer: Trainer, progress: Progress) -> None:
        """After every group of steps and every epoch, when the state is final and can be saved.

        Within an epoch, ``trainer.set_state`` is refused, as in ``steps_end``.
        """

    @_spec
    def checkpoint_saving(self, trainer: Trainer, progress: Progress, saved: Saved) -> None:
        """A checkpoint is written; ``saved.put("my_callback", {…})`` adds numbers, strings or arrays."""

    @_spec
    def checkpoint_loading(self, trainer: Trainer, saved: Saved) -> None:
        """A checkpoint was read; ``saved.get("my_callback")`` returns what was stored, or None."""

    @_spec
    def train_end(self, trainer: Trainer, progress: Progress) -> None:
        """After the last step, even if training was interrupted or failed."""

    @_spec
    def exception(self, trainer: Trainer, progress: Progress, error: BaseException) -> None:
        """``fit`` is about to raise ``error``, which may be a KeyboardInterrupt."""


class _WithHooks(abc.ABCMeta):
    """The type of :class:`Callback`: every class with hooks counts as a subclass of it."""

    def __subclasscheck__(cls, other: type) -> bool:
        if cls is not Callback:
            return super().__subclasscheck__(other)
        members = (member for base in other.__mro__ for member in vars(base).values())
        functions = (getattr(member, "__func__", member) for member in members)
        return any(f"{PROJECT}_impl" in getattr(f, "__dict__", ()) for f in functions)

    def __instancecheck__(cls, instance: object) -> bool:
        return issubclass(type(instance), cls)


class Callback(metaclass=_WithHooks):
    """A callback is an object whose methods, if decorated with ``hook``, are called during training.

    Every class with such methods counts as a subclass. If it does not inherit from this class, its
    attributes have the values below, unless it defines them.

    >>> class PrintLoss:
    ...     @hook
    ...     def epoch_end(self, record):
    ...         print(record["loss"])
    >>> issubclass(PrintLoss, Callback), issubclass(dict, Callback)
    (True, False)
    """

    __slots__ = ()

    every_rank: ClassVar[bool] = False
    """Whether every process of a run calls it, not only rank 0, because it changes weights or batches."""
    prints_epochs: ClassVar[bool] = False
    """Whether it prints a line per epoch, so that the Trainer does not."""
    stability: ClassVar[Literal["stable", "experimental"]] = "stable"
    """As for every :class:`~ortflex_core.Component`."""


def declares(plugin: object, flag: Literal["every_rank", "prints_epochs"]) -> bool:
    """A flag of :class:`Callback`, also of an object (a module, say) that does not inherit from it."""
    return bool(getattr(plugin, flag, getattr(Callback, flag)))


NAMES = tuple(name for name in dir(Hooks) if not name.startswith("_"))
"""The names of all hooks."""


class HookManager:
    """The callbacks and hook plugins of a Trainer.

    Entry points are loaded one by one: a broken one is left out with a warning, since no user asked
    for it. ``installed`` names the distributions whose hooks are active.

    Raises:
        ConfigError: a callback has no hooks, or one of a name or an argument that does not exist.
    """

    def __init__(self, plugins: Plugins, callbacks: Iterable[Any]) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(Hooks)
        self._plugins = plugins
        self._entries: dict[int, Entry] = {}
        for entry in plugins[HOOKS]:
            try:
                self._take(entry)
            except OrtflexError as error:
                warn_once(f"the hooks of {entry.distribution} are skipped: {error}")
        for callback in callbacks:
            self.register(callback)

    def __del__(self) -> None:
        """Break pluggy's cycle of a manager and its callers, so that callbacks end with the Trainer."""
        manager = getattr(self, "_manager", None)
        if manager is not None:
            vars(manager.hook).clear()

    @property
    def installed(self) -> list[str]:
        """The distributions whose hooks are active by being installed."""
        return [entry.distribution for entry in self._entries.values()]

    @classmethod
    def check(cls, entry: Entry) -> None:
        """Load one hook plugin.

        Raises:
            BrokenPlugin: it cannot be imported, or its hooks are wrong.
        """
        cls(Plugins(()), ())._take(entry)

    def _take(self, entry: Entry) -> None:
        plugin = entry.load()
        try:
            self.register(plugin, entry.qualified)
        except ConfigError as error:
            raise BrokenPlugin(f"{entry.described}: {error}. {entry.remedy}") from error
        self._entries[id(plugin)] = entry

    def register(self, plugin: Any, name: str | None = None) -> None:
        """Register an object if all its hooks are valid; otherwise none of them is registered."""
        known = f"the hooks are {', '.join(NAMES)}"
        manager = self._manager
        if isinstance(plugin, type):
            raise ConfigError(
                f"callbacks: {plugin.__qualname__} is a class; pass an instance: "
                f"{plugin.__qualname__}()"
            )
        try:
            if plugin == object():
                raise ValueError(
                    f"{short_repr(plugin)} compares equal to every object; correct its __eq__"
                )
            if manager.is_registered(plugin):  # or one that equals it
                raise ConfigError(f"callbacks: {short_repr(plugin)} is given twice; pass it once")
            manager.register(plugin, name=name)
            manager.check_pending()
            hooks = manager.get_hookcallers(plugin)
        except (KeyboardInterrupt, ConfigError):
            raise
        except BaseException as error:  # comparisons and reprs of a plugin are its own code
            _forget(manager, plugin)
            of_pluggy = isinstance(error, pluggy.PluginValidationError | ValueError)
            text = str(error) if of_pluggy else describe_error(error)
            raise ConfigError(f"callbacks: {text}; {known}") from error
        if not hooks:
            _forget(manager, plugin)
            raise ConfigError(
                f"callbacks: {short_repr(plugin)} has no hooks; decorate its methods with "
                f"ortflex_core.hook; {known}"
            )

    def keep(self, wanted: Callable[[Any], bool]) -> None:
        """Forget the callbacks and hook plugins that are not ``wanted``."""
        for _, plugin in list(self._manager.list_name_plugin()):
            if not wanted(plugin):
                _forget(self._manager, plugin)

    def callables(self, trainer: Any) -> dict[str, HookCall]:
        """The hooks that a callback implements; the others are left out and cost nothing."""
        callers = ((name, getattr(self._manager.hook, name)) for name in NAMES)
        return {
            name: HookCall(self._note, caller, trainer, self._whose)
            for name, caller in callers
            if caller.get_hookimpls()
        }

    def one_by_one(self, name: str, trainer: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
        """The implementations of a hook, in the order of the callbacks: plugin, name, function."""
        found = getattr(self._manager.hook, name).get_hookimpls()
        plugins = [i.plugin for i in sorted(found, key=lambda i: i.trylast - i.tryfirst)]
        out: list[tuple[Any, str, Callable[..., Any]]] = []
        for plugin in plugins:
            others = [other for other in plugins if other is not plugin]
            caller = self._manager.subset_hook_caller(name, others)
            call = HookCall(self._note, caller, trainer, self._whose)
            out.append((plugin, self._whose(plugin), partial(_first, call)))
        return out

    def _note(self, error: BaseException, name: str, plugin: Any) -> None:
        """Name the plugin in an error of its hook.

        Raises:
            BrokenPlugin: the hook of an installed plugin ends the process of a user who may not have asked
                for it. A callback that is passed as an object may do so: its user has decided that.
        """
        entry = self._entry(plugin)
        if isinstance(error, SystemExit) and entry is not None:
            raise BrokenPlugin(
                f"the hook {name!r} of {entry.described} calls sys.exit({error.code!r}); a hook ends the "
                f"training by returning True, or by an error. {entry.remedy}"
            ) from error
        if not isinstance(error, KeyboardInterrupt):
            error.add_note(f"raised by the hook {name!r} of {self._whose(plugin)}")

    def _entry(self, plugin: Any) -> Entry | None:
        return self._entries.get(id(plugin)) or self._plugins["callbacks"].entry_of(plugin)

    def _whose(self, plugin: Any) -> str:
        entry = self._entry(plugin)
        if entry is not None:
            return entry.described
        return f"the callback {type(plugin).__qualname__}"


class HookCall:
    """Calls a hook's implementations with keywords and returns what is not None, the last callback first.

    Without wrappers it calls the functions itself, which takes a fifth of pluggy's time: a hook may be
    called after every step. An error names its callback in a note, if no wrapper hides which it is. Its
    traceback has no frames of pluggy: they refer to the exception, so that it and the Trainer would wait
    for the cyclic collector; and they say nothing that an author can use. ``takes`` are the names of the
    arguments that the implementations have.
    """

    def __init__(
        self,
        note: Callable[[BaseException, str, Any], None],
        caller: pluggy.HookCaller,
        trainer: Any,
        whose: Callable[[Any], str] = repr,
    ) -> None:
        self._note, self._caller, self._trainer, self._whose = note, caller, trainer, whose
        self._impls = caller.get_hookimpls()[::-1]
        self.takes = frozenset(name for impl in self._impls for name in impl.argnames)
        self._wrapped = any(impl.hookwrapper or impl.wrapper for impl in self._impls)

    def __call__(self, **values: Any) -> Any:
        """Call all of them; ``values`` are the arguments without the Trainer."""
        with traced(self._caller.name, self._names):
            return self._answers(values)

    def _names(self) -> str:
        plugins = {id(impl.plugin): impl.plugin for impl in self._impls}.values()
        return ", ".join(map(self._whose, plugins))

    def _answers(self, values: dict[str, Any]) -> Any:
        values["trainer"] = self._trainer
        answers, impl = [], self._impls[0] if len(self._impls) == 1 else None
        try:
            if self._wrapped:
                return self._caller(**values)
            for impl in self._impls:
                answer = impl.function(*[values[n] for n in impl.argnames])
                if answer is not None:
                    answers.append(answer)
        except BaseException as error:
            error.__traceback__ = _without_pluggy(error.__traceback__)
            exits = self._impls if isinstance(error, SystemExit) else []
            for one in exits if impl is None else [impl]:
                self._note(error, self._caller.name, one.plugin)
            raise
        return answers


def _first(call: HookCall, **values: Any) -> Any:
    return next(iter(call(**values)), None)


def _forget(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Remove a partly registered object; by identity, since an object may equal every other."""
    for name, known in list(manager.list_name_plugin()):
        if known is plugin:
            manager.unregister(name=name)


def _without_pluggy(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback after :class:`HookCall` and pluggy, or all of it without such a part."""
    part = trace.tb_next if trace is not None else None
    while part is not None and str(part.tb_frame.f_globals.get("__name__")).startswith("pluggy."):
        part.tb_frame.clear()
        part = part.tb_next
    return part if part is not None else trace


def weak_hook(trainer: weakref.ref[Trainer], hooks: HookManager, name: str) -> HookCall | None:
    """A hook that does not keep its Trainer alive: a cycle would outlive ``del trainer``."""
    owner = trainer()
    return None if owner is None else hooks.callables(owner).get(name)
