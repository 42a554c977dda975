"""Application of a portable step's state to a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from ortflex_core.compiler.graph import protos
from ortflex_core.compiler.model.adapted_model import adapt
from ortflex_core.compiler.model.master_weights import with_masters
from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.errors import CheckpointError, suggest
from ortflex_core.kernel.model_protocols import Adapter
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.tracebacks import short_traceback
from ortflex_core.kernel.types import Array, TensorSpec, dtype_name, shape_text
from ortflex_core.training.artifacts import step_manifest as manifest
from ortflex_core.training.artifacts import step_state as state_file
from ortflex_core.training.artifacts.step_folder import open_step
from ortflex_core.training.artifacts.step_state import State

_WEIGHTS = ("frozen", "parameter", "buffer", "average")
"""The roles of exported tensors; an average replaces its weight."""


@short_traceback
def apply_state(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Model,
    state: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    strict: bool = True,
    plugins: Plugins | None = None,
    adapters: Sequence[Adapter] | None = None,
    trust_code: bool = False,
) -> onnx.ModelProto:
    """The model with the weights of a state file: what :meth:`ortflex_core.Trainer.export` writes.

    Args:
        model: the file that was trained, or another with the same graph.
        state: the ``state.safetensors`` that a runner wrote, or the folder of a portable step,
            whose other files are checked, too.
        path: where the model is written to, completely or not at all; by default nowhere.
        strict: refuse a model that computes something different from the exported one.
        plugins: the plugins with the adapters; by default the installed ones.
        adapters: the adapters whose tensors are in the state, instead of those that its header names.
        trust_code: import and use the classes of adapters that the header names by their paths; this
            executes their modules and files.

    Raises:
        ConfigError, PluginError: an adapter that the header names is not installed or has other
            parameters, or the header names a class by its path, without ``trust_code``.
        CheckpointError: the state is damaged, or belongs to a different model; names the tensor.
        ModelError: the model cannot be read.
        OutputError: the file cannot be written; an old one of that name is untouched.

    Example:
        >>> apply_state("model.onnx", "state.safetensors", "trained.onnx")  # doctest: +SKIP
    """
    given = Path(state)
    content = open_step(given).state if given.is_dir() else state_file.read(given)
    target = model if isinstance(model, Model) else Model(model)
    if adapters is None:
        known = Plugins.given(plugins)
        if not trust_code:
            way_out = "Pass the objects: apply_state(model, state, {key}=[…])"
            known = known.for_data(f"the state {content.label!r}", way_out=way_out)
        adapters = [known.component("adapters", t, "adapters") for t in content.adapters]
    if adapters:
        target = adapt(target, adapters, content.seed)
    if not target.attached:
        masters = [
            str(t.of)
            for k, t in content.tensors.items()
            if k in content.arrays and content.arrays[k].dtype.kind == "f"
        ]
        target = with_masters(target, masters)
    weights = _weights(target, content)
    if strict and content.model != protos.structure(target.proto):
        raise CheckpointError(
            f"{content.label!r} was exported from a different model than {target.label}: the names "
            f"and shapes of its {len(weights)} tensors fit, but the graphs differ. Give the model "
            f"that `ortflex export-step` read ({manifest.NAME} has its hash), or strict=False "
            "(--no-strict) if you know that both compute the same"
        )
    return target.export(weights, path)


def _spec(model: Model, name: str) -> TensorSpec | None:
    """Type and shape of an initializer, or of a copy of one, which an export makes an initializer."""
    origin, copied = name, model.producers.get(name)
    while copied is not None and copied.op_type == "Identity":
        origin = copied.input[0]
        copied = model.producers.get(origin)
    return model.initializers.get(origin)


def _weights(model: Model, state: State) -> dict[str, Array]:
    """The new values of the model's tensors."""
    weights: dict[str, Array] = {}
    if lost := [name for name in state.tensors if name not in state.arrays]:
        raise CheckpointError(
            f"{state.label!r} lacks {lost[0]!r}, which its header names; {suggest(lost[0], state.arrays)}"
        )
    if unknown := [name for name in state.arrays if name not in state.tensors]:
        raise CheckpointError(
            f"{state.label!r} has {unknown[0]!r}, but its header does not say what that is; "
            f"{suggest(unknown[0], state.tensors)}"
        )
    for role in _WEIGHTS:
        for key, tensor in state.tensors.items():
            if tensor.role != role:
                continue
            name, array = str(tensor.of), state.arrays[key]
            spec = _spec(model, name)
            if spec is None:
                raise CheckpointError(
                    f"{state.label!r} is the state of a different model: {model.label} has no "
                    f"tensor {name!r}; {suggest(name, model.initializers)}"
                )
            if (dtype_name(spec.dtype), spec.shape) != (array.dtype.name, tuple(array.shape)):
                raise CheckpointError(
                    f"{state.label!r} is the state of a different model: {name!r} is "
                    f"{array.dtype}{list(array.shape)}, in {model.label} it is "
                    f"{dtype_name(spec.dtype)}{shape_text(spec.shape)}"
                )
            finite = (
                role == "frozen" or array.dtype.kind != "f" or np.isfinite(array)
            )  # a mask is frozen
            if odd := int(np.size(finite) - np.count_nonzero(finite)):
                raise CheckpointError(
                    f"{state.label!r}: {name!r} has {odd} of {array.size} values that are not finite: the "
                    "training that wrote it diverged, or the file is damaged"
                )
            weights[name] = array
    return weights
