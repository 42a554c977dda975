"""Support for notebooks and IPython: the output of lines, and the display of models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ortflex_core.kernel.errors import printable

if TYPE_CHECKING:
    from onnx import ModelProto

_SHOWN = 5


def shell() -> Any:
    """The shell of IPython that runs this code, or None; IPython is imported there already."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return getattr(shell(), "kernel", None) is not None


def displayed_briefly(model: ModelProto) -> ModelProto:
    """The same model; IPython displays models in one line from now on, unless they have a display already.

    Otherwise a cell that ends with ``trainer.export(path)`` shows every number of the model.
    ``print`` still writes everything.
    """
    formatter = getattr(shell(), "display_formatter", None)
    if formatter is not None:
        printers = formatter.formatters["text/plain"].type_printers
        printers.setdefault(type(model), lambda proto, printer, _: printer.text(one_line(proto)))
    return model


def one_line(model: ModelProto) -> str:
    """A model in one line.

    >>> import onnx.parser
    >>> one_line(onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    ... ))
    '<ModelProto g: 1 node, 0 initializers, x → y>'
    """
    graph = model.graph
    own = {tensor.name for tensor in graph.initializer}
    counts = (
        f"{count} {noun}{'' if count == 1 else 's'}"
        for count, noun in ((len(graph.node), "node"), (len(own), "initializer"))
    )
    takes = _few([value.name for value in graph.input if value.name not in own])
    gives = _few([value.name for value in graph.output])
    text = f"<ModelProto {graph.name}: {', '.join(counts)}, {takes} → {gives}>"
    return printable(text, lines=False)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
