"""Federated training of edited models: what travels, what the server writes, and clients with other edits.

The class of mistakes: the server or a client uses the model of the file, or two classes of the same number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from tests import models

pytest.importorskip("flwr")

from flwr.app import Context

from ortflex_core import OrtflexError
from ortflex_plugins.flower import client_app, server_app
from tests.plugins.commands import works
from tests.plugins.test_flower import averaged, run, weights
from tests.training import same

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


def rows(names: bool = False) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    out = []
    for size in SIZES:
        labels = np.arange(size) % 3
        x = rng.standard_normal((size, 6)).astype(np.float32)
        out.append((x, NAMES[labels] if names else labels))
    return out


def new(seed: int = 0, **options: Any) -> Trainer:
    given = {"loss": "softmax_cross_entropy", "optimizer": "sgd", "batch_size": 6, "epochs": 1}
    return Trainer(network(), seed=seed, progress=False, **(given | options))


def federate(tmp_path: Path, server: Any, options: Any, names: bool = False) -> Any:
    """Two rounds of three clients; ``options`` are those of every client, or a function of its number."""
    data = rows(names)

    def make_trainer(context: Context) -> Any:
        number = context.node_config["partition-id"]
        own = options(number) if callable(options) else options
        return new(**({"seed": number} | own)), data[number]

    path = tmp_path / "trained.onnx"
    grid = run(client_app(make_trainer), server_app(server, rounds=2, output=path))
    return grid, path


@pytest.mark.parametrize("name", EDITS)
def test_the_edited_model_travels_and_is_written(name: str, tmp_path: Path) -> None:
    """Clients have seeds of their own; the new weights are the server's, then the averages."""
    options, names = EDITS[name], name == "names"
    grid, path = federate(tmp_path, new(**options), options, names)
    trainers, data = [new(k, **options) for k in range(3)], rows(names)
    mean = new(**options).get_state()
    sent = [r for m in grid.sent for r in m.content.array_records.values()]
    assert {n: a.numpy().shape for n, a in sent[0].items()} == {n: a.shape for n, a in mean.items()}
    mean = averaged(trainers, data, list(SIZES), 2, mean)
    found, edited = weights(path), new(**options).export()
    same({name: found[name] for name in mean}, mean, 0)
    assert onnx.load(path).graph.node == edited.graph.node
    shapes = {n: a.shape for n, a in models.weights_of(edited).items()}
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
        federate(tmp_path, new(**server), clients, name == "classes in another order")
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not (tmp_path / "trained.onnx").exists()


def test_a_project_of_a_recipe_with_a_head_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client and server read the same recipe."""
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "model.onnx")
    x, y = (np.concatenate(part) for part in zip(*rows(names=True), strict=True))
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
