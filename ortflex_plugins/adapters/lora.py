"""Low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core.component import expected_count, is_count, number
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Adapter, Product
from ortflex_core.types import Array


def _rank(instance: Lora, attribute: attrs.Attribute[int], value: int) -> None:
    if not is_count(value):
        raise ValueError(f"{attribute.name}: {expected_count(value)}")


@attrs.frozen(kw_only=True)
class Lora(Adapter):
    """A product of two thin matrices next to a weight: ``y = x·M + s · drop(x)·A·B``, s = alpha / rank.

    A is [inputs, rank] and starts uniform in ±1/√inputs (Kaiming's with a = √5), B is [rank, outputs]
    and starts at 0, so that the model starts as what it was. With ``rslora`` s is alpha / √rank.

    Raises:
        ValueError: ``rank`` is no integer above 0, ``dropout`` is not in [0, 1), ``alpha`` is 0.

    >>> Lora(rank=4, alpha=8, targets=("*/q_proj/*",)).scale
    2.0

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021);
    Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (2023).
    """

    name: ClassVar[str] = "lora"

    rank: int = attrs.field(
        default=8, validator=_rank, metadata={"help": "the columns of A and the rows of B"}
    )
    alpha: float = attrs.field(
        default=16.0,
        validator=number(gt=0),
        metadata={"help": "times 1/rank the factor of the branch"},
    )
    dropout: float = attrs.field(
        default=0.0,
        validator=number(ge=0, lt=1),
        metadata={"help": "the ratio of the data of the branch that a step drops"},
    )
    rslora: bool = attrs.field(default=False, metadata={"help": "divide alpha by √rank"})

    @property
    def scale(self) -> float:
        """The factor of the branch."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def initial(self, product: Product, generator: np.random.Generator) -> Mapping[str, Array]:
        """A uniform in ±1/√inputs, B = 0."""
        bound = 1 / math.sqrt(product.inputs)
        down = generator.uniform(-bound, bound, (product.inputs, self.rank))
        return {"lora_A": down, "lora_B": np.zeros((self.rank, product.outputs))}

    def apply(
        self, op: Ops, x: Tensor, y: Tensor, tensors: Mapping[str, Tensor], product: Product
    ) -> Tensor:
        """``y + s · drop(x)·A·B``."""
        if self.dropout:
            x = op.Dropout(x, self.dropout, True)
        thin = product.times(op, x, tensors["lora_A"])
        if self.scale != 1:
            thin = thin * self.scale
        return y + product.times(op, thin, tensors["lora_B"])

    def merge(self, matrix: Array, tensors: Mapping[str, Array], product: Product) -> Array:
        """``M + s · A·B``."""
        return np.asarray(matrix + self.scale * (tensors["lora_A"] @ tensors["lora_B"]))

    def warnings(self, product: Product) -> Iterator[str]:
        """A rank that a matrix of this size cannot have."""
        most = min(product.inputs, product.outputs)
        if self.rank > most:
            yield (
                f"rank {self.rank} is larger than the matrix of {product.module!r} "
                f"[{product.inputs}, {product.outputs}]: rank {most} can express every change of it"
            )
