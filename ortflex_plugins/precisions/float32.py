"""The precision ``float32``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Precision


@attrs.frozen(kw_only=True)
class Float32(Precision):
    """Computes in float32, or in float64 where the model has float64 tensors.

    A matrix product is computed as ``h = x·W``, without casts. Models in float16 or bfloat16 are first
    converted to float32.

    >>> Float32().describe()
    {'name': 'float32'}
    """

    name: ClassVar[str] = "float32"
