"""Which initializers of a model are parameters, and which of them the user wants trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np
from onnx import NodeProto, TensorProto

from ortflex_core.errors import ModelError, nearest
from ortflex_core.model import Model, reads
from ortflex_core.subgraphs import subgraphs_of
from ortflex_core.types import dtype_name, shape_text

# Input places that hold weights. "product" places make an initializer a parameter by themselves;
# an elementwise place does so only downstream of another parameter: an addition to the raw input
# is preprocessing, an addition to a matrix product is a bias.
_PRODUCT: Mapping[str, tuple[int, ...]] = {
    "MatMul": (0, 1),
    "Gemm": (0, 1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": (0, 1, 2, 3),
    "Gather": (0,),
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "RMSNormalization": (1,),
    "PRelu": (1,),
}
_ELEMENTWISE: Mapping[str, tuple[int, ...]] = {"Add": (0, 1), "Mul": (0, 1)}
_THROUGH = frozenset(
    {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze"}
    | {"QuantizeLinear", "DequantizeLinear"}
)
_BIASED = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# A float initializer with values like these is a mask to add to attention scores, not a weight.
_MASKED = -1e4


@attrs.frozen
class Choice:
    """One float initializer: whether it is trained, and why or why not."""

    name: str
    trained: bool
    reason: str
    operator: str = ""
    place: int = -1


def choose(
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
    found = _by_place(model, nodes)
    if params is None:
        choices = list(found.values())
    else:
        choices = _by_name(
            model, nodes, found, [params] if isinstance(params, str) else list(params)
        )
    if not any(c.trained for c in choices):
        raise ModelError(_nothing(model, outputs, params, choices))
    return choices


def _nothing(model: Model, outputs: Sequence[str], params: object, choices: list[Choice]) -> str:
    floats = [n for n, s in model.initializers.items() if s.dtype in _FLOATS]
    nodes = model.ancestors(outputs)
    linear = sorted(
        {n.op_type for n in nodes if n.op_type in ("LinearClassifier", "LinearRegressor")}
    )
    text = f"{model.label} has no float parameter to train that reaches {', '.join(outputs)}"
    if params is not None:
        text += f" with params={params!r}"
    if linear:
        text += (
            f"; the weights of {', '.join(linear)} are attributes, which cannot be trained: convert "
            f"with skl2onnx's options black_op={set(linear)!r} to get MatMul and Add"
        )
    elif floats:
        text += f"; its float initializers are {', '.join(floats[:10])}: name them with params=[…]"
    reasons = [f"{c.name} ({c.reason})" for c in choices if not c.trained]
    return text + (f". Left out: {', '.join(reasons[:10])}" if reasons else "")


def _by_place(model: Model, nodes: list[NodeProto]) -> dict[str, Choice]:
    """Follow every float initializer to the places it is used in."""
    specs = model.initializers
    carries: dict[str, str] = {n: n for n, s in specs.items() if s.dtype in _FLOATS}
    from_parameter: set[str] = set()
    product_of: dict[str, NodeProto] = {}
    found: dict[str, Choice] = {}
    trained: set[str] = set()
    for node in _with_subgraphs(nodes):
        product = _PRODUCT.get(node.op_type, ()) if not node.domain else ()
        elementwise = _ELEMENTWISE.get(node.op_type, ()) if not node.domain else ()
        for place, name in enumerate(node.input):
            source = carries.get(name)
            if source is None:
                continue
            if node.op_type in _THROUGH and place == 0:
                carries[node.output[0]] = source
                continue
            where = f"{node.op_type} {node.name!r}" if node.name else node.op_type
            others = [i for i in node.input if i and i != name]
            if place in product:
                # A bias of one channel, a 1×1 matrix, the one slope of a PRelu are weights;
                # a single number anywhere else is a constant.
                rank = len(model.initializers[source].shape or ())
                single = node.op_type in _BIASED and (place == 2 or rank > 1)
                single = single or node.op_type == "PRelu"
                choice = _judge(model, source, where, allow_single=single)
                choice = attrs.evolve(choice, operator=node.op_type, place=place)
            elif place in elementwise and any(o in from_parameter for o in others):
                single = node.op_type == "Add" and any(
                    _one_channel(model, product_of.get(o)) for o in others
                )
                choice = _judge(model, source, where, allow_single=single)
                choice = attrs.evolve(choice, operator=node.op_type, place=place)
            else:
                choice = Choice(source, False, f"a constant of {where}")
            if choice.trained or source not in found:
                found[source] = choice
            if choice.trained:
                trained.add(source)
        if any(i in from_parameter or carries.get(i) in trained for i in reads(node)):
            from_parameter.update(node.output)
        if node.op_type in _BIASED:
            product_of[node.output[0]] = node
    return {name: found[name] for name in specs if name in found}


def _with_subgraphs(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, those inside If, Loop and Scan before the one that holds them."""
    for node in nodes:
        for graph in subgraphs_of(node):
            yield from _with_subgraphs(graph.node)
        yield node


def _one_channel(model: Model, product: NodeProto | None) -> bool:
    """Whether a product has one output channel, so that its bias has one element."""
    if product is None or product.output[0] not in model.producers:
        return False
    shape = model.value(product.output[0]).shape
    axis = 1 if product.op_type.startswith("Conv") else -1
    return bool(shape) and shape is not None and len(shape) > 1 and shape[axis] == 1


def _judge(model: Model, name: str, where: str, *, allow_single: bool) -> Choice:
    shape = model.initializers[name].shape or ()
    size = int(np.prod(shape, dtype=np.int64))  # type: ignore[arg-type]
    if size == 0:
        return Choice(name, False, "it is empty")
    if size == 1 and not (allow_single and shape):
        return Choice(name, False, f"a single number in {where}")
    array = model.initializer(name)
    if not np.isfinite(array).all() or (array.min() <= _MASKED and array.max() <= 0):
        return Choice(name, False, f"a mask in {where}")
    return Choice(name, True, f"a weight of {where}")


def _by_name(
    model: Model, nodes: list[NodeProto], found: dict[str, Choice], params: list[str]
) -> list[Choice]:
    used = {i for node in nodes for i in reads(node)}
    specs = model.initializers
    floats = [n for n, s in specs.items() if s.dtype in _FLOATS]
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
                raise ModelError(f"the parameter {pattern!r} does not reach what the loss sees")
            matches = [pattern]
        else:
            # A glob takes what is trained by default; constants are chosen by their full name only.
            pool = [n for n, c in found.items() if c.trained]
            matches = fnmatch.filter(pool, pattern)
        if not matches:
            raise ModelError(f"unknown parameter {pattern!r}; {nearest(pattern, floats)}")
        chosen.update(dict.fromkeys(matches, True))
    for pattern in unwanted:
        if not fnmatch.filter(floats, pattern):
            raise ModelError(f"unknown parameter in '!{pattern}'; {nearest(pattern, floats)}")
        chosen.update(dict.fromkeys(fnmatch.filter(list(chosen), pattern), False))
    everything = [n for n in specs if n in found or n in chosen]
    out = []
    for name in everything:
        known = found.get(name, Choice(name, False, ""))
        trained = chosen.get(name, False)
        reason = "chosen by name" if trained else "left out by params="
        out.append(attrs.evolve(known, trained=trained, reason=reason))
    return out


def matching(patterns: Mapping[str, object], names: Sequence[str], what: str) -> dict[str, str]:
    """Which pattern each name falls under; a full name wins over a glob, an earlier over a later.

    Without any name there is another error, of which no pattern is to blame.

    Raises:
        ModelError: a pattern fits no name.
    """
    out: dict[str, str] = {}
    for pattern in () if not names else sorted(patterns, key=lambda p: p not in names):
        hits = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not hits:
            raise ModelError(
                f"{what}: no trained parameter fits {pattern!r}; {nearest(pattern, names)}"
            )
        for name in hits:
            out.setdefault(name, pattern)
    return out
