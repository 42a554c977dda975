"""``ortflex check``: which nodes of a model can be trained, and by which backends."""

from __future__ import annotations

import json
from typing import Any

import attrs
import click

from ortflex_core import (
    MemoryReport,
    ModelReport,
    NodeReport,
    OrtflexError,
    check_model,
    estimate_memory,
    mebibytes,
    printable,
)
from ortflex_plugins.cli.completion import names_of
from ortflex_plugins.cli.overrides import HEAD, classes_of, refuse_recipe
from ortflex_plugins.cli.terminal import open_console, plain, show_table

_COLORS = {
    "trainable": "green",
    "passes": "green",
    "frozen": "dim",
    "not differentiable": "yellow",
    "no rule": "red",
}


@click.command()
@click.argument("model", type=click.Path())
@click.option(
    "--loss",
    shell_complete=names_of("losses"),
    help="The name of the loss. By default, squared_error on every float output.",
)
@click.option(
    "--params", multiple=True, help="The name or glob of a parameter to train; may be repeated."
)
@click.option("--head", help=HEAD)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also list every node, every trained tensor and every adapter target.",
)
@click.option("--memory", is_flag=True, help="Also estimate the memory of a training step.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="With --memory: the number of rows per batch. By default, 32.",
)
@click.option(
    "--optimizer",
    shell_complete=names_of("optimizers"),
    help="With --memory: the name of the optimizer. By default, `adam`.",
)
@click.option(
    "--recompute",
    help="With --memory: the value of the argument `recompute`, which is true, a number of segments, or "
    "the name of a tensor to keep.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="NAME=SIZE",
    help="With --memory: the size of a dynamic axis of the model; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check(
    model: str,
    loss: str | None,
    params: tuple[str, ...],
    head: str | None,
    everything: bool,
    memory: bool,
    batch_size: int | None,
    optimizer: str | None,
    recompute: str | None,
    sizes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show which nodes of MODEL can be trained, and with which backends.

    The report starts with a summary. It then lists the tensors that are not trained, with the reasons,
    and the nodes that block a gradient. With --all, it also lists every node, every trained tensor, and
    the matrix products to which you can attach adapters. With --memory, it also estimates the memory of
    a training step and shows what the memory is used for.

    The exit code is 1 if no backend in this environment can train the model, or if MODEL cannot be
    checked. In the second case, the output of --json contains the reason under the key "error".
    """
    try:
        refuse_recipe(model, "check")
        report = check_model(model, loss, list(params) or None, head=classes_of(head))
        if memory:
            given: dict[str, Any] = {"loss": loss, "batch_size": batch_size, "optimizer": optimizer}
            given |= {"params": list(params) or None, "recompute": _recompute(recompute)}
            given |= {"head": classes_of(head)}
            known = {key: value for key, value in given.items() if value is not None}
            estimate = estimate_memory(model, _sizes(sizes), **known)
            report = attrs.evolve(report, memory=estimate)
    except OrtflexError as error:
        if not as_json:
            raise
        refusal = {"model": model, "trainable": False, "error": printable(str(error))}
        click.echo(json.dumps(refusal, indent=2))
        raise SystemExit(1) from None
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report, everything)
    if not report.trainable:
        raise SystemExit(1)


def _sizes(given: tuple[str, ...]) -> dict[str, int]:
    """The sizes of axes by their names."""
    out = {}
    for text in given:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise click.UsageError(f"--size: expected NAME=SIZE with a whole number, got {text!r}")
        out[name] = int(size)
    return out


def _recompute(text: str | None) -> bool | int | str | None:
    """The argument ``recompute=`` from the value of the option."""
    if text is None or text.lower() in ("true", "false"):
        return None if text is None else text.lower() == "true"
    return int(text) if text.isdecimal() else text


def _show_memory(console: Any, memory: MemoryReport) -> None:
    console.print(f"\n{memory.summary}")
    rows = [[plain(what), mebibytes(size)] for what, size in memory.parts.items()]
    show_table(console, ["memory", "size"], rows)
    console.print()
    rows = [[plain(t.name), plain(t.operator), mebibytes(t.size)] for t in memory.largest]
    show_table(console, ["largest tensor at the peak", "operator", "size"], rows)


def _show(report: ModelReport, everything: bool) -> None:
    console = open_console()
    for line in report.summary.split("\n"):
        console.print(plain(line))
    nodes = [n for n in report.nodes if everything or n.blocks or n.status == "no rule"]
    rows = []
    for node in nodes:
        color = _COLORS[node.status]
        label = plain(node.name or f"#{node.index}")
        operator = plain(node.operator)
        rows.append([label, operator, f"[{color}]{node.status}[/]", plain(_why(node))])
    if rows:
        console.print()
        show_table(console, ["node", "operator", "status", "reason"], rows)
    choices = sorted(report.choices, key=lambda c: not c.trained)
    lines = [
        f"{'trained' if c.trained else 'not trained'}: {c.name} ({c.reason})"
        for c in choices
        if everything or not c.trained
    ]
    for name, readers in report.shared.items():
        few = ", ".join(readers[:4]) + (", …" if len(readers) > 4 else "")
        lines.append(f"one parameter, read by {len(readers)} nodes: {name} ({few})")
    if everything:
        lines += [
            f"adapter target: {p.module} ({p.operator} [{p.inputs}, {p.outputs}]"
            + (f", weight {p.weight})" if p.weight else ")")
            for p in report.products
        ]
        lines += [
            f"{name} cannot train this model: {reason}"
            for name, reasons in report.backends.items()
            for reason in reasons
        ]
    if lines:
        console.print()
    for line in lines:
        console.print(plain(line))
    if not everything:
        hidden = f"{'other ' if nodes else ''}{len(report.nodes) - len(nodes)} nodes"
        trained = sum(c.trained for c in choices)
        console.print(f"\n--all lists the {hidden} and the {trained} trained tensors")
    if report.memory is not None:
        _show_memory(console, report.memory)


def _why(node: NodeReport) -> str:
    text = node.reason
    if node.parameters:
        text += f"; reads {', '.join(node.parameters)}"
    if node.blocks:
        text += f"; blocks {', '.join(node.blocks)}"
    return text
