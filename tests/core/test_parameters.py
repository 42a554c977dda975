"""What is trained by default: the set that torch trains, on networks exported by torch's older exporter.

The class of mistakes: a weight that meets the data by way of other operators than a product (class tokens,
positions, scales, recurrent and normalized weights) is left out, or a table that is no weight is trained.
The oracle is torch: which parameters have a gradient, found in the file by their values.
"""

from __future__ import annotations

import copy
import logging
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Model, Trainer, choose_parameters, internals_of
from ortflex_core.compiler.problem import parameter_evidence as evidence
from ortflex_core.compiler.problem.description import headline
from tests import models
from tests.training import make, regression

pytestmark = pytest.mark.sampled

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
networks = pytest.importorskip("tests.parameter_networks")
truth = pytest.importorskip("tests.parameter_truth")

BUILDERS = {name: build for _, name, build in networks.networks("torch")}
# What torch's older exporter has no operators for.
NEWER_ONLY = {"spectral_norm", "rms_norm", "transformer", "two_inputs"}
# What cannot be seen: the exporter wrote exp(temperature) as a number called exp.
FOLDED = {("one_and_scale", "dynamo-eval"): {"exp"}}
# Of those whose files differ most between the exporters, the quicker ones.
DYNAMO = {
    ("tokens", "dynamo-eval"),
    ("group_norm", "dynamo-train"),
    ("one_and_scale", "dynamo-train"),
    ("one_and_scale", "dynamo-eval"),
}


def compared(name: str, how: str) -> tuple[set[str], set[str], Any]:
    """What torch trains, what is chosen, and the choices."""
    torch.manual_seed(1)
    net, inputs = BUILDERS[name]()
    truth.randomize(net)
    net.eval()
    trained = truth.trained_values(net, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A pass in training mode moves running statistics: each export has a network of its own.
        proto = truth.exported(copy.deepcopy(net), inputs, how)

        def again() -> Any:
            other = copy.deepcopy(net)
            truth.randomize(other, 5, buffers=False)
            return truth.exported(other, inputs, how)

        weights = truth.weights_of(proto, trained, again)
    model = Model(proto)
    outputs = [o.name for o in model.outputs if o.dtype in (1, 11)]
    choices = {c.name: c for c in choose_parameters(model, outputs, None)}
    used = {i for node in model.ancestors(outputs) for i in node.input}
    expected = {n for n, is_weight in weights.items() if is_weight and n in used}
    return expected, {n for n, c in choices.items() if c.trained}, choices


@pytest.mark.parametrize("how", ["script-train", "script-eval"])
@pytest.mark.parametrize("name", [n for n in BUILDERS if n not in NEWER_ONLY])
def test_what_torch_trains_is_trained_of_the_older_exporters_files(name: str, how: str) -> None:
    expected, chosen, choices = compared(name, how)
    assert chosen == expected, {n: choices[n].reason for n in chosen ^ expected if n in choices}
    assert all(c.reason for c in choices.values())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        case if case in DYNAMO else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(BUILDERS, ["dynamo-train", "dynamo-eval"])
    ],
)
@pytest.mark.once
def test_what_torch_trains_is_trained_of_the_newer_exporters_files(name: str, how: str) -> None:
    expected, chosen, choices = compared(name, how)
    expected -= FOLDED.get((name, how), set())
    assert chosen == expected, {n: choices[n].reason for n in chosen ^ expected if n in choices}


@pytest.mark.slow
@pytest.mark.parametrize("how", truth.EXPORTS)
@pytest.mark.parametrize("package", ["torchvision", "timm", "transformers"])
def test_what_torch_trains_is_trained_of_other_packages_networks(package: str, how: str) -> None:
    """At least 95 of 100; frozen parameters that no file tells from others are the rest."""
    pytest.importorskip(package)
    equal, unequal = [], []
    for _, name, build in networks.networks(package):
        BUILDERS[name] = build
        try:
            expected, chosen, _ = compared(name, how)
        except (RuntimeError, torch.onnx.OnnxExporterError):
            continue  # which torch cannot export
        assert chosen
        (equal if chosen == expected else unequal).append(name)
    assert len(equal) >= 0.95 * len(equal + unequal), unequal


# ---------------------------------------------------------------------- the evidence, piece by piece

rng = np.random.default_rng(0)
MASK = np.triu(np.ones((5, 5)), 1)
SIN, COS = (f(np.arange(8)[:, None] / 100.0 ** (np.arange(0, 6, 2) / 6)) for f in (np.sin, np.cos))
SINES = np.stack([SIN, COS], -1).reshape(8, 6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (rng.standard_normal((4, 5)), {"random"}),
        (rng.standard_normal(5), set()),
        (np.zeros(5), {"equal"}),
        (np.arange(6.0), {"regular"}),
        (10000.0 ** -np.linspace(0, 1, 6), {"regular"}),
        (np.eye(6), {"regular"}),
        (SINES, {"sines"}),
        (np.concatenate([SIN, COS], -1)[None], {"sines"}),
        (np.concatenate([COS, 2 * COS**2 - 1], -1), {"sines"}),
        (np.concatenate([SIN, SIN], -1), {"sines"}),
        (np.repeat(SIN, 2, -1), {"sines"}),
        (SINES + 0.01 * rng.standard_normal(SINES.shape), {"random"}),
        (np.where(MASK, -np.inf, 0), {"mask"}),
        (-1e9 * MASK, {"mask"}),
        (rng.standard_normal((5, 5)) * 1e5, {"random"}),
        (np.array([0.6, 0.0, 0.8]), {"unit"}),
        (np.float32(3), set()),
    ],
)
def test_evidence_from_values_distinguishes_weights_from_constants(
    values: Any, expected: set[str]
) -> None:
    assert {fact.name for fact in evidence.of_values(np.asarray(values))} == expected


OF_NAMES = {
    "weight name": (
        *("encoder.layers.0.weight", "lstm.weight_ih_l0_reverse", "model/norm/gamma:0"),
        *("vit.cls_token", "pos_embed"),
    ),
    "buffer name": (
        *("rotary.inv_freq", "bn.running_mean", "attn_mask", "0.parametrizations.weight.0._u"),
    ),
}


@pytest.mark.parametrize("expected", OF_NAMES)
def test_evidence_from_names_distinguishes_weights_from_constants(expected: str) -> None:
    for name in OF_NAMES[expected]:
        assert [fact.name for fact in evidence.of_name(name)] == [expected], name
    assert not [*evidence.of_name("w1"), *evidence.of_name("unity")]


def chosen(body: str, **weights: Any) -> dict[str, bool]:
    """The weights of a network of 4 × 4 numbers, and whether they are trained."""
    model = Model(models.parsed(body, weights, "float[4, 4] X", "float[4, 3] Y"))
    return {c.name: c.trained for c in choose_parameters(model, ["Y"], None)}


def test_an_addend_before_any_product_is_a_constant_unless_more_speaks_for_it() -> None:
    """The same graph: a scaler's offset, a table of positions, positions by another name."""
    for name, shape, expected in (
        *(("offset", (4,), False), ("pos_embed", (4, 4), True), ("offset", (4, 4), False)),
    ):
        weights = {name: rng.standard_normal(shape), "W": rng.standard_normal((4, 3))}
        found = chosen(f"a = Add(X, {name})  Y = MatMul(a, W)", **weights)
        assert found == {name: expected, "W": True}


def test_a_name_alone_makes_no_constant_of_what_stands_in_a_product() -> None:
    """Names that torch gives to buffers are those of weights in files of others."""
    for name in ("table", "filters", "mean", "window", "grid"):
        assert chosen(f"Y = MatMul(X, {name})", **{name: np.ones((4, 3))}) == {name: True}


# ---------------------------------------------------------------------- what fit says

LINE = (
    "training 6 tensors with 85 numbers; `ortflex check --all` or Trainer.summary() lists them, params= "
    "selects others"
)


def test_fit_says_in_one_line_what_is_trained(capsys: Any, caplog: Any) -> None:
    trainer = Trainer(models.mlp(), loss="squared_error", epochs=1)
    x, y = regression(rows=8, features=6)
    numbers = sum(a.size for a in trainer.get_state().values())
    line = LINE.replace("85", f"{numbers}")
    trainer.fit(x, y)
    assert capsys.readouterr().err.splitlines()[0] == line
    trainer.progress = False
    trainer.fit(x, y)
    assert capsys.readouterr().err == ""
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer.progress = None
        trainer.fit(x, y)
    assert line in caplog.messages
    assert line not in capsys.readouterr().err


def line_of(**options: Any) -> str:
    made = internals_of(make(models.mlp(), **options))
    return headline(made.problem, made.setup.requests)


def test_the_line_counts_what_is_left_out_by_sort() -> None:
    frozen = [{"params": "b1", "frozen": True}]
    line = line_of(params=["!W1"], groups=frozen)
    assert "; left out: 1 by params=, 1 by groups=;" in line


@pytest.mark.parametrize(("start", "words"), [(0, ""), (2, " (2 of them from a later epoch on)")])
def test_the_line_counts_what_is_trained_later(start: int, words: str) -> None:
    line = line_of(groups=[{"params": ["W1", "b1"], "start_epoch": start}])
    assert line.startswith("training 6 tensors")
    assert f"numbers{words};" in line


def test_a_resume_trains_what_the_checkpoint_trained(tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever would be chosen today: here a token that was no weight by the points of its time."""
    body = """
        size = Shape <start = 0, end = 1> (X)  shape = Concat <axis = 0> (size, rest)
        tokens = Expand(cls_token, shape)  rows = Concat <axis = 1> (tokens, X)
        products = MatMul(rows, W)  Y = ReduceMean <axes = [1], keepdims = 0> (products)
    """
    weights = {"cls_token": rng.standard_normal((1, 1, 4)), "W": rng.standard_normal((4, 3))}
    proto = models.parsed(body, weights | {"rest": np.array([1, 4])}, "float[N, 2, 4] X")
    x, y = rng.standard_normal((8, 2, 4)).astype(np.float32), np.zeros((8, 3), np.float32)
    with monkeypatch.context() as older:
        older.setitem(evidence.POINTS, "joined", -20)
        trainer = Trainer(proto, loss="squared_error", epochs=1, progress=False)
        trainer.fit(x, y)
        trainer.save(tmp_path / "saved")
    assert internals_of(trainer).problem.parameters == ("W",)
    assert internals_of(make(proto)).problem.parameters == ("cls_token", "W")
    again = Trainer.resume(tmp_path / "saved")
    assert internals_of(again).problem.parameters == ("W",)
    again.fit(x, y)
