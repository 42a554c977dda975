"""The derivative of a model as a model, by the older API's options and names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import IntFlag
from pathlib import Path

from onnx import AttributeProto, ModelProto, NodeProto, helper

from ortflex_core import FLOATS as ALL_FLOATS
from ortflex_core import ConfigError, ModelError, gradient_model, split_nodes, suggest, write_bytes
from ortflex_plugins.onnxcustom.checks import check_model
from ortflex_plugins.onnxcustom.weights import FLOATS, get_train_initializer, rename_tensors


class DerivativeOptions(IntFlag):
    """What the model of :func:`onnx_derivative` computes; ``|`` combines options.

    - ``Zero``: only gradients, from inputs, weights and gradients of the outputs
    - ``KeepYieldOp``: the gradients of the outputs come from a node YieldOp, as in onnxruntime's
      TrainingAgent, not from inputs; it cannot be combined with other options
    - ``KeepOutputs``: the model's outputs as well
    - ``FillGrad``: the gradients of the outputs are ones, not inputs; it needs ``KeepOutputs``
    - ``Loss``: the gradients of one output, the loss; it cannot be combined with other options
    """

    Zero = 0
    KeepYieldOp = 1
    KeepOutputs = 2
    FillGrad = 4
    Loss = 5


def onnx_derivative(
    onx: ModelProto,
    weights: Iterable[str] | None = None,
    inputs: Iterable[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | Iterable[str] | None = None,
    path_name: str | None = None,
) -> ModelProto:
    """A model that computes gradients: ``<name>_grad`` = Σ_y (∂y/∂name)ᵀ · ``<y>_grad``.

    Its inputs are those of ``onx``, the weights (which are no initializers any more), and one
    ``<y>_grad`` for every float output; its outputs are one ``<name>_grad`` for each input and
    weight. All operators except YieldOp are standard ones, so any onnxruntime runs the model.

    Args:
        onx: the model.
        weights: initializers to differentiate by; None for all of float type.
        inputs: inputs to differentiate by; None for all of float type.
        options: see :class:`DerivativeOptions`.
        loss: with ``Loss``: the output to differentiate.
        label: with ``Loss``: inputs without a gradient.
        path_name: with ``Loss``: the file to write.

    Raises:
        TypeError: ``options`` is not a DerivativeOptions.
        ConfigError: options or arguments exclude each other, or an argument is missing.
        ModelError, NoGradientRule, NotDifferentiable: as for :func:`ortflex_core.gradient_model`.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] X) => (float[N, 1] Y) '
    ...     "<float[2, 1] coef = {1, 2}> { Y = MatMul(X, coef) }"
    ... )
    >>> graph = onnx_derivative(model).graph
    >>> [i.name for i in graph.input], [o.name for o in graph.output]
    (['X', 'coef', 'Y_grad'], ['X_grad', 'coef_grad'])

    Source: the function of this name in onnxcustom.
    """
    if not isinstance(options, DerivativeOptions):
        raise TypeError(
            f"options: expected a DerivativeOptions, got {type(options).__name__}: {options!r}"
        )
    check_model(onx, "onx")
    initializers = {t.name for t in onx.graph.initializer}
    given = [i for i in onx.graph.input if i.name not in initializers]
    by = [i.name for i in given if i.type.tensor_type.elem_type in FLOATS]
    if inputs is not None:
        by = [inputs] if isinstance(inputs, str) else list(inputs)
    if options == DerivativeOptions.Loss:
        return _derivative_of_loss(onx, weights, by, loss, label, path_name)
    if options & DerivativeOptions.KeepYieldOp and options != DerivativeOptions.KeepYieldOp:
        raise ConfigError("options: KeepYieldOp cannot be combined with other options")
    if options & DerivativeOptions.FillGrad and not options & DerivativeOptions.KeepOutputs:
        raise ConfigError("options: FillGrad requires KeepOutputs")
    by += get_train_initializer(onx) if weights is None else weights
    outputs = [o.name for o in onx.graph.output if o.type.tensor_type.elem_type in ALL_FLOATS]
    model = _differentiate(onx, by, outputs)
    if options == DerivativeOptions.KeepYieldOp:
        _yield_outputs(model, outputs)
    elif options & DerivativeOptions.FillGrad:
        _fill_with_ones(model, outputs)
    if not options & DerivativeOptions.KeepOutputs:
        del model.graph.output[len(by) :]
    return model


def _derivative_of_loss(
    onx: ModelProto,
    weights: Iterable[str] | None,
    by: list[str],
    loss: str | None,
    label: str | Iterable[str] | None,
    path_name: str | None,
) -> ModelProto:
    if loss is None or label is None or path_name is None:
        given = {"loss": loss, "label": label, "path_name": path_name}
        missing = next(name for name, value in given.items() if value is None)
        raise ConfigError(f"{missing}: required by options=DerivativeOptions.Loss, got None")
    if weights is not None:
        raise ConfigError(
            "weights: options=DerivativeOptions.Loss supports gradients of inputs only"
        )
    outputs = [o.name for o in onx.graph.output]
    if loss not in outputs:
        raise ConfigError(f"loss: {loss!r} is not an output of the model; {suggest(loss, outputs)}")
    labels = {label} if isinstance(label, str) else set(label)
    model = _differentiate(onx, [name for name in by if name not in labels], [loss])
    _fill_with_ones(model, [loss])
    write_bytes(Path(os.fspath(path_name)), model.SerializeToString())
    return model


def _differentiate(onx: ModelProto, by: Sequence[str], outputs: Sequence[str]) -> ModelProto:
    """The model of gradients under the older names; its outputs are the gradients, then the model's."""
    model = gradient_model(onx, by, outputs)
    if both := sorted({*by} & {*outputs}):
        raise ModelError(f"'{both[0]}_grad' would be the gradient of an input and of an output")
    graph, count = model.graph, len(onx.graph.output)
    own, gradients = graph.output[:count], graph.output[count:]
    cotangents = graph.input[len(graph.input) - len(outputs) :]
    values = zip([*cotangents, *gradients], [*outputs, *by], strict=True)
    rename_tensors(graph, {value.name: f"{name}_grad" for value, name in values})
    del graph.output[:]
    graph.output.extend([*gradients, *own])
    return model


def _compute_seeds(model: ModelProto, outputs: Sequence[str], nodes: Iterable[NodeProto]) -> None:
    """Replace the inputs ``<output>_grad`` by nodes, which read the outputs of the model."""
    graph = model.graph
    before, after = split_nodes(graph.node, [f"{name}_grad" for name in outputs])
    order = [*before, *nodes, *after]
    del graph.input[len(graph.input) - len(outputs) :], graph.node[:]
    graph.node.extend(order)


def _yield_outputs(model: ModelProto, outputs: Sequence[str]) -> None:
    """Compute the gradients of the outputs by a YieldOp, as onnxruntime's TrainingAgent has it."""
    seeds = [f"{name}_grad" for name in outputs]
    node = helper.make_node("YieldOp", outputs, seeds, domain="com.microsoft")
    node.attribute.append(AttributeProto(name="full_shape_outputs", type=AttributeProto.INTS))
    _compute_seeds(model, outputs, [node])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _fill_with_ones(model: ModelProto, outputs: Sequence[str]) -> None:
    """Ones of the outputs' shapes as the gradients of the outputs."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    nodes = []
    for name in outputs:
        seed = f"{name}_grad"
        one = helper.make_tensor("value", kinds[seed], [1], [1])
        nodes.append(helper.make_node("Shape", [name], [f"{seed}_shape"]))
        nodes.append(helper.make_node("ConstantOfShape", [f"{seed}_shape"], [seed], value=one))
    _compute_seeds(model, outputs, nodes)
