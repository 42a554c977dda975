"""Low-rank adapters."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    Adapter,
    Array,
    ConfigError,
    Ops,
    Product,
    Tensor,
    expected_count,
    is_count,
    match_products,
    number,
    setting,
)
from ortflex_plugins.adapters._peft import PeftFolder, write_peft


def _rank(instance: Lora, attribute: attrs.Attribute[int], value: int) -> None:
    if not is_count(value):
        raise ValueError(expected_count(value))


@attrs.frozen(kw_only=True)
class Lora(Adapter):
    """Adds a low-rank term to a matrix product: ``y = x·M + (alpha/rank)·drop(x)·A·B``.

    A has the shape [inputs, rank], and its initial values are drawn uniformly from the interval
    [−1/√inputs, 1/√inputs], as in Kaiming initialization with a = √5. B has the shape [rank, outputs]
    and is initially 0, so the adapter does not change the model until the first update. ``drop`` is
    dropout. With ``rslora``, the scale alpha/rank is replaced with alpha/√rank.

    Raises:
        ValueError: ``rank`` is not an integer above 0, ``dropout`` is not in [0, 1), ``alpha`` is 0.

    >>> Lora(rank=4, alpha=8, targets=("*/q_proj/*",)).scale
    2.0

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021);
    Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (2023).
    """

    name: ClassVar[str] = "lora"
    formats: ClassVar[Mapping[str, str]] = {"": "peft"}

    rank: int = setting(
        default=8, validator=_rank, help="the rank: the number of columns of A and of rows of B"
    )
    alpha: float = setting(
        default=16.0, validator=number(gt=0), help="the numerator of the scale alpha/rank"
    )
    dropout: float = setting(
        default=0.0, validator=number(ge=0, lt=1), help="the probability of dropout before A"
    )
    rslora: bool = setting(default=False, help="whether alpha is divided by √rank instead of rank")

    source: str = setting(
        default="", help="the folder of a Hugging Face PEFT adapter with the initial values"
    )
    prefix: str = setting(
        default="",
        help="the start of the module paths that is missing from PEFT's names, such as `model.`",
    )
    modules: tuple[str, ...] = setting(
        converter=tuple,
        help="PEFT's names for the modules in `source`, which are also used in exports",
    )

    @modules.default
    def _names_in_source(self) -> tuple[str, ...]:
        # A run may be resumed without the folder; what reads its values has the errors.
        with contextlib.suppress(ConfigError, OSError):
            return PeftFolder(Path(self.source)).modules if self.source else ()
        return ()

    @classmethod
    def from_peft(cls, folder: str | os.PathLike[str], **changes: Any) -> Lora:
        """The adapter that PEFT saved, with its values.

        Args:
            folder: what ``PeftModel.save_pretrained`` wrote.
            changes: other fields, such as ``frozen=True`` or ``label="style"``.

        Raises:
            ConfigError: the folder is no adapter of PEFT, it is damaged, or the adapter is more than A·B.
        """
        config = PeftFolder(Path(folder)).config
        return cls(**{**config.fields(), "source": str(folder), **changes})

    @cached_property
    def _folder(self) -> PeftFolder:
        """The folder with the initial values."""
        return PeftFolder(Path(self.source))

    @property
    def scale(self) -> float:
        """The factor of the branch."""
        return self.scale_of(self.rank)

    def scale_of(self, rank: int) -> float:
        """The factor of a branch of another rank, which a file may have for some modules."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def is_read(self) -> bool:
        """Whether ``source`` has the initial values."""
        return bool(self.source)

    def select(self, products: Sequence[Product], where: str) -> Sequence[Product]:
        """The products that match the targets; with ``source``, those of the modules in the folder.

        Raises:
            ModelError: a target or a module of the folder matches no product.
            ConfigError: the folder was written with another rank or factor.
        """
        if not self.source:
            return super().select(products, where)
        self._folder.config.check(self, where)
        chosen = self._folder.match_modules(products, where)
        if not self.targets:
            return chosen
        return match_products(chosen, self.targets, f"{where}.targets")

    def initial(self, product: Product, generator: np.random.Generator) -> Mapping[str, Array]:
        """A uniform in ±1/√inputs, B = 0."""
        if self.source:
            down, up = self._folder.read_pair(product)
            return {"lora_A": down, "lora_B": up}
        bound = 1 / math.sqrt(product.inputs)
        down = generator.uniform(-bound, bound, (product.inputs, self.rank))
        return {"lora_A": down, "lora_B": np.zeros((self.rank, product.outputs))}

    def apply(
        self, op: Ops, x: Tensor, y: Tensor, tensors: Mapping[str, Tensor], product: Product
    ) -> Tensor:
        """``y + s · drop(x)·A·B``."""
        if self.dropout:
            x = op.Dropout(x, self.dropout, True)
        down = tensors["lora_A"]
        rank = down.shape[1] if down.shape else None
        # The rank of a base that takes adapters is unknown, and the factor is in B.
        scale = self.scale_of(rank) if isinstance(rank, int) else self.scale
        thin = product.times(op, x, down)
        if scale != 1:
            thin = thin * scale
        return y + product.times(op, thin, tensors["lora_B"])

    def merge(self, matrix: Array, tensors: Mapping[str, Array], product: Product) -> Array:
        """``M + s · A·B``."""
        down, up = tensors["lora_A"], tensors["lora_B"]
        return np.asarray(matrix + self.scale_of(down.shape[1]) * (down @ up))

    def portable(self) -> Lora:
        """Without dropout, and with a factor of 1: the factor is in B."""
        return attrs.evolve(self, dropout=0.0, alpha=float(self.rank), rslora=False)

    def at_run_time(self, tensors: Mapping[str, Array], product: Product) -> Mapping[str, Array]:
        """A, and B times the factor of the branch."""
        return {
            "lora_A": tensors["lora_A"],
            "lora_B": tensors["lora_B"] * self.scale_of(tensors["lora_A"].shape[1]),
        }

    def empty(self, product: Product) -> Mapping[str, Array]:
        """A [inputs, 0] and B [0, outputs]."""
        return {"lora_A": np.zeros((product.inputs, 0)), "lora_B": np.zeros((0, product.outputs))}

    def write(
        self, path: Path, format: str, tensors: Mapping[Product, Mapping[str, Array]]
    ) -> None:
        """Write the folder that PEFT reads: adapter_model.safetensors and adapter_config.json.

        Modules have the names of the folder that the adapter came from, or else their paths without
        ``prefix``.

        Raises:
            ConfigError: the path of a module does not begin with ``prefix``.
            OutputError: the folder cannot be written.
        """
        write_peft(path, self, tensors)

    def warnings(self, product: Product) -> Iterator[str]:
        """A warning about a rank that is larger than the matrix."""
        most = min(product.inputs, product.outputs)
        if self.rank > most:
            yield (
                f"rank {self.rank} is larger than the matrix of {product.module!r} "
                f"[{product.inputs}, {product.outputs}]: rank {most} can express every change of it"
            )
