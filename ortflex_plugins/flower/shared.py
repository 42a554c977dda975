"""The tensors that travel between server and clients: their choice, packing and checks."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import io
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflex_core import (
    Array,
    ConfigError,
    DataError,
    buffer_value,
    find_changes,
    install_command,
    internals_of,
    running_statistics,
    short_repr,
    suggest,
    tensors_of,
)

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

    from ortflex_core import Trainer

Share = str | Iterable[str]
"""``"parameters"``, ``"adapters"``, or names and globs."""
_SHOWN = 5
DESCRIPTION = _CLASSES, _FIXED = "ortflex-classes", "ortflex-fixed"
"""The keys of the server's description in the configuration that it sends."""


def tensors(trainer: Trainer) -> dict[str, Array]:
    """Trained tensors and running statistics, by name, as they are now."""
    inner = internals_of(trainer)
    problem = inner.setup.problem
    predicted = tensors_of(inner.setup.requests)
    first = {name: buffer_value(problem, name) for name in running_statistics(problem, predicted)}
    return {**trainer.get_state(), **first, **inner.live.buffers()}


def shared_names(trainer: Trainer, share: Share) -> list[str]:
    """The names of the tensors that are shared."""
    known = list(tensors(trainer))
    if share == "parameters":
        return known
    if share == "adapters":
        return _adapters(trainer, known)
    patterns = [share] if isinstance(share, str) else list(share)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"share: expected 'parameters', 'adapters', or names and globs, got {share!r}"
        )
    wanted = [p for p in patterns if not p.startswith("!")]
    chosen = set() if wanted else set(known)
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        hits = {glob} & set(known) or set(fnmatch.filter(known, glob))
        if not hits:
            raise ConfigError(
                f"share: {pattern!r} matches no trained tensor; {suggest(glob, known)}"
            )
        if pattern.startswith("!"):
            chosen -= hits
        else:
            chosen |= hits
    if not chosen:
        raise ConfigError(f"share={share!r} leaves nothing to share of {', '.join(known)}")
    return [name for name in known if name in chosen]


def _adapters(trainer: Trainer, known: list[str]) -> list[str]:
    attached = getattr(trainer.model, "attachments", ())
    names = {spec.name for a in attached for spec in a.tensors.values()}
    if not names:
        raise ConfigError(
            "share='adapters': this training has no adapters; share='parameters' sends all "
            "trained tensors, share='layer*' those that match the glob"
        )
    return [name for name in known if name in names]


def pack_shared(trainer: Trainer, share: Share = "parameters") -> ArrayRecord:
    """The shared tensors of a Trainer as Flower's ArrayRecord.

    Args:
        trainer: the Trainer.
        share: ``"parameters"``, every trained tensor and the running statistics of
            BatchNormalization; ``"adapters"``; or names, globs and ``"!glob"``.

    Raises:
        ConfigError: a pattern fits nothing, there are no adapters, or Flower is not installed.
    """
    state = tensors(trainer)
    return as_record({name: state[name] for name in shared_names(trainer, share)})


def load_shared(trainer: Trainer, arrays: ArrayRecord, share: Share = "parameters") -> None:
    """Put the shared tensors of a message or of a strategy's result into a Trainer.

    Args:
        trainer: the Trainer.
        arrays: as :func:`pack_shared` makes them.
        share: as for :func:`pack_shared`.

    Raises:
        DataError: other names, other shapes, or values that are not numbers.
    """
    names = shared_names(trainer, share)
    given = as_arrays(arrays)
    check_arrays(given, {n: a for n, a in tensors(trainer).items() if n in names})
    put(trainer, given)


def description(trainer: Trainer) -> dict[str, Any]:
    """What the server's Trainer and a client's have in common besides the shapes of the shared tensors.

    It has the labels of the classes in the order of the scores, and a digest of the weights that edits
    drew and that are not trained: these are not sent.
    """
    classes = internals_of(trainer).setup.classes
    fixed = _fixed(trainer)
    digest = hashlib.sha256(b"".join(fixed[n].tobytes() for n in sorted(fixed))).hexdigest()
    return {
        **({} if classes is None else {_CLASSES: np.asarray(classes).tolist()}),
        **({_FIXED: digest} if fixed else {}),
    }


def check_description(trainer: Trainer, config: Mapping[str, Any]) -> None:
    """Compare a client's Trainer with the server's description in a configuration."""
    own = description(trainer)
    both = [d[_CLASSES] for d in (own, config) if _CLASSES in d]
    if len(both) == 2 and both[0] != both[1]:
        raise ConfigError(
            f"the classes of the client are {short_repr(both[0])}, those of the server "
            f"{short_repr(both[1])}; give both the same head, edits or classes"
        )
    if _FIXED in config and config[_FIXED] != own.get(_FIXED):
        names = ", ".join(_fixed(trainer)) or "none here"
        raise ConfigError(
            f"edits drew weights that are not trained, and so are not sent ({names}), with other values "
            "on the client than on the server; give both the same seed and edits, or train these weights"
        )


def _fixed(trainer: Trainer) -> dict[str, Array]:
    """The weights that edits drew and that are not trained."""
    model = trainer.model
    new = find_changes(model).new if internals_of(trainer).setup.edits else ()
    trained = trainer.get_state()
    return {name: model.initializer(name) for name in new if name not in trained}


def check_arrays(given: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Refuse arrays whose names or shapes differ from the expected ones."""
    lines = []
    if missing := {name: a for name, a in expected.items() if name not in given}:
        lines.append(f"missing are {_listed(missing)}")
    if unknown := {name: a for name, a in given.items() if name not in expected}:
        lines.append(f"not shared here are {_listed(unknown)}")
    for name, array in given.items():
        old = expected.get(name)
        if old is None:
            continue
        if array.shape != old.shape or array.dtype.kind not in "iuf":
            lines.append(f"{name!r} is {_kind(old)}, got {_kind(array)}")
        elif not np.isfinite(array).all():
            lines.append(f"{name!r} has values that are not finite")
    if lines:
        further = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise DataError(
            f"the arrays are not those that are shared: {'; '.join(lines[:_SHOWN])}{further}. Server and "
            "clients need the same model, head, edits, params and share; the strategy has to keep names "
            "and shapes"
        )


def put(trainer: Trainer, values: Mapping[str, Array]) -> None:
    """Replace trained tensors and running statistics by values of these names."""
    inner = internals_of(trainer)
    weights = trainer.get_state()
    inner.forget_engine()
    trainer.set_state({name: array for name, array in values.items() if name in weights})
    now = tensors(trainer)
    fresh = {n: a.astype(now[n].dtype) for n, a in values.items() if n not in weights}
    standing = inner.live.standing
    standing.buffers = {**standing.buffers, **fresh}


def as_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Flower's record of these arrays; types that numpy's files do not have become float32."""
    app = require_flower()
    return app.ArrayRecord(
        {
            name: app.Array(
                np.ascontiguousarray(array, np.float32 if array.dtype.kind == "V" else None)
                if array.ndim
                else np.asarray(array)
            )
            for name, array in arrays.items()
        }
    )


def as_arrays(record: Any) -> dict[str, Array]:
    """The arrays of a record."""
    out = {}
    for name, array in record.items():
        try:
            out[name] = _values(array)
        except (TypeError, ValueError, EOFError, OSError, MemoryError) as error:
            raise DataError(f"the array {name!r} of the message cannot be read: {error}") from error
    return out


def _values(array: Any) -> Array:
    """An array of a message, whose header claims no more than its bytes hold."""
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    old = version == (1, 0)
    header = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    held = len(array.data) - file.tell()
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"it claims {dtype}{list(shape)}, and has {held} bytes")
    return np.asarray(array.numpy())


def _listed(arrays: Mapping[str, Array]) -> str:
    text = ", ".join(f"{name!r} {_kind(a)}" for name, a in list(arrays.items())[:_SHOWN])
    return text + (f" and {len(arrays) - _SHOWN} more" if len(arrays) > _SHOWN else "")


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


OLDEST = (1, 22)
"""The first version whose Message API has everything that is used here."""


def require_flower(module: str = "flwr.app") -> Any:
    """A module of Flower."""
    try:
        flwr = importlib.import_module("flwr")
    except ImportError as error:
        raise ConfigError(
            f"Flower is not installed: {install_command('stock', 'flower')}. It needs an environment with "
            "protobuf below version 7"
        ) from error
    version = str(getattr(flwr, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise ConfigError(
            f"Flower {version} is too old, its Message API lacks what is needed; expected "
            f"{'.'.join(map(str, OLDEST))} or newer: {install_command('stock', 'flower')} --upgrade"
        )
    return importlib.import_module(module)
