"""The callbacks that write for other programs: TensorBoard's files, read byte by byte, and MLflow."""

from __future__ import annotations

import logging
import struct
import sys
import warnings
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, Trainer, hook, internals_of
from ortflex_plugins.callbacks.mlflow import Mlflow
from tests import children, models
from tests.training import EndAt, make, plugins, regression

pytestmark = pytest.mark.per_python


def train(*callbacks: Any, error: Any = None, epochs: int = 3, **options: Any) -> Any:
    x, y = regression(rows=40, features=6)
    more = [EndAt(6, error)] if error is not None else []
    settings = {"epochs": epochs, "batch_size": 10, "learning_rate": 0.05, "metrics": ["r2"]}
    backend = {"name": "fused", "steps_per_run": 1}
    given: Any = {"callbacks": [*callbacks, *more], **settings, **options}
    trainer = make(models.mlp(), backend=backend, **given)
    return trainer, lambda: trainer.fit(x, y, validation_data=0.25)


# TensorBoard ------------------------------------------------------------------------------------


def events(folder: Path) -> list[Any]:
    """The events of every file of a folder, the oldest first: (length, crc, bytes, crc) each."""
    from tensorboardX.proto.event_pb2 import Event

    out = []
    for path in sorted(folder.glob("events.*")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (size,) = struct.unpack_from("<Q", raw, at)
            out.append(Event.FromString(raw[at + 12 : at + 12 + size]))
            at += size + 16
    return out


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    out: dict[str, dict[int, float]] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                out.setdefault(value.tag, {})[event.step] = value.simple_value
    return out


def test_tensorboard_has_the_history_and_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    spec = {"name": "tensorboard", "folder": str(tmp_path), "steps": 2}
    _, fit = train(spec)
    history = fit()
    found = scalars(tmp_path)
    steps = [3, 6, 9]  # 30 rows, 10 at a time
    for column in set(history.columns) - {"epoch"}:
        values = found.pop(f"epoch/{column}")
        assert list(values) == steps
        if column == "seconds":  # final only after the callbacks of the epoch
            continue
        np.testing.assert_allclose(list(values.values()), history[column], rtol=1e-6)
    assert {tag: list(values) for tag, values in found.items()} == {
        "step/loss": [2, 4, 6, 8],
        "step/penalty": [2, 4, 6, 8],
        "step/rate": [2, 4, 6, 8],
    }
    assert list(found["step/rate"].values()) == pytest.approx([0.05] * 4)


def test_tensorboard_has_histograms_of_the_weights_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    spec = {"name": "tensorboard", "folder": str(tmp_path), "histograms": 2}
    trainer, fit = train(spec, epochs=4)
    before = trainer.get_state()
    fit()
    after = trainer.get_state()
    seen: dict[str, dict[int, Any]] = {}
    for event in events(tmp_path):
        for value in event.summary.value:
            if value.WhichOneof("value") == "histo":
                seen.setdefault(value.tag, {})[event.step] = value.histo
    assert set(seen) == {f"weights/{name}" for name in before}
    for name, array in before.items():
        histograms = seen[f"weights/{name}"]
        assert list(histograms) == [0, 6, 12]
        for step, weights in ((0, array), (12, after[name])):
            histo = histograms[step]
            assert (histo.num, histo.min, histo.max) == (
                weights.size,
                pytest.approx(weights.min()),
                pytest.approx(weights.max()),
            )
            assert sum(histo.bucket) == weights.size


def test_tensorboard_has_the_graph(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.graph_pb2 import GraphDef

    node = onnx.helper.make_node
    model = models.model(
        [
            node("Split", ["X"], ["/a b", "/c"], axis=1, name="/block/Split"),
            node("MatMul", ["/c", "W"], ["m"], name="/block/Split"),
            node("Concat", ["/a b", "m"], ["Y"], axis=1),
        ],
        [models.floats("X", "N", 6)],
        [models.floats("Y", "N", 4)],
        {"W": np.ones((3, 1))},
    )
    x, y = regression(features=6, outputs=4)
    spec = {"name": "tensorboard", "folder": str(tmp_path), "histograms": 0}
    make(model, backend="fused", callbacks=[spec], epochs=1).fit(x, y)
    (raw,) = [e.graph_def for e in events(tmp_path) if e.WhichOneof("what") == "graph_def"]
    graph = {n.name: (n.op, list(n.input)) for n in GraphDef.FromString(raw).node}
    assert graph == {
        "X": ("Placeholder", []),
        "W": ("Const", []),
        "block/Split": ("Split", ["X"]),
        "block/Split_1": ("MatMul", ["block/Split:1", "W"]),
        "Concat": ("Concat", ["block/Split", "block/Split_1"]),
        "Y": ("Output", ["Concat"]),
    }
    nodes = {n.name: n for n in GraphDef.FromString(raw).node}
    assert [d.size for d in nodes["W"].attr["shape"].shape.dim] == [3, 1]
    assert [d.size for d in nodes["X"].attr["shape"].shape.dim] == [-1, 6]
    assert nodes["Concat"].attr["axis"].s == b"1"
    assert not any(
        e.summary.value and "weights" in e.summary.value[0].tag for e in events(tmp_path)
    )


def test_tensorboard_reads_what_is_written_for_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer, fit = train({"name": "tensorboard", "folder": str(tmp_path), "steps": 3})
    history = fit()
    seen = reader.EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    for column in set(history.columns) - {"epoch", "seconds"}:
        points = [(e.step, e.value) for e in seen.Scalars(f"epoch/{column}")]
        assert points == [
            (k, pytest.approx(v)) for k, v in zip([3, 6, 9], history[column], strict=True)
        ]
    assert [e.step for e in seen.Scalars("step/loss")] == [3, 6, 9]
    for name, array in trainer.get_state().items():
        last = seen.Histograms(f"weights/{name}")[-1]
        assert (last.step, last.histogram_value.num) == (9, array.size)
    operators = {node.op for node in seen.Graph().node}
    assert {"MatMul", "Add", "Tanh", "Const", "Placeholder"} <= operators


def test_a_resumed_training_hides_what_it_makes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    board = {"name": "tensorboard", "folder": str(tmp_path / "board")}
    saving = {"name": "checkpoint", "folder": str(tmp_path / "saved"), "steps": 4}
    _, fit = train(board, saving, error=KeyboardInterrupt())
    fit()
    again = Trainer.resume(tmp_path / "saved" / "step-000000006", plugins=plugins())
    x, y = regression(rows=40, features=6)
    history = again.fit(x, y, validation_data=0.25)
    restarts = [e.step for e in events(tmp_path / "board") if e.HasField("session_log")]
    assert restarts == [7]
    assert list(scalars(tmp_path / "board")["epoch/loss"]) == [3, 6, 9]
    values = list(scalars(tmp_path / "board")["epoch/loss"].values())
    np.testing.assert_allclose(values, history["loss"], rtol=1e-6)
    graphs = [e for e in events(tmp_path / "board") if e.WhichOneof("what") == "graph_def"]
    assert len(graphs) == 1


def test_a_callback_for_epochs_alone_does_not_hear_of_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    for steps in (0, 1):
        spec = {"name": "tensorboard", "folder": str(tmp_path), "steps": steps}
        trainer, _ = train(spec)
        assert ("steps_end" in internals_of(trainer).hooks.callables(trainer)) == bool(steps)


# MLflow -----------------------------------------------------------------------------------------

# Of the packages below it, not of ours.
quiet = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store; making its tables takes seconds."""
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'store.db'}"


def runs(uri: str, experiment: str) -> tuple[Any, list[Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return client, client.search_runs([found.experiment_id])


def check_flavor(folder: Path, trainer: Trainer) -> None:
    """MLflow reads the model by itself, with its signature."""
    pytest.importorskip("mlflow.onnx", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import pyfunc

        loaded = pyfunc.load_model(str(folder))
    [given] = loaded.metadata.signature.inputs
    assert (given.name, given.shape, given.type) == ("X", (-1, 6), np.dtype("float32"))
    assert [spec.name for spec in loaded.metadata.signature.outputs] == ["Y"]
    x, _ = regression(rows=5, features=6)
    np.testing.assert_allclose(loaded.predict({"X": x})["Y"], trainer.predict(x), rtol=1e-5)


@quiet
def test_mlflow_has_parameters_history_and_model(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    spec = {"name": "mlflow", "experiment": "whole", "run": "first", "uri": store}
    stopping = {"name": "early_stopping", "patience": 1, "min_delta": 1e9}
    trainer, fit = train(
        stopping,
        spec,
        optimizer={"name": "adam", "beta1": 0.8},
        metrics=["sklearn.r2_score", {"name": "sklearn.d2_pinball_score", "alpha": 0.3}],
    )
    history = fit()
    client, (run,) = runs(store, "whole")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params["optimizer.name"] == "adam"
    assert run.data.params["optimizer.beta1"] == "0.8"
    assert run.data.params["epochs"] == "3"
    assert run.data.tags["ortflex.backend"] == "fused"
    for column in set(history.columns) - {"epoch", "seconds"}:  # final only after the callbacks
        name = column.replace("(alpha=0.3)", "_alpha_0.3_")
        lines = client.get_metric_history(run.info.run_id, name)
        assert [(m.step, m.value) for m in lines] == list(zip([3, 6], history[column], strict=True))
    path = client.download_artifacts(run.info.run_id, "model/model.onnx", str(tmp_path))
    whole = tmp_path / "downloaded"
    whole.mkdir()
    check_flavor(Path(client.download_artifacts(run.info.run_id, "model", str(whole))), trainer)
    kept = models.weights_of(onnx.load(path))
    for name, array in trainer.get_state().items():  # those of the first epoch, the best
        np.testing.assert_array_equal(kept[name], array)


@quiet
@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "KILLED"), (ValueError("no"), "FAILED")]
)
def test_mlflow_records_how_the_run_ended(
    store: str, error: BaseException, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, fit = train({"name": "mlflow", "experiment": status, "uri": store}, error=error)
    if status == "KILLED":
        fit()
    else:
        with pytest.raises(ValueError, match="no"):
            fit()
    client, (run,) = runs(store, status)
    assert run.info.status == status
    assert len(client.list_artifacts(run.info.run_id)) == (status == "KILLED")


@quiet
def test_mlflow_continues_its_run(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = {"name": "mlflow", "experiment": "resumed", "uri": store, "model": False}
    saving = {"name": "checkpoint", "folder": str(tmp_path / "saved"), "steps": 4}
    _, fit = train(spec, saving, error=KeyboardInterrupt())
    fit()
    again = Trainer.resume(tmp_path / "saved", plugins=plugins())
    x, y = regression(rows=40, features=6)
    history = again.fit(x, y, validation_data=0.25)
    client, (run,) = runs(store, "resumed")
    assert run.info.status == "FINISHED"
    lines = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    assert lines == pytest.approx(dict(zip([3, 6, 9], history["loss"], strict=True)))


@quiet
def test_a_store_that_goes_away_does_not_end_a_training(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    class Break:
        @hook
        def epoch_start(self, trainer: Any) -> None:
            for callback in internals_of(trainer).setup.callbacks:
                if isinstance(callback, Mlflow):
                    callback._run = None

    _, fit = train({"name": "mlflow", "experiment": "broken", "uri": store}, Break())
    with caplog.at_level(logging.WARNING, "ortflex"):
        assert len(fit()) == 3
    assert "mlflow: the metrics of an epoch could not be written" in caplog.text
    with pytest.raises(ConfigError, match="mlflow: the store 'nothing://x' cannot be used"):
        train({"name": "mlflow", "uri": "nothing://x"})[1]()


@quiet
@pytest.mark.slow
def test_mlflow_s_own_store_is_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trainer, fit = train("mlflow", epochs=1)
    trainer.folder = tmp_path / "run"
    trainer.folder.mkdir()
    fit()
    _, (run,) = runs(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}", "ortflex")
    assert run.info.status == "FINISHED"
    assert list((tmp_path / "run" / "mlflow-artifacts").rglob("model.onnx"))
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


# Both -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package"),
    [("tensorboard", "tensorboardX"), *((n, n) for n in ("mlflow", "wandb", "trackio"))],
)
def test_without_its_package_a_callback_says_what_to_install(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = util.find_spec
    monkeypatch.setattr(
        "ortflex_plugins.callbacks._extras.find_spec",
        lambda wanted: None if wanted == package else real(wanted),
    )
    with pytest.raises(ConfigError, match=rf"needs {package}, .* pip install .*\[{name}\]"):
        train(name)


def test_nothing_is_imported_before_a_training_starts() -> None:
    code = (
        "import sys\n"
        "from ortflex_core import Plugins\n"
        "from ortflex_plugins.cli.plugins import rows\n"
        "rows(Plugins.discover(), check=True)\n"
        "import ortflex_plugins.callbacks.mlflow, ortflex_plugins.callbacks.tensorboard\n"
        "print([m for m in ('mlflow', 'tensorboardX', 'sklearn.metrics') if m in sys.modules])\n"
    )
    done = children.run([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "[]"
