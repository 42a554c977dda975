"""Smaller models: ``cut`` ends a model earlier, ``shrink`` leaves out channels that say nothing."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Edit, Editor, setting


@attrs.frozen(kw_only=True)
class Cut(Edit):
    """Ends the model at one or more tensors, which become its outputs.

    Nodes, initializers and inputs on which these tensors do not depend are removed. The tensors keep
    their names, shapes and element types.

    Raises:
        ModelError: when a model is edited: it computes no tensor of that name, or none of the tensors
            depends on an input.

    Example:
        >>> from onnx import parser
        >>> from ortflex_core import edited_model
        >>> model = parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y) '
        ...     "<float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3, 1] v = {1, 2, 3}> "
        ...     "{ h = MatMul(x, w) y = MatMul(h, v) }"
        ... )
        >>> edited = edited_model(model, edits=Cut(at="h"))
        >>> str(edited.outputs[0]), list(edited.initializers)
        ('h: float32[N, 3]', ['w'])

    Source: onnx.utils.extract_model, which does the same for a file.
    """

    name: ClassVar[str] = "cut"
    stability = "experimental"
    needs: ClassVar[str] = "the names of tensors, which `ortflex graph` shows"

    at: str = setting(help="the name of the tensor")
    also: tuple[str, ...] = setting(default=(), help="the names of additional output tensors")

    def apply(self, editor: Editor) -> None:
        editor.cut(self.at, *self.also)


@attrs.frozen(kw_only=True)
class Shrink(Edit):
    """Removes channels of matrix products, convolutions and normalizations that the outputs do not need.

    A channel is removed if it is 0 for all inputs, because its bias and the weights that compute it are
    0, or because a BatchNormalization multiplies it by 0. It is also removed if every product that
    reads it multiplies it only by 0. A channel with another constant value, such as relu(b) if the
    weights that compute it are 0, is folded into the biases of the products that read it. Where this is
    not possible, such channels are merged into one. Channels that are tied together by an addition, by
    a concatenation along another axis or by the groups of a convolution can only be removed together. A
    model without removable channels is not changed.

    The edit removes rows or columns from weights, but the shapes of the inputs and outputs stay the
    same. The values of the outputs also stay the same, up to rounding.

    Example:
        >>> from onnx import parser
        >>> from ortflex_core import edited_model
        >>> model = parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 1] y) '
        ...     "<float[2, 3] w = {1, 0, 3, 4, 0, 6}, float[3, 1] v = {1, 2, 3}> "
        ...     "{ h = MatMul(x, w) y = MatMul(h, v) }"
        ... )
        >>> edited = edited_model(model, edits=Shrink())
        >>> edited.initializer("w").tolist(), edited.initializer("v").tolist()
        ([[1.0, 3.0], [4.0, 6.0]], [[1.0], [3.0]])

    Source: Fang et al., "DepGraph: Towards Any Structural Pruning" (2023), for the groups of channels.
    """

    name: ClassVar[str] = "shrink"
    stability = "experimental"
    needs: ClassVar[str] = (
        "rows or columns of zeros in the weights, as the constraint sparsity makes them"
    )

    def apply(self, editor: Editor) -> None:
        editor.remove_channels()
