"""The derivative of a model as a model, by the older API's options and names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import IntFlag
from pathlib import Path

from onnx import AttributeProto, ModelProto, NodeProto, helper

from ortflex_core import gradient_model
from ortflex_core.errors import ConfigError, ModelError, suggest
from ortflex_core.files import write_bytes
from ortflex_core.model import reads
from ortflex_plugins.onnxcustom.checks import check_model
from ortflex_plugins.onnxcustom.weights import FLOATS, get_train_initializer, rename_tensors

_YIELD = "com.microsoft"


class DerivativeOptions(IntFlag):
    """What :func:`onnx_derivative` makes; options are added by ``|``.

    - ``Zero``: gradients only, from inputs, weights and gradients of the outputs
    - ``KeepYieldOp``: a node YieldOp between outputs and their gradients, as onnxruntime's
      TrainingAgent has it, instead of inputs; alone
    - ``KeepOutputs``: the model's outputs, too
    - ``FillGrad``: gradients of the outputs are ones, not inputs; with ``KeepOutputs``
    - ``Loss``: the gradients of one output, the loss; alone
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

    Its inputs are the model's, the weights (no initializers any more), and ``<y>_grad`` of every
    float output; its outputs one ``<name>_grad`` for each input and weight. All operators are
    standard ones, so any onnxruntime runs it (but YieldOp).

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
        ConfigError: options or arguments that exclude each other.
        ModelError, NoGradientRule, NotDifferentiable: as :func:`ortflex_core.gradient_model`.

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
    floats = [i.name for i in onx.graph.input if i.type.tensor_type.elem_type in FLOATS]
    initializers = {t.name for t in onx.graph.initializer}
    floats = [name for name in floats if name not in initializers]
    if options == DerivativeOptions.Loss:
        return _of_loss(onx, weights, floats if inputs is None else inputs, loss, label, path_name)
    if options & DerivativeOptions.KeepYieldOp and options != DerivativeOptions.KeepYieldOp:
        raise ConfigError("options: KeepYieldOp cannot be combined with other options")
    if options & DerivativeOptions.FillGrad and not options & DerivativeOptions.KeepOutputs:
        raise ConfigError("options: FillGrad requires KeepOutputs")
    by = list(floats if inputs is None else inputs)
    by += get_train_initializer(onx) if weights is None else weights
    model = _named(gradient_model(onx, by))
    outputs = [o.name for o in onx.graph.output]
    seeds = [i.name for i in model.graph.input if i.name.removesuffix("_grad") in outputs]
    if options == DerivativeOptions.KeepYieldOp:
        _yield(model, seeds)
    elif options & DerivativeOptions.FillGrad:
        _fill(model, seeds)
    _arrange(model, outputs if options & DerivativeOptions.KeepOutputs else [])
    return model


def _of_loss(
    onx: ModelProto,
    weights: Iterable[str] | None,
    inputs: str | Iterable[str],
    loss: str | None,
    label: str | Iterable[str] | None,
    path_name: str | None,
) -> ModelProto:
    given = {"loss": loss, "label": label, "path_name": path_name}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ConfigError(f"{missing[0]}: required by options=DerivativeOptions.Loss, got None")
    if weights is not None:
        raise ConfigError(
            "weights: options=DerivativeOptions.Loss supports gradients of inputs only"
        )
    assert loss is not None
    assert label is not None
    assert path_name is not None
    outputs = [o.name for o in onx.graph.output]
    if loss not in outputs:
        raise ConfigError(f"loss: {loss!r} is not an output of the model; {suggest(loss, outputs)}")
    labels = {label} if isinstance(label, str) else set(label)
    by = [n for n in ([inputs] if isinstance(inputs, str) else inputs) if n not in labels]
    model = _named(gradient_model(onx, by, [loss]))
    _fill(model, [f"{loss}_grad"])
    _arrange(model, outputs)
    write_bytes(Path(os.fspath(path_name)), model.SerializeToString())
    return model


def _named(model: ModelProto) -> ModelProto:
    """``cotangent/y`` and ``gradient/x`` by their old names, ``y_grad`` and ``x_grad``."""
    names = {}
    for value in (*model.graph.input, *model.graph.output):
        for prefix in ("cotangent/", "gradient/"):
            if value.name.startswith(prefix):
                names[value.name] = value.name.removeprefix(prefix) + "_grad"
    twice = [n for n in set(names.values()) if list(names.values()).count(n) > 1]
    if twice:
        raise ModelError(f"{twice[0]!r} would be the gradient of an input and of an output")
    rename_tensors(model.graph, names)
    return model


def _drop(model: ModelProto, names: Iterable[str]) -> None:
    gone = set(names)
    kept = [i for i in model.graph.input if i.name not in gone]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _insert(model: ModelProto, seeds: Iterable[str], nodes: Iterable[NodeProto]) -> None:
    """Insert the nodes of the seeds after the nodes that they read and before those that read them."""
    late = set(seeds)
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    for node in model.graph.node:
        waits = not late.isdisjoint(reads(node))
        (after if waits else before).append(node)
        if waits:
            late.update(node.output)
    order = [*before, *nodes, *after]
    del model.graph.node[:]
    model.graph.node.extend(order)


def _yield(model: ModelProto, seeds: list[str]) -> None:
    _drop(model, seeds)
    node = helper.make_node(
        "YieldOp", [s.removesuffix("_grad") for s in seeds], seeds, domain="com.microsoft"
    )
    node.attribute.append(AttributeProto(name="full_shape_outputs", type=AttributeProto.INTS))
    _insert(model, seeds, [node])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _fill(model: ModelProto, seeds: list[str]) -> None:
    """Ones of the outputs' shapes."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    _drop(model, seeds)
    nodes = []
    for seed in seeds:
        one = helper.make_tensor("value", kinds[seed], [1], [1])
        nodes.append(helper.make_node("Shape", [seed.removesuffix("_grad")], [f"{seed}_shape"]))
        nodes.append(helper.make_node("ConstantOfShape", [f"{seed}_shape"], [seed], value=one))
    _insert(model, seeds, nodes)


def _arrange(model: ModelProto, kept: list[str]) -> None:
    """Gradients first, then the kept outputs."""
    outputs = {o.name: o for o in model.graph.output}
    names = [n for n in outputs if n.endswith("_grad")] + kept
    del model.graph.output[:]
    model.graph.output.extend(outputs[n] for n in names)
