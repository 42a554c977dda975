"""The prefix of a model as a session of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import onnx

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.programs.prefix import Prefix
from ortflex_core.compiler.runtime.session import open_session, session_options
from ortflex_core.kernel.digests import of_array
from ortflex_core.kernel.engine_protocols import Device
from ortflex_core.kernel.errors import GraphError, error_reason
from ortflex_core.kernel.types import Array

_MOST = 2**30
"""The bytes of weights that are constants of the graph; onnxruntime reads at most 2 GB."""


class PrefixSession:
    """A prefix in onnxruntime, with every optimization, from arrays of inputs to arrays of columns."""

    def __init__(self, prefix: Prefix, device: Device, threads: int = 1) -> None:
        model = prefix.problem.model
        program = prefix.program()
        proto = program.proto()
        specs = {key: spec for key, spec in program.takes.items() if isinstance(key, Port)}
        frozen = {str(k.of): s.name for k, s in specs.items() if k.role != "data"}
        self._inputs = {s.name: str(k.of) for k, s in specs.items() if k.role == "data"}
        self._names = {o.name: str(k.of) for k, o in program.gives.items()}  # type: ignore[union-attr]
        values = {label: model.initializer(name) for name, label in frozen.items()}
        self._large: Mapping[str, Array] = values
        if sum(array.nbytes for array in values.values()) < _MOST:
            # Constants, so that onnxruntime folds them into the products.
            self._large = {}
            for value in [i for i in proto.graph.input if i.name in values]:
                proto.graph.input.remove(value)
            proto.graph.initializer.extend(
                onnx.numpy_helper.from_array(array, label) for label, array in values.items()
            )
        self._program, self._values, self._device = program, values, device
        try:
            self._session = open_session(
                proto.SerializeToString(), session_options(threads), device
            )
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(f"the prefix of {model.label}: {error_reason(error)}") from error

    @cached_property
    def digest(self) -> str:
        """A digest of the graph, its weights, the runtime and the device."""
        import onnxruntime

        weights = sorted((label, of_array(array)) for label, array in self._values.items())
        facts = (self._program.key, weights, onnxruntime.__version__, self._device.providers())
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The columns that the prefix computes, for some rows."""
        feeds = {label: inputs[name] for label, name in self._inputs.items()}
        try:
            values: Any = self._session.run(list(self._names), {**feeds, **self._large})
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(f"the prefix failed: {error_reason(error)}") from error
        return dict(zip(self._names.values(), values, strict=True))
