"""``ortflex predict``: the outputs of a trained model, into a file."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ortflex_core.types import Array

_ENDINGS = (".npz", ".npy", ".csv")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("predictions.npz"),
    show_default=True,
    help="The file to write: .npz has every output by its name; .npy and .csv have one output.",
)
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    help="The name of an output or inner tensor to write; may be repeated.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def predict(run: Path, data: str | None, output: Path, tensors: Sequence[str], force: bool) -> None:
    """Write the predictions of a trained model for data.

    RUN is the folder that `ortflex train` wrote, or a recipe. DATA is a file or folder like the one
    of the training, with labels or without; by default the recipe's own.
    """
    from ortflex_core.data import Columns
    from ortflex_core.errors import ConfigError
    from ortflex_core.files import write_bytes
    from ortflex_plugins.cli import trained

    if output.suffix not in _ENDINGS:
        raise ConfigError(f"{output}: expected a file that ends with {', '.join(_ENDINGS)}")
    if output.exists() and not force:
        raise ConfigError(f"{output} exists and was not changed; overwrite it with --force")
    recipe, trainer = trained.open_run(run)
    what, source = trained.source(recipe, trainer, data)
    names = list(tensors) or [spec.name for spec in trainer.model.outputs]
    given = trained.features(source)
    found = trainer.predict(given, names)
    arrays = found if isinstance(found, Mapping) else {names[0]: found}
    write_bytes(output, _encode(arrays, output.suffix))
    rows = given.rows if isinstance(given, Columns) else len(next(iter(arrays.values())))
    shown = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    click.echo(f"wrote {output}: {shown} for {rows} rows of {what}")


def _encode(arrays: Mapping[str, Array], ending: str) -> bytes:
    """The content of a file.

    Raises:
        ConfigError: the arrays do not fit into a file of that kind.
    """
    import numpy as np

    from ortflex_core.errors import ConfigError

    # Strings of a model are Python objects, which no file holds without unpickling.
    plain = {n: a.astype(str) if a.dtype == object else a for n, a in arrays.items()}
    out = io.BytesIO()
    if ending == ".npz":
        # np.savez takes names as keyword arguments, so that no array may be called "file".
        with zipfile.ZipFile(out, "w") as archive:
            for name, array in plain.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
        return out.getvalue()
    if len(plain) != 1:
        raise ConfigError(
            f"a {ending} file holds one tensor, but there are {len(plain)}: {', '.join(plain)}; choose "
            "one with --tensor, or write .npz"
        )
    [(name, array)] = plain.items()
    if ending == ".npy":
        np.save(out, array, allow_pickle=False)
        return out.getvalue()
    table = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
    heads = [name] if table.shape[1] == 1 else [f"{name}_{k}" for k in range(table.shape[1])]
    # Enough digits to read the same number back.
    digits = {"e": 5, "f": 9}.get(table.dtype.char, 17)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    for row in table.tolist():
        writer.writerow([f"{v:.{digits}g}" if isinstance(v, float) else v for v in row])
    return text.getvalue().encode()
