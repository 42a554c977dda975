"""The callback ``wandb``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from ortflex_core import setting
from ortflex_plugins.callbacks._tracking import Outcome, Tracker, parameters

if TYPE_CHECKING:
    from ortflex_core import Trainer


@attrs.define(kw_only=True)
class Wandb(Tracker):
    """Tracks training as a Weights & Biases run: the parameters, the History and the trained model.

    The columns of the History are logged as metrics, with the number of finished steps as the step.
    Resumed training continues the same run. In offline mode, it creates a second folder with the
    identifier of that run. If entries cannot be written during training, the callback logs a warning,
    and training continues. ``wandb sync`` uploads runs that were recorded offline. The callback does
    not set the global ``wandb.run``.

    Raises:
        ConfigError: wandb is not installed (extra ``wandb``), or no run can be opened.

    >>> Wandb(project="digits").project  # doctest: +SKIP
    'digits'

    Source: wandb.init with ``reinit="create_new"``.
    """

    tracker: ClassVar[str] = "wandb"
    project: str = setting(default="ortflex", help="the name of the project")
    run: str | None = setting(
        default=None, help="the name of the run; by default, wandb chooses one"
    )
    entity: str | None = setting(default=None, help="the user or team")
    mode: Literal["online", "offline", "disabled"] | None = setting(
        default=None,
        help="whether the run is logged to the server (`online`), to local files (`offline`) or not at "
        "all (`disabled`); if it is not set, the callback uses the environment variable WANDB_MODE or, "
        "without it, `online`",
    )
    model: bool = setting(default=True, help="whether to also store the trained model")

    def open(self, trainer: Trainer, known: str | None) -> tuple[Any, str]:
        """A run in the run folder's ``wandb``."""
        import wandb

        run = wandb.init(
            project=self.project,
            name=self.run,
            entity=self.entity,
            mode=self.mode,
            id=known,
            resume="allow" if known else None,
            config=parameters(trainer),
            dir=str(trainer.folder.absolute()),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        return run, str(run.id)

    def store(self, run: Any, trainer: Trainer, folder: Path) -> None:
        """The model as an artifact."""
        import wandb

        file = folder / "model.onnx"
        trainer.export(file)
        artifact = wandb.Artifact(f"model-{run.id}", type="model")
        artifact.add_file(str(file))
        run.log_artifact(artifact)

    def close(self, run: Any, outcome: Outcome) -> None:
        """With the exit code of a failed run, if it failed."""
        run.finish(exit_code=int(outcome == "failed"))
