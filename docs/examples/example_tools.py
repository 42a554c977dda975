"""Shared by the examples: the backends and devices that are available."""

from __future__ import annotations

from ortflex import Plugins
from ortflex_core import require_runtime


def available_backends() -> list[str]:
    """The backends of ortflex that work with the onnxruntime that is installed."""
    runtime, registry = require_runtime(), Plugins.discover()["backends"]
    ours = [entry.name for entry in registry if entry.distribution == "ortflex"]
    return [name for name in ours if not registry.load(name).available(runtime)]


def best_device() -> str:
    """``"cuda"`` if onnxruntime computes on a GPU, else ``"cpu"``; prints the choice."""
    runtime, registry = require_runtime(), Plugins.discover()["devices"]
    reasons = registry.load("cuda").available(runtime)
    why = f"on the CPU: {reasons[0].partition(';')[0]}" if reasons else "on the GPU"
    print(why)
    return "cpu" if reasons else "cuda"


def best_of(name: str, otherwise: str) -> str:
    """The backend ``name`` if it works here, else ``otherwise``; prints the choice."""
    if name in available_backends():
        return name
    print(f"{require_runtime()} has no {name}: {otherwise} takes its place")
    return otherwise
