"""What the examples share: the versions they ran with, and which backends there are."""

from __future__ import annotations

import importlib.metadata
import platform

from ortflex_core.registry import Plugins
from ortflex_core.runtime import require_runtime


def show_versions(*more: str) -> None:
    """Print the versions that this page was made with."""
    print(f"python {platform.python_version()}, {require_runtime()}")
    for name in ("ortflex", "onnx", "numpy", *more):
        print(name, importlib.metadata.version(name))


def available_backends() -> list[str]:
    """The backends of ortflex that work with the onnxruntime that is installed."""
    runtime, registry = require_runtime(), Plugins.discover()["backends"]
    ours = [entry.name for entry in registry if entry.distribution == "ortflex"]
    return [name for name in ours if not registry.load(name).available(runtime)]


def best_device() -> str:
    """``"cuda"`` where onnxruntime has a GPU, else ``"cpu"``."""
    import onnxruntime

    return "cuda" if "CUDAExecutionProvider" in onnxruntime.get_available_providers() else "cpu"
