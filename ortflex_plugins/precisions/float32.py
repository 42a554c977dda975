"""The precision ``float32``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Precision


@attrs.frozen(kw_only=True)
class Float32(Precision):
    """Computes in the types of the file: float32, and float64 where the file has float64 tensors.

    A matrix product is computed as ``h = x·W``, without casts. Files in float16 or bfloat16 are first
    converted to float32.

    >>> Float32().describe()
    {'name': 'float32'}
    """

    name: ClassVar[str] = "float32"
