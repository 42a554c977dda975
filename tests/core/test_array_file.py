"""Files of arrays: the library safetensors reads what is written."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load

from ortflex_core import dump_arrays
from ortflex_core.training.artifacts.array_file import read_arrays, write_arrays

pytestmark = pytest.mark.once

TYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
]


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    out = {f"of {name}": rng.integers(0, 2, (3, 5)).astype(name) for name in TYPES}
    return out | {
        "empty": np.zeros((0, 4), np.float32),
        "a number": np.float64(2.5).reshape(()),
        "größe/λ": rng.standard_normal(7).astype(np.float32),
    }


def dumped(content: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    dump_arrays(out, content, metadata)
    return out.getvalue()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"λ": '{"a": [1, "\\n"]}'}])
@pytest.mark.parametrize("content", [{}, arrays()], ids=["nothing", "all types"])
def test_the_library_reads_what_is_written(
    content: dict[str, Any], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    written = dumped(content, metadata)
    found = load(written)
    assert found.keys() == content.keys()
    for name, array in content.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    (tmp_path / "file").write_bytes(written)
    with safe_open(tmp_path / "file", "numpy") as file:
        assert file.metadata() == metadata


VIEWS: dict[str, Any] = {
    "transposed": lambda a: a.T,
    "in the order of Fortran": np.asfortranarray,
    "backwards": lambda a: a[::-1, ::-1],
    "every other": lambda a: a[:, ::2],
    "broadcast": lambda a: np.broadcast_to(a[:1], (4, a.shape[1])),
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("kind", ["float32", "int64", "bool", "float16"])
@pytest.mark.parametrize("name", VIEWS)
def test_arrays_in_any_memory_are_read_back(name: str, kind: str, tmp_path: Path) -> None:
    whole = np.random.default_rng(1).integers(0, 2, (4, 6)).astype(kind)
    view = VIEWS[name](whole)
    write_arrays(tmp_path / "file", {"first": whole, "view": view}, {"a": "b"})
    found, metadata = read_arrays(tmp_path / "file")
    theirs = load((tmp_path / "file").read_bytes())
    for read in (found, theirs):
        assert read["view"].dtype == np.dtype(kind)
        np.testing.assert_array_equal(read["view"], view)
        np.testing.assert_array_equal(read["first"], whole)
    assert metadata == {"a": "b"}


def test_no_copy_of_a_large_array_is_made(tmp_path: Path) -> None:
    large = {name: np.ones((1 << 20,), np.float32) for name in "abcd"}  # 4 MiB each
    turned = {"m": np.ones((1 << 10, 1 << 10), np.float32).T}
    tracemalloc.start()
    write_arrays(tmp_path / "plain", large)
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 1 << 20
    tracemalloc.reset_peak()
    write_arrays(tmp_path / "turned", large | turned)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 << 20  # that of the array whose elements are not contiguous


@pytest.mark.parametrize("kind", ["complex128", "U3", "O"])
def test_a_type_that_the_format_lacks_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="'odd' has the type"):
        write_arrays(tmp_path / "file", {"odd": np.zeros(2, kind)})
