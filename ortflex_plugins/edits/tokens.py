"""More tokens for a language model."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Edit, Editor, ModelError, expected_count, is_count, setting, suggest


def count(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: an integer above 0."""
    if not is_count(value):
        raise ValueError(f"{attribute.name}: {expected_count(value)}")


@attrs.frozen(kw_only=True)
class MoreTokens(Edit):
    """Adds tokens: new rows of the token embedding, and new columns of a head that is tied to it.

    The embedding table [tokens, width] becomes [tokens + add, width], and the logits [N, …, tokens] of
    a tied head become [N, …, tokens + add]. A new row is the mean of the old rows plus normally
    distributed noise. In each column, the standard deviation of the noise is √1e-9 (about 3.2e-5) times
    the standard deviation of the old values. The new tokens are therefore about as likely as an average
    token at first, but differ from one another. The new bias elements of a tied head are the mean of
    the old elements. A head is tied if it reads the initializer of the embedding, or if its matrix has
    the same values as the embedding table.

    Raises:
        ValueError: ``add`` is not an integer above 0.
        ModelError: when a model is edited: it has no embedding, ``at`` does not name one, or another node
            reads the table.

    Example:
        >>> from onnx import parser
        >>> from ortflex_core import edited_model
        >>> model = parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> g (int64[N] ids) => (float[N, 2] y) '
        ...     "<float[3, 2] table = {1, 2, 3, 4, 5, 6}> { y = Gather(table, ids) }"
        ... )
        >>> edited_model(model, edits=MoreTokens(add=2)).initializer("table").round(2).tolist()
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [3.0, 4.0], [3.0, 4.0]]

    Source: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models" (2021); the
    variance of the noise is that of ``resize_token_embeddings`` in transformers.
    """

    name: ClassVar[str] = "more_tokens"
    stability = "experimental"
    needs: ClassVar[str] = "an embedding: a Gather of rows of a float initializer"

    add: int = setting(validator=count, help="the number of new tokens")
    at: str = setting(
        default="",
        help="the name of the initializer or module of the embedding; by default, the embedding "
        "with the most rows",
    )

    def apply(self, editor: Editor) -> None:
        table = self._table(editor)
        old = editor.constant(table).astype(np.float64)
        editor.check_room(self.add, old.shape[1])
        noise = editor.generator(table).standard_normal((self.add, old.shape[1]))
        editor.add_tokens(table, old.mean(axis=0) + 10**-4.5 * old.std(axis=0) * noise)

    def _table(self, editor: Editor) -> str:
        tables = editor.embeddings
        if not tables:
            raise ModelError(
                f"{editor.where}: {editor.label} has no embedding (a Gather of rows of a float initializer)"
            )
        if not self.at:
            return max(tables, key=lambda name: len(editor.constant(name)))
        found = [name for name, module in tables.items() if self.at in (name, module)]
        if not found:
            known = [*tables, *tables.values()]
            raise ModelError(
                f"{editor.where}.at: {self.at!r} is not an embedding of {editor.label}; "
                f"{suggest(self.at, known)}"
            )
        return found[0]
