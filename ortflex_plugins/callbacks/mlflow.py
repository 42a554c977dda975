"""The callback ``mlflow``."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from ortflex_core import ConfigError, internals_of, setting
from ortflex_plugins.callbacks._tracking import Outcome, Tracker, arguments

if TYPE_CHECKING:
    from ortflex_core import Trainer

_LARGEST = 1 << 30  # bytes of a model in one file
_LONGEST = 500  # the longest parameter of older stores


@attrs.define(kw_only=True)
class Mlflow(Tracker):
    """Tracks training as an MLflow run: the parameters, the History and the trained model.

    The columns of the History are logged as metrics, with the number of finished steps as the step. If
    training succeeds, the model is stored as an artifact of the run, together with its signature, in
    the format of ``mlflow.onnx``. Resumed training continues the same run. If the tracking store cannot
    be reached during training, the entries are lost, but training continues. The callback does not
    change the global state of MLflow.

    Raises:
        ConfigError: mlflow is not installed (extra ``mlflow``), or the store cannot be opened.

    >>> Mlflow(experiment="digits").experiment  # doctest: +SKIP
    'digits'

    Source: mlflow.tracking.MlflowClient.
    """

    tracker: ClassVar[str] = "mlflow"
    experiment: str = setting(default="ortflex", help="the name of the experiment")
    run: str | None = setting(
        default=None, help="the name of the run; by default, MLflow chooses one"
    )
    uri: str | None = setting(
        default=None,
        help="the URI of the tracking store; if it is not set, the callback uses the environment "
        "variable MLFLOW_TRACKING_URI or, without it, the file mlflow.db in the run folder",
    )
    model: bool = setting(default=True, help="whether to also store the trained model")

    def open(self, trainer: Trainer, known: str | None) -> tuple[_Run, str]:
        """A run in the store."""
        from mlflow.tracking import MlflowClient

        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or _file(trainer.folder)
        try:
            client = MlflowClient(uri)
            if known is None or not _continues(client, known):
                known = self._begin(client, trainer, uri)
        except Exception as error:  # of the store's client, its database or the network
            raise ConfigError(
                f"mlflow: the store {uri!r} cannot be used: {type(error).__name__}: {error}"
            ) from error
        return _Run(client, known), known

    def _begin(self, client: Any, trainer: Trainer, uri: str) -> str:
        from mlflow.entities import Param, RunTag

        known = client.get_experiment_by_name(self.experiment)
        if known is None:
            files = (trainer.folder / "mlflow-artifacts").absolute().as_uri()
            place = files if uri.startswith("sqlite:") else None
            experiment = client.create_experiment(self.experiment, artifact_location=place)
        else:
            experiment = known.experiment_id
        run = client.create_run(experiment, run_name=self.run).info.run_id
        params = [Param(name, text[:_LONGEST]) for name, text in _parameters(trainer).items()]
        about = {
            "ortflex.backend": trainer.backend_,
            "ortflex.runtime": internals_of(trainer).runtime,
        }
        tags = [RunTag(name, str(value)) for name, value in about.items()]
        client.log_batch(run, params=params, tags=tags)
        return str(run)

    def store(self, run: _Run, trainer: Trainer, folder: Path) -> None:
        """The model as an artifact."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of MLflow about itself
            _write_model(trainer, folder / "model")
            run.client.log_artifacts(run.identifier, str(folder / "model"), "model")

    def close(self, run: _Run, outcome: Outcome) -> None:
        """With the status that MLflow has for the outcome."""
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        run.client.set_terminated(run.identifier, status[outcome])


@attrs.frozen
class _Run:
    client: Any
    identifier: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [
            Metric(_allowed(column), value, now, step)
            for column, value in metrics.items()
            if column != "epoch"
        ]
        self.client.log_batch(self.identifier, metrics=values)


def _file(folder: Path) -> str:
    return f"sqlite:///{(folder / 'mlflow.db').absolute().as_posix()}"


def _continues(client: Any, run: str) -> bool:
    """Mark a run as running; False if it is in another store or was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run, status="RUNNING")
    except MlflowException:
        return False
    return True


def _write_model(trainer: Trainer, folder: Path) -> None:
    """The model with its signature, as ``mlflow.onnx`` writes it; where that is missing, the file alone.

    ``mlflow.onnx.load_model`` and ``mlflow.pyfunc.load_model`` read it from the run's artifacts.
    """
    try:
        import mlflow.onnx as flavor
        from mlflow.models import ModelSignature
        from mlflow.types import Schema, TensorSpec
    except ImportError:  # pandas, which mlflow-skinny does not ask for
        folder.mkdir()
        trainer.export(folder / "model.onnx")
        return

    def schema(specs: Iterable[Any]) -> Any:
        known = [s for s in specs if s.shape is not None]
        shapes = {s.name: [d if isinstance(d, int) else -1 for d in s.shape] for s in known}
        return Schema([TensorSpec(s.numpy, shapes[s.name], s.name) for s in known])

    proto = trainer.export()
    flavor.save_model(
        proto,
        str(folder),
        signature=ModelSignature(schema(trainer.model.inputs), schema(trainer.model.outputs)),
        pip_requirements=["onnx", "onnxruntime"],  # else it runs the model to find them out
        save_as_external_data=proto.ByteSize() > _LARGEST,
    )


def _allowed(name: str) -> str:
    """A name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _parameters(trainer: Trainer) -> dict[str, str]:
    """The Trainer's arguments as strings, such as ``optimizer.beta1``."""
    out: dict[str, str] = {}

    def put(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                put(f"{name}.{key}", inner)
        else:
            out[_allowed(name)] = str(value)

    for name, value in arguments(trainer):
        put(name, value)
    return out
