"""The graphs of a layer: the model as it runs, and its vector-Jacobian product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortflex_core import (
    Program,
    Rewrite,
    RuleTable,
    Tensor,
    TensorSpec,
    Trace,
    build,
    gradients,
    optimize,
)
from ortflex_plugins.layers.mode import Mode

COTANGENT, GRADIENT, NEW = "cotangent/", "gradient/", "new/"


def gradient_program(
    mode: Mode, wrt: Sequence[str], outputs: Sequence[str], rules: RuleTable
) -> Program:
    """Outputs, ``new/<statistic>`` and ``gradient/<name>`` from inputs, weights and cotangents."""
    trace, values, updates, given = _replayed(mode, wrt)
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for name in outputs:
        y = values[name]
        pairs.append((y, trace.input(f"{COTANGENT}{name}", y.dtype, y.shape)))
    results = gradients(pairs, [given[name] for name in wrt], rules)
    named = {f"{GRADIENT}{name}": gradient for name, gradient in zip(wrt, results, strict=True)}
    return build(*optimize(trace, {**values, **updates, **named}), name="gradient")


def forward_program(mode: Mode, wrt: Sequence[str], replacing: Rewrite) -> Program:
    """Outputs and ``new/<statistic>``, for a backend that differentiates by itself."""
    trace, values, updates, _ = _replayed(mode, wrt, replacing)
    return build(trace, {**values, **updates}, name="forward")


def _replayed(
    mode: Mode, wrt: Sequence[str], replacing: Rewrite | None = None
) -> tuple[Trace, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model = mode.model
    trace = Trace(model.opsets)
    statistics = mode.statistics()
    specs = _inputs(mode, wrt) | statistics
    given = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
    own = mode.rewrite({n: given[n] for n in statistics}, plain=replacing is not None)

    def rewrite(trace, node, inputs):  # type: ignore[no-untyped-def]  # a Rewrite
        outputs = own(trace, node, inputs)
        if outputs is not None or replacing is None:
            return outputs
        return replacing(trace, node, inputs)

    values = model.replay(trace, [o.name for o in model.outputs], given, rewrite)
    updates = {f"{NEW}{name}": tensor for name, tensor in own.updates.items()}
    return trace, values, updates, given


def _inputs(mode: Mode, wrt: Sequence[str]) -> dict[str, TensorSpec]:
    weights: Mapping[str, TensorSpec] = mode.model.initializers
    named = {spec.name: mode.model.value(spec.name) for spec in mode.model.inputs}
    return named | {name: weights[name] for name in wrt if name in weights}
