"""``ortflex train``: a run with the settings of a TOML file, in a run folder."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortflex_core import printable
from ortflex_plugins.cli.overrides import RecipeCommand, trusting_code
from ortflex_plugins.cli.terminal import new_table, right

if TYPE_CHECKING:
    from ortflex_core import History, Recipe, Trainer
    from ortflex_plugins.pictures.measure import Measures

_RESULTS = ("loss", "penalty", "validation_")
_NO_CHECKPOINT = (
    "they cannot be continued, because the recipe has no callback checkpoint (callbacks = "
    '["checkpoint"])'
)


@click.command(cls=RecipeCommand)
@click.option(
    "--resume",
    type=click.Path(file_okay=False, path_type=Path),
    help="Continue from a checkpoint, or from the newest checkpoint in a run folder.",
)
@click.option(
    "--strict/--no-strict",
    default=True,
    help="With --resume: whether to stop or only warn if the arguments or data differ from those of the "
    "checkpoint.",
)
@click.option(
    "--force",
    is_flag=True,
    help="If the output folder contains a run, rename that folder and start a new run.",
)
@trusting_code
def train(
    recipe: Path,
    overrides: Sequence[str],
    resume: Path | None,
    strict: bool,
    force: bool,
    trust_code: bool,
) -> None:
    """Train a model with the settings in a recipe (a TOML file).

    RECIPE is the TOML file, which `ortflex init` can write for you. KEY=VALUE overrides a key of the
    recipe, for example epochs=5, optimizer.beta1=0.8 or optimizer=adam.

    The results are written to a run folder: recipe.toml (with all keys, including the defaults),
    versions.json, trained.onnx, history.csv, measures.json and, if matplotlib is installed, loss.png.
    `ortflex report` creates a report from this folder. If the folder already contains a run, pass
    --resume to continue it, or --force to start a new one.

    Ctrl-C ends the run and keeps the results so far. If the recipe has the callback `checkpoint`, you
    can continue from the newest checkpoint with --resume. The result is then bit-identical to that of
    an uninterrupted run. If the recipe does not match the checkpoint, the error message names the keys
    that differ.
    """
    from ortflex_core import ConfigError, Plugins, Recipe, Trainer, internals_of, no_file
    from ortflex_plugins.cli import run_folder
    from ortflex_plugins.pictures.measure import Measures

    if resume is not None and not resume.exists():
        raise ConfigError(f"--resume: {no_file(resume)}")
    plugins = Plugins.discover()
    before = [] if resume is None else run_folder.plain_descent(recipe, overrides, resume)
    given = [*overrides, *before]
    loaded = Recipe.load(recipe, given, plugins, trust_code=trust_code or None)
    with echoed_messages() as messages:
        measures = Measures()
        watching = [measures, run_folder.Curves()]
        trainer = Trainer.from_recipe(loaded, plugins, callbacks=watching)
        if trainer.rank:
            messages.setLevel(logging.CRITICAL)  # only the process of rank 0 prints and writes
            _follow(loaded, trainer, resume, strict=strict)
            return
        # A folder that cannot be written to is found before training, so that no result is lost.
        with internals_of(trainer).sharing_errors():
            place = run_folder.make(loaded, resume, force=force)
        trainer.folder = folder = place.folder
        try:
            with internals_of(trainer).sharing_errors():
                if resume is not None:
                    _restore(trainer, run_folder.checkpoint(resume), strict=strict)
                loaded = loaded.found(plugins)
                run_folder.begin(folder, loaded.resolved(plugins), trainer)
            history = run_and_write(loaded, trainer, measures)
        except BaseException:
            place.discard()
            raise
        finally:
            place.lock.release()
    _show(history, folder)
    if history.interrupted:
        resumable = run_folder.checkpoint(folder) != folder
        trusted = ["--trust-code"] * trust_code
        words = ["ortflex", "train", str(recipe), *overrides, *trusted, "--resume", str(folder)]
        again = shlex.join(words)
        hint = f"continue: {again}" if resumable else _NO_CHECKPOINT
        click.echo(f"interrupted: these are the results so far; {hint}", err=True)
        raise SystemExit(130)


_WORDS = {
    ", or use Trainer.resume(folder), which reads them from the checkpoint": " in the recipe",
    "continue anyway with strict=False": "continue anyway with --no-strict",
    ". To use only its weights, call set_state(Trainer.resume(folder).get_state())": "",
    "Trainer.resume(folder, strict=False)": "--no-strict",
}
"""What an error of a checkpoint advises in Python, and what it means for the command."""


def _restore(trainer: Trainer, checkpoint: Path, *, strict: bool) -> None:
    """Continue from a checkpoint, and say so if nothing is left to train."""
    from ortflex_core import CheckpointError, internals_of

    try:
        trainer.restore(checkpoint, strict=strict)
    except CheckpointError as error:
        text = str(error)
        for python, command in _WORDS.items():
            text = text.replace(python, command)
        raise CheckpointError(text) from error
    position = internals_of(trainer).live.standing.position
    if position is not None and (position.stopped or position.progress.epoch >= trainer.epochs):
        done = position.progress.epoch
        end = "was stopped by a callback" if position.stopped else "has all of its epochs"
        click.echo(
            f"nothing is left to train: the run {end} ({done} are finished, the recipe has epochs = "
            f"{trainer.epochs}); epochs={max(done, trainer.epochs) + 10} continues the run"
        )


def _follow(recipe: Recipe, trainer: Trainer, resume: Path | None, *, strict: bool) -> None:
    """Train in a process of another rank than 0, which writes nothing."""
    from ortflex_core import internals_of
    from ortflex_plugins.cli import run_folder

    with internals_of(trainer).sharing_errors():
        if resume is not None:
            trainer.restore(run_folder.checkpoint(resume), strict=strict)
    if recipe.run(trainer).interrupted:
        raise SystemExit(130)


def run_and_write(recipe: Recipe, trainer: Trainer, measures: Measures) -> History:
    """Train and write the results, if necessary to another folder."""
    from ortflex_core import OutputError, TrainingDiverged
    from ortflex_plugins.cli import run_folder

    folder = trainer.folder
    try:
        try:
            history = recipe.run(trainer)
        except TrainingDiverged:
            trainer.export(folder / "last_good.onnx")
            click.echo(f"the last good weights are in {folder / 'last_good.onnx'}", err=True)
            raise
        run_folder.finish(folder, trainer, measures)
    except OutputError:
        from ortflex_core import internals_of

        if internals_of(trainer).live.standing.manual.step:
            click.echo(run_folder.rescue(trainer, folder), err=True)
        raise
    return history


@contextmanager
def echoed_messages() -> Iterator[logging.Handler]:
    """Print the log messages of ortflex."""

    class Echo(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warning = record.levelno >= logging.WARNING
            text = printable(record.getMessage())
            click.echo(("warning: " if warning else "") + text, err=warning)

    logger = logging.getLogger("ortflex")
    handler, level, propagate = Echo(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def _show(history: History, folder: Path) -> None:
    from rich.console import Console

    if len(history):
        table = new_table("", *right("first epoch", "last epoch", "lowest", "highest"))
        for name in history.columns:
            if name.startswith(_RESULTS):
                values = [v for v in history[name] if not math.isnan(v)]
                if not values or (name == "penalty" and not any(values)):
                    continue
                shown = (history[name][0], history[name][-1], min(values), max(values))
                table.add_row(name, *("" if math.isnan(v) else f"{v:.5g}" for v in shown))
        seconds, rows = sum(history["seconds"]), sum(history["rows"])
        console = Console(highlight=False)
        console.print(table)
        speed = rows / seconds if seconds else 0.0
        epochs = "1 epoch" if len(history) == 1 else f"{len(history)} epochs"
        console.print(f"{epochs} in {seconds:.2f} s, {speed:,.0f} rows/s")
    click.echo(f"wrote {folder}")
