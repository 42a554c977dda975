"""New random weights, for training from scratch instead of fine-tuning."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.parameters import Choice
from ortflex_core.kernel.errors import ModelError, suggest
from ortflex_core.kernel.types import Array

_NORMALIZATIONS = frozenset(
    f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer", "RMS")
)
# The matrices that recurrent weights contain.
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def reinitialize(
    model: Model, choices: Sequence[Choice], which: bool | str | Iterable[str], seed: int
) -> dict[str, Array]:
    """Draw new values for trained parameters, each by its role in the graph.

    Matrices and kernels: Glorot's uniform distribution, ±sqrt(6 / (fan_in + fan_out)). Biases: 0.
    Scales of normalizations and elementwise factors: 1. Recurrent weights: uniform in
    ±1/sqrt(hidden size). Embeddings: standard normal. The values of a parameter do not depend on the
    other parameters. ``which`` is True for all, or has names and globs, each of which must match.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks" (2010), eq. 16.
    """
    if which is False or which is None:
        return {}
    # The tensors of adapters have their own initial values.
    trained = [c for c in choices if c.trained and c.name not in model.attached]
    names = [c.name for c in trained]
    patterns = ["*"] if which is True else [which] if isinstance(which, str) else list(which)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise ModelError(
                f"reinitialize: no trained parameter matches {pattern!r}; {suggest(pattern, names)}"
            )
        chosen.update(hits)
    out = {}
    for k, choice in enumerate(trained):
        if choice.name in chosen:
            rng = np.random.default_rng([seed, 0x1417, k])
            old = model.initializer(choice.name)
            out[choice.name] = _draw(choice, old.shape, rng).astype(old.dtype)
    return out


def _draw(choice: Choice, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    operator, place = choice.operator, choice.place
    if operator == "Mul" or (operator in _NORMALIZATIONS and place == 1):
        return np.ones(shape)
    if operator == "PRelu":
        return np.full(shape, 0.25)
    if operator in _GATES:
        hidden = shape[-1] if place == 2 else max(1, shape[1] // _GATES[operator])
        return rng.uniform(-1, 1, shape) / math.sqrt(hidden)
    if operator == "Gather":
        return rng.standard_normal(shape)
    if operator == "Add" or len(shape) < 2 or place == 2:
        return np.zeros(shape)
    fans = shape[-1] + shape[-2]
    if operator.startswith("Conv"):
        fans = (shape[0] + shape[1]) * math.prod(shape[2:])
    limit = math.sqrt(6 / fans)
    return rng.uniform(-limit, limit, shape)
