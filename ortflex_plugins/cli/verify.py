"""``ortflex verify``: checks an exported model against its receipt, or repeats its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

if TYPE_CHECKING:
    from ortflex_core import Verdict

_LISTED = 20
_CODES = {"identical": 0, "intact": 0, "different": 1, "not repeated": 3}


@click.command()
@click.argument("trained", type=click.Path(path_type=Path))
@click.option(
    "--model", type=click.Path(path_type=Path), help="The model before training, an .onnx file."
)
@click.option("--data", help="The training data: a file or folder that `ortflex train` can read.")
@click.option("--validation", help="The validation data, if it is separate from the training data.")
@click.option(
    "--recipe",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The recipe of the run. Its model and data are the defaults of --model and --data.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def verify(
    trained: Path,
    model: Path | None,
    data: str | None,
    validation: str | None,
    recipe: Path | None,
    as_json: bool,
) -> None:
    """Check an exported model against its receipt, or repeat its training.

    TRAINED is an .onnx file that ortflex exported after training. By default, the command compares its
    tensors, graph and receipt with the digests in the receipt. With --model and --data, or with
    --recipe, it repeats the training and compares every tensor bit by bit.

    A receipt refers only to installed components, never to files or other code. A recipe that you pass
    with --recipe may refer to both, so use only recipes that you trust.

    The exit code is 0 if the model is intact or identical to the result of the repeated training, 1 if
    it is different or damaged, and 3 if it has no receipt or its training cannot be repeated in this
    environment.
    """
    from ortflex_core import ConfigError, printable, verify

    if model is not None and data is None and recipe is None:
        raise ConfigError(f"--model {model} needs data; also pass --data, or pass --recipe instead")
    if data is not None and model is None and recipe is None:
        raise ConfigError(
            f"--data {data} needs a model; also pass --model, or pass --recipe instead"
        )
    verdict = verify(
        trained,
        model,
        data,
        validation=validation,
        recipe=recipe,
        progress=False if as_json else None,
    )
    if as_json:
        click.echo(json.dumps(attrs.asdict(verdict), indent=2))
    else:
        click.echo("\n".join(map(printable, _lines(trained, verdict))))
    raise SystemExit(_CODES[verdict.outcome])


def _lines(trained: Path, verdict: Verdict) -> list[str]:
    from ortflex_core import text_table

    receipt = verdict.receipt
    if verdict.outcome == "identical" and receipt is not None:
        return [
            f"{trained}: identical. The training was repeated ({receipt.epochs} epochs, {receipt.steps} "
            f"steps), and all {verdict.compared} tensors are bit-identical"
        ]
    if verdict.outcome == "intact":
        return [
            f"{trained}: intact. Tensors, graph and receipt match the digests in the receipt. Only "
            "repeating the training proves how the file was made; to repeat it, add --model and --data"
        ]
    out = [f"{trained}: {verdict.outcome}", *(f"- {reason}" for reason in verdict.reasons)]
    if verdict.tensors:
        rows = [
            (
                t.name,
                "another form" if t.numbers is None else f"{t.numbers:,} of {t.size:,}",
                "" if t.largest is None else f"{t.largest:.3g}",
            )
            for t in verdict.tensors[:_LISTED]
        ]
        out += text_table([("tensor", "other bits", "largest difference"), *rows])
        if (rest := len(verdict.tensors) - _LISTED) > 0:
            out.append(f"and {rest} more; --json lists all")
    return out
