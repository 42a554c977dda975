"""BatchNormalization and Dropout in a layer, as in torch's train() and eval()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
from onnx import NodeProto, TensorProto

from ortflex_core import (
    Array,
    Model,
    Modes,
    Tensor,
    TensorSpec,
    Trace,
    buffer_spec,
    buffer_value,
    dropout,
    rewrite_for_inference,
    trains_statistics,
)

STEP = "dropout/step"
"""The input that masks depend on, an int64 scalar."""


@attrs.frozen(kw_only=True)
class Mode:
    """How a model runs: ``training`` as in torch; with None every node runs as in the file."""

    model: Model
    training: bool | None
    batch_norm: Literal["train", "freeze"] = "train"
    dropout: Literal["file", "off"] | float = "file"
    seed: int = 0
    parameters: tuple[str, ...] = ()
    later: frozenset[str] = frozenset()
    observing: bool = False

    def statistics(self) -> dict[str, TensorSpec]:
        """The running statistics of BatchNormalization; empty if every node runs as in the file."""
        if self.training is None:
            return {}
        names = [
            name
            for node in self.model.ancestors(o.name for o in self.model.outputs)
            if node.op_type == "BatchNormalization" and trains_statistics(self, node)
            for name in node.input[3:5]
        ]
        return {name: buffer_spec(self, name) for name in dict.fromkeys(names)}

    def start(self, statistics: Sequence[str]) -> dict[str, Array]:
        """The values of running statistics in the file."""
        return {name: buffer_value(self, name) for name in statistics}

    @property
    def matters(self) -> bool:
        """Whether training mode makes a difference."""
        nodes = self.model.internal.graph.node
        return any(
            n.op_type in ("BatchNormalization", "Dropout") and n.domain in ("", "ai.onnx")
            for n in nodes
        )

    def rewrite(self, statistics: Mapping[str, Tensor], plain: bool) -> Rewriting:
        """The rewrite of one replay; ``plain`` writes BatchNormalization with simple operators."""
        return Rewriting(self, statistics, plain)


class Rewriting:
    """A rewrite for :meth:`ortflex_core.compiler.model.Model.replay`; ``updates`` are new statistics."""

    def __init__(self, mode: Mode, statistics: Mapping[str, Tensor], plain: bool) -> None:
        self._mode = mode
        self._plain = plain
        self._modes = Modes(mode, statistics)
        self._frozen = Modes(attrs.evolve(mode, batch_norm="freeze"), {})

    @property
    def updates(self) -> dict[str, Tensor]:
        """New running statistics, after the replay."""
        return self._modes.updates

    def __call__(
        self, trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        """Replace the node, or return None to keep it."""
        mode = self._mode
        if mode.training is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Dropout" and mode.training and mode.dropout != "off":
            return self._dropout(trace, node, inputs)
        if node.op_type == "BatchNormalization":
            if mode.training and trains_statistics(mode, node):
                return self._modes(trace, node, inputs)
            if self._plain:
                return self._frozen(trace, node, inputs)
        return rewrite_for_inference(trace, node, inputs)

    def _dropout(
        self, trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        """Drop by the ratio of the file; its training_mode has no effect, since torch's train() decides."""
        x, given = (*inputs, None)[:2]
        assert x is not None
        ratio: float | Tensor = 0.5 if given is None else given
        if not isinstance(self._mode.dropout, str):
            ratio = float(self._mode.dropout)
        if isinstance(ratio, Tensor) and ratio.constant is not None:
            ratio = float(ratio.constant.item())
        if ratio == 0:
            return rewrite_for_inference(trace, node, inputs)
        known = trace.inputs.get(STEP)
        step = trace.input(STEP, TensorProto.INT64, ()) if known is None else known
        masked = dropout(trace.op, x, ratio, step, seed=self._mode.seed, node=node.output[0])
        return masked[: len(node.output)]
