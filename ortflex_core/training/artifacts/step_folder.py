"""The folder of a portable step: its files, and checks that they belong together."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
from google.protobuf.message import DecodeError
from onnx import ModelProto

from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel.errors import CheckpointError, suggest
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.regular_files import NotRegular
from ortflex_core.kernel.types import shape_text
from ortflex_core.training.artifacts import step_manifest as manifests
from ortflex_core.training.artifacts import step_state as state_file
from ortflex_core.training.artifacts.step_manifest import Manifest
from ortflex_core.training.artifacts.step_state import State

STEP, PREDICT, FROZEN = "step.onnx", "predict.onnx", "frozen.data"
TRAINING = "training_info.onnx"
FILES = (STEP, PREDICT, TRAINING, FROZEN, manifests.NAME, state_file.NAME)
"""Every file that an export may write."""


@attrs.frozen(kw_only=True)
class PortableStep:
    """A portable step that was read and whose files belong together.

    Attributes:
        folder: where its files are.
        manifest: the inputs and outputs.
        state: the tensors that a step replaces.
    """

    folder: Path
    manifest: Manifest
    state: State

    @property
    def step(self) -> Path:
        """The graph of a step."""
        return self.folder / STEP

    @property
    def predict(self) -> Path:
        """The graph of a prediction."""
        return self.folder / PREDICT


def open_step(folder: str | os.PathLike[str]) -> PortableStep:
    """Read the folder of a portable step and check that manifest, graphs and state fit.

    Args:
        folder: what ``ortflex export-step`` or :meth:`ortflex_core.Trainer.export_step` wrote.

    Raises:
        CheckpointError: a file is missing or damaged, or two of them do not fit; says which tensor.

    Example:
        >>> open_step("step").manifest.steps_per_run  # doctest: +SKIP
        1
    """
    place = Path(folder)
    manifest = manifests.read(place / manifests.NAME)
    manifests.check(manifest.step, _graph(place / STEP), STEP)
    manifests.check(manifest.predict, _graph(place / PREDICT), PREDICT)
    state = state_file.read(place / state_file.NAME)
    check_state(state, manifest)
    return PortableStep(folder=place, manifest=manifest, state=state)


def _graph(path: Path) -> ModelProto:
    try:
        return model_file.read_proto(path)
    except FileNotFoundError as error:
        raise CheckpointError(no_file(path)) from error
    except NotRegular as error:
        raise CheckpointError(str(error)) from error
    except (DecodeError, OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is not an ONNX model: {error}") from error


def check_state(state: State, manifest: Manifest) -> None:
    """Compare the tensors of a state with the inputs of a step."""
    wanted = manifest.state
    for name, array in state.arrays.items():
        if name not in wanted:
            if name in state.tensors and state.tensors[name].role == "frozen":
                continue
            raise CheckpointError(
                f"{state.label!r} has the tensor {name!r}, which is not an input of the step; "
                f"{suggest(name, wanted)}"
            )
        item = wanted[name]
        if (array.dtype.name, tuple(array.shape)) != (item.dtype, item.shape):
            raise CheckpointError(
                f"{state.label!r}: {name!r} is {array.dtype}{list(array.shape)}, but the step "
                f"expects {item.dtype}{shape_text(item.shape)}"
            )
    if missing := [name for name in wanted if name not in state.arrays]:
        raise CheckpointError(
            f"{state.label!r} lacks the tensor {missing[0]!r} of the step; "
            f"{suggest(missing[0], state.arrays)}"
        )
    if state.model != manifest.model:
        raise CheckpointError(f"{state.label!r} belongs to a different model than the manifest")
