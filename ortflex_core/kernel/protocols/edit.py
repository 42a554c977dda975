"""Edits: changes of a model before its training, which stay in the export."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

import attrs

from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.compiler.model.editor import Editor


@attrs.frozen(kw_only=True)
class Edit(Component, abc.ABC):
    """An edit changes the graph of a model before training, for example its head or its vocabulary.

    The changed model is then trained, checked and exported like any other. An edit is applied once, when
    the Trainer is created; a resumed run applies it again to the file in the checkpoint, so it
    has to be a function of the model, its fields and :meth:`Editor.generator
    <ortflex_core.Editor.generator>`.
    """

    needs: ClassVar[str] = ""
    """What a model needs for this edit, in a few words, for the reference."""

    @abc.abstractmethod
    def apply(self, editor: Editor) -> None:
        """Change the model that the editor has.

        Raises:
            ConfigError, ModelError: the edit does not fit the model; says what does.
        """
