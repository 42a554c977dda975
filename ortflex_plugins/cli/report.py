"""``ortflex report``: one run folder, or several, as one page."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ortflex_plugins.cli.overrides import output_option

_EVERY = 5
"""Seconds between updates of the page while a run is in progress."""


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option(
    "The page to write. By default, report.html in the run folder, or in the current folder "
    "if there are several runs."
)
@click.option(
    "--watch", is_flag=True, help="Update the page every 5 seconds until all runs have ended."
)
def report(folders: tuple[Path, ...], output: Path | None, watch: bool) -> None:
    """Write an HTML report about one or more runs.

    FOLDERS are run folders that `ortflex train` wrote. The report on a run shows its curves, times,
    weights, graph, recipe and versions. The report on several runs compares their curves, their
    results, and the keys that differ between their recipes.

    The report is a single, self-contained page. If a run is in progress, the page shows the finished
    epochs. With --watch, the command updates the page until all runs have ended, and the browser reloads
    it automatically.
    """
    from ortflex_core import write_bytes
    from ortflex_plugins.pictures.pages import report
    from ortflex_plugins.pictures.run_files import is_running

    single = folders[0] if len(folders) == 1 else None
    target = output or (Path() if single is None else single) / "report.html"
    while True:
        running = any(is_running(folder) is not False for folder in folders)
        write_bytes(target, report(folders if single is None else single).html.encode())
        if not (watch and running):
            break
        time.sleep(_EVERY)
    click.echo(f"wrote {target}")
