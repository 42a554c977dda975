"""Which initializers of a model are parameters, and which of them the user wants trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import attrs
from onnx import NodeProto

from ortflex_core.errors import ModelError, suggest
from ortflex_core.model.model import Model
from ortflex_core.model.nodes import reads
from ortflex_core.parameters import classical_nodes, evidence
from ortflex_core.parameters.evidence import POINTS, Fact
from ortflex_core.parameters.uses import BIASED, FLOATS, Use, Uses, find_uses
from ortflex_core.types import dtype_name, shape_text

_PLACES: Mapping[str, str] = {
    "product": "a weight of {}",
    "bias": "a weight of {}",
    "joined": "concatenated with data by {}",
    "early": "a constant of {}, before any product",
    "shift": "a constant of {}",
    "other": "a constant of {}",
    "setting": "a setting of {}",
}
_KINDS: Mapping[evidence.Kind, str] = {
    "parameter": "torch's exporter says that it is a parameter",
    "buffer": "torch's exporter says that it is a buffer or a constant",
    "state": "torch's exporter names it after a module",
    "frozen": "it is next to running statistics that are constants, too",
    "made up": "its name was made up by an exporter",
}
# Operators that need a scale or bias, ones and zeros if the network has none.
_FILLED = frozenset(
    {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"}
    | {"LSTM", "GRU", "RNN"}
)


@attrs.frozen
class Choice:
    """One float initializer: whether it is trained, and why or why not."""

    name: str
    trained: bool
    reason: str
    operator: str = ""
    place: int = -1
    sort: str = "constant"
    """What it is if it is not trained, in a word or two, for counting."""


def choose_parameters(
    model: Model, outputs: Sequence[str], params: str | Iterable[str] | None
) -> list[Choice]:
    """Decide about every float initializer that ``outputs`` depend on.

    Args:
        model: the model.
        outputs: what the losses see.
        params: None for all parameters (found by the places they are used in), or names, globs
            and ``"!glob"`` to leave out; a list of exclusions alone starts from all.

    Raises:
        ModelError: a name fits nothing or is not a float initializer; nothing is left to train.
    """
    nodes = model.ancestors(outputs)
    found = _by_evidence(model, nodes, outputs)
    if params is None:
        choices = list(found.values())
    else:
        choices = _by_name(
            model, nodes, found, [params] if isinstance(params, str) else list(params)
        )
    if not any(c.trained for c in choices):
        raise ModelError(_nothing(model, outputs, params, choices))
    return choices


def shared(readers: Iterable[tuple[str, Iterable[str]]]) -> dict[str, tuple[str, ...]]:
    """The parameters that several nodes read, and which: each trains as one.

    Exporters merge tensors of equal values, such as the ones and zeros that the scales and biases of a
    new network begin with.

    Args:
        readers: each node's label and the parameters that it reads.
    """
    found: dict[str, list[str]] = {}
    for label, names in readers:
        for name in names:
            found.setdefault(name, []).append(label)
    return {name: tuple(labels) for name, labels in found.items() if len(labels) > 1}


def _nothing(model: Model, outputs: Sequence[str], params: object, choices: list[Choice]) -> str:
    floats = [n for n, s in model.initializers.items() if s.dtype in FLOATS]
    nodes = model.ancestors(outputs)
    text = f"{model.label} has no float parameter to train that reaches {', '.join(outputs)}"
    if params is not None:
        text += f" with params={params!r}"
    if held := classical_nodes.ways_out(nodes):
        text += f"; {held}"
    elif floats:
        text += f"; its float initializers are {', '.join(floats[:10])}: name them with params=[…]"
    else:
        text += (
            f": its operators ({classical_nodes.listed(nodes)}) have no float initializers. Only those are "
            "trained; add a network after it, or train another model"
        )
    reasons = [f"{c.name} ({c.reason})" for c in choices if not c.trained]
    return text + (f". Left out: {', '.join(reasons[:10])}" if reasons else "")


def _by_evidence(model: Model, nodes: list[NodeProto], outputs: Sequence[str]) -> dict[str, Choice]:
    """Weigh what speaks for each float initializer, see :data:`ortflex_core.parameters.evidence.POINTS`."""
    kinds = evidence.kinds(model.proto)
    values: dict[str, list[Fact]] = {}

    def judge(name: str, uses: Uses) -> Choice:
        if name not in values:
            empty = 0 in (model.initializers[name].shape or ())
            values[name] = [] if empty else list(evidence.of_values(model.initializer(name)))
        return _judge(model, name, kinds.get(name, ""), uses, values[name])

    found = find_uses(model, nodes, outputs, lambda name, uses: judge(name, uses).trained)
    kinds |= evidence.frozen(kinds, {name for name, uses in found.items() if uses.moves})
    return {name: judge(name, uses) for name, uses in found.items()}


def _judge(
    model: Model, name: str, kind: evidence.Kind, uses: Uses, values: Sequence[Fact]
) -> Choice:
    shape = model.initializers[name].shape or ()
    if 0 in shape:
        return Choice(name, False, "it is empty")
    if uses.moves:
        why = "running statistics, which training updates without a gradient"
        return Choice(name, False, why, sort="running statistic")
    if not uses.found:
        return Choice(name, False, "no gradient comes to it", sort="without a gradient")
    best = max(uses.found, key=lambda use: POINTS[use.kind])
    facts = [Fact(best.kind, _PLACES[best.kind].format(best.where))]
    facts += evidence.of_name(name, kind)
    if kind:
        facts.append(Fact(kind, _KINDS[kind]))
    if all(d == 1 for d in shape) and not _may_be_single(model, best, len(shape)):
        facts.append(Fact("single", f"a single number in {best.where}"))
    facts += values
    if uses.turned:
        facts.append(Fact("turned", "a sine or cosine is taken of it"))
    if kind == "state" and any(f.name == "regular" for f in values):  # such as a kernel that blurs
        facts.append(Fact("state of steps", "its values are steps or repeat"))
    if uses.computed and not kind:  # as the formulas of scikit-learn's estimators
        facts.append(Fact("computed", "arithmetic of constants alone"))
    if kind == "made up" and best.operator in _FILLED and any(f.name == "equal" for f in values):
        facts.append(Fact("filler", f"{best.operator} asks for one"))
    trained = sum(fact.points for fact in facts) > 0
    # Of the evidence for what was chosen, the place and the strongest other.
    place, *others = facts
    told = [place, *sorted(others, key=lambda f: -abs(f.points))]
    told = [f for f in told if (f.points > 0) == trained]
    reason = "; ".join(dict.fromkeys(f.words for f in told[:2]))
    mask = any(fact.name == "mask" for fact in facts)
    return Choice(name, trained, reason, best.operator, best.place, "mask" if mask else "constant")


def _may_be_single(model: Model, use: Use, rank: int) -> bool:
    """Whether one number can be a weight in this place: the bias of one channel, a 1×1 matrix."""
    if use.kind == "product":
        of_one = use.operator in BIASED and (use.place == 2 or rank > 1)
        return bool(rank) and (of_one or use.operator == "PRelu")
    if use.operator != "Add" or not rank or use.kind != "bias":
        return False
    return _one_channel(model, model.producers.get(use.behind))


def _one_channel(model: Model, product: NodeProto | None) -> bool:
    """Whether a product has one output channel, so that its bias has one element."""
    if product is None or product.op_type not in BIASED:
        return False
    shape = model.value(product.output[0]).shape
    axis = 1 if product.op_type.startswith("Conv") else -1
    return bool(shape) and shape is not None and len(shape) > 1 and shape[axis] == 1


def _by_name(
    model: Model, nodes: list[NodeProto], found: dict[str, Choice], params: list[str]
) -> list[Choice]:
    used = {i for node in nodes for i in reads(node)}
    specs = model.initializers
    floats = [n for n, s in specs.items() if s.dtype in FLOATS]
    wanted = [p for p in params if not p.startswith("!")]
    unwanted = [p[1:] for p in params if p.startswith("!")]
    chosen: dict[str, bool] = {}
    if not wanted:
        chosen = {name: True for name, choice in found.items() if choice.trained}
    for pattern in wanted:
        if pattern in specs:
            if pattern not in floats:
                raise ModelError(
                    f"the parameter {pattern!r} is {dtype_name(specs[pattern].dtype)}"
                    f"{shape_text(specs[pattern].shape)}; only float initializers can be trained"
                )
            if 0 in (specs[pattern].shape or ()):
                shape = shape_text(specs[pattern].shape)
                raise ModelError(f"the parameter {pattern!r} has no elements, its shape is {shape}")
            if pattern not in used:
                raise ModelError(
                    f"the parameter {pattern!r} does not reach the tensors that the losses read"
                )
            matches = [pattern]
        else:
            # A glob takes what is trained by default; constants are chosen by their full name only.
            pool = [n for n, c in found.items() if c.trained]
            matches = fnmatch.filter(pool, pattern)
        if not matches:
            raise ModelError(f"unknown parameter {pattern!r}; {suggest(pattern, floats)}")
        chosen.update(dict.fromkeys(matches, True))
    for pattern in unwanted:
        if not fnmatch.filter(floats, pattern):
            raise ModelError(f"unknown parameter in '!{pattern}'; {suggest(pattern, floats)}")
        chosen.update(dict.fromkeys(fnmatch.filter(list(chosen), pattern), False))
    everything = [n for n in specs if n in found or n in chosen]
    out = []
    for name in everything:
        known = found.get(name, Choice(name, False, ""))
        if chosen.get(name, False):
            out.append(attrs.evolve(known, trained=True, reason="chosen by name"))
        elif known.trained or not known.reason or name in chosen:
            why = "left out by params="
            out.append(attrs.evolve(known, trained=False, reason=why, sort="by params="))
        else:
            out.append(known)
    return out


def matching(
    patterns: Mapping[str, object],
    names: Sequence[str],
    what: str,
    apart: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Which pattern each name falls under; a full name wins over a glob, an earlier over a later.

    Without any name there is another error, of which no pattern is to blame. ``apart`` says of
    parameters that are not among the names why they are not.

    Raises:
        ModelError: a pattern fits no name.
    """
    out: dict[str, str] = {}
    for pattern in () if not names else sorted(patterns, key=lambda p: p not in names):
        hits = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        others = [] if hits else fnmatch.filter(apart or (), pattern)
        if apart and others:
            raise ModelError(f"{what}: {pattern!r} fits {others[0]!r}, which {apart[others[0]]}")
        if not hits:
            raise ModelError(
                f"{what}: no trained parameter matches {pattern!r}; {suggest(pattern, names)}"
            )
        for name in hits:
            out.setdefault(name, pattern)
    return out
