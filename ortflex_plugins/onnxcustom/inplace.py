"""Updates in place: a graph writes to other memory, which is then copied over the tensor.

Binding an output over its own input gives wrong results where another node still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ortflex_core.protocols import Device, Value
from ortflex_core.runtime import value_key
from ortflex_core.types import Array, numpy_dtype
from ortflex_plugins.onnxcustom.devices import plain


class Scratch:
    """Memory of the same shape and type for tensors that are updated, kept from step to step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: dict[tuple[int, str], tuple[Any, Value, Value, Array | None, Array | None]] = {}

    @contextmanager
    def beside(self, place: int, **targets: Any) -> Iterator[dict[str, Value]]:
        """Other memory for each of ``targets``; at the end its content is copied over them."""
        held = {name: self._held(place, name, plain(value)) for name, value in targets.items()}
        yield {name: fresh for name, (_, _, fresh, _, _) in held.items()}
        for _, target, fresh, there, here in held.values():
            if there is not None and here is not None:
                there[...] = here
            else:
                self._device.write(target, self._device.read(fresh))

    def _held(self, place: int, name: str, target: Value) -> Any:
        key = value_key(target)
        held = self._kept.get((place, name))
        if held is None or held[0] != key:
            fresh = self._device.empty(tuple(target.shape()), numpy_dtype(target.element_type()))
            # Views cost more than the copy, so they are kept with their memory.
            there, here = self._device.view(target), self._device.view(fresh)
            held = self._kept[place, name] = (key, target, fresh, there, here)
        return held
