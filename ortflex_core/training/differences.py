"""Differences between a Trainer and the Trainer of a checkpoint that change the result of training.

Every argument of the Trainer is compared, except those in :data:`FREE`. Arguments are first
compared in their written form; if they differ, their resolved values are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs

from ortflex_core.compiler.model.training_mode import normalized_by_batch
from ortflex_core.compiler.problem.losses import tensors_of
from ortflex_core.kernel.entries import OURS
from ortflex_core.kernel.errors import OrtflexError, printable
from ortflex_core.kernel.registry import Plugins
from ortflex_core.training import fingerprint
from ortflex_core.training.artifacts.checkpoint_record import Record
from ortflex_core.training.config.arguments import Arguments
from ortflex_core.training.fingerprint import Identity
from ortflex_core.training.internals import Internals
from ortflex_core.training.setup import Setup, resolve

FREE: Mapping[str, str] = {
    "params": "the trained tensors themselves are compared",
    "freeze": "the trained tensors themselves are compared",
    "epochs": "training may be extended",
    "backend": "every backend computes the same, to rounding",
    "recompute": "tensors that are recomputed are bit-identical",
    "device": "every device computes the same, to rounding",
    "threads": "they change only the speed of a step",
    "metrics": "they are reported, and nothing is trained on them",
    "callbacks": "they keep their own state",
    "reinitialize": "the weights come from the checkpoint",
    "cache": "the results of a prefix are the same, to rounding",
    "check_finite": "it refuses data and never changes them",
    "receipt": "it is metadata of the export",
    "distributed": "accumulate has the batches of all processes",
    "shard_state": "a checkpoint has the whole state of the optimizer",
    "progress": "it only changes what is displayed",
}
"""Arguments that may differ, and the reason why the result of training does not change."""

GO_ON = ("0.1.0",)
"""Versions whose checkpoints resume here bit-identically (test_saved_by_earlier_versions.py)."""

_NOTHING = object()
_SHOWN = 160


def arguments(
    record: Record, inner: Internals, identity: Identity, but: Collection[str] = ()
) -> dict[str, str]:
    """The arguments that differ, one line for each: ``learning_rate: was 0.1, is 0.5``.

    The arguments in ``but`` are not compared.
    """
    names = dict.fromkeys([*record.arguments, *record.unnamed, *identity.arguments])
    out: dict[str, str] = {}
    for name in names:
        if name in FREE or name in but:
            continue
        unnamed = name in record.unnamed, name in identity.unnamed
        if all(unnamed):
            continue
        old = record.arguments.get(name, _NOTHING)
        if old is _NOTHING and not unnamed[0]:
            old = default_of(inner.plugins, name)
        new = identity.arguments.get(name, _NOTHING)
        if not any(unnamed) and _same(inner, name, old, new):
            continue
        out[name] = "; ".join(_changes(name, old, new))
    return out


def frozen(record: Record, identity: Identity, buffers: Collection[str]) -> list[str]:
    """The initializers that are neither trained nor in ``buffers`` and have other values."""
    if record.frozen is None:  # a checkpoint of format 1
        return []
    names = dict.fromkeys([*record.frozen, *identity.frozen])
    return [n for n in names if n not in buffers and record.frozen.get(n) != identity.frozen.get(n)]


def versions(record: Record, now: Mapping[str, str]) -> list[str]:
    """The distributions whose plugins were used and that now have another version or are not used.

    ortflex itself may be newer than the checkpoint if that was written by a version in :data:`GO_ON`.
    """
    return [
        f"{name} was {old}, " + (f"is {now[name]}" if name in now else "is not used")
        for name, old in record.versions.items()
        if now.get(name) != old and not (name == OURS and old in GO_ON)
    ]


def data(was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """The differences between the columns of two sources, if both describe their columns."""
    old, new = (was or {}).get("columns"), now.get("columns")
    if not old or not new:
        return []
    out = [f"there is no {name!r} now" for name in old if name not in new]
    out += [f"there was no {name!r}" for name in new if name not in old]
    for name in (n for n in old if n in new):
        before, after = (f"{c['dtype']}{list(c['shape'])}" for c in (old[name], new[name]))
        if before != after:
            out.append(f"{name!r} was {before}, is {after}")
        elif old[name]["digest"] != new[name]["digest"]:
            out.append(f"{name!r} has other values, or its rows are in a different order")
    return out


def default_of(plugins: Plugins, name: str) -> Any:
    """The default of an argument that did not exist in the version that wrote the checkpoint."""
    field = getattr(attrs.fields(Arguments), name, None)
    if field is None or field.default is attrs.NOTHING:
        return _NOTHING
    return fingerprint.argument(plugins, name, field.default)


def _same(inner: Internals, name: str, old: Any, new: Any) -> bool:
    if old == new and type(old) is type(new):
        return True
    if old is _NOTHING or new is _NOTHING or name not in _MEANINGS:
        return False
    meaning = _MEANINGS[name]
    given = {**inner.arguments, "callbacks": (), "progress": False, name: old}
    setup = inner.setup
    own = [component for _, component in fingerprint.components(setup)]
    plugins = setup.plugins.for_data("the checkpoint", own)
    try:
        twin = resolve(inner.runtime, plugins, setup.model, Arguments(**given))
    except (OrtflexError, TypeError, ValueError):
        return False
    return bool(meaning(twin) == meaning(setup))


# The resolved values of arguments that can be written in several ways.
_MEANINGS: Mapping[str, Callable[[Setup], Any]] = {
    "loss": lambda setup: setup.requests,
    "penalty": lambda setup: setup.problem.penalties,
    "optimizer": lambda setup: setup.optimizer,
    "learning_rate": lambda setup: setup.learning_rate,
    "schedule": lambda setup: setup.schedule,
    "groups": lambda setup: (setup.problem.updating.groups, setup.problem.penalties),
    "transforms": lambda setup: setup.problem.updating.transforms,
    "constraint": lambda setup: setup.problem.updating.constraints,
    "precision": lambda setup: setup.problem.precision,
    "averaging": lambda setup: setup.problem.updating.average,
    "batch_norm": lambda setup: normalized_by_batch(setup.problem, tensors_of(setup.requests)),
}


def _changes(name: str, old: Any, new: Any) -> Iterator[str]:
    """The difference; for two tables of the same component, the parameters that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("name") == new.get("name"):
        for key in dict.fromkeys([*old, *new]):
            before, after = old.get(key, _NOTHING), new.get(key, _NOTHING)
            if before != after:
                yield from _changes(f"{name}.{key}", before, after)
        return
    yield f"{name}: was {_shown(old, new)}, is {_shown(new, old)}"


def _shown(value: Any, other: Any) -> str:
    if value is _NOTHING:
        unnamed = isinstance(other, str)
        return "an object that cannot be written to a file" if unnamed else "not given"
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        mine = value["name"]
        if not isinstance(other, Mapping) or other.get("name") != mine:
            value = mine
    text = repr(value)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…", lines=False)
