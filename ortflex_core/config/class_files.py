"""The files of class paths in a recipe: made absolute, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ortflex_core.class_paths import files, is_class_path


def beside(spec: Any, folder: Path) -> Any:
    """Class paths at any depth of ``spec`` whose file is in ``folder``, with the file's absolute path."""
    if isinstance(spec, Mapping):
        return {key: beside(value, folder) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(beside(value, folder) for value in spec)
    if not is_class_path(spec):
        return spec
    module, _, name = spec.rpartition(":")
    path = folder / (module if module.endswith(".py") else module.replace(".", "/") + ".py")
    return f"{path.resolve()}:{name}" if path.is_file() else spec


def map_files(spec: Any, change: Callable[[str], str]) -> Any:
    """Class paths at any depth of ``spec`` with other paths of their files."""
    if isinstance(spec, Mapping):
        return {key: map_files(value, change) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(map_files(value, change) for value in spec)
    if not any(files(spec)):
        return spec
    module, _, name = spec.rpartition(":")
    return f"{change(module)}:{name}"
