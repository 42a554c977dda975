"""Every loss and every schedule in a training, compared with torch's autograd in float64.

Of scores and labels fifty steps; of embeddings and sequences values and gradients of every tensor. The
classes of errors: a wrong formula or gradient in a corner (ties, lengths, repeated labels, padding), a
tensor without its gradient, bad labels and lengths that are found in the middle of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import Array, ConfigError, DataError, Schedule, Trainer
from ortflex_plugins.losses.cross_entropy import SoftmaxCrossEntropy

pytest.importorskip("torch")

import torch

from tests.models import weights_of
from tests.plugins.test_losses import TABLE, cross_entropy
from tests.plugins.test_losses import labels as labels_of
from tests.plugins.test_optimizers_table import PRECISION, linear
from tests.plugins.test_schedules import TWINS, of_torch
from tests.training import every_backend, make, plugins

F = torch.nn.functional

ROWS, RATE, STEPS = 24, 0.03, 50
SMALLER = {"cosine_embedding": 0.005}  # its slope has the length of an embedding below it
Formula = Callable[[Any, Any], Any]

# The first of each name, and labels for scores [B, 2]; softmax counts rows that it does not ignore.
LOSSES = {loss.name: (loss, theirs, kind) for loss, theirs, kind, _ in reversed(TABLE)}
LOSSES["softmax_cross_entropy"] = (SoftmaxCrossEntropy(), cross_entropy(), "class")

ELSEWHERE = {
    *("entropy", "distillation", "feature_matching"),  # test_losses, test_teachers
    "consistency",  # test_consistency
    *("triplet", "mined_triplet", "contrastive", "supervised_contrastive", "margin_softmax"),
    *("ctc", "causal_lm"),  # below
    *("ssd", "retinanet", "task_aligned"),  # test_detection
}
"""The losses without labels, of several tensors or of sequences; those tests compare them with torch."""


def labels(kind: str, dtype: Any) -> Any:
    made = labels_of(kind, (ROWS, 2))
    return made % 2 if kind == "class" else made.astype(dtype)


def rows(dtype: Any) -> Any:
    return np.random.default_rng(2).normal(size=(ROWS, 3)).astype(dtype)


def torch_s(formula: Formula, x: Any, y: Any, rates: Any) -> tuple[dict[str, Any], list[float]]:
    """The weights after steps of these rates, and the mean cost before each."""
    start = weights_of(linear(2, x.dtype))
    w = {n: torch.tensor(a.astype(float), requires_grad=True) for n, a in start.items()}
    inputs = torch.tensor(x.astype(float))
    target = torch.tensor(y if y.dtype.kind == "i" else y.astype(float))
    descent, costs = torch.optim.SGD(w.values(), lr=1.0), []
    for rate in rates:
        descent.param_groups[0]["lr"] = rate
        descent.zero_grad()
        cost = formula(inputs @ w["coef"] + w["intercept"], target).mean()
        cost.backward()
        costs.append(cost.item())
        descent.step()
    return {n: t.detach().numpy() for n, t in w.items()}, costs


def trainer_of(backend: str, loss: Any, dtype: Any, **options: Any) -> Trainer:
    settings = {"learning_rate": RATE, "batch_size": ROWS, "epochs": 10}
    return make(linear(2, dtype), loss=loss, backend=backend, **settings | options)


def same_as(trainer: Trainer, wanted: dict[str, Any], dtype: Any) -> None:
    at = PRECISION[dtype]
    for name, array in trainer.get_state().items():
        assert array.dtype == dtype
        np.testing.assert_allclose(array, wanted[name], rtol=at, atol=at)


def test_no_loss_is_left_out() -> None:
    ours = {n for n in plugins()["losses"].names() if _ours("losses", n)}
    assert set(LOSSES) | ELSEWHERE == ours
    assert not ELSEWHERE & set(LOSSES)


def _ours(kind: str, name: str) -> bool:
    return plugins()[kind].entry(name).distribution == "ortflex"


@pytest.mark.backend("fused")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_fifty_steps_of_a_loss(loss: str, dtype: Any) -> None:
    made, formula, kind = LOSSES[loss]
    x, y = rows(dtype), labels(kind, dtype)
    rate = SMALLER.get(loss, RATE)
    trainer = trainer_of("fused", made, dtype, learning_rate=rate)
    costs = [trainer.step((x, y))]
    bound, graphs = trainer.engine.counters()["bindings_made"], set(trainer.engine.programs())
    costs += [trainer.step((x, y)) for _ in range(STEPS - 1)]
    assert trainer.engine.counters()["bindings_made"] == bound
    assert set(trainer.engine.programs()) == graphs
    wanted, theirs = torch_s(formula, x, y, [rate] * STEPS)
    np.testing.assert_allclose(costs, theirs, rtol=PRECISION[dtype], atol=PRECISION[dtype])
    same_as(trainer, wanted, dtype)
    assert costs[-1] < costs[0]


@every_backend
@pytest.mark.parametrize("loss", LOSSES)
def test_every_other_backend_makes_the_same_steps(backend: str, loss: str) -> None:
    if backend == "fused":
        pytest.skip("it has the whole table")
    made, formula, kind = LOSSES[loss]
    x, y = rows(np.float32), labels(kind, np.float32)
    trainer = trainer_of(backend, made, np.float32)
    for _ in range(10):
        trainer.step((x, y))
    same_as(trainer, torch_s(formula, x, y, [RATE] * 10)[0], np.float32)


@pytest.mark.backend("fused")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@of_torch
def test_fifty_steps_under_a_schedule(schedule: Schedule, twin: Any, dtype: Any) -> None:
    """Ten epochs of five steps, several in one run; no rate builds a graph."""
    part = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    theirs, rates = twin(torch.optim.lr_scheduler, part, STEPS), []
    for step in range(STEPS):
        rates.append(theirs.get_last_lr()[0])
        part.step()
        if step < STEPS - 1:
            theirs.step()
    x, y = rows(dtype), labels("real", dtype)
    trainer = trainer_of("fused", "squared_error", dtype, schedule=schedule, shuffle=False)
    trainer.fit(np.tile(x, (5, 1)), np.tile(y, (5, 1)))
    same_as(trainer, torch_s(LOSSES["squared_error"][1], x, y, rates)[0], dtype)
    assert len({name.partition("@")[0] for name in trainer.engine.programs()}) <= 2


def test_no_schedule_of_torch_s_is_left_out() -> None:
    ours = {n for n in plugins()["schedules"].names() if _ours("schedules", n)}
    # Those are scikit-learn's, and plateau goes by epochs: tests of their own have them.
    assert {s.name for s, _ in TWINS} == ours - {"invscaling", "optimal", "plateau"}


RNG = np.random.default_rng(5)


def moved(tensors: Mapping[str, Array]) -> onnx.ModelProto:
    """A float64 model whose output NAME is its input ``in/NAME`` plus the parameter ``w/NAME``."""
    nodes, inputs, outputs, weights = [], [], [], []
    for name, array in tensors.items():
        shape = ["N", *array.shape[1:]]
        inputs.append(helper.make_tensor_value_info(f"in/{name}", TensorProto.DOUBLE, shape))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, shape))
        weights.append(numpy_helper.from_array(np.zeros(array.shape), f"w/{name}"))
        nodes.append(helper.make_node("Add", [f"in/{name}", f"w/{name}"], [name]))
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check(
    loss: Mapping[str, Any],
    tensors: Mapping[str, Array],
    labels: Array | None,
    reference: Callable[..., Any],
    columns: Mapping[str, Array] | None = None,
    own: Mapping[str, Array] | None = None,
) -> None:
    """Values, and the gradients of Σ values by each tensor and by the loss's own parameters."""
    given = {"params": [f"w/{name}" for name in tensors], "reduction": "sum", "learning_rate": 1.0}
    trainer = make(moved(tensors), loss=dict(loss), backend="fused", **given)
    trainer.set_state(dict(own or {}))
    X = {f"in/{name}": array for name, array in tensors.items()} | dict(columns or {})
    own = dict(own or {})
    given = {n: torch.tensor(a, requires_grad=True) for n, a in {**tensors, **own}.items()}
    wanted = reference(*given.values())
    wanted.sum().backward()
    got = trainer.per_sample_losses(X, labels)
    np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-8, atol=1e-8)
    before = trainer.get_state()
    trainer.step((X,) if labels is None else (X, labels))
    after = trainer.get_state()
    for name, tensor in given.items():
        key = name if name in after else f"w/{name}"
        np.testing.assert_allclose(
            before[key] - after[key], tensor.grad.numpy(), rtol=1e-6, atol=1e-7, err_msg=name
        )


def embeddings(*names: str, rows: int = 8, size: int = 5) -> dict[str, Array]:
    return {name: RNG.normal(size=(rows, size)) for name in names}


@pytest.mark.parametrize(("p", "swap"), [(2.0, False), (2.0, True), (1.0, True), (3.0, False)])
def test_triplet(p: float, swap: bool) -> None:
    loss = {"name": "triplet", "margin": 0.7, "p": p, "swap": swap}
    theirs = partial(F.triplet_margin_loss, margin=0.7, p=p, swap=swap, reduction="none")
    check(loss, embeddings("anchor", "positive", "negative"), None, theirs)


def mined(e: Any, y: Array, margin: float, mining: str) -> Any:
    e = F.normalize(e)
    d = (((e[:, None] - e[None]) ** 2).sum(-1).clamp_min(1e-12)).sqrt()
    out = []
    for i in range(len(y)):
        near = [d[i, j] for j in range(len(y)) if y[j] == y[i] and j != i]
        far = [d[i, j] for j in range(len(y)) if y[j] != y[i]]
        if not near or not far:
            out.append(d[i, i] * 0)
        elif mining == "hard":
            out.append(F.relu(torch.stack(near).max() - torch.stack(far).min() + margin))
        else:
            terms = []
            for one in near:
                beyond = [f for f in far if f > one]
                best = torch.stack(beyond).min() if beyond else torch.stack(far).max()
                terms.append(F.relu(one - best + margin))
            out.append(torch.stack(terms).mean())
    return torch.stack(out)


@pytest.mark.parametrize("mining", ["hard", "semi_hard"])
def test_mined_triplet(mining: str) -> None:
    y = np.array([0, 0, 0, 1, 1, 2, 2, 3])
    loss = {"name": "mined_triplet", "mining": mining, "margin": 0.3}
    check(loss, embeddings("e"), y, lambda e: mined(e, y, 0.3, mining))


def pairs(a: Any, p: Any, scale: Any, symmetric: bool = True) -> Any:
    s = F.normalize(a) @ F.normalize(p).T * scale
    own = torch.arange(len(a))
    value = F.cross_entropy(s, own, reduction="none")
    return (value + F.cross_entropy(s.T, own, reduction="none")) / 2 if symmetric else value


@pytest.mark.parametrize("symmetric", [True, False])
def test_contrastive(symmetric: bool) -> None:
    loss = {"name": "contrastive", "temperature": 0.3, "symmetric": symmetric}
    two = embeddings("anchor", "positive")
    check(loss, two, None, lambda a, p: pairs(a, p, 1 / 0.3, symmetric))


def test_contrastive_with_a_trained_temperature() -> None:
    loss = {"name": "contrastive", "temperature": 0.5, "trained_temperature": True}
    own = {"contrastive.logit_scale": np.array(np.log(2.0))}
    two = embeddings("anchor", "positive")
    check(loss, two, None, lambda a, p, s: pairs(a, p, s.exp()), own=own)


def supervised(e: Any, y: Array, temperature: float) -> Any:
    s = F.normalize(e) @ F.normalize(e).T / temperature
    out = []
    for i in range(len(y)):
        others = [k for k in range(len(y)) if k != i]
        total = torch.logsumexp(s[i, others], 0)
        terms = [total - s[i, j] for j in others if y[j] == y[i]]
        out.append(torch.stack(terms).mean() if terms else s[i, i] * 0)
    return torch.stack(out)


def test_supervised_contrastive() -> None:
    y = np.array([0, 0, 0, 1, 1, 2, 2, 3])
    loss = {"name": "supervised_contrastive", "temperature": 0.4}
    check(loss, embeddings("e"), y, lambda e: supervised(e, y, 0.4))


@pytest.mark.parametrize("kind", ["arcface", "cosface"])
def test_margin_softmax(kind: str) -> None:
    y = RNG.integers(0, 4, 8)
    loss = {"name": "margin_softmax", "classes": 4, "kind": kind, "margin": 0.4, "scale": 8.0}

    def reference(e: Any, w: Any) -> Any:
        cosines = F.normalize(e) @ F.normalize(w).T
        own = F.one_hot(torch.tensor(y), 4).bool()
        far = torch.cos(torch.acos(cosines) + 0.4) if kind == "arcface" else cosines - 0.4
        scores = 8 * torch.where(own, far, cosines)
        return F.cross_entropy(scores, torch.tensor(y), reduction="none")

    own = {"margin_softmax.weight": RNG.normal(size=(4, 5))}
    check(loss, embeddings("embedding"), y, reference, own=own)


LABELS = np.array([[1, 2, 3, 3], [2, 2, -1, -1], [-1, -1, -1, -1], [3, -1, -1, -1], [1, 2, 1, 2]])
TARGETS = np.array([4, 2, 0, 1, 4])


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("per_label", [False, True])
def test_ctc(axis: int, per_label: bool) -> None:
    scores = RNG.normal(size=(5, 9, 4) if axis == -1 else (5, 4, 9)) * 2

    def reference(s: Any) -> Any:
        logs = (s if axis == -1 else s.transpose(1, 2)).log_softmax(-1).transpose(0, 1)
        given = torch.tensor(np.maximum(LABELS, 0)), torch.full((5,), 9), torch.tensor(TARGETS)
        values = F.ctc_loss(logs, *given, reduction="none")
        return values / torch.tensor(TARGETS).clamp_min(1) if per_label else values

    loss = {"name": "ctc", "axis": axis, "per_label": per_label}
    check(loss, {"scores": scores}, LABELS, reference)


def test_ctc_with_lengths_another_blank_and_rows_that_do_not_fit() -> None:
    scores = RNG.normal(size=(5, 9, 4)) * 2
    rows = np.array([[0, 1, 2, 2], [1, 1, 3, 3], [3, 3, 3, 3], [2, 0, 0, 0], [0, 1, 0, 1]])
    steps = np.array([9, 4, 5, 1, 3])  # the last row does not fit

    def reference(s: Any) -> Any:
        given = torch.tensor(rows), torch.tensor(steps), torch.tensor(TARGETS)
        logs = s.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, *given, blank=3, reduction="none", zero_infinity=True)

    names = {"scores": "scores", "input_lengths": "n", "target_lengths": "m"}
    loss = {"name": "ctc", "blank": 3, "zero_infinity": True, "predicted": names}
    columns = {"n": steps, "m": TARGETS}
    check(loss, {"scores": scores}, rows, reference, columns=columns)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_with_more_labels_than_there_are_has_an_infinite_loss(zero_infinity: bool) -> None:
    scores = RNG.normal(size=(5, 9, 4))
    names = {"scores": "scores", "target_lengths": "m"}
    loss = {"name": "ctc", "zero_infinity": zero_infinity, "predicted": names}
    trainer = make(moved({"scores": scores}), loss=loss, params=["w/scores"], backend="fused")
    rows, columns = np.abs(LABELS), {"in/scores": scores.astype(np.float32)}
    right = trainer.per_sample_losses(columns | {"m": TARGETS}, rows)
    assert np.isfinite(right).all()
    wrong = trainer.per_sample_losses(columns | {"m": [5, 2, 0, 1, 4]}, rows)
    np.testing.assert_array_equal(wrong, np.where(np.arange(5) == 0, np.inf, right))


def test_causal_lm() -> None:
    scores = RNG.normal(size=(4, 6, 7))
    tokens = RNG.integers(0, 7, (4, 6))
    tokens[1, 3:], tokens[2, 2] = -100, -100

    def reference(s: Any) -> Any:
        given = torch.tensor(tokens[:, 1:]).reshape(-1)
        logits = s[:, :-1].reshape(-1, 7)
        return F.cross_entropy(logits, given, reduction="none").reshape(4, 5)

    check({"name": "causal_lm"}, {"s": scores}, tokens, reference)
    model = moved({"s": scores})
    metrics = ["perplexity", "token_accuracy"]
    trainer = make(model, loss="causal_lm", params=["w/s"], metrics=metrics, backend="fused")
    got = trainer.evaluate({"in/s": scores}, tokens)
    kept = tokens[:, 1:] != -100
    mean = reference(torch.tensor(scores)).numpy()[kept].mean()
    right = (scores[:, :-1].argmax(-1) == tokens[:, 1:])[kept].mean()
    assert got["loss"] == pytest.approx(mean)
    assert got["perplexity"] == pytest.approx(np.exp(mean))
    assert got["token_accuracy"] == pytest.approx(right)


def shape(*sizes: int) -> dict[str, Array]:
    return {"x": np.zeros(sizes)}


NAMES = {"scores": "x", "input_lengths": "n"}


@pytest.mark.parametrize(
    ("loss", "tensors", "labels", "columns", "key"),
    [
        ({"name": "ctc"}, shape(2, 5, 4), [1, 2], {}, r"\[B, S\]"),
        ({"name": "ctc", "predicted": NAMES}, shape(2, 5, 4), [[1], [2]], {"n": [5, 6]}, "5 time"),
        ({"name": "causal_lm"}, shape(2, 3), [[1, 2, 3]] * 2, {}, r"\[B, T, V\]"),
        ({"name": "margin_softmax", "classes": 3}, shape(2, 4), [0, 3], {}, "classes=3"),
        ({"name": "mined_triplet"}, shape(2, 4), [0.5, 1.0], {}, "integers"),
        ({"name": "supervised_contrastive"}, shape(2, 4, 3), [0, 1], {}, r"\[B, D\]"),
    ],
)
def test_bad_data_are_errors_before_the_training(
    loss: Any, tensors: Any, labels: Any, columns: Any, key: str
) -> None:
    trainer = make(moved(tensors), loss=loss, params=["w/x"], backend="fused")
    X = {"in/x": tensors["x"]} | {n: np.array(c) for n, c in columns.items()}
    with pytest.raises(DataError, match=key):
        trainer.fit(X, np.array(labels))


def test_a_missing_number_of_classes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="classes"):
        make(moved(shape(2, 4)), loss="margin_softmax")
