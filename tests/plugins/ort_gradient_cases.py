"""One or several models for every operator that onnxruntime's gradient builder is trusted with.

Each is ``Y = operator(X · w, …)``: X has a batch dimension of unknown size, w and the arrays
wrapped in :class:`P` are parameters.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import onnx.parser
from onnx import ModelProto, NodeProto, helper

from ortflex_core import Array, LossTerm, Model, Plugins, Problem
from ortflex_core.compiler.operators.reverse_mode import RuleTable
from ortflex_core.compiler.problem.parameters import Choice
from ortflex_plugins.losses.regression import SquaredError
from ortflex_plugins.optimizers.sgd import Sgd

_RNG = np.random.default_rng(7)


class P:
    """An array that is a parameter."""

    def __init__(self, array: Array) -> None:
        self.array = array


@attrs.frozen(eq=False)
class Case:
    """A model, its data and its parameters' names."""

    name: str
    model: ModelProto
    data: Array
    parameters: tuple[str, ...]
    step: float = 1e-5
    """Of the central differences."""
    reference: bool = True
    """Whether onnx's reference implementation has the operator right."""


def problem(model: ModelProto, parameters: Any, **options: Any) -> Problem:
    """A model's first output under the squared error."""
    read = Model(model)
    predicted = read.outputs[0]
    term = LossTerm(
        index=0,
        loss=SquaredError(),
        output=predicted.name,
        predicted=predicted,
        label=attrs.evolve(predicted, name="label"),
        weight=None,
        samples=predicted.shape or (),
    )
    options = {"batch_norm": "freeze", "plugins": Plugins(())} | options
    return Problem(
        model=read,
        terms=(term,),
        penalties=(),
        optimizer=Sgd(),
        optimizer_name="sgd",
        choices=tuple(Choice(name, True, "") for name in parameters),
        reduction="mean",
        rules=RuleTable({}),
        **options,
    )


def graph(
    nodes: list[NodeProto], x: Array, weights: dict[str, Array], opset: int = 17
) -> ModelProto:
    """A model from X, whose first dimension is the batch, to Y, whose shape is inferred."""
    elem = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [helper.make_tensor_value_info("X", elem, ["N", *x.shape[1:]])]
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    made = helper.make_graph(nodes, "case", inputs, [], tensors)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8 if opset < 19 else 9 if opset == 19 else 10
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    found = {v.name: v for v in inferred}
    model.graph.output.append(found["Y"])
    return model


def case(
    name: str,
    x: Array,
    *rest: Any,
    opset: int = 17,
    outputs: int = 1,
    dtype: type = np.float32,
    **attributes: Any,
) -> Case:
    """``name`` is the operator, with what is special after a dash."""
    options = {k: attributes.pop(k) for k in ("step", "reference") if k in attributes}
    w = _RNG.uniform(0.6, 1.4, (1, *x.shape[1:])).astype(dtype)
    weights, names, parameters = {"w": w}, ["XW"], ["w"]
    for k, value in enumerate(rest):
        if value is None:
            names.append("")
            continue
        names.append(f"in{k}")
        array = value.array if isinstance(value, P) else np.asarray(value)
        weights[f"in{k}"] = array.astype(dtype) if array.dtype.kind == "f" else array
        if isinstance(value, P):
            parameters.append(f"in{k}")
    results = ["Y", *(f"extra{k}" for k in range(1, outputs))]
    nodes = [
        helper.make_node("Mul", ["X", "w"], ["XW"], name="scaled"),
        helper.make_node(name.split("-")[0], names, results, name="node", **attributes),
    ]
    made, given = graph(nodes, x.astype(dtype), weights, opset), x.astype(dtype)
    label = name if opset == 17 else f"{name}@{opset}"
    return Case(label, made, given, tuple(parameters), **options)


def rn(*shape: int) -> Array:
    """Anywhere."""
    return _RNG.standard_normal(shape)


def far(*shape: int) -> Array:
    """Away from zero, on both sides."""
    return _RNG.uniform(0.3, 1.5, shape) * _RNG.choice([-1.0, 1.0], shape)


def pos(*shape: int) -> Array:
    """Above zero."""
    return _RNG.uniform(0.4, 2.0, shape)


def apart(*shape: int) -> Array:
    """No two close to each other."""
    return _RNG.permutation(int(np.prod(shape))).reshape(shape) * 3.0 + 40


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def _cases() -> list[Case]:
    image, axes = rn(2, 4, 7, 6), {13: {"axes": [1]}, 17: {"axes": [1]}}
    found = [case(name, far(3, 4)) for name in ("Abs", "Neg", "Reciprocal", "Relu", "LeakyRelu")]
    found += [case(n, rn(3, 4)) for n in ("Exp", "Tanh", "Sigmoid", "Sin", "Cos", "Identity")]
    found += [case(n, far(3, 4)) for n in ("Softplus", "Softsign", "Elu", "Selu", "Celu")]
    found += [case(n, far(3, 4)) for n in ("ThresholdedRelu", "HardSigmoid", "HardSwish", "Tan")]
    found += [case(n, pos(3, 4)) for n in ("Log", "Sqrt")]
    found += [case("Erf", rn(3, 4), step=1e-2), case("Mish", rn(3, 4), opset=18)]
    found += [case("Gelu", rn(3, 4), opset=20, step=1e-2)]
    found += [case("Gelu-tanh", rn(3, 4), opset=20, approximate="tanh")]
    for name in ("Add", "Sub", "Mul", "Div"):
        found += [case(name, rn(3, 4), P(pos(4))), case(f"{name}-column", rn(3, 4), P(pos(1, 1)))]
        found += [case(f"{name}-up", rn(3, 1), P(pos(5, 1, 4)))]
    found += [case(n, apart(3, 4), P(apart(4) + 1.5)) for n in ("Max", "Min")]
    found += [case(n, rn(3, 4), P(rn(4)), P(rn(1))) for n in ("Sum", "Mean")]
    found += [case("Pow", pos(3, 4), np.float32(3)), case("Pow-integer", far(3, 4), ints(2))]
    found += [case("Clip", apart(3, 4) / 40 - 1.5, np.float32(-0.5), np.float32(0.5))]
    found += [case("PRelu", far(3, 4), P(pos(4))), case("CastLike", rn(3, 4), np.float32(1))]
    found += [case("Cast", rn(3, 4), to=onnx.TensorProto.DOUBLE)]
    found += [case("MatMul", rn(3, 4), P(rn(4, 5))), case("MatMul-stack", rn(3, 2, 4), P(rn(4, 5)))]
    found += [case("MatMul-vector", rn(3, 2, 4), P(rn(4))), case("Gemm", rn(3, 4), P(rn(4, 5)))]
    found += [
        case(f"Gemm-{k}", rn(3, 4), P(rn(5, 4)), P(rn(*c)), transB=1, alpha=0.5, beta=0.7)
        for k, c in enumerate([(5,), (1, 5), (1,), ()])
    ]
    for name in ("Softmax", "LogSoftmax"):
        found += [case(name, rn(3, 4)), case(f"{name}-middle", rn(3, 4, 2), axis=1)]
    for name in ("ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceL1", "ReduceSumSquare"):
        for opset in (13, 17, 18, 21):
            rest, by = ([], axes[opset]) if opset < 18 else ([ints(1)], {})
            found += [case(name, far(3, 4, 2), *rest, opset=opset, keepdims=0, **by)]
        found += [case(f"{name}-all", far(3, 4), keepdims=0), case(f"{name}-keep", far(3, 4))]
    found += [case("ReduceMean-all-18", far(3, 4), keepdims=0, opset=18)]
    found += [case("ReduceLogSum", pos(3, 4), axes=[1])]
    found += [case("ReduceSum", rn(3, 4, 2), ints(-1, 1), keepdims=0)]
    found += [case("Concat", rn(3, 4), P(rn(3, 2)), axis=1)]
    found += [case("Reshape", rn(3, 4), ints(-1, 2)), case("Flatten", rn(3, 4, 2))]
    found += [case("Transpose", rn(3, 4, 2)), case("Transpose-perm", rn(3, 4, 2), perm=[0, 2, 1])]
    found += [case("Squeeze", rn(3, 1, 2), ints(1)), case("Unsqueeze", rn(3, 2), ints(1))]
    found += [case("Expand", rn(3, 1), ints(1, 4)), case("Tile", rn(3, 4), ints(1, 2))]
    found += [case("Slice", rn(3, 6), ints(1), ints(6), ints(1), ints(2))]
    found += [case("Gather", rn(3, 5), ints(0, -1, 2, 2), axis=1)]
    found += [case("GatherElements", rn(3, 4), np.array([[0, 1], [1, 1], [3, 0]]), axis=1)]
    found += [case("GatherND", rn(3, 4), np.array([[0, 1], [2, 3], [0, 1]]))]
    found += [case("ScatterND", rn(4, 3), np.array([[1], [3]]), P(rn(2, 3)))]
    found += [case("ScatterElements", rn(3, 4), np.array([[0, 1], [2, 3]]), P(rn(2, 2)), axis=1)]
    found += [case("Pad", rn(3, 4), ints(0, 1, 0, 2))]
    found += [case("Pad-axes", rn(3, 4), ints(1, 2), None, ints(1), opset=18)]
    found += [case("Trilu", rn(2, 4, 4)), case("TopK", apart(3, 5) / 9, ints(2), outputs=2)]
    found += [case("Split", rn(3, 5), ints(2, 3), outputs=2, axis=1)]
    found += [case("Split-even", rn(3, 4), outputs=2, axis=1)]
    found += [case("Split-outputs", rn(3, 5), outputs=2, axis=1, opset=18, num_outputs=2)]
    found += [case("Conv", image, P(rn(3, 4, 3, 3)), P(rn(3)), pads=[1, 0, 1, 2], strides=[2, 1])]
    found += [case("Conv-groups", image, P(rn(4, 2, 3, 3)), group=2, dilations=[2, 1])]
    found += [case("Conv-line", rn(2, 4, 9), P(rn(4, 2, 3)), P(rn(4)), group=2, pads=[1, 0])]
    for pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        found += [case(f"Conv-{pad}", image, P(rn(3, 4, 2, 3)), auto_pad=pad, strides=[2, 2])]
        odd = {"kernel_shape": [2, 3], "auto_pad": pad}
        good = pad != "SAME_LOWER"
        found += [case(f"MaxPool-{pad}", apart(2, 2, 5, 5) / 50, reference=good, **odd)]
        found += [case(f"AveragePool-{pad}", rn(2, 2, 5, 5), reference=good, **odd)]
    window: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1]}
    found += [case("MaxPool", apart(2, 2, 6, 6) / 50, pads=[1, 0, 1, 1], **window)]
    found += [case("MaxPool-ceil", apart(2, 2, 6, 6) / 50, ceil_mode=1, **window)]
    found += [case("GlobalMaxPool", apart(2, 3, 4, 4) / 50), case("GlobalAveragePool", image)]
    for include in (0, 1):
        more = window | {"pads": [1, 0, 1, 1], "count_include_pad": include}
        found += [case(f"AveragePool-{include}", rn(2, 2, 6, 6), **more)]
    found += [case("AveragePool-line", rn(2, 3, 8), kernel_shape=[3], strides=[2])]
    far_apart = {"kernel_shape": [2, 2], "dilations": [2, 3]}
    found += [case("AveragePool-dilated", rn(1, 2, 7, 7), opset=19, **far_apart)]
    found += [case("LayerNormalization", rn(3, 4), P(pos(4)), P(rn(4)))]
    found += [case("LayerNormalization-plain", rn(3, 4, 2), P(pos(4, 2)), axis=1, epsilon=0.1)]
    found += [case("InstanceNormalization", rn(2, 3, 5), P(pos(3)), P(rn(3)))]
    found += [case("BatchNormalization", rn(3, 4, 2), P(pos(4)), P(rn(4)), rn(4), pos(4))]
    found += [case("Dropout", rn(3, 4)), case("Dropout-ratio", rn(3, 4), np.float32(0.5))]
    found += [case("SoftmaxCrossEntropyLoss", rn(4, 3), ints(0, 2, 1, 1), reduction="sum")]
    for name in ("Relu", "Softmax", "LogSoftmax", "Tanh"):
        found += [case(f"{name}-float64", far(3, 4), dtype=np.float64)]
    return [*found, *_graphs()]


def _graphs() -> list[Case]:
    """What one node does not show."""

    x, single = rn(3, 4).astype(np.float32), np.float32
    w, v, zero = pos(1, 4).astype(single), rn(4).astype(single), np.zeros((), single)
    made: dict[str, tuple[str, dict[str, Array]]] = {
        "Where": ("a = Mul(X, w) g = Greater(a, zero) Y = Where(g, a, v)", {"v": v, "zero": zero}),
        "Cast-mask": (
            "a = Mul(X, w) g = Greater(a, zero) m = Cast <to = 1> (g) Y = Mul(a, m)",
            {"zero": zero},
        ),
        "Mul-square": ("q = Mul(w, w) Y = Add(X, q)", {}),
        "Add-twice": ("q = Add(w, w) Y = Mul(X, q)", {}),
        "Mul-branches": ("a = Mul(X, w) b = Sin(a) Y = Mul(a, b)", {}),
        "Div-parameters": ("d = Abs(v) q = Div(w, d) Y = Mul(X, q)", {"v": v}),
        "Split-half": ("a = Mul(X, w) s, t = Split <axis = 1> (a) Y = Tanh(s)", {}),
        "ArgMax": (
            "a = Mul(X, w) i = ArgMax <axis = 1> (a) f = Cast <to = 1> (i) Y = Mul(a, f)",
            {},
        ),
        "Shape": ("a = Mul(X, w) s = Shape(a) e = Expand(v, s) Y = Mul(a, e)", {"v": v}),
    }
    cases = []
    for name, (text, others) in made.items():
        nodes = onnx.parser.parse_graph(f"g (float X) => (float Y) {{ {text} }}").node
        weights = {"w": w, **others}
        names = tuple(n for n in weights if n != "zero")
        cases.append(Case(name, graph(list(nodes), x, weights), x, names))
    return cases


CASES = {one.name: one for one in _cases()}
