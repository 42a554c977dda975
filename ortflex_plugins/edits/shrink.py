"""A smaller model with the same outputs: without the channels that say nothing."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Edit, Editor


@attrs.frozen(kw_only=True)
class Shrink(Edit):
    """Removes channels of products, convolutions and normalizations that the outputs do not need.

    A channel goes if it is 0 for all inputs (its row of the weight and its bias are 0, or a
    BatchNormalization multiplies it by 0), or if every product that reads it has a column of 0 for it.
    Channels with another constant value, such as relu(b) after a row of 0, are merged into one. Channels
    that an addition, a concatenation or groups of a convolution bind together go together. The outputs
    are those of the model before, up to rounding; without such channels nothing is changed.

    Weights get fewer rows or columns; shapes of inputs and outputs stay.

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
        """Remove the channels."""
        editor.remove_channels()
