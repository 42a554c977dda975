"""The folders of PEFT: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ortflex_core import (
    Array,
    ArrayFile,
    CheckpointError,
    ConfigError,
    ModelError,
    Product,
    dump_arrays,
    is_count,
    is_number,
    make_folder,
    read_json,
    reason,
    short_repr,
    suggest,
    write_bytes,
)
from ortflex_plugins.adapters._patterns import Patterns, Refused

if TYPE_CHECKING:
    from ortflex_plugins.adapters.lora import Lora

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ROOT = "base_model.model."
_KEY = re.compile(rf"{re.escape(_ROOT)}(.+)\.lora_([AB])\.weight")
_OTHERS = ("use_dora", "use_qalora", "lora_bias", "modules_to_save", "layer_replication")
"""Entries of a configuration with which an adapter is more than A·B."""
_MODULES = ("target_modules", "exclude_modules", "layers_pattern")
"""Entries that choose the modules of a network; here, the names of the tensors do."""
_LARGEST = 1e30
"""Above the largest ``lora_alpha``: its product with a weight has to be finite."""


@attrs.frozen
class Config:
    """The entries of adapter_config.json that a LoRA adapter has, checked."""

    path: Path
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    alphas: Mapping[str, float]
    """Other values of ``lora_alpha``, by the patterns of modules."""
    patterns: Patterns

    def fields(self) -> dict[str, Any]:
        """The fields of Lora."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "dropout": self.dropout,
            "rslora": self.rslora,
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
                f"{where}: the adapter in {str(self.path.parent)!r} was created with other fields: "
                f"pass {values}, or use Lora.from_peft(folder), which reads them"
            )

    def alpha_of(self, module: str) -> float:
        """``lora_alpha`` of a module.

        Raises:
            ConfigError: matching the patterns takes too long.
        """
        try:
            pattern = self.patterns.first(module)
        except Refused as error:
            raise ConfigError(f"{str(self.path)!r}: alpha_pattern: {error}") from error
        return self.alpha if pattern is None else self.alphas[pattern]


def read_config(folder: Path) -> Config:
    """The configuration of an adapter that PEFT wrote.

    Raises:
        ConfigError: the folder has no configuration, an entry is wrong, or the adapter is more than
            A·B; names the file and the key.
    """
    for name in (CONFIG, TENSORS):
        if not os.path.lexists(folder / name):
            hint = ""
            if os.path.lexists(folder / "adapter_model.bin"):
                hint = "; it has adapter_model.bin: save it again with safe_serialization=True"
            raise ConfigError(
                f"{str(folder)!r} is not a PEFT folder: it has no {name}{hint}. "
                "Trainer.resume(checkpoint) continues a run without this folder"
            )
    path = folder / CONFIG
    try:
        entries = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {reason(error)}") from error
    if not isinstance(entries, dict) or "peft_type" not in entries:
        raise ConfigError(
            f"{str(path)!r} is not the configuration of a LoRA adapter: it has no key peft_type"
        )
    if entries["peft_type"] != "LORA":
        kind = short_repr(entries["peft_type"])
        raise ConfigError(f"{str(path)!r}: peft_type is {kind}, expected 'LORA'")
    beyond = [name for name in _OTHERS if entries.get(name)]
    if entries.get("bias", "none") != "none":
        beyond.append("bias")
    if beyond:
        raise ConfigError(
            f"{str(folder)!r} has an adapter that is more than A·B: {beyond[0]} is "
            f"{short_repr(entries[beyond[0]])}; merge it with PEFT (merge_and_unload) and export that "
            "model"
        )
    return _checked(path, entries)


def _checked(path: Path, entries: Mapping[str, Any]) -> Config:
    """The entries, each in its valid range."""

    def entry(key: str, expected: str, valid: Callable[[Any], bool], absent: Any = None) -> Any:
        value = entries.get(key)
        value = absent if value is None else value
        if value is None or not valid(value):
            found = "found none" if value is None else f"got {short_repr(value)}"
            raise ConfigError(f"{str(path)!r}: {key}: expected {expected}, {found}")
        return value

    for key in _MODULES:
        entry(key, "a string or a list of strings", _is_strings, ())
    entry("rank_pattern", "counts by the patterns of modules", _is_table(is_count), {})
    alphas = entry(
        "alpha_pattern", "numbers > 0 by the patterns of modules", _is_table(_is_alpha), {}
    )
    try:
        patterns = Patterns(list(alphas))
    except Refused as error:
        raise ConfigError(f"{str(path)!r}: alpha_pattern: {error}") from error
    return Config(
        path=path,
        rank=entry("r", "an integer >= 1", is_count),
        alpha=float(entry("lora_alpha", "a finite number > 0", _is_alpha)),
        dropout=float(entry("lora_dropout", "a number >= 0 and < 1", _is_ratio, 0.0)),
        rslora=entry("use_rslora", "true or false", lambda v: isinstance(v, bool), False),
        alphas={pattern: float(value) for pattern, value in alphas.items()},
        patterns=patterns,
    )


def _is_alpha(value: Any) -> bool:
    return is_number(value) and 0 < value < _LARGEST


def _is_ratio(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _is_strings(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
    )


def _is_table(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(valid, value.values()))


class PeftFolder:
    """A folder of PEFT: its configuration, and the names of A and B of every module.

    Raises:
        ConfigError: a file is missing or damaged, or has tensors that are neither A nor B.
    """

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self._path = folder / TENSORS
        self._keys: dict[str, dict[str, str]] = {}
        with self._open() as file:
            names = file.names
        for name in names:
            match = _KEY.fullmatch(name)
            if match is None:
                raise ConfigError(
                    f"{str(self._path)!r} has the tensor {name!r}, which is neither A nor B of a linear "
                    "layer or convolution; merge the adapter with PEFT (merge_and_unload) and export "
                    "that model"
                )
            self._keys.setdefault(match[1], {})[match[2]] = name
        half = [module for module, pair in self._keys.items() if len(pair) < 2]
        if half or not self._keys:
            what = f"only {next(iter(self._keys[half[0]].values()))!r}" if half else "no tensor"
            raise ConfigError(f"{str(self._path)!r} has {what}; A and B are needed")

    @property
    def modules(self) -> tuple[str, ...]:
        """PEFT's names of the modules that have an adapter."""
        return tuple(self._keys)

    def _open(self) -> ArrayFile:
        try:
            return ArrayFile(self._path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def match_modules(self, products: Sequence[Product], where: str) -> list[Product]:
        """The products of an adapter's modules, whose paths may differ by a prefix.

        Raises:
            ModelError: the adapter belongs to another base model.
        """
        by_module = {p.module: p for p in products}
        out: dict[str, str] = {}
        for name in self._keys:
            module = _same_module(name, list(by_module))
            if module is None or module in out:
                raise ModelError(
                    f"{where}: the adapter in {str(self._path.parent)!r} belongs to a different base "
                    f"model: its module {name!r} matches no product of this model; "
                    f"{suggest(name, by_module)}"
                )
            out[module] = name
        return [p for p in products if p.module in out]

    def read_pair(self, product: Product) -> tuple[Array, Array]:
        """A [inputs, rank] and B [rank, outputs] of a product; B has the factor of an ``alpha_pattern``.

        Raises:
            ModelError: the shapes are not those of the model.
            ConfigError: the file has changed and cannot be read, or has values that are not finite.
        """
        module = _same_module(product.module, list(self._keys)) or product.module
        keys = self._keys[module]
        with self._open() as file:
            down, up = (self._matrix(file, keys[letter]) for letter in "AB")
        shapes = [list(down.shape), list(up.shape)]
        rank = down.shape[1]
        if not rank or shapes != [[product.inputs, rank], [rank, product.outputs]]:
            raise ModelError(
                f"the adapter in {str(self._path.parent)!r} belongs to a different base model: the module "
                f"{module!r} has A {list(down.shape[::-1])} and B {list(up.shape[::-1])} there, expected "
                f"[rank, {product.inputs}] and [{product.outputs}, rank]"
            )
        own = self.config.alpha_of(module)
        return down, up if own == self.config.alpha else up * (own / self.config.alpha)

    def _matrix(self, file: ArrayFile, key: str) -> Array:
        """A stored tensor [to, from], or a convolution's [to, from, 1, …], as [from, to]."""
        try:
            stored = file.array(key)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        if stored.dtype.kind != "f":
            raise ModelError(f"{str(self._path)!r}: the tensor {key!r} has the type {stored.dtype}")
        if stored.ndim < 2 or any(d != 1 for d in stored.shape[2:]):
            raise ModelError(
                f"{str(self._path)!r}: the tensor {key!r} of shape {list(stored.shape)} is not a matrix"
            )
        with np.errstate(over="ignore"):
            matrix = stored.astype(np.float32)
        if (odd := int((~np.isfinite(matrix)).sum())) > 0:
            raise ConfigError(
                f"{str(self._path)!r}: the tensor {key!r} has {odd} of {matrix.size} values that are not "
                "finite in float32: the training that wrote it diverged, or the file is damaged"
            )
        return np.asarray(matrix.reshape(stored.shape[:2]).T)


def _same_module(module: str, names: Sequence[str]) -> str | None:
    """The name of a module among ``names``: the same, or one with more or fewer parts before it."""
    if module in names:
        return module
    ends = [n for n in names if module.endswith(f".{n}") or n.endswith(f".{module}")]
    return max(ends, key=len) if ends else None


def _written_name(module: str, lora: Lora) -> str:
    """PEFT's name of a module: that of the folder the adapter came from, or its path without a prefix."""
    if not lora.prefix and (known := _same_module(module, lora.modules)) is not None:
        return known
    if not module.startswith(lora.prefix):
        raise ConfigError(f"prefix: {lora.prefix!r} is not a prefix of the module path {module!r}")
    return module[len(lora.prefix) :]


def write_peft(folder: Path, lora: Lora, tensors: Mapping[Product, Mapping[str, Array]]) -> None:
    """Write an adapter as ``PeftModel.save_pretrained`` does.

    Raises:
        ConfigError: the prefix of modules does not fit.
        OutputError: the folder cannot be written to.
    """
    out: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    for product, pair in tensors.items():
        module = _written_name(product.module, lora)
        for letter in "AB":
            matrix = np.asarray(pair[f"lora_{letter}"], np.float32).T
            shape = (*matrix.shape, *[1] * product.axes)
            out[f"{_ROOT}{module}.lora_{letter}.weight"] = matrix.reshape(shape)
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
    make_folder(folder)
    write_bytes(folder / TENSORS, lambda file: dump_arrays(file, out, {"format": "pt"}))
    write_bytes(folder / CONFIG, json.dumps(config, indent=2).encode())
