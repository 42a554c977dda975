"""The public names as a page: ``python -m tests.core.public_names`` writes docs/reference/names.md.

What is public is chosen here; the page has it with its arguments, and the test beside this module
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
        "ortflex_core": (),
        "ortflex_core.config": ("Recipe",),
        "ortflex_core.types": ("History", "Progress", "TensorSpec"),
        "ortflex_core.iterables": ("Batches",),
        "ortflex_core.check": ("ModelReport", "NodeReport"),
        "ortflex_core.compare": ("compare", "Comparison", "Result"),
        "ortflex_core.runtime": ("diagnose", "require_runtime", "Runtime"),
        "ortflex_core.errors": (
            *("OrtflexError", "RuntimeUnavailable", "ModelError", "DataError", "ConfigError"),
            *("PluginError", "Unsupported", "GraphError", "MissingKernel", "NoGradientRule"),
            *("NotDifferentiable", "CheckpointError", "TrainingDiverged", "nearest"),
        ),
        "ortflex_plugins.estimators": (),
        "ortflex_plugins.layers": (),
        "ortflex_plugins.onnxcustom": (),
    },
    "Plugins": {
        "ortflex_core.component": ("Component", "hyper", "number", "one_of"),
        "ortflex_core.protocols": (
            *("Loss", "Penalty", "Optimizer", "Constraint", "Average", "Schedule"),
            *("ScheduleContext", "Metric", "MetricState", "DataSource", "Device", "Value"),
            *("Backend", "Engine", "Losses"),
        ),
        "ortflex_core.ops": ("Ops", "Tensor"),
        "ortflex_core.labels": ("float_labels", "float_scores", "integer_labels", "require_range"),
        "ortflex_core.autodiff": ("Rules", "NodeView"),
        "ortflex_core.cotangents": ("full", "dims", "passed", "unbroadcast"),
        "ortflex_core.hookspecs": ("hook", "Hooks", "NAMES"),
        "ortflex_core.checkpoint": ("Saved",),
        "ortflex_core.data": ("Columns", "Batch"),
        "ortflex_core.pieces": ("Pieces",),
        "ortflex_core.hostengine": ("HostEngine",),
        "ortflex_core.program": ("Program",),
        "ortflex_core.session": ("use_library",),
        "ortflex_core.registry": ("Plugins", "Registry", "Entry", "KINDS"),
        "ortflex_core.testing": (),
    },
}


def lines(module: str, names: tuple[str, ...]) -> list[str]:
    """The names of a module, one line each, and of classes one line a member."""
    loaded = importlib.import_module(module)
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
