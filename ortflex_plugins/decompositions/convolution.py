"""Decompositions of fused convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from ortflex_core import Call, Decompositions, NotDecomposed, Ops, Tensor
from ortflex_plugins.decompositions.matmul import activated

DECOMPOSITIONS = Decompositions()

_BLOCKED = (
    *("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample"),
    *("ReorderInput", "ReorderOutput"),
)
"""Operators on channels in blocks; the size of a block depends on the machine."""
DECOMPOSITIONS.refuse(
    *_BLOCKED,
    domain="com.microsoft.nchwc",
    reason=(
        "because onnxruntime saved it with ORT_ENABLE_ALL in a memory layout for one machine: "
        "train the file from before this optimization, or save it with ORT_ENABLE_EXTENDED"
    ),
)

_SETTINGS = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@DECOMPOSITIONS.operator("FusedConv")
def fused_conv(op: Ops, node: Call) -> Sequence[Tensor]:
    """Conv, followed by the addition of the optional input Z and by an activation."""
    settings = {name: node.setting(name) for name in _SETTINGS}
    x, weight = node.input(0), node.input(1)  # whose ranks may be unknown
    if x is None or weight is None:
        raise NotDecomposed("without an input or a weight")
    y = op.Conv(x, weight, node.input(2), **settings)
    added = node.input(3)
    if added is not None:
        y = y + added
    numbers = node.setting("activation_params", [])
    return [activated(op, y, node.setting("activation", ""), numbers)]
