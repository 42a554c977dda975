"""Receipts: what an export says about its training, as JSON in the metadata of the model.

A receipt has digests of the model and the data before training and of the result, the arguments
that are not the defaults, and the versions that decide the bits; it is sealed by a digest of itself.
It has no values of data, and no path, host or account: a string that names a place becomes the
digest of the file. :mod:`ortflex_core.tools.verification` repeats the training.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from onnx import ModelProto

from ortflex_core.compiler.onnx_files.content import LENGTH, RECEIPT, content_of
from ortflex_core.kernel import digests
from ortflex_core.kernel.class_paths import is_class_path
from ortflex_core.kernel.construct import converter, explain
from ortflex_core.kernel.engine_protocols import DataSource
from ortflex_core.kernel.entries import OURS
from ortflex_core.kernel.errors import ModelError, OrtflexError
from ortflex_core.kernel.hooks import declares
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.regular_files import open_regular
from ortflex_core.kernel.types import Array
from ortflex_core.kernel.version import __version__
from ortflex_core.training import fingerprint
from ortflex_core.training.artifacts.checkpoint_record import seal, to_json
from ortflex_core.training.config.arguments import kinds_of_plugins
from ortflex_core.training.config.components import to_plain
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.data.iterables import IterableBatches
from ortflex_core.training.data.pieces import head, rows_of
from ortflex_core.training.differences import default_of
from ortflex_core.training.internals import Internals, Settings
from ortflex_core.training.standing import Training

_log = logging.getLogger("ortflex")
FORMAT = 1
MOST = 2048
"""The largest number of bytes of a receipt."""
SETTINGS = ("batch_size", "epochs", "shuffle", "seed", "learning_rate", "schedule")
"""The arguments that are attributes of a Trainer and may change between fits."""
APART = (
    *("backend", "callbacks", "check_finite", "distributed", "progress", "receipt", "threads"),
    "shard_state",
)
"""The arguments that are not in the recipe of a receipt, or in another form."""
_MOST_OF_A_FILE = 64 << 30
"""The bytes of a file that is read for its digest, such as the model of a teacher."""
_LEFT_OUT = "sha256:"
"""The beginning of a value of which only the digest is kept."""
_FEATURES = (
    *("AVX512_SPR", "AVX512_ICL", "AVX512_CNL", "AVX512_CLX", "AVX512_SKX", "AVX512F", "AVX2"),
    *("AVX", "SVE", "ASIMDFHM", "ASIMDDP", "ASIMD", "NEON", "VSX4", "VSX3", "VXE2", "RVV", "LSX"),
)
"""The features of CPUs for which libraries have kernels of their own, the newest of each family first."""


@attrs.frozen(kw_only=True)
class Receipt:
    """The content of a receipt.

    Attributes:
        format: the version of this form.
        model: the digest of the model before training.
        parent: the digest of the receipt that this model had, if any.
        recipe: a digest of all arguments, those with default values included.
        arguments: the arguments that are not the defaults.
        unnamed: arguments whose objects cannot be written to a file.
        data: digests of the data (``columns``), and how they were read (``read``).
        validation: the same of the validation data, or the fraction that was held out.
        limit: ``steps_per_epoch``.
        stratify: whether rows of each class were held out.
        fits: how many times ``fit`` was called.
        epochs: the finished epochs of the last fit.
        steps: its finished steps.
        backend: the backend that trained.
        threads: its threads.
        versions: of ortflex, onnxruntime, numpy, onnx and the distributions of plugins.
        cpu: the machine, and its newest instructions.
        obstacles: the reasons why the training cannot be repeated.
        export: the arguments of the export.
        tensors: the digest of the tensors of the export.
        graph: the digest of everything else in it.
        digest: the digest of the receipt.
    """

    format: int
    model: str
    recipe: str
    tensors: str
    graph: str
    digest: str
    versions: dict[str, str]
    parent: str = ""
    arguments: Any = attrs.field(factory=dict)
    unnamed: tuple[str, ...] = ()
    data: Any = attrs.field(factory=dict)
    validation: Any = None
    limit: int | None = None
    stratify: bool = False
    fits: int = 0
    epochs: int = 0
    steps: int = 0
    backend: str | None = None
    threads: int = 1
    cpu: str = ""
    obstacles: tuple[str, ...] = ()
    export: dict[str, bool] = attrs.field(factory=dict)


def read(model: ModelProto, label: str) -> Receipt | None:
    """The receipt of a model; None if it has none."""
    texts = [entry.value for entry in model.metadata_props if entry.key == RECEIPT]
    return parse(texts[0], label) if texts else None


def parse(text: str, label: str) -> Receipt:
    """A receipt from its text."""
    broken = f"{label}: the receipt is damaged"
    if len(text.encode()) > MOST:
        raise ModelError(f"{broken}: it has more than {MOST} bytes")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{broken}: it is not JSON: {error}") from error
    if not isinstance(table, dict) or _text(_sealed(table)) != text:
        raise ModelError(f"{broken}: its digest differs from its content")
    if table.get("format") != FORMAT:
        raise ModelError(
            f"{label}: the receipt has the format {table.get('format')!r}, but this version reads "
            f"format {FORMAT}; use the version of ortflex that wrote it"
        )
    try:
        receipt: Receipt = converter(tuple).structure(table, Receipt)
    except Exception as error:  # cattrs raises groups
        raise ModelError(f"{broken}: {'; '.join(explain(error, 'receipt')[:3])}") from error
    return receipt


def _sealed(table: Mapping[str, Any]) -> dict[str, Any]:
    out = seal(table)
    return {**out, "digest": out["digest"][:LENGTH]}


def _text(table: Mapping[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"))


# ------------------------------------------------------------------ what a training had


def begin(
    inner: Internals,
    settings: Settings,
    given: Any,
    feed: Feed,
    validation_data: Any,
    validation: Feed | None,
    options: Mapping[str, Any],
) -> Training:
    """Describe a fit that begins; ``feed`` and ``validation`` are the data as they were opened."""
    standing = inner.live.standing
    before, continues = standing.training, standing.position is not None
    held: Any = validation_data if isinstance(validation_data, float) else None
    if held is None and validation is not None:
        held = describe(validation, validation_data, inner)
    facts = {
        "data": describe(feed, given, inner),
        "validation": held,
        **options,
        "settings": changed_settings(inner, settings),
    }
    obstacles = () if before is None else before.obstacles
    if before is None and standing.fits > continues:
        obstacles = (*obstacles, "it had earlier fits, whose data are not known")
    elif before is not None and not continues and before.facts != facts:
        obstacles = (*obstacles, "its fits had different data or settings")
    if isinstance(feed.given, IterableBatches):
        obstacles = (*obstacles, "its data were an iterable of batches")
    if isinstance(validation, Feed) and isinstance(validation.given, IterableBatches):
        obstacles = (*obstacles, "its validation data were an iterable of batches")
    peers = inner.setup.problem.peers
    if peers is not None and peers.size > 1:
        obstacles = (*obstacles, f"{peers.size} processes trained together")
    return Training(facts=facts, obstacles=tuple(dict.fromkeys(obstacles)))


def changed_settings(inner: Internals, settings: Settings) -> dict[str, Any]:
    """The public attributes of a Trainer whose values are no longer those of its arguments."""
    setup = inner.setup
    given = {**inner.arguments, "learning_rate": setup.learning_rate, "schedule": setup.schedule}
    now = {name: getattr(settings, name) for name in SETTINGS}
    return {name: value for name, value in now.items() if value != given[name]}


def ended(training: Training, why: str) -> Training:
    """The description of a training that did not end as planned."""
    return attrs.evolve(training, obstacles=(*training.obstacles, why))


def describe(feed: Feed, given: Any, inner: Internals) -> dict[str, Any]:
    """Digests of data, and how a data source read them."""
    out: dict[str, Any] = {}
    if isinstance(feed.given, Columns):
        columns = dict(_columns(feed.given))
    elif isinstance(feed.given, IterableBatches):
        return out
    else:
        columns = dict(_columns(head(feed.given, feed.size.rows)))
        out["rows"] = rows_of(feed.given)
    out["columns"] = {
        name: f"{array.dtype}{list(array.shape)} {digests.of_array(array, digests.SAMPLE)}"
        for name, array in columns.items()
    }
    if isinstance(given, DataSource):
        try:
            read = fingerprint.argument(inner.plugins, "data", given)
            shortest = _without_defaults(type(given), read)
            out["read"] = without_places({k: v for k, v in shortest.items() if k != "path"})
        except (OrtflexError, TypeError, OverflowError):
            out["read"] = type(given).__name__
    return out


def _columns(columns: Columns) -> Iterator[tuple[str, Array]]:
    parts = {"input": columns.inputs, "label": columns.labels, "weight": columns.weights}
    taken: set[str] = set()
    for part, arrays in parts.items():
        for name, array in arrays.items():
            yield f"{part} {name}" if name in taken else name, array
            taken.add(name)


def _without_defaults(cls: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a component of a class without the parameters that have their defaults."""
    if not attrs.has(cls):
        return dict(table)
    plain = {f.alias or f.name: f.default for f in attrs.fields(cls)}
    return {k: v for k, v in table.items() if k == "name" or plain.get(k, attrs.NOTHING) != v}


# ------------------------------------------------------------------ what a recipe had


def recipe(
    inner: Internals, changes: Mapping[str, Any]
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """A digest of all arguments; those that are not the defaults; names of those that no file can hold.

    ``changes`` are the :data:`SETTINGS` that were changed after the Trainer was made.
    """
    setup, given = inner.setup, {**inner.arguments, **changes}
    kept = {name: value for name, value in given.items() if name not in APART}
    full, unnamed = fingerprint.written(setup, kept)
    if full.get("learning_rate") in (None, setup.optimizer.default_rate):
        full["learning_rate"] = None
    chosen, kinds = {}, kinds_of_plugins()
    for name, value in full.items():
        default = default_of(setup.plugins, name)
        if value != default or type(value) is not type(default):
            chosen[name] = _shortened(value, setup.plugins, kinds.get(name, ""))
    callbacks, objects = _callbacks(inner)
    if callbacks:
        chosen["callbacks"] = full["callbacks"] = callbacks
    names = (*unnamed, *(("callbacks",) if objects else ()))
    return digest(without_places(full)), without_places(chosen), names


def digest(value: Any) -> str:
    """A digest of JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def _shortened(value: Any, plugins: Plugins, kind: str) -> Any:
    """Tables of components without parameters that have their defaults; a name if no other is left."""
    if isinstance(value, list):
        return [_shortened(part, plugins, kind) for part in value]
    if not (isinstance(value, Mapping) and kind):
        return value
    if not isinstance(value.get("name"), str):
        return {key: _shortened(part, plugins, kind) for key, part in value.items()}
    try:
        cls = plugins[kind].load(value["name"])
    except OrtflexError:
        return value
    short = _without_defaults(cls, value)
    return short["name"] if len(short) == 1 else short


def changes_training(callback: object) -> bool:
    """Whether a callback may change weights or batches; others observe, or write files."""
    return declares(callback, "every_rank") or hasattr(callback, "batch_drawn")


def _callbacks(inner: Internals) -> tuple[list[Any], bool]:
    """The callbacks that may change a training, as tables; and whether others have no name."""
    tables, objects = [], False
    for given, made in zip(inner.arguments["callbacks"], inner.setup.callbacks, strict=True):
        if not changes_training(made):
            continue
        if isinstance(given, str | Mapping):
            tables.append(to_json(to_plain(given)))
            continue
        entry = inner.plugins["callbacks"].entry_of(made)
        if entry is None or not attrs.has(type(made)):
            objects = True
            continue
        table = {
            f.alias or f.name: getattr(made, f.name) for f in attrs.fields(type(made)) if f.init
        }
        table = _without_defaults(type(made), {"name": entry.name, **table})
        try:
            tables.append(to_json(to_plain(table)) if len(table) > 1 else entry.name)
        except TypeError:
            objects = True
    return tables, objects


# ------------------------------------------------------------------ places


def without_places(value: Any) -> Any:
    """A value without paths and addresses: digests of the files take their place.

    >>> without_places({"name": "adam", "by": "https://me:secret@host"})
    {'name': 'adam', 'by': 'sha256:not a file'}
    """
    if isinstance(value, Mapping):
        return {key: without_places(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if is_class_path(value):
        module, _, name = value.rpartition(":")
        file = (
            module if module.endswith(".py") else getattr(sys.modules.get(module), "__file__", "")
        )
        named = "" if module.endswith(".py") else f"{module}@"
        return f"{named}{_of_file(file or '')}:{name}"
    return _of_file(value) if is_place(value) else value


def is_place(text: str) -> bool:
    r"""Whether a string names a file, a folder or an address, not a tensor or a component.

    >>> is_place("~/data.npz"), is_place("C:\\data"), is_place("s3://bucket/key")
    (True, True, True)
    >>> is_place("/encoder/layer.0/*"), is_place("validation_loss"), is_place("*.weight")
    (False, False, False)
    """
    if text.startswith("~") or "://" in text or re.match(r"[A-Za-z]:[\\/]|\\\\", text):
        return True
    try:
        path = Path(text)
        if path.is_absolute() and len(path.parts) > 1:
            return os.path.lexists(Path(*path.parts[:2]))
        has_form = len(path.parts) > 1 or bool(path.suffix)
        return has_form and os.path.lexists(path)
    except (OSError, ValueError):
        return False


def _of_file(path: str) -> str:
    try:
        with open_regular(path, _MOST_OF_A_FILE) as file:
            return _LEFT_OUT + hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]
    except (OSError, ValueError):
        return f"{_LEFT_OUT}not a file"


# ------------------------------------------------------------------ the export


def sealing(
    inner: Internals, settings: Settings, export: Mapping[str, bool]
) -> Callable[[ModelProto, Mapping[str, Array]], None] | None:
    """A function that puts the receipt of a training into its export; None before any training.

    Without ``receipt=True`` it removes the receipt of the model's file, which is of another training.
    """
    standing = inner.live.standing
    now = standing.manual if inner.loop is None else inner.loop.progress
    if not (standing.fits or now.step):
        return None
    source = inner.setup.model.as_read
    if not inner.arguments["receipt"]:
        return None if source.receipt is None else lambda model, _: _remove(model)
    try:
        training = _of_training(inner, settings)
    except (OrtflexError, TypeError, ValueError) as error:  # no export is lost for its receipt
        _log.warning("the export has no receipt: %s", error)
        return lambda model, _: _remove(model)
    table = {
        "format": FORMAT,
        "model": source.content.digest,
        "parent": _digest_of(source.receipt),
        **training,
        "fits": standing.fits,
        "epochs": now.epoch,
        "steps": now.step,
        "backend": inner.live.backend or standing.backend,
        "threads": inner.live.problem.threads,
        "versions": versions(inner),
        "cpu": cpu(),
        "export": {name: flag for name, flag in export.items() if flag},
    }

    def put(model: ModelProto, state: Mapping[str, Array]) -> None:
        _remove(model)
        content = content_of(model, inner.setup.model.files, state)
        whole = {**table, "tensors": content.tensors, "graph": content.graph}
        model.metadata_props.add(key=RECEIPT, value=_fitted(whole))

    return put


def _remove(model: ModelProto) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != RECEIPT]
    if len(kept) < len(model.metadata_props):
        del model.metadata_props[:]
        model.metadata_props.extend(kept)


def _digest_of(receipt: str | None) -> str:
    """The digest that a receipt has of itself; of its text if it is damaged."""
    if receipt is None:
        return ""
    try:
        return parse(receipt, "").digest
    except ModelError:
        return hashlib.sha256(receipt.encode()).hexdigest()[:LENGTH]


def _of_training(inner: Internals, settings: Settings) -> dict[str, Any]:
    standing = inner.live.standing
    training = standing.training
    facts: dict[str, Any] = {} if training is None else dict(training.facts)
    changes = facts.pop("settings", None)
    if changes is None:
        changes = changed_settings(inner, settings)
    whole, arguments, unnamed = recipe(inner, changes)
    obstacles = () if training is None else training.obstacles
    if training is None and standing.fits:
        why = "it was resumed from a checkpoint, which does not describe its data"
        obstacles = (*obstacles, why)
    if standing.by_hand:
        obstacles = (*obstacles, f"weights were changed by {', '.join(standing.by_hand)}")
    if inner.loop is not None and not inner.loop.ended:
        obstacles = (*obstacles, "it was exported before the training had ended")
    return {
        "recipe": whole,
        "arguments": arguments,
        "unnamed": unnamed,
        **facts,
        "obstacles": obstacles,
    }


def versions(inner: Internals) -> dict[str, str]:
    """The versions that decide the bits of a training; ``code`` is a digest of files with components."""
    used = fingerprint.versions(inner.setup)
    used |= fingerprint.of_backends(inner.setup, inner.live.backend)
    used |= dict.fromkeys(inner.hooks.installed, "")
    names = [inner.runtime.distribution, "numpy", "onnx", *sorted(used)]
    found = {name: version for name in names if (version := _installed(name))}
    out = {OURS: __version__} | found
    # The name of a file's distribution is its path.
    code = sorted(version for name, version in used.items() if name not in out)
    return {**out, "code": digest(code)} if code else out


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def cpu() -> str:
    """The machine and its newest instructions, which choose the kernels of numpy and onnxruntime."""
    features: Mapping[str, bool] = {}
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        with contextlib.suppress(ImportError):
            features = getattr(importlib.import_module(module), "__cpu_features__", features)
            break
    found = next((name for name in _FEATURES if features.get(name)), "")
    return f"{platform.machine()} {found}".strip()


# ------------------------------------------------------------------ at most 2 kB


def left_out(value: Any) -> str:
    """What stands for a value that is left out: its digest.

    >>> left_out([1, 2])
    'sha256:49a64717d5d4cb19'
    """
    return f"{_LEFT_OUT}{digest(value)[:16]}"


def is_left_out(value: Any) -> bool:
    """Whether only the digest of a value was kept, or that of a file."""
    return isinstance(value, str) and value.startswith(_LEFT_OUT)


def agrees(recorded: Any, value: Any) -> bool:
    """Whether a value is the recorded one, of which parts may be left out."""
    if recorded == value or recorded == left_out(value):
        return True
    if not (isinstance(recorded, Mapping) and isinstance(value, Mapping)):
        return False
    return recorded.keys() == value.keys() and all(agrees(v, value[k]) for k, v in recorded.items())


def _fitted(table: Mapping[str, Any]) -> str:
    """The sealed text of a receipt; the largest values are left out until it is small enough."""
    empty: tuple[Any, ...] = (None, "", (), [], {}, False)
    kept = {name: value for name, value in table.items() if value not in empty}
    kept = json.loads(json.dumps(kept, default=to_json))
    while len(_text(_sealed(kept))) > MOST:
        places = [place for place in _places(kept) if _size(place) > _SMALLEST]
        # If many small values are left: all arguments, all data, all versions.
        wholes = [(kept, name) for name in ("data", "validation", "arguments") if name in kept]
        wholes = [place for place in wholes if not is_left_out(place[0][place[1]])]
        if not (places or wholes):
            kept["versions"] = {
                OURS: kept["versions"].get(OURS, ""),
                "": left_out(kept["versions"]),
            }
            break
        holder, name = max(places or wholes, key=_size)
        short = left_out(holder[name])
        holder[name] = [short] if name in ("obstacles", "unnamed") and holder is kept else short
    return _text(_sealed(kept))


_SMALLEST = 2 * len(left_out(""))
"""Shorter values are not left out one by one."""


def _places(table: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The values that may be left out, each as a table and a key."""
    for name in ("arguments", "data", "validation"):
        if isinstance(inner := table.get(name), dict):
            yield from ((inner, key) for key in inner)
    yield from ((table, name) for name in ("obstacles", "unnamed") if name in table)


def _size(place: tuple[dict[str, Any], str]) -> int:
    holder, name = place
    return len(_text({"": holder[name]}))
