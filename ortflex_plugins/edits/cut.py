"""The end of a model at another tensor."""

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
        """Make the tensors the outputs."""
        editor.cut(self.at, *self.also)
