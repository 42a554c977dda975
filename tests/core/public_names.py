"""The public names as a page: ``python -m tests.core.public_names`` writes docs/reference/names.md.

What is public is chosen here; the page has it with its arguments, and the test next to this module
compares the two.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import attrs

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "names.md"

# For people who train, then for people who write plugins. An empty tuple is all that __all__ has.
MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Training": {
        "ortflex": (),
        "ortflex_core": (),
        "ortflex_core.config": (),
        "ortflex_core.types": (
            *("Progress", "TensorSpec", "Array", "Shape", "array_at", "dtype_name"),
            *("numpy_dtype", "onnx_dtype", "same_shape", "shape_text"),
        ),
        "ortflex_core.views": (),
        "ortflex_core.check": (),
        "ortflex_core.comparison": (),
        "ortflex_core.portable": (),
        "ortflex_core.errors": (
            *("OrtflexError", "RuntimeUnavailable", "ModelError", "DataError", "ConfigError"),
            *("PluginError", "BrokenPlugin", "Unsupported", "GraphError", "MissingKernel"),
            *("NoGradientRule", "NotDecomposed", "NotDifferentiable", "CheckpointError"),
            "TrainingDiverged",
            *("MALFORMED", "printable", "short_repr", "suggest"),
        ),
        "ortflex_plugins.estimators": (),
        "ortflex_plugins.flower": (),
        "ortflex_plugins.layers": (),
        "ortflex_plugins.onnxcustom": (),
        "ortflex_plugins.pictures": (),
    },
    "Plugins": {
        "ortflex_core.component": (
            *(
                "Component",
                "hyper",
                "number",
                "one_of",
                "setting",
                "expected_count",
                "is_count",
                "is_number",
                "MOST",
            ),
        ),
        "ortflex_core.protocols": (),
        "ortflex_core.hooks": ("hook", "Hooks", "HookManager", "NAMES"),
        "ortflex_core.registry": (
            "Plugins",
            "Registry",
            "Entry",
            "KINDS",
            "TABLES",
            "HOOKS",
            "singular",
        ),
        "ortflex_core.process_groups": (),
        "ortflex_core.graph": (),
        "ortflex_core.autodiff": (),
        "ortflex_core.runtime": (),
        "ortflex_core.opsets": (),
        "ortflex_core.model": (),
        "ortflex_core.parameters": (),
        "ortflex_core.adapters": (),
        "ortflex_core.data": (),
        "ortflex_core.problem": (),
        "ortflex_core.programs": (),
        "ortflex_core.engines": (),
        "ortflex_core.checkpoints": (),
        "ortflex_core.training": (),
        "ortflex_core.construct": ("component_schema", "expected", "field_types"),
        "ortflex_core.files": ("OutputError", "make_folder", "write_bytes"),
        "ortflex_core.locks": ("FolderLock", "lock_handle"),
        "ortflex_core.testing": (),
    },
}


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
    """The page."""
    text = [
        "# Public names",
        "",
        "<!-- Written by `python -m tests.core.public_names`; what is listed is chosen there. -->",
        "",
        "What other packages may rely on, with the arguments of each; `=` marks those that need not be",
        "given. How any of it may change is said in [Deprecation](../explanation/deprecation.md). The",
        "names and parameters of [components](components.md), the keys of",
        "[`train.toml`](configuration.md) and the commands of `ortflex` are public, too. Whatever is not",
        "listed, and every name that begins with an underscore, may change at any time.",
    ]
    for part, modules in MODULES.items():
        text += ["", f"## {part}"]
        for module, names in modules.items():
            text += ["", f"### {module}", "", "```text", *lines(module, names), "```"]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
