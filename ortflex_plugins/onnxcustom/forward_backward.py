"""The forward and the backward pass of a model, by the older API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from ortflex_core import (
    FLOATS,
    Array,
    ConfigError,
    DataError,
    Model,
    ModelError,
    OrtflexError,
    reads,
    suggest,
)
from ortflex_plugins.layers import Buffer, OnnxFunction
from ortflex_plugins.onnxcustom.base import save_graphs
from ortflex_plugins.onnxcustom.checks import check_model
from ortflex_plugins.onnxcustom.devices import own_values, own_vector, plain, plugins, this_runtime
from ortflex_plugins.onnxcustom.weights import check_weights, get_train_initializer

_AGENT = "training_agent"
_DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}
_log = logging.getLogger("ortflex")


class OrtGradientForwardBackward:
    """A model whose weights are inputs, and its gradients; instances of :meth:`new_instance` run it.

    onnxruntime's TrainingAgent runs it if it is installed and has the right gradients, otherwise the
    gradient graph of the backend ``fused``.

    Args:
        onnx_model: the model.
        weights_to_train: names of float initializers, in alphabetical order, which must also be the
            order of the initializers (see :func:`onnx_rename_weights`); None for all.
        input_names, output_names: None, or all names of the model's inputs and outputs.
        class_name: the name of the class of :meth:`new_instance`.
        sess_options, provider_options, run_options, graph_builder_config: must be None, because the
            core creates the sessions.
        providers: None, ``"cpu"``, ``"cuda"``, or names of execution providers.
        device_index: the number of a GPU.
        enable_logging: log every action to the logger ``onnxcustom``.
        debug: kept for compatibility; inputs of other types than the model's are always refused.

    Raises:
        ModelError: a name does not exist, or the names are in another order.
        ConfigError: the providers are unknown, or an option is not supported.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] X) => (float[N, 1] Y) '
    ...     "<float[2, 1] coef = {1, 2}> { Y = MatMul(X, coef) }"
    ... )
    >>> function = OrtGradientForwardBackward(model).new_instance()
    >>> X, coef = np.ones((3, 2), np.float32), np.ones((2, 1), np.float32)
    >>> _ = function.forward([X, coef], training=True)
    >>> [g.numpy().ravel().tolist() for g in function.backward([np.ones((3, 1), np.float32)])]
    [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [3.0, 3.0]]

    Source: the class of this name in onnxcustom.
    """

    def __init__(
        self,
        onnx_model: ModelProto,
        weights_to_train: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        class_name: str | None = None,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        run_options: Any = None,
        graph_builder_config: Any = None,
        device_index: int = 0,
        enable_logging: bool = False,
        debug: bool = False,
    ) -> None:
        others = {
            "sess_options": sess_options,
            "provider_options": provider_options,
            "run_options": run_options,
            "graph_builder_config": graph_builder_config,
        }
        for name, value in others.items():
            if value is not None:
                raise ConfigError(
                    f"{name}: ortflex_core creates the sessions and does not support this option"
                )
            setattr(self, name, None)
        check_model(onnx_model, "onnx_model")
        weights = list(
            get_train_initializer(onnx_model) if weights_to_train is None else weights_to_train
        )
        if not weights:
            raise ModelError("the model has no float initializer to train")
        check_weights(onnx_model, weights, ordered=True)
        self.onnx_model = onnx_model
        self.weights_to_train = weights
        self.input_names = _all("input_names", input_names, onnx_model.graph.input)
        self.output_names = _all("output_names", output_names, onnx_model.graph.output)
        self.class_name = class_name or f"OrtGradientForwardBackwardFunction_{id(self)}"
        self.providers = _providers(providers)
        self.device_index = device_index
        self.enable_logging = enable_logging
        self.debug = debug
        self._init_next()

    def _init_next(self) -> None:
        kind = _DEVICES[self.providers[0]]
        device = f"{kind}:{self.device_index}" if self.device_index else kind
        logger = logging.getLogger("onnxcustom") if self.enable_logging else None
        function = _function(self.onnx_model, self.weights_to_train, device)
        names = [*(i.name for i in function.model.inputs), *self.weights_to_train]
        gradients = [f"{n}_grad" for n in (*function.inputs, *function.parameters)]
        if logger is not None:
            logger.info("[OrtGradientForwardBackward] engine=%s", function.engine)
            logger.info("[OrtGradientForwardBackward] weights_to_train=%r", self.weights_to_train)
            logger.info("[OrtGradientForwardBackward] input_names=%r", self.input_names)
            logger.info("[OrtGradientForwardBackward] output_names=%r", self.output_names)
        attributes = {
            "__doc__": OrtGradientForwardBackwardFunction.__doc__,
            "__module__": OrtGradientForwardBackwardFunction.__module__,
            "_function": function,
            "_logger": logger,
            "_shapes": {
                t.name: list(t.dims)
                for t in self.onnx_model.graph.initializer
                if t.name in self.weights_to_train
            },
            "_input_names": self.input_names,
            "_output_names": self.output_names,
            "_grad_input_names": names,
            "_bw_fetches_names": gradients,
            "_onx_inp": names,
            "_onx_out": gradients,
            "_weights_to_train": sorted(self.weights_to_train),
            "_trained_onnx": function.graphs["gradient"],
            "_optimized_pre_grad_model": function.graphs["forward"],
        }
        self.cls_type_ = type(self.class_name, (OrtGradientForwardBackwardFunction,), attributes)

    def new_instance(self) -> OrtGradientForwardBackwardFunction:
        """An object with ``forward`` and ``backward``."""
        function: OrtGradientForwardBackwardFunction = self.cls_type_()
        return function

    def get_initializer(self, name: str, exc: bool = True) -> Array | None:
        """The value of an initializer; without ``exc``, None if it does not exist.

        Raises:
            ModelError: the model has no initializer of this name.
        """
        from onnx.numpy_helper import to_array

        tensors = {tensor.name: tensor for tensor in self.onnx_model.graph.initializer}
        if name in tensors:
            return to_array(tensors[name])
        if exc:
            raise ModelError(f"the model has no initializer {name!r}; {suggest(name, tensors)}")
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if not k.endswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._init_next()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class OrtGradientForwardBackwardFunction:
    """The forward and the backward pass of one model; several forward passes may be open.

    Instances come from :meth:`OrtGradientForwardBackward.new_instance`.
    """

    _function: ClassVar[OnnxFunction]
    _logger: ClassVar[logging.Logger | None]
    _shapes: ClassVar[dict[str, list[int]]]
    _output_names: ClassVar[list[str]]
    _grad_input_names: ClassVar[list[str]]
    _bw_fetches_names: ClassVar[list[str]]

    def __init__(self) -> None:
        self.states_: list[Any] = []
        self.saved_tensors_: list[Any] | None = None

    @classmethod
    def save_onnx_graph(
        cls, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Save the graphs of the class; see :meth:`BaseOnnxClass.save_onnx_graph`."""
        return save_graphs(cls.__name__, dict(vars(cls)), folder, prefix, suffix)

    @property
    def saved_tensors(self) -> list[Any]:
        """The inputs of the last forward pass for training.

        Raises:
            RuntimeError: there was no such pass.
        """
        if self.saved_tensors_ is None:
            raise RuntimeError(
                "no forward pass was saved yet; call forward(…, training=True) first"
            )
        return self.saved_tensors_

    def _buffers(self, given: Any, names: Sequence[str], what: str) -> dict[str, Buffer]:
        """The memory of arrays and ``OrtValue`` objects, by name."""
        values = own_values(given)
        if len(values) != len(names):
            raise DataError(
                f"{what}: expected {len(names)} ({', '.join(names)}), got {len(values)}"
            )
        missing = [n for n, v in zip(names, values, strict=True) if v is None]
        if missing:
            raise DataError(f"{what}: {missing[0]!r} is None")
        return {
            name: self._function.buffer(value)
            if isinstance(value, np.ndarray)
            else Buffer.of_value(plain(value))
            for name, value in zip(names, values, strict=True)
        }

    def forward(
        self, inputs: Any, training: bool = False, forward_outputs_cache: Any = None
    ) -> Any:
        """The outputs.

        Args:
            inputs: the values of the model's inputs, then those of the weights: arrays, ``OrtValue``
                objects, or an ``OrtValueVector``.
            training: keep the values that :meth:`backward` needs.
            forward_outputs_cache: not used, because outputs have separate memory.

        Returns:
            An ``OrtValueVector``.

        Raises:
            DataError: the number of values or the shape of a weight does not fit.
            GraphError: onnxruntime refuses the values.
        """
        feeds = self._buffers(inputs, self._grad_input_names, "inputs")
        if self._logger is not None:
            self._logger.debug("[%s.forward] training=%r", type(self).__name__, training)
        for name, shape in self._shapes.items():
            if list(feeds[name].shape) != shape:
                raise DataError(
                    f"inputs: {name!r} has shape {list(feeds[name].shape)}, the initializer has "
                    f"{shape}"
                )
        outputs, saved, _ = self._function.run_forward(feeds, wanted=None if training else ())
        if training:
            self.states_.append(saved)
            self.saved_tensors_ = [b.value() for b in feeds.values()]
            if self._function.reuses:  # the backward pass reuses their memory
                outputs = {n: b.copied(self._function.device) for n, b in outputs.items()}
        return own_vector([outputs[n].value() for n in self._output_names])

    def backward(self, grad_outputs: Any, backward_outputs_cache: Any = None) -> Any:
        """Gradients of inputs and weights of the last open forward pass.

        Args:
            grad_outputs: the gradient of every output.
            backward_outputs_cache: not used, because gradients have separate memory.

        Returns:
            An ``OrtValueVector``, in the order of the inputs of :meth:`forward`.

        Raises:
            RuntimeError: no forward pass for training is open.
            DataError: the number of gradients or the shape of one does not fit.
        """
        if not self.states_:
            raise RuntimeError(
                "there is no saved forward pass; call forward(…, training=True) first"
            )
        seeds = self._buffers(grad_outputs, self._output_names, "grad_outputs")
        if self._logger is not None:
            self._logger.debug("[%s.backward]", type(self).__name__)
        function = self._function
        gradients = function.run_backward(
            {n: seeds[n] for n in function.differentiated}, self.states_.pop()
        )
        return own_vector([gradients[n].value() for n in (*function.inputs, *function.parameters)])


def _function(onx: ModelProto, weights: Sequence[str], device: str) -> OnnxFunction:
    """The model's passes by TrainingAgent if it is installed and can run them, else by ``fused``."""
    model = Model(onx, raise_half=False)
    outputs = [o.name for o in model.outputs if o.dtype in FLOATS]
    read = {n for node in model.ancestors(outputs) for n in reads(node)}
    options: Any = {
        "params": [n for n in weights if n in read],
        "device": device,
        "plugins": plugins(),
    }
    try:
        if this_runtime().has_training_agent:
            return OnnxFunction(model, engine=_AGENT, **options)
    except OrtflexError as error:  # an operator has a wrong gradient or none
        _log.info("TrainingAgent cannot run the model, the gradient graph does: %s", error)
    return OnnxFunction(model, **options)


def _all(what: str, names: Sequence[str] | None, values: Any) -> list[str]:
    known = [value.name for value in values]
    if names is not None and list(names) != known:
        raise ConfigError(f"{what}: expected None or all of {known}, got {list(names)}")
    return known


def _providers(given: Any) -> list[str]:
    kind = getattr(given, "type", given)
    names = {None: "CPUExecutionProvider", "cpu": "CPUExecutionProvider"}
    names |= dict.fromkeys(("cuda", "cuda:0", "gpu"), "CUDAExecutionProvider")
    listed = [names[kind]] if kind is None or (isinstance(kind, str) and kind in names) else kind
    if isinstance(listed, str) or any(name not in _DEVICES for name in listed):
        raise ConfigError(f"providers: expected some of {', '.join(_DEVICES)}, got {given!r}")
    return list(listed)
