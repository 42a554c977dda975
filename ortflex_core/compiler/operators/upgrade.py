"""Internal conversion of models with old opsets to an opset that the gradient rules cover."""

from __future__ import annotations

import onnx
import onnx.helper
import onnx.shape_inference
import onnx.version_converter
from onnx import ModelProto

from ortflex_core.compiler.operators.equivalence import Runner, difference, fitting_inputs
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.kernel.errors import GraphError, ModelError, RuntimeUnavailable
from ortflex_core.kernel.types import Arrays

TARGET = 17
"""The opset of converted models; every runtime that ortflex supports reads it."""
OLDEST = 7
"""The oldest opset that onnxruntime supports."""
_IR = 8
_FAILS = (onnx.version_converter.ConvertError, onnx.shape_inference.InferenceError)


def note(written: int, computed: int) -> str:
    """One line about the opset of the graphs if it is not the opset of the file, else ""."""
    if computed == written:
        return ""
    why = (
        "the newest that the installed runtime reads, where every operator means the same"
        if computed < written
        else "which the gradient rules cover"
    )
    return f"the file's opset {written} is computed as opset {computed}, {why}; exports keep it"


def upgrade_opset(
    model: ModelProto, label: str, opset: int, large: Arrays, target: int = TARGET
) -> ModelProto:
    """The model at another opset; a test on random inputs shows that it computes the same.

    Functions are already inlined; ``large`` are tensors that are inputs because they do not fit into the
    graph. A conversion that fails or changes what is computed is refused.
    """
    newest = 13 if target == TARGET else target
    advice = f"Export the model again with opset {newest} or newer (it has opset {opset})"
    if opset < OLDEST:
        raise ModelError(
            f"{label} has opset {opset}; ortflex trains opset {OLDEST} and newer. {advice}."
        )
    head = f"{label} has opset {opset} and has to be converted to {target} internally"
    try:
        converted = onnx.version_converter.convert_version(model, target)
    except (*_FAILS, RuntimeError, ValueError) as error:
        raise ModelError(f"{head}, which fails: {_first_line(error)}. {advice}.") from error
    opsets = [onnx.helper.make_opsetid("", target)]
    least = onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True)
    converted.ir_version = max(model.ir_version, _IR if target == TARGET else least)
    _keep_names(model, converted, head, advice)
    try:
        require_runtime()
        old, new = Runner(model, large), Runner(converted, large)
        feeds, _ = fitting_inputs(old, batch=2)
        wrong = difference(new(feeds), old(feeds))
    except RuntimeUnavailable:
        raise
    except GraphError as error:
        raise ModelError(
            f"{head}, and the result cannot be compared with the original: {error}. {advice}."
        ) from error
    if wrong:
        raise ModelError(f"{head}, but then {wrong}. {advice}.")
    return converted


def _keep_names(model: ModelProto, made: ModelProto, head: str, advice: str) -> None:
    """Check that the names used by users and by the export still exist."""
    for kind in ("initializer", "input", "output"):
        before = [v.name for v in getattr(model.graph, kind)]
        after = {v.name for v in getattr(made.graph, kind)}
        lost = [name for name in before if name not in after]
        if lost:
            raise ModelError(f"{head}, but then the {kind} {lost[0]!r} is lost. {advice}.")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
