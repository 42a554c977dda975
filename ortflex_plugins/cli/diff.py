"""``ortflex diff``: the differences between two models, for example before and after training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from ortflex_plugins.cli.overrides import output_option

if TYPE_CHECKING:
    from ortflex_core import Array, Model

_LISTED = 40
_COLUMNS = ("tensor", "type", "change", "norm", "norm of the change", "largest change", "numbers")


@attrs.frozen(kw_only=True)
class TensorChange:
    """An initializer that differs: ``norm`` is ‖a‖, ``change`` ‖b − a‖, ``largest`` max |b − a|.

    ``state`` is ``changed``, ``added``, ``removed`` or ``other form`` (another type or shape); numbers are
    None where there is nothing to subtract.
    """

    name: str
    form: str
    state: str
    norm: float | None = None
    change: float | None = None
    largest: float | None = None
    numbers: int | None = None
    """How many of its numbers differ."""


@attrs.frozen(kw_only=True)
class Difference:
    """The difference of two models; ``facts`` has everything but tensors as (first, second)."""

    first: str
    second: str
    tensors: tuple[TensorChange, ...]
    equal: int
    facts: dict[str, tuple[Any, Any]]


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@output_option("Also write the differences to this .html file.")
def diff(first: Path, second: Path, as_json: bool, output: Path | None) -> None:
    """Show the differences between two models, for example before and after training.

    FIRST and SECOND are .onnx files. The command lists the tensors that differ. For each tensor, it
    prints the Euclidean norms of the original value and of the change, the largest change in any
    element, and the number of elements that differ. It also lists differences in nodes, inputs,
    outputs, versions and metadata.
    """
    from ortflex_core import Model, printable, write_bytes

    found = difference(Model(first), Model(second))
    if output is not None:
        write_bytes(output, _page(found).encode())
    if as_json:
        click.echo(json.dumps(attrs.asdict(found), indent=2))
        return
    click.echo("\n".join(map(printable, _lines(found))))
    if output is not None:
        click.echo(f"wrote {output}")


def difference(first: Model, second: Model) -> Difference:
    """The difference of two models: tensors by their names, and facts about the graphs."""
    specs = [{t.name: t for t in m.proto.graph.initializer} for m in (first, second)]
    names = list(dict.fromkeys([*specs[0], *specs[1]]))
    changes = [_tensor(name, first, second, *(s.get(name) for s in specs)) for name in names]
    different = tuple(change for change in changes if change is not None)
    return Difference(
        first=first.label,
        second=second.label,
        tensors=different,
        equal=len(names) - len(different),
        facts=_facts(first, second),
    )


def _tensor(name: str, first: Model, second: Model, old: Any, new: Any) -> TensorChange | None:
    import numpy as np

    forms = [_form(t) for t in (old, new)]
    if old is None or new is None:
        state = "added" if old is None else "removed"
        return TensorChange(name=name, form=forms[old is None], state=state)
    if forms[0] != forms[1]:
        return TensorChange(name=name, form=f"{forms[0]} → {forms[1]}", state="other form")
    a, b = first.initializer(name), second.initializer(name)
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        same = np.array_equal(a, b)
        return None if same else TensorChange(name=name, form=forms[0], state="changed")
    differs = (a != b) & ~((a != a) & (b != b))  # NaN equals NaN
    if not differs.any():
        return None
    delta = b.astype(np.float64) - a.astype(np.float64)
    return TensorChange(
        name=name,
        form=forms[0],
        state="changed",
        norm=_norm(a),
        change=_norm(delta),
        largest=float(np.abs(delta).max()),
        numbers=int(differs.sum()),
    )


def _form(tensor: Any) -> str:
    from ortflex_core import dtype_name

    return "" if tensor is None else f"{dtype_name(tensor.data_type)}{list(tensor.dims)}"


def _norm(array: Array) -> float:
    import numpy as np

    return float(np.linalg.norm(array.astype(np.float64).ravel()))


def _facts(first: Model, second: Model) -> dict[str, tuple[Any, Any]]:
    """What differs besides the tensors; each value as (first, second), None where it is missing."""
    values = [_described(model) for model in (first, second)]
    keys = dict.fromkeys([*values[0], *values[1]])
    pairs = {key: (values[0].get(key), values[1].get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _described(model: Model) -> dict[str, Any]:
    proto = model.proto
    nodes = Counter(f"{n.domain + '.' if n.domain else ''}{n.op_type}" for n in proto.graph.node)
    return {
        "inputs": ", ".join(map(str, model.inputs)),
        "outputs": ", ".join(map(str, model.outputs)),
        **{f"nodes {kind}": count for kind, count in nodes.items()},
        **{f"opset {o.domain or 'ai.onnx'}": o.version for o in proto.opset_import},
        "IR version": proto.ir_version,
        "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
        **{f"metadata {p.key}": p.value for p in proto.metadata_props if p.value != model.receipt},
        "receipt": _digest(model.receipt),
    }


def _digest(receipt: str | None) -> str | None:
    """The digest of the receipt of a training, whose text is long; None without a receipt."""
    import hashlib

    return None if receipt is None else hashlib.sha256(receipt.encode()).hexdigest()[:12]


def _cells(change: TensorChange) -> tuple[str, ...]:
    numbers = [change.norm, change.change, change.largest]
    shown = ["" if n is None else f"{n:.4g}" for n in numbers]
    count = "" if change.numbers is None else f"{change.numbers:,}"
    return (change.name, change.form, change.state, *shown, count)


def _lines(found: Difference) -> list[str]:
    from ortflex_core import text_table

    total = found.equal + len(found.tensors)
    out = [f"{found.first} → {found.second}: {len(found.tensors)} of {total} tensors differ"]
    if found.tensors:
        out += text_table([_COLUMNS, *map(_cells, found.tensors[:_LISTED])])
        if (rest := len(found.tensors) - _LISTED) > 0:
            out.append(f"and {rest} more; --json lists all")
    for key, (old, new) in found.facts.items():
        out.append(f"{key}: {_short(old)} → {_short(new)}")
    return out if found.tensors or found.facts else [*out, "nothing else differs"]


def _short(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _page(found: Difference) -> str:
    from ortflex_plugins.pictures import html

    note = f"{len(found.tensors)} of {found.equal + len(found.tensors)} tensors differ"
    parts = []
    if found.tensors:
        rows = [html.row(_COLUMNS, "th"), *(html.row(_cells(t)) for t in found.tensors)]
        parts.append(f"<h2>Tensors</h2>{html.table(rows)}")
    if found.facts:
        facts = [
            (key, *("–" if v is None else v for v in pair)) for key, pair in found.facts.items()
        ]
        rows = [html.row(("", found.first, found.second), "th"), *map(html.row, facts)]
        parts.append(f"<h2>Graph and metadata</h2>{html.table(rows)}")
    return html.page(f"{found.first} → {found.second}", "\n".join(parts), note=note)
