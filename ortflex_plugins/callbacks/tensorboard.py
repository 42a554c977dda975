"""The callback ``tensorboard``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core import Callback, hook, number, setting
from ortflex_plugins.callbacks._extras import require

if TYPE_CHECKING:
    from ortflex_core import Progress, Trainer


# Without slots, so that an object can drop one of its hooks.
@attrs.define(kw_only=True, slots=False)
class Tensorboard(Callback):
    """Writes event files for TensorBoard: the History, histograms of the weights and the model's graph.

    ``epoch/<column>`` shows the History, and ``weights/<parameter>`` shows the weights. The horizontal
    axis of both is the number of finished steps. If ``steps`` is set, the callback also writes
    ``step/loss``, ``step/penalty`` and ``step/rate`` every ``steps`` steps. A resumed run continues in
    the same folder, and TensorBoard hides the earlier entries of repeated steps.
    ``tensorboard --logdir`` displays the files.

    Raises:
        ConfigError: tensorboardX is not installed (extra ``tensorboard``).
        ValueError: a number is negative.

    >>> Tensorboard(folder="logs", steps=100).folder  # doctest: +SKIP
    'logs'

    Source: tensorboardX.SummaryWriter.
    """

    folder: str = setting(
        default="tensorboard", help="the folder, relative to the run folder if there is one"
    )
    steps: int = setting(
        default=0,
        validator=number(ge=0),
        help="the number of steps between two entries of the loss, the penalty and the learning rate; "
        "0 means never",
    )
    histograms: int = setting(
        default=1,
        validator=number(ge=0),
        help="the number of epochs between two histograms of the weights; 0 means never",
    )
    graph: bool = setting(default=True, help="whether to also write the model's graph")
    _writer: Any = attrs.field(default=None, init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Check that the package is installed; drop the hook of steps if it is not used."""
        require("tensorboard", "tensorboardX")
        if not self.steps:
            self.steps_end = None  # type: ignore[assignment,method-assign]

    @hook
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Open the files, and write the graph and the first weights."""
        from tensorboardX import SummaryWriter

        fresh = progress.step == 0 and progress.epoch == 0
        place = str(trainer.folder / self.folder)
        # Names of files have the time in seconds; two runs in the same second must not share a file.
        suffix = f".{time.time_ns() % 10**9:09d}"
        purge = None if fresh else progress.step + 1
        self._writer = SummaryWriter(place, purge_step=purge, filename_suffix=suffix)
        if fresh:
            if self.graph:
                from ortflex_plugins.callbacks._tensorboard_graph import graph_def

                self._writer.file_writer.add_onnx_graph(graph_def(trainer.model.proto))
            self._weights(trainer, 0)

    @hook
    def steps_end(
        self,
        progress: Progress,
        losses: Sequence[float],
        penalties: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        """Write costs and rate of every ``steps``-th step."""
        first = progress.step - len(losses) + 1
        for k, values in enumerate(zip(losses, penalties, rates, strict=True)):
            if (first + k) % self.steps == 0:
                for name, value in zip(("loss", "penalty", "rate"), values, strict=True):
                    self._writer.add_scalar(f"step/{name}", value, first + k)

    @hook
    def epoch_end(self, trainer: Trainer, progress: Progress, record: Mapping[str, float]) -> None:
        """Write the epoch's line of the History, and the weights."""
        for column, value in record.items():
            if column != "epoch":
                self._writer.add_scalar(f"epoch/{column}", value, progress.step)
        if self.histograms and progress.epoch % self.histograms == 0:
            self._weights(trainer, progress.step)
        self._writer.flush()

    @hook
    def train_end(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _weights(self, trainer: Trainer, step: int) -> None:
        for name, array in trainer.get_state().items() if self.histograms else ():
            self._writer.add_histogram(f"weights/{name}", array, step)
