"""Model files of any size: reading, checks, and replacement of tensors.

A ModelProto gives copies of its values only, so those of large files are held in arrays, once. A
ModelProto of more than 2 GB cannot be serialized, which checking, inlining and shape inference require.
Tensors of such a model stay in their file and are mapped into memory when they are needed. The analysis
of the graph works on a skeleton, in which large tensors are inputs.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, helper

from ortflex_core.compiler.graph.protos import copied
from ortflex_core.compiler.onnx_files import external_data, half_floats, vetting, wire_format
from ortflex_core.compiler.onnx_files.external_data import DataFiles
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.regular_files import NotRegular, RegularFile, read_bytes
from ortflex_core.kernel.types import Array, Arrays, Shape

HUGE = 2**30
"""Total bytes above which tensors stay outside the ModelProto."""
LARGE = 2**26
"""Total bytes above which the values of a file are held outside the ModelProto."""
_SMALL = 1024
"""The largest number of elements of a tensor that always stays in the ModelProto, for shape inference."""
_HELD = 16 * _SMALL + 1
"""The smallest number of bytes of such values: no element has more than 16, so they are not small."""
MOST = 2**31
"""A protocol buffer cannot have more bytes."""
_STEP = 10
"""The graph of a training step may have this many times the nodes of a model."""
_TRIES = 3
"""The number of attempts to read a model that another process replaces meanwhile."""


def read_model(source: Any, label: str) -> ModelProto:
    """Load a model from a path, bytes or a ModelProto (which is copied).

    Raises:
        ModelError: missing, truncated, not ONNX, or without its external data.
    """
    return load(source, label, whole=True)[0]


def load(
    source: Any, label: str, files: DataFiles | None = None, *, whole: bool = False
) -> tuple[ModelProto, DataFiles]:
    """Load a model, as :func:`read_model`, with the tensors that stay outside.

    ``files`` has the tensors of a ModelProto that are not inside. If ``whole``, all tensors are put into
    the ModelProto, unless they are over 1 GiB in other files.
    """
    if not isinstance(source, ModelProto | bytes | str | os.PathLike):
        raise ModelError(
            f"expected a path, bytes or a ModelProto, got {type(source).__name__}; export a model of "
            "another framework first, for example with torch.onnx.export or skl2onnx.to_onnx"
        )
    for _ in range(_TRIES):
        before = _version(source)
        try:
            return _load(source, label, files, whole)
        except ModelError:
            if before == _version(source):  # else it was replaced, and its old data may be gone
                raise
    return _load(source, label, files, whole)


def import_standard(model: ModelProto, oldest: int) -> None:
    """Import the standard's operators, which added nodes need, if the graph imports none.

    The opset is the newest one that its functions import, otherwise ``oldest``.
    """
    standard = ("", "ai.onnx")
    known = any(o.domain in standard for o in model.opset_import)
    if model.opset_import and not known and all(n.domain not in standard for n in model.graph.node):
        within = [o for f in model.functions for o in f.opset_import]
        versions = [o.version for o in within if o.domain in standard]
        model.opset_import.append(helper.make_opsetid("", max(versions, default=oldest)))


def _version(source: Any) -> Any:
    """A stamp that changes when the file is replaced; None if it is not a file."""
    if isinstance(source, bytes | ModelProto):
        return None
    try:
        status = os.stat(source)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _load(
    source: Any, label: str, known: DataFiles | None, whole: bool
) -> tuple[ModelProto, DataFiles]:
    model = ModelProto()
    files = known or DataFiles()
    size, content = 0, b""
    try:
        if isinstance(source, ModelProto):
            model.CopyFrom(source)
        elif isinstance(source, bytes):
            size, content = len(source), source
            model = _parse(source, label)
        else:
            with RegularFile(source, MOST) as file:
                size = file.size
                content, held = _read(file, whole)
            files.hold(held)
            model = _parse(content, label)
    except FileNotFoundError as error:
        raise ModelError(no_file(source, label)) from error  # only a path can be missing
    except NotRegular as error:
        if error.is_folder:
            inside = sorted(str(path) for path in Path(source).glob("*.onnx"))
            found = f": {', '.join(inside[:3])}" * bool(inside)
            raise ModelError(f"{label!r} is a folder; pass the .onnx file in it{found}") from error
        raise ModelError(f"{label} cannot be read: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        what = wire_format.no_model(content[:64]) or error
        raise ModelError(
            f"{label} ({size} bytes) is not an ONNX model or is truncated: {what}"
        ) from error
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error}") from error
    except MemoryError as error:
        raise ModelError(f"{label} ({size} bytes) does not fit into memory") from error
    if not model.HasField("graph"):
        # An empty file is a valid protocol buffer, without any field.
        what = wire_format.no_model(content[:64]) or "no graph"
        raise ModelError(f"{label} ({size} bytes) is not an ONNX model or is truncated: {what}")
    vetting.vet(model, label)
    if known is None and isinstance(source, bytes | ModelProto):
        outside = next(filter(external_data.is_outside, vetting.tensors(model)), None)
        if outside is not None:  # onnxruntime would look for the data in the current folder
            raise external_data.not_inside(outside)
    elif known is None:
        try:
            files.load(model, Path(source).parent, HUGE, _SMALL, None if whole else LARGE)
        except (ModelError, OSError, ValueError) as error:
            raise ModelError(f"{label} lacks its external data: {error}") from error
    return model, files


def _read(file: RegularFile, whole: bool) -> tuple[bytes, dict[str, Array]]:
    """The content of a model file; of a large one without the values of its tensors, which come apart."""
    if whole or file.size <= LARGE:
        return file.readall(), {}
    with mmap.mmap(file.fileno(), file.size, access=mmap.ACCESS_READ) as mapped:
        bare, tensors = wire_format.split(mapped, _HELD)
    names = Counter(tensor.name for tensor, _, _ in tensors)
    held = {}
    for tensor, place, length in tensors:
        plain = external_data.is_plain(tensor) and vetting.bytes_of(tensor) == length
        array = external_data.read_values(file, tensor, place) if plain else None
        if array is None or names[tensor.name] > 1 or min(tensor.dims, default=1) < 0:
            file.seek(0)  # protobuf and vetting say what is wrong, or keep a type that numpy lacks
            return file.readall(), {}
        held[tensor.name] = array
    return bare, held


def _parse(content: bytes, label: str, most_nodes: int = vetting.MOST_NODES) -> ModelProto:
    wire_format.check(content, label, most_nodes)
    return onnx.load_model_from_string(content)


def read_proto(path: str | os.PathLike[str]) -> ModelProto:
    """The content of a file; tensors in other files stay there, and nothing is checked.

    Raises:
        OSError: it is missing, not a regular file, or too large for a protocol buffer.
        DecodeError, ValueError, ModelError: it is not an ONNX model, or has too much in it.
    """
    return _parse(read_bytes(path, MOST), str(path), _STEP * vetting.MOST_NODES)


def is_small(tensor: TensorProto) -> bool:
    """Whether a tensor always stays in the graph."""
    return bool(math.prod(tensor.dims) <= _SMALL)


def array_of(tensor: TensorProto, files: DataFiles | None = None) -> Array:
    """A tensor's values, read-only; external values are mapped."""
    if not external_data.is_outside(tensor):
        try:
            array = onnx.numpy_helper.to_array(tensor)
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"the initializer {tensor.name!r} declares the shape {list(tensor.dims)} and the "
                f"type {tensor.data_type}, but its data do not match: {error}"
            ) from error
        array.setflags(write=False)
        return array
    return (files or DataFiles()).array(tensor)


def skeleton(model: ModelProto) -> ModelProto:
    """The model with large tensors as inputs of the same name: the analysis serializes it several times."""
    if all(map(is_small, model.graph.initializer)):
        return model
    out = ModelProto()
    _copy_fields(model, out, "graph")
    _copy_fields(model.graph, out.graph, "initializer")
    inputs = {value.name for value in out.graph.input}
    for tensor in model.graph.initializer:
        if is_small(tensor):
            out.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            out.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return out


def with_tensors(bare: ModelProto, model: ModelProto) -> ModelProto:
    """A copy of a skeleton's graph with the large tensors of ``model`` back in their place."""
    out = copied(bare)
    names = {t.name for t in out.graph.initializer}
    missing = [t for t in model.graph.initializer if t.name not in names]
    out.graph.initializer.extend(missing)
    own = {v.name for v in model.graph.input}
    added = {t.name for t in missing} - own
    for value in [v for v in out.graph.input if v.name in added]:
        out.graph.input.remove(value)
    return out


def _copy_fields(source: Any, target: Any, but: str) -> None:
    for field, value in source.ListFields():
        if field.name == but:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def replace(tensor: TensorProto, array: Array) -> None:
    """Replace values in the encoding of the tensor, so that nothing else of the file changes."""
    wanted: Shape = tuple(tensor.dims)
    if tuple(array.shape) != wanted:
        raise ModelError(f"{tensor.name!r} has shape {list(wanted)}, got {list(array.shape)}")
    if external_data.is_outside(tensor):
        return  # export writes it to its file
    array = half_floats.rounded(array, tensor.data_type, tensor.name)
    fields = [f for f in ("float_data", "double_data", "int32_data") if len(getattr(tensor, f))]
    raw = onnx.numpy_helper.from_array(array, tensor.name).raw_data
    if tensor.HasField("raw_data") or not fields:
        tensor.raw_data = raw
        return
    values = np.ravel(array)
    if tensor.data_type in half_floats.HALF:  # their bits
        values = values.view(np.uint16)
    elif len(raw) < array.nbytes or "float8" in array.dtype.name:  # elements of 4 bits share a byte
        values = np.frombuffer(raw, np.uint8)
    getattr(tensor, fields[0])[:] = values.tolist()


def own_values(model: ModelProto, state: Arrays) -> None:
    """Replace Identity nodes by initializers if their outputs were trained separately."""
    types = {t.name: t.data_type for t in model.graph.initializer}
    for node in [n for n in model.graph.node if n.op_type == "Identity" and n.output[0] in state]:
        name = node.output[0]
        array = np.asarray(state[name], order="C")
        if (dtype := types.get(node.input[0])) in half_floats.HALF:
            array = half_floats.rounded(array, dtype, name)
        add_initializer(model, onnx.numpy_helper.from_array(array, name))
        model.graph.node.remove(node)


def add_initializer(model: ModelProto, tensor: TensorProto) -> None:
    """Add an initializer to a graph."""
    model.graph.initializer.append(tensor)
    if model.ir_version < 4:  # older files also list every initializer as an input
        info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        model.graph.input.append(info)
