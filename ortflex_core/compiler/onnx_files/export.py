"""Atomic writing of models to files, including those with data in a second file.

A model and its data are two files, which no system replaces in one step. So data that a model
refers to are never replaced: new data get an unused name, then the model is replaced, then the old
data are removed. So the model refers to its own data, even if the process is killed in between.
Exports to the same path wait for one another.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, external_data_helper

from ortflex_core.compiler.graph.protos import copied
from ortflex_core.compiler.onnx_files import model_file, vetting
from ortflex_core.compiler.onnx_files.external_data import DataFiles, is_outside
from ortflex_core.compiler.onnx_files.half_floats import rounded
from ortflex_core.compiler.onnx_files.model_file import array_of, is_small
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.files import OutputError, flush_folder, staging, write_bytes, write_flushed
from ortflex_core.kernel.locks import FolderLock
from ortflex_core.kernel.regular_files import NotRegular, file_size, open_regular
from ortflex_core.kernel.types import Array, Arrays

_PATIENCE = 600.0
"""Seconds to wait for another export to the same path."""
_digest = partial(hashlib.blake2b, digest_size=6)
"""The hash in the names of data files."""
OTHER_FORMATS: Mapping[str, str] = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "PyTorch"),
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "Keras"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "pickle"),
    **dict.fromkeys((".npy", ".npz"), "numpy"),
    **dict.fromkeys((".json", ".txt", ".csv", ".textproto", ".onnxtxt"), "text"),
    ".safetensors": "safetensors",
    ".onnx_adapter": "adapters of onnxruntime",
    ".ort": "onnxruntime's own format",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
    ".gguf": "llama.cpp",
    ".xml": "OpenVINO",
    ".engine": "TensorRT",
}
"""Suffixes of files that are not ONNX, with the format that readers expect."""
_NO_MODELS = (".bin", ".csv", ".data", ".npy", ".npz", ".parquet", ".safetensors", ".weight")


def write(model: ModelProto, path: Path, files: DataFiles, state: Arrays) -> ModelProto:
    """Write a model; tensors that were external data stay external, in a separate file next to it.

    That file is ``<name>.data`` if neither the model nor that file exists yet, and otherwise
    ``<name>.<hash>.data``, with a hash of its content. The data file of the model that is replaced
    is removed if it has such a name and no other model in the folder, and none in the folder above,
    mentions it. If a model is too large for one file, all large tensors become external.

    ``state`` has values of tensors that are not inside ``model``. The result is ``model``, or the model as
    it was written if some of its tensors are external.

    Raises:
        OutputError: the folder cannot be written to, or the suffix is that of another format; old files
            are untouched.
    """
    if (other := OTHER_FORMATS.get(path.suffix.lower())) is not None:
        raise OutputError(
            f"{str(path)!r} ends with {path.suffix}, but the export is an ONNX model, not a file of "
            f"{other}; write {str(path.with_suffix('.onnx'))!r}. Nothing was written"
        )
    external = files.external & {t.name for t in model.graph.initializer}
    if not external and sum(map(vetting.bytes_of, model.graph.initializer)) > model_file.HUGE:
        external = frozenset(
            t.name
            for t in model.graph.initializer
            if not is_small(t) and t.data_type != TensorProto.STRING
        )
    if not external:
        write_bytes(path, inline_tensors(model, files, state).SerializeToString())
        return model
    copy = copied(model)
    try:
        with _alone(path), staging(path) as folder:
            _write_pair(copy, path, folder, external, files, state)
    except ModelError:  # of the tensors that are read
        raise
    except (OSError, ValueError) as error:
        raise OutputError.of(
            f"write {str(path)!r}",
            error,
            "The earlier model was not changed; choose a folder that can be written to.",
        ) from error
    return copy if any(map(is_outside, model.graph.initializer)) else model


def inline_tensors(model: ModelProto, files: DataFiles, state: Arrays) -> ModelProto:
    """The model with all of its tensors inside; it may be too large to be serialized in one piece."""
    for tensor in model.graph.initializer:
        if is_outside(tensor):
            array = state.get(tensor.name)
            values = array_of(tensor, files) if array is None else array
            raw = _content(tensor, rounded(values, tensor.data_type, tensor.name))
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT
            if tensor.name not in files.external:  # as in the file
                tensor.ClearField("data_location")
            tensor.raw_data = bytes(raw)
    return model


def _content(tensor: TensorProto, values: Array) -> bytes | memoryview:
    """The bytes of a tensor, copied only if elements share bytes, as those of int4."""
    # Not tofile, which requires a real file and may leave holes in it.
    if vetting.bytes_of(tensor) < values.nbytes:
        packed: bytes = onnx.numpy_helper.from_array(values).raw_data
        return packed
    return values.reshape(-1).view(np.uint8).data


def _write_pair(
    model: ModelProto,
    path: Path,
    folder: Path,
    external: frozenset[str],
    files: DataFiles,
    state: Arrays,
) -> None:
    digest = _digest()
    places: list[tuple[TensorProto, int, int]] = []
    with open(folder / "data", "wb") as out:
        for tensor in model.graph.initializer:
            if tensor.name in external:
                start = out.tell()
                _append(out, digest, tensor, files, state)
                places.append((tensor, start, out.tell() - start))
        out.flush()
        os.fsync(out.fileno())
    files.release()
    old = _own_data(path)
    data = path.with_name(f"{path.name}.data")
    if os.path.lexists(data) or old:
        data = path.with_name(f"{path.name}.{digest.hexdigest()}.data")
    for tensor, start, length in places:
        tensor.raw_data = b""  # a tensor without values cannot refer to data
        external_data_helper.set_external_data(tensor, data.name, start, length)
        tensor.ClearField("raw_data")
    write_flushed(folder / "model", model.SerializeToString())
    os.replace(folder / "data", data)
    flush_folder(path.parent)
    os.replace(folder / "model", path)
    flush_folder(path.parent)
    for unused in {*old, *_left_over(path, {*old, data})} - {data}:
        if not _mentioned(unused, path):
            with contextlib.suppress(OSError):  # Windows does not remove a mapped file
                unused.unlink()


def _append(
    out: IO[bytes], digest: Any, tensor: TensorProto, files: DataFiles, state: Arrays
) -> None:
    """Write the bytes of a tensor, and remove its values from the model."""
    content: Any = tensor.raw_data
    if is_outside(tensor):
        array = state.get(tensor.name)
        values = array_of(tensor, files) if array is None else array
        values = rounded(values, tensor.data_type, tensor.name)
        content = _content(tensor, values)
    elif not tensor.HasField("raw_data"):
        content = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)).raw_data
    out.write(content)
    digest.update(content)
    for field in vetting.VALUE_FIELDS:
        tensor.ClearField(field)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """The context in which no other process exports to this path; an OSError after too long a wait."""
    lock, deadline = FolderLock(f".{path.name[:40]}.lock"), time.monotonic() + _PATIENCE
    while not lock.acquire(path.parent):
        if time.monotonic() > deadline:
            raise OSError(f"{lock.holder(path.parent)} is writing it")
        time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def _own_data(path: Path) -> set[Path]:
    """The data files that exports gave to the model at a path."""
    try:
        model = model_file.read_proto(path)
    except (OSError, ValueError, DecodeError):
        return set()
    entries = [e for t in model.graph.initializer for e in t.external_data if e.key == "location"]
    return {path.with_name(e.value) for e in entries if _ours(path).fullmatch(e.value)}


def _ours(path: Path) -> re.Pattern[str]:
    """The names of a model's data files."""
    return re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{12}})?\.data")


def _left_over(path: Path, known: set[Path]) -> set[Path]:
    """Data files of exports that were killed before the model referred to them, recognized by content."""
    out = set()
    for candidate in set(path.parent.iterdir()) - known:
        name = _ours(path).fullmatch(candidate.name)
        if name is None or name[1] is None or candidate.is_symlink():
            continue
        with contextlib.suppress(OSError), open_regular(candidate) as file:
            if f".{hashlib.file_digest(file, _digest).hexdigest()}" == name[1]:
                out.add(candidate)
    return out


def _mentioned(data: Path, path: Path) -> bool:
    """Whether a file that may be a model contains the name of a data file."""
    neighbors = [p for p in path.parent.iterdir() if not p.name.endswith(_NO_MODELS)]
    above = [p for p in path.parent.parent.glob("*.onnx") if path.parent != p.parent]
    return any(_has(p, data.name.encode()) for p in (*neighbors, *above))


def _has(path: Path, text: bytes) -> bool:
    try:
        with open_regular(path) as file:
            size = file_size(file)
            if not 0 < size < 2**31:  # a protocol buffer cannot be larger
                return False
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
                return content.find(text) >= 0
    except NotRegular:
        return False
    except (OSError, ValueError):
        return True  # unknown
