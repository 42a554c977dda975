"""A loop over the first axis of tensors, written as a Python function of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from ortflex_core import Tensor, Trace, build, prefix_names

Step = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]

# Values inside a subgraph may not have the name of one outside.
_PREFIX = "scan/"


def scan(
    step: Step,
    states: Sequence[Tensor],
    items: Sequence[Tensor],
    outer: Mapping[str, Tensor],
    *,
    backwards: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Final states and stacked outputs of ``step(op, states, items, outer)`` along axis 0.

    ``step`` returns the new states and its outputs; it has to read every state and item. Tensors
    in ``outer`` are the same in all steps. With ``backwards``, the first step reads the last items; the
    outputs of a step have the index of its items. States have the shape [batch, n], items
    [steps, batch, n].
    """
    trace = items[0].trace
    inner = Trace(trace.opsets)

    def declare(name: str, tensor: Tensor, first: int) -> Tensor:
        # The body of a Scan must know at least the number of dimensions.
        shape = (None, None) if tensor.shape is None else tensor.shape[first:]
        return inner.input(name, tensor.dtype, shape)

    inner_states = [declare(f"state{k}", t, 0) for k, t in enumerate(states)]
    inner_items = [declare(f"item{k}", t, 1) for k, t in enumerate(items)]
    inner_outer = {name: inner.input(name, t.dtype, t.shape) for name, t in outer.items()}
    new_states, stacked = step(inner.op, inner_states, inner_items, inner_outer)
    outputs = {f"next{k}": t for k, t in enumerate(new_states)}
    outputs |= {f"out{k}": t for k, t in enumerate(stacked)}
    body = build(inner, outputs, name="step").proto().graph
    inner_inputs = [i for i in body.input if i.name not in outer]
    del body.input[:]
    body.input.extend(inner_inputs)
    prefix_names(body, _PREFIX, set())
    size = None if items[0].shape is None else items[0].shape[0]
    types = [(t.dtype, t.shape) for t in new_states]
    types += [(t.dtype, None if t.shape is None else (size, *t.shape)) for t in stacked]
    settings: dict[str, object] = {
        "body": body,
        "num_scan_inputs": len(items),
        "scan_input_directions": [int(backwards)] * len(items),
    }
    if stacked:
        settings["scan_output_directions"] = [int(backwards)] * len(stacked)
    results = trace.node(
        "Scan",
        [*states, *items],
        {name: onnx.helper.make_attribute(name, value) for name, value in settings.items()},
        outputs=len(types),
        captures={_PREFIX + name: tensor for name, tensor in outer.items()},
        types=types,
    )
    return list(results[: len(states)]), list(results[len(states) :])
