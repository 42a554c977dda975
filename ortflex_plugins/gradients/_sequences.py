"""Shared by the rules of recurrent layers: a direction, loops over its time steps, and activations.

The activations are chosen by name. Source: ONNX, operators RNN, GRU and LSTM, attributes ``activations``,
``activation_alpha`` and ``activation_beta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import onnx

from ortflex_core import (
    NodeView,
    NoGradientRule,
    Ops,
    Tensor,
    Trace,
    build,
    full,
    known_size,
    known_sizes,
    prefix_names,
    size_of,
    size_vector,
)

_END = np.iinfo(np.int64).max
_INT32 = onnx.TensorProto.INT32


@attrs.frozen(kw_only=True)
class Direction:
    """x [T, B, I]; w [gates · H, I]; r [gates · H, H]; y and before [T, B, H]; states [B, H].

    ``before`` is the hidden state before each step, ``alive`` [T, B, 1] marks the steps inside
    their sequence (None means all steps). ``g_y``, ``g_h`` and ``g_c`` are the cotangents of y and of
    the final states. ``peephole`` [3 · H] are the weights of an LSTM for its gates i, o and f.
    """

    reverse: bool
    hidden: int
    x: Tensor
    w: Tensor
    r: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    y: Tensor
    before: Tensor
    c0: Tensor
    alive: Tensor | None
    g_y: Tensor | None
    g_h: Tensor
    g_c: Tensor
    peephole: Tensor | None = None

    def masked(self, op: Ops, value: Tensor, outside: float = 0.0) -> Tensor:
        """The value inside the sequences, and ``outside`` after their ends."""
        return value if self.alive is None else op.Where(self.alive, value, outside)

    def dead(self, op: Ops) -> list[Tensor]:
        """1 for the steps after the end of their sequence and 0 for others, if there may be such steps."""
        return [] if self.alive is None else [op.Cast(op.Not(self.alive), to=self.x.dtype)]


def flat(op: Ops, value: Tensor) -> Tensor:
    """[T, B, n] as [T · B, n]."""
    size = known_size(value, -1)
    if size is not None:
        return op.Reshape(value, [-1, size])
    last = op.Slice(op.Shape(value), [2], [3])
    return op.Reshape(value, op.Concat(op.constant([-1]), last, axis=0))


def unflat(op: Ops, value: Tensor, like: Tensor, size: int) -> Tensor:
    """[T · B, n] as [T, B, n], with the T and B of ``like``."""
    steps, batch = known_size(like, 0), known_size(like, 1)
    if steps is not None:
        return op.Reshape(value, [steps, -1, size])
    if batch is not None:
        return op.Reshape(value, [-1, batch, size])
    front = op.Slice(op.Shape(like), [0], [2])
    return op.Reshape(value, op.Concat(front, op.constant([size]), axis=0))


def previous(op: Ops, values: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The value before each step: ``start``, then the value after the step before."""
    first = op.Unsqueeze(start, axes=[0])
    if known_size(values, 0) == 1:
        return first
    if reverse:
        return op.Concat(op.Slice(values, [1], [_END], [0]), first, axis=0)
    return op.Concat(first, op.Slice(values, [0], [-1], [0]), axis=0)


def directions(op: Ops, node: NodeView, gates: int, gs: Sequence[Tensor | None]) -> list[Direction]:
    """The one or two directions that a node runs in.

    Raises:
        NoGradientRule: a form of the operator that is not supported.
    """
    if node.layout:
        raise NoGradientRule("with layout=1")
    count = 2 if node.direction == "bidirectional" else 1
    x, w, r = node.inputs[:3]
    sizes = known_sizes(r)
    if sizes is None or known_sizes(w) is None:
        raise NoGradientRule("with weights of unknown shape")
    hidden = sizes[2]
    zeros = op.Expand(op.constant(0.0, x.dtype), _state_shape(op, x, hidden))
    alive, alive_next = _inside(op, x, node.input(4))
    out = []
    for k in range(count):
        reverse = k == 1 or node.direction == "reverse"

        def own(t: Tensor, axis: int = 0, k: int = k) -> Tensor:
            if count == 1:
                return op.Squeeze(t, axes=[axis])
            return op.Gather(t, op.constant(k), axis=axis)

        def state(t: Tensor | None, own: Callable[[Tensor], Tensor] = own) -> Tensor:
            return zeros if t is None else own(t)

        bias = node.input(3)
        halves: Sequence[Tensor | None] = (None, None)
        if bias is not None:
            halves = op.Split(own(bias), [gates * hidden] * 2, axis=0, outputs=2)
        y = own(node.outputs[0], 1)
        h0 = state(node.input(5))
        before = previous(op, y, h0, reverse)
        if reverse and alive_next is not None:
            before = op.Where(alive_next, before, op.Unsqueeze(h0, axes=[0]))
        g_y = None if gs[0] is None else own(full(op, gs[0], node.outputs[0]), 1)
        if g_y is not None and alive is not None:
            g_y = op.Where(alive, g_y, 0.0)
        final = [
            None if g is None else full(op, g, o)
            for g, o in zip(gs[1:], node.outputs[1:], strict=True)
        ]
        if alive is not None:
            # The final state of a sequence without steps is 0 and does not depend on its start.
            not_empty = op.Unsqueeze(op.Greater(node.inputs[4], 0), axes=[0, 2])
            final = [None if g is None else op.Where(not_empty, g, 0.0) for g in final]
        g_h, g_c = (*final, None, None)[:2]
        out.append(
            Direction(
                reverse=reverse,
                hidden=hidden,
                x=x,
                w=own(w),
                r=own(r),
                input_bias=halves[0],
                hidden_bias=halves[1],
                y=y,
                before=before,
                c0=state(node.input(6) if gates == 4 else None),
                alive=alive,
                g_y=g_y,
                g_h=state(g_h),
                g_c=state(g_c),
                peephole=None if node.input(7) is None else own(node.input(7)),
            )
        )
    return out


def _state_shape(op: Ops, x: Tensor, hidden: int) -> Tensor:
    return op.Concat(size_vector(op, x, 1), op.constant([hidden]), axis=0)


def _inside(op: Ops, x: Tensor, lengths: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Whether a step is inside its sequence, and whether the next step is: [T, B, 1]."""
    if lengths is None:
        return None, None
    count = op.Range(0, op.Cast(size_of(op, x, 0), to=_INT32), 1)
    time = op.Unsqueeze(count, axes=[1, 2])
    ends = op.Unsqueeze(lengths, axes=[0, 2])
    return op.Less(time, ends), op.Less(time + 1, ends)


Step = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]

# Values inside a subgraph may not have the name of one outside.
_PREFIX = "scan/"


def scan(
    step: Step,
    states: Sequence[Tensor],
    items: Sequence[Tensor],
    outer: Mapping[str, Tensor],
    *,
    backwards: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Final states and stacked outputs of ``step(op, states, items, outer)`` along axis 0.

    ``step`` returns the new states and its outputs; it has to read every state and item. Tensors
    in ``outer`` are the same in all steps. With ``backwards``, the first step reads the last items; the
    outputs of a step have the index of its items. States have the shape [batch, n], items
    [steps, batch, n].
    """
    trace = items[0].trace
    inner = Trace(trace.opsets)

    def declare(name: str, tensor: Tensor, first: int) -> Tensor:
        # The body of a Scan must know at least the number of dimensions.
        shape = (None, None) if tensor.shape is None else tensor.shape[first:]
        return inner.input(name, tensor.dtype, shape)

    inner_states = [declare(f"state{k}", t, 0) for k, t in enumerate(states)]
    inner_items = [declare(f"item{k}", t, 1) for k, t in enumerate(items)]
    inner_outer = {name: inner.input(name, t.dtype, t.shape) for name, t in outer.items()}
    new_states, stacked = step(inner.op, inner_states, inner_items, inner_outer)
    outputs = {f"next{k}": t for k, t in enumerate(new_states)}
    outputs |= {f"out{k}": t for k, t in enumerate(stacked)}
    body = build(inner, outputs, name="step").proto().graph
    inner_inputs = [i for i in body.input if i.name not in outer]
    del body.input[:]
    body.input.extend(inner_inputs)
    prefix_names(body, _PREFIX, set())
    size = None if items[0].shape is None else items[0].shape[0]
    types = [(t.dtype, t.shape) for t in new_states]
    types += [(t.dtype, None if t.shape is None else (size, *t.shape)) for t in stacked]
    settings: dict[str, object] = {
        "body": body,
        "num_scan_inputs": len(items),
        "scan_input_directions": [int(backwards)] * len(items),
    }
    if stacked:
        settings["scan_output_directions"] = [int(backwards)] * len(stacked)
    results = trace.node(
        "Scan",
        [*states, *items],
        {name: onnx.helper.make_attribute(name, value) for name, value in settings.items()},
        outputs=len(types),
        captures={_PREFIX + name: tensor for name, tensor in outer.items()},
        types=types,
    )
    return list(results[: len(states)]), list(results[len(states) :])


@attrs.frozen
class Activation:
    """y = f(x), and f′ as a function of y."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def value(self, op: Ops, x: Tensor) -> Tensor:
        """Return f(x)."""
        if self.name == "Affine":
            return self.alpha * x + self.beta
        if self.name == "ScaledTanh":
            return self.alpha * op.Tanh(self.beta * x)
        names = ("alpha", "beta")[: _PARAMETERS[self.name]]
        result: Tensor = op(self.name, x, **{name: getattr(self, name) for name in names})
        return result

    def slope(self, op: Ops, y: Tensor) -> Tensor:
        """Return f′(x) from y = f(x)."""
        return _SLOPES[self.name](op, y, self)


_Slope = Callable[[Ops, Tensor, Activation], Tensor]

_SLOPES: Mapping[str, _Slope] = {
    "Sigmoid": lambda op, y, a: y * (1 - y),
    "Tanh": lambda op, y, a: 1 - y * y,
    "Relu": lambda op, y, a: op.Sign(y),
    "LeakyRelu": lambda op, y, a: op.Where(y > 0, op.constant(1.0, y.dtype), a.alpha),
    "ThresholdedRelu": lambda op, y, a: op.Abs(op.Sign(y)),
    "Elu": lambda op, y, a: op.Where(y > 0, 1.0, y + a.alpha),
    "Softsign": lambda op, y, a: (1 - op.Abs(y)) * (1 - op.Abs(y)),
    "Softplus": lambda op, y, a: 1 - op.Exp(-y),
    "HardSigmoid": lambda op, y, a: op.Where(
        op.And(y > 0, y < 1), op.constant(a.alpha, y.dtype), 0.0
    ),
    "ScaledTanh": lambda op, y, a: a.beta * (a.alpha - y * y / a.alpha),
    "Affine": lambda op, y, a: op.Expand(op.constant(a.alpha, y.dtype), op.Shape(y)),
}
_PARAMETERS = dict.fromkeys(_SLOPES, 0) | {
    **dict.fromkeys(("LeakyRelu", "ThresholdedRelu", "Elu"), 1),
    **dict.fromkeys(("HardSigmoid", "ScaledTanh", "Affine"), 2),
}
_DEFAULTS = {
    "LeakyRelu": (0.01,),
    "ThresholdedRelu": (1.0,),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
}
_BY_NAME = {name.lower(): name for name in _SLOPES}


def activations(node: NodeView, default: Sequence[str], sides: int) -> list[Activation]:
    """The activations of all directions, in the order of the directions.

    Raises:
        NoGradientRule: an unknown activation, or one whose slope is not a function of y.
    """
    texts = [n.decode() if isinstance(n, bytes) else n for n in node.activations or []]
    names = texts[: len(default) * sides] or [*default] * sides
    alphas, betas = iter(node.activation_alpha or []), iter(node.activation_beta or [])
    return [_activation(name, alphas, betas) for name in names]


def _activation(given: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """One activation; it takes its parameters from the remaining numbers, else it has the defaults."""
    name = _BY_NAME.get(given.lower())
    if name is None:
        raise NoGradientRule(f"with the activation {given!r}")
    defaults = (*_DEFAULTS.get(name, ()), None, None)
    sources = (alphas, betas)[: _PARAMETERS[name]]
    values = [next(source, default) for source, default in zip(sources, defaults, strict=False)]
    if None in values:
        raise NoGradientRule(f"with the activation {given!r} without its activation_alpha or _beta")
    activation = Activation(name, *(float(v) for v in values if v is not None))
    if name in ("LeakyRelu", "ScaledTanh", "ThresholdedRelu", "Elu") and activation.alpha <= 0:
        raise NoGradientRule(
            f"with the activation {given!r} and activation_alpha {activation.alpha:g}"
        )
    return activation
