"""A program in two parts: random draws, which need 64-bit integers, and the rest.

OpenVINO computes 64-bit integers with 32 bits on a CPU. Draws only depend on the seed, a name and
the step, so a separate graph computes them before each run.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs
import onnx
from onnx import NodeProto

from ortflex_core import Key, Program, TensorSpec, Unsupported, ancestor_nodes, reads


def split_draws(program: Program) -> tuple[Program, Program | None]:
    """The program without its draws, whose values are inputs, and the program that gives them.

    The inputs that are added have names for keys. A program without draws is returned unchanged,
    with None.

    Raises:
        Unsupported: the sizes of what is drawn are not known before a run.
    """
    if b"BitShift" not in program.model:
        return program, None
    proto = program.proto()
    graph = proto.graph
    hosts = {h.spec.name for h in program.hosts}
    fixed = {t.name for t in graph.initializer}
    drawn: set[str] = set()
    draws: list[NodeProto] = []
    rest: list[NodeProto] = []
    for node in graph.node:
        before = set(reads(node))
        if before <= fixed:
            fixed.update(node.output)
            draws.append(node)
            rest.append(node)
        elif before <= fixed | hosts | drawn:
            drawn.update(node.output)
            draws.append(node)
        else:
            rest.append(node)
    if not any(node.op_type == "BitShift" and node.output[0] in drawn for node in draws):
        return program, None
    wanted = [n for n in dict.fromkeys(r for node in rest for r in reads(node)) if n in drawn]
    wanted += [o.name for o in graph.output if o.name in drawn]
    first = _part(program, draws, wanted, ())
    known = {v.name: v for v in onnx.shape_inference.infer_shapes(first).graph.value_info}
    specs = tuple(_spec(name, known) for name in wanted)
    first.graph.output.extend(s.to_proto() for s in specs)
    columns = [s.name for s in program.inputs]
    second = _part(program, rest, [o.name for o in graph.output], columns)
    second.graph.output.extend(graph.output)
    given = tuple(attrs.evolve(s, name=f"{s.name}/drawn") for s in specs)
    names = {old.name: new.name for old, new in zip(specs, given, strict=True)}
    for node in second.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
    outputs = {o.name for o in graph.output}
    for name in outputs & drawn:
        second.graph.node.append(NodeProto(op_type="Identity", input=[names[name]], output=[name]))
    second.graph.input.extend(s.to_proto("draw") for s in given)
    read = {n for node in second.graph.node for n in reads(node)}
    keys: tuple[Key, ...] = tuple(s.name for s in specs)
    return (
        attrs.evolve(
            program,
            model=second.SerializeToString(deterministic=True),
            inputs=(*program.inputs, *given),
            input_keys=(*program.input_keys, *keys),
            hosts=tuple(h for h in program.hosts if h.spec.name in read),
            nodes=len(second.graph.node),
        ),
        attrs.evolve(
            program,
            name="draws",
            model=first.SerializeToString(deterministic=True),
            inputs=(),
            input_keys=(),
            hosts=tuple(
                h for h in program.hosts if h.spec.name in {i.name for i in first.graph.input}
            ),
            outputs=specs,
            output_keys=keys,
            nodes=len(first.graph.node),
        ),
    )


def _part(
    program: Program, nodes: list[NodeProto], outputs: list[str], inputs: Collection[str]
) -> onnx.ModelProto:
    """The nodes before some values, as a model without outputs, with constants and all ``inputs``."""
    made = program.proto()
    graph = made.graph
    kept = ancestor_nodes(nodes, outputs)
    wanted = {*outputs, *(name for node in kept for name in reads(node))}
    given = [i for i in graph.input if i.name in wanted or i.name in inputs]
    constants = [t for t in graph.initializer if t.name in wanted]
    del graph.node[:], graph.output[:], graph.input[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.input.extend(given)
    graph.initializer.extend(constants)
    return made


def _spec(name: str, known: dict[str, onnx.ValueInfoProto]) -> TensorSpec:
    """The type and sizes of a value."""
    spec = TensorSpec.from_proto(known[name]) if name in known else None
    if spec is None or spec.shape is None or not all(isinstance(d, int) for d in spec.shape):
        raise Unsupported(
            f"the sizes of {name!r}, which is drawn at random, are not known before a run"
        )
    return spec
