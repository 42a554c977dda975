"""A smaller file that computes the same: a model without the channels that its outputs do not need."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core.compiler.model.channel_removal import find_classes
from ortflex_core.compiler.model.channels import Channels
from ortflex_core.compiler.model.editor import Editor
from ortflex_core.compiler.model.model import Model, as_model
from ortflex_core.compiler.model.products import module_of
from ortflex_core.compiler.operators import equivalence
from ortflex_core.kernel.errors import GraphError, ModelError
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array

_ROWS = 3
"""The rows of random inputs."""
_CLOSE, _CLOSE_HALF = 1e-4, 2e-2
"""The largest difference of outputs, as a part of the largest one; of files in half precision."""
_MERGED = "it has the constant values of all channels of its layer"
_VARIES = "where a product reads it, another channel is added, or zeros are around it"
_DEFECT = "This is a defect of ortflex; please report it with the file"


@attrs.frozen(kw_only=True)
class ShrunkLayer:
    """The number of channels of a product, before and after."""

    module: str
    operator: str
    before: int
    after: int


@attrs.frozen(kw_only=True, eq=False)
class Shrunk:
    """The result of :func:`shrink`.

    Attributes:
        layers: the products that compute channels, in the order of the graph.
        kept: the reasons why channels that are the same for all inputs are kept, each with the number
            of these channels.
        parameters: the number of elements of all initializers, before and after.
        difference: the largest difference of an output, as a fraction of the largest element of that
            output; None if the two models could not be compared.
        not_compared: the reason why they could not be compared, or "".
    """

    layers: tuple[ShrunkLayer, ...]
    kept: Mapping[str, int]
    parameters: tuple[int, int]
    difference: float | None
    not_compared: str = ""
    _small: Model = attrs.field(repr=False, alias="small")

    def export(self, path: str | os.PathLike[str] | None = None) -> ModelProto:
        """The smaller model; with a path, the file is written, too.

        Raises:
            OutputError: the file cannot be written.
        """
        return self._small.export({}, path)


def shrink(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    inputs: Mapping[str, Array] | None = None,
    plugins: Plugins | None = None,
) -> Shrunk:
    """Remove the channels of a model that its outputs do not need, and write the smaller one.

    A channel goes if it is 0 for all inputs, or if no product reads it; one with another constant value
    goes into biases, or is merged with others. The outputs of both models are compared on some rows
    before anything is written.

    Args:
        model: a path, bytes, a ModelProto or a Model.
        path: the file to write; None writes nothing.
        inputs: rows for the comparison, by the names of the inputs; by default random rows.
        plugins: the plugins with decompositions of operators; None for the installed ones.

    Raises:
        ModelError: the model cannot be read, or the outputs differ, which is a defect of ortflex;
            nothing is written then.
        OutputError: the file cannot be written.

    >>> import onnx.parser
    >>> before = onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["" : 17]>
    ...     agraph (float[N, 2] x) => (float[N, 1] y)
    ...     <float[2, 3] w = {1, 0, 3, 4, 0, 6}, float[3, 1] v = {1, 2, 3}>
    ...     {
    ...         h = MatMul (x, w)
    ...         r = Relu (h)
    ...         y = MatMul (r, v)
    ...     }
    ... ''')
    >>> small = shrink(before)
    >>> [(layer.module, layer.before, layer.after) for layer in small.layers]
    [('w', 3, 2), ('v', 1, 1)]

    Source: Fang et al., "DepGraph: Towards Any Structural Pruning" (2023), for the groups of channels.
    """
    source = as_model(model, False, plugins)
    editor = Editor(source, 0, source.label)
    before = {layer.node.output[0]: layer for layer in editor.channels.layers}
    editor.remove_channels()
    channels = editor.channels
    after = {layer.node.output[0]: len(layer.channels.ids) for layer in channels.layers}
    small = editor.result()
    old, new = source.export({}), small.export({})
    difference, reason = _compare(source, old, new, inputs)
    if difference is not None and difference > (_CLOSE_HALF if source.half else _CLOSE):
        raise ModelError(
            f"{source.label} without the channels that seem superfluous has outputs that differ by "
            f"{difference:.3g} of the largest one, so nothing was written. {_DEFECT}"
        )
    found = Shrunk(
        layers=tuple(
            ShrunkLayer(
                module=module_of(layer.node, layer.node.input[1]),
                operator=layer.node.op_type,
                before=len(layer.channels.ids),
                after=after[output],
            )
            for output, layer in before.items()
            if output in after
        ),
        kept=_kept(channels),
        parameters=(_parameters(old), _parameters(new)),
        difference=difference,
        not_compared=reason,
        small=small,
    )
    if path is not None:
        found.export(path)
    return found


def _kept(channels: Channels) -> dict[str, int]:
    """The reasons why channels stay whose rows are zero."""
    classes = find_classes(channels)
    reasons: Counter[str] = Counter()
    for layer in channels.layers:
        for i, value in zip(layer.channels.ids, layer.channels.values, strict=True):
            if np.isfinite(value):
                known = classes.get(channels.root(int(i)))
                own = _MERGED if known is not None and known.constant else _VARIES
                reasons[channels.reason(int(i)) or own] += 1
    return dict(reasons)


def _compare(
    model: Model, old: ModelProto, new: ModelProto, inputs: Mapping[str, Array] | None
) -> tuple[float | None, str]:
    try:
        before = equivalence.Runner(old, {})
        feeds = equivalence.fitting_inputs(before, _ROWS)[0] if inputs is None else dict(inputs)
        expected = before(feeds)
    except GraphError as error:
        return None, f"the model cannot be run with these inputs: {error}"
    try:
        found = equivalence.Runner(new, {})(feeds)
    except GraphError as error:
        raise ModelError(
            f"{model.label} cannot be run without the channels that seem superfluous: {error}. "
            f"Nothing was written. {_DEFECT}"
        ) from error
    worst = 0.0
    for name, one in expected.items():
        other = found[name]
        if not isinstance(one, np.ndarray) or one.dtype.kind not in "fiu":
            continue
        if one.shape != other.shape:
            return float("inf"), ""
        wide = one.astype(np.float64)
        finite = np.isfinite(wide)
        if not (finite == np.isfinite(other)).all():
            return float("inf"), ""
        if finite.any():
            largest = np.abs(wide[finite]).max() or 1.0
            worst = max(worst, float(np.abs(wide - other)[finite].max() / largest))
    return worst, ""


def _parameters(model: ModelProto) -> int:
    sizes = (int(np.prod(t.dims, dtype=np.int64)) for t in model.graph.initializer)
    return sum(sizes)
