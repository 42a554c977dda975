"""An input that a rule gives no gradient has the slope 0, or asking for its gradient is refused.

The class of defects: a rule returns None for a float input that matters. A parameter there then gets
no gradient by this way, without an error where it has another way to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from ortflex_core import Array, NodeView, NoGradientRule, Tensor, Trace, build, gradients
from ortflex_core.compiler.graph.ops import Node
from tests.gradcheck import RULES, run, traced
from tests.plugins.gradient_samples import every_case
from tests.tracing import NEWEST

pytestmark = pytest.mark.sampled


def copied(
    node: Node, opsets: Mapping[str, int], arrays: Mapping[str, Array], free: int
) -> tuple[Trace, tuple[Tensor, ...]]:
    """The node alone in a graph; its inputs i0, i1 … are the graph's, ``free`` even if constant."""
    trace = Trace(opsets)
    inputs: list[Tensor | None] = []
    for k, given in enumerate(node.inputs):
        if given is None:
            inputs.append(None)
        elif given.constant is not None and k != free:
            inputs.append(trace.constant(given.constant, given.dtype))
        else:
            inputs.append(trace.input(f"i{k}", given.dtype, arrays[f"i{k}"].shape))
    outputs = trace.node(
        node.op_type, inputs, node.attributes, outputs=len(node.outputs), domain=node.domain
    )
    return trace, outputs


def omits(node: Node, opsets: Mapping[str, int], arrays: Mapping[str, Array], index: int) -> bool:
    """Whether the rule answers None for a float input that alone is differentiated by."""
    trace, outputs = copied(node, opsets, arrays, index)
    made = outputs[0].node
    if made is None:  # simplified away
        return False
    _, rule = RULES.lookup(made.domain, made.op_type, opsets.get(made.domain, 1))
    if rule is None:
        return False
    seeds = [trace.constant(np.ones(()), o.dtype) if o.is_float else None for o in outputs]
    try:
        found = rule(trace.op, NodeView(trace, made, frozenset([index]), RULES), *seeds)
        return found[index] is None
    except NoGradientRule:
        return False


def slopes(
    node: Node, opsets: Mapping[str, int], arrays: Mapping[str, Array], index: int, reference: bool
) -> list[float]:
    """Central differences of the weighted sum of a node's float outputs, for a few elements.

    Those that grow when the step shrinks tell of a jump, not of a slope, and are left out.
    """
    trace, outputs = copied(node, opsets, arrays, index)
    named = {f"o{k}": t for k, t in enumerate(outputs) if t.is_float}
    program = build(trace, named, name="node")
    step = 1e-6 if arrays[f"i{index}"].dtype == np.float64 else 1e-3

    def total(place: int, move: float) -> float:
        moved = arrays[f"i{index}"].copy()
        moved.reshape(-1)[place] += move
        found = run(program, {**arrays, f"i{index}": moved}, reference=reference).values()
        return sum(float(v.reshape(-1) @ np.cos(np.arange(v.size) + 1)) for v in found)

    def slope(place: int, size: float) -> float:
        return (total(place, size) - total(place, -size)) / (2 * size)

    places = range(min(arrays[f"i{index}"].size, 6))
    both = [(slope(k, step), slope(k, step / 4)) for k in places]
    return [near for far, near in both if abs(near) <= 2 * abs(far)]


def found() -> Iterator[str]:
    """Operators with an input that has a slope, but neither a gradient nor a refusal."""
    seen: set[object] = set()
    for case in every_case(3):
        if case.since > NEWEST:
            continue
        dtype = np.float32 if case.oracle is not None else case.dtypes[0]
        given = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in case.arrays.items()}
        reference = case.reference and dtype == np.float64
        opset = min(NEWEST, case.until)
        trace, _, _ = traced(case.formula, given, opset, "sizes")
        for node in list(trace.nodes):
            attributes = {n: a.SerializeToString() for n, a in node.attributes.items()}
            key = (node.op_type, str(attributes), *(t is None for t in node.inputs))
            if key in seen or node.captures or RULES.rounds(node.domain, node.op_type):
                continue  # one that rounds is passed straight through, which is a choice
            seen.add(key)
            tensors = {f"i{k}": t for k, t in enumerate(node.inputs) if t is not None}
            arrays: Mapping[str, Array] | None = None
            for index, tensor in enumerate(node.inputs):
                if (
                    tensor is None
                    or not tensor.is_float
                    or not any(o.is_float for o in node.outputs)
                ):
                    continue
                if arrays is None:
                    program = build(trace, tensors, name="inputs")
                    arrays = run(program, given, reference=reference)
                if arrays[f"i{index}"].size and omits(node, trace.opsets, arrays, index):
                    slope = slopes(node, trace.opsets, arrays, index, reference)
                    if max(map(abs, slope), default=0) > 1e-3:
                        yield f"{node.op_type}, input {index} ({case.name}): {slope}"


def test_input_without_a_gradient_has_no_slope() -> None:
    assert not list(found())


@pytest.mark.parametrize(
    ("operator", "place", "words"),
    [
        ("Resize", 1, "by its input roi"),
        ("Resize", 2, "by its input scales"),
        ("RoiAlign", 1, "by its regions"),
        ("Dropout", 1, "by its input ratio"),
    ],
)
def test_refused_where_another_way_has_a_gradient(operator: str, place: int, words: str) -> None:
    """The parameter also reaches the loss by a sum, so that what is left out would not be noticed."""
    trace = Trace({"": 18})
    x, p = trace.input("x", np.float32, (1, 1, 4, 4)), trace.input("p", np.float32, (2, 4))
    op = trace.op
    if operator == "Resize":
        given: list[Tensor | None] = [x, op.Reshape(p, [-1]), op.constant([1.0, 1.0, 1.5, 1.5])]
        if place == 2:
            given[1:] = [None, op.Reshape(op.Slice(p, [0], [1], [0]), [-1])]
        how = "tf_crop_and_resize" if place == 1 else "half_pixel"
        y = op.Resize(*given, mode="linear", coordinate_transformation_mode=how)
    elif operator == "RoiAlign":
        y = op.RoiAlign(x, p, op.constant([0, 0]), output_height=2, output_width=2)
    else:
        y = op.Dropout(x, op.ReduceMax(p, keepdims=0), op.constant(True))
    loss = op.ReduceSum(y, keepdims=0) + op.ReduceSum(p, keepdims=0)
    with pytest.raises(NoGradientRule, match=words):
        gradients([(loss, None)], [p], RULES)
    assert gradients([(loss, None)], [x], RULES)


def test_a_deformed_convolution_needs_the_sizes_of_its_weights() -> None:
    trace = Trace({"": 19})
    x = trace.input("x", np.float32, (1, 2, 5, 5))
    offset = trace.input("offset", np.float32, (1, 18, 3, 3))
    for rows, refused in (("rows", True), (4, False)):
        weight = trace.input(f"w {rows}", np.float32, (rows, 2, 3, 3))
        loss = trace.op.ReduceSum(trace.op.DeformConv(x, weight, offset), keepdims=0)
        if refused:
            with pytest.raises(NoGradientRule, match="weights of unknown shape"):
                gradients([(loss, None)], [x], RULES)
        else:
            assert gradients([(loss, None)], [x], RULES)
