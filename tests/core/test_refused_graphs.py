"""Small models that are refused at read, with the node and the reason; and large ones that are not.

Attributes that the standard forbids: numbers that are no axes of the tensor, that are given twice, or that
must count from 1, in attributes, in constants, in functions and in branches. The oracle is onnxruntime:
what it does not run is refused, and what is not refused can be exported and loaded.

Memory or time out of all proportion: tensors that grow step by step, each step within its bounds, along the
batch axis or any other, in the graph and in its branches; graphs that grow by functions or loops written
out. And what real models have, a chain of 10,000 nodes or a GPT-2 of 12 layers among it, is not refused.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, helper

from ortflex_core import Model, ModelError, OrtflexError, Trace, internals_of, require_runtime
from ortflex_core.compiler.onnx_files.vetting import MOST_ADDED, MOST_NODES, vet
from tests import models
from tests.training import make, regression

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
    values = {"W": np.linspace(1, 2, 16).reshape(1, 4, 4), **(constants or {})}
    return models.model(nodes, *ends, values, opset=opset)


def step(operator: str, *more: str, **attributes: Any) -> NodeProto:
    outputs = ["b", "other"] if operator == "TopK" else ["b"]
    return node(operator, ["a", *more], outputs, "step", **attributes)


def runs(model: ModelProto) -> bool:
    try:
        models.predict(model, {"X": X})
    except Exception:  # those of onnxruntime have no class in common
        return False
    return True


KERNEL = {"k": np.ones((1, 1, 2, 2), np.float32)}
INDICES = {
    "Gather": np.array([0]),
    "GatherElements": np.zeros((1, 1, 1, 1), np.int64),
    "TopK": np.array([1]),
    "LayerNormalization": np.ones(4, np.float32),
    "Compress": np.array([True]),
}
ALONG = ("Softmax", "LogSoftmax", "Hardmax", "Split", "LpNormalization", "Concat")
WRONG_AXES = {"twice": [1, 1], "twice, once from the end": [1, -3], "beyond": [7], "before": [-6]}


def _cases() -> Iterator[tuple[str, ModelProto, str]]:
    """The operator and what is wrong with it, a model, and the attribute."""
    for operator, value in product(("Conv", "ConvTranspose"), (0, -1)):
        grouped = around(step(operator, "k", group=value), KERNEL)
        yield f"{operator} of group {value}", grouped, "group"
        for name in ("strides", "dilations"):
            given = step(operator, "k", **{name: [1, value]})
            yield f"{operator} of {name} {value}", around(given, KERNEL), name
    for operator, name in product(
        ("MaxPool", "AveragePool", "LpPool"), ("kernel_shape", "strides")
    ):
        given = step(operator, **{"kernel_shape": [2, 2], name: [0, 1]})
        yield f"{operator} of {name} 0", around(given), name
    yield "DepthToSpace of 0", around(step("DepthToSpace", blocksize=0)), "blocksize"
    yield "LRN of 0", around(step("LRN", size=0)), "size"
    yield "Transpose twice", around(step("Transpose", perm=[0, 1, 2, 2])), "perm"
    for axis in (4, -5):
        for operator in ALONG:
            yield f"{operator} along {axis}", around(step(operator, axis=axis)), "axis"
        for operator, index in INDICES.items():
            given = step(operator, "i", axis=axis)
            yield f"{operator} along {axis}", around(given, {"i": index}), "axis"
        yield f"CumSum along {axis}", around(step("CumSum", "i"), {"i": np.array(axis)}), "axis"
    for how, axes in WRONG_AXES.items():
        for operator in ("ReduceMean", "ReduceMax", "ReduceL2", "Squeeze", "Unsqueeze"):
            if (operator, how) != ("Unsqueeze", "twice, once from the end"):
                yield f"{operator} {how}", around(step(operator, axes=axes), opset=12), "axes"
        for operator, opset in (("ReduceSum", 17), ("ReduceMean", 18), ("Squeeze", 17)):
            made = around(step(operator, "i"), {"i": np.array(axes)}, opset)
            yield f"{operator} by a constant {how}", made, "axes"
        ends = {"from": np.zeros(len(axes), int), "to": np.ones(len(axes), int)}
        yield f"Slice {how}", around(step("Slice", *ends, "i"), {"i": axes, **ends}), "axes"


CASES = {case: (model, name) for case, model, name in _cases()}
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
        function = "f", "convolved", ["x", "k"], ["y"], [inner], opsets, ["g"]
        model.functions.append(helper.make_function(*function))
        if group:
            Model(model)
        else:
            with pytest.raises(ModelError, match="the group of the ConvTranspose"):
                Model(model)
    then_branch, else_branch = (
        helper.make_graph(
            [node("CumSum", ["a", f"axis{k}"], [f"b{k}"], f"in{k}")],
            "branch",
            [],
            [models.floats(f"b{k}", "N", 1, 4, 4)],
            [onnx.numpy_helper.from_array(np.array(3 + k), f"axis{k}")],
        )
        for k in range(2)
    )
    choice = node("If", ["yes"], ["b"], "step", then_branch=then_branch, else_branch=else_branch)
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


# Memory and time out of all proportion -------------------------------------------------------------


def parsed(body: str, opset: int = 17) -> ModelProto:
    weights = {"w": np.full((1, 1), 2.0), "by": np.array([2, 1]), "scales": np.array([2.0, 1.0])}
    return models.parsed(body, weights, "float[N, 1] x", "float[N, 1] y", opset=opset)


def doubled(step: str, times: int, around: str = "{}") -> ModelProto:
    """``x @ w``, a step repeated on its result, and the largest value of that added to it."""
    steps = "  ".join(
        step.replace("<a>", f"t{k}").replace("<b>", f"t{k + 1}") for k in range(times)
    )
    body = f"t0 = MatMul(x, w)  {steps}  top = ReduceMax <keepdims = 0> (t{times})"
    return parsed(around.replace("{}", body) + "  y = Add(t0, top)")


CONCAT = "<b> = Concat <axis = 0> (<a>, <a>)"
STEPS = {
    "concat": CONCAT,
    "concat in another axis": "<b> = Concat <axis = 1> (<a>, <a>)",
    "tile": "<b> = Tile(<a>, by)",
    "expand": (
        "<a>_1 = Unsqueeze(<a>, by1)  <a>_2 = Expand(<a>_1, to)  <b> = Reshape(<a>_2, column)"
    ),
    "resize": "<b> = Resize(<a>, , scales)",
    "outer product": "<a>_t = Transpose(<a>)  <a>_m = MatMul(<a>, <a>_t)  <b> = Reshape(<a>_m, column)",
    "einsum": '<a>_m = Einsum <equation = "ij,kj->ik"> (<a>, <a>)  <b> = Reshape(<a>_m, column)',
}
HEAD = (
    "by1 = Constant <value = int64[1] {1}> ()  column = Constant <value = int64[2] {-1, 1}> () "
    "to = Constant <value = int64[3] {1, 2, 1}> () "
)


@pytest.mark.parametrize("what", STEPS)
def test_tensors_that_grow_step_by_step_are_refused(what: str) -> None:
    """24 doublings of the batch's rows, or four squares of them: gigabytes from a kilobyte."""
    squares = what in ("outer product", "einsum")
    with pytest.raises(ModelError, match="would take"):
        Model(doubled(STEPS[what], 4 if squares else 24, HEAD + "{}"))


def test_tensors_that_grow_in_a_branch_are_refused() -> None:
    def branch(u: str) -> str:
        grown = "  ".join(f"{u}{k + 1} = Concat <axis = 0> ({u}{k}, {u}{k})" for k in range(24))
        return (
            f"() => (float p) {{ {u}0 = Identity(m)  {grown} p = ReduceMax<keepdims = 0>({u}24) }}"
        )

    model = parsed(
        "m = MatMul(x, w)  most = ReduceMax <keepdims = 0> (m)  yes = Greater(most, most) "
        f"top = If(yes) <then_branch = a {branch('u')}, else_branch = b {branch('v')}> "
        "y = Add(m, top)"
    )
    with pytest.raises(ModelError, match="would take"):
        Model(model)


def test_many_large_tensors_are_refused() -> None:
    """Each is below the bound of one tensor; together they are not."""
    steps = "  ".join(
        f"c{k} = Constant <value = int64[2] {{{2**20 + k}, 50}}> ()  f{k} = ConstantOfShape(c{k}) "
        f"r{k} = ReduceMax <keepdims = 0> (f{k})"
        for k in range(8)
    )
    sums = "  ".join(f"s{k + 1} = Add(s{k}, r{k})" for k in range(8))
    with pytest.raises(ModelError, match=r"large tensors would take \d+ bytes together"):
        Model(parsed(f"s0 = MatMul(x, w)  {steps}  {sums}  y = Identity(s8)"))


def test_a_few_doublings_train() -> None:
    make(doubled(CONCAT, 4), backend="fused", epochs=1).fit(np.ones((8, 1)), np.ones((8, 1)))


def test_sizes_of_any_length_are_written() -> None:
    """A size of more than 4300 digits is no number that Python writes into a message."""
    model = models.linear()
    inputs = list(model.graph.node[0].input)[:2]
    equation = "ij,jk->" + "j" * 20_000
    model.graph.node[0].CopyFrom(node("Einsum", inputs, ["XW"], equation=equation))
    with pytest.raises(ModelError, match=r"would take more than 10\^30 bytes"):
        Model(model)


def chain(length: int) -> ModelProto:
    last = length - 1
    steps = (f"t{k + 1} = {'Relu' if k % 100 else 'Tanh'}(t{k})" for k in range(last))
    body = f"t0 = MatMul(X, coef)  {'  '.join(steps)}  Y = Identity(t{last})"
    return models.parsed(body, {"coef": np.ones((5, 1))}, "float[N, 5] X", "float[N, 1] Y")


def test_a_chain_of_10_000_nodes_is_read_in_time() -> None:
    """Seconds of the processor, which a quadratic step anywhere would make minutes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    trainer = make(chain(10_000), backend="fused", epochs=1)
    trainer.predict(np.ones((2, 5), np.float32))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 60


@pytest.mark.slow
def test_a_chain_of_10_000_nodes_trains() -> None:
    make(chain(10_000), backend="fused", epochs=1).fit(*regression(rows=8))


@pytest.mark.parametrize("inside", ["the graph", "functions", "a branch"])
def test_the_number_of_nodes_is_bounded_also_in_subgraphs_and_functions(inside: str) -> None:
    """As many as there may be pass, one more is refused; those of functions and branches add up."""

    def vetted(count: int) -> None:
        model = ModelProto()
        relu = node("Relu", ["x"], ["y"])
        if inside == "functions":
            opsets = [helper.make_opsetid("", 17)]
            for k in range(4):
                share = [relu] * (count // 4 + (count % 4 if k == 0 else 0))
                made = helper.make_function("f", f"f{k}", ["x"], ["y"], share, opsets)
                model.functions.append(made)
        elif inside == "a branch":
            branch = helper.make_graph([relu] * (count - 1), "g", [], [])
            model.graph.node.append(node("If", ["c"], ["y"], then_branch=branch))
        else:
            model.graph.node.extend([relu] * count)
        vet(model, "the model")

    vetted(MOST_NODES)
    with pytest.raises(ModelError, match=f"has {MOST_NODES + 1} nodes, more than the {MOST_NODES}"):
        vetted(MOST_NODES + 1)


def test_a_gpt_2_of_12_layers_is_far_from_all_bounds(tmp_path: Path) -> None:
    """As torch exports it, narrow: its nodes are those of the wide one, and 1 % of the bound."""
    pytest.importorskip("torch")
    from tests.benchmarks import large_networks

    path, _, _ = large_networks.made("gpt", tmp_path, width=24, words=50, places=8)
    model = onnx.load(path)
    assert len(model.graph.node) > 400
    vet(model, "the model")
    assert len(model.graph.node) * 50 < MOST_NODES


def test_loops_one_after_another_are_not_all_written_out() -> None:
    """Each is short enough to be written out, all of them are not: the rest stay loops."""
    loop = (
        "s{b} = Loop(n, , s{a}) <body = b{a} (int64 i{a}, bool g{a}, float[N, 1] t{a}) => "
        "(bool o{a}, float[N, 1] u{a}) {{ o{a} = Identity(g{a})  u{a} = Tanh(t{a}) }}>"
    )
    fits = MOST_ADDED // 128
    count = fits + 6
    loops = "  ".join(loop.format(a=k, b=k + 1) for k in range(count))
    head = "s0 = MatMul(x, w)  n = Constant <value = int64 {64}> ()"
    model = Model(parsed(f"{head}  {loops}  y = Identity(s{count})"))
    trace = Trace(model.opsets)
    model.replay(trace, ["y"], {"x": trace.input("x", np.float32, ("N", 1))})
    operators = [made.op_type for made in trace.nodes]
    assert operators.count("Tanh") == 64 * fits
    assert operators.count("Loop") == 6


def test_loops_written_out_do_not_multiply() -> None:
    """Loops inside one another, each short enough to be written out: 32^3 and 8^4 nodes."""
    for levels, count in ((3, 32), (4, 8)):
        body = f"z{levels} = Tanh(s{levels})"
        for k in range(levels, 0, -1):
            result = f"z{k}"
            body = (
                f"z{k - 1} = Loop(n, , s{k - 1}) <body = b{k} (int64 i{k}, bool g{k}, float[N, 1] "
                f"s{k}) => (bool o{k}, float[N, 1] {result}) {{ o{k} = Identity(g{k})  {body} }}>"
            )
        model = parsed(
            f"s0 = MatMul(x, w)  n = Constant <value = int64 {{{count}}}> ()  {body} y = Identity(z0)"
        )
        trainer = make(model, backend="fused", epochs=1)
        assert trainer.predict(np.ones((2, 1), np.float32)).shape == (2, 1)
        trainer.per_sample_losses(np.ones((2, 1)), np.ones((2, 1)))
        assert sum(p.nodes for p in internals_of(trainer).live.evaluator.programs.values()) < 20_000
