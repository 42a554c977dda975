"""Model files: read, checked and written, whatever their size.

A ModelProto of more than 2 GB cannot be serialised, which checking, inlining and shape inference all
do. Where the tensors are that many, those stay in their file and are mapped into memory when they
are asked for; what looks at the graph gets a skeleton, in which they are inputs.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, external_data_helper, helper

from ortflex_core import external, vetting
from ortflex_core.errors import ModelError
from ortflex_core.files import OutputError, no_file, write_bytes
from ortflex_core.types import Array, Shape, numpy_dtype

HUGE = 2**30
"""Bytes of tensors above which they stay outside the ModelProto."""
_SMALL = 1024
"""Elements of tensors that stay inside in any case: shape inference reads them."""


def read(source: Any, label: str) -> ModelProto:
    """Load a model from a path, bytes or a ModelProto (which is copied).

    Raises:
        ModelError: missing, truncated, not ONNX, or without its external data.
    """
    model = ModelProto()
    size = 0
    try:
        if isinstance(source, ModelProto):
            model.CopyFrom(source)
        elif isinstance(source, bytes):
            size = len(source)
            model = onnx.load_model_from_string(source)
        else:
            found = Path(source).stat()
            if stat.S_ISFIFO(found.st_mode):  # to open it is to wait for it
                raise ModelError(f"{label} cannot be read: it is a pipe")
            size = found.st_size
            model = onnx.load(source, load_external_data=False)
    except FileNotFoundError as error:
        raise ModelError(no_file(source, label)) from error  # only paths are not found
    except IsADirectoryError as error:
        raise ModelError(f"{label!r} is a folder; give the .onnx file that is in it") from error
    except (DecodeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{label} ({size} bytes) is not an ONNX model or is truncated: {error}"
        ) from error
    except OSError as error:
        raise ModelError(f"{label} cannot be read: {error}") from error
    if not model.HasField("graph"):
        # Protocol buffers take no bytes at all for a message without fields.
        raise ModelError(f"{label} ({size} bytes) is not an ONNX model or is truncated: no graph")
    vetting.vet(model, label)
    if isinstance(source, bytes | ModelProto):
        _refuse_external(model)
    else:
        try:
            external.load(model, Path(source).parent, HUGE, _SMALL)
        except (ModelError, OSError) as error:
            raise ModelError(f"{label} lacks its external data: {error}") from error
    return model


def _refuse_external(model: ModelProto) -> None:
    """Without a path nobody knows which folder is meant; onnxruntime would take the current one."""
    for tensor in vetting.tensors(model):
        if external.is_outside(tensor):
            raise ModelError(
                f"the data of {tensor.name!r} are in another file; pass the path of the model, or "
                "load it with onnx.load"
            )


def size_of(tensor: TensorProto) -> int:
    """Bytes that a tensor's values take."""
    return vetting.bytes_of(tensor)


def is_small(tensor: TensorProto) -> bool:
    """Whether a tensor is kept in the graph in any case."""
    return bool(math.prod(tensor.dims) <= _SMALL)


def array_of(tensor: TensorProto, folder: Path | None) -> Array:
    """A tensor's values, not to be written to; those outside the file's graph are mapped.

    Raises:
        ModelError: the data are missing, too few or too many, or of an unknown type.
    """
    if not external_data_helper.uses_external_data(tensor):
        try:
            array = onnx.numpy_helper.to_array(tensor)
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"the initializer {tensor.name!r} is said to have the shape {list(tensor.dims)} and "
                f"the type {tensor.data_type}, its data do not fit: {error}"
            ) from error
        array.setflags(write=False)
        return array
    if folder is None:
        raise ModelError(
            f"the data of {tensor.name!r} are in another file; pass the path of the model, or load it "
            "with onnx.load"
        )
    try:
        return external.mapped(tensor, folder)
    except (ModelError, OSError, ValueError) as error:
        raise ModelError(f"the external data of {tensor.name!r} cannot be read: {error}") from error


def structure(model: ModelProto) -> str:
    """A hash of what a model computes, whatever the values of its larger tensors.

    Two files that differ only in trained weights, names of their producer or documentation have the
    same structure.
    """
    graph = model.graph
    parts: list[Any] = [*model.functions, *graph.input, *graph.output, *graph.node]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        digest.update(f"{tensor.name}\0{tensor.data_type}\0{list(tensor.dims)}\0".encode())
    opsets = sorted((o.domain, o.version) for o in model.opset_import)
    digest.update(repr(opsets).encode())
    return digest.hexdigest()


def skeleton(model: ModelProto) -> ModelProto:
    """A model without its large tensors, or the model itself where it has none.

    They are inputs of the graph, of the same name, type and shape: what looks at the graph
    serialises all of it, several times.
    """
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
    out = ModelProto()
    out.CopyFrom(bare)
    there = {t.name for t in out.graph.initializer}
    missing = [t for t in model.graph.initializer if t.name not in there]
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
    """New values in the encoding the tensor had, so that nothing else of the file changes.

    Raises:
        ModelError: the shapes differ.
    """
    wanted: Shape = tuple(tensor.dims)
    if tuple(array.shape) != wanted:
        raise ModelError(f"{tensor.name!r} has shape {list(wanted)}, got {list(array.shape)}")
    if external_data_helper.uses_external_data(tensor):
        return  # it is written where it belongs
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    fresh = onnx.numpy_helper.from_array(np.asarray(array, order="C").astype(dtype), tensor.name)
    if not tensor.HasField("raw_data") and len(tensor.float_data):
        del tensor.float_data[:]
        tensor.float_data.extend(np.ravel(array).tolist())
    elif not tensor.HasField("raw_data") and len(tensor.double_data):
        del tensor.double_data[:]
        tensor.double_data.extend(np.ravel(array).tolist())
    else:
        tensor.raw_data = fresh.raw_data


def own_values(model: ModelProto, state: Mapping[str, Array]) -> None:
    """Replace Identity nodes whose outputs have got values of their own by initializers."""
    for node in [n for n in model.graph.node if n.op_type == "Identity" and n.output[0] in state]:
        name = node.output[0]
        tensor = onnx.numpy_helper.from_array(np.asarray(state[name], order="C"), name)
        model.graph.initializer.append(tensor)
        if model.ir_version < 4:  # where every initializer is an input
            model.graph.input.append(
                helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            )
        model.graph.node.remove(node)


def write(
    model: ModelProto, path: Path, original: Path | None, state: Mapping[str, Array]
) -> ModelProto:
    """Write a model; tensors that were external data stay external, in ``<name>.data`` beside it.

    ``state`` has the values of tensors that are outside ``model``. Of a model that is too large for
    one file, all large tensors become external. Returns ``model``, or, where some of its tensors
    are outside, what was written.

    Raises:
        OutputError: the folder cannot be written to; old files are untouched.
    """
    external = _external_names(original)
    if not external and sum(map(size_of, model.graph.initializer)) > HUGE:
        external = {t.name for t in model.graph.initializer if not is_small(t)}
    if not external:
        write_bytes(path, model.SerializeToString())
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    data = f"{path.name}.data"
    folder_of = original.parent if original is not None else None
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            with open(Path(folder, data), "wb") as out:
                for tensor in copy.graph.initializer:
                    if tensor.name in external:
                        _append(out, tensor, data, folder_of, state)
            Path(folder, path.name).write_bytes(copy.SerializeToString())
            os.replace(Path(folder, data), path.with_name(data))
            os.replace(Path(folder, path.name), path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    outside = any(external_data_helper.uses_external_data(t) for t in model.graph.initializer)
    return copy if outside else model


def _append(
    out: Any, tensor: TensorProto, data: str, folder: Path | None, state: Mapping[str, Array]
) -> None:
    """Write a tensor's bytes and make it refer to them."""
    offset = out.tell()
    if external_data_helper.uses_external_data(tensor):
        array = state.get(tensor.name)
        values = array_of(tensor, folder) if array is None else array
        values = np.asarray(values, dtype=numpy_dtype(tensor.data_type), order="C")
        # Not tofile, which leaves holes out and asks for a real file.
        out.write(values.reshape(-1).view(np.uint8).data)
        tensor.raw_data = b""  # what has no values cannot be made to refer to them
    else:
        out.write(tensor.raw_data)
    external_data_helper.set_external_data(tensor, data, offset, out.tell() - offset)
    tensor.ClearField("raw_data")


def inside(model: ModelProto, folder: Path | None, state: Mapping[str, Array]) -> ModelProto:
    """The model with all of its tensors inside; it may be too large to be serialised in one piece."""
    for tensor in model.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            array = state.get(tensor.name)
            values = array_of(tensor, folder) if array is None else array
            raw = np.asarray(values, dtype=numpy_dtype(tensor.data_type), order="C").tobytes()
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT
            tensor.raw_data = raw
    return model


def _external_names(original: Path | None) -> set[str]:
    if original is None or not original.exists():
        return set()
    bare = onnx.load(original, load_external_data=False)
    return {t.name for t in bare.graph.initializer if external_data_helper.uses_external_data(t)}
