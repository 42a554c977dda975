"""Federated training with Flower: strategies, clients and arguments that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex import Trainer
from ortflex_core import ConfigError, DataError, OrtflexError
from tests import models

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg

from ortflex_plugins.flower import client_app, pack_shared, partition_rows, server_app
from tests.plugins.test_flower import federate, making, new, parts


class Renaming(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({f"x{n}": a for n, a in arrays.items()}), metrics


class Reshaping(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({n: Array(a.numpy().ravel()) for n, a in arrays.items()}), metrics


class Spoiling(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({n: Array(a.numpy() * np.nan) for n, a in arrays.items()}), metrics


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Renaming, "Renaming changed the arrays in round 1.*missing are 'W1'.*'xW1'"),
        (Reshaping, r"'W1' is float32\[6, 8\], got float32\[48\]"),
        (Spoiling, "'W1' has values that are not finite"),
    ],
)
def test_a_strategy_that_returns_other_arrays_ends_the_run(
    tmp_path: Path, strategy: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        federate(tmp_path, making(), strategy=strategy())
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
        (
            lambda: (new(learning_rate=1e30, optimizer="sgd"), parts()[0]),
            "the loss is inf at step 2",
        ),
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
    ("share", "words"),
    [
        ("w1", "matches no trained tensor.*'W1'"),
        (["!*"], "leaves nothing to share"),
        ([], "expected 'parameters', 'adapters'"),
        ([3], "expected 'parameters', 'adapters'"),
        ("adapters", "has no adapters"),
    ],
)
def test_share_says_what_is_wrong(share: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pack_shared(new(), share)


def test_arguments_say_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="expected a function"):
        client_app(new())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep: expected 'slots' or 'nothing', got 'all'"):
        client_app(making(), keep="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rounds: expected an integer"):
        server_app(models.mlp(), rounds=0)
    with pytest.raises(ConfigError, match="pass a Trainer as model"):
        server_app(models.mlp(), validation_data=parts()[0])
    with pytest.raises(DataError, match="--node-config"):
        partition_rows(parts()[0], Context(1, 1, {}, RecordDict(), {}))
    place = {"partition-id": 0, "num-partitions": 50}
    with pytest.raises(DataError, match="cannot be divided among 50 clients"):
        partition_rows(parts()[0], Context(1, 1, place, RecordDict(), {}))
