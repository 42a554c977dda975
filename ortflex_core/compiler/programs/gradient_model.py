"""The gradient of a model as a model, for derivatives without training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import onnx
from onnx import ModelProto

from ortflex_core.compiler.graph.ops import FLOATS, Tensor, Trace
from ortflex_core.compiler.graph.program import build, fresh_name
from ortflex_core.compiler.graph.protos import refill
from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.operators.gradient_families import load_rules
from ortflex_core.compiler.operators.reverse_mode import gradients
from ortflex_core.compiler.programs import rebuild
from ortflex_core.kernel.errors import ModelError, suggest
from ortflex_core.kernel.notebook import displayed_briefly
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.tracebacks import short_traceback
from ortflex_core.kernel.types import TensorSpec, dtype_name


@short_traceback
def gradient_model(
    model: str | os.PathLike[str] | bytes | ModelProto | Model,
    wrt: str | Iterable[str],
    outputs: str | Iterable[str] | None = None,
    *,
    families: Sequence[str] = (),
    plugins: Plugins | None = None,
) -> ModelProto:
    """Create a model that computes the gradients of another model (a vector-Jacobian product).

    For every name x in ``wrt``, with a sum over the outputs y in ``outputs``::

        gradient/x = Σ_y (∂y/∂x)ᵀ · cotangent/y

    The new model consists of standard operators, so any build of onnxruntime can run it.

    Args:
        model: a path, the file's bytes, a ModelProto, or a :class:`Model`.
        wrt: the names of the float inputs and initializers with respect to which the model is
            differentiated.
        outputs: the names of the float outputs that are differentiated; None for all float outputs.
        families: families of gradient rules that are used first if several families have a rule for
            an operator.
        plugins: the plugins with the gradient rules; None for the installed plugins.

    Returns:
        A new model. Its inputs are the inputs of ``model``, the initializers in ``wrt``, and one
        ``cotangent/<output>`` for each of ``outputs``, with the shape of this output. Its outputs are
        the outputs of ``model`` and one ``gradient/<name>`` for each of ``wrt``, with the shape of
        this tensor. Inputs and outputs always have this order. If the model already has a tensor with
        one of these names, the new name gets a number (``gradient/x.1``). Functions are inlined;
        dropout and normalization keep the mode that they have in the file. If the opset of the model
        is newer than the installed runtime supports, the new model has an older opset in which all of
        its operators have the same meaning, and ``doc_string`` reports this.

    Raises:
        ModelError: the model cannot be read; or a name is unknown, occurs twice, or is not the name of
            a float tensor.
        PluginError: a name in ``families`` is unknown.
        NoGradientRule: an operator between ``wrt`` and ``outputs`` has no gradient rule.
        NotDifferentiable: every path from a tensor in ``wrt`` ends at an operator without a gradient.
        GraphError: no path leads from a tensor in ``wrt`` to ``outputs``.

    Example:
        >>> import numpy as np
        >>> import onnx.parser
        >>> from onnx.reference import ReferenceEvaluator
        >>> square = onnx.parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> '
        ...     "g (float[N, 2] x) => (float[N, 2] y) { y = Mul(x, x) }"
        ... )
        >>> derivative = gradient_model(square, wrt="x")
        >>> [i.name for i in derivative.graph.input], [o.name for o in derivative.graph.output]
        (['x', 'cotangent/y'], ['y', 'gradient/x'])
        >>> x = np.array([[1, 3]], np.float32)
        >>> y, gradient = ReferenceEvaluator(derivative).run(None, {"x": x, "cotangent/y": np.ones_like(x)})
        >>> gradient.tolist()
        [[2.0, 6.0]]

    Source: A. Griewank and A. Walther, "Evaluating derivatives" (2008), on the reverse mode.
    """
    source = model if isinstance(model, Model) else Model(model, raise_half=False)
    table = load_rules(Plugins.given(plugins), families, source.internal.graph.node)
    shape_probe.complete_shapes(source)
    asked = _names(wrt, "wrt")
    known = {i.name: i for i in source.inputs} | source.initializers
    _check(source, asked, known, "wrt", "an input or initializer")
    floats = {o.name: o for o in source.outputs}
    roots = (
        [o.name for o in source.outputs if o.dtype in FLOATS]
        if outputs is None
        else _names(outputs, "outputs")
    )
    _check(source, roots, floats, "outputs", "an output")
    taken = {i.name for i in source.inputs} | set(source.initializers) | set(source.producers)
    seeds = {name: fresh_name(f"cotangent/{name}", taken) for name in roots}
    derivative_names = [fresh_name(f"gradient/{name}", taken) for name in asked]
    trace = Trace(source.opsets)
    given = {n: trace.input(n, s.dtype, s.shape) for n, s in _inputs(source, asked).items()}
    with trace.part("forward"):
        values = source.replay(trace, [o.name for o in source.outputs], given)
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for name in roots:
        y = values[name]
        pairs.append((y, trace.input(seeds[name], y.dtype, y.shape)))
    with shape_probe.explain_unknown(source), trace.part("backward"):
        derivatives = gradients(pairs, [given[name] for name in asked], table)
    named = {**values, **dict(zip(derivative_names, derivatives, strict=True))}
    trace, named = rebuild.optimize(trace, named)
    proto = build(trace, named, name="gradient").proto()
    _complete(proto, source, asked, pairs, list(seeds.values()))
    proto.doc_string = source.stamp
    return displayed_briefly(proto)


def _names(given: str | Iterable[str], what: str) -> list[str]:
    names = [given] if isinstance(given, str) else list(given)
    if not names:
        raise ModelError(f"{what}: expected at least one name, got none")
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ModelError(f"{what}: {twice[0]!r} is listed twice")
    return names


def _check(
    model: Model, names: Sequence[str], known: dict[str, TensorSpec], what: str, kind: str
) -> None:
    for name in names:
        if name not in known:
            raise ModelError(
                f"{what}: {name!r} is not {kind} of {model.label}; {suggest(name, known)}"
            )
        if known[name].dtype not in FLOATS:
            raise ModelError(
                f"{what}: {name!r} is {dtype_name(known[name].dtype)}, expected a float tensor"
            )


def _inputs(model: Model, asked: Sequence[str]) -> dict[str, TensorSpec]:
    weights = model.initializers
    # The batch has the same name as in other tensors' shapes, so equal sizes need no sum.
    named = {spec.name: model.value(spec.name) for spec in model.inputs}
    return named | {name: weights[name] for name in asked if name in weights}


def _complete(
    proto: ModelProto,
    model: Model,
    asked: Sequence[str],
    pairs: Sequence[tuple[Tensor, Tensor | None]],
    seeds: Sequence[str],
) -> None:
    """Inputs in the documented order, including those that nothing reads; large constants inside."""
    graph = proto.graph
    infos = list(_inputs(model, asked).values())
    infos += [TensorSpec(name, y.dtype, y.shape) for name, (y, _) in zip(seeds, pairs, strict=True)]
    promised = {spec.name for spec in infos}
    for value in graph.input:
        if value.name not in promised:
            array = model.initializer(value.name)
            graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    refill(graph.input, map(TensorSpec.to_proto, infos))
