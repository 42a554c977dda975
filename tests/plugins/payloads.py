"""Names of code for files that are data, and a watch that reports whether any of it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CODE = """
from pathlib import Path

from ortflex_core import hook

Path({marker!r}).write_text("imported")


class Evil:
    name = "evil"

    def __init__(self, **_):
        Path({marker!r}).write_text("made")

    @hook
    def epoch_end(self, trainer):
        Path({marker!r}).write_text("called")
"""
"""A module that writes a file when it is imported, and again when its class is made."""


def plant(folder: Path) -> Path:
    """Write the module to a folder, under several names; returns the file that it would write."""
    marker = folder / "it-ran"
    (folder / "plugins").mkdir(exist_ok=True)
    for name in ("evil.py", "evil.PY", "evil_module.py", " evil.py", "plugins/evil.py"):
        (folder / name).write_text(CODE.format(marker=str(marker)))
    (folder / "ortflex").mkdir(exist_ok=True)
    (folder / "ortflex" / "evil.py").write_text(CODE.format(marker=str(marker)))
    return marker


def payloads(folder: Path, marker: Path) -> dict[str, dict[str, Any]]:
    """Tables that name code, each with arguments with which it would write the file."""
    file, touch = str(marker), ["touch", str(marker)]
    python = f"open({file!r}, 'w')"
    return {
        "a process": {"name": "subprocess:Popen", "args": touch},
        "target": {"target": "subprocess:Popen", "args": touch},
        "a shell": {"name": "os:system", "command": " ".join(touch)},
        "exec": {"name": "builtins:exec", "source": python},
        "eval": {"name": "builtins:eval", "source": python},
        "a relative file": {"name": "evil.py:Evil"},
        "an absolute file": {"name": f"{folder / 'evil.py'}:Evil"},
        "a file with dots": {"name": f"./../{folder.name}/evil.py:Evil"},
        "target of a file": {"target": "evil.py:Evil"},
        "a module of the folder": {"name": "evil:Evil"},
        "a module on the path": {"name": "evil_module:Evil"},
        "a class that is imported": {"name": "logging:FileHandler", "filename": file},
        "a class of an installed package": {
            "name": "numpy:memmap",
            "filename": file,
            "mode": "w+",
            "shape": 1,
        },
        "a member of a class": {"name": "pathlib:Path.touch", "self": file},
        "capitals": {"name": "EVIL_MODULE:Evil"},
        "a capital ending": {"name": "evil.PY:Evil"},
        "spaces": {"name": " evil.py:Evil "},
        "a line break": {"name": "evil.py:Evil\n"},
        "other letters": {"name": "\uff45vil_module:Evil"},
        "another colon": {"name": "evil.py\uff1aEvil"},
        "a null byte": {"name": "evil.py\0.py:Evil"},
        "a distribution": {"name": "ortflex/evil.py:Evil"},
        "a member of a family": {"name": "sklearn.evil_module:Evil"},
        "a family of a distribution": {"name": "ortflex/sklearn.subprocess:Popen", "args": touch},
        "a folder of plugins": {"plugins": "plugins", "callbacks": ["evil"]},
        "an address": {"name": f"file://{folder / 'evil.py'}:Evil"},
    }


_COMPILERS = {os.path.abspath(c) for c in map(shutil.which, ("cc", "gcc", "clang")) if c}
"""The backend ``c`` compiles what it writes itself, with the compiler of the machine."""
_EVENTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_seen: list[str] = []
_watching: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in _EVENTS and arguments[0] not in _COMPILERS:
        _seen.append(f"{event} {arguments[:2]}")
    elif event == "exec" and "evil" in str(getattr(arguments[0], "co_filename", "")).lower():
        _seen.append(f"{event} {arguments[0].co_filename}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """The processes that start, and the code of planted files that runs, inside the block."""
    if _audit not in _installed:  # a hook cannot be removed
        sys.addaudithook(_audit)
        _installed.append(_audit)
    _seen.clear()
    _watching.append(True)
    try:
        yield _seen
    finally:
        _watching.clear()


_installed: list[Any] = []
assert subprocess  # a payload names it as a module that is imported
