"""A loop over the first axis of tensors, written as a Python function of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from ortflex_core.graph import Ops, Tensor, Trace, build

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
    in ``outer`` are the same in all steps. With ``backwards`` the last items come first; outputs
    stand where the items stood. States have the shape [batch, n], items [steps, batch, n].
    """
    trace = items[0].trace
    inner = Trace(trace.opsets)

    def declare(kind: str, tensors: Sequence[Tensor], drop: int) -> list[Tensor]:
        # The body of a Scan must know at least the number of dimensions.
        shapes = [(None, None) if t.shape is None else t.shape[drop:] for t in tensors]
        return [
            inner.input(f"{kind}{k}", t.dtype, shape)
            for k, (t, shape) in enumerate(zip(tensors, shapes, strict=True))
        ]

    inner_states, inner_items = declare("state", states, 0), declare("item", items, 1)
    inner_outer = {name: inner.input(name, t.dtype, t.shape) for name, t in outer.items()}
    after, results = step(inner.op, inner_states, inner_items, inner_outer)
    outputs = {f"next{k}": t for k, t in enumerate(after)}
    outputs |= {f"out{k}": t for k, t in enumerate(results)}
    body = build(inner, outputs, name="step").proto().graph
    _isolate(body, outer)
    size = None if items[0].shape is None else items[0].shape[0]
    types = [(t.dtype, t.shape) for t in after]
    types += [(t.dtype, None if t.shape is None else (size, *t.shape)) for t in results]
    settings: dict[str, object] = {
        "body": body,
        "num_scan_inputs": len(items),
        "scan_input_directions": [int(backwards)] * len(items),
    }
    if results:
        settings["scan_output_directions"] = [int(backwards)] * len(results)
    found = trace.node(
        "Scan",
        [*states, *items],
        {name: onnx.helper.make_attribute(name, value) for name, value in settings.items()},
        outputs=len(types),
        captures={_PREFIX + name: tensor for name, tensor in outer.items()},
        types=types,
    )
    return list(found[: len(states)]), list(found[len(states) :])


def _isolate(body: onnx.GraphProto, outer: Mapping[str, Tensor]) -> None:
    """Remove the outer values from a body's inputs, and give all values new names."""
    kept = [i for i in body.input if i.name not in outer]
    del body.input[:]
    body.input.extend(kept)
    for value in (*body.input, *body.output, *body.initializer):
        value.name = _PREFIX + value.name
    for node in body.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                names[k] = name and _PREFIX + name


__all__ = ["Ops", "Step", "scan"]
