"""The weights that a pruning makes zero, and the biases and normalizations of their channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onnx import NodeProto

from ortflex_core.compiler.graph.nodes import readers_of
from ortflex_core.compiler.model.editor import Editor
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.module_paths import Paths
from ortflex_core.compiler.problem.output_axes import output_axes
from ortflex_core.compiler.problem.parameters import matching
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.compiler.problem.pruning import Pruning
from ortflex_core.compiler.problem.updating import ConstraintTerm, Follower, PruningTerm
from ortflex_core.kernel.errors import ConfigError

# After these a channel that is zero is still zero.
_KEEPING_ZERO = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Tanh", "Dropout", "Identity"}
    | {"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Mish", "ThresholdedRelu"}
)
_CONSTANT = frozenset({"Identity", "Cast", "Transpose", "QuantizeLinear", "DequantizeLinear"})


def place_prunings(
    terms: Sequence[ConstraintTerm], model: Model, paths: Paths
) -> tuple[ConstraintTerm, ...]:
    """The constraints, prunings with the weights that they make zero; named ones must be possible."""
    problems = Problems()
    placed = [
        problems.collect(_placed, term, term.constraint, model, paths)
        if isinstance(term.constraint, Pruning)
        else term
        for term in terms
    ]
    problems.raise_all()
    return tuple(term for term in placed if term is not None)


def _placed(term: ConstraintTerm, pruning: Pruning, model: Model, paths: Paths) -> PruningTerm:
    label = f"constraint {pruning.name!r}"
    own = [n for n in term.parameters if n not in model.attached]
    patterns, where = dict.fromkeys(pruning.params), "constraint.params"
    named = list(matching(patterns, term.parameters, where, paths=paths)) if patterns else []
    if (term.parameters and not own) or not set(named) <= set(own):
        raise ConfigError(
            f"{label}: the matrices of adapters cannot be sparse: their product is dense, and one of "
            "them is zero at the start, so it would stay zero; train the model's own weights, without "
            "adapters="
        )
    axes = output_axes(model, own)
    last = _before_outputs(model, own, axes) if pruning.whole_channels else set()
    refused: dict[str, str] = {}
    targets = []
    for name in named or [n for n in own if n in axes]:
        why = pruning.refusal(model.initializer(name).shape, axes.get(name, ()))
        if not why and name in last and not named:
            why = "its channels are outputs of the model"
        if why:
            refused[name] = why
        else:
            targets.append(name)
    if named and refused:
        raise ConfigError(
            [f"{label}: {name!r} cannot have such zeros: {why}" for name, why in refused.items()]
        )
    notes = [f"{label}: {name!r} stays dense: {why}" for name, why in refused.items()]
    if not targets:
        why = "; ".join(notes) or "no trained weight belongs to a product or convolution"
        raise ConfigError(
            f"{label}: there is no weight to make sparse: {why}; name some with params="
        )
    followers: dict[str, Follower] = {}
    together: tuple[tuple[str, ...], ...] = ()
    if pruning.whole_channels:
        together = Editor(model, 0, label).joined_weights(targets)
        notes += [
            f"{label}: {', '.join(map(repr, group))} have the same channels, which become zero together"
            for group in together
        ]
        vectors = [n for n in own if n not in targets]
        followers = _followers(model, {n: axes[n][0] for n in targets}, vectors)
    return PruningTerm(
        index=term.index,
        constraint=pruning,
        parameters=tuple(targets),
        axes={n: axes.get(n, ()) for n in targets},
        followers=followers,
        together=together,
        notes=tuple(notes),
    )


def _before_outputs(model: Model, names: Sequence[str], axes: Mapping[str, object]) -> set[str]:
    """The weights whose channels reach an output of the model without another weight's product."""
    readers = readers_of(model.internal.graph.node)
    outputs = {output.name for output in model.outputs}
    weights = {t for name in axes for t in _forms(name, readers)}
    found = set()
    for name in names:
        seen: set[str] = set()
        pending = [o for node in _products(name, readers) for o in node.output]
        while pending:
            tensor = pending.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            for node in readers.get(tensor, ()):
                if weights.isdisjoint(node.input):
                    pending.extend(node.output)
        if seen & outputs:
            found.add(name)
    return found


def _forms(weight: str, readers: Mapping[str, list[NodeProto]]) -> Iterator[str]:
    """A weight, and the same transposed or rounded."""
    yield weight
    for node in readers.get(weight, ()):
        if node.op_type in _CONSTANT and node.input[0] == weight:
            yield from _forms(node.output[0], readers)


def _followers(
    model: Model, channels: Mapping[str, int], vectors: Sequence[str]
) -> dict[str, Follower]:
    """The vectors that are zero for a zero channel: biases, and what normalizations multiply and add.

    A vector that several nodes read, or that belongs to several weights, is left out.
    """
    readers = readers_of(model.internal.graph.node)
    found: dict[str, list[Follower]] = {}
    for weight, channel in channels.items():
        size = (model.initializers[weight].shape or ())[channel]
        for node in _products(weight, readers):
            for vector in _vectors(model, node, readers):
                spec = model.initializers.get(vector)
                if vector not in vectors or spec is None or len(readers[vector]) > 1:
                    continue
                shape = tuple(spec.shape or ())
                if [d for d in shape if d != 1] == [size]:
                    rank = len(model.initializers[weight].shape or ())
                    summed = tuple(k for k in range(rank) if k != channel)
                    found.setdefault(vector, []).append(
                        Follower(weight=weight, summed=summed, shape=shape)  # type: ignore[arg-type]
                    )
    return {n: followers[0] for n, followers in found.items() if len(followers) == 1}


def _products(weight: str, readers: Mapping[str, list[NodeProto]]) -> Iterator[NodeProto]:
    """The nodes that multiply data by a weight, perhaps transposed or rounded."""
    for node in readers.get(weight, ()):
        if node.op_type in _CONSTANT and node.input[0] == weight:
            yield from _products(node.output[0], readers)
        else:
            yield node


def _vectors(
    model: Model, node: NodeProto, readers: Mapping[str, list[NodeProto]]
) -> Iterator[str]:
    """The initializers that are added to a product, or that normalizations of it read."""
    last = node.op_type in ("MatMul", "Gemm")  # its channels are the last axis
    if node.op_type in ("Gemm", "Conv", "ConvTranspose") and len(node.input) > 2:
        yield node.input[2]
    tensor, outputs = node.output[0], {output.name for output in model.outputs}
    # Where several nodes read a tensor, each of them may need another bias.
    while len(following := readers.get(tensor, [])) == 1 and tensor not in outputs:
        [node] = following
        if node.op_type == "Add":
            others = [name for name in node.input if name != tensor and name in model.initializers]
            if not others or not _along(model, others[0], tensor, last=last):
                return
            yield others[0]
        elif node.op_type == "BatchNormalization" and node.input[0] == tensor:
            if last and len(model.value(tensor).shape or ()) != 2:
                return
            yield from node.input[1:3]
        elif node.op_type not in _KEEPING_ZERO or node.input[0] != tensor:
            return
        tensor = node.output[0]


def _along(model: Model, vector: str, tensor: str, *, last: bool) -> bool:
    """Whether a vector is added along the channels of a tensor."""
    shape, rank = model.initializers[vector].shape or (), len(model.value(tensor).shape or ())
    place = next((len(shape) - k for k, size in enumerate(shape) if size != 1), 0)
    return bool(rank) and len(shape) <= rank and place == (1 if last else rank - 1)
