"""Every operator of the standard has a rule or a reason, and no rule ignores an attribute.

An operator gets attributes in new opsets; a rule that was written before them would compute the old
meaning, without an error. So a rule accounts for each attribute: it asks for it, or declares that it
changes nothing in its formula. These tests walk all attributes of all opsets of the installed onnx.
The table of operators of the backend xla computes what the standard's own cases expect.
"""

from __future__ import annotations

import collections
import functools
import importlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortflex_core import (
    NodeView,
    NoGradientRule,
    Trace,
    build,
    gradients,
    load_rules,
    require_runtime,
)
from ortflex_core.compiler.operators.reverse_mode import Rules, RuleTable
from ortflex_plugins import gradients as package
from ortflex_plugins.cli import operators as page
from ortflex_plugins.operators.calls import NotTranslatable
from ortflex_plugins.operators.numpy_forms import NumpyForms
from ortflex_plugins.operators.translation import DECLARED, OPERATORS, ModelFunction
from tests import models
from tests.gradcheck import FAMILIES, RULES, traced
from tests.node_cases import modules
from tests.plugins.gradient_samples import every_case
from tests.plugins.test_gradient_rules import OLDEST, rules_with_a_gradient
from tests.training import plugins

pytestmark = pytest.mark.once

UNREAD: Mapping[str, set[str]] = {
    # The rule has the type of the output, and its number of elements.
    "Cast": {"round_mode", "saturate", "to"},
    "CastLike": {"round_mode", "saturate"},
    "DequantizeLinear": {"output_dtype"},
    "QuantizeLinear": {"output_dtype", "precision", "saturate"},
    "Flatten": {"axis"},
    "Reshape": {"allowzero"},
    "Split": {"num_outputs"},
    "DeformConv": {"kernel_shape"},
    **{name: {"hidden_size"} for name in ("GRU", "LSTM", "RNN")},
    # It has the indices, the mask or the value of the output.
    "Dropout": {"seed"},
    "LpPool": {"ceil_mode"},
    "MaxUnpool": {"kernel_shape", "pads", "strides"},
    "TopK": {"largest", "sorted"},
    "Unique": {"sorted"},
    "HardSigmoid": {"beta"},
    "Mod": {"fmod"},
    # A summand without influence on the slope.
    "Resize": {"extrapolation_value"},
    "Shrink": {"bias"},
    # The type in which a runtime computes.
    "Attention": {"qk_matmul_output_mode", "softmax_precision"},
    "GroupNormalization": {"stash_type"},
    "Range": {"stash_type"},
    "RMSNormalization": {"stash_type"},
}
"""Declared attributes that no rule reads in any form, and why."""


@functools.cache
def history() -> Mapping[tuple[str, str], Sequence[Any]]:
    """All versions of each operator."""
    found: dict[tuple[str, str], list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.deprecated:
            found.setdefault((schema.domain, schema.name), []).append(schema)
    return found


def attributes_since(op_type: str, opset: int) -> set[str]:
    """The attributes of all versions of an operator from an opset on."""
    versions = history()["", op_type]
    first = max((s.since_version for s in versions if s.since_version <= opset), default=0)
    return {a for s in versions if s.since_version >= first for a in s.attributes}


@pytest.fixture(scope="module")
def reads() -> dict[str, dict[str, set[bool]]]:
    """Whether rules ask for each attribute, over the cases of all rules: {True}, {False} or both."""
    found: Any = collections.defaultdict(lambda: collections.defaultdict(set))

    def record(view: NodeView) -> None:
        node = view._node
        opset, asked = view.trace.opsets.get(node.domain, 1), set(view._asked)
        for name in attributes_of(node.op_type, opset) if not node.domain else ():
            found[node.op_type][name].add(name in asked)

    known: dict[tuple[str, int], list[str]] = {}

    def attributes_of(op_type: str, opset: int) -> list[str]:
        if (op_type, opset) not in known:
            known[op_type, opset] = list(onnx.defs.get_schema(op_type, opset, "").attributes)
        return known[op_type, opset]

    newest = onnx.defs.onnx_opset_version()  # which the runtime may not read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeView, "check_read", record)
        for case in every_case(3):
            arrays = {
                n: a.astype("f") if a.dtype.kind == "f" else a for n, a in case.arrays.items()
            }
            for opset, sizes, seeded in ((OLDEST, "sizes", True), (newest, "names", False)):
                opset = min(max(opset, case.since), case.until)
                told = "sizes" if case.needs_sizes else sizes
                trace, inputs, y = traced(case.formula, arrays, opset, told, case.sized)
                wrt = [t for n, t in inputs.items() if arrays[n].dtype.kind == "f"]
                gradients([(y, trace.input("g", y.dtype, y.shape) if seeded else None)], wrt, RULES)
    return found


def ruled() -> set[str]:
    # See test_gradient_rules.py.
    gone = {"Identity", "CastLike", "MatMulInteger", "ConvInteger"}
    return {name for (domain, name), _ in rules_with_a_gradient() if not domain} - gone


def test_every_rule_accounts_for_every_attribute_of_every_opset(reads: Any) -> None:
    ignored = {
        (op_type, name)
        for op_type in ruled()
        for name in attributes_since(op_type, OLDEST)
        if reads[op_type][name] != {True} and name not in RULES.attributes("", op_type)
    }
    assert ignored == set()


def test_what_rules_declare_exists_and_is_read_or_has_a_reason(reads: Any) -> None:
    families = [(key, names) for f in FAMILIES.values() for key, names in f.declared.items()]
    declared = {(*key, name) for key, names in families for name in names}
    # Operators of one rule share its declaration.
    shared = {"Reshape": "axis", "Flatten": "allowzero", "CastLike": "to", "ScatterND": "axis"}
    for domain, op_type, name in declared:
        if shared.get(op_type) != name:
            assert any(name in s.attributes for s in history()[domain, op_type]), (op_type, name)
    standard = {(o, n) for d, o, n in declared if not d and o in ruled()}
    never = {(o, n) for o, n in standard if True not in reads[o][n]}
    never = {(o, n) for o, n in never if n in attributes_since(o, OLDEST)}
    assert never == {(o, n) for o, names in UNREAD.items() for n in names if o in ruled()}


def test_a_rule_that_ignores_an_attribute_is_not_used_for_a_node_that_has_it() -> None:
    """The class of the defect: an operator has a new attribute, and the rule is from before it."""
    old = Rules()
    old.rule("DepthToSpace")(lambda op, n, g: [op.SpaceToDepth(g, blocksize=n.blocksize)])

    def slope(rules: Rules, **attributes: Any) -> Any:
        trace = Trace({"": 17})
        x = trace.input("x", np.float32, (1, 4, 2, 2))
        y = trace.op.DepthToSpace(x, blocksize=2, **attributes)
        table = RuleTable({"old": rules, **FAMILIES}, first=["old"])
        return gradients([(y, trace.input("g", y.dtype, y.shape))], [x], table)

    assert slope(old)
    assert slope(old, mode="DCR")
    with pytest.raises(NoGradientRule, match="mode = 'CRD'"):
        slope(old, mode="CRD")
    declaring = Rules()
    declaring.rule("DepthToSpace", attributes=["mode"])(old.table["", "DepthToSpace"][0][1])
    assert slope(declaring, mode="CRD")


def test_the_body_of_the_standard_replaces_a_rule_that_ignores_an_attribute() -> None:
    """LeakyRelu's body has the attribute, so its gradient is right."""
    careless = Rules()
    careless.rule("LeakyRelu")(lambda op, n, g: [g * op.Sign(op.Relu(n.inputs[0]))])
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, (3,))
    table = RuleTable({"careless": careless, **FAMILIES}, first=["careless"])
    y = trace.op.LeakyRelu(x, alpha=0.25)
    (g,) = gradients([(y, trace.op.constant([1.0, 2.0, 4.0]))], [x], table)
    program = build(trace, {"slope": g}, name="gradient")
    [found] = ReferenceEvaluator(program.proto()).run(None, {"x": np.float32([-1, 2, -3])})
    np.testing.assert_allclose(found, [0.25, 2.0, 1.0])


def test_attributes_of_operators_outside_the_standard_have_no_default() -> None:
    family = Rules()
    family.rule("Mystery", domain="own")(lambda op, n, g: [g * n.factor])

    def slope(**attributes: Any) -> Any:
        trace = Trace({"": 17, "own": 1})
        x = trace.input("x", np.float32, (2,))
        protos = {k: helper.make_attribute(k, v) for k, v in attributes.items()}
        kinds = [(TensorProto.FLOAT, (2,))]
        [y] = trace.node("Mystery", [x], protos, domain="own", outputs=1, types=kinds)
        return gradients([(y, None)], [x], RuleTable({"own": family}))

    assert slope(factor=2.0)
    with pytest.raises(NoGradientRule, match=r"shift = 1\.0"):
        slope(factor=2.0, shift=1.0)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_the_gradient_of_space_to_depth_knows_its_mode(mode: str) -> None:
    if onnx.defs.onnx_opset_version() < 28:
        pytest.skip("this onnx does not know the attribute")
    trace = Trace({"": 28})
    x = trace.input("x", np.float32, (2, 3, 4, 6))
    y = trace.op.SpaceToDepth(x, blocksize=2, mode=mode)
    (g,) = gradients([(y, trace.input("g", y.dtype, y.shape))], [x], RULES)
    program = build(trace, {"y": y, "slope": g}, name="gradient")
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 4, 6)), "g": rng.standard_normal((2, 12, 2, 3))}
    feeds = {n: a.astype(np.float32) for n, a in feeds.items()}
    value, slope = ReferenceEvaluator(program.proto()).run(None, feeds)
    # It only moves elements: the gradient moves them back, so <y, g> = <x, slope> for all x and g.
    np.testing.assert_allclose((value * feeds["g"]).sum(), (feeds["x"] * slope).sum(), rtol=1e-4)
    parts = feeds["x"].reshape(2, 3, 2, 2, 3, 2)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    np.testing.assert_array_equal(value, parts.transpose(order).reshape(2, 12, 2, 3))


def test_the_table_of_xla_declares_attributes_that_exist() -> None:
    for op_type, names in DECLARED.items():
        known = attributes_since(op_type, 1)
        shared = {"keepdims", "nearest_mode", "cubic_coeff_a", "extrapolation_value"}
        assert set(names) - known <= shared | {"keep_aspect_ratio_policy"}, op_type
    assert set(DECLARED) <= set(OPERATORS)


@pytest.mark.parametrize(
    ("op_type", "arguments", "attributes"),
    [
        ("Resize", ("x", "", "s"), {"mode": "linear", "exclude_outside": 1}),
        ("Cast", ("x",), {"to": TensorProto.FLOAT16, "saturate": 0}),
    ],
)
def test_the_table_of_xla_refuses_an_attribute_that_it_does_not_read(
    op_type: str, arguments: Any, attributes: Any
) -> None:
    node = helper.make_node(op_type, arguments, ["y"], **attributes)
    kinds = {"x": [1, 1, 4], "s": [3]}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in kinds.items()]
    graph = helper.make_graph([node], "one", inputs, [onnx.ValueInfoProto(name="y")])
    opset = min(28, onnx.defs.onnx_opset_version())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    feeds = [np.ones((1, 1, 4), np.float32), np.float32([1, 1, 2])]
    with pytest.raises(NotTranslatable, match="another value than its default"):
        ModelFunction(model, NumpyForms())(feeds)


@pytest.mark.parametrize(("up", "down"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_is_inf_of_xla_reads_both_attributes(up: int, down: int) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[3] x) => (bool[3] y) '
        f"{{ y = IsInf<detect_positive = {up}, detect_negative = {down}>(x) }}"
    )
    [found] = ModelFunction(model, NumpyForms())([np.float32([np.inf, -np.inf, 0])])
    np.testing.assert_array_equal(found, [bool(up), bool(down), False])


def test_the_package_of_rules_lists_every_family() -> None:
    families = {entry.name for entry in plugins()["gradients"] if entry.owner == "ortflex"}
    listed = set(re.findall(r"``(\w+)``", str(package.__doc__)))
    assert len(families) > 10
    assert families - listed == set()


def test_all_differentiable_operators_can_be_trained_through() -> None:
    """144 that have a derivative, and two products of whole numbers, straight through."""
    rules = load_rules(plugins())
    kinds = {name: page.kind(rules, name) for name in page.standard()}
    counts = Counter(kinds.values())
    if not {"BitCast", "CumProd"} <= set(kinds):
        pytest.skip(f"this onnx does not know opset {page.NEWEST}")
    assert {n for n, found in kinds.items() if found == "no rule"} == set()
    assert counts["rule"] + counts["resolved"] == 144 + 2
    assert counts["decomposed"] == 2


@pytest.mark.parametrize("opset", range(page.OLDEST, page.NEWEST + 1))
def test_every_operator_of_every_opset_has_a_rule_or_a_reason(opset: int) -> None:
    rules = load_rules(plugins())
    assert [n for n in page.standard(opset) if page.kind(rules, n, opset) == "no rule"] == []


def test_operators_outside_the_standard_are_unknown_without_a_plugin() -> None:
    assert load_rules(plugins()).lookup("com.microsoft", "FusedMatMul", 1) == (False, None)


def test_the_page_has_every_operator() -> None:
    text = "\n\n".join(page.operator_blocks(plugins(), None))
    missing = [n for n in page.standard() if f"| {n} |" not in text and n not in text]
    assert missing == []
    assert "| Gemm |  | matmul | yes |" in text
    assert "no rule is missing" in text
    assert "## Operators without a rule" not in text


# numpy has no product of bfloat16 with float32 that stays bfloat16, and no Einsum of it.
_PLAIN = (np.ndarray, np.generic, onnx.TensorProto)
NOT_IN_NUMPY = ("bf16", "bfloat16")


def standard_cases() -> Iterator[tuple[str, Any]]:
    """(operator, case) of the standard's cases on tensors; the modules may be imported already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cases overflow on purpose
        for module in modules():
            importlib.import_module(module)
    package = importlib.import_module("onnx.backend.test.case.node")
    operator, seen = "", set()
    for case in package._NodeTestCases:
        if "_expanded" not in case.name:
            operator = case.model.graph.node[0].op_type
        plain = all(isinstance(v, _PLAIN) for part in case.data_sets[0] for v in part)
        standard = all(o.domain in ("", "ai.onnx") for o in case.model.opset_import)
        if plain and standard and case.name not in seen:
            seen.add(case.name)
            yield operator, case


def as_array(value: Any) -> Any:
    """An input or output of a case as an array."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return np.asarray(value)


def check(case: Any, got: list[Any]) -> None:
    for mine, theirs in zip(got, case.data_sets[0][1], strict=True):
        assert mine is not None, case.name
        value, wanted = np.asarray(mine), as_array(theirs)
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), case.name
        if wanted.dtype.kind == "O":
            continue
        if wanted.dtype.kind not in "biu":
            loose = wanted.dtype.itemsize <= 2
            value, wanted = value.astype(np.float64), wanted.astype(np.float64)
            tolerance = 2e-2 if loose else 1e-4
            close = np.allclose(value, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert close, f"{case.name}: {np.nanmax(np.abs(value - wanted))}"
        else:
            assert np.array_equal(value, wanted), case.name


def test_numpy_form_gives_the_expected_outputs_of_the_standard() -> None:
    translated: set[str] = set()
    for operator, case in standard_cases():
        if any(word in case.name for word in NOT_IN_NUMPY):
            continue
        inputs = [as_array(v) for v in case.data_sets[0][0]]
        try:
            got = ModelFunction(case.model, NumpyForms())(inputs)
        except NotTranslatable:
            continue
        check(case, got)
        translated.add(operator)
    assert len(translated) >= 150
    assert set(OPERATORS) - translated == {"GlobalLpPool"}  # it has no case


RNG = np.random.default_rng(0)
SHAPES = {"X": (3, 2, 4), "W": (1, 3, 4), "R": (1, 3, 3)}
FEEDS = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
NUMBERS = {"LeakyRelu": "a", "ThresholdedRelu": "a", "Elu": "a"}
NUMBERS |= dict.fromkeys(("HardSigmoid", "Affine", "ScaledTanh"), "ab")
NAMES = ["Tanh", "Sigmoid", "Relu", "Softsign", "Softplus", *NUMBERS]
WITHOUT_DEFAULTS = ("ThresholdedRelu", "Affine", "ScaledTanh")


def layer(name: str, given: str) -> onnx.ModelProto:
    numbers = {"a": ("activation_alpha", 0.3), "b": ("activation_beta", 0.4)}
    options = {key: [value] for key, value in (numbers[letter] for letter in given)}
    node = helper.make_node("RNN", [*FEEDS], ["Y"], hidden_size=3, activations=[name], **options)
    inputs = [models.floats(n, *shape) for n, shape in SHAPES.items()]
    return models.model([node], inputs, [helper.make_tensor_value_info("Y", 1, None)], {})


def computed(model: onnx.ModelProto) -> Any:
    return ModelFunction(model, NumpyForms())([*FEEDS.values()])[0]


@pytest.mark.parametrize("given", ["", "a", "b", "ab"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_an_activation_that_are_given_or_left_out(name: str, given: str) -> None:
    model = layer(name, given)
    if name in WITHOUT_DEFAULTS and not set(NUMBERS[name]) <= set(given):
        with pytest.raises(NotTranslatable, match=f"{name} without its activation_alpha or _beta"):
            computed(model)
        return
    if set(NUMBERS.get(name, "")) - set(given) and require_runtime().version_info < (1, 23):
        pytest.skip("older runtimes take 0 for a number that is left out")
    wanted = models.predict(model, FEEDS)["Y"]
    np.testing.assert_allclose(computed(model), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["", "ab"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WITHOUT_DEFAULTS)))
def test_names_of_activations_in_other_letters(name: str, given: str) -> None:
    """onnxruntime 1.32 knows the standard's spelling only, so that is the oracle."""
    for other in (name.lower(), name.upper()):
        np.testing.assert_array_equal(computed(layer(other, given)), computed(layer(name, given)))


def test_an_unknown_activation() -> None:
    with pytest.raises(NotTranslatable, match="RNN with the activation Cosine"):
        computed(layer("Cosine", ""))
