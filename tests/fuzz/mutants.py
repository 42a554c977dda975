"""The mutant of a number: always the same files, written into a folder."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random

import numpy as np
from onnx import ModelProto

from ortflex_core import short_repr, to_toml
from ortflex_core.training.artifacts import checkpoint_record as record
from tests.fuzz import seeds
from tests.fuzz.values import TEXTS, mutate, scrambled, tree, written

TABLES = ("parquet", "arrow")
KINDS = ("model", "checkpoint", "recipe", "data", "run", "number", "step", "adapter")


def write(kind: str, number: int, folder: Path) -> str:
    """Write mutant ``number`` of a kind; returns what was mutated."""
    return _WRITERS[kind](Random(f"{kind}/{number}"), folder)


def mutated_model(rng: Random, source: bytes) -> bytes:
    """Most are models still; some are only bytes."""
    if rng.random() < 0.1:
        return scrambled(rng, source)
    model = ModelProto.FromString(source)
    mutate(rng, model)
    return model.SerializeToString()


def _model(rng: Random, folder: Path) -> str:
    sources = seeds.all_models()
    name = rng.choice(sorted(sources))
    (folder / "model.onnx").write_bytes(mutated_model(rng, sources[name]))
    outside = seeds.weights()
    if name == "outside" and rng.random() < 0.3:
        outside = scrambled(rng, outside)
    (folder / "w.bin").write_bytes(outside)
    return name


def _files(make: Callable[[Path], Path], *, empty: bool) -> dict[str, bytes]:
    """The files of what is made in a folder, those that are empty only where that is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        place = make(Path(folder))
        files = [p for p in sorted(place.rglob("*")) if p.is_file()]
        return {
            str(p.relative_to(place)): p.read_bytes() for p in files if empty or p.stat().st_size
        }


def _mutate(
    rng: Random, files: dict[str, bytes], ending: str, change: Mutation, share: float
) -> str:
    """Change one of the files; those of an ending by ``change``, so often."""
    name = rng.choice(sorted(files))
    if name.endswith(".json") and rng.random() < 0.8:
        value = json.loads(files[name])
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = tree(rng, value)
        files[name] = written(value).encode()
    elif name.endswith(".onnx"):
        files[name] = mutated_model(rng, files[name])
    elif name.endswith(ending) and rng.random() < share:
        files[name] = change(rng, files[name])
    elif rng.random() < 0.1:
        del files[name]
    else:
        files[name] = scrambled(rng, files[name])
    return name


def _write(files: dict[str, bytes], folder: Path) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


@functools.cache
def _saved() -> dict[str, bytes]:
    return _files(lambda folder: seeds.checkpoint(folder / "checkpoint"), empty=True)


def _checkpoint(rng: Random, folder: Path) -> str:
    files = dict(_saved())
    name = _mutate(rng, files, ".safetensors", _tensors, 0.6)
    if rng.random() < 0.9:
        _seal(files)
    _write(files, folder / "checkpoint")
    return name


def _seal(files: dict[str, bytes]) -> None:
    """Put the digests right, or no mutant would pass them."""
    try:
        table = json.loads(files[record.NAME])
        for name in table["files"]:
            if name in files:
                table["files"][name] = hashlib.sha256(files[name]).hexdigest()
        files[record.NAME] = json.dumps(record.seal(table)).encode()
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return


@functools.cache
def _exported() -> dict[str, bytes]:
    return _files(seeds.portable_step, empty=True)


def _step(rng: Random, folder: Path) -> str:
    """A mutated manifest, graph, or state: its header, its tensors, and what its metadata describe."""
    files = dict(_exported())
    name = _mutate(rng, files, ".safetensors", _described, 0.9)
    _write(files, folder)
    return name


@functools.cache
def _saved_adapter() -> dict[str, bytes]:
    return _files(seeds.adapter, empty=True)


def _adapter(rng: Random, folder: Path) -> str:
    files = dict(_saved_adapter())
    model = files.pop("m.onnx")
    name = _mutate(rng, files, ".safetensors", _tensors, 0.8)
    _write({**files, "m.onnx": model}, folder)
    return name


def _described(rng: Random, source: bytes) -> bytes:
    """A state whose header is mutated, or the JSON inside of its metadata, with the right length."""
    if rng.random() < 0.4:
        return _tensors(rng, source)
    size = int.from_bytes(source[:8], "little")
    header = json.loads(source[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["ortflex"])
    for _ in range(rng.choice((1, 1, 2))):
        inner = tree(rng, inner)
    header["__metadata__"]["ortflex"] = written(inner)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + source[8 + size :]


def _tensors(rng: Random, source: bytes) -> bytes:
    """A safetensors file with another header: its length, names, types, shapes, places."""
    size = int.from_bytes(source[:8], "little")
    header = tree(rng, json.loads(source[8 : 8 + size]))
    text = written(header).encode()
    length = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2**32, 2**63))
    return length.to_bytes(8, "little") + text + source[8 + size :]


def _recipe(rng: Random, folder: Path) -> str:
    (folder / "model.onnx").write_bytes(seeds.all_models()["mlp"])
    (folder / "data.csv").write_bytes(seeds.table())
    source = seeds.RECIPE
    how = "bytes"
    content = source.encode()
    if rng.random() < 0.75:
        how, value = "tree", tomllib.loads(source)
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed = tree(rng, value)
            value = changed if isinstance(changed, dict) else {**value, "loss": changed}
        try:
            content = "\n".join(
                f"{to_toml(str(k))} = {to_toml(v)}" for k, v in value.items() if v is not None
            ).encode()
        except (TypeError, RecursionError):
            content = scrambled(rng, content)
    else:
        content = scrambled(rng, content)
    (folder / "train.toml").write_bytes(content)
    return how


def _data(rng: Random, folder: Path) -> str:
    kind = rng.choice(("npz", "npz", "npy", "csv", *(TABLES if find_spec("pyarrow") else ())))
    if kind == "csv":
        (folder / "data.csv").write_bytes(_table(rng))
        return kind
    if kind in TABLES:
        (folder / f"data.{kind}").write_bytes(scrambled(rng, seeds.columns(kind)))
        return kind
    changed = rng.choice((("X",), ("y",), ("sample_weight",), ("X", "y"), ()))
    arrays = {
        name: _npy(rng, array) if name in changed else _written(array)
        for name, array in seeds.arrays().items()
    }
    if kind == "npy":
        (folder / "data").mkdir()
        for name, content in arrays.items():
            (folder / "data" / f"{name}.npy").write_bytes(content)
        return kind
    out = io.BytesIO()
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    how = rng.choices((stored, deflated, zipfile.ZIP_BZIP2), (5, 5, 1))[0]
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    content = out.getvalue()
    (folder / "data.npz").write_bytes(scrambled(rng, content) if rng.random() < 0.6 else content)
    return kind


def _written(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _npy(rng: Random, array: np.ndarray) -> bytes:
    content = _written(array)
    what = rng.random()
    if what < 0.25:
        return scrambled(rng, content)
    if what < 0.4:  # another header of the same length
        header = {
            "descr": rng.choice(("<f4", "<f8", "|O", "<U1000", "|V8", "<M8[s]", "<i1", ">f4")),
            "fortran_order": rng.choice((True, False)),
            "shape": rng.choice(((12, 3), (2**40,), (0,), (), (-1, 3), (2**62, 2**62), (12,))),
        }
        return content[:10] + repr(header).encode().ljust(117)[:117] + b"\n" + content[128:]
    return content


def _table(rng: Random) -> bytes:
    source = seeds.table()
    if rng.random() < 0.5:
        return scrambled(rng, source)
    return _cells(rng, source)


def _cells(rng: Random, source: bytes) -> bytes:
    """A table with other fields, which are odd numbers and texts."""
    fields = source.decode().split(",")
    for _ in range(rng.choice((1, 2, 5))):
        odd = ("1e999", "nan", "-0x1p3", "1_000", '"', "\r", "9" * 5000, *TEXTS)
        fields[rng.randrange(len(fields))] = rng.choice(odd)
    return ",".join(fields).encode("utf-8", "surrogatepass")


@functools.cache
def _finished() -> dict[str, bytes]:
    return _files(seeds.finished_run, empty=False)


def _run(rng: Random, folder: Path) -> str:
    files = dict(_finished())
    name = _mutate(rng, files, ".csv", _cells, 0.8)
    _write(files, folder / "run")
    return name


def _number(rng: Random, folder: Path) -> str:
    """No file: arguments; said is which, and what it is."""
    from tests.fuzz import numbers

    place, value = numbers.drawn(rng)
    return f"{' '.join(place)} = {short_repr(value)}"


Mutation = Callable[[Random, bytes], bytes]


def _planted(rng: Random, folder: Path) -> str:
    """No file: a target of the harness's own tests."""
    return "planted"


_WRITERS = {
    "model": _model,
    "checkpoint": _checkpoint,
    "recipe": _recipe,
    "data": _data,
    "number": _number,
    "run": _run,
    "step": _step,
    "adapter": _adapter,
    "planted": _planted,
}
