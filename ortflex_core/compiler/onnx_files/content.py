"""What a model has in it, as digests: its tensors, and everything else.

The digests do not depend on where tensors are stored: in the file or next to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import attrs
from google.protobuf.message import Message
from onnx import ModelProto, StringStringEntryProto, TensorProto

from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.compiler.onnx_files.external_data import DataFiles, is_outside
from ortflex_core.compiler.onnx_files.half_floats import rounded
from ortflex_core.kernel import digests
from ortflex_core.kernel.types import Array, Arrays

RECEIPT = "ortflex.receipt"
"""The key of the metadata that is no part of the content (:mod:`ortflex_core.training.receipt`)."""
LENGTH = 32
"""The number of hexadecimal digits of a digest."""


@attrs.frozen
class Content:
    """Digests of the initializers, by name, type, shape and bits, and of everything else in a model."""

    tensors: str
    graph: str

    @property
    def digest(self) -> str:
        """One digest of both."""
        return hashlib.sha256(f"{self.tensors} {self.graph}".encode()).hexdigest()[:LENGTH]


def content_of(
    model: ModelProto, files: DataFiles | None = None, state: Arrays | None = None
) -> Content:
    """The digests of a model; ``state`` has new values of tensors that are not in it but in ``files``."""
    tensors = hashlib.sha256()
    for tensor in model.graph.initializer:
        told = [(entry.key, entry.value) for entry in tensor.metadata_props]
        values = digests.of_array(_values(tensor, files, state or {}))
        facts = (tensor.name, tensor.data_type, tensor.doc_string, told, values)
        tensors.update(repr(facts).encode())
    graph = hashlib.sha256()
    for part, but in ((model, "graph"), (model.graph, "initializer")):
        for fact in _facts(part, but):
            graph.update(fact)
    return Content(tensors.hexdigest()[:LENGTH], graph.hexdigest()[:LENGTH])


def _facts(message: Message, but: str) -> Iterator[bytes]:
    """The fields of a message, except one, each with its name; the message itself is not copied."""
    for field, value in message.ListFields():
        if field.name == but:
            continue
        # A string that is not UTF-8 is bytes here, and cannot be copied to another message.
        parts = value if hasattr(value, "extend") else [value]
        for part in parts:
            if isinstance(part, StringStringEntryProto) and part.key == RECEIPT:
                continue
            plain = not isinstance(part, Message)
            content = repr(part).encode() if plain else part.SerializeToString(deterministic=True)
            yield f"{field.name} {len(content)} ".encode() + content


def _values(tensor: TensorProto, files: DataFiles | None, state: Arrays) -> Array:
    if is_outside(tensor) and tensor.name in state:
        return rounded(state[tensor.name], tensor.data_type, tensor.name)
    return model_file.array_of(tensor, files)
