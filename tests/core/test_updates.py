"""Between gradient and weight: clipping, groups, constraints, averages; compared with torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, ModelError, Recipe, Trainer, Unsupported, internals_of
from tests import models
from tests.training import every_backend, make, plugins, regression, same

STEPS = 20


def trainer(backend: Any, **options: Any) -> Trainer:
    if backend == "training_session":
        pytest.skip("TrainingSession updates the weights itself")
    settings = {"optimizer": "momentum", "learning_rate": 0.05, "epochs": 1, "batch_size": 8}
    return make(models.mlp(), backend=backend, shuffle=False, **(settings | options))


def torch_run(
    after_backward: Callable[[Any], None] = lambda p: None,
    after_step: Callable[[Any, int], None] = lambda p, t: None,
    groups: Callable[[Any], Any] | None = None,
    batches: int = 1,
    momentum: float = 0.9,
) -> dict[str, Any]:
    """The same network and the same rows by torch in float64; the weights after one epoch."""
    torch = pytest.importorskip("torch")
    x, y = (torch.tensor(a, dtype=torch.float64) for a in regression(rows=8 * STEPS, features=6))
    w = {
        n: torch.tensor(a, dtype=torch.float64, requires_grad=True)
        for n, a in models.weights_of(models.mlp()).items()
    }
    chosen = list(w.values()) if groups is None else groups(w)
    optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=momentum)
    layers = sorted(n for n in w if n.startswith("W"))
    for step in range(STEPS // batches):
        optimizer.zero_grad()
        rows = slice(8 * batches * step, 8 * batches * (step + 1))
        h = x[rows]
        for k, name in enumerate(layers):
            h = h @ w[name] + w[name.replace("W", "b")]
            h = torch.tanh(h) if k < len(layers) - 1 else h
        ((h - y[rows]) ** 2).mean().backward()
        after_backward(w)
        optimizer.step()
        with torch.no_grad():
            after_step(w, step)
    return {n: t.detach().numpy() for n, t in w.items()}


def close(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sorted(got) == sorted(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def fitted(made: Trainer) -> Trainer:
    made.fit(*regression(rows=8 * STEPS, features=6))
    return made


# Without momentum the rate is in the gradients before they are clipped.
optimizers = pytest.mark.parametrize(("optimizer", "momentum"), [("momentum", 0.9), ("sgd", 0.0)])


@every_backend
@optimizers
@pytest.mark.parametrize(("what", "bound"), [("norm", 0.1), ("norm", 1.0), ("value", 0.05)])
@pytest.mark.sampled
def test_gradients_are_bounded_as_torch_does(
    backend: str, optimizer: str, momentum: float, what: str, bound: float
) -> None:
    """The norm of all of them, or every element."""
    made = fitted(trainer(backend, **{f"clip_{what}": bound, "optimizer": optimizer}))
    torch = pytest.importorskip("torch")
    clip = getattr(torch.nn.utils, f"clip_grad_{what}_")
    wanted = torch_run(lambda w: clip(list(w.values()), bound), momentum=momentum)
    close(made.get_state(), wanted)


@every_backend
def test_gradients_clipped_with_the_rate_zero_leave_the_weights(backend: str) -> None:
    options = {"clip_norm": 1.0, "clip_value": 1.0, "optimizer": "sgd"}
    made = fitted(trainer(backend, schedule=lambda base: 0.0, **options))
    same(made.get_state(), models.weights_of(models.mlp()), 0)


@every_backend
def test_penalties_are_clipped_with_the_loss(backend: str) -> None:
    made = fitted(trainer(backend, clip_value=1e-3, penalty={"name": "l2", "l2": 10.0}))
    before, after = models.weights_of(models.mlp()), made.get_state()
    for name, array in before.items():
        assert np.abs(after[name] - array).max() <= 0.05 * 1e-3 / (1 - 0.9) * STEPS + 1e-6


@every_backend
def test_groups_have_rates_optimizers_and_may_be_frozen(backend: str) -> None:
    tables = [{"params": "W1", "rate": 0.1}, {"params": "W2", "frozen": True}]
    tables += [{"params": ["b*"], "optimizer": {"name": "momentum", "beta": 0.5}}]
    made = fitted(trainer(backend, groups=tables))
    assert "W2" not in made.get_state()
    assert "frozen by its group" in made.describe()

    def groups(w: Any) -> Any:
        biases = {"params": [t for n, t in w.items() if n.startswith("b")], "momentum": 0.5}
        return [{"params": [w["W3"]]}, {"params": [w["W1"]], "lr": 0.005}, biases]

    wanted = torch_run(groups=groups)
    close(made.get_state(), {n: a for n, a in wanted.items() if n != "W2"})


@every_backend
def test_weights_stay_where_a_constraint_wants_them(backend: str) -> None:
    constraint = {"W1": "non_negative", "W2": {"name": "max_norm", "bound": 0.5}}
    made = fitted(trainer(backend, constraint=constraint))
    torch = pytest.importorskip("torch")

    def after(w: Any, step: int) -> None:
        w["W1"].clamp_(min=0)
        w["W2"].copy_(torch.renorm(w["W2"], 2, 1, 0.5))

    close(made.get_state(), torch_run(after_step=after))
    assert made.get_state()["W1"].min() == 0


@pytest.mark.parametrize(
    "average", [{"name": "ema", "decay": 0.7}, {"name": "swa", "start": 5, "every": 3}]
)
def test_averages_of_several_steps_at_once_are_those_of_one_by_one(average: dict[str, Any]) -> None:
    def means(steps: int) -> dict[str, Any]:
        backend = {"name": "fused", "steps_per_run": steps}
        made = trainer(backend, averaging=average, optimizer="sgd", epochs=2)
        return fitted(made).get_state(averaged=True)

    same(means(7), means(1))


@every_backend
@pytest.mark.parametrize("average", ["ema", "swa"])
def test_averages_are_torchs_and_are_what_is_exported(
    backend: str, average: str, tmp_path: Path
) -> None:
    spec = {"name": "ema", "decay": 0.8} if average == "ema" else {"name": "swa", "start": 6}
    made = fitted(trainer(backend, averaging=spec))
    seen: list[dict[str, Any]] = []

    def after(w: Any, step: int) -> None:
        seen.append({n: t.detach().numpy().copy() for n, t in w.items()})

    last = torch_run(after_step=after)
    if average == "ema":
        mean = seen[0]
        for now in seen[1:]:
            mean = {n: 0.8 * mean[n] + 0.2 * now[n] for n in mean}
    else:
        mean = {n: np.mean([w[n] for w in seen[5:]], axis=0) for n in last}
    close(made.get_state(), last)
    close(made.get_state(averaged=True), mean)
    x, _ = regression(rows=8, features=6)
    exported = made.export(tmp_path / "a.onnx")
    same({"Y": made.predict(x)}, models.predict(exported, {"X": x}))
    close(models.weights_of(exported), mean)


def test_every_kth_step_of_swa() -> None:
    made = trainer("fused", averaging={"name": "swa", "start": 5, "every": 4})
    x, y = regression(rows=8 * STEPS, features=6)
    seen = []
    for k in range(STEPS):
        made.step((x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8]))
        seen.append(made.get_state()["W1"])
        counted = seen[4::4] or [seen[-1]]
        mean = made.get_state(averaged=True)["W1"]
        np.testing.assert_allclose(mean, np.mean(counted, axis=0), rtol=1e-5, atol=1e-6)


def test_weights_that_are_set_are_their_own_average() -> None:
    made = trainer("fused", averaging="ema")
    fitted(made)
    made.set_state({"W1": np.ones_like(made.get_state()["W1"])})
    np.testing.assert_array_equal(made.get_state(averaged=True)["W1"], 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm": -1.0}, r"clip_norm: expected a finite number > 0, got -1\.0"),
        ({"clip_value": "big"}, "clip_value: expected a finite number > 0, got 'big'"),
        ({"accumulate": 0}, "accumulate: expected an integer >= 1, got 0"),
        ({"groups": "*"}, r"groups\[0\]: expected a table"),
        ({"groups": [{"rate": 2.0}]}, r"groups\[0\]\.params: is missing"),
        ({"groups": [{"params": "*", "rat": 2.0}]}, r"groups\[0\]\.rat: unknown key; did you mean"),
        ({"groups": [{"params": "V*"}]}, r"groups\[0\]\.params: no .* parameter matches 'V\*'"),
        (
            {"groups": [{"params": "W*"}, {"params": ["W1", "W3"], "rate": 0.1}]},
            r"groups\[1\]\.params: an earlier group already has W1, W3",
        ),
        (
            {"groups": [{"params": "W*", "start_epoch": 1}, {"params": "b*", "start_epoch": 3}]},
            "groups: no parameter is trained before epoch 2; the smallest start_epoch must be 0",
        ),
        ({"groups": [{"params": "*", "frozen": True}]}, "groups: every parameter is frozen, so"),
        ({"constraint": "non_negativ"}, "unknown constraint 'non_negativ'; did you mean"),
        ({"averaging": {"name": "ema", "decay": 1.5}}, "averaging.decay: must be a number >= 0"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, ModelError, LookupError), match=text):
        trainer("fused", **options)


def test_a_wrong_loss_is_not_blamed_on_the_patterns() -> None:
    options: dict[str, Any] = {"constraint": {"W1": "max_nrm"}, "penalty": {"W*": "l2"}}
    with pytest.raises(ConfigError) as caught:
        trainer("fused", loss="squared_eror", groups=[{"params": "b*"}], **options)
    loss, constraint = caught.value.problems
    assert loss.startswith("loss: unknown loss 'squared_eror'; did you mean 'squared_error'?")
    assert constraint.startswith("constraint.W1: unknown constraint 'max_nrm'; did you mean")


def test_an_axis_that_a_weight_has_not_is_refused() -> None:
    made = trainer("fused", constraint={"name": "max_norm", "axis": 2})
    with pytest.raises(Unsupported, match="max_norm: axis=2 is not an axis of a weight with 2 axe"):
        made.fit(*regression(features=6))


def test_a_recipe_spells_all_of_it_out(tmp_path: Path) -> None:
    onnx.save(models.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", X=np.zeros((4, 6), np.float32), y=np.zeros((4, 1), np.float32))
    (tmp_path / "train.toml").write_text(
        'model = "m.onnx"\ndata = "d.npz"\nloss = "squared_error"\nclip_norm = 1.0\n'
        'averaging = "ema"\nconstraint = { "W*" = "max_norm" }\n'
        '[[groups]]\nparams = "b*"\nrate = 0.5\noptimizer = "adam"\npenalty = { name = "l2" }\n'
    )
    recipe = Recipe.load(tmp_path / "train.toml", (), plugins())
    text = recipe.resolved(plugins()).to_toml(tmp_path)
    assert 'averaging = { name = "ema", decay = 0.999 }' in text
    assert '"W*" = { name = "max_norm", bound = 2.0, axis = -1 }' in text
    assert "beta1 = 0.9" in text
    (tmp_path / "again.toml").write_text(text)
    again = Recipe.load(tmp_path / "again.toml", (), plugins())
    assert again.resolved(plugins()) == recipe.resolved(plugins())
    made = Trainer.from_recipe(recipe, plugins())
    assert internals_of(made).problem.updating.group("b1").rate == 0.5  # type: ignore[union-attr]


@every_backend
@pytest.mark.parametrize("batches", [2, 3])
def test_accumulated_batches_are_one_large_batch(backend: str, batches: int) -> None:
    rows = 8 * batches
    x, y = regression(rows=8 * 11, features=6)  # the last step of an epoch has fewer batches
    w = np.linspace(0.2, 2.0, len(x))
    options: dict[str, Any] = {"penalty": {"name": "l2", "l2": 0.01}, "epochs": 2, "clip_norm": 1.0}
    many = trainer(backend, accumulate=batches, **options)
    if backend == "training_session":
        with pytest.raises(Unsupported, match="accumulate"):
            many.fit(x, y, w)
        return
    one = trainer(backend, **options, batch_size=rows)
    losses = many.fit(x, y, w), one.fit(x, y, w)
    close(many.get_state(), one.get_state())
    for column in ("loss", "penalty", "rows", "rate"):
        np.testing.assert_allclose(losses[0][column], losses[1][column], rtol=1e-5)
    assert int(many.engine.slots()["step"]) == 2 * -(-11 // batches)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_batches_in_one_graph_are_batches_one_after_the_other(optimizer: str) -> None:
    rng = np.random.default_rng(0)
    body = """
        h = Gemm(X, W1, b1)  n = BatchNormalization(h, s, t, mean, var)
        d = Dropout(n, ratio, training)  Y = Gemm(d, W2, b2)
    """
    names = ("s", "t", "mean", "var")
    weights: dict[str, Any] = {n: np.full(5, n in ("s", "var")) * 1.0 for n in names}
    weights |= {"W1": rng.standard_normal((6, 5)), "b1": np.zeros(5), "ratio": np.float32(0.3)}
    weights |= {"W2": rng.standard_normal((5, 1)), "b2": np.zeros(1), "training": np.array(True)}
    network = models.parsed(body, weights, outputs="float[N, 1] Y")
    x, y = regression(rows=8 * 2 * 9 + 3, features=6)  # a short step at the end of every epoch
    w = np.linspace(0.2, 2.0, len(x))

    options = {"optimizer": optimizer, "learning_rate": 0.01, "epochs": 2, "batch_size": 8}
    options |= {"accumulate": 2, "clip_norm": 1.0, "penalty": {"name": "l2", "l2": 0.01}}
    # In front of the normalization b1 has a gradient of rounding errors, which Adam enlarges.
    options |= {"batch_norm": "train", "params": ["*", "!b1"]}

    def trained(steps: int) -> tuple[Any, Any, Any]:
        made = make(network, backend={"name": "fused", "steps_per_run": steps}, **options)
        history = made.fit(x, y, w)
        assert any("at-once" in name for name in made.engine.programs()) == (steps > 1)
        return made.get_state(buffers=True), history, made.engine.slots()

    (one, lines, slots), (several, others, after) = trained(1), trained(3)
    close(several, one)
    close(after, slots)
    for column in ("loss", "penalty", "rows", "rate"):
        np.testing.assert_allclose(lines[column], others[column], rtol=1e-5)


def test_batches_of_an_iterable_are_accumulated_too() -> None:
    x, y = regression(rows=80, features=6)
    parts = [(x[k : k + 8], y[k : k + 8]) for k in range(0, 80, 8)]
    many = trainer("fused", accumulate=4)
    many.fit(parts)
    one = trainer("fused", batch_size=32)
    one.fit(x, y)
    close(many.get_state(), one.get_state())


@every_backend
@pytest.mark.parametrize("optimizer", ["adam", "radam"])
def test_groups_are_unfrozen_epoch_by_epoch_and_count_their_own_steps(
    backend: str, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    x, y = regression(rows=8 * STEPS, features=6)
    late = {"*2": 1, "*1": 2}
    groups = [{"params": glob, "start_epoch": epoch} for glob, epoch in late.items()]
    made = trainer(backend, groups=groups, epochs=3, optimizer=optimizer)
    with caplog.at_level("INFO", "ortflex"):
        made.fit(x, y)
    assert "from epoch 2 on, W2, b2 are also trained" in caplog.text

    def until(w: Any) -> Any:
        """Of each parameter torch counts the steps that it was there for."""
        theirs = {"adam": torch.optim.Adam, "radam": torch.optim.RAdam}
        adam = theirs[optimizer](list(w.values()), lr=0.05)
        rows, labels = (torch.tensor(a, dtype=torch.float64) for a in (x, y))
        for epoch in range(3):
            for glob, start in late.items():
                for name in (n for n in w if n.endswith(glob[1:])):
                    w[name].requires_grad_(epoch >= start)
            for first in range(0, len(x), 8):
                adam.zero_grad()
                h = rows[first : first + 8]
                for k in (1, 2, 3):
                    h = h @ w[f"W{k}"] + w[f"b{k}"]
                    h = torch.tanh(h) if k < 3 else h
                (h - labels[first : first + 8]).square().mean().backward()
                adam.step()
        return {n: t.detach().numpy() for n, t in w.items()}

    kind: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    start = models.weights_of(models.mlp()).items()
    close(made.get_state(), until({n: torch.tensor(a, **kind) for n, a in start}))
    before = made.get_state()
    made.fit(x[:8], y[:8])  # a new training starts with the first phase again
    assert len([n for n, a in made.get_state().items() if not np.array_equal(a, before[n])]) == 6


def test_what_is_not_trained_yet_can_be_set(tmp_path: Path) -> None:
    x, y = regression(rows=16, features=6)
    made = trainer("fused", groups=[{"params": "*1", "start_epoch": 5}])
    assert "from epoch 6 on: W1, b1" in made.describe()
    made.step((x[:8], y[:8]))
    made.set_state({"W1": np.zeros((6, 8), np.float32), "b1": np.zeros(8, np.float32)})
    np.testing.assert_array_equal(np.ptp(made.predict(x), axis=0), 0)
    made.step((x[:8], y[:8]))
    np.testing.assert_array_equal(made.get_state()["W1"], 0)
    np.testing.assert_allclose(np.ptp(made.predict(x), axis=0), 0, atol=1e-6)
    folder = made.save(tmp_path / "c")
    again = Trainer.resume(folder, plugins=plugins())
    assert again.step((x[8:], y[8:])) == made.step((x[8:], y[8:]))
