"""The pages of the Python reference: one for each module with public names and one for each class.

``conf.py`` writes them before the build; which names are public is chosen in tests/core/public_names.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_origin

import ortflex
from tests.core import public_names

FOLDER = Path(__file__).parent / "reference" / "api"


def has_page(module: str, value: Any) -> bool:
    """Whether a name is a class with a page of its own; errors and kits are on that of their module."""
    kit = module.endswith(".testing")
    return inspect.isclass(value) and not (
        kit or issubclass(value, BaseException) or get_origin(value)
    )


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
        inherited = [
            c
            for c in value.__mro__[1:]
            if c.__module__.startswith("ortflex_core.training.artifacts")
        ]
        if inherited:
            yield "   :inherited-members: object"
    if issubclass(value, Enum):
        yield "   :undoc-members:"


def in_rst(*lines: str) -> list[str]:
    """Lines of reStructuredText within Markdown."""
    return ["```{eval-rst}", *lines, "```"]


def class_page(module: str, name: str) -> str:
    """The page of a class."""
    return "\n".join([f"# {name}", "", *in_rst(*directive(module, name))]) + "\n"


def page(module: str, names: tuple[str, ...]) -> dict[str, str]:
    """The page of a module and those of its classes, by the names of their files."""
    loaded = importlib.import_module(module)
    lines = [f"# {module}", ""]
    if module == "ortflex":
        listed = [f"- :py:obj:`~{place}.{name}`" for name, place in sorted(ortflex._PLACES.items())]
        lines += in_rst(inspect.cleandoc(loaded.__doc__ or ""), "", *listed)
        return {f"{module}.md": "\n".join(lines) + "\n"}
    lines += in_rst(f".. automodule:: {module}")
    public = names or tuple(loaded.__all__)
    classes = [n for n in public if has_page(module, getattr(loaded, n))]
    if classes:
        lines += ["", "## Classes", "", "| class | |", "|---|---|"]
        lines += [f"| {{py:class}}`~{module}.{n}` | {headline(loaded, n)} |" for n in classes]
        lines += ["", "```{toctree}", ":hidden:", "", *(f"{module}/{n}" for n in classes), "```"]
    others = [n for n in public if n not in classes]
    if others:
        described = [line for name in others for line in (*directive(module, name), "")]
        lines += [
            "",
            "## Functions and data" if classes else "## Contents",
            "",
            *in_rst(*described),
        ]
    pages = {f"{module}/{n}.md": class_page(module, n) for n in classes}
    return {f"{module}.md": "\n".join(lines) + "\n", **pages}


def headline(module: Any, name: str) -> str:
    """The first line of a class's documentation, as text of a table."""
    first = (inspect.getdoc(getattr(module, name)) or "").partition("\n")[0]
    for role in (":class:", ":func:", ":meth:", ":mod:", ":data:", ":attr:"):
        first = first.replace(role, "")
    return first.replace("``", "`").replace("`~", "`").replace("|", "\\|")


def main() -> None:
    """Write the pages that have changed, and remove those of names that are gone."""
    pages: dict[str, str] = {}
    for modules in public_names.MODULES.values():
        for module, names in modules.items():
            pages |= page(module, names)
    for file in FOLDER.rglob("*.md"):
        if file.relative_to(FOLDER).as_posix() not in pages:
            file.unlink()
    for name, text in pages.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
