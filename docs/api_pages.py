"""The pages of the Python reference: one for each module with public names, with signatures and types.

``conf.py`` writes them before the build; which names are public is chosen in tests/core/public_names.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import get_origin

import ortflex
from tests.core import public_names

FOLDER = Path(__file__).parent / "reference" / "api"


def directive(module: str, name: str) -> Iterator[str]:
    """The lines with which autodoc describes a public name of a module."""
    value = getattr(importlib.import_module(module), name)
    path = f"{module}.{name}"
    if inspect.ismodule(value):  # it has a page of its own
        yield f"- :py:mod:`{path}`"
        return
    if get_origin(value):  # another name of a type, whose text is not ours
        yield from (f".. py:data:: {path}", "", f"   The same as ``{value}``.")
        return
    if not inspect.isclass(value):
        function = inspect.isroutine(value)
        yield f".. {'autofunction' if function else 'autodata'}:: {path}"
        if not function:
            yield "   :no-value:"
        return
    yield f".. {'autoexception' if issubclass(value, BaseException) else 'autoclass'}:: {path}"
    yield "   :show-inheritance:"
    # A kit is inherited; which checks it has is no promise.
    if not module.endswith(".testing"):
        yield "   :members:"
        # scikit-learn adds methods for its own routing, with references to its own manual.
        theirs = [n for n in dir(value) if n.endswith("_request") or n == "get_metadata_routing"]
        if theirs:
            yield f"   :exclude-members: {', '.join(theirs)}"
    if issubclass(value, Enum):
        yield "   :undoc-members:"


def page(module: str, names: tuple[str, ...]) -> str:
    """The page of a module."""
    loaded = importlib.import_module(module)
    lines = [f"# {module}", "", "```{eval-rst}"]
    if module == "ortflex":
        lines += [inspect.cleandoc(loaded.__doc__ or ""), ""]
        lines += [f"- :py:obj:`~{place}.{name}`" for name, place in sorted(ortflex._PLACES.items())]
    else:
        lines += [f".. automodule:: {module}", ""]
        for name in names or loaded.__all__:
            lines += [*directive(module, name), ""]
    return "\n".join([*lines, "```"]) + "\n"


def main() -> None:
    """Write the pages that have changed, and remove those of modules that are gone."""
    FOLDER.mkdir(exist_ok=True)
    pages = {
        f"{module}.md": page(module, names)
        for modules in public_names.MODULES.values()
        for module, names in modules.items()
    }
    for file in FOLDER.iterdir():
        if file.name not in pages:
            file.unlink()
    for name, text in pages.items():
        path = FOLDER / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
