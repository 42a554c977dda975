"""The networks of the workloads as an ONNX file has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.workloads import HEADS, LENGTH, WIDTH, Workload, data, weights


class _Graph:
    """Nodes by their operators' names."""

    def __init__(self, arrays: list[Any]) -> None:
        self.nodes: list[Any] = []
        self.initializers = [numpy_helper.from_array(a, f"p{k}") for k, a in enumerate(arrays)]

    def __call__(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def sizes(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def linear(self, x: str, first: int) -> str:
        return str(self("Gemm", x, f"p{first}", f"p{first + 1}"))


def network(workload: Workload) -> onnx.ModelProto:
    """The network at opset 17, its batch size free."""
    arrays = weights(workload)
    graph = _Graph(arrays)
    shape = list(data(workload)[0].shape[1:])
    build = {"mlp": _mlp, "lenet": _lenet, "transformer": _transformer}[workload.kind]
    build(graph, len(arrays))
    graph.nodes[-1].output[0] = "Y"
    made = helper.make_graph(
        graph.nodes,
        workload.kind,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", *shape])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["N", len(arrays[-1])])],
        graph.initializers,
    )
    return helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def _mlp(op: _Graph, count: int) -> None:
    x = "X"
    for k in range(0, count, 2):
        x = op.linear(x, k)
        if k < count - 2:
            x = op("Relu", x)


def _lenet(op: _Graph, count: int) -> None:
    x = "X"
    for k in (0, 2):
        x = op("Relu", op("Conv", x, f"p{k}", f"p{k + 1}", kernel_shape=[5, 5]))
        x = op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    op.linear(op("Relu", op.linear(op("Reshape", x, op.sizes(-1, 800)), 4)), 6)


def _transformer(op: _Graph, count: int) -> None:
    depth = WIDTH // HEADS
    x = op("Reshape", "X", op.sizes(-1, WIDTH))
    for k in (0, 12):
        heads = op("Reshape", op.linear(x, k), op.sizes(-1, LENGTH, 3, HEADS, depth))
        heads = op("Transpose", heads, perm=[2, 0, 3, 1, 4])
        parts = op("Split", heads, op.sizes(1, 1, 1), outputs=3, axis=0)
        q, key, v = (op("Reshape", p, op.sizes(-1, LENGTH, depth)) for p in parts)
        score = op("MatMul", q, op("Transpose", key, perm=[0, 2, 1]))
        score = op("Mul", score, op.constant(depth**-0.5, np.float32))
        mixed = op("MatMul", op("Softmax", score, axis=-1), v)
        mixed = op("Reshape", mixed, op.sizes(-1, HEADS, LENGTH, depth))
        mixed = op("Reshape", op("Transpose", mixed, perm=[0, 2, 1, 3]), op.sizes(-1, WIDTH))
        y = op("Add", x, op.linear(mixed, k + 2))
        # The gradient builder of the on-device API asks for all three outputs.
        y = op("LayerNormalization", y, f"p{k + 4}", f"p{k + 5}", outputs=3, axis=-1)[0]
        inner = op.linear(y, k + 6)
        error = op("Erf", op("Mul", inner, op.constant(2**-0.5, np.float32)))
        half = op("Mul", op("Add", error, op.constant(1, np.float32)), op.constant(0.5, np.float32))
        z = op("Add", y, op.linear(op("Mul", inner, half), k + 8))
        x = op("LayerNormalization", z, f"p{k + 10}", f"p{k + 11}", outputs=3, axis=-1)[0]
    rows = op("Reshape", x, op.sizes(-1, LENGTH, WIDTH))
    op.linear(op("ReduceMean", rows, axes=[1], keepdims=0), 24)
