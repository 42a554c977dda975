"""Programs compiled by OpenVINO, with the state that they replace inside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from ortflex_core.errors import Unsupported
from ortflex_core.graph import Key, Program
from ortflex_core.runtime import get_program
from ortflex_core.types import dtype_name

_WIDE = (TensorProto.DOUBLE, TensorProto.UINT64, TensorProto.STRING)
"""Types that OpenVINO does not compute with on a CPU: it would silently take 32 bits."""
_NOISE = ("Exception from", "Check '", "FrontEnd API", "Model wasn't", "Summary", "To facilitate")


@attrs.frozen(eq=False)
class Compiled:
    """A compiled program.

    ``states`` are the tensors that it reads and replaces, and the names of the variables that hold them.
    """

    program: Program
    model: Any
    states: Mapping[Key, str]

    def request(self) -> Any:
        """A request of its own: with variables that no other request has."""
        return self.model.create_infer_request()


def compile_program(
    program: Program,
    shapes: Mapping[Key, tuple[int, ...]],
    *,
    threads: int,
    precision: str,
    stateful: bool = True,
) -> Compiled:
    """Compile a program for inputs of the given exact shapes; from the cache if possible.

    With ``stateful``, tensors that are inputs and outputs stay inside.

    Raises:
        Unsupported: what OpenVINO cannot compute, with the node.
    """
    known = tuple((program.takes[k].name, tuple(s)) for k, s in shapes.items())
    key = ("openvino", os.getpid(), program.key, known, threads, precision, stateful)
    takes = program.takes.items() if stateful else ()
    pairs = {k: (s.name, program.gives[k].name) for k, s in takes if k in program.gives}
    return get_program(key, lambda: _compile(program, dict(known), pairs, threads, precision))


def _compile(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    pairs: Mapping[Key, tuple[str, str]],
    threads: int,
    precision: str,
) -> Compiled:
    """Compile without the cache."""
    import openvino
    from openvino.passes import MakeStateful, Manager

    proto = program.proto()
    for reason in _refusals(proto.graph):
        raise Unsupported(reason)
    _replace_abs(proto.graph)
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
        "INFERENCE_PRECISION_HINT": precision,
        # Threads of several processes would be bound to the same processors.
        "ENABLE_CPU_PINNING": False,
    }
    try:
        model = core.read_model(proto.SerializeToString(), b"")
        if pairs:
            passes = Manager()
            passes.register_pass(MakeStateful(dict(pairs.values())))
            passes.run_passes(model)
        made = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:  # OpenVINO's only class, made in C++
        raise Unsupported(_reason(str(error), proto.graph)) from error
    return Compiled(program, made, {k: before + after for k, (before, after) in pairs.items()})


def _replace_abs(graph: GraphProto) -> None:
    """Write |x| as max(x, -x).

    OpenVINO moves an Abs before a Concat, and other readers of the Concat then read absolute values, too
    (seen in 2026.4: Adamax on joined parameters went in one direction only).
    """
    nodes = []
    for node in graph.node:
        if node.op_type == "Abs" and not node.domain:
            x, (y,) = node.input[0], node.output
            nodes.append(
                NodeProto(op_type="Neg", name=f"{node.name}/negative", input=[x], output=[f"{y}/-"])
            )
            node = NodeProto(op_type="Max", name=node.name, input=[x, f"{y}/-"], output=[y])
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _replace_abs(attribute.g)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _refusals(graph: GraphProto) -> Iterator[str]:
    """Reasons why a graph would be computed with fewer bits than it asks for."""
    for dtype, what in _typed(graph):
        if dtype in _WIDE:
            yield (
                f"{what} has the type {dtype_name(dtype)}, which OpenVINO does not compute with on a CPU"
            )


def _typed(graph: GraphProto) -> Iterator[tuple[int, str]]:
    """Where a type enters a graph: inputs, constants, and attributes of operators."""
    for info in graph.input:
        yield info.type.tensor_type.elem_type, f"the input {info.name!r}"
    for tensor in graph.initializer:
        yield tensor.data_type, f"the constant {tensor.name!r}"
    for node in graph.node:
        name = node_name(node)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t.data_type, name
            elif attribute.type == AttributeProto.GRAPH:
                yield from _typed(attribute.g)
            elif attribute.name in ("to", "dtype"):
                yield attribute.i, name


def node_name(node: NodeProto) -> str:
    """An operator with its node, for messages."""
    return f"{node.op_type} (node {node.name or node.output[0]!r})"


def _reason(text: str, graph: GraphProto) -> str:
    """What OpenVINO says, without its C++ trace, with the nodes of operators that it does not know."""
    missing = re.search(r"No conversion rule found for operations: (.*)", text)
    if missing is not None:
        kinds = {k.strip().rsplit("-", 1)[0].rsplit(".", 1)[-1] for k in missing[1].split(",")}
        nodes = [node_name(n) for n in graph.node if n.op_type in kinds]
        return "OpenVINO has no operator " + ", ".join(nodes or sorted(kinds))
    lines = [line.strip() for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith(_NOISE)]
    which = re.search(r"<Node\((\w+)\): (.*?)>", text)
    if which is not None:
        last = [line for line in useful if not line.startswith(("--", "While"))]
        return f"OpenVINO cannot compile {which[1]} (node {which[2]!r}): {(last or useful)[-1]}"
    return f"OpenVINO cannot compile it: {(useful or lines)[0]}"


def error_line(error: BaseException) -> str:
    """What OpenVINO says of a run that failed, without its C++ trace."""
    lines = [line.strip() for line in str(error).splitlines()]
    useful = [line for line in lines if line and not line.startswith(_NOISE)]
    return (useful or lines or [type(error).__name__])[0]
