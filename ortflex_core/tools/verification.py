"""Whether an export is what its receipt says: its digests, and its training, repeated to the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.compiler.onnx_files.content import RECEIPT, Content, content_of
from ortflex_core.compiler.onnx_files.external_data import DataFiles
from ortflex_core.kernel.errors import ConfigError, ModelError, OrtflexError, printable
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array
from ortflex_core.training import receipt as receipts
from ortflex_core.training.config.arguments import Arguments
from ortflex_core.training.config.components import Parts
from ortflex_core.training.config.recipe import Recipe
from ortflex_core.training.internals import internals_of
from ortflex_core.training.receipt import Receipt
from ortflex_core.training.trainer import Trainer

Outcome = Literal["identical", "intact", "different", "not repeated"]
_EXPORT = ("free_batch", "inference")
_SHOWN = 200


@attrs.frozen(kw_only=True)
class TensorDifference:
    """A tensor of which the repeated training has other bits.

    ``numbers`` of its ``size`` numbers differ, by ``largest`` at most; None if one of the two lacks the
    tensor, or has another type or shape.
    """

    name: str
    size: int | None = None
    numbers: int | None = None
    largest: float | None = None


@attrs.frozen(kw_only=True)
class Verdict:
    """The result of :func:`verify`.

    Attributes:
        outcome: ``identical``: the repeated run is bit-identical. ``intact``: the digests of the
            receipt are right, and no run was repeated. ``different``: the file was changed after its
            export, or the repeated run gives other bits. ``not repeated``: the file has no receipt, or
            its run cannot be repeated here.
        reasons: the reasons for the outcome, one line each.
        tensors: the tensors with other bits.
        compared: the number of tensors that were compared with those of the repeated run.
        receipt: the receipt, if there is one.
    """

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    compared: int = 0
    receipt: Receipt | None = None


def verify(
    trained: str | os.PathLike[str] | bytes | ModelProto,
    model: Any = None,
    data: Any = None,
    *,
    validation: Any = None,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    plugins: Plugins | None = None,
    progress: bool | None = False,
    **arguments: Any,
) -> Verdict:
    """Compare an export with its receipt and, if a model and data are given, with a repeated run.

    A receipt is data: it names installed components, and neither files nor classes. A program that
    changes a file can also write a receipt that fits the changed file, so only a repeated run is a proof.

    Args:
        trained: the export.
        model: the model before training. Without it and ``recipe``, only the digests are compared.
        data: the training data: a path, a data source, ``X``, or ``(X, y)`` or ``(X, y, sample_weight)``.
        validation: the validation data, in the same forms; a fraction is in the receipt.
        recipe: the recipe of the run, if the receipt has only digests of parts of it; the recipe also
            names the model and the data.
        plugins: the plugins with the components; by default all installed plugins.
        progress: as for the Trainer.
        arguments: objects for arguments of the Trainer that no receipt can hold (``loss=MyLoss()``).

    Raises:
        ModelError: ``trained`` or ``model`` cannot be read, or the receipt is damaged.
        ConfigError: a value of ``recipe`` or ``arguments`` is wrong.

    Example:
        >>> verify("trained.onnx", "model.onnx", (X, y)).outcome  # doctest: +SKIP
        'identical'
    """
    label = str(trained) if isinstance(trained, str | os.PathLike) else "the model"
    proto, files = model_file.load(trained, label)
    if sum(entry.key == RECEIPT for entry in proto.metadata_props) > 1:
        raise ModelError(f"{label}: the receipt is damaged: there are several")
    receipt = receipts.read(proto, label)
    if receipt is None:
        return Verdict(
            outcome="not repeated",
            reasons=(
                f"{label} has no receipt: it is not the export of a training of ortflex, was exported "
                "with receipt=False, or another program removed its metadata",
            ),
        )
    content = content_of(proto, files)
    changed = _changes(receipt, content)
    if model is None and recipe is None:
        return Verdict(
            outcome="different" if changed else "intact", reasons=changed, receipt=receipt
        )
    repeating = _Repetition(
        receipt=receipt,
        plugins=Plugins.given(plugins),
        recipe=recipe,
        given=arguments,
        progress=progress,
    )
    try:
        again = repeating.run(model, data, validation)
    except _NotRepeated as stop:
        return Verdict(
            outcome="different" if changed else "not repeated",
            reasons=(*changed, *stop.reasons),
            receipt=receipt,
        )
    tensors = tuple(_differences(proto, files, again))
    graph = content_of(again).graph == content.graph
    compared = len(proto.graph.initializer)
    if not tensors and graph and not changed:
        return Verdict(outcome="identical", compared=compared, receipt=receipt)
    reasons = list(changed)
    if tensors:
        reasons.append(f"the repeated training has other bits in {len(tensors)} tensors")
    if not graph:
        reasons.append("its graph or metadata are not those of the repeated export")
    causes = tuple(repeating.causes)
    return Verdict(
        outcome="not repeated" if causes and not changed else "different",
        reasons=(*reasons, *causes),
        tensors=tensors,
        compared=compared,
        receipt=receipt,
    )


def _changes(receipt: Receipt, content: Content) -> tuple[str, ...]:
    out = []
    if content.tensors != receipt.tensors:
        out.append("tensors were changed since the export: their digest is not that of the receipt")
    if content.graph != receipt.graph:
        out.append("the graph or the metadata were changed since the export")
    return tuple(out)


class _NotRepeated(Exception):
    """The training cannot be repeated."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(*reasons)
        self.reasons = reasons


@attrs.define(kw_only=True)
class _Repetition:
    """A training that is repeated from its receipt; ``causes`` are differences that may change bits."""

    receipt: Receipt
    plugins: Plugins
    recipe: str | os.PathLike[str] | Recipe | None
    given: Mapping[str, Any]
    progress: bool | None
    causes: list[str] = attrs.field(factory=list)

    def run(self, model: Any, data: Any, validation: Any) -> ModelProto:
        """The export of the repeated training."""
        receipt = self.receipt
        if receipt.obstacles:
            raise _NotRepeated(
                *(f"the training cannot be repeated: {why}" for why in receipt.obstacles)
            )
        loaded = self._loaded()
        if loaded is not None:
            model = loaded.model if model is None else model
            data = loaded.data if data is None else data
            held = loaded.validation
            validation = held if validation is None and not isinstance(held, float) else validation
        if data is None:
            raise _NotRepeated("there are no data: give those of the training")
        self._check_model(model)
        arguments = self._from_receipt() if loaded is None else self._from_recipe(loaded)
        try:
            trainer = self._trainer(model, arguments)
        except OrtflexError as error:
            raise _NotRepeated(f"the training cannot be repeated: {error}") from error
        self._check_recipe(trainer, of_user=loaded is not None)
        rows, held = self._data(trainer, data, validation)
        self._compare_circumstances(trainer)
        try:
            for _ in range(max(receipt.fits, 1)):
                trainer.fit(
                    *rows,
                    validation_data=held,
                    steps_per_epoch=receipt.limit,
                    stratify=receipt.stratify and isinstance(held, float),
                )
        except OrtflexError as error:
            raise _NotRepeated(f"the repeated training failed: {error}") from error
        if trainer.history_.interrupted:
            raise _NotRepeated("the repeated training was interrupted")
        free, inferring = (receipt.export.get(name) is True for name in _EXPORT)
        return trainer.export(free_batch=free, inference=inferring)

    def _loaded(self) -> Recipe | None:
        if self.recipe is None or isinstance(self.recipe, Recipe):
            return self.recipe
        return Recipe.load(self.recipe, plugins=self.plugins)

    def _check_model(self, model: Any) -> None:
        label = str(model) if isinstance(model, str | os.PathLike) else "the model"
        content = content_of(*model_file.load(model, label))
        if content.digest != self.receipt.model:
            raise _NotRepeated(
                f"{label} is not the model that was trained: its digest is {content.digest[:12]}…, that in "
                f"the receipt {self.receipt.model[:12]}…"
            )

    def _from_receipt(self) -> dict[str, Any]:
        """The arguments in the receipt, which name neither files nor classes, and those that are given."""
        arguments = self.receipt.arguments
        if missing := [name for name in self.receipt.unnamed if name not in self.given]:
            raise _NotRepeated(
                f"the receipt cannot hold the objects of {', '.join(missing)}: pass them to verify in "
                "Python, or pass the recipe"
            )
        if not isinstance(arguments, dict):
            raise _NotRepeated("the receipt has only a digest of the arguments: pass the recipe")
        wanted = {name: value for name, value in arguments.items() if name not in self.given}
        if parts := [name for name, value in wanted.items() if _has_digest(value)]:
            raise _NotRepeated(
                f"the receipt has only digests of {', '.join(parts)} (files, classes or long values): "
                "pass the recipe"
            )
        fields = attrs.fields_dict(Arguments)
        for name, value in wanted.items():
            known = name in fields and (name == "callbacks" or name not in receipts.APART)
            if not known or receipts.without_places(value) != value:
                raise _NotRepeated(
                    f"the receipt was not written by ortflex: {name} is {_short(value)}"
                )
        return {**wanted, **self.given}

    def _from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        """The arguments of a recipe, without callbacks that only observe or write files."""
        names = [field.name for field in attrs.fields(Arguments)]
        arguments = {name: getattr(recipe, name) for name in names}
        made = Parts(self.plugins).build("callbacks", arguments["callbacks"])
        pairs = zip(arguments["callbacks"], made, strict=True)
        arguments["callbacks"] = [given for given, one in pairs if receipts.changes_training(one)]
        return {**arguments, **self.given}

    def _trainer(self, model: Any, arguments: Mapping[str, Any]) -> Trainer:
        known, receipt = self.plugins, self.receipt
        if self.recipe is None:
            known = known.for_data(
                "the receipt", self.given, way_out="Pass the object: verify(…, {key}=…)"
            )
        own: dict[str, Any] = {
            "backend": receipt.backend or "auto",
            "threads": receipt.threads,
            "progress": self.progress,
            "receipt": True,
            "distributed": None,
        }
        trainer = Trainer(model, plugins=known, **{**arguments, **own})
        for made in internals_of(trainer).setup.callbacks:
            if not receipts.changes_training(made):
                raise ConfigError(f"callbacks: {type(made).__name__} changes no training")
        return trainer

    def _check_recipe(self, trainer: Trainer, *, of_user: bool) -> None:
        receipt = self.receipt
        whole, chosen, _ = receipts.recipe(internals_of(trainer), {})
        if whole == receipt.recipe:
            return
        was = receipt.arguments if isinstance(receipt.arguments, dict) else {}
        names = [n for n in {**was, **chosen} if not receipts.agrees(was.get(n), chosen.get(n))]
        lines = [f"{n}: was {_short(was.get(n))}, is {_short(chosen.get(n))}" for n in names]
        if of_user:
            what = "; ".join(lines) or "defaults or components of this version"
            raise _NotRepeated(f"the recipe is not that of the receipt: {what}")
        self.causes.append(
            f"arguments have other values or defaults here: {'; '.join(lines) or 'unknown'}"
        )

    def _data(self, trainer: Trainer, data: Any, validation: Any) -> tuple[tuple[Any, ...], Any]:
        """The data to train on and to validate with."""
        receipt = self.receipt
        rows = self._opened(trainer, "data", data, receipt.data)
        self._compare_data(trainer, "data", rows, receipt.data)
        held = receipt.validation
        if held is None or isinstance(held, float):
            return rows, held
        if validation is None:
            if isinstance(receipt.arguments, dict) and "callbacks" in receipt.arguments:
                raise _NotRepeated("the training had validation data: give them, too")
            self.causes.append("the training had validation data, which were not given")
            return rows, None
        given = self._opened(trainer, "validation", validation, held)
        self._compare_data(trainer, "validation data", given, held)
        return rows, given if len(given) > 1 else given[0]

    def _opened(self, trainer: Trainer, name: str, data: Any, was: Any) -> tuple[Any, ...]:
        if isinstance(data, tuple):
            return data
        parts = Parts(trainer.plugins)
        if not isinstance(data, str | os.PathLike | Mapping) or _is_arrays(data):
            return (data,)
        if isinstance(data, Mapping):
            return (Parts(self.plugins).build(name, data),)
        table = Parts(self.plugins).as_table(name, os.fspath(data))
        read = was.get("read") if isinstance(was, Mapping) else None
        if isinstance(read, dict) and read.get("name") == table["name"] and not _has_digest(read):
            if receipts.without_places(read) != read:
                raise _NotRepeated(
                    f"the receipt was not written by ortflex: it reads data by {read!r}"
                )
            table = {**read, **table}
        return (parts.build(name, table),)

    def _compare_data(self, trainer: Trainer, what: str, rows: tuple[Any, ...], was: Any) -> None:
        now = receipts.describe(trainer._feed(*rows), rows[0], internals_of(trainer))
        was = was if isinstance(was, Mapping) else {}
        old, new = was.get("columns"), now.get("columns")
        if receipts.agrees(old, new) and was.get("rows") == now.get("rows"):
            return
        lines = []
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names = [n for n in {**old, **new} if not receipts.agrees(old.get(n), new.get(n))]
            lines = [f"{n!r} was {_form(old.get(n))}, is {_form(new.get(n))}" for n in names]
        told = "; ".join(lines) or "their digests differ"
        raise _NotRepeated(f"the {what} are not those of the training: {told}")

    def _compare_circumstances(self, trainer: Trainer) -> None:
        """Note what is different here from where the model was trained."""
        receipt, inner = self.receipt, internals_of(trainer)
        now = receipts.versions(inner)
        for name, version in receipt.versions.items():
            if now.get(name) != version:
                self.causes.append(f"{name} was {version}, is {now.get(name, 'not used')}")
        if receipt.cpu != receipts.cpu():
            self.causes.append(f"the CPU was {receipt.cpu or 'unknown'}, is {receipts.cpu()}")


def _is_arrays(data: Any) -> bool:
    """Whether a mapping has arrays by the names of inputs, not a data source."""
    return isinstance(data, Mapping) and not any(
        isinstance(data.get(key), str) for key in ("name", "path")
    )


def _has_digest(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_digest, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_digest, value))
    return receipts.is_left_out(value)


def _form(text: Any) -> str:
    """A column of the data: type, shape and the beginning of its digest."""
    if text is None:
        return "not there"
    form, _, digest = str(text).rpartition(" ")
    return f"{form} {digest[:12]}…"


def _short(value: Any) -> str:
    text = "the default" if value is None else repr(value)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…", lines=False)


def _differences(
    proto: ModelProto, files: DataFiles, again: ModelProto
) -> Iterator[TensorDifference]:
    new = {tensor.name: tensor for tensor in again.graph.initializer}
    for tensor in proto.graph.initializer:
        other = new.pop(tensor.name, None)
        form = (tensor.data_type, list(tensor.dims))
        if other is None or form != (other.data_type, list(other.dims)):
            yield TensorDifference(name=tensor.name)
            continue
        was, now = model_file.array_of(tensor, files), model_file.array_of(other)
        if (found := _difference(tensor.name, was, now)) is not None:
            yield found
    yield from (TensorDifference(name=name) for name in new)


def _difference(name: str, was: Array, now: Array) -> TensorDifference | None:
    if was.dtype == object:
        differ = was != now
        return (
            TensorDifference(name=name, size=was.size, numbers=int(differ.sum()))
            if differ.any()
            else None
        )
    width = was.dtype.itemsize
    bits = [
        np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, width) for a in (was, now)
    ]
    numbers = int((bits[0] != bits[1]).any(axis=1).sum())
    if not numbers:
        return None
    largest = None
    with np.errstate(all="ignore"):
        if was.dtype.kind in "iubf":
            delta = np.abs(was.astype(np.float64) - now.astype(np.float64))
            largest = float(np.nanmax(delta)) if not np.isnan(delta).all() else None
    return TensorDifference(name=name, size=was.size, numbers=numbers, largest=largest)
