"""Federated training with Flower, in one process: what rounds compute, what travels, and edited models.

The class of mistakes with edits: the server or a client uses the model of the file, or two classes of the
same number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from tests import models
from tests.training import same

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg

from ortflex_core import OrtflexError, internals_of
from ortflex_plugins.flower import client_app, load_shared, pack_shared, partition_rows, server_app
from tests.plugins.commands import works
from tests.plugins.flower_grid import LocalGrid, as_bytes

ROWS = [40, 25, 64]
OPTIMIZERS = ["sgd", "momentum", "adam", "prodigy"]


def parts(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    out = []
    for rows in ROWS:
        x = rng.standard_normal((rows, 6)).astype(np.float32)
        out.append((x, np.sin(x).sum(axis=1, keepdims=True).astype(np.float32)))
    return out


def new(number: int = 0, model: Any = None, **changes: Any) -> Trainer:
    given = {"loss": "squared_error", "optimizer": "adam", "batch_size": 8, "epochs": 2}
    given |= {"seed": number, "progress": False} | changes
    return Trainer(models.mlp() if model is None else model, **given)


def making(model: Any = None, **changes: Any) -> Any:
    data = parts()

    def make_trainer(context: Context) -> Any:
        number = context.node_config["partition-id"]
        return new(number, model, **changes), data[number]

    return make_trainer


def run(app: Any, server: Any, nodes: int = 3, **config: Any) -> LocalGrid:
    grid = LocalGrid(app, nodes, **config)
    server(grid, Context(1, 1, {}, RecordDict(), grid.run_config))
    return grid


def federate(tmp_path: Path, make: Any, model: Any = None, **options: Any) -> Any:
    """Five rounds; the grid and the weights that were written."""
    shared = {k: options.pop(k) for k in ("share",) if k in options}
    keep = {k: options.pop(k) for k in ("keep",) if k in options}
    nodes = options.pop("nodes", 3)
    if nodes < 3:
        least = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 1)
        options["strategy"] = FedAvg(**least)
    server = server_app(
        models.mlp() if model is None else model,
        **shared,
        **({"rounds": 5} | options),
        output=tmp_path / "trained.onnx",
    )
    grid = run(client_app(make, **shared, **keep), server, nodes)
    return grid, weights(tmp_path / "trained.onnx")


def weights(path: Path) -> dict[str, np.ndarray]:
    return models.weights_of(onnx.load(path))


def average(states: list[dict[str, np.ndarray]], rows: list[int]) -> dict[str, np.ndarray]:
    """Σ rows · state / Σ rows in float32, in the order of the clients."""
    factors = [np.float32(n / sum(rows)) for n in rows]
    out = {name: np.zeros_like(array) for name, array in states[0].items()}
    for state, factor in zip(states, factors, strict=True):
        for name, array in state.items():
            out[name] = out[name] + array * factor
    return out


def averaged(
    trainers: list[Trainer], data: Any, rows: list[int], rounds: int, start: Any, **options: Any
) -> dict[str, np.ndarray]:
    """The weights after rounds of trainers alone."""
    for _ in range(rounds):
        for trainer, part in zip(trainers, data, strict=True):
            trainer.set_state(start)
            trainer.fit(*part, **options)
        start = average([t.get_state() for t in trainers], rows)
    return start


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_of_fedavg_are_weighted_averages_of_trainers(tmp_path: Path, optimizer: str) -> None:
    _, trained = federate(tmp_path, making(optimizer=optimizer))
    trainers = [new(k, optimizer=optimizer) for k in range(3)]
    same(trained, averaged(trainers, parts(), ROWS, 5, trainers[0].get_state()), 0)
    assert any((trained[n] != a).any() for n, a in models.weights_of(models.mlp()).items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_of_one_client_are_calls_of_fit(tmp_path: Path, optimizer: str) -> None:
    grid, trained = federate(tmp_path, making(optimizer=optimizer), nodes=1)
    alone = new(0, optimizer=optimizer)
    for _ in range(5):
        alone.fit(*parts()[0])
    same(trained, alone.get_state(), 0)
    slots = grid.contexts[1].state["ortflex-slots"]
    same({n: a.numpy() for n, a in slots.items()}, internals_of(alone).live.slots(), 0)


def test_rounds_of_one_client_are_one_training_where_nothing_starts_again(tmp_path: Path) -> None:
    """Without shuffling and with a constant rate an epoch does not know in which fit it is."""
    _, trained = federate(tmp_path, making(shuffle=False, epochs=1), nodes=1)
    alone = new(0, shuffle=False, epochs=5)
    alone.fit(*parts()[0])
    same(trained, alone.get_state(), 0)


def test_keep_nothing_starts_the_optimizer_again(tmp_path: Path) -> None:
    grid, trained = federate(tmp_path, making(), nodes=1, keep="nothing")
    state = new().get_state()
    for _ in range(5):
        state = averaged([new()], parts()[:1], ROWS[:1], 1, state)
    same(trained, state, 0)
    assert not list(grid.contexts[1].state)


def test_messages_hold_what_is_shared_and_nothing_else(tmp_path: Path) -> None:
    wide = models.mlp((6, 2000, 4, 1))
    grid, trained = federate(tmp_path, making(wide), wide, share=["W3", "b3"], rounds=2)
    start = models.weights_of(wide)
    size = sum(start[name].nbytes for name in ("W3", "b3"))
    assert size == 20
    for message in [*grid.sent, *grid.replies]:
        records = message.content.array_records
        assert all(set(record) == {"W3", "b3"} for record in records.values())
        # Each array has numpy's header of 128 bytes.
        assert sum(len(a.data) for r in records.values() for a in r.values()) in (0, size + 2 * 128)
        assert len(as_bytes(message)) < 1000 < start["W1"].nbytes
    # What is private was trained, stays at each client, and the server's file has its old values.
    np.testing.assert_array_equal(trained["W1"], start["W1"])
    private = [c.state["ortflex-private"]["W1"].numpy() for c in grid.contexts.values()]
    assert all((w != start["W1"]).any() for w in private)
    assert (private[0] != private[1]).any()


def test_adapters_travel_alone_and_are_merged_into_the_file(tmp_path: Path) -> None:
    wide = models.mlp((6, 400, 4, 1))
    options = {"adapters": {"name": "lora", "rank": 1, "targets": ["W2"]}, "params": ["b3"]}
    server = new(0, wide, **options)
    make = making(wide, **options)
    grid, trained = federate(tmp_path, make, server, share="adapters", rounds=2)
    [arrays] = {frozenset(r) for m in grid.replies for r in m.content.array_records.values()}
    assert arrays == {"W2.lora_A", "W2.lora_B"}
    assert max(len(as_bytes(message)) for message in grid.sent) < 3000
    start = models.weights_of(wide)
    assert [name for name in start if (trained[name] != start[name]).any()] == ["W2"]
    change = trained["W2"].astype(np.float64) - start["W2"]
    assert np.linalg.matrix_rank(change, tol=1e-5) == 1
    assert {len(c.state["ortflex-private"]) for c in grid.contexts.values()} == {1}


def test_private_tensors_keep_their_values_between_rounds(tmp_path: Path) -> None:
    _, trained = federate(tmp_path, making(), share="!W1", nodes=1)
    alone = new()
    for _ in range(5):
        alone.fit(*parts()[0])
    for name in ("b1", "W2", "b3"):
        np.testing.assert_array_equal(trained[name], alone.get_state()[name])


def test_running_statistics_travel_with_the_parameters(tmp_path: Path) -> None:
    model, statistics = models.normalized(models.mlp()), ("mean", "variance")
    # No client has a last batch of one row.
    _, trained = federate(tmp_path, making(model, batch_size=10), model, rounds=2)
    trainers = [new(k, model, batch_size=10) for k in range(3)]
    mean: dict[str, np.ndarray] = {}
    for _ in range(2):
        for trainer, rows in zip(trainers, parts(), strict=True):
            if mean:
                trained_now = set(trainer.get_state())
                trainer.set_state({n: a for n, a in mean.items() if n in trained_now})
                trainer.engine.load_buffers({n: mean[n] for n in statistics})
            trainer.fit(*rows)
        mean = average([t.get_state(buffers=True) for t in trainers], ROWS)
    assert set(statistics) <= set(mean)
    same(trained, mean, 0)
    assert (trained["mean"] != models.weights_of(model)["mean"]).any()


@pytest.mark.parametrize("validation", [None, 0.25, "rows"])
def test_evaluation_has_metrics_of_the_weights_that_came(tmp_path: Path, validation: Any) -> None:
    held = parts(seed=1)

    def make_trainer(context: Context) -> Any:
        number = context.node_config["partition-id"]
        trainer = new(number, metrics=["mae", "rmse"])
        given = held[number] if validation == "rows" else validation
        return (trainer, parts()[number], given) if validation else (trainer, parts()[number])

    grid, trained = federate(tmp_path, make_trainer, rounds=1)
    judged = [r for r in grid.replies if "arrays" not in r.content]
    assert len(judged) == 3
    for k, reply in enumerate(judged):
        x, y = held[k] if validation == "rows" else parts()[k]
        if validation == 0.25:
            order = np.random.default_rng([k, 0x5A11D]).permutation(len(x))
            x, y = x[order[: len(x) // 4]], y[order[: len(x) // 4]]
        alone = new(k, metrics=["mae", "rmse"])
        alone.set_state({n: trained[n] for n in alone.get_state()})
        error = alone.predict(x).astype(np.float64) - y
        metrics = dict(reply.content["metrics"])
        assert metrics.pop("num-examples") == len(x)
        assert metrics.keys() == {"loss", "mae", "rmse"}
        np.testing.assert_allclose(metrics["mae"], np.abs(error).mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["rmse"] ** 2, metrics["loss"], rtol=1e-5)


def test_iterables_of_batches_train_and_are_weighted_by_their_rows(tmp_path: Path) -> None:
    """They are evaluated on other data, whose rows can be counted."""

    def make_trainer(context: Context, held: bool = True) -> Any:
        number = context.node_config["partition-id"]
        x, y = parts()[number]
        batches = [(x[k : k + 8], y[k : k + 8]) for k in range(0, len(x), 8)]
        given = new(number), lambda: iter(batches)
        return (*given, parts()[number]) if held else given

    grid, _ = federate(tmp_path, make_trainer, rounds=1)
    counts = [reply.content["metrics"]["num-examples"] for reply in grid.replies]
    assert counts == ROWS * 2
    grid, _ = federate(tmp_path, lambda context: make_trainer(context, False), rounds=1)
    evaluated = [r for r in grid.replies if r.has_error()]
    assert len(evaluated) == 3
    assert "iterable of batches is not known" in evaluated[0].error.reason


def test_the_server_evaluates_on_rows_of_its_own(tmp_path: Path) -> None:
    seen = []

    class Watching(FedAvg):
        def start(self, *args: Any, **options: Any) -> Any:
            seen.append(super().start(*args, **options))
            return seen[-1]

    x, y = parts(seed=1)[0]
    server = server_app(
        new(), strategy=Watching(), rounds=2, validation_data=(x, y), output=tmp_path / "t.onnx"
    )
    run(client_app(making()), server)
    scores = seen[0].evaluate_metrics_serverapp
    final = new(0, onnx.load(tmp_path / "t.onnx")).evaluate(x, y)["loss"]
    assert [*scores] == [0, 1, 2]
    assert scores[0]["loss"] == new().evaluate(x, y)["loss"]
    assert scores[2]["loss"] == final < scores[0]["loss"]


def test_config_reaches_make_trainer(tmp_path: Path) -> None:
    seen = []

    def make_trainer(context: Context, config: Any) -> Any:
        seen.append((config["server-round"], config["rate"], context.run_config["shuffle"]))
        return new(0, learning_rate=config["rate"]), parts()[0]

    server = server_app(models.mlp(), config={"rate": 0.25}, output=tmp_path / "t.onnx")
    run(client_app(make_trainer), server, shuffle=True, **{"num-server-rounds": 2})
    assert set(seen) == {(1, 0.25, True), (2, 0.25, True)}


def test_other_strategies_work(tmp_path: Path) -> None:
    _, trained = federate(tmp_path, making(), strategy=FedAdam(), rounds=2)
    assert all(a.dtype == np.float32 and np.isfinite(a).all() for a in trained.values())


def test_partitions_are_disjoint_and_together_everything() -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    found = []
    for k in range(3):
        context = Context(1, k, {"partition-id": k, "num-partitions": 3}, RecordDict(), {})
        inputs, labels, weight = partition_rows(({"X": x}, y, None), context)
        assert weight is None
        np.testing.assert_array_equal(inputs["X"], x[labels])
        found += list(labels)
    assert sorted(found) == list(range(10))


def test_shared_tensors_go_from_one_trainer_to_another() -> None:
    one, other = new(), new(0, models.mlp(seed=1))
    load_shared(other, pack_shared(one, "W*"), "W*")
    for name, array in other.get_state().items():
        same = (array == one.get_state()[name]).all()
        assert same == name.startswith("W")


SIZES = (24, 18, 30)
NAMES = np.array(["ant", "bee", "fly"])
HEAD_ON = {"outputs": 3, "on": "h1"}
EDITS: dict[str, dict[str, Any]] = {
    "a head": {"head": 3},
    "names": {"head": list(NAMES)},
    "a layer on features": {"head": HEAD_ON},
    "more classes": {"edits": {"name": "more_classes", "add": 2}},
    "the head alone": {"head": 3, "freeze": "backbone"},
}


def network() -> onnx.ModelProto:
    """Two classes, before an Identity."""
    return models.mlp((6, 8, 2))


def labeled(names: bool = False) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    out = []
    for size in SIZES:
        labels = np.arange(size) % 3
        x = rng.standard_normal((size, 6)).astype(np.float32)
        out.append((x, NAMES[labels] if names else labels))
    return out


def edited(seed: int = 0, **options: Any) -> Trainer:
    given = {"loss": "softmax_cross_entropy", "optimizer": "sgd", "batch_size": 6, "epochs": 1}
    return new(seed, network(), **(given | options))


def federate_edited(tmp_path: Path, server: Any, options: Any, names: bool = False) -> Any:
    """Two rounds of three clients; ``options`` are those of every client, or a function of its number."""
    data = labeled(names)

    def make_trainer(context: Context) -> Any:
        number = context.node_config["partition-id"]
        own = options(number) if callable(options) else options
        return edited(**({"seed": number} | own)), data[number]

    path = tmp_path / "trained.onnx"
    grid = run(client_app(make_trainer), server_app(server, rounds=2, output=path))
    return grid, path


@pytest.mark.parametrize("name", EDITS)
def test_the_edited_model_travels_and_is_written(name: str, tmp_path: Path) -> None:
    """Clients have seeds of their own; the new weights are the server's, then the averages."""
    options, names = EDITS[name], name == "names"
    grid, path = federate_edited(tmp_path, edited(**options), options, names)
    trainers, data = [edited(k, **options) for k in range(3)], labeled(names)
    mean = edited(**options).get_state()
    sent = [r for m in grid.sent for r in m.content.array_records.values()]
    assert {n: a.numpy().shape for n, a in sent[0].items()} == {n: a.shape for n, a in mean.items()}
    mean = averaged(trainers, data, list(SIZES), 2, mean)
    found, alone = weights(path), edited(**options).export()
    same({name: found[name] for name in mean}, mean, 0)
    assert onnx.load(path).graph.node == alone.graph.node
    shapes = {n: a.shape for n, a in models.weights_of(alone).items()}
    assert {n: a.shape for n, a in found.items()} == shapes


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "another number of classes": ({"head": 4}, {"head": 3}, ("float32[8, 3]", "float32[8, 4]")),
    "no head": ({}, {"head": 3}, ("float32[8, 3]", "float32[8, 2]")),
    "a layer elsewhere": (
        {"head": HEAD_ON},
        {"head": 3},
        ("'W2' float32[8, 3]", "'scores.weight' float32[8, 3]", "head"),
    ),
    "classes in another order": (
        {"head": ["bee", "ant", "fly"]},
        {"head": list(NAMES)},
        ("['ant', 'bee', 'fly']", "['bee', 'ant', 'fly']"),
    ),
    "another seed of weights that are not sent": (
        {"head": 3, "params": ["W1"], "seed": 5},
        {"head": 3, "params": ["W1"], "seed": 6},
        ("W2", "b2", "seed"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_clients_with_other_edits_are_an_error(name: str, tmp_path: Path) -> None:
    server, clients, words = WRONG[name]
    with pytest.raises(OrtflexError) as raised:
        federate_edited(tmp_path, edited(**server), clients, name == "classes in another order")
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not (tmp_path / "trained.onnx").exists()


def test_a_project_of_a_recipe_with_a_head_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client and server read the same recipe."""
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "model.onnx")
    x, y = (np.concatenate(part) for part in zip(*labeled(names=True), strict=True))
    np.savez("data.npz", X=x, y=y)
    Path("train.toml").write_text(
        'model = "model.onnx"\ndata = "data.npz"\nloss = "softmax_cross_entropy"\n'
        f"head = {list(map(str, NAMES))}\nfreeze = 'backbone'\n"
    )
    works("new-flower-app", "train.toml", "-o", "app")
    apps: dict[str, Any] = {}
    for name in ("client_app", "server_app"):
        path = Path("app/app") / f"{name}.py"
        scope: dict[str, Any] = {"__file__": str(path), "__name__": name}
        exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)
        apps[name] = scope["app"]
    config = {"local-epochs": 1, "num-server-rounds": 2, "output": "trained.onnx"}
    run(apps["client_app"], apps["server_app"], **config)
    assert weights(Path("trained.onnx"))["W2"].shape == (8, 3)
    trained = Trainer("trained.onnx", loss="softmax_cross_entropy", metrics="accuracy")
    assert trained.evaluate(x, y)["accuracy"] > 0
