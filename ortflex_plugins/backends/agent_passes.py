"""onnxruntime's TrainingAgent on one graph: its forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortflex_core import (
    Device,
    GraphError,
    Program,
    Unsupported,
    Value,
    error_reason,
    keep_alive,
    session_options,
)


class Agent:
    """The runtime's TrainingAgent on one program, whose parameters are inputs with gradients."""

    def __init__(
        self, program: Program, parameters: Sequence[str], device: Device, threads: int
    ) -> None:
        import onnxruntime
        from onnxruntime.capi import _pybind_state as state

        config = state.OrtModuleGraphBuilderConfiguration()
        config.initializer_names = []
        config.initializer_names_to_train = []
        config.input_names_require_grad = list(parameters)
        config.build_gradient_graph = True
        builder = state.OrtModuleGraphBuilder()
        try:
            builder.initialize(program.model, config)
            builder.build(state.TrainingGraphTransformerConfiguration())
            self.model: bytes = builder.get_gradient_model()
            info = builder.get_graph_info()
            self._session = keep_alive(
                onnxruntime.InferenceSession(
                    self.model, session_options(threads), providers=device.providers()
                )
            )
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(
                f"onnxruntime cannot differentiate the model: {error_reason(error)}"
            ) from error
        self.inputs = [i.name for i in self._session.get_inputs()]
        self.outputs = list(info.user_output_names)
        fixed = set(info.output_grad_indices_non_differentiable)
        self.differentiable = [n for k, n in enumerate(self.outputs) if k not in fixed]
        fetches = [o.name for o in self._session.get_outputs()]
        owner = {gradient: name for name, gradient in info.user_input_grad_names.items()}
        self.gradients = [owner[f] for f in fetches]
        missing = sorted(set(parameters) - set(self.gradients))
        if missing:
            raise Unsupported(f"onnxruntime's builder gives no gradient for {', '.join(missing)}")
        place = device.ort_device()
        self._agent = state.TrainingAgent(
            self._session._sess,
            self.inputs,
            [place] * len(self.outputs),
            fetches,
            [place] * len(fetches),
            0,
        )
        self._cache = state.OrtValueCache()
        self._new_state = state.PartialGraphExecutionState
        self.vector = state.OrtValueVector

    def pack(self, values: Sequence[Value]) -> Any:
        """The runtime's vector of tensors, which holds references to them."""
        vector = self.vector()
        for value in values:
            vector.push_back(value)
        return vector

    def forward(self, feeds: Any, fetches: Any) -> Any:
        """Run to the outputs; the returned state serves one :meth:`backward`."""
        state = self._new_state()
        try:
            self._agent.run_forward(feeds, fetches, state, self._cache)
        except Exception as error:  # onnxruntime has its own exception classes
            raise GraphError(f"the forward graph failed: {error_reason(error)}") from error
        return state

    def backward(self, cotangents: Any, fetches: Any, state: Any) -> None:
        """Run from the cotangents of the outputs to the gradients."""
        try:
            self._agent.run_backward(cotangents, fetches, state)
        except Exception as error:  # onnxruntime has its own exception classes
            raise GraphError(f"the backward graph failed: {error_reason(error)}") from error
