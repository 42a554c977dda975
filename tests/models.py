"""Small ONNX models with fixed weights: opset 17 and IR 8, which every runtime reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx.parser
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Mapping[str, Any],
    *,
    opset: int = 17,
    ir: int = 8,
    **domains: int,
) -> ModelProto:
    """A model of these parts; float64 arrays among the weights become float32."""
    tensors = []
    for name, value in weights.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        tensors.append(onnx.numpy_helper.from_array(array, name))
    graph = helper.make_graph(list(nodes), "net", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(d.replace("_", "."), v) for d, v in domains.items()]
    return helper.make_model(graph, ir_version=ir, opset_imports=opsets, producer_name="tests")


def parsed(
    body: str,
    weights: Mapping[str, Any],
    inputs: str = "float[N, 6] X",
    outputs: str = "float[N, 3] Y",
    *,
    opset: int = 17,
    **domains: int,
) -> ModelProto:
    """A model whose nodes are written as onnx's text: ``Y = MatMul(X, W)``."""
    graph = onnx.parser.parse_graph(f"net ({inputs}) => ({outputs}) {{ {body} }}")
    return model(graph.node, graph.input, graph.output, weights, opset=opset, **domains)


def of_text(
    graph: str, weights: Mapping[str, Any], *, opset: int = 17, seed: int = 0
) -> ModelProto:
    """A model of the whole text of a graph; weights that are shapes are filled with random numbers."""
    made, rng = onnx.parser.parse_graph(f"net {graph}"), np.random.default_rng(seed)
    drawn = {n: rng.standard_normal(w) if isinstance(w, tuple) else w for n, w in weights.items()}
    return model(made.node, made.input, made.output, drawn, opset=opset)


def floats(name: str, *shape: int | str | None) -> ValueInfoProto:
    """A float32 input or output."""
    return helper.make_tensor_value_info(name, FLOAT, list(shape))


def linear(features: int = 5, outputs: int = 1, seed: int = 0) -> ModelProto:
    """``Y = X @ coef + intercept``."""
    rng = np.random.default_rng(seed)
    return model(
        [
            helper.make_node("MatMul", ["X", "coef"], ["XW"], name="product"),
            helper.make_node("Add", ["XW", "intercept"], ["Y"], name="sum"),
        ],
        [floats("X", "N", features)],
        [floats("Y", "N", outputs)],
        {
            "coef": rng.standard_normal((features, outputs)) / 2,
            "intercept": rng.standard_normal(outputs) / 2,
        },
    )


def mlp(sizes: Sequence[int] = (6, 8, 4, 1), activation: str = "Tanh", seed: int = 0) -> ModelProto:
    """Layers ``activation(h @ W<k> + b<k>)``, the last one without activation."""
    rng = np.random.default_rng(seed)
    nodes, weights, here = [], {}, "X"
    for k, (before, after) in enumerate(pairwise(sizes), start=1):
        weights[f"W{k}"] = rng.standard_normal((before, after)) / np.sqrt(before)
        weights[f"b{k}"] = 0.1 * rng.standard_normal(after)
        last = k == len(sizes) - 1
        nodes.append(helper.make_node("MatMul", [here, f"W{k}"], [f"m{k}"], name=f"matmul{k}"))
        out = "Y" if last else f"a{k}"
        nodes.append(helper.make_node("Add", [f"m{k}", f"b{k}"], [out], name=f"add{k}"))
        if not last:
            nodes.append(helper.make_node(activation, [out], [f"h{k}"], name=f"act{k}"))
            here = f"h{k}"
    return model(nodes, [floats("X", "N", sizes[0])], [floats("Y", "N", sizes[-1])], weights)


def conv_net(side: int = 6, channels: int = 3, classes: int = 4, seed: int = 0) -> ModelProto:
    """3×3 convolution, relu, 2×2 max-pooling, fully connected: scores of ``classes`` classes."""
    rng = np.random.default_rng(seed)
    flat = channels * ((side - 2) // 2) ** 2
    return model(
        [
            helper.make_node("Conv", ["X", "kernel", "bias"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node(
                "MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]
            ),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node("Gemm", ["f", "full", "shift"], ["scores"], name="full"),
        ],
        [floats("X", "N", 1, side, side)],
        [floats("scores", "N", classes)],
        {
            "kernel": rng.standard_normal((channels, 1, 3, 3)) / 3,
            "bias": 0.1 * rng.standard_normal(channels),
            "full": rng.standard_normal((flat, classes)) / np.sqrt(flat),
            "shift": 0.1 * rng.standard_normal(classes),
        },
    )


def two_headed(seed: int = 0) -> ModelProto:
    """Inputs ``left`` and ``right``; outputs ``amount`` [N, 1] and ``scores`` [N, 3]."""
    rng = np.random.default_rng(seed)
    return model(
        [
            helper.make_node("Concat", ["left", "right"], ["both"], axis=1),
            helper.make_node("MatMul", ["both", "shared"], ["s"]),
            helper.make_node("Tanh", ["s"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "to_amount"], ["amount"]),
            helper.make_node("MatMul", ["hidden", "to_scores"], ["scores"]),
        ],
        [floats("left", "N", 3), floats("right", "N", 2)],
        [floats("amount", "N", 1), floats("scores", "N", 3)],
        {
            "shared": rng.standard_normal((5, 4)) / 2,
            "to_amount": rng.standard_normal((4, 1)) / 2,
            "to_scores": rng.standard_normal((4, 3)) / 2,
        },
    )


def classifier(features: int = 4, classes: int = 3, seed: int = 0) -> ModelProto:
    """``probabilities = Softmax(X @ W + b)``; the scores are an inner tensor."""
    rng = np.random.default_rng(seed)
    return model(
        [
            helper.make_node("MatMul", ["X", "W"], ["product"]),
            helper.make_node("Add", ["product", "b"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
        ],
        [floats("X", "N", features)],
        [floats("probabilities", "N", classes)],
        {"W": rng.standard_normal((features, classes)) / 2, "b": np.zeros(classes)},
    )


def language_model(tied: str) -> ModelProto:
    """Embedding, a product, and a head: the embedding's initializer, a copy of it, or its own."""
    turn = "turned = Transpose<perm = [1, 0]>(table)" if tied == "same" else ""
    text = f"{{ e = Gather(table, ids) h = MatMul(e, mix) {turn} logits = MatMul(h, turned) }}"
    rng = np.random.default_rng(4)
    weights = {"table": rng.standard_normal((6, 4)), "mix": rng.standard_normal((4, 4))}
    if tied != "same":
        weights["turned"] = weights["table"].T.copy() if tied == "copy" else np.ones((4, 6))
    return of_text(f"(int64[N, T] ids) => (float[N, T, 6] logits) {text}", weights)


def renamed(source: ModelProto, names: Mapping[str, str]) -> ModelProto:
    """A copy of a model with some of its tensors called otherwise."""
    out = ModelProto()
    out.CopyFrom(source)
    for value in (*out.graph.input, *out.graph.output, *out.graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in out.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    return out


def weights_of(source: ModelProto) -> dict[str, Any]:
    """The initializers as arrays."""
    return {t.name: onnx.numpy_helper.to_array(t) for t in source.graph.initializer}


def in_float64(source: ModelProto) -> ModelProto:
    """A copy with weights, inputs and outputs in float64 where they were in float32."""
    out = ModelProto()
    out.CopyFrom(source)
    for tensor in out.graph.initializer:
        if tensor.data_type == FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*out.graph.input, *out.graph.output):
        if value.type.tensor_type.elem_type == FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return out


def without_receipt(source: ModelProto) -> ModelProto:
    """A copy of an export without the receipt of its training."""
    out = ModelProto()
    out.CopyFrom(source)
    for entry in [e for e in out.metadata_props if e.key == "ortflex.receipt"]:
        out.metadata_props.remove(entry)
    return out


def predict(source: ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """What the installed onnxruntime computes from a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        source.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def normalized(model: ModelProto) -> ModelProto:
    """The network, changed in place: a BatchNormalization of its input [N, 6]."""
    names = ["scale", "shift", "mean", "variance"]
    for name, value in zip(names, (1, 0, 0, 1), strict=True):
        array = np.full(6, value, np.float32) + 0.1
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.node[0].input[0] = "normed"
    node = helper.make_node("BatchNormalization", ["X", *names], ["normed"])
    model.graph.node.insert(0, node)
    return model
