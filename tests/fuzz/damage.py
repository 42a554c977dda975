"""Checkpoints that a disk has damaged: flipped bits, files that are cut off, zeros at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import attrs

from ortflex_core import CheckpointError, Trainer, hook
from ortflex_core.training.artifacts import checkpoint
from ortflex_core.training.artifacts.checkpoint import Checkpoint
from tests import models
from tests.training import make, regression

WAYS = ("flip", "flip", "flip", "flip", "truncate", "zeros")


class _Once:
    """Saves in the middle of an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @hook
    def settled(self, trainer: Trainer, progress: Any) -> None:
        if progress.epoch == 1:
            trainer.save(self.folder)


def write(folder: Path) -> list[Path]:
    """Checkpoints of several kinds: in mid-training, with arrays of callbacks, of nothing trained."""
    x, y = regression(rows=24, features=3)
    options: dict[str, Any] = {
        "backend": "fused",
        "optimizer": "adam",
        "batch_size": 4,
        "epochs": 3,
    }
    stopping = {"name": "early_stopping", "monitor": "loss"}
    for name, more in {
        "middle": {"callbacks": [_Once(folder / "middle")]},
        "best": {"callbacks": [stopping], "averaging": "ema"},
        "frozen": {"params": ["W2", "b2"], "schedule": "cosine"},
    }.items():
        trainer = make(models.mlp((3, 4, 1)), **{**options, **more})
        trainer.fit(x, y)
        if name != "middle":
            trainer.save(folder / name)
    make(models.mlp((3, 4, 1)), **options).save(folder / "untrained")
    return sorted(folder.iterdir())


def attack(place: Path, seed: int, count: int) -> Counter[str]:
    """Damage one file at a time and read; what came of it, by way and file.

    What is read in spite of the damage has to be what was written, to the bit.
    """
    rng = Random(f"{place.name}/{seed}")
    files = sorted(p for p in place.rglob("*") if p.is_file())
    wanted = content(checkpoint.read(place))
    out: Counter[str] = Counter()
    for _ in range(count):
        path = rng.choice(files)
        whole = path.read_bytes()
        way, broken = damaged(rng, whole)
        path.write_bytes(broken)
        try:
            end = "harmless" if content(checkpoint.read(place)) == wanted else "WRONG"
        except CheckpointError as error:
            end = "noticed" if str(place) in str(error) else "NAMELESS"
        finally:
            path.write_bytes(whole)
        out[f"{end} {way} {path.name}"] += 1
    return out


def damaged(rng: Random, whole: bytes) -> tuple[str, bytes]:
    """A way, and the bytes that it leaves; they are never the whole ones."""
    while True:
        way, at = rng.choice(WAYS), rng.randrange(len(whole))
        if way == "flip":
            broken = bytearray(whole)
            broken[at] ^= 1 << rng.randrange(8)
            return way, bytes(broken)
        broken = whole[:at] + (b"" if way == "truncate" else bytes(len(whole) - at))
        if broken != whole:
            return way, bytes(broken)


def content(found: Checkpoint) -> dict[str, Any]:
    """All that is used of a checkpoint, comparable."""
    arrays = {n: (str(a.dtype), a.shape, a.tobytes()) for n, a in found.arrays.items()}
    files = {p.name: p.read_bytes() for p in _model_files(found)}
    return {"record": repr(attrs.asdict(found.record)), "arrays": arrays, "model": files}


def _model_files(found: Checkpoint) -> Iterator[Path]:
    yield from sorted(found.model.parent.iterdir())
