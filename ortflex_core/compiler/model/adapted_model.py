"""A model with adapters in its graph, which is trained like any other model.

The formulas of adapters are traced once and put into a copy of the internal graph: a product keeps
its node, whose output gets a new name, and the adapter computes the tensor of the old name. Losses,
rules and backends do not depend on adapters, and the user's file is not changed.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, numpy_helper

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph import shape_inference
from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.protos import copied, refill
from ortflex_core.compiler.model.adapter_branches import Attached, initializer_name, insert_branches
from ortflex_core.compiler.model.master_weights import Quantized, quantized_weights
from ortflex_core.compiler.model.model import Model, as_model
from ortflex_core.compiler.model.products import Place, find_products, keeps_values
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.errors import ModelError, Unsupported
from ortflex_core.kernel.model_protocols import Adapter, Product
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array, Arrays, TensorSpec, numpy_dtype

_log = logging.getLogger("ortflex")
_MOST_LOST = 0.5
"""The largest share of an adapter that rounding a quantized weight may take."""


def adapt(model: Model, adapters: Sequence[Adapter], seed: int) -> Model:
    """The model with these adapters instead of its current ones; without adapters, the model itself.

    The values in ``model.adapter_values`` replace the initial values once, because the files with the
    initial values may have been removed.

    Raises:
        ModelError, BrokenPlugin: as :class:`AdaptedModel`.
    """
    base = model.base if isinstance(model, AdaptedModel) else model
    stored, base.adapter_values = base.adapter_values, {}
    return AdaptedModel(base, adapters, seed, stored) if adapters else base


def with_values(
    source: Any, arguments: Mapping[str, Any], values: Arrays, plugins: Plugins | None = None
) -> Any:
    """The model of a resumed run, whose adapters do not need the files of their initial values.

    Args:
        source: the model's source, which is returned if a Trainer with these arguments has no
            adapters.
        arguments: the arguments of the Trainer.
        values: the values of the adapters' tensors, by the names of the tensors.
        plugins: as for a Model.
    """
    if not arguments.get("adapters") or isinstance(source, Model):
        return source
    model = as_model(source, bool(arguments.get("free_batch")), Plugins.given(plugins))
    model.adapter_values = values
    return model


def frozen_values(model: Model) -> dict[str, Array]:
    """The tensors of a model's adapters that are not trained, by their names."""
    return {n: model.initializer(n) for n, trained in model.attached.items() if not trained}


class AdaptedModel(Model):
    """A model whose products have adapters.

    Args:
        base: the model.
        adapters: the adapters, which are attached in this order.
        seed: the seed of their initial values.
        stored: values that replace the initial values, by the names of tensors.

    Raises:
        ModelError: targets that match no product, or two adapters with the same label at one
            module.
        BrokenPlugin: an adapter returns a value that its kind does not allow.
    """

    def __init__(
        self, base: Model, adapters: Sequence[Adapter], seed: int, stored: Arrays | None = None
    ) -> None:
        self.__dict__.update(base.__dict__)
        self.__dict__.pop("initializers", None)
        self.base = base
        self._initializers, self._arrays = dict(base._initializers), dict(base._arrays)
        self._taken = {*base.producers, *base._values, *base._initializers}
        self.places = find_products(base)
        codes = {place.codes for place in self.places} - {""}
        self._layouts = {n: w for n, w in quantized_weights(base).items() if n in codes}
        """How the quantized weights of products are stored, by name."""
        self.tied: dict[str, str] = {}
        """The modules without an adapter because their weights are read elsewhere, with the reason."""
        self.attachments: list[Attached] = []
        for k, adapter in enumerate(adapters):
            where = "adapters" if len(adapters) == 1 else f"adapters[{k}]"
            self._attach(adapter, where, seed, stored or {})
        own = {spec.name: a.adapter.frozen for a in self.attachments for spec in a.tensors.values()}
        self.attached = {name: not frozen for name, frozen in own.items()}
        self._build()
        self._warn()

    def _attach(self, adapter: Adapter, where: str, seed: int, stored: Arrays) -> None:
        modules: dict[str, list[Place]] = {}
        for place in self.places:
            modules.setdefault(place.product.module, []).append(place)
        if not modules:
            raise ModelError(
                f"{where}: {self.label} has no product by a constant matrix (MatMul, Gemm, 1×1 Conv) "
                "that an adapter could be attached to"
            )
        products = [places[0].product for places in modules.values()]
        earlier = {p: t for p in products if (t := self._stored(p, adapter.label, stored))}
        if earlier:
            chosen = list(earlier)
        else:
            with calling(adapter, "select"):
                chosen = list(adapter.select(products, where))
            chosen = self._without_tied(adapter, chosen, modules, where)
        for product in chosen:
            # The initial values of a module do not depend on the other modules.
            key = zlib.crc32(f"{adapter.label}/{product.module}".encode())
            generator = np.random.default_rng([seed, key])
            given = earlier.get(product) or calls.first_values(adapter, product, generator)
            dtype = modules[product.module][0].dtype
            tensors = {}
            for tensor, array in given.items():
                name = initializer_name(product, tensor, adapter.label)
                if name in self._taken:
                    raise ModelError(
                        f"{where}: {self.label} already has a tensor {name!r}; choose another "
                        "label for the adapter"
                    )
                self._taken.add(name)
                typed = np.asarray(array, numpy_dtype(dtype), order="C")
                self._initializers[name] = numpy_helper.from_array(typed, name)
                self._arrays[name] = typed
                tensors[tensor] = TensorSpec(name, dtype, typed.shape)
            self.attachments.append(
                Attached(
                    adapter=adapter,
                    product=product,
                    places=tuple(modules[product.module]),
                    tensors=tensors,
                )
            )
        for line in dict.fromkeys(line for p in chosen for line in adapter.warnings(p)):
            _log.warning("%s: %s", where, line)

    def _without_tied(
        self,
        adapter: Adapter,
        chosen: list[Product],
        modules: Mapping[str, list[Place]],
        where: str,
    ) -> list[Product]:
        """The products without those whose weight is read elsewhere, such as an embedding.

        Export could not merge an adapter into such a weight. Values that were read from a file say where
        they belong; only :meth:`_warn` speaks of them.

        Raises:
            ModelError: a target names such a product, or no other product is left.
        """
        found = {p: why for p in chosen if (why := self._read_elsewhere(modules[p.module]))}
        if not found or adapter.is_read:
            return chosen
        first, why = next(iter(found.items()))
        way = ", ".join(repr(f"!{p.module}") for p in found)
        if any(not target.startswith("!") for target in adapter.targets):
            raise ModelError(
                f"{where}.targets: the adapter of {first.module!r} could not be merged by export(): {why}. "
                f"Leave it out: targets=[{way}] adapts all other products; with targets of its own, "
                f"add {way} to them"
            )
        left = [p for p in chosen if p not in found]
        if not left:
            raise ModelError(f"{where}: {self.label} has no product to adapt: {why}")
        self.tied |= {p.module: why for p, why in found.items()}
        _log.info("%s: %r has no adapter, because %s", where, first.module, why)
        return left

    def _read_elsewhere(
        self, places: Sequence[Place], layouts: Mapping[str, Quantized] | None = None
    ) -> str:
        """The reason why the weight of a module is not its own; "" if it is.

        Args:
            places: the places of the module.
            layouts: the quantized weights that count, too.
        """
        own = {place.node.output[0] for place in places}
        for place in places:
            weight = place.codes if layouts and place.codes in layouts else place.stored
            if not weight:
                continue
            for node in self._readers(weight):
                if node.output[0] not in own:
                    return (
                        f"its weight {weight!r} is read by the {node.op_type} "
                        f"{node.name or node.output[0]!r}, too"
                    )
        return ""

    @property
    def stamp(self) -> str:
        """As of a Model, and the products without an adapter because their weights are read elsewhere."""
        notes = [f"no adapter at {module!r}: {why}" for module, why in self.tied.items()]
        return "; ".join(filter(None, (super().stamp, *notes)))

    def _stored(self, product: Product, label: str, stored: Arrays) -> dict[str, Array]:
        """The tensors of an adapter at a module among stored ones, by their names in the adapter."""
        names = {n: n.removeprefix(f"{product.module}.") for n in stored}
        ends = {n: own.removesuffix(f".{label}") if label else own for n, own in names.items()}
        return {
            own: stored[n]
            for n, own in ends.items()
            if n == initializer_name(product, own, label)
            and "." not in own
            and n not in self.base._initializers
        }

    def _build(self) -> None:
        base = self.base
        nodes = insert_branches(
            base.internal.graph.node, self.attachments, base.opsets, base.value, self._taken
        )
        self.internal = copied(base.internal)
        refill(self.internal.graph.node, nodes)
        added = [t for n, t in self._initializers.items() if n not in base._initializers]
        self.internal.graph.initializer.extend(added)
        values = shape_inference.one_batch(self._inferred(self.internal), self.internal.graph)
        self._values = {**values, **base._values}
        self.producers = {o: n for n in self.internal.graph.node for o in n.output if o}

    def _warn(self) -> None:
        shared = [why for why in self._obstacles().values() if "read" in why]
        if shared:
            _log.warning(
                "adapters: export() cannot merge: %s; export_adapter and export_base can be used",
                shared[0],
            )

    def values_of(self, attached: Attached, state: Arrays) -> dict[str, Array]:
        """The tensors of an adapter at a module, those that are trained from ``state``."""
        return {
            n: state[spec.name] if spec.name in state else self.initializer(spec.name)
            for n, spec in attached.tensors.items()
        }

    def run_time_values(
        self, state: Arrays, only: Sequence[Attached] | None = None
    ) -> dict[str, Array]:
        """The inputs of one adapter, for a base model with adapter inputs.

        Raises:
            Unsupported: adapters of this kind cannot be inputs at run time.
        """
        out = {}
        for attached in self.attachments if only is None else only:
            adapter, product = attached.adapter, attached.product
            with calling(adapter, "at_run_time"):
                given = adapter.at_run_time(self.values_of(attached, state), product)
            for tensor, array in given.items():
                dtype = numpy_dtype(attached.places[0].dtype)
                out[initializer_name(product, tensor, "")] = np.asarray(array, dtype, order="C")
        return out

    def merged(self, state: Arrays) -> dict[str, Array]:
        """The weights of the file with the adapters merged into them; a quantized one is rounded again.

        Raises:
            Unsupported: a weight with an adapter is computed, or read elsewhere, too; or it is quantized,
                and its codes cannot hold the sum.
        """
        obstacles = self._obstacles()
        if obstacles:
            module, why = next(iter(obstacles.items()))
            others = f", and {len(obstacles) - 1} more" if len(obstacles) > 1 else ""
            raise self._not_merged(module, why + others)
        out: dict[str, Array] = {}
        for attached in self.attachments:
            place = attached.places[0]
            name = place.stored or place.codes
            stored = out.get(name, state.get(name))
            stored = self._values_of(name) if stored is None else stored
            tensors = {n: a.astype(np.float64) for n, a in self.values_of(attached, state).items()}
            matrix = calls.merged(attached.adapter, place.matrix(stored), tensors, attached.product)
            # A weight with several adapters stays in float64 until it is stored.
            wide = stored.astype(np.float64)
            out[name] = place.stored_form(matrix, wide)
        modules = {a.places[0].codes: a.product.module for a in self.attachments}
        return {
            n: self._rounded(n, a, modules[n])
            if n in self._layouts
            else a.astype(self.initializer(n).dtype)
            for n, a in out.items()
        }

    def _not_merged(self, module: str, why: str) -> Unsupported:
        return Unsupported(
            f"{self.label}: the adapter of {module!r} cannot be merged: {why}. Write the "
            "adapter with export_adapter(path), and the model that takes it with export_base(path); "
            "or train the adapter on the float model"
        )

    def _values_of(self, name: str) -> Array:
        """A weight, or the float values of a quantized one."""
        layout = self._layouts.get(name)
        if layout is None:
            return self.initializer(name)
        return layout.weight(self.initializer(name), *self._scale_and_zero(layout))

    def _scale_and_zero(self, layout: Quantized) -> tuple[Array, Array | None]:
        zero = self.initializer(layout.zero) if layout.zero else None
        return self.initializer(layout.scale), zero

    def _rounded(self, name: str, values: Array, module: str) -> Array:
        """The codes of a quantized weight with its adapters.

        Raises:
            Unsupported: rounding takes more than a half of what the adapters add, by the norm.
        """
        layout = self._layouts[name]
        pair = self._scale_and_zero(layout)
        codes = layout.codes(values, *pair)
        lost = float(np.linalg.norm(layout.weight(codes, *pair) - values))
        added = float(np.linalg.norm(values - self._values_of(name)))
        share = lost / added if added else 0.0
        if share > _MOST_LOST:
            raise self._not_merged(
                module,
                f"its matrix is quantized, and rounding the sum to the codes of {name!r} changes it by "
                f"{share:.0%} of what the adapter adds, of which {_MOST_LOST:.0%} are allowed",
            )
        _log.warning(
            "adapters: export() rounds %r with its adapter, which changes it by %.2g of what the adapter "
            "adds; export_adapter and export_base keep it as it is",
            name,
            share,
        )
        return codes

    def _obstacles(self) -> dict[str, str]:
        """Why adapters cannot be merged into the file, by module."""
        out = {}
        for attached in self.attachments:
            whys = (p.why for p in attached.places if p.why and p.codes not in self._layouts)
            own = next(whys, "")
            if why := own or self._read_elsewhere(attached.places, self._layouts):
                out[attached.product.module] = why
        return out

    def _readers(self, weight: str) -> Iterable[NodeProto]:
        """The nodes that compute with a weight, or with a transposed copy of it."""
        copies = {weight}
        for node in self.base.internal.graph.node:
            if copies.isdisjoint(reads(node)):
                continue
            if node.op_type in ("Transpose", "DequantizeLinear") or keeps_values(self.base, node):
                copies.update(node.output)
            else:
                yield node

    @property
    def as_read(self) -> Model:
        """The model of the file: without adapters and edits."""
        return self.base.as_read

    def file_values(self, state: Arrays) -> Arrays:
        """The weights of the file, with the adapters merged into them.

        Raises:
            Unsupported: as :meth:`merged`.
        """
        weights = {n: a for n, a in state.items() if n not in self.attached}
        return weights | self.merged(state)
