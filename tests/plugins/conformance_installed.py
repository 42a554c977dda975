"""What pip makes of a package, without pip: its modules and its metadata in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests import children

ROOT = Path(__file__).parents[2]


def install(package: Path, site: Path) -> None:
    """Put a package of hatchling's into a folder, with the metadata that entry points come from."""
    table = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))
    project = table["project"]
    for name in table["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(package / name, site / name, dirs_exist_ok=True)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, "utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")


def run(arguments: Sequence[str], folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run a module of this Python in a folder; what ``site`` holds is installed for it."""
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("ORTFLEX_TEST_REPORT", None)
    return children.run([sys.executable, "-m", *arguments], cwd=folder, env=environment)


PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error")
