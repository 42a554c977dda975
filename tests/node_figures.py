"""The figures of the standard's node cases, by operator: what docs/reference/operators.md shows.

``python -m tests.node_cases --write`` makes them; a slow test says whether they are up to date.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx

from ortflex_core import require_runtime
from ortflex_plugins.cli import reference
from tests.node_cases import OUTCOMES, Result, by_operator

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_CORNERS = (
    "to align corners, onnxruntime uses the output size after rounding, whereas the standard uses the "
    "product of the input size and the scale"
)
RUNTIME_DIFFERS = {
    "test_maxunpool_export_with_output_shape": (
        "onnxruntime interprets the indices as positions in a tensor of the shape output_shape; the "
        "standard interprets them as positions in a tensor of the size that kernel and strides determine"
    ),
    "test_resize_downsample_scales_cubic_align_corners": _CORNERS,
    "test_resize_downsample_scales_linear_align_corners": _CORNERS,
}
"""Why onnxruntime's forward values of a case are known to differ from the standard's."""


def figures(results: Iterable[Result]) -> dict[str, Any]:
    """Versions, counts by operator, and why cases are refused or the runtime differs."""
    results = list(results)
    told = [r for r in results if r.outcome in ("refused", "runtime differs")]
    reasons = Counter(
        (r.operator, r.outcome, _short(RUNTIME_DIFFERS.get(r.name, r.message))) for r in told
    )
    return {
        "onnx": onnx.__version__,
        "onnxruntime": require_runtime().version,
        "operators": {
            name: {o: found[o] for o in OUTCOMES if found[o]}
            for name, found in by_operator(results).items()
        },
        "reasons": [[*key, count] for key, count in sorted(reasons.items())],
    }


def _short(message: str) -> str:
    """What a message says, without the place in the graph, the code of onnxruntime and the advice."""
    if found := re.search(r"Could not find an implementation for (\w+)\(", message):
        return f"onnxruntime has no kernel for {found[1]} with these data types"
    if "ValidateOpsetForDomain" in message:
        return "onnxruntime does not read this opset, and the types exist in it only"
    if found := re.search(
        r"no gradient rule for the operator (.*?)( of ai\.onnx|, node |\. )", message
    ):
        return f"no gradient rule for {found[1].strip()}"
    text = re.sub(r"^(by the runtime \([^)]*\)[^:]*: )?\w+: ", "", message)
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return re.sub(r"test_\w+", "…", text.split(". ")[0])[:200]


def text_of(made: dict[str, Any]) -> str:
    """JSON with one line for each operator and each reason."""
    operators = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in made["operators"].items()
    )
    reasons = ",\n".join(map(json.dumps, made["reasons"]))
    versions = "".join(
        f"{json.dumps(k)}: {json.dumps(made[k])},\n" for k in ("onnx", "onnxruntime")
    )
    return f'{{\n{versions}"operators": {{\n{operators}\n}},\n"reasons": [\n{reasons}\n]\n}}\n'


def written() -> dict[str, Any]:
    """The figures as they are checked in."""
    found: dict[str, Any] = json.loads((FOLDER / reference.FIGURES).read_text(encoding="utf-8"))
    return found


def write(results: Iterable[Result]) -> None:
    """Write the figures, and the pages that show them."""
    target = FOLDER / reference.FIGURES
    fresh = target.with_suffix(".new")
    fresh.write_text(text_of(figures(results)), encoding="utf-8")
    fresh.replace(target)
    reference.main(str(FOLDER))


def stale(results: Iterable[Result]) -> list[str]:
    """In which lines the figures that are checked in differ from those of ``results``."""
    new, old = text_of(figures(results)).splitlines(), text_of(written()).splitlines()
    return [f"+ {line}" for line in new if line not in old] + [
        f"- {line}" for line in old if line not in new
    ]
