"""The callback ``mlflow``."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.component import setting
from ortflex_core.config import Parts, to_plain
from ortflex_core.errors import ConfigError, OrtflexError
from ortflex_core.hooks import hook
from ortflex_core.training import internals_of
from ortflex_plugins.callbacks._extras import require

if TYPE_CHECKING:
    from ortflex_core import Trainer
    from ortflex_core.checkpoints import Saved
    from ortflex_core.types import Progress

_log = logging.getLogger("ortflex")
_LARGEST = 1 << 30  # bytes of a model in one file
_LONGEST = 500  # the longest parameter of older stores


@attrs.define(kw_only=True)
class Mlflow:
    """Tracks a training as a run of MLflow: its parameters, its History, the trained model.

    Metrics are the columns of the History over finished steps. The model is an artifact of a
    training that did not fail, with its signature, as ``mlflow.onnx`` writes it. A resumed training
    continues its run. If the store cannot be reached during the training, its entries are lost and the
    training continues.

    Raises:
        ConfigError: mlflow is not installed (extra ``mlflow``), or the store cannot be opened.

    >>> Mlflow(experiment="digits").experiment  # doctest: +SKIP
    'digits'

    Source: mlflow.tracking.MlflowClient; no global state of MLflow is touched.
    """

    experiment: str = setting(default="ortflex", help="the experiment's name")
    run: str | None = setting(default=None, help="the run's name; not set: MLflow chooses one")
    uri: str | None = setting(
        default=None,
        help="the address of the store; not set: MLFLOW_TRACKING_URI, or mlflow.db in the run folder",
    )
    model: bool = setting(default=True, help="also store the trained model")
    _client: Any = attrs.field(default=None, init=False, repr=False, eq=False)
    _id: str | None = attrs.field(default=None, init=False)
    _outcome: str = attrs.field(default="FINISHED", init=False)

    def __attrs_post_init__(self) -> None:
        """Check that the package is installed."""
        require("mlflow", "mlflow", "mlflow")

    @property
    def run_id_(self) -> str | None:
        """The run of the last training."""
        return self._id

    @hook
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Open the store and begin a run, or continue the one of the checkpoint."""
        from mlflow.tracking import MlflowClient

        self._outcome = "FINISHED"
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or _local(trainer.folder)
        try:
            self._client = MlflowClient(uri)
            if not (progress.step or progress.epoch) or not self._goes_on():
                self._id = self._begin(trainer, uri)
        except Exception as error:  # of the store's client, its database or the network
            raise ConfigError(
                f"mlflow: the store {uri!r} cannot be used: {type(error).__name__}: {error}"
            ) from error

    def _goes_on(self) -> bool:
        if self._id is None:
            return False
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(self._id, status="RUNNING")
        except MlflowException:  # it is of another store, or deleted
            return False
        return True

    def _begin(self, trainer: Trainer, uri: str) -> str:
        from mlflow.entities import Param, RunTag

        known = self._client.get_experiment_by_name(self.experiment)
        if known is None:
            files = (trainer.folder / "mlflow-artifacts").absolute().as_uri()
            place = files if uri.startswith("sqlite:") else None
            experiment = self._client.create_experiment(self.experiment, artifact_location=place)
        else:
            experiment = known.experiment_id
        run = self._client.create_run(experiment, run_name=self.run).info.run_id
        params = [Param(name, text[:_LONGEST]) for name, text in _parameters(trainer).items()]
        about = {
            "ortflex.backend": trainer.backend_,
            "ortflex.runtime": internals_of(trainer).runtime,
        }
        tags = [RunTag(name, str(value)) for name, value in about.items()]
        self._client.log_batch(run, params=params, tags=tags)
        return str(run)

    @hook
    def epoch_end(self, progress: Progress, record: Mapping[str, float]) -> None:
        """Log the epoch's line of the History."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_allowed(column), float(value), now, progress.step)
            for column, value in record.items()
            if column != "epoch"
        ]
        with _tolerant("the metrics of an epoch"):
            self._client.log_batch(self._id, metrics=metrics)

    @hook
    def exception(self, error: BaseException) -> None:
        """Note how the run ended."""
        self._outcome = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"

    @hook(trylast=True)
    def train_end(self, trainer: Trainer) -> None:
        """Store the model, after early stopping has restored the best weights, and end the run."""
        if self._client is None:
            return
        with _tolerant("the end of the run"):
            if self.model and self._outcome != "FAILED":
                with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of MLflow about itself
                    _write_model(trainer, Path(folder) / "model")
                    self._client.log_artifacts(self._id, str(Path(folder) / "model"), "model")
            self._client.set_terminated(self._id, self._outcome)
        self._client = None

    @hook
    def checkpoint_saving(self, saved: Saved) -> None:
        """Keep the identifier of the run."""
        saved.put("mlflow", {"run": self._id})

    @hook
    def checkpoint_loading(self, saved: Saved) -> None:
        """Continue that run."""
        values = saved.get("mlflow", {"run": str | None})
        if values is not None:
            self._id = values["run"]


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


def _local(folder: Path) -> str:
    return f"sqlite:///{(folder / 'mlflow.db').absolute().as_posix()}"


def _allowed(name: str) -> str:
    """A name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _parameters(trainer: Trainer) -> dict[str, str]:
    """The Trainer's arguments as strings: ``optimizer.beta1``; objects by their repr."""
    parts, out = Parts(trainer.plugins), dict[str, str]()

    def put(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                put(f"{name}.{key}", inner)
        else:
            out[_allowed(name)] = str(value)

    for name, value in internals_of(trainer).arguments.items():
        if value is None or value == ():
            continue
        try:
            put(name, to_plain(parts.spell_out(name, value)))
        except (OrtflexError, TypeError):
            out[name] = repr(value)
    return out


@contextmanager
def _tolerant(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the store's client, its database or the network
        _log.warning("mlflow: %s could not be written: %s: %s", what, type(error).__name__, error)
