"""The precision ``bf16_mixed``; :mod:`ortflex_core.compiler.programs.precision` inserts the casts."""

from __future__ import annotations

from typing import ClassVar

import attrs
from onnx import TensorProto

from ortflex_core import Precision


@attrs.frozen(kw_only=True)
class Bf16Mixed(Precision):
    """Computes matrix products and convolutions in bfloat16, with float32 master weights.

    A matrix product is computed as ``h = cast(x)·cast(W)``, where ``cast`` rounds to bfloat16, whose
    significand has 8 bits. Elementwise operators between products stay in bfloat16. Softmax,
    normalizations, reductions, losses and updates are computed in float32. bfloat16 has the range of
    float32, so no loss scale is needed.

    onnxruntime has no bfloat16 arithmetic on CPUs. Backends that do not support bfloat16 raise an error.

    >>> Bf16Mixed().describe()
    {'name': 'bf16_mixed'}

    Source: ``torch.autocast(dtype=torch.bfloat16)``; Kalamkar et al., "A Study of BFLOAT16
    for Deep Learning Training" (2019).
    """

    name: ClassVar[str] = "bf16_mixed"
    aliases: ClassVar[tuple[str, ...]] = ("bf16", "bfloat16", "bf16-mixed", "autocast_bf16")
    dtype: ClassVar[int] = TensorProto.BFLOAT16
