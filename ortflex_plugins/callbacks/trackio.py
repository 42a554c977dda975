"""The callback ``trackio``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from ortflex_core import setting
from ortflex_plugins.callbacks._tracking import Outcome, Tracker, parameters

if TYPE_CHECKING:
    from ortflex_core import Trainer


@attrs.define(kw_only=True)
class Trackio(Tracker):
    """Tracks training as a trackio run, locally by default: the parameters and the History.

    The columns of the History are logged as metrics, with the number of finished steps as the step.
    Resumed training continues the same run. If entries cannot be written during training, the callback
    logs a warning, and training continues. The command ``trackio show`` opens the dashboard. The
    environment variable TRACKIO_DIR sets the folder in which the files are stored.

    Raises:
        ConfigError: trackio is not installed (extra ``trackio``), or no run can be opened.

    >>> Trackio(project="digits").project  # doctest: +SKIP
    'digits'

    Source: trackio.init.
    """

    tracker: ClassVar[str] = "trackio"
    project: str = setting(default="ortflex", help="the name of the project")
    run: str | None = setting(
        default=None, help="the name of the run; by default, trackio chooses one"
    )
    space: str | None = setting(
        default=None,
        help="the Hugging Face Space to which the run is sent; by default, it stays local",
    )

    def open(self, trainer: Trainer, known: str | None) -> tuple[Any, str]:
        """A run; its name identifies it."""
        import trackio

        run = trackio.init(
            self.project,
            name=known or self.run,
            space_id=self.space,
            config=parameters(trainer),
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return run, str(run.name)

    def close(self, run: Any, outcome: Outcome) -> None:
        """Write all entries."""
        run.finish()
