"""The export of a portable step: its folder is written completely or not at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import TensorProto, external_data_helper

from ortflex_core.compiler.graph import protos
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.model.training_mode import buffer_value
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.errors import GraphError, NoGradientRule, NotDifferentiable
from ortflex_core.kernel.files import OutputError, write_flushed
from ortflex_core.kernel.types import Array
from ortflex_core.kernel.version import __version__
from ortflex_core.training.artifacts import artifact_folders as folders
from ortflex_core.training.artifacts import step_manifest as manifests
from ortflex_core.training.artifacts import step_state as state_file
from ortflex_core.training.artifacts.rate_table import RateTable
from ortflex_core.training.artifacts.step_folder import FILES, FROZEN, PREDICT, STEP, TRAINING
from ortflex_core.training.artifacts.step_graph import (
    COUNTER,
    STATE,
    PortableGraph,
    predict_graph,
    step_graph,
)
from ortflex_core.training.artifacts.step_manifest import Item, Manifest, Missing, Rates
from ortflex_core.training.artifacts.training_info import training_info


@attrs.frozen(kw_only=True)
class Content:
    """The content of an export.

    Attributes:
        problem: the training problem.
        arrays: weights, slots and statistics, by their ports.
        resting: values of parameters that are not trained yet, by name.
        step: the number of finished steps.
        rate: the learning rate of the next step.
        rates: the rates of all steps; None if the rate is constant, or not known before training.
        schedule: the settings of the schedule.
        classes: the names of classes; None if labels are indices.
        missing: parts of the training that the files do not have.
    """

    problem: Problem
    arrays: Mapping[Port, Array]
    resting: Mapping[str, Array]
    step: int
    rate: float
    rates: RateTable | None
    schedule: Mapping[str, Any]
    classes: Array | None
    missing: Sequence[Missing]


def export_step(
    folder: Path,
    content: Content,
    *,
    rows: int | None = None,
    steps_per_run: int = 1,
    optional_inputs: bool = True,
) -> Path:
    """Write the folder of a portable step; an earlier one of that name is replaced when it is complete.

    Args:
        folder: the target; its parent is created.
        content: the content of the files.
        rows: the rows of every batch; None for any number.
        steps_per_run: the number of steps in one run.
        optional_inputs: whether the graph has defaults of the rate and the hyperparameters.

    Raises:
        GraphError: the step needs a fixed number of rows.
        OutputError: the folder has other files, or cannot be written to; nothing was changed.
    """
    problem = content.problem
    step = _step_graph(content, rows, steps_per_run, optional_inputs)
    state = {e.port: e for e in step.entries if e.name and e.port.role in STATE}
    outputs = [o.name for o in problem.model.outputs]
    predict = predict_graph(problem, outputs, state)
    values = {**content.arrays, COUNTER: np.asarray(content.step, np.int64)}
    arrays = {e.name: values[e.port] for e in state.values()}
    tensors = {
        e.name: state_file.Tensor(role=e.port.role, of=e.port.of, slot=e.port.slot)
        for e in state.values()
    }
    for name, array in content.resting.items():
        key = f"frozen/{name}"
        arrays[key], tensors[key] = array, state_file.Tensor(role="frozen", of=name)
    graphs = {STEP: step, PREDICT: predict}
    used = sorted({name for graph in graphs.values() for name in graph.frozen.values()})
    frozen = {name: buffer_value(problem, name) for name in used}
    left_out = _too_large({**frozen, **arrays})
    manifest = _manifest(content, step, predict, rows, steps_per_run, left_out)
    target = folders.resolve(folder)
    try:
        with folders.replacing(target, _foreign) as fresh:
            if not left_out:
                info = training_info(step, predict, {**frozen, **arrays})
                write_flushed(fresh / TRAINING, info.SerializeToString(deterministic=True))
            _write_graphs(fresh, graphs, frozen)
            attached = getattr(problem.model, "attachments", ())
            adapters = [a.describe() for a in dict.fromkeys(a.adapter for a in attached)]
            place = fresh / state_file.NAME
            state_file.write(place, manifest.model, tensors, arrays, adapters, problem.seed)
            write_flushed(fresh / manifests.NAME, manifest.text().encode())
            folders.flush(fresh / state_file.NAME, fresh)
    except OSError as error:
        if isinstance(error, OutputError) and not isinstance(error.__cause__, OSError):
            raise
        raise OutputError.of(
            f"write the portable step {str(folder)!r}", error, "Nothing was changed."
        ) from error
    return target


def _step_graph(content: Content, rows: int | None, steps: int, optional: bool) -> PortableGraph:
    try:
        return step_graph(
            content.problem, content.rate, content.rates, rows=rows, steps=steps, optional=optional
        )
    except (GraphError, NoGradientRule, NotDifferentiable) as error:
        if rows is not None:
            raise
        raise type(error)(
            f"{error}. The graph was requested for any number of rows; with a fixed number "
            "(rows=) all sizes are known"
        ) from error


def _manifest(
    content: Content,
    step: PortableGraph,
    predict: PortableGraph,
    rows: int | None,
    steps: int,
    left_out: Sequence[Missing],
) -> Manifest:
    problem, classes = content.problem, content.classes
    return Manifest(
        format=1,
        ortflex=__version__,
        model=protos.structure(problem.model.proto),
        rows=rows,
        steps_per_run=steps,
        batches_per_run=steps * problem.updating.accumulate,
        step=tuple(Item.of_entry(e, problem.updating.accumulate) for e in step.entries),
        predict=tuple(map(Item.of_entry, predict.entries)),
        classes=None if classes is None else tuple(classes.tolist()),
        schedule=json.loads(json.dumps(dict(content.schedule), default=str)),
        rates=None if content.rates is None else Rates.of_table(content.rates),
        not_portable=(*content.missing, *left_out),
    )


def _too_large(arrays: Mapping[str, Array]) -> tuple[Missing, ...]:
    """The note that the training information is left out because it would exceed the size of a message."""
    size = sum(array.nbytes for array in arrays.values())
    if size <= model_file.HUGE:
        return ()
    why = (
        f"its tensors have {size / 2**30:.2f} GB, but a file that contains them can have at most "
        "2 GB"
    )
    instead = f"{STEP} with {state_file.NAME} is the same step"
    return (Missing(what="file", name=TRAINING, why=why, instead=instead),)


def _write_graphs(
    folder: Path, graphs: Mapping[str, PortableGraph], arrays: Mapping[str, Array]
) -> None:
    """Write the graphs; a model that exceeds the size of a message has its tensors in a separate file."""
    outside: dict[str, tuple[int, int]] = {}
    if sum(array.nbytes for array in arrays.values()) > model_file.HUGE:
        with open(folder / FROZEN, "wb") as out:
            for name, array in arrays.items():
                start = out.tell()
                out.write(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)
                outside[name] = start, array.nbytes
            out.flush()
            os.fsync(out.fileno())
    for file, graph in graphs.items():
        for inside, name in graph.frozen.items():
            graph.model.graph.initializer.append(_tensor(inside, arrays[name], outside.get(name)))
        write_flushed(folder / file, graph.model.SerializeToString(deterministic=True))


def _tensor(name: str, array: Array, place: tuple[int, int] | None) -> TensorProto:
    if place is None:
        return onnx.numpy_helper.from_array(np.asarray(array, order="C"), name)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    out = TensorProto(name=name, data_type=dtype, dims=array.shape, raw_data=b"")
    external_data_helper.set_external_data(out, FROZEN, *place)
    out.ClearField("raw_data")
    return out


def _foreign(folder: Path, partial: bool) -> str | None:
    """The content of a folder that is not part of a portable step; None for a missing or empty folder."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return "a file has that name"
        names = {path.name for path in folder.iterdir()} - folders.OF_SYSTEMS
    except FileNotFoundError:
        return None
    if others := sorted(names - set(FILES)):
        further = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"that folder holds {others[0]!r}{further}, which is not part of a portable step"
    if not names or partial:
        return None
    if manifests.NAME not in names:
        return f"that folder has no {manifests.NAME}, so it is not a portable step"
    if not manifests.is_ours(folder / manifests.NAME):
        return f"its {manifests.NAME} was not written for a portable step"
    if state_file.NAME in names and not state_file.is_ours(folder / state_file.NAME):
        return f"its {state_file.NAME} was not written for a portable step"
    return None
