"""``ortflex compare``: the steps of a recipe on every backend, and where they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortflex_plugins.cli.completion import names_of
from ortflex_plugins.cli.overrides import RecipeCommand, trusting_code
from ortflex_plugins.cli.terminal import new_table, open_console, plain, right

if TYPE_CHECKING:
    from ortflex_core import Comparison, Times


@click.command(cls=RecipeCommand)
@click.option("--steps", default=10, show_default=True, help="The number of steps to compare.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    shell_complete=names_of("backends"),
    help="Run only this backend; may be repeated.",
)
@click.option("--time", "times", is_flag=True, help="Measure the time per step instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@trusting_code
def compare(
    recipe: Path,
    overrides: Sequence[str],
    steps: int,
    backends: Sequence[str],
    times: bool,
    as_json: bool,
    trust_code: bool,
) -> None:
    """Run the same steps on every available backend and show where the results differ.

    RECIPE and KEY=VALUE are the same as for `ortflex train`. In each step, all backends start from the
    same weights and use the same batch. The command writes no files. The results are compared with a
    float64 reference or, if it is not available, with those of the first backend that works. The exit
    code is 1 if the results of a backend differ from the reference by more than float32 rounding can
    explain, or if there is nothing to compare.

    With --time, the command measures the time per step instead, as `backend = "fastest"` does. It
    prints the milliseconds per step, the seconds until the graphs are compiled, and the seconds until
    the first step has finished. If a backend runs several steps in one call, the time of the call is
    divided by their number. The exit code is 1 if no backend can train the model.
    """
    from ortflex_core import Parts, Plugins, Recipe, Trainer, time_backends
    from ortflex_core import compare as run

    plugins = Plugins.discover()
    loaded = Recipe.load(recipe, overrides, plugins, trust_code=trust_code or None)
    held_out = loaded.validation if isinstance(loaded.validation, float) else None
    trainer = Trainer.from_recipe(loaded, plugins)
    rows = Parts(trainer.plugins).build("data", loaded.data)
    chosen = list(backends) or None
    if times:
        measured = time_backends(trainer, rows, backends=chosen, held_out=held_out)
        if as_json:
            click.echo(json.dumps(measured.to_dict(), indent=2))
        else:
            _show_times(measured)
        if measured.fastest is None:
            raise SystemExit(1)
        return
    result = run(trainer, rows, steps=steps, backends=chosen, held_out=held_out)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _show(result)
    if not result.agree:
        raise SystemExit(1)


def _show_times(measured: Times) -> None:
    from ortflex_core import refusals

    console = open_console()
    head, *rows = measured.table()
    table = new_table(head[0], *right(*head[1:-1]))
    for row in rows:
        if row[1]:
            table.add_row(*map(plain, row[:-1]))
    console.print(table)
    reasons = {t.backend: [t.reason] for t in measured.timings if t.reason}
    for line in refusals(reasons, "not measured: "):
        console.print(plain(line))
    if measured.fastest is None:
        console.print("no backend can train this here")
    else:
        console.print(plain(f'backend = "fastest" chooses {measured.fastest}'))


def _show(found: Comparison) -> None:
    from ortflex_core import refusals

    console = open_console()
    worst = [f"worst {what}" for what in ("loss", "gradient", "update", "inference")]
    table = new_table("backend", *right("µs/step", "first loss", "last loss"), *worst)
    table.add_row(found.reference, "", *_ends(found.reference_losses), "reference")
    for result in found.results:
        table.add_row(
            result.backend,
            f"{result.us_per_step:.1f}",
            *_ends(result.losses),
            f"{result.loss_error:.1e}",
            plain(_worst(result.gradient_errors)),
            plain(_worst(result.weight_errors)),
            plain(_worst(result.inference_errors)),
        )
    console.print(table)
    for line in refusals(found.skipped, "not compared: "):
        console.print(plain(line))
    for note in found.notes:
        console.print(plain(note))
    for difference in found.differences:
        console.print(plain(str(difference)))
    if not found.compared:
        console.print(
            "nothing was compared: only one backend is available, and no float64 reference"
        )
    elif found.agree:
        steps = len(found.reference_losses)
        console.print(f"all agree within float32 rounding over {steps} steps")


def _ends(losses: Sequence[float]) -> tuple[str, str]:
    return f"{losses[0]:.6g}", f"{losses[-1]:.6g}"


def _worst(errors: Mapping[str, float]) -> str:
    name = max(errors, key=lambda n: errors[n])
    return f"{errors[name]:.1e} {name}"
