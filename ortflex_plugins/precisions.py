"""The precisions ``float32``, ``bf16_mixed``, ``fp16_mixed``.

:mod:`ortflex_core.compiler.programs.precision` inserts the casts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from onnx import TensorProto

from ortflex_core import Growth, Precision, hyper, is_count, number, setting

__path__: list[str] = []  # Import paths of 0.2, such as precisions.float32, are modules inside.


@attrs.frozen(kw_only=True)
class Float32(Precision):
    """Computes in float32, or in float64 where the model has float64 tensors.

    A matrix product is computed as ``h = x·W``, without casts. Models in float16 or bfloat16 are first
    converted to float32.

    >>> Float32().describe()
    {'name': 'float32'}
    """

    name: ClassVar[str] = "float32"


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


def _check_count(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not is_count(value):
        raise ValueError(f"Fp16Mixed.{attribute.name} must be an integer >= 1, got {value!r}")


def _check_flag(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"Fp16Mixed.{attribute.name} must be True or False, got {value!r}")


@attrs.frozen(kw_only=True)
class Fp16Mixed(Precision):
    """Computes matrix products and convolutions in float16, with float32 master weights and loss scaling.

    A matrix product is computed as ``h = cast(x)·cast(W)``, where ``cast`` rounds to float16.
    Elementwise operators between products stay in float16. Softmax, normalizations, reductions, losses
    and updates are computed in float32.

    In float16, gradients below 3e-8 would be rounded to zero. To avoid this, the losses are multiplied
    by the loss scale s, and the gradients are divided by it: ``∂L/∂W = cast(∂(s·L)/∂W) / s``.

    If ``dynamic`` is True, the loss scale s starts at ``loss_scale``. It is doubled after
    ``growth_steps`` consecutive updates with finite gradients, and halved if a gradient is not finite.
    In that case, the update is skipped: weights, optimizer state and statistics do not change. The
    skipped step counts toward schedules, but not toward bias corrections, averages or noise. The loss scale
    and its counters are part of the optimizer state and of checkpoints.

    If ``dynamic`` is False, the loss scale is constant, and the run stops with an error if a gradient
    is not finite.

    Raises:
        ValueError: ``loss_scale`` is not positive, ``growth_steps`` is not a positive integer, or
            ``dynamic`` is not a boolean.

    >>> Fp16Mixed(loss_scale=1024.0).describe()
    {'name': 'fp16_mixed', 'loss_scale': 1024.0, 'dynamic': True, 'growth_steps': 2000}

    Source: Micikevicius et al., "Mixed Precision Training" (2018); ``torch.amp.GradScaler``.
    """

    name: ClassVar[str] = "fp16_mixed"
    aliases: ClassVar[tuple[str, ...]] = (
        "fp16",
        "float16",
        "16-mixed",
        "half",
        "amp",
        "mixed_float16",
        "mixed",
    )
    dtype: ClassVar[int] = TensorProto.FLOAT16

    loss_scale: float = hyper(
        default=65536.0, validator=number(gt=0), help="the initial loss scale"
    )
    dynamic: bool = setting(
        default=True, validator=_check_flag, help="whether the loss scale adapts to the gradients"
    )
    growth_steps: int = setting(
        default=2000,
        validator=_check_count,
        help="the number of consecutive updates with finite gradients after which the loss scale is "
        "doubled",
    )

    @property
    def scale(self) -> Any:
        """The loss scale; if it is dynamic, its first value."""
        return self.loss_scale

    @property
    def growth(self) -> Growth | None:
        """How the loss scale grows, if it is dynamic."""
        return Growth(steps=self.growth_steps) if self.dynamic else None
