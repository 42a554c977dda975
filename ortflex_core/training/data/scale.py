"""Inputs whose scale does not fit the first layer that reads them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.types import Array
from ortflex_core.training.data.columns import Columns

_TRANSPARENT = frozenset(
    {"Cast", "Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Pad"}
)
_LARGEST = 100.0
"""The root mean square of the results of a first layer from which its inputs are called too large."""
_BYTE = 128


def out_of_scale(model: Model, columns: Columns) -> Iterator[str]:
    """One line for each input that is out of scale, with the line that repairs it.

    The size of a layer's results is estimated as rms(x) · ‖W‖ / √m for m outputs: their root mean square
    if the inputs are independent. Data of 8 bits are out of scale from 128 on. A model that changes the
    scale itself (Div, Sub, BatchNormalization, …) before its first product is not judged.
    """
    for spec in model.inputs:
        given = columns.inputs.get(spec.name)
        if (
            given is None
            or given.dtype.kind not in "uif"
            or spec.numpy.kind != "f"
            or not given.size
        ):
            continue
        first = _first_layer(model, spec.name)
        if first is None:
            continue
        weight, outputs = first
        what = "X" if len(columns.inputs) == 1 else f"X[{spec.name!r}]"
        if given.dtype == np.uint8:
            if given.max() >= _BYTE:
                yield (
                    f"{what} has 8-bit values up to {given.max()}, and nothing in the model scales them; "
                    f"repair it: {what} = {what}.astype('float32') / 255, and then with the mean and the "
                    "standard deviation with which the model was trained"
                )
            continue
        size = _norm(given) / given.size**0.5
        result = size * _norm(model.initializer(weight)) / max(1, outputs) ** 0.5
        if np.isfinite(result) and min(size, result) > _LARGEST:
            yield (
                f"the values of {what} are about {size:.3g} in size, so the first layer ({weight!r}) "
                f"gives values of about {result:.3g}; training usually needs values of about 1: "
                f"{what} = ({what} - {what}.mean(0)) / {what}.std(0)"
            )


def _norm(array: Array) -> float:
    return float(np.linalg.norm(array.astype(np.float64).ravel()))


def _first_layer(model: Model, name: str) -> tuple[str, int] | None:
    """The weight of the only product that reads an input, and the number of its outputs."""
    nodes = model.internal.graph.node
    for _ in nodes:
        readers = [node for node in nodes if name in node.input]
        if len(readers) != 1:
            return None
        [node] = readers
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            if node.op_type not in _TRANSPARENT or node.input[0] != name:
                return None
            name = node.output[0]
            continue
        weight = node.input[1]
        if node.input[0] != name or weight not in model.initializers:
            return None
        shape = model.initializer(weight).shape
        is_first = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
        return (weight, shape[0 if is_first else -1]) if len(shape) > 1 else None
    return None
