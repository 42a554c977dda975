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

    >>> Shrink().name
    'shrink'

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
