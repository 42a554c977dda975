"""``ortflex report``: a run folder as one page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write; by default report.html in the folder.",
)
def report(folder: Path, output: Path | None) -> None:
    """Write a page about a training: curves, times, weights, graph, recipe, versions.

    FOLDER is what `ortflex train` wrote. The page is one file that loads nothing from anywhere.
    """
    from ortflex_core.files import write_bytes
    from ortflex_plugins.pictures.report import report as page

    target = output or folder / "report.html"
    write_bytes(target, page(folder).encode())
    click.echo(f"wrote {target}")
