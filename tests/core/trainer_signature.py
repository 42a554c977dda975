"""The Trainer's signature and the Args of its docstring, written from the list of arguments.

``python -m tests.core.trainer_signature`` writes both into ortflex_core/training/trainer.py, where
type checkers and editors read them; ``test_arguments.py`` says whether they are those of the list.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from ortflex_core import KINDS, Arguments
from ortflex_core.kernel.hooks import Callback
from ortflex_core.training import trainer
from ortflex_core.training.config import arguments

SOURCE = Path(inspect.getfile(trainer))
_MODEL = "str | os.PathLike[str] | bytes | onnx.ModelProto | Model"
_HELP = {
    "model": "a path, the file's bytes, or a ModelProto; training starts from its weights",
    "plugins": "the plugins from which components are chosen; by default all installed plugins",
}
_WIDTH = 100


def annotations() -> dict[str, str]:
    """The types of the arguments: those in the source of the list, and of components their classes.

    The list itself has ``Any`` for components, since the registry converts and checks their values.
    """
    module = ast.parse(inspect.getsource(arguments))
    (owner,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Arguments")
    nodes = (n for n in owner.body if isinstance(n, ast.AnnAssign))
    types = {ast.unparse(node.target): ast.unparse(node.annotation) for node in nodes}
    return types | {f.name: of_components(f) for f in attrs.fields(Arguments) if f.metadata["of"]}


def of_components(field: attrs.Attribute[Any]) -> str:
    """The type of an argument that chooses components: a name, an object or a table, or several."""
    base = KINDS[field.metadata["of"]]
    if base is Callback:  # callbacks may be objects of any class
        return "Any"
    several = " | Sequence[Any]" if "a list of" in field.metadata["kind"] else ""
    nothing = " | None" if field.default is None else ""
    return f"str | {base.__name__} | Mapping[str, Any]{several}{nothing}"


def signature() -> Iterator[str]:
    """The lines of ``__init__`` up to its colon, as ruff formats them."""
    types = annotations()
    yield "    def __init__("
    yield "        self,"
    yield f"        model: {_MODEL},"
    yield "        *,"
    for field in attrs.fields(Arguments):
        default = "" if field.default is attrs.NOTHING else f" = {_literal(field.default)}"
        yield f"        {field.name}: {types[field.name].replace(chr(39), chr(34))}{default},"
    yield "        plugins: Plugins | None = None,"
    yield "    ) -> None:"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def args() -> Iterator[str]:
    """The lines of the docstring's Args, its heading left out."""
    texts = {f.name: f.metadata["help"] for f in attrs.fields(Arguments)}
    order = ["model", *texts, "plugins"]
    for name in order:
        text = f"{name}: {(_HELP | texts)[name]}."
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )


def written(source: str) -> str:
    """The module's source with the signature and the Args of the list."""
    before, rest = source.split("    def __init__(\n", 1)
    after = rest.split("    ) -> None:\n", 1)[1]
    head, rest = before.split("    Args:\n", 1)
    tail = rest.split("\n    Raises:\n", 1)[1]
    made = "\n".join(args()), "\n".join(signature())
    return f"{head}    Args:\n{made[0]}\n\n    Raises:\n{tail}{made[1]}\n{after}"


if __name__ == "__main__":
    SOURCE.write_text(written(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
