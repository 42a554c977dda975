"""What edits changed in a model, for summaries and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from onnx import NodeProto

from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.onnx_files import functions, model_file
from ortflex_core.kernel.types import TensorSpec, dtype_name, shape_text

_LISTED = 4
"""The tensors that a line names."""


@attrs.frozen(kw_only=True)
class Changes:
    """The differences between a model and its file before the edits."""

    new: Mapping[str, str]
    """The new weights, and those with new rows or columns: types and shapes, and the shapes before."""
    numbers: int
    """How many of their numbers the file does not have."""
    smaller: Mapping[str, str]
    """The weights from which parts were removed: types and shapes, and the shapes before."""
    removed: tuple[str, ...]
    """The weights that the model no longer has."""
    nodes: frozenset[str]
    """The first outputs of new nodes."""
    removed_nodes: int
    """How many nodes the model no longer has."""

    @property
    def facts(self) -> dict[str, str]:
        """What is new, smaller and removed, each in one line; without what there is not.

        >>> Changes(
        ...     new={"fc.bias": "float32[5], was [4]"},
        ...     numbers=5,
        ...     smaller={},
        ...     removed=("old.w",),
        ...     nodes=frozenset(),
        ...     removed_nodes=2,
        ... ).facts
        {'new': 'fc.bias float32[5], was [4]; 5 new numbers', 'removed': '2 nodes; old.w'}
        """
        new = [f"{name} {words}" for name, words in self.new.items()]
        smaller = [f"{name} {words}" for name, words in self.smaller.items()]
        gone = [f"{self.removed_nodes} node{'s' * (self.removed_nodes > 1)}"]
        facts = {
            "new": _listed(new) + f"; {self.numbers:,} new numbers" * bool(new),
            "smaller": _listed(smaller),
            "removed": _listed([*gone[: self.removed_nodes], *self.removed]),
        }
        return {key: words for key, words in facts.items() if words}


def _listed(words: Sequence[str]) -> str:
    hidden = len(words) - _LISTED
    return "; ".join([*words[:_LISTED], *([f"{hidden} more"] if hidden > 0 else [])])


def find_changes(model: Model) -> Changes:
    """What edits changed in a model, and the nodes of a quantizer."""
    model, old = model.unextended or model, model.as_read
    specs = (_weights(old), _weights(model))
    new: dict[str, str] = {}
    smaller: dict[str, str] = {}
    numbers = 0
    for name, spec in specs[1].items():
        known = specs[0].get(name)
        own = name in model.new_head
        if known is not None and known.shape == spec.shape and not own:
            continue
        if known is None and not own and model.quantization is not None:
            continue  # of the quantizer
        words = f"{dtype_name(spec.dtype)}{shape_text(spec.shape)}"
        if known is not None and known.shape != spec.shape:
            words += f", was {shape_text(known.shape)}"
        if known is None or own or _size(known) < _size(spec):
            new[name] = words
            numbers += _size(spec) - (0 if known is None else _kept(old, model, name))
        else:
            smaller[name] = words
    nodes = (_nodes(old), _nodes(model))
    return Changes(
        new=new,
        numbers=numbers,
        smaller=smaller,
        removed=tuple(name for name in specs[0] if name not in specs[1]),
        nodes=frozenset(
            name
            for name, node in nodes[1].items()
            if name not in nodes[0] or nodes[0][name].op_type != node.op_type
        ),
        removed_nodes=len(nodes[0].keys() - nodes[1].keys()),
    )


def _weights(model: Model) -> dict[str, TensorSpec]:
    """The float initializers of a file."""
    names = [t.name for t in model.proto.graph.initializer]
    specs = {name: model.initializers[name] for name in names if name in model.initializers}
    return {name: spec for name, spec in specs.items() if spec.dtype in FLOATS}


def _size(spec: TensorSpec) -> int:
    return math.prod(d for d in spec.shape or () if isinstance(d, int))


def _kept(old: Model, model: Model, name: str) -> int:
    """How many numbers of a weight are those that it had in the file, at the same places."""
    before, after = old.initializer(name), model.initializer(name)
    if before.ndim != after.ndim:
        return 0
    part = after[tuple(slice(size) for size in before.shape)]
    return before.size if np.array_equal(part, before) else 0


def _nodes(model: Model) -> dict[str, NodeProto]:
    """The nodes of a file by their first outputs, without calls of functions."""
    bare = model_file.skeleton(model.proto)
    whole = functions.inlined(bare, model.label) if bare.functions else bare
    return {node.output[0]: node for node in whole.graph.node if node.output}
