"""Lines that say which parameters are trained, and which tensors the losses read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.compiler.model.training_mode import normalized_by_batch
from ortflex_core.compiler.problem import parameters as selection
from ortflex_core.compiler.problem.losses import LossRequest, tensors_of
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.types import Shape, TensorSpec, shape_text

# The number of parameters that a warning names.
_FEW = 3
# The tensors that a description lists.
_LISTED = 20
# The numbers of a loss that are listed.
_MOST = 10
_PLURALS = {"constant": "constants", "mask": "masks", "running statistic": "running statistics"}


def describe(problem: Problem, requests: Sequence[LossRequest]) -> str:
    """What is trained and what is not, in one line."""
    specs = problem.model.initializers
    trained = [f"{n} {list(specs[n].shape or ())}" for n in problem.parameters]
    left = [f"{c.name} ({c.reason})" for c in problem.choices if not c.trained]
    text = f"training {len(trained)} parameters: {_listed(trained)}"
    for group in problem.updating.groups:
        if group.start_epoch:
            text += f"; from epoch {group.start_epoch + 1} on: {', '.join(group.parameters)}"
    if left:
        text += f"; not: {_listed(left)}"
    text += _new_head(problem) + _resting_norms(problem, requests)
    words = ", then ".join(term.words for term in problem.updating.transforms)
    text += f"; transforms of gradients: {words}" if words else ""
    return text + _readings(problem, requests)


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    hidden = len(names) - _LISTED
    more = f" and {hidden} more (Trainer.summary() has all)" if hidden > 0 else ""
    return ", ".join(names[:_LISTED]) + more


def headline(problem: Problem, requests: Sequence[LossRequest]) -> str:
    """How much is trained and how much is not, and how to change it, in one short line."""
    trained = problem.parameters
    numbers = sum(math.prod(problem.shape_of(n)) for n in trained)
    text = f"training {_counted(len(trained), 'tensor')} with {_counted(numbers, 'number')}"
    later = sum(len(g.parameters) for g in problem.updating.groups if g.start_epoch)
    if later:
        text += f" ({later} of them from a later epoch on)"
    left = Counter(c.sort for c in problem.choices if not c.trained)
    if left:
        sorts = ", ".join(f"{n} {_PLURALS.get(s, s) if n > 1 else s}" for s, n in left.items())
        text += f"; left out: {sorts}"
    text += _new_head(problem) + _resting_norms(problem, requests)
    text += "; `ortflex check --all` or Trainer.summary() lists them, params= selects others"
    return text + _readings(problem, requests)


def _new_head(problem: Problem) -> str:
    """The weights of a new head; "" without one."""
    specs = problem.model.initializers
    words = [f"{n} {shape_text(specs[n].shape)}" for n in problem.model.new_head if n in specs]
    return f"; new: {_listed(words)}" if words else ""


def _resting_norms(problem: Problem, requests: Sequence[LossRequest]) -> str:
    """How many BatchNormalization nodes ``batch_norm="auto"`` leaves in inference mode; "" if none."""
    if problem.batch_norm != "auto":
        return ""
    predicted = tensors_of(requests)
    without = attrs.evolve(problem, batch_norm="train")
    count = len(normalized_by_batch(without, predicted))
    resting = count - len(normalized_by_batch(problem, predicted))
    if not resting:
        return ""
    return (
        f"; {resting} of {_counted(count, 'BatchNormalization node')} in inference mode, because scale "
        "and bias are frozen (batch_norm='train' updates the statistics)"
    )


def _readings(problem: Problem, requests: Sequence[LossRequest]) -> str:
    """The losses that read another tensor than the given one, and how the file is read."""
    seen = "".join(
        f"; {r.loss.name} reads {r.predicted!r}, the logits before the {r.traced_back}"
        for r in requests
        if r.traced_back
    )
    seen += "".join(f"; {r.loss.name} reads {r.teacher}" for r in requests if r.teacher)
    for request in requests:
        fields = {name: getattr(request.loss, name) for name in request.loss.counted}
        seen += "".join(
            f"; {request.loss.name} has {name} {_shown(value)}"
            for name, value in fields.items()
            if value is not None
        )
    return seen + (f"; {problem.model.stamp}" if problem.model.stamp else "")


def _shown(value: Any) -> str:
    """Numbers, or the rule that computes them when the training begins."""
    if isinstance(value, str):
        return f"{value!r}, which counts the labels when fit begins"
    more = f", … ({len(value)} numbers)" if len(value) > _MOST else ""
    return ", ".join(f"{number:.4g}" for number in value[:_MOST]) + more


def shared_parameters(problem: Problem, requests: Sequence[LossRequest]) -> str:
    """The parameters that several nodes before the losses read, in one line; "" without any."""
    outputs = tensors_of(requests)
    scales = () if problem.model.quantization is None else problem.model.quantization.scales
    names = [n for n in problem.parameters if n not in scales]
    readers = selection.shared_in(problem.model, outputs, names)
    several = [f"{n} ({len(nodes)}: {nodes[0]}, {nodes[1]})" for n, nodes in readers.items()]
    hidden = len(several) - _FEW
    return ", ".join(several[:_FEW]) + (f", and {hidden} more" if hidden > 0 else "")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def fed(inputs: Sequence[TensorSpec], shapes: Mapping[str, Shape]) -> str:
    """The shapes of data next to those of the inputs: ``X [30, 5, 4] (the model expects [N, h, w])``."""
    return ", ".join(
        f"{i.name} {shape_text(shapes[i.name])} (the model expects {shape_text(i.shape)})"
        for i in inputs
        if i.name in shapes
    )
