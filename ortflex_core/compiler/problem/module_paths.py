"""The paths of modules to which initializers belong, for files whose exporter gave these other names.

torch's older exporter calls a folded weight ``onnx::Conv_193``, but its node is
``/layer4/layer4.0/conv1/Conv``; the newer one stores the scopes of modules in the metadata of nodes. So
patterns such as ``layer4*`` select the same weights in every file.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from onnx import NodeProto

from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.products import path_of

Paths = Mapping[str, tuple[str, ...]]
"""The paths of an initializer, by its name."""
_COPIES = frozenset({"Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose", "Unsqueeze"})
_NORMALIZATIONS = [f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer")]
_ROLES: Mapping[str, Mapping[int, str]] = {
    operator: {1: "weight", 2: "bias"}
    for operator in ("Conv", "ConvTranspose", "Gemm", *_NORMALIZATIONS)
} | {
    "MatMul": {0: "weight", 1: "weight"},
    "Gather": {0: "weight"},
    "Add": {0: "bias", 1: "bias"},
    "Mul": {0: "weight", 1: "weight"},
    "PRelu": {1: "weight"},
}


def module_paths(model: Model) -> Paths:
    """Paths such as ``module.weight`` for the initializers whose own names do not have the module."""
    origins = {name: name for name in model.initializers}
    out: dict[str, dict[str, None]] = {}
    for node in model.internal.graph.node:
        if node.op_type in _COPIES and node.input and node.input[0] in origins:
            origins[node.output[0]] = origins[node.input[0]]
            continue
        module = path_of(node)
        if not module:
            continue
        for name in dict.fromkeys(n for n in reads(node) if n in origins):
            source = origins[name]
            if module not in source:
                out.setdefault(source, {}).setdefault(_path(node, name, module))
    return {name: tuple(paths) for name, paths in out.items()}


def _path(node: NodeProto, name: str, module: str) -> str:
    places = [k for k, given in enumerate(node.input) if given == name]
    role = _ROLES.get(node.op_type, {}).get(places[0] if places else -1, "")
    return f"{module}.{role}" if role else module


def match(pattern: str, names: Sequence[str], paths: Paths) -> list[str]:
    """The names that match a glob by themselves or by one of their paths.

    A pattern without a star also matches a module and everything in it.

    >>> match("layer4", ["layer4.0.weight", "onnx::Conv_1", "b"], {"onnx::Conv_1": ("layer4.1.weight",)})
    ['layer4.0.weight', 'onnx::Conv_1']
    """
    regular = re.compile(fnmatch.translate(pattern))

    def fits(name: str) -> bool:
        return bool(regular.match(name)) or name.startswith(f"{pattern}.")

    return [n for n in names if fits(n) or any(map(fits, paths.get(n, ())))]


def known(names: Iterable[str], paths: Paths) -> list[str]:
    """The names and paths that a pattern may match, for suggestions."""
    return [text for name in names for text in (name, *paths.get(name, ()))]
