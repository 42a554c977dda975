"""Calls of onnxruntime's own operators for the kit of decompositions: drawn inputs, every setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core.testing import DecompositionCase
from ortflex_core.types import Array

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


FAMILIES: Mapping[str, Sequence[Case]] = {
    "activations": activations(),
    "matmul": matmul(),
    "convolution": convolution(),
}
"""The cases of each family of ours."""
