"""The base of the losses whose labels have the type and shape of the prediction."""

from __future__ import annotations

import attrs

from ortflex_core import Loss, TensorSpec, float_labels


@attrs.frozen(kw_only=True)
class ElementwiseLoss(Loss):
    """A loss of each element of the prediction and the element of the labels at its place."""

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)
