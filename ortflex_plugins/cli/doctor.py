"""``ortflex doctor``: what is installed, what works, and how to repair what does not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, TypedDict

import attrs
import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ortflex_core import (
    OrtflexError,
    Runtime,
    RuntimeUnavailable,
    find_distributions,
    install_command,
    require_runtime,
)
from ortflex_plugins.c.compiler import find_compiler, obstacle
from ortflex_plugins.cli.terminal import new_table

_TELEMETRY = (
    ".cache/Microsoft/DeveloperTools/.onnxruntime",
    "intel/openvino_ga_cid",
    "intel/stats",
)
"""What onnxruntime from 1.29 on and openvino write into the home folder."""
_PACKAGES = ("ortflex", "numpy", "onnx", "torch", "scikit-learn", "skl2onnx")


class Report(TypedDict):
    """The output of ``ortflex doctor --json``.

    ``backends`` and ``devices`` have the reasons why each one does not work, and an empty list if it
    works. If the installation is broken, both are empty, and ``fault`` says how to repair it.
    ``telemetry`` says whether onnxruntime may report how it is used to its authors. ``compiler`` is the
    C compiler, or the reason why none is used. ``telemetry_files`` are what onnxruntime and openvino wrote
    into the home folder. ``install`` is the command that adds an extra to this installation.
    """

    python: str
    platform: str
    packages: dict[str, str | None]
    distributions: list[str]
    fault: str | None
    runtime: dict[str, Any] | None
    telemetry: bool
    telemetry_files: list[str]
    install: str
    compiler: str
    backends: dict[str, list[str]]
    devices: dict[str, list[str]]


def examine() -> Report:
    """Examine this environment; onnxruntime is imported only if the installation has no fault.

    Example:
        >>> examine()["python"] == platform.python_version()
        True
    """
    runtime: Runtime | None = None
    fault: str | None = None
    try:
        runtime = require_runtime()
    except RuntimeUnavailable as error:
        fault = str(error)
    return Report(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _PACKAGES},
        distributions=[str(one) for one in find_distributions()],
        fault=fault,
        runtime=None if runtime is None else attrs.asdict(runtime),
        telemetry=runtime is not None and _reports_usage(runtime),
        telemetry_files=[
            str(path) for path in map(Path.home().joinpath, _TELEMETRY) if path.exists()
        ],
        install=install_command("EXTRA"),
        compiler=obstacle() or str(find_compiler()),
        backends={} if runtime is None else _reasons("backends", runtime),
        devices={} if runtime is None else _reasons("devices", runtime),
    )


def show(report: Report, console: Console) -> None:
    """Print a report as tables."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("Python", f"{report['python']}, {report['platform']}")
    for name, version in report["packages"].items():
        if version is not None:
            facts.add_row(name, version)
    facts.add_row("C compiler", escape(report["compiler"]))
    facts.add_row("onnxruntime", ", ".join(report["distributions"]) or "none")
    if (runtime := report["runtime"]) is not None:
        facts.add_row("  providers", ", ".join(runtime["providers"]))
        facts.add_row("  newest model", f"opset {runtime['max_opset']}, IR {runtime['max_ir']}")
        off = "may be on; the environment variable ORT_DISABLE_TELEMETRY=1 switches it off"
        facts.add_row("  telemetry", off if report["telemetry"] else "off")
    if report["telemetry_files"]:
        what = "written by onnxruntime or openvino, not by ortflex; you may delete them"
        facts.add_row("telemetry files", escape(f"{', '.join(report['telemetry_files'])}: {what}"))
    facts.add_row("more extras", escape(report["install"]))
    console.print(facts)
    if report["fault"] is not None:
        console.print()
        # soft_wrap, because a command that is divided into two lines cannot be copied.
        console.print(f"[bold red]Broken:[/] {escape(report['fault'])}", soft_wrap=True)
        return
    kinds = {"backend": report["backends"], "device": report["devices"]}
    table = new_table("", "name", Column("works here", overflow="fold"))
    for kind, reasons_by_name in kinds.items():
        for name, reasons in reasons_by_name.items():
            verdict = f"[red]no:[/] {escape('; '.join(reasons))}" if reasons else "[green]yes[/]"
            table.add_row(kind, name, verdict)
    console.print()
    console.print(table)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Show the installed runtime, what works with it, and how to fix problems.

    If the installation is broken, the command explains how to repair it, and the exit code is 1.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console(highlight=False))
    if report["fault"] is not None:
        raise SystemExit(1)


def _reports_usage(runtime: Runtime) -> bool:
    """Whether this onnxruntime has telemetry that is not switched off: on Windows, since 1.29 elsewhere."""
    has_it = sys.platform == "win32" or runtime.version_info >= (1, 29)
    return has_it and not os.environ.get("ORT_DISABLE_TELEMETRY")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reasons(kind: str, runtime: Runtime) -> dict[str, list[str]]:
    """The reasons why each plugin of a kind does not work here."""
    # Imported here, because only metadata may be read if the runtime is broken.
    from ortflex_core import Plugins

    registry = Plugins.discover()[kind]

    def obstacles(name: str) -> list[str]:
        try:
            return list(registry.load(name).available(runtime))
        except OrtflexError as error:
            return [str(error)]
        except Exception as error:  # a third-party plugin: its error is part of the report
            return [f"{type(error).__name__}: {error}"]

    return {name: obstacles(name) for name in sorted(registry.names())}
