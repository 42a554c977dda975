"""The protocols of what changes a model before it is trained: adapters and edits."""

from __future__ import annotations

import abc
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from ortflex_core.kernel.component import Component, setting
from ortflex_core.kernel.errors import ModelError, Unsupported, suggest
from ortflex_core.kernel.types import Array

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor
    from ortflex_core.compiler.model.editor import Editor


@attrs.frozen(kw_only=True)
class Product:
    """A product of data and a constant matrix in a model: y = x·M, optionally with a bias.

    It is a MatMul, a Gemm, or a convolution with kernels of one element. M is [inputs, outputs],
    whatever the layout of the file; x is [..., inputs] or, before a convolution, [N, inputs, ...].
    """

    module: str
    """The path of the module in the network, with dots: ``layers.0.q_proj``."""
    operator: str
    """The operator of the node."""
    inputs: int
    outputs: int
    node: str = ""
    """The name of the node."""
    weight: str = ""
    """The initializer that contains M, or from which M is computed; "" if no initializer does."""
    axes: int = 0
    """The number of position axes after the channel axis of a convolution."""

    def times(self, op: Ops, x: Tensor, matrix: Tensor) -> Tensor:
        """The product of data in the layout of this node and another matrix, [from, to]."""
        if not self.axes:
            return op.MatMul(x, matrix)
        kernels = op.Transpose(matrix, perm=[1, 0])
        kernels = op.Unsqueeze(kernels, axes=list(range(2, 2 + self.axes)))
        return op.Conv(x, kernels)

    def matches(self, pattern: str) -> bool:
        """Whether a target matches this product: see :func:`match_products`."""
        slashed = f"/{self.module.replace('.', '/')}/"
        names = [n for n in (self.node, self.module, slashed, self.weight) if n]
        ends = f".{self.module}".endswith(f".{pattern}")
        return ends or any(fnmatch.fnmatchcase(name, pattern) for name in names)


def match_products(
    products: Sequence[Product], patterns: Sequence[str], where: str = "targets"
) -> list[Product]:
    """The products that match the targets, in the order of the graph.

    A target is a glob over the name of the node (``/model/layers.0/q_proj/MatMul``), over the path
    of the module with slashes (``/model/layers/0/q_proj/``) or dots, or over the name of the
    weight; or it is the end of a module's path (``q_proj``). ``!target`` excludes products; a list
    with exclusions only starts from all products; no target means all products.

    Raises:
        ModelError: a target matches no product, or no product is left.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    wanted = [p for p in patterns if not p.startswith("!")]
    unwanted = [p[1:] for p in patterns if p.startswith("!")]
    for pattern in (*wanted, *unwanted):
        if not any(p.matches(pattern) for p in products):
            last = [p.module.rpartition(".")[2] for p in products]
            named = [n for p in products for n in (p.module, p.node, p.weight) if n]
            known = last if len(pattern) < min(map(len, named)) else [*last, *named]
            raise ModelError(
                f"{where}: {pattern!r} matches no product of the model; {suggest(pattern, known)}"
            )
    matching = [p for p in products if not wanted or any(p.matches(w) for w in wanted)]
    matching = [p for p in matching if not any(p.matches(u) for u in unwanted)]
    if not matching:
        raise ModelError(f"{where}: {list(patterns)!r} leaves no product of the model")
    return matching


@attrs.frozen(kw_only=True)
class Adapter(Component, abc.ABC):
    """An adapter adds small tensors to a matrix product ``y = x·M`` and trains them instead of M.

    ``initial`` returns the initial values of the tensors by name, ``apply`` is the formula of the new y,
    and ``merge`` returns the matrix that gives the same y without an adapter. Adapters whose tensors can be
    inputs at run time define ``portable`` and ``empty``; ``formats`` lists the file formats.
    """

    formats: ClassVar[Mapping[str, str]] = {}
    """File formats that ``write`` supports, by the ending of the path ("" for a folder)."""

    targets: tuple[str, ...] = setting(
        default=(),
        help="globs that select matrix products by module path, node name or weight name; a leading ``!`` "
        "excludes products; by default, all products are selected",
    )
    label: str = setting(default="", help="a name that distinguishes this adapter from others")
    frozen: bool = setting(default=False, help="whether the adapter is applied but not trained")

    @property
    def is_read(self) -> bool:
        """Whether the initial values come from a file, which also says which products have them."""
        return False

    def select(self, products: Sequence[Product], where: str) -> Sequence[Product]:
        """The products that get the adapter.

        Raises:
            ModelError: a target matches no product.
        """
        return match_products(products, self.targets, f"{where}.targets")

    @abc.abstractmethod
    def initial(self, product: Product, generator: np.random.Generator) -> Mapping[str, Array]:
        """The initial values of the tensors of one product, by name; they leave y unchanged."""

    @abc.abstractmethod
    def apply(
        self, op: Ops, x: Tensor, y: Tensor, tensors: Mapping[str, Tensor], product: Product
    ) -> Tensor:
        """The new y; ``product.times(op, x, matrix)`` multiplies in the layout of the node."""

    @abc.abstractmethod
    def merge(self, matrix: Array, tensors: Mapping[str, Array], product: Product) -> Array:
        """M [inputs, outputs] with the adapter merged into it, in float64."""

    def warnings(self, product: Product) -> Iterator[str]:
        """Warnings for the user about the adapter of a product."""
        yield from ()

    def portable(self) -> Adapter:
        """The adapter whose ``apply`` is the formula of a base with adapter tensors as inputs.

        Raises:
            Unsupported: adapters of this kind cannot be inputs at run time.
        """
        raise Unsupported(f"the adapter {self.name!r} cannot be an input of a model at run time")

    def at_run_time(self, tensors: Mapping[str, Array], product: Product) -> Mapping[str, Array]:
        """The tensors in the form that the base of :meth:`portable` reads."""
        raise Unsupported(f"the adapter {self.name!r} cannot be an input of a model at run time")

    def empty(self, product: Product) -> Mapping[str, Array]:
        """The tensors of :meth:`portable` that leave the base unchanged; sizes may be 0."""
        raise Unsupported(f"the adapter {self.name!r} cannot be an input of a model at run time")

    def write(self, path: Path, format: str, tensors: Mapping[Product, Mapping[str, Array]]) -> Any:
        """Write a file or folder in one of :attr:`formats`, atomically.

        Raises:
            OutputError: it cannot be written.
        """
        raise Unsupported(f"the adapter {self.name!r} has no files of the format {format!r}")


@attrs.frozen(kw_only=True)
class Edit(Component, abc.ABC):
    """An edit changes the graph of a model before training, for example its head or its vocabulary.

    The changed model is then trained, checked and exported like any other. An edit is applied once, when
    the Trainer is created; a resumed run applies it again to the file in the checkpoint, so it
    has to be a function of the model, its fields and :meth:`Editor.generator
    <ortflex_core.Editor.generator>`.
    """

    needs: ClassVar[str] = ""
    """What a model needs for this edit, in a few words, for the reference."""

    @abc.abstractmethod
    def apply(self, editor: Editor) -> None:
        """Change the model that the editor has.

        Raises:
            ConfigError, ModelError: the edit does not fit the model; says what does.
        """
