"""The two pictures of explanation/architecture.md; the docs build calls this script.

``packages.svg`` is drawn from the imports of the code, ``data.svg`` from the table below, whose
modules must exist. Both are laid out by :mod:`ortflex_plugins.pictures`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import ortflex_core
from ortflex_core import KINDS
from ortflex_plugins.pictures.layout import layout
from ortflex_plugins.pictures.scene import Chip, Item, Level
from ortflex_plugins.pictures.svg import svg

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "explanation"
PLUGINS = "kinds of plugins"

# Box: (kind, what it says, module or path that it stands for), then where its arrows lead.
DATA: Mapping[str, tuple[str, str, str, tuple[str, ...]]] = {
    "train.toml, arguments": ("io", "", "", ("Recipe",)),
    "model.onnx": ("io", "", "", ("Model",)),
    "user's data": ("io", "", "", ("Columns, Pieces, Batches",)),
    "Recipe": (
        "forward",
        "names and parameters",
        "ortflex_core/training/config/recipe.py",
        ("components",),
    ),
    "components": (
        *("forward", "found, built, validated", "ortflex_core/kernel/registry.py"),
        ("Problem", "Loop"),
    ),
    "Model": (
        "forward",
        "vetted, completed",
        "ortflex_core/compiler/model/model.py",
        ("Problem", "trained .onnx"),
    ),
    "Columns, Pieces, Batches": (
        *("penalty", "by name", "ortflex_core/training/data/columns.py"),
        ("Problem", "Preparation"),
    ),
    "Problem": (
        *("forward", "what is trained, symbolically", "ortflex_core/compiler/problem/problem.py"),
        ("Backend",),
    ),
    "Backend": (
        *("loss", "supports(problem), build(…)", "ortflex_plugins/backends"),
        ("Engine", "programs"),
    ),
    "programs": (
        "loss",
        "one ONNX graph or several",
        "ortflex_core/compiler/programs/step.py",
        ("Engine",),
    ),
    "Preparation": (
        *("penalty", "types and shapes of the graphs", "ortflex_core/training/data/preparation.py"),
        ("Source",),
    ),
    "Source": (
        "penalty",
        "batches, epoch after epoch",
        "ortflex_core/kernel/batches.py",
        ("Loop",),
    ),
    "Engine": (
        "update",
        "weights, slots, run(batches, rates)",
        "ortflex_core/kernel/engine_protocols.py",
        ("Loop",),
    ),
    "Loop": (
        *("update", "epochs, rates, hooks", "ortflex_core/kernel/loop.py"),
        ("History", "checkpoint", "trained .onnx"),
    ),
    "History": ("io", "", "", ()),
    "checkpoint": ("io", "", "", ()),
    "trained .onnx": ("io", "", "", ()),
}


def data() -> Level:
    """The way of the data, from arguments and files to the trained file."""
    names = list(DATA)
    items = []
    for name, (kind, says, path, _) in DATA.items():
        if path and not (ROOT / path).exists():
            raise FileNotFoundError(f"the box {name!r} stands for {path}, which does not exist")
        items.append(
            Item(title=name, kind=kind, chips=(Chip(says, "plain"),) if says else (), tip=path)
        )
    edges = [(k, names.index(b)) for k, a in enumerate(names) for b in DATA[a][3]]
    return Level(tuple(items), tuple(edges))


def place(module: str) -> str | None:
    """The box of the picture of packages in which a module is."""
    parts = module.split(".")
    if parts[0] == "ortflex":
        return "ortflex"
    if parts[0] not in ("ortflex_core", "ortflex_plugins") or parts[1:] == ["moved"]:
        return None
    inner = parts[1] if len(parts) > 1 else ""
    # The package hands on names that are used from everywhere: Trainer stands for its module.
    inner = ortflex_core._PLACES.get(inner, inner).partition(".")[0]
    if parts[0] == "ortflex_plugins":
        return PLUGINS if inner in KINDS else inner or None
    # The face itself, and its version, are in no layer.
    return inner if inner and (ROOT / "ortflex_core" / inner).is_dir() else None


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the project and what is in it."""
    for name in ("ortflex.py", "ortflex_core", "ortflex_plugins"):
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield module, ast.parse(file.read_text("utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """What runs as an import; what only type checkers read is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from ortflex_core import graph` names a package, `from ortflex_core.x import y` its module.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            whole = node.module in ("ortflex_core", "ortflex_plugins")
            yield from inner if whole else [node.module]
        yield from imports(node)


def edges() -> dict[str, set[str]]:
    """Which boxes import which others, without those that follow from the rest."""
    direct: dict[str, set[str]] = {}
    for module, tree in modules():
        box = place(module)
        if box is None:
            continue
        others = {place(name) for name in imports(tree)}
        direct.setdefault(box, set()).update(o for o in others if o and o != box)
    # What these hand on is imported by name, late.
    direct["ortflex"] |= {"tools", "estimators", "layers", "pictures", "cli"}

    @cache
    def reached(box: str) -> frozenset[str]:
        return frozenset(direct.get(box, set()).union(*map(reached, direct.get(box, set()))))

    return {
        box: {o for o in others if not any(o in reached(p) for p in others if p != o)}
        for box, others in direct.items()
    }


def packages() -> Level:
    """The packages; what is imported stands above what imports it."""
    found = edges()
    order: list[str] = []
    while len(order) < len(found):
        placed = sorted(b for b in found if b not in order and found[b] <= set(order))
        if not placed:
            raise ValueError(f"these import one another: {sorted(found.keys() - set(order))}")
        order += placed
    kinds = {PLUGINS: "update", "ortflex": "io"}
    says = {
        "kernel": ("loop, binder, protocols,", "registry, hooks"),
        "compiler": ("graphs, gradients,", "programs, runtime"),
        "training": ("Trainer, data, engines,", "checkpoints, …"),
        "tools": ("check, comparison, …",),
        "testing": ("the conformance kits",),
        PLUGINS: tuple(", ".join(sorted(KINDS)[k : k + 3]) for k in range(0, len(KINDS), 3)),
        "ortflex": ("the names for users",),
    }
    items = []
    for box in order:
        core = (ROOT / "ortflex_core" / box).is_dir()
        kind = kinds.get(box, "forward" if core else "update")
        chips = tuple(Chip(text, "plain") for text in says.get(box, ()))
        items.append(Item(title=box, kind=kind, chips=chips))
    pairs = [(order.index(o), order.index(box)) for box in order for o in sorted(found[box])]
    return Level(tuple(items), tuple(pairs))


def pictures() -> dict[str, str]:
    """Every picture by the name of its file."""
    # The legend of the colors would speak of operators: these pictures have their text on the page.
    return {
        "packages.svg": svg(layout(packages()), (), "Packages: the imported ones are above"),
        "data.svg": svg(layout(data()), (), "The way of the data"),
    }


def main() -> int:
    """Write what has changed."""
    for name, text in pictures().items():
        path = FOLDER / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
