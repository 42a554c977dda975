"""Main memory at an address, as numpy reads it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core.kernel.types import Array


class _Memory:
    """An address that numpy can read; it keeps the owner of the memory alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def array_at(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> Array:
    """Main memory at an address as an array, without a copy; the array keeps ``owner`` alive."""
    if 0 in shape:  # a tensor without elements may have no address
        return np.empty(shape, dtype)
    interface = {"data": (pointer, False), "shape": shape, "typestr": dtype.str, "version": 3}
    array = np.asarray(_Memory(interface, owner))
    return array if array.dtype is dtype else array.view(dtype)  # bfloat16 arrives as raw bytes
