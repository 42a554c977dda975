"""Programs compiled by OpenVINO, which keep their state inside."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import attrs
import onnx
from onnx import GraphProto

from ortflex_core import Array, Key, Program, Unsupported, get_program
from ortflex_plugins.backends.openvino.differences import (
    differences,
    node_name,
    replace_copies,
    replace_nodes,
    take_matrices,
)

_NOISE = ("Exception from", "Check '", "FrontEnd API", "Model wasn't", "Summary", "To facilitate")


@attrs.frozen
class Hints:
    """How to compile: OpenVINO's word for the precision, and the folder of its cache on disk, if any."""

    precision: str = "f32"
    cache_folder: str | None = None


@attrs.frozen(eq=False)
class Compiled:
    """A compiled program.

    ``states`` are the tensors that it reads and replaces, and the names of the variables that hold them;
    ``matrices`` are constants of the program that are inputs of the model (see ``take_matrices``).
    """

    program: Program
    model: Any
    states: Mapping[Key, str]
    matrices: Mapping[str, Array]

    def request(self) -> Any:
        """A new request, whose variables are not shared with other requests."""
        import openvino

        request = self.model.create_infer_request()
        for name, array in self.matrices.items():
            request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        return request


def compile_program(
    program: Program,
    shapes: Mapping[Key, tuple[int, ...]],
    *,
    threads: int,
    hints: Hints,
    stateful: bool = True,
) -> Compiled:
    """Compile a program for inputs of the given exact shapes; from the cache if possible.

    With ``stateful``, tensors that are inputs and outputs stay inside.

    Raises:
        Unsupported: an operator that OpenVINO cannot compute, with its node.
    """
    known = tuple((program.takes[k].name, tuple(s)) for k, s in shapes.items())
    key = ("openvino", os.getpid(), program.key, known, threads, hints, stateful)
    takes = program.takes.items() if stateful else ()
    pairs = {k: (s.name, program.gives[k].name) for k, s in takes if k in program.gives}
    return get_program(key, lambda: _compile(program, dict(known), pairs, threads, hints))


def _compile(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    pairs: Mapping[Key, tuple[str, str]],
    threads: int,
    hints: Hints,
) -> Compiled:
    """Compile without the cache."""
    import openvino
    from openvino.passes import MakeStateful, Manager

    proto = program.proto()
    if reasons := list(differences(proto.graph)):
        raise Unsupported("; ".join(reasons[:4]))
    # A value that a program passes on unchanged would be removed from the state.
    same = {(n.input[0], n.output[0]) for n in proto.graph.node if n.op_type == "Identity"}
    pairs = {key: pair for key, pair in pairs.items() if pair not in same}
    replace_nodes(proto.graph)
    replace_copies(proto.graph)
    matrices = take_matrices(proto.graph)
    for info in proto.graph.input:
        if info.name in shapes:
            sizes = info.type.tensor_type.shape
            del sizes.dim[:]
            sizes.dim.extend(
                onnx.TensorShapeProto.Dimension(dim_value=d) for d in shapes[info.name]
            )
    core = get_program(("openvino core", os.getpid()), openvino.Core)
    settings = {
        "INFERENCE_NUM_THREADS": min(threads, os.cpu_count() or 1),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": hints.precision,
        # Threads of several processes would be bound to the same processors.
        "ENABLE_CPU_PINNING": False,
        **({} if hints.cache_folder is None else {"CACHE_DIR": hints.cache_folder}),
    }
    try:
        model = core.read_model(proto.SerializeToString(), b"")
        if pairs:
            passes = Manager()
            passes.register_pass(MakeStateful(dict(pairs.values())))
            passes.run_passes(model)
        made = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:  # OpenVINO's only exception class, defined in C++
        raise Unsupported(_reason(str(error), proto.graph)) from error
    states = {k: before + after for k, (before, after) in pairs.items()}
    return Compiled(program, made, states, matrices)


def _reason(text: str, graph: GraphProto) -> str:
    """OpenVINO's message without its C++ trace, with the nodes of unknown operators."""
    missing = re.search(r"No conversion rule found for operations: (.*)", text)
    if missing is not None:
        kinds = {k.strip().rsplit("-", 1)[0].rsplit(".", 1)[-1] for k in missing[1].split(",")}
        nodes = [node_name(n) for n in graph.node if n.op_type in kinds]
        return "OpenVINO has no operator " + ", ".join(nodes or sorted(kinds))
    useful = _useful(text)
    which = re.search(r"<Node\((\w+)\): (.*?)>", text)
    if which is not None:
        last = [line for line in useful if not line.startswith(("--", "While"))]
        return f"OpenVINO cannot compile {which[1]} (node {which[2]!r}): {(last or useful)[-1]}"
    return f"OpenVINO cannot compile it: {useful[0]}"


def _useful(text: str) -> list[str]:
    """The lines of a message without its C++ trace; all lines if there are no others."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(_NOISE)] or lines


def error_line(error: BaseException) -> str:
    """OpenVINO's message about a failed run."""
    return (_useful(str(error)) or [type(error).__name__])[0]
