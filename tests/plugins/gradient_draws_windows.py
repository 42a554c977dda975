"""Draws of convolutions and pooling: one to three axes, any padding, strides, dilations, groups."""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
from hypothesis import assume

from tests.plugins import window_oracles as oracles
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import F32, Draw, Draws, drawn, numbers, shapes, torch

DRAWS = Draws()


@attrs.frozen
class Frame:
    """Windows on every axis: how large, how far apart, and what lies around."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[int]
    sizes: list[int]
    auto_pad: str = "NOTSET"

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes that are not the default."""
        n = len(self.kernel)
        out: dict[str, Any] = {}
        if self.auto_pad != "NOTSET":
            out["auto_pad"] = self.auto_pad
        elif any(self.pads):
            out["pads"] = self.pads
        if self.strides != [1] * n:
            out["strides"] = self.strides
        if self.dilations != [1] * n:
            out["dilations"] = self.dilations
        return out

    @property
    def plain(self) -> dict[str, Any]:
        """The same for an oracle, which has no automatic padding."""
        return {"strides": self.strides, "dilations": self.dilations, "pads": self.pads}


def frame(draw: Draw, *, dilated: bool = True, automatic: bool = True) -> Frame:
    """Some window fits on every axis."""
    n = draw(st.sampled_from([1, 2, 2, 2, 3]))
    rows = []
    auto = draw(st.sampled_from(["NOTSET"] * 4 + ["VALID", "SAME_UPPER", "SAME_LOWER"]))
    auto = auto if automatic else "NOTSET"
    same = auto.startswith("SAME")
    for _ in range(n):
        k = draw(st.integers(1, 3 if n < 3 else 2))
        stride = draw(st.integers(1, 3))
        # onnxruntime pads for dilated windows as if they were not, where it pads by itself.
        dilation = draw(st.integers(1, 3)) if dilated and not same else 1
        span = dilation * (k - 1) + 1
        before, after = (draw(st.integers(0, k - 1)) if auto == "NOTSET" else 0 for _ in range(2))
        size = max(1, span - before - after) + draw(st.integers(0, 3 if n < 3 else 1))
        if same:
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            before, after = total // 2, total - total // 2
            if auto == "SAME_LOWER":
                before, after = after, before
        rows.append((k, stride, dilation, before, after, size))
    kernel, strides, dilations, first, last, sizes = map(list, zip(*rows, strict=True))
    return Frame(kernel, strides, dilations, first + last, sizes, auto)


def _f() -> Any:
    return torch.nn.functional


def around(x: Any, pads: list[int], value: float = 0.0) -> Any:
    """Padding of torch, which counts from the last axis on."""
    n = len(pads) // 2
    pairs = [p for axis in reversed(range(n)) for p in (pads[axis], pads[n + axis])]
    return _f().pad(x, pairs, value=value)


@DRAWS.of("Conv")
def conv(draw: Draw, operator: str) -> Case:
    at = frame(draw)
    n = len(at.kernel)
    group, per_in, per_out = draw(
        st.tuples(st.sampled_from([1, 1, 2, 3]), st.integers(1, 2), st.integers(1, 2))
    )
    options = dict(at.settings)
    if group > 1:
        options["group"] = group
    if at.auto_pad != "NOTSET" or draw(st.booleans()):
        options["kernel_shape"] = at.kernel
    arrays = {
        "x": numbers(draw, (draw(st.integers(1, 2)), group * per_in, *at.sizes)),
        "w": numbers(draw, (group * per_out, per_in, *at.kernel), salt=1),
    }
    if draw(st.booleans()):
        arrays["b"] = numbers(draw, (group * per_out,), salt=2)
    function = f"conv{n}d"
    return drawn(
        f"Conv {options}",
        lambda op, x, w, b=None: op.Conv(x, w, b, **options),
        arrays,
        oracle=lambda x, w, b=None: oracles.conv(x, w, b, group=group, **at.plain),
        torch=lambda x, w, b=None: getattr(_f(), function)(
            around(x, at.pads), w, b, at.strides, 0, at.dilations, group
        ),
        dtypes=F32,
        needs_rank=True,
    )


@DRAWS.of("ConvTranspose")
def conv_transpose(draw: Draw, operator: str) -> Case:
    at = frame(draw, automatic=False)
    n = len(at.kernel)
    group, per_in, per_out = draw(
        st.tuples(st.sampled_from([1, 1, 2]), st.integers(1, 2), st.integers(1, 2))
    )
    counts = [draw(st.integers(1, 3 if n < 3 else 2)) for _ in range(n)]
    options = dict(at.settings)
    if group > 1:
        options["group"] = group
    more = None
    if draw(st.booleans()):
        more = [draw(st.integers(0, s - 1)) for s in at.strides]
        options["output_padding"] = more
    # Something must be left where padding is cut off.
    rows = zip(counts, at.strides, at.dilations, at.kernel, more or [0] * n, strict=True)
    whole = [s * (c - 1) + d * (k - 1) + 1 + e for c, s, d, k, e in rows]
    assume(all(w > a + b for w, a, b in zip(whole, at.pads[:n], at.pads[n:], strict=True)))
    arrays = {
        "x": numbers(draw, (draw(st.integers(1, 2)), group * per_in, *counts)),
        "w": numbers(draw, (group * per_in, per_out, *at.kernel), salt=1),
    }
    if draw(st.booleans()):
        arrays["b"] = numbers(draw, (group * per_out,), salt=2)
    function = f"conv_transpose{n}d"

    def in_torch(x: Any, w: Any, b: Any = None) -> Any:
        y = getattr(_f(), function)(x, w, None, at.strides, 0, 0, group, at.dilations)
        y = around(y, [0] * n + (more or [0] * n))
        cut = [slice(a, y.shape[2 + k] - at.pads[n + k]) for k, a in enumerate(at.pads[:n])]
        y = y[(..., *cut)]
        return y if b is None else y + b.reshape(-1, *[1] * n)

    return drawn(
        f"ConvTranspose {options}",
        lambda op, x, w, b=None: op.ConvTranspose(x, w, b, **options),
        arrays,
        oracle=lambda x, w, b=None: oracles.conv_transpose(
            x, w, b, more=more, group=group, **at.plain
        ),
        torch=in_torch,
        dtypes=F32,
        needs_rank=True,
    )


def rounded_up(at: Frame) -> list[int]:
    """How many windows there are with ceil_mode; each must begin before the end of the tensor."""
    n = len(at.kernel)
    out = []
    for k in range(n):
        span = at.dilations[k] * (at.kernel[k] - 1) + 1
        room = at.sizes[k] + at.pads[k] + at.pads[n + k] - span
        count = -(-room // at.strides[k]) + 1
        assume((count - 1) * at.strides[k] < at.sizes[k] + at.pads[k])
        out.append(count)
    return out


POOLS = {"MaxPool": "max", "AveragePool": "mean", "LpPool": "norm"}


@DRAWS.of(*POOLS)
def pool(draw: Draw, operator: str) -> Case:
    """Every window sees an element at least: of padding alone there is no largest and no mean."""
    dilated = draw(st.booleans())
    at = frame(draw, dilated=dilated)
    kind, options = POOLS[operator], dict(at.settings)
    since = {"MaxPool": 13, "AveragePool": 19, "LpPool": 18}[operator] if dilated else 13
    more: dict[str, Any] = {}
    out = None
    if at.auto_pad == "NOTSET" and draw(st.booleans()):
        out, options["ceil_mode"] = rounded_up(at), 1
        since = {"MaxPool": 13, "AveragePool": 19, "LpPool": 18}[operator]
    if operator == "LpPool":
        options["p"] = more["p"] = draw(st.integers(1, 4))
    if operator == "AveragePool" and draw(st.booleans()):
        kind, options["count_include_pad"] = "padded", 1
    x = numbers(draw, (draw(st.integers(1, 2)), draw(st.integers(1, 2)), *at.sizes))
    seen = oracles.pool("max", x, at.kernel, out=out, **at.plain)
    assume(bool(np.isfinite(seen).all()))
    if operator == "MaxPool" and draw(st.booleans()):
        options["storage_order"] = draw(st.integers(0, 1))
    two = operator == "MaxPool" and draw(st.booleans())

    def formula(op: Any, x: Any) -> Any:
        if two:
            return op(operator, x, kernel_shape=at.kernel, outputs=2, **options)[0]
        return op(operator, x, kernel_shape=at.kernel, **options)

    return drawn(
        f"{operator} {at.kernel} {options} two={two}",
        formula,
        {"x": x},
        oracle=lambda x: oracles.pool(kind, x, at.kernel, out=out, **at.plain, **more),
        dtypes=F32,
        since=since,
    )


@DRAWS.of("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def of_everything(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(3, 5))
    axes = tuple(range(2, len(shape)))
    p = draw(st.integers(1, 4)) if operator == "GlobalLpPool" else 2
    options = {"p": p} if operator == "GlobalLpPool" else {}
    functions = {
        "GlobalAveragePool": lambda x: x.mean(axes, keepdim=True),
        "GlobalMaxPool": lambda x: x.amax(axes, keepdim=True),
        "GlobalLpPool": lambda x: (x.abs() ** p).sum(axes, keepdim=True) ** (1 / p),
    }
    oracle = {
        "GlobalAveragePool": lambda x: x.mean(axes, keepdims=True),
        "GlobalMaxPool": lambda x: x.max(axes, keepdims=True),
        "GlobalLpPool": lambda x: (abs(x) ** p).sum(axes, keepdims=True) ** (1 / p),
    }
    return drawn(
        f"{operator} {options}",
        lambda op, x: op(operator, x, **options),
        {"x": numbers(draw, shape)},
        oracle=oracle[operator],
        torch=functions[operator],
        dtypes=F32,
        needs_rank=operator == "GlobalMaxPool",
        # No runtime has a kernel of the newest definition.
        until=21 if operator == "GlobalLpPool" else 99,
    )


@DRAWS.of("MaxUnpool")
def unpool(draw: Draw, operator: str) -> Case:
    """Any places of the output, each for one element."""
    n = draw(st.integers(1, 2))
    sizes = [draw(st.integers(1, 2)) for _ in range(n)]
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    strides = [draw(st.integers(1, 3)) for _ in range(n)]
    out = [s * (c - 1) + k for c, k, s in zip(sizes, kernel, strides, strict=True)]
    front = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    shape, target = (*front, *sizes), (*front, *out)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    index = rng.permutation(int(np.prod(target)))[: int(np.prod(shape))].reshape(shape)

    def oracle(x: Any, i: Any) -> Any:
        y = np.zeros(int(np.prod(target)))
        y[i.reshape(-1)] = x.reshape(-1)
        return y.reshape(target)

    return drawn(
        f"MaxUnpool {kernel} {strides}",
        lambda op, x, i: op.MaxUnpool(x, i, kernel_shape=kernel, strides=strides),
        {"x": numbers(draw, shape), "i": index},
        oracle=oracle,
        dtypes=F32,
    )
