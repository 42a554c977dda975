"""The folders of PEFT: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ortflex_core.errors import ConfigError, ModelError, suggest
from ortflex_core.files import make_folder, write_bytes
from ortflex_core.protocols import Product
from ortflex_core.types import Array

if TYPE_CHECKING:
    from ortflex_plugins.adapters.lora import Lora

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ROOT = "base_model.model."
_KEY = re.compile(rf"{re.escape(_ROOT)}(.+)\.lora_([AB])\.weight")
_OTHERS = ("use_dora", "use_qalora", "lora_bias", "modules_to_save", "layer_replication")
"""Entries of a configuration with which an adapter is more than A·B."""


@attrs.frozen
class Config:
    """The entries of adapter_config.json."""

    folder: Path
    entries: Mapping[str, Any]

    def fields(self) -> dict[str, Any]:
        """The fields of Lora."""
        return {
            "rank": int(self.entries["r"]),
            "alpha": float(self.entries["lora_alpha"]),
            "dropout": float(self.entries.get("lora_dropout") or 0.0),
            "rslora": bool(self.entries.get("use_rslora")),
        }

    def check(self, lora: Lora, where: str) -> None:
        """Refuse an adapter whose fields differ from those of the folder's tensors.

        Raises:
            ConfigError: the message has the fields that differ.
        """
        wanted = {n: v for n, v in self.fields().items() if n != "dropout"}
        differ = {n: v for n, v in wanted.items() if getattr(lora, n) != v}
        if differ:
            values = ", ".join(f"{n} = {json.dumps(v)}" for n, v in differ.items())
            raise ConfigError(
                f"{where}: the adapter in {str(self.folder)!r} was created with other fields: "
                f"pass {values}, or use Lora.from_peft(folder), which reads them"
            )


def read_config(folder: Path) -> Config:
    """The configuration of an adapter that PEFT wrote.

    Raises:
        ConfigError: the folder has no configuration, or the adapter is more than A·B.
    """
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            hint = ""
            if (folder / "adapter_model.bin").is_file():
                hint = "; it has adapter_model.bin: save it again with safe_serialization=True"
            raise ConfigError(
                f"{str(folder)!r} is not a PEFT folder: it has no {name}{hint}. "
                "Trainer.resume(checkpoint) continues a run without this folder"
            )
    try:
        entries = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, config = entries["peft_type"], Config(folder, entries)
        config.fields()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(folder / CONFIG)!r} is not the configuration of a LoRA adapter: "
            f"{type(error).__name__}: {error}"
        ) from error
    if kind != "LORA":
        raise ConfigError(f"{str(folder)!r} has an adapter of the kind {kind}, not LORA")
    beyond = [name for name in _OTHERS if entries.get(name)]
    if entries.get("bias", "none") != "none":
        beyond.append("bias")
    if beyond:
        raise ConfigError(
            f"{str(folder)!r} has an adapter that is more than A·B: {beyond[0]} is "
            f"{entries[beyond[0]]!r}; merge it with PEFT (merge_and_unload) and export that model"
        )
    return config


def _keys(folder: Path) -> dict[str, dict[str, str]]:
    """The keys of A and B of every module.

    Raises:
        ConfigError: the file is damaged, or has tensors that are neither A nor B.
    """
    import safetensors

    out: dict[str, dict[str, str]] = {}
    path = folder / TENSORS
    try:
        with safetensors.safe_open(str(path), framework="np") as file:  # type: ignore[no-untyped-call]
            names = list(file.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    for name in names:
        match = _KEY.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{str(path)!r} has the tensor {name!r}, which is neither A nor B of a linear "
                "layer or convolution; merge the adapter with PEFT (merge_and_unload) and export "
                "that model"
            )
        out.setdefault(match[1], {})[match[2]] = name
    half = [module for module, pair in out.items() if len(pair) < 2]
    if half or not out:
        what = f"only {next(iter(out[half[0]]))} of {half[0]!r}" if half else "no tensor"
        raise ConfigError(f"{str(path)!r} has {what}; A and B are needed")
    return out


def _same_module(module: str, names: Sequence[str]) -> str | None:
    """The name of a module among ``names``: the same, or one with more or fewer parts before it."""
    if module in names:
        return module
    ends = [n for n in names if module.endswith(f".{n}") or n.endswith(f".{module}")]
    return max(ends, key=len) if ends else None


def match_modules(folder: Path, products: Sequence[Product], where: str) -> list[Product]:
    """The products of an adapter's modules, whose paths may differ by a prefix.

    Raises:
        ModelError: the adapter belongs to another base model.
    """
    by_module = {p.module: p for p in products}
    out: dict[str, str] = {}
    for name in _keys(folder):
        module = _same_module(name, list(by_module))
        if module is None or module in out:
            raise ModelError(
                f"{where}: the adapter in {str(folder)!r} belongs to a different base model: its "
                f"module {name!r} matches no product of this model; {suggest(name, by_module)}"
            )
        out[module] = name
    return [p for p in products if p.module in out]


def read_pair(folder: Path, product: Product) -> tuple[Array, Array]:
    """A [inputs, rank] and B [rank, outputs] of a product; B has the factor of an ``alpha_pattern``.

    Raises:
        ModelError: the shapes are not those of the model.
    """
    import safetensors

    keys = _keys(folder)
    module = _same_module(product.module, list(keys)) or product.module
    with safetensors.safe_open(str(folder / TENSORS), framework="np") as file:  # type: ignore[no-untyped-call]
        down, up = (_matrix(file, keys[module][k]) for k in "AB")
    shapes = [list(down.shape), list(up.shape)]
    rank = down.shape[1]
    if shapes != [[product.inputs, rank], [rank, product.outputs]]:
        raise ModelError(
            f"the adapter in {str(folder)!r} belongs to a different base model: the module "
            f"{module!r} has {down.shape[0]} inputs and {up.shape[1]} outputs there, but "
            f"{product.inputs} inputs and {product.outputs} outputs here"
        )
    entries = read_config(folder).entries
    own = _by_pattern(entries.get("alpha_pattern"), module)
    return down, up * (own / float(entries["lora_alpha"])) if own is not None else up


def _matrix(file: Any, key: str) -> Array:
    """A stored tensor [to, from], or a convolution's [to, from, 1, …], as [from, to]."""
    array = file.get_tensor(key).astype(np.float32)
    if array.ndim < 2 or any(d != 1 for d in array.shape[2:]):
        raise ModelError(f"the tensor {key!r} of shape {list(array.shape)} is not a matrix")
    return np.asarray(array.reshape(array.shape[:2]).T)


def _by_pattern(patterns: Mapping[str, float] | None, module: str) -> float | None:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return None


def write_peft(folder: Path, lora: Lora, tensors: Mapping[Product, Mapping[str, Array]]) -> None:
    """Write an adapter as ``PeftModel.save_pretrained`` does.

    Raises:
        ConfigError: the prefix of modules does not fit.
        OutputError: the folder cannot be written to.
    """
    from safetensors.numpy import save

    out: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    for product, pair in tensors.items():
        module = product.module
        if not module.startswith(lora.prefix):
            raise ConfigError(
                f"prefix: {lora.prefix!r} is not a prefix of the module path {module!r}"
            )
        module = module[len(lora.prefix) :]
        for letter in "AB":
            matrix = np.asarray(pair[f"lora_{letter}"], np.float32).T
            shape = (*matrix.shape, *[1] * product.axes)
            out[f"{_ROOT}{module}.lora_{letter}.weight"] = matrix.reshape(shape).copy()
        ranks[module] = pair["lora_A"].shape[1]
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted(ranks),
        "rank_pattern": {m: r for m, r in sorted(ranks.items()) if r != lora.rank},
        "alpha_pattern": {},
    }
    content = save(out, metadata={"format": "pt"})
    make_folder(folder)
    write_bytes(folder / TENSORS, content)
    write_bytes(folder / CONFIG, json.dumps(config, indent=2).encode())
