"""Calls of onnxruntime's own operators for the kit of decompositions: drawn inputs, every setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, DecompositionCase

Case = DecompositionCase
RNG = np.random.default_rng(20)


def draw(*shape: int, scale: float = 1.0) -> Array:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def away(*shape: int) -> Array:
    """Draws between 0.2 and 1 of both signs: no kink of an activation is near."""
    signs = np.where(RNG.random(shape) < 0.5, -1.0, 1.0)
    return np.asarray(RNG.uniform(0.2, 1.0, shape) * signs, np.float32)


def call(op_type: str, *inputs: Array | None, **attributes: Any) -> Case:
    return Case(op_type=op_type, inputs=inputs, attributes=attributes)


def activations() -> list[Case]:
    return [
        call("Gelu", draw(2, 3)),
        call("BiasGelu", draw(2, 3, 4), draw(4)),
        call("FastGelu", draw(2, 3, 4), draw(4)),
        call("FastGelu", draw(2, 3)),
        call("QuickGelu", draw(2, 3)),
        call("QuickGelu", draw(2, 3), alpha=0.7),
    ]


def matmul() -> list[Case]:
    cases = [
        call("FusedMatMul", draw(3, 4), draw(4, 5), alpha=0.3),
        call("FusedMatMul", draw(4), draw(4, 5), transA=1),
        call("FusedMatMul", draw(2, 3, 4), draw(4, 5)),
        call("TransposeMatMul", draw(4, 3), draw(5, 4), transA=1, transB=1, alpha=2.0),
    ]
    for bits in range(16):
        turned = [bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8)]
        a, b = draw(2, 3, 4, 5), draw(2, 3, 5, 6)
        a = a.swapaxes(-1, -2) if turned[0] else a
        b = b.swapaxes(-1, -2) if turned[1] else b
        a = a.transpose(2, 0, 1, 3) if turned[2] else a
        b = b.transpose(2, 0, 1, 3) if turned[3] else b
        names = ("transA", "transB", "transBatchA", "transBatchB")
        settings = {n: int(t) for n, t in zip(names, turned, strict=True)}
        cases.append(
            call("FusedMatMul", np.ascontiguousarray(a), np.ascontiguousarray(b), **settings)
        )
    numbers: Mapping[str, Mapping[str, float]] = {
        "Tanh": {},
        "Sigmoid": {},
        "Softplus": {},
        "Softsign": {},
        "Elu": {"activation_alpha": 0.5},
        "HardSigmoid": {"activation_alpha": 0.01, "activation_beta": 0.4},
    }
    for name, given in numbers.items():
        a, b, c = draw(3, 4), draw(5, 4), draw(5)
        cases.append(
            call("FusedGemm", a, b, c, activation=name, transB=1, alpha=0.5, beta=2.0, **given)
        )
    for name, given in {"Relu": {}, "LeakyRelu": {"activation_alpha": 0.1}}.items():
        # No sum is near 0: the sign of each column is that of its weights.
        b = np.abs(away(4, 5)) * np.array([1, -1, 1, -1, 1], np.float32)
        cases.append(call("FusedGemm", np.abs(away(3, 4)), b, activation=name, **given))
    return cases


def convolution() -> list[Case]:
    cases = [
        call("FusedConv", draw(2, 4, 7), draw(6, 4, 3), draw(6), activation="Tanh", strides=[2]),
        call("FusedConv", draw(2, 4, 6, 6), draw(6, 2, 3, 3), None, draw(2, 6, 4, 4), group=2),
        call("FusedConv", draw(1, 2, 6, 6), draw(3, 2, 3, 3), auto_pad="SAME_UPPER"),
    ]
    settings: Any = {"pads": [1, 1, 1, 1], "strides": [2, 2], "dilations": [1, 1]}
    x, w = draw(2, 4, 7, 7, scale=0.1), draw(6, 4, 3, 3, scale=0.1)
    for name, numbers in {"Sigmoid": None, "HardSigmoid": [0.2, 0.5], "Clip": [-30, 30]}.items():
        given = {} if numbers is None else {"activation_params": [float(n) for n in numbers]}
        cases.append(call("FusedConv", x, w, draw(6), activation=name, **settings, **given))
    x, w = np.abs(away(2, 2, 5, 5)), np.abs(away(2, 2, 3, 3))
    w[1] *= -1
    cases.append(call("FusedConv", x, w, activation="Relu", pads=[1, 1, 1, 1]))
    cases.append(call("FusedConv", x, w, activation="LeakyRelu", activation_params=[0.1]))
    return cases


def whole(*rows: Any) -> Array:
    return np.array(rows, np.int32)


def normalization() -> list[Case]:
    b, s, h = 2, 3, 6
    skip = "SkipLayerNormalization"
    simplified = "SkipSimplifiedLayerNormalization"
    sums = (True, False, False, True)
    cases = [
        call(skip, draw(b, s, h), draw(b, s, h), draw(h), draw(h), draw(h), epsilon=1e-5),
        attrs.evolve(call(skip, draw(b, s, h), draw(s, h), draw(h)), outputs=sums),
        attrs.evolve(call(skip, draw(b, s, h), draw(1, s, h), draw(h), draw(h)), opset=14),
        call(simplified, draw(b, s, h), draw(b, s, h), draw(h), epsilon=1e-3),
        attrs.evolve(
            call(simplified, draw(b, s, h), draw(b, s, h), draw(h), draw(h)), outputs=sums
        ),
    ]
    for op_type, inputs, settings, opset in (
        ("SimplifiedLayerNormalization", [draw(h)], {"axis": -1, "stash_type": 1}, 17),
        ("SimplifiedLayerNormalization", [draw(s, h)], {"axis": 1, "epsilon": 1e-3}, 14),
        ("LayerNormalization", [draw(h), draw(h)], {"axis": -1, "epsilon": 1e-3}, 14),
        ("LayerNormalization", [draw(h)], {}, 13),
    ):
        made = call(op_type, draw(b, s, h), *inputs, **settings)
        cases.append(attrs.evolve(made, domain="", opset=opset))
    ids, segments = whole([1, 4, 2], [0, 6, 6]), whole([0, 1, 1], [0, 0, 1])
    mask, positions = whole([1, 1, 0], [1, 1, 1]), whole([2, 0, 1])
    tables = [draw(7, h), draw(4, h), draw(2, h), draw(h), draw(h)]
    without = [tables[0], tables[1], None, tables[3], tables[4]]
    embed = "EmbedLayerNormalization"
    cases += [
        call(embed, ids, segments, *tables, mask),
        attrs.evolve(call(embed, ids, None, *without, epsilon=1e-5), outputs=(True, True, True)),
        call(embed, ids, segments, *tables, mask, np.concatenate([positions] * 2)),
        call(embed, ids, None, *without),
    ]
    small = np.array(0.02, np.float32)
    for given in (segments, None):
        wide = [RNG.integers(0, 255, a.shape).astype(np.uint8) for a in tables]
        zeros = [np.array(v, np.uint8) for v in (120, 130, 128, 90, 127)]
        if given is None:
            wide[2], zeros[2] = None, None  # type: ignore[call-overload]
        steps = [small * (k + 1) for k in range(5)]
        scales = [None if w is None else s for w, s in zip(wide, steps, strict=True)]
        made = call("QEmbedLayerNormalization", ids, given, *wide, mask, *scales, *zeros)
        settings = {"outputs": (True, True), "constants": (*range(2, 7), *range(8, 18))}
        cases.append(attrs.evolve(made, smooth=False, tolerance=1e-4, **settings))
    for k, case in enumerate(cases):
        if case.op_type == embed and len(case.outputs) == 1:
            cases[k] = attrs.evolve(case, outputs=(True, True))
    return cases


def of_heads() -> list[Case]:
    """Attention with all weights in one product."""
    b, s, h, n = 2, 4, 6, 3
    weights, bias, x = draw(h, 3 * h), draw(3 * h), draw(b, s, h)
    raw = whole([1, 1, 1, 0], [0, 1, 1, 1])
    cases = [
        call("Attention", x, draw(h, 14), draw(14), num_heads=2, qkv_hidden_sizes=[4, 4, 6]),
        call("Attention", x, weights, None, num_heads=n, scale=0.3),
    ]
    for causal in (0, 1):
        settings = {"num_heads": n, "unidirectional": causal}
        for mask, more in (
            (None, {}),
            (raw, {}),
            (raw, {"mask_filter_value": -3.0}),
            (whole(3, 2), {}),
            (whole(3, 4, 1, 0), {}),
            (RNG.integers(0, 2, (b, s, s)).astype(np.int32), {"mask_filter_value": -3.0}),
        ):
            cases.append(call("Attention", x, weights, bias, mask, **settings, **more))
        cases += [
            call("Attention", x, weights, bias, None, None, draw(*shape), **settings)
            for shape in ((b, n, s, s), (1, n, s, s), (1, 1, s, s))
        ]
        past = draw(2, b, n, 3, h // n)
        mask = whole([1] * 7, [0] + [1] * 6)
        made = call("Attention", x, weights, bias, mask, past, **settings)
        cases.append(attrs.evolve(made, outputs=(True, True)))
    return cases


def apart() -> list[Case]:
    """Attention of queries, keys and values that are inputs."""
    b, s, n, t, op = 2, 4, 3, 5, "MultiHeadAttention"
    q, k, v = draw(b, s, 6), draw(b, t, 6), draw(b, t, 6)
    square = [draw(b, s, 6) for _ in range(3)]
    mask = whole([1, 1, 1, 1, 0], [0, 1, 1, 1, 1])
    cube = RNG.integers(0, 2, (b, s, t)).astype(np.int32)
    whole_bias = draw(18)
    cases = [
        call(op, q, k, v, whole_bias, mask, num_heads=n),
        call(op, q, k, v, None, whole(4, 2), num_heads=n),
        call(op, q, k, v, None, cube, num_heads=n, mask_filter_value=-2.0),
        call(op, q, k, v, None, mask, draw(b, n, s, t), num_heads=n),
        call(op, q, k, v, None, None, draw(1, 1, s, t), num_heads=n),
        call(op, q, draw(b, n, t, 2), draw(b, n, t, 2), num_heads=n),
        call(op, q, draw(b, s, 6), draw(b, s, 9), draw(21), num_heads=n),
    ]
    for causal in (0, 1):
        settings = {"num_heads": n, "unidirectional": causal}
        cases.append(call(op, *square, draw(18), scale=0.2, **settings))
        past = [draw(b, n, 3, 2), draw(b, n, 3, 2)]
        made = call(op, *square, None, None, None, *past, **settings)
        cases.append(attrs.evolve(made, outputs=(True, True, True)))
    return cases + packed()


def packed() -> list[Case]:
    """Packed forms, which have a kernel on CUDA alone: attention written out is the reference."""

    def reference(x: Array, y: Array | None = None) -> Array:
        parts = [x[:, :, :, j] for j in range(3)] if y is None else [x.reshape(2, 4, 3, 2)]
        parts += [] if y is None else [y[:, :, :, j] for j in range(2)]
        q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
        scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(2))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        return np.asarray(out.transpose(0, 2, 1, 3).reshape(2, 4, 6))

    made = [
        call("MultiHeadAttention", draw(2, 4, 3, 3, 2), num_heads=3),
        call("MultiHeadAttention", draw(2, 4, 6), draw(2, 5, 3, 2, 2), num_heads=3),
    ]
    return [attrs.evolve(case, reference=reference) for case in made]


def groups() -> list[Case]:
    b, s, h, n, g, op = 2, 4, 16, 4, 2, "GroupQueryAttention"
    lengths, total = whole(s - 1, s - 1), np.array([s], np.int32)
    q, k, v = draw(b, s, n * h), draw(b, s, g * h), draw(b, s, g * h)
    angles = [draw(9, h // 2), draw(9, h // 2)]
    settings: dict[str, Any] = {"num_heads": n, "kv_num_heads": g}
    none = [None, None]
    places = np.array([[0, 1, 2, 3], [1, 2, 3, 4]], np.int64)
    every = (True, True, True)
    cases = [
        call(op, q, k, v, *none, lengths, total, **settings),
        call(op, q, k, v, *none, whole(1, 3), total, **settings),
        call(op, draw(b, s, 8 * h), *none, *none, lengths, total, scale=0.2, **settings),
        call(op, q, k, v, *none, lengths, total, *angles, do_rotary=1, **settings),
        call(op, q, k, v, *none, lengths, total, *angles, places, do_rotary=1, **settings),
        call(
            *(op, q, k, v, *none, lengths, total, *angles),
            **{"do_rotary": 1, "rotary_interleaved": 1, **settings},
        ),
        call(op, q, k, v, *none, lengths, total, local_window_size=2, softcap=5.0, **settings),
        call(op, q, k, v, *none, lengths, total, smooth_softmax=1, **settings),
        call(op, q, k, v, *none, lengths, total, *none, None, draw(b, n, s, s), **settings),
        call(op, q, k, v, *none, lengths, total, *none, None, None, draw(n), **settings),
    ]
    return [attrs.evolve(case, outputs=every, tolerance=2e-5) for case in cases]


def rotary() -> list[Case]:
    cases = []
    for x in (draw(2, 4, 24), draw(2, 3, 4, 8)):
        for interleaved in (0, 1):
            for places in (np.array([1]), RNG.integers(0, 9, (2, 4))):
                made = call("RotaryEmbedding", x, places, draw(9, 4), draw(9, 4))
                cases.append(attrs.evolve(made, attributes={"interleaved": interleaved}))
        inputs, settings = (np.array([1]), draw(9, 2), draw(9, 2)), {"rotary_embedding_dim": 4}
        cases.append(call("RotaryEmbedding", x, *inputs, num_heads=3, **settings))
    return cases


def quantized_heads() -> list[Case]:
    """QAttention: its input and weights are whole numbers, with a zero point or without."""
    b, s, h, n = 2, 3, 8, 2
    x = RNG.integers(0, 255, (b, s, h)).astype(np.uint8)
    # 7 bits: the kernels of CPUs without VNNI saturate sums of two products of 8.
    weights = RNG.integers(-63, 64, (h, 3 * h)).astype(np.int8)
    one, scale = np.array(0.02, np.float32), np.array(0.01, np.float32)
    zeros = [np.array(120, np.uint8), np.array(3, np.int8)]
    mask, columns = whole([1, 1, 0], [1, 1, 1]), np.abs(draw(3 * h, scale=0.01))
    of_columns = RNG.integers(-9, 9, 3 * h).astype(np.int8)
    return [
        attrs.evolve(
            call("QAttention", x, weights, draw(3 * h), one, *inputs, num_heads=n, **settings),
            constants=(1, 4, 7),
            smooth=False,
            tolerance=1e-4,
        )
        for inputs, settings in (
            ([scale, mask, *zeros], {}),
            ([scale, None, *zeros], {"unidirectional": 1}),
            ([columns, mask, zeros[0], of_columns], {}),
        )
    ]


def bucket_of(distance: int, count: int, most: int) -> int:
    """T5's bucket of a distance of 0 or more."""
    near = count // 2
    if distance < near:
        return distance
    far = math.log(distance / near) / math.log(most / near) * (count - near)
    return min(near + int(far), count - 1)


def positions() -> list[Case]:
    """No CPU kernel computes RelativePositionBias."""
    cases = []
    for both, buckets, most, queries, keys in ((1, 8, 20, 30, 30), (0, 6, 10, 3, 15)):

        def reference(table: Array, q: Array, k: Array, both: int, buckets: int, most: int) -> Any:
            own = table.reshape(-1).reshape(2, buckets)  # by columns
            out = np.zeros((1, 2, int(q[0]), int(k[0])), np.float32)
            for i, j in np.ndindex(*out.shape[2:]):
                if both:
                    place = bucket_of(abs(j - i), buckets // 2, most) + buckets // 2 * (j > i)
                else:
                    place = bucket_of(max(i - j, 0), buckets, most)
                out[0, :, i, j] = own[:, place]
            return out

        sizes = [np.array([n]) for n in (queries, keys)]
        made = call("RelativePositionBias", draw(buckets, 2), *sizes)
        settings = {"max_distance": most, "is_bidirectional": both}
        # The number of buckets is known in every file: the table is a weight.
        made = attrs.evolve(made, attributes=settings, constants=(0,), smooth=False)
        known = partial(reference, both=both, buckets=buckets, most=most)
        cases.append(attrs.evolve(made, reference=known))
    return cases


def quantization() -> list[Case]:
    cases = []
    for bits in (2, 4, 8):
        for width, block in ((32, 16), (40, 16)):
            blocks, rows = -(-width // block), 3
            made = RNG.integers(0, 256, (rows, blocks, block * bits // 8)).astype(np.uint8)
            zeros = RNG.integers(0, 256, rows * -(-blocks * bits // 8)).astype(np.uint8)
            scales = draw(rows * blocks, scale=0.1)
            settings = {"K": width, "N": rows, "bits": bits, "block_size": block}
            own = [
                [draw(2, width), made, scales],
                [draw(2, 2, width), made, scales, zeros, None, draw(rows)],
            ]
            if bits == 4:
                own.append([draw(2, width), made, scales, draw(rows * blocks)])
            for inputs in own:
                case = call("MatMulNBits", *inputs, **settings)
                cases.append(attrs.evolve(case, constants=(1, 2, 3), tolerance=1e-4))
    b, scale = RNG.integers(-63, 64, (4, 3)).astype(np.int8), draw(3, scale=0.01)
    own = [b, scale, RNG.integers(-9, 9, 3).astype(np.int8)]
    for inputs in ([draw(2, 4), *own, draw(3)], [draw(2, 5, 4), b, scale[:1]]):
        made = call("DynamicQuantizeMatMul", *inputs)
        cases.append(attrs.evolve(made, constants=(1, 2, 3), smooth=False))
    a, one = RNG.integers(0, 255, (2, 4)).astype(np.uint8), np.array([0.02], np.float32)
    zero = np.array([120], np.uint8)
    for inputs in ([a, b, one, scale, zero, own[2], draw(3)], [a, b, one, scale[:1]]):
        made = call("MatMulIntegerToFloat", *inputs)
        cases.append(attrs.evolve(made, constants=(1, 3, 5), smooth=False))
    for inputs, settings in (
        ([b, scale, own[2]], {"axis": 1}),
        ([b, scale[:1], own[2][:1]], {}),
        ([b.astype(np.int32), scale[0]], {}),
    ):
        made = call("DequantizeLinear", *inputs, **settings)
        cases.append(attrs.evolve(made, constants=(1, 2), smooth=False))
    units = np.abs(scale) + np.float32(0.01)
    for inputs, settings in (
        ([draw(4, 3), units, own[2]], {"axis": -1}),
        ([draw(4, 3), units[0]], {}),
    ):
        made = call("QuantizeLinear", *inputs, **settings)
        cases.append(attrs.evolve(made, constants=(1, 2), smooth=False))
    return cases


def _coded(*shape: int, kind: Any = np.uint8, scale: float = 0.0213) -> list[Array]:
    """Integers, their scale and their zero point."""
    bounds = np.iinfo(kind)
    whole = RNG.integers(bounds.min, bounds.max + 1, shape).astype(kind)
    return [whole, np.array(scale, np.float32), np.array(bounds.min + 120, kind)]


def integers() -> list[Case]:
    """Calls of the operators that ``quantize_static`` writes in the format QOperator.

    The kernels of some of them round other sums: their codes may differ by one.
    """
    cases = []

    def add(
        op_type: str, *inputs: Array | None, domain: str = "com.microsoft", **rest: Any
    ) -> None:
        fixed = [k for k, a in enumerate(inputs) if a is not None and (a.ndim < 2 or k in (3, 8))]
        made = attrs.evolve(call(op_type, *inputs, **rest), domain=domain, smooth=False)
        tolerance = 0.008 if "Average" in op_type or "Softmax" in op_type else 1e-5
        cases.append(attrs.evolve(made, constants=tuple(fixed), tolerance=tolerance))

    for kind in (np.uint8, np.int8):
        x, out = _coded(2, 4, 6, 6, kind=kind), _coded(kind=kind, scale=0.0519)[1:]
        low = np.iinfo(kind).min
        weight = RNG.integers(-63, 64, (6, 2, 3, 3)).astype(np.int8)
        bias = RNG.integers(-3000, 3000, 6).astype(np.int32)
        scales, zeros = RNG.uniform(0.001, 0.002, 6).astype(np.float32), np.zeros(6, np.int8)
        own: dict[str, Any] = {"group": 2, "pads": [1] * 4, "strides": [2, 1]}
        add("QLinearConv", *x, weight, scales, zeros, *out, bias, domain="", **own)
        add("QLinearConv", *x, weight, scales[:1], zeros[:1], *out, domain="", group=2)
        last = np.ascontiguousarray(x[0].transpose(0, 2, 3, 1))
        own = {"channels_last": 1, "group": 2}
        add("QLinearConv", last, *x[1:], weight, scales, zeros, *out, bias, **own)
        a, b = _coded(2, 3, 8, kind=kind), RNG.integers(-63, 64, (8, 5)).astype(np.int8)
        add("QLinearMatMul", *a, b, scales[:5], zeros[:5], *out, domain="")
        add("QLinearMatMul", *a, b, scales[:1], zeros[:1], *out, domain="")
        a = _coded(3, 8, kind=kind)
        add("QGemm", *a, b, scales[:5], zeros[:5], bias[:5], *out)
        add("QGemm", *a, b.T.copy(), scales[0], zeros[0], bias[:5], *out, transB=1, alpha=0.5)
        add("QGemm", *a, b, scales[0], zeros[0], None)
        for op_type in ("QLinearAdd", "QLinearMul"):
            add(op_type, *x, *_coded(6, kind=kind, scale=0.0317), *out)
        add("QLinearSigmoid", *x, np.array(1 / 256, np.float32), np.array(low, kind))
        add("QLinearLeakyRelu", *x, *out, alpha=0.3)
        add("QLinearConcat", *out, *x, *_coded(2, 3, 6, 6, kind=kind, scale=0.0317), axis=1)
        add("QLinearAveragePool", *x, *out, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
        small = np.array(0.0041, np.float32)
        add("QLinearSoftmax", *x, small, np.array(low, kind), axis=-1, opset=13)
        add("QLinearGlobalAveragePool", *x, *out, channels_last=0)
        add("QLinearGlobalAveragePool", last, *x[1:], *out, channels_last=1)
    chosen = RNG.random((2, 4)) < 0.5
    add(
        *("QLinearWhere", chosen, *_coded(2, 4), *_coded(2, 4, scale=0.0317)),
        *_coded(scale=0.0519)[1:],
    )
    add("QLinearReduceMean", *_coded(2, 4, 6), *_coded(scale=0.0519)[1:], axes=[1], keepdims=0)
    cases[-1] = attrs.evolve(cases[-1], reference=_mean_of_integers)  # it has no kernel
    return cases


def _mean_of_integers(q: Array, scale: Array, zero: Array, unit: Array, place: Array) -> Array:
    mean = ((q.astype(float) - zero) * scale).mean(1)
    return np.asarray(np.clip(np.rint(mean / unit) + place, 0, 255), np.uint8)


FAMILIES: Mapping[str, Sequence[Case]] = {
    "activations": activations(),
    "matmul": matmul(),
    "convolution": convolution(),
    "normalization": normalization(),
    "attention": [*of_heads(), *apart(), *groups(), *rotary(), *quantized_heads(), *positions()],
    "quantization": quantization(),
    "operator_format": integers(),
}
"""The cases of each family of ours."""
