"""The result of a check of a model: by node, by backend, as a summary, as a mapping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from ortflex_core.compiler.problem.parameters import Choice, shared
from ortflex_core.kernel.model_protocols import Product
from ortflex_core.tools.memory import MemoryReport
from ortflex_core.training.engines.backend_choice import refusals

Status = Literal["trainable", "passes", "frozen", "not differentiable", "no rule"]

_WORDS: Mapping[Status, str] = {
    "trainable": "trainable",
    "passes": "passing a gradient",
    "frozen": "frozen",
    "not differentiable": "not differentiable",
    "no rule": "no rule",
}


@attrs.frozen(kw_only=True)
class NodeReport:
    """One node: whether a gradient passes through it, why, and the parameters that it blocks."""

    index: int
    name: str
    operator: str
    domain: str
    status: Status
    reason: str
    parameters: tuple[str, ...] = ()
    """The trained initializers that the node reads."""
    blocks: tuple[str, ...] = ()
    """The parameters that cannot be trained because of this node."""


@attrs.frozen(kw_only=True)
class ModelReport:
    """The result of :func:`check_model`."""

    model: str
    opset: int
    outputs: tuple[str, ...]
    choices: tuple[Choice, ...]
    nodes: tuple[NodeReport, ...]
    backends: Mapping[str, tuple[str, ...]]
    """The reasons why each backend cannot train the model; empty if it can."""
    products: tuple[Product, ...] = ()
    """The products that adapters may be attached to."""
    notes: tuple[str, ...] = ()
    """Other facts that matter for training the model."""
    memory: MemoryReport | None = None
    """The memory of a step, if it was requested (:func:`~ortflex_core.estimate_memory`)."""

    @property
    def trainable(self) -> bool:
        """Whether some backend can train the model here."""
        return any(not reasons for reasons in self.backends.values())

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes there are of each status."""
        numbers = Counter(node.status for node in self.nodes)
        return {status: numbers[status] for status in _WORDS}

    @property
    def shared(self) -> dict[str, tuple[str, ...]]:
        """The parameters that several nodes read, with these nodes; each is trained as one parameter."""
        return shared((node.name or f"#{node.index}", node.parameters) for node in self.nodes)

    @property
    def summary(self) -> str:
        """The result in a few lines."""
        trained = [c.name for c in self.choices if c.trained]
        blocked = {name for node in self.nodes for name in node.blocks}
        counts = ", ".join(f"{n} {_WORDS[s]}" for s, n in self.counts.items() if n)  # type: ignore[index]
        lines = [
            f"{self.model}: opset {self.opset}, {len(self.nodes)} nodes ({counts})",
            f"{len(trained)} parameters; a gradient from {', '.join(self.outputs)} reaches "
            f"{len(trained) - len(blocked & set(trained))} of them",
        ]
        able = [name for name, reasons in self.backends.items() if not reasons]
        lines += [f"{name}: can train this model" for name in able] + refusals(self.backends)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "model": self.model,
            "opset": self.opset,
            "outputs": list(self.outputs),
            "trainable": self.trainable,
            "counts": self.counts,
            "shared": {name: list(readers) for name, readers in self.shared.items()},
            "parameters": [
                {"name": c.name, "trained": c.trained, "reason": c.reason} for c in self.choices
            ],
            "nodes": [attrs.asdict(node) for node in self.nodes],
            "adapter_targets": [attrs.asdict(product) for product in self.products],
            "backends": {
                name: {"can_train": not reasons, "reasons": list(reasons)}
                for name, reasons in self.backends.items()
            },
            "notes": list(self.notes),
            **({} if self.memory is None else {"memory": self.memory.to_dict()}),
        }
