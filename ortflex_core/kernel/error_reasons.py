"""Reasons in the messages of onnxruntime, without traces of C++."""

from __future__ import annotations

import re

_BOUND_REACHED = re.compile(r"more than \d+ iterations of the Loop '[^']*'")
"""The node that fails when a loop reaches the bound of ``ortflex_core.compiler.onnx_files.loop_bounds``."""
_GROWN = re.compile(r"a state of more than \d+ elements of the Loop '[^']*'")
"""The node that fails when a state grows beyond the bound of runs that measure a model."""
_RUNNING = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
_PLACE = re.compile(r"^(/\S+ .*?\) (?=\S)|\S+\.(h|cc|cu):\d+ )")


def error_reason(error: BaseException) -> str:
    """The first line of onnxruntime's message: node and reason, without the location in its source code."""
    if endless := _BOUND_REACHED.search(str(error)):
        return f"{endless[0]}; it does not end on these data, or needs a larger bound"
    if grown := _GROWN.search(str(error)):
        return f"{grown[0]}, in a run that only measures the model"
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    node = _RUNNING.search(first)
    for marker in ("Status Message: ", "[ONNXRuntimeError] : "):
        if marker in first:
            first = first.rsplit(marker, 1)[1]
    first = _PLACE.sub("", first)
    if node:
        first = f"{node[1]} node {node[2]!r}: {first}"
    return first[:500]
