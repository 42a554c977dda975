"""Sessions on programs: made once per structure, shared, with one thread unless told otherwise.

The cache of sessions is the only process-wide state of ortflex. It is bounded and locked, its
entries are immutable (weights and bindings belong to engines), and a forked child starts anew,
because a session's threads do not survive a fork.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from ortflex_core.errors import GraphError
from ortflex_core.program import Program
from ortflex_core.protocols import Device
from ortflex_core.types import Array

_LIMIT = 64
_cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_lock = threading.Lock()


def session_options(threads: int) -> Any:
    """Options that all our sessions share: quiet, sequential, ``threads`` inside an operator."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return options


def session(program: Program, device: Device, threads: int = 1) -> Any:
    """The session of a program on a device, made or found.

    Raises:
        GraphError: onnxruntime refuses the graph; its reason without the C++ trace.
    """
    key = (os.getpid(), program.key, device, threads)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    import onnxruntime

    try:
        made = onnxruntime.InferenceSession(
            program.model, session_options(threads), providers=device.providers()
        )
    except Exception as error:  # onnxruntime raises classes of its own, made in C++
        raise GraphError(
            f"onnxruntime {onnxruntime.__version__} refuses the {program.name} graph: {reason(error)}"
        ) from error
    with _lock:
        _cache[key] = made
        while len(_cache) > _LIMIT:
            _cache.popitem(last=False)
    return made


def reason(error: BaseException) -> str:
    """The first line of onnxruntime's message: what, without where in its sources."""
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    for marker in ("Status Message: ", "[ONNXRuntimeError] : "):
        if marker in first:
            first = first.rsplit(marker, 1)[1]
    return first[:500]


def run_once(
    program: Program, feeds: dict[str, Array], values: dict[str, float], device: Device
) -> dict[str, Array]:
    """Run a program from arrays to arrays; for what happens once, not once a step."""
    from ortflex_core.host import HostProgram

    numbers = HostProgram([h.expression for h in program.hosts])(values)
    scalars = {
        h.spec.name: np.asarray(v, dtype=h.spec.numpy)
        for h, v in zip(program.hosts, numbers, strict=True)
    }
    names = [o.name for o in program.outputs]
    arrays = {i.name: feeds[i.name] for i in program.inputs}
    try:
        results = session(program, device).run(names, arrays | scalars)
    except Exception as error:  # as above
        raise GraphError(f"the {program.name} graph failed: {reason(error)}") from error
    return dict(zip(names, results, strict=True))
