"""Adapters after training: their files, and a model that reads adapters as inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto, helper, numpy_helper

from ortflex_core.compiler.graph.protos import opsets_of, refill
from ortflex_core.compiler.model.adapted_model import AdaptedModel
from ortflex_core.compiler.model.adapter_branches import Attached, initializer_name, insert_branches
from ortflex_core.compiler.model.model import OLDEST_OPSET, Model
from ortflex_core.compiler.model.products import Place
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.errors import ConfigError, OrtflexError, Unsupported, suggest
from ortflex_core.kernel.files import OutputError, staging
from ortflex_core.kernel.model_protocols import Adapter
from ortflex_core.kernel.types import Array, Arrays, TensorSpec, numpy_dtype

ENDING = ".onnx_adapter"
"""The ending of the files of adapters that onnxruntime reads."""


def _adapted(model: Model, what: str) -> AdaptedModel:
    if not isinstance(model, AdaptedModel):
        raise OrtflexError(f"{what}: the Trainer has no adapters; create it with adapters=…")
    return model


def write_adapter(
    model: Model, state: Arrays, path: Path, format: str | None = None, label: str | None = None
) -> None:
    """Write one adapter of a model to a file, by default in the format of the path's ending.

    Raises:
        OrtflexError: the model has no adapters.
        ConfigError: an unknown label or format.
        Unsupported: the installed onnxruntime has no files of adapters.
        OutputError: the file cannot be written; an existing file is not changed.
    """
    adapted = _adapted(model, "export_adapter")
    adapter = _chosen(adapted, label)
    own = [a for a in adapted.attachments if a.adapter is adapter]
    formats = {ENDING: ENDING[1:], **adapter.formats}
    ending = path.suffix
    known = sorted({*formats.values()})
    if format is None and ending not in formats:
        endings = ", ".join(f"{e or 'a folder'} ({f})" for e, f in formats.items())
        raise ConfigError(
            f"export_adapter: the ending {ending!r} is unknown; known: {endings}; or pass format="
        )
    format = formats[ending] if format is None else format
    if format not in known:
        raise ConfigError(f"export_adapter: unknown format {format!r}; {suggest(format, known)}")
    if format == ENDING[1:]:
        _write_onnx_adapter(path, adapted.run_time_values(state, own))
        return
    tensors = {a.product: adapted.values_of(a, state) for a in own}
    with calling(adapter, "write"):
        adapter.write(path, format, tensors)


def _chosen(model: AdaptedModel, label: str | None) -> Adapter:
    adapters = {a.adapter.label: a.adapter for a in model.attachments}
    if label is not None:
        if label not in adapters:
            raise ConfigError(f"label: no adapter is called {label!r}; {suggest(label, adapters)}")
        return adapters[label]
    trained = [a for a in adapters.values() if not a.frozen] or list(adapters.values())
    if len(trained) > 1:
        names = ", ".join(repr(a.label) for a in trained)
        raise ConfigError(
            f"export_adapter: the model has the adapters {names}; choose one: label=…"
        )
    return trained[0]


def _write_onnx_adapter(path: Path, tensors: Arrays) -> None:
    import onnxruntime

    if not hasattr(onnxruntime, "AdapterFormat"):
        raise Unsupported(
            f"onnxruntime {onnxruntime.__version__} does not support adapter files; install 1.20 or newer"
        )
    file: Any = onnxruntime.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters(
        {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in tensors.items()}
    )
    try:
        with staging(path) as folder:
            file.export_adapter(str(folder / "content"))
            os.replace(folder / "content", path)
    except (OSError, ValueError, RuntimeError) as error:
        cause = error if isinstance(error, OSError | ValueError) else OSError(str(error))
        raise OutputError.of(f"write {str(path)!r}", cause, "Nothing was changed.") from error


def write_base(
    model: Model, state: Arrays, path: str | os.PathLike[str] | None = None
) -> ModelProto:
    """The user's file with the tensors of adapters as optional inputs.

    Without these inputs it computes the same as the base. Other trained weights have their trained values.

    Raises:
        OrtflexError: the model has no adapters.
        Unsupported: the adapters cannot be inputs at run time, or a product is inside a function.
        OutputError: the file cannot be written; an existing file is not changed.
    """
    adapted = _adapted(model, "export_base")
    weights = {n: a for n, a in state.items() if n not in adapted.attached}
    slots = _slots(adapted)
    return adapted.base.export(weights, path, edit=lambda proto, _: _take(adapted, proto, slots))


def _slots(model: AdaptedModel) -> dict[str, tuple[Attached, dict[str, Array]]]:
    """The inputs of each module and kind of adapter, by the name of the first input."""
    out: dict[str, tuple[Attached, dict[str, Array]]] = {}
    for attached in model.attachments:
        product, dtype = attached.product, attached.places[0].dtype
        with calling(attached.adapter, "portable"):
            adapter = attached.adapter.portable()
            empty = adapter.empty(product)
        names = {n: initializer_name(product, n, "") for n in empty}
        tensors = {}
        for tensor, array in empty.items():
            shape = tuple(d or f"{product.module}.rank" for d in array.shape)
            tensors[tensor] = TensorSpec(names[tensor], dtype, shape)
        arrays = {names[n]: np.asarray(a, numpy_dtype(dtype)) for n, a in empty.items()}
        slot = attrs.evolve(attached, adapter=adapter, tensors=tensors)
        out.setdefault(next(iter(names.values())), (slot, arrays))
    return out


def _take(
    model: AdaptedModel, proto: ModelProto, slots: Mapping[str, tuple[Attached, dict[str, Array]]]
) -> None:
    """Insert the branches and their inputs into a copy of the user's file."""
    opsets = opsets_of(proto)
    if opsets[""] < OLDEST_OPSET:
        raise Unsupported(
            f"{model.label} has opset {opsets['']}; a base that takes adapters needs {OLDEST_OPSET} or "
            "later: convert it with onnx.version_converter"
        )
    graph = proto.graph
    attachments = [
        attrs.evolve(attached, places=tuple(_in_file(model, proto, p) for p in attached.places))
        for attached, _ in slots.values()
    ]
    taken = {o for node in graph.node for o in node.output}
    taken |= {v.name for v in graph.input} | {t.name for t in graph.initializer}
    nodes = insert_branches(graph.node, attachments, opsets, model.base.value, taken)
    refill(graph.node, nodes)
    for attached, arrays in slots.values():
        for spec in attached.tensors.values():
            graph.input.append(
                helper.make_tensor_value_info(spec.name, spec.dtype, list(spec.shape or ()))
            )
        for name, array in arrays.items():
            graph.initializer.append(numpy_helper.from_array(array, name))


def _in_file(model: AdaptedModel, proto: ModelProto, place: Place) -> Place:
    """The place with the node of the file for the same product; Unsupported if it is inside an operator."""
    name, output = place.product.node, place.node.output[0]
    for node in proto.graph.node:
        # The bias of a MatMulNBits may come before the adapter or after it.
        same = output in node.output or (node.op_type == "MatMulNBits" and name == node.name != "")
        if same and node.input[:1] == place.node.input[:1]:
            return attrs.evolve(place, node=node)
    raise Unsupported(
        f"{model.label}: the product of {place.product.module!r} is inside a function or an "
        "operator of the file, so an adapter cannot be attached to it there"
    )
