"""The public names as a page and as a stub: ``python -m tests.core.public_names`` writes both.

What is public is chosen in ``ortflex_core.PUBLIC``; docs/reference/names.md has it with its arguments,
``ortflex_core/__init__.pyi`` for type checkers. The test next to this module compares them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import attrs

import ortflex_core

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "names.md"

STUB = Path(ortflex_core.__file__).with_suffix(".pyi")

# For people who train, then for authors of plugins. An empty tuple is all that __all__ has.
MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Training": {
        "ortflex": (),
        "ortflex_plugins.c.export": ("export_c",),
        "ortflex_plugins.estimators": (),
        "ortflex_plugins.flower": (),
        "ortflex_plugins.layers": (),
        "ortflex_plugins.losses.detection": ("pad_boxes",),
        "ortflex_plugins.onnxcustom": (),
        "ortflex_plugins.pictures": (),
    },
    "Plugins": {
        "ortflex_core": tuple(" ".join(ortflex_core.PUBLIC.values()).split()),
    },
}


def stub() -> str:
    """The face of the core for type checkers and editors, which do not follow its table."""
    text = [
        '"""The public names of the core; written by ``python -m tests.core.public_names``."""',
        "",
    ]
    for module, names in ortflex_core.PUBLIC.items():
        one = f"from ortflex_core.{module} import "
        parts = [f"{name} as {name}" for name in names.split()]
        whole = one + ", ".join(parts)
        text += [whole] if len(whole) <= 100 else [f"{one}(", *(f"    {p}," for p in parts), ")"]
    return "\n".join([*text, "", "PUBLIC: dict[str, str]", "__version__: str", ""])


def lines(module: str, names: tuple[str, ...]) -> list[str]:
    """The names of a module, one line each, and of classes one line a member."""
    loaded = importlib.import_module(module)
    if module == "ortflex":  # each is described where it comes from
        return list(loaded.__all__)
    out = []
    for name in names or loaded.__all__:
        try:
            value = getattr(loaded, name)
        except ImportError:
            if name != "OrtLayer":  # torch is not everywhere
                raise
            continue
        out += list(_described(name, value))
    return out


def _described(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}({_arguments(value)})" if inspect.isfunction(value) else name
        return
    # A kit is inherited; which checks it has is no promise.
    if value.__module__.startswith("ortflex_core.testing"):
        yield name
        return
    if issubclass(value, Enum):
        yield from (name, *(f"{name}.{member}" for member in value.__members__))
        return
    own = issubclass(value, Exception) or getattr(value, "_is_protocol", False)
    yield name if own else f"{name}({_arguments(value)})"
    fields = {f.name for f in attrs.fields(value)} if attrs.has(value) else set()
    declared = {m for c in value.__mro__ for m in vars(c).get("__annotations__", ())}
    for member in sorted({*dir(value), *declared} - fields):
        # scikit-learn makes set_fit_request and others, if it is new enough.
        if member.startswith("_") or member.endswith("_request"):
            continue
        if not hasattr(value, member):
            yield f"{name}.{member}"
            continue
        owner = next(c for c in value.__mro__ if member in vars(c))
        if owner.__module__.split(".")[0] not in ("ortflex_core", "ortflex_plugins"):
            continue
        held = inspect.getattr_static(value, member)
        function = getattr(held, "__func__", held)
        callable_ = inspect.isfunction(function)
        yield f"{name}.{member}({_arguments(function)})" if callable_ else f"{name}.{member}"


def _arguments(function: Any) -> str:
    """``a, b=, *, c, d=``: what can be given, and what need not be."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return ""
    out, star = [], False
    for p in parameters:
        if p.name == "self" or p.name == "cls":
            continue
        star |= p.kind == p.VAR_POSITIONAL
        if p.kind == p.KEYWORD_ONLY and not star:
            out.append("*")
            star = True
        marks = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}
        optional = p.default is not p.empty
        out.append(f"{marks.get(p.kind, '')}{p.name}{'=' if optional else ''}")
    return ", ".join(out)


def page() -> str:
    text = [
        "# Public names",
        "",
        "<!-- Written by `python -m tests.core.public_names`; `ortflex_core.PUBLIC` is the list. -->",
        "",
        "This page lists the names on which other packages may rely, with their arguments. Optional",
        "arguments are marked with `=`. [Deprecation](../explanation/deprecation.md) explains how names",
        "may change. The names and parameters of [components](components.md), the keys of",
        "[`train.toml`](configuration.md) and the commands of `ortflex` are also public. All other names,",
        "and every name that begins with an underscore, may change at any time.",
    ]
    for part, modules in MODULES.items():
        text += ["", f"## {part}"]
        for module, names in modules.items():
            text += ["", f"### {module}", "", "```text", *lines(module, names), "```"]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
    PAGE.write_text(page(), "utf-8")
