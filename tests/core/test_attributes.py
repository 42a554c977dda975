"""Attributes that the standard forbids are refused at read, with the node and the attribute.

The class: numbers that are no axes of the tensor, that are given twice, or that must count from 1, in
attributes, in constants, in functions and in branches. The oracle is onnxruntime: what it does not run
is refused, and what is not refused can be exported and loaded.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, helper

from ortflex_core import Model, ModelError, OrtflexError, require_runtime
from tests import models
from tests.training import make

pytestmark = pytest.mark.sampled

node = helper.make_node
X = np.random.default_rng(0).standard_normal((2, 1, 4, 4)).astype(np.float32)


def around(step: NodeProto, constants: dict[str, Any] | None = None, opset: int = 17) -> ModelProto:
    """``X + Σ step(X · W)``: the step has any shape."""
    total = ["s"] if opset < 13 else ["s", ""]
    nodes = [
        node("Mul", ["X", "W"], ["a"], "product"),
        step,
        node("ReduceSum", ["b"], total[:1], "sum", keepdims=0),
        node("Add", ["X", "s"], ["Y"], "end"),
    ]
    ends = [models.floats("X", "N", 1, 4, 4)], [models.floats("Y", "N", 1, 4, 4)]
    values = {"W": np.linspace(1, 2, 16, dtype=np.float32).reshape(1, 4, 4)}
    made = models.model(nodes, *ends, values)
    for name, value in (constants or {}).items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    del made.opset_import[:]
    made.opset_import.append(helper.make_opsetid("", opset))
    return made


def step(operator: str, *more: str, **attributes: Any) -> NodeProto:
    outputs = ["b", "other"] if operator == "TopK" else ["b"]
    return node(operator, ["a", *more], outputs, "step", **attributes)


def runs(model: ModelProto) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        session.run(None, {"X": X})
    except Exception:  # those of onnxruntime have no class in common
        return False
    return True


KERNEL = {"k": np.ones((1, 1, 2, 2), np.float32)}
CASES: dict[str, tuple[ModelProto, str]] = {
    f"{operator} of group {group}": (around(step(operator, "k", group=group), KERNEL), "group")
    for operator in ("Conv", "ConvTranspose")
    for group in (0, -1)
}
CASES |= {
    f"{operator} of {name} {value}": (
        around(step(operator, "k", **{name: [1, value]}), KERNEL),
        name,
    )
    for operator in ("Conv", "ConvTranspose")
    for name in ("strides", "dilations")
    for value in (0, -1)
}
CASES |= {
    f"{operator} of {name} 0": (
        around(step(operator, **{"kernel_shape": [2, 2], name: [0, 1]})),
        name,
    )
    for operator in ("MaxPool", "AveragePool", "LpPool")
    for name in ("kernel_shape", "strides")
}
CASES |= {
    "DepthToSpace of 0": (around(step("DepthToSpace", blocksize=0)), "blocksize"),
    "LRN of 0": (around(step("LRN", size=0)), "size"),
    "Transpose twice": (around(step("Transpose", perm=[0, 1, 2, 2])), "perm"),
}
CASES |= {
    f"{operator} along {axis}": (around(step(operator, axis=axis)), "axis")
    for operator in ("Softmax", "LogSoftmax", "Hardmax", "Split", "LpNormalization", "Concat")
    for axis in (4, -5)
}
CASES |= {
    f"{operator} along {axis}": (around(step(operator, "i", axis=axis), {"i": index}), "axis")
    for operator, index in {
        "Gather": np.array([0]),
        "GatherElements": np.zeros((1, 1, 1, 1), np.int64),
        "TopK": np.array([1]),
        "LayerNormalization": np.ones(4, np.float32),
        "Compress": np.array([True]),
    }.items()
    for axis in (4, -5)
}
CASES |= {
    f"CumSum along {axis}": (around(step("CumSum", "i"), {"i": np.array(axis)}), "axis")
    for axis in (4, -5)
}
WRONG_AXES = {"twice": [1, 1], "twice, once from the end": [1, -3], "beyond": [7], "before": [-6]}
CASES |= {
    f"{operator} {how}": (around(step(operator, axes=axes), opset=12), "axes")
    for operator in ("ReduceMean", "ReduceMax", "ReduceL2", "Squeeze", "Unsqueeze")
    for how, axes in WRONG_AXES.items()
    if (operator, how) != ("Unsqueeze", "twice, once from the end")
}
CASES |= {
    f"{operator} by a constant {how}": (
        around(step(operator, "i"), {"i": np.array(axes)}, opset),
        "axes",
    )
    for operator, opset in (("ReduceSum", 17), ("ReduceMean", 18), ("Squeeze", 17))
    for how, axes in WRONG_AXES.items()
}
CASES |= {
    f"Slice {how}": (
        around(
            step("Slice", "from", "to", "i"),
            {"i": axes, "from": np.zeros(len(axes), int), "to": np.ones(len(axes), int)},
        ),
        "axes",
    )
    for how, axes in WRONG_AXES.items()
}
# onnxruntime takes an axis that is given twice there for one; a gradient would divide by it twice.
LENIENT = ("Reduce", "Squeeze twice", "Squeeze by a constant twice")


@pytest.mark.parametrize("case", CASES)
def test_what_the_standard_forbids_is_refused_at_read(case: str) -> None:
    model, name = CASES[case]
    with pytest.raises(ModelError) as caught:
        Model(model)
    text = str(caught.value)
    assert "step" in text
    # onnx's inference sees some of them first, and says the same in its own words.
    assert f"the {name} of the {case.split()[0]} 'step' must be " in text or "nference" in text
    lenient = case.startswith(LENIENT) and "twice" in case
    fatal = case.endswith("of group 0")  # runtimes end the process; older ones, over more
    if not (lenient or fatal or require_runtime().version_info < (1, 23)):
        assert not runs(model)


def test_attributes_of_functions_and_branches_are_judged() -> None:
    """A group that only the call tells, and an axis inside a branch."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    inner = node("ConvTranspose", ["x", "k"], ["y"], "inner")
    inner.attribute.add(name="group", ref_attr_name="g", type=onnx.AttributeProto.INT)
    for group in (1, 0):
        model = around(node("convolved", ["a", "k"], ["b"], "step", domain="f", g=group), KERNEL)
        model.opset_import.add(domain="f", version=1)
        model.functions.append(
            helper.make_function("f", "convolved", ["x", "k"], ["y"], [inner], opsets, ["g"])
        )
        if group:
            Model(model)
        else:
            with pytest.raises(ModelError, match="the group of the ConvTranspose"):
                Model(model)
    branches = [
        helper.make_graph(
            [node("CumSum", ["a", f"axis{k}"], [f"b{k}"], f"in{k}")],
            "branch",
            [],
            [models.floats(f"b{k}", "N", 1, 4, 4)],
            [onnx.numpy_helper.from_array(np.array(3 + k), f"axis{k}")],
        )
        for k in range(2)
    ]
    choice = node("If", ["yes"], ["b"], "step", then_branch=branches[0], else_branch=branches[1])
    with pytest.raises(ModelError, match="the axis of the CumSum 'in1' must be axes of 4 dim"):
        Model(around(choice, {"yes": np.array(True)}))


@pytest.mark.parametrize("number", range(24))
def test_what_is_not_refused_is_exported_and_loads(number: int) -> None:
    """Whatever numbers attributes have: refused, or an export that onnxruntime runs."""
    rng = Random(f"attributes/{number}")
    axes = rng.choices(range(-6, 6), k=rng.choice((1, 1, 2)))
    numbers = [rng.choice((-1, 0, 1, 1, 2)) for _ in range(2)]
    drawn = [
        around(step("ReduceMean", axes=axes)),
        around(step("Squeeze", axes=axes), opset=12),
        around(step("Unsqueeze", "i"), {"i": np.array(axes)}),
        around(step("Softmax", axis=axes[0])),
        around(step("Gather", "i", axis=axes[0]), {"i": np.array([0])}),
        around(step("AveragePool", kernel_shape=[2, 2], strides=numbers)),
        around(step("Conv", "k", dilations=numbers, group=numbers[0]), KERNEL),
        around(step("Flatten", axis=axes[0])),
    ]
    model = drawn[number % len(drawn)]
    try:
        trainer = make(model, backend="fused", epochs=1, params=["W"])
        trainer.fit(X, X)
        exported = trainer.export()
    except OrtflexError:
        return
    assert runs(exported)
