"""``ortflex predict``: the outputs of a trained model as a file."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortflex_plugins.cli.overrides import output_option, trusting_code

if TYPE_CHECKING:
    from ortflex_core import Array

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_ENDINGS = (".npz", ".npy", ".csv")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@output_option(
    "The file to write. An .npz file stores all outputs by name, a .csv file stores all outputs as "
    "columns, and an .npy file stores a single output.",
    default=Path("predictions.npz"),
    show_default=True,
)
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    help="The name of an output or intermediate tensor to write; may be repeated.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@trusting_code
def predict(
    run: Path, data: str | None, output: Path, tensors: Sequence[str], force: bool, trust_code: bool
) -> None:
    """Write the predictions of a trained model to a file.

    RUN is a run folder that `ortflex train` wrote, a checkpoint, a folder of checkpoints, a recipe, or
    an .onnx file. If RUN is a folder of checkpoints, the newest one is used. If RUN is a recipe,
    its model is used without training.

    DATA is a file or folder in the format of the training data, with or without labels, or an .npy file
    with one array. Without DATA, the command uses the same data as `ortflex evaluate`.
    """
    from ortflex_core import ConfigError, write_bytes
    from ortflex_plugins.cli import trained

    if output.suffix not in _ENDINGS:
        raise ConfigError(f"{output}: expected a file name that ends with {' or '.join(_ENDINGS)}")
    recipe, trainer = trained.open_run(run, (), data, trust_code=trust_code)
    what, source = trained.source(recipe, trainer, data)
    if output.exists() and not force:
        raise ConfigError(f"{output} exists and was not changed; overwrite it with --force")
    names = list(tensors) or [spec.name for spec in trainer.model.outputs]
    # A map from classes to probabilities is not a tensor; the tensor from which it is made is written.
    maps = {} if tensors else trained.class_maps(trainer.model)
    if output.suffix == ".npy" and names:
        for name, (tensor, _) in maps.items():
            click.echo(
                f"{output} has no {name!r}; --tensor {tensor} writes it, and so do .npz and .csv"
            )
        maps = {}
    given = trained.features(source)
    wanted = list(dict.fromkeys([*names, *(tensor for tensor, _ in maps.values())]))
    predicted = trainer.predict(given, wanted)
    values = predicted if isinstance(predicted, Mapping) else {wanted[0]: predicted}
    arrays = {name: values[name] for name in names}
    arrays |= {name: values[tensor] for name, (tensor, _) in maps.items()}
    heads = {name: classes for name, (_, classes) in maps.items()}
    write_bytes(output, _encode(arrays, output.suffix, heads))
    shown = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    click.echo(f"wrote {output}: {shown}, predicted by {trained.state(run, trainer)} for {what}")


def _encode(
    arrays: Mapping[str, Array], ending: str, classes: Mapping[str, Sequence[str]] | None = None
) -> bytes:
    """The content of a file; ``classes`` name the columns of an array in a .csv file."""
    import numpy as np

    from ortflex_core import ConfigError

    # Strings of a model are Python objects, which could only be stored as pickles.
    plain = {n: a.astype(str) if a.dtype == object else a for n, a in arrays.items()}
    out = io.BytesIO()
    if ending == ".npz":
        # np.savez takes names as keyword arguments, so an array cannot be called "file".
        with zipfile.ZipFile(out, "w") as archive:
            for name, array in plain.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
        return out.getvalue()
    if ending == ".npy":
        if len(plain) != 1:
            raise ConfigError(
                f"a .npy file holds one tensor, but there are {len(plain)}: {', '.join(plain)}; choose "
                "one with --tensor, or write .npz"
            )
        [array] = plain.values()
        np.save(out, array, allow_pickle=False)
        return out.getvalue()
    tables = {n: a.reshape(len(a), -1) if a.ndim else a.reshape(1, 1) for n, a in plain.items()}
    if len({len(table) for table in tables.values()}) > 1:
        sizes = ", ".join(f"{n} {list(a.shape)}" for n, a in plain.items())
        raise ConfigError(
            f"a .csv file has one line per row, but the tensors have different numbers of rows: {sizes}; "
            "choose one with --tensor, or write .npz"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = (h for n, t in tables.items() for h in _heads(n, t, (classes or {}).get(n)))
    writer.writerow(map(_plain, heads))
    for rows in zip(*(_written(table) for table in tables.values()), strict=True):
        writer.writerow(cell for row in rows for cell in row)
    return text.getvalue().encode()


def _heads(name: str, table: Array, classes: Sequence[str] | None) -> list[str]:
    """The names of the columns of a table with one line per row."""
    count = table.shape[1]
    if classes is not None and len(classes) == count:
        return [f"{name}_{label}" for label in classes]
    return [name] if count == 1 else [f"{name}_{k}" for k in range(count)]


def _written(table: Array) -> Iterator[list[str]]:
    """The cells of each row, with enough digits to read the same number back."""
    digits = {"e": 5, "f": 9}.get(table.dtype.char, 17)
    for row in table.tolist():
        yield [
            f"{v:.{digits}g}" if isinstance(v, float) else _plain(v) if isinstance(v, str) else v
            for v in row
        ]


def _plain(text: str) -> str:
    """A cell that a spreadsheet shows as it is: an apostrophe comes before what it would compute.

    Source: OWASP, "CSV Injection".
    """
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
