"""Forward and backward on any onnxruntime: our gradient graph, in two halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto

from ortflex_core.autodiff import RuleTable
from ortflex_core.errors import GraphError
from ortflex_core.protocols import Device
from ortflex_core.session import open_session, reason, session_options
from ortflex_plugins.layers.graphs import GRADIENT, gradient_program
from ortflex_plugins.layers.memory import Buffer
from ortflex_plugins.layers.mode import Mode
from ortflex_plugins.layers.splitting import split


class OwnGradient:
    """The two halves as sessions; what the first one keeps is memory, so it can be used again."""

    reuses = False
    """Outputs stay what they are."""

    def __init__(
        self,
        mode: Mode,
        wrt: Sequence[str],
        outputs: Sequence[str],
        rules: RuleTable,
        device: Device,
        threads: int,
    ) -> None:
        whole = gradient_program(mode, wrt, outputs, rules)
        halves = split(whole.proto())
        self.graphs = {
            "gradient": whole.proto(),
            "forward": halves.forward,
            "backward": halves.backward,
        }
        self.inputs = tuple(i.name for i in whole.inputs)
        self._saved = halves.saved
        self._forward = _Run("forward", halves.forward, device, threads)
        self._backward = _Run("backward", halves.backward, device, threads)

    def forward(self, feeds: Mapping[str, Buffer]) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
        """All outputs, and what :meth:`backward` reads."""
        made = self._forward(feeds)
        kept = {n: feeds[n] for n in self._backward.inputs if n in feeds}
        return made, kept | {n: made[n] for n in self._saved}

    def backward(
        self, cotangents: Mapping[str, Buffer], kept: Mapping[str, Buffer]
    ) -> dict[str, Buffer]:
        """Gradients by name; ``cotangents`` are called ``cotangent/<output>``."""
        feeds = {**kept, **cotangents}
        made = self._backward({n: feeds[n] for n in self._backward.inputs})
        return {n.removeprefix(GRADIENT): b for n, b in made.items()}


class _Run:
    """A session run on memory that others own; outputs are the runtime's own."""

    def __init__(self, name: str, model: ModelProto, device: Device, threads: int) -> None:
        self._name = name
        try:
            self._session = open_session(
                model.SerializeToString(), session_options(threads), device
            )
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(f"onnxruntime refuses the {name} graph: {reason(error)}") from error
        self.inputs = [i.name for i in model.graph.input]
        self._outputs = [o.name for o in model.graph.output]
        self._place = device.ort_device()

    def __call__(self, feeds: Mapping[str, Buffer]) -> dict[str, Buffer]:
        binding = self._session.io_binding()
        raw: Any = binding._iobinding
        for name in self.inputs:
            b = feeds[name]
            raw.bind_input(name, self._place, b.dtype.type, list(b.shape), b.pointer)
        for name in self._outputs:
            raw.bind_output(name, self._place)
        try:
            self._session._sess.run_with_iobinding(raw, None)
        except Exception as error:  # as above
            raise GraphError(f"the {self._name} graph failed: {reason(error)}") from error
        values = [v._ortvalue for v in binding.get_outputs()]
        return {n: Buffer.of_value(v) for n, v in zip(self._outputs, values, strict=True)}
