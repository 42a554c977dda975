"""The gradient model of a whole file against central differences of onnx's reference in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from ortflex_core import Array, gradient_model
from ortflex_core.compiler.graph.program import ir_for
from tests import models
from tests.training import plugins


def parsed(text: str, kind: str, opset: int) -> ModelProto:
    """A model of a graph in text; FLOAT stands for the type of the data."""
    head = f'<ir_version: {ir_for(opset)}, opset_import: ["": {opset}]> g '
    return onnx.parser.parse_model(head + text.replace("FLOAT", kind))


def agree(
    text: str,
    feeds: Mapping[str, Array],
    *,
    opset: int,
    wrt: Iterable[str] | None = None,
    oracle: Any = None,
    rtol: float = 1e-3,
) -> ModelProto:
    """Fail unless the float32 gradients, run by onnxruntime, are the slopes in float64; the model.

    ``oracle`` is a function of the feeds that returns the outputs, instead of onnx's reference.
    """
    source = parsed(text, "float", opset)
    outputs = [o.name for o in source.graph.output]
    wanted = [n for n, a in feeds.items() if a.dtype == np.float64] if wrt is None else list(wrt)
    reference = ReferenceEvaluator(parsed(text, "double", opset))

    def values(given: Mapping[str, Array]) -> list[Array]:
        return list(oracle(**given)) if oracle else reference.run(None, dict(given))

    made = gradient_model(source, wanted, plugins=plugins())
    rng = np.random.default_rng(5)
    exact = values(feeds)
    roots = [k for k, y in enumerate(exact) if y.dtype == np.float64]
    seeds = {k: rng.uniform(0.5, 1.5, exact[k].shape) for k in roots}
    narrow = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in feeds.items()}
    narrow |= {f"cotangent/{outputs[k]}": s.astype(np.float32) for k, s in seeds.items()}
    got = models.predict(made, narrow)
    for k in roots:
        np.testing.assert_allclose(got[outputs[k]], exact[k], rtol, rtol, err_msg=outputs[k])
    for name in wanted:
        slope = np.zeros_like(feeds[name])
        for place in np.ndindex(slope.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = feeds[name].copy()
                moved[place] += step
                after = values({**feeds, name: moved})
                ends.append(sum((after[k] * s).sum() for k, s in seeds.items()))
            slope[place] = (ends[0] - ends[1]) / 2e-6
        scale = max(1.0, float(np.abs(slope).max(initial=0)))
        found = got[f"gradient/{name}"]
        np.testing.assert_allclose(found, slope, rtol, rtol * scale, err_msg=f"gradient/{name}")
    return source
