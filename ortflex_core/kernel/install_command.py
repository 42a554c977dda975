"""The command that installs ortflex with extras, in the way in which it was installed here.

pip and uv record where a distribution came from in ``direct_url.json`` (PEP 610): a folder, a wheel, a
repository; a distribution from an index has no such file.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

_NAME = "ortflex"


def install_command(*extras: str) -> str:
    """``pip install …`` with extras: of the checkout, the wheel or the repository that ortflex came from.

    >>> install_command("xla").startswith("pip install "), "[xla]" in install_command("xla")
    (True, True)
    """
    return command_of(origin(), extras)


@functools.cache
def origin() -> dict[str, Any] | None:
    """The content of direct_url.json, a folder for a checkout on the path; None for an index."""
    try:
        text = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        folder = Path(__file__).parents[2]
        is_checkout = (folder / "pyproject.toml").is_file()
        return {"url": folder.as_uri(), "dir_info": {"editable": True}} if is_checkout else None
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None


def command_of(found: dict[str, Any] | None, extras: tuple[str, ...] = ()) -> str:
    """The command for a content of direct_url.json, quoted for bash, zsh, cmd and PowerShell.

    >>> command_of(None, ("xla",))
    'pip install "ortflex[xla]"'
    >>> command_of({"url": "file:///wheels/ortflex-1.0-py3-none-any.whl"}, ("stock", "xla"))
    'pip install "/wheels/ortflex-1.0-py3-none-any.whl[stock,xla]"'
    >>> command_of({"url": "https://host/repo.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}})
    'pip install "ortflex @ git+https://host/repo.git@1f"'
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    if found is None:
        return f'pip install "{_NAME}{wanted}"'
    url = str(found["url"])
    vcs = found.get("vcs_info")
    if isinstance(vcs, dict):
        url = f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', 'HEAD')}"
    if not url.startswith("file:"):
        return f'pip install "{_NAME}{wanted} @ {url}"'
    place = url2pathname(unquote(urlsplit(url).path))
    info = found.get("dir_info")
    editable = "-e " if isinstance(info, dict) and info.get("editable") else ""
    here = isinstance(info, dict) and os.path.abspath(place) == os.getcwd()
    return f'pip install {editable}"{"." if here else place}{wanted}"'
