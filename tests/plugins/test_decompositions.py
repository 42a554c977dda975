"""Decompositions: equal to onnxruntime's kernels, trained, refused by name where they are not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from ortflex import Trainer
from ortflex_core import (
    BrokenPlugin,
    DecompositionKit,
    Decompositions,
    Model,
    ModelError,
    NotDecomposed,
    OrtflexError,
    Unsupported,
    check_model,
    require_runtime,
)
from ortflex_core.testing.running import plugins
from tests import models
from tests.plugins.decomposition_cases import FAMILIES, Case, draw


def test_every_family_of_ours_has_cases() -> None:
    entries = [e.name for e in plugins()["decompositions"] if e.distribution == "ortflex"]
    assert sorted(entries) == sorted(FAMILIES)


FIRST = {
    **dict.fromkeys(("quantization", "operator_format", "normalization"), (1, 22)),
    "attention": (1, 24),
}
"""The first runtime whose kernels are an oracle: older ones crash on some forms, and give other values
to the rows of GroupQueryAttention that are padding."""


class TestFamilies(DecompositionKit):
    @pytest.fixture(params=FAMILIES)
    def family(self, request: Any) -> Any:
        return request.param

    @pytest.fixture
    def component(self, family: str) -> Any:
        return plugins()["decompositions"].load(f"ortflex/{family}")

    @pytest.fixture
    def cases(self, family: str) -> Sequence[Case]:
        if require_runtime().version_info < FIRST.get(family, (0,)):
            pytest.skip("the kernels of this runtime crash on some of these forms")
        return FAMILIES[family]


def network(nodes: str, weights: dict[str, Any], **domains: int) -> ModelProto:
    """x [N, 4] to y [N, …] through some nodes."""
    ends = "float[N, 4] x", "float[N, M] y"
    return models.parsed(nodes, weights, *ends, com_microsoft=1, **domains)


def fused() -> ModelProto:
    nodes = """
        [first] z = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(x, W)
        [gelu] h = com.microsoft.BiasGelu(z, b)
        [last] y = MatMul(h, V)
    """
    return network(nodes, {"W": draw(6, 4), "b": draw(6), "V": draw(6, 2)})


def test_a_fused_network_trains_like_torch_and_is_exported_as_it_was() -> None:
    torch = pytest.importorskip("torch")
    model, rng = fused(), np.random.default_rng(0)
    x, y = (rng.standard_normal((8, n)).astype(np.float32) for n in (4, 2))
    trainer = Trainer(model, loss="squared_error", optimizer="sgd", learning_rate=0.1)
    trainer.step((x, y))
    weights = {name: array.astype(float) for name, array in models.weights_of(model).items()}
    w, b, v = (torch.tensor(weights[n], requires_grad=True) for n in ("W", "b", "V"))
    hidden = torch.nn.functional.gelu(0.5 * torch.tensor(x, dtype=torch.float64) @ w.T + b)
    ((hidden @ v - torch.tensor(y)) ** 2).mean().backward()
    for name, tensor in {"W": w, "b": b, "V": v}.items():
        wanted = (tensor - 0.1 * tensor.grad).detach().numpy()
        np.testing.assert_allclose(trainer.get_state()[name], wanted, rtol=1e-5, atol=1e-6)
    assert trainer.export().graph.node == model.graph.node


def test_check_says_what_is_decomposed() -> None:
    report = check_model(fused(), "squared_error")
    assert report.trainable
    kinds = [(n.operator, n.domain, n.status) for n in report.nodes]
    assert kinds == [
        ("FusedMatMul", "com.microsoft", "trainable"),
        ("BiasGelu", "com.microsoft", "trainable"),
        ("MatMul", "ai.onnx", "trainable"),
    ]
    assert report.nodes[0].reason == "decomposed into Transpose, MatMul, Mul"
    assert report.nodes[0].parameters == ("W",)


def test_a_form_that_is_not_decomposed_is_named_with_its_reason() -> None:
    node = """y = com.microsoft.FusedGemm<activation = "ScaledTanh", activation_alpha = 2.0,
        activation_beta = 3.0>(h, W)"""
    alone = network(f"h = Abs(x) {node}", {"W": draw(4, 2)})
    model = network(f"h = MatMul(x, V) {node}", {"V": draw(4, 3), "W": draw(3, 2)})
    text = "FusedGemm of com.microsoft is not computed by standard operators with activation='ScaledTanh'"
    assert Model(model).decomposed.refused == {"y": text}
    report = check_model(model, "squared_error")
    assert (report.nodes[1].status, report.nodes[1].reason) == ("no rule", text)
    with pytest.raises(ModelError, match=text):
        Trainer(alone, loss="squared_error")
    with pytest.raises(Unsupported, match=text):
        Trainer(model, loss="squared_error", backend="fused").step((draw(2, 4), draw(2, 2)))


REFUSED = {
    ("com.microsoft.nchwc", "ReorderInput"): (1, 1, "save it with ORT_ENABLE_EXTENDED"),
    ("com.microsoft", "DynamicQuantizeLSTM"): (12, 3, "train the float file and quantize the res"),
}


def test_packed_queries_of_unknown_size_are_named() -> None:
    """How they are split into queries, keys and values depends on the size."""
    node = """y = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(
        x, , , , , lengths, total)"""
    for width, reasons in ((128, {}), ("D", {"y": "with packed queries of unknown size"})):
        inputs = f"float[N, 4, {width}] x, int32[N] lengths, int32[1] total"
        model = models.parsed(node, {}, inputs, "float[N, 4, M] y", com_microsoft=1)
        refused = Model(model).decomposed.refused
        assert refused.keys() == reasons.keys()
        assert all(reason in refused[name] for name, reason in reasons.items())


@pytest.mark.parametrize("key", REFUSED, ids=lambda key: key[1])
def test_an_operator_that_no_formula_computes_says_what_to_do(key: tuple[str, str]) -> None:
    count, outputs, text = REFUSED[key]
    outs = ", ".join(["y", "other", "third"][:outputs])
    node = f"[odd] {outs} = {'.'.join(key)}({', '.join(['h'] * count)})"
    model = network(f"h = MatMul(x, V) {node}", {"V": draw(4, 3)}, com_microsoft_nchwc=1)
    text = f"{key[1]} 'odd' of {key[0]} is not computed by standard operators because .*{text}"
    report = check_model(model, "squared_error")
    assert report.nodes[1].status == "no rule"
    assert re.search(text, report.nodes[1].reason)
    with pytest.raises(OrtflexError, match=text):
        Trainer(model, loss="squared_error", backend="fused").step((draw(2, 4), draw(2, 2)))


def test_an_error_explains_each_operator_once() -> None:
    names = [*(f"h{k}" for k in range(8)), "y"]
    nodes = [
        f"{after} = com.microsoft.QLinearSigmoid({', '.join([before] * 5)})"
        for before, after in pairwise(names)
    ]
    made = Model(network(" ".join(["h0 = MatMul(x, V)", *nodes]), {"V": draw(4, 3)})).decomposed
    assert (len(made.refused), len(made.explanations())) == (8, 1)


def test_nodes_in_the_branches_of_an_if_are_decomposed() -> None:
    nodes = """
        z = MatMul(x, W) s = ReduceSum<keepdims = 0>(x) c = Cast<to = 9>(s)
        y = If(c)<
            then_branch = t () => (float[N, 2] a) { a = com.microsoft.Gelu(z) },
            else_branch = e () => (float[N, 2] b) { b = com.microsoft.FastGelu(z) }
        >
    """
    model = network(nodes, {"W": draw(4, 2)})
    inner = Model(model)
    assert len(inner.decomposed.reasons) == 2
    trainer = Trainer(model, loss="squared_error", backend="fused", learning_rate=0.1)
    before = trainer.get_state()["W"].copy()
    trainer.step((draw(8, 4), draw(8, 2)))
    assert np.abs(trainer.get_state()["W"] - before).max() > 1e-4


def test_a_formula_that_fails_is_named_with_its_distribution() -> None:
    from ortflex_core import Entry
    from ortflex_core.compiler.operators import decompositions

    family = Decompositions()

    @family.operator("BiasGelu")
    def wrong(op: Any, node: Any) -> Any:
        return [node.input(0).nothing]

    entry = Entry("decompositions", "mine", "mine:D", "mine", "1", None)  # type: ignore[arg-type]
    table = {key: [(entry, formula)] for key, formula in family.table.items()}
    with pytest.raises(BrokenPlugin, match=r"BiasGelu 'gelu'.*mine 1.*nothing.*uninstall mine"):
        decompositions.decompose(fused(), plugins(), lambda *_: False, table)


def test_an_input_that_is_not_read_is_refused() -> None:
    from ortflex_core import Call, Trace

    trace = Trace({"": 17})
    inputs = [trace.input(n, np.float32, (2, 3)) for n in "ab"]
    node = Call(trace, "Any", inputs, {}, [True])
    node.required(0)
    with pytest.raises(NotDecomposed, match="with input 1"):
        node.check_read()
