"""Undetected damage: what was read in spite of a mutation is what the files say, byte for byte.

The files are read here a second time, with json, hashlib and numpy alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortflex_core import Trainer
from ortflex_core.training.artifacts import checkpoint_record as record
from ortflex_core.training.internals import internals_of

DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "F16": "<f2", "U8": "u1"}


def tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a safetensors file that is read without an error, and its metadata."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header.pop("__metadata__", None) or {}
    arrays = {
        name: np.frombuffer(
            content[end + spec["data_offsets"][0] : end + spec["data_offsets"][1]],
            DTYPES[spec["dtype"]],
        ).reshape(spec["shape"])
        for name, spec in header.items()
        if spec["dtype"] in DTYPES
    }
    return arrays, metadata


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.astype(found.dtype).tobytes()


def check_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Every digest of an accepted checkpoint is right, and the Trainer has its tensors."""
    table = json.loads((folder / record.NAME).read_text("utf-8"))
    assert record.seal(dict(table))["digest"] == table["digest"], "the record's digest"
    for name, digest in table["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    arrays, _ = tensors(folder / "state.safetensors")
    _check(trainer.get_state(), arrays, "parameter/")
    _check(internals_of(trainer).live.slots(), arrays, "slot/")


def check_step(folder: Path, made: onnx.ModelProto, before: onnx.ModelProto) -> None:
    """Every tensor of the model is the one that the state has for it, or the old one."""
    arrays, metadata = tensors(folder / "state.safetensors")
    roles = json.loads(metadata["ortflex"])["tensors"]
    given = {role["of"]: arrays[n] for n, role in roles.items() if role["role"] == "parameter"}
    old = {t.name: onnx.numpy_helper.to_array(t) for t in before.graph.initializer}
    for tensor in made.graph.initializer:
        wanted = given.get(tensor.name, old.get(tensor.name))
        assert wanted is not None, tensor.name
        assert same(onnx.numpy_helper.to_array(tensor), wanted), tensor.name


def check_adapter(folder: Path, trainer: Trainer) -> None:
    """The matrices of the Trainer are those of the file, transposed, B times one factor.

    The factor is a quotient of the alphas of the file: of ``alpha_pattern`` and ``lora_alpha``.
    """
    arrays, _ = tensors(next(folder.glob("*.safetensors")))
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    alphas = [config.get("lora_alpha", 8), *(config.get("alpha_pattern") or {}).values()]
    factors = {1.0, *(float(alpha) / float(alphas[0]) for alpha in alphas)}
    state = trainer.get_state()
    assert len(state) == len(arrays)
    for name, array in arrays.items():
        found = state[name.removeprefix("base_model.model.").removesuffix(".weight")]
        wanted = array.reshape(found.T.shape).T.astype(np.float64)
        allowed = [wanted * factor for factor in (factors if "lora_B" in name else (1.0,))]
        close = [np.allclose(found, one, 1e-6, 1e-30, equal_nan=True) for one in allowed]
        assert any(close), name


def _check(found: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], kind: str) -> None:
    for name, array in found.items():
        assert kind + name in arrays, f"{kind}{name} is not in the file"
        assert same(np.asarray(array), arrays[kind + name]), kind + name
