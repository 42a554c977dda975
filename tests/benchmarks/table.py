"""What was measured, as a table next to what is to be reached, and as lines of a CSV file."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.workloads import Workload

RESULTS = Path(__file__).parent / "results"


def ratios(found: Mapping[str, Sequence[float]], peer: str) -> float:
    """Median over rounds of the peer's time by ours."""
    return median(p / o for p, o in zip(found[peer], found["ortflex"], strict=True))


def show(workload: Workload, found: Mapping[str, Sequence[float]], why: Mapping[str, str]) -> None:
    """Print the table of one workload."""
    counted = "" if workload.kind == "image" else f"  ({workload.flops / 1e6:.3g} Mflop a step)"
    print(f"\n{workload.name}  {workload.text}{counted}")
    print(f"  {'':14}{'µs a step':>11}{'quickest':>11}{'it / ours':>11}{'target':>9}")
    for name, times in sorted(found.items(), key=lambda item: median(item[1])):
        line = f"  {name:14}{median(times):11.1f}{min(times):11.1f}"
        if name != "ortflex":
            ratio, target = ratios(found, name), workload.targets.get(name)
            line += f"{ratio:11.2f}"
            if target is not None:
                line += f"{target:9.3g}  {'reached' if ratio >= target else 'missed'}"
        print(line)
    for name, reason in why.items():
        print(f"  {name:14} not measured: {reason}")


def lines(
    workload: Workload,
    found: Mapping[str, Sequence[float]],
    versions: Mapping[str, str],
    losses: Mapping[str, float],
) -> list[dict[str, Any]]:
    """A line per peer."""
    return [
        {
            "workload": workload.name,
            "what": workload.text,
            "who": name,
            "version": versions[name],
            "rounds": len(times),
            "us_a_step": round(median(times), 2),
            "quickest": round(min(times), 2),
            "it / ours": round(ratios(found, name), 3),
            "target": workload.targets.get(name, ""),
            "loss of epoch 1": losses[name],
        }
        for name, times in found.items()
    ]


def circumstances() -> dict[str, str]:
    """What the figures depend on."""
    names = ("ortflex", "numpy", "onnx", "torch", "scikit-learn")
    runtimes = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime")

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return ""

    runtime = next((f"{n} {version(n)}" for n in runtimes if version(n)), "none")
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "processor": _processor(),
        "python": platform.python_version(),
        "runtime": runtime,
        **{name: version(name) for name in names},
    }


def _processor() -> str:
    """The name and the widest instructions of the processor, where the system tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = {k.strip(): v for k, _, v in (x.partition(":") for x in text.splitlines())}
    sets = ("amx_tile", "avx512f", "avx2")
    widest = next((s for s in sets if s in found.get("flags", "").split()), "")
    return f"{found.get('model name', '').strip()} {widest}".strip()


def heading(around: Mapping[str, str]) -> str:
    """One line of versions."""
    return ", ".join(f"{k} {v}" for k, v in around.items() if v and k not in ("date", "ortflex"))


def append(found: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Add lines to a CSV file, the circumstances first; a file with other columns is set aside."""
    around = circumstances()
    names = [*around, *columns]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text().partition("\n")[0] != ",".join(names):
        path.replace(path.with_suffix(".old.csv"))
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows({**around, **line} for line in found)
