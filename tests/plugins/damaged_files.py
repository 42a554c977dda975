"""Damage to the files of a folder, such as a disk or a full file system makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WAYS = ("empty", "other bytes", "cut off", "flipped", "zeros")


def damage(folder: Path, way: str) -> None:
    """Change every file of a folder in one of the :data:`WAYS`."""
    rng = np.random.default_rng(0)
    blobs = [path for path in folder.rglob("*") if path.is_file()]
    assert blobs
    for path in blobs:
        content = bytearray(path.read_bytes())
        size = len(content)
        if way == "empty":
            content.clear()
        elif way == "other bytes":
            content[:] = rng.bytes(size)
        elif way == "cut off":
            del content[size // 2 :]
        elif way == "zeros":
            content[size // 2 :] = bytes(size - size // 2)
        else:
            for at in rng.integers(0, size, 20):
                content[at] ^= 1 << rng.integers(0, 8)
        path.write_bytes(bytes(content))
