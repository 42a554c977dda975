"""The products of a model that adapters may be attached to, and the weights that contain their matrices."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs
import numpy as np
from onnx import NodeProto, TensorProto

from ortflex_core.compiler.graph.nodes import plain_domain, reads
from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.graph.protos import settings
from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.model_protocols import Product
from ortflex_core.kernel.types import Array, TensorSpec

_COMPUTED = FLOATS - {TensorProto.BFLOAT16}
"""The element types of products that may have adapters."""
_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")
_INNER = re.compile(r"(.*)/\d+~[^/]*")
"""The names of nodes of a decomposition: the name of the file's node, a number, an operator."""
_WEIGHT = re.compile(r"\.(weight|kernel|W)(_orig)?(_quantized|_scale)?$")

_NO_SPEC = TensorSpec("", TensorProto.FLOAT, None)


@attrs.frozen
class Place:
    """A product, its node in the internal graph, and how its matrix comes from an initializer."""

    product: Product
    node: NodeProto
    dtype: int
    transposed: bool = False
    """Whether the initializer is [outputs, inputs], as the kernels of a convolution are."""
    factor: float = 1.0
    """The factor by which the node multiplies the product."""
    stored: str = ""
    """The float initializer of the file that contains M; empty if M is computed or quantized."""
    why: str = ""
    """The reason why M is not a float initializer of the file."""
    codes: str = ""
    """The initializer of integers that contains M, if a DequantizeLinear reads it."""

    def matrix(self, stored: Array) -> Array:
        """M of the stored weight, in float64."""
        flat = stored.astype(np.float64).reshape(stored.shape[:2])
        return np.asarray((flat.T if self.transposed else flat) * self.factor)

    def stored_form(self, matrix: Array, like: Array) -> Array:
        """The stored weight of M, in its type and shape."""
        flat = matrix / self.factor
        flat = flat.T if self.transposed else flat
        return np.asarray(flat.reshape(like.shape)).astype(like.dtype)


def find_products(model: Model) -> list[Place]:
    """The products by constant matrices at the top level of a model, in the order of its graph.

    These are: a MatMul or a Gemm by a matrix that does not depend on an input of the model (it may
    be computed, for instance by DequantizeLinear), a MatMulNBits, and a convolution with one group
    and kernels of one element.
    """
    # The tensors that depend neither on inputs of the model nor on random numbers.
    constant = set(model.initializers)
    places: list[Place] = []
    for node in model.internal.graph.node:
        if constant.issuperset(reads(node)) and not node.op_type.startswith("Random"):
            constant.update(node.output)
        places += _place(model, node, constant)
    return _unambiguous(places)


def _place(model: Model, node: NodeProto, constant: set[str]) -> Iterator[Place]:
    domain, operator = plain_domain(node.domain), node.op_type
    if not node.input or node.input[0] in constant or not node.output:
        return
    dtype = model.value(node.output[0]).dtype or model.value(node.input[0]).dtype
    if dtype not in _COMPUTED:
        return
    given = settings(node)
    if (domain, operator) == ("com.microsoft", "MatMulNBits"):
        product = _product(node, given["K"], given["N"], node.input[1])
        yield Place(product, node, dtype, why=f"{operator} has a quantized weight")
        return
    if domain or operator not in ("MatMul", "Gemm", "Conv") or node.input[1] not in constant:
        return
    shape = model.value(node.input[1]).shape
    sizes = [d for d in shape or () if isinstance(d, int) and d > 0]
    if shape is None or len(sizes) < len(shape):
        return
    turned, factor, axes = False, 1.0, 0
    if operator == "Conv":
        if len(sizes) < 3 or set(sizes[2:]) != {1} or given.get("group", 1) != 1:
            return
        is_one_step = set(given.get("strides", ())) <= {1}
        allowed = (b"", b"NOTSET", b"VALID", *(b"SAME_UPPER", b"SAME_LOWER") * is_one_step)
        if any(given.get("pads", ())) or given.get("auto_pad", b"") not in allowed:
            return
        turned, axes = True, len(sizes) - 2
    elif len(sizes) != 2:
        return
    elif operator == "Gemm":
        turned, factor = bool(given.get("transB", 0)), float(given.get("alpha", 1.0))
        if not factor:
            return
    inputs, outputs = sizes[1::-1] if turned else sizes[:2]
    stored, swapped, why = _stored(model, node.input[1])
    codes = stored if why and model.initializers.get(stored, _NO_SPEC).dtype not in FLOATS else ""
    product = _product(node, inputs, outputs, stored or _first(model, node.input[1]), axes)
    own = "" if why else stored
    yield Place(product, node, dtype, turned != swapped, factor, own, why, codes)


def _stored(model: Model, name: str) -> tuple[str, bool, str]:
    """The float initializer of a matrix, whether it is transposed, and the reason without one."""
    swapped = False
    while (node := model.producers.get(name)) is not None:
        turns = [list(a.ints) for a in node.attribute if a.name == "perm"]
        if node.op_type == "Transpose" and turns in ([], [[1, 0]]):
            swapped = not swapped
        elif not keeps_values(model, node):
            is_quantized = node.op_type == "DequantizeLinear"
            kind = "quantized" if is_quantized else "computed in the graph"
            name = node.input[0] if is_quantized and node.input[0] in model.initializers else ""
            return name, swapped, f"its matrix is {kind} ({node.op_type})"
        name = node.input[0]
    if name not in {t.name for t in model.proto.graph.initializer}:
        return name, swapped, "its weight is not an initializer of the file's graph"
    if model.initializers[name].dtype not in FLOATS:
        return name, swapped, "its weight is not a float initializer"
    return name, swapped, ""


def keeps_values(model: Model, node: NodeProto) -> bool:
    """Whether a node is an Identity, or a Cast between types that the graphs compute as one."""
    if node.op_type == "Cast":
        return model.value(node.input[0]).dtype == model.value(node.output[0]).dtype
    return node.op_type == "Identity"


def _first(model: Model, name: str) -> str:
    """The first initializer that a matrix is computed from."""
    while (node := model.producers.get(name)) is not None:
        inputs = reads(node)
        if not inputs:
            return ""
        name = inputs[0]
    return name


def _product(node: NodeProto, inputs: int, outputs: int, weight: str, axes: int = 0) -> Product:
    inner = _INNER.fullmatch(node.name)
    name = node.name if inner is None else inner[1]
    sizes = {"inputs": int(inputs), "outputs": int(outputs), "axes": axes}
    module = module_of(node, weight, name)
    return Product(module=module, operator=node.op_type, node=name, weight=weight, **sizes)


def module_of(node: NodeProto, weight: str, name: str = "") -> str:
    """The path of a node's module: from its name, the exporter's metadata, or the weight's name.

    torch's exporters write ``/layers/layers.0/q_proj/MatMul``, or they store the scopes of the node in its
    metadata and keep the names of weights.
    """
    name = name or node.name
    parts = [p for p in name.split("/") if p]
    if len(parts) > 1:
        return ".".join(_joined(parts[:-1]))
    if "." in weight and _WEIGHT.search(weight):
        return _WEIGHT.sub("", weight)
    return _scope(node) or weight or name or node.output[0]


def path_of(node: NodeProto) -> str:
    """The path of a node's module in its name or the exporter's metadata; "" without one."""
    parts = [p for p in node.name.split("/") if p]
    return ".".join(_joined(parts[:-1])) if len(parts) > 1 else _scope(node)


def _scope(node: NodeProto) -> str:
    for entry in node.metadata_props:
        if entry.key == _SCOPES[0]:
            scopes = re.findall(r"'([^']*)'", entry.value)
            if len(scopes) > 1 and scopes[-2]:
                return str(scopes[-2])
    return ""


def _joined(parts: list[str]) -> list[str]:
    """The parts of a path; ``layers``, ``layers.0`` are one part, since the second contains the first."""
    out: list[str] = []
    for part in parts:
        if out and part.startswith(f"{out[-1]}.") and part[len(out[-1]) + 1 :].isdigit():
            out.pop()
        out.append(part)
    return out


def _unambiguous(places: list[Place]) -> list[Place]:
    """Places with unambiguous module names: products by different weights get different names."""
    names: dict[str, dict[str, str]] = {}
    for place in places:
        of_weights = names.setdefault(place.product.module, {})
        own = place.product.node.rpartition("/")[2]
        if own in ("", *of_weights.values()):
            own = f"{own}{len(of_weights)}"
        of_weights.setdefault(place.node.input[1], own)
    out = []
    for place in places:
        module, of_weights = place.product.module, names[place.product.module]
        if len(of_weights) > 1:
            module = f"{module}.{of_weights[place.node.input[1]]}"
        product = attrs.evolve(place.product, module=module)
        out.append(attrs.evolve(place, product=product))
    return out
