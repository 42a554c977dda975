"""Teachers: other models whose tensors losses read, for the same rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.model import shape_probe, targets
from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.errors import ConfigError, ModelError, suggest
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import TensorSpec, shape_text


@attrs.frozen(kw_only=True)
class TeacherTensor:
    """A tensor of another model, the teacher, that a loss reads for the same rows as the prediction.

    Attributes:
        model: the file of the teacher.
        tensor: the tensor; None is its only float output.
        inputs: the inputs of the trained model by the inputs of the teacher, where names differ.
        check: raises a DataError if the tensor does not fit the prediction; both as specifications.
    """

    model: str
    tensor: str | None = None
    inputs: Mapping[str, str] = attrs.field(factory=dict)
    check: Callable[[Any, TensorSpec], None] | None = None


@attrs.frozen(kw_only=True)
class Teacher:
    """A tensor of a teacher, with rows in the first axis.

    ``inputs`` are those of the trained model by the inputs of the teacher, and ``digest`` is that of the
    teacher's graph and weights.
    """

    model: Model = attrs.field(eq=False, repr=False)
    tensor: TensorSpec
    inputs: Mapping[str, str]
    digest: str

    @property
    def key(self) -> str:
        """The name of the column of the tensor; equal for two losses that read the same tensor."""
        return f"{self.model.label}:{self.tensor.name}"

    def __str__(self) -> str:
        return (
            f"the teacher {self.model.label} ({self.tensor.name} {shape_text(self.tensor.shape)})"
        )


class TeacherFiles:
    """The teachers of the losses of one Trainer; a file that several losses name is read once."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._models: dict[tuple[str, bool], tuple[Model, str]] = {}

    def teacher(self, wanted: TeacherTensor, model: Model, where: str, *, raw: bool) -> Teacher:
        """The teacher of a loss on ``model``, with the logits before a Softmax for ``raw``."""
        teacher, digest = self._read(wanted.model, where, fixed=model.fixed_batch is not None)
        name = self._tensor(wanted, teacher, where, raw=raw)
        spec = teacher.value(name)
        if spec.dtype not in FLOATS or not spec.shape:
            raise ModelError(
                f"{where}: {teacher.label}: a loss reads a float tensor with one row per sample, {spec} "
                "is not; name another one"
            )
        shape = tuple(f"{name}/{k}" if d is None else d for k, d in enumerate(spec.shape))
        return Teacher(
            model=teacher,
            tensor=attrs.evolve(spec, shape=("batch", *shape[1:])),
            inputs=_inputs(wanted, teacher, model, where),
            digest=digest,
        )

    def _read(self, path: str, where: str, *, fixed: bool) -> tuple[Model, str]:
        key = os.path.abspath(path), fixed
        if key not in self._models:
            if not os.path.isfile(path):
                raise ConfigError(
                    f"{where}: {no_file(path)}; pass the file of the teacher, for a checkpoint "
                    "Trainer.resume(folder, loss={…, 'teacher': 'path'})"
                )
            model = Model(path, plugins=self._plugins)
            if model.fixed_batch is not None and not fixed:
                model = Model(path, free_batch=True, plugins=self._plugins)
            shape_probe.complete_shapes(model)
            self._models[key] = model, model.digest()
        return self._models[key]

    def _tensor(self, wanted: TeacherTensor, teacher: Model, where: str, *, raw: bool) -> str:
        name = wanted.tensor
        if name is None:
            floats = [o.name for o in teacher.outputs if o.dtype in FLOATS]
            if len(floats) > 1:
                raise ConfigError(
                    f"{where}: {teacher.label} has {len(floats)} float outputs ({', '.join(floats)}); "
                    "name one: teacher_tensor='…'"
                )
            name = targets.default_output(teacher)
        elif name not in teacher.producers:
            known = [o.name for o in teacher.outputs]
            raise ConfigError(
                f"{where}_tensor: {teacher.label} computes no tensor {name!r}; {suggest(name, known)}"
            )
        if not raw:
            return name
        if targets.has_normalized_scores(teacher, name):
            raise ModelError(
                f"{where}: {teacher.label}: {name!r} has normalized scores, x / Σ x, but the loss reads "
                "logits; name the tensor of the scores: teacher_tensor='…'"
            )
        return targets.raw_scores(teacher, name)[0]


def _inputs(wanted: TeacherTensor, teacher: Model, model: Model, where: str) -> dict[str, str]:
    """The inputs of the trained model by the inputs of the teacher."""
    own = {spec.name: spec for spec in model.inputs}
    theirs = {spec.name: spec for spec in teacher.inputs}
    for name in wanted.inputs:
        if name not in theirs:
            raise ConfigError(
                f"{where}_inputs: {teacher.label} has no input {name!r}; {suggest(name, theirs)}"
            )
    out = {}
    for name, spec in theirs.items():
        given = wanted.inputs.get(name, name)
        if given not in own and len(own) == len(theirs) == 1 and not wanted.inputs:
            given = next(iter(own))
        if given not in own:
            raise ConfigError(
                f"{where}: {teacher.label} reads the input {given!r}, but {model.label} has "
                f"{', '.join(own)}; name the input that it gets: teacher_inputs={{{name!r}: "
                f"{next(iter(own))!r}}}"
            )
        ours = own[given]
        sizes = zip((spec.shape or ())[1:], (ours.shape or ())[1:], strict=False)
        fits = None in (spec.shape, ours.shape) or (
            len(spec.shape or ()) == len(ours.shape or ())
            and all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
        )
        if spec.dtype != ours.dtype or not fits:
            raise ModelError(
                f"{where}: {teacher.label} expects {spec}, but {model.label} is trained on {ours}; both "
                "get the same rows. Export the teacher for these inputs, or put the conversion (Cast, "
                "Resize) into its file: onnx.compose.merge_models"
            )
        out[name] = given
    return out
