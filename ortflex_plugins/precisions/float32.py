"""The precision ``float32``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Precision


@attrs.frozen(kw_only=True)
class Float32(Precision):
    """Computes in the types of the file: float32, and float64 if the file has float64 tensors.

    ``h = x·W`` without casts; files in float16 and bfloat16 are converted to float32 first.

    >>> Float32().describe()
    {'name': 'float32'}
    """

    name: ClassVar[str] = "float32"
