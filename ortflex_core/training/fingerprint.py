"""The identity of a Trainer: its model, arguments, plugins and frozen weights."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.compiler.graph import protos
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel import digests
from ortflex_core.kernel.component import Component
from ortflex_core.kernel.entries import Entry
from ortflex_core.kernel.errors import CheckpointError, OrtflexError
from ortflex_core.kernel.path_entries import path_entry
from ortflex_core.kernel.registry import Plugins
from ortflex_core.training.artifacts.checkpoint_record import to_json
from ortflex_core.training.config.components import Parts, to_plain
from ortflex_core.training.config.functions import OfFunction
from ortflex_core.training.setup import Setup

if TYPE_CHECKING:
    from ortflex_core.compiler.model.model import Model


TEACHER = "teacher of loss "
"""The beginning of the name of a teacher among the frozen weights; the number of the loss follows."""


@attrs.frozen(kw_only=True)
class Identity:
    """The part that is the same in every checkpoint of a Trainer; computed once.

    ``versions`` has the distributions whose plugins are used, except backends; ``frozen`` has a
    digest of every initializer that is not trained, and of the teachers of losses.
    """

    structure: str
    arguments: dict[str, Any]
    unnamed: tuple[str, ...]
    versions: dict[str, str]
    frozen: dict[str, str]

    @classmethod
    def of(cls, setup: Setup, given: Mapping[str, Any]) -> Identity:
        """Model, arguments and plugins of a Trainer, from its resolved and its given arguments."""
        arguments, unnamed = written(setup, given)
        return cls(
            structure=protos.structure(setup.model.proto),
            arguments=arguments,
            unnamed=tuple(unnamed),
            versions=versions(setup),
            frozen=_digests_of_frozen(setup.model, setup.problem.parameters)
            | {
                f"{TEACHER}{k}": request.teacher.digest
                for k, request in enumerate(setup.requests)
                if request.teacher is not None
            },
        )


def versions(setup: Setup) -> dict[str, str]:
    """The distributions whose plugins are used, except backends, with their versions."""
    return {entry.distribution: entry.version for entry in _entries(setup)}


def argument(plugins: Plugins, name: str, value: Any) -> Any:
    """The value of an argument as JSON, components as tables with every parameter."""
    return to_json(to_plain(Parts(plugins).spell_out(name, value)))


def of_backends(setup: Setup, only: str | None = "") -> dict[str, str]:
    """The distribution and version of the backend of that name, or of all backends that may be used."""
    registry = setup.plugins["backends"]
    entries = [registry.entry_of(b) for b in setup.backends if only in ("", b.name)]
    if setup.auto and (not entries or not only):
        entries += [entry for entry in registry if only in ("", entry.name)]
    return {entry.distribution: entry.version for entry in entries if entry is not None}


def written(setup: Setup, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A Trainer's arguments as JSON, and the names of those that cannot be written to a file."""
    out: dict[str, Any] = {}
    unnamed: list[str] = []
    # A checkpoint has the batches of all processes, so any number of processes can continue it.
    in_all = {"accumulate": setup.problem.updating.accumulate}
    for name, value in {**given, **in_all}.items():
        if name in ("distributed", "shard_state"):
            continue
        try:
            if name == "callbacks":
                known = setup.plugins["callbacks"]
                named = [v for v in value if isinstance(v, str | Mapping) or known.name_of(v)]
                if len(named) < len(value):
                    unnamed.append(name)
                value = named
            out[name] = argument(setup.plugins, name, value)
        except (OrtflexError, TypeError):
            unnamed.append(name)
        except OverflowError as error:
            raise CheckpointError(
                f"{name} has {error}, which a checkpoint cannot store; use a smaller one"
            ) from error
    return out, unnamed


def _with_parts(component: Component) -> Iterator[Component]:
    """A component, and those inside it."""
    yield component
    for field in attrs.fields(type(component)):
        value = getattr(component, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Component):
                yield from _with_parts(part)


def components(setup: Setup) -> Iterator[tuple[str, Any]]:
    """The components that change the result of a training, each with its kind."""
    updating = setup.problem.updating
    yield from (
        ("optimizers", setup.optimizer),
        *(("optimizers", group.optimizer) for group in updating.groups),
        *(("edits", edit) for edit in setup.edits),
        *(("quantizers", q) for q in (setup.quantizer,) if q is not None),
        *(("adapters", a.adapter) for a in getattr(setup.model, "attachments", ())),
        *(("transforms", term.transform) for term in updating.transforms),
        *(("constraints", term.constraint) for term in updating.constraints),
        *(("averages", average) for average in (updating.average,) if average is not None),
        *(("schedules", schedule) for schedule in _with_parts(setup.schedule)),
        ("precisions", setup.problem.precision),
        ("devices", setup.device),
        *(("losses", loss) for r in setup.requests for loss in _with_parts(r.loss)),
        *(("penalties", term.penalty) for term in setup.problem.penalties),
    )


def _entries(setup: Setup) -> Iterator[Entry]:
    plugins = setup.plugins
    for kind, component in components(setup):
        path = component.path if isinstance(component, OfFunction) else None
        if path is not None and path.rpartition(":")[0].endswith(".py"):
            yield path_entry(kind, path)
        elif (entry := plugins[kind].entry_of(component)) is not None:
            yield entry
    yield from plugins["gradients"]


def _digests_of_frozen(model: Model, trained: Collection[str]) -> dict[str, str]:
    """A digest of every initializer of a model's file, and of its adapters, that is not trained."""
    graph = model.proto.graph
    out = {
        tensor.name: digests.of_array(model_file.array_of(tensor, model.files))
        for tensor in graph.initializer
        if tensor.name not in trained
    }
    frozen = (name for name in model.attached if name not in trained)
    out |= {name: digests.of_array(model.initializer(name)) for name in frozen}
    for sparse in graph.sparse_initializer:
        content = sparse.SerializeToString(deterministic=True)
        out[sparse.values.name] = hashlib.sha256(content).hexdigest()[:32]
    model.files.release()
    return out
