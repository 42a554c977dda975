"""A loss at the end of a model's graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from ortflex_core.errors import ConfigError, ModelError, suggest
from ortflex_core.graph import Tensor, Trace, build
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
    """The tensor with the loss of every row, before the sum."""
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
    (``"elastic"``), e being prediction − label. ``"log"`` takes two columns of probabilities and
    int64 labels 0 and 1 of shape [rows, 1]: p = clip(p, eps, 1 − eps), divided by its sum over the
    columns, l = −(1 − y)·log(p_0) − y·log(p_1); its loss is the *mean* of w·l.

    Args:
        onx: the model; it is not changed.
        score_name: which loss.
        loss_name: of the output.
        label_name: of the input; a tensor of that name in the model is called ``_label_`` instead.
        weight_name: of the input with sample weights [rows]; None for a loss without.
        penalty: ``{initializer: {"l1": …, "l2": …}}``, or ``{initializer: l2}``.
        output_index: which output is compared with the labels, by place or name; needed where there
            are several.
        kwargs: ``l1_weight``, ``l2_weight`` (both ½ by default) of ``"elastic"``; ``eps`` (1e-6) of
            ``"log"``.

    Raises:
        ConfigError: unknown names or parameters.
        ModelError: the output is not of floats, or a name is taken.

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
    own = {i.name for i in (*graph.input, *graph.initializer)}
    own |= {name for node in graph.node for name in (*node.input, *node.output)}
    if label_name in own:
        rename_tensors(graph, {label_name: "_label_"})
    taken = [n for n in (loss_name, weight_name) if n in own]
    if taken:
        raise ModelError(f"the model already has a tensor {taken[0]!r}; choose another name")
    added = _loss_graph(out, output, _SCORES[score_name], kwargs, penalty or {}, weight_name)
    _merge(out, added, {"loss": loss_name, "rows": rows_name(loss_name), "label": label_name})
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
    output = ValueInfoProto()
    output.CopyFrom(outputs[index])
    if output.type.tensor_type.elem_type not in FLOATS:
        raise ModelError(f"the output {output.name!r} is not a tensor of floats; others: {names}")
    return output


def _loss_graph(
    onx: ModelProto,
    output: ValueInfoProto,
    score: str,
    parameters: Mapping[str, Any],
    penalty: Mapping[str, Any],
    weight_name: str | None,
) -> onnx.GraphProto:
    """The nodes of the loss, its inputs under their names; outputs ``loss`` and ``rows``."""
    opset = next(o.version for o in onx.opset_import if o.domain in ("", "ai.onnx"))
    trace = Trace({"": opset})
    op = trace.op
    kind = output.type.tensor_type
    sizes = [d.dim_value or None for d in kind.shape.dim][1:]
    shape = ("batch", *sizes)
    predicted = trace.input(output.name, kind.elem_type, shape)
    labels: tuple[Any, ...] = (
        (TensorProto.INT64, ("batch", 1))
        if score == "log"
        else (
            kind.elem_type,
            shape,
        )
    )
    expected = trace.input("label", *labels)
    if score == "log":
        values = _log_loss(trace, predicted, expected, **_only(parameters, "eps"))
    else:
        allowed = ("l1_weight", "l2_weight") if score == "elastic" else ()
        spec = {"name": score, **_only(parameters, *allowed)}
        loss = plugins().component("losses", spec, "score_name")
        values = loss.per_sample(op, predicted, expected)
    if weight_name is not None:
        weight = trace.input(weight_name, kind.elem_type, ("batch",))
        column = op.Reshape(weight, np.array([-1] + [1] * len(sizes)))
        values = values * column
    square = np.array([1, 1])
    total = (op.ReduceMean if score == "log" else op.ReduceSum)(values, keepdims=0)
    for name, formula in _penalties(onx, penalty).items():
        tensor = next(t for t in onx.graph.initializer if t.name == name)
        w = trace.input(name, tensor.data_type, tuple(tensor.dims))
        total = total + op.ReduceSum(formula.per_element(op, w), keepdims=0)
    outputs = {"rows": op.Identity(values), "loss": op.Reshape(total, square)}
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


def _merge(onx: ModelProto, added: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Append the nodes of a graph; the names that it defines get a prefix."""
    graph = onx.graph
    outer = {i.name for i in added.input}
    renamed: dict[str, str] = {name: name for name in outer} | dict(names)
    taken = {n for node in graph.node for n in (*node.input, *node.output)}

    renamed[""] = ""

    def new(name: str) -> str:
        if name not in renamed:
            label, k = f"{names['loss']}/{name}", 1
            while label in taken:
                label, k = f"{names['loss']}/{name}.{k}", k + 1
            renamed[name] = label
            taken.add(label)
        return renamed[name]

    for node in added.node:
        fresh = graph.node.add()
        fresh.CopyFrom(node)
        fresh.name = f"{names['loss']}/{node.name}"
        for place in (fresh.input, fresh.output):
            for k, name in enumerate(place):
                place[k] = new(name)
    for tensor in added.initializer:
        fresh_tensor = graph.initializer.add()
        fresh_tensor.CopyFrom(tensor)
        fresh_tensor.name = new(tensor.name)
    known = {i.name for i in (*graph.input, *graph.initializer)} | {
        o for node in graph.node for o in node.output
    }
    order = [i for i in added.input if i.name == "label"]
    order += [i for i in added.input if i.name != "label" and i.name not in known]
    for info in order:
        value = graph.input.add()
        value.CopyFrom(info)
        value.name = renamed[info.name]
