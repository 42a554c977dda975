"""Forward and backward by a backend that differentiates by itself, such as training_agent."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import attrs
import onnx

from ortflex_core import Device, LayerBackend, Passes, Runtime, Unsupported
from ortflex_plugins.layers.graphs import COTANGENT, forward_program
from ortflex_plugins.layers.memory import Buffer
from ortflex_plugins.layers.mode import Mode


@attrs.define
class Flight:
    """A forward pass that waits for its backward pass: its inputs, its memory, the state of the runtime."""

    feeds: Mapping[str, Buffer]
    alive: Any
    state: Any


class BackendGradient:
    """The model's forward and backward pass, run by a backend.

    The state of onnxruntime's agent can be used once, so a second backward pass runs forward again.
    """

    reuses = True
    """True: the backward pass reuses the memory of the outputs, so callers have to copy them."""

    def __init__(
        self,
        mode: Mode,
        wrt: Sequence[str],
        outputs: Sequence[str],
        backend: LayerBackend,
        device: Device,
        runtime: Runtime,
        threads: int,
    ) -> None:
        replacing = backend.replacing(mode.model, wrt, outputs)
        program = forward_program(mode, wrt, replacing)
        try:
            self._passes: Passes = backend.passes(program, wrt, device, runtime, threads)
        except Unsupported as error:
            raise Unsupported(
                f"engine={backend.name!r} cannot run this layer; engine='fused' may:\n{error}"
            ) from None
        self.graphs = {"forward": program.proto()}
        # The runtime's own graph, if the backend has it.
        raw = getattr(self._passes, "model", program.model)
        self.graphs["gradient"] = onnx.load_model_from_string(raw)
        self.inputs = tuple(i.name for i in program.inputs)
        self._device = device
        self._specs = {s.name: s for s in (*program.inputs, *program.outputs)}

    def forward(
        self, feeds: Mapping[str, Buffer], wanted: Container[str] | None = None
    ) -> tuple[dict[str, Buffer], Flight]:
        """All outputs, and the state for :meth:`backward`, which always returns all gradients."""
        values = [feeds[n].value() for n in self._passes.inputs]
        packed, fetched = self._passes.pack(values), self._passes.pack([])
        state = self._passes.forward(packed, fetched)
        outputs = {n: Buffer.of_value(fetched[k]) for k, n in enumerate(self._passes.outputs)}
        return outputs, Flight(feeds, (packed, values, fetched), state)

    def backward(self, cotangents: Mapping[str, Buffer], kept: Flight) -> dict[str, Buffer]:
        """Gradients by name; ``cotangents`` are called ``cotangent/<output>``."""
        if kept.state is None:
            _, again = self.forward(kept.feeds)
            kept.alive, kept.state = again.alive, again.state
        state, kept.state = kept.state, None
        given = []
        for name in self._passes.differentiable:
            cotangent = cotangents.get(f"{COTANGENT}{name}")
            if cotangent is None:  # new running statistics, which are not differentiated
                shape = [d for d in self._specs[name].shape or () if isinstance(d, int)]
                cotangent = Buffer.zeros(shape, self._specs[name].numpy, self._device)
            given.append(cotangent.value())
        fetched = self._passes.pack([])
        self._passes.backward(self._passes.pack(given), fetched, state)
        return {n: Buffer.of_value(fetched[k]) for k, n in enumerate(self._passes.gradients)}
