"""The graphs of an engine, for users: as ModelProtos, or as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import ModelProto

from ortflex_core.compiler.graph.program import Program
from ortflex_core.kernel.files import make_folder, write_bytes


def load_graphs(programs: Mapping[str, Program | bytes]) -> dict[str, ModelProto]:
    """The graphs of an engine as ModelProtos, by their names."""
    raw = {name: p.model if isinstance(p, Program) else p for name, p in programs.items()}
    return {name: onnx.load_model_from_string(model) for name, model in raw.items()}


def write_programs(programs: Mapping[str, Program | bytes], folder: Path) -> dict[str, str]:
    """Write the graphs of an engine to ``<folder>/<name>.onnx``; returns the paths."""
    paths = {name: make_folder(folder) / f"{name}.onnx" for name in programs}
    for name, program in programs.items():
        write_bytes(paths[name], program.model if isinstance(program, Program) else program)
    return {name: str(path) for name, path in paths.items()}
