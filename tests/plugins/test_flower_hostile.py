"""Federated training: wrong arguments, strategies and clients, and messages that may hold anything.

The class: what one client sends ends the run of all, spoils the weights, or takes memory. The expected
weights are those of the clients that reply as they should.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex import Trainer
from ortflex_core import ConfigError, DataError, OrtflexError
from tests import models
from tests.plugins.payloads import payloads, plant, watched
from tests.training import same

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from ortflex_plugins.flower import client_app, pack_shared, partition_rows, server_app
from tests.plugins.flower_grid import LocalGrid
from tests.plugins.test_flower import federate, making, new, parts, weights

Change = Callable[[dict[str, Array], dict[str, Any]], None]


class Hostile(LocalGrid):
    """Changes the replies of node 3, which the others do not see."""

    def __init__(self, app: Any, change: Change, only: tuple[int, ...] = (3,)) -> None:
        super().__init__(app, 3)
        self.change, self.only = change, only

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.dst_node_id not in self.only:
            return reply
        records = reply.content.array_records.values()
        arrays = {n: a for record in records for n, a in record.items()}
        metrics = {n: v for r in reply.content.metric_records.values() for n, v in r.items()}
        self.change(arrays, metrics)
        content: dict[str, Any] = {"metrics": MetricRecord(metrics)}
        if len(reply.content.array_records):
            content["arrays"] = ArrayRecord(arrays)
        return Message(RecordDict(content), reply_to=message)


def run(tmp_path: Path, change: Change | None, only: tuple[int, ...] = (3,)) -> Any:
    """Two rounds, and the weights that were written; without a change node 3 does not take part."""
    app = client_app(making())
    grid = LocalGrid(app, 2) if change is None else Hostile(app, change, only)
    least = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 1)
    path = tmp_path / ("honest.onnx" if change is None else "trained.onnx")
    server = server_app(models.mlp(), rounds=2, output=path, strategy=FedAvg(**least))
    server(grid, Context(1, 1, {}, RecordDict(), {}))
    return weights(path)


def claim(shape: tuple[int, ...], descr: str = "<f4", content: bytes = b"") -> Array:
    """An array whose header claims a shape."""
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)
    data = file.getvalue() + content
    return Array(dtype="float32", shape=shape, stype="numpy.ndarray", data=data)


def pickled() -> Array:
    file = io.BytesIO()
    np.save(file, np.array([print], object), allow_pickle=True)
    return Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=file.getvalue())


def put(**changed: Any) -> Change:
    return lambda arrays, metrics: arrays.update(changed)


ARRAYS: dict[str, Change] = {
    "another shape": put(b1=Array(np.zeros(3, np.float32))),
    "nan": put(b1=Array(np.full(8, np.nan, np.float32))),
    "inf": put(b1=Array(np.full(8, np.inf, np.float32))),
    "strings": put(b1=Array(np.array(["x"] * 8))),
    "an unknown name": put(other=Array(np.zeros(8, np.float32))),
    "a missing name": lambda arrays, metrics: arrays.pop("b1", None),
    "none": lambda arrays, metrics: arrays.clear(),
    "a header of 4 TB": put(b1=claim((2**40,))),
    "a header of more than memory": put(b1=claim((2**62,))),
    "a negative size": put(b1=claim((-8,))),
    "fewer bytes": put(b1=claim((8,), content=b"1234")),
    "more bytes": put(b1=claim((8,), content=bytes(1 << 20))),
    "a pickle": put(b1=pickled()),
    "objects": put(b1=claim((8,), "|O", bytes(64))),
    "no array": put(b1=Array(dtype="float32", shape=(8,), stype="numpy.ndarray", data=b"abc")),
    "another format": put(b1=Array(dtype="float32", shape=(8,), stype="torch", data=b"abc")),
}
ROWS: dict[str, Change] = {
    name: lambda arrays, metrics, value=value: metrics.update({"num-examples": value})
    for name, value in {
        "no rows": 0,
        "negative rows": -5,
        "nan rows": float("nan"),
        "inf rows": float("inf"),
        "a huge number of rows": 1e300,
        "a list of rows": [1, 2],
    }.items()
}
METRICS: dict[str, Change] = {
    "no weight": lambda arrays, metrics: metrics.pop("num-examples"),
    "another metric": lambda arrays, metrics: metrics.update({"x": 1.0}),
    "no metrics": lambda arrays, metrics: metrics.clear(),
    "a list": lambda arrays, metrics: metrics.update({"loss": [1.0, 2.0]}),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run(tmp_path_factory.mktemp("honest"), None)


@pytest.mark.parametrize("what", [*ARRAYS, *ROWS, *METRICS])
def test_a_hostile_reply_is_left_out(
    what: str, tmp_path: Path, honest: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In training and in evaluation: the weights are the average of the others'."""
    with caplog.at_level(logging.WARNING, "ortflex"):
        found = run(tmp_path, (ARRAYS | ROWS | METRICS)[what])
    assert "the client of node 3 in round 1" in caplog.text
    assert "node 1 in" not in caplog.text
    same(found, honest, 0)


@pytest.mark.parametrize("what", ["nan", "a header of 4 TB", "nan rows"])
def test_if_all_are_hostile_the_run_ends_with_the_reason(what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no client's reply can be used.*node 1 in round 1"):
        run(tmp_path, (ARRAYS | ROWS)[what], only=(1, 2, 3))
    assert not (tmp_path / "trained.onnx").exists()


@pytest.mark.parametrize("what", ARRAYS)
def test_a_hostile_server_is_an_error_of_the_client(what: str) -> None:
    """What a server sends is checked in the same way."""
    app = client_app(making())
    grid = LocalGrid(app, 1)
    grid.contexts[1].node_config.update({"num-partitions": 3})
    first = Message(RecordDict(), dst_node_id=1, message_type="train")
    arrays = {n: Array(a) for n, a in models.weights_of(models.mlp()).items()}
    metrics: dict[str, Any] = {}
    ARRAYS[what](arrays, metrics)
    first.content["arrays"] = ArrayRecord(arrays)
    with pytest.raises(OrtflexError, match="node 1"):
        app(first, grid.contexts[1])


def test_names_in_messages_name_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As names of arrays and metrics, of a client and of the server, and as the configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    marker = plant(tmp_path)
    texts = [str(v) for table in payloads(tmp_path, marker).values() for v in table.values()]
    texts = [text for text in dict.fromkeys(texts) if "\0" not in text]

    def change(arrays: dict[str, Array], metrics: dict[str, Any]) -> None:
        arrays.update({text: Array(np.zeros(1, np.float32)) for text in texts})
        metrics.update(dict.fromkeys(texts, 1.0))

    with watched() as events:
        run(tmp_path, change)
        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        message.content["arrays"] = ArrayRecord({t: Array(np.zeros(1)) for t in texts})
        app = client_app(making())
        with pytest.raises(OrtflexError):
            app(message, LocalGrid(app, 3).contexts[1])
    assert not events
    assert not marker.exists()


def changing(change: Any) -> FedAvg:
    """A strategy that changes what clients have trained."""

    class Changing(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            return ArrayRecord(dict(change(n, a.numpy()) for n, a in arrays.items())), metrics

    return Changing()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda name, a: (f"x{name}", Array(a)),
            "Changing changed the arrays in round 1.*missing are 'W1'.*'xW1'",
        ),
        (lambda name, a: (name, Array(a.ravel())), r"'W1' is float32\[6, 8\], got float32\[48\]"),
        (lambda name, a: (name, Array(a * np.nan)), "'W1' has values that are not finite"),
    ],
    ids=["other names", "other shapes", "no numbers"],
)
def test_a_strategy_that_returns_other_arrays_ends_the_run(
    tmp_path: Path, change: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        federate(tmp_path, making(), strategy=changing(change))
    assert not (tmp_path / "trained.onnx").exists()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: (new(), None), r"node 1 \(partition 0 of 3\): it has no data"),
        (lambda: (new(), ()), "it has no data"),
        (lambda: (new(), (np.zeros((0, 6), np.float32), np.zeros((0, 1)))), "it has no data"),
        (lambda: (new(), ({"X": []}, [])), "it has no data"),
        (lambda: new(), r"returns \(trainer, data\)"),
        (lambda: (models.mlp(), parts()[0]), "its first value is a ModelProto"),
        (lambda: (trained_already(), parts()[0]), "has already trained"),
        (lambda: (new(averaging="ema"), parts()[0]), "averaging"),
        (lambda: (new(params="W1"), parts()[0]), "not shared here are 'b1'"),
        (lambda: (new(0, models.mlp((6, 3, 1))), parts()[0]), "'W1' is float32"),
        (lambda: (new(learning_rate=1e30, optimizer="sgd"), parts()[0]), "the loss is inf at step"),
    ],
)
def test_clients_that_all_fail_end_the_run_with_their_reason(
    tmp_path: Path, made: Any, words: str
) -> None:
    with pytest.raises(OrtflexError, match=f"(?s)every client failed in round 1.*{words}"):
        federate(tmp_path, lambda context: made())
    assert not (tmp_path / "trained.onnx").exists()


def trained_already() -> Trainer:
    trainer = new()
    trainer.fit(*parts()[0])
    return trainer


def test_another_optimizer_in_a_later_round_is_an_error(tmp_path: Path) -> None:
    def make_trainer(context: Context, config: Any) -> Any:
        return new(optimizer=["adam", "momentum"][config["server-round"] - 1]), parts()[0]

    with pytest.raises(OrtflexError, match=r"round 2.*belongs to another run.*keep='nothing'"):
        federate(tmp_path, make_trainer)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack_shared(new(), "w1"), "matches no trained tensor.*'W1'"),
        (lambda: pack_shared(new(), ["!*"]), "leaves nothing to share"),
        (lambda: pack_shared(new(), []), "expected 'parameters', 'adapters'"),
        (lambda: pack_shared(new(), [3]), "expected 'parameters', 'adapters'"),
        (lambda: pack_shared(new(), "adapters"), "has no adapters"),
        (lambda: client_app(new()), "expected a function"),  # type: ignore[arg-type]
        (lambda: client_app(making(), keep="all"), "keep: .* 'slots' or 'nothing', got 'all'"),  # type: ignore[arg-type]
        (lambda: server_app(models.mlp(), rounds=0), "rounds: expected an integer"),
        (lambda: server_app(models.mlp(), validation_data=parts()[0]), "pass a Trainer as model"),
    ],
)
def test_arguments_say_what_is_wrong(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_partitions_that_cannot_be_say_what_is_missing() -> None:
    for place, words in (
        ({}, "--node-config"),
        ({"partition-id": 0, "num-partitions": 50}, "cannot be divided among 50 clients"),
    ):
        with pytest.raises(DataError, match=words):
            partition_rows(parts()[0], Context(1, 1, place, RecordDict(), {}))
