"""Products by weights of 2, 4 or 8 bits in blocks that are packed into bytes: MatMulNBits.

onnxruntime's operator computes ``A·Wᵀ + bias``. Its weight has blocks of inputs, each with one scale and
one zero point, and its codes begin at 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph.protos import settings
from ortflex_core.compiler.model.master_weights import Packing, Quantized
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.types import Array

LAYOUT = "MatMulNBits"
DOMAIN = "com.microsoft"
SMALLEST = 16
"""The smallest block; sizes are powers of two."""


def is_size(block: int) -> bool:
    """Whether the operator has blocks of a size."""
    return block >= SMALLEST and block & (block - 1) == 0


def has_form(node: NodeProto, position: int, shape: Sequence[int], bias: Sequence[int]) -> bool:
    """Whether a MatMul or Gemm by a constant at ``position`` can be written as MatMulNBits.

    ``shape`` is that of the constant, ``bias`` the shape of a constant bias.
    """
    if position != 1 or len(shape) != 2 or node.op_type not in ("MatMul", "Gemm"):
        return False
    given = settings(node)
    if given.get("transA") or given.get("alpha", 1.0) != 1 or given.get("beta", 1.0) != 1:
        return False
    outputs = shape[0] if given.get("transB") else shape[1]
    has_bias = len(node.input) > 2 and bool(node.input[2])
    return not has_bias or tuple(bias) == (outputs,)


@attrs.frozen
class Blocks:
    """A weight of MatMulNBits: [outputs · blocks, block] numbers; those after the last input are 0."""

    values: Array
    outputs: int
    inputs: int

    @classmethod
    def of(cls, weight: Array, inputs: int, block: int) -> Blocks:
        """The blocks of a matrix whose axis ``inputs`` is summed over."""
        lines = np.asarray(weight if inputs else weight.T, np.float32)
        count = -(-lines.shape[1] // block)
        padded = np.pad(lines, ((0, 0), (0, count * block - lines.shape[1])))
        return cls(padded.reshape(-1, block), *lines.shape)

    def packed(self, scale: Array, zero: Array, bits: int) -> Array:
        """The bytes of the codes; ``zero`` is that of codes that begin at 0."""
        layout = Quantized("", TensorProto.UINT8, "", axis=0, bits=bits % 8)
        codes = layout.codes(self.values, scale, zero.astype(np.uint8))
        return self.packing(bits).packed(codes)

    def packing(self, bits: int) -> Packing:
        """How the codes are stored."""
        count, block = self.values.shape
        return Packing(
            bits, (self.outputs, count // self.outputs, block * bits // 8), (count, block)
        )

    def packed_zeros(self, zero: Array, bits: int) -> Array:
        """The bytes of zero points, of each output by itself."""
        lines = zero.reshape(self.outputs, -1)
        each = 8 // bits
        padded = np.pad(lines, ((0, 0), (0, -lines.shape[1] % each)))
        stored = (self.outputs * padded.shape[1] // each,)
        return Packing(bits, stored, (self.outputs, padded.shape[1])).packed(padded)

    def attributes(self, bits: int) -> Mapping[str, int]:
        """The settings of the node; sums are in float32, as those of the training."""
        block = self.values.shape[1]
        sizes = {"K": self.inputs, "N": self.outputs, "bits": bits, "block_size": block}
        return {**sizes, "accuracy_level": 1}


@functools.cache
def is_computed(bits: int, block: int, opset: int) -> bool:
    """Whether the installed runtime has a kernel for these bits and blocks."""
    draw = np.random.default_rng(0)
    weight = draw.integers(-2, 2, (4, block)).astype(np.float32)
    blocks = Blocks.of(weight, 1, block)
    middle = np.full(4, 2 ** (bits - 1), np.uint8)
    tensors = [
        numpy_helper.from_array(blocks.packed(np.ones(4, np.float32), middle, bits), "w"),
        numpy_helper.from_array(np.ones(4, np.float32), "scale"),
    ]
    given: Mapping[str, Any] = blocks.attributes(bits)
    node = helper.make_node(LAYOUT, ["x", "w", "scale"], ["y"], domain=DOMAIN, **given)
    x_info, y_info = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    graph = helper.make_graph([node], "multiplies", [x_info], [y_info], tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    least = helper.find_min_ir_version_for(opsets[:1], ignore_unknown=True)
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=least)
    x = draw.integers(-9, 9, (3, block)).astype(np.float32)
    try:
        y = cpu_session(proto).run(None, {"x": x})[0]
    except Exception:  # every runtime has errors of its own for what it does not know
        return False
    return bool(np.abs(y - x @ weight.T).max() <= 1e-3 * np.abs(x @ weight.T).max())
