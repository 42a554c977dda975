"""The end of a model at another tensor."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Edit, Editor, setting


@attrs.frozen(kw_only=True)
class Cut(Edit):
    """Ends the model at a tensor, or at several, which become its outputs.

    Nodes and initializers that these do not need are removed.

    >>> Cut(at="features").at
    'features'

    Source: onnx.utils.extract_model, which does the same for a file.
    """

    name: ClassVar[str] = "cut"
    stability = "experimental"
    needs: ClassVar[str] = "the names of tensors, which `ortflex graph` shows"

    at: str = setting(help="the name of the tensor")
    also: tuple[str, ...] = setting(default=(), help="the names of further outputs")

    def apply(self, editor: Editor) -> None:
        """Make the tensors the outputs."""
        editor.cut(self.at, *self.also)
