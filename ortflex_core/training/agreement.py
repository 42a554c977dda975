"""The facts that all processes must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ortflex_core.kernel import digests
from ortflex_core.kernel.batches import Source
from ortflex_core.kernel.errors import short_repr
from ortflex_core.kernel.version import __version__
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.fingerprint import Identity
from ortflex_core.training.internals import Internals

# They may differ from process to process.
_OWN = ("callbacks", "progress", "distributed")


def facts(inner: Internals, source: Source | None = None) -> dict[str, str]:
    """Model, recipe, versions, data and state of a process, for messages."""
    identity = inner.live.standing.identity or Identity.of(inner.setup, inner.arguments)
    inner.live.standing.identity = identity
    weights = hashlib.sha256()
    peers = inner.setup.problem.peers
    divided = peers is not None and peers.shards
    # A state that is divided would have to be put together, which takes the memory that this saves.
    slots = {} if divided else inner.live.slots()
    for part in (inner.live.state(buffers=True), slots):
        for name, array in part.items():
            weights.update(name.encode() + array.tobytes())
    out = {"the model": identity.structure[:12], "ortflex": __version__}
    out["the argument shard_state"] = str(divided)
    out |= {"the runtime": str(inner.runtime), "the backend": str(inner.live.backend)}
    out |= {f"the version of {name}": version for name, version in identity.versions.items()}
    for name, value in identity.arguments.items():
        if name not in _OWN:
            text, full_text = short_repr(value), repr(value)
            digest = hashlib.sha256(full_text.encode()).hexdigest()[:12]
            out[f"the argument {name}"] = text if text == full_text else f"{text}… ({digest})"
    out |= {f"the frozen weight {name}": digest[:12] for name, digest in identity.frozen.items()}
    out |= {
        f"the {kind} {spec.name}": f"{spec}"
        for term in inner.live.problem.terms
        for kind, spec in (("label", term.label), ("sample weight", term.weight))
        if spec is not None
    }
    if source is not None:
        out |= {"the number of rows": str(source.rows), "the batches per epoch": str(source.steps)}
        out |= _columns("column", source.position().get("columns", {}))
    out["the weights and the optimizer's state at the start"] = weights.hexdigest()[:12]
    return out


def validation_facts(columns: Columns) -> dict[str, str]:
    """The validation data of a process, for messages; for data in pieces, the first rows."""
    parts = digests.of_columns({**columns.inputs, **columns.labels, **columns.weights})
    return {"the validation rows": str(columns.rows)} | _columns("validation column", parts)


def _columns(what: str, described: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"the {what} {name}": f"{column['dtype']}{column['shape']} {column['digest'][:12]}"
        for name, column in described.items()
    }
