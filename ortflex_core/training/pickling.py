"""Pickles and copies of Trainers, which have the model's bytes, the arguments and the state.

This is for workers of joblib and multiprocessing, whose pickles come from the same program. Loading
a pickle can execute any code, so share checkpoints, not pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from ortflex_core.compiler.model.adapted_model import frozen_values, with_values
from ortflex_core.kernel import class_paths
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array
from ortflex_core.training.artifacts.checkpoint import Saved
from ortflex_core.training.fingerprint import components
from ortflex_core.training.internals import Internals, Settings, call_hook, internals_of
from ortflex_core.training.standing import Standing

T = TypeVar("T", bound=Settings)


@attrs.frozen(kw_only=True)
class Packed:
    """The content of a pickle of a Trainer."""

    model: bytes
    arguments: Mapping[str, Any]
    weights: Mapping[str, Array]
    standing: Standing
    saved: Saved
    history: Any
    classes: frozenset[str] = frozenset()
    """The class paths of the components in use: the arguments name no other class."""


def reduced(trainer: T, inner: Internals) -> tuple[Callable[..., T], tuple[Any, ...]]:
    """The function and the arguments that recreate a Trainer, for ``__reduce__``.

    Raises:
        ValueError: the model has more than 2 GB, which a pickle of a ModelProto cannot hold.
    """
    live, setup = inner.live, inner.setup
    made = [component for _, component in components(setup)]
    made += [*(m.metric for m in setup.metrics), *setup.callbacks, *setup.backends]
    saved = Saved()
    standing = live.standing
    now = standing.manual if inner.loop is None else inner.loop.progress
    call_hook(trainer, "checkpoint_saving", progress=now, saved=saved)
    packed = Packed(
        model=inner.setup.model.as_read.export({}).SerializeToString(),
        arguments=inner.arguments,
        weights={**live.state(), **frozen_values(inner.setup.model)},
        standing=attrs.evolve(
            standing,
            manual=now,
            position=standing.position if inner.loop is None else inner.loop.position(),
            last=None,
            slots=live.slots(),
            buffers=live.buffers(),
            written=None,
            epoch=now.epoch,
        ),
        saved=saved,
        history=trainer.history_,
        classes=frozenset(class_paths.named(made)),
    )
    return rebuilt, (type(trainer), packed)


def rebuilt(cls: Callable[..., T], packed: Packed) -> T:
    """The Trainer of a pickle; it compiles at its first use."""
    classes: frozenset[str] = getattr(
        packed, "classes", frozenset()
    )  # which a pickle of 0.2 does not have
    plugins = Plugins.discover().for_data("the pickled Trainer", list(classes))
    model = with_values(packed.model, packed.arguments, packed.weights, plugins)
    trainer = cls(model, **packed.arguments, plugins=plugins)
    inner = internals_of(trainer)
    inner.live.replace({name: packed.weights[name] for name in inner.live.state()})
    inner.live.standing = packed.standing
    trainer.history_ = packed.history
    call_hook(trainer, "checkpoint_loading", saved=packed.saved)
    return trainer
