"""Training with every plugin of the fixture distribution, the way its author would expect."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ortflex_core import KINDS
from tests import models
from tests.training import Recorder, make, plugins, regression, same

ortflex_example = pytest.importorskip("ortflex_example")

NAMES: dict[str, Any] = {
    "loss": "example_cauchy",
    "penalty": "example_smooth",
    "schedule": "example_sawtooth",
    "optimizer": "example_rmsprop",
    "device": "example_counting",
    "metrics": ["example_worst"],
    "callbacks": ["example_stop"],
    "backend": "example_numpy",
}
PARAMETERS: dict[str, Any] = {
    "loss": {"scale": 0.5},
    "penalty": {"factor": 0.01, "width": 0.2},
    "schedule": {"period": 4, "by": "step"},
    "optimizer": {"decay": 0.9},
    "device": {},
    "metrics": {},
    "callbacks": {"steps": 7},
    "backend": {},
}
KIND_OF = {"loss": "losses", "penalty": "penalties", "device": "devices", "backend": "backends"}


def chosen(how: str, **options: Any) -> Any:
    """A Trainer whose parts are all the example's, each with parameters of its own."""
    parts: dict[str, Any] = {}
    for part, name in NAMES.items():
        listed = isinstance(name, list)
        spec = {"name": name[0] if listed else name, **PARAMETERS[part]}
        if how == "object":
            kind = KIND_OF.get(part, part if listed else f"{part}s")
            spec = plugins().component(kind, spec)
        parts[part] = [spec] if listed else spec
    return make(models.linear(3), learning_rate=0.02, epochs=3, batch_size=10, **(parts | options))


def test_there_is_one_of_every_kind() -> None:
    for kind in KINDS:
        owners = [e.distribution for e in plugins()[kind]]
        assert "ortflex-example" in owners, kind


def test_its_constraint_and_its_average_stand_after_the_optimizer() -> None:
    x, y = regression(rows=40, features=3)
    trainer = make(
        models.linear(3),
        backend="fused",
        learning_rate=0.1,
        constraint={"coef": {"name": "example_at_most", "bound": 0.1}},
        averaging="example_halfway",
    )
    mean = trainer.get_state()
    for at in range(0, 40, 10):
        trainer.step((x[at : at + 10], y[at : at + 10]))
        now = trainer.get_state()
        mean = {n: (mean[n] + now[n]) / 2 for n in now}
    assert trainer.get_state()["coef"].max() == np.float32(0.1)
    same(trainer.get_state(averaged=True), mean)


@pytest.mark.parametrize("how", ["mapping", "object"])
def test_training_with_all_of_them_is_what_their_formulas_say(how: str) -> None:
    x, y = regression(rows=40, features=3)
    recorder = Recorder()
    trainer = chosen(how, shuffle=False, callbacks=[recorder, {"name": "example_stop"}])
    history = trainer.fit(x, y, validation_data=(x, y))
    weights = {n: a.astype(float) for n, a in models.weights_of(models.linear(3)).items()}
    square = {n: np.zeros_like(a) for n, a in weights.items()}
    costs, rates = [], []
    for step in range(10):
        at = slice(10 * step % 40, 10 * step % 40 + 10)
        e = (x[at] @ weights["coef"] + weights["intercept"] - y[at]) / 0.5
        smooth = {n: np.sqrt(a**2 + 0.2**2) for n, a in weights.items()}
        costs.append(np.log(1 + e**2).mean() + 0.01 * sum(s.sum() for s in smooth.values()))
        pull = 2 * e / (1 + e**2) / 0.5 / 10
        g = {"coef": x[at].T @ pull, "intercept": pull.sum(axis=0)}
        rates.append(0.02 * (1 - (step % 4) / 8))
        for n, a in weights.items():
            g[n] = g[n] + 0.01 * a / smooth[n]
            square[n] = 0.9 * square[n] + 0.1 * g[n] ** 2
            weights[n] = a - rates[-1] * g[n] / (np.sqrt(square[n]) + 1e-8)
    steps = recorder.all("step_end")
    np.testing.assert_allclose([s["loss"] + s["penalty"] for s in steps], costs, rtol=1e-4)
    np.testing.assert_allclose([s["rate"] for s in steps], rates, rtol=1e-12)
    for n, a in trainer.get_state().items():
        np.testing.assert_allclose(a, weights[n], rtol=1e-4, atol=1e-5)
    worst = abs(trainer.predict(x).astype(float) - y).max()
    np.testing.assert_allclose(history["validation_example_worst"][-1], worst, rtol=1e-5)


def test_by_name_is_by_mapping_without_parameters() -> None:
    x, y = regression(rows=40, features=3)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 10}
    empty = {k: [{"name": v[0]}] if isinstance(v, list) else {"name": v} for k, v in NAMES.items()}
    runs = [make(models.linear(3), **options, **parts) for parts in (NAMES, empty)]
    losses = [trainer.fit(x, y).losses for trainer in runs]
    assert losses[0] == losses[1]
    # RMSprop's own rate, not that of some other optimizer.
    assert runs[0].learning_rate == 0.01


@pytest.mark.parametrize("steps", [1, 3])
def test_data_and_losses_stay_on_a_device_with_room(steps: int) -> None:
    from ortflex_example.counting import Counting

    x, y = regression(rows=43, features=5)
    w = np.linspace(0, 1, 43)
    rooms = {"none": 0, "too little": 500, "enough": 2**20}
    devices = {"cpu": "cpu"} | {name: Counting(data_bytes=room) for name, room in rooms.items()}
    backend = {"name": "fused", "steps_per_run": steps}
    made, moved = {}, {}
    for name, device in devices.items():
        trainer = make(
            models.mlp((5, 4, 1)), backend=backend, device=device, batch_size=4, epochs=3
        )
        Counting.transfers.clear()
        first = trainer.fit(x, y, w).losses
        second = trainer.fit(x[::-1].copy(), y, w).losses  # other data of the same shapes
        made[name] = {**trainer.get_state(), "losses": np.array([*first, *second])}
        moved[name] = Counter(Counting.transfers)
    for name in rooms:
        same(made[name], made["cpu"], 1e-6)
    runs = 6 * (11 if steps == 1 else 3 + 2)
    # A run writes the numbers of its rows in place of three columns.
    assert moved["none"]["write"] - moved["enough"]["write"] == 2 * runs
    assert moved["enough"]["put"] - moved["none"]["put"] == 2 * 3
    assert moved["too little"] == moved["none"]


def test_losses_stay_on_a_device_until_the_epoch_ends() -> None:
    from ortflex_example.counting import Counting

    x, y = regression(rows=800, features=5)
    reads, losses = [], []
    for device in ("cpu", "example_counting"):
        for rows in (40, 80, 800):
            backend = {"name": "fused", "steps_per_run": 1}
            trainer = make(models.mlp((5, 4, 1)), backend=backend, device=device, batch_size=2)
            Counting.transfers.clear()
            losses.append(trainer.fit(x[:rows], y[:rows]).losses)
            reads.append(Counting.transfers["read"])
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-6)
    few, twice, many = reads[3:]
    assert twice - few < 20  # runs an epoch that there are more
    # Beyond 256 runs they fill a page on the device, and are read when the next one begins.
    assert many - few < 4 * len(losses[0])


def test_a_data_source_by_name_trains() -> None:
    source = plugins().component("data", {"name": "example_line", "rows": 200})
    trainer = make(models.linear(3), learning_rate=0.1, epochs=20)
    held_out = plugins().component("data", {"name": "example_line", "seed": 1})
    history = trainer.fit(source, validation_data=held_out)
    np.testing.assert_allclose(trainer.get_state()["coef"], 1 / 3, atol=0.05)
    # What is left is the noise.
    np.testing.assert_allclose(history["validation_loss"][-1], 0.01, atol=0.005)


def quick_gelu_model() -> Any:
    rng = np.random.default_rng(0)
    model = models.parsed(
        "z = MatMul(X, W) h = com.microsoft.QuickGelu<alpha = 1.5>(z) Y = MatMul(h, V)",
        {"W": rng.standard_normal((3, 4)), "V": rng.standard_normal((4, 1))},
        "float[N, 3] X",
        "float[N, 1] Y",
        com_microsoft=1,
    )
    # The standard's shape inference does not know the operator, so the file has to say.
    model.graph.value_info.append(models.floats("h", "N", 4))
    return model


def test_what_follows_an_operator_with_a_rule_has_a_type() -> None:
    """The rule beats the decomposition, which still gives the shape that FusedMatMul needs."""
    model = quick_gelu_model()
    del model.graph.value_info[:]
    model.graph.node[-1].CopyFrom(
        models.helper.make_node("FusedMatMul", ["h", "V"], ["Y"], domain="com.microsoft", alpha=1.0)
    )
    trainer = make(model, epochs=1, batch_size=20, shuffle=False, learning_rate=0.1)
    assert list(trainer.model.decomposed.reasons) == ["Y"]
    x, y = regression(rows=20, features=3)
    trainer.fit(x, y)
    plain = make(quick_gelu_model(), epochs=1, batch_size=20, shuffle=False, learning_rate=0.1)
    plain.fit(x, y)
    for name, array in plain.get_state().items():
        np.testing.assert_allclose(trainer.get_state()[name], array, rtol=1e-6)


def test_without_the_rule_the_operator_is_named() -> None:
    from ortflex_core import Plugins, Unsupported

    entries = [e for kind in plugins() for e in kind if e.kind != "decompositions"]
    every = Plugins([e for e in entries if e.name != "example_quick_gelu"])
    with pytest.raises(Unsupported, match=r"no gradient rule for the operator QuickGelu of com\.m"):
        make(quick_gelu_model(), plugins=every).fit(*regression(rows=20, features=3))
