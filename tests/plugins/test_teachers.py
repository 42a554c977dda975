"""Losses that read a teacher: values and gradients beside torch, and every way in which rows come in.

The classes of errors: the teacher gets other rows than the model; its columns are of an earlier run; a
teacher that does not fit is found in the middle of the training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import (
    Array,
    Batches,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    OrtflexError,
    Recipe,
    Trainer,
    check_model,
    hook,
    run_ranks,
)
from ortflex_core.training.data.prefix_session import PrefixSession
from ortflex_plugins.losses.distillation import Distillation, FeatureMatching
from tests import models
from tests.plugins.commands import works
from tests.training import every_backend, make, results, same

RNG = np.random.default_rng(5)
X = RNG.standard_normal((40, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 40)
SCORES = "scores"


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    path = tmp_path / "large.onnx"
    onnx.save(models.classifier(seed=7), path)
    return str(path)


def trainer(teacher: str, loss: Any = None, **options: Any) -> Trainer:
    table = {"name": "distillation", "teacher": teacher, **(loss or {})}
    settings = {"epochs": 3, "batch_size": 8, "learning_rate": 0.5, "loss": table} | options
    return make(models.classifier(), **settings)


def torch_loss(weights: Any, scores: Array, x: Array, t: float, alpha: float, y: Any = None) -> Any:
    """The value and the gradients of the weights, in float64."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w, b = (torch.tensor(weights[n].astype(np.float64), requires_grad=True) for n in ("W", "b"))
    logits = torch.tensor(x.astype(np.float64)) @ w + b
    ours = functional.log_softmax(logits / t, dim=1)
    theirs = functional.softmax(torch.tensor(scores.astype(np.float64)) / t, dim=1)
    loss = alpha * t * t * functional.kl_div(ours, theirs, reduction="batchmean")
    if y is not None:
        loss = loss + (1 - alpha) * functional.cross_entropy(logits, torch.tensor(y))
    loss.backward()
    return loss.item(), {"W": w.grad.numpy(), "b": b.grad.numpy()}


@every_backend
@pytest.mark.parametrize(("t", "alpha"), [(4.0, 0.7), (1.0, 0.25), (2.5, 1.0)])
def test_a_step_is_the_step_of_torch(teacher: str, backend: str, t: float, alpha: float) -> None:
    loss = {"temperature": t, "alpha": alpha}
    run = trainer(teacher, loss, backend=backend, batch_size=40, epochs=1, learning_rate=1.0)
    before = run.get_state()
    theirs = models.predict(models.classifier(seed=7), {"X": X})
    scores = np.log(theirs["probabilities"])
    y = Y if alpha < 1 else None
    value, slopes = torch_loss(before, scores, X, t, alpha, y)
    assert run.evaluate(X, y)["loss"] == pytest.approx(value, rel=1e-5)
    run.fit(X, y)
    for name, slope in slopes.items():
        np.testing.assert_allclose(before[name] - run.get_state()[name], slope, atol=2e-6)


def test_the_formula_in_float64_is_that_of_torch(torch: Any) -> None:
    from ortflex_core.compiler.operators.gradient_families import load_rules
    from ortflex_core.compiler.operators.reverse_mode import gradients
    from ortflex_core.testing import running

    s, q = RNG.standard_normal((2, 6, 5)) * 4
    y = RNG.integers(0, 5, 6)
    for loss in (
        Distillation(teacher="t", temperature=3.0, alpha=0.4),
        Distillation(teacher="t", temperature=0.5, alpha=1.0),
        FeatureMatching(teacher="t"),
    ):
        labels = y if loss.needs_labels else None

        def formula(
            op: Any, predicted: Any, taught: Any, expected: Any = None, loss: Any = loss
        ) -> Any:
            own = "predicted" if loss.name == "distillation" else "features"
            value = loss.per_sample(op, {own: predicted, "teacher": taught}, expected)
            [slope] = gradients([(value, None)], [predicted], load_rules(running.plugins()))
            return {"value": value, "slope": slope}

        arrays = {"predicted": s, "taught": q} | ({} if labels is None else {"expected": labels})
        found = running.run(running.traced(formula, arrays, batch="N"), arrays, {})
        p, f = torch.tensor(s, requires_grad=True), torch.nn.functional
        if isinstance(loss, FeatureMatching):
            wanted = f.mse_loss(p, torch.tensor(q), reduction="none").mean(1)
        else:
            t, a = loss.temperature, loss.alpha
            theirs = f.log_softmax(torch.tensor(q) / t, 1)
            parts = f.kl_div(f.log_softmax(p / t, 1), theirs, reduction="none", log_target=True)
            wanted = a * t * t * parts.sum(1)
            if labels is not None:
                wanted = wanted + (1 - a) * f.cross_entropy(p, torch.tensor(y), reduction="none")
        wanted.sum().backward()
        np.testing.assert_allclose(found["value"], wanted.detach().numpy(), rtol=1e-9)
        np.testing.assert_allclose(found["slope"], p.grad.numpy(), rtol=1e-9, atol=1e-12)


class Noise:
    """Rows that change in each epoch."""

    @hook
    def batch_drawn(self, batch: Any) -> None:
        batch["X"] += 0


@pytest.mark.parametrize(
    "way", ["memory", "disk", "auto", "no cache", "hook", "iterable", "buffer", "step"]
)
def test_every_kind_of_data_and_cache_is_the_same_training(teacher: str, way: str) -> None:
    options = {"backend": "fused", "shuffle": False}
    cache = {"no cache": False, "memory": "memory", "disk": "disk"}.get(way, "auto")
    callbacks = [Noise()] if way == "hook" else []
    wanted = trainer(teacher, **options)
    run = trainer(teacher, **options, cache=cache, callbacks=callbacks)
    held = (X[:9], Y[:9])
    wanted.fit(X, Y, validation_data=held)
    cuts = [(X[k : k + 8], Y[k : k + 8]) for k in range(0, 40, 8)]
    if way == "step":
        for cut in cuts * 3:
            run.step(cut)
    elif way in ("iterable", "buffer"):
        run.fit(cuts if way == "iterable" else Batches(cuts, buffer=8), validation_data=held)
    else:
        run.fit(X, Y, validation_data=held)
    if way == "buffer":  # which mixes rows
        assert run.history_.losses[-1] < run.history_.losses[0]
        return
    same(run.get_state(), wanted.get_state(), tolerance=1e-6)
    if way != "step":
        np.testing.assert_allclose(run.validation_losses_, wanted.validation_losses_, rtol=1e-5)
    assert run.evaluate(X, Y)["loss"] == pytest.approx(wanted.evaluate(X, Y)["loss"], rel=1e-5)


SHAPES = {"vectors": (5, 7), "images": (3, 4, 2, 2), "tokens": (4, 3)}


def networks(kind: str, seed: int, width: int) -> tuple[onnx.ModelProto, Array]:
    """A tensor ``f`` of features, and rows for it: [N, width], [N, width, 2, 2] or [N, 4, width]."""
    inner = {"vectors": (), "images": (2, 2), "tokens": (4,)}[kind]
    if kind == "images":
        shapes, weight, out = (3, *inner), (width, 3, 1, 1), (width, *inner)
    else:
        shapes, weight, out = (*inner, 5), (5, width), (*inner, width)
    given, made = (", ".join(map(str, ("N", *sizes))) for sizes in (shapes, out))
    product = "Conv" if kind == "images" else "MatMul"
    text = f"(float[{given}] X) => (float[{made}] f) {{ h = {product}(X, w) f = Tanh(h) }}"
    file = models.of_text(text, {"w": weight}, seed=seed)
    return file, np.random.default_rng(9).standard_normal((12, *shapes)).astype(np.float32)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_projection_is_trained_and_not_exported(kind: str, tmp_path: Path, torch: Any) -> None:
    path = tmp_path / "wide.onnx"
    large, x = networks(kind, 1, 6)
    small, _ = networks(kind, 2, 4)
    onnx.save(large, path)
    loss = {"name": "feature_matching", "teacher": str(path), "projection": True}
    loss |= {"axis": -1} if kind == "tokens" else {}
    run = make(small, loss=loss, backend="fused", batch_size=12, epochs=1, learning_rate=1.0)
    before = run.get_state()
    assert set(before) == {"w", "feature_matching.projection"}
    w, m = (torch.tensor(a.astype(np.float64), requires_grad=True) for a in before.values())
    wide = torch.tensor(models.predict(large, {"X": x})["f"].astype(np.float64))
    rows = torch.tensor(x.astype(np.float64))
    if kind == "images":
        conv2d = torch.nn.functional.conv2d
        ours = conv2d(torch.tanh(conv2d(rows, w)), m.T[..., None, None])
    else:
        ours = torch.tanh(rows @ w) @ m
    value = ((ours - wide) ** 2).mean()
    value.backward()
    assert run.evaluate(x)["loss"] == pytest.approx(value.item(), rel=1e-5)
    run.fit(x)
    for name, tensor in zip(before, (w, m), strict=True):
        moved = before[name] - run.get_state()[name]
        np.testing.assert_allclose(moved, tensor.grad.numpy(), atol=2e-6)
    assert [t.name for t in run.export().graph.initializer] == ["w"]
    again = Trainer.resume(run.save(tmp_path / "c"))
    same(again.get_state(), run.get_state(), tolerance=0)
    with pytest.raises(DataError, match="projection=True"):
        make(small, loss={**loss, "projection": False})


def test_each_row_is_computed_once(teacher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    inner = PrefixSession.__call__

    def counted(session: PrefixSession, inputs: Any) -> Any:
        counts.append(len(inputs["X"]))
        return inner(session, inputs)

    monkeypatch.setattr(PrefixSession, "__call__", counted)
    trainer(teacher, epochs=50).fit(X, Y)
    assert sum(counts) <= 40 + 6 * 8 + 2  # the test of the first rows
    run = trainer(teacher)
    run.fit(X, Y)
    counts.clear()
    run.predict(X)
    assert not counts  # predictions need no teacher


def test_two_teachers_a_prefix_and_weights(teacher: str, tmp_path: Path) -> None:
    onnx.save(models.classifier(seed=9), tmp_path / "other.onnx")
    losses = [
        {"name": "distillation", "teacher": teacher, "alpha": 1.0, "predicted": SCORES},
        {"name": "feature_matching", "teacher": str(tmp_path / "other.onnx"), "predicted": SCORES,
         "teacher_tensor": SCORES, "factor": 0.1},
    ]  # fmt: skip
    weight = np.linspace(0, 2, 40)
    runs = []
    for cache in ("memory", False):
        run = make(models.classifier(), loss=losses, params=["b"], epochs=4, cache=cache)
        run.fit(X, None, weight, validation_data=X[:5])
        runs.append(run)
    same(runs[0].get_state(), runs[1].get_state())
    assert runs[0].evaluate(X)["loss"] == pytest.approx(runs[1].evaluate(X)["loss"], rel=1e-5)


def test_a_teacher_with_other_names_and_types(teacher: str, tmp_path: Path) -> None:
    path = str(tmp_path / "renamed.onnx")
    onnx.save(models.renamed(models.classifier(seed=7), {"X": "pixels"}), path)
    runs = [trainer(name, backend="fused") for name in (teacher, path)]
    runs.append(trainer(path, {"teacher_inputs": {"pixels": "X"}}, backend="fused"))
    for run in runs:
        run.fit(X, Y)
    for other in runs[1:]:
        same(runs[0].get_state(), other.get_state(), tolerance=0)


def mixing(rows: int | str = "N") -> onnx.ModelProto:
    return models.of_text(
        f"(float[{rows}, 4] X) => (float[{rows}, 3] Y) "
        "{ m = ReduceMean<axes = [0], keepdims = 1>(X) c = Sub(X, m) Y = MatMul(c, W) }",
        {"W": np.eye(4, 3)},
    )


@pytest.mark.parametrize(
    ("proto", "loss", "error", "key"),
    [
        (models.classifier(features=5), {}, ModelError, "merge_models"),
        (models.classifier(classes=4), {}, DataError, "head="),
        (models.two_headed(), {}, ConfigError, "teacher_tensor"),
        (models.two_headed(), {"teacher_tensor": "amount"}, ConfigError, "teacher_inputs"),
        (models.classifier(), {"teacher_tensor": "score"}, ConfigError, "probabilities"),
        (models.classifier(), {"teacher_inputs": {"Z": "X"}}, ConfigError, "'Z'"),
        (models.classifier(), {"teacher_inputs": {"X": "Z"}}, ConfigError, "'Z'"),
        (mixing(), {}, DataError, "mixes rows"),
        (None, {"temperature": 0}, OrtflexError, "temperature"),
        (None, {"alpha": 1.5}, OrtflexError, "alpha"),
        (None, {"alpha": -0.1}, OrtflexError, "alpha"),
        (None, {"teacher": "missing.onnx"}, ConfigError, "missing.onnx"),
        (None, {"teacher": 3}, OrtflexError, "teacher"),
        (None, {"teacher": ""}, OrtflexError, "teacher"),
        (None, {"teacher_inputs": "X"}, OrtflexError, "teacher_inputs"),
        (None, {"teacher_inputs": ["X"]}, OrtflexError, "teacher_inputs"),
        (None, {"teacher_inputs": {"X": 0}}, OrtflexError, "teacher_inputs"),
    ],
)
def test_a_teacher_that_does_not_fit_is_an_error(
    teacher: str, proto: Any, loss: Any, error: Any, key: str
) -> None:
    if proto is not None:
        onnx.save(proto, teacher)
    with pytest.raises(error, match=key):
        trainer(teacher, loss).fit(X, Y)


def test_a_checkpoint_knows_its_teacher(teacher: str, tmp_path: Path) -> None:
    options = {"backend": "fused", "shuffle": False}
    whole, half = trainer(teacher, **options), trainer(teacher, **options, epochs=1)
    whole.fit(X, Y)
    half.fit(X, Y)
    folder = half.save(tmp_path / "checkpoint")
    again = Trainer.resume(folder, epochs=2)
    again.fit(X, Y)
    same(again.get_state(), whole.get_state(), tolerance=0)
    moved = tmp_path / "moved.onnx"
    Path(teacher).rename(moved)
    with pytest.raises(CheckpointError, match=r"loss\.teacher.*moved\.onnx"):
        Trainer.resume(folder)
    table = {"name": "distillation", "teacher": str(moved)}
    given = Trainer.resume(folder, loss=table, epochs=2)
    given.fit(X, Y)
    same(given.get_state(), whole.get_state(), tolerance=0)
    onnx.save(models.classifier(seed=8), teacher)
    with pytest.raises(CheckpointError, match="teacher"):
        Trainer.resume(folder)


def test_two_processes_share_the_work(teacher: str) -> None:
    alone = trainer(teacher, backend="fused", accumulate=2)
    alone.fit(X, Y, validation_data=(X[:9], Y[:9]))

    def train(group: Any) -> Any:
        run = trainer(teacher, backend="fused", distributed=group)
        run.fit(X, Y, validation_data=(X[:9], Y[:9]))
        return run

    for run in results(run_ranks(2, train)):
        same(run.get_state(), alone.get_state(), tolerance=1e-6)
        np.testing.assert_allclose(run.validation_losses_, alone.validation_losses_, rtol=1e-5)


def test_a_recipe_names_its_teacher_beside_it(teacher: str, tmp_path: Path) -> None:
    onnx.save(models.classifier(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=X, y=Y)
    (tmp_path / "train.toml").write_text(
        'model = "model.onnx"\nepochs = 2\nvalidation = 0.2\nmetrics = ["accuracy"]\noutput = "run"\n'
        '[data]\nname = "npz"\npath = "data.npz"\n'
        '[loss]\nname = "distillation"\nteacher = "large.onnx"\ntemperature = 3.0\n'
    )
    works("train", str(tmp_path / "train.toml"))
    copied = Recipe.load(tmp_path / "run" / "recipe.toml", trust_code=False)
    assert copied.loss["teacher"] == teacher
    report = check_model(models.classifier(), {"name": "distillation", "teacher": teacher})
    assert any("large.onnx" in note for note in report.notes)
    assert "large.onnx" in trainer(teacher).describe()


@pytest.mark.parametrize("value", ["X", ["X"], {"X": 0}, {0: "X"}])
def test_the_inputs_of_a_teacher_are_names_by_names(value: Any) -> None:
    """A component that is made in Python is checked as one of a recipe."""
    with pytest.raises(TypeError, match="teacher_inputs must have names of our inputs by names"):
        Distillation(teacher="large.onnx", teacher_inputs=value)
