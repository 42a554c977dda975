"""A loss at the end of a model's graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from ortflex_core import ConfigError, ModelError, Tensor, Trace, build, opsets_of, suggest
from ortflex_plugins.onnxcustom.checks import check_model
from ortflex_plugins.onnxcustom.devices import plugins
from ortflex_plugins.onnxcustom.weights import FLOATS, rename_tensors

_SCORES = {
    "squared_error": "squared_error",
    "l2": "squared_error",
    "absolute_error": "absolute_error",
    "l1": "absolute_error",
    "elastic": "elastic",
    "log": "log",
}


def rows_name(loss_name: str) -> str:
    """The name of the tensor with the loss of every row, before the sum."""
    return f"{loss_name}/rows"


def add_loss_output(
    onx: ModelProto,
    score_name: str = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Mapping[str, Any] | None = None,
    output_index: int | str | None = None,
    **kwargs: Any,
) -> ModelProto:
    """A model with its loss: inputs X, label and perhaps weights, outputs loss [1, 1] and prediction.

    loss = Σ_i w_i·l_i + Σ_k (l1_k·Σ|W_k| + l2_k·Σ W_k²), with l = e² (``"squared_error"``,
    ``"l2"``), ``|e|`` (``"absolute_error"``, ``"l1"``), ``l1_weight·|e| + l2_weight·e²``
    (``"elastic"``), where e is prediction − label. ``"log"`` reads two columns of probabilities and
    int64 labels 0 and 1 of shape [rows, 1]: p = clip(p, eps, 1 − eps), divided by its sum over the
    columns, and l = −(1 − y)·log(p_0) − y·log(p_1); its loss is the *mean* of w·l.

    Args:
        onx: the model, which is not changed.
        score_name: the name of the loss.
        loss_name: the name of the output.
        label_name: the name of the input; a tensor of this name in the model is renamed to ``_label_``.
        weight_name: the name of the input with sample weights [rows]; None for a loss without them.
        penalty: ``{initializer: {"l1": …, "l2": …}}``, or ``{initializer: l2}``.
        output_index: the number or the name of the output that is compared with the labels; a model
            with several outputs needs it.
        kwargs: ``l1_weight`` and ``l2_weight`` of ``"elastic"``, ½ by default; ``eps`` of ``"log"``,
            1e-6 by default.

    Raises:
        ConfigError: a name or a parameter is unknown.
        ModelError: the output is not a tensor of floats, or the model already has one of the names.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] X) => (float[N, 1] Y) '
    ...     "<float[2, 1] coef = {1, 2}> { Y = MatMul(X, coef) }"
    ... )
    >>> graph = add_loss_output(model, weight_name="weight", penalty={"coef": 0.1}).graph
    >>> [i.name for i in graph.input], [o.name for o in graph.output]
    (['X', 'label', 'weight'], ['loss', 'Y'])

    Source: the function of this name in onnxcustom; differences are in docs/howto/from-onnxcustom.md.
    """
    if score_name not in _SCORES:
        raise ConfigError(f"unknown score_name {score_name!r}; {suggest(str(score_name), _SCORES)}")
    check_model(onx, "onx")
    out = ModelProto()
    out.CopyFrom(onx)
    graph = out.graph
    output = _output(out, output_index)
    taken = {i.name for i in (*graph.input, *graph.initializer)}
    taken |= {name for node in graph.node for name in (*node.input, *node.output)}
    if label_name in taken:
        rename_tensors(graph, {label_name: "_label_"})
    for name in (loss_name, weight_name):
        if name in taken:
            raise ModelError(f"the model already has a tensor {name!r}; choose another name")
    names = {"loss": loss_name, "label": label_name, "weight": weight_name}
    loss = _loss_graph(out, output, _SCORES[score_name], kwargs, penalty or {}, names)
    _append(graph, loss, loss_name, taken)
    elem = output.type.tensor_type.elem_type
    del graph.output[:]
    graph.output.extend([helper.make_tensor_value_info(loss_name, elem, [1, 1]), output])
    return out


def _output(onx: ModelProto, index: int | str | None) -> ValueInfoProto:
    outputs = list(onx.graph.output)
    names = [o.name for o in outputs]
    if index is None:
        if len(outputs) != 1:
            raise ConfigError(
                "output_index: the model has several outputs; choose the one to compare with the "
                f"labels: {names}"
            )
        index = 0
    if not isinstance(index, int | str):
        raise TypeError(f"output_index: expected an index or a name, got {index!r}")
    if isinstance(index, str):
        if index not in names:
            raise ConfigError(f"output_index: {index!r} is not an output; {suggest(index, names)}")
        index = names.index(index)
    if not -len(names) <= index < len(names):
        raise ConfigError(f"output_index: expected an index or a name among {names}, got {index!r}")
    output: ValueInfoProto = outputs[index]
    if output.type.tensor_type.elem_type not in FLOATS:
        raise ModelError(f"the output {output.name!r} is not a tensor of floats; others: {names}")
    return output


def _loss_graph(
    onx: ModelProto,
    output: ValueInfoProto,
    score: str,
    parameters: Mapping[str, Any],
    penalty: Mapping[str, Any],
    names: Mapping[str, Any],
) -> onnx.GraphProto:
    """The nodes of the loss; ``names`` has those of its output and of the inputs label and weight."""
    trace = Trace({"": opsets_of(onx)[""]})
    op = trace.op
    kind = output.type.tensor_type
    sizes = [d.dim_value or None for d in kind.shape.dim][1:]
    shape = ("batch", *sizes)
    predicted = trace.input(output.name, kind.elem_type, shape)
    if score == "log":
        expected = trace.input(names["label"], TensorProto.INT64, ("batch", 1))
        values = _log_loss(trace, predicted, expected, **_only(parameters, "eps"))
    else:
        expected = trace.input(names["label"], kind.elem_type, shape)
        allowed = ("l1_weight", "l2_weight") if score == "elastic" else ()
        spec = {"name": score, **_only(parameters, *allowed)}
        loss = plugins().component("losses", spec, "score_name")
        values = loss.per_sample(op, predicted, expected)
    if names["weight"] is not None:
        weight = trace.input(names["weight"], kind.elem_type, ("batch",))
        values = values * op.Reshape(weight, np.array([-1] + [1] * len(sizes)))
    total = (op.ReduceMean if score == "log" else op.ReduceSum)(values, keepdims=0)
    for name, formula in _penalties(onx, penalty).items():
        tensor = next(t for t in onx.graph.initializer if t.name == name)
        w = trace.input(name, tensor.data_type, tuple(tensor.dims))
        total = total + op.ReduceSum(formula.per_element(op, w), keepdims=0)
    scalar = op.Reshape(total, np.array([1, 1]))
    outputs = {rows_name(names["loss"]): op.Identity(values), names["loss"]: scalar}
    return build(trace, outputs, name="loss").proto().graph


def _log_loss(trace: Trace, predicted: Tensor, expected: Tensor, eps: float = 1e-6) -> Tensor:
    op = trace.op
    p = op.Clip(predicted, eps, 1 - eps)
    logarithms = op.Log(p / op.ReduceSum(p, axes=[1], keepdims=1))
    y = op.Cast(expected, to=predicted.dtype)
    both = op.Concat(1 - y, y, axis=1)
    return -op.ReduceSum(logarithms * both, axes=[1], keepdims=1)


def _only(parameters: Mapping[str, Any], *allowed: str) -> dict[str, Any]:
    unknown = [name for name in parameters if name not in allowed]
    if unknown:
        raise ConfigError(
            f"unknown parameter {unknown[0]!r} of the loss; {suggest(unknown[0], allowed)}"
        )
    return dict(parameters)


def _penalties(onx: ModelProto, penalty: Mapping[str, Any]) -> dict[str, Any]:
    known = [t.name for t in onx.graph.initializer if t.data_type in FLOATS]
    if not isinstance(penalty, Mapping):
        raise TypeError(
            f"penalty: expected {{initializer: {{'l1': …, 'l2': …}}}}, got {penalty!r}; "
            f"initializers: {', '.join(known)}"
        )
    out = {}
    for name, given in penalty.items():
        if name not in known:
            raise ConfigError(
                f"penalty: {name!r} is not a float initializer; {suggest(name, known)}"
            )
        factors = {"l2": given} if isinstance(given, int | float) else dict(given)
        spec = {"name": "elastic", "l1": 0.0, "l2": 0.0}
        spec |= {key: float(value or 0) for key, value in factors.items()}
        out[name] = plugins().component("penalties", spec, f"penalty.{name}")
    return out


def _append(graph: onnx.GraphProto, loss: onnx.GraphProto, loss_name: str, taken: set[str]) -> None:
    """Append the nodes, the constants and the new inputs of the loss; its inner names get a prefix."""
    names: dict[str, str] = {value.name: value.name for value in (*loss.input, *loss.output)}
    names[""] = ""

    def new(name: str) -> str:
        if name not in names:
            label, k = f"{loss_name}/{name}", 1
            while label in taken:
                label, k = f"{loss_name}/{name}.{k}", k + 1
            names[name] = label
            taken.add(label)
        return names[name]

    for node in loss.node:
        node.name = f"{loss_name}/{node.name}"
        node.input[:] = map(new, node.input)
        node.output[:] = map(new, node.output)
    for tensor in loss.initializer:
        tensor.name = new(tensor.name)
    known = {i.name for i in (*graph.input, *graph.initializer)}
    known |= {o for node in graph.node for o in node.output}
    graph.node.extend(loss.node)
    graph.initializer.extend(loss.initializer)
    graph.input.extend(i for i in loss.input if i.name not in known)
