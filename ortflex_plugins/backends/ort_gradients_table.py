"""The operators, inputs, attributes and types that onnxruntime's gradient builder differentiates correctly.

Every entry was checked against central differences in float64, on onnxruntime-training 1.16.3
(TrainingAgent and TrainingSession) and 1.19.2 (TrainingAgent), at opsets 13 to 21; so was every
condition. If the two versions differ, the entry has what holds for both. Other operators have not
been checked, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import attrs
import onnx
from onnx import NodeProto, TensorProto

from ortflex_core import Array, Shape, TensorSpec

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """A node's attributes as Python values, strings decoded."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


@attrs.frozen
class View:
    """One node of a finished graph, with what is known about its values."""

    node: NodeProto
    opset: int
    specs: Mapping[str, TensorSpec]
    constants: Mapping[str, Array]
    active: frozenset[int]
    """Places of the inputs that a trained parameter reaches."""
    parameters: frozenset[str]
    """Trained parameters, and values that share their memory."""
    used: frozenset[str]
    """Values on which the result depends through operators with a derivative."""

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value; strings are decoded."""
        return attributes_of(self.node).get(name, default)

    def has(self, place: int) -> bool:
        """Whether the node has an input there."""
        return len(self.node.input) > place and bool(self.node.input[place])

    def shape(self, name: str) -> Shape | None:
        """A value's shape, or None if even its rank is unknown."""
        spec = self.specs.get(name)
        return None if spec is None else spec.shape

    def rank(self, place: int) -> int | None:
        """An input's number of dimensions, or None if unknown."""
        shape = self.shape(self.node.input[place])
        return None if shape is None else len(shape)

    def constant(self, place: int) -> Array | None:
        """An input's value where it is a constant."""
        return self.constants.get(self.node.input[place]) if self.has(place) else None


Condition = Callable[[View], str | None]
"""The problem of a node, or None."""


def same(left: Shape | None, right: Shape | None) -> bool:
    """Whether two shapes are known to be equal."""
    return left is not None and left == right and None not in left


def known(sizes: Sequence[Any]) -> TypeGuard[tuple[int, ...]]:
    """Whether all sizes are numbers."""
    return all(isinstance(size, int) for size in sizes)


@attrs.frozen(kw_only=True)
class Entry:
    """The cases in which the builder's gradient of an operator is correct.

    ``differentiable`` are the positions of the inputs with a gradient (None: all), ``discrete``
    those without one by definition, such as an index.
    """

    differentiable: tuple[int, ...] | None = None
    discrete: tuple[int, ...] = ()
    float64: bool = True
    check: Condition | None = None


def _pow(view: View) -> str | None:
    base, exponent = (view.specs.get(name) for name in view.node.input)
    if base is None or exponent is None or base.dtype != exponent.dtype:
        return "its gradient needs an exponent of the base's type"
    if not same(view.shape(view.node.output[0]), base.shape):
        return "its gradient is wrong where the base is broadcast to the exponent"
    return None


def _if(wrong: Callable[[View], bool], text: str) -> Condition:
    """The condition with one problem."""
    return lambda view: text if wrong(view) else None


_div = _if(
    # The gradient is a function that onnxruntime inlines after it has placed the updates.
    lambda view: view.active == {0, 1} and view.node.input[0] in view.parameters,
    "TrainingSession updates the numerator before the denominator's gradient has read it",
)
_gemm = _if(
    lambda view: 2 in view.active and view.rank(2) in (None, 0),
    "the gradient of a scalar C has the wrong shape",
)
_transpose = _if(
    lambda view: not view.attribute("perm"), "the builder of 1.19 fails without the attribute perm"
)
_mean = _if(
    lambda view: view.opset >= 18 and not view.attribute("keepdims", 1) and view.has(1),
    "its gradient is wrong with keepdims=0 at opset 18 and newer",
)
_norm = _if(lambda view: not view.attribute("keepdims", 1), "its gradient is wrong with keepdims=0")
_split = _if(
    lambda view: not view.used.issuperset(view.node.output),
    "its gradient has the wrong shape where an output is not used",
)
_gelu = _if(
    lambda view: view.attribute("approximate", "none") != "none",
    "the builder uses the derivative of the exact Gelu",
)
_cast = _if(
    lambda view: view.attribute("to") not in FLOATS, "only casts between floats have a gradient"
)


def _matmul(view: View) -> str | None:
    ranks = view.rank(0), view.rank(1)
    if None in ranks:
        return "its gradient is wrong for vectors, and the rank of an input is unknown"
    if 1 in ranks and ranks != (1, 2):
        return "its gradient is wrong where an input is a vector"
    return None


def _where(view: View) -> str | None:
    result = view.shape(view.node.output[0])
    if all(_whole(view.shape(view.node.input[k]), result) for k in view.active & {1, 2}):
        return None
    return "the gradient of an input that is broadcast has the wrong shape"


def _whole(shape: Shape | None, result: Shape | None) -> bool:
    """Whether a tensor is not broadcast to ``result``.

    The first axis is the batch, which predictions and labels may know by different names.
    """
    if shape is None or result is None or len(shape) != len(result):
        return False
    batch = bool(shape) and not isinstance(shape[0], int) and not isinstance(result[0], int)
    return same(shape[1:], result[1:]) if batch else same(shape, result)


def _plain_padding(view: View) -> str | None:
    padding = view.attribute("auto_pad", "NOTSET")
    return (
        None if padding in ("NOTSET", "VALID") else f"its gradient is wrong with auto_pad={padding}"
    )


def _conv(view: View) -> str | None:
    if view.attribute("group", 1) != 1 and view.rank(0) != 4:
        return "its gradient is wrong with groups unless there are two spatial dimensions"
    return _plain_padding(view)


def _max_pool(view: View) -> str | None:
    if view.attribute("storage_order", 0):
        return "its gradient is wrong with storage_order=1"
    if view.attribute("ceil_mode", 0) and not _windows_start_inside(view):
        return (
            "with ceil_mode a window may begin after the last row, which onnxruntime computes "
            "incorrectly"
        )
    return _plain_padding(view)


def _windows_start_inside(view: View) -> bool:
    """Whether under ceil_mode=1 no window of a pool begins in the padding at the end."""
    shape, kernel = view.shape(view.node.input[0]), view.attribute("kernel_shape")
    n, sizes = len(kernel), (shape or ())[2:]
    if shape is None or len(shape) != n + 2 or not known(sizes):
        return False
    strides, dilations = (view.attribute(a) or [1] * n for a in ("strides", "dilations"))
    pads = view.attribute("pads") or [0] * 2 * n
    for k, size in enumerate(sizes):
        stride, begin, end = strides[k], pads[k], pads[k + n]
        reach = (kernel[k] - 1) * dilations[k] + 1
        steps = -((size + begin + end - reach) // -stride)
        if steps * stride >= size + begin:
            return False
    return True


def _average_pool(view: View) -> str | None:
    if any(d != 1 for d in view.attribute("dilations", ())):
        return "its gradient is wrong with dilations"
    if view.attribute("ceil_mode", 0):
        return "its gradient is wrong with ceil_mode"
    shape = view.shape(view.node.input[0])
    if shape is None or not known(shape):
        return "its gradient is wrong where a dimension of the image or the batch is not fixed"
    return _plain_padding(view)


def _layer_norm(view: View) -> str | None:
    if len([o for o in view.node.output if o]) < 3 or not view.has(2):
        return "the builder fails without a bias and without the outputs Mean and InvStdDev"
    return _first_output_only(view)


def _cross_entropy(view: View) -> str | None:
    if len([o for o in view.node.output if o]) < 2:
        return "the builder fails without the output log_prob"
    return _first_output_only(view)


def _first_output_only(view: View) -> str | None:
    others = [o for o in view.node.output[1:] if o in view.used]
    return f"its output {others[0]!r} has no gradient" if others else None


def _slice(view: View) -> str | None:
    steps = view.constant(4)
    if view.has(4) and (steps is None or (steps < 0).any()):
        return "its gradient fails with negative steps (or steps that are not constant)"
    return None


def _pad(view: View) -> str | None:
    mode = view.attribute("mode", "constant")
    if mode != "constant":
        return f"its gradient supports mode='constant' only, got {mode!r}"
    return "its gradient is wrong with the input axes" if view.has(3) else None


def _scatter(view: View) -> str | None:
    reduction = view.attribute("reduction", "none")
    return None if reduction == "none" else f"its gradient is wrong with reduction={reduction!r}"


TABLE: Mapping[str, Entry] = {
    **dict.fromkeys(
        (
            *("Abs", "Add", "Exp", "Flatten", "Identity", "Log", "Max", "Min", "Mul", "Neg"),
            *("Reciprocal", "Sigmoid", "Sqrt", "Sub", "Tanh"),
        ),
        Entry(),
    ),
    **dict.fromkeys(
        (
            *("Concat", "Cos", "Erf", "GlobalAveragePool", "LeakyRelu", "LogSoftmax", "Relu"),
            *("Sin", "Softmax"),
        ),
        Entry(float64=False),
    ),
    **dict.fromkeys(
        (
            *("Expand", "Gather", "GatherElements", "GatherND", "Reshape", "Squeeze", "Tile"),
            *("TopK", "Trilu", "Unsqueeze"),
        ),
        Entry(differentiable=(0,), discrete=(1, 2, 3, 4)),
    ),
    "AveragePool": Entry(float64=False, check=_average_pool),
    "Cast": Entry(check=_cast),
    "Clip": Entry(differentiable=(0,)),
    "Conv": Entry(float64=False, check=_conv),
    "Div": Entry(check=_div),
    "Gelu": Entry(float64=False, check=_gelu),
    "Gemm": Entry(check=_gemm),
    "LayerNormalization": Entry(check=_layer_norm),
    "MatMul": Entry(check=_matmul),
    "MaxPool": Entry(float64=False, check=_max_pool),
    "Pad": Entry(differentiable=(0,), discrete=(1, 3), check=_pad),
    "Pow": Entry(differentiable=(0,), check=_pow),
    "ReduceL2": Entry(differentiable=(0,), discrete=(1,), float64=False, check=_norm),
    "ReduceLogSumExp": Entry(differentiable=(0,), discrete=(1,), check=_norm),
    "ReduceMean": Entry(differentiable=(0,), discrete=(1,), check=_mean),
    "ReduceSum": Entry(differentiable=(0,), discrete=(1,)),
    "ScatterElements": Entry(differentiable=(0, 2), discrete=(1,), float64=False, check=_scatter),
    "ScatterND": Entry(differentiable=(0, 2), discrete=(1,), float64=False, check=_scatter),
    "Slice": Entry(differentiable=(0,), discrete=(1, 2, 3, 4), check=_slice),
    "SoftmaxCrossEntropyLoss": Entry(differentiable=(0,), discrete=(1,), check=_cross_entropy),
    "Split": Entry(differentiable=(0,), discrete=(1,), check=_split),
    "Transpose": Entry(check=_transpose),
    "Where": Entry(differentiable=(1, 2), discrete=(0,), check=_where),
}
"""Operators of the standard, and the cases in which their gradients are correct."""

DISCRETE = frozenset(
    {"And", "ArgMax", "ConstantOfShape", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN"}
    | {"Less", "LessOrEqual", "NonZero", "Not", "OneHot", "Or", "Range", "Shape", "Size", "Xor"}
)
"""Operators without a derivative, at which the builder correctly stops."""

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose output shares the memory of their first input."""

FLAT = frozenset({"Sign", "Floor", "Ceil", "Round"})
"""Operators whose derivative is zero wherever it exists: nothing can be trained through them."""
