"""A model as a differentiable function on arrays: forward, and backward to its gradients."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from onnx import ModelProto

from ortflex_core import (
    FLOATS,
    Array,
    ConfigError,
    DataError,
    Device,
    LayerBackend,
    Model,
    ModelError,
    Plugins,
    TensorSpec,
    Unsupported,
    choose_parameters,
    complete_shapes,
    device_spec,
    expected_count,
    explain_unknown,
    is_count,
    is_number,
    load_rules,
    require_runtime,
    shape_text,
    shapes_compatible,
    short_tracebacks,
    suggest,
)
from ortflex_plugins.layers.backend_gradient import BackendGradient
from ortflex_plugins.layers.graphs import COTANGENT, NEW
from ortflex_plugins.layers.memory import Buffer
from ortflex_plugins.layers.mode import STEP, Mode
from ortflex_plugins.layers.own_gradient import OwnGradient

_OURS = "fused"


class Saved:
    """The values that a forward pass saves for its backward pass; several may be open at a time.

    ``statistics`` has the new running statistics, if the forward pass computed any.
    """

    __slots__ = ("function", "kept", "shapes", "statistics")

    def __init__(
        self,
        function: OnnxFunction,
        kept: Any,
        shapes: Mapping[str, Buffer],
        statistics: Mapping[str, Array],
    ) -> None:
        self.function = function
        self.kept = kept
        self.shapes = {n: (b.shape, b.dtype) for n, b in shapes.items()}
        self.statistics = dict(statistics)


@short_tracebacks
class OnnxFunction:
    """A model as a function that can be differentiated, on any onnxruntime.

    For y = f(x, w) and cotangents c of the outputs, backward computes gradient/v = Σ_y (∂y/∂v)ᵀ·c_y for
    every float input and every parameter v. The graph of the vector-Jacobian product is split in two: the
    backward graph reads tensors that the forward graph saved, and computes nothing twice.

    Args:
        model: a path, bytes or a ModelProto; float32 or float64.
        params: the initializers to differentiate by: None for all parameters, or names and globs,
            as for :class:`ortflex_core.Trainer`.
        inputs: the inputs to differentiate by; None for all inputs of float type.
        outputs: the outputs that have cotangents; None for all outputs of float type.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. Arrays are copied to a GPU and back. The tests
            use a simulated GPU, not a real one.
        threads: the number of threads within an operator.
        training: None: nodes run as in the file. True: BatchNormalization normalizes with the
            statistics of the batch, :meth:`forward` returns new running statistics, and Dropout uses
            the ratio in the file. False: the running statistics are used, and Dropout is off.
        batch_norm: ``"freeze"`` uses the running statistics in training, too.
        dropout: in training, ``"file"`` uses the ratios in the file, ``"off"`` switches Dropout off, and a
            number is the ratio of all nodes.
        seed: the seed of the masks.
        engine: ``"fused"`` uses the gradient graph of ortflex; ``"training_agent"`` uses
            onnxruntime-training, if it is installed.

    Raises:
        ModelError: the file is broken, or a name does not exist.
        NoGradientRule, NotDifferentiable: the message has the node and the next step.
        Unsupported: the engine is not installed here, or cannot differentiate an operator.

    Example:
        >>> import numpy as np, onnx.parser
        >>> square = onnx.parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> '
        ...     "g (float[N, 2] x) => (float[N, 2] y) { y = Mul(x, x) }"
        ... )
        >>> f = OnnxFunction(square)
        >>> outputs, saved = f.forward(np.array([[1.0, 3.0]], np.float32))
        >>> f.backward(np.ones((1, 2), np.float32), saved)["x"].tolist()
        [[2.0, 6.0]]

    Source: the split is reverse-mode differentiation as in A. Griewank and A. Walther, "Evaluating
    Derivatives" (2008), §3.2; training and its negation are torch.nn.Module's train and eval.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Model,
        *,
        params: str | Iterable[str] | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        device: Any = "cpu",
        threads: int = 1,
        training: bool | None = None,
        batch_norm: Literal["train", "freeze"] = "train",
        dropout: Literal["file", "off"] | float = "file",
        seed: int = 0,
        engine: str = _OURS,
        plugins: Plugins | None = None,
    ) -> None:
        if batch_norm not in ("train", "freeze"):
            raise ConfigError(f"batch_norm: expected 'train' or 'freeze', got {batch_norm!r}")
        ratio: Any = dropout
        if ratio not in ("file", "off") and not (is_number(ratio) and 0 <= ratio < 1):
            raise ConfigError(
                f"dropout: expected 'file', 'off' or a ratio from 0 to below 1, got {ratio!r}"
            )
        if not is_count(threads):
            raise ConfigError(f"threads: {expected_count(threads)}")
        self.engine = engine
        self._runtime = require_runtime()
        self._plugins = Plugins.given(plugins)
        self.model = model if isinstance(model, Model) else Model(model, raise_half=False)
        complete_shapes(self.model)
        where = device_spec(device)
        self.device: Device = self._plugins.component("devices", where, "device")
        if reasons := self.device.available(self._runtime):
            raise Unsupported(f"device={device!r}: {'; '.join(reasons)}")
        # An array is memory that the CPU computes on; a GPU cannot.
        self._host = self.device.view(self.device.empty([1], np.float32)) is not None
        self.mode = Mode(
            model=self.model, training=training, batch_norm=batch_norm, dropout=dropout, seed=seed
        )
        floats = {o.name: o for o in self.model.outputs if o.dtype in FLOATS}
        self.differentiated = self._known("outputs", outputs, floats)
        self.parameters = self._choose(params)
        self.inputs = self._known("inputs", inputs, self._float_inputs())
        if not (self.inputs or self.parameters):
            raise ModelError(
                f"{self.model.label} cannot be differentiated: no input or parameter of float "
                f"type reaches {', '.join(self.differentiated) or 'an output of float type'}"
            )
        self._specs = self.mode.statistics()
        self._statistics = self.mode.start(list(self._specs))
        self._values = {n: self.model.initializer(n) for n in self.parameters}
        self.outputs = tuple(o.name for o in self.model.outputs)
        weights = {n: self.model.initializers[n] for n in self.parameters}
        specs = [*self.model.inputs, *weights.values(), *self._specs.values()]
        self._fed = {s.name: s for s in specs}
        self.kinds = {s.name: s.numpy for s in (*self.model.outputs, *specs)}
        with explain_unknown(self.model):
            self._gradient = self._compiled(engine, threads)
        self.graphs: dict[str, ModelProto] = self._gradient.graphs
        given = {*(i.name for i in self.model.inputs), *self._values, *self._specs}
        given |= {STEP, *(f"{COTANGENT}{n}" for n in self.differentiated)}
        self._frozen = {
            n: self.buffer(self.model.initializer(n))
            for n in self._gradient.inputs
            if n not in given
        }

    def _compiled(self, engine: str, threads: int) -> OwnGradient | BackendGradient:
        wrt = [*self.inputs, *self.parameters]
        if engine == _OURS:
            rules = load_rules(self._plugins)
            return OwnGradient(self.mode, wrt, self.differentiated, rules, self.device, threads)
        backend = self._plugins.component("backends", engine, "engine")
        if not isinstance(backend, LayerBackend):
            raise ConfigError(
                f"engine={engine!r} trains whole models and cannot run a layer; use 'fused', or "
                "'training_agent' where onnxruntime-training is installed"
            )
        if reasons := backend.available(self._runtime):
            raise Unsupported(f"engine={engine!r}: {'; '.join(reasons)}; or use engine='fused'")
        return BackendGradient(
            self.mode, wrt, self.differentiated, backend, self.device, self._runtime, threads
        )

    def _choose(self, params: str | Iterable[str] | None) -> tuple[str, ...]:
        try:
            chosen = choose_parameters(self.model, list(self.differentiated), params)
        except ModelError:
            if params is not None or not self.model.inputs:
                raise
            return ()  # a function of its inputs alone
        return tuple(c.name for c in chosen if c.trained)

    def _float_inputs(self) -> dict[str, TensorSpec]:
        used = {n for node in self.model.ancestors(self.differentiated) for n in node.input}
        return {i.name: i for i in self.model.inputs if i.dtype in FLOATS and i.name in used}

    def _known(
        self, what: str, names: Sequence[str] | None, known: Mapping[str, TensorSpec]
    ) -> tuple[str, ...]:
        for name in names or ():
            if name not in known:
                raise ModelError(
                    f"{what}: {self.model.label} has no {what[:-1]} {name!r} that can be "
                    f"differentiated; {suggest(name, known)}"
                )
        return tuple(known if names is None else names)

    @property
    def draws(self) -> bool:
        """Whether masks are drawn, so that :meth:`forward` depends on ``step``."""
        return STEP in self._gradient.inputs

    @property
    def reuses(self) -> bool:
        """Whether the backward pass reuses the memory of the outputs of :meth:`run_forward`."""
        return self._gradient.reuses

    @property
    def state(self) -> dict[str, Array]:
        """The parameters, by initializer name."""
        return dict(self._values)

    @property
    def statistics(self) -> dict[str, Array]:
        """The file's running statistics, by initializer name; none where ``training`` is None."""
        return dict(self._statistics)

    def forward(
        self,
        inputs: Any,
        parameters: Mapping[str, Array] | None = None,
        *,
        statistics: Mapping[str, Array] | None = None,
        step: int = 0,
    ) -> tuple[dict[str, Array], Saved]:
        """The outputs, and the saved state for :meth:`backward`.

        Args:
            inputs: an array (a model with one input) or a mapping of arrays.
            parameters: values instead of those of the model; parameters without a value keep theirs.
            statistics: running statistics instead of those of the model; ``saved.statistics`` has the
                statistics after this pass.
            step: the number of the step, which the masks of dropout depend on in training.

        Raises:
            DataError: names, types or shapes do not fit.
        """
        named = self._named(inputs, [i.name for i in self.model.inputs], "inputs")
        specs = {i.name: i for i in self.model.inputs}
        feeds = {n: self._own(self._fit(s, named[n])) for n, s in specs.items()}
        for what, mine, given, kinds in (
            ("parameter", self._values, parameters, self.model.initializers),
            ("running statistic", self._statistics, statistics, self._specs),
        ):
            values = {**mine, **(given or {})}
            if unknown := [n for n in values if n not in mine]:
                raise DataError(f"unknown {what} {unknown[0]!r}; {suggest(unknown[0], mine)}")
            fitting = {n: self._fit(kinds[n], a) for n, a in values.items()}
            changeable = given or ()
            feeds |= {
                n: self._own(a) if n in changeable else self.buffer(a) for n, a in fitting.items()
            }
        outputs, saved, new = self.run_forward(feeds, step)
        saved.statistics = {n: self._array(b) for n, b in new.items()}
        return {n: self._array(b) for n, b in outputs.items()}, saved

    def backward(self, cotangents: Any, saved: Saved) -> dict[str, Array]:
        """Gradients of inputs and parameters, by name.

        Args:
            cotangents: an array for one output, or a mapping, with the shapes of the outputs; cotangents
                that are missing are 0.
            saved: the second result of :meth:`forward`, which can be used again.

        Raises:
            DataError: the names, types or shapes of the cotangents are not those of the outputs, or
                ``saved`` comes from another function.
        """
        if not isinstance(saved, Saved):
            raise DataError(
                f"saved: expected the second result of forward, got {type(saved).__name__}"
            )
        named = self._named(cotangents, self.differentiated, "cotangents", partial=True)
        specs = {o.name: o for o in self.model.outputs}
        given = {n: self.buffer(self._fit(specs[n], a)) for n, a in named.items()}
        return {n: self._array(b) for n, b in self.run_backward(given, saved).items()}

    def run_forward(
        self, feeds: Mapping[str, Buffer], step: int = 0, wanted: Container[str] | None = None
    ) -> tuple[dict[str, Buffer], Saved, dict[str, Buffer]]:
        """:meth:`forward` without copies: outputs, saved values, new running statistics.

        ``feeds`` has every input, parameter and running statistic, on the device of the function. The
        backward pass may omit gradients that are not ``wanted``.
        """
        for name, buffer in feeds.items():
            if not shapes_compatible(self._fed[name].shape, buffer.shape):
                raise DataError(
                    f"{name!r} expects {self._fed[name]}, got the shape {shape_text(buffer.shape)}"
                )
        fed = {**self._frozen, **feeds}
        if self.draws:
            fed[STEP] = self.buffer(np.asarray(step, np.int64))
        results, kept = self._gradient.forward(fed, wanted)
        outputs = {n: results[n] for n in self.outputs}
        new = {n: results[f"{NEW}{n}"] for n in self._specs if f"{NEW}{n}" in results}
        return outputs, Saved(self, kept, outputs, {}), new

    def run_backward(self, cotangents: Mapping[str, Buffer], saved: Saved) -> dict[str, Buffer]:
        """:meth:`backward` without copies."""
        if saved.function is not self:
            raise DataError("saved comes from the forward pass of another OnnxFunction")
        feeds = {}
        for name in self.differentiated:
            shape, dtype = saved.shapes[name]
            given = cotangents.get(name)
            if given is None:
                given = Buffer.zeros(shape, dtype, self.device)
            elif given.shape != shape:
                raise DataError(
                    f"the cotangent of {name!r} has shape {list(given.shape)}, the output has "
                    f"{list(shape)}"
                )
            feeds[f"{COTANGENT}{name}"] = given
        return self._gradient.backward(feeds, saved.kept)

    def _own(self, array: Array) -> Buffer:
        """A copy, so that later changes of the caller's array have no effect."""
        return self.buffer(array.copy() if self._host else array)

    def buffer(self, array: Array) -> Buffer:
        """An array's memory, or a copy on a device that cannot reach host memory."""
        return Buffer.of(array) if self._host else Buffer.of_value(self.device.put(array))

    def _array(self, buffer: Buffer) -> Array:
        if not self._host:
            return self.device.read(buffer.value())
        return buffer.array().copy() if self.reuses else buffer.array()

    def _fit(self, spec: TensorSpec, array: Any) -> Array:
        given = np.asarray(array)
        if given.dtype != spec.numpy or (spec.shape is not None and given.ndim != len(spec.shape)):
            raise DataError(
                f"{spec.name!r} expects {spec}, got {given.dtype}{list(given.shape)}; convert it "
                "first"
            )
        return given

    def _named(
        self, given: Any, names: Sequence[str], what: str, partial: bool = False
    ) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            if len(names) != 1:
                raise DataError(
                    f"{what}: expected a mapping with {', '.join(names)}, got one array"
                )
            return {names[0]: given}
        if unknown := [n for n in given if n not in names]:
            raise DataError(f"{what} has {unknown[0]!r}; {suggest(str(unknown[0]), names)}")
        if not partial and (missing := [n for n in names if n not in given]):
            raise DataError(f"{what} lacks {missing[0]!r}")
        return dict(given)
