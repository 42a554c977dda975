"""Gradients of every operator on OpenVINO next to onnxruntime: equal, or refused with a reason."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import pytest

from ortflex_core import Unsupported, build, gradients
from ortflex_plugins.backends.openvino.compiled import Hints, compile_program
from tests.gradcheck import RULES, declared, run, traced
from tests.plugins.gradient_cases import Case
from tests.plugins.test_gradient_rules import CASES

pytestmark = pytest.mark.once

openvino = pytest.importorskip("openvino")

# An eighth of the cases runs always, all of them where slow tests run.
SAMPLE = int(os.environ.get("ORTFLEX_TEST_SAMPLE", "1")) * 8
OPSET = 17


def computed(case: Case) -> tuple[Any, Any] | None:
    """What onnxruntime and OpenVINO compute; None if it is refused."""
    opset = min(max(OPSET, case.since), case.until)
    arrays = {n: a.astype("f") if a.dtype.kind == "f" else a for n, a in case.arrays.items()}
    trace, inputs, y = traced(case.formula, arrays, opset, "sizes", case.sized)
    value = run(build(trace, {"value": y}, name="forward"), arrays)["value"]
    seed = np.random.default_rng(0).standard_normal(value.shape).astype(np.float32)
    cotangent = trace.input("seed", seed.dtype, declared(seed, "sizes"))
    floats = [t for n, t in inputs.items() if arrays[n].dtype.kind == "f"]
    found = gradients([(y, cotangent)], floats, RULES)
    outputs = {f"gradient {k}": t for k, t in enumerate(found)} | {"value": y}
    program = build(trace, outputs, name="gradient")
    feeds = {s.name: {**arrays, "seed": seed}[s.name] for s in program.inputs}
    try:
        shapes = {k: feeds[s.name].shape for k, s in program.takes.items()}
        made = compile_program(program, shapes, threads=1, hints=Hints(), stateful=False)
    except Unsupported:
        return None
    request = made.request()
    for port in made.model.inputs:
        if set(port.names) & set(made.matrices):
            continue  # a constant that the request has
        (name,) = set(port.names) & set(feeds)
        request.set_tensor(name, openvino.Tensor(np.array(feeds[name], order="C")))
    request.infer()
    got = {s.name: np.array(request.get_tensor(s.name).data) for s in program.outputs}
    return run(program, feeds), got


def check(case: Case) -> bool:
    both = computed(case)
    if both is None:
        return False
    for name, wanted in both[0].items():
        finite = np.abs(wanted[np.isfinite(wanted)])
        scale = max(1.0, float(finite.max(initial=0)))
        np.testing.assert_allclose(
            both[1][name], wanted, rtol=2e-3, atol=2e-3 * scale, err_msg=f"{case.name}: {name}"
        )
    return True


def test_openvino_computes_gradients_as_onnxruntime_or_refuses() -> None:
    own = [c for c in CASES if zlib.crc32(c.name.encode()) % SAMPLE == 0 and c.since <= 22]
    assert sum(map(check, own)) >= len(own) // 2


@pytest.mark.slow
def test_openvino_computes_every_gradient_as_onnxruntime_or_refuses() -> None:
    right, wrong = 0, []
    for case in CASES:
        if case.since <= 22:
            try:
                right += check(case)
            except AssertionError as error:
                wrong.append(str(error).strip()[:300])
    assert not wrong, "\n".join(wrong)
    assert right >= 390
