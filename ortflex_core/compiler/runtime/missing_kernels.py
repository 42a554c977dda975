"""The error for an operator that the installed onnxruntime does not compute."""

from __future__ import annotations

import re

import onnx

from ortflex_core.kernel.engine_protocols import Device

_NO_KERNEL = re.compile(
    r"Could not find an implementation for (\w+)\(\d+\) node with name '([^']*)'"
)
_UNREGISTERED = re.compile(r"([\w.:]+)\(-?\d*\) is not a registered function/op")


def missing_kernel(
    error: BaseException, model: onnx.ModelProto, name: str, device: Device
) -> str | None:
    """The error for an operator that the runtime lacks; None if the reason is another one."""
    import onnxruntime

    text = str(error)
    if match := _NO_KERNEL.search(text):
        operator, label = match[1], match[2]
    elif match := _UNREGISTERED.search(text):
        operator, label = match[1].rpartition(":")[2], ""
    else:
        return None
    graph = model.graph
    node = next((n for n in graph.node if label and n.name == label), None)
    node = node or next((n for n in graph.node if n.op_type == operator), None)
    domain = (node.domain if node is not None else "") or "ai.onnx"
    opsets = {o.domain or "ai.onnx": o.version for o in model.opset_import}
    where = f"node {node.name!r} of the {name} graph" if node is not None else name
    types = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    ways = ["use another onnxruntime or device (`ortflex doctor` lists them)"]
    if onnx.TensorProto.DOUBLE in types:
        ways.insert(0, "convert the model to float32, which has more kernels than float64")
    else:
        ways.append("replace the operator by others")
    if newer := _changed_at(operator, domain, opsets.get(domain, 1)):
        ways.insert(0, f"export the model with opset <= {newer - 1}, for which there may be one")
    return (
        f"onnxruntime {onnxruntime.__version__} has no kernel on {device.name} for the operator "
        f"{operator} of {domain} opset {opsets.get(domain, '?')}, {where}. Ways out: {', or '.join(ways)}."
    )


def _changed_at(operator: str, domain: str, opset: int) -> int | None:
    """The opset that last changed an operator of the standard, if that is older."""
    try:
        schema = onnx.defs.get_schema(operator, opset, "" if domain == "ai.onnx" else domain)
        onnx.defs.get_schema(operator, schema.since_version - 1, schema.domain)
    except onnx.defs.SchemaError:
        return None
    return int(schema.since_version)
