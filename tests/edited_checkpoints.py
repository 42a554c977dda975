"""Checkpoints that were edited on purpose: their digests are right again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortflex_core.kernel.regular_files import sha256_of
from ortflex_core.training.artifacts import checkpoint_record as record


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the record of a checkpoint in place, and seal it again."""
    path = folder / record.NAME
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(record.seal(table)))


def seal(folder: Path) -> None:
    """Have the record say what the files of a checkpoint are now."""

    def say(table: dict[str, Any]) -> None:
        table["files"] = {name: sha256_of(folder / name) for name in table["files"]}

    edit(folder, say)
