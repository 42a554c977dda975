"""Whether a runtime can load a model: its opset and its IR version."""

from __future__ import annotations

from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.runtime.installation import Runtime
from ortflex_core.kernel.errors import ModelError


def check_version(model: Model, runtime: Runtime) -> None:
    """Refuse a model whose opset or IR version the runtime cannot load, and name a runtime that can."""
    opset, ir = model.opsets[""], model.internal.ir_version
    if opset <= runtime.max_opset and ir <= runtime.max_ir:
        return
    known = [("onnxruntime-training 1.16.3", 19, 9), ("onnxruntime-training-cpu 1.19.2", 21, 10)]
    fits = [name for name, top, newest in known if opset <= top and ir <= newest]
    hint = f"use {' or '.join(fits)}" if fits else "use the newest onnxruntime"
    why = f", and it cannot be converted ({model.unreadable})" if model.unreadable else ""
    raise ModelError(
        f"{model.label} has opset {opset} and IR version {ir}; the installed {runtime} reads opset "
        f"{runtime.max_opset} and IR {runtime.max_ir} at most{why}: {hint}, or export the model "
        f"again with opset <= {runtime.max_opset}"
    )
