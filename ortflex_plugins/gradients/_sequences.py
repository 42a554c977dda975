"""One direction of a recurrent layer: its weights, its states before each step, its cotangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import onnx

from ortflex_core.autodiff import NodeView, full
from ortflex_core.errors import NoGradientRule
from ortflex_core.graph import Ops, Tensor

_END = np.iinfo(np.int64).max
_INT32 = onnx.TensorProto.INT32


@attrs.frozen(kw_only=True)
class Direction:
    """x [T, B, I]; w [gates · H, I]; r [gates · H, H]; y and before [T, B, H]; states [B, H].

    ``before`` is the hidden state before each step, ``alive`` [T, B, 1] marks the steps inside
    their sequence (None: all steps). ``g_y``, ``g_h`` and ``g_c`` are the cotangents of y and of
    the final states. ``peephole`` [3 · H] is an LSTM's, for its gates i, o, f.
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

    def masked(self, op: Ops, value: Tensor) -> Tensor:
        """0 outside the sequences."""
        return value if self.alive is None else op.Where(self.alive, value, 0.0)


def flat(op: Ops, value: Tensor) -> Tensor:
    """[T, B, n] as [T · B, n]."""
    size = None if value.shape is None else value.shape[-1]
    if isinstance(size, int):
        return op.Reshape(value, [-1, size])
    last = op.Slice(op.Shape(value), [2], [3])
    return op.Reshape(value, op.Concat(op.constant([-1]), last, axis=0))


def unflat(op: Ops, value: Tensor, like: Tensor, size: int) -> Tensor:
    """[T · B, n] as [T, B, n], with the T and B of ``like``."""
    steps, batch = (None, None) if like.shape is None else like.shape[:2]
    if isinstance(steps, int):
        return op.Reshape(value, [steps, -1, size])
    if isinstance(batch, int):
        return op.Reshape(value, [-1, batch, size])
    front = op.Slice(op.Shape(like), [0], [2])
    return op.Reshape(value, op.Concat(front, op.constant([size]), axis=0))


def previous(op: Ops, values: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The value before each step: ``start`` at first, then the values one step earlier."""
    first = op.Unsqueeze(start, axes=[0])
    if values.shape is not None and values.shape[0] == 1:
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
    sizes = [*(w.shape or (None,)), *(r.shape or (None,))]
    if not all(isinstance(s, int) for s in sizes):
        raise NoGradientRule("with weights of unknown shape")
    hidden = int(r.shape[2])
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
        g_y = None
        if gs[0] is not None:
            g_y = own(full(op, gs[0], node.outputs[0]), 1)
            g_y = g_y if alive is None else op.Where(alive, g_y, 0.0)
        final = [
            None if g is None else full(op, g, o)
            for g, o in zip(gs[1:], node.outputs[1:], strict=True)
        ]
        if alive is not None:
            # The final state of a sequence without any step is 0, whatever its start.
            some = op.Unsqueeze(op.Greater(node.inputs[4], op.constant(0, _INT32)), axes=[0, 2])
            final = [None if g is None else op.Where(some, g, 0.0) for g in final]
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
    batch = None if x.shape is None else x.shape[1]
    if isinstance(batch, int):
        return op.constant([batch, hidden])
    return op.Concat(op.Slice(op.Shape(x), [1], [2]), op.constant([hidden]), axis=0)


def _inside(op: Ops, x: Tensor, lengths: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Whether a step lies inside its sequence, and whether the one after it does: [T, B, 1]."""
    if lengths is None:
        return None, None
    steps = None if x.shape is None else x.shape[0]
    if isinstance(steps, int):
        count = op.constant(np.arange(steps, dtype=np.int32))
    else:
        end = op.Squeeze(op.Slice(op.Shape(x), [0], [1]), axes=[0])
        count = op.Range(op.constant(0, _INT32), op.Cast(end, to=_INT32), op.constant(1, _INT32))
    time = op.Unsqueeze(count, axes=[1, 2])
    ends = op.Unsqueeze(lengths, axes=[0, 2])
    return op.Less(time, ends), op.Less(time + 1, ends)
