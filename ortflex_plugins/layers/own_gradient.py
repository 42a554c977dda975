"""Forward and backward on any onnxruntime, by the two halves of our gradient graph."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from onnx import ModelProto

from ortflex_core import (
    Binder,
    Device,
    GraphError,
    MissingKernel,
    RuleTable,
    error_reason,
    missing_kernel,
    numpy_dtype,
    open_session,
    session_options,
)
from ortflex_plugins.layers.graphs import GRADIENT, Halves, gradient_program, split
from ortflex_plugins.layers.memory import Buffer
from ortflex_plugins.layers.mode import Mode


class OwnGradient:
    """The two halves as sessions. The tensors saved between them can be used more than once.

    Sessions are created at their first use, when the wanted gradients are known.
    """

    reuses = False
    """False: the backward pass does not change the outputs."""

    def __init__(
        self,
        mode: Mode,
        wrt: Sequence[str],
        outputs: Sequence[str],
        rules: RuleTable,
        device: Device,
        threads: int,
    ) -> None:
        program = gradient_program(mode, wrt, outputs, rules)
        self._gradient, self._wrt = program.proto(), tuple(wrt)
        self._device, self._threads = device, threads
        self._pairs: dict[tuple[str, ...], _Pair] = {}
        self.inputs = tuple(i.name for i in program.inputs)
        self._halves = halves = split(self._gradient)
        self.graphs = {
            "gradient": self._gradient,
            "forward": halves.forward,
            "backward": halves.backward,
        }

    def _pair(self, wanted: tuple[str, ...]) -> _Pair:
        """The sessions for some of the gradients; without gradients there is no backward pass."""
        if wanted not in self._pairs:
            halves = self._halves if wanted == self._wrt else split(self._gradient, wanted)
            backward = None
            if wanted:
                backward = _Run("backward", halves.backward, self._device, self._threads)
            forward = _Run("forward", halves.forward, self._device, self._threads)
            self._pairs[wanted] = _Pair(halves, forward, backward)
        return self._pairs[wanted]

    def forward(
        self, feeds: Mapping[str, Buffer], wanted: Container[str] | None = None
    ) -> tuple[dict[str, Buffer], Kept]:
        """All outputs, and the state from which :meth:`backward` computes the wanted gradients."""
        pair = self._pair(tuple(n for n in self._wrt if wanted is None or n in wanted))
        results = pair.forward(feeds)
        if pair.backward is None:
            return results, Kept({}, None)
        kept = {n: feeds[n] for n in pair.backward.inputs if n in feeds}
        return results, Kept(kept | {n: results[n] for n in pair.halves.saved}, pair.backward)

    def backward(self, cotangents: Mapping[str, Buffer], kept: Kept) -> dict[str, Buffer]:
        """Gradients by name; ``cotangents`` are called ``cotangent/<output>``."""
        if kept.run is None:
            return {}
        feeds = {**kept.buffers, **cotangents}
        results = kept.run({n: feeds[n] for n in kept.run.inputs})
        return {n.removeprefix(GRADIENT): b for n, b in results.items()}


class _Run:
    """A session that runs on the caller's memory; its outputs are in memory of the runtime."""

    def __init__(self, name: str, model: ModelProto, device: Device, threads: int) -> None:
        self._name = name
        try:
            self._session = open_session(
                model.SerializeToString(), session_options(threads), device
            )
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            if missing := missing_kernel(error, model, name, device):
                raise MissingKernel(missing) from error
            raise GraphError(
                f"onnxruntime refuses the {name} graph: {error_reason(error)}"
            ) from error
        self.inputs = [i.name for i in model.graph.input]
        self._outputs = {
            o.name: numpy_dtype(o.type.tensor_type.elem_type) for o in model.graph.output
        }
        self._place = device.ort_device()
        self._free: list[Binder] = []

    def __call__(self, feeds: Mapping[str, Buffer]) -> dict[str, Buffer]:
        try:
            binder = self._free.pop()  # only one thread may use a binding at a time
        except IndexError:
            binder = Binder(self._session, self._name)
        binder.lent(feeds, self.inputs, self._place)
        values = binder.fetch(self._outputs, self._place)
        self._free.append(binder)
        return {
            name: Buffer.of_value(value, dtype)
            for value, (name, dtype) in zip(values, self._outputs.items(), strict=True)
        }


class Kept(NamedTuple):
    """The tensors that a forward pass saves, and the run that reads them."""

    buffers: Mapping[str, Buffer]
    run: _Run | None


class _Pair(NamedTuple):
    halves: Halves
    forward: _Run
    backward: _Run | None
